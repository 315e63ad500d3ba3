/* The trunk's elementwise work and attention for one instruction set, in the compiler's own vectors. The file that
   includes this defines LANES (floats of a vector), TILE_VECTORS, and NAME, and turns the instruction set on; with
   DOT_BF16 bfloat16 keys and values are multiplied as they are, by queries and weights rounded to bfloat16. */

#include <math.h>
#include <string.h>

#define TILE_QUERIES 6

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t lanes_i __attribute__((vector_size(4 * LANES)));
typedef uint32_t lanes_u __attribute__((vector_size(4 * LANES)));
typedef uint16_t lanes_h __attribute__((vector_size(2 * LANES)));
typedef uint8_t lanes_b __attribute__((vector_size(LANES)));
typedef lanes lanes_any __attribute__((aligned(4)));
typedef lanes_h lanes_h_any __attribute__((aligned(2)));
typedef lanes_b lanes_b_any __attribute__((aligned(1)));
typedef lanes_u lanes_u_any __attribute__((aligned(2)));

ALWAYS_INLINE lanes all(float value) { return value - (lanes){0}; }
ALWAYS_INLINE lanes load_f32(const float *from) { return *(const lanes_any *)from; }
ALWAYS_INLINE void store_f32(float *to, lanes value) { *(lanes_any *)to = value; }
ALWAYS_INLINE lanes load_bf16(const uint16_t *from) {
    lanes_h words = *(const lanes_h_any *)from;
    return (lanes)(__builtin_convertvector(words, lanes_u) << 16);
}
ALWAYS_INLINE lanes load_any(const void *from, int64_t index, int dtype) {
    return dtype == PLLM_BF16 ? load_bf16((const uint16_t *)from + index) : load_f32((const float *)from + index);
}
ALWAYS_INLINE lanes_u load_u32(const uint32_t *from) { return *(const lanes_u_any *)from; }
ALWAYS_INLINE lanes low_half(lanes_u pairs) { return (lanes)(pairs << 16); }
ALWAYS_INLINE lanes high_half(lanes_u pairs) { return (lanes)(pairs & 0xffff0000U); }
#if defined(DOT_BF16)
ALWAYS_INLINE lanes_u all_u(uint32_t value) { return value - (lanes_u){0}; }
ALWAYS_INLINE lanes dot_bf16(lanes sum, lanes_u a, lanes_u b) {
    return (lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
#endif
ALWAYS_INLINE float one_bf16(uint16_t word) {
    uint32_t bits = (uint32_t)word << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
ALWAYS_INLINE float one_any(const void *from, int64_t index, int dtype) {
    return dtype == PLLM_BF16 ? one_bf16(((const uint16_t *)from)[index]) : ((const float *)from)[index];
}
/* Round to nearest, ties to even; a NaN stays one. */
ALWAYS_INLINE uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
ALWAYS_INLINE float sum_of(lanes value) {
    float parts[LANES], total = 0;
    memcpy(parts, &value, sizeof parts);
    for (int i = 0; i < LANES; i++) total += parts[i];
    return total;
}
ALWAYS_INLINE lanes larger(lanes a, lanes b) {
    lanes_i mask = a > b;
    return (lanes)(((lanes_i)a & mask) | ((lanes_i)b & ~mask));
}

/* exp of values up to 0, relative error about 1e-7; 0 below -87. */
ALWAYS_INLINE lanes exp_of(lanes x) {
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
    lanes_i live = x > all(-87.0f);
    lanes clamped = larger(x, all(-87.0f));
    lanes n = (clamped * 1.44269504088896341f + shift) - shift;
    lanes r = clamped - n * 0.693145751953125f - n * 1.42860682030941723212e-6f;
    lanes p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    lanes_i power = (__builtin_convertvector(n, lanes_i) + 127) << 23;
    return (lanes)((lanes_i)(p * (lanes)power) & live);
}

ALWAYS_INLINE float mean_square(const float *x, int64_t count) {
    lanes a = {0}, b = {0};
    int64_t i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES) {
        lanes u = load_f32(x + i), v = load_f32(x + i + LANES);
        a += u * u;
        b += v * v;
    }
    float total = sum_of(a + b);
    for (; i < count; i++) total += x[i] * x[i];
    return total / (float)count;
}

static void NAME(norm)(float *x, const float *weight, float epsilon, int64_t count) {
    float scale = 1.0f / sqrtf(mean_square(x, count) + epsilon);
    for (int64_t i = 0; i < count; i++) x[i] = x[i] * scale * weight[i];
}

static void NAME(residual_norm)(float *h, const float *out, const float *bias, const float *other, float scale,
                                const float *weight, float epsilon, float *to, int64_t count) {
    if (out)
        for (int64_t i = 0; i < count; i++) h[i] += scale * out[i];
    if (bias)
        for (int64_t i = 0; i < count; i++) h[i] += scale * bias[i];
    if (other)
        for (int64_t i = 0; i < count; i++) h[i] += scale * other[i];
    float by = 1.0f / sqrtf(mean_square(h, count) + epsilon);
    for (int64_t i = 0; i < count; i++) to[i] = h[i] * by * weight[i];
}

static void NAME(rotate)(float *head, const float *cosine, const float *sine, float scale, int64_t half) {
    float *low = head, *high = head + half;
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        lanes a = load_f32(low + i), b = load_f32(high + i);
        lanes c = load_f32(cosine + i) * scale, s = load_f32(sine + i) * scale;
        store_f32(low + i, a * c - b * s);
        store_f32(high + i, b * c + a * s);
    }
    for (; i < half; i++) {
        float a = low[i], b = high[i], c = cosine[i] * scale, s = sine[i] * scale;
        low[i] = a * c - b * s;
        high[i] = b * c + a * s;
    }
}

/* `to` may be `from`. */
static void NAME(store)(void *to, const float *from, int64_t count, int dtype) {
    if (dtype == PLLM_F32) {
        memmove(to, from, (size_t)count * 4);
        return;
    }
    uint16_t *words = to;
    int64_t i = 0;
#if defined(DOT_BF16)
    for (; i + LANES <= count; i += LANES) {
        const __m256bh rounded = _mm512_cvtneps_pbh((__m512)load_f32(from + i));
        memcpy(words + i, &rounded, sizeof rounded);
    }
#endif
    for (; i < count; i++) words[i] = to_bf16(from[i]);
}

static void NAME(load)(float *to, const void *from, float scale, int64_t count, int dtype) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store_f32(to + i, load_any(from, i, dtype) * scale);
    for (; i < count; i++) to[i] = one_any(from, i, dtype) * scale;
}

