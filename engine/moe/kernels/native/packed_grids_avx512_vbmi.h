/* Codes of formats with a grid for AVX-512 with VBMI: points are looked up in registers, 64 at a time, as numbers of two or
   four bits for each value; those of IQ1_S and IQ1_M, which are too many for that, in memory. These, and the bits of the signs, are brought to the bytes of their values, and both together
   are looked up in a table of raised codes. They lie as packed_avx512_few_template.h says. Include after packed_avx512_template.h. */
#include "packed_grids.h"

/* The low bytes of all points, and then the high ones. */
#define LOW_BYTE(point) (uint8_t)(point),
#define HIGH_BYTE(point) (uint8_t)((point) >> 8),
#define FIRST_LOW(first, second) (uint8_t)(first),
#define FIRST_HIGH(first, second) (uint8_t)((first) >> 8),
#define SECOND_LOW(first, second) (uint8_t)(second),
#define SECOND_HIGH(first, second) (uint8_t)((second) >> 8),
#define IN_LINES __attribute__((aligned(64)))

static const uint8_t iq3_s_points[2][512] IN_LINES = {{IQ3_S_GRID(FIRST_LOW) IQ3_S_GRID(SECOND_LOW)},
                                                      {IQ3_S_GRID(FIRST_HIGH) IQ3_S_GRID(SECOND_HIGH)}};
static const uint8_t iq3_xxs_points[2][256] IN_LINES = {{IQ3_XXS_GRID(LOW_BYTE)}, {IQ3_XXS_GRID(HIGH_BYTE)}};
static const uint8_t iq2_xxs_points[2][256] IN_LINES = {{IQ2_XXS_GRID(LOW_BYTE)}, {IQ2_XXS_GRID(HIGH_BYTE)}};
static const uint8_t iq2_xs_points[2][512] IN_LINES = {{IQ2_XS_GRID(LOW_BYTE)}, {IQ2_XS_GRID(HIGH_BYTE)}};
static const uint8_t iq2_s_points[2][1024] IN_LINES = {{IQ2_S_GRID(LOW_BYTE)}, {IQ2_S_GRID(HIGH_BYTE)}};

#define POINT(point) (uint16_t)(point),
static const uint16_t iq1_points[2048] IN_LINES = {IQ1_S_GRID(POINT)};
#undef POINT

#define FOUR_TIMES(M, n) M(n) M((n) + 1) M((n) + 2) M((n) + 3)
#define SIXTEEN_TIMES(M, n) FOUR_TIMES(M, n) FOUR_TIMES(M, (n) + 4) FOUR_TIMES(M, (n) + 8) FOUR_TIMES(M, (n) + 12)
#define THIRTY_TWO_TIMES(M) SIXTEEN_TIMES(M, 0) SIXTEEN_TIMES(M, 16)

/* Which of a unit's 32 points of eight values word n has, or byte n of its signs: first and second of the half of a block
   that lane n / 2 of wide_input has. */
#define EIGHT_AT(n) (16 * ((n) / 2 % 2) + 8 * ((n) / 16) + 4 * ((n) / 4 % 2) + 2 * ((n) / 8 % 2) + (n) % 2)
/* Which of its 64 points of four values: first and second of the half, or third and fourth; exchanged in blocks of odd
   number. */
#define FOUR_AT(n) (2 * EIGHT_AT((n) & ~1) + ((n) % 2 ^ (n) / 4 % 2))

/* Both bytes of such words, of which the second is in a second vector. */
#define WORD_OF_EIGHT(n) EIGHT_AT(n), 64 + EIGHT_AT(n),
#define WORD_OF_SECOND_EIGHT(n) 32 + EIGHT_AT(n), 96 + EIGHT_AT(n),
#define WORD_OF_FOUR(n) FOUR_AT(n), 64 + FOUR_AT(n),
#define WORD_OF_NEXT_FOUR(n) 2 + FOUR_AT(n), 66 + FOUR_AT(n),
static const uint8_t words_of_eights[2][64] IN_LINES = {{THIRTY_TWO_TIMES(WORD_OF_EIGHT)},
                                                        {THIRTY_TWO_TIMES(WORD_OF_SECOND_EIGHT)}};
