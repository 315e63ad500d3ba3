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

/* The points of the grids. Of those of IQ3_S both that differ in the highest bit of nine lie side by side. */
extern const uint32_t pllm_iq3_s_grid[256][2];

/* The first `values` of a unit (whole blocks); the rest are zeros. */
void pllm_open_unit(int dtype, const uint8_t *from, int64_t values, packed_unit *to);

#endif
