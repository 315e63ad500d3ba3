/* Vectors of eight lanes with AVX2 and FMA; include inside the target's pragmas. */
#define V __m256
#define W 8
#define SET(name) avx2_##name
#define FEW_TOKENS 3
#define TILE_TOKENS 3

ALWAYS_INLINE float avx2_sum(__m256 v) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
}

ALWAYS_INLINE void avx2_sum4(__m256 a, __m256 b, __m256 c, __m256 d, float *to) {
    __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}

ALWAYS_INLINE __m256 avx2_load_bf16(const uint16_t *from) {
    __m128i halves = _mm_loadu_si128((const __m128i *)(const void *)from);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

/* As fp8_as_half. */
ALWAYS_INLINE void avx2_load_fp8(const uint8_t *from, __m256 to[2]) {
    const __m256i codes = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(const void *)from));
    const __m256i size = _mm256_set1_epi16(0x7f);
    const __m256i none = _mm256_cmpeq_epi16(_mm256_and_si256(codes, size), size);
    const __m256i sized = _mm256_and_si256(_mm256_slli_epi16(codes, 7), _mm256_set1_epi16((short)0xbf80));
    const __m256i halves = _mm256_or_si256(sized, _mm256_srli_epi16(none, 1));
    to[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
    to[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
}

/* The lower 16 bits of each lane, packed side by side and widened. */
ALWAYS_INLINE __m256 avx2_low_f16(__m256i words) {
    const __m256i low = _mm256_and_si256(words, _mm256_set1_epi32(0xffff));
    const __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08);
    return _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
}

ALWAYS_INLINE __m256 avx2_pow2(__m256 v) {
    __m256i n = _mm256_add_epi32(_mm256_cvtps_epi32(v), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(n, 23));
}

ALWAYS_INLINE void avx2_transpose(__m256 r[8]) {
    __m256 a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
        b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
        b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
        b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
        r[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
    }
}

/* The first `count` columns of r, `apart` floats from one to the next. */
ALWAYS_INLINE void avx2_store_transposed(__m256 r[8], float *to, const int64_t apart, const int64_t count) {
    avx2_transpose(r);
    for (int64_t i = 0; i < count; i++) _mm256_storeu_ps(to + i * apart, r[i]);
}

#define V_ZERO _mm256_setzero_ps()
#define V_SET1(value) _mm256_set1_ps(value)
#define V_LOAD(from) _mm256_loadu_ps(from)
#define V_STORE(to, v) _mm256_storeu_ps(to, v)
#define V_ADD(a, b) _mm256_add_ps(a, b)
#define V_SUB(a, b) _mm256_sub_ps(a, b)
#define V_MUL(a, b) _mm256_mul_ps(a, b)
#define V_DIV(a, b) _mm256_div_ps(a, b)
#define V_FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#define V_MIN(a, b) _mm256_min_ps(a, b)
#define V_MAX(a, b) _mm256_max_ps(a, b)
#define V_ROUND(v) _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define V_POW2(v) avx2_pow2(v)
#define V_SUM(v) avx2_sum(v)
#define V_SUM4(a, b, c, d, to) avx2_sum4(a, b, c, d, to)
#define V_LOAD_BF16(from) avx2_load_bf16(from)
#define V_LOW(v) _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(v), 16))
#define V_HIGH(v) _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32((int)0xffff0000U)))
#define V_LOAD_F16(from) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(from)))
#define V_LOAD_FP8(from, to) avx2_load_fp8(from, to)
#define V_LOW_F16(v) avx2_low_f16(_mm256_castps_si256(v))
#define V_HIGH_F16(v) avx2_low_f16(_mm256_srli_epi32(_mm256_castps_si256(v), 16))
#define V_TRANSPOSE(rows) avx2_transpose(rows)
#define V_SELECT_POSITIVE(v, a, b) _mm256_blendv_ps(b, a, _mm256_cmp_ps(v, V_ZERO, _CMP_GE_OQ))
