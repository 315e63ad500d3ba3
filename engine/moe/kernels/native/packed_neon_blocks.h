/* Packed weights as NEON reads them: 16 codes of two to eight bits at a time, and the scales of a unit. Codes of grouped
   weights are among them. */

#define GROUP 16 /* codes of a vector, which have one scale */
#define GROUPS (UNIT / GROUP)
/* Rows of a panel of bytes that are multiplied together: their sums with a tile's tokens fit twice into registers, as whole
   numbers and as products. */
#define SLICE_ROWS 8

/* ---- Codes ------------------------------------------------------------------------------------------------------- */

ALWAYS_INLINE uint8x16_t nibble(const uint8_t *from, const int high) {
    const uint8x16_t bytes = vld1q_u8(from);
    return high ? vshrq_n_u8(bytes, 4) : vandq_u8(bytes, vdupq_n_u8(15));
}

/* Of the nibbles of 16 bytes, in the order of the bytes, the first 16 or the other ones. */
ALWAYS_INLINE uint8x16_t nibbles_in_order(const uint8_t *from, const int second) {
    const uint8x8_t bytes = vld1_u8(from + 8 * second);
    const uint8x8_t low = vand_u8(bytes, vdup_n_u8(15)), high = vshr_n_u8(bytes, 4);
    return vcombine_u8(vzip1_u8(low, high), vzip2_u8(low, high));
}

ALWAYS_INLINE int8x16_t looked_up(uint8x16_t codes, const int dtype) {
    static const int8_t iq4[16] = {IQ4_VALUES}, fp4[16] = {FP4_VALUES};
    return vqtbl1q_s8(vld1q_s8(table_of(dtype) == IQ4_TABLE ? iq4 : fp4), codes);
}

