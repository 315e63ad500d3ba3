/* Codes of packed weights as AVX2 and AVX-512 read them, 32 at a time: those of formats of one to three bits, and of
   others, that both open alike. Codes have no sign: what was added to them for that is above_of. Include inside pragmas for
   avx2. */

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

/* For each of the 32 bits of a word a byte: negative where it is set, else positive. */
ALWAYS_INLINE __m256i signs_of_bits(uint32_t word) {
    const __m256i bytes = _mm256_shuffle_epi8(
        _mm256_set1_epi32((int)word),
        _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3));
    const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201ULL);
    return _mm256_add_epi8(_mm256_and_si256(bytes, bit), _mm256_set1_epi8(127));
}

/* ---- Formats with a grid ---------------------------------------------------------------------------------------- */

/* Bytes of seven signs, each with an eighth that makes the number of set ones even. */
ALWAYS_INLINE __m256i even_signs(__m256i sevens) {
    const __m128i odd = _mm_setr_epi8(0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0);
    const __m256i folded = low_bits(_mm256_xor_si256(sevens, _mm256_srli_epi16(sevens, 4)), 0, 15);
    return _mm256_or_si256(sevens, _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(odd), folded));
}

/* The four groups of seven bits of each word, a byte each. */
ALWAYS_INLINE __m256i sevens_of_words(__m256i words) {
    const __m256i first = _mm256_and_si256(words, _mm256_set1_epi32(0x7f));
    const __m256i second = _mm256_and_si256(_mm256_slli_epi32(words, 1), _mm256_set1_epi32(0x7f00));
    const __m256i third = _mm256_and_si256(_mm256_slli_epi32(words, 2), _mm256_set1_epi32(0x7f0000));
    const __m256i fourth = _mm256_and_si256(_mm256_slli_epi32(words, 3), _mm256_set1_epi32(0x7f000000));
    return _mm256_or_si256(_mm256_or_si256(first, second), _mm256_or_si256(third, fourth));
}

/* The upper words of eight pairs of words. */
ALWAYS_INLINE __m256i upper_words(const uint8_t *from) {
    const __m256 a = _mm256_castsi256_ps(thirty_two(from)), b = _mm256_castsi256_ps(thirty_two(from + 32));
    return _mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd)), 0xd8);
}

/* What of a unit is put together for all its groups at once. */
typedef struct grid_unit {
    uint16_t at[UNIT / 4]; /* where the points lie in their table, where that is not a byte in the file */
    union {
        uint8_t signs[UNIT / 8];
        uint16_t below[UNIT / 8]; /* of IQ1_M how far the values of a point are below it */
    };
} grid_unit;

ALWAYS_INLINE void store_at(grid_unit *to, const int i, __m256i low, __m256i high) {
    _mm256_storeu_si256((__m256i *)(void *)(to->at + 16 * i), _mm256_or_si256(low, high));
}

/* Sixteen bytes, widened. */
ALWAYS_INLINE __m256i words_of_bytes(const uint8_t *from) {
    return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(const void *)from));
}

