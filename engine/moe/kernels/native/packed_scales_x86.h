/* The scales of packed weights as AVX2 and AVX-512 read them: eight for a unit, one for each 32 values, or twice as many.
   Include inside pragmas for avx2 and f16c. */

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

/* Numbers of four bits. */
ALWAYS_INLINE __m256i eight_fours(const uint8_t *from) {
    uint32_t word;
    memcpy(&word, from, 4);
    const __m256i fours = _mm256_srlv_epi32(_mm256_set1_epi32((int)word), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
    return _mm256_and_si256(fours, _mm256_set1_epi32(15));
}

/* One more than twice each, times the factor of a unit with a grid. */
ALWAYS_INLINE __m256 eight_odd(__m256i of, const uint8_t *b, const int dtype) {
    const __m256 odd = _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_add_epi32(of, of), _mm256_set1_epi32(1)));
    if (dtype == PLLM_IQ1_M) return _mm256_mul_ps(odd, _mm256_set1_ps(grid_factor(b, dtype)));
    const float part = dtype == PLLM_IQ3_S ? 1.0F : dtype == PLLM_IQ3_XXS ? 0.5F : 0.125F;
    return _mm256_mul_ps(odd, _mm256_set1_ps(widened(b) * part));
}

/* Of blocks of 64 or 128 values the scale of each, as often as it has 32 of them. */
ALWAYS_INLINE __m256 eight_repeated(const uint8_t *b, const int dtype) {
    const int64_t size = block_bytes(dtype);
    if (block_values(dtype) == 128) return _mm256_set_m128(_mm_set1_ps(widened(b + size)), _mm_set1_ps(widened(b)));
    __m128i halves = _mm_cvtsi32_si128(half_at(b));
    halves = _mm_insert_epi16(halves, half_at(b + size), 2);
    halves = _mm_insert_epi16(halves, half_at(b + 2 * size), 4);
    halves = _mm_insert_epi16(halves, half_at(b + 3 * size), 6);
    return _mm256_moveldup_ps(_mm256_cvtph_ps(halves));
}

ALWAYS_INLINE __m256 eight_scales(const uint8_t *b, const int dtype) {
    switch (dtype) {
    case PLLM_Q4_K:
    case PLLM_Q5_K: return eight_k(b, 0);
    case PLLM_IQ4_XS: return eight_iq4_xs(b);
    case PLLM_IQ3_S: return eight_odd(eight_fours(b + IQ3_S_SCALES), b, dtype);
    case PLLM_IQ3_XXS:
        return eight_odd(_mm256_srli_epi32(_mm256_loadu_si256((const __m256i *)(const void *)(b + IQ3_XXS_SIGNS)), 28), b, dtype);
    case PLLM_IQ2_XXS: return eight_odd(_mm256_srli_epi32(upper_words(b + codes_at(dtype)), 28), b, dtype);
    case PLLM_IQ1_S: {
        const __m128i high = _mm_loadu_si128((const __m128i *)(const void *)(b + IQ1_S_HIGH));
        const __m256i bits = _mm256_and_si256(_mm256_srli_epi32(_mm256_cvtepu16_epi32(high), 12), _mm256_set1_epi32(7));
        return eight_odd(bits, b, dtype);
    }
    case PLLM_TQ1_0: return _mm256_set1_ps(widened(b + TQ1_0_SCALE));
    case PLLM_TQ2_0: return _mm256_set1_ps(widened(b + TQ2_0_SCALE));
    case PLLM_Q1_0:
    case PLLM_Q2_0: return eight_repeated(b, dtype);
    case PLLM_MXFP4: return eight_powers(b, block_bytes(dtype));
    default: return eight_halves(b, block_bytes(dtype), 0);
    }
}

/* What the file itself says is to be taken away; only of formats with has_minimums. */
ALWAYS_INLINE __m256 eight_minimums(const uint8_t *b, const int dtype) {
    if (dtype == PLLM_Q4_K || dtype == PLLM_Q5_K) return eight_k(b, 1);
    return _mm256_sub_ps(_mm256_setzero_ps(), eight_halves(b, block_bytes(dtype), 2));
}

/* Sixteen whole numbers times a half: first those of even places, then those of odd ones. */
ALWAYS_INLINE void sixteen_apart(__m128i whole, const uint8_t *half, __m256 to[2]) {
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    const __m128i apart = _mm_shuffle_epi8(whole, order);
    const __m256 by = _mm256_set1_ps(widened(half));
    to[0] = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(apart)), by);
    to[1] = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(apart, 8))), by);
}

ALWAYS_INLINE __m128i sixteen_bytes(const uint8_t *from) { return _mm_loadu_si128((const __m128i *)(const void *)from); }

