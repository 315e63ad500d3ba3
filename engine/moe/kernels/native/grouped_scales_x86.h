/* The scales of a unit of grouped weights as AVX2 and AVX-512 read them: one for each 32 values. Include inside pragmas
   for avx2 and f16c. */

/* Two, four or eight words of 16 bits at `from`, and zeros after them; nothing else is read. */
ALWAYS_INLINE __m128i two_words(const uint8_t *from) {
    int32_t word;
    memcpy(&word, from, 4);
    return _mm_cvtsi32_si128(word);
}

ALWAYS_INLINE __m128i four_words(const uint8_t *from) { return _mm_loadl_epi64((const __m128i *)(const void *)from); }

ALWAYS_INLINE __m128i eight_words(const uint8_t *from) { return _mm_loadu_si128((const __m128i *)(const void *)from); }

/* Each of `groups` numbers for as many of the eight blocks as it belongs to. */
ALWAYS_INLINE __m256 spread_out(__m256 v, const int32_t groups) {
    if (groups == 8) return v;
    return _mm256_permutevar8x32_ps(v, groups == 4 ? _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)
                                                   : _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
}

ALWAYS_INLINE __m256 eight_numbers(const uint8_t *from, const group_reader *reader) {
    const int32_t groups = reader->groups;
    if (reader->kind == PLLM_F32) {
        float all[UNIT_GROUPS] = {0};
        memcpy(all, from, (size_t)groups * 4);
        return spread_out(_mm256_loadu_ps(all), groups);
    }
    const __m128i words = groups == 8 ? eight_words(from) : groups == 4 ? four_words(from) : two_words(from);
    const __m256 numbers = reader->kind == PLLM_F16
                               ? _mm256_cvtph_ps(words)
                               : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
    return spread_out(numbers, groups);
}

/* As e8m0_half, of eight groups. */
ALWAYS_INLINE __m256 eight_powers(const uint8_t *from) {
    const __m256i exponents = _mm256_cvtepu8_epi32(four_words(from));
    const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(exponents, _mm256_set1_epi32(1)), 23);
    const __m256i small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), exponents);
    const __m256i tiny = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), exponents);
    return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, small, tiny));
}

/* The scales of a unit, and what is added to its values; `raised` is what the codes are above what they stand for. */
ALWAYS_INLINE __m256 scales_of(const uint8_t *scales, const uint8_t *biases, const group_reader *reader,
                               const int dtype, const float raised, __m256 *offsets) {
    const __m256 own = dtype == PLLM_OCP_MXFP4 ? eight_powers(scales) : eight_numbers(scales, reader);
    *offsets = dtype == PLLM_OCP_MXFP4 ? _mm256_setzero_ps() : eight_numbers(biases, reader);
    if (raised != 0) *offsets = _mm256_fnmadd_ps(own, _mm256_set1_ps(raised), *offsets);
    return own;
}

ALWAYS_INLINE float eight_added_up(__m256 v) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