/* For a format with a grid the unit at b, so that of_grid can read it. */
ALWAYS_INLINE void open_grid_unit(const uint8_t *b, grid_unit *to, const int dtype) {
    const uint8_t *from = b + codes_at(dtype);
    switch (dtype) {
    case PLLM_IQ3_S:
        UNROLL for (int i = 0; i < 4; i++) {
            const __m256i places = _mm256_set_m128i(_mm_set1_epi16((int16_t)0xff01), _mm_set1_epi16((int16_t)0xff00));
            const __m256i both = _mm256_set1_epi16((int16_t)two_bytes(b + IQ3_S_HIGH + 2 * i));
            const __m256i bits = _mm256_shuffle_epi8(both, places);
            const __m128i by = _mm_setr_epi16(256, 128, 64, 32, 16, 8, 4, 2);
            const __m256i moved = _mm256_mullo_epi16(bits, _mm256_broadcastsi128_si256(by));
            store_at(to, i, words_of_bytes(from + 16 * i), _mm256_and_si256(moved, _mm256_set1_epi16(256)));
        }
        break;
    case PLLM_IQ3_XXS:
        _mm256_storeu_si256((__m256i *)(void *)to->signs, even_signs(sevens_of_words(thirty_two(b + IQ3_XXS_SIGNS))));
        break;
    case PLLM_IQ2_XXS:
        _mm256_storeu_si256((__m256i *)(void *)to->signs, even_signs(sevens_of_words(upper_words(from))));
        break;
    case PLLM_IQ2_XS: {
        const __m256i a = thirty_two(from), c = thirty_two(from + 32);
        store_at(to, 0, _mm256_setzero_si256(), _mm256_and_si256(a, _mm256_set1_epi16(511)));
        store_at(to, 1, _mm256_setzero_si256(), _mm256_and_si256(c, _mm256_set1_epi16(511)));
        const __m256i sevens = _mm256_packus_epi16(_mm256_srli_epi16(a, 9), _mm256_srli_epi16(c, 9));
        _mm256_storeu_si256((__m256i *)(void *)to->signs, even_signs(_mm256_permute4x64_epi64(sevens, 0xd8)));
        break;
    }
    case PLLM_IQ2_S:
        UNROLL for (int i = 0; i < 2; i++) {
            const __m256i places = _mm256_add_epi16(
                _mm256_set1_epi16((int16_t)0xff00), _mm256_setr_epi16(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3));
            const __m256i bits = _mm256_shuffle_epi8(_mm256_set1_epi32((int32_t)four_bytes(b + IQ2_S_HIGH + 4 * i)), places);
            const __m256i moved = _mm256_mullo_epi16(bits, _mm256_set1_epi64x(256 | 64LL << 16 | 16LL << 32 | 4LL << 48));
            store_at(to, i, words_of_bytes(from + 16 * i), _mm256_and_si256(moved, _mm256_set1_epi16(768)));
        }
        break;
    case PLLM_IQ1_S: /* twice the places, as there is no shift of words that goes to both sides */
        UNROLL for (int i = 0; i < 2; i++) {
            const __m256i places = _mm256_setr_epi16(0x100, 0x100, 0x100, 0x100, 0x302, 0x302, 0x302, 0x302, 0x504, 0x504,
                                                     0x504, 0x504, 0x706, 0x706, 0x706, 0x706);
            int64_t four;
            memcpy(&four, b + IQ1_S_HIGH + 8 * i, 8);
            const __m256i bits = _mm256_shuffle_epi8(_mm256_set1_epi64x(four), places);
            const __m256i moved = _mm256_mullo_epi16(bits, _mm256_set1_epi64x(512 | 64LL << 16 | 8LL << 32 | 1LL << 48));
            const __m256i low = words_of_bytes(from + 16 * i);
            store_at(to, i, _mm256_add_epi16(low, low), _mm256_and_si256(moved, _mm256_set1_epi16(7 << 9)));
        }
        break;
    case PLLM_IQ1_M:
        UNROLL for (int i = 0; i < 2; i++) {
            const __m256i places = _mm256_add_epi16(
                _mm256_set1_epi16((int16_t)0xff00), _mm256_setr_epi16(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7));
            int64_t eight;
            memcpy(&eight, b + IQ1_M_HIGH + 8 * i, 8);
            const __m256i bits = _mm256_shuffle_epi8(_mm256_set1_epi64x(eight), places);
            const __m256i moved = _mm256_mullo_epi16(bits, _mm256_set1_epi32(256 | 16 << 16));
            store_at(to, i, words_of_bytes(from + 16 * i), _mm256_and_si256(moved, _mm256_set1_epi16(7 << 8)));
            const __m256i below = _mm256_srli_epi16(_mm256_and_si256(moved, _mm256_set1_epi16(1 << 11)), 10);
            _mm256_storeu_si256((__m256i *)(void *)(to->below + 16 * i), below);
        }
        break;
    default: break;
    }
    /* Read from there: a compiler would take indices from vectors, at twice the cost. */
    __asm__("" : "+m"(*to));
}

/* Indices that are together in a register: one load for each of them, beside that of its point, would cost more. */
#define IN_REGISTER(word) __asm__("" : "+r"(word))

