/* Codes of packed weights as AVX2 and AVX-512 read them, 32 at a time: those of formats of one to three bits, and of
   others, that both open alike. Codes have no sign: what was added to them for that is above_of. Include inside pragmas for avx2. */

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

/* Sizes of which some are negative, and `above` added. */
ALWAYS_INLINE __m256i with_signs(__m256i sizes, __m256i negative, const int above) {
    const __m256i more = _mm256_set1_epi8((char)above);
    return _mm256_add_epi8(_mm256_xor_si256(sizes, negative), _mm256_sub_epi8(more, negative));
}

/* Four words of seven signs, each with an eighth that makes the number of set ones even. */
ALWAYS_INLINE __m256i even_signs(__m128i sevens) {
    const __m128i odd = _mm_setr_epi8(0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0);
    const __m128i folded = _mm_xor_si128(sevens, _mm_srli_epi32(sevens, 4));
    const __m256i eights = _mm256_broadcastsi128_si256(_mm_or_si128(sevens, _mm_shuffle_epi8(odd, folded)));
    const __m256i bytes = _mm256_shuffle_epi8(
        eights,
        _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4, 8, 8, 8, 8, 8, 8, 8, 8, 12, 12, 12, 12, 12, 12, 12, 12));
    const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201ULL);
    return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit);
}

/* A word's four groups of seven bits. */
ALWAYS_INLINE __m128i four_sevens(uint32_t word) {
    const __m128i apart = _mm_srlv_epi32(_mm_set1_epi32((int)word), _mm_setr_epi32(0, 7, 14, 21));
    return _mm_and_si128(apart, _mm_set1_epi32(127));
}

/* Four times eight bytes. */
ALWAYS_INLINE __m256i four_eights(const void *a, const void *b, const void *c, const void *d) {
    const __m128 low = _mm_castsi128_ps(_mm_loadl_epi64((const __m128i *)a));
    const __m128 high = _mm_castsi128_ps(_mm_loadl_epi64((const __m128i *)c));
    return _mm256_castps_si256(_mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadh_pi(low, (const __m64 *)b)),
                                                    _mm_loadh_pi(high, (const __m64 *)d), 1));
}

/* Number i of eight bytes. */
#define AT(i) (at >> (8 * (i)) & 255)

/* Eight points of four values, whose indices are eight bits each, and the eight of `high` above them. Both points that the
   eight bits may mean lie side by side: choosing one of them costs less than the indices of nine bits. */
ALWAYS_INLINE __m256i points_of_iq3_s(const uint8_t *low, const int high) {
    const uint32_t (*grid)[2] = pllm_iq3_s_grid;
    uint64_t at;
    memcpy(&at, low, 8);
    const __m256 a = _mm256_castsi256_ps(four_eights(grid[AT(0)], grid[AT(1)], grid[AT(4)], grid[AT(5)]));
    const __m256 b = _mm256_castsi256_ps(four_eights(grid[AT(2)], grid[AT(3)], grid[AT(6)], grid[AT(7)]));
    const __m256i second = _mm256_sllv_epi32(_mm256_set1_epi32(high), _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24));
    return _mm256_castps_si256(_mm256_blendv_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd),
                                                _mm256_castsi256_ps(second)));
}

ALWAYS_INLINE __m256i points_of_iq3_xxs(const uint8_t *low) {
    const uint32_t *grid = pllm_iq3_xxs_grid;
    uint64_t at;
    memcpy(&at, low, 8);
    return _mm256_setr_epi32((int)grid[AT(0)], (int)grid[AT(1)], (int)grid[AT(2)], (int)grid[AT(3)], (int)grid[AT(4)],
                             (int)grid[AT(5)], (int)grid[AT(6)], (int)grid[AT(7)]);
}

#undef AT

ALWAYS_INLINE uint32_t word_at(const uint8_t *from) { return four_bytes(from); }

/* Whether codes of a format are opened here. */
ALWAYS_INLINE int has_few_bits(const int dtype) {
    return code_bits(dtype) < 4 || table_of(dtype) == GRID || dtype == PLLM_NVFP4;
}

