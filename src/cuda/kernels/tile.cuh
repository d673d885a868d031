/*
 * Tiles of 16-bit rows in shared memory, and the way there.
 *
 * A row of COLS elements is COLS / 8 chunks of 16 bytes. ldmatrix reads the same chunk of eight neighbouring rows at
 * once, so chunks are exchanged within groups by the row's number (an XOR), and no two of the eight share a bank:
 *     COLS % 64 == 0: groups of 8 chunks, by row % 8;    COLS % 32 == 0: groups of 4, by row / 2 % 4 (an odd row starts 64
 *     bytes further round the banks already);    else groups of 2, by row / 4 % 2.
 */
#ifndef FA_TILE_CUH
#define FA_TILE_CUH

#include "rows.cuh"

constexpr int THREADS = 32 * FA_WARPS;

template <int COLS> struct tile {
    static constexpr int CHUNKS    = COLS / 8;
    static constexpr int ROW_BYTES = COLS * 2;
    static constexpr int GROUP     = COLS % 64 == 0 ? 8 : COLS % 32 == 0 ? 4 : 2; /* chunks that change places */
    static constexpr int PHASES    = GROUP / 2;
    static_assert(COLS % 16 == 0, "a row is a whole number of groups");

    static __device__ __forceinline__ unsigned turn(int row)
    {
        return GROUP == 8 ? row & 7 : GROUP == 4 ? (row >> 1) & 3 : (row >> 2) & 1;
    }

    /* Bytes from the tile's start to chunk `chunk` of row `row`. */
    static __device__ __forceinline__ unsigned offset(int row, int chunk)
    {
        return row * ROW_BYTES + ((chunk ^ turn(row)) << 4);
    }
};

/*
 * Where a lane reads for ldmatrix over a tile: blocks of 16 rows by 16 columns (two chunks).
 * COMPACT: one register; a block's place in its group of chunks is an XOR, for tiles that the lane reads from chunk 0 or 1
 * on. Otherwise a register for each place, and the block is a constant away. The forward is short of registers; the
 * backward, with them, was 3% slower by XOR on an H200.
 */
template <int COLS, bool COMPACT = false> struct lane_addresses {
    using layout               = tile<COLS>;
    static constexpr int COUNT = COMPACT ? 1 : layout::PHASES;
    unsigned             phase[COUNT];

    __device__ __forceinline__ lane_addresses(unsigned base, int row, int half)
    {
#pragma unroll
        for (int p = 0; p < COUNT; p++)
            phase[p] = base + layout::offset(row, 2 * p + half);
    }
    /* The same as seen from a tile `bytes` further on. The compiler is kept from knowing that it is the same in every
     * iteration, or it would keep each block's address in a register over the whole loop. */
    __device__ __forceinline__ lane_addresses from(unsigned bytes) const
    {
        lane_addresses moved = *this;
#pragma unroll
        for (int p = 0; p < COUNT; p++) {
            moved.phase[p] += bytes;
            asm volatile("" : "+r"(moved.phase[p]));
        }
        return moved;
    }
    /* Compile-time arguments after unrolling. */
    __device__ __forceinline__ unsigned at(int row16, int col16) const
    {
        int place = col16 % layout::PHASES;
        return (COMPACT ? phase[0] ^ (place << 5) : phase[place % COUNT]) + (col16 / layout::PHASES) * layout::GROUP * 16 +
               row16 * 16 * layout::ROW_BYTES;
    }
};

/* The lane's (row, half) of the 16x16 block that it addresses, so that ldmatrix yields
 *   rows first:   A of 16 rows (plain), or B of k = rows (transposed; then columns 0-7 are in r[0], r[1], 8-15 in r[2], r[3])
 *   halves first: B of n = rows (plain; rows 0-7 in r[0], r[1], 8-15 in r[2], r[3]), or A of k = rows (transposed). */