/* All bits of a byte for each bit of two that is set. */
ALWAYS_INLINE uint8x16_t bytes_of_bits(const int first, const int second) {
    static const uint8_t each[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    return vtstq_u8(vcombine_u8(vdup_n_u8((uint8_t)first), vdup_n_u8((uint8_t)second)), vld1q_u8(each));
}

/* 16 added to the codes whose bit is set in the two bytes at `bits`. */
ALWAYS_INLINE uint8x16_t with_fifth_bits(uint8x16_t codes, const uint8_t *bits) {
    return vorrq_u8(codes, vandq_u8(bytes_of_bits(bits[0], bits[1]), vdupq_n_u8(16)));
}

/* `bits` of each byte, moved to where the fifth bit is. Shifts by a vector go left, or right where it is negative. */
ALWAYS_INLINE uint8x16_t high_bits(const uint8_t *from, const int shift, const int bits) {
    const uint8x16_t bytes = vshlq_u8(vld1q_u8(from), vdupq_n_s8((int8_t)-shift));
    return vshlq_n_u8(vandq_u8(bytes, vdupq_n_u8((uint8_t)bits)), 4);
}

ALWAYS_INLINE uint8x16_t low_bits(const uint8_t *from, const int shift, const int bits) {
    return vandq_u8(vshlq_u8(vld1q_u8(from), vdupq_n_s8((int8_t)-shift)), vdupq_n_u8((uint8_t)bits));
}

/* Sizes with the signs of the bits of two bytes. */
ALWAYS_INLINE int8x16_t with_signs(uint8x16_t sizes, const int first, const int second) {
    const uint8x16_t negative = bytes_of_bits(first, second);
    return vreinterpretq_s8_u8(vsubq_u8(veorq_u8(sizes, negative), negative));
}

/* Codes 16 g .. 16 g + 15 of the unit at b, of a format with a grid. */
ALWAYS_INLINE int8x16_t of_grid(const uint8_t *b, const int g, const int dtype) {
    const eight_codes first = codes_of_grid(b, 2 * g, dtype), second = codes_of_grid(b, 2 * g + 1, dtype);
    const uint8x16_t sizes = vcombine_u8(vcreate_u8(first.sizes), vcreate_u8(second.sizes));
    if (has_signed_points(dtype)) return with_signs(sizes, (int)first.signs, (int)second.signs);
    return vreinterpretq_s8_u8(vsubq_u8(sizes, vdupq_n_u8((uint8_t)above_of(dtype))));
}

/* Sixteen bytes times powers of three, modulo 256: the thirds of a whole that they are 256ths of. */
ALWAYS_INLINE uint8x16_t thirds(uint8x16_t bytes, uint8x16_t powers) {
    const uint8x16_t of = vmulq_u8(bytes, powers);
    const uint8x16_t first = vcgeq_u8(of, vdupq_n_u8(86)), second = vcgeq_u8(of, vdupq_n_u8(171));
    return vsubq_u8(vdupq_n_u8(0), vaddq_u8(first, second));
}

ALWAYS_INLINE uint8x16_t of_tq1_0(const uint8_t *b, const int g) {
    static const uint8_t powers[5] = {1, 3, 9, 27, 81}, each[16] = {1, 1, 1, 1, 3, 3, 3, 3, 9, 9, 9, 9, 27, 27, 27, 27};
    if (g < 10) return thirds(vld1q_u8(b + g % 2 * 16), vdupq_n_u8(powers[g / 2]));
    if (g < 15) return thirds(vld1q_u8(b + TQ1_0_HALVES), vdupq_n_u8(powers[g - 10]));
    return thirds(vreinterpretq_u8_u32(vdupq_n_u32(four_bytes(b + TQ1_0_LAST))), vld1q_u8(each));
}

/* Four bytes of four codes each, the first in the lowest bits. */
ALWAYS_INLINE uint8x16_t of_q2_0(const uint8_t *from) {
    const uint8x16_t four = vreinterpretq_u8_u32(vdupq_n_u32(four_bytes(from)));
    static const uint8_t each[16] = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
    static const int8_t right[16] = {0, -2, -4, -6, 0, -2, -4, -6, 0, -2, -4, -6, 0, -2, -4, -6};
    return vandq_u8(vshlq_u8(vqtbl1q_u8(four, vld1q_u8(each)), vld1q_s8(right)), vdupq_n_u8(3));
}

#define PAIR(k) (uint8_t)(PAIR_BYTE(k, bits) + skip), (uint8_t)(PAIR_BYTE(k, bits) + skip + 1)
#define MOVED(k) PAIR_SHIFT(k, bits)

/* Codes 16 g .. 16 g + 15 of the unit at b, of grouped weights that have pairs. */
ALWAYS_INLINE int8x16_t paired_codes(const uint8_t *b, const int g, const int bits) {
    int skip;
    const uint8x16_t bytes = vld1q_u8(sixteen_from(b + g / 4 * 8 * bits, g % 4, bits, &skip));
    const uint8_t places[16] = {PAIR(0), PAIR(1), PAIR(2), PAIR(3), PAIR(4), PAIR(5), PAIR(6), PAIR(7)};
    const int16_t moves[8] = {MOVED(0), MOVED(1), MOVED(2), MOVED(3), MOVED(4), MOVED(5), MOVED(6), MOVED(7)};
    const uint16x8_t pairs = vreinterpretq_u16_u8(vqtbl1q_u8(bytes, vld1q_u8(places)));
    const uint16x8_t moved = vshlq_u16(pairs, vld1q_s16(moves));
    const uint16_t mask = (uint16_t)((1 << bits) - 1);
    const uint16x8_t even = vandq_u16(vshlq_u16(moved, vdupq_n_s16((int16_t)(2 * bits - 16))), vdupq_n_u16(mask));
    const uint16x8_t odd = vandq_u16(vshlq_u16(moved, vdupq_n_s16((int16_t)(bits - 8))), vdupq_n_u16((uint16_t)(mask << 8)));
    return vreinterpretq_s8_u16(vorrq_u16(even, odd));
}

/* Codes 16 g .. 16 g + 15 of the unit at b. Those of PLLM_AFFINE8 are 128 less than in the file. */
ALWAYS_INLINE int8x16_t codes_of(const uint8_t *b, const int g, const int dtype) {
    const uint8_t *from = b + codes_at(dtype) + g / 2 * codes_apart(dtype);
    const int half = g % 2;
    const int64_t twos = codes_at(dtype) + g / 8 * 32 + half * 16;
    const int blocks = (int)block_values(dtype) / GROUP;
    const uint8_t *block = b + g / blocks * block_bytes(dtype) + codes_at(dtype);
    uint8x16_t codes;
    if (is_grouped(dtype) && has_pairs(dtype)) return paired_codes(b, g, group_bits(dtype));
    if (table_of(dtype) == GRID) return of_grid(b, g, dtype);
    switch (dtype) {
    case PLLM_TQ1_0: codes = of_tq1_0(b, g); break;
    case PLLM_Q1_0: {
        const uint8_t *bits = block + g % 8 * 2;
        codes = vandq_u8(bytes_of_bits(bits[0], bits[1]), vdupq_n_u8(2));
        break;
    }
    case PLLM_Q2_0: codes = of_q2_0(block + g % 4 * 4); break;
    case PLLM_NVFP4: {
        const uint8x8_t bytes = vld1_u8(block + g % 4 * 8);
        return looked_up(vcombine_u8(vand_u8(bytes, vdup_n_u8(15)), vshr_n_u8(bytes, 4)), dtype);
    }
    case PLLM_TQ2_0:
    case PLLM_Q2_K: codes = low_bits(b + twos, g / 2 % 4 * 2, 3); break;
    case PLLM_Q3_K:
        codes = vorrq_u8(low_bits(b + twos, g / 2 % 4 * 2, 3), vshlq_n_u8(low_bits(b + half * 16, g / 2, 1), 2));
        break;
    case PLLM_Q4_K: codes = nibble(b + codes_at(dtype) + g / 4 * 32 + half * 16, g / 2 % 2); break;
    case PLLM_Q5_K:
        codes = vorrq_u8(nibble(b + codes_at(dtype) + g / 4 * 32 + half * 16, g / 2 % 2),
                         high_bits(b + Q5_K_HIGH + half * 16, g / 2, 1));
        break;
    case PLLM_Q6_K: {
        const int part = g / 8, quarter = g % 8 / 2;
        codes = vorrq_u8(nibble(b + part * 64 + quarter % 2 * 32 + half * 16, quarter / 2),
                         high_bits(b + Q6_K_HIGH + part * 32 + half * 16, 2 * quarter, 3));
        break;
    }
    case PLLM_AFFINE4: codes = nibbles_in_order(from, half); break;
    case PLLM_AFFINE8: codes = veorq_u8(vld1q_u8(from + 16 * half), vdupq_n_u8(0x80)); break;
    case PLLM_OCP_MXFP4:
    case PLLM_GROUPED_NVFP4: return looked_up(nibbles_in_order(from, half), dtype);
    case PLLM_Q8_0: return vld1q_s8((const int8_t *)from + 16 * half);
    default:
        codes = nibble(from, half);
        if (table_of(dtype) != NO_TABLE) return looked_up(codes, dtype);
        if (has_fifth_bits(dtype)) codes = with_fifth_bits(codes, from - 4 + 2 * half);
    }
    return vreinterpretq_s8_u8(codes);
}

/* ---- Scales ------------------------------------------------------------------------------------------------------ */

/* One for each 32 values of a unit. */
typedef struct eight {
    float32x4_t of[2];
} eight;

/* One for each 16. */
typedef struct sixteen {
    float32x4_t of[4];
} sixteen;

ALWAYS_INLINE float widened(const uint8_t *from) {
    __fp16 half;
    memcpy(&half, from, 2);
    return (float)half;
}

ALWAYS_INLINE eight eight_products(const float *figures, const float by) {
    return (eight){{vmulq_n_f32(vld1q_f32(figures), by), vmulq_n_f32(vld1q_f32(figures + 4), by)}};
}

/* The scales of Q4_K and Q5_K as k_scale reads them; `minimums` instead of them. */
ALWAYS_INLINE eight eight_k(const uint8_t *b, const int minimums) {
    uint32_t first, second, third;
    memcpy(&first, b + Q4_K_SCALES, 4);
    memcpy(&second, b + Q4_K_SCALES + 4, 4);
    memcpy(&third, b + Q4_K_SCALES + 8, 4);
    const uint32_t own = minimums ? second : first, shared = minimums ? third >> 4 : third;
    const uint64_t bytes =
        (own & 0x3f3f3f3fU) | (uint64_t)((shared & 0x0f0f0f0fU) | (own >> 2 & 0x30303030U)) << 32;
    const uint16x8_t whole = vmovl_u8(vcreate_u8(bytes));
    const float by = widened(b + 2 * minimums);
    return (eight){{vmulq_n_f32(vcvtq_f32_u32(vmovl_u16(vget_low_u16(whole))), by),
                    vmulq_n_f32(vcvtq_f32_u32(vmovl_u16(vget_high_u16(whole))), by)}};
}

/* Of formats that are not halved. */
ALWAYS_INLINE eight eight_scales(const uint8_t *b, const int dtype) {
    const int64_t size = block_bytes(dtype);
    float own[8];
    if (dtype == PLLM_Q4_K || dtype == PLLM_Q5_K) return eight_k(b, 0);
    if (dtype == PLLM_IQ4_XS) {
        const int high = b[IQ4_XS_HIGH] | b[IQ4_XS_HIGH + 1] << 8;
        UNROLL for (int i = 0; i < 8; i++)
            own[i] = (float)(((b[IQ4_XS_LOW + i / 2] >> (i % 2 * 4) & 15) | (high >> (2 * i) & 3) << 4) - 32);
        return eight_products(own, widened(b));
    }
    if (table_of(dtype) == GRID) {
        UNROLL for (int i = 0; i < 8; i++) own[i] = (float)(1 + 2 * grid_scale(b, 2 * i, dtype));
        return eight_products(own, grid_factor(b, dtype));
    }
    if (dtype == PLLM_TQ1_0 || dtype == PLLM_TQ2_0) {
        const float32x4_t all = vdupq_n_f32(widened(b + (dtype == PLLM_TQ1_0 ? TQ1_0_SCALE : TQ2_0_SCALE)));
        return (eight){{all, all}};
    }
    if (block_values(dtype) != 32) { /* blocks of 64 or 128 */
        UNROLL for (int i = 0; i < 8; i++) own[i] = widened(b + i * 32 / block_values(dtype) * size);
        return eight_products(own, 1);
    }
    UNROLL for (int i = 0; i < 8; i++) own[i] = dtype == PLLM_MXFP4 ? e8m0_half(b[i * size]) : widened(b + i * size);
    return eight_products(own, 1);
}

/* What the file itself says is to be taken away; only of formats with has_minimums. */
ALWAYS_INLINE eight eight_minimums(const uint8_t *b, const int dtype) {
    float own[8];
    if (dtype == PLLM_Q4_K || dtype == PLLM_Q5_K) return eight_k(b, 1);
    UNROLL for (int i = 0; i < 8; i++) own[i] = widened(b + i * block_bytes(dtype) + 2);
    return eight_products(own, -1);
}

ALWAYS_INLINE sixteen sixteen_products(int8x16_t whole, const float by) {
    const int16x8_t low = vmovl_s8(vget_low_s8(whole)), high = vmovl_s8(vget_high_s8(whole));
    return (sixteen){{vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), by),
                      vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))), by),
                      vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), by),
                      vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_high_s16(high))), by)}};
}