ALWAYS_INLINE uint32_t word_at(const uint8_t *from) { return four_bytes(from); }

/* Four points of four values. */
ALWAYS_INLINE __m128i four_fours(const uint32_t *grid, const uint32_t a, const uint32_t b, const uint32_t c,
                                 const uint32_t d) {
    __m128i points = _mm_cvtsi32_si128((int)grid[a]);
    points = _mm_insert_epi32(points, (int)grid[b], 1);
    points = _mm_insert_epi32(points, (int)grid[c], 2);
    return _mm_insert_epi32(points, (int)grid[d], 3);
}

/* Eight, whose indices are bytes, or words of 16 bits. */
ALWAYS_INLINE __m256i fours_of_bytes(const uint32_t *grid, const uint8_t *at) {
    uint32_t a = word_at(at), b = word_at(at + 4);
    IN_REGISTER(a);
    IN_REGISTER(b);
    return _mm256_set_m128i(four_fours(grid, b & 255, b >> 8 & 255, b >> 16 & 255, b >> 24),
                            four_fours(grid, a & 255, a >> 8 & 255, a >> 16 & 255, a >> 24));
}

ALWAYS_INLINE __m256i fours_of_words(const uint32_t *grid, const uint16_t *at) {
    uint32_t pairs[4];
    memcpy(pairs, at, 16);
    UNROLL for (int i = 0; i < 4; i++) IN_REGISTER(pairs[i]);
    return _mm256_set_m128i(four_fours(grid, pairs[2] & 65535, pairs[2] >> 16, pairs[3] & 65535, pairs[3] >> 16),
                            four_fours(grid, pairs[0] & 65535, pairs[0] >> 16, pairs[1] & 65535, pairs[1] >> 16));
}

/* Two points of eight values. */
ALWAYS_INLINE __m128i two_points(const uint64_t *a, const uint64_t *b) {
    const __m128i first = _mm_loadl_epi64((const __m128i *)(const void *)a);
    return _mm_castps_si128(_mm_loadh_pi(_mm_castsi128_ps(first), (const __m64 *)(const void *)b));
}

ALWAYS_INLINE __m128i two_eights(const uint64_t *grid, const uint32_t a, const uint32_t b) {
    return two_points(grid + a, grid + b);
}

/* Four, whose indices are bytes, or words of 16 bits. */
ALWAYS_INLINE __m256i eights_of_bytes(const uint64_t *grid, const uint8_t *at) {
    uint32_t a = word_at(at);
    IN_REGISTER(a);
    return _mm256_set_m128i(two_eights(grid, a >> 16 & 255, a >> 24), two_eights(grid, a & 255, a >> 8 & 255));
}

ALWAYS_INLINE __m256i eights_of_words(const uint64_t *grid, const uint16_t *at) {
    uint32_t pairs[2];
    memcpy(pairs, at, 8);
    UNROLL for (int i = 0; i < 2; i++) IN_REGISTER(pairs[i]);
    return _mm256_set_m128i(two_eights(grid, pairs[1] & 65535, pairs[1] >> 16),
                            two_eights(grid, pairs[0] & 65535, pairs[0] >> 16));
}

/* Whether codes of a format are opened here. */
ALWAYS_INLINE int has_few_bits(const int dtype) {
    return code_bits(dtype) < 4 || table_of(dtype) == GRID || dtype == PLLM_NVFP4;
}

/* The same of indices that are twice as large. */
ALWAYS_INLINE __m256i eights_of_twice(const uint64_t *grid, const uint16_t *at) {
    const uint32_t *half = (const uint32_t *)(const void *)grid;
    uint32_t pairs[2];
    memcpy(pairs, at, 8);
    UNROLL for (int i = 0; i < 2; i++) IN_REGISTER(pairs[i]);
#define POINT(i) (const uint64_t *)(const void *)(half + (i))
    const __m128i low = two_points(POINT(pairs[0] & 65535), POINT(pairs[0] >> 16));
    return _mm256_set_m128i(two_points(POINT(pairs[1] & 65535), POINT(pairs[1] >> 16)), low);
#undef POINT
}

