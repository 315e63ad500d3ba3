/* Weights in blocks of four to eight bits, as GGUF files hold them: what lies where in a block.

   Formats are described in ggml's ggml-common.h and gguf's quants.py. A row is a whole number of blocks; a block may begin
   at any address. Not part of the library's interface. */
#ifndef PRIVATELLM_PACKED_BLOCKS_H
#define PRIVATELLM_PACKED_BLOCKS_H

#include <stdint.h>
#include <string.h>

#include "privatellm_kernels.h"

/* Values that the kernels take in one step, whatever the format: one block of 256, or eight of 32. */
#define UNIT 256
#define UNIT_BYTES_LIMIT (UNIT / 32 * 34) /* of a unit in any format of 32 values */
/* Values that have a scale of their own in the finest format (Q6_K). */
#define FINEST 16
#define UNIT_SCALES (UNIT / FINEST)

static inline int is_packed(int dtype) { return dtype > PLLM_F32 && dtype < PLLM_F16; }
static inline int is_grouped(int dtype) { return dtype > PLLM_F16; }

static inline int64_t block_values(int dtype) {
    switch (dtype) {
    case PLLM_BF16:
    case PLLM_F16:
    case PLLM_F32:
    case PLLM_BLOCK_FP8: return 1;
    case PLLM_Q4_K:
    case PLLM_Q5_K:
    case PLLM_Q6_K:
    case PLLM_IQ4_XS: return 256;
    default: return 32;
    }
}

static inline int64_t block_bytes(int dtype) {
    switch (dtype) {
    case PLLM_BF16:
    case PLLM_F16: return 2;
    case PLLM_F32: return 4;
    case PLLM_BLOCK_FP8: return 1;
    case PLLM_Q4_0:
    case PLLM_IQ4_NL: return 18;
    case PLLM_Q4_1: return 20;
    case PLLM_Q5_0: return 22;
    case PLLM_Q5_1: return 24;
    case PLLM_Q8_0: return 34;
    case PLLM_Q4_K: return 144;
    case PLLM_Q5_K: return 176;
    case PLLM_Q6_K: return 210;
    case PLLM_IQ4_XS: return 136;
    case PLLM_AFFINE4: /* of grouped weights, the codes */
    case PLLM_OCP_MXFP4: return 16;
    case PLLM_AFFINE8: return 32;
    default: return 17; /* PLLM_MXFP4 */
    }
}

/* Bytes of so many values, which are whole blocks. */
static inline int64_t bytes_of_values(int dtype, int64_t values) {
    return values / block_values(dtype) * block_bytes(dtype);
}

/* Where the parts of a block begin, in bytes. */
enum {
    Q4_K_SCALES = 4, Q4_K_CODES = 16,
    Q5_K_HIGH = 16, Q5_K_CODES = 48,
    Q6_K_HIGH = 128, Q6_K_SCALES = 192, Q6_K_SCALE = 208,
    IQ4_XS_HIGH = 2, IQ4_XS_LOW = 4, IQ4_XS_CODES = 8
};

/* IQ4_NL and IQ4_XS: what a code of four bits stands for. */
#define IQ4_TABLE -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113
/* MXFP4: the same, doubled; the scale is halved for it. */
#define MXFP4_TABLE 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12

static inline float half_to_float(const void *from) {
    uint16_t half;
    memcpy(&half, from, 2);
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = half & 0x7fff;
    uint32_t word;
    float value;
    if (magnitude >= 0x7c00) { /* infinity, or not a number */
        word = 0x7f800000U | (magnitude & 0x3ff) << 13 | (magnitude > 0x7c00 ? 0x400000U : 0);
    } else if (magnitude < 0x400) { /* subnormal: a whole number of 2^-24 */
        value = (float)magnitude * 0x1p-24F;
        memcpy(&word, &value, 4);
    } else {
        word = (magnitude << 13) + 0x38000000U;
    }
    word |= sign;
    memcpy(&value, &word, 4);
    return value;
}

#define FP8_LIFT 256.0F

/* An FP8 number (E4M3) as half precision: a FP8_LIFT-th of it, which loses nothing. */
static inline uint16_t fp8_as_half(uint8_t code) {
    if ((code & 0x7f) == 0x7f) return 0x7fff;
    return (uint16_t)((code & 0x80) << 8 | (code & 0x7f) << 7);
}

/* Half of two to the power of (exponent - 127). */
static inline float e8m0_half(uint8_t exponent) {
    const uint32_t word = exponent < 2 ? 0x00200000U << exponent : (uint32_t)(exponent - 1) << 23;
    float value;
    memcpy(&value, &word, 4);
    return value;
}

/* The 6-bit scale and minimum of sub-block `i` of 8, of Q4_K and Q5_K. */
static inline void k_scale(const uint8_t *scales, int i, int *scale, int *minimum) {
    if (i < 4) {
        *scale = scales[i] & 63;
        *minimum = scales[i + 4] & 63;
    } else {
        *scale = (scales[i + 4] & 15) | (scales[i - 4] >> 6) << 4;
        *minimum = scales[i + 4] >> 4 | (scales[i] >> 6) << 4;
    }
}

/* A unit as the kernels multiply it: value i is scales[i / FINEST] * codes[i] - minimums[i / FINEST]. */
typedef struct packed_unit {
    int8_t codes[UNIT];
    float scales[UNIT_SCALES], minimums[UNIT_SCALES];
} packed_unit;

/* The first `values` of a unit (whole blocks); the rest are zeros. */
void pllm_open_unit(int dtype, const uint8_t *from, int64_t values, packed_unit *to);

#endif
