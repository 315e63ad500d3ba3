/* Products with FP8 weights (E4M3) that have a scale for each block of FP8_SIDE rows and columns, for each row, or one
   for all. They take the input of
   plain weights, and are widened to what that is multiplied with, which loses nothing; a block's sum is then scaled.
   Included by rows_template.h, whose names are used. Besides them

   V_LOAD_FP8(p, to)    2 W values to to[0] and to[1], as FP8_LIFT-ths
   FACTOR_FP8(p, to)    the same with W words each, as FACTOR_LIFT-ths
   FACTOR_LIFT          1, or FP8_LIFT
   STORE_OPENED(to, k, count, v)   `count` values of v as OPENED, to place k */

#define ALONE_BYTES 16384 /* of one token's input up to which its rows of weights are taken one by one */

/* sums[R][M] += the scaled sums of `columns` columns from `first` on, a multiple of FP8_SIDE, of R rows from `row` on.
   R and M are constants of the compiler. `ahead`: bytes from these weights to those wanted next. */
ALWAYS_INLINE void SET(fp8_dots)(const pllm_matrix *w, int64_t row, int64_t first, int64_t columns,
                                 const void *const *x, V *sums, const int R, const int M, int fresh, int64_t ahead) {
    const uint8_t *codes = (const uint8_t *)w->data + row * w->columns + first;
    const char *in[FEW_TOKENS];
    UNROLL for (int m = 0; m < M; m++) in[m] = (const char *)x[m] + first * ACTIVATION_BYTES;
    const char *scales[ROWS_TOGETHER];
    float scale[ROWS_TOGETHER] = {0};
    UNROLL for (int r = 0; r < R; r++) scales[r] = fp8_scales(w, row + r);
    if (fresh) UNROLL for (int i = 0; i < R * M; i++) V_STORE((float *)&sums[i], V_ZERO);
    for (int64_t k = 0; k < columns; k += FP8_SIDE) {
        const int64_t end = MIN(columns, k + FP8_SIDE), whole = k + (end - k) / (2 * STEP) * (2 * STEP);
        V part[ROWS_TOGETHER][FEW_TOKENS];
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int m = 0; m < M; m++) part[r][m] = V_ZERO;
        if (M > 1) UNROLL for (int r = 0; r < R; r++) {
            __builtin_prefetch(codes + r * w->columns + k + ahead, 0, 3);
            __builtin_prefetch(codes + r * w->columns + k + ahead + 64, 0, 3);
        }
        for (int64_t i = k; i < whole; i += 2 * STEP) {
            UNROLL for (int r = 0; r < R; r++) {
                FACTOR weight[2];
                FACTOR_FP8(codes + r * w->columns + i, weight);
                UNROLL for (int half = 0; half < 2; half++)
                    UNROLL for (int m = 0; m < M; m++)
                        part[r][m] = FACTOR_ADD(weight[half], FACTOR_LOAD(in[m] + (i + half * STEP) * ACTIVATION_BYTES),
                                                part[r][m]);
            }
        }
        if (whole < end) UNROLL for (int r = 0; r < R; r++) {
            uint8_t rest[2 * STEP] = {0};
            FACTOR weight[2];
            memcpy(rest, codes + r * w->columns + whole, (size_t)(end - whole));
            FACTOR_FP8(rest, weight);
            for (int half = 0; half < (end - whole > STEP ? 2 : 1); half++) /* the input ends there, too */
                UNROLL for (int m = 0; m < M; m++)
                    part[r][m] = FACTOR_ADD(weight[half], FACTOR_LOAD(in[m] + (whole + half * STEP) * ACTIVATION_BYTES),
                                            part[r][m]);
        }
        UNROLL for (int r = 0; r < R; r++) {
            /* Rows that are taken together have one scale, but where a block ends between them. */
            scale[r] = r > 0 && scales[r] == scales[r - 1] ? scale[r - 1]
                                                           : fp8_scale(w, scales[r], (first + k) / FP8_SIDE) * FACTOR_LIFT;
            UNROLL for (int m = 0; m < M; m++) {
                float *sum = (float *)&sums[r * M + m];
                V_STORE(sum, V_FMA(part[r][m], V_SET1(scale[r]), V_LOAD(sum)));
            }
        }
    }
}

typedef void (*SET(fp8_function))(const pllm_matrix *w, int64_t row, int64_t first, int64_t columns,
                                  const void *const *x, V *sums, int fresh, int64_t ahead);

