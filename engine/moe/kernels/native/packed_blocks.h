/* Weights in blocks of four to eight bits, as GGUF files hold them: what lies where in a block.

   A row is a whole number of blocks; a block may begin at any address. Not part of the library's interface. */
#ifndef PRIVATELLM_PACKED_BLOCKS_H
#define PRIVATELLM_PACKED_BLOCKS_H

#include <stdint.h>
#include <string.h>

#include "privatellm_kernels.h"

/* Values that the kernels take in one step, whatever the format: one block of 256, or eight of 32. */
#define UNIT 256
#define UNIT_BYTES_LIMIT (UNIT / 32 * 34) /* of a unit in any format of 32 values */
/* Values that have a scale of their own in the finest formats. */
#define FINEST 16
#define UNIT_SCALES (UNIT / FINEST)

static inline int is_packed(int dtype) { return dtype > PLLM_F32 && dtype < PLLM_F16; }
static inline int is_grouped(int dtype) { return dtype > PLLM_F16; }
/* Whether all its codes are multiplied with an input of their own, which no other dtype takes. */
static inline int is_alone(int dtype) { return dtype >= PLLM_BLOCK_FP8; }

typedef struct format_row {
    int values, bytes, codes, bits, above, minimums, shared, table;
} format_row;

#define FORMAT_ROW(NAME, ...) [PLLM_##NAME] = {__VA_ARGS__},
static const format_row format_rows[PLLM_DTYPES] = {PLLM_FORMATS(FORMAT_ROW)};
#undef FORMAT_ROW

static inline int64_t block_values(int dtype) { return format_rows[dtype].values; }
static inline int64_t block_bytes(int dtype) { return format_rows[dtype].bytes; }

/* Whether the blocks of a format say what is to be taken away from its values. */
static inline int has_minimums(int dtype) { return format_rows[dtype].minimums; }

/* Whether each half of 32 values has a scale of its own, and where the format has minimums one of these. */
static inline int is_halved(int dtype) { return format_rows[dtype].shared == FINEST; }

/* By how much the codes of a format, multiplied without a sign, are above what they stand for. */
static inline int above_of(int dtype) { return format_rows[dtype].above; }

/* How far -128 times a sum of codes is shifted to the right to be -above times it, `above` being a power of two. */
static inline int raised_shift(int above) {
    return above == 128 ? 0 : above == 64 ? 1 : above == 32 ? 2 : above == 16 ? 3 : above == 8 ? 4 : above == 4 ? 5 : 7;
}

/* Bits of a code as it is multiplied; one of 8 bits is signed. */
static inline int code_bits(int dtype) { return format_rows[dtype].bits; }

static inline int table_of(int dtype) { return format_rows[dtype].table; }

/* By how much the codes of a format, as they lie in the file, are above what they stand for. */
static inline float raised_in_file(int dtype) { return table_of(dtype) == NO_TABLE ? (float)above_of(dtype) : 0; }

/* Where the codes of a block begin, and how far those of 32 values are from the next ones, where a nibble holds one. */
static inline int64_t codes_at(int dtype) { return format_rows[dtype].codes; }
static inline int64_t codes_apart(int dtype) { return block_values(dtype) == 32 ? block_bytes(dtype) : 16; }

/* Whether the four bytes before the codes of 32 values are a fifth bit of each. */
static inline int has_fifth_bits(int dtype) {
    return block_values(dtype) == 32 && code_bits(dtype) == 5 && table_of(dtype) == NO_TABLE;
}

/* Bytes of so many values, which are whole blocks. */
static inline int64_t bytes_of_values(int dtype, int64_t values) {
    return values / block_values(dtype) * block_bytes(dtype);
}

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

/* The 6-bit scales of Q3_K, 32 more than what they stand for. */
static inline int q3_k_scale(const uint8_t *scales, int i) {
    return (scales[i % 8] >> (i / 8 * 4) & 15) | (scales[8 + i % 4] >> (i / 4 * 2) & 3) << 4;
}

/* A unit as the kernels multiply it: value i is scales[i / FINEST] * codes[i] - minimums[i / FINEST]. */
typedef struct packed_unit {
    int8_t codes[UNIT];
    float scales[UNIT_SCALES], minimums[UNIT_SCALES];
} packed_unit;

static inline uint32_t two_bytes(const uint8_t *from) {
    uint16_t word;
    memcpy(&word, from, 2);
    return word;
}

static inline uint32_t four_bytes(const uint8_t *from) {
    uint32_t word;
    memcpy(&word, from, 4);
    return word;
}

/* The points of the grids. */
extern const uint32_t pllm_iq3_s_grid[512], pllm_iq3_xxs_grid[256];
extern const uint64_t pllm_iq2_xxs_grid[256], pllm_iq2_xs_grid[512], pllm_iq2_s_grid[1024], pllm_iq1_grid[2048];
/* Seven signs, and an eighth, so that the number of negative ones is even. */
extern const uint8_t pllm_even_signs[128];

/* Eight codes of a format with a grid, a byte each, and the bits of their signs. Those of IQ1_S and IQ1_M have their signs,
   and are raised by above_of. */
typedef struct eight_codes {
    uint64_t sizes;
    uint32_t signs;
} eight_codes;

