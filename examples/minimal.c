/* The smallest whole program: causal attention of three positions, checked by hand.
 *
 *     cc minimal.c $(pkg-config --cflags --libs flashattn) -o minimal && ./minimal
 *
 * All keys are alike, so every visible key gets the same weight and row i of the output is the mean of rows 0 to i of V.
 * The last column printed is that mean. */
#include <flashattn.h>

#include <math.h>
#include <stdio.h>

enum { BATCH = 1, SEQLEN = 3, HEADS = 1, HEAD_DIM = 2 };

int main(void)
{
    float q[SEQLEN][HEAD_DIM] = {{1, 2}, {3, 4}, {5, 6}};
    float k[SEQLEN][HEAD_DIM] = {{1, 1}, {1, 1}, {1, 1}};
    float v[SEQLEN][HEAD_DIM] = {{1, 10}, {2, 20}, {6, 60}};
    float o[SEQLEN][HEAD_DIM];

    flash_attn_problem p = {0}; /* zero always means the default: here the CPU, float32, scale 1 / sqrt(head_dim) */
    p.q = (flash_attn_tensor){.data = q, .shape = {BATCH, SEQLEN, HEADS, HEAD_DIM}};
    p.k = (flash_attn_tensor){.data = k, .shape = {BATCH, SEQLEN, HEADS, HEAD_DIM}};
    p.v = (flash_attn_tensor){.data = v, .shape = {BATCH, SEQLEN, HEADS, HEAD_DIM}};
    p.o = (flash_attn_tensor){.data = o};
    p.mask = FLASH_ATTN_CAUSAL;
    if (flash_attn_forward(NULL, &p, NULL) != FLASH_ATTN_OK) {
        fprintf(stderr, "minimal: %s\n", flash_attn_last_error());
        return 1;
    }

    int wrong = 0;
    for (int i = 0; i < SEQLEN; i++) {
        float mean = 0;
        for (int j = 0; j <= i; j++)
            mean += v[j][0] / (float)(i + 1);
        wrong += !(fabsf(o[i][0] - mean) < 1e-5f && fabsf(o[i][1] - 10 * mean) < 1e-4f);
        printf("o[%d] = %6.3f %7.3f   mean of v[0..%d] = %6.3f %7.3f\n", i, o[i][0], o[i][1], i, mean, 10 * mean);
    }
    puts(wrong ? "wrong" : "right");
    return wrong != 0;
}