/* Scores of `queries` (at most TILE_QUERIES) for `vectors` vectors of keys from `keys` on, a block's start.
   bfloat16 keys lie in pairs of dimensions: a 32-bit lane holds two of them for one position. */
ALWAYS_INLINE void score_tile(const attention *a, int64_t first, int queries, int vectors, const void *keys, int dtype,
                              float *scores) {
    const int64_t width = a->width, pairs = width / 2;
    const float *const *q = a->queries + first;
    lanes sums[TILE_QUERIES][TILE_VECTORS];
    int64_t at[TILE_VECTORS];
    for (int v = 0; v < vectors; v++) {
        const int64_t row = dtype == PLLM_BF16 ? pairs : width;
        at[v] = (int64_t)(v * LANES / PLLM_KEY_BLOCK) * row * PLLM_KEY_BLOCK + v * LANES % PLLM_KEY_BLOCK;
    }
    for (int i = 0; i < queries; i++)
        for (int v = 0; v < vectors; v++) sums[i][v] = (lanes){0};
    if (dtype == PLLM_BF16) {
        for (int64_t d = 0; d < pairs; d++) {
            lanes_u k[TILE_VECTORS];
            for (int v = 0; v < vectors; v++) k[v] = load_u32((const uint32_t *)keys + at[v] + d * PLLM_KEY_BLOCK);
            for (int i = 0; i < queries; i++) {
#if defined(DOT_BF16)
                const lanes_u pair = all_u(a->packed_queries[(first + i) * pairs + d]);
                for (int v = 0; v < vectors; v++) sums[i][v] = dot_bf16(sums[i][v], k[v], pair);
#else
                const lanes even = all(q[i][2 * d]), odd = all(q[i][2 * d + 1]);
                for (int v = 0; v < vectors; v++) sums[i][v] += even * low_half(k[v]);
                for (int v = 0; v < vectors; v++) sums[i][v] += odd * high_half(k[v]);
#endif
            }
        }
    } else {
        for (int64_t d = 0; d < width; d++) {
            lanes k[TILE_VECTORS];
            for (int v = 0; v < vectors; v++) k[v] = load_f32((const float *)keys + at[v] + d * PLLM_KEY_BLOCK);
            for (int i = 0; i < queries; i++) {
                const lanes value = all(q[i][d]);
                for (int v = 0; v < vectors; v++) sums[i][v] += value * k[v];
            }
        }
    }
    for (int i = 0; i < queries; i++)
        for (int v = 0; v < vectors; v++) store_f32(scores + i * SCORE_TILE + v * LANES, sums[i][v]);
}

