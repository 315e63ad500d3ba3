/* Products of many tokens with packed weights for AVX-512 with VNNI: bytes times bytes, added up as whole numbers within a
   block of 32 values and scaled once. The including file has included packed_avx512_few_template.h.

   A panel is PANEL_ROWS rows of weights opened once for all tokens, sixteen rows to a vector, four neighbouring codes to
   a lane. A tile is up to BYTE_TILE_TOKENS rows of input, four codes of one after those of another. */
#define BLOCKS_OF_UNIT (UNIT / INPUT_BLOCK)
#define PANEL_VECTORS (PANEL_ROWS / 16)

#define BLOCKS_AHEAD 6 /* that many blocks of a tile are fetched before they are wanted */
#define PANEL_BLOCKS (PANEL_COLUMNS / INPUT_BLOCK)
#define FETCHES (PANEL_ROWS * (PANEL_COLUMNS / 32 * 34 / 64 + 1)) /* lines of the largest panel in the file */

typedef struct byte_panel {
    panel_block blocks[PANEL_BLOCKS];
    uint32_t fetches[FETCHES + PANEL_BLOCKS]; /* the last tile that fetches any does so with each of its blocks */
} byte_panel;

_Static_assert(sizeof(byte_panel) <= PANEL_BYTES, "a panel of bytes fits where others do");

/* ---- Opening a panel -------------------------------------------------------------------------------------------- */

/* A unit of sixteen rows, so many bytes apart. */
typedef struct sixteen_rows {
    const uint8_t *first;
    int64_t step;
} sixteen_rows;

ALWAYS_INLINE const uint8_t *row_of(const sixteen_rows rows, const int r) { return rows.first + r * rows.step; }

/* Up to UNIT values of the `count` rows from `w` on: the sixteen of vector v. Where not all are there, those that lack get the
   last one's, and where the unit is not whole zeros follow, so that nothing is read past the row: copies in `room`. */
ALWAYS_INLINE sixteen_rows rows_of(const uint8_t *w, const int64_t row_bytes, const int v, const int64_t count,
                                   const int64_t values, uint8_t room[16][UNIT_BYTES_LIMIT], const int dtype) {
    if (values == UNIT && 16 * (v + 1) <= count) return (sixteen_rows){w + 16 * v * row_bytes, row_bytes};
    for (int r = 0; r < 16; r++) {
        memset(room[r], 0, UNIT_BYTES_LIMIT);
        memcpy(room[r], w + MIN(16 * v + r, count - 1) * row_bytes, (size_t)bytes_of_values(dtype, values));
    }
    return (sixteen_rows){room[0], UNIT_BYTES_LIMIT};
}

/* The 16 bytes at `at` of each row as four vectors of words, a row to a lane. */
ALWAYS_INLINE void sixteen_words(const sixteen_rows rows, const int64_t at, __m512i to[4]) {
    __m512i four[4];
    UNROLL for (int i = 0; i < 4; i++) {
        sixteen_rows own = {row_of(rows, i) + at, 4 * rows.step};
        __asm__("" : "+r"(own.first)); /* or sixteen addresses are kept, most of them not in registers */
        four[i] = _mm512_castsi128_si512(sixteen_bytes(own.first));
        four[i] = _mm512_mask_broadcast_i32x4(four[i], 0x00f0, sixteen_bytes(row_of(own, 1)));
        four[i] = _mm512_mask_broadcast_i32x4(four[i], 0x0f00, sixteen_bytes(row_of(own, 2)));
        four[i] = _mm512_mask_broadcast_i32x4(four[i], 0xf000, sixteen_bytes(row_of(own, 3)));
    }
    const __m512i a = _mm512_unpacklo_epi32(four[0], four[1]), b = _mm512_unpackhi_epi32(four[0], four[1]);
    const __m512i c = _mm512_unpacklo_epi32(four[2], four[3]), d = _mm512_unpackhi_epi32(four[2], four[3]);
    to[0] = _mm512_unpacklo_epi64(a, c);
    to[1] = _mm512_unpackhi_epi64(a, c);
    to[2] = _mm512_unpacklo_epi64(b, d);
    to[3] = _mm512_unpackhi_epi64(b, d);
}

