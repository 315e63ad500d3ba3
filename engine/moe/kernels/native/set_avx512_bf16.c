/* The kernels for AVX512_BF16 (with VBMI, which all but the first CPUs that had it have): activations are rounded to
   bfloat16 and multiplied in pairs, sums are float32. For bfloat16 and FP8 weights only; float32 weights go to the AVX-512
   kernels with float32 activations. */
#include "grouped_internal.h"
#include "packed_internal.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi")
#endif

#include "vector_avx512f.h"

#undef SET
#define SET(name) avx512_bf16_##name
#define OPENED PLLM_BF16
#include "activations_bf16_template.h"
#include "rows_template.h"
#include "vector_math_template.h"

const kernel_set pllm_set_avx512_bf16 = {PLAIN_SET};
const kernel_set pllm_set_avx512_bf16_fp8 = {FP8_SET};
const kernel_set pllm_set_avx512_bf16_packed = {PACKED_VBMI_SET};
const kernel_set pllm_set_avx512_bf16_grouped = {GROUPED_VNNI_SET};

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
