/* Positions: which of them a rank has, and which rectangles of the score matrix lie between two ranks' shares. */
#include "dist/dist.h"

#include <inttypes.h>

#define MAX_TOTAL ((int64_t)1 << 40) /* positions of the whole sequence: times ranks it stays inside 64 bits */
#define MAX_RANKS (1 << 20)

flash_attn_status flash_attn_ring_get_share(flash_attn_ring_layout layout, int32_t ranks, int32_t rank, int64_t seqlen,
                                            flash_attn_ring_share *share)
{
    if (!share)
        return fa_fail(FLASH_ATTN_INVALID, "share is NULL, expected a place for it");
    if ((unsigned)layout > FLASH_ATTN_RING_STRIPED)
        return fa_fail(FLASH_ATTN_INVALID, "ring.layout is %d, expected CONTIGUOUS (0), ZIGZAG (1) or STRIPED (2)",
                       (int)layout);
    if (ranks < 1 || ranks > MAX_RANKS)
        return fa_fail(FLASH_ATTN_INVALID, "ring.ranks is %d, expected 1 to %d", ranks, MAX_RANKS);
    if (rank < 0 || rank >= ranks)
        return fa_fail(FLASH_ATTN_INVALID, "ring.rank is %d, expected 0 to %d, one below ring.ranks", rank, ranks - 1);
    if (seqlen < 0 || seqlen > MAX_TOTAL)
        return fa_fail(FLASH_ATTN_INVALID, "the whole sequence has %" PRId64 " positions, expected 0 to 2^40", seqlen);
    flash_attn_ring_share made = {.step = 1};
    if (layout == FLASH_ATTN_RING_STRIPED) {
        made.step     = ranks;
        made.begin[0] = made.begin[1] = rank;
        made.count[0]                 = seqlen > rank ? (seqlen - rank + ranks - 1) / ranks : 0;
    } else {
        bool    zigzag = layout == FLASH_ATTN_RING_ZIGZAG;
        int64_t chunks = zigzag ? 2 * (int64_t)ranks : ranks, chunk[2] = {rank, chunks - 1 - rank};
        for (int n = 0; n < 1 + zigzag; n++) {
            made.begin[n] = chunk[n] * seqlen / chunks;
            made.count[n] = (chunk[n] + 1) * seqlen / chunks - made.begin[n];
        }
    }
    made.rows = made.count[0] + made.count[1];
    *share    = made;
    return FLASH_ATTN_OK;
}

static int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/*
 * Part a of share q against part b of share k. With n and m rows counted from the parts' own beginnings, query n sees
 * keys n - low to n + high. What nobody sees is cut off on all four sides; what is left has both limits at or outside
 * of its bottom right corner, as the public masks want them.
 */
static bool rect_of(const flash_attn_ring_share *q, int a, const flash_attn_ring_share *k, int b, fa_ring_mask mask,
                    fa_ring_rect *rect)
{
    int64_t step = q->step, apart = q->begin[a] + mask.diagonal - k->begin[b];
    int64_t high = mask.right < 0 ? 0 : floor_div(apart + mask.right, step);
    int64_t low  = mask.left < 0 ? 0 : floor_div(mask.left - apart, step);
    int64_t q0 = 0, q1 = q->count[a], k0 = 0, k1 = k->count[b];
    if (mask.right >= 0) {
        k1 = least(k1, q1 + high);
        q0 = most(q0, k0 - high);
    }
    if (mask.left >= 0) {
        k0 = most(k0, q0 - low);
        q1 = least(q1, k1 + low);
    }
    if (q0 >= q1 || k0 >= k1 || (mask.left >= 0 && mask.right >= 0 && low + high < 0)) /* stripes may fall between */
        return false;
    int64_t diagonal = (k1 - k0) - (q1 - q0);
    int64_t right = high + q0 - k0 - diagonal, left = low + k0 - q0 + diagonal;
    bool    all_right = mask.right < 0 || right >= q1 - q0 - 1, all_left = mask.left < 0 || left >= k1 - k0 - 1;
    int64_t row_q = a ? q->count[0] : 0, row_k = b ? k->count[0] : 0;
    *rect = (fa_ring_rect){.q_begin = row_q + q0, .q_end = row_q + q1, .k_begin = row_k + k0, .k_end = row_k + k1};
    if (all_left && (all_right || right == 0)) {
        rect->mask = all_right ? FLASH_ATTN_NONE : FLASH_ATTN_CAUSAL;
    } else {
        rect->mask  = FLASH_ATTN_WINDOW;
        rect->left  = all_left ? -1 : (int32_t)left;
        rect->right = all_right ? -1 : (int32_t)right;
    }
    return true;
}

/* Two neighbours that are seen whole are one. */
static bool join(fa_ring_rect *a, const fa_ring_rect *b)
{
    if (a->mask != FLASH_ATTN_NONE || b->mask != FLASH_ATTN_NONE)
        return false;
    if (a->k_begin == b->k_begin && a->k_end == b->k_end && a->q_end == b->q_begin)
        a->q_end = b->q_end;
    else if (a->q_begin == b->q_begin && a->q_end == b->q_end && a->k_end == b->k_begin)
        a->k_end = b->k_end;
    else
        return false;
    return true;
}

int fa_ring_rects(const flash_attn_ring_share *q, const flash_attn_ring_share *k, fa_ring_mask mask, bool itself,
                  fa_ring_rect rects[FA_RING_MAX_RECTS])
{
    if (itself && mask.diagonal == 0 && mask.left < 0 && mask.right == 0) { /* rows rise with positions */
        rects[0] = (fa_ring_rect){.q_end = q->rows, .k_end = k->rows, .mask = FLASH_ATTN_CAUSAL};
        return q->rows > 0;
    }
    int count = 0;
    for (int b = 0; b < 2; b++)
        for (int a = 0; a < 2; a++)
            if (rect_of(q, a, k, b, mask, &rects[count]))
                count++;
    for (int a = 0; a < count; a++)
        for (int b = a + 1; b < count; b++)
            if (join(&rects[a], &rects[b])) {
                for (int n = b; n + 1 < count; n++)
                    rects[n] = rects[n + 1];
                count--;
                b = a;
            }
    return count;
}
