/* Products of many tokens with packed and grouped weights for AVX2: bytes times bytes, added up as whole numbers within a block of 32
   values and scaled once. Included by packed_avx2.c.

   A panel is PANEL_ROWS rows of weights opened once for all tokens, eight rows to a vector, four neighbouring codes to a
   lane. Codes of two to seven bits are unsigned: what was added to them for that is taken away again as whole numbers
   (tile_block.raised). Codes of eight bits are signed.

   VPMADDUBSW adds up two products in 16 bits. Codes of four bits fit there 32 columns long, wider ones less long, and those
   of eight bits two columns long. */

#define BLOCKS_OF_UNIT (UNIT / INPUT_BLOCK)
#define ROWS_OF_VECTOR 8
#define VECTORS 2 /* of rows, that are multiplied together; the panel of that many rows stays in the first-level cache */
#define PART_TOKENS 3 /* tokens that are multiplied together: their sums fit beside those of VECTORS into registers */
#define STEP_BYTES (PANEL_ROWS * 4)

_Static_assert(sizeof(panel_block) * (PANEL_COLUMNS / INPUT_BLOCK) <= PANEL_BYTES, "a panel of bytes fits where others do");

/* How wide the codes of a panel are. */
enum { FOUR_BITS, FIVE_BITS, SIX_BITS, SEVEN_BITS, EIGHT_BITS, WIDTHS };

ALWAYS_INLINE int width_of(const int dtype) {
    const int fp4 = dtype == PLLM_OCP_MXFP4 || dtype == PLLM_GROUPED_NVFP4; /* whose codes are raised to have no sign */
    return MAX(FOUR_BITS, FOUR_BITS + (fp4 ? 5 : is_grouped(dtype) ? group_bits(dtype) : code_bits(dtype)) - 4);
}

/* What is done with the products of a block: its codes are raised, or else are signed or have a minimum (LOWERED); its
   halves have a scale of their own (HALVED), or that and a minimum. */
enum { RAISED, LOWERED, HALVED, HALVED_LOWERED, KINDS };

ALWAYS_INLINE int kind_of(const int dtype) {
    if (is_halved(dtype)) return has_minimums(dtype) ? HALVED_LOWERED : HALVED;
    return has_minimums(dtype) || is_grouped(dtype) ? LOWERED : RAISED;
}

/* ---- Opening a panel -------------------------------------------------------------------------------------------- */

/* For the eight rows of vector v of the panel, to `blocks` blocks. */
ALWAYS_INLINE void open_codes(const uint8_t *const rows[ROWS_OF_VECTOR], panel_block *to, const int v,
                              const int64_t blocks, const int dtype) {
    grid_unit grids[ROWS_OF_VECTOR];
    UNROLL for (int r = 0; r < ROWS_OF_VECTOR; r++) open_grid_unit(rows[r], grids + r, dtype);
    for (int g = 0; g < (int)blocks; g++) {
        __m256 lanes[ROWS_OF_VECTOR];
        UNROLL for (int r = 0; r < ROWS_OF_VECTOR; r++) lanes[r] = _mm256_castsi256_ps(codes_of(rows[r], grids + r, g, dtype));
        avx2_transpose(lanes);
        UNROLL for (int i = 0; i < 8; i++)
            _mm256_storeu_ps((float *)(void *)(to[g].codes[i] + 4 * ROWS_OF_VECTOR * v), lanes[i]);
    }
}

/* A nibble of each byte, so that two blocks are exchanged together. */
ALWAYS_INLINE void open_q4_k_codes(const uint8_t *const rows[ROWS_OF_VECTOR], panel_block *to, const int v) {
    for (int pair = 0; pair < BLOCKS_OF_UNIT / 2; pair++) {
        __m256 lanes[ROWS_OF_VECTOR];
        UNROLL for (int r = 0; r < ROWS_OF_VECTOR; r++)
            lanes[r] = _mm256_castsi256_ps(loaded(rows[r] + codes_at(PLLM_Q4_K) + 32 * pair));
        avx2_transpose(lanes);
        UNROLL for (int i = 0; i < 8; i++) {
            const __m256i both = _mm256_castps_si256(lanes[i]);
            _mm256_storeu_si256((__m256i *)(void *)(to[2 * pair].codes[i] + 4 * ROWS_OF_VECTOR * v), masked(both, 15));
            _mm256_storeu_si256((__m256i *)(void *)(to[2 * pair + 1].codes[i] + 4 * ROWS_OF_VECTOR * v),
                                masked(_mm256_srli_epi16(both, 4), 15));
        }
    }
}

