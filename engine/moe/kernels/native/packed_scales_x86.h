/* The scales of packed weights as AVX2 and AVX-512 read them: eight for a unit, one for each 32 values. Q6_K, with sixteen,
   is not among them. Include inside pragmas for avx2 and f16c. */

ALWAYS_INLINE int half_at(const uint8_t *from) {
    uint16_t half;
    memcpy(&half, from, 2);
    return half;
}

ALWAYS_INLINE float widened(const uint8_t *from) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half_at(from)))); }

/* The halves `at` bytes after the beginning of each of eight blocks. */
ALWAYS_INLINE __m256 eight_halves(const uint8_t *b, const int64_t size, const int64_t at) {
    const uint8_t *from = b + at;
    __m128i halves = _mm_cvtsi32_si128(half_at(from));
    halves = _mm_insert_epi16(halves, half_at(from + size), 1);
    halves = _mm_insert_epi16(halves, half_at(from + 2 * size), 2);
    halves = _mm_insert_epi16(halves, half_at(from + 3 * size), 3);
    halves = _mm_insert_epi16(halves, half_at(from + 4 * size), 4);
    halves = _mm_insert_epi16(halves, half_at(from + 5 * size), 5);
    halves = _mm_insert_epi16(halves, half_at(from + 6 * size), 6);
    halves = _mm_insert_epi16(halves, half_at(from + 7 * size), 7);
    return _mm256_cvtph_ps(halves);
}

ALWAYS_INLINE __m256 times_one(__m256i whole, const uint8_t *scale) {
    return _mm256_mul_ps(_mm256_cvtepi32_ps(whole), _mm256_set1_ps(widened(scale)));
}

/* As e8m0_half. */
ALWAYS_INLINE __m256 eight_powers(const uint8_t *b, const int64_t size) {
    __m128i bytes = _mm_cvtsi32_si128(b[0]);
    bytes = _mm_insert_epi8(bytes, b[size], 1);
    bytes = _mm_insert_epi8(bytes, b[2 * size], 2);
    bytes = _mm_insert_epi8(bytes, b[3 * size], 3);
    bytes = _mm_insert_epi8(bytes, b[4 * size], 4);
    bytes = _mm_insert_epi8(bytes, b[5 * size], 5);
    bytes = _mm_insert_epi8(bytes, b[6 * size], 6);
    bytes = _mm_insert_epi8(bytes, b[7 * size], 7);
    const __m256i exponents = _mm256_cvtepu8_epi32(bytes);
    const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(exponents, _mm256_set1_epi32(1)), 23);
    const __m256i small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), exponents);
    const __m256i tiny = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), exponents);
    return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, small, tiny));
}

/* The scales of Q4_K and Q5_K as k_scale reads them; `minimums` instead of them. */
ALWAYS_INLINE __m256 eight_k(const uint8_t *b, const int minimums) {
    uint32_t first, second, third;
    memcpy(&first, b + Q4_K_SCALES, 4);
    memcpy(&second, b + Q4_K_SCALES + 4, 4);
    memcpy(&third, b + Q4_K_SCALES + 8, 4);
    const uint32_t own = minimums ? second : first, shared = minimums ? third >> 4 : third;
    const uint64_t bytes =
        (own & 0x3f3f3f3fU) | (uint64_t)((shared & 0x0f0f0f0fU) | (own >> 2 & 0x30303030U)) << 32;
    return times_one(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)bytes)), b + 2 * minimums);
}

ALWAYS_INLINE __m256 eight_iq4_xs(const uint8_t *b) {
    uint32_t low;
    memcpy(&low, b + IQ4_XS_LOW, 4);
    const __m256i steps = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i fours = _mm256_srlv_epi32(_mm256_set1_epi32((int)low), _mm256_slli_epi32(steps, 2));
    const __m256i twos = _mm256_srlv_epi32(_mm256_set1_epi32(half_at(b + IQ4_XS_HIGH)), _mm256_slli_epi32(steps, 1));
    const __m256i own = _mm256_or_si256(_mm256_and_si256(fours, _mm256_set1_epi32(15)),
                                        _mm256_slli_epi32(_mm256_and_si256(twos, _mm256_set1_epi32(3)), 4));
    return times_one(_mm256_sub_epi32(own, _mm256_set1_epi32(32)), b);
}

ALWAYS_INLINE __m256 eight_scales(const uint8_t *b, const int dtype) {
    switch (dtype) {
    case PLLM_Q4_K:
    case PLLM_Q5_K: return eight_k(b, 0);
    case PLLM_IQ4_XS: return eight_iq4_xs(b);
    case PLLM_MXFP4: return eight_powers(b, block_bytes(dtype));
    default: return eight_halves(b, block_bytes(dtype), 0);
    }
}

/* What the file itself says is to be taken away; only of formats with has_minimums. */
ALWAYS_INLINE __m256 eight_minimums(const uint8_t *b, const int dtype) {
    if (dtype == PLLM_Q4_K || dtype == PLLM_Q5_K) return eight_k(b, 1);
    return _mm256_sub_ps(_mm256_setzero_ps(), eight_halves(b, block_bytes(dtype), 2));
}