/* Adds the values of positions first..last) of a tile, weighted, for `vectors` vectors of dimensions from d on.
   bfloat16 values lie in pairs of positions; the weight of what is not to be seen is 0. */
ALWAYS_INLINE void value_tile(const attention *a, int64_t query, int queries, int vectors, const void *values,
                              int64_t first, int64_t last, int64_t d, int dtype) {
    const int64_t width = a->value_width;
    const float *weights = a->scores + query * SCORE_TILE;
    float *sum = a->sum + query * width + d;
    lanes sums[TILE_QUERIES][TILE_VECTORS];
    for (int i = 0; i < queries; i++)
        for (int v = 0; v < vectors; v++) sums[i][v] = load_f32(sum + i * width + v * LANES);
    if (dtype == PLLM_BF16) {
        for (int64_t pair = first / 2; pair < (last + 1) / 2; pair++) {
            lanes_u x[TILE_VECTORS];
            for (int v = 0; v < vectors; v++)
                x[v] = load_u32((const uint32_t *)values + pair * width + d + v * LANES);
            for (int i = 0; i < queries; i++) {
#if defined(DOT_BF16)
                const lanes_u weight = all_u(a->packed_weights[(query + i) * (SCORE_TILE / 2) + pair]);
                for (int v = 0; v < vectors; v++) sums[i][v] = dot_bf16(sums[i][v], x[v], weight);
#else
                const lanes even = all(weights[i * SCORE_TILE + 2 * pair]);
                const lanes odd = all(weights[i * SCORE_TILE + 2 * pair + 1]);
                for (int v = 0; v < vectors; v++) sums[i][v] += even * low_half(x[v]);
                for (int v = 0; v < vectors; v++) sums[i][v] += odd * high_half(x[v]);
#endif
            }
        }
    } else {
        for (int64_t key = first; key < last; key++) {
            lanes x[TILE_VECTORS];
            for (int v = 0; v < vectors; v++) x[v] = load_f32((const float *)values + key * width + d + v * LANES);
            for (int i = 0; i < queries; i++) {
                const lanes weight = all(weights[i * SCORE_TILE + key]);
                for (int v = 0; v < vectors; v++) sums[i][v] += weight * x[v];
            }
        }
    }
    for (int i = 0; i < queries; i++)
        for (int v = 0; v < vectors; v++) store_f32(sum + i * width + v * LANES, sums[i][v]);
}

#define EACH_COUNT(call)    \
    switch (queries) {      \
    case 1: call(1); break; \
    case 2: call(2); break; \
    case 3: call(3); break; \
    case 4: call(4); break; \
    case 5: call(5); break; \
    default: call(6);       \
    }

