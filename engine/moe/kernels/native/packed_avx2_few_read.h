/* Products of one or two tokens that are read with packed weights for AVX2: what the panels of packed_avx2_many.h give, to
   the bit, without them. For so few tokens codes are not worth exchanging between rows: as with tokens that are written, each
   row's are multiplied and added up within blocks, and only these sums are exchanged. Include in that file, after its
   products. */
#define FEW_READ 2                           /* most tokens that are faster so than with panels */
#define FEW_COLUMNS (PANEL_BYTES / FEW_READ) /* whose codes fit into the scratch */

/* y[m][0..8) (+)= up to eight rows from `w` on, `count`, times the first M tokens of a tile, whose codes, zeros up to whole
   units, are from[M]; M is a constant of the compiler. What lies at `next` is fetched meanwhile. */
ALWAYS_INLINE void multiply_rows(const uint8_t *w, const int64_t row_bytes, const int64_t count, const int64_t columns,
                                 const int8_t *const *from, const tile_block *tile, float *y, const int64_t y_stride,
                                 const int add, const char *next, const int dtype, const int M) {
    const int kind = kind_of(dtype), halves = kind == HALVED || kind == HALVED_LOWERED ? 2 : 1;
    const int points = M == 1 && has_signs_apart(dtype); /* whose sums are not raised */
    const int raised = raised_by(dtype) > 0 && !has_minimums(dtype) && !points;
    const __m128i less = _mm_cvtsi32_si128(raised_shift(raised_by(dtype)));
    const __m256i there = lanes_of(count);
    const int64_t unit_bytes = bytes_of_values(dtype, UNIT);
    const int8_t *in[FEW_READ];
    __m256 sums[FEW_READ];
    UNROLL for (int m = 0; m < M; m++) {
        in[m] = from[m];
        sums[m] = add ? _mm256_maskload_ps(y + m * y_stride, there) : _mm256_setzero_ps();
    }
    for (int64_t first = 0; first < columns; first += UNIT, w += unit_bytes, tile += BLOCKS_OF_UNIT) {
        const int64_t values = is_unit(dtype) ? UNIT : MIN(UNIT, columns - first), blocks = values / INPUT_BLOCK;
        uint8_t ends[ROWS_OF_VECTOR][UNIT_BYTES_LIMIT];
        const uint8_t *rows[ROWS_OF_VECTOR];
        grid_unit grids[ROWS_OF_VECTOR];
        panel_block opened[BLOCKS_OF_UNIT];
        __m256 dots[FEW_READ][2][ROWS_OF_VECTOR];
        rows_of(w, row_bytes, 0, count, values, rows, ends, dtype);
        for (const char *end = next + ROWS_OF_VECTOR * unit_bytes; next < end; next += 64) __builtin_prefetch(next, 0, 2);
        for (int r = 0; r < ROWS_OF_VECTOR; r++) open_grid_unit(rows[r], grids + r, dtype);
        for (int r = 0; r < ROWS_OF_VECTOR; r++) {
            __m256i own[MOST_TOKENS][2];
            if (dtype == PLLM_Q2_K)
                q2_k_dots(rows[r], in, own, M);
            else
                unit_dots(rows[r], grids + r, in, own, dtype, 0, points, M);
            UNROLL for (int m = 0; m < M; m++) {
                if (halves == 1) own[m][0] = _mm256_add_epi32(own[m][0], own[m][1]);
                UNROLL for (int half = 0; half < halves; half++) dots[m][half][r] = _mm256_castsi256_ps(own[m][half]);
            }
        }
        open_scales(rows, opened, 0, blocks, dtype);
        UNROLL for (int m = 0; m < M; m++) {
            in[m] += UNIT;
            UNROLL for (int half = 0; half < halves; half++) avx2_transpose(dots[m][half]);
            for (int block = 0; block < (int)blocks; block++) {
                const tile_block *own = tile + block;
                const panel_block *figures = opened + block;
                __m256 waits;
                UNROLL for (int half = 0; half < halves; half++) {
                    const __m256i more = _mm256_set1_epi32(own->raised[halves == 2 ? half : 2][m]);
                    __m256i whole = _mm256_castps_si256(dots[m][half][block]);
                    if (raised) whole = _mm256_add_epi32(whole, _mm256_sra_epi32(more, less));
                    add_product(&sums[m], &waits, whole, _mm256_loadu_ps(figures->scales[half]),
                                _mm256_broadcast_ss(&own->scales[m]), half, halves);
                }
                if (!has_minimums(dtype)) continue;
                UNROLL for (int half = 0; half < halves; half++) {
                    const float *added = halves == 2 ? own->half_sums[half] : own->sums;
                    const __m256 minimum = _mm256_loadu_ps(figures->minimums[half]);
                    sums[m] = _mm256_fnmadd_ps(minimum, _mm256_broadcast_ss(added + m), sums[m]);
                }
            }
        }
    }
    UNROLL for (int m = 0; m < M; m++) _mm256_maskstore_ps(y + m * y_stride, there, sums[m]);
}

typedef void (*rows_function)(const uint8_t *w, int64_t row_bytes, int64_t count, int64_t columns, const int8_t *const *from,
                              const tile_block *tile, float *y, int64_t y_stride, int add, const char *next);

#define MULTIPLY_ROWS(NAME, M)                                                                                     \
    NOINLINE void NAME##_rows_##M(const uint8_t *w, int64_t row_bytes, int64_t count, int64_t columns,             \
                                  const int8_t *const *from, const tile_block *tile, float *y, int64_t y_stride,   \
                                  int add, const char *next) {                                                     \
        multiply_rows(w, row_bytes, count, columns, from, tile, y, y_stride, add, next, PLLM_##NAME, M);           \
    }
#define MULTIPLY_ROWS_ALL(NAME, ...) MULTIPLY_ROWS(NAME, 1) MULTIPLY_ROWS(NAME, 2)
#define ROWS_NAMES(NAME, ...) [PLLM_##NAME] = {NAME##_rows_1, NAME##_rows_2},

PLLM_BLOCK_FORMATS(MULTIPLY_ROWS_ALL)

/* By tokens - 1. */
static const rows_function rows_table[PLLM_DTYPES][FEW_READ] = {PLLM_BLOCK_FORMATS(ROWS_NAMES)};

/* kernel_set.many of up to FEW_READ tokens, FEW_COLUMNS columns, and weights that are not grouped. */
static void read_few(const char *data, int dtype, int64_t row_bytes, int64_t rows, int64_t columns, const tile_block *tile,
                     int64_t tokens, float *y, int64_t y_stride, int add, int8_t *scratch, const char *after) {
    const int8_t *from[FEW_READ];
    for (int64_t m = 0; m < tokens; m++) {
        int8_t *to = scratch + m * (int64_t)FEW_COLUMNS;
        from[m] = to;
        for (int64_t k = 0; k < columns; k += INPUT_BLOCK, to += INPUT_BLOCK)
            UNROLL for (int i = 0; i < 8; i++) memcpy(to + 4 * i, &tile[k / INPUT_BLOCK].codes[i][m], 4);
        memset(to, 0, (size_t)(divided_up(columns, UNIT) * UNIT - columns));
    }
    for (int64_t n = 0; n < rows; n += ROWS_OF_VECTOR, data += ROWS_OF_VECTOR * row_bytes)
        rows_table[dtype][tokens - 1]((const uint8_t *)data, row_bytes, MIN(ROWS_OF_VECTOR, rows - n), columns, from, tile,
                                      y + n, y_stride, add,
                                      n + ROWS_OF_VECTOR < rows ? data + ROWS_OF_VECTOR * row_bytes : after);
}
