/* Vectors of four lanes with NEON (every AArch64 has it). */
#define V float32x4_t
#define W 4
#define SET(name) neon_##name
#define FEW_TOKENS 6
#define TILE_TOKENS 3

ALWAYS_INLINE float32x4_t neon_load_bf16(const uint16_t *from) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(from), 16));
}

/* As fp8_as_half. */
ALWAYS_INLINE void neon_load_fp8(const uint8_t *from, float32x4_t to[2]) {
    const int8x8_t codes = vreinterpret_s8_u8(vld1_u8(from));
    const uint16x8_t wide = vreinterpretq_u16_s16(vmovl_s8(codes)), size = vdupq_n_u16(0x7f);
    const uint16x8_t none = vshrq_n_u16(vceqq_u16(vandq_u16(wide, size), size), 1);
    const uint16x8_t sized = vandq_u16(vshlq_n_u16(wide, 7), vdupq_n_u16(0xbf80));
    const float16x8_t halves = vreinterpretq_f16_u16(vorrq_u16(sized, none));
    to[0] = vcvt_f32_f16(vget_low_f16(halves));
    to[1] = vcvt_high_f32_f16(halves);
}

ALWAYS_INLINE float32x4_t neon_pow2(float32x4_t v) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(v), vdupq_n_s32(127)), 23));
}

ALWAYS_INLINE void neon_sum4(float32x4_t a, float32x4_t b, float32x4_t c, float32x4_t d, float *to) {
    vst1q_f32(to, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
}

ALWAYS_INLINE void neon_transpose(float32x4_t r[4]) {
    float32x4_t a = vtrn1q_f32(r[0], r[1]), b = vtrn2q_f32(r[0], r[1]);
    float32x4_t c = vtrn1q_f32(r[2], r[3]), d = vtrn2q_f32(r[2], r[3]);
    r[0] = vcombine_f32(vget_low_f32(a), vget_low_f32(c));
    r[1] = vcombine_f32(vget_low_f32(b), vget_low_f32(d));
    r[2] = vcombine_f32(vget_high_f32(a), vget_high_f32(c));
    r[3] = vcombine_f32(vget_high_f32(b), vget_high_f32(d));
}

#define V_ZERO vdupq_n_f32(0)
#define V_SET1(value) vdupq_n_f32(value)
#define V_LOAD(from) vld1q_f32(from)
#define V_STORE(to, v) vst1q_f32(to, v)
#define V_ADD(a, b) vaddq_f32(a, b)
#define V_SUB(a, b) vsubq_f32(a, b)
#define V_MUL(a, b) vmulq_f32(a, b)
#define V_DIV(a, b) vdivq_f32(a, b)
#define V_FMA(a, b, c) vfmaq_f32(c, a, b)
#define V_MIN(a, b) vminq_f32(a, b)
#define V_MAX(a, b) vmaxq_f32(a, b)
#define V_ROUND(v) vrndnq_f32(v)
#define V_POW2(v) neon_pow2(v)
#define V_SUM(v) vaddvq_f32(v)
#define V_SUM4(a, b, c, d, to) neon_sum4(a, b, c, d, to)
#define V_LOAD_BF16(from) neon_load_bf16(from)
#define V_LOW(v) vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(v), 16))
#define V_HIGH(v) vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(v), vdupq_n_u32(0xffff0000U)))
#define V_LOAD_F16(from) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)))
#define V_LOAD_FP8(from, to) neon_load_fp8(from, to)
#define V_LOW_F16(v) vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(vreinterpretq_u32_f32(v))))
#define V_HIGH_F16(v) vcvt_f32_f16(vreinterpret_f16_u16(vshrn_n_u32(vreinterpretq_u32_f32(v), 16)))
#define V_TRANSPOSE(rows) neon_transpose(rows)
#define V_SELECT_POSITIVE(v, a, b) vbslq_f32(vcgeq_f32(v, V_ZERO), a, b)
