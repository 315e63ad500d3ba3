/* The kernels for NEON; empty on other CPUs. */
#include "kernels_internal.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#include <string.h>

#include "vector_neon.h"

#include "activations_f32_template.h"
#include "rows_template.h"
#include "vector_math_template.h"

const kernel_set pllm_set_neon = {
    .element = 4, .tile_tokens = TILE_TOKENS, .few = SET(few), .many = SET(many), .convert = SET(convert),
    .tile = SET(tile), .gate = SET(gate), .exp_sum = SET(exp_sum), .add_scaled = SET(add_scaled),
};
#endif
