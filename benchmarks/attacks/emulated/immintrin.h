/* AVX2 and AVX-512 in plain C, for processors without them and for builds with sanitizers: SIMDe's functions (Debian:
   libsimde-dev), and those that its release lacks. It stands in for the compiler's own header of this name. */
#ifndef EMULATED_AVX512_H
#define EMULATED_AVX512_H
#define SIMDE_NO_NATIVE
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/simde-common.h>
#undef SIMDE_FUNCTION_ATTRIBUTES
#define SIMDE_FUNCTION_ATTRIBUTES __attribute__((noinline, unused, no_sanitize("undefined"))) static
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

typedef simde__mmask8 __mmask8;
typedef simde__mmask16 __mmask16;
typedef simde__mmask32 __mmask32;
typedef simde__mmask64 __mmask64;
#define _MM_FROUND_NO_EXC SIMDE_MM_FROUND_NO_EXC
#define _MM_PERM_ENUM int
/* A macro of several arguments may stand for them, as in a call of a function. */
#undef _mm_setr_epi8
#define _mm_setr_epi8(...) simde_mm_setr_epi8(__VA_ARGS__)
#undef _mm256_setr_epi8
#define _mm256_setr_epi8(...) simde_mm256_setr_epi8(__VA_ARGS__)
#undef _mm_setr_epi16
#define _mm_setr_epi16(...) simde_mm_setr_epi16(__VA_ARGS__)
#undef _mm512_madd_epi16
#define _mm512_madd_epi16(v, w) simde_mm512_madd_epi16(v, w)

#define EACH(i, count) for (int i = 0; i < (count); i++)
#define STATIC SIMDE_FUNCTION_ATTRIBUTES

/* to[i] = the value of `expression` for each lane of a vector `v`, the operand, which may name lanes of the others. */
#define MAPPED(name, to_type, to_lane, parameters, opened, count, expression)                                          \
    STATIC simde__##to_type name parameters {                                                                          \
        simde__##to_type##_private r_;                                                                                 \
        memset(&r_, 0, sizeof r_);                                                                                     \
        opened;                                                                                                        \
        EACH(i, count) r_.to_lane[i] = (expression);                                                                   \
        return simde__##to_type##_from_private(r_);                                                                    \
    }
#define OPENED(type, v) const simde__##type##_private v##_ = simde__##type##_to_private(v)

MAPPED(_mm512_cvtepi32_ps, m512, f32, (simde__m512i v), OPENED(m512i, v), 16, (float)v_.i32[i])
MAPPED(_mm512_cvtepi8_epi32, m512i, i32, (simde__m128i v), OPENED(m128i, v), 16, v_.i8[i])
MAPPED(_mm512_cvtepu8_epi32, m512i, i32, (simde__m128i v), OPENED(m128i, v), 16, v_.u8[i])
MAPPED(_mm512_cvtepu16_epi32, m512i, i32, (simde__m256i v), OPENED(m256i, v), 16, v_.u16[i])
MAPPED(_mm512_cvtepu8_epi16, m512i, i16, (simde__m256i v), OPENED(m256i, v), 32, v_.u8[i])
MAPPED(_mm512_cvtepi32_epi16, m256i, u16, (simde__m512i v), OPENED(m512i, v), 16, (uint16_t)v_.u32[i])
MAPPED(_mm512_cvtepi32_epi8, m128i, u8, (simde__m512i v), OPENED(m512i, v), 16, (uint8_t)v_.u32[i])
MAPPED(_mm256_cvtepi16_epi8, m128i, u8, (simde__m256i v), OPENED(m256i, v), 16, (uint8_t)v_.u16[i])
MAPPED(_mm512_sra_epi32, m512i, i32, (simde__m512i v, simde__m128i by), OPENED(m512i, v); OPENED(m128i, by), 16,
       v_.i32[i] >> (by_.u64[0] > 31 ? 31 : (int)by_.u64[0]))
MAPPED(_mm512_srai_epi32, m512i, i32, (simde__m512i v, unsigned by), OPENED(m512i, v), 16,
       v_.i32[i] >> (by > 31 ? 31 : by))
MAPPED(_mm512_shuffle_epi32, m512i, i32, (simde__m512i v, int by), OPENED(m512i, v), 16,
       v_.i32[(i & ~3) + (by >> 2 * (i & 3) & 3)])
MAPPED(_mm512_maskz_shuffle_epi32, m512i, i32, (simde__mmask16 k, simde__m512i v, int by), OPENED(m512i, v), 16,
       k >> i & 1 ? v_.i32[(i & ~3) + (by >> 2 * (i & 3) & 3)] : 0)
MAPPED(_mm512_permute_ps, m512, f32, (simde__m512 v, int by), OPENED(m512, v), 16,
       v_.f32[(i & ~3) + (by >> 2 * (i & 3) & 3)])
MAPPED(_mm512_shuffle_f32x4, m512, f32, (simde__m512 v, simde__m512 w, int by), OPENED(m512, v); OPENED(m512, w), 16,
       (i < 8 ? v_ : w_).f32[4 * (by >> 2 * (i / 4) & 3) + i % 4])
MAPPED(_mm512_shuffle_i64x2, m512i, i64, (simde__m512i v, simde__m512i w, int by), OPENED(m512i, v); OPENED(m512i, w),
       8, (i < 4 ? v_ : w_).i64[2 * (by >> 2 * (i / 2) & 3) + i % 2])
