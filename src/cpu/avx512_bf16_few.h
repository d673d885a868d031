/*
 * Few bfloat16 queries against long keys by VDPBF16PS: rows of K and V are read where they lie, once for up to four
 * rows of Q or O. K's rows are pairs as they are; V's are interleaved two keys at a time, for more than a dozen rows
 * once for all.
 *
 * Keys are read in the order of memory, for Zen 4 reads one stream of rows faster than several (decision 0067).
 */
#define FEW_ROWS 16
#define FEW_ROWS_WIDE                                                                                                  \
    256 /* 16 sums take 45 steps to add up: nothing beside the products of 576 columns, much beside 128's */
#define FEW_ROWS_EACH 12    /* up to here each block interleaves V for itself (0071) */
#define FEW_BLOCK 4         /* rows that share what is loaded */
#define FEW_AT_ONCE 4       /* keys of a block of S */
#define FEW_CHUNK 32        /* keys of V that pass the L1 cache while all rows of O use them */
#define FEW_K_BYTES 20480   /* of K that stay in the L1 cache while all rows of Q pass over them */
#define FEW_BYTES 1024      /* that are asked for ahead */
#define FEW_FAR_BYTES 16384 /* into the second-level cache */
#define FEW_UNROLL UNROLL(GCC unroll 16)

V int rows_ahead(const fa_rows *rows, const fa_soon *soon)
{
    return fa_max_int(1, (soon->far ? FEW_FAR_BYTES : FEW_BYTES) / (2 * rows->cols));
}

/* Rows beyond whole blocks are blocks of their own. */
V int blocks_of(int rows) { return rows / FEW_BLOCK + rows % FEW_BLOCK; }

/* The row to be asked for with row n: `ahead` further on, or of those that are read next. */
V const char *row_soon(const fa_rows *rows, const fa_soon *soon, int n, int ahead)
{
    const fa_rows *of = soon->each || n + ahead >= rows->count ? &soon->rows : rows;
    int            at = soon->each ? n : of == rows ? n + ahead : n + ahead - rows->count;
    return fa_row_of(at < of->count ? of : rows, at < of->count ? at : n);
}

/* ---- S = Q K^T ---- */

V void few_dots(float *s, int lds, const uint16_t *q, int ldq, const fa_rows *k, const fa_soon *soon, int key,
                int ahead, const int rows, const int keys, const bool ask)
{
    const char *row[FEW_AT_ONCE], *next[FEW_AT_ONCE];
    vf          sum[FEW_BLOCK * FEW_AT_ONCE];
    FEW_UNROLL
    for (int j = 0; j < keys; j++) {
        row[j]  = fa_row_of(k, key + j);
        next[j] = ask ? row_soon(k, soon, key + j, ahead) : NULL;
    }
    FEW_UNROLL
    for (int n = 0; n < FEW_BLOCK * FEW_AT_ONCE; n++)
        sum[n] = v_zero();
    FEW_UNROLL
    for (int j = 0; j < keys && ask; j++)
        fa_ask_for_end(next[j], 2 * k->cols, soon->far);
    for (int col = 0; col < k->cols; col += 32) {
        vf x[FEW_AT_ONCE];
        FEW_UNROLL
        for (int j = 0; j < keys; j++) {
            if (ask)
                FA_ASK_FOR(next[j] + 2 * col, soon->far);
            x[j] = v_load((const float *)(row[j] + 2 * col));
        }
        FEW_UNROLL
        for (int n = 0; n < rows; n++) {
            vf y = v_load((const float *)(q + n * ldq + col));
            V_KEEP(y); /* loaded once for all keys */
            FEW_UNROLL
            for (int j = 0; j < keys; j++)
                sum[n * FEW_AT_ONCE + j] = V_PRODUCT(y, x[j], sum[n * FEW_AT_ONCE + j]);
        }
    }
    if (rows == FEW_BLOCK && keys == FEW_AT_ONCE) {
        vf all = v_sums16(sum);
        _mm_storeu_ps(s + key, _mm512_castps512_ps128(all));
        _mm_storeu_ps(s + lds + key, _mm512_extractf32x4_ps(all, 1));
        _mm_storeu_ps(s + 2 * lds + key, _mm512_extractf32x4_ps(all, 2));
        _mm_storeu_ps(s + 3 * lds + key, _mm512_extractf32x4_ps(all, 3));
        return;
    }
    FEW_UNROLL
    for (int n = 0; n < rows; n++) {
        if (keys == FEW_AT_ONCE)
            v_store_sums4(s + n * lds + key, sum + n * FEW_AT_ONCE);
        else
            s[n * lds + key] = v_reduce_add(sum[n * FEW_AT_ONCE]);
    }
}

