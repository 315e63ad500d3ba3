/* Packed weights one value at a time: what the instruction sets are compared with, and what runs where there is none. */
#include "packed_blocks.h"
#include "packed_grids.h"

const uint32_t pllm_iq3_s_grid[512] = {IQ3_S_GRID(IQ3_S_FIRST) IQ3_S_GRID(IQ3_S_SECOND)},
               pllm_iq3_xxs_grid[256] = {IQ3_XXS_GRID(IQ3_XXS_POINT)};
const uint64_t pllm_iq2_xxs_grid[256] = {IQ2_XXS_GRID(IQ2_POINT)}, pllm_iq2_xs_grid[512] = {IQ2_XS_GRID(IQ2_POINT)},
               pllm_iq2_s_grid[1024] = {IQ2_S_GRID(IQ2_POINT)}, pllm_iq1_grid[2048] = {IQ1_S_GRID(IQ1_POINT)};

#define IS_ODD(n) (0x6996 >> ((n) >> 4) & 1) ^ (0x6996 >> ((n) & 15) & 1)
#define EVEN(n) (n) | ((IS_ODD(n)) << 7)
#define FOUR_EVEN(n) EVEN(n), EVEN((n) + 1), EVEN((n) + 2), EVEN((n) + 3)
#define SIXTEEN_EVEN(n) FOUR_EVEN(n), FOUR_EVEN((n) + 4), FOUR_EVEN((n) + 8), FOUR_EVEN((n) + 12)
const uint8_t pllm_even_signs[128] = {
    SIXTEEN_EVEN(0),  SIXTEEN_EVEN(16), SIXTEEN_EVEN(32), SIXTEEN_EVEN(48),
    SIXTEEN_EVEN(64), SIXTEEN_EVEN(80), SIXTEEN_EVEN(96), SIXTEEN_EVEN(112),
};

static const int8_t IQ4[16] = {IQ4_VALUES}, FP4[16] = {FP4_VALUES};

