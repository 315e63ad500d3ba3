/* The kernels for AVX-512 with float32 activations. */
#include "kernels_internal.h"

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

#include "activations_f32_template.h"
#include "rows_template.h"
#include "vector_math_template.h"

const kernel_set pllm_set_avx512f = {
    .element = 4, .tile_tokens = TILE_TOKENS, .few = SET(few), .many = SET(many), .convert = SET(convert),
    .tile = SET(tile), .gate = SET(gate), .exp_sum = SET(exp_sum), .add_scaled = SET(add_scaled),
};

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