/* `turn` of so many `turns`, one for each block of rows: each asks for some of the rows, so that they do not come at
 * once. */
V void few_scores(float *s, int lds, const uint16_t *q, int ldq, const fa_rows *k, const fa_soon *soon, int begin,
                  int end, const int rows, int turn, int turns)
{
    int key = begin, ahead = rows_ahead(k, soon);
    for (; key + FEW_AT_ONCE <= end; key += FEW_AT_ONCE) {
        if (key / FEW_AT_ONCE % turns == turn)
            few_dots(s, lds, q, ldq, k, soon, key, ahead, rows, FEW_AT_ONCE, true);
        else
            few_dots(s, lds, q, ldq, k, soon, key, ahead, rows, FEW_AT_ONCE, false);
    }
    for (; key < end; key++)
        few_dots(s, lds, q, ldq, k, soon, key, ahead, rows, 1, false);
}

static void scores_few(float *s, int lds, const void *q, const fa_rows *k, int rows, const fa_soon *soon)
{
    int ldq = left_ld(k->cols), step = fa_max_int(1, FEW_K_BYTES / (2 * k->cols * FEW_AT_ONCE)) * FEW_AT_ONCE;
    int turns = fa_min_int(blocks_of(rows), step / FEW_AT_ONCE);
    for (int begin = 0; begin < k->count; begin += step) {
        int end = fa_min_int(begin + step, k->count), r = 0, turn = 0;
        for (; r + FEW_BLOCK <= rows; r += FEW_BLOCK, turn++)
            few_scores(s + (int64_t)r * lds, lds, (const uint16_t *)q + (int64_t)r * ldq, ldq, k, soon, begin, end,
                       FEW_BLOCK, turn, turns);
        for (; r < rows; r++, turn++)
            few_scores(s + (int64_t)r * lds, lds, (const uint16_t *)q + (int64_t)r * ldq, ldq, k, soon, begin, end, 1,
                       turn, turns);
    }
}

/* ---- O += P V ---- */

/* Columns col .. of two keys of V, the second 0 if there is none, as `vectors` vectors of pairs. ask: for as many of
 * two others. */
V void interleave_two(vf *x, const fa_rows *v, const fa_soon *soon, int key, int end, int col, const int vectors,
                      int ahead, const bool ask)
{
    const uint16_t *a = (const uint16_t *)fa_row_of(v, key);
    const uint16_t *b = key + 1 < end ? (const uint16_t *)fa_row_of(v, key + 1) : NULL;
    const char     *next  = ask ? row_soon(v, soon, key, ahead) : NULL;
    const char     *other = ask && b ? row_soon(v, soon, key + 1, ahead) : next;
    if (ask && col == 0) {
        fa_ask_for_end(next, 2 * v->cols, soon->far);
        fa_ask_for_end(other, 2 * v->cols, soon->far);
    }
    FEW_UNROLL
    for (int c = 0; c < vectors; c += 2) {
        vh low = _mm512_loadu_si512(a + col + c * VL);
        vh up  = b ? _mm512_loadu_si512(b + col + c * VL) : _mm512_setzero_si512();
        if (ask) {
            FA_ASK_FOR(next + 2 * (col + c * VL), soon->far);
            FA_ASK_FOR(other + 2 * (col + c * VL), soon->far);
        }
        x[c]     = interleaved(low, up, 0);
        x[c + 1] = interleaved(low, up, VL);
    }
}

/* `vectors` vectors of `rows` rows of O, from column `col` on; p: pairs of keys, [rows][FEW_CHUNK / 2]. */
V void few_block(float *o, int ldo, const float *p, const fa_rows *v, const fa_soon *soon, int begin, int end, int col,
                 const int rows, const int vectors, const bool ask)
{
    vf  acc[FEW_BLOCK][NV];
    int ahead = rows_ahead(v, soon);
    FEW_UNROLL
    for (int n = 0; n < rows; n++) {
        FEW_UNROLL
        for (int c = 0; c < vectors; c++)
            acc[n][c] = v_load(o + (int64_t)n * ldo + col + c * VL);
    }
    for (int key = begin; key < end; key += 2) {
        vf x[NV];
        interleave_two(x, v, soon, key, end, col, vectors, ahead, ask);
        FEW_UNROLL
        for (int n = 0; n < rows; n++) {
            vf prob = v_set1(p[n * (FEW_CHUNK / 2) + (key - begin) / 2]);
            FEW_UNROLL
            for (int c = 0; c < vectors; c++)
                acc[n][c] = V_PRODUCT(prob, x[c], acc[n][c]);
        }
    }
    FEW_UNROLL
    for (int n = 0; n < rows; n++) {
        FEW_UNROLL
        for (int c = 0; c < vectors; c++)
            v_store(o + (int64_t)n * ldo + col + c * VL, acc[n][c]);
    }
}

