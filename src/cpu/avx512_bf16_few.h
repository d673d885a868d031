/*
 * Few bfloat16 queries against long keys by VDPBF16PS: rows of K and V are read where they lie, once for up to four rows
 * of Q or O. K's rows are pairs as they are; V's are interleaved two keys at a time.
 *
 * Keys are read in the order of memory, for Zen 4 reads one stream of rows faster than several (decision 0067).
 */
#define FEW_ROWS 16
#define FEW_BLOCK 4     /* rows that share what is loaded */
#define FEW_AT_ONCE 4   /* keys of a block of S */
#define FEW_CHUNK 32    /* keys of V that pass the L1 cache while all rows of O use them */
#define FEW_BYTES 1024      /* that are asked for ahead */
#define FEW_FAR_BYTES 16384 /* into the second-level cache */
#define FEW_UNROLL UNROLL(GCC unroll 16)

V int rows_ahead(const fa_rows *rows, const fa_soon *soon)
{
    return fa_max_int(1, (soon->far ? FEW_FAR_BYTES : FEW_BYTES) / (2 * rows->cols));
}

/* The row to be asked for with row n: `ahead` further on, or of those that are read next. */
V const char *row_soon(const fa_rows *rows, const fa_soon *soon, int n, int ahead)
{
    const fa_rows *of = soon->each || n + ahead >= rows->count ? &soon->rows : rows;
    int            at = soon->each ? n : of == rows ? n + ahead : n + ahead - rows->count;
    return at < of->count ? of->row[at] : rows->row[n];
}

/* Lane n: the sum of vector n, each added up as v_reduce_add does. */
V vf sums16(const vf of[16])
{
    vf two[8], four[4], pair[2];
    FEW_UNROLL
    for (int n = 0; n < 8; n++) { /* rows n % 4 + 8 (n / 4), and four rows further on: halves, ... */
        vf a = of[n % 4 + n / 4 * 8], b = of[n % 4 + n / 4 * 8 + 4];
        two[n] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
    }
    FEW_UNROLL
    for (int n = 0; n < 4; n++) /* ... quarters, ... */
        four[n] = _mm512_add_ps(_mm512_shuffle_f32x4(two[n], two[n + 4], 0x88),
                                _mm512_shuffle_f32x4(two[n], two[n + 4], 0xDD));
    FEW_UNROLL
    for (int n = 0; n < 2; n++) /* ... and what is left of each quarter */
        pair[n] = _mm512_add_ps(_mm512_shuffle_ps(four[2 * n], four[2 * n + 1], 0x44),
                                _mm512_shuffle_ps(four[2 * n], four[2 * n + 1], 0xEE));
    return _mm512_add_ps(_mm512_shuffle_ps(pair[0], pair[1], 0x88), _mm512_shuffle_ps(pair[0], pair[1], 0xDD));
}

/* ---- S = Q K^T ---- */

