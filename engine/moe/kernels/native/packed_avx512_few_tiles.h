/* Products of few tiles with packed weights for AVX-512 with VNNI: what the panels of packed_avx512_many_template.h give, to
   the bit, without them. A panel that hardly any tile passes is not worth storing: codes are multiplied as soon as they
   are exchanged, sixteen rows to a vector, four neighbouring codes to a lane. Include in that file, after its products. */
#define FEW_TILES 2 /* that are faster so than with panels */

/* Blocks whose codes lie in the same bytes. */
ALWAYS_INLINE int blocks_together(const int dtype) {
    return dtype == PLLM_Q6_K ? 4 : dtype == PLLM_Q4_K || dtype == PLLM_Q5_K ? 2 : 1;
}

ALWAYS_INLINE __m512i turned(__m512i words, const int64_t left) {
    return _mm512_rolv_epi32(words, _mm512_set1_epi32((int)left & 31));
}

/* The codes of half of each of blocks_together blocks from `block` on, as they are multiplied; `rows` are readable. */
ALWAYS_INLINE void half_codes(const sixteen_rows rows, const int64_t block, const int half, __m512i to[4][4],
                              const int dtype) {
    __m512i words[4], more[4], high[4];
    if (has_few_bits(dtype)) {
        sixteen_words(rows, 32 * block + 16 * half, to[0]);
        return;
    }
    const int64_t at = codes_at(dtype) + block * codes_apart(dtype); /* of K formats a block's nibbles lie beside another's */
    switch (dtype) {
    case PLLM_Q4_K:
    case PLLM_Q5_K:
        sixteen_words(rows, at + 16 * half, words);
        if (dtype == PLLM_Q5_K) sixteen_words(rows, Q5_K_HIGH + 16 * half, high);
        UNROLL for (int b = 0; b < 2; b++)
            UNROLL for (int i = 0; i < 4; i++) {
                const __m512i low = _mm512_srli_epi32(words[i], (unsigned)(4 * b));
                to[b][i] = dtype == PLLM_Q4_K ? masked(low, 15)
                                              : masked(joined(low, turned(high[i], 4 - block - b), 15), 31);
            }
        return;
    case PLLM_Q6_K:
        sixteen_words(rows, at + 16 * half, words);
        sixteen_words(rows, at + 32 + 16 * half, more);
        sixteen_words(rows, Q6_K_HIGH + 8 * block + 16 * half, high);
        UNROLL for (int b = 0; b < 4; b++)
            UNROLL for (int i = 0; i < 4; i++) {
                const __m512i low = _mm512_srli_epi32(b % 2 ? more[i] : words[i], (unsigned)(b / 2 * 4));
                to[b][i] = masked(joined(low, turned(high[i], 4 - 2 * b), 15), 63);
            }
        return;
    case PLLM_Q8_0:
        sixteen_words(rows, at + 16 * half, words);
        UNROLL for (int i = 0; i < 4; i++) to[0][i] = _mm512_xor_si512(words[i], _mm512_set1_epi8((char)0x80));
        return;
    default:
        sixteen_words(rows, at, words);
        if (has_fifth_bits(dtype)) sixteen_words(rows, at - 4, high);
        UNROLL for (int i = 0; i < 4; i++) {
            to[0][i] = masked(_mm512_srli_epi32(words[i], (unsigned)(4 * half)), 15);
            if (table_of(dtype) != NO_TABLE) to[0][i] = looked_up(to[0][i], dtype);
            if (!has_fifth_bits(dtype)) continue;
            /* Four bits, each to the fifth of a byte. */
            const __m512i bits = bits_of(high[0], 16 * half + 4 * i, 15);
            const __m512i apart = _mm512_mullo_epi32(bits, _mm512_set1_epi32(0x02040810));
            to[0][i] = _mm512_or_si512(to[0][i], masked(apart, 16));
        }
    }
}

/* y[m][0..count) (+)= the rows from `w` on times the tokens of a tile, of which there may be fewer than M, a constant of the
   compiler; what lies at `next` is fetched meanwhile. */