V void few_columns(float *o, int ldo, const float *p, int ldp, const fa_rows *v, const fa_soon *soon, int begin, int end,
                   const int rows, const bool ask)
{
    float pairs[FEW_BLOCK * FEW_CHUNK / 2];
    FEW_UNROLL
    for (int n = 0; n < rows; n++) { /* P is 0 from its last key to the next multiple of key_step */
        const float *from = p + (int64_t)n * ldp + begin;
        vf           high = end - begin > VL ? v_load(from + VL) : v_zero();
        _mm512_storeu_si512(pairs + n * (FEW_CHUNK / 2), halves_of(v_load(from), high));
    }
    int col = 0;
    for (; col + WIDTH <= v->cols; col += WIDTH)
        few_block(o, ldo, pairs, v, soon, begin, end, col, rows, NV, ask);
    if (col < v->cols)
        few_block(o, ldo, pairs, v, soon, begin, end, col, rows, 2, ask);
}

/* Many rows: V is interleaved once for all of them, some keys of WIDTH columns at a time, which the L1 cache holds. */
static void accumulate_many(float *o, int ldo, const float *rescale, const float *p, int ldp, const fa_rows *v,
                            int rows, const fa_soon *soon, float *scratch)
{
    int       ld = left_ld(v->count), ahead = rows_ahead(v, soon);
    uint16_t *left = (uint16_t *)(scratch + FEW_PANEL / 2 * WIDTH);
    pack_p(left, p, ldp, rows, v->count);
    for (int begin = 0; begin < v->count; begin += FEW_PANEL) {
        int     end = fa_min_int(begin + FEW_PANEL, v->count);
        product to  = {.ldc     = ldo,
                       .a       = (const float *)(left + begin),
                       .lda     = ld / 2,
                       .b       = scratch,
                       .ldb     = WIDTH,
                       .depth   = pairs_of(end - begin),
                       .rescale = begin == 0 ? rescale : NULL,
                       .add     = true};
        for (int col = 0; col < v->cols; col += WIDTH) {
            int vectors = fa_min_int(WIDTH, v->cols - col) / VL;
            for (int key = begin; key < end; key += 2) {
                vf x[NV] = {v_zero(), v_zero(), v_zero(), v_zero()};
                if (vectors == NV)
                    interleave_two(x, v, soon, key, end, col, NV, ahead, true);
                else
                    interleave_two(x, v, soon, key, end, col, 2, ahead, true);
                FEW_UNROLL
                for (int c = 0; c < NV; c++)
                    v_store(scratch + (key - begin) / 2 * WIDTH + c * VL, x[c]);
            }
            to.c = o + col;
            product_panel(to, by_rows[vectors - 1], rows, false, false);
        }
    }
}

static void accumulate_few(float *o, int ldo, const float *rescale, const float *p, int ldp, const fa_rows *v, int rows,
                           const fa_soon *soon, void *scratch)
{
    if (rows > FEW_ROWS_EACH && v->cols > FA_WIDE_HEAD) {
        accumulate_many(o, ldo, rescale, p, ldp, v, rows, soon, scratch);
        return;
    }
    for (int r = 0; r < rows; r++)
        for (int col = 0; col < v->cols; col += VL)
            v_store(o + (int64_t)r * ldo + col, v_mul(v_load(o + (int64_t)r * ldo + col), v_set1(rescale[r])));
    /* Columns are passes over the chunk: what is asked for is the next one's, or it would come only shortly before its turn. */
    int chunk = soon->far && !soon->each && rows_ahead(v, soon) < FEW_CHUNK ? FEW_CHUNK / 2 : FEW_CHUNK;
    for (int begin = 0; begin < v->count; begin += chunk) {
        int end = fa_min_int(begin + chunk, v->count), r;
        if (rows >= FEW_BLOCK)
            few_columns(o, ldo, p, ldp, v, soon, begin, end, FEW_BLOCK, true);
        for (r = FEW_BLOCK; r + FEW_BLOCK <= rows; r += FEW_BLOCK)
            few_columns(o + (int64_t)r * ldo, ldo, p + (int64_t)r * ldp, ldp, v, soon, begin, end, FEW_BLOCK, false);
        if (rows < FEW_BLOCK)
            few_columns(o, ldo, p, ldp, v, soon, begin, end, 1, true);
        for (r = fa_max_int(1, rows / FEW_BLOCK * FEW_BLOCK); r < rows; r++)
            few_columns(o + (int64_t)r * ldo, ldo, p + (int64_t)r * ldp, ldp, v, soon, begin, end, 1, false);
    }
}