#define IQ1_LESS 0x0202020202020202ULL

/* Number i of 32 in the unit at b. */
static inline eight_codes codes_of_grid(const uint8_t *b, int i, int dtype) {
    const uint8_t *from = b + codes_at(dtype);
    const int group = i / 4, part = i % 4;
    switch (dtype) {
    case PLLM_IQ3_S: {
        const uint32_t high = (uint32_t)b[IQ3_S_HIGH + group] >> (2 * part);
        const uint32_t first = pllm_iq3_s_grid[from[2 * i] | (high << 8 & 256)];
        const uint32_t second = pllm_iq3_s_grid[from[2 * i + 1] | (high << 7 & 256)];
        return (eight_codes){first | (uint64_t)second << 32, b[IQ3_S_SIGNS + i]};
    }
    case PLLM_IQ3_XXS: {
        const uint32_t signs = four_bytes(b + IQ3_XXS_SIGNS + 4 * group) >> (7 * part) & 127;
        const uint32_t first = pllm_iq3_xxs_grid[from[2 * i]], second = pllm_iq3_xxs_grid[from[2 * i + 1]];
        return (eight_codes){first | (uint64_t)second << 32, pllm_even_signs[signs]};
    }
    case PLLM_IQ2_XXS: {
        const uint32_t signs = four_bytes(b + IQ2_XXS_SIGNS + 8 * group) >> (7 * part) & 127;
        return (eight_codes){pllm_iq2_xxs_grid[from[8 * group + part]], pllm_even_signs[signs]};
    }
    case PLLM_IQ2_XS: {
        const uint32_t both = two_bytes(from + 2 * i);
        return (eight_codes){pllm_iq2_xs_grid[both & 511], pllm_even_signs[both >> 9]};
    }
    case PLLM_IQ2_S: {
        const uint32_t high = (uint32_t)b[IQ2_S_HIGH + group] >> (2 * part) & 3;
        return (eight_codes){pllm_iq2_s_grid[from[i] | high << 8], b[IQ2_S_SIGNS + i]};
    }
    case PLLM_IQ1_S: {
        const uint32_t high = two_bytes(b + IQ1_S_HIGH + 2 * group);
        const uint64_t point = pllm_iq1_grid[from[i] | (high >> (3 * part) & 7) << 8];
        return (eight_codes){point - (high >> 15) * IQ1_LESS, 0};
    }
    default: { /* IQ1_M */
        const uint32_t high = (uint32_t)b[IQ1_M_HIGH + i / 2] >> (4 * (i % 2)) & 15;
        return (eight_codes){pllm_iq1_grid[from[i] | (high & 7) << 8] - (high >> 3) * IQ1_LESS, 0};
    }
    }
}

static inline int has_signed_points(int dtype) { return dtype != PLLM_IQ1_S && dtype != PLLM_IQ1_M; }

/* The factor of all scales of a unit of a format with a grid: the one in the file, divided by what codes are multiples of. */
static inline float grid_factor(const uint8_t *b, int dtype) {
    if (dtype == PLLM_IQ3_S) return half_to_float(b);
    if (dtype == PLLM_IQ3_XXS) return half_to_float(b) * 0.5F;
    if (dtype != PLLM_IQ1_M) return half_to_float(b) * 0.125F;
    uint16_t half = 0;
    for (int i = 0; i < 4; i++) half = (uint16_t)(half | two_bytes(b + IQ1_M_SCALES + 2 * i) >> 12 << (4 * i));
    return half_to_float(&half) * 0.125F;
}

/* The bits of the scale of 16 values, number i of 16; the scale is one more than twice as much, times the factor. */
static inline int grid_scale(const uint8_t *b, int i, int dtype) {
    const int group = i / 2;
    switch (dtype) {
    case PLLM_IQ3_S: return b[IQ3_S_SCALES + group / 2] >> (group % 2 * 4) & 15;
    case PLLM_IQ3_XXS: return (int)(four_bytes(b + IQ3_XXS_SIGNS + 4 * group) >> 28);
    case PLLM_IQ2_XXS: return (int)(four_bytes(b + IQ2_XXS_SIGNS + 8 * group) >> 28);
    case PLLM_IQ2_XS: return b[IQ2_XS_SCALES + group] >> (i % 2 * 4) & 15;
    case PLLM_IQ2_S: return b[IQ2_S_SCALES + group] >> (i % 2 * 4) & 15;
    case PLLM_IQ1_S: return (int)(two_bytes(b + IQ1_S_HIGH + 2 * group) >> 12 & 7);
    default: return (int)(two_bytes(b + IQ1_M_SCALES + group / 2 * 2) >> (i % 4 * 3) & 7);
    }
}

/* Half of an unsigned FP8 number (E4M3), as the codes of NVFP4 stand for twice their values; 0x7f is 0. */
static inline float nvfp4_scale(uint8_t code) {
    const uint16_t half = code == 0x7f ? 0 : (uint16_t)((code & 0x7f) << 7);
    return half_to_float(&half) * (FP8_LIFT / 2);
}

/* The first `values` of a unit (whole blocks); the rest are zeros. */
void pllm_open_unit(int dtype, const uint8_t *from, int64_t values, packed_unit *to);

#endif