/* Codes 32 g .. 32 g + 31 of a unit of a format with a grid. */
ALWAYS_INLINE __m256i of_grid(const uint8_t *b, const int g, const int dtype) {
    const uint8_t *from = b + codes_at(dtype);
    __m256i sizes, negative;
    switch (dtype) {
    case PLLM_IQ3_S:
        sizes = points_of_iq3_s(from + 8 * g, b[IQ3_S_HIGH + g]);
        negative = bytes_of_bits(word_at(b + IQ3_S_SIGNS + 4 * g));
        break;
    case PLLM_IQ3_XXS:
        sizes = points_of_iq3_xxs(from + 8 * g);
        negative = even_signs(four_sevens(word_at(b + IQ3_XXS_SIGNS + 4 * g)));
        break;
    case PLLM_IQ2_XXS: {
        const uint64_t *grid = pllm_iq2_xxs_grid;
        const uint32_t at = word_at(from + 8 * g);
        sizes = four_eights(grid + (at & 255), grid + (at >> 8 & 255), grid + (at >> 16 & 255), grid + (at >> 24));
        negative = even_signs(four_sevens(word_at(b + IQ2_XXS_SIGNS + 8 * g)));
        break;
    }
    case PLLM_IQ2_XS: {
        const uint64_t *grid = pllm_iq2_xs_grid;
        uint64_t at;
        memcpy(&at, from + 8 * g, 8);
        sizes = four_eights(grid + (at & 511), grid + (at >> 16 & 511), grid + (at >> 32 & 511), grid + (at >> 48 & 511));
        negative = even_signs(_mm_srli_epi32(_mm_cvtepu16_epi32(_mm_cvtsi64_si128((long long)at)), 9));
        break;
    }
    case PLLM_IQ2_S: {
        const uint64_t *grid = pllm_iq2_s_grid;
        const uint32_t at = word_at(from + 4 * g), high = b[IQ2_S_HIGH + g];
        sizes = four_eights(grid + (at & 255) + (high << 8 & 768), grid + (at >> 8 & 255) + (high << 6 & 768),
                            grid + (at >> 16 & 255) + (high << 4 & 768), grid + (at >> 24) + (high << 2 & 768));
        negative = bytes_of_bits(word_at(b + IQ2_S_SIGNS + 4 * g));
        break;
    }
    case PLLM_IQ1_S: {
        const uint64_t *grid = pllm_iq1_grid;
        const uint32_t at = word_at(from + 4 * g), high = two_bytes(b + IQ1_S_HIGH + 2 * g);
        sizes = four_eights(grid + (at & 255) + (high << 8 & 1792), grid + (at >> 8 & 255) + (high << 5 & 1792),
                            grid + (at >> 16 & 255) + (high << 2 & 1792), grid + (at >> 24) + (high >> 1 & 1792));
        return _mm256_sub_epi8(sizes, _mm256_set1_epi8((char)(high >> 14 & 2)));
    }
    default: { /* IQ1_M */
        const uint64_t *grid = pllm_iq1_grid;
        const uint32_t at = word_at(from + 4 * g), high = two_bytes(b + IQ1_M_HIGH + 2 * g);
        sizes = four_eights(grid + (at & 255) + (high << 8 & 1792), grid + (at >> 8 & 255) + (high << 4 & 1792),
                            grid + (at >> 16 & 255) + (high & 1792), grid + (at >> 24) + (high >> 4 & 1792));
        const __m256i bits = _mm256_setr_epi64x(1 << 3, 1 << 7, 1 << 11, 1 << 15);
        const __m256i below = _mm256_cmpeq_epi64(_mm256_and_si256(_mm256_set1_epi64x(high), bits), bits);
        return _mm256_sub_epi8(sizes, _mm256_and_si256(below, _mm256_set1_epi8(2)));
    }
    }
    return with_signs(sizes, negative, above_of(dtype));
}

/* Three times each byte, modulo 256. */
ALWAYS_INLINE __m256i thrice(__m256i v) { return _mm256_add_epi8(_mm256_add_epi8(v, v), v); }