ALWAYS_INLINE void open_scales(const uint8_t *const rows[ROWS_OF_VECTOR], panel_block *to, const int v,
                               const int64_t blocks, const int dtype) {
    const int64_t apart = sizeof *to / sizeof(float);
    __m256 lanes[ROWS_OF_VECTOR];
    __m256 upper[ROWS_OF_VECTOR];
    UNROLL for (int r = 0; r < ROWS_OF_VECTOR; r++) {
        __m256 scales[2];
        scales_of(rows[r], scales, dtype);
        lanes[r] = scales[0];
        if (is_halved(dtype)) upper[r] = scales[1];
    }
    avx2_store_transposed(lanes, to->scales[0] + ROWS_OF_VECTOR * v, apart, blocks);
    if (is_halved(dtype)) avx2_store_transposed(upper, to->scales[1] + ROWS_OF_VECTOR * v, apart, blocks);
    if (!has_minimums(dtype)) return;
    UNROLL for (int r = 0; r < ROWS_OF_VECTOR; r++) {
        __m256 minimums[2];
        minimums_of(rows[r], minimums, dtype);
        lanes[r] = minimums[0];
        if (is_halved(dtype)) upper[r] = minimums[1];
    }
    avx2_store_transposed(lanes, to->minimums[0] + ROWS_OF_VECTOR * v, apart, blocks);
    if (is_halved(dtype)) avx2_store_transposed(upper, to->minimums[1] + ROWS_OF_VECTOR * v, apart, blocks);
}

/* Up to UNIT values of the eight rows of vector v of the `count` rows from w on; those that are not there get the last one's.
   Where the unit is not whole zeros follow, in `ends`, so that nothing is read past the row. */
ALWAYS_INLINE void rows_of(const uint8_t *w, const int64_t row_bytes, const int v, const int64_t count, const int64_t values,
                           const uint8_t *rows[ROWS_OF_VECTOR],
                           uint8_t ends[ROWS_OF_VECTOR][UNIT_BYTES_LIMIT], const int dtype) {
    for (int r = 0; r < ROWS_OF_VECTOR; r++) {
        rows[r] = w + MIN(ROWS_OF_VECTOR * v + r, count - 1) * row_bytes;
        if (values == UNIT) continue;
        memset(ends[r], 0, UNIT_BYTES_LIMIT);
        rows[r] = memcpy(ends[r], rows[r], (size_t)bytes_of_values(dtype, values));
    }
}

/* `count` rows of `columns` values. Meanwhile fetches the panel after this one. */
ALWAYS_INLINE void open_panel(panel_block *to, const uint8_t *w, const int64_t row_bytes, const int64_t count,
                              const int64_t columns, const int64_t ahead, const int dtype) {
    for (int64_t first = 0; first < columns; first += UNIT, to += BLOCKS_OF_UNIT) {
        const int64_t values = MIN(UNIT, columns - first), blocks = values / INPUT_BLOCK;
        for (int v = 0; v < PANEL_ROWS / ROWS_OF_VECTOR; v++) {
            uint8_t ends[ROWS_OF_VECTOR][UNIT_BYTES_LIMIT];
            const uint8_t *rows[ROWS_OF_VECTOR];
            const uint8_t *from = w + bytes_of_values(dtype, first);
            for (int r = 0; r < ROWS_OF_VECTOR; r++)
                for (int64_t line = 0; line < bytes_of_values(dtype, UNIT); line += 64)
                    __builtin_prefetch(from + MIN(ROWS_OF_VECTOR * v + r, count - 1) * row_bytes + ahead + line, 0, 2);
            rows_of(from, row_bytes, v, count, values, rows, ends, dtype);
            if (dtype == PLLM_Q4_K)
                open_q4_k_codes(rows, to, v);
            else
                open_codes(rows, to, v, blocks, dtype);
            open_scales(rows, to, v, blocks, dtype);
        }
    }
}

