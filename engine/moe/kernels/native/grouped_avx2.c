/* Products with grouped weights for AVX2. */
#include "grouped_internal.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#include "grouped_scales_x86.h"
#include "vector_avx2.h"

typedef __m256 lanes;
typedef grouped_input unit_input;

ALWAYS_INLINE lanes no_lanes(void) { return _mm256_setzero_ps(); }

ALWAYS_INLINE float added_up(lanes v) { return eight_added_up(v); }

ALWAYS_INLINE __m256i loaded(const void *from) { return _mm256_loadu_si256((const __m256i *)from); }

/* What codes of four bits stand for, raised by as much as they are multiplied. */
ALWAYS_INLINE __m256i halves(__m256i v, const int dtype) {
    static const int8_t fp4[16] = {FP4_VALUES};
    if (dtype == PLLM_AFFINE4) return v;
    const int above = dtype == PLLM_OCP_MXFP4 ? FP4_RAISED : above_of(dtype);
    const __m128i table = _mm_loadu_si128((const __m128i *)(const void *)fp4);
    const __m256i raised = _mm256_broadcastsi128_si256(_mm_add_epi8(table, _mm_set1_epi8((char)above)));
    return _mm256_shuffle_epi8(raised, v);
}

/* By how much codes, as they are multiplied, are above what they stand for, where their scales know it. */
ALWAYS_INLINE float raised_by(const int dtype) {
    return dtype == PLLM_AFFINE8 ? -128 : dtype == PLLM_OCP_MXFP4 ? FP4_RAISED : 0;
}

#define PAIR(k) (char)(PAIR_BYTE(k, bits) + skip), (char)(PAIR_BYTE(k, bits) + skip + 1)
#define PAIRS PAIR(0), PAIR(1), PAIR(2), PAIR(3), PAIR(4), PAIR(5), PAIR(6), PAIR(7)
#define MOVED(k) (int16_t)(1 << PAIR_SHIFT(k, bits))
#define MOVES MOVED(0), MOVED(1), MOVED(2), MOVED(3), MOVED(4), MOVED(5), MOVED(6), MOVED(7)

/* Sixteen codes' pairs, each in a word; bytes beyond the 16 loaded ones do not matter. */
ALWAYS_INLINE __m128i eight_pairs(const uint8_t *from, const int g, const int bits) {
    int skip;
    const uint8_t *bytes = sixteen_from(from, g, bits, &skip);
    return _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(const void *)bytes), _mm_setr_epi8(PAIRS));
}

/* Codes 32 g and following of the unit at `codes`, which have pairs. */
ALWAYS_INLINE __m256i thirty_two(const uint8_t *codes, const int g, const int bits) {
    const uint8_t *from = codes + g / 2 * 8 * bits;
    const __m256i pairs = _mm256_set_m128i(eight_pairs(from, g % 2 * 2 + 1, bits), eight_pairs(from, g % 2 * 2, bits));
    const __m256i moved = _mm256_mullo_epi16(pairs, _mm256_broadcastsi128_si256(_mm_setr_epi16(MOVES)));
    const int mask = (1 << bits) - 1;
    const __m256i even = _mm256_and_si256(_mm256_srli_epi16(moved, 16 - 2 * bits), _mm256_set1_epi16((int16_t)mask));
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi16(moved, 8 - bits), _mm256_set1_epi16((int16_t)(mask << 8)));
    return _mm256_or_si256(even, odd);
}

/* A unit of NVFP4, whose groups have 16 values: two of the eight sums of 64 values are of one. */
ALWAYS_INLINE void add_nvfp4(const uint8_t *codes, const uint8_t *scales, const uint8_t *table,
                             const unit_input *const *x, lanes *sums, const int M) {
    static const int8_t fp4[16] = {FP4_VALUES};
    const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi8(15);
    const __m256i values = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)fp4));
    UNROLL for (int g = 0; g < UNIT / 64; g++) {
        const __m256i both = loaded(codes + 32 * g);
        const __m256i even = _mm256_shuffle_epi8(values, _mm256_and_si256(both, low));
        const __m256i odd = _mm256_shuffle_epi8(values, _mm256_and_si256(_mm256_srli_epi16(both, 4), low));
        const __m256i even_size = _mm256_abs_epi8(even), odd_size = _mm256_abs_epi8(odd);
        const __m128i four = _mm_cvtepu8_epi32(two_words(scales + 4 * g));
        const __m256i places = _mm256_permutevar8x32_epi32(_mm256_castsi128_si256(four),
                                                           _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
        const __m256 own = _mm256_i32gather_ps((const float *)(const void *)table, places, 4);
        const int first = 2 * g, next = first + 1;
        const __m256i blocks = _mm256_setr_epi32(first, first, first, first, next, next, next, next);
        UNROLL for (int m = 0; m < M; m++) {
            const __m256i a = _mm256_maddubs_epi16(even_size, _mm256_sign_epi8(loaded(x[m]->apart + 32 * g), even));
            const __m256i b = _mm256_maddubs_epi16(odd_size, _mm256_sign_epi8(loaded(x[m]->apart + UNIT / 2 + 32 * g), odd));
            const __m256 dots = _mm256_cvtepi32_ps(_mm256_madd_epi16(_mm256_add_epi16(a, b), ones));
            const __m256 by = _mm256_permutevar8x32_ps(_mm256_loadu_ps(x[m]->scales), blocks);
            sums[m] = _mm256_fmadd_ps(dots, _mm256_mul_ps(own, by), sums[m]);
        }
    }
}

