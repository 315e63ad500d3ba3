/* Packed weights opened for AVX-512: 64 codes of two to eight bits at a time. Codes are unsigned: what was added to them
   for that is taken away again with the minimums. The including file says

   SET(name)             the name of this set's copy of a function
   PACKED_FORMATS(ROW)   the formats that it has */

#include "packed_codes_x86.h"
#include "packed_scales_x86.h"

#define GROUP 64 /* codes of a vector */
#define GROUPS (UNIT / GROUP)
/* By how much the codes of a format are raised: those that are signed in the file by 128. */
ALWAYS_INLINE int raised_by(const int dtype) {
    return has_minimums(dtype) || above_of(dtype) > 0 ? above_of(dtype) : 128;
}

ALWAYS_INLINE __m512i masked(__m512i v, int bits) { return _mm512_and_si512(v, _mm512_set1_epi8((char)bits)); }

ALWAYS_INLINE __m512i loaded(const void *from) { return _mm512_loadu_si512(from); }

/* `low` where the bits of `mask` are set in each byte, `high` where they are not. */
ALWAYS_INLINE __m512i joined(__m512i low, __m512i high, int mask) {
    return _mm512_ternarylogic_epi32(_mm512_set1_epi8((char)mask), low, high, 0xca);
}

/* 32 bytes each. */
ALWAYS_INLINE __m512i two_pairs(const uint8_t *a, const uint8_t *b) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)(const void *)a)),
                              _mm256_loadu_si256((const __m256i *)(const void *)b), 1);
}

/* Of the lanes of a unit, as packed_avx512_few_template.h has them, the blocks of 32 values. */
ALWAYS_INLINE __m512i lanes_of_blocks(void) {
    return _mm512_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5, 2, 6, 3, 7, 2, 6, 3, 7);
}

/* Words of 16 bits shifted right by `low` in the lower half of the vector and by `high` in the upper one. */
ALWAYS_INLINE __m512i halves_shifted(__m512i v, int low, int high) {
    return _mm512_srlv_epi16(v, _mm512_inserti64x4(_mm512_set1_epi16((short)low), _mm256_set1_epi16((short)high), 1));
}

/* Each 16 bytes twice: low nibbles, high nibbles. `v` holds each 16 bytes twice. */
ALWAYS_INLINE __m512i nibbles(__m512i v) {
    const __m512i by = _mm512_inserti64x2(
        _mm512_inserti64x2(_mm512_setzero_si512(), _mm_set1_epi16(4), 1), _mm_set1_epi16(4), 3);
    return masked(_mm512_srlv_epi16(v, by), 15);
}

/* The 16 bytes at a and those at b, each twice. */
ALWAYS_INLINE __m512i pair_of_blocks(const uint8_t *a, const uint8_t *b) {
    const __m256i low = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)a));
    const __m256i high = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)b));
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

ALWAYS_INLINE __m512i twice(const uint8_t *from) {
    return _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(const void *)from));
}

ALWAYS_INLINE __m512i looked_up(__m512i codes, const int dtype) {
    static const int8_t iq4[16] = {IQ4_VALUES}, fp4[16] = {FP4_VALUES};
    const __m128i table = _mm_loadu_si128((const __m128i *)(const void *)(table_of(dtype) == IQ4_TABLE ? iq4 : fp4));
    const __m128i raised = _mm_add_epi8(table, _mm_set1_epi8((char)raised_by(dtype)));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(raised), codes);
}

ALWAYS_INLINE __m512i with_fifth_bits(__m512i codes, const uint8_t *a, const uint8_t *b) {
    uint32_t low, high;
    memcpy(&low, a, 4);
    memcpy(&high, b, 4);
    const __m512i bit = _mm512_maskz_set1_epi8((__mmask64)low | (__mmask64)high << 32, 16);
    return _mm512_or_si512(codes, bit);
}

/* Units of formats that few_bits opens: their codes one after the other, a byte each. They are compiled once, as they are
   long; what multiplies or exchanges them is the same for all. */
#define OPEN_CODES(NAME, ...)                                                                                      \
    NOINLINE void NAME##_codes(const uint8_t *b, uint8_t to[UNIT]) {                                               \
        if (!has_few_bits(PLLM_##NAME)) return;                                                                    \
        grid_unit grid;                                                                                            \
        open_grid_unit(b, &grid, PLLM_##NAME);                                                                     \
        UNROLL for (int g = 0; g < UNIT / 32; g++)                                                                 \
            _mm256_storeu_si256((__m256i *)(void *)(to + 32 * g), few_bits(b, &grid, g, PLLM_##NAME));                    \
    }
#define CODES_NAME(NAME, ...) [PLLM_##NAME] = NAME##_codes,

PACKED_FORMATS(OPEN_CODES)

static void (*const codes_table[PLLM_DTYPES])(const uint8_t *b, uint8_t to[UNIT]) = {PACKED_FORMATS(CODES_NAME)};

/* What codes_of reads: the unit at b, or, of formats that few_bits opens, their codes in `room`. */
ALWAYS_INLINE const uint8_t *readable(const uint8_t *b, uint8_t room[UNIT], const int dtype) {
    if (!has_few_bits(dtype)) return b;
    codes_table[dtype](b, room);
    return room;
}

/* Codes 64 g .. 64 g + 63 of the readable unit at b, unsigned. */
ALWAYS_INLINE __m512i codes_of(const uint8_t *b, const int g, const int dtype) {
    if (has_few_bits(dtype)) return _mm512_loadu_si512(b + 64 * g);
    const uint8_t *first = b + codes_at(dtype) + 2 * g * codes_apart(dtype), *second = first + codes_apart(dtype);
    switch (dtype) {
    case PLLM_Q4_K:
        return masked(halves_shifted(twice(b + codes_at(dtype) + 32 * g), 0, 4), 15);
    case PLLM_Q5_K: {
        const __m512i low = masked(halves_shifted(twice(b + codes_at(dtype) + 32 * g), 0, 4), 15);
        const __m512i high = masked(halves_shifted(twice(b + Q5_K_HIGH), 2 * g, 2 * g + 1), 1);
        return _mm512_or_si512(low, _mm512_slli_epi16(high, 4));
    }
    case PLLM_Q6_K: {
        const __m512i four = _mm512_loadu_si512(b + g / 2 * 64);
        const __m512i low = masked(g % 2 ? _mm512_srli_epi16(four, 4) : four, 15);
        const __m512i high = masked(halves_shifted(twice(b + Q6_K_HIGH + g / 2 * 32), g % 2 * 4, g % 2 * 4 + 2), 3);
        return _mm512_or_si512(low, _mm512_slli_epi16(high, 4));
    }
    case PLLM_Q8_0: {
        const __m256i low = _mm256_loadu_si256((const __m256i *)(const void *)first);
        const __m256i high = _mm256_loadu_si256((const __m256i *)(const void *)second);
        const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
        return _mm512_xor_si512(both, _mm512_set1_epi8((char)0x80));
    }
    default: {
        const __m512i low = nibbles(pair_of_blocks(first, second));
        if (table_of(dtype) != NO_TABLE) return looked_up(low, dtype);
        return has_fifth_bits(dtype) ? with_fifth_bits(low, first - 4, second - 4) : low;
    }
    }
}
