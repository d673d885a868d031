/*
 * A step of backward_sm90.cu at head dims above 128 (BY_COLUMNS). Both consumers have the same 80 keys, for S and dP stand with queries down and dK^T and dV^T with columns down:
 * 80 keys are one product across. Consumer 0 makes S and P, consumer 1 dP and dS; of dV, dK and dQ each has its part of the columns, of 256 a half, of 192 the first has two panels
 * and the other one. The tensor cores have the products of one while the other is at its elements:
 *
 *     consumer 0                                                  consumer 1
 *     S = Q K^T; of the step before dK^T = Q^T dS                 dP = dO V^T; P from consumer 0; dV^T
 *     P = exp(S - LSE), to consumer 1                             dS = P (dP - delta), in P's place
 *     dV^T = dO^T P; of the step before dQ = dS K                 dQ, dK^T
 *
 * Registers hold dK^T and dV^T, 160, and either S or a round of dQ: the latter leaves in rounds of 64 columns, each in pieces, each consumer's by a warp of its own. P and then dS of
 * a step lie in one of two places, [80 keys][64 queries]; consumer 1 waits for the other's dV before it writes dS, and P of the next step but one is behind the word that dS of the next is there.
 */
#ifndef FA_BACKWARD_WIDE_SM90_CUH
#define FA_BACKWARD_WIDE_SM90_CUH

#include "backward_products_sm90.cuh"

/* Of an accumulator a panel, or the first ones. */
template <int COUNT, int ALL> FA_DEVICE float (&part_of(float (&x)[ALL], int first))[COUNT] { return reinterpret_cast<float(&)[COUNT]>(x[first]); }

/* The panels of dK and dV that a consumer has: its places are for the first's. */
template <int GROUP> FA_DEVICE auto &own_dk(consumer &c) { return part_of<PANEL_COUNT * panels_of(GROUP, false)>(c.dk, 0); }
template <int GROUP> FA_DEVICE auto &own_dv(consumer &c) { return part_of<PANEL_COUNT * panels_of(GROUP, true)>(c.dv, 0); }

/* c += X^T Y; x: from its panel `panel` on a tile of dO or Q, y: P or dS. */
template <int COUNT> FA_DEVICE void start_turned(float (&c)[COUNT], unsigned x, unsigned y, int panel)
{
    matrix a = matrix_of(x + panel * (FA_TILE_Q * 128), 0), b = matrix_of(y, 0);
    hold(c);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < COUNT / PANEL_COUNT; n++)
#pragma unroll
        for (int step = 0; step < FA_TILE_Q / 16; step++)
            wgmma_shared<0, 1>(part_of<PANEL_COUNT>(c, n * PANEL_COUNT), a.from(n * (FA_TILE_Q * 128) + step * 2048), b.from(step * 32), 1);
    wgmma_commit();
}

template <int GROUP> FA_DEVICE void start_dv(consumer &c) { start_turned(own_dv<GROUP>(c), dout_tile(c.n), ds_tile(c.n), first_panel_of(GROUP, true)); }
/* Of dK COUNT panels, from the consumer's own one `first` on. */
template <int GROUP, int COUNT = panels_of(GROUP, false)> FA_DEVICE void start_dk(consumer &c, unsigned n, int first = 0)
{
    start_turned(part_of<PANEL_COUNT * COUNT>(c.dk, PANEL_COUNT * first), q_tile(n), ds_tile(n), first_panel_of(GROUP, false) + first);
}

template <int GROUP> constexpr bool TWO_ROUNDS = panels_of(GROUP, false) > 1;

/* dQ = dS K, a panel of this consumer's. */
template <int GROUP> FA_DEVICE void start_wide_dq(float (&dq)[DQ_COUNT], unsigned n, int round)
{
    matrix a = matrix_of(ds_tile(n), 0), b = matrix_of(k_tile() + (first_panel_of(GROUP, false) + round) * (FA_TILE_K * 128), 0);
    hold(dq);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < FA_TILE_K / 16; step++)
        wgmma_shared<1, 1>(dq, a.from(step * 2048), b.from(step * 2048), step > 0);
    wgmma_commit();
}

/* By consumer 0: its first round of dQ is there; it leaves, and the other one. LAST of an item: K is free. */
template <bool LAST = false> FA_DEVICE void end_dq(float (&dq)[DQ_COUNT], unsigned n)
{
    hold(dq);
    share_dq<0>(dq);
    start_wide_dq<0>(dq, n, 1);
    wgmma_wait<0>();
    hold(dq);
    if (LAST)
        release(k_empty());
    share_dq<0>(dq, 1);
}