ALWAYS_INLINE void score_all(const attention *a, const void *keys, int64_t blocks, int dtype) {
    const int64_t bytes = dtype == PLLM_BF16 ? 2 : 4, block = a->width * PLLM_KEY_BLOCK * bytes;
    const int large = TILE_VECTORS * LANES / PLLM_KEY_BLOCK;
    for (int64_t b = 0; b < blocks;) {
        const int wide = blocks - b >= large;
        const void *at = (const char *)keys + b * block;
        for (int64_t i = 0; i < a->count; i += TILE_QUERIES) {
            const int queries = (int)MIN(TILE_QUERIES, a->count - i);
            float *scores = a->scores + i * SCORE_TILE + b * PLLM_KEY_BLOCK;
#define WIDE(n) score_tile(a, i, n, TILE_VECTORS, at, dtype, scores)
#define NARROW(n) score_tile(a, i, n, PLLM_KEY_BLOCK / LANES, at, dtype, scores)
            if (wide) {
                EACH_COUNT(WIDE)
            } else {
                EACH_COUNT(NARROW)
            }
        }
        b += wide ? large : 1;
    }
}

/* `values`: of the tile's first position. */
ALWAYS_INLINE void value_all(const attention *a, const void *values, int64_t first, int64_t last, int dtype) {
    int64_t d = 0;
    while (a->value_width - d >= LANES) {
        const int wide = a->value_width - d >= TILE_VECTORS * LANES;
        for (int64_t i = 0; i < a->count; i += TILE_QUERIES) {
            const int queries = (int)MIN(TILE_QUERIES, a->count - i);
#define WIDE_VALUES(n) value_tile(a, i, n, TILE_VECTORS, values, first, last, d, dtype)
#define ONE_VALUES(n) value_tile(a, i, n, 1, values, first, last, d, dtype)
            if (wide) {
                EACH_COUNT(WIDE_VALUES)
            } else {
                EACH_COUNT(ONE_VALUES)
            }
        }
        d += wide ? TILE_VECTORS * LANES : LANES;
    }
    for (; d < a->value_width; d++)
        for (int64_t i = 0; i < a->count; i++)
            for (int64_t key = first; key < last; key++) {
                const int64_t at = dtype == PLLM_BF16 ? key / 2 * 2 * a->value_width + 2 * d + key % 2 : key * a->value_width + d;
                a->sum[i * a->value_width + d] += a->scores[i * SCORE_TILE + key] * one_any(values, at, dtype);
            }
}

#if defined(DOT_BF16)
static void NAME(pack_queries)(const attention *a) {
    uint16_t *to = (uint16_t *)a->packed_queries;
    for (int64_t i = 0; i < a->count; i++, to += a->width) NAME(store)(to, a->queries[i], a->width, PLLM_BF16);
}
static void NAME(pack_weights)(const attention *a, int64_t i, int64_t count) {
    NAME(store)((uint16_t *)a->packed_weights + i * SCORE_TILE, a->scores + i * SCORE_TILE, count, PLLM_BF16);
}
#else
static void NAME(pack_queries)(const attention *a) { (void)a; }
static void NAME(pack_weights)(const attention *a, int64_t i, int64_t count) { (void)a, (void)i, (void)count; }
#endif

/* A constant type lets the compiler specialise the loops. */
NOINLINE void NAME(scores_bf16)(const attention *a, const void *keys, int64_t blocks) {
    score_all(a, keys, blocks, PLLM_BF16);
}
NOINLINE void NAME(scores_f32)(const attention *a, const void *keys, int64_t blocks) {
    score_all(a, keys, blocks, PLLM_F32);
}
NOINLINE void NAME(values_bf16)(const attention *a, const void *values, int64_t first, int64_t last) {
    value_all(a, values, first, last, PLLM_BF16);
}
NOINLINE void NAME(values_f32)(const attention *a, const void *values, int64_t first, int64_t last) {
    value_all(a, values, first, last, PLLM_F32);
}

