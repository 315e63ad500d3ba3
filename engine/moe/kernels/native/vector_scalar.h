/* Vectors of four lanes as the compiler makes them from plain C, for any CPU. */
#include <string.h>

typedef float scalar_vector __attribute__((vector_size(16)));
typedef uint32_t scalar_words __attribute__((vector_size(16)));

#define V scalar_vector
#define W 4
#define SET(name) scalar_##name
#define FEW_TOKENS 2
#define TILE_TOKENS 2

ALWAYS_INLINE V scalar_load(const float *from) {
    V v;
    memcpy(&v, from, sizeof v);
    return v;
}

ALWAYS_INLINE void scalar_store(float *to, V v) { memcpy(to, &v, sizeof v); }

ALWAYS_INLINE V scalar_load_bf16(const uint16_t *from) {
    scalar_words words = {(uint32_t)from[0] << 16, (uint32_t)from[1] << 16, (uint32_t)from[2] << 16,
                          (uint32_t)from[3] << 16};
    return (V)words;
}

ALWAYS_INLINE V scalar_load_f16(const uint16_t *from) {
    return (V){half_to_float(from), half_to_float(from + 1), half_to_float(from + 2), half_to_float(from + 3)};
}

ALWAYS_INLINE void scalar_load_fp8(const uint8_t *from, V to[2]) {
    uint16_t halves[2 * W];
    for (int i = 0; i < 2 * W; i++) halves[i] = fp8_as_half(from[i]);
    to[0] = scalar_load_f16(halves);
    to[1] = scalar_load_f16(halves + W);
}

ALWAYS_INLINE V scalar_low_f16(scalar_words words) {
    const uint16_t halves[W] = {(uint16_t)words[0], (uint16_t)words[1], (uint16_t)words[2], (uint16_t)words[3]};
    return scalar_load_f16(halves);
}

ALWAYS_INLINE V scalar_choose(scalar_words where, V a, V b) {
    return (V)((where & (scalar_words)a) | (~where & (scalar_words)b));
}

/* Adding 1.5 * 2^23 leaves no room for a fraction. */
ALWAYS_INLINE V scalar_round(V v) {
    const V shift = {12582912.0F, 12582912.0F, 12582912.0F, 12582912.0F};
    return (v + shift) - shift;
}

ALWAYS_INLINE V scalar_pow2(V v) {
    scalar_words words = {(uint32_t)((int32_t)v[0] + 127) << 23, (uint32_t)((int32_t)v[1] + 127) << 23,
                          (uint32_t)((int32_t)v[2] + 127) << 23, (uint32_t)((int32_t)v[3] + 127) << 23};
    return (V)words;
}

ALWAYS_INLINE float scalar_sum(V v) { return (v[0] + v[2]) + (v[1] + v[3]); }

ALWAYS_INLINE void scalar_transpose(V rows[W]) {
    V copy[W];
    memcpy(copy, rows, sizeof copy);
    for (int i = 0; i < W; i++)
        for (int j = 0; j < W; j++) rows[i][j] = copy[j][i];
}

#define V_ZERO ((V){0, 0, 0, 0})
#define V_SET1(value) ((V){(value), (value), (value), (value)})
#define V_LOAD(from) scalar_load(from)
#define V_STORE(to, v) scalar_store(to, v)
#define V_ADD(a, b) ((a) + (b))
#define V_SUB(a, b) ((a) - (b))
#define V_MUL(a, b) ((a) * (b))
#define V_DIV(a, b) ((a) / (b))
#define V_FMA(a, b, c) ((a) * (b) + (c))
#define V_MIN(a, b) scalar_choose((scalar_words)((a) < (b)), (a), (b))
#define V_MAX(a, b) scalar_choose((scalar_words)((a) > (b)), (a), (b))
#define V_ROUND(v) scalar_round(v)
#define V_POW2(v) scalar_pow2(v)
#define V_SUM(v) scalar_sum(v)
#define V_SUM4(a, b, c, d, to) \
    ((to)[0] = scalar_sum(a), (to)[1] = scalar_sum(b), (to)[2] = scalar_sum(c), (to)[3] = scalar_sum(d))
#define V_LOAD_BF16(from) scalar_load_bf16(from)
#define V_LOW(v) ((V)((scalar_words)(v) << 16))
#define V_HIGH(v) ((V)((scalar_words)(v) & 0xffff0000U))
#define V_LOAD_F16(from) scalar_load_f16(from)
#define V_LOAD_FP8(from, to) scalar_load_fp8(from, to)
#define V_LOW_F16(v) scalar_low_f16((scalar_words)(v))
#define V_HIGH_F16(v) scalar_low_f16((scalar_words)(v) >> 16)
#define V_TRANSPOSE(rows) scalar_transpose(rows)
#define V_SELECT_POSITIVE(v, a, b) scalar_choose((scalar_words)((v) >= V_ZERO), (a), (b))
