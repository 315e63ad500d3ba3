/* Products with packed weights for AVX2: 32 codes of four to eight bits at a time, sums of products in whole numbers,
   eight lanes of four values each. */
#include <float.h>
#include <math.h>

#include "packed_internal.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#include "packed_scales_x86.h"
#include "vector_avx2.h"

#define GROUP 32 /* codes of a vector */
#define GROUPS (UNIT / GROUP)
#define MOST_ROWS 4
#define MOST_TOKENS 4

/* Whether the codes of a format are signed. The others are small enough to be added up in pairs in 16 bits. */
ALWAYS_INLINE int is_signed(const int dtype) { return !has_minimums(dtype) && raised_in_file(dtype) == 0; }

ALWAYS_INLINE __m256i masked(__m256i v, int bits) { return _mm256_and_si256(v, _mm256_set1_epi8((char)bits)); }

ALWAYS_INLINE __m256i loaded(const uint8_t *from) { return _mm256_loadu_si256((const __m256i *)(const void *)from); }

/* Low nibbles of 16 bytes, then high nibbles. */
ALWAYS_INLINE __m256i nibbles(const uint8_t *from) {
    const __m128i bytes = _mm_loadu_si128((const __m128i *)(const void *)from);
    return masked(_mm256_set_m128i(_mm_srli_epi16(bytes, 4), bytes), 15);
}

ALWAYS_INLINE __m256i looked_up(__m256i codes, const int dtype) {
    static const int8_t iq4[16] = {IQ4_TABLE}, mxfp4[16] = {MXFP4_TABLE};
    const __m128i table = _mm_loadu_si128((const __m128i *)(const void *)(dtype == PLLM_MXFP4 ? mxfp4 : iq4));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), codes);
}

/* 16 added to the codes whose bit is set in the four bytes at `bits`. */
ALWAYS_INLINE __m256i with_fifth_bits(__m256i codes, const uint8_t *bits) {
    uint32_t word;
    memcpy(&word, bits, 4);
    const __m256i bytes = _mm256_shuffle_epi8(
        _mm256_set1_epi32((int)word),
        _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3));
    const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201ULL);
    return _mm256_or_si256(codes, masked(_mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit), 16));
}

/* Codes 32 g .. 32 g + 31 of the unit at b. */
ALWAYS_INLINE __m256i codes_of(const uint8_t *b, const int g, const int dtype) {
    const uint8_t *block = b + g * block_bytes(dtype);
    switch (dtype) {
    case PLLM_Q4_K: {
        const __m256i both = loaded(b + Q4_K_CODES + g / 2 * 32);
        return masked(g % 2 ? _mm256_srli_epi16(both, 4) : both, 15);
    }
    case PLLM_Q5_K: {
        const __m256i both = loaded(b + Q5_K_CODES + g / 2 * 32), high = loaded(b + Q5_K_HIGH);
        const __m256i low = masked(g % 2 ? _mm256_srli_epi16(both, 4) : both, 15);
        return _mm256_or_si256(low, _mm256_slli_epi16(masked(_mm256_srli_epi16(high, g), 1), 4));
    }
    case PLLM_Q6_K: {
        const int quarter = g % 4;
        const __m256i both = loaded(b + g / 4 * 64 + quarter % 2 * 32), high = loaded(b + Q6_K_HIGH + g / 4 * 32);
        const __m256i low = masked(quarter / 2 ? _mm256_srli_epi16(both, 4) : both, 15);
        return _mm256_or_si256(low, _mm256_slli_epi16(masked(_mm256_srli_epi16(high, 2 * quarter), 3), 4));
    }
    case PLLM_IQ4_XS: return looked_up(nibbles(b + IQ4_XS_CODES + 16 * g), dtype);
    case PLLM_Q4_0: return nibbles(block + 2);
    case PLLM_Q4_1: return nibbles(block + 4);
    case PLLM_Q5_0: return with_fifth_bits(nibbles(block + 6), block + 2);
    case PLLM_Q5_1: return with_fifth_bits(nibbles(block + 8), block + 4);
    case PLLM_IQ4_NL: return looked_up(nibbles(block + 2), dtype);
    case PLLM_MXFP4: return looked_up(nibbles(block + 1), dtype);
    default: return loaded(block + 2);
    }
}