FA_DEVICE int rows_first_row() { return threadIdx.x & 15; }
FA_DEVICE int rows_first_half() { return (threadIdx.x >> 4) & 1; }
FA_DEVICE int halves_first_row() { return (threadIdx.x & 7) + ((threadIdx.x >> 4) & 1) * 8; }
FA_DEVICE int halves_first_half() { return (threadIdx.x >> 3) & 1; }

/* Eight elements to a chunk, or to the same chunk of each plane. */
FA_DEVICE void store_chunk(unsigned at, int plane_bytes, const float (&e)[8])
{
    unsigned word[4][PLANES];
#pragma unroll
    for (int w = 0; w < 4; w++)
        pack_planes(word[w], e[2 * w], e[2 * w + 1]);
#pragma unroll
    for (int p = 0; p < PLANES; p++)
        shared_store(at + p * plane_bytes, make_uint4(word[0][p], word[1][p], word[2][p], word[3][p]));
}

/* FP8 arrives as it is, each chunk's eight bytes in the chunk's first half, and expand_tile makes float16 of it. */
constexpr bool AS_BYTES = FA_DTYPE == FA_F8E4M3 && FA_ALIGNED;

/* The same number, of which the compiler cannot know that a part of it is all threads'. */
FA_DEVICE unsigned apart_from_others(unsigned x) { return __shfl_sync(~0u, x, (int)(threadIdx.x % 32)); }

/*
 * All threads copy rows [0, ROWS) of `source` to a tile. Rows outside [begin, end) and columns from `cols` on are zeros,
 * which keeps what lies there (NaN too) out of the products. No branch: the compiler may spread the copies over the
 * products around them. Needs copy_commit, copy_wait and expand_tile; without FA_ALIGNED it is done on return.
 */