/* To `blocks` blocks, for the sixteen rows of vector v of the panel. */
ALWAYS_INLINE void store_codes(panel_block *to, const int v, const int64_t blocks, const int block, const int step,
                               const __m512 codes) {
    if (block < blocks) _mm512_storeu_ps((float *)(void *)(to[block].codes[step] + 64 * v), codes);
}

ALWAYS_INLINE void open_codes(const sixteen_rows rows, panel_block *to, const int v, const int64_t blocks,
                              const int dtype) {
    __m512 lanes[16];
    if (dtype == PLLM_Q4_K) { /* a nibble of each byte, so that they are exchanged together */
        for (int half = 0; half < 2; half++) {
            UNROLL for (int r = 0; r < 16; r++) lanes[r] = _mm512_loadu_ps(row_of(rows, r) + codes_at(dtype) + 64 * half);
            avx512f_transpose(lanes);
            UNROLL for (int i = 0; i < 16; i++) {
                const __m512i both = _mm512_castps_si512(lanes[i]);
                const int block = 4 * half + i / 8 * 2;
                store_codes(to, v, blocks, block, i % 8, _mm512_castsi512_ps(masked(both, 15)));
                store_codes(to, v, blocks, block + 1, i % 8,
                            _mm512_castsi512_ps(masked(_mm512_srli_epi32(both, 4), 15)));
            }
        }
        return;
    }
    const uint8_t *units[16];
    uint8_t room[16][UNIT];
    for (int r = 0; r < 16; r++) units[r] = readable(row_of(rows, r), room[r], dtype);
#define OPEN_GROUP(g)                                                                                              \
    UNROLL for (int r = 0; r < 16; r++) lanes[r] = _mm512_castsi512_ps(codes_of(units[r], g, dtype));              \
    avx512f_transpose(lanes);                                                                                      \
    UNROLL for (int i = 0; i < 16; i++) store_codes(to, v, blocks, 2 * (g) + i / 8, i % 8, lanes[i]);
    OPEN_GROUP(0)
    OPEN_GROUP(1)
    OPEN_GROUP(2)
    OPEN_GROUP(3)
#undef OPEN_GROUP
}

ALWAYS_INLINE __m512i bits_of(__m512i words, const int low, const int bits) {
    return _mm512_and_si512(_mm512_srli_epi32(words, (unsigned)low), _mm512_set1_epi32(bits));
}

ALWAYS_INLINE __m512 scaled(__m512i whole, __m512 by) { return _mm512_mul_ps(_mm512_cvtepi32_ps(whole), by); }

/* As k_scale. */
ALWAYS_INLINE void open_k_scales(const sixteen_rows rows, panel_block *to, const int v) {
    __m512i heads[4];
    sixteen_words(rows, 0, heads);
    const __m512 scale = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(heads[0]));
    const __m512 minimum = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(heads[0], 16)));
    UNROLL for (int j = 0; j < 4; j++) {
        const __m512i scale_end = _mm512_slli_epi32(bits_of(heads[1], 8 * j + 6, 3), 4);
        const __m512i minimum_end = _mm512_slli_epi32(bits_of(heads[2], 8 * j + 6, 3), 4);
        _mm512_storeu_ps(to[j].scales[0] + 16 * v, scaled(bits_of(heads[1], 8 * j, 63), scale));
        _mm512_storeu_ps(to[j].minimums[0] + 16 * v, scaled(bits_of(heads[2], 8 * j, 63), minimum));
        _mm512_storeu_ps(to[4 + j].scales[0] + 16 * v,
                         scaled(_mm512_or_si512(bits_of(heads[3], 8 * j, 15), scale_end), scale));
        _mm512_storeu_ps(to[4 + j].minimums[0] + 16 * v,
                         scaled(_mm512_or_si512(bits_of(heads[3], 8 * j + 4, 15), minimum_end), minimum));
    }
}