/* Codes of four bits are added up in 16 bits, of which 2 * 2 * 24 * 127 take few; 128 * 127 twice just fit. */
ALWAYS_INLINE void add_unit(const uint8_t *codes, const uint8_t *scales, const uint8_t *biases,
                            const group_reader *reader, const unit_input *const *x, lanes *sums, const int dtype, const int M) {
    if (dtype == PLLM_GROUPED_NVFP4) {
        add_nvfp4(codes, scales, biases, x, sums, M);
        return;
    }
    const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi8(15);
    __m256 added;
    const __m256 own = scales_of(scales, biases, reader, dtype, raised_by(dtype), &added);
    __m256 by[4];
    UNROLL for (int m = 0; m < M; m++) {
        by[m] = _mm256_mul_ps(own, _mm256_loadu_ps(x[m]->scales));
        sums[m] = _mm256_fmadd_ps(added, _mm256_loadu_ps(x[m]->sums), sums[m]);
    }
    if (has_pairs(dtype)) {
        UNROLL for (int g = 0; g < UNIT / 32; g++) {
            const __m256i code = thirty_two(codes, g, group_bits(dtype));
            UNROLL for (int m = 0; m < M; m++) {
                const __m256i dots = _mm256_madd_epi16(_mm256_maddubs_epi16(code, loaded(x[m]->codes + 32 * g)), ones);
                const __m256 scale = _mm256_permutevar8x32_ps(by[m], _mm256_set1_epi32(g));
                sums[m] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots), scale, sums[m]);
            }
        }
        return;
    }
    if (dtype == PLLM_AFFINE8) {
        UNROLL for (int g = 0; g < UNIT / 32; g++) {
            const __m256i code = _mm256_xor_si256(loaded(codes + 32 * g), _mm256_set1_epi8((char)0x80));
            const __m256i size = _mm256_abs_epi8(code);
            UNROLL for (int m = 0; m < M; m++) {
                const __m256i in = _mm256_sign_epi8(loaded(x[m]->codes + 32 * g), code);
                const __m256i dots = _mm256_madd_epi16(_mm256_maddubs_epi16(size, in), ones);
                const __m256 scale = _mm256_permutevar8x32_ps(by[m], _mm256_set1_epi32(g));
                sums[m] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots), scale, sums[m]);
            }
        }
        return;
    }
    UNROLL for (int g = 0; g < UNIT / 64; g++) {
        const __m256i both = loaded(codes + 32 * g);
        const __m256i even = halves(_mm256_and_si256(both, low), dtype);
        const __m256i odd = halves(_mm256_and_si256(_mm256_srli_epi16(both, 4), low), dtype);
        const int first = 2 * g, next = first + 1;
        const __m256i places = _mm256_setr_epi32(first, first, first, first, next, next, next, next);
        UNROLL for (int m = 0; m < M; m++) {
            const __m256i a = _mm256_maddubs_epi16(even, loaded(x[m]->apart + 32 * g));
            const __m256i b = _mm256_maddubs_epi16(odd, loaded(x[m]->apart + UNIT / 2 + 32 * g));
            const __m256 dots = _mm256_cvtepi32_ps(_mm256_madd_epi16(_mm256_add_epi16(a, b), ones));
            sums[m] = _mm256_fmadd_ps(dots, _mm256_permutevar8x32_ps(by[m], places), sums[m]);
        }
    }
}

#undef SET
#define SET(name) pllm_grouped_avx2_##name
#define MOST_TOKENS 4
#define MORE_FORMATS(ROW) ROW(GROUPED_NVFP4)
#include "grouped_rows_template.h"

/* ---- Panels of bytes ------------------------------------------------------------------------------------------ */

#define ROWS_OF_VECTOR 8

/* Codes 32 g and following of the unit at `codes`, in order, as they are multiplied. */
ALWAYS_INLINE __m256i codes_in_order(const uint8_t *codes, const int g, const int dtype) {
    if (has_pairs(dtype)) return thirty_two(codes, g, group_bits(dtype));
    if (dtype == PLLM_AFFINE8) return _mm256_xor_si256(loaded(codes + 32 * g), _mm256_set1_epi8((char)0x80));
    /* Each byte in 16 bits, the second half of it moved up to the next eight. */
    const __m256i wide = _mm256_cvtepu8_epi16(eight_words(codes + 16 * g));
    return halves(_mm256_and_si256(_mm256_or_si256(wide, _mm256_slli_epi16(wide, 4)), _mm256_set1_epi8(15)), dtype);
}