ALWAYS_INLINE void multiply_rows(const uint8_t *w, const int64_t row_bytes, const int64_t count, const int64_t columns,
                                 const tile_block *tile, const int64_t tokens, float *y, const int64_t y_stride,
                                 const int add, const char *next, const int dtype, const int M) {
    const int kind = kind_of(dtype), halves = kind == HALVED || kind == HALVED_LOWERED ? 2 : 1;
    const int together = blocks_together(dtype);
    const int64_t apart = bytes_of_values(dtype, UNIT); /* sixteen rows have as many bytes for each half of a block */
    const __m128i less = _mm_cvtsi32_si128(raised_shift(raised_by(dtype)));
    const int vectors = count > 16 ? PANEL_VECTORS : 1;
    __mmask16 there[PANEL_VECTORS];
    __m512 sums[PANEL_VECTORS][BYTE_TILE_TOKENS] = {0};
    for (int v = 0; v < vectors; v++) {
        there[v] = (__mmask16)((1U << MIN(16, count - 16 * v)) - 1);
        for (int64_t m = 0; m < tokens && add; m++) sums[v][m] = _mm512_maskz_loadu_ps(there[v], y + m * y_stride + 16 * v);
    }
    for (int64_t first = 0; first < columns; first += UNIT, tile += BLOCKS_OF_UNIT) {
        const int64_t values = MIN(UNIT, columns - first), blocks = values / INPUT_BLOCK;
        for (int v = 0; v < vectors; v++) {
            uint8_t copies[16][UNIT_BYTES_LIMIT], room[16][UNIT];
            panel_block opened[BLOCKS_OF_UNIT];
            const sixteen_rows rows = rows_of(w + bytes_of_values(dtype, first), row_bytes, v, count, values, copies, dtype);
            open_scales(rows, opened, 0, blocks, dtype);
            sixteen_rows from = rows;
            if (has_few_bits(dtype)) {
                for (int r = 0; r < 16; r++) codes_table[dtype](row_of(rows, r), room[r]);
                from = (sixteen_rows){room[0], UNIT};
            }
            __m512 own[BYTE_TILE_TOKENS];
            UNROLL for (int m = 0; m < M; m++) own[m] = sums[v][m];
            for (int64_t block = 0; block < blocks; block += together) {
                const tile_block *in = tile + block;
                __m512i whole[4][2][BYTE_TILE_TOKENS];
                UNROLL for (int half = 0; half < 2; half++) {
                    __m512i codes[4][4];
                    half_codes(from, block, half, codes, dtype);
                    UNROLL for (int b = 0; b < together; b++, next += apart) {
                        for (int64_t at = 0; at < apart; at += 64) __builtin_prefetch(next + at, 0, 2);
                        UNROLL for (int m = 0; m < M; m++) {
                            __m512i sum = half < halves ? start_of(in + b, half, m, less, kind) : whole[b][0][m];
                            UNROLL for (int i = 0; i < 4; i++)
                                sum = _mm512_dpbusd_epi32(sum, codes[b][i], _mm512_set1_epi32(in[b].codes[4 * half + i][m]));
                            whole[b][half < halves ? half : 0][m] = sum;
                        }
                    }
                }
                UNROLL for (int b = 0; b < together; b++) {
                    const panel_block *figures = opened + block + b;
                    UNROLL for (int m = 0; m < M; m++) {
                        __m512 waits;
                        UNROLL for (int half = 0; half < halves; half++)
                            add_product(&own[m], &waits, whole[b][half][m], _mm512_loadu_ps(figures->scales[half]),
                                        _mm512_set1_ps(in[b].scales[m]), half, halves);
                        if (kind == RAISED || kind == HALVED) continue;
                        UNROLL for (int half = 0; half < halves; half++) {
                            const float added = halves == 2 ? in[b].half_sums[half][m] : in[b].sums[m];
                            own[m] = _mm512_fnmadd_ps(_mm512_loadu_ps(figures->minimums[half]), _mm512_set1_ps(added), own[m]);
                        }
                    }
                }
            }
            UNROLL for (int m = 0; m < M; m++) sums[v][m] = own[m];
        }
    }
    for (int v = 0; v < vectors; v++)
        for (int64_t m = 0; m < tokens; m++) _mm512_mask_storeu_ps(y + m * y_stride + 16 * v, there[v], sums[v][m]);
}

typedef void (*rows_function)(const uint8_t *w, int64_t row_bytes, int64_t count, int64_t columns, const tile_block *tile,
                              int64_t tokens, float *y, int64_t y_stride, int add, const char *next);

#define MULTIPLY_ROWS(NAME, M)                                                                                     \
    NOINLINE void NAME##_rows_##M(const uint8_t *w, int64_t row_bytes, int64_t count, int64_t columns,             \
                                  const tile_block *tile, int64_t tokens, float *y, int64_t y_stride, int add,     \
                                  const char *next) {                                                              \
        multiply_rows(w, row_bytes, count, columns, tile, tokens, y, y_stride, add, next, PLLM_##NAME, M);         \
    }
#define MULTIPLY_ROWS_ALL(NAME, ...)                                                                               \
    MULTIPLY_ROWS(NAME, 1) MULTIPLY_ROWS(NAME, 2) MULTIPLY_ROWS(NAME, 4) MULTIPLY_ROWS(NAME, 6)
#define ROWS_NAMES(NAME, ...) [PLLM_##NAME] = {NAME##_rows_1, NAME##_rows_2, NAME##_rows_4, NAME##_rows_6},

PLLM_BLOCK_FORMATS(MULTIPLY_ROWS_ALL)

/* For 1, 2, up to 4, and up to 6 tokens. */
static const rows_function rows_table[PLLM_DTYPES][4] = {PLLM_BLOCK_FORMATS(ROWS_NAMES)};

/* kernel_set.many of up to FEW_TILES tiles and weights that are not grouped. */
static void few_tiles(const char *data, int dtype, int64_t row_bytes, int64_t rows, int64_t columns,
                      const tile_block *tiles, int64_t tokens, float *y, int64_t y_stride, int add, const char *after) {
    for (int64_t n = 0; n < rows; n += PANEL_ROWS) {
        const char *from = data + n * row_bytes, *next = n + PANEL_ROWS < rows ? from + PANEL_ROWS * row_bytes : after;
        for (int64_t m = 0; m < tokens; m += BYTE_TILE_TOKENS) {
            const int64_t width = MIN(BYTE_TILE_TOKENS, tokens - m);
            rows_table[dtype][width > 4 ? 3 : width > 2 ? 2 : width - 1](
                (const uint8_t *)from, row_bytes, MIN(PANEL_ROWS, rows - n), columns,
                tiles + m / BYTE_TILE_TOKENS * (padded(columns) / INPUT_BLOCK), width, y + m * y_stride + n, y_stride, add,
                next);
        }
    }
}
