/*
 * backward_sm90.cu's consumers: the products that they start, and what they do with elements between these.
 */
#ifndef FA_BACKWARD_PRODUCTS_SM90_CUH
#define FA_BACKWARD_PRODUCTS_SM90_CUH

#include "backward_dbias_sm90.cuh"
#include "dropout_sm90.cuh"
#include "gradients_sm90.cuh"

/* Of its keys a consumer keeps the first 16 K_HELD columns of K and 16 V_HELD of V in registers, where these have room and it pays: S and dP then read the less of shared memory. */
constexpr bool HOLDS_K = !HAS_NOTED && !FA_HAS_ALIBI && !FA_HAS_BIAS && (FA_HEAD_DIM == 64 ? FA_MASK != FA_MASK_WINDOW && !LISTED : (FA_HEAD_DIM == 96 && !LISTED) || (FA_HEAD_DIM == 128 && FA_MASK == FA_MASK_CAUSAL && FA_TILE_Q == 64));
constexpr int  K_HELD  = !HOLDS_K ? 0 : FA_HEAD_DIM == 96 ? 6 : 4, V_HELD = FA_HEAD_DIM != 96 || !HOLDS_K ? 0 : FA_TILE_Q == 80 ? 2 : 6;

struct consumer {
    float    dk[DK_COUNT], dv[DV_COUNT];
    unsigned p[P_STEPS][4], ds[P_STEPS][4]; /* P^T and dS^T, as left operands */
    unsigned noted[P_STEPS][4];             /* HAS_NOTED: what dS is made of, P or under a softcap P (1 - tanh^2), negative where it is dropped */
    unsigned k[K_HELD + 1][4], v[V_HELD + 1][4]; /* load_held */
    float    alibi_log2;                    /* the head's slope */
    int      group;
    unsigned n;                             /* query tiles since the kernel began */
#if FA_HAS_DROPOUT
    int batch_head;
#endif
#if FA_HAS_DBIAS
    int head; /* of the step */
#endif
#if FA_MASK == FA_MASK_LISTED
    int mask; /* of the step */
#endif
};

FA_DEVICE void wait_for_q(unsigned n) { barrier_wait(q_full(n), filled<Q_STAGES>(n)); }
FA_DEVICE void wait_for_dout(unsigned n) { barrier_wait(dout_full(n), filled<STAGES>(n)); }

/* In an edge tile P and dS are 0 where a query does not see a key, but 0 * NaN is NaN: K, and there Q and dO, must hold nothing that is not
 * finite before they are multiplied by them; S and dP do no harm, and tell. Who sees it has it from LSE and delta. A warp's S has the products of all queries of the tile
 * with its 16 keys, dP those of dO and V, and dS is not finite where dP is not, even if P is 0: a row with Inf or NaN leaves none of them finite. A sum beyond float
 * tells of something that is not there, which does no harm. */
FA_DEVICE bool some_nonfinite(const float (&x)[S_COUNT])
{
    float sums[4] = {x[0], x[1], x[2], x[3]};
#pragma unroll
    for (int n = 4; n < S_COUNT; n++)
        sums[n % 4] += x[n];
    return __any_sync(~0u, !finite((sums[0] + sums[1]) + (sums[2] + sums[3])));
}

/* All of the tile by each warp that has come upon it, for itself: the others may see what this one has already cleared, but not less of it than is there. Rare. */
template <int BYTES = Q_BYTES> FA_DEVICE void clear_by_warp(unsigned tile)
{
    clear_nonfinite_of_lane<BYTES, 512>(tile + threadIdx.x % 32 * 16);
    fence_async();
    __syncwarp();
}

/* K of this warp's own keys. Rare. */
FA_DEVICE void clear_own_keys(int group)
{
    unsigned from = k_tile() + (first_key_of(group) + threadIdx.x % 128 / 32 * 16) * 128 + threadIdx.x % 32 * 16;
#pragma unroll 1
    for (int panel = 0; panel < K_PANELS; panel++)
        clear_nonfinite_of_lane<16 * 128, 512>(from + panel * (FA_TILE_K * 128));
    fence_async();
}

