/* exp and the activations for the vectors of the including file (the names are explained in rows_template.h). */

/* Relative error about 1e-7 between -87 and 88; outside as at the border. */
ALWAYS_INLINE V SET(exp)(V x) {
    x = V_MIN(V_MAX(x, V_SET1(-87.0F)), V_SET1(88.0F));
    V n = V_ROUND(V_MUL(x, V_SET1(1.44269504F)));
    V r = V_FMA(n, V_SET1(-0.693359375F), x);
    r = V_FMA(n, V_SET1(2.12194440e-4F), r);
    V p = V_FMA(V_SET1(1.9875691500e-4F), r, V_SET1(1.3981999507e-3F));
    p = V_FMA(p, r, V_SET1(8.3334519073e-3F));
    p = V_FMA(p, r, V_SET1(4.1665795894e-2F));
    p = V_FMA(p, r, V_SET1(1.6666665459e-1F));
    p = V_FMA(p, r, V_SET1(5.0000001201e-1F));
    p = V_ADD(V_FMA(V_MUL(p, r), r, r), V_SET1(1.0F));
    return V_MUL(p, V_POW2(n));
}

/* v * sigmoid(s) */
ALWAYS_INLINE V SET(times_sigmoid)(V v, V s) {
    return V_DIV(v, V_ADD(V_SET1(1.0F), SET(exp)(V_SUB(V_ZERO, s))));
}

/* The complementary error function of z >= 0 as t * exp(-z*z + P(t)), t = 1 / (1 + z/2): a Chebyshev fit whose
   relative error stays about 1e-7 for every z. */
ALWAYS_INLINE V SET(erfc)(V z) {
    V t = V_DIV(V_SET1(1.0F), V_FMA(V_SET1(0.5F), z, V_SET1(1.0F)));
    V p = V_FMA(t, V_SET1(0.17087277F), V_SET1(-0.82215223F));
    p = V_FMA(t, p, V_SET1(1.48851587F));
    p = V_FMA(t, p, V_SET1(-1.13520398F));
    p = V_FMA(t, p, V_SET1(0.27886807F));
    p = V_FMA(t, p, V_SET1(-0.18628806F));
    p = V_FMA(t, p, V_SET1(0.09678418F));
    p = V_FMA(t, p, V_SET1(0.37409196F));
    p = V_FMA(t, p, V_SET1(1.00002368F));
    p = V_FMA(t, p, V_SET1(-1.26551223F));
    return V_MUL(t, SET(exp)(V_FMA(V_SUB(V_ZERO, z), z, p)));
}

ALWAYS_INLINE V SET(activated)(const pllm_activation *activation, V g, V u) {
    switch (activation->kind) {
    case PLLM_SILU:
        return V_MUL(SET(times_sigmoid)(g, g), u);
    case PLLM_GELU: {
        V tail = V_MUL(V_MUL(V_SET1(0.5F), g), SET(erfc)(V_MUL(V_MAX(g, V_SUB(V_ZERO, g)), V_SET1(0.70710678F))));
        return V_MUL(V_SELECT_POSITIVE(g, V_SUB(g, tail), tail), u);
    }
    case PLLM_GELU_TANH: { /* (1 + tanh(s)) / 2 = sigmoid(2 s) */
        V cubic = V_MUL(V_FMA(V_MUL(V_MUL(g, g), g), V_SET1(0.044715F), g), V_SET1(1.59576912F));
        return V_MUL(SET(times_sigmoid)(g, cubic), u);
    }
    case PLLM_RELU:
        return V_MUL(V_MAX(g, V_ZERO), u);
    case PLLM_CLAMPED_SILU: {
        V limit = V_SET1(activation->limit);
        return V_MUL(V_MIN(SET(times_sigmoid)(g, g), limit), V_MAX(V_MIN(u, limit), V_SUB(V_ZERO, limit)));
    }
    case PLLM_XIELU: {
        V below = V_SUB(V_SUB(SET(exp)(V_MIN(g, V_SET1(activation->epsilon))), V_SET1(1.0F)), g);
        V curved = V_SELECT_POSITIVE(g, V_MUL(V_MUL(g, g), V_SET1(activation->alpha)), V_MUL(below, V_SET1(activation->limit)));
        return V_FMA(g, V_SET1(activation->beta), curved);
    }
    default: {
        V limit = V_SET1(activation->limit);
        g = V_MIN(g, limit);
        u = V_MAX(V_MIN(u, limit), V_SUB(V_ZERO, limit));
        return V_MUL(V_ADD(u, V_SET1(activation->beta)), SET(times_sigmoid)(g, V_MUL(g, V_SET1(activation->alpha))));
    }
    }
}

static void SET(gate)(const pllm_activation *activation, float *gate, const float *up, int64_t count) {
    int64_t i = 0;
    for (; i + W <= count; i += W) V_STORE(gate + i, SET(activated)(activation, V_LOAD(gate + i), V_LOAD(up + i)));
    if (i < count) {
        float g[W] = {0}, u[W] = {0};
        memcpy(g, gate + i, (size_t)(count - i) * 4);
        memcpy(u, up + i, (size_t)(count - i) * 4);
        V_STORE(g, SET(activated)(activation, V_LOAD(g), V_LOAD(u)));
        memcpy(gate + i, g, (size_t)(count - i) * 4);
    }
}

static float SET(exp_sum)(float *values, float shift, int64_t count) {
    const V by = V_SET1(shift);
    V sum = V_ZERO;
    int64_t i = 0;
    for (; i + W <= count; i += W) {
        V v = SET(exp)(V_SUB(V_LOAD(values + i), by));
        V_STORE(values + i, v);
        sum = V_ADD(sum, v);
    }
    float total = V_SUM(sum);
    if (i < count) {
        float rest[W] = {0};
        memcpy(rest, values + i, (size_t)(count - i) * 4);
        V_STORE(rest, SET(exp)(V_SUB(V_LOAD(rest), by)));
        memcpy(values + i, rest, (size_t)(count - i) * 4);
        for (int64_t k = 0; k < count - i; k++) total += rest[k];
    }
    return total;
}

static void SET(add_scaled)(float *to, const float *from, float scale, int64_t count) {
    const V factor = V_SET1(scale);
    int64_t i = 0;
    for (; i + W <= count; i += W) V_STORE(to + i, V_FMA(V_LOAD(from + i), factor, V_LOAD(to + i)));
    if (i < count) {
        float t[W] = {0}, f[W] = {0};
        memcpy(t, to + i, (size_t)(count - i) * 4);
        memcpy(f, from + i, (size_t)(count - i) * 4);
        V_STORE(t, V_FMA(V_LOAD(f), factor, V_LOAD(t)));
        memcpy(to + i, t, (size_t)(count - i) * 4);
    }
}
