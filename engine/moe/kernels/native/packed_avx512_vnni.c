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
#define PACKED_FORMATS PLLM_BLOCK_FORMATS
#include "packed_avx512_template.h"

#define DOT(codes, in, dtype) SET(dot)(codes, (in)->codes, (in)->raised, dtype)

#include "packed_avx512_dot_vnni.h"

#define LARGE_CODES 1
#define LOOKS_UP 0
#define FEW_OF_OTHERS(...) (void)0
#include "packed_avx512_few_template.h"
#include "packed_avx512_input.h"
#include "packed_avx512_many_template.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