/* ---- the products: started here, finished by wgmma_wait ---- */

/* c += X^T Y; x: P^T or dS^T, y: a tile of dO or Q. */
template <int COUNT> FA_DEVICE void start_gradient(float (&c)[COUNT], unsigned (&x)[P_STEPS][4], unsigned y)
{
    matrix b = matrix_of(y, FA_TILE_Q * 128);
    hold(c);
    hold(x);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < P_STEPS; step++)
        if constexpr (!BY_COLUMNS) /* which has another */
            wgmma_registers(c, x[step], b.from(step * 2048), 1);
    wgmma_commit();
}

/* dQ begins with this consumer's own keys, so that the other's dS has longer to come. */
constexpr bool OWN_FIRST = !BY_COLUMNS && !DQ_LATE;

/* This consumer's part of dS K; DQ_TURNED of K^T dS^T. */
FA_DEVICE void start_dq(float (&dq)[DQ_COUNT], unsigned ds, int group)
{
    constexpr bool BY_ROWS = FA_TILE_Q == 128;
    int            panel = BY_ROWS ? 0 : group;
    matrix         a = matrix_of(ds + (BY_ROWS ? group * (64 * 128) : 0), 0), b = matrix_of(k_tile() + panel * (FA_TILE_K * 128), 0);
    hold(dq);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < FA_TILE_K / 16; step++) {
        int whose = OWN_FIRST && group == 1 ? 1 - step / 4 : step / 4;
        if (OWN_FIRST && !THIRD_SHARED && step == 4)
            named_sync(DS_IS_THERE, 128 * CONSUMERS);
        matrix of_ds = a.from(whose * (FA_TILE_Q * 128) + step % 4 * 32), of_k = b.from((4 * whose + step % 4) * 2048);
        if constexpr (DQ_TURNED)
            wgmma_shared<0, 1>(dq, of_k, of_ds, step > 0); /* rows of both are queries or keys as they lie */
        else
            wgmma_shared<1>(dq, of_ds, of_k, step > 0);
    }
    wgmma_commit();
}

/* THIRD_SHARED: of the third panel half of the queries, before dQ's own. */
FA_DEVICE void start_third_of_dq(float (&third)[THIRD_COUNT], unsigned ds, int group)
{
    matrix a = matrix_of(k_tile() + 2 * (FA_TILE_K * 128), 0), b = matrix_of(ds + group * (FA_TILE_Q * 64), 0);
    hold(third);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < FA_TILE_K / 16; step++) {
        int whose = group == 1 ? 1 - step / 4 : step / 4;
        if (step == 4)
            named_sync(DS_IS_THERE, 128 * CONSUMERS);
        wgmma_shared<0, 1>(third, a.from((4 * whose + step % 4) * 2048), b.from(whose * (FA_TILE_Q * 128) + step % 4 * 32), step > 0);
    }
    wgmma_commit();
}

/* ---- from products to operands. Elements as in warpgroup.cuh, keys down and queries across ---- */

#if FA_MASK == FA_MASK_LISTED

using columns = seen_words;

FA_DEVICE columns columns_of(const fa_args &args, const work &, const consumer &c, int) { return load_seen<FA_TILE_K>(args, c.mask, first_key_of(c.group) + fragment_row()); }

FA_DEVICE bool sees(const columns &seen, int h, int col) { return sees(seen, col / 8 * 4 + 2 * h + col % 2); }

#else

/* Of a thread's two keys, which columns see them: [first, last] less its own first column. */
struct columns {
    int first[2], last[2];
};

FA_DEVICE columns columns_of(const fa_args &args, const work &w, const consumer &c, int tile)
{
    columns seen;
    int     col = tile * FA_TILE_Q + threadIdx.x % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        row_limits limits = query_limits(args, w, w.first_k + first_key_of(c.group) + fragment_row() + 8 * h);
        seen.first[h]     = limits.last < 0 ? FA_TILE_Q : limits.first - col;
        seen.last[h]      = limits.last - col;
    }
    return seen;
}

/* Only a window has a last query; those that do not exist have LSE inf. */
FA_DEVICE bool sees(const columns &seen, int h, int col)
{
    return col >= seen.first[h] && (FA_MASK != FA_MASK_WINDOW || col <= seen.last[h]);
}