static const uint8_t words_of_fours[2][64] IN_LINES = {{THIRTY_TWO_TIMES(WORD_OF_FOUR)},
                                                       {THIRTY_TWO_TIMES(WORD_OF_NEXT_FOUR)}};

#define PLACE_OF_EIGHT(n) EIGHT_AT(n),
static const uint16_t places_of_eights[32] IN_LINES = {THIRTY_TWO_TIMES(PLACE_OF_EIGHT)};

/* The signs of a unit's lanes 4 i to 4 i + 3, and those of the same lanes of the next unit. */
#define SIGNS_OF_FOUR(n) EIGHT_AT(n), EIGHT_AT((n) + 1), EIGHT_AT((n) + 2), EIGHT_AT((n) + 3),                     \
        32 + EIGHT_AT(n), 32 + EIGHT_AT((n) + 1), 32 + EIGHT_AT((n) + 2), 32 + EIGHT_AT((n) + 3),
static const uint8_t signs_of_lanes[64] IN_LINES = {
    SIGNS_OF_FOUR(0) SIGNS_OF_FOUR(4) SIGNS_OF_FOUR(8) SIGNS_OF_FOUR(12)
    SIGNS_OF_FOUR(16) SIGNS_OF_FOUR(20) SIGNS_OF_FOUR(24) SIGNS_OF_FOUR(28)
};

#define TWICE(n) 2 * (n),
static const uint8_t even_bytes[64] IN_LINES = {
    SIXTEEN_TIMES(TWICE, 0) SIXTEEN_TIMES(TWICE, 16) SIXTEEN_TIMES(TWICE, 32) SIXTEEN_TIMES(TWICE, 48)
};

/* Eight bytes for each pair of lanes, from the words that they have. */
#define FOUR_BITS(first, step) (first), (first) + (step), (first) + 2 * (step), (first) + 3 * (step)
#define PAIR_BITS(first, apart, step) FOUR_BITS(first, step), FOUR_BITS((first) + (apart), step)
#define LANES_BITS(even, odd, apart, step)                                                                         \
    _mm512_broadcast_i32x4(_mm_setr_epi8(PAIR_BITS(even, apart, step), PAIR_BITS(odd, apart, step)))

ALWAYS_INLINE __m512i bytes_at(__m512i bits, __m512i from) { return _mm512_multishift_epi64_epi8(from, bits); }

/* Of 64 indices the bytes of the points in a table of `count`. `high`: of the index the eighth bit and those above. */
ALWAYS_INLINE __m512i points_in(const uint8_t *table, __m512i at, const __mmask64 *high, const int count) {
    __m512i found[8];
    UNROLL for (int i = 0; i < 8; i++)
        if (i < count / 128)
            found[i] = _mm512_permutex2var_epi8(loaded(table + 128 * i), at, loaded(table + 128 * i + 64));
    UNROLL for (int i = 0; i < 4; i++)
        if (i < count / 256) found[i] = _mm512_mask_blend_epi8(high[0], found[2 * i], found[2 * i + 1]);
    UNROLL for (int i = 0; i < 2; i++)
        if (i < count / 512) found[i] = _mm512_mask_blend_epi8(high[1], found[2 * i], found[2 * i + 1]);
    return count < 1024 ? found[0] : _mm512_mask_blend_epi8(high[2], found[0], found[1]);
}

/* The codes of a vector: `points`, whose low `bits` are what they stand for, with `signs`, whose next bit is the sign. */
ALWAYS_INLINE __m512i signed_codes(__m512i points, __m512i signs, __m512i values, const int bits) {
    const __m512i both = joined(points, signs, (1 << bits) - 1);
    return _mm512_permutexvar_epi8(both, values);
}

/* Signs in the order of signs_of_lanes, moved so that those of vector i are above `bits` bits. */
#define SIGNS_AT(i, bits) LANES_BITS(((i) / 2 * 8 + (i) % 2 * 4 - (bits)) & 63, ((i) / 2 * 8 + ((i) % 2 ^ 1) * 4 - (bits)) & 63, 16, 1)

/* The four vectors of a unit whose points of eight values, of two bits each, are in the order of words_of_eights. `signs`: of
   each vector. */
