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

#define RAISED8 0
#define DOT8(codes, in) _mm512_dpbusd_epi32(_mm512_setzero_si512(), codes, in)
#define DOT4(even, odd, in, in_odd)                                                                                \
    _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), even, in), odd, in_odd)

#undef SET
#define SET(name) pllm_grouped_avx512_vnni_##name
#include "grouped_avx512_template.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