/* cap * tanh(score / cap) of `count` scores, a multiple of LANES. */
static void NAME(bend)(float *scores, int64_t count, float cap) {
    for (int64_t k = 0; k < count; k += LANES) {
        const lanes x = load_f32(scores + k) / cap, size = (lanes)((lanes_u)x & 0x7fffffffU), square = x * x;
        const lanes e = exp_of(size * -2.0f);
        const lanes_u far = (lanes_u)((1.0f - e) / (1.0f + e)) | ((lanes_u)x & 0x80000000U);
        /* Of small numbers the difference has few digits. */
        const lanes_u near = (lanes_u)(x * (1.0f + square * (-1.0f / 3.0f + square * (2.0f / 15.0f + square *
                                       (-17.0f / 315.0f + square * (62.0f / 2835.0f))))));
        const lanes_u small = (lanes_u)(size < all(0.3f)), number = (lanes_u)(x == x);
        const lanes_u bent = (near & small) | (far & ~small);
        store_f32(scores + k, (lanes)((bent & number) | ((lanes_u)x & ~number)) * cap);
    }
}

/* Takes what is not chosen from the scores of positions low..high). */
static void NAME(hide)(const attention *a, const uint8_t *chosen, float *scores, int64_t low, int64_t high) {
    for (int64_t at = low, end; at < high; at = end) {
        const int64_t block = (at - a->chosen_start) / a->chosen_size;
        end = MIN((block + 1) * a->chosen_size + a->chosen_start, high);
        for (int64_t k = at; !chosen[block] && k < end; k++) scores[k - low] = -INFINITY;
    }
}

/* Turns the scores of positions tile..tile + SCORE_TILE) into weights, and rescales what was added up before. */
static void NAME(soften)(const attention *a, int64_t i, int64_t tile, int64_t from, int64_t to, int64_t end) {
    float *scores = a->scores + i * SCORE_TILE;
    const int64_t low = MIN(MAX(a->low[i], from), to), high = MAX(MIN(a->high[i], to), low);
    for (int64_t k = 0; k < low - tile; k++) scores[k] = 0;
    for (int64_t k = high - tile; k < end - tile; k++) scores[k] = 0;
    if (low == high) return;
    float *visible = scores + (low - tile);
    const int64_t count = high - low;
    if (a->chosen && a->chosen[i]) NAME(hide)(a, a->chosen[i], visible, low, high);
    float most = a->maximum[i];
    int64_t k = 0;
    if (count >= LANES) {
        lanes best = load_f32(visible);
        for (k = LANES; k + LANES <= count; k += LANES) best = larger(load_f32(visible + k), best);
        float parts[LANES];
        memcpy(parts, &best, sizeof parts);
        for (int j = 0; j < LANES; j++) most = MAX(most, parts[j]);
    }
    for (; k < count; k++) most = MAX(most, visible[k]);
    if (a->chosen && most == -INFINITY) { /* nothing is seen so far */
        for (k = 0; k < count; k++) visible[k] = 0;
        return;
    }
    if (most > a->maximum[i]) {
        const float shrink = a->maximum[i] == -INFINITY ? 0.0f : expf(a->maximum[i] - most);
        a->maximum[i] = most;
        a->total[i] *= shrink;
        float *sum = a->sum + i * a->value_width;
        for (int64_t d = 0; d < a->value_width; d++) sum[d] *= shrink;
    }
    lanes totals = {0};
    for (k = 0; k + LANES <= count; k += LANES) {
        lanes weight = exp_of(load_f32(visible + k) - most);
        store_f32(visible + k, weight);
        totals += weight;
    }
    float total = sum_of(totals);
    for (; k < count; k++) total += visible[k] = expf(visible[k] - most);
    a->total[i] += total;
}