ALWAYS_INLINE void codes_of_eights(__m512i points, const __m512i signs[4], __m512i values, __m512i to[4]) {
    to[0] = signed_codes(bytes_at(points, LANES_BITS(0, 8, 32, 2)), signs[0], values, 2);
    to[1] = signed_codes(bytes_at(points, LANES_BITS(8, 0, 32, 2)), signs[1], values, 2);
    to[2] = signed_codes(bytes_at(points, LANES_BITS(16, 24, 32, 2)), signs[2], values, 2);
    to[3] = signed_codes(bytes_at(points, LANES_BITS(24, 16, 32, 2)), signs[3], values, 2);
}

/* Three bytes with, and three without what follows the two bits of a point: a sign, or that they are below. */
ALWAYS_INLINE __m512i values_of_eights(const int dtype) {
    const int64_t plain = dtype == PLLM_IQ1_S || dtype == PLLM_IQ1_M ? 9 | 17 << 8 | 25 << 16
                                                                     : (64 + 8) | (64 + 25) << 8 | (64 + 43) << 16;
    const int64_t other = dtype == PLLM_IQ1_S || dtype == PLLM_IQ1_M ? 7 | 15 << 8 | 23 << 16
                                                                     : (64 - 8) | (64 - 25) << 8 | (64 - 43) << 16;
    return _mm512_set1_epi64(plain | other << 32);
}

/* The same of points of four values, of four bits each, in the orders of words_of_fours. */
ALWAYS_INLINE void codes_of_fours(__m512i first, __m512i second, __m512i signs, __m512i values, __m512i to[4]) {
    const __m512i even = LANES_BITS(0, 0, 32, 4), odd = LANES_BITS(16, 16, 32, 4);
    to[0] = signed_codes(bytes_at(first, even), bytes_at(signs, SIGNS_AT(0, 3)), values, 3);
    to[1] = signed_codes(bytes_at(first, odd), bytes_at(signs, SIGNS_AT(1, 3)), values, 3);
    to[2] = signed_codes(bytes_at(second, even), bytes_at(signs, SIGNS_AT(2, 3)), values, 3);
    to[3] = signed_codes(bytes_at(second, odd), bytes_at(signs, SIGNS_AT(3, 3)), values, 3);
}

/* Bytes of seven signs with the eighth that makes the number of negative ones even; their highest bit does not matter. */
ALWAYS_INLINE __m512i evened(__m512i sevens) {
    return _mm512_permutex2var_epi8(loaded(pllm_even_signs), sevens, loaded(pllm_even_signs + 64));
}

/* The four groups of seven bits of each of sixteen words, a byte each. */
ALWAYS_INLINE __m512i four_sevens(__m512i words) { return bytes_at(words, LANES_BITS(0, 0, 32, 7)); }

/* Of units at a and b the places of the points, the signs, and the high bits of the places. */
ALWAYS_INLINE __m512i places_of_two(const uint8_t *a, const uint8_t *b, __m512i *signs, __mmask64 high[3],
                                    const int dtype) {
    const int codes = (int)codes_at(dtype);
    __m512i at;
    if (dtype == PLLM_IQ2_S) {
        uint64_t first, second;
        memcpy(&first, a + IQ2_S_HIGH, 8);
        memcpy(&second, b + IQ2_S_HIGH, 8);
        const __m512i four = _mm512_inserti64x4(_mm512_set1_epi64((int64_t)first), _mm256_set1_epi64x((int64_t)second), 1);
        const __m256i turns = _mm256_setr_epi8(PAIR_BITS(0, 8, 2), PAIR_BITS(16, 8, 2), PAIR_BITS(32, 8, 2), PAIR_BITS(48, 8, 2));
        const __m512i twos = bytes_at(four, _mm512_broadcast_i64x4(turns));
        at = two_pairs(a + codes, b + codes);
        *signs = two_pairs(a + IQ2_S_SIGNS, b + IQ2_S_SIGNS);
        high[1] = _mm512_test_epi8_mask(twos, _mm512_set1_epi8(1));
        high[2] = _mm512_test_epi8_mask(twos, _mm512_set1_epi8(2));
    } else if (dtype == PLLM_IQ2_XS) {
        const __m512i even = loaded(even_bytes), first = loaded(a + codes), second = loaded(b + codes);
        const __m512i ends = _mm512_permutex2var_epi8(first, _mm512_add_epi8(even, _mm512_set1_epi8(1)), second);
        at = _mm512_permutex2var_epi8(first, even, second);
        *signs = evened(_mm512_srli_epi16(ends, 1));
        high[1] = _mm512_test_epi8_mask(ends, _mm512_set1_epi8(1));
    } else {
        const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        const __m512i first = loaded(a + codes), second = loaded(b + codes);
        at = _mm512_permutex2var_epi32(first, even, second);
        *signs = evened(four_sevens(_mm512_permutex2var_epi32(first, _mm512_add_epi32(even, _mm512_set1_epi32(1)), second)));
    }
    high[0] = _mm512_movepi8_mask(at);
    return at;
}