#endif

/* LSE or delta of this thread's columns, in shared memory until they are used: all that would be held are a third of the registers. SHUFFLED: loads of 8 bytes a
 * lane would be a fifth of what shared memory does there, so each of the eight lanes that have the same columns holds an eighth of them. */
constexpr bool SHUFFLED = FA_TILE_Q == 128;

constexpr int OWN_STATS = (FA_TILE_Q + 63) / 64; /* of 80 columns the second is something else, but in the first lanes */

struct row_stats {
    unsigned from;
    float2   own[OWN_STATS];
};

/* This lane's 8 bytes of every 256. */
FA_DEVICE void load_own(row_stats &rows)
{
#pragma unroll
    for (int n = 0; n < OWN_STATS; n++)
        rows.own[n] = shared_load_float2(rows.from + threadIdx.x % 32 * 8 + n * 256);
}

FA_DEVICE void load_stats(row_stats &rows, unsigned from)
{
    rows.from = from;
    if (SHUFFLED)
        load_own(rows);
}

/* Of this thread's columns 8 j and 8 j + 1. */
FA_DEVICE float2 stats_of(const row_stats &rows, int j)
{
    if (!SHUFFLED)
        return shared_load_float2(rows.from + threadIdx.x % 4 * 8 + 32 * j);
    return make_float2(from_quad(rows.own[j / 8].x, j % 8), from_quad(rows.own[j / 8].y, j % 8));
}

/* Four dot products become tanh(dot * scale / softcap), which is 2 / (1 + exp(-2 x)) - 1. The sums stay below 2^30 or so, a NaN's too, for it must not
 * reach the others' query: its own has NaN from LSE. */
FA_DEVICE void cap_four(float *x, float slope_log2)
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        x[i] = 1.0f + exp2_fast(fminf(x[i] * slope_log2, 30.0f));
    reciprocals(x[0], x[1], x[2], x[3]);
#pragma unroll
    for (int i = 0; i < 4; i++)
        x[i] = x[i] * 2.0f - 1.0f;
}

/* In units of log2. Queries past the last, for which LSE is inf, may have any, and only a window hides them: what is NaN there becomes a number. Elsewhere LSE is NaN too. */
FA_DEVICE float bias_log2(float bias) { return FA_MASK == FA_MASK_WINDOW ? bias * FA_LOG2E : fminf(bias * FA_LOG2E, 3e38f); }

/* Of this thread's elements eight, from 4 j on: as ldmatrix hands them out. */
FA_DEVICE void load_bias(float (&bias)[8], const fa_args &args, int group, int j)
{
    unsigned four[4];
    int      warp = threadIdx.x % 128 / 32;
    if constexpr (BY_COLUMNS)
        load_matrix(four, bias_at(args, bias_tile(), 16 * warp, j));
    else
        load_matrix_transposed(four, turned_bias_at(args, bias_tile(), j, first_key_of(group) / 8 + 2 * warp));
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float2 two      = unpack<FA_DTYPE>(four[i]);
        bias[2 * i]     = bias_log2(two.x);
        bias[2 * i + 1] = bias_log2(two.y);
    }
}

/* P^T = exp(S^T - LSE), in place; c.noted. ALiBi: of this thread's keys the second is eight behind the first, so it is as far from a column as the
 * first is from the column eight before. */