/* The pairs of numbers at `at`, of 8 or 4 bits each, to pairs of bfloat16. `even` and `odd`: the scales of the first and
   the second of a pair. */
ALWAYS_INLINE lanes_u opened_pairs(const void *pairs, int64_t at, lanes even, lanes odd, int bits) {
    const lanes_i pair = bits == 8 ? __builtin_convertvector(*(const lanes_h_any *)((const uint16_t *)pairs + at), lanes_i)
                                   : __builtin_convertvector(*(const lanes_b_any *)((const uint8_t *)pairs + at), lanes_i);
    const lanes low = __builtin_convertvector((lanes_i)((lanes_u)pair << (32 - bits)) >> (32 - bits), lanes);
    const lanes high = __builtin_convertvector((lanes_i)((lanes_u)pair << (32 - 2 * bits)) >> (32 - bits), lanes);
    const lanes_u a = (lanes_u)(low * even), b = (lanes_u)(high * odd);
    return (a + 0x7fff + (a >> 16 & 1)) >> 16 | ((b + 0x7fff + (b >> 16 & 1)) & 0xffff0000U);
}

/* `blocks` of packed keys to bfloat16, in the same order. */
ALWAYS_INLINE void open_keys(const attention *a, const void *from, int64_t blocks, int bits) {
    const int64_t width = a->width, row = cached_bytes(a->dtype, width);
    for (int64_t b = 0; b < blocks; b++) {
        const char *pairs = (const char *)from + b * PLLM_KEY_BLOCK * row;
        const uint16_t *scales = (const uint16_t *)(pairs + PLLM_KEY_BLOCK * width * bits / 8);
        uint32_t *to = (uint32_t *)a->opened + b * PLLM_KEY_BLOCK * width / 2;
        for (int64_t group = 0; group < width / CACHE_GROUP; group++)
            for (int64_t lane = 0; lane < PLLM_KEY_BLOCK; lane += LANES) {
                const lanes scale = load_bf16(scales + group * PLLM_KEY_BLOCK + lane);
                for (int64_t d = group * CACHE_GROUP / 2; d < (group + 1) * CACHE_GROUP / 2; d++) {
                    const lanes_u found = opened_pairs(pairs, d * PLLM_KEY_BLOCK + lane, scale, scale, bits);
                    memcpy(to + d * PLLM_KEY_BLOCK + lane, &found, sizeof found);
                }
            }
    }
}

/* `blocks` of values. */
ALWAYS_INLINE void open_values(const attention *a, const void *from, int64_t blocks, int bits) {
    const int64_t width = a->value_width, row = cached_bytes(a->dtype, width);
    for (int64_t b = 0; b < blocks; b++) {
        const char *pairs = (const char *)from + b * PLLM_KEY_BLOCK * row;
        const uint16_t *scales = (const uint16_t *)(pairs + PLLM_KEY_BLOCK * width * bits / 8);
        uint32_t *to = (uint32_t *)a->opened + b * PLLM_KEY_BLOCK * width / 2;
        for (int64_t pair = 0; pair < PLLM_KEY_BLOCK / 2; pair++)
            for (int64_t group = 0; group < width / CACHE_GROUP; group++) {
                const uint16_t *two = scales + group * PLLM_KEY_BLOCK + 2 * pair;
                const lanes even = all(one_bf16(two[0])), odd = all(one_bf16(two[1]));
                for (int64_t d = group * CACHE_GROUP; d < (group + 1) * CACHE_GROUP; d += LANES) {
                    const lanes_u found = opened_pairs(pairs, pair * width + d, even, odd, bits);
                    memcpy(to + pair * width + d, &found, sizeof found);
                }
            }
    }
}

/* Keys or values of the cache as attention reads them: those of 8 or 4 bits are opened. */
static const void *NAME(readable)(const attention *a, const void *from, int64_t blocks, int values) {
    const int bits = packed_bits(a->dtype);
    if (!bits) return from;
    if (bits == 8) {
        (values ? open_values : open_keys)(a, from, blocks, 8);
    } else {
        (values ? open_values : open_keys)(a, from, blocks, 4);
    }
    return a->opened;
}

