/* The kernels for AVX-512 with float32 activations. */
#include "grouped_internal.h"
#include "packed_internal.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif

#include "vector_avx512f.h"

#define OPEN_ROW(dtype, from, to, count) pllm_packed_avx512f_open_row(dtype, from, to, count)
#define OPEN_GROUPED(matrix, row, first, count, to) \
    pllm_grouped_avx512f_open(matrix, row, first, count, to)
#define OPENED PLLM_F32
#include "activations_f32_template.h"
#include "rows_template.h"
#include "vector_math_template.h"

const kernel_set pllm_set_avx512f = {PLAIN_SET};
const kernel_set pllm_set_avx512f_fp8 = {FP8_SET};
const kernel_set pllm_set_avx512f_packed = {PACKED_SET(avx512f, avx512f)};
const kernel_set pllm_set_avx512_vnni_packed = {PACKED_VNNI_SET};
const kernel_set pllm_set_avx512_vbmi_packed = {PACKED_VBMI_SET};
const kernel_set pllm_set_avx512f_grouped = {GROUPED_SET(avx512f, avx512f)};
const kernel_set pllm_set_avx512_vnni_grouped = {GROUPED_VNNI_SET};

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