FA_DEVICE void exponentials(const fa_args &args, const work &w, consumer &c, float (&s)[S_COUNT], const row_stats &lse, int tile)
{
    float unit = FA_HAS_SOFTCAP ? args.cap_unit : args.scale_log2, distance = 0.0f, less[2][2] = {};
    if constexpr (FA_HAS_ALIBI) {
        distance = (float)(tile * FA_TILE_Q + (int)threadIdx.x % 4 * 2 + w.seq.diagonal - w.first_k - first_key_of(c.group) - fragment_row());
        less[0][0] = c.alibi_log2 * fabsf(distance - 8.0f);
        less[0][1] = c.alibi_log2 * fabsf(distance - 7.0f);
    }
    float bias[8];
    if constexpr (FA_HAS_BIAS)
        barrier_wait(bias_full(), filled<1>(c.n));
#pragma unroll
    for (int n = 0; n < S_COUNT; n += 4) {
        float  slope[4];
        float2 row = stats_of(lse, n / 4);
        if constexpr (FA_HAS_BIAS)
            if (n % 8 == 0)
                load_bias(bias, args, c.group, n / 4);
        if constexpr (FA_HAS_SOFTCAP) {
            cap_four(s + n, args.cap_slope);
#pragma unroll
            for (int i = 0; i < 4; i++)
                slope[i] = 1.0f - s[n + i] * s[n + i];
        }
        if constexpr (FA_HAS_ALIBI)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                less[1][e] = less[0][e];
                less[0][e] = c.alibi_log2 * fabsf(distance + (float)(2 * n + e));
            }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float score = s[n + i] * unit - (i % 2 ? row.y : row.x);
            if (FA_HAS_BIAS)
                score += bias[n % 8 + i];
            s[n + i] = exp2_fast(FA_HAS_ALIBI ? score - less[i / 2][i % 2] : score);
        }
        if constexpr (FA_HAS_SOFTCAP)
#pragma unroll
            for (int h = 0; h < 2; h++)
                c.noted[n / 8][n / 4 % 2 * 2 + h] = pack<FA_DTYPE>(s[n + 2 * h] * slope[2 * h], s[n + 2 * h + 1] * slope[2 * h + 1]);
    }
    if constexpr (FA_HAS_BIAS)
        release(bias_empty());
}

/*
 * Of a thread's exponentials the first PINNED come before dP is waited for. ptxas moves all it can behind that wait, where no product of this consumer's runs beside
 * them, whatever the text says. So a store that is never made hangs on them (P is not below 0), and behind it stands an instruction over which nothing moves. Were it all
 * of them, their end would be waited for too. How many is found by timing; an edge step has none (decision 0056, tenth round).
 */
constexpr int PINNED = HAS_NOTED || FA_HAS_ALIBI || FA_HAS_BIAS || FA_MASK == FA_MASK_WINDOW || LISTED || K_PANELS != 2 ? 0 : FA_TILE_Q == 80 ? 17 : FA_MASK == FA_MASK_CAUSAL ? 12 : 0;

FA_DEVICE void pin_exponentials(const float (&p)[S_COUNT])
{
    unsigned any = 0;
#pragma unroll
    for (int n = 0; n < PINNED; n++)
        any |= __float_as_uint(p[n]);
    keep_behind(any == 0x80018001u);
    __syncwarp();
}

/* Which pairs of a step are dropped, before S is there. */
FA_DEVICE void find_dropped(const fa_args &args, const work &w, const consumer &c, dropped_bits<S_COUNT> &bits, int tile)
{
#if FA_HAS_DROPOUT
    find_dropped(args, bits, c.batch_head, tile * (FA_TILE_Q / 16), (w.first_k + first_key_of(c.group)) / 16 + threadIdx.x % 128 / 32);
#endif
}

/* dS^T = P^T (dP^T - delta), in place of dP^T: 16 queries of it. Where P is negative dP is dropped; delta is multiplied by the share that is kept, as dP is by
 * which dropout does not make up for it: dQ and dK become larger at the end. */
FA_DEVICE void score_gradients(const fa_args &args, const unsigned (&p)[4], float (&dp)[S_COUNT], const row_stats &delta, int step)
{
#pragma unroll
    for (int n = 8 * step; n < 8 * step + 8; n += 2) {
        float2 pair = unpack<FA_DTYPE>(p[n / 2 % 4]), row = stats_of(delta, n / 4);
        if constexpr (FA_HAS_DROPOUT) {
            float share = 1.0f - (float)args.dropout.threshold * 0x1p-16f;
            dp[n]     = fmaxf(pair.x, 0.0f) * dp[n] - fabsf(pair.x) * (row.x * share);
            dp[n + 1] = fmaxf(pair.y, 0.0f) * dp[n + 1] - fabsf(pair.y) * (row.y * share);
            continue;
        }
        dp[n]     = pair.x * (dp[n] - row.x);
        dp[n + 1] = pair.y * (dp[n + 1] - row.y);
    }
}