/* Codes 32 g .. 32 g + 31 of a unit of a format with a grid, without their signs if the format has these apart, and those
   of IQ1_S without what whole groups of them are below their points. */
ALWAYS_INLINE __m256i points_of(const uint8_t *b, const grid_unit *unit, const int g, const int dtype) {
    const uint8_t *from = b + codes_at(dtype);
    switch (dtype) {
    case PLLM_IQ3_S: return fours_of_words(pllm_iq3_s_grid, unit->at + 8 * g);
    case PLLM_IQ3_XXS: return fours_of_bytes(pllm_iq3_xxs_grid, from + 8 * g);
    case PLLM_IQ2_XXS: return eights_of_bytes(pllm_iq2_xxs_grid, from + 8 * g);
    case PLLM_IQ2_XS: return eights_of_words(pllm_iq2_xs_grid, unit->at + 4 * g);
    case PLLM_IQ2_S: return eights_of_words(pllm_iq2_s_grid, unit->at + 4 * g);
    case PLLM_IQ1_S: return eights_of_twice(pllm_iq1_grid, unit->at + 4 * g);
    default: { /* IQ1_M */
        const __m256i places = _mm256_setr_epi64x(0, 0x0202020202020202, 0x0404040404040404, 0x0606060606060606);
        int64_t four;
        memcpy(&four, unit->below + 4 * g, 8);
        const __m256i below = _mm256_shuffle_epi8(_mm256_set1_epi64x(four), places);
        return _mm256_sub_epi8(eights_of_words(pllm_iq1_grid, unit->at + 4 * g), below);
    }
    }
}

/* The signs of such codes, as signs_of_bits. */
ALWAYS_INLINE __m256i signs_of(const uint8_t *b, const grid_unit *unit, const int g, const int dtype) {
    const uint8_t *from = dtype == PLLM_IQ3_S ? b + IQ3_S_SIGNS : dtype == PLLM_IQ2_S ? b + IQ2_S_SIGNS : unit->signs;
    return signs_of_bits(word_at(from + 4 * g));
}

/* Codes 32 g .. 32 g + 31 of a unit of a format with a grid. */
ALWAYS_INLINE __m256i of_grid(const uint8_t *b, const grid_unit *unit, const int g, const int dtype) {
    const __m256i points = points_of(b, unit, g, dtype);
    if (dtype == PLLM_IQ1_M) return points;
    if (dtype == PLLM_IQ1_S) {
        const uint32_t below = two_bytes(b + IQ1_S_HIGH + 2 * g) >> 14 & 2;
        return _mm256_sub_epi8(points, _mm256_set1_epi8((char)below));
    }
    const __m256i own = _mm256_sign_epi8(points, signs_of(b, unit, g, dtype));
    return _mm256_add_epi8(own, _mm256_set1_epi8((char)above_of(dtype)));
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
ALWAYS_INLINE __m256i few_bits(const uint8_t *b, const grid_unit *unit, const int g, const int dtype) {
    const int groups = (int)block_values(dtype) / 32;
    const uint8_t *codes = b + g / groups * block_bytes(dtype) + codes_at(dtype);
    switch (dtype) {
    case PLLM_Q2_K:
    case PLLM_TQ2_0: return low_bits(thirty_two(codes + g / 4 * 32), g % 4 * 2, 3);
    case PLLM_Q3_K: {
        const __m256i low = low_bits(thirty_two(codes + g / 4 * 32), g % 4 * 2, 3);
        const __m256i high = _mm256_and_si256(thirty_two(b), _mm256_set1_epi8((char)(1 << g)));
        return _mm256_or_si256(low, g < 2 ? _mm256_slli_epi16(high, 2 - g) : _mm256_srli_epi16(high, g - 2));
    }
    case PLLM_TQ1_0: return of_tq1_0(b, g);
    case PLLM_NVFP4: return of_nvfp4(codes + g % 2 * 16);
    case PLLM_Q1_0: return _mm256_and_si256(bytes_of_bits(word_at(codes + g % 4 * 4)), _mm256_set1_epi8(2));
    case PLLM_Q2_0: return of_q2_0(codes + g % 2 * 8);
    default: return of_grid(b, unit, g, dtype);
    }
}
