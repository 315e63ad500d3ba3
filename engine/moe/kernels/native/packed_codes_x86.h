/* Codes of packed weights as AVX2 and AVX-512 read them, 32 at a time: those of formats of two and three bits, which both
   open alike. Codes have no sign: what was added to them for that is above_of. Include inside pragmas for avx2. */

ALWAYS_INLINE __m256i thirty_two(const uint8_t *from) { return _mm256_loadu_si256((const __m256i *)(const void *)from); }

ALWAYS_INLINE __m256i low_bits(__m256i v, const int shift, const int bits) {
    return _mm256_and_si256(_mm256_srli_epi16(v, shift), _mm256_set1_epi8((char)bits));
}

/* All bits of a byte for each of the 32 bits of a word that is set. */
ALWAYS_INLINE __m256i bytes_of_bits(uint32_t word) {
    const __m256i bytes = _mm256_shuffle_epi8(
        _mm256_set1_epi32((int)word),
        _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3));
    const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201ULL);
    return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit);
}

/* Sizes with the signs of a word's bits, and `above` added. */
ALWAYS_INLINE __m256i with_signs(__m256i sizes, uint32_t signs, const int above) {
    const __m256i negative = bytes_of_bits(signs), more = _mm256_set1_epi8((char)above);
    return _mm256_add_epi8(_mm256_xor_si256(sizes, negative), _mm256_sub_epi8(more, negative));
}

/* Two pairs of points, and two more. */
ALWAYS_INLINE __m256 four_pairs(const uint32_t (*grid)[2], const int a, const int b, const int c, const int d) {
    const __m128 low = _mm_castsi128_ps(_mm_loadl_epi64((const __m128i *)(const void *)grid[a]));
    const __m128 high = _mm_castsi128_ps(_mm_loadl_epi64((const __m128i *)(const void *)grid[c]));
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadh_pi(low, (const __m64 *)(const void *)grid[b])),
                                _mm_loadh_pi(high, (const __m64 *)(const void *)grid[d]), 1);
}

/* Eight points of four values, whose indices are eight bits each, and the eight of `high` above them. Both points that the
   eight bits may mean lie side by side: choosing one of them costs less than the indices of nine bits. */
ALWAYS_INLINE __m256i eight_points(const uint32_t (*grid)[2], const uint8_t *low, const int high) {
    uint64_t at;
    memcpy(&at, low, 8);
#define AT(i) (int)(at >> (8 * (i)) & 255)
    const __m256 a = four_pairs(grid, AT(0), AT(1), AT(4), AT(5)), b = four_pairs(grid, AT(2), AT(3), AT(6), AT(7));
#undef AT
    const __m256i second = _mm256_sllv_epi32(_mm256_set1_epi32(high), _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24));
    return _mm256_castps_si256(_mm256_blendv_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd),
                                                _mm256_castsi256_ps(second)));
}

ALWAYS_INLINE uint32_t word_at(const uint8_t *from) {
    uint32_t word;
    memcpy(&word, from, 4);
    return word;
}

/* Whether codes of a format are opened here. */
ALWAYS_INLINE int has_few_bits(const int dtype) {
    return dtype == PLLM_Q2_K || dtype == PLLM_Q3_K || table_of(dtype) == GRID;
}

/* Codes 32 g .. 32 g + 31 of the unit at b. */
ALWAYS_INLINE __m256i few_bits(const uint8_t *b, const int g, const int dtype) {
    switch (dtype) {
    case PLLM_Q2_K: return low_bits(thirty_two(b + codes_at(dtype) + g / 4 * 32), g % 4 * 2, 3);
    case PLLM_Q3_K: {
        const __m256i low = low_bits(thirty_two(b + codes_at(dtype) + g / 4 * 32), g % 4 * 2, 3);
        return _mm256_or_si256(low, _mm256_slli_epi16(low_bits(thirty_two(b), g, 1), 2));
    }
    default: /* IQ3_S */
        return with_signs(eight_points(pllm_iq3_s_grid, b + codes_at(dtype) + 8 * g, b[IQ3_S_HIGH + g]),
                          word_at(b + IQ3_S_SIGNS + 4 * g), above_of(dtype));
    }
}
