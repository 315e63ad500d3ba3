/* Matrix kernels, written once and compiled for each instruction set. The including file says what a vector is:

   V, W                        a vector of W float32 lanes
   V_LOAD, V_STORE, V_SET1, V_ZERO, V_ADD, V_SUB, V_MUL, V_DIV, V_MIN, V_MAX
   V_FMA(a, b, c)              a * b + c
   V_ROUND(v), V_POW2(v)       to the nearest whole number; 2 to the power of a whole number
   V_SUM(v), V_SUM4(a, b, c, d, to)   the sum of the lanes; of four vectors, to to[0..3]
   V_LOAD_BF16(p), V_LOAD_F16(p)       W values, widened
   V_LOW(v), V_HIGH(v)         the lower and the upper bfloat16 of each lane, widened
   V_LOW_F16(v), V_HIGH_F16(v) the same of float16
   V_TRANSPOSE(rows)           W vectors, lanes as 32-bit words
   V_SELECT_POSITIVE(v, a, b)  a where v >= 0, else b
   FEW_TOKENS                  tokens whose accumulators fit beside four rows of weights
   TILE_TOKENS                 tokens whose accumulators fit beside PANEL_ROWS rows
   OPEN_ROW(dtype, from, to, count)    packed weights as float32, unless others multiply them
   OPEN_GROUPED(matrix, row, first, count, to)   grouped weights as float32, unless others multiply them
   OPENED                      what FP8 weights are opened as for panels, PLLM_F32 or PLLM_BF16
   SET(name)                   the name of this set's copy of a function

   V_LOAD_FP8, FACTOR_FP8, FACTOR_LIFT, STORE_OPENED   see fp8_rows_template.h

   and what is multiplied: words of 32 bits, each one float32 value or (bfloat16 activations) a pair of values:

   PER_WORD                    values of a word, 1 or 2
   FACTOR                      a vector of W words
   FACTOR_LOAD(p), FACTOR_SET1(p)      from activations: W words; the same word in every lane
   FACTOR_WEIGHT(p, dtype), FACTOR_WEIGHT_SOME(p, count, dtype)   W words of weights; of only `count` values, zeros after
   FACTOR_ADD(weight, token, sum)      sum + weight * token */

#define PANEL_VECTORS (PANEL_ROWS / W)
#define STEP (PER_WORD * W) /* values of a vector */
#define ACTIVATION_BYTES (4 / PER_WORD)
#define ROWS_TOGETHER 4
#define GROUP_ROWS 16        /* rows between which a chunk of the activations stays in the first-level cache */
#define CHUNK_BYTES 20480    /* of such a chunk, all tokens */
#define WHOLE_BYTES 65536    /* the same where the weights pass only once: better in one piece, from the second level */
#define PREFETCH_LINES 32

static inline int64_t SET(bytes_of)(int dtype) { return dtype == PLLM_F32 ? 4 : 2; }

/* Of what a table holds for each plain format, or each that the set reads. */
static inline int SET(place_of)(int dtype) { return dtype == PLLM_F32 ? 1 : dtype == PLLM_F16 ? 2 : 0; }


/* ---- Few tokens: each row of weights streams past all of them ------------------------------------------------ */

/* sum[R][M] += w[R rows][columns] * x[M tokens][columns], the lanes still apart. R and M are constants of the compiler.
   One accumulator for each pair, so that a result depends neither on R nor on M, nor on how the columns are cut into
   chunks. `ahead`: bytes from these weights to those wanted next; not used for one token, whose weights the processor
   fetches faster by itself. */