ALWAYS_INLINE void open_q6_k_scales(const sixteen_rows rows, panel_block *to, const int v) {
    __m512i own[4];
    uint32_t halves[16];
    sixteen_words(rows, Q6_K_SCALES, own);
    for (int r = 0; r < 16; r++) halves[r] = (uint32_t)half_at(row_of(rows, r) + Q6_K_SCALE);
    const __m512 scale = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_loadu_si512(halves)));
    UNROLL for (int i = 0; i < 4; i++)
        UNROLL for (int j = 0; j < 4; j++) {
            const __m512i whole = _mm512_srai_epi32(_mm512_slli_epi32(own[i], (unsigned)(24 - 8 * j)), 24);
            _mm512_storeu_ps(to[2 * i + j / 2].scales[j % 2] + 16 * v, scaled(whole, scale));
        }
}

/* To `count` blocks: a figure of each row, and, if there is a place for it, a second one. */
ALWAYS_INLINE void store_figures(__m256 figures[16][2], float *to, float *more, const int64_t count) {
    const int64_t apart = sizeof(panel_block) / sizeof(float);
    __m512 lanes[16];
    for (int r = 0; r < 16; r++) {
        lanes[r] = _mm512_castps256_ps512(figures[r][0]);
        if (more) lanes[r] = _mm512_insertf32x8(lanes[r], figures[r][1], 1);
    }
    avx512f_transpose(lanes);
    for (int64_t block = 0; block < count; block++) {
        _mm512_storeu_ps(to + block * apart, lanes[block]);
        if (more) _mm512_storeu_ps(more + block * apart, lanes[8 + block]);
    }
}

ALWAYS_INLINE void open_scales(const sixteen_rows rows, panel_block *to, const int v, const int64_t blocks,
                               const int dtype) {
    const int halved = is_halved(dtype), lowered = has_minimums(dtype);
    if (dtype == PLLM_Q4_K || dtype == PLLM_Q5_K) return open_k_scales(rows, to, v);
    if (dtype == PLLM_Q6_K) return open_q6_k_scales(rows, to, v);
    __m256 figures[16][2];
    for (int r = 0; r < 16; r++) {
        scales_of(row_of(rows, r), figures[r], dtype);
        if (lowered && !halved) minimums_of(row_of(rows, r), figures[r] + 1, dtype);
    }
    float *more = halved ? to->scales[1] + 16 * v : lowered ? to->minimums[0] + 16 * v : NULL;
    store_figures(figures, to->scales[0] + 16 * v, more, blocks);
    if (!halved || !lowered) return;
    for (int r = 0; r < 16; r++) minimums_of(row_of(rows, r), figures[r], dtype);
    store_figures(figures, to->minimums[0] + 16 * v, to->minimums[1] + 16 * v, blocks);
}

/* `count` rows of `columns` values; those that are not there get the last one's. */
ALWAYS_INLINE void open_panel(panel_block *to, const uint8_t *w, const int64_t row_bytes, const int64_t count,
                              const int64_t columns, const int dtype) {
    for (int64_t first = 0; first < columns; first += UNIT, to += BLOCKS_OF_UNIT) {
        const int64_t values = MIN(UNIT, columns - first), blocks = values / INPUT_BLOCK;
        for (int v = 0; v < PANEL_VECTORS; v++) {
            uint8_t room[16][UNIT_BYTES_LIMIT];
            const sixteen_rows rows = rows_of(w + bytes_of_values(dtype, first), row_bytes, v, count, values, room, dtype);
            open_codes(rows, to, v, blocks, dtype);
            open_scales(rows, to, v, blocks, dtype);
        }
    }
}

