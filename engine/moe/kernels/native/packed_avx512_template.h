/* Packed weights opened for AVX-512: 64 codes of four to eight bits at a time. Codes are unsigned: what was added to them
   for that is taken away again with the minimums. The including file says

   SET(name)   the name of this set's copy of a function */

#include "packed_scales_x86.h"

#define GROUP 64 /* codes of a vector */
#define GROUPS (UNIT / GROUP)
/* By how much the codes of a format are raised: those that are signed in the file by 128. */
ALWAYS_INLINE float raised_by(const int dtype) {
    return has_minimums(dtype) || raised_in_file(dtype) > 0 ? raised_in_file(dtype) : 128;
}

ALWAYS_INLINE __m512i masked(__m512i v, int bits) { return _mm512_and_si512(v, _mm512_set1_epi8((char)bits)); }

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
    static const int8_t iq4[16] = {IQ4_TABLE}, mxfp4[16] = {MXFP4_TABLE};
    const __m128i table = _mm_loadu_si128((const __m128i *)(const void *)(dtype == PLLM_MXFP4 ? mxfp4 : iq4));
    const __m128i raised = _mm_xor_si128(table, _mm_set1_epi8((char)0x80));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(raised), codes);
}

ALWAYS_INLINE __m512i with_fifth_bits(__m512i codes, const uint8_t *a, const uint8_t *b) {
    uint32_t low, high;
    memcpy(&low, a, 4);
    memcpy(&high, b, 4);
    const __m512i bit = _mm512_maskz_set1_epi8((__mmask64)low | (__mmask64)high << 32, 16);
    return _mm512_or_si512(codes, bit);
}

/* Codes 64 g .. 64 g + 63 of the unit at b, unsigned. */
ALWAYS_INLINE __m512i codes_of(const uint8_t *b, const int g, const int dtype) {
    const uint8_t *first = b + 2 * g * block_bytes(dtype), *second = first + block_bytes(dtype);
    switch (dtype) {
    case PLLM_Q4_K:
        return masked(halves_shifted(twice(b + Q4_K_CODES + 32 * g), 0, 4), 15);
    case PLLM_Q5_K: {
        const __m512i low = masked(halves_shifted(twice(b + Q5_K_CODES + 32 * g), 0, 4), 15);
        const __m512i high = masked(halves_shifted(twice(b + Q5_K_HIGH), 2 * g, 2 * g + 1), 1);
        return _mm512_or_si512(low, _mm512_slli_epi16(high, 4));
    }
    case PLLM_Q6_K: {
        const __m512i four = _mm512_loadu_si512(b + g / 2 * 64);
        const __m512i low = masked(g % 2 ? _mm512_srli_epi16(four, 4) : four, 15);
        const __m512i high = masked(halves_shifted(twice(b + Q6_K_HIGH + g / 2 * 32), g % 2 * 4, g % 2 * 4 + 2), 3);
        return _mm512_or_si512(low, _mm512_slli_epi16(high, 4));
    }
    case PLLM_IQ4_XS:
        return looked_up(nibbles(pair_of_blocks(b + IQ4_XS_CODES + 32 * g, b + IQ4_XS_CODES + 32 * g + 16)), dtype);
    case PLLM_Q4_0: return nibbles(pair_of_blocks(first + 2, second + 2));
    case PLLM_Q4_1: return nibbles(pair_of_blocks(first + 4, second + 4));
    case PLLM_Q5_0: return with_fifth_bits(nibbles(pair_of_blocks(first + 6, second + 6)), first + 2, second + 2);
    case PLLM_Q5_1: return with_fifth_bits(nibbles(pair_of_blocks(first + 8, second + 8)), first + 4, second + 4);
    case PLLM_IQ4_NL: return looked_up(nibbles(pair_of_blocks(first + 2, second + 2)), dtype);
    case PLLM_MXFP4: return looked_up(nibbles(pair_of_blocks(first + 1, second + 1)), dtype);
    default: {
        const __m256i low = _mm256_loadu_si256((const __m256i *)(const void *)(first + 2));
        const __m256i high = _mm256_loadu_si256((const __m256i *)(const void *)(second + 2));
        const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
        return _mm512_xor_si512(both, _mm512_set1_epi8((char)0x80));
    }
    }
}

ALWAYS_INLINE __m512 each_twice(__m256 v) {
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7),
                                 _mm512_castps256_ps512(v));
}