/* Thread to thread: both have the same elements. */
FA_DEVICE unsigned passed_at(int n) { return shared_address(shared) + PASSED_AT + threadIdx.x % 128 * 16 + n * 2048; }

FA_DEVICE void pass(const unsigned (&x)[4], int n) { shared_store(passed_at(n), make_uint4(x[0], x[1], x[2], x[3])); }

FA_DEVICE void take(unsigned (&x)[4], int n)
{
    uint4 four = shared_load_16(passed_at(n));
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
}

/* ---- elements: queries down, keys across. Element 4 j + 2 h + e: of this thread's rows the h-th, key 8 j + 2 t + e ---- */

FA_DEVICE int own_query(int tile) { return tile * FA_TILE_Q + fragment_row(); }
FA_DEVICE int own_key(const work &w) { return w.first_k + threadIdx.x % 4 * 2; }

#if FA_MASK == FA_MASK_LISTED

using seen_keys = seen_words;

FA_DEVICE seen_keys keys_of(const fa_args &args, const work &, const consumer &c, int) { return load_seen<FA_TILE_Q>(args, c.mask, fragment_row()); }

#else

/* Of a thread's two queries, which of its keys they see: [first, last] less its own first key. */
struct seen_keys {
    int first[2], last[2];
};

FA_DEVICE seen_keys keys_of(const fa_args &args, const work &w, const consumer &, int tile)
{
    seen_keys seen;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        row_limits limits = row_limits_of(window_of(args), w.seq, w.keys, own_query(tile) + 8 * h);
        seen.first[h]     = limits.first - own_key(w);
        seen.last[h]      = own_query(tile) + 8 * h < w.seq.seqlen_q ? limits.last - own_key(w) : -1;
    }
    return seen;
}

FA_DEVICE bool sees(const seen_keys &seen, int n)
{
    int key = n / 4 * 8 + n % 2;
    return key >= seen.first[n / 2 % 2] && key <= seen.last[n / 2 % 2];
}

/* P or dS of an edge tile: exactly 0 where it is masked, whatever Q, dO, LSE and delta hold. */
FA_DEVICE void mask_elements(float (&x)[S_COUNT], const seen_keys &seen)
{
#pragma unroll
    for (int n = 0; n < S_COUNT; n++)
        x[n] = sees(seen, n) ? x[n] : 0.0f;
}

#endif

/* LSE or delta of this thread's rows. */
FA_DEVICE void load_rows(float (&rows)[2], unsigned from)
{
#pragma unroll
    for (int h = 0; h < 2; h++)
        rows[h] = shared_load_float(from + (fragment_row() + 8 * h) * 4);
}

/* P = exp(S - LSE), in place. Softcap: what dS is made of, to the other consumer. */
FA_DEVICE void row_exponentials(const fa_args &args, const work &w, consumer &c, float (&s)[S_COUNT], const float (&lse)[2], int tile)
{
    float unit = FA_HAS_SOFTCAP ? args.cap_unit : args.scale_log2, distance = (float)(own_query(tile) + w.seq.diagonal - own_key(w));
    float bias[8];
    if constexpr (FA_HAS_BIAS)
        barrier_wait(bias_full(), filled<1>(c.n));
#pragma unroll
    for (int n = 0; n < S_COUNT; n += 4) {
        float slope[4];
        if constexpr (FA_HAS_BIAS)
            if (n % 8 == 0)
                load_bias(bias, args, 0, n / 4);
        if constexpr (FA_HAS_SOFTCAP) {
            cap_four(s + n, args.cap_slope);
#pragma unroll
            for (int i = 0; i < 4; i++)
                slope[i] = 1.0f - s[n + i] * s[n + i];
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float score = s[n + i] * unit - lse[i / 2];
            if constexpr (FA_HAS_BIAS)
                score += bias[n % 8 + i];
            if constexpr (FA_HAS_ALIBI)
                score -= c.alibi_log2 * fabsf(distance + (float)(i / 2 * 8 - n * 2 - i % 2));
            s[n + i] = exp2_fast(score);
        }
        if constexpr (FA_HAS_SOFTCAP) {
#pragma unroll
            for (int h = 0; h < 2; h++)
                c.noted[n / 8][n / 4 % 2 * 2 + h] = pack<FA_DTYPE>(s[n + 2 * h] * slope[2 * h], s[n + 2 * h + 1] * slope[2 * h + 1]);
            if (!FA_HAS_DROPOUT && n % 8 == 4)
                pass(c.noted[n / 8], n / 8);
        }
    }
    if constexpr (FA_HAS_BIAS)
        release(bias_empty());
}