/* The thirds of a whole that bytes are 256ths of, rounded down: all before the first third are 0. */
ALWAYS_INLINE __m256i thirds(__m256i v) {
    const __m256i first = _mm256_cmpeq_epi8(_mm256_max_epu8(v, _mm256_set1_epi8(86)), v);
    const __m256i second = _mm256_cmpeq_epi8(_mm256_max_epu8(v, _mm256_set1_epi8((char)171)), v);
    return _mm256_sub_epi8(_mm256_setzero_si256(), _mm256_add_epi8(first, second));
}

ALWAYS_INLINE __m256i of_tq1_0(const uint8_t *b, const int g) {
    if (g < 5) {
        __m256i v = thirty_two(b);
        UNROLL for (int i = 0; i < g; i++) v = thrice(v);
        return thirds(v);
    }
    __m256i v = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)(b + TQ1_0_HALVES)));
    UNROLL for (int i = 0; i < 2 * (g - 5); i++) v = thrice(v);
    const __m256i more = thrice(v);
    if (g < 7) return thirds(_mm256_blend_epi32(v, more, 0xf0));
    /* Four bytes with each of four powers. */
    const __m256i last = _mm256_cvtepu8_epi16(_mm_set1_epi32((int)word_at(b + TQ1_0_LAST)));
    const __m256i powers = _mm256_setr_epi16(1, 1, 1, 1, 3, 3, 3, 3, 9, 9, 9, 9, 27, 27, 27, 27);
    const __m256i whole = _mm256_and_si256(_mm256_mullo_epi16(last, powers), _mm256_set1_epi16(255));
    const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    return thirds(_mm256_inserti128_si256(v, bytes, 1));
}

/* Eight bytes of four codes each, the first in the lowest bits. */
ALWAYS_INLINE __m256i of_q2_0(const uint8_t *from) {
    const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)from));
    const __m256i twice = _mm256_or_si256(bytes, _mm256_slli_epi32(bytes, 12));
    return _mm256_and_si256(_mm256_or_si256(twice, _mm256_slli_epi32(twice, 6)), _mm256_set1_epi8(3));
}

/* Two groups of 16, eight bytes each whose low nibbles are the first half. */
ALWAYS_INLINE __m256i of_nvfp4(const uint8_t *from) {
    static const int8_t fp4[16] = {FP4_VALUES};
    const __m128i bytes = _mm_loadu_si128((const __m128i *)(const void *)from), nibble = _mm_set1_epi8(15);
    const __m128i low = _mm_and_si128(bytes, nibble), high = _mm_and_si128(_mm_srli_epi16(bytes, 4), nibble);
    const __m128i table = _mm_add_epi8(_mm_loadu_si128((const __m128i *)(const void *)fp4), _mm_set1_epi8(16));
    return _mm256_set_m128i(_mm_shuffle_epi8(table, _mm_unpackhi_epi64(low, high)),
                            _mm_shuffle_epi8(table, _mm_unpacklo_epi64(low, high)));
}

/* Codes 32 g .. 32 g + 31 of the unit at b. */
ALWAYS_INLINE __m256i few_bits(const uint8_t *b, const int g, const int dtype) {
    const int groups = (int)block_values(dtype) / 32;
    const uint8_t *codes = b + g / groups * block_bytes(dtype) + codes_at(dtype);
    switch (dtype) {
    case PLLM_Q2_K:
    case PLLM_TQ2_0: return low_bits(thirty_two(codes + g / 4 * 32), g % 4 * 2, 3);
    case PLLM_Q3_K: {
        const __m256i low = low_bits(thirty_two(codes + g / 4 * 32), g % 4 * 2, 3);
        return _mm256_or_si256(low, _mm256_slli_epi16(low_bits(thirty_two(b), g, 1), 2));
    }
    case PLLM_TQ1_0: return of_tq1_0(b, g);
    case PLLM_NVFP4: return of_nvfp4(codes + g % 2 * 16);
    case PLLM_Q1_0: return _mm256_and_si256(bytes_of_bits(word_at(codes + g % 4 * 4)), _mm256_set1_epi8(2));
    case PLLM_Q2_0: return of_q2_0(codes + g % 2 * 8);
    default: return of_grid(b, g, dtype);
    }
}