#define OPEN_PANEL(NAME, ...)                                                                                      \
    NOINLINE void NAME##_panel(panel_block *to, const uint8_t *w, int64_t row_bytes, int64_t count,               \
                                int64_t columns) {                                                                 \
        open_panel(to, w, row_bytes, count, columns, PLLM_##NAME);                                                       \
    }
#define PANEL_NAME(NAME, ...) [PLLM_##NAME] = NAME##_panel,

PLLM_BLOCK_FORMATS(OPEN_PANEL)

typedef void (*open_function)(panel_block *to, const uint8_t *w, int64_t row_bytes, int64_t count, int64_t columns);

static const open_function open_table[PLLM_DTYPES] = {PLLM_BLOCK_FORMATS(PANEL_NAME)};

/* ---- Products --------------------------------------------------------------------------------------------------- */

/* Whether a format's blocks have a minimum; else its codes are raised. There is one of it and of the scales for a block, or
   one for each half. */
enum { LOWERED = 0, RAISED = 1, HALVED = 2, HALVED_LOWERED = 3 };

ALWAYS_INLINE int kind_of(const int dtype) {
    if (is_halved(dtype)) return has_minimums(dtype) ? HALVED_LOWERED : HALVED;
    return has_minimums(dtype) || is_grouped(dtype) ? LOWERED : RAISED;
}

/* What the whole numbers of a block, or of half of one, begin with. */
ALWAYS_INLINE __m512i start_of(const tile_block *tile, const int half, const int m, const __m128i less, const int kind) {
    if (kind == RAISED) return _mm512_sra_epi32(_mm512_set1_epi32(tile->raised[2][m]), less);
    if (kind == HALVED) return _mm512_sra_epi32(_mm512_set1_epi32(tile->raised[half][m]), less);
    return _mm512_setzero_si512();
}

/* *sum += whole * scale * by, of a block or of its halves, the first of which waits in *first for the second. */
ALWAYS_INLINE void add_product(__m512 *sum, __m512 *first, __m512i whole, __m512 scale, __m512 by, const int half,
                               const int halves) {
    const __m512 product = _mm512_cvtepi32_ps(whole);
    if (halves == 1)
        *sum = _mm512_fmadd_ps(product, _mm512_mul_ps(scale, by), *sum);
    else if (half == 0)
        *first = _mm512_mul_ps(product, scale);
    else
        *sum = _mm512_fmadd_ps(_mm512_fmadd_ps(product, scale, *first), by, *sum);
}

/* What a matrix's products have in common. */
typedef struct panel_task {
    const panel_block *panel;
    int64_t blocks, y_stride;
    int64_t fetched;         /* lines of the next panel fetched with each block */
    int less, more;          /* how far tile_block.raised is shifted; whether y is added to */
    __mmask16 rows[PANEL_VECTORS]; /* of the panel that there are */
} panel_task;

/* y[m][0..PANEL_ROWS) (+)= panel * tile for M tokens; KIND and M are constants of the compiler. */
ALWAYS_INLINE void multiply_tile(const panel_task *task, const tile_block *tile, float *y, const char *next,
                                 const uint32_t *fetches, const int kind, const int M) {
    __m512 sums[BYTE_TILE_TOKENS][PANEL_VECTORS];
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int v = 0; v < PANEL_VECTORS; v++)
            sums[m][v] = task->more ? _mm512_maskz_loadu_ps(task->rows[v], y + m * task->y_stride + 16 * v)
                                    : _mm512_setzero_ps();
    const panel_block *panel = task->panel;
    const int halves = kind == HALVED || kind == HALVED_LOWERED ? 2 : 1, steps = 8 / halves;
    __m512 first[BYTE_TILE_TOKENS][PANEL_VECTORS]; /* of the halves */
    const __m128i less = _mm_cvtsi32_si128(task->less);
    for (int64_t block = 0; block < task->blocks; block++, panel++, tile++) {
        for (int64_t i = 0; i < task->fetched; i++) __builtin_prefetch(next + *fetches++, 0, 2);
        for (int line = 0; line < 5; line++) __builtin_prefetch((const char *)(tile + BLOCKS_AHEAD) + 64 * line, 0, 3);
        UNROLL for (int half = 0; half < halves; half++) {
            __m512i whole[BYTE_TILE_TOKENS][PANEL_VECTORS];
            UNROLL for (int m = 0; m < M; m++) {
                const __m512i start = start_of(tile, half, m, less, kind);
                UNROLL for (int v = 0; v < PANEL_VECTORS; v++) whole[m][v] = start;
            }
            UNROLL for (int step = half * steps; step < (half + 1) * steps; step++) {
                __m512i codes[PANEL_VECTORS];
                UNROLL for (int v = 0; v < PANEL_VECTORS; v++) codes[v] = loaded(panel->codes[step] + 64 * v);
                UNROLL for (int m = 0; m < M; m++) {
                    const __m512i in = _mm512_set1_epi32(tile->codes[step][m]);
                    UNROLL for (int v = 0; v < PANEL_VECTORS; v++)
                        whole[m][v] = _mm512_dpbusd_epi32(whole[m][v], codes[v], in);
                }
            }
            UNROLL for (int v = 0; v < PANEL_VECTORS; v++) {
                const __m512 scale = _mm512_loadu_ps(panel->scales[half] + 16 * v);
                UNROLL for (int m = 0; m < M; m++)
                    add_product(&sums[m][v], &first[m][v], whole[m][v], scale, _mm512_set1_ps(tile->scales[m]), half, halves);
            }
        }
        if (kind == RAISED || kind == HALVED) continue;
        UNROLL for (int half = 0; half < halves; half++)
            UNROLL for (int v = 0; v < PANEL_VECTORS; v++) {
                const float *added = halves == 2 ? tile->half_sums[half] : tile->sums;
                const __m512 minimum = _mm512_loadu_ps(panel->minimums[half] + 16 * v);
                UNROLL for (int m = 0; m < M; m++)
                    sums[m][v] = _mm512_fnmadd_ps(minimum, _mm512_set1_ps(added[m]), sums[m][v]);
            }
    }
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int v = 0; v < PANEL_VECTORS; v++)
            _mm512_mask_storeu_ps(y + m * task->y_stride + 16 * v, task->rows[v], sums[m][v]);
}