/* The scales of a unit of NVFP4: of its first halves of groups, then of the second ones. */
ALWAYS_INLINE void nvfp4_scales(const uint8_t *scales, const uint8_t *table, __m256 to[2]) {
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    const __m128i apart = _mm_shuffle_epi8(eight_words(scales), order);
    to[0] = _mm256_i32gather_ps((const float *)(const void *)table, _mm256_cvtepu8_epi32(apart), 4);
    to[1] = _mm256_i32gather_ps((const float *)(const void *)table, _mm256_cvtepu8_epi32(_mm_srli_si128(apart, 8)), 4);
}

/* Where the rows of a unit begin. */
typedef struct eight_units {
    const uint8_t *codes[ROWS_OF_VECTOR], *scales[ROWS_OF_VECTOR], *biases[ROWS_OF_VECTOR];
} eight_units;

/* `blocks` of 32 values of a unit, for the eight rows of vector v of the panel. */
ALWAYS_INLINE void open_unit(panel_block *to, const int v, const eight_units *rows, const group_reader *reader,
                             const int64_t blocks, const int dtype) {
    const int64_t apart = sizeof *to / sizeof(float), place = ROWS_OF_VECTOR * v;
    const size_t bytes = (size_t)(divided_up(blocks * reader->groups, UNIT_GROUPS) * reader->width);
    __m256 lanes[ROWS_OF_VECTOR], more[ROWS_OF_VECTOR];
    for (int g = 0; g < (int)blocks; g++) {
        UNROLL for (int r = 0; r < ROWS_OF_VECTOR; r++)
            lanes[r] = _mm256_castsi256_ps(codes_in_order(rows->codes[r], g, dtype));
        avx2_store_transposed(lanes, (float *)(void *)(to[g].codes[0] + 4 * place), PANEL_ROWS, 8);
    }
    for (int r = 0; r < ROWS_OF_VECTOR; r++) {
        uint8_t scales[4 * UNIT_GROUPS] = {0}, biases[4 * UNIT_GROUPS] = {0}; /* so that nothing is read past the row */
        __m256 both[2];
        memcpy(scales, rows->scales[r], bytes);
        if (dtype == PLLM_GROUPED_NVFP4) {
            nvfp4_scales(scales, rows->biases[r], both);
        } else {
            if (dtype != PLLM_OCP_MXFP4) memcpy(biases, rows->biases[r], bytes);
            both[0] = scales_of(scales, biases, reader, dtype, raised_by(dtype), both + 1);
            both[1] = _mm256_sub_ps(_mm256_setzero_ps(), both[1]);
        }
        lanes[r] = both[0];
        more[r] = both[1];
    }
    avx2_store_transposed(lanes, to->scales[0] + place, apart, blocks);
    avx2_store_transposed(more, (dtype == PLLM_GROUPED_NVFP4 ? to->scales[1] : to->minimums[0]) + place, apart, blocks);
}

ALWAYS_INLINE void open_panel(panel_block *to, const pllm_matrix *matrix, const int64_t row, const int64_t rows,
                              const int64_t first, const int64_t count, const int64_t ahead, const int dtype) {
    const group_reader reader = reader_of(matrix);
    const int64_t unit_bytes = bytes_of_values(dtype, UNIT);
    for (int64_t k = 0; k < count; k += UNIT, to += UNIT_GROUPS) {
        const int64_t at = (first + k) / matrix->group * reader.width, values = MIN(UNIT, count - k);
        for (int v = 0; v < PANEL_ROWS / ROWS_OF_VECTOR; v++) {
            uint8_t ends[ROWS_OF_VECTOR][UNIT];
            eight_units units;
            for (int r = 0; r < ROWS_OF_VECTOR; r++) { /* those that are not there get the last one's */
                const int64_t own = row + MIN(ROWS_OF_VECTOR * v + r, rows - 1);
                units.codes[r] = (const uint8_t *)matrix->data + own * reader.code_bytes + bytes_of_values(dtype, first + k);
                units.scales[r] = (const uint8_t *)matrix->scales + own * reader.scale_bytes + at;
                units.biases[r] = biases_of(matrix) + (dtype == PLLM_GROUPED_NVFP4 ? 0 : own * reader.scale_bytes + at);
                for (int64_t line = 0; line < unit_bytes; line += 64)
                    __builtin_prefetch(units.codes[r] + ahead + line, 0, 2);
                if (values == UNIT) continue;
                memset(ends[r], 0, sizeof ends[r]); /* so that nothing is read past the row */
                units.codes[r] = memcpy(ends[r], units.codes[r], (size_t)bytes_of_values(dtype, values));
            }
            open_unit(to, v, &units, &reader, values / GROUP_VALUES, dtype);
        }
    }
}

#define OPEN_PANEL(NAME, ...)                                                                                      \
    case PLLM_##NAME: open_panel(to, matrix, row, rows, first, count, ahead, PLLM_##NAME); break;

void SET(open_panel)(panel_block *to, const pllm_matrix *matrix, int64_t row, int64_t rows, int64_t first,
                     int64_t count, int64_t ahead) {
    switch (matrix->dtype) {
        PLLM_GROUPED_FORMATS(OPEN_PANEL)
        OPEN_PANEL(GROUPED_NVFP4)
    default: break;
    }
}

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