/* Eight elements, of two rows and two 8x8 matrices. */
FA_DEVICE void pack_eight(unsigned (&a)[4], const float *x)
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        a[i] = pack<FA_DTYPE>(x[2 * i], x[2 * i + 1]);
}

/* What is dropped of P becomes 0, and is marked by its sign in what dS is made of, P or under a softcap P (1 - tanh^2), which goes to the other consumer. */
FA_DEVICE void drop_rows(const fa_args &args, const work &w, consumer &c, float (&s)[S_COUNT], int tile)
{
#if FA_HAS_DROPOUT
#pragma unroll
    for (int n = 0; n < P_STEPS; n++) { /* one after the other: registers are short */
        float(&x)[8]        = part_of<8>(s, 8 * n);
        unsigned(&noted)[4] = c.noted[n];
        if (!FA_HAS_SOFTCAP)
            pack_eight(noted, x);
        drop_elements(args, x, c.batch_head, tile * (FA_TILE_Q / 16) + threadIdx.x % 128 / 32, w.first_k / 16 + n);
#pragma unroll
        for (int i = 0; i < 4; i++) /* P that is 0 anyway may be marked too */
            noted[i] |= (x[2 * i] == 0.0f ? 0x8000u : 0) | (x[2 * i + 1] == 0.0f ? 0x80000000u : 0);
        pass(noted, n);
    }
#endif
}

/* dS = P (dP - delta), in place of dP: 16 keys of it. Dropout as in backward_products_sm90.cuh. */
FA_DEVICE void row_gradients(const fa_args &args, const unsigned (&p)[4], float *dp, const float (&delta)[2])
{
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        float2 pair = unpack<FA_DTYPE>(p[i / 2]);
        float  row  = delta[i / 2 % 2];
        if constexpr (FA_HAS_DROPOUT) {
            row *= 1.0f - (float)args.dropout.threshold * 0x1p-16f;
            dp[i]     = fmaxf(pair.x, 0.0f) * dp[i] - fabsf(pair.x) * row;
            dp[i + 1] = fmaxf(pair.y, 0.0f) * dp[i + 1] - fabsf(pair.y) * row;
            continue;
        }
        dp[i]     = pair.x * (dp[i] - row);
        dp[i + 1] = pair.y * (dp[i + 1] - row);
    }
}

template <bool FIRST>
FA_DEVICE void step_of_p(const fa_args &args, const work &w, consumer &c, int tile, bool masked)
{
    constexpr int GROUP = 0;
    float         s[S_COUNT], dq[DQ_COUNT], rows[2];
    wait_for_q(c.n);
    start_rows_by_rows<FA_TILE_Q, FA_TILE_K>(s, q_tile(c.n), k_tile());
    if constexpr (!FIRST) {
        named_sync(DS_IS_THERE, 128 * CONSUMERS);
        start_dk<GROUP>(c, c.n - 1);
    }
    load_rows(rows, lse_at(c.n));
    wgmma_wait<FIRST ? 0 : 1>();
    hold(s);
    if (INSPECTED && masked && some_nonfinite(s)) { /* before the other has P, and so before dQ and dK are begun */
        clear_by_warp<K_BYTES>(k_tile());
        clear_by_warp(q_tile(c.n));
    }
    row_exponentials(args, w, c, s, rows, tile);
    drop_rows(args, w, c, s, tile);
    if constexpr (!FIRST) {
        wgmma_wait<0>();
        hold(c.dk);
        release(q_empty(c.n - 1));
    }
    if (INSPECTED && masked) {
        seen_keys seen = keys_of(args, w, c, tile);
        mask_elements(s, seen);
        wait_for_dout(c.n);
        load_rows(rows, delta_at(c.n));
#pragma unroll
        for (int n = 0; n < S_COUNT; n++) /* the dO of an edge tile loses its Inf and NaN; delta says so, and dV gets them by P */
            if (!finite(rows[n / 2 % 2]) && sees(seen, n))
                s[n] = __int_as_float(0x7FFFFFFF);
    }
#pragma unroll
    for (int n = 0; n < P_STEPS; n++) {
        unsigned a[4];
        pack_eight(a, s + 8 * n);
        store_matrix_transposed(turned_at(ds_tile(c.n)) + n * 2048, a); /* found anew: one register more, and dropout spills others */
    }
    fence_async();
    named_arrive(P_IS_THERE, 128 * CONSUMERS);
    named_sync(MINE + GROUP, 128);
    wait_for_dout(c.n);
    if (INSPECTED && masked)
        named_sync(DOUT_IS_CLEAN, 128 * CONSUMERS);
    start_dv<GROUP>(c);
    if constexpr (!FIRST)
        start_wide_dq<GROUP>(dq, c.n - 1, 0);
    wgmma_wait<FIRST ? 0 : 1>();
    hold(c.dv);
    named_arrive(P_IS_USED, 128 * CONSUMERS);
    release(dout_empty(c.n));
    if constexpr (!FIRST) {
        wgmma_wait<0>();
        end_dq(dq, c.n - 1);
    }
    c.n++;
}