MAPPED(_mm512_extractf32x8_ps, m256, f32, (simde__m512 v, int which), OPENED(m512, v), 8, v_.f32[8 * which + i])
MAPPED(_mm512_alignr_epi8, m512i, u8, (simde__m512i v, simde__m512i w, int by), OPENED(m512i, v); OPENED(m512i, w), 64,
       by + i % 16 < 16   ? w_.u8[i / 16 * 16 + by + i % 16]
       : by + i % 16 < 32 ? v_.u8[i / 16 * 16 + by + i % 16 - 16]
                          : 0)
/* To the nearest, to even from the middle; what does not fit is the smallest number. */
MAPPED(_mm512_cvtps_epi32, m512i, i32, (simde__m512 v), OPENED(m512, v), 16,
       v_.f32[i] >= -0x1p31f && v_.f32[i] < 0x1p31f ? (int32_t)simde_math_nearbyintf(v_.f32[i]) : INT32_MIN)

STATIC simde__m512 _mm512_cvtph_ps(simde__m256i v) {
    simde__m512_private r;
    OPENED(m256i, v);
    EACH(i, 16) r.f32[i] = simde_float16_to_float32(simde_uint16_as_float16(v_.u16[i]));
    return simde__m512_from_private(r);
}

/* Bits that a mask leaves out are not read or written. */
MAPPED(_mm512_maskz_loadu_ps, m512, f32, (simde__mmask16 k, const void *from), const float *at = from, 16,
       k >> i & 1 ? at[i] : 0)
MAPPED(_mm512_maskz_loadu_epi8, m512i, u8, (simde__mmask64 k, const void *from), const uint8_t *at = from, 64,
       k >> i & 1 ? at[i] : 0)
MAPPED(_mm_maskz_loadu_epi8, m128i, u8, (simde__mmask16 k, const void *from), const uint8_t *at = from, 16,
       k >> i & 1 ? at[i] : 0)
STATIC simde__m512i _mm512_maskz_loadu_epi16(simde__mmask32 k, const void *from) {
    simde__m512i_private r;
    memset(&r, 0, sizeof r);
    EACH(i, 32) if (k >> i & 1) memcpy(&r.u16[i], (const char *)from + 2 * i, 2);
    return simde__m512i_from_private(r);
}
STATIC void _mm512_mask_storeu_ps(void *to, simde__mmask16 k, simde__m512 v) {
    OPENED(m512, v);
    EACH(i, 16) if (k >> i & 1) memcpy((char *)to + 4 * i, &v_.f32[i], 4);
}
STATIC void _mm256_mask_storeu_epi16(void *to, simde__mmask16 k, simde__m256i v) {
    OPENED(m256i, v);
    EACH(i, 16) if (k >> i & 1) memcpy((char *)to + 2 * i, &v_.u16[i], 2);
}
STATIC simde__mmask32 _mm512_cmpeq_epi16_mask(simde__m512i v, simde__m512i w) {
    simde__mmask32 r = 0;
    OPENED(m512i, v);
    OPENED(m512i, w);
    EACH(i, 32) r |= (simde__mmask32)(v_.u16[i] == w_.u16[i]) << i;
    return r;
}

STATIC simde__m512 _mm512_i32gather_ps(simde__m512i at, const void *from, int step) {
    simde__m512_private r = simde__m512_to_private(simde_mm512_setzero_ps());
    OPENED(m512i, at);
    EACH(i, 16) memcpy(&r.f32[i], (const char *)from + (int64_t)at_.i32[i] * step, 4);
    return simde__m512_from_private(r);
}
STATIC simde__m512i _mm512_permutex_epi64(simde__m512i v, int places) {
    simde__m512i_private r = simde__m512i_to_private(v);
    OPENED(m512i, v);
    EACH(i, 8) r.u64[i] = v_.u64[i / 4 * 4 + (places >> (i % 4 * 2) & 3)];
    return simde__m512i_from_private(r);
}

/* Half and half, as compilers do it. */
#define REDUCED(name, to, type, lane, combined)                                                                        \
    STATIC to name(simde__##type v) {                                                                                  \
        simde__##type##_private r = simde__##type##_to_private(v);                                                     \
        for (int half = 8; half; half /= 2) EACH(i, half) {                                                            \
            const to a = r.lane[i], b = r.lane[i + half];                                                              \
            r.lane[i] = (combined);                                                                                    \
        }                                                                                                              \
        return r.lane[0];                                                                                              \
    }
REDUCED(_mm512_reduce_add_ps, float, m512, f32, a + b)
REDUCED(_mm512_reduce_max_ps, float, m512, f32, a > b ? a : b)
REDUCED(_mm512_reduce_add_epi32, int, m512i, i32, (int)((unsigned)a + (unsigned)b))

/* bfloat16: to the nearest, to even from the middle; denormal numbers are zeros. */
STATIC uint16_t emulated_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
    if (!(bits & 0x7f800000)) return (uint16_t)(bits >> 16 & 0x8000);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
STATIC simde__m256bh _mm512_cvtneps_pbh(simde__m512 v) {
    uint16_t r[16];
    simde__m256bh to;
    OPENED(m512, v);
    EACH(i, 16) r[i] = emulated_bf16(v_.f32[i]);
    memcpy(&to, r, sizeof to);
    return to;
}
STATIC simde__m512bh _mm512_cvtne2ps_pbh(simde__m512 high, simde__m512 low) {
    uint16_t r[32];
    simde__m512bh to;
    OPENED(m512, high);
    OPENED(m512, low);
    EACH(i, 16) r[i] = emulated_bf16(low_.f32[i]), r[16 + i] = emulated_bf16(high_.f32[i]);
    memcpy(&to, r, sizeof to);
    return to;
}
#endif
