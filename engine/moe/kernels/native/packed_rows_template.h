/* Products with packed weights for one instruction set: the products for each format, number of rows and number
   of tokens. The including file has defined

   unit_input               a unit of an input row
   lanes, no_lanes(), added_up(v)   a vector of sums, one of zeros, and the sum of its lanes
   MOST_ROWS, MOST_TOKENS, GROUP    rows and tokens taken together at most; values of a group
   add_unit(w[R], x[M], groups, sums[R][M], dtype, R, M)    adds the products of units of all rows and tokens; dtype, R
                            and M are constants of the compiler
   ROWS_OF_1 .. ROWS_OF_4   rows that it takes together for so many tokens, 1, 2 or 4
   IS_OWN(dtype), OWN(...)  formats of which it multiplies all rows with all tokens by itself, and how
   SET(name)                the name of this set's copy of a function */

/* y[m * y_stride + r] (+)= W[r] · x[m] for R rows and M tokens, constants of the compiler. */
ALWAYS_INLINE void products(const uint8_t *w, const int64_t row_bytes, const int64_t columns, const void *const *x,
                            float *y, const int64_t y_stride, const int add, const int dtype, const int R,
                            const int M) {
    lanes sums[MOST_ROWS][MOST_TOKENS];
    const uint8_t *rows[MOST_ROWS];
    const unit_input *in[MOST_TOKENS];
    uint8_t blocks[MOST_ROWS][UNIT_BYTES_LIMIT];
    UNROLL for (int r = 0; r < R; r++) rows[r] = w + r * row_bytes;
    UNROLL for (int m = 0; m < M; m++) in[m] = x[m];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int m = 0; m < M; m++) sums[r][m] = no_lanes();
    for (int64_t left = columns; left > 0; left -= UNIT) {
        if (block_values(dtype) < UNIT && left < UNIT) { /* zeros follow, so that nothing is read past the row */
            UNROLL for (int r = 0; r < R; r++) {
                memset(blocks[r], 0, sizeof blocks[r]);
                memcpy(blocks[r], rows[r], (size_t)bytes_of_values(dtype, left));
                rows[r] = blocks[r];
            }
        }
        add_unit(rows, in, (int)MIN(GROUPS, divided_up(left, GROUP)), sums, dtype, R, M);
        UNROLL for (int r = 0; r < R; r++) rows[r] += bytes_of_values(dtype, UNIT);
        UNROLL for (int m = 0; m < M; m++) in[m]++;
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int m = 0; m < M; m++) {
            float *to = y + m * y_stride + r;
            const float sum = added_up(sums[r][m]);
            *to = add ? *to + sum : sum;
        }
}

typedef void (*products_function)(const uint8_t *w, int64_t row_bytes, int64_t columns, const void *const *x, float *y,
                                  int64_t y_stride, int add);

#define PRODUCTS(NAME, KIND, R, M)                                                                                 \
    NOINLINE void NAME##_##KIND##_##M(const uint8_t *w, int64_t row_bytes, int64_t columns,                        \
                                      const void *const *x, float *y, int64_t y_stride, int add) {                 \
        if (!IS_OWN(PLLM_##NAME)) products(w, row_bytes, columns, x, y, y_stride, add, PLLM_##NAME, R, M);         \
    }
#define ALL(NAME, ...)                                                                                             \
    PRODUCTS(NAME, several, ROWS_OF_1, 1) PRODUCTS(NAME, several, ROWS_OF_2, 2)                                    \
    PRODUCTS(NAME, several, ROWS_OF_3, 3) PRODUCTS(NAME, several, ROWS_OF_4, 4) PRODUCTS(NAME, one, 1, 1)
#define NAMES(NAME, ...)                                                                                           \
    [PLLM_##NAME] = {NAME##_one_1, NAME##_several_1, NAME##_several_2, NAME##_several_3, NAME##_several_4},

PLLM_BLOCK_FORMATS(ALL)

/* By dtype, and tokens; before them one row of one token. */
static const products_function table[PLLM_DTYPES][1 + MOST_TOKENS] = {PLLM_BLOCK_FORMATS(NAMES)};

static const int rows_together[1 + MOST_TOKENS] = {1, ROWS_OF_1, ROWS_OF_2, ROWS_OF_3, ROWS_OF_4};

/* Every part of the tokens passes four rows before the next four are read: they are in the cache then. Rows that are too
   few to be taken together are multiplied one by one; a result is the same however it is taken. */
void SET(few)(const void *weights, int dtype, int64_t stride, int64_t rows, int64_t columns, const void *const *x,
              int64_t tokens, float *y, int64_t y_stride, int add) {
    const uint8_t *w = weights;
    const int64_t row_bytes = bytes_of_values(dtype, stride), parts = divided_up(tokens, MOST_TOKENS);
    if (IS_OWN(dtype)) {
        OWN(w, dtype, row_bytes, rows, columns, x, tokens, y, y_stride, add);
        return;
    }
    for (int64_t group = 0; group < rows; group += MOST_ROWS) {
        const int64_t end = MIN(rows, group + MOST_ROWS);
        for (int64_t part = 0; part < parts; part++) {
            const int64_t first = tokens * part / parts, width = tokens * (part + 1) / parts - first;
            int64_t row = group;
            for (; row + rows_together[width] <= end; row += rows_together[width])
                table[dtype][width](w + row * row_bytes, row_bytes, columns, x + first, y + first * y_stride + row,
                                    y_stride, add);
            for (; row < end; row++)
                for (int64_t m = first; m < first + width; m++)
                    table[dtype][0](w + row * row_bytes, row_bytes, columns, x + m, y + m * y_stride + row, y_stride,
                                    add);
        }
    }
}
