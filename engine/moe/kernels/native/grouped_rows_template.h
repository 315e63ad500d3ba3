/* Products of a few tokens with grouped weights. The including file has defined

   lanes, no_lanes(), added_up(v)   a vector of sums, one of zeros, and the sum of its lanes
   unit_input              a unit of an input row
   add_unit(codes, scales, biases, reader, x[M], sums[M], dtype, M)   adds the products of a unit; dtype and M are
                           constants of the compiler
   MORE_FORMATS(ROW)       rows of formats besides PLLM_GROUPED_FORMATS
   MOST_TOKENS             tokens taken together at most, 4 or 8
   SET(name)               the name of this set's copy of a function */

#define GROUP_ROWS 16 /* of a part of the tokens: their rows and its input stay in the first-level cache */
#define AHEAD 1024    /* bytes that codes are fetched before they are wanted */
#define PART_BYTES 24576 /* of the input of a part of more than four tokens */

/* y[m * y_stride] (+)= one row of the weights · x[m] for M tokens. Nothing is read past the row. */
ALWAYS_INLINE void products(const uint8_t *codes, const uint8_t *scales, const uint8_t *biases,
                            const group_reader *reader, const int64_t columns, const void *const *x, float *y,
                            const int64_t y_stride, const int add, const int dtype, const int M) {
    const int64_t unit_bytes = bytes_of_values(dtype, UNIT), scale_bytes = reader->groups * reader->width;
    lanes sums[MOST_TOKENS];
    const unit_input *in[MOST_TOKENS];
    UNROLL for (int m = 0; m < M; m++) {
        sums[m] = no_lanes();
        in[m] = x[m];
    }
    int64_t left = columns;
    for (; left >= UNIT; left -= UNIT) {
        /* One token's weights the processor fetches faster by itself. */
        if (M > 1) for (int64_t line = 0; line < unit_bytes; line += 64) __builtin_prefetch(codes + AHEAD + line, 0, 3);
        add_unit(codes, scales, biases, reader, in, sums, dtype, M);
        codes += unit_bytes;
        scales += scale_bytes;
        if (dtype != PLLM_GROUPED_NVFP4) biases += scale_bytes;
        UNROLL for (int m = 0; m < M; m++) in[m]++;
    }
    if (left) {
        uint8_t rest[UNIT] = {0}, rest_scales[4 * UNIT_GROUPS] = {0}, rest_biases[4 * UNIT_GROUPS] = {0};
        const size_t bytes = (size_t)(left * reader->groups / UNIT * reader->width);
        memcpy(rest, codes, (size_t)bytes_of_values(dtype, left));
        memcpy(rest_scales, scales, bytes);
        if (reader->kind) memcpy(rest_biases, biases, bytes);
        add_unit(rest, rest_scales, dtype == PLLM_GROUPED_NVFP4 ? biases : rest_biases, reader, in, sums, dtype, M);
    }
    UNROLL for (int m = 0; m < M; m++) {
        float *to = y + m * y_stride;
        const float sum = added_up(sums[m]);
        *to = add ? *to + sum : sum;
    }
}

typedef void (*products_function)(const uint8_t *codes, const uint8_t *scales, const uint8_t *biases,
                                  const group_reader *reader, int64_t columns, const void *const *x, float *y,
                                  int64_t y_stride, int add);

#define PRODUCTS(NAME, M)                                                                                          \
    NOINLINE void NAME##_##M(const uint8_t *codes, const uint8_t *scales, const uint8_t *biases,                   \
                             const group_reader *reader, int64_t columns, const void *const *x, float *y,          \
                             int64_t y_stride, int add) {                                                          \
        products(codes, scales, biases, reader, columns, x, y, y_stride, add, PLLM_##NAME, M);                     \
    }
#define UP_TO_4(NAME) PRODUCTS(NAME, 1) PRODUCTS(NAME, 2) PRODUCTS(NAME, 3) PRODUCTS(NAME, 4)
#if MOST_TOKENS == 8
#define ALL(NAME, ...)                                                                                             \
    UP_TO_4(NAME) PRODUCTS(NAME, 5) PRODUCTS(NAME, 6) PRODUCTS(NAME, 7) PRODUCTS(NAME, 8)
#define NAMES(NAME, ...)                                                                                           \
    [PLLM_##NAME] = {NAME##_1, NAME##_2, NAME##_3, NAME##_4, NAME##_5, NAME##_6, NAME##_7, NAME##_8},
#else
#define ALL(NAME, ...) UP_TO_4(NAME)
#define NAMES(NAME, ...) [PLLM_##NAME] = {NAME##_1, NAME##_2, NAME##_3, NAME##_4},
#endif

PLLM_GROUPED_FORMATS(ALL)
MORE_FORMATS(ALL)

/* By dtype, and tokens - 1. */
static const products_function table[PLLM_DTYPES][MOST_TOKENS] = {PLLM_GROUPED_FORMATS(NAMES) MORE_FORMATS(NAMES)};

void SET(few)(const void *w, int dtype, int64_t stride, int64_t rows, int64_t columns, const void *const *x,
              int64_t tokens, float *y, int64_t y_stride, int add) {
    const pllm_matrix *matrix = w;
    const group_reader reader = reader_of(matrix);
    const uint8_t *codes = matrix->data, *scales = matrix->scales, *biases = biases_of(matrix);
    const int64_t bias_bytes = dtype == PLLM_GROUPED_NVFP4 ? 0 : reader.scale_bytes;
    /* About half of the input's bytes are read: its codes are there in two orders. */
    const int64_t row_bytes = divided_up(columns, UNIT) * (int64_t)sizeof(unit_input) / 2;
    const int64_t parts = divided_up(tokens, MAX(4, MIN(MOST_TOKENS, PART_BYTES / row_bytes)));
    (void)stride;
    for (int64_t group = 0; group < rows; group += GROUP_ROWS) {
        const int64_t end = MIN(rows, group + GROUP_ROWS);
        for (int64_t part = 0; part < parts; part++) {
            const int64_t first = tokens * part / parts, width = tokens * (part + 1) / parts - first;
            for (int64_t row = group; row < end; row++)
                table[dtype][width - 1](
                    codes + row * reader.code_bytes, scales + row * reader.scale_bytes,
                    biases + row * bias_bytes, &reader, columns, x + first, y + first * y_stride + row,
                    y_stride, add);
        }
    }
}
