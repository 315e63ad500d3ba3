/* Products of many tokens with packed and grouped weights for NEON with i8mm: one instruction multiplies eight codes of
   each of two rows with those of each of two tokens. What comes out is the same to the bit as without it. */
#include <float.h>
#include <math.h>

#include "grouped_internal.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod,i8mm"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod+i8mm")
#endif

#include "packed_neon_blocks.h"
#include "vector_neon.h"

#undef SET
#define SET(name) pllm_packed_neon_i8mm_##name
#define STEP 8
#define ROWS_OF_VECTOR 2
#define TOKENS_OF_VECTOR 2
#define VECTORS (SLICE_ROWS / ROWS_OF_VECTOR)

ALWAYS_INLINE void exchange(int8x16_t v[ROWS_OF_VECTOR]) {
    const int64x2_t a = vreinterpretq_s64_s8(v[0]), b = vreinterpretq_s64_s8(v[1]);
    v[0] = vreinterpretq_s8_s64(vzip1q_s64(a, b));
    v[1] = vreinterpretq_s8_s64(vzip2q_s64(a, b));
}

ALWAYS_INLINE void add_step(int32x4_t whole[][VECTORS], const int8_t *w, const int8_t *x, const int M) {
    int8x16_t rows[VECTORS];
    UNROLL for (int v = 0; v < VECTORS; v++) rows[v] = vld1q_s8(w + 16 * v);
    UNROLL for (int m = 0; m < M; m += 2) {
        const int8x16_t in = vld1q_s8(x + STEP * m);
        UNROLL for (int v = 0; v < VECTORS; v++) whole[m / 2][v] = vmmlaq_s32(whole[m / 2][v], rows[v], in);
    }
}

/* Sums lie row by row, and of each row token by token. */
ALWAYS_INLINE void row_factors(const float *from, float32x4_t to[VECTORS]) {
    UNROLL for (int v = 0; v < VECTORS; v += 2) {
        const float32x4_t four = vld1q_f32(from + 2 * v);
        to[v] = vzip1q_f32(four, four);
        to[v + 1] = vzip2q_f32(four, four);
    }
}

ALWAYS_INLINE float32x4_t token_factors(const float *from) {
    const float32x2_t two = vld1_f32(from);
    return vcombine_f32(two, two);
}

/* A second token that is not there begins as the first. */
ALWAYS_INLINE void load_sums(float32x4_t sums[][VECTORS], const float *y, const int64_t stride, const int M) {
    UNROLL for (int m = 0; m < M; m += 2)
        UNROLL for (int v = 0; v < VECTORS; v += 2) {
            const float32x4_t first = vld1q_f32(y + m * stride + 2 * v);
            const float32x4_t second = m + 1 < M ? vld1q_f32(y + (m + 1) * stride + 2 * v) : first;
            sums[m / 2][v] = vzip1q_f32(first, second);
            sums[m / 2][v + 1] = vzip2q_f32(first, second);
        }
}

ALWAYS_INLINE void store_sums(const float32x4_t sums[][VECTORS], float *y, const int64_t stride, const int M) {
    UNROLL for (int m = 0; m < M; m += 2)
        UNROLL for (int v = 0; v < VECTORS; v += 2) {
            vst1q_f32(y + m * stride + 2 * v, vuzp1q_f32(sums[m / 2][v], sums[m / 2][v + 1]));
            if (m + 1 < M) vst1q_f32(y + (m + 1) * stride + 2 * v, vuzp2q_f32(sums[m / 2][v], sums[m / 2][v + 1]));
        }
}

#include "packed_neon_many_template.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
