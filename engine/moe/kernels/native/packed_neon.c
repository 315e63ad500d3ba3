/* Products with packed weights for NEON with dot products of bytes: 16 codes of four to eight bits at a time, sums of
   products in whole numbers, four lanes of four values each. */
#include "packed_internal.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif

#define GROUP 16 /* codes of a vector, which have one scale */
#define GROUPS (UNIT / GROUP)
#define MOST_ROWS 4
#define MOST_TOKENS 4

ALWAYS_INLINE uint8x16_t nibble(const uint8_t *from, const int high) {
    const uint8x16_t bytes = vld1q_u8(from);
    return high ? vshrq_n_u8(bytes, 4) : vandq_u8(bytes, vdupq_n_u8(15));
}

ALWAYS_INLINE int8x16_t looked_up(uint8x16_t codes, const int dtype) {
    static const int8_t iq4[16] = {IQ4_TABLE}, mxfp4[16] = {MXFP4_TABLE};
    return vqtbl1q_s8(vld1q_s8(dtype == PLLM_MXFP4 ? mxfp4 : iq4), codes);
}

/* 16 added to the codes whose bit is set in the two bytes at `bits`. */
ALWAYS_INLINE uint8x16_t with_fifth_bits(uint8x16_t codes, const uint8_t *bits) {
    static const uint8_t each[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const uint8x16_t bytes = vcombine_u8(vdup_n_u8(bits[0]), vdup_n_u8(bits[1]));
    return vorrq_u8(codes, vandq_u8(vtstq_u8(bytes, vld1q_u8(each)), vdupq_n_u8(16)));
}

/* `bits` of each byte, moved to where the fifth bit is. Shifts by a vector go left, or right where it is negative. */
ALWAYS_INLINE uint8x16_t high_bits(const uint8_t *from, const int shift, const int bits) {
    const uint8x16_t bytes = vshlq_u8(vld1q_u8(from), vdupq_n_s8((int8_t)-shift));
    return vshlq_n_u8(vandq_u8(bytes, vdupq_n_u8((uint8_t)bits)), 4);
}

/* Codes 16 g .. 16 g + 15 of the unit at b. */
ALWAYS_INLINE int8x16_t codes_of(const uint8_t *b, const int g, const int dtype) {
    const uint8_t *block = b + g / 2 * block_bytes(dtype);
    const int half = g % 2;
    uint8x16_t codes;
    switch (dtype) {
    case PLLM_Q4_K: codes = nibble(b + Q4_K_CODES + g / 4 * 32 + half * 16, g / 2 % 2); break;
    case PLLM_Q5_K:
        codes = vorrq_u8(nibble(b + Q5_K_CODES + g / 4 * 32 + half * 16, g / 2 % 2),
                         high_bits(b + Q5_K_HIGH + half * 16, g / 2, 1));
        break;
    case PLLM_Q6_K: {
        const int part = g / 8, quarter = g % 8 / 2;
        codes = vorrq_u8(nibble(b + part * 64 + quarter % 2 * 32 + half * 16, quarter / 2),
                         high_bits(b + Q6_K_HIGH + part * 32 + half * 16, 2 * quarter, 3));
        break;
    }
    case PLLM_IQ4_XS: return looked_up(nibble(b + IQ4_XS_CODES + g / 2 * 16, half), dtype);
    case PLLM_Q4_0: codes = nibble(block + 2, half); break;
    case PLLM_Q4_1: codes = nibble(block + 4, half); break;
    case PLLM_Q5_0: codes = with_fifth_bits(nibble(block + 6, half), block + 2 + 2 * half); break;
    case PLLM_Q5_1: codes = with_fifth_bits(nibble(block + 8, half), block + 4 + 2 * half); break;
    case PLLM_IQ4_NL: return looked_up(nibble(block + 2, half), dtype);
    case PLLM_MXFP4: return looked_up(nibble(block + 1, half), dtype);
    default: return vld1q_s8((const int8_t *)block + 2 + 16 * half);
    }
    return vreinterpretq_s8_u8(codes);
}

typedef struct sixteen {
    float32x4_t of[4];
} sixteen;

ALWAYS_INLINE sixteen each_twice(const float *eight, float by) {
    const float32x4_t low = vmulq_n_f32(vld1q_f32(eight), by), high = vmulq_n_f32(vld1q_f32(eight + 4), by);
    return (sixteen){{vzip1q_f32(low, low), vzip2q_f32(low, low), vzip1q_f32(high, high), vzip2q_f32(high, high)}};
}

ALWAYS_INLINE float widened(const uint8_t *from) {
    __fp16 half;
    memcpy(&half, from, 2);
    return (float)half;
}

/* The scales of a unit, and what is to be taken away for each 16 values of the input. */
ALWAYS_INLINE sixteen scales_of(const uint8_t *b, const int dtype, sixteen *minimums) {
    const int64_t size = block_bytes(dtype);
    float own[8], less[8];
    sixteen scales;
    *minimums = (sixteen){{vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0)}};
    switch (dtype) {
    case PLLM_Q4_K:
    case PLLM_Q5_K:
        UNROLL for (int i = 0; i < 8; i++) {
            int scale, minimum;
            k_scale(b + Q4_K_SCALES, i, &scale, &minimum);
            own[i] = (float)scale;
            less[i] = (float)minimum;
        }
        *minimums = each_twice(less, widened(b + 2));
        return each_twice(own, widened(b));
    case PLLM_Q6_K: {
        const int8x16_t bytes = vld1q_s8((const int8_t *)b + Q6_K_SCALES);
        const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
        const float by = widened(b + Q6_K_SCALE);
        scales.of[0] = vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), by);
        scales.of[1] = vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))), by);
        scales.of[2] = vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), by);
        scales.of[3] = vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_high_s16(high))), by);
        break;
    }
    case PLLM_IQ4_XS: {
        const int high = b[IQ4_XS_HIGH] | b[IQ4_XS_HIGH + 1] << 8;
        UNROLL for (int i = 0; i < 8; i++)
            own[i] = (float)(((b[IQ4_XS_LOW + i / 2] >> (i % 2 * 4) & 15) | (high >> (2 * i) & 3) << 4) - 32);
        return each_twice(own, widened(b));
    }
    default:
        UNROLL for (int i = 0; i < 8; i++)
            own[i] = dtype == PLLM_MXFP4 ? e8m0_half(b[i * size]) : widened(b + i * size);
        scales = each_twice(own, 1);
    }
    if (dtype == PLLM_Q4_1 || dtype == PLLM_Q5_1) {
        UNROLL for (int i = 0; i < 8; i++) less[i] = widened(b + i * size + 2);
        *minimums = each_twice(less, -1);
    } else if (raised_in_file(dtype) != 0) {
        UNROLL for (int i = 0; i < 4; i++) minimums->of[i] = vmulq_n_f32(scales.of[i], raised_in_file(dtype));
    }
    return scales;
}

/* sums[R][M] += `groups` groups of the units at w, one of each row, times those at x. */
ALWAYS_INLINE void add_unit(const uint8_t *const *w, const packed_input *const *x, const int groups,
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

#define SET(name) pllm_packed_neon_##name
#define ROWS_OF_1 4
#define ROWS_OF_2 2
#define ROWS_OF_3 2
#define ROWS_OF_4 2
#include "packed_rows_template.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
