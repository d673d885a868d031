/* The header alone, as C11 under the strictest warnings, with the shared library. */
#include "flashattn.h"

int main(void)
{
    flash_attn_problem problem = {.mask = FLASH_ATTN_CAUSAL};
    return flash_attn_forward(NULL, &problem, NULL) == FLASH_ATTN_INVALID ? 0 : 1;
}