#define FP8_DOTS(R, M)                                                                                             \
    NOINLINE void SET(fp8_##R##_##M)(const pllm_matrix *w, int64_t row, int64_t first, int64_t columns,            \
                                     const void *const *x, V *sums, int fresh, int64_t ahead) {                    \
        SET(fp8_dots)(w, row, first, columns, x, sums, R, M, fresh, ahead);                                        \
    }
#define FP8_BOTH(M) FP8_DOTS(4, M) FP8_DOTS(1, M)
#define FP8_NAMES(M) {SET(fp8_4_##M), SET(fp8_1_##M)}

FP8_BOTH(1)
FP8_BOTH(2)
#if FEW_TOKENS >= 3
FP8_BOTH(3)
#endif
#if FEW_TOKENS >= 6
FP8_BOTH(4)
FP8_BOTH(5)
FP8_BOTH(6)
#endif

/* By tokens - 1; then four rows or one. */
static const SET(fp8_function) SET(fp8_table)[FEW_TOKENS][2] = {
    FP8_NAMES(1), FP8_NAMES(2),
#if FEW_TOKENS >= 3
    FP8_NAMES(3),
#endif
#if FEW_TOKENS >= 6
    FP8_NAMES(4), FP8_NAMES(5), FP8_NAMES(6),
#endif
};

static void SET(few_fp8)(const void *weights, int dtype, int64_t stride, int64_t rows, int64_t columns,
                         const void *const *x, int64_t tokens, float *y, int64_t y_stride, int add) {
    V sums[GROUP_ROWS * FEW_LIMIT];
    const pllm_matrix *w = weights;
    const int64_t parts = divided_up(tokens, FEW_TOKENS), bytes = parts == 1 ? WHOLE_BYTES : CHUNK_BYTES;
    const int64_t fitting = MAX(2 * FP8_SIDE, bytes / (tokens * ACTIVATION_BYTES) / FP8_SIDE * FP8_SIDE);
    const int64_t chunk = fitting * 5 / 4 < columns ? fitting : columns;
    /* The processor fetches one stream of weights best; but long inputs are read again from the second level. */
    const int alone = tokens == 1 && columns * ACTIVATION_BYTES <= ALONE_BYTES;
    (void)dtype;
    (void)stride;
    for (int64_t group = 0; group < rows; group += GROUP_ROWS) {
        const int64_t end = MIN(rows, group + GROUP_ROWS);
        for (int64_t k = 0; k < columns; k += chunk) {
            const int64_t count = MIN(chunk, columns - k);
            const int64_t turn = k + count < columns ? count : GROUP_ROWS * columns - k;
            for (int64_t row = group; row < end;) {
                const int64_t together = alone || end - row < ROWS_TOGETHER ? 1 : ROWS_TOGETHER;
                const int64_t ahead = row + together < end ? together * columns : turn - (row - group) * columns;
                for (int64_t part = 0; part < parts; part++) {
                    const int64_t m = tokens * part / parts, width = tokens * (part + 1) / parts - m;
                    V *sum = sums + (row - group) * tokens + m * together;
                    SET(fp8_table)[width - 1][together == 1](w, row, k, count, x + m, sum, k == 0, ahead);
                    if (k + count == columns)
                        SET(finish)(sum, together, width, y + m * y_stride + row, y_stride, add);
                }
                row += together;
            }
        }
    }
}

/* `count` values of a row from column `first` on, a multiple of FP8_SIDE, for a panel. */
static void SET(open_fp8)(const pllm_matrix *w, int64_t row, int64_t first, int64_t count, void *to) {
    const uint8_t *codes = (const uint8_t *)w->data + row * w->columns + first;
    const char *scales = fp8_scales(w, row);
    V scale = V_ZERO;
    for (int64_t k = 0; k < count; k += 2 * W) {
        uint8_t rest[2 * W] = {0};
        const int64_t there = count - k;
        V values[2];
        if (k % FP8_SIDE == 0) scale = V_SET1(fp8_scale(w, scales, (first + k) / FP8_SIDE) * FP8_LIFT);
        if (there < 2 * W) memcpy(rest, codes + k, (size_t)there);
        V_LOAD_FP8(there < 2 * W ? rest : codes + k, values);
        STORE_OPENED(to, k, MIN(W, there), V_MUL(values[0], scale));
        if (there > W) STORE_OPENED(to, k + W, MIN(W, there - W), V_MUL(values[1], scale));
    }
}