ALWAYS_INLINE void SET(accumulate)(const char *w, const int dtype, int64_t row_bytes, int64_t columns,
                                   const char *const *in, V sum[ROWS_TOGETHER][FEW_TOKENS], const int R, const int M,
                                   int64_t ahead) {
    const int64_t size = SET(bytes_of)(dtype), whole = columns / STEP * STEP;
    const int turns = MIN(ROWS_TOGETHER, 64 / (STEP * (int)size));
    for (int64_t k = 0; k < whole; k += STEP) {
        FACTOR token[FEW_TOKENS];
        UNROLL for (int m = 0; m < M; m++) token[m] = FACTOR_LOAD(in[m] + k * ACTIVATION_BYTES);
        if (R == ROWS_TOGETHER && M > 1) { /* the rows take turns, so that each line is fetched once */
            const char *from = w + k / STEP % turns * row_bytes + k * size + ahead;
            UNROLL for (int r = 0; r < R; r += turns) __builtin_prefetch(from + r * row_bytes, 0, 3);
        }
        UNROLL for (int r = 0; r < R; r++) {
            const char *from = w + r * row_bytes + k * size;
            FACTOR weight = FACTOR_WEIGHT(from, dtype);
            UNROLL for (int m = 0; m < M; m++) sum[r][m] = FACTOR_ADD(weight, token[m], sum[r][m]);
        }
    }
    if (whole < columns) {
        UNROLL for (int r = 0; r < R; r++) {
            FACTOR weight = FACTOR_WEIGHT_SOME(w + r * row_bytes + whole * size, columns - whole, dtype);
            UNROLL for (int m = 0; m < M; m++)
                sum[r][m] = FACTOR_ADD(weight, FACTOR_LOAD(in[m] + whole * ACTIVATION_BYTES), sum[r][m]);
        }
    }
}

/* A chunk of the columns: adds w * x[..][first..first + columns) to sums[R][M]. */
ALWAYS_INLINE void SET(dots)(const char *w, const int dtype, int64_t row_bytes, int64_t columns, const void *const *x,
                             int64_t first, V *sums, const int R, const int M, int fresh, int64_t ahead) {
    V sum[ROWS_TOGETHER][FEW_TOKENS];
    const char *in[FEW_TOKENS];
    UNROLL for (int m = 0; m < M; m++) in[m] = (const char *)x[m] + first * ACTIVATION_BYTES;
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int m = 0; m < M; m++) sum[r][m] = fresh ? V_ZERO : V_LOAD((float *)&sums[r * M + m]);
    SET(accumulate)(w, dtype, row_bytes, columns, in, sum, R, M, ahead);
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int m = 0; m < M; m++) V_STORE((float *)&sums[r * M + m], sum[r][m]);
}

/* All columns of `rows` rows, a multiple of ROWS_TOGETHER, straight to y. */
ALWAYS_INLINE void SET(products)(const char *w, const int dtype, int64_t row_bytes, int64_t rows, int64_t columns,
                                 const void *const *x, const int M, float *y, int64_t y_stride, int add) {
    const char *in[FEW_TOKENS];
    UNROLL for (int m = 0; m < M; m++) in[m] = x[m];
    for (int64_t row = 0; row < rows; row += ROWS_TOGETHER, w += ROWS_TOGETHER * row_bytes) {
        V sum[ROWS_TOGETHER][FEW_TOKENS];
        UNROLL for (int r = 0; r < ROWS_TOGETHER; r++) UNROLL for (int m = 0; m < M; m++) sum[r][m] = V_ZERO;
        SET(accumulate)(w, dtype, row_bytes, columns, in, sum, ROWS_TOGETHER, M, ROWS_TOGETHER * row_bytes);
        UNROLL for (int m = 0; m < M; m++) {
            float totals[ROWS_TOGETHER], *to = y + m * y_stride + row;
            V_SUM4(sum[0][m], sum[1][m], sum[2][m], sum[3][m], totals);
            UNROLL for (int r = 0; r < ROWS_TOGETHER; r++) to[r] = add ? to[r] + totals[r] : totals[r];
        }
    }
}

typedef void (*SET(dots_function))(const char *w, int64_t row_bytes, int64_t columns, const void *const *x,
                                   int64_t first, V *sums, int fresh, int64_t ahead);
typedef void (*SET(products_function))(const char *w, int64_t row_bytes, int64_t rows, int64_t columns,
                                       const void *const *x, float *y, int64_t y_stride, int add);

