/* Products of few tokens with packed weights that have a grid, for AVX-512 with VNNI and VBMI. */
#include "packed_internal.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,f16c")
#endif

#include "vector_avx512f.h"

#undef SET
#define SET(name) pllm_packed_avx512_vbmi_##name
#define PACKED_FORMATS(ROW) ROW(IQ3_S) ROW(IQ3_XXS) ROW(IQ2_XXS) ROW(IQ2_XS) ROW(IQ2_S) ROW(IQ1_S) ROW(IQ1_M)
#include "packed_avx512_template.h"
#include "packed_grids_avx512_vbmi.h"

#define DOT(codes, in, dtype) SET(dot)(codes, (in)->codes, (in)->raised, dtype)

#include "packed_avx512_dot_vnni.h"

#define LARGE_CODES 1
#define LOOKS_UP 1
#define FEW_OF_OTHERS pllm_packed_avx512_vnni_few
#include "packed_avx512_few_template.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
