/* The kernels for NEON; empty on other CPUs. */
#include "grouped_internal.h"
#include "packed_internal.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#include <string.h>

#include "vector_neon.h"

#define OPEN_ROW(dtype, from, to, count) pllm_unpack_row(dtype, from, to, count)
#define OPEN_GROUPED(matrix, row, first, count, to) \
    pllm_grouped_scalar_open(matrix, row, first, count, to)
#define OPENED PLLM_F32
#include "activations_f32_template.h"
#include "rows_template.h"
#include "vector_math_template.h"

const kernel_set pllm_set_neon = {PLAIN_SET};
const kernel_set pllm_set_neon_fp8 = {FP8_SET};
const kernel_set pllm_set_neon_packed = {PACKED_SET(scalar, scalar)};
const kernel_set pllm_set_neon_dot_packed = {PACKED_NEON_SET(neon)};
const kernel_set pllm_set_neon_i8mm_packed = {PACKED_NEON_SET(neon_i8mm)};
const kernel_set pllm_set_neon_grouped = {GROUPED_SET(scalar, scalar)};
const kernel_set pllm_set_neon_dot_grouped = {GROUPED_NEON_SET(neon)};
const kernel_set pllm_set_neon_i8mm_grouped = {GROUPED_NEON_SET(neon_i8mm)};
#endif