#define DOTS(NAME, DTYPE, R, M)                                                                                    \
    NOINLINE void SET(NAME##_##R##_##M)(const char *w, int64_t row_bytes, int64_t columns, const void *const *x,   \
                                        int64_t first, V *sums, int fresh, int64_t ahead) {                        \
        SET(dots)(w, DTYPE, row_bytes, columns, x, first, sums, R, M, fresh, ahead);                               \
    }
#define PRODUCTS(NAME, DTYPE, M)                                                                                   \
    NOINLINE void SET(NAME##_products_##M)(const char *w, int64_t row_bytes, int64_t rows, int64_t columns,        \
                                           const void *const *x, float *y, int64_t y_stride, int add) {            \
        SET(products)(w, DTYPE, row_bytes, rows, columns, x, M, y, y_stride, add);                                 \
    }
#define DOTS_BF16(M) DOTS(bf16, PLLM_BF16, 4, M) DOTS(bf16, PLLM_BF16, 1, M) PRODUCTS(bf16, PLLM_BF16, M)
#define NAMES_BF16(M) SET(bf16_4_##M), SET(bf16_1_##M)
#if PER_WORD == 1
#define FORMATS 3
#define DOTS_F32(M) DOTS(f32, PLLM_F32, 4, M) DOTS(f32, PLLM_F32, 1, M) PRODUCTS(f32, PLLM_F32, M)
#define DOTS_F16(M) DOTS(f16, PLLM_F16, 4, M) DOTS(f16, PLLM_F16, 1, M) PRODUCTS(f16, PLLM_F16, M)
#define DOTS_ALL(M) DOTS_BF16(M) DOTS_F32(M) DOTS_F16(M)
#define DOTS_NAMES(M) {NAMES_BF16(M), SET(f32_4_##M), SET(f32_1_##M), SET(f16_4_##M), SET(f16_1_##M)}
#define PRODUCTS_NAMES(M) {SET(bf16_products_##M), SET(f32_products_##M), SET(f16_products_##M)}
#else
#define FORMATS 1
#define DOTS_ALL(M) DOTS_BF16(M)
#define DOTS_NAMES(M) {NAMES_BF16(M)}
#define PRODUCTS_NAMES(M) {SET(bf16_products_##M)}
#endif

DOTS_ALL(1)
DOTS_ALL(2)
#if FEW_TOKENS >= 3
DOTS_ALL(3)
#endif
#if FEW_TOKENS >= 6
DOTS_ALL(4)
DOTS_ALL(5)
DOTS_ALL(6)
#endif

/* By tokens - 1; then four rows or one of each format. */
static const SET(dots_function) SET(dots_table)[FEW_TOKENS][2 * FORMATS] = {
    DOTS_NAMES(1), DOTS_NAMES(2),
#if FEW_TOKENS >= 3
    DOTS_NAMES(3),
#endif
#if FEW_TOKENS >= 6
    DOTS_NAMES(4), DOTS_NAMES(5), DOTS_NAMES(6),
#endif
};

/* By tokens - 1; then by format. */
static const SET(products_function) SET(products_table)[FEW_TOKENS][FORMATS] = {
    PRODUCTS_NAMES(1), PRODUCTS_NAMES(2),
#if FEW_TOKENS >= 3
    PRODUCTS_NAMES(3),
#endif
#if FEW_TOKENS >= 6
    PRODUCTS_NAMES(4), PRODUCTS_NAMES(5), PRODUCTS_NAMES(6),
#endif
};

/* The lanes of sums[rows][tokens] added up, to y. */
static void SET(finish)(const V *sums, int64_t rows, int64_t tokens, float *y, int64_t y_stride, int add) {
    for (int64_t m = 0; m < tokens; m++) {
        float *to = y + m * y_stride, totals[4];
        const V *of = sums + m;
        if (rows == ROWS_TOGETHER) {
            V_SUM4(of[0], of[tokens], of[2 * tokens], of[3 * tokens], totals);
        } else {
            V_SUM4(of[0], of[0], of[0], of[0], totals);
        }
        for (int64_t r = 0; r < rows; r++) to[r] = add ? to[r] + totals[r] : totals[r];
    }
}

