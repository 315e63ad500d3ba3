/* Products with packed weights for AVX-512 without VNNI. */
#include "packed_internal.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c")
#endif

#include "vector_avx512f.h"

#undef SET
#define SET(name) pllm_packed_avx512f_##name
#define PACKED_FORMATS PLLM_BLOCK_FORMATS
#include "packed_avx512_template.h"

#define DOT(codes, in, dtype) SET(dot)(codes, (in)->codes, (in)->raised, dtype)

/* Products of two codes are added up in 16 bits, which codes below 64 cannot overflow, nor twice as many of them; those of
   up to five bits not even four times. Codes of eight bits lend their signs to the input, as 128 * 127 twice just fits. */
static inline __attribute__((always_inline)) __m512i SET(dot)(const __m512i codes[4], const int8_t (*in)[64],
                                                              const int32_t *raised, const int dtype) {
    const __m512i ones = _mm512_set1_epi16(1);
    __m512i pairs[4];
    UNROLL for (int i = 0; i < 4; i++) {
        __m512i code = codes[i], x = _mm512_loadu_si512(in[i]);
        if (raised_by(dtype) == 128) {
            code = _mm512_xor_si512(code, _mm512_set1_epi8((char)0x80));
            x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(code), _mm512_setzero_si512(), x);
            code = _mm512_abs_epi8(code);
        }
        pairs[i] = _mm512_maddubs_epi16(code, x);
    }
    __m512i sum;
    if (code_bits(dtype) > 6) {
        UNROLL for (int i = 0; i < 4; i++) pairs[i] = _mm512_madd_epi16(pairs[i], ones);
        sum = _mm512_add_epi32(_mm512_add_epi32(pairs[0], pairs[1]), _mm512_add_epi32(pairs[2], pairs[3]));
    } else {
        const __m512i first = _mm512_add_epi16(pairs[0], pairs[1]), second = _mm512_add_epi16(pairs[2], pairs[3]);
        sum = code_bits(dtype) == 6 ? _mm512_add_epi32(_mm512_madd_epi16(first, ones), _mm512_madd_epi16(second, ones))
                                    : _mm512_madd_epi16(_mm512_add_epi16(first, second), ones);
    }
    if (raised_by(dtype) == 0 || raised_by(dtype) == 128) return sum;
    return _mm512_add_epi32(sum, _mm512_srai_epi32(_mm512_loadu_si512(raised), (unsigned)raised_shift(raised_by(dtype))));
}

#define LARGE_CODES 0
#define LOOKS_UP 0
#define FEW_OF_OTHERS(...) (void)0
#include "packed_avx512_few_template.h"
#include "packed_avx512_input.h"

/* ---- Rows opened for panels ---------------------------------------------------------------------------------- */

/* The figures of a unit for each 16 values: those of groups, or of their first halves and their second ones. */
ALWAYS_INLINE __m512 of_sixteen(const __m256 figures[2], const int dtype) {
    const __m512 both = _mm512_insertf32x8(_mm512_castps256_ps512(figures[0]), figures[is_halved(dtype) ? 1 : 0], 1);
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15), both);
}

/* The scales of a unit, and what is to be taken away, for each 16 values of raised codes. */
ALWAYS_INLINE __m512 scales_of_sixteen(const uint8_t *b, const int dtype, __m512 *minimums) {
    __m256 own[2], less[2];
    scales_of(b, own, dtype);
    const __m512 scales = of_sixteen(own, dtype);
    if (has_minimums(dtype)) {
        minimums_of(b, less, dtype);
        *minimums = of_sixteen(less, dtype);
    } else {
        *minimums = _mm512_mul_ps(scales, _mm512_set1_ps((float)raised_by(dtype)));
    }
    return scales;
}

/* The values of sixteen raised codes. */
ALWAYS_INLINE __m512 opened(__m128i codes, __m512 scales, __m512 minimums, const int part) {
    const __m512 values = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(codes));
    const __m512i lane = _mm512_set1_epi32(part);
    return _mm512_fmsub_ps(values, _mm512_permutexvar_ps(lane, scales), _mm512_permutexvar_ps(lane, minimums));
}

ALWAYS_INLINE void open_row(const int dtype, const uint8_t *from, float *to, int64_t count) {
    for (int64_t first = 0; first < count; first += UNIT) {
        uint8_t blocks[UNIT_BYTES_LIMIT];
        const uint8_t *unit = from + bytes_of_values(dtype, first);
        const int64_t values = MIN(UNIT, count - first);
        if (values < UNIT) {
            memset(blocks, 0, sizeof blocks);
            memcpy(blocks, unit, (size_t)bytes_of_values(dtype, values));
            unit = blocks;
        }
        __m512 minimums;
        const __m512 scales = scales_of_sixteen(unit, dtype, &minimums);
        uint8_t room[UNIT];
        const uint8_t *readable_unit = readable(unit, room, dtype);
        UNROLL for (int g = 0; g < GROUPS; g++) {
            const __m512i codes = codes_of(readable_unit, g, dtype);
            UNROLL for (int i = 0; i < GROUP / 16; i++) {
                const int64_t at = first + GROUP * g + 16 * i;
                if (at >= count) break;
                /* What is extracted must be a constant for every compiler, also before it inlines. */
                const __m128i sixteen = i == 0   ? _mm512_extracti32x4_epi32(codes, 0)
                                        : i == 1 ? _mm512_extracti32x4_epi32(codes, 1)
                                        : i == 2 ? _mm512_extracti32x4_epi32(codes, 2)
                                                 : _mm512_extracti32x4_epi32(codes, 3);
                _mm512_storeu_ps(to + at, opened(sixteen, scales, minimums, 4 * g + i));
            }
        }
    }
}

#define OPEN(NAME, ...)                                                                                            \
    case PLLM_##NAME: open_row(PLLM_##NAME, from, to, count); break;

void SET(open_row)(int dtype, const void *from, float *to, int64_t count) {
    switch (dtype) {
        PLLM_BLOCK_FORMATS(OPEN)
    default: break;
    }
}

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