/* The same of P before it is rounded. */
FA_DEVICE void score_gradients(const float (&p)[S_COUNT], float (&dp)[S_COUNT], const row_stats &delta)
{
#pragma unroll
    for (int n = 0; n < S_COUNT; n += 4) {
        float2 row = stats_of(delta, n / 4);
#pragma unroll
        for (int i = 0; i < 4; i++)
            dp[n + i] = p[n + i] * (dp[n + i] - (i % 2 ? row.y : row.x));
    }
}

/* P or dS of an edge tile: exactly 0 where it is masked, whatever Q, dO, LSE and delta hold. */
FA_DEVICE void mask_elements(float (&x)[S_COUNT], const columns &seen)
{
#pragma unroll
    for (int n = 0; n < S_COUNT; n++)
        x[n] = sees(seen, n / 2 % 2, n / 4 * 8 + n % 2) ? x[n] : 0.0f;
}

/* The dO of an edge tile has lost its Inf and NaN; delta says so, and dV gets them by P. Each consumer for itself. */
FA_DEVICE void give_back_nonfinite(unsigned (&p)[P_STEPS][4], const columns &seen, row_stats delta)
{
    bool some = false;
    load_own(delta);
#pragma unroll
    for (int n = 0; n < OWN_STATS; n++)
        some |= !finite(delta.own[n].x) || !finite(delta.own[n].y);
    if (!__any_sync(~0u, some))
        return;
#pragma unroll
    for (int j = 0; j < FA_TILE_Q / 8; j++) {
        float2 row = stats_of(delta, j);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            unsigned &pair = p[j / 2][j % 2 * 2 + h]; /* 0x7FFF is NaN in both formats */
            pair |= (!finite(row.x) && sees(seen, h, 8 * j) ? 0x7FFFu : 0) | (!finite(row.y) && sees(seen, h, 8 * j + 1) ? 0x7FFF0000u : 0);
        }
    }
}

/* THIRD_SHARED, which has no registers for a branch behind dP's wait: by delta, which says where a row of dO is not finite, before dP is begun. P as it is then. */
FA_DEVICE bool some_marked_row(unsigned delta_from)
{
    row_stats delta = {delta_from};
    load_own(delta);
    return __any_sync(~0u, is_marked(delta.own[0].x) || is_marked(delta.own[0].y)); /* of 48 columns the last lanes have something else, which does no harm */
}

FA_DEVICE void give_back_nonfinite(float (&p)[S_COUNT], const columns &seen, const row_stats &delta)
{
#pragma unroll
    for (int n = 0; n < S_COUNT; n += 4) {
        float2 row = stats_of(delta, n / 4);
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (!finite(i % 2 ? row.y : row.x) && sees(seen, i / 2, 2 * n + i % 2))
                p[n + i] = __int_as_float(0x7FFFFFFF);
    }
}

/* P^T as operands, c.p, and under dropout what dS is made of. */
FA_DEVICE void pack_probabilities(consumer &c, const float (&s)[S_COUNT], const dropped_bits<S_COUNT> &bits)
{
    pack_operand(c.p, s);
    if constexpr (FA_HAS_DROPOUT) {
        if constexpr (!FA_HAS_SOFTCAP)
#pragma unroll
            for (int n = 0; n < S_COUNT / 2; n++)
                c.noted[n / 4][n % 4] = c.p[n / 4][n % 4];
        drop_pairs(c.p, c.noted, bits);
    }
}

/* dS, queries down, for dQ: a consumer's 64 keys are one panel. */
FA_DEVICE void share_ds(unsigned tile, const unsigned (&ds)[P_STEPS][4], int group)
{
    unsigned to = turned_at(tile + first_key_of(group) / 64 * (FA_TILE_Q * 128));
#pragma unroll
    for (int step = 0; step < P_STEPS; step++)
        store_matrix_transposed(to + step * 2048, ds[step]);
}