static void SET(few)(const void *weights, int dtype, int64_t stride, int64_t rows, int64_t columns,
                     const void *const *x, int64_t tokens, float *y, int64_t y_stride, int add) {
    V sums[GROUP_ROWS * FEW_LIMIT];
    const char *w = weights;
    const int64_t size = SET(bytes_of)(dtype), row_bytes = stride * size, parts = divided_up(tokens, FEW_TOKENS);
    const int64_t bytes = parts == 1 ? WHOLE_BYTES : CHUNK_BYTES;
    const int64_t fitting = MAX(256, bytes / (tokens * ACTIVATION_BYTES) / 64 * 64);
    const int64_t chunk = fitting * 5 / 4 < columns ? fitting : columns;
    if (parts == 1 && chunk == columns && rows >= ROWS_TOGETHER) {
        const int64_t most = rows / ROWS_TOGETHER * ROWS_TOGETHER;
        SET(products_table)[tokens - 1][SET(place_of)(dtype)](w, row_bytes, most, columns, x, y, y_stride, add);
        w += most * row_bytes;
        y += most;
        rows -= most;
    }
    for (int64_t group = 0; group < rows; group += GROUP_ROWS) {
        const int64_t end = MIN(rows, group + GROUP_ROWS);
        for (int64_t k = 0; k < columns; k += chunk) {
            const int64_t count = MIN(chunk, columns - k);
            /* Weights are fetched one step of four rows ahead: after a group's last rows, those of its next chunk or,
               where there is none, the first of the next group. */
            const int64_t turn = k + count < columns ? count * size : GROUP_ROWS * row_bytes - k * size;
            for (int64_t row = group; row < end;) {
                const int64_t together = end - row < ROWS_TOGETHER ? 1 : ROWS_TOGETHER;
                const int64_t ahead = row + together < end ? together * row_bytes : turn - (row - group) * row_bytes;
                const int kind = (together == 1) + 2 * SET(place_of)(dtype);
                for (int64_t part = 0; part < parts; part++) {
                    const int64_t m = tokens * part / parts, width = tokens * (part + 1) / parts - m;
                    V *sum = sums + (row - group) * tokens + m * together;
                    SET(dots_table)[width - 1][kind](w + row * row_bytes + k * size, row_bytes, count, x + m, k, sum,
                                                     k == 0, ahead);
                    if (k + count == columns)
                        SET(finish)(sum, together, width, y + m * y_stride + row, y_stride, add);
                }
                row += together;
            }
        }
    }
}

/* ---- FP8 weights ---------------------------------------------------------------------------------------------- */

#include "fp8_rows_template.h"

/* ---- Many tokens: panels of weights, transposed once, times tiles of tokens ------------------------------------ */

/* panel[k / PER_WORD][PANEL_ROWS] of words from `rows` <= PANEL_ROWS rows and `columns` <= PANEL_COLUMNS columns. */
static void SET(pack)(float *panel, const char *w, int dtype, int64_t row_bytes, int64_t rows, int64_t columns) {
    const int64_t size = SET(bytes_of)(dtype), step = W * 4 / size; /* values of a vector's bytes */
    for (int64_t first = 0; first < PANEL_ROWS; first += W) {
        for (int64_t k = 0; k < columns; k += step) {
            V lanes[W];
            const int64_t count = MIN(step, columns - k);
            UNROLL for (int r = 0; r < W; r++) {
                const char *from = w + (first + r) * row_bytes + k * size;
                if (first + r >= rows) {
                    lanes[r] = V_ZERO;
                } else if (count == step) {
                    lanes[r] = V_LOAD((const float *)(const void *)from);
                } else {
                    float buffer[W] = {0};
                    memcpy(buffer, from, (size_t)(count * size));
                    lanes[r] = V_LOAD(buffer);
                }
            }
            V_TRANSPOSE(lanes);
            float *to = panel + k / PER_WORD * PANEL_ROWS + first;
            UNROLL for (int i = 0; i < W; i++) {
                if (PER_WORD == 1 && size == 2) {
                    const int half = dtype == PLLM_F16;
                    V_STORE(to + 2 * i * PANEL_ROWS, half ? V_LOW_F16(lanes[i]) : V_LOW(lanes[i]));
                    V_STORE(to + (2 * i + 1) * PANEL_ROWS, half ? V_HIGH_F16(lanes[i]) : V_HIGH(lanes[i]));
                } else {
                    V_STORE(to + i * PANEL_ROWS, lanes[i]);
                }
            }
        }
    }
}