/* As q3_k_scale, less 32. */
ALWAYS_INLINE __m128i sixteen_of_q3_k(const uint8_t *scales) {
    uint64_t low;
    uint32_t high;
    memcpy(&low, scales, 8);
    memcpy(&high, scales + 8, 4);
    const __m128i nibble = _mm_set1_epi8(15), lows = _mm_cvtsi64_si128((long long)low);
    const __m128i fours = _mm_and_si128(_mm_unpacklo_epi64(lows, _mm_srli_epi16(lows, 4)), nibble);
    const __m128i twos = _mm_srlv_epi32(_mm_set1_epi32((int)high), _mm_setr_epi32(0, 2, 4, 6));
    const __m128i ends = _mm_slli_epi16(_mm_and_si128(twos, _mm_set1_epi8(3)), 4);
    return _mm_sub_epi8(_mm_or_si128(fours, ends), _mm_set1_epi8(32));
}

/* Those of IQ2_XS and IQ2_S: of four bits, and those of the second halves in the upper ones. */
ALWAYS_INLINE void scales_of_nibbles(const uint8_t *from, const uint8_t *b, __m256 scales[2], const int dtype) {
    const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)from));
    scales[0] = eight_odd(_mm256_and_si256(bytes, _mm256_set1_epi32(15)), b, dtype);
    scales[1] = eight_odd(_mm256_srli_epi32(bytes, 4), b, dtype);
}

/* Those of IQ1_M: four of three bits in 16. */
ALWAYS_INLINE void scales_of_iq1_m(const uint8_t *b, __m256 scales[2]) {
    const __m128i four = _mm_loadl_epi64((const __m128i *)(const void *)(b + IQ1_M_SCALES));
    const __m256i words = _mm256_cvtepu16_epi32(_mm_unpacklo_epi16(four, four)), bits = _mm256_set1_epi32(7);
    const __m256i first = _mm256_srlv_epi32(words, _mm256_setr_epi32(0, 6, 0, 6, 0, 6, 0, 6));
    scales[0] = eight_odd(_mm256_and_si256(first, bits), b, PLLM_IQ1_M);
    scales[1] = eight_odd(_mm256_and_si256(_mm256_srli_epi32(first, 3), bits), b, PLLM_IQ1_M);
}

/* Those of NVFP4, as nvfp4_scale. */
ALWAYS_INLINE void scales_of_nvfp4(const uint8_t *b, __m256 scales[2]) {
    const int64_t size = block_bytes(PLLM_NVFP4);
    const __m128i codes = _mm_setr_epi32((int)four_bytes(b), (int)four_bytes(b + size), (int)four_bytes(b + 2 * size),
                                         (int)four_bytes(b + 3 * size));
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15), sizes = _mm_set1_epi8(0x7f);
    const __m128i there = _mm_andnot_si128(_mm_cmpeq_epi8(codes, sizes), _mm_and_si128(codes, sizes));
    const __m256i halves = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_shuffle_epi8(there, order)), 7);
    const __m256 by = _mm256_set1_ps(FP8_LIFT / 2);
    scales[0] = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), by);
    scales[1] = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)), by);
}

/* The scales of a unit's groups, or, where halves of groups have their own, of the first halves and of the second ones. */
ALWAYS_INLINE void scales_of(const uint8_t *b, __m256 scales[2], const int dtype) {
    switch (dtype) {
    case PLLM_Q6_K: sixteen_apart(sixteen_bytes(b + Q6_K_SCALES), b + Q6_K_SCALE, scales); return;
    case PLLM_Q2_K:
        sixteen_apart(_mm_and_si128(sixteen_bytes(b), _mm_set1_epi8(15)), b + Q2_K_SCALE, scales);
        return;
    case PLLM_Q3_K: sixteen_apart(sixteen_of_q3_k(b + Q3_K_SCALES), b + Q3_K_SCALE, scales); return;
    case PLLM_IQ2_XS: scales_of_nibbles(b + IQ2_XS_SCALES, b, scales, dtype); return;
    case PLLM_IQ2_S: scales_of_nibbles(b + IQ2_S_SCALES, b, scales, dtype); return;
    case PLLM_IQ1_M: scales_of_iq1_m(b, scales); return;
    case PLLM_NVFP4: scales_of_nvfp4(b, scales); return;
    default: scales[0] = eight_scales(b, dtype);
    }
}

/* The same of what the file itself says is to be taken away; only of formats with has_minimums. */
ALWAYS_INLINE void minimums_of(const uint8_t *b, __m256 minimums[2], const int dtype) {
    if (dtype == PLLM_Q2_K) {
        const __m128i own = _mm_and_si128(_mm_srli_epi16(sixteen_bytes(b), 4), _mm_set1_epi8(15));
        sixteen_apart(own, b + Q2_K_MINIMUM, minimums);
    } else {
        minimums[0] = eight_minimums(b, dtype);
    }
}