#define OPEN_PANEL(NAME, ...)                                                                                      \
    NOINLINE void NAME##_panel(panel_block *to, const uint8_t *w, int64_t row_bytes, int64_t count,               \
                                int64_t columns, int64_t ahead) {                                                  \
        open_panel(to, w, row_bytes, count, columns, ahead, PLLM_##NAME);                                                \
    }
#define PANEL_NAME(NAME, ...) [PLLM_##NAME] = NAME##_panel,

PLLM_BLOCK_FORMATS(OPEN_PANEL)

typedef void (*open_function)(panel_block *to, const uint8_t *w, int64_t row_bytes, int64_t count, int64_t columns,
                              int64_t ahead);

static const open_function open_table[PLLM_DTYPES] = {PLLM_BLOCK_FORMATS(PANEL_NAME)};

/* ---- Products --------------------------------------------------------------------------------------------------- */

/* What a matrix's products have in common. */
typedef struct panel_task {
    const panel_block *panel;
    int64_t blocks, y_stride, rows; /* rows: of the panel that there are */
    int less, more;                 /* how far tile_block.raised is shifted; whether y is added to */
} panel_task;

/* The sum as it is here: compilers would regroup the summands of whole numbers, and there are registers for the sums only. */
#define IN_ORDER(sum) __asm__("" : "+x"(sum))

/* Sums of steps [first, first + count) of a block, two products to 16 bits. */
ALWAYS_INLINE void add_steps(__m256i pairs[PART_TOKENS][VECTORS], const uint8_t *codes, const int32_t *in,
                             const int first, const int count, const int M) {
    UNROLL for (int step = first; step < first + count; step++) {
        __m256i w[VECTORS];
        UNROLL for (int v = 0; v < VECTORS; v++) w[v] = loaded(codes + step * STEP_BYTES + 32 * v);
        UNROLL for (int m = 0; m < M; m++) {
            const __m256i x = _mm256_set1_epi32(in[step * BYTE_TILE_TOKENS + m]);
            UNROLL for (int v = 0; v < VECTORS; v++) {
                const __m256i two = _mm256_maddubs_epi16(w[v], x);
                pairs[m][v] = step == first ? two : _mm256_add_epi16(pairs[m][v], two);
                IN_ORDER(pairs[m][v]);
            }
        }
    }
}

/* Sums of a block of signed codes. 128 * 127 twice just fit into 16 bits. */
ALWAYS_INLINE void signed_products(__m256i whole[PART_TOKENS][VECTORS], const uint8_t *codes, const int32_t *in,
                                   const int M) {
    UNROLL for (int step = 0; step < 8; step++)
        UNROLL for (int v = 0; v < VECTORS; v++) {
            const __m256i w = loaded(codes + step * STEP_BYTES + 32 * v), size = _mm256_abs_epi8(w);
            UNROLL for (int m = 0; m < M; m++) {
                const __m256i x = _mm256_set1_epi32(in[step * BYTE_TILE_TOKENS + m]);
                const __m256i two = _mm256_maddubs_epi16(size, _mm256_sign_epi8(x, w));
                const __m256i four = _mm256_madd_epi16(two, _mm256_set1_epi16(1));
                whole[m][v] = step == 0 ? four : _mm256_add_epi32(whole[m][v], four);
                IN_ORDER(whole[m][v]);
            }
        }
}

/* whole[M][VECTORS] (+)= pairs. */
ALWAYS_INLINE void widen(__m256i whole[PART_TOKENS][VECTORS], const __m256i pairs[PART_TOKENS][VECTORS],
                         const int fresh, const int M) {
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int v = 0; v < VECTORS; v++) {
            const __m256i four = _mm256_madd_epi16(pairs[m][v], _mm256_set1_epi16(1));
            whole[m][v] = fresh ? four : _mm256_add_epi32(whole[m][v], four);
        }
}

/* The products of a block, or of a half of it, as whole numbers. */
ALWAYS_INLINE void whole_products(__m256i whole[PART_TOKENS][VECTORS], const uint8_t *codes, const int32_t *in,
                                  const int half, const int width, const int halves, const int M) {
    if (width == EIGHT_BITS) {
        signed_products(whole, codes, in, M);
        return;
    }
    const int steps = 8 / halves, at_once = MIN(steps, 8 >> width);
    UNROLL for (int step = 0; step < steps; step += at_once) {
        __m256i pairs[PART_TOKENS][VECTORS];
        add_steps(pairs, codes, in, steps * half + step, at_once, M);
        widen(whole, pairs, step == 0, M);
    }
}

/* Those of eight lanes that are of the first `rows`. */
ALWAYS_INLINE __m256i lanes_of(const int64_t rows) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)rows), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