/* The scales of a format that is halved, in order. */
ALWAYS_INLINE sixteen halved_scales(const uint8_t *b, const int dtype) {
    if (dtype == PLLM_Q6_K) return sixteen_products(vld1q_s8((const int8_t *)b + Q6_K_SCALES), widened(b + Q6_K_SCALE));
    if (dtype == PLLM_Q2_K) return sixteen_products(vreinterpretq_s8_u8(nibble(b, 0)), widened(b + Q2_K_SCALE));
    if (dtype == PLLM_NVFP4) {
        float each[16];
        UNROLL for (int i = 0; i < 16; i++) each[i] = nvfp4_scale(b[i / 4 * block_bytes(dtype) + i % 4]);
        return (sixteen){{vld1q_f32(each), vld1q_f32(each + 4), vld1q_f32(each + 8), vld1q_f32(each + 12)}};
    }
    int8_t own[16];
    if (table_of(dtype) == GRID) {
        UNROLL for (int i = 0; i < 16; i++) own[i] = (int8_t)(1 + 2 * grid_scale(b, i, dtype));
        return sixteen_products(vld1q_s8(own), grid_factor(b, dtype));
    }
    UNROLL for (int i = 0; i < 16; i++) own[i] = (int8_t)(q3_k_scale(b + Q3_K_SCALES, i) - 32);
    return sixteen_products(vld1q_s8(own), widened(b + Q3_K_SCALE));
}

/* Its minimums, if it has any. */
ALWAYS_INLINE sixteen halved_minimums(const uint8_t *b) {
    return sixteen_products(vreinterpretq_s8_u8(nibble(b, 1)), widened(b + Q2_K_MINIMUM));
}
