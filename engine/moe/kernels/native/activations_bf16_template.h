/* Activations in bfloat16, two to a word, for AVX512_BF16 (the names are explained in rows_template.h). */

#define PER_WORD 2
#define FACTOR __m512bh
#define FACTOR_LOAD(from) SET(load)(from)
#define FACTOR_SET1(from) SET(load_word)(from)
#define FACTOR_WEIGHT(from, dtype) SET(load)(from)
#define FACTOR_WEIGHT_SOME(from, count, dtype) SET(load_some)(from, count)
#define FACTOR_ADD(weight, token, sum) _mm512_dpbf16_ps(sum, weight, token)
#define FACTOR_FP8(from, to) SET(load_fp8)(from, to)
#define FACTOR_LIFT 1.0F
#define STORE_OPENED(to, k, count, v)                                                                              \
    _mm256_mask_storeu_epi16((uint16_t *)(to) + (k), (__mmask16)((1U << (count)) - 1), (__m256i)_mm512_cvtneps_pbh(v))

ALWAYS_INLINE __m512bh SET(load)(const void *from) { return (__m512bh)_mm512_loadu_si512(from); }

ALWAYS_INLINE __m512bh SET(load_word)(const void *from) {
    int32_t word;
    memcpy(&word, from, 4);
    return (__m512bh)_mm512_set1_epi32(word);
}

ALWAYS_INLINE __m512bh SET(load_some)(const void *from, int64_t count) {
    return (__m512bh)_mm512_maskz_loadu_epi16((__mmask32)((1ULL << count) - 1), from);
}

/* What the bytes of a bfloat16 are for the 128 sizes of an FP8 number, without a sign. */
static const uint8_t SET(fp8_upper)[128] = {
    0x00, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c,
    0x3d, 0x3d, 0x3d, 0x3d, 0x3d, 0x3d, 0x3d, 0x3d, 0x3d, 0x3d, 0x3d, 0x3d, 0x3d, 0x3d, 0x3d, 0x3d,
    0x3e, 0x3e, 0x3e, 0x3e, 0x3e, 0x3e, 0x3e, 0x3e, 0x3e, 0x3e, 0x3e, 0x3e, 0x3e, 0x3e, 0x3e, 0x3e,
    0x3f, 0x3f, 0x3f, 0x3f, 0x3f, 0x3f, 0x3f, 0x3f, 0x3f, 0x3f, 0x3f, 0x3f, 0x3f, 0x3f, 0x3f, 0x3f,
    0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40,
    0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41,
    0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42,
    0x43, 0x43, 0x43, 0x43, 0x43, 0x43, 0x43, 0x43, 0x43, 0x43, 0x43, 0x43, 0x43, 0x43, 0x43, 0x7f,
}, SET(fp8_lower)[128] = {
    0x00, 0x00, 0x80, 0xc0, 0x00, 0x20, 0x40, 0x60, 0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xf0,
    0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xf0,
    0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xf0,
    0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xf0,
    0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xf0,
    0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xf0,
    0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xf0,
    0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xc0,
};

/* The bytes are put between one another within 16 bytes, and so those of 8 numbers change places before. */
ALWAYS_INLINE void SET(load_fp8)(const uint8_t *from, __m512bh to[2]) {
    const __m512i places = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const __m512i codes = _mm512_permutexvar_epi64(places, _mm512_loadu_si512(from));
    const __m512i size = _mm512_permutex2var_epi8(_mm512_loadu_si512(SET(fp8_upper)), codes,
                                                  _mm512_loadu_si512(SET(fp8_upper) + 64));
    const __m512i lower = _mm512_permutex2var_epi8(_mm512_loadu_si512(SET(fp8_lower)), codes,
                                                   _mm512_loadu_si512(SET(fp8_lower) + 64));
    /* size | (codes & the sign) */
    const __m512i upper = _mm512_ternarylogic_epi32(size, codes, _mm512_set1_epi8((char)0x80), 0xf8);
    to[0] = (__m512bh)_mm512_unpacklo_epi8(lower, upper);
    to[1] = (__m512bh)_mm512_unpackhi_epi8(lower, upper);
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
