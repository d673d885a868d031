/* Errors: one sentence a thread, and the names of statuses. */
#include "call.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char last_error[512];

flash_attn_status fa_fail(flash_attn_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_error, sizeof last_error, format, arguments);
    va_end(arguments);
    return status;
}

const char *flash_attn_last_error(void) { return last_error; }

const char *flash_attn_status_string(flash_attn_status status)
{
    switch (status) {
    case FLASH_ATTN_OK: return "ok";
    case FLASH_ATTN_INVALID: return "invalid argument";
    case FLASH_ATTN_UNSUPPORTED: return "unsupported";
    case FLASH_ATTN_NO_DEVICE: return "no device";
    case FLASH_ATTN_NO_MEMORY: return "out of memory";
    case FLASH_ATTN_COMPILE: return "kernel compilation failed";
    case FLASH_ATTN_LAUNCH: return "kernel launch failed";
    case FLASH_ATTN_TRANSPORT: return "transport between ranks failed";
    }
    return "unknown status";
}

int flash_attn_version(void)
{
    return 10000 * FLASH_ATTN_VERSION_MAJOR + 100 * FLASH_ATTN_VERSION_MINOR + FLASH_ATTN_VERSION_PATCH;
}
