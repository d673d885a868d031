/* A program of version 0.1: built against the frozen header, linked to today's shared library. It calls every function
 * that 0.1 had and checks what comes back. */
#include "flashattn_0_1.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            printf("line %d: %s is false; last error: %s\n", __LINE__, #condition, flash_attn_last_error());           \
            return 1;                                                                                                  \
        }                                                                                                              \
    } while (0)

enum { S = 3, D = 2 };

/* Structs that the library fills, with something behind them that it must leave alone. */
typedef struct filled {
    flash_attn_device_info info;
    uint64_t               after_info;
    flash_attn_explanation explanation;
    uint64_t               after_explanation;
} filled;

int main(void)
{
    float              q[S * D] = {1, 0, 0, 1, 1, 1}, k[S * D] = {1, 2, 0, 1, 1, 0}, v[S * D] = {1, 2, 3, 4, 5, 6};
    float              o[S * D], lse[S], dout[S * D] = {1, 1, 1, 1, 1, 1}, dq[S * D], dk[S * D], dv[S * D];
    flash_attn_problem p = {0};
    p.q                  = (flash_attn_tensor){.data = q, .shape = {1, S, 1, D}};
    p.k                  = (flash_attn_tensor){.data = k, .shape = {1, S, 1, D}};
    p.v                  = (flash_attn_tensor){.data = v, .shape = {1, S, 1, D}};
    p.o.data             = o;
    p.lse.data           = lse;
    p.mask               = FLASH_ATTN_CAUSAL;
    CHECK(flash_attn_version() >= 100);
    CHECK(strcmp(flash_attn_status_string(FLASH_ATTN_OK), "ok") == 0);

    flash_attn_context *context;
    flash_attn_options  options = {.num_threads = 1};
    CHECK(flash_attn_create(&context, &options) == FLASH_ATTN_OK);
    CHECK(flash_attn_prepare(context, &p, FLASH_ATTN_FORWARD) == FLASH_ATTN_OK);
    CHECK(flash_attn_forward(context, &p, NULL) == FLASH_ATTN_OK);
    for (int i = 0; i < S; i++) {
        double sum = 0, value = 0;
        for (int j = 0; j <= i; j++) {
            double weight = exp((q[i * D] * k[j * D] + q[i * D + 1] * k[j * D + 1]) / sqrt(D));
            sum += weight;
            value += weight * v[j * D];
        }
        CHECK(fabs(o[i * D] - value / sum) < 1e-5 && fabs(lse[i] - log(sum)) < 1e-5);
    }

    flash_attn_grads g = {
        .dout = {.data = dout, .shape = {1, S, 1, D}}, .dq = {.data = dq}, .dk = {.data = dk}, .dv = {.data = dv}};
    size_t bytes;
    char   workspace[1 << 16];
    CHECK(flash_attn_workspace_size(context, &p, FLASH_ATTN_BACKWARD, &bytes) == FLASH_ATTN_OK);
    flash_attn_exec exec = {.workspace = workspace, .workspace_bytes = sizeof workspace};
    if (bytes > sizeof workspace)
        exec = (flash_attn_exec){.num_threads = 1};
    CHECK(flash_attn_backward(context, &p, &g, &exec) == FLASH_ATTN_OK);
    CHECK(fabs(dv[0] + dv[2] + dv[4] - S) < 1e-5); /* every row of P sums to 1 */

    filled out;
    memset(&out, 0x5A, sizeof out);
    CHECK(flash_attn_get_device_info(context, p.device, &out.info) == FLASH_ATTN_OK);
    CHECK(flash_attn_explain(context, &p, FLASH_ATTN_FORWARD, &out.explanation) == FLASH_ATTN_OK);
    CHECK(out.explanation.flops == 4.0 * 6 * D);
    CHECK(out.after_info == 0x5A5A5A5A5A5A5A5A && out.after_explanation == out.after_info);

    float             k_cache[4 * D] = {0}, v_cache[4 * D] = {0};
    flash_attn_append a = {0};
    a.k_new             = p.k;
    a.v_new             = p.v;
    a.k_cache           = (flash_attn_tensor){.data = k_cache, .shape = {1, 4, 1, D}};
    a.v_cache           = (flash_attn_tensor){.data = v_cache, .shape = {1, 4, 1, D}};
    CHECK(flash_attn_append_kv(context, &a, NULL) == FLASH_ATTN_OK);
    CHECK(memcmp(k_cache, k, sizeof k) == 0 && memcmp(v_cache, v, sizeof v) == 0);

    flash_attn_partial part = {.o = {.data = o, .shape = {1, S, 1, D}}, .lse = {.data = lse, .shape = {1, 1, S, 1}}},
                       parts[2] = {part, part}, merged = {.o.data = dq};
    CHECK(flash_attn_merge(context, p.device, parts, 2, &merged, NULL) == FLASH_ATTN_OK);
    CHECK(fabsf(dq[4] - o[4]) < 1e-6f);

    CHECK(flash_attn_compile(context, &p, FLASH_ATTN_FORWARD, 90, "") == FLASH_ATTN_INVALID);

    /* A caller newer than the library sets a word that was reserved: refused with a reason, never ignored. */
    p.reserved[0] = 1;
    CHECK(flash_attn_forward(context, &p, NULL) == FLASH_ATTN_INVALID);
    CHECK(strstr(flash_attn_last_error(), "older than the caller's header"));
    flash_attn_destroy(context);
    return 0;
}