template <int ROWS, int COLS, bool ONCE = false, class SOURCE>
FA_DEVICE void copy_tile(unsigned to, const SOURCE &source, int begin, int end, int cols, fa_i64 inner_stride)
{
    using layout               = tile<COLS>;
    constexpr int LANES        = layout::GROUP; /* threads that copy one row side by side */
    constexpr int ROWS_AT_ONCE = THREADS / LANES;
    constexpr int UNROLLED     = COLS > 256 && (AS_BYTES || !FA_ALIGNED || PLANES > 1) ? 1 : layout::CHUNKS / LANES; /* O leaves few registers */
    int           lane = threadIdx.x % LANES, first_row = threadIdx.x / LANES;
    static_assert(!ONCE || ROWS_AT_ONCE % 8 == 0, "a lane's chunks keep their places");
    constexpr int     STEPS = SOURCE::PLAIN ? 1 : (ROWS + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    const fa_element *found[STEPS]; /* page table or division: all rows at once, for nothing passes a copy */
#pragma unroll
    for (int n = 0; n < STEPS; n++)
        found[n] = source.row(first_row + n * ROWS_AT_ONCE);
    const fa_element *from = found[0]; /* moved on by a step, so that no row keeps an address in registers */
    unsigned          own  = ONCE ? apart_from_others(to + layout::offset(first_row, lane)) : 0;
#pragma unroll
    for (int r = 0; r < ROWS; r += ROWS_AT_ONCE) {
        int row = first_row + r;
        if (ROWS % ROWS_AT_ONCE != 0 && row >= ROWS)
            break;
        if (r > 0) {
            from = SOURCE::PLAIN ? from + ROWS_AT_ONCE * source.stride : found[r / ROWS_AT_ONCE % STEPS];
            if (SOURCE::PLAIN)
                asm("" : "+l"(from)); /* or the compiler keeps every row's offset in registers over the whole loop */
        }
        bool valid = row >= begin && row < end;
#pragma unroll(UNROLLED)
        for (int group = 0; group < layout::CHUNKS; group += LANES) {
            int      chunk = group + lane;
            unsigned at    = ONCE ? own + r * layout::ROW_BYTES + group * 16 : to + layout::offset(row, chunk);
            if constexpr (AS_BYTES) {
                copy_async_8(at, from + chunk * 8, valid && (FA_EVEN_D || chunk * 8 < cols));
            } else if constexpr (ONCE) {
                copy_async_once(at, from + chunk * 8, valid && (FA_EVEN_D || chunk * 8 < cols));
            } else if constexpr (FA_ALIGNED && PLANES == 1) {
                copy_async(at, from + chunk * 8, valid && (FA_EVEN_D || chunk * 8 < cols));
            } else {
                float e[8];
#pragma unroll
                for (int c = 0; c < 8; c++)
                    e[c] = valid && chunk * 8 + c < cols ? load_element(from, (chunk * 8 + c) * inner_stride, FA_DTYPE) : 0.0f;
                store_chunk(at, ROWS * layout::ROW_BYTES, e);
            }
        }
    }
}

/* As copy_tile for a float32 source: rounded on the way, done on return. */
template <int ROWS, int COLS>
FA_DEVICE void convert_tile(unsigned to, const float *from, fa_i64 stride, fa_i64 inner_stride, int end, int cols)
{
    using layout = tile<COLS>;
    for (int row = threadIdx.x / layout::GROUP; row < ROWS; row += THREADS / layout::GROUP)
        for (int chunk = threadIdx.x % layout::GROUP; chunk < layout::CHUNKS; chunk += layout::GROUP) {
            float e[8];
#pragma unroll
            for (int c = 0; c < 8; c++)
                e[c] = row < end && chunk * 8 + c < cols ? from[row * stride + (chunk * 8 + c) * inner_stride] : 0.0f;
            store_chunk(to + layout::offset(row, chunk), ROWS * layout::ROW_BYTES, e);
        }
}

/* The chunks that this thread copied by copy_tile, once copy_wait has seen them: bytes become float16. */
template <int ROWS, int COLS> FA_DEVICE void expand_tile(unsigned tile_at)
{
    using layout               = tile<COLS>;
    constexpr int LANES        = layout::GROUP;
    constexpr int ROWS_AT_ONCE = THREADS / LANES;
    int           lane = threadIdx.x % LANES, first_row = threadIdx.x / LANES;
#pragma unroll 1 /* scores and O leave few registers */
    for (int r = 0; r < (AS_BYTES ? ROWS : 0); r += ROWS_AT_ONCE)
#pragma unroll(COLS > 256 ? 1 : layout::CHUNKS / LANES)
        for (int group = 0; group < layout::CHUNKS; group += LANES)
            if (ROWS % ROWS_AT_ONCE == 0 || first_row + r < ROWS) {
                unsigned at = tile_at + layout::offset(first_row + r, group + lane), low[2], high[2];
                uint2    v  = shared_load_8(at);
                f16_of_e4m3(low, v.x);
                f16_of_e4m3(high, v.y);
                shared_store(at, make_uint4(low[0], low[1], high[0], high[1]));
            }
}

/* Looks through the chunks that this thread copied by copy_tile (its own copies are visible to it after copy_wait); Inf
 * and NaN become zeros in the tile. True if there were any. */
template <int ROWS, int COLS> FA_DEVICE bool clear_nonfinite_plane(unsigned tile_at)
{
    using layout               = tile<COLS>;
    constexpr int LANES        = layout::GROUP;
    constexpr int ROWS_AT_ONCE = THREADS / LANES;
    int           lane = threadIdx.x % LANES, first_row = threadIdx.x / LANES;
    unsigned      note = 0;
#pragma unroll
    for (int r = 0; r < ROWS; r += ROWS_AT_ONCE)
#pragma unroll
        for (int group = 0; group < layout::CHUNKS; group += LANES)
            if (ROWS % ROWS_AT_ONCE == 0 || first_row + r < ROWS) {
                uint4 v = shared_load_16(tile_at + layout::offset(first_row + r, group + lane));
                note_nonfinite(note, v.x);
                note_nonfinite(note, v.y);
                note_nonfinite(note, v.z);
                note_nonfinite(note, v.w);
            }
    if ((note & 0x7FFF7FFFu) == 0) /* +-0 in both halves */
        return false;
    for (int r = 0; r < ROWS; r += ROWS_AT_ONCE)
        for (int chunk = lane; chunk < layout::CHUNKS; chunk += LANES)
            if (first_row + r < ROWS) {
                unsigned at     = tile_at + layout::offset(first_row + r, chunk);
                uint4    v      = shared_load_16(at);
                shared_store(at, make_uint4(without_nonfinite(v.x), without_nonfinite(v.y), without_nonfinite(v.z),
                                            without_nonfinite(v.w)));
            }
    return true;
}

template <int ROWS, int COLS> FA_DEVICE bool clear_nonfinite(unsigned tile_at)
{
    bool found = false;
    for (int p = 0; p < PLANES; p++)
        found |= clear_nonfinite_plane<ROWS, COLS>(tile_at + p * ROWS * COLS * 2);
    return found;
}

/* This thread's own copies of a tile, times a factor that is a power of two or 0. Rare. */
template <int ROWS, int COLS> FA_DEVICE void multiply_tile(unsigned tile_at, float factor)
{
    using layout = tile<COLS>;
    for (int row = threadIdx.x / layout::GROUP; row < ROWS * PLANES; row += THREADS / layout::GROUP)
        for (int chunk = threadIdx.x % layout::GROUP; chunk < layout::CHUNKS; chunk += layout::GROUP) {
            unsigned at      = tile_at + layout::offset(row, chunk);
            uint4    v       = shared_load_16(at);
            unsigned word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int w = 0; w < 4; w++) {
                float2 e = unpack<OPERAND>(word[w]);
                word[w]  = pack<OPERAND>(e.x * factor, e.y * factor);
            }
            shared_store(at, make_uint4(word[0], word[1], word[2], word[3]));
        }
}