/* `blocks` of keys in the order of values. Of bfloat16, two positions of two dimensions are turned at a time. */
static void NAME(turn_keys)(const attention *a, const void *from, int64_t blocks, int half) {
    const int64_t width = a->width;
    for (int64_t b = 0; b < blocks; b++) {
        if (half) {
            const uint64_t *keys = (const uint64_t *)from + b * width / 2 * PLLM_KEY_BLOCK / 2;
            uint64_t *to = (uint64_t *)a->turned + b * PLLM_KEY_BLOCK / 2 * width / 2;
            for (int64_t d = 0; d < width / 2; d++)
                for (int64_t pair = 0; pair < PLLM_KEY_BLOCK / 2; pair++) {
                    const uint64_t four = keys[d * PLLM_KEY_BLOCK / 2 + pair];
                    to[pair * width / 2 + d] = (four & 0xffff00000000ffffU) | (four >> 16 & 0xffff0000U) |
                                               (four & 0xffff0000U) << 16;
                }
        } else {
            const float *keys = (const float *)from + b * width * PLLM_KEY_BLOCK;
            float *to = (float *)a->turned + b * PLLM_KEY_BLOCK * width;
            for (int64_t d = 0; d < width; d++)
                for (int64_t lane = 0; lane < PLLM_KEY_BLOCK; lane++)
                    to[lane * width + d] = keys[d * PLLM_KEY_BLOCK + lane];
        }
    }
}

/* The blocks of PLLM_KEY_BLOCK positions of a tile, as bits, that some query sees. Leaving out the others changes no bit of
   what comes out: their weights are 0. */
static uint32_t NAME(seen_blocks)(const attention *a, int64_t tile, int64_t from, int64_t to) {
    const uint32_t before = (1U << (from - tile) / PLLM_KEY_BLOCK) - 1;
    const uint32_t every = (uint32_t)((1ULL << divided_up(to - tile, PLLM_KEY_BLOCK)) - 1) & ~before;
    uint32_t seen = 0;
    for (int64_t i = 0; a->chosen && i < a->count; i++) {
        if (!a->chosen[i]) return every;
        if (i > 0 && a->chosen[i] == a->chosen[i - 1]) continue;
        for (int64_t at = from, end; at < to; at = end) {
            const int64_t block = (at - a->chosen_start) / a->chosen_size;
            end = MIN((block + 1) * a->chosen_size + a->chosen_start, to);
            for (int64_t k = (at - tile) / PLLM_KEY_BLOCK; a->chosen[i][block] && k <= (end - 1 - tile) / PLLM_KEY_BLOCK; k++)
                seen |= 1U << k;
        }
    }
    return a->chosen ? seen : every;
}

/* The next run of blocks in `seen`, behind block `*end`; 0 if there is none. */
static int NAME(next_run)(uint32_t seen, int64_t *begin, int64_t *end) {
    for (*begin = *end; *begin < SCORE_TILE / PLLM_KEY_BLOCK && !(seen >> *begin & 1);) ++*begin;
    for (*end = *begin; *end < SCORE_TILE / PLLM_KEY_BLOCK && seen >> *end & 1;) ++*end;
    return *begin < *end;
}