template <bool FIRST>
FA_DEVICE void step_of_ds(const fa_args &args, const work &w, consumer &c, unsigned item, int tile, bool masked)
{
    constexpr int GROUP = 1;
    float         dp[S_COUNT], dq[DQ_COUNT], rows[2];
    if constexpr (FIRST)
        barrier_wait(v_full(), filled<1>(item));
    wait_for_dout(c.n);
    start_rows_by_rows<FA_TILE_Q, FA_TILE_K, FA_HEAD_DIM_V>(dp, dout_tile(c.n), v_tile());
    load_rows(rows, delta_at(c.n));
    wgmma_wait<0>();
    hold(dp);
    if (INSPECTED && masked) {
        if (some_nonfinite(dp))
            clear_by_warp<DO_BYTES>(dout_tile(c.n));
        named_arrive(DOUT_IS_CLEAN, 128 * CONSUMERS);
    }
    named_sync(P_IS_THERE, 128 * CONSUMERS); /* and this consumer's warps have cleared theirs of dO */
    start_dv<GROUP>(c);
    unsigned to = turned_at(ds_tile(c.n));
#pragma unroll
    for (int n = 0; n < P_STEPS; n++) {
        unsigned p[4];
        if constexpr (HAS_NOTED)
            take(p, n);
        else
            load_matrix_transposed(p, to + n * 2048);
        row_gradients(args, p, dp + 8 * n, rows);
    }
    if (masked)
        mask_elements(dp, keys_of(args, w, c, tile));
#if FA_HAS_DBIAS
    add_dbias(args, w, dp, c.head, own_query(tile), own_key(w));
#endif
    wgmma_wait<0>();
    hold(c.dv);
    release(dout_empty(c.n));
    wait_for_q(c.n); /* for dK; consumer 0 has */
    named_sync(P_IS_USED, 128 * CONSUMERS);
#pragma unroll
    for (int n = 0; n < P_STEPS; n++) {
        unsigned a[4];
        pack_eight(a, dp + 8 * n);
        store_matrix_transposed(to + n * 2048, a);
    }
    fence_async();
    named_arrive(DS_IS_THERE, 128 * CONSUMERS);
    named_sync(MINE + GROUP, 128); /* for this consumer's own products */
    start_wide_dq<GROUP>(dq, c.n, 0);
    if constexpr (TWO_ROUNDS<GROUP>) { /* a panel of dK beside each round on its way out */
        start_dk<GROUP, 1>(c, c.n);
        wgmma_wait<1>();
        hold(dq);
        share_dq<GROUP>(dq);
        start_wide_dq<GROUP>(dq, c.n, 1);
    }
    start_dk<GROUP, 1>(c, c.n, panels_of(GROUP, false) - 1);
    wgmma_wait<1>();
    hold(dq);
    share_dq<GROUP>(dq, TWO_ROUNDS<GROUP>);
    wgmma_wait<0>();
    hold(c.dk);
    release(q_empty(c.n));
    c.n++;
}

/* ---- dK and dV: columns down, keys across ---- */

/* To where V was, for TMA, in whole panels; keys past the last that counts are 0. */
template <int COUNT> FA_DEVICE void send_gradient(const work &w, const fa_map &map, int apart, const float (&x)[COUNT], float factor, int group, int panel)
{
    int counting = w.keys.end - own_key(w);
#pragma unroll
    for (int n = 0; n < COUNT / 8; n++) {
        unsigned a[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *from = x + 8 * n + 2 * i;
            int          key  = n % P_STEPS * 16 + i / 2 * 8;
            a[i] = pack<FA_DTYPE>(key < counting ? from[0] * factor : 0.0f, key + 1 < counting ? from[1] * factor : 0.0f);
        }
        store_matrix_transposed(turned_at(v_tile() + (panel + n / P_STEPS) * PANEL_BYTES) + n % P_STEPS * 2048, a);
    }
    fence_async();
    named_sync(MINE + group, 128);
    if (threadIdx.x % 128 == 0)
#pragma unroll
        for (int n = 0; n < COUNT / PANEL_COUNT; n++)
            store_panel(w, map, apart, v_tile() + (panel + n) * PANEL_BYTES, 64 * (panel + n), w.first_k);
}

