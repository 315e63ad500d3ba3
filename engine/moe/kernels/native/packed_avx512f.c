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

#define SET(name) pllm_packed_avx512f_##name
#define DOTS(codes, in, signed_ones) SET(dots)(codes, in, signed_ones)

/* Two products are added up in 16 bits, which codes below 64 cannot overflow; those of eight bits lend their signs to the
   input, as 128 * 127 twice just fits. */
static inline __attribute__((always_inline)) __m512i SET(dots)(__m512i codes, __m512i in, const int signed_ones) {
    if (signed_ones) {
        codes = _mm512_xor_si512(codes, _mm512_set1_epi8((char)0x80));
        in = _mm512_mask_sub_epi8(in, _mm512_movepi8_mask(codes), _mm512_setzero_si512(), in);
        codes = _mm512_abs_epi8(codes);
    }
    return _mm512_madd_epi16(_mm512_maddubs_epi16(codes, in), _mm512_set1_epi16(1));
}

#include "packed_avx512_template.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
