/* Products with packed weights for AVX-512 with VNNI. */
#include "packed_internal.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c")
#endif

#define SET(name) pllm_packed_avx512_vnni_##name
#define DOTS(codes, in, signed_ones) SET(dots)(codes, in, signed_ones)

/* What raised codes add, 128 times the inputs, is taken away before: the same for all rows of weights. */
static inline __attribute__((always_inline)) __m512i SET(dots)(__m512i codes, __m512i in, const int signed_ones) {
    __m512i before = _mm512_setzero_si512();
    if (signed_ones)
        before = _mm512_sub_epi32(before, _mm512_slli_epi32(_mm512_dpbusd_epi32(before, _mm512_set1_epi8(1), in), 7));
    return _mm512_dpbusd_epi32(before, codes, in);
}

#include "packed_avx512_template.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