typedef void (*tile_function)(const panel_task *task, const tile_block *tile, float *y, const char *next,
                              const uint32_t *fetches);

#define MULTIPLY(KIND, M)                                                                                          \
    NOINLINE void KIND##_##M(const panel_task *task, const tile_block *tile, float *y, const char *next,           \
                             const uint32_t *fetches) {                                                            \
        multiply_tile(task, tile, y, next, fetches, KIND, M);                                                      \
    }
#define MULTIPLY_ALL(KIND)                                                                                         \
    MULTIPLY(KIND, 1) MULTIPLY(KIND, 2) MULTIPLY(KIND, 3) MULTIPLY(KIND, 4) MULTIPLY(KIND, 5) MULTIPLY(KIND, 6)
MULTIPLY_ALL(LOWERED)
MULTIPLY_ALL(RAISED)
MULTIPLY_ALL(HALVED)
MULTIPLY_ALL(HALVED_LOWERED)

#define MULTIPLY_NAMES(KIND) {KIND##_1, KIND##_2, KIND##_3, KIND##_4, KIND##_5, KIND##_6}
static const tile_function tile_table[4][BYTE_TILE_TOKENS] = {
    MULTIPLY_NAMES(LOWERED), MULTIPLY_NAMES(RAISED), MULTIPLY_NAMES(HALVED), MULTIPLY_NAMES(HALVED_LOWERED),
};

/* Where the lines of a panel are that begins at 0, and the last one PANEL_BLOCKS times more; returns their number. */
static int64_t lines_of(uint32_t *fetches, const int64_t row_bytes, const int64_t bytes) {
    int64_t count = 0;
    for (int64_t row = 0; row < PANEL_ROWS; row++)
        for (int64_t at = 0; at < bytes + 64 && count < FETCHES; at += 64)
            fetches[count++] = (uint32_t)(row * row_bytes + MIN(at, bytes - 1));
    for (int64_t i = count; i < count + PANEL_BLOCKS; i++) fetches[i] = fetches[count - 1];
    return count;
}

#include "packed_avx512_few_tiles.h"

