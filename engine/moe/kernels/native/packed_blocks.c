/* Packed weights one value at a time: what the instruction sets are compared with, and what runs where there is none. */
#include "packed_blocks.h"
#include "packed_grids.h"

const uint32_t pllm_iq3_s_grid[256][2] = {IQ3_S_GRID(IQ3_S_POINTS)};

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

/* Four or eight codes of a grid, and the signs of each. */
static void signed_point(const void *point, int count, int signs, int8_t *codes) {
    const int8_t *values = point;
    for (int i = 0; i < count; i++) codes[i] = (int8_t)(signs >> i & 1 ? -values[i] : values[i]);
}

static void open_iq3_s(const uint8_t *b, packed_unit *to) {
    const float scale = half_to_float(b);
    for (int j = 0; j < 8; j++) {
        const int own = b[IQ3_S_SCALES + j / 2] >> (j % 2 * 4) & 15;
        for (int i = 0; i < 2; i++) {
            to->scales[2 * j + i] = scale * (float)(1 + 2 * own);
            to->minimums[2 * j + i] = 0;
        }
        for (int i = 0; i < 8; i++) {
            const uint32_t *point = &pllm_iq3_s_grid[b[codes_at(PLLM_IQ3_S) + 8 * j + i]][b[IQ3_S_HIGH + j] >> i & 1];
            signed_point(point, 4, b[IQ3_S_SIGNS + 4 * j + i / 2] >> (i % 2 * 4), to->codes + 32 * j + 4 * i);
        }
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
    case PLLM_IQ3_S: open_iq3_s(from, to); return;
    default: break;
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
