/* What the instruction sets bring to the trunk; not part of the library's interface. */
#ifndef PRIVATELLM_TRUNK_INTERNAL_H
#define PRIVATELLM_TRUNK_INTERNAL_H

#include "kernels_internal.h"
#include "trunk.h"

/* Keys whose scores are computed before the values are added up. */
#define SCORE_TILE 256

/* Numbers of a key or value that share a scale in Q8_0 and Q4_0. */
#define CACHE_GROUP 32

/* Bits of a number of a packed key or value; 0: they are not packed. */
static inline int packed_bits(int32_t dtype) { return dtype == PLLM_Q8_0 ? 8 : dtype == PLLM_Q4_0 ? 4 : 0; }

/* Bytes of a head's keys, or of its values, of one position; of a whole packed block, divided by its positions. */
static inline int64_t cached_bytes(int32_t dtype, int64_t width) {
    const int bits = packed_bits(dtype);
    return bits ? width * bits / 8 + width / CACHE_GROUP * 2 : width * (dtype == PLLM_F32 ? 4 : 2);
}

/* Queries of one key/value head against positions first..last) of one page. Query i sees positions low[i]..high[i]).
   Softmax runs on: `maximum`, `total` and `sum` [queries, value_width] hold the state so far. */
typedef struct attention {
    const float *const *queries; /* scaled */
    const int64_t *low, *high;
    const void *keys, *values; /* of the head, position 0 of the page; values NULL: the keys are the values */
    float *scores;             /* [queries, SCORE_TILE] */
    uint32_t *packed_queries;  /* [queries, width / 2] and */
    uint32_t *packed_weights;  /* [queries, SCORE_TILE / 2]: scratch for pairs of bfloat16 */
    uint16_t *opened;          /* [SCORE_TILE, the wider of both]: packed keys or values as bfloat16 */
    void *turned;              /* [SCORE_TILE, width]: keys in the order of values; without values only */
    float *maximum, *total, *sum;
    const uint8_t *const *chosen; /* [queries]: whether a query sees each block of chosen_size positions; NULL in it, or
                                     instead of all: every one */
    int64_t chosen_size, chosen_start; /* the first block begins at this position of the page, which may be negative */
    int64_t count, width, value_width, first, last;
    int32_t dtype;
    float cap; /* scores are cap * tanh(score / cap); 0: they are not limited */
} attention;

/* Tokens of one head of a delta-net or a Mamba-2 layer: its states and what changes them. Widths of values are padded to
   whole PLLM_STATE_COLUMNS. */
typedef struct delta_run {
    const float *before;         /* the head's state; NULL: zeros */
    float *after;                /* may be `before` */
    const float *queries, *keys; /* [tokens, key_width] */
    const float *values;         /* [tokens, value_width] */
    float *results;              /* [tokens, value_width] */
    const float *decays, *rates; /* [tokens]; decays may be `wide` */
    const float *products;       /* [tokens]: query times key */
    const float *decayed;        /* [tokens, key_width]: keys times their decays, if those are `wide` */
    int64_t tokens, key_width, value_width;
    int64_t adds; /* whether values are added to the state whatever it answers to their keys */
    int64_t wide; /* whether decays are [tokens, key_width], and queries are multiplied by them already */
} delta_run;

typedef struct trunk_set {
    /* h += scale * out (+ other) if `out`; to = h / rms(h) * weight. */
    void (*residual_norm)(float *h, const float *out, const float *bias, const float *other, float scale,
                          const float *weight, float epsilon, float *to, int64_t count);
    /* x = x / rms(x) * weight */
    void (*norm)(float *x, const float *weight, float epsilon, int64_t count);
    /* Rotates a head by the angles of its position, and scales it. */
    void (*rotate)(float *head, const float *cosine, const float *sine, float scale, int64_t half);
    void (*store)(void *to, const float *from, int64_t count, int dtype);
    void (*load)(float *to, const void *from, float scale, int64_t count, int dtype);
    void (*attend)(const attention *a);
    /* to [last - first] = the sum over the queries of weight * max(0, query * key), of positions a->first..a->last). */
    void (*index)(const attention *a, const float *weights, float *to);
    /* x *= sigmoid(gate) */
    void (*gate)(float *x, const float *gate, int64_t count);
    /* to = SiLU of the sum of taps[i] * kernel[i], i from `first` on, and of `bias` if there is one; `stride` from one tap's
       kernel to the next. `to` may be one of the taps. */
    void (*convolve)(float *to, const float *const *taps, const float *kernel, const float *bias, int64_t stride, int first,
                     int last, int64_t count);
    float (*product)(const float *a, const float *b, int64_t count);
    /* Makes both of length 1, then the query `scale` long; returns their product. */
    float (*unit)(float *query, float *key, float scale, int64_t count);
    /* to = exp(scale * softplus(x + bias)), or, with a `least` below 0, exp(least * sigmoid(-scale * (x + bias))). */
    void (*decay)(float *to, const float *x, const float *bias, float scale, float least, int64_t count);
    /* to = a * b */
    void (*multiply)(float *to, const float *a, const float *b, int64_t count);
    void (*recur)(const delta_run *run);
    /* to = x / rms(x) * weight * SiLU(gate) */
    void (*gated_norm)(float *to, const float *x, const float *gate, const float *weight, float epsilon, int64_t count);
} trunk_set;

extern const trunk_set pllm_trunk_scalar;
#if defined(__x86_64__)
extern const trunk_set pllm_trunk_avx2, pllm_trunk_avx512f, pllm_trunk_avx512_bf16;
#endif
#if defined(__aarch64__)
extern const trunk_set pllm_trunk_neon;
#endif

#endif