void SET(many)(const void *weights, int dtype, int64_t stride, int64_t rows, int64_t columns, const void *tiles,
               int64_t tokens, float *y, int64_t y_stride, int add, void *scratch, const void *after) {
    byte_panel *panel = scratch;
    const pllm_matrix *grouped = is_grouped(dtype) ? weights : NULL;
    const char *data = grouped ? grouped->data : weights;
    const int64_t row_bytes = bytes_of_values(dtype, stride), count = divided_up(tokens, BYTE_TILE_TOKENS);
    if (count <= FEW_TILES && !grouped) {
        few_tiles(data, dtype, row_bytes, rows, columns, tiles, tokens, y, y_stride, add, after);
        return;
    }
    const int64_t tile_blocks = padded(columns) / INPUT_BLOCK;
    const int less = raised_shift(raised_by(dtype));
    const int64_t lines = lines_of(panel->fetches, row_bytes, bytes_of_values(dtype, MIN(PANEL_COLUMNS, columns)));
    for (int64_t n = 0; n < rows; n += PANEL_ROWS) {
        const int64_t here = MIN(PANEL_ROWS, rows - n);
        for (int64_t k = 0; k < columns; k += PANEL_COLUMNS) {
            const int64_t depth = MIN(PANEL_COLUMNS, columns - k), blocks = depth / INPUT_BLOCK;
            const char *from = data + n * row_bytes + bytes_of_values(dtype, k);
            const char *next = panel_after(from, dtype, row_bytes, n, rows, k, depth, columns, after);
            if (grouped)
                pllm_grouped_avx512_vnni_open_panel(panel->blocks, grouped, n, here, k, depth);
            else
                open_table[dtype](panel->blocks, (const uint8_t *)from, row_bytes, here, depth);
            panel_task task = {.panel = panel->blocks, .blocks = blocks, .y_stride = y_stride, .less = less,
                               .more = add || k > 0, .fetched = divided_up(lines, count * blocks)};
            for (int v = 0; v < PANEL_VECTORS; v++)
                task.rows[v] = (__mmask16)((1U << MAX(0, MIN(16, here - 16 * v))) - 1);
            int64_t fetched = 0;
            for (int64_t i = 0; i < count; i++) {
                task.fetched = MIN(task.fetched, divided_up(lines - fetched, blocks));
                const int64_t m = i * BYTE_TILE_TOKENS, width = MIN(BYTE_TILE_TOKENS, tokens - m);
                const tile_block *tile = (const tile_block *)tiles + i * tile_blocks + k / INPUT_BLOCK;
                tile_table[kind_of(dtype)][width - 1](&task, tile, y + m * y_stride + n, next,
                                                      panel->fetches + fetched);
                fetched += task.fetched * blocks;
            }
        }
    }
}

/* ---- Tiles ------------------------------------------------------------------------------------------------------- */

void SET(tile)(void *tile, const float *const *rows, const float *scales, int64_t tokens, int64_t column,
               int64_t count) {
    for (int64_t m = 0; m < tokens; m++) {
        tile_block *to = (tile_block *)tile + column / INPUT_BLOCK;
        for (int64_t i = 0; i < count; i += INPUT_BLOCK, to++) {
            __m512i halves[2];
            const float step = rounded_block(rows[m] + i, scales ? scales[m] : 1.0F, halves);
            int total = 0;
            UNROLL for (int half = 0; half < 2; half++) {
                uint32_t words[4];
                const int sum = _mm512_reduce_add_epi32(halves[half]);
                _mm_storeu_si128((__m128i *)(void *)words, _mm512_cvtepi32_epi8(halves[half]));
                UNROLL for (int j = 0; j < 4; j++) memcpy(&to->codes[4 * half + j][m], &words[j], 4);
                to->raised[half][m] = -128 * sum;
                to->half_sums[half][m] = step * (float)sum;
                total += sum;
            }
            to->raised[2][m] = -128 * total;
            to->scales[m] = step;
            to->sums[m] = step * (float)total;
        }
    }
}
