/* Products with grouped weights for AVX-512 without VNNI, and the input's conversion for both. */
#include <float.h>

#include "grouped_internal.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c,fma")
#endif

/* Codes lend their signs to the input, as 128 * 127 twice just fits into 16 bits. */
static inline __attribute__((always_inline)) __m512i dot8(__m512i codes, __m512i in) {
    const __m512i code = _mm512_xor_si512(codes, _mm512_set1_epi8((char)0x80));
    in = _mm512_mask_sub_epi8(in, _mm512_movepi8_mask(code), _mm512_setzero_si512(), in);
    return _mm512_madd_epi16(_mm512_maddubs_epi16(_mm512_abs_epi8(code), in), _mm512_set1_epi16(1));
}

/* 2 * 2 * 24 * 127 fit into 16 bits. */
static inline __attribute__((always_inline)) __m512i dot4(__m512i even, __m512i odd, __m512i in, __m512i in_odd) {
    const __m512i pairs = _mm512_add_epi16(_mm512_maddubs_epi16(even, in), _mm512_maddubs_epi16(odd, in_odd));
    return _mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
}

#define RAISED8 128
#define DOT8(codes, in) dot8(codes, in)
#define DOT4(even, odd, in, in_odd) dot4(even, odd, in, in_odd)

#undef SET
#define SET(name) pllm_grouped_avx512f_##name
#include "grouped_avx512_template.h"

/* As pllm_grouped_scalar_convert, to the bit. */
void pllm_grouped_avx512f_convert(void *row, int64_t first, const float *from, float scale, int64_t count) {
    const __m512 by_scale = _mm512_set1_ps(scale);
    for (int64_t i = 0; i < count; i += GROUP_VALUES) {
        grouped_input *unit = (grouped_input *)row + (first + i) / UNIT;
        const int64_t at = (first + i) % UNIT;
        const __m512 a = _mm512_mul_ps(_mm512_loadu_ps(from + i), by_scale);
        const __m512 b = _mm512_mul_ps(_mm512_loadu_ps(from + i + 16), by_scale);
        const __m512 sizes = _mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b));
        const __m512 limit = _mm512_set1_ps(FLT_MAX);
        const int finite = (_mm512_cmp_ps_mask(_mm512_abs_ps(a), limit, _CMP_LE_OQ) &
                            _mm512_cmp_ps_mask(_mm512_abs_ps(b), limit, _CMP_LE_OQ)) == 0xffff;
        const float most = finite ? _mm512_reduce_max_ps(sizes) : 0;
        const float step = finite ? most / 127.0F : __builtin_nanf(""), by = most > 0 ? 127.0F / most : 0;
        const __m512 factor = _mm512_set1_ps(by);
        __m512i low = _mm512_cvtps_epi32(_mm512_mul_ps(a, factor)), high = _mm512_cvtps_epi32(_mm512_mul_ps(b, factor));
        if (!finite) low = high = _mm512_setzero_si512();
        const int sum = _mm512_reduce_add_epi32(_mm512_add_epi32(low, high));
        const __m256i codes = _mm256_set_m128i(_mm512_cvtepi32_epi8(high), _mm512_cvtepi32_epi8(low));
        const __m256i odd_places = _mm256_srai_epi16(codes, 8);
        _mm256_storeu_si256((__m256i *)(void *)(unit->codes + at), codes);
        _mm_storeu_si128((__m128i *)(void *)(unit->apart + at / 2), _mm256_cvtepi16_epi8(codes));
        _mm_storeu_si128((__m128i *)(void *)(unit->apart + UNIT / 2 + at / 2), _mm256_cvtepi16_epi8(odd_places));
        unit->scales[at / GROUP_VALUES] = step;
        unit->sums[at / GROUP_VALUES] = step * (float)sum;
    }
}

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
