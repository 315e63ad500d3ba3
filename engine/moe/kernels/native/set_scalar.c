/* The kernels in plain C: what runs where there is no other set, and what the others are compared with. */
#include "kernels_internal.h"
#include "vector_scalar.h"

#include "activations_f32_template.h"
#include "rows_template.h"
#include "vector_math_template.h"

const kernel_set pllm_set_scalar = {
    .element = 4, .tile_tokens = TILE_TOKENS, .few = SET(few), .many = SET(many), .convert = SET(convert),
    .tile = SET(tile), .gate = SET(gate), .exp_sum = SET(exp_sum), .add_scaled = SET(add_scaled),
};
