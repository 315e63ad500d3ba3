/* Products with packed weights for NEON with dot products of bytes: 16 codes of two to eight bits at a time, sums of
   products in whole numbers, four lanes of four values each. Many tokens' with grouped weights, too. */
#include <float.h>
#include <math.h>

#include "grouped_internal.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif

#include "packed_neon_blocks.h"
#include "vector_neon.h"

#define MOST_ROWS 4
#define MOST_TOKENS 4

ALWAYS_INLINE sixteen each_twice(const eight v) {
    return (sixteen){{vzip1q_f32(v.of[0], v.of[0]), vzip2q_f32(v.of[0], v.of[0]), vzip1q_f32(v.of[1], v.of[1]),
                      vzip2q_f32(v.of[1], v.of[1])}};
}

/* The scales of a unit, and what is to be taken away for each 16 values of the input. */
ALWAYS_INLINE sixteen scales_of(const uint8_t *b, const int dtype, sixteen *minimums) {
    const sixteen scales = is_halved(dtype) ? halved_scales(b, dtype) : each_twice(eight_scales(b, dtype));
    if (has_minimums(dtype)) {
        *minimums = is_halved(dtype) ? halved_minimums(b) : each_twice(eight_minimums(b, dtype));
    } else {
        UNROLL for (int i = 0; i < 4; i++) minimums->of[i] = vmulq_n_f32(scales.of[i], raised_in_file(dtype));
    }
    return scales;
}

typedef packed_input unit_input;

/* sums[R][M] += `groups` groups of the units at w, one of each row, times those at x. */
ALWAYS_INLINE void add_unit(const uint8_t *const *w, const unit_input *const *x, const int groups,
                            float32x4_t sums[MOST_ROWS][MOST_TOKENS], const int dtype, const int R, const int M) {
    float scales[MOST_ROWS][MOST_TOKENS][UNIT_SCALES];
    UNROLL for (int r = 0; r < R; r++) {
        sixteen minimums;
        const sixteen own = scales_of(w[r], dtype, &minimums);
        UNROLL for (int m = 0; m < M; m++)
            UNROLL for (int i = 0; i < 4; i++) {
                vst1q_f32(scales[r][m] + 4 * i, vmulq_f32(own.of[i], vld1q_f32(x[m]->scales + 4 * i)));
                if (has_minimums(dtype) || raised_in_file(dtype) != 0)
                    sums[r][m] = vfmsq_f32(sums[r][m], minimums.of[i], vld1q_f32(x[m]->sums + 4 * i));
            }
    }
    UNROLL for (int g = 0; g < GROUPS; g++) {
        if (g >= groups) break;
        UNROLL for (int r = 0; r < R; r++) {
            const int8x16_t codes = codes_of(w[r], g, dtype);
            UNROLL for (int m = 0; m < M; m++) {
                const int32x4_t dots = vdotq_s32(vdupq_n_s32(0), codes, vld1q_s8(x[m]->codes + GROUP * g));
                sums[r][m] = vfmaq_n_f32(sums[r][m], vcvtq_f32_s32(dots), scales[r][m][g]);
            }
        }
    }
}

typedef float32x4_t lanes;

ALWAYS_INLINE lanes no_lanes(void) { return vdupq_n_f32(0); }

ALWAYS_INLINE float added_up(lanes v) { return vaddvq_f32(v); }

#undef SET
#define SET(name) pllm_packed_neon_##name
#define IS_OWN(dtype) 0
#define OWN(...) (void)0
#define ROWS_OF_1 4
#define ROWS_OF_2 2
#define ROWS_OF_3 2
#define ROWS_OF_4 2
#include "packed_rows_template.h"

/* ---- Panels of bytes: a step of four rows is multiplied with one token ------------------------------------------- */

#define STEP 4
#define ROWS_OF_VECTOR 4
#define TOKENS_OF_VECTOR 1
#define VECTORS (SLICE_ROWS / ROWS_OF_VECTOR)

ALWAYS_INLINE void exchange(int8x16_t v[ROWS_OF_VECTOR]) {
    float32x4_t lanes[4];
    UNROLL for (int i = 0; i < 4; i++) lanes[i] = vreinterpretq_f32_s8(v[i]);
    neon_transpose(lanes);
    UNROLL for (int i = 0; i < 4; i++) v[i] = vreinterpretq_s8_f32(lanes[i]);
}

/* sum + w times lane m of the tokens; the instruction takes a number only. */
ALWAYS_INLINE int32x4_t dots_of_lane(int32x4_t sum, int8x16_t w, int8x16_t first, int8x8_t more, const int m) {
    switch (m) {
    case 0: return vdotq_laneq_s32(sum, w, first, 0);
    case 1: return vdotq_laneq_s32(sum, w, first, 1);
    case 2: return vdotq_laneq_s32(sum, w, first, 2);
    case 3: return vdotq_laneq_s32(sum, w, first, 3);
    case 4: return vdotq_lane_s32(sum, w, more, 0);
    default: return vdotq_lane_s32(sum, w, more, 1);
    }
}

ALWAYS_INLINE void add_step(int32x4_t whole[][VECTORS], const int8_t *w, const int8_t *x, const int M) {
    const int8x16_t first = vld1q_s8(x);
    const int8x8_t more = M > 4 ? vld1_s8(x + 16) : vdup_n_s8(0);
    int8x16_t rows[VECTORS];
    UNROLL for (int v = 0; v < VECTORS; v++) rows[v] = vld1q_s8(w + 16 * v);
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int v = 0; v < VECTORS; v++) whole[m][v] = dots_of_lane(whole[m][v], rows[v], first, more, m);
}

ALWAYS_INLINE void row_factors(const float *from, float32x4_t to[VECTORS]) {
    UNROLL for (int v = 0; v < VECTORS; v++) to[v] = vld1q_f32(from + 4 * v);
}

ALWAYS_INLINE float32x4_t token_factors(const float *from) { return vld1q_dup_f32(from); }

ALWAYS_INLINE void load_sums(float32x4_t sums[][VECTORS], const float *y, const int64_t stride, const int M) {
    UNROLL for (int m = 0; m < M; m++) row_factors(y + m * stride, sums[m]);
}

ALWAYS_INLINE void store_sums(const float32x4_t sums[][VECTORS], float *y, const int64_t stride, const int M) {
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int v = 0; v < VECTORS; v++) vst1q_f32(y + m * stride + 4 * v, sums[m][v]);
}

#include "packed_neon_many_template.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
