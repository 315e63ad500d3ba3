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

typedef __m256 lanes;
typedef grouped_input unit_input;

ALWAYS_INLINE lanes no_lanes(void) { return _mm256_setzero_ps(); }

ALWAYS_INLINE float added_up(lanes v) { return eight_added_up(v); }

ALWAYS_INLINE __m256i loaded(const void *from) { return _mm256_loadu_si256((const __m256i *)from); }

ALWAYS_INLINE __m256i halves(__m256i v, const int dtype) {
    static const int8_t fp4[16] = {FP4_VALUES};
    if (dtype == PLLM_AFFINE4) return v;
    const __m128i table = _mm_loadu_si128((const __m128i *)(const void *)fp4);
    const __m256i raised = _mm256_broadcastsi128_si256(_mm_add_epi8(table, _mm_set1_epi8(FP4_RAISED)));
    return _mm256_shuffle_epi8(raised, v);
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
    const float raised = dtype == PLLM_AFFINE8 ? -128 : dtype == PLLM_OCP_MXFP4 ? FP4_RAISED : 0;
    if (dtype == PLLM_GROUPED_NVFP4) {
        add_nvfp4(codes, scales, biases, x, sums, M);
        return;
    }
    const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi8(15);
    __m256 added;
    const __m256 own = scales_of(scales, biases, reader, dtype, raised, &added);
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

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
