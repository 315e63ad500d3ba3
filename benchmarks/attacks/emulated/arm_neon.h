/* NEON in plain C, for processors that are none of ARM's: SIMDe's functions (Debian: libsimde-dev), and those that its
   release lacks. It stands in for the compiler's own header of this name. */
#ifndef EMULATED_NEON_H
#define EMULATED_NEON_H
#define SIMDE_NO_NATIVE
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/simde-common.h>
#undef SIMDE_FUNCTION_ATTRIBUTES
#define SIMDE_FUNCTION_ATTRIBUTES __attribute__((noinline, unused, no_sanitize("undefined"))) static
#include <simde/arm/neon.h>

/* ARM's name of half precision. */
#define __fp16 _Float16

#define LANES(type, v) const simde_##type##_private v##_ = simde_##type##_to_private(v)
#define EACH_OF_FOUR(type, lane, expression)                                                                           \
    simde_##type##_private r_;                                                                                         \
    for (int i = 0; i < 4; i++) r_.values[i] = (expression);                                                           \
    return simde_##type##_from_private(r_)

SIMDE_FUNCTION_ATTRIBUTES simde_float32x4_t vdivq_f32(simde_float32x4_t v, simde_float32x4_t w) {
    LANES(float32x4, v);
    LANES(float32x4, w);
    EACH_OF_FOUR(float32x4, f, v_.values[i] / w_.values[i]);
}
SIMDE_FUNCTION_ATTRIBUTES simde_float32x4_t vfmsq_f32(simde_float32x4_t sum, simde_float32x4_t v, simde_float32x4_t w) {
    LANES(float32x4, sum);
    LANES(float32x4, v);
    LANES(float32x4, w);
    EACH_OF_FOUR(float32x4, f, simde_math_fmaf(-v_.values[i], w_.values[i], sum_.values[i]));
}
/* To the nearest, to even from the middle; what does not fit is the nearest number that does. */
SIMDE_FUNCTION_ATTRIBUTES simde_int32x4_t vcvtnq_s32_f32(simde_float32x4_t v) {
    LANES(float32x4, v);
    EACH_OF_FOUR(int32x4, i, v_.values[i] != v_.values[i] ? 0
                             : v_.values[i] >= 0x1p31f    ? INT32_MAX
                             : v_.values[i] < -0x1p31f    ? INT32_MIN
                                                          : (int32_t)simde_math_nearbyintf(v_.values[i]));
}
SIMDE_FUNCTION_ATTRIBUTES simde_float16x4_t vget_low_f16(simde_float16x8_t v) {
    LANES(float16x8, v);
    EACH_OF_FOUR(float16x4, f, v_.values[i]);
}
SIMDE_FUNCTION_ATTRIBUTES simde_float32x4_t vcvt_high_f32_f16(simde_float16x8_t v) {
    LANES(float16x8, v);
    EACH_OF_FOUR(float32x4, f, simde_float16_to_float32(v_.values[4 + i]));
}
SIMDE_FUNCTION_ATTRIBUTES simde_int32x4_t vmmlaq_s32(simde_int32x4_t sum, simde_int8x16_t v, simde_int8x16_t w) {
    simde_int32x4_private r_ = simde_int32x4_to_private(sum);
    LANES(int8x16, v);
    LANES(int8x16, w);
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 8; k++) r_.values[i] += v_.values[8 * (i / 2) + k] * w_.values[8 * (i % 2) + k];
    return simde_int32x4_from_private(r_);
}
#endif