V void few_dots(float *s, int lds, const uint16_t *q, int ldq, const fa_rows *k, const fa_soon *soon, int key,
                const int rows, const int keys, const bool ask)
{
    const char *row[FEW_AT_ONCE], *next[FEW_AT_ONCE];
    vf          sum[FEW_BLOCK * FEW_AT_ONCE];
    FEW_UNROLL
    for (int j = 0; j < keys; j++) {
        row[j]  = k->row[key + j];
        next[j] = ask ? row_soon(k, soon, key + j, rows_ahead(k, soon)) : NULL;
    }
    FEW_UNROLL
    for (int n = 0; n < FEW_BLOCK * FEW_AT_ONCE; n++)
        sum[n] = v_zero();
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
        vf all = sums16(sum);
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

V void few_scores(float *s, int lds, const uint16_t *q, int ldq, const fa_rows *k, const fa_soon *soon, const int rows,
                  const bool ask)
{
    int key = 0;
    for (; key + FEW_AT_ONCE <= k->count; key += FEW_AT_ONCE)
        few_dots(s, lds, q, ldq, k, soon, key, rows, FEW_AT_ONCE, ask);
    for (; key < k->count; key++)
        few_dots(s, lds, q, ldq, k, soon, key, rows, 1, ask);
}

static void scores_few(float *s, int lds, const void *q, const fa_rows *k, int rows, const fa_soon *soon)
{
    int ldq = left_ld(k->cols), r = 0;
    for (; r + FEW_BLOCK <= rows; r += FEW_BLOCK) {
        const uint16_t *block = (const uint16_t *)q + (int64_t)r * ldq;
        if (r == 0)
            few_scores(s, lds, block, ldq, k, soon, FEW_BLOCK, true);
        else
            few_scores(s + (int64_t)r * lds, lds, block, ldq, k, soon, FEW_BLOCK, false);
    }
    for (; r < rows; r++)
        few_scores(s + (int64_t)r * lds, lds, (const uint16_t *)q + (int64_t)r * ldq, ldq, k, soon, 1, r == 0);
}

/* ---- O += P V ---- */

/* `vectors` vectors of `rows` rows of O, from column `col` on; p: pairs of keys, [rows][FEW_CHUNK / 2]. */
V void few_block(float *o, int ldo, const float *p, const fa_rows *v, const fa_soon *soon, int begin, int end, int col,
                 const int rows, const int vectors, const bool ask)
{
    vf acc[FEW_BLOCK][NV];
    FEW_UNROLL
    for (int n = 0; n < rows; n++) {
        FEW_UNROLL
        for (int c = 0; c < vectors; c++)
            acc[n][c] = v_load(o + (int64_t)n * ldo + col + c * VL);
    }
    for (int key = begin; key < end; key += 2) {
        const uint16_t *a = v->row[key], *b = key + 1 < end ? v->row[key + 1] : NULL;
        vf              x[NV];
        if (ask) {
            int         ahead = rows_ahead(v, soon);
            const char *next = row_soon(v, soon, key, ahead), *other = b ? row_soon(v, soon, key + 1, ahead) : next;
            FEW_UNROLL
            for (int c = 0; c < vectors; c += 2) {
                FA_ASK_FOR(next + 2 * (col + c * VL), soon->far);
                FA_ASK_FOR(other + 2 * (col + c * VL), soon->far);
            }
        }
        FEW_UNROLL
        for (int c = 0; c < vectors; c += 2) {
            vh low = _mm512_loadu_si512(a + col + c * VL);
            vh up  = b ? _mm512_loadu_si512(b + col + c * VL) : _mm512_setzero_si512();
            x[c]     = interleaved(low, up, 0);
            x[c + 1] = interleaved(low, up, VL);
        }
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

static void accumulate_few(float *o, int ldo, const float *rescale, const float *p, int ldp, const fa_rows *v, int rows,
                           const fa_soon *soon)
{
    for (int r = 0; r < rows; r++)
        for (int col = 0; col < v->cols; col += VL)
            v_store(o + (int64_t)r * ldo + col, v_mul(v_load(o + (int64_t)r * ldo + col), v_set1(rescale[r])));
    for (int begin = 0; begin < v->count; begin += FEW_CHUNK) {
        int end = fa_min_int(begin + FEW_CHUNK, v->count), r = 0;
        for (; r + FEW_BLOCK <= rows; r += FEW_BLOCK) {
            if (r == 0)
                few_columns(o, ldo, p, ldp, v, soon, begin, end, FEW_BLOCK, true);
            else
                few_columns(o + (int64_t)r * ldo, ldo, p + (int64_t)r * ldp, ldp, v, soon, begin, end, FEW_BLOCK, false);
        }
        for (; r < rows; r++)
            few_columns(o + (int64_t)r * ldo, ldo, p + (int64_t)r * ldp, ldp, v, soon, begin, end, 1, r == 0);
    }
}