/* *sum += whole * scale * by, of a block or of its halves, the first of which waits in *first for the second. */
ALWAYS_INLINE void add_product(__m256 *sum, __m256 *first, __m256i whole, __m256 scale, __m256 by, const int half,
                               const int halves) {
    const __m256 product = _mm256_cvtepi32_ps(whole);
    if (halves == 1)
        *sum = _mm256_fmadd_ps(product, _mm256_mul_ps(scale, by), *sum);
    else if (half == 0)
        *first = _mm256_mul_ps(product, scale);
    else
        *sum = _mm256_fmadd_ps(_mm256_fmadd_ps(product, scale, *first), by, *sum);
}

/* y[m][0..PANEL_ROWS) (+)= panel * tile for M tokens from token `at` of the tile on, and VECTORS vectors of rows from
   `vector` on; WIDTH, KIND and M are constants of the compiler. */
ALWAYS_INLINE void multiply_part(const panel_task *task, const tile_block *tile, const int64_t at, const int64_t vector,
                                 float *y, const int width, const int kind, const int M) {
    const int64_t row = vector * ROWS_OF_VECTOR;
    __m256i there[VECTORS];
    __m256 sums[PART_TOKENS][VECTORS];
    UNROLL for (int v = 0; v < VECTORS; v++) there[v] = lanes_of(task->rows - row - ROWS_OF_VECTOR * v);
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int v = 0; v < VECTORS; v++)
            sums[m][v] = task->more ? _mm256_maskload_ps(y + m * task->y_stride + row + ROWS_OF_VECTOR * v, there[v])
                                    : _mm256_setzero_ps();
    const __m128i less = _mm_cvtsi32_si128(task->less);
    const int halves = kind == HALVED || kind == HALVED_LOWERED ? 2 : 1;
    const panel_block *panel = task->panel;
    for (int64_t block = 0; block < task->blocks; block++, panel++, tile++) {
        __m256 first[PART_TOKENS][VECTORS]; /* of the halves */
        UNROLL for (int half = 0; half < halves; half++) {
            __m256i whole[PART_TOKENS][VECTORS];
            whole_products(whole, panel->codes[0] + 4 * row, &tile->codes[0][at], half, width, halves, M);
            UNROLL for (int m = 0; m < M; m++) {
                const __m256 by = _mm256_broadcast_ss(&tile->scales[at + m]);
                const __m256i raised = _mm256_set1_epi32(tile->raised[halves == 2 ? half : 2][at + m]);
                UNROLL for (int v = 0; v < VECTORS; v++) {
                    const int64_t own = row + ROWS_OF_VECTOR * v;
                    const __m256 scale = _mm256_loadu_ps(panel->scales[half] + own);
                    if ((kind == RAISED || kind == HALVED) && width != EIGHT_BITS)
                        whole[m][v] = _mm256_add_epi32(whole[m][v], _mm256_sra_epi32(raised, less));
                    add_product(&sums[m][v], &first[m][v], whole[m][v], scale, by, half, halves);
                }
            }
        }
        if (kind == RAISED || kind == HALVED) continue;
        UNROLL for (int half = 0; half < halves; half++)
            UNROLL for (int v = 0; v < VECTORS; v++) {
                const float *added = halves == 2 ? tile->half_sums[half] : tile->sums;
                const __m256 minimum = _mm256_loadu_ps(panel->minimums[half] + row + ROWS_OF_VECTOR * v);
                UNROLL for (int m = 0; m < M; m++)
                    sums[m][v] = _mm256_fnmadd_ps(minimum, _mm256_broadcast_ss(added + at + m), sums[m][v]);
            }
    }
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int v = 0; v < VECTORS; v++)
            _mm256_maskstore_ps(y + m * task->y_stride + row + ROWS_OF_VECTOR * v, there[v], sums[m][v]);
}

typedef void (*part_function)(const panel_task *task, const tile_block *tile, int64_t at, int64_t vector, float *y);

#define MULTIPLY(WIDTH, KIND, M)                                                                                   \
    NOINLINE void WIDTH##_##KIND##_##M(const panel_task *task, const tile_block *tile, int64_t at,                 \
                                       int64_t vector, float *y) {                                                 \
        multiply_part(task, tile, at, vector, y, WIDTH, KIND, M);                                                  \
    }
