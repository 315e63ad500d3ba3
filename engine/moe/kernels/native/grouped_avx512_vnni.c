/* Products with grouped weights for AVX-512 with VNNI. */
#include "grouped_internal.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c,fma")
#endif

static inline __attribute__((always_inline)) __m512i dot(const __m512i codes[4], const int8_t (*in)[64]) {
    __m512i sum = _mm512_setzero_si512();
    UNROLL for (int i = 0; i < 4; i++) sum = _mm512_dpbusd_epi32(sum, codes[i], _mm512_loadu_si512(in[i]));
    return sum;
}

#define RAISED8 0
#define DOT(codes, in, dtype) dot(codes, in)

#undef SET
#define SET(name) pllm_grouped_avx512_vnni_##name
#include "grouped_avx512_template.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