/* Straight from the registers, row by row, for columns share an address: even so it is a quarter of the kernel's machine code, which takes long to compile. */
template <typename ELEMENT, int COUNT>
FA_DEVICE void store_rows(ELEMENT *to, fa_i64 stride, const float (&x)[COUNT], float factor, int rows, int counting, int cols)
{
#pragma unroll
    for (int n = 0; n < PANEL_COUNT; n += n % 2 ? 3 : 1) {
        int row = n / 4 * 8 + n % 2;
        if (row >= rows)
            break;
        ELEMENT *at = to + row * stride;
#pragma unroll
        for (int half = 0; half < 2 * COUNT / PANEL_COUNT; half++) { /* a thread has two of a panel's columns */
            int   col   = half / 2 * 64 + half % 2 * 8;
            float value = row < counting ? x[half / 2 * PANEL_COUNT + n + half % 2 * 2] * factor : 0.0f;
            if (col >= cols)
                continue;
            if constexpr (sizeof(ELEMENT) == 4)
                at[col] = value;
            else
                at[col] = (fa_u16)pack<FA_DTYPE>(value, 0.0f);
        }
    }
}

/* What is asked for in float32, has no map or is seen by no query. */
template <int COUNT> FA_DEVICE void store_turned(const share_work &w, const fa_view &view, const float (&x)[COUNT], float factor, int cols, int panel)
{
    int    col = 64 * panel + fragment_row(), key = threadIdx.x % 4 * 2, rows = w.seq.rows_k - w.first_k - key, counting = w.keys.end - w.first_k - key;
    fa_i64 from = w.seq.kv_entry * view.stride[0] + (w.seq.kv_row + w.first_k + key) * view.stride[1] + w.stored_head * view.stride[2] + col;
    if (!view.data)
        return;
    if (view.dtype == FA_F32)
        store_rows((float *)view.data + from, view.stride[1], x, factor, rows, counting, cols - col);
    else
        store_rows((fa_u16 *)view.data + from, view.stride[1], x, factor, rows, counting, cols - col);
}

/* What the last step of an item has left. */
template <int GROUP> FA_DEVICE void last_by_columns(const fa_args &args, const fa_maps &maps, const work &w, consumer &c, float factor)
{
    float dq[DQ_COUNT];
    if (GROUP == 0) {
        named_sync(DS_IS_THERE, 128 * CONSUMERS); /* and V is done with */
        start_dk<GROUP>(c, c.n - 1);
        start_wide_dq<GROUP>(dq, c.n - 1, 0);
    } else
        release(k_empty());
    if (args.apart_dv >= 0)
        send_gradient(w, maps.dv, args.apart_dv, own_dv<GROUP>(c), factor, GROUP, first_panel_of(GROUP, true));
    if (GROUP == 0) {
        wgmma_wait<0>();
        hold(c.dk);
        release(q_empty(c.n - 1));
        end_dq<true>(dq, c.n - 1);
    }
}

template <int GROUP> FA_DEVICE void end_by_columns(const fa_args &args, const fa_maps &maps, const share_work &w, consumer &c, float factor)
{
    bool some = steps_of(w) > 0, asks = threadIdx.x % 128 == 0;
    if (!some || args.apart_dv < 0)
        store_turned(w, args.dv_stored, own_dv<GROUP>(c), factor, args.head_dim_v, first_panel_of(GROUP, true));
    if (some && args.apart_dk >= 0 && K_PANELS <= V_PANELS) {
        if (asks)
            bulk_added_was_read();
        named_sync(MINE + GROUP, 128);
        send_gradient(w, maps.dk, args.apart_dk, own_dk<GROUP>(c), args.scale * factor, GROUP, first_panel_of(GROUP, false));
    } else
        store_turned(w, args.dk_stored, own_dk<GROUP>(c), args.scale * factor, args.head_dim, first_panel_of(GROUP, false));
    if (asks) {
        bulk_added_was_read();
        barrier_arrive(v_empty());
    }
}

#endif