/* The scales of a unit, and what is to be taken away, for each 16 values of raised codes. */
ALWAYS_INLINE __m512 scales_of(const uint8_t *b, const int dtype, __m512 *minimums) {
    if (has_minimums(dtype)) {
        *minimums = each_twice(eight_minimums(b, dtype));
        return each_twice(eight_scales(b, dtype));
    }
    __m512 scales;
    if (dtype == PLLM_Q6_K) {
        const __m128i own = _mm_loadu_si128((const __m128i *)(const void *)(b + Q6_K_SCALES));
        scales = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(own)),
                               _mm512_set1_ps(widened(b + Q6_K_SCALE)));
    } else {
        scales = each_twice(eight_scales(b, dtype));
    }
    *minimums = _mm512_mul_ps(scales, _mm512_set1_ps(raised_by(dtype)));
    return scales;
}

/* ---- Rows opened for panels ---------------------------------------------------------------------------------- */

/* Values 16 i .. 16 i + 15 of a group of raised codes. */
ALWAYS_INLINE __m512 opened(__m512i codes, const int i, __m512 scales, __m512 minimums, const int part) {
    const __m512 values = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(codes, i)));
    const __m512i lane = _mm512_set1_epi32(part);
    return _mm512_fmsub_ps(values, _mm512_permutexvar_ps(lane, scales), _mm512_permutexvar_ps(lane, minimums));
}

/* To the nearest bfloat16, ties to even. */
ALWAYS_INLINE __m256i rounded(__m512 values) {
    const __m512i words = _mm512_castps_si512(values);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(words, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(words, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 number = _mm512_cmp_ps_mask(values, values, _CMP_ORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(
        _mm512_mask_mov_epi32(_mm512_set1_epi32(0x7fc00000), number, up), 16));
}

ALWAYS_INLINE void open_row(const int dtype, const uint8_t *from, void *to, int64_t count, const int two_bytes) {
    for (int64_t first = 0; first < count; first += UNIT) {
        uint8_t blocks[UNIT_BYTES_LIMIT];
        const uint8_t *unit = from + bytes_of_values(dtype, first);
        const int64_t values = MIN(UNIT, count - first);
        if (values < UNIT) {
            memset(blocks, 0, sizeof blocks);
            memcpy(blocks, unit, (size_t)bytes_of_values(dtype, values));
            unit = blocks;
        }
        __m512 minimums;
        const __m512 scales = scales_of(unit, dtype, &minimums);
        UNROLL for (int g = 0; g < GROUPS; g++) {
            const __m512i codes = codes_of(unit, g, dtype);
            UNROLL for (int i = 0; i < GROUP / 16; i++) {
                const int64_t at = first + GROUP * g + 16 * i;
                if (at >= count) break;
                /* The part is a constant of the compiler, and so is what is extracted. */
                const __m512 v = i == 0   ? opened(codes, 0, scales, minimums, 4 * g)
                                 : i == 1 ? opened(codes, 1, scales, minimums, 4 * g + 1)
                                 : i == 2 ? opened(codes, 2, scales, minimums, 4 * g + 2)
                                          : opened(codes, 3, scales, minimums, 4 * g + 3);
                if (two_bytes)
                    _mm256_storeu_si256((__m256i *)(void *)((uint16_t *)to + at), rounded(v));
                else
                    _mm512_storeu_ps((float *)to + at, v);
            }
        }
    }
}

#define OPEN(DTYPE)                                                                                                \
    case DTYPE: open_row(DTYPE, from, to, count, two_bytes); break;

ALWAYS_INLINE void open_any(int dtype, const void *from, void *to, int64_t count, const int two_bytes) {
    switch (dtype) {
        OPEN(PLLM_Q4_0)
        OPEN(PLLM_Q4_1)
        OPEN(PLLM_Q5_0)
        OPEN(PLLM_Q5_1)
        OPEN(PLLM_Q8_0)
        OPEN(PLLM_Q4_K)
        OPEN(PLLM_Q5_K)
        OPEN(PLLM_Q6_K)
        OPEN(PLLM_IQ4_NL)
        OPEN(PLLM_IQ4_XS)
        OPEN(PLLM_MXFP4)
    default: break;
    }
}

void SET(open_row)(int dtype, const void *from, float *to, int64_t count) {
    open_any(dtype, from, to, count, 0);
}

void SET(open_row_bf16)(int dtype, const void *from, uint16_t *to, int64_t count) {
    open_any(dtype, from, to, count, 1);
}
