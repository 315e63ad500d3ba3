/* Activations in bfloat16, two to a word, for AVX512_BF16 (the names are explained in rows_template.h). */

#define PER_WORD 2
#define FACTOR __m512bh
#define FACTOR_LOAD(from) SET(load)(from)
#define FACTOR_SET1(from) SET(load_word)(from)
#define FACTOR_WEIGHT(from, dtype) SET(load)(from)
#define FACTOR_WEIGHT_SOME(from, count, dtype) SET(load_some)(from, count)
#define FACTOR_ADD(weight, token, sum) _mm512_dpbf16_ps(sum, weight, token)

ALWAYS_INLINE __m512bh SET(load)(const void *from) { return (__m512bh)_mm512_loadu_si512(from); }

ALWAYS_INLINE __m512bh SET(load_word)(const void *from) {
    int32_t word;
    memcpy(&word, from, 4);
    return (__m512bh)_mm512_set1_epi32(word);
}

ALWAYS_INLINE __m512bh SET(load_some)(const void *from, int64_t count) {
    return (__m512bh)_mm512_maskz_loadu_epi16((__mmask32)((1ULL << count) - 1), from);
}

static void SET(convert)(void *row, int64_t first, const float *from, float scale, int64_t count) {
    uint16_t *to = (uint16_t *)row + first;
    const __m512 factor = _mm512_set1_ps(scale);
    for (int64_t i = 0; i < count; i += W) {
        const __mmask16 mask = count - i >= W ? 0xffff : (__mmask16)((1U << (count - i)) - 1);
        const __m512 values = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, from + i), factor);
        _mm256_mask_storeu_epi16(to + i, mask, (__m256i)_mm512_cvtneps_pbh(values));
    }
}

static void SET(pad)(void *row, int64_t columns) {
    memset((uint16_t *)row + columns, 0, (size_t)(padded(columns) - columns) * sizeof(uint16_t));
}

static void SET(tile)(void *tile, const float *const *rows, const float *scales, int64_t tokens, int64_t column,
                      int64_t count) {
    /* Two neighbouring columns of a token are the word of a lane; sixteen words of up to sixteen tokens at a time. */
    uint32_t *to = (uint32_t *)tile + column / 2 * TILE_TOKENS;
    const __mmask16 held = (1U << TILE_TOKENS) - 1;
    for (int64_t k = 0; k < count; k += (2 * W)) {
        const int64_t left = MIN((2 * W), count - k);
        const uint32_t mask = (uint32_t)((1ULL << left) - 1);
        V lanes[W];
        UNROLL for (int m = 0; m < W; m++) {
            if (m >= tokens) {
                lanes[m] = V_ZERO;
                continue;
            }
            const __m512 factor = _mm512_set1_ps(scales ? scales[m] : 1.0F);
            const __m512 low = _mm512_mul_ps(_mm512_maskz_loadu_ps((__mmask16)mask, rows[m] + k), factor);
            const __m512 high = _mm512_mul_ps(_mm512_maskz_loadu_ps((__mmask16)(mask >> W), rows[m] + k + W), factor);
            lanes[m] = (V)_mm512_cvtne2ps_pbh(high, low);
        }
        V_TRANSPOSE(lanes);
        const int64_t pairs = divided_up(left, 2);
        UNROLL for (int i = 0; i < W; i++) {
            if (i < pairs) _mm512_mask_storeu_ps(to + (k / 2 + i) * TILE_TOKENS, held, lanes[i]);
        }
    }
}