template <int ROWS16, int COLS8> FA_DEVICE void clear(float (&acc)[ROWS16][COLS8][4])
{
#pragma unroll
    for (int m = 0; m < ROWS16; m++)
#pragma unroll
        for (int n = 0; n < COLS8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                acc[m][n][e] = 0.0f;
}

/* A operands: ROWS16 blocks of 16 rows, of each plane. */
template <int ROWS16> using blocks_of = unsigned[PLANES][ROWS16][4];

/* Block `col16` of `a_at`'s rows, as A. */
template <int ROWS16, int PLANE_BYTES, class ADDRESSES>
FA_DEVICE void load_rows(blocks_of<ROWS16> &a, const ADDRESSES &a_at, int col16)
{
#pragma unroll
    for (int p = 0; p < PLANES; p++)
#pragma unroll
        for (int m = 0; m < ROWS16; m++)
            load_matrix(a[p][m], a_at.at(m, col16) + p * PLANE_BYTES);
}

/* c += A B for 16 numbers of the inner dimension. load(b, n, plane): B of columns 16 n ... 16 n + 15 as load_matrix gives
 * it. float32 leaves out the planes' products that vanish in it.
 *
 * LONG: a sum over a whole sequence, or over more than 256 columns. Tensor cores cut a sum off where others round, always towards zero, which is seen in
 * float32 over thousands of steps: there the products of a step are summed by themselves and then added (decision 0043). */
template <bool LONG, int ROWS16, int COLS8, class LOAD>
FA_DEVICE void multiply_step(float (&c)[ROWS16][COLS8][4], const blocks_of<ROWS16> &a, const LOAD &load)
{
    constexpr bool APART = LONG && PLANES > 1;
#pragma unroll
    for (int n = 0; n < COLS8; n += 2) {
        float sum[ROWS16][2][4] = {};
#pragma unroll
        for (int p = 0; p < PLANES; p++) {
            unsigned b[4];
            load(b, n / 2, p);
#pragma unroll
            for (int other = 0; other < PLANES - p; other++)
#pragma unroll
                for (int m = 0; m < ROWS16; m++) {
                    multiply_add(APART ? sum[m][0] : c[m][n], a[other][m], b[0], b[1]);
                    multiply_add(APART ? sum[m][1] : c[m][n + 1], a[other][m], b[2], b[3]);
                }
        }
        if constexpr (APART)
#pragma unroll
            for (int m = 0; m < ROWS16; m++)
#pragma unroll
                for (int e = 0; e < 8; e++)
                    c[m][n + e / 4][e % 4] += sum[m][e / 4][e % 4];
    }
}

/*
 * A warp's accumulator, 16 ROWS16 rows by 8 COLS8 columns, times `scale` of each row (index 2 * row16 + (lower half)), to
 * rows first_row ... of a tensor: row r is at data + r * row_stride elements. Only rows < num_rows and columns < cols.
 * staging: shared memory of this warp alone, 16 * ROWS16 rows of COLS8 * 8 elements, for 16-byte stores.
 * APART: the accumulator's blocks of 16 columns are the row's block first16 and those APART apart.
 */
template <int DTYPE, int ROWS16, int COLS8, int APART = 1>
FA_DEVICE void store_accumulator(float (&acc)[ROWS16][COLS8][4], const float (&scale)[2 * ROWS16], unsigned staging,
                                 void *data, fa_i64 row_stride, fa_i64 inner_stride, int num_rows, int cols, int first16 = 0)
{
    int  lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    auto place_of = [&](int n) { return APART == 1 ? n : (n / 2 * APART + first16) * 2 + n % 2; }; /* of 8 columns */
    if constexpr (DTYPE != FA_F32 && FA_ALIGNED) {
        using layout = tile<COLS8 * 8>;
        __syncwarp();
#pragma unroll
        for (int m = 0; m < ROWS16; m++)
#pragma unroll
            for (int n = 0; n < COLS8; n++)
#pragma unroll
                for (int h = 0; h < 2; h++)
                    shared_store(staging + layout::offset(m * 16 + h * 8 + g, n) + t * 4,
                                 pack<DTYPE>(acc[m][n][2 * h] * scale[2 * m + h], acc[m][n][2 * h + 1] * scale[2 * m + h]));
        __syncwarp();
        constexpr int LANES = layout::GROUP;
#pragma unroll
        for (int r = 0; r < 16 * ROWS16; r += 32 / LANES) {
            int row = r + lane / LANES;
#pragma unroll
            for (int group = 0; group < COLS8; group += LANES) {
                int chunk = group + lane % LANES, place = place_of(chunk);
                if (row < num_rows && (FA_EVEN_D || place * 8 < cols))
                    *(uint4 *)((fa_u16 *)data + row * row_stride + place * 8) =
                        shared_load_16(staging + layout::offset(row, chunk));
            }
        }
    } else {
#pragma unroll
        for (int m = 0; m < ROWS16; m++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int row = m * 16 + h * 8 + g;
                if (row >= num_rows)
                    continue;
#pragma unroll
                for (int n = 0; n < COLS8; n++) {
                    int   col = place_of(n) * 8 + 2 * t;
                    float a = acc[m][n][2 * h] * scale[2 * m + h], b = acc[m][n][2 * h + 1] * scale[2 * m + h];
                    if constexpr (DTYPE == FA_F32 && FA_ALIGNED) {
                        if (FA_EVEN_D || col < cols) /* a row is whole 16-byte pieces: pairs never straddle its end */
                            *(float2 *)((float *)data + row * row_stride + col) = make_float2(a, b);
                    } else {
                        if (col < cols)
                            store_element(data, row * row_stride + col * inner_stride, DTYPE, a);
                        if (col + 1 < cols)
                            store_element(data, row * row_stride + (col + 1) * inner_stride, DTYPE, b);
                    }
                }
            }
    }
}

#endif
