/* Activations as the kernels with float32 activations read them (the names are explained in rows_template.h). */

#define PER_WORD 1
#define FACTOR V
#define FACTOR_LOAD(from) V_LOAD((const float *)(const void *)(from))
#define FACTOR_SET1(from) V_SET1(*(from))
#define FACTOR_WEIGHT(from, dtype) SET(weight)(from, dtype)
#define FACTOR_WEIGHT_SOME(from, count, dtype) SET(weight_some)(from, count, dtype)
#define FACTOR_ADD(weight, token, sum) V_FMA(weight, token, sum)
#define FACTOR_FP8(from, to) V_LOAD_FP8(from, to)
#define FACTOR_LIFT FP8_LIFT
#define STORE_OPENED(to, k, count, v) SET(store_opened)((float *)(to) + (k), count, v)

ALWAYS_INLINE V SET(weight)(const void *from, int dtype) {
    return dtype == PLLM_BF16  ? V_LOAD_BF16((const uint16_t *)from)
           : dtype == PLLM_F16 ? V_LOAD_F16((const uint16_t *)from)
                               : V_LOAD((const float *)from);
}

ALWAYS_INLINE V SET(weight_some)(const void *from, int64_t count, int dtype) {
    float values[W] = {0};
    for (int64_t i = 0; i < count; i++) {
        const uint32_t word = dtype == PLLM_BF16 ? (uint32_t)((const uint16_t *)from)[i] << 16 : 0;
        if (dtype == PLLM_BF16)
            memcpy(&values[i], &word, 4);
        else if (dtype == PLLM_F16)
            values[i] = half_to_float((const uint16_t *)from + i);
        else
            memcpy(&values[i], (const char *)from + 4 * i, 4);
    }
    return V_LOAD(values);
}

ALWAYS_INLINE void SET(store_opened)(float *to, int64_t count, V v) {
    if (count == W) {
        V_STORE(to, v);
        return;
    }
    float values[W];
    V_STORE(values, v);
    memcpy(to, values, (size_t)count * sizeof(float));
}

static void SET(convert)(void *row, int64_t first, const float *from, float scale, int64_t count) {
    float *to = (float *)row + first;
    int64_t i = 0;
    const V factor = V_SET1(scale);
    for (; i + W <= count; i += W) V_STORE(to + i, V_MUL(V_LOAD(from + i), factor));
    for (; i < count; i++) to[i] = from[i] * scale;
}

static void SET(pad)(void *row, int64_t columns) {
    memset((float *)row + columns, 0, (size_t)(padded(columns) - columns) * sizeof(float));
}

static void SET(tile)(void *tile, const float *const *rows, const float *scales, int64_t tokens, int64_t column,
                      int64_t count) {
    float *to = (float *)tile + column * TILE_TOKENS;
    if (tokens == TILE_TOKENS && !scales) {
        for (int64_t k = 0; k < count; k++, to += TILE_TOKENS)
            for (int m = 0; m < TILE_TOKENS; m++) to[m] = rows[m][k];
        return;
    }
    for (int64_t m = 0; m < tokens; m++) {
        const float *from = rows[m], scale = scales ? scales[m] : 1.0F;
        for (int64_t k = 0; k < count; k++) to[k * TILE_TOKENS + m] = from[k] * scale;
    }
}
