/* The kernels for AVX2 and FMA. */
#include "kernels_internal.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif

#include "vector_avx2.h"

#include "activations_f32_template.h"
#include "rows_template.h"
#include "vector_math_template.h"

const kernel_set pllm_set_avx2 = {
    .element = 4, .tile_tokens = TILE_TOKENS, .few = SET(few), .many = SET(many), .convert = SET(convert),
    .tile = SET(tile), .gate = SET(gate), .exp_sum = SET(exp_sum), .add_scaled = SET(add_scaled),
};

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