static void NAME(attend)(const attention *a) {
    const int half = a->dtype != PLLM_F32;
    const int64_t row = cached_bytes(a->dtype, a->width), value_row = cached_bytes(a->dtype, a->value_width);
    int64_t first = a->last, last = a->first;
    for (int64_t i = 0; i < a->count; i++) {
        first = MIN(first, MAX(a->low[i], a->first));
        last = MAX(last, MIN(a->high[i], a->last));
    }
    if (half) NAME(pack_queries)(a);
    /* Tiles begin where no query has a part in it, so that a query's sums do not depend on those beside it. */
    for (int64_t tile = first / SCORE_TILE * SCORE_TILE; tile < last; tile += SCORE_TILE) {
        const int64_t from = MAX(tile, first), to = MIN(tile + SCORE_TILE, last);
        const int64_t end = tile + divided_up(to - tile, PLLM_KEY_BLOCK) * PLLM_KEY_BLOCK;
        const uint32_t seen = NAME(seen_blocks)(a, tile, from, to);
        if (!seen) continue;
        const void *keys = NULL;
        int runs = 0;
        for (int64_t begin, behind = 0; NAME(next_run)(seen, &begin, &behind); runs++) {
            attention part = *a;
            part.scores += begin * PLLM_KEY_BLOCK;
            keys = NAME(readable)(a, (const char *)a->keys + (tile + begin * PLLM_KEY_BLOCK) * row, behind - begin, 0);
            (half ? NAME(scores_bf16) : NAME(scores_f32))(&part, keys, behind - begin);
        }
        for (int64_t i = 0; i < a->count; i++) {
            if (a->cap > 0) NAME(bend)(a->scores + i * SCORE_TILE, end - tile, a->cap);
            NAME(soften)(a, i, tile, from, to, end);
            if (half) NAME(pack_weights)(a, i, end - tile);
        }
        for (int64_t begin, behind = 0; NAME(next_run)(seen, &begin, &behind);) {
            const int64_t start = tile + begin * PLLM_KEY_BLOCK, count = behind - begin;
            const void *values = a->turned;
            attention part = *a;
            part.scores += begin * PLLM_KEY_BLOCK;
            part.packed_weights += begin * PLLM_KEY_BLOCK / 2;
            if (!a->values) {
                if (runs > 1) keys = NAME(readable)(a, (const char *)a->keys + start * row, count, 0);
                NAME(turn_keys)(a, keys, count, half);
            } else {
                values = NAME(readable)(a, (const char *)a->values + start * value_row, count, 1);
            }
            (half ? NAME(values_bf16) : NAME(values_f32))(&part, values, MAX(from - start, 0),
                                                          MIN(to - start, count * PLLM_KEY_BLOCK));
        }
    }
}

static void NAME(index)(const attention *a, const float *weights, float *to) {
    const int half = a->dtype != PLLM_F32;
    const int64_t row = cached_bytes(a->dtype, a->width);
    if (half) NAME(pack_queries)(a);
    for (int64_t tile = a->first / PLLM_KEY_BLOCK * PLLM_KEY_BLOCK; tile < a->last; tile += SCORE_TILE) {
        const int64_t from = MAX(tile, a->first), end = MIN(tile + SCORE_TILE, a->last);
        const int64_t blocks = divided_up(end - tile, PLLM_KEY_BLOCK);
        const void *keys = NAME(readable)(a, (const char *)a->keys + tile * row, blocks, 0);
        (half ? NAME(scores_bf16) : NAME(scores_f32))(a, keys, blocks);
        float sums[SCORE_TILE];
        for (int64_t k = 0; k < blocks * PLLM_KEY_BLOCK; k += LANES) {
            lanes sum = {0};
            for (int64_t i = 0; i < a->count; i++) {
                const lanes score = load_f32(a->scores + i * SCORE_TILE + k);
                sum += weights[i] * (lanes)((lanes_u)score & ~(lanes_u)(score < all(0.0f)));
            }
            store_f32(sums + k, sum);
        }
        memcpy(to + from - a->first, sums + from - tile, (size_t)(end - from) * 4);
    }
}

#include "delta_template.h"

const trunk_set NAME(pllm_trunk) = {
    NAME(residual_norm), NAME(norm), NAME(rotate), NAME(store), NAME(load),  NAME(attend), NAME(index),
    NAME(gate),          NAME(convolve), NAME(product), NAME(unit), NAME(decay),
    NAME(multiply),      NAME(recur),    NAME(gated_norm),
};