#define FITS(NAME, VALUES, BYTES, ...)                                                                             \
    _Static_assert(UNIT % (VALUES) == 0 && UNIT / (VALUES) * (BYTES) <= UNIT_BYTES_LIMIT, #NAME " fits into a unit");
PLLM_BLOCK_FORMATS(FITS)

/* The codes of a block of 32 whose low nibbles are its first half. */
static void nibbles(const uint8_t *from, int8_t *to) {
    for (int i = 0; i < 16; i++) {
        to[i] = (int8_t)(from[i] & 15);
        to[i + 16] = (int8_t)(from[i] >> 4);
    }
}

static void look_up(int dtype, int8_t *codes) {
    const int8_t *table = table_of(dtype) == IQ4_TABLE ? IQ4 : FP4;
    for (int i = 0; i < 32; i++) codes[i] = table[codes[i]];
}

static void fifth_bits(const uint8_t *from, int8_t *codes) {
    uint32_t bits;
    memcpy(&bits, from, 4);
    for (int i = 0; i < 32; i++) codes[i] = (int8_t)(codes[i] | (bits >> i & 1) << 4);
}

/* A block of 32 values. */
static void open_small(int dtype, const uint8_t *b, int8_t *codes, float *scale, float *minimum) {
    const int above = (int)raised_in_file(dtype);
    *scale = dtype == PLLM_MXFP4 ? e8m0_half(b[0]) : half_to_float(b);
    *minimum = has_minimums(dtype) ? -half_to_float(b + 2) : 0;
    b += codes_at(dtype);
    if (dtype == PLLM_Q8_0) {
        memcpy(codes, b, 32);
        return;
    }
    nibbles(b, codes);
    if (has_fifth_bits(dtype)) fifth_bits(b - 4, codes);
    if (table_of(dtype) != NO_TABLE) look_up(dtype, codes);
    for (int i = 0; i < 32; i++) codes[i] = (int8_t)(codes[i] - above);
}

static void open_k(const uint8_t *b, int five, packed_unit *to) {
    const float scale = half_to_float(b), minimum = half_to_float(b + 2);
    const uint8_t *codes = b + codes_at(five ? PLLM_Q5_K : PLLM_Q4_K), *high = b + Q5_K_HIGH;
    for (int j = 0; j < 8; j++) {
        int own_scale, own_minimum;
        k_scale(b + Q4_K_SCALES, j, &own_scale, &own_minimum);
        for (int i = 0; i < 2; i++) {
            to->scales[2 * j + i] = scale * (float)own_scale;
            to->minimums[2 * j + i] = minimum * (float)own_minimum;
        }
        for (int i = 0; i < 32; i++) {
            int code = codes[j / 2 * 32 + i] >> (j % 2 * 4) & 15;
            if (five) code |= (high[i] >> j & 1) << 4;
            to->codes[j * 32 + i] = (int8_t)code;
        }
    }
}

static void open_q6_k(const uint8_t *b, packed_unit *to) {
    const float scale = half_to_float(b + Q6_K_SCALE);
    for (int i = 0; i < UNIT_SCALES; i++) {
        to->scales[i] = scale * (float)(int8_t)b[Q6_K_SCALES + i];
        to->minimums[i] = 0;
    }
    for (int i = 0; i < UNIT; i++) {
        const int part = i / 128, quarter = i % 128 / 32, at = i % 32;
        const int low = b[part * 64 + quarter % 2 * 32 + at] >> (quarter / 2 * 4) & 15;
        const int high = b[Q6_K_HIGH + part * 32 + at] >> (2 * quarter) & 3;
        to->codes[i] = (int8_t)((low | high << 4) - 32);
    }
}

static void open_iq4_xs(const uint8_t *b, packed_unit *to) {
    const float scale = half_to_float(b);
    const int high = b[IQ4_XS_HIGH] | b[IQ4_XS_HIGH + 1] << 8;
    for (int j = 0; j < 8; j++) {
        const int own = (b[IQ4_XS_LOW + j / 2] >> (j % 2 * 4) & 15) | (high >> (2 * j) & 3) << 4;
        for (int i = 0; i < 2; i++) {
            to->scales[2 * j + i] = scale * (float)(own - 32);
            to->minimums[2 * j + i] = 0;
        }
        nibbles(b + codes_at(PLLM_IQ4_XS) + codes_apart(PLLM_IQ4_XS) * j, to->codes + 32 * j);
        look_up(PLLM_IQ4_XS, to->codes + 32 * j);
    }
}

static void open_q2_k(const uint8_t *b, packed_unit *to) {
    const float scale = half_to_float(b + Q2_K_SCALE), minimum = half_to_float(b + Q2_K_MINIMUM);
    for (int i = 0; i < UNIT_SCALES; i++) {
        to->scales[i] = scale * (float)(b[i] & 15);
        to->minimums[i] = minimum * (float)(b[i] >> 4);
    }
    for (int i = 0; i < UNIT; i++)
        to->codes[i] = (int8_t)(b[codes_at(PLLM_Q2_K) + i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3);
}

static void open_q3_k(const uint8_t *b, packed_unit *to) {
    const float scale = half_to_float(b + Q3_K_SCALE);
    for (int i = 0; i < UNIT_SCALES; i++) {
        to->scales[i] = scale * (float)(q3_k_scale(b + Q3_K_SCALES, i) - 32);
        to->minimums[i] = 0;
    }
    for (int i = 0; i < UNIT; i++) {
        const int low = b[codes_at(PLLM_Q3_K) + i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
        to->codes[i] = (int8_t)((low | (b[i % 32] >> (i / 32) & 1) << 2) - 4);
    }
}

static void open_grid(int dtype, const uint8_t *b, packed_unit *to) {
    const float factor = grid_factor(b, dtype);
    for (int i = 0; i < UNIT_SCALES; i++) {
        to->scales[i] = factor * (float)(1 + 2 * grid_scale(b, i, dtype));
        to->minimums[i] = 0;
    }
    for (int i = 0; i < UNIT; i++) {
        const eight_codes eight = codes_of_grid(b, i / 8, dtype);
        const int size = (int)(eight.sizes >> (i % 8 * 8) & 255);
        to->codes[i] = (int8_t)(!has_signed_points(dtype) ? size - above_of(dtype) : eight.signs >> i % 8 & 1 ? -size : size);
    }
}

/* 3 to the power of n, times what lies in the file, modulo 256, is a number of 256ths whose thirds are the code. */
static int third(uint8_t from, int power) {
    static const uint8_t powers[5] = {1, 3, 9, 27, 81};
    return (uint8_t)(from * powers[power]) * 3 >> 8;
}

static void open_ternary(int dtype, const uint8_t *b, packed_unit *to) {
    const float scale = half_to_float(b + (dtype == PLLM_TQ1_0 ? TQ1_0_SCALE : TQ2_0_SCALE));
    for (int i = 0; i < UNIT_SCALES; i++) {
        to->scales[i] = scale;
        to->minimums[i] = 0;
    }
    for (int i = 0; i < UNIT; i++) {
        const int later = i - 160, last = i - 240;
        const int code = dtype == PLLM_TQ2_0 ? b[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3
                         : i < 160           ? third(b[i % 32], i / 32)
                         : i < 240           ? third(b[TQ1_0_HALVES + later % 16], later / 16)
                                             : third(b[TQ1_0_LAST + last % 4], last / 4);
        to->codes[i] = (int8_t)(code - 1);
    }
}

/* Blocks of 64 and 128 values, as many as there are of a unit. */
static void open_blocks(int dtype, const uint8_t *b, int64_t values, packed_unit *to) {
    memset(to, 0, sizeof *to);
    for (int i = 0; i < (int)values; i++) {
        const uint8_t *block = b + i / block_values(dtype) * block_bytes(dtype), *codes = block + codes_at(dtype);
        const int at = i % (int)block_values(dtype);
        to->scales[i / FINEST] = dtype == PLLM_NVFP4 ? nvfp4_scale(block[at / 16]) : half_to_float(block);
        if (dtype == PLLM_NVFP4)
            to->codes[i] = FP4[codes[at / 16 * 8 + at % 8] >> (at / 8 % 2 * 4) & 15];
        else if (dtype == PLLM_Q1_0)
            to->codes[i] = codes[at / 8] >> (at % 8) & 1 ? 1 : -1;
        else
            to->codes[i] = (int8_t)((codes[at / 4] >> (at % 4 * 2) & 3) - 1);
    }
}

void pllm_open_unit(int dtype, const uint8_t *from, int64_t values, packed_unit *to) {
    switch (dtype) {
    case PLLM_Q4_K:
    case PLLM_Q5_K: open_k(from, dtype == PLLM_Q5_K, to); return;
    case PLLM_Q6_K: open_q6_k(from, to); return;
    case PLLM_IQ4_XS: open_iq4_xs(from, to); return;
    case PLLM_Q2_K: open_q2_k(from, to); return;
    case PLLM_Q3_K: open_q3_k(from, to); return;
    case PLLM_TQ1_0:
    case PLLM_TQ2_0: open_ternary(dtype, from, to); return;
    default: break;
    }
    if (table_of(dtype) == GRID) {
        open_grid(dtype, from, to);
        return;
    }
    if (block_values(dtype) != 32) {
        open_blocks(dtype, from, values, to);
        return;
    }
    if (values < UNIT) memset(to, 0, sizeof *to);
    for (int64_t block = 0; block < values / 32; block++) {
        float scale, minimum;
        open_small(dtype, from + block * block_bytes(dtype), to->codes + 32 * block, &scale, &minimum);
        for (int i = 0; i < 2; i++) {
            to->scales[2 * block + i] = scale;
            to->minimums[2 * block + i] = minimum;
        }
    }
}

void pllm_unpack_row(int dtype, const void *from, float *to, int64_t values) {
    const uint8_t *at = from;
    if (dtype == PLLM_F16) {
        for (int64_t i = 0; i < values; i++) to[i] = half_to_float(at + 2 * i);
        return;
    }
    const int lowered = has_minimums(dtype);
    for (int64_t first = 0; first < values; first += UNIT) {
        packed_unit unit;
        const int64_t count = values - first < UNIT ? values - first : UNIT;
        pllm_open_unit(dtype, at, count, &unit);
        /* Two roundings, the product's and the difference's, as in the reference: nothing may be fused here. */
        for (int64_t i = 0; i < count; i++) {
            const volatile float product = unit.scales[i / FINEST] * (float)unit.codes[i];
            to[first + i] = lowered ? product - unit.minimums[i / FINEST] : product;
        }
        at += bytes_of_values(dtype, count);
    }
}