/* What is looked up for two units: their points, in the order of words_of_eights or of words_of_fours, and their signs. */
typedef struct unit_pair {
    __m512i points[2][2], signs[2];
} unit_pair;

/* A unit whose points have four values. */
ALWAYS_INLINE void look_up_fours(const uint8_t *b, const int dtype, __m512i points[2], __m512i *signs) {
    const int is_s = dtype == PLLM_IQ3_S, count = is_s ? 512 : 256;
    const uint8_t *table = is_s ? iq3_s_points[0] : iq3_xxs_points[0];
    const __m512i at = loaded(b + codes_at(dtype));
    __mmask64 high[2];
    high[0] = _mm512_movepi8_mask(at);
    if (is_s) {
        memcpy(&high[1], b + IQ3_S_HIGH, 8);
        *signs = _mm512_castsi256_si512(thirty_two(b + IQ3_S_SIGNS));
    } else {
        *signs = evened(four_sevens(_mm512_castsi256_si512(thirty_two(b + IQ3_XXS_SIGNS))));
    }
    const __m512i first = points_in(table, at, high, count), second = points_in(table + count, at, high, count);
    points[0] = _mm512_permutex2var_epi8(first, loaded(words_of_fours[0]), second);
    points[1] = _mm512_permutex2var_epi8(first, loaded(words_of_fours[1]), second);
    *signs = _mm512_permutexvar_epi8(loaded(signs_of_lanes), *signs);
}

/* Eight points of IQ1 whose places, times `step` bytes, are at `at`. */
ALWAYS_INLINE __m128i eight_of_iq1(const uint16_t *at, const int step) {
    uint32_t pairs[4];
    memcpy(pairs, at, 16);
    UNROLL for (int i = 0; i < 4; i++) IN_REGISTER(pairs[i]);
#define POINT(i) (int)two_bytes((const uint8_t *)iq1_points + step * ((i) % 2 ? pairs[(i) / 2] >> 16 : pairs[(i) / 2] & 65535))
    __m128i points = _mm_cvtsi32_si128(POINT(0));
    points = _mm_insert_epi16(points, POINT(1), 1);
    points = _mm_insert_epi16(points, POINT(2), 2);
    points = _mm_insert_epi16(points, POINT(3), 3);
    points = _mm_insert_epi16(points, POINT(4), 4);
    points = _mm_insert_epi16(points, POINT(5), 5);
    points = _mm_insert_epi16(points, POINT(6), 6);
    return _mm_insert_epi16(points, POINT(7), 7);
#undef POINT
}

