/* The kernels for AVX2 and FMA. */
#include "grouped_internal.h"
#include "packed_internal.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#include "vector_avx2.h"

#define OPENED PLLM_F32
#include "activations_f32_template.h"
#include "rows_template.h"
#include "vector_math_template.h"

const kernel_set pllm_set_avx2 = {PLAIN_SET};
const kernel_set pllm_set_avx2_fp8 = {FP8_SET};
const kernel_set pllm_set_avx2_packed = {PACKED_AVX2_SET};
const kernel_set pllm_set_avx2_grouped = {GROUPED_AVX2_SET};

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
