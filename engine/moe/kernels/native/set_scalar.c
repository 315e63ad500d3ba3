/* The kernels in plain C: what runs where there is no other set, and what the others are compared with. */
#include "grouped_internal.h"
#include "packed_internal.h"
#include "vector_scalar.h"

#define OPEN_ROW(dtype, from, to, count) pllm_unpack_row(dtype, from, to, count)
#define OPEN_GROUPED(matrix, row, first, count, to) \
    pllm_grouped_scalar_open(matrix, row, first, count, to)
#define OPENED PLLM_F32
#include "activations_f32_template.h"
#include "rows_template.h"
#include "vector_math_template.h"

const kernel_set pllm_set_scalar = {PLAIN_SET};
const kernel_set pllm_set_scalar_fp8 = {FP8_SET};
const kernel_set pllm_set_scalar_packed = {PACKED_SET(scalar, scalar)};
const kernel_set pllm_set_scalar_grouped = {GROUPED_SET(scalar, scalar)};