/* The points of a unit of IQ1_S, whose places grid_unit has twice as large, or of IQ1_M. */
ALWAYS_INLINE __m512i points_of_iq1(const uint8_t *b, const int dtype) {
    const int step = dtype == PLLM_IQ1_S ? 1 : 2;
    grid_unit grid;
    open_grid_unit(b, &grid, dtype);
    const __m256i low = _mm256_set_m128i(eight_of_iq1(grid.at + 8, step), eight_of_iq1(grid.at, step));
    const __m256i high = _mm256_set_m128i(eight_of_iq1(grid.at + 24, step), eight_of_iq1(grid.at + 16, step));
    return _mm512_permutexvar_epi16(loaded(places_of_eights), _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
}

/* By lane all bits where the codes of a block of IQ1_S are below its points. */
ALWAYS_INLINE __m512i below_of_iq1_s(const uint8_t *b) {
    const __m256i words = _mm256_cvtepi16_epi32(sixteen_bytes(b + IQ1_S_HIGH));
    return _mm512_permutexvar_epi32(lanes_of_blocks(), _mm512_castsi256_si512(_mm256_srai_epi32(words, 31)));
}

/* The fours of bits of IQ1_M for each point, whose highest one says that the codes are below. */
ALWAYS_INLINE __m256i fours_of_iq1_m(const uint8_t *b) {
    const __m128i bytes = sixteen_bytes(b + IQ1_M_HIGH), more = _mm_srli_epi16(bytes, 4);
    return _mm256_set_m128i(_mm_unpackhi_epi8(bytes, more), _mm_unpacklo_epi8(bytes, more));
}

/* The units at a and b. */
ALWAYS_INLINE unit_pair look_up_two(const uint8_t *a, const uint8_t *b, const int dtype) {
    unit_pair to;
    if (dtype == PLLM_IQ3_S || dtype == PLLM_IQ3_XXS) {
        look_up_fours(a, dtype, to.points[0], &to.signs[0]);
        look_up_fours(b, dtype, to.points[1], &to.signs[1]);
        return to;
    }
    if (dtype == PLLM_IQ1_S || dtype == PLLM_IQ1_M) {
        to.points[0][0] = points_of_iq1(a, dtype);
        to.points[1][0] = points_of_iq1(b, dtype);
        if (dtype == PLLM_IQ1_S) {
            to.signs[0] = below_of_iq1_s(a);
            to.signs[1] = below_of_iq1_s(b);
        } else {
            const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(fours_of_iq1_m(a)), fours_of_iq1_m(b), 1);
            to.signs[0] = _mm512_permutexvar_epi8(loaded(signs_of_lanes), both);
        }
        return to;
    }
    const uint8_t *table = dtype == PLLM_IQ2_S    ? iq2_s_points[0]
                           : dtype == PLLM_IQ2_XS ? iq2_xs_points[0]
                                                  : iq2_xxs_points[0];
    const int count = dtype == PLLM_IQ2_S ? 1024 : dtype == PLLM_IQ2_XS ? 512 : 256;
    __mmask64 high[3];
    const __m512i at = places_of_two(a, b, &to.signs[0], high, dtype);
    const __m512i first = points_in(table, at, high, count), second = points_in(table + count, at, high, count);
    UNROLL for (int i = 0; i < 2; i++)
        to.points[i][0] = _mm512_permutex2var_epi8(first, loaded(words_of_eights[i]), second);
    to.signs[0] = _mm512_permutexvar_epi8(loaded(signs_of_lanes), to.signs[0]);
    return to;
}

/* The unsigned codes of unit i of two. */
ALWAYS_INLINE void codes_of_pair(const unit_pair *pair, const int i, const int dtype, __m512i to[4]) {
    if (dtype == PLLM_IQ3_S || dtype == PLLM_IQ3_XXS) {
        const __m128i values = dtype == PLLM_IQ3_S
                                   ? _mm_setr_epi8(17, 19, 21, 23, 25, 27, 29, 31, 15, 13, 11, 9, 7, 5, 3, 1)
                                   : _mm_setr_epi8(34, 38, 42, 46, 50, 54, 58, 63, 30, 26, 22, 18, 14, 10, 6, 1);
        codes_of_fours(pair->points[i][0], pair->points[i][1], pair->signs[i], _mm512_broadcast_i32x4(values), to);
        return;
    }
    const __m512i own = i && dtype != PLLM_IQ1_S ? _mm512_shuffle_epi32(pair->signs[0], (_MM_PERM_ENUM)0xb1) : pair->signs[i];
    __m512i signs[4];
    if (dtype == PLLM_IQ1_S) {
        UNROLL for (int v = 0; v < 4; v++) signs[v] = own;
    } else if (dtype == PLLM_IQ1_M) {
        signs[0] = signs[1] = bytes_at(own, LANES_BITS(1, 1, 16, 0));
        signs[2] = signs[3] = bytes_at(own, LANES_BITS(9, 9, 16, 0));
    } else {
        signs[0] = bytes_at(own, SIGNS_AT(0, 2));
        signs[1] = bytes_at(own, SIGNS_AT(1, 2));
        signs[2] = bytes_at(own, SIGNS_AT(2, 2));
        signs[3] = bytes_at(own, SIGNS_AT(3, 2));
    }
    codes_of_eights(pair->points[i][0], signs, values_of_eights(dtype), to);
}