#define MULTIPLY_ALL(WIDTH, KIND) MULTIPLY(WIDTH, KIND, 1) MULTIPLY(WIDTH, KIND, 2) MULTIPLY(WIDTH, KIND, 3)
#define MULTIPLY_NAMES(WIDTH, KIND) [WIDTH][KIND] = {WIDTH##_##KIND##_1, WIDTH##_##KIND##_2, WIDTH##_##KIND##_3},
#define WIDTHS_AND_KINDS(OF)                                                                                       \
    OF(FOUR_BITS, RAISED) OF(FOUR_BITS, LOWERED) OF(FOUR_BITS, HALVED) OF(FOUR_BITS, HALVED_LOWERED)               \
    OF(FIVE_BITS, RAISED) OF(FIVE_BITS, LOWERED) OF(FIVE_BITS, HALVED) OF(SIX_BITS, RAISED) OF(SIX_BITS, HALVED)   \
    OF(SIX_BITS, LOWERED) OF(SEVEN_BITS, RAISED) OF(SEVEN_BITS, HALVED) OF(EIGHT_BITS, RAISED)                    \
    OF(EIGHT_BITS, LOWERED)

WIDTHS_AND_KINDS(MULTIPLY_ALL)

/* By width of the codes, kind of the format, and tokens. */
static const part_function part_table[WIDTHS][KINDS][PART_TOKENS] = {WIDTHS_AND_KINDS(MULTIPLY_NAMES)};

/* A few rows of the panel pass all tokens before the next ones do, as they stay in the first-level cache. */
static void multiply_panel(const panel_task *task, const part_function *parts, const tile_block *tiles,
                           const int64_t tile_blocks, const int64_t tokens, float *y) {
    for (int64_t vector = 0; vector * ROWS_OF_VECTOR < task->rows; vector += VECTORS)
        for (int64_t m = 0; m < tokens; m += BYTE_TILE_TOKENS) {
            const tile_block *tile = tiles + m / BYTE_TILE_TOKENS * tile_blocks;
            const int64_t width = MIN(BYTE_TILE_TOKENS, tokens - m), count = divided_up(width, PART_TOKENS);
            for (int64_t part = 0; part < count; part++) {
                const int64_t at = width * part / count, end = width * (part + 1) / count;
                parts[end - at - 1](task, tile, at, vector, y + (m + at) * task->y_stride);
            }
        }
}

#include "packed_avx2_few_read.h"

void SET(many)(const void *weights, int dtype, int64_t stride, int64_t rows, int64_t columns, const void *tiles,
               int64_t tokens, float *y, int64_t y_stride, int add, void *scratch, const void *after) {
    const pllm_matrix *grouped = is_grouped(dtype) ? weights : NULL;
    const char *data = grouped ? grouped->data : weights;
    const int64_t row_bytes = bytes_of_values(dtype, stride), tile_blocks = padded(columns) / INPUT_BLOCK;
    if (tokens <= FEW_READ && divided_up(columns, UNIT) * UNIT <= (int64_t)FEW_COLUMNS && !grouped) {
        read_few(data, dtype, row_bytes, rows, columns, tiles, tokens, y, y_stride, add, scratch, after);
        return;
    }
    const int less = raised_shift(raised_by(dtype));
    const part_function *parts = part_table[width_of(dtype)][kind_of(dtype)];
    for (int64_t n = 0; n < rows; n += PANEL_ROWS) {
        const int64_t here = MIN(PANEL_ROWS, rows - n);
        for (int64_t k = 0; k < columns; k += PANEL_COLUMNS) {
            const int64_t depth = MIN(PANEL_COLUMNS, columns - k);
            const char *from = data + n * row_bytes + bytes_of_values(dtype, k);
            const char *next = panel_after(from, dtype, row_bytes, n, rows, k, depth, columns, after);
            const int64_t ahead = (intptr_t)next - (intptr_t)from;
            if (grouped)
                pllm_grouped_avx2_open_panel(scratch, grouped, n, here, k, depth, ahead);
            else
                open_table[dtype](scratch, (const uint8_t *)from, row_bytes, here, depth, ahead);
            const panel_task task = {.panel = scratch, .blocks = depth / INPUT_BLOCK, .y_stride = y_stride, .rows = here,
                                     .less = less, .more = add || k > 0};
            multiply_panel(&task, parts, (const tile_block *)tiles + k / INPUT_BLOCK, tile_blocks, tokens, y + n);
        }
    }
}

/* ---- Inputs ------------------------------------------------------------------------------------------------------ */

/* INPUT_BLOCK values rounded to whole numbers, and their common scale, as pllm_packed_scalar_convert does; sums[half] of
   the codes of each half. */
