/* Products with packed weights for AVX-512 with VNNI. */
#include "grouped_internal.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c")
#endif

#include "vector_avx512f.h"

#undef SET
#define SET(name) pllm_packed_avx512_vnni_##name
#include "packed_avx512_template.h"

#define DOT(codes, in, dtype) SET(dot)(codes, (in)->codes, (in)->raised, dtype)

static inline __attribute__((always_inline)) __m512i SET(dot)(const __m512i codes[4], const int8_t (*in)[64],
                                                              const int32_t *raised, const int dtype) {
    /* 128 or less: taken away as whole numbers, before anything is added. */
    const unsigned less = (unsigned)raised_shift(raised_by(dtype));
    __m512i sum = _mm512_setzero_si512();
    if (raised_by(dtype) > 0) sum = _mm512_srai_epi32(_mm512_loadu_si512(raised), less);
    UNROLL for (int i = 0; i < 4; i++) sum = _mm512_dpbusd_epi32(sum, codes[i], _mm512_loadu_si512(in[i]));
    return sum;
}

#define LARGE_CODES 1
#include "packed_avx512_few_template.h"
#include "packed_avx512_many_template.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
