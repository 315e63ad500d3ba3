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
    if (raised_by(dtype) == 128 && dtype != PLLM_MXFP4) {
        UNROLL for (int i = 0; i < 4; i++) pairs[i] = _mm512_madd_epi16(pairs[i], ones);
        return _mm512_add_epi32(_mm512_add_epi32(pairs[0], pairs[1]), _mm512_add_epi32(pairs[2], pairs[3]));
    }
    const __m512i first = _mm512_add_epi16(pairs[0], pairs[1]), second = _mm512_add_epi16(pairs[2], pairs[3]);
    __m512i sum;
    if (dtype == PLLM_Q6_K)
        sum = _mm512_add_epi32(_mm512_madd_epi16(first, ones), _mm512_madd_epi16(second, ones));
    else
        sum = _mm512_madd_epi16(_mm512_add_epi16(first, second), ones);
    const int less = raised_by(dtype) == 32 ? 2 : raised_by(dtype) == 16 ? 3 : 4;
    if (raised_by(dtype) == 0 || dtype == PLLM_MXFP4) return sum;
    return _mm512_add_epi32(sum, _mm512_srai_epi32(_mm512_loadu_si512(raised), less));
}

#define LARGE_CODES 0
#include "packed_avx512_few_template.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