ALWAYS_INLINE float rounded_block(const float *from, const float scale, __m256i *codes, int sums[2]) {
    const __m256 factor = _mm256_set1_ps(scale), largest = _mm256_set1_ps(FLT_MAX), sign = _mm256_set1_ps(-0.0F);
    __m256 values[4], most = _mm256_setzero_ps(), finite = _mm256_castsi256_ps(_mm256_set1_epi32(-1));
    UNROLL for (int i = 0; i < 4; i++) {
        values[i] = _mm256_mul_ps(_mm256_loadu_ps(from + 8 * i), factor);
        const __m256 size = _mm256_andnot_ps(sign, values[i]);
        finite = _mm256_and_ps(finite, _mm256_cmp_ps(size, largest, _CMP_LE_OQ));
        most = _mm256_max_ps(most, size);
    }
    if (_mm256_movemask_ps(finite) != 0xff) {
        *codes = _mm256_setzero_si256();
        sums[0] = sums[1] = 0;
        return NAN;
    }
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(most), _mm256_extractf128_ps(most, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    const float size = _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
    const __m256 by = _mm256_set1_ps(size > 0 ? 127.0F / size : 0);
    __m256i whole[4];
    UNROLL for (int i = 0; i < 4; i++) whole[i] = _mm256_cvtps_epi32(_mm256_mul_ps(values[i], by));
    const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(whole[0], whole[1]), _mm256_packs_epi32(whole[2], whole[3]));
    *codes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), *codes);
    __m256i total = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    total = _mm256_hadd_epi32(total, total);
    total = _mm256_hadd_epi32(total, total);
    sums[0] = _mm256_cvtsi256_si32(total);
    sums[1] = _mm256_extract_epi32(total, 4);
    return size / 127.0F;
}

void SET(convert)(void *row, int64_t first, const float *from, float scale, int64_t count) {
    for (int64_t i = 0; i < count; i += INPUT_BLOCK) {
        unit_input *unit = (unit_input *)row + (first + i) / UNIT;
        const int64_t at = (first + i) % UNIT, group = at / GROUP;
        __m256i codes;
        int sums[2];
        const float step = rounded_block(from + i, scale, &codes, sums);
        _mm256_storeu_si256((__m256i *)(void *)(unit->codes + at), codes);
        unit->scales[group] = step;
        unit->sums[group] = step * (float)(sums[0] + sums[1]);
        UNROLL for (int half = 0; half < 2; half++) {
            unit->half_sums[half][group] = step * (float)sums[half];
            unit->code_sums[half][group] = unit->half_code_sums[2 * group + half] = (int16_t)sums[half];
        }
        unit->code_sums[2][group] = sums[0] + sums[1];
    }
}

void SET(pad)(void *row, int64_t columns) {
    const int64_t at = columns % UNIT;
    if (!at) return;
    unit_input *unit = (unit_input *)row + columns / UNIT;
    memset(unit->codes + at, 0, (size_t)(UNIT - at));
    for (int64_t group = at / GROUP; group < GROUPS; group++) {
        unit->scales[group] = unit->sums[group] = unit->half_sums[0][group] = unit->half_sums[1][group] = 0;
        UNROLL for (int i = 0; i < 3; i++) unit->code_sums[i][group] = 0;
        unit->half_code_sums[2 * group] = unit->half_code_sums[2 * group + 1] = 0;
    }
}

void SET(tile)(void *tile, const float *const *rows, const float *scales, int64_t tokens, int64_t column,
               int64_t count) {
    for (int64_t m = 0; m < tokens; m++) {
        tile_block *to = (tile_block *)tile + column / INPUT_BLOCK;
        for (int64_t i = 0; i < count; i += INPUT_BLOCK, to++) {
            __m256i codes;
            int32_t words[8];
            int sums[2];
            const float step = rounded_block(rows[m] + i, scales ? scales[m] : 1.0F, &codes, sums);
            _mm256_storeu_si256((__m256i *)(void *)words, codes);
            UNROLL for (int j = 0; j < 8; j++) to->codes[j][m] = words[j];
            UNROLL for (int half = 0; half < 2; half++) {
                to->raised[half][m] = -128 * sums[half];
                to->half_sums[half][m] = step * (float)sums[half];
            }
            to->raised[2][m] = -128 * (sums[0] + sums[1]);
            to->scales[m] = step;
            to->sums[m] = step * (float)(sums[0] + sums[1]);
        }
    }
}