/* Sums of the products of four neighbours. 128 * 127 twice, and 63 * 127 twice, just fit into 16 bits. */
ALWAYS_INLINE __m256i dots(__m256i codes, __m256i in, const int dtype) {
    if (is_signed(dtype)) {
        in = _mm256_sign_epi8(in, codes);
        codes = _mm256_abs_epi8(codes);
    }
    return _mm256_madd_epi16(_mm256_maddubs_epi16(codes, in), _mm256_set1_epi16(1));
}

typedef struct sixteen {
    __m256 low, high;
} sixteen;

ALWAYS_INLINE sixteen each_twice(__m256 v) {
    return (sixteen){_mm256_permutevar8x32_ps(v, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)),
                     _mm256_permutevar8x32_ps(v, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7))};
}

ALWAYS_INLINE sixteen times(sixteen v, float by) {
    const __m256 factor = _mm256_set1_ps(by);
    return (sixteen){_mm256_mul_ps(v.low, factor), _mm256_mul_ps(v.high, factor)};
}

/* The scales of a unit, and what is to be taken away for each 16 values of the input. */
ALWAYS_INLINE sixteen scales_of(const uint8_t *b, const int dtype, sixteen *minimums) {
    if (has_minimums(dtype)) {
        *minimums = each_twice(eight_minimums(b, dtype));
        return each_twice(eight_scales(b, dtype));
    }
    sixteen scales;
    if (dtype == PLLM_Q6_K) {
        const __m128i own = _mm_loadu_si128((const __m128i *)(const void *)(b + Q6_K_SCALES));
        scales = times((sixteen){_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(own)),
                                 _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(own, 8)))},
                       widened(b + Q6_K_SCALE));
    } else {
        scales = each_twice(eight_scales(b, dtype));
    }
    *minimums = times(scales, raised_in_file(dtype));
    return scales;
}

/* sums[R][M] += `groups` groups of the units at w, one of each row, times those at x. */
ALWAYS_INLINE void add_unit(const uint8_t *const *w, const packed_input *const *x, const int groups,
                            __m256 sums[MOST_ROWS][MOST_TOKENS], const int dtype, const int R, const int M) {
    float scales[MOST_ROWS][MOST_TOKENS][UNIT_SCALES];
    UNROLL for (int r = 0; r < R; r++) {
        sixteen minimums;
        const sixteen own = scales_of(w[r], dtype, &minimums);
        UNROLL for (int m = 0; m < M; m++) {
            _mm256_storeu_ps(scales[r][m], _mm256_mul_ps(own.low, _mm256_loadu_ps(x[m]->scales)));
            _mm256_storeu_ps(scales[r][m] + 8, _mm256_mul_ps(own.high, _mm256_loadu_ps(x[m]->scales + 8)));
            if (is_signed(dtype)) continue;
            sums[r][m] = _mm256_fnmadd_ps(minimums.low, _mm256_loadu_ps(x[m]->sums), sums[r][m]);
            sums[r][m] = _mm256_fnmadd_ps(minimums.high, _mm256_loadu_ps(x[m]->sums + 8), sums[r][m]);
        }
    }
    UNROLL for (int g = 0; g < GROUPS; g++) {
        if (g >= groups) break;
        UNROLL for (int r = 0; r < R; r++) {
            const __m256i codes = codes_of(w[r], g, dtype);
            UNROLL for (int m = 0; m < M; m++) {
                const __m256i in = loaded((const uint8_t *)x[m]->codes + GROUP * g);
                const __m256 products = _mm256_cvtepi32_ps(dots(codes, in, dtype));
                const float *scale = scales[r][m] + 2 * g;
                const __m256 by = dtype == PLLM_Q6_K
                                      ? _mm256_set_m128(_mm_broadcast_ss(scale + 1), _mm_broadcast_ss(scale))
                                      : _mm256_broadcast_ss(scale);
                sums[r][m] = _mm256_fmadd_ps(products, by, sums[r][m]);
            }
        }
    }
}

typedef __m256 lanes;

ALWAYS_INLINE lanes no_lanes(void) { return _mm256_setzero_ps(); }

ALWAYS_INLINE float added_up(__m256 v) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

#undef SET
#define SET(name) pllm_packed_avx2_##name
#define ROWS_OF_1 1 /* from end to end: the processor fetches one stream best */
#define ROWS_OF_2 2
#define ROWS_OF_3 1
#define ROWS_OF_4 1
#include "packed_rows_template.h"

#include "packed_avx2_many.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