/* Without a mask only keys past the last are hidden, and only their dS does harm. */
FA_DEVICE void clear_hidden_keys(const work &w, unsigned (&ds)[P_STEPS][4], int group)
{
#pragma unroll
    for (int h = 0; h < 2; h++)
        if (w.first_k + first_key_of(group) + fragment_row() + 8 * h >= w.keys.end)
#pragma unroll
            for (int n = 0; n < P_STEPS; n++)
                ds[n][h] = ds[n][2 + h] = 0;
}

/* To the warp that adds it to the float dQ: of a round the elements from `first` on. */
template <int GROUP = -1, int COUNT> FA_DEVICE void share_dq(const float (&dq)[COUNT], int round = 0, int group = GROUP, int first = 0)
{
    constexpr int PIECE = piece_of(GROUP), PER_ROUND = pieces_of(GROUP);
    bool          half  = HALF_PANEL && group == 1;
    unsigned      to    = dq_at(group * PIECES) + threadIdx.x % 128 * 16, apart = half && DQ_TURNED ? 64 * 16 : 128 * 16;
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
        int j = (first + i) / 4, slot = (round * PER_ROUND + j / PIECE) % PIECES;
        if (j % PIECE == 0)
            named_sync(DQ_IS_FREE + group * PIECES + slot, 128 + 32);
        if (!half || (DQ_TURNED ? threadIdx.x % 128 < 64 : j < PIECE / 2))
            shared_store(to + (slot * PIECE + j % PIECE) * apart,
                         make_uint4(__float_as_uint(dq[i]), __float_as_uint(dq[i + 1]), __float_as_uint(dq[i + 2]), __float_as_uint(dq[i + 3])));
        if (j % PIECE == PIECE - 1 || j == ROUND_COUNT / 4 - 1) {
            if (!ADDER_FENCES)
                fence_async();
            named_arrive(DQ_IS_THERE + group * PIECES + slot, 128 + 32);
        }
    }
}

constexpr int SLOT_PANELS = DK_BY_DQ ? DQ_BYTES / PANEL_BYTES : K_PANELS, GRADIENT_ROUNDS = (K_PANELS + SLOT_PANELS - 1) / SLOT_PANELS; /* of dK in dQ's memory */

/* This consumer's dK to the warp that adds dQ, by way of dQ's memory. */
template <int COUNT> FA_DEVICE void share_gradient(const work &w, const float (&x)[COUNT], float factor, int group)
{
    unsigned      thread = threadIdx.x % 128;
    asm volatile("" : "+r"(thread)); /* or the compiler keeps these places in registers while it walks the query tiles */
    int lane = thread % 32, warp = thread / 32;
#pragma unroll
    for (int panel = 0; panel < K_PANELS; panel++) {
        int at = panel % SLOT_PANELS;
        if (at == 0)
            named_sync(DQ_IS_FREE + group, 128 + 32);
        stage_panel(x, panel, factor, lane, w.keys.end - w.first_k - first_key_of(group) - 16 * warp, dq_at(group) + at * PANEL_BYTES + warp * 2048);
        if (at == SLOT_PANELS - 1 || panel == K_PANELS - 1)
            named_arrive(DQ_IS_THERE + group, 128 + 32);
    }
}

/* TMA takes it from there, asked by one thread. */
FA_DEVICE void store_panel(const work &w, const fa_map &map, int apart, unsigned from, int column, int first)
{
    tma_store_ragged(map, from, column, w.seq.rows_k - first, w.kv_head, w.seq.kv_entry * apart + w.seq.kv_row + w.seq.rows_k);
}

/* One stage of dS: the other consumer's dQ has been made of it, and, for the other, this one's. */
FA_DEVICE void wait_for_free_ds(int group)
{
    if (DS_STAGES == 1)
        named_sync(DS_IS_FREE + group, 128 * CONSUMERS);
}

FA_DEVICE void free_ds(int group)
{
    if (DS_STAGES == 1)
        named_arrive(DS_IS_FREE + 1 - group, 128 * CONSUMERS);
}

/* Until this consumer's dS is there. */
FA_DEVICE void wait_for_own_ds(int group)
{
    fence_async();
    named_sync(OWN + group, 128);
}

#endif