/* y[m][0..PANEL_ROWS) (+)= panel * tile for M tokens, a constant of the compiler. Meanwhile fetches the weights that are
   packed next: PREFETCH_LINES lines from `fetch`, then from fetch + fetch_stride, and so on. */
ALWAYS_INLINE void SET(outer)(const float *panel, const float *tile, int64_t words, const int M, float *y,
                              int64_t y_stride, int add, const char *fetch, int64_t fetch_stride) {
    V sum[TILE_TOKENS][PANEL_VECTORS];
    float *to[TILE_TOKENS];
    UNROLL for (int m = 0; m < M; m++) {
        to[m] = y + m * y_stride;
        UNROLL for (int v = 0; v < PANEL_VECTORS; v++) sum[m][v] = add ? V_LOAD(to[m] + v * W) : V_ZERO;
    }
    for (int64_t k = 0; k < words; fetch += fetch_stride) {
        const char *line = fetch;
        for (const int64_t end = MIN(words, k + PREFETCH_LINES); k < end; k++, line += 64) {
            __builtin_prefetch(line, 0, 2);
            if (PANEL_VECTORS <= 2) {
                FACTOR weight[PANEL_VECTORS];
                UNROLL for (int v = 0; v < PANEL_VECTORS; v++) weight[v] = FACTOR_LOAD(panel + v * W);
                UNROLL for (int m = 0; m < M; m++) {
                    FACTOR token = FACTOR_SET1(tile + m);
                    UNROLL for (int v = 0; v < PANEL_VECTORS; v++) sum[m][v] = FACTOR_ADD(weight[v], token, sum[m][v]);
                }
            } else {
                FACTOR token[TILE_TOKENS];
                UNROLL for (int m = 0; m < M; m++) token[m] = FACTOR_SET1(tile + m);
                UNROLL for (int v = 0; v < PANEL_VECTORS; v++) {
                    FACTOR weight = FACTOR_LOAD(panel + v * W);
                    UNROLL for (int m = 0; m < M; m++) sum[m][v] = FACTOR_ADD(weight, token[m], sum[m][v]);
                }
            }
            panel += PANEL_ROWS;
            tile += TILE_TOKENS;
        }
    }
    UNROLL for (int m = 0; m < M; m++) UNROLL for (int v = 0; v < PANEL_VECTORS; v++) V_STORE(to[m] + v * W, sum[m][v]);
}

typedef void (*SET(outer_function))(const float *panel, const float *tile, int64_t words, float *y, int64_t y_stride,
                                    int add, const char *fetch, int64_t fetch_stride);

#define OUTER(M)                                                                                                   \
    NOINLINE void SET(outer_##M)(const float *panel, const float *tile, int64_t words, float *y, int64_t y_stride, \
                                 int add, const char *fetch, int64_t fetch_stride) {                               \
        SET(outer)(panel, tile, words, M, y, y_stride, add, fetch, fetch_stride);                                  \
    }

OUTER(1)
OUTER(2)
#if TILE_TOKENS >= 3
OUTER(3)
#endif
#if TILE_TOKENS >= 12
OUTER(4)
OUTER(5)
OUTER(6)
OUTER(7)
OUTER(8)
OUTER(9)
OUTER(10)
OUTER(11)
OUTER(12)
#endif

static const SET(outer_function) SET(outer_table)[TILE_TOKENS] = {
    SET(outer_1), SET(outer_2),
#if TILE_TOKENS >= 3
    SET(outer_3),
#endif
#if TILE_TOKENS >= 12
    SET(outer_4), SET(outer_5), SET(outer_6),  SET(outer_7),  SET(outer_8),
    SET(outer_9), SET(outer_10), SET(outer_11), SET(outer_12),
#endif
};

/* A panel of fewer than PANEL_ROWS rows: through `part`, so that nothing is written beside y. */
static void SET(narrow)(const float *panel, const float *tile, int64_t words, int64_t tokens, int64_t rows, float *part,
                        float *y, int64_t y_stride, int add) {
    SET(outer_table)[tokens - 1](panel, tile, words, part, PANEL_ROWS, 0, (const char *)tile, 0);
    for (int64_t m = 0; m < tokens; m++)
        for (int64_t r = 0; r < rows; r++) {
            const float value = part[m * PANEL_ROWS + r];
            y[m * y_stride + r] = add ? y[m * y_stride + r] + value : value;
        }
}

static void SET(many)(const void *weights, int dtype, int64_t stride, int64_t rows, int64_t columns, const void *tiles,
                      int64_t tokens, float *y, int64_t y_stride, int add, void *scratch, const void *after) {
    const pllm_matrix *scaled = is_grouped(dtype) ? weights : NULL;
    const char *codes = scaled ? scaled->data : weights;
    const int64_t row_bytes = bytes_of_values(dtype, stride), tile_words = TILE_TOKENS * padded(columns) / PER_WORD;
    float *panel = scratch, *part = panel + PANEL_WORDS;
    for (int64_t n = 0; n < rows; n += PANEL_ROWS) {
        const int64_t count = MIN(PANEL_ROWS, rows - n);
        for (int64_t k = 0; k < columns; k += PANEL_COLUMNS) {
            const int64_t depth = MIN(PANEL_COLUMNS, columns - k), words = divided_up(depth, PER_WORD);
            const int more = add || k > 0;
            const char *from = codes + n * row_bytes + bytes_of_values(dtype, k);
            const char *next = panel_after(from, dtype, row_bytes, n, rows, k, depth, columns, after);
            char *opened = (char *)(part + TILE_LIMIT * PANEL_ROWS);
            if (dtype == PLLM_BLOCK_FP8) {
                const int64_t size = SET(bytes_of)(OPENED);
                for (int64_t r = 0; r < count; r++)
                    SET(open_fp8)(scaled, n + r, k, depth, opened + r * PANEL_COLUMNS * size);
                SET(pack)(panel, opened, OPENED, PANEL_COLUMNS * size, count, depth);
            } else
#ifdef OPEN_ROW
            if (is_grouped(dtype)) {
                for (int64_t r = 0; r < count; r++)
                    OPEN_GROUPED(scaled, n + r, k, depth, (float *)(void *)opened + r * PANEL_COLUMNS);
                SET(pack)(panel, opened, PLLM_F32, PANEL_COLUMNS * 4, count, depth);
            } else if (is_packed(dtype)) {
                for (int64_t r = 0; r < count; r++)
                    OPEN_ROW(dtype, from + r * row_bytes, (float *)(void *)opened + r * PANEL_COLUMNS, depth);
                SET(pack)(panel, opened, PLLM_F32, PANEL_COLUMNS * 4, count, depth);
            } else
#endif
                SET(pack)(panel, from, dtype, row_bytes, count, depth);
            int64_t fetched = 0; /* rows of the next panel */
            for (int64_t m = 0; m < tokens; m += TILE_TOKENS) {
                const int64_t width = MIN(TILE_TOKENS, tokens - m);
                const float *tile = (const float *)tiles + m / TILE_TOKENS * tile_words + k / PER_WORD * TILE_TOKENS;
                float *to = y + m * y_stride + n;
                if (count < PANEL_ROWS) {
                    SET(narrow)(panel, tile, words, width, count, part, to, y_stride, more);
                    continue;
                }
                const int fetches = fetched < PANEL_ROWS;
                SET(outer_table)[width - 1](panel, tile, words, to, y_stride, more,
                                            fetches ? next + fetched * row_bytes : (const char *)tile,
                                            fetches ? row_bytes : 0);
                fetched += words / PREFETCH_LINES;
            }
        }
    }
}
