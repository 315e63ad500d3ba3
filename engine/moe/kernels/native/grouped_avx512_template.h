/* Grouped weights for AVX-512. The including file says

   DOT(codes, in, dtype)   for each lane the sum of the products of its 16 codes, which lie in four vectors, with those of
                           the input
   DOT_OF_TWO(codes, in)   the same of the 8 codes in the first two vectors, which are 12 at most
   RAISED8                 what codes of eight bits, as they lie in the file, are above what DOT takes them for
   SET(name)               the name of this set's copy of a function */

#include "grouped_scales_x86.h"

/* Each of the 16 lanes of a unit has 16 values of its own, half a block of 32, so that a lane's products are added up as
   whole numbers and scaled once: four lanes have two of block l and then two of block 4 + l. Eight values of a block lie
   side by side in each of four vectors: of codes of eight bits the first, third, second and last eight, of codes of four
   bits the even ones of the first half, the odd ones, and those of the second half. */
typedef struct wide_input {
    int8_t codes[4][64], apart[4][64];
    float scales[16];
    float sums[UNIT_GROUPS];
} wide_input;

typedef wide_input unit_input;

_Static_assert(sizeof(wide_input) <= FEWEST_STRIDE * 4, "a unit fits into the shortest row");

typedef __m512 lanes;

ALWAYS_INLINE lanes no_lanes(void) { return _mm512_setzero_ps(); }

ALWAYS_INLINE float added_up(lanes v) {
    return eight_added_up(_mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)));
}

/* What codes of four bits stand for, `raised`. */
ALWAYS_INLINE __m512i fp4_table(const int raised) {
    static const int8_t fp4[16] = {FP4_VALUES};
    return _mm512_broadcast_i32x4(_mm_add_epi8(_mm_loadu_si128((const __m128i *)(const void *)fp4),
                                               _mm_set1_epi8((char)raised)));
}

/* Whether codes are multiplied in the order of the values, not even and odd ones apart. */
ALWAYS_INLINE int in_order(const int dtype) { return dtype == PLLM_AFFINE8 || has_pairs(dtype); }

#define PAIR(k) (char)PAIR_BYTE(k, bits), (char)(PAIR_BYTE(k, bits) + 1)
#define WORDS_OF(j) (int16_t)(bits * (j)), (int16_t)(bits * (j) + 1), (int16_t)(bits * (j) + 2), (int16_t)(bits * (j) + 3), \
                    (int16_t)(bits * (j) + 4), (int16_t)(bits * (j) + 5), (int16_t)(bits * (j) + 6), (int16_t)(bits * (j) + 7)

/* The first `count`, 64 or 32, codes at `from` that have pairs, in order; zeros after them. */
ALWAYS_INLINE __m512i paired_codes(const uint8_t *from, const int64_t count, const int bits) {
    const __m512i bytes = _mm512_maskz_loadu_epi8((1ULL << (count * bits / 8)) - 1, from);
    const int16_t words[32] = {WORDS_OF(0), WORDS_OF(1), WORDS_OF(2), WORDS_OF(3)}; /* each sixteen codes in 128 bits */
    const __m128i places = _mm_setr_epi8(PAIR(0), PAIR(1), PAIR(2), PAIR(3), PAIR(4), PAIR(5), PAIR(6), PAIR(7));
    const __m128i moves = _mm_setr_epi16(PAIR_SHIFT(0, bits), PAIR_SHIFT(1, bits), PAIR_SHIFT(2, bits),
                                         PAIR_SHIFT(3, bits), PAIR_SHIFT(4, bits), PAIR_SHIFT(5, bits),
                                         PAIR_SHIFT(6, bits), PAIR_SHIFT(7, bits));
    const __m512i apart = _mm512_permutexvar_epi16(_mm512_loadu_si512(words), bytes);
    const __m512i pairs = _mm512_shuffle_epi8(apart, _mm512_broadcast_i32x4(places));
    const __m512i moved = _mm512_sllv_epi16(pairs, _mm512_broadcast_i32x4(moves));
    const int mask = (1 << bits) - 1;
    const __m512i even = _mm512_and_si512(_mm512_srli_epi16(moved, (unsigned)(16 - 2 * bits)), _mm512_set1_epi16((int16_t)mask));
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi16(moved, (unsigned)(8 - bits)), _mm512_set1_epi16((int16_t)(mask << 8)));
    return _mm512_or_si512(even, odd);
}

/* The four vectors of a unit of codes. */
ALWAYS_INLINE void unit_codes(const uint8_t *codes, const int dtype, __m512i to[4]) {
    if (in_order(dtype)) {
        __m512i four[4];
        UNROLL for (int i = 0; i < 4; i++)
            four[i] = dtype == PLLM_AFFINE8 ? _mm512_loadu_si512(codes + 64 * i)
                                            : paired_codes(codes + bytes_of_values(dtype, 64) * i, 64, group_bits(dtype));
        const __m512i a = four[0], b = four[1], c = four[2], d = four[3];
        const __m512i low = _mm512_unpacklo_epi64(a, c), low_end = _mm512_unpacklo_epi64(b, d);
        const __m512i high = _mm512_unpackhi_epi64(a, c), high_end = _mm512_unpackhi_epi64(b, d);
        to[0] = _mm512_shuffle_i64x2(low, low_end, 0x88);
        to[1] = _mm512_shuffle_i64x2(low, low_end, 0xdd);
        to[2] = _mm512_shuffle_i64x2(high, high_end, 0x88);
        to[3] = _mm512_shuffle_i64x2(high, high_end, 0xdd);
        return;
    }
    const __m512i a = _mm512_loadu_si512(codes), b = _mm512_loadu_si512(codes + 64), mask = _mm512_set1_epi8(15);
    const __m512i first = _mm512_unpacklo_epi64(a, b), second = _mm512_unpackhi_epi64(a, b);
    to[0] = _mm512_and_si512(first, mask);
    to[1] = _mm512_and_si512(_mm512_srli_epi16(first, 4), mask);
    to[2] = _mm512_and_si512(second, mask);
    to[3] = _mm512_and_si512(_mm512_srli_epi16(second, 4), mask);
    if (dtype == PLLM_OCP_MXFP4) UNROLL for (int i = 0; i < 4; i++) to[i] = _mm512_shuffle_epi8(fp4_table(FP4_RAISED), to[i]);
}

/* Half of what the 16 scales of a unit of NVFP4 stand for, one for each half of a block. Scales usually have no sign, and
   their 128 numbers are looked up in registers: gathering them takes longer than the products. */
ALWAYS_INLINE __m512 nvfp4_scales(const uint8_t *scales, const uint8_t *table) {
    const __m128i bytes = eight_words(scales);
    const __m512i at = _mm512_cvtepu8_epi32(bytes);
    if (_mm_movemask_epi8(bytes)) return _mm512_i32gather_ps(at, (const float *)(const void *)table, 4);
    __m512 found[4];
    UNROLL for (int i = 0; i < 4; i++)
        found[i] = _mm512_permutex2var_ps(_mm512_loadu_ps(table + 128 * i), at, _mm512_loadu_ps(table + 128 * i + 64));
    const __mmask16 odd = _mm512_test_epi32_mask(at, _mm512_set1_epi32(32));
    return _mm512_mask_blend_ps(_mm512_test_epi32_mask(at, _mm512_set1_epi32(64)),
                                _mm512_mask_blend_ps(odd, found[0], found[1]),
                                _mm512_mask_blend_ps(odd, found[2], found[3]));
}

/* A unit of NVFP4: the lanes of a block have eight values of its first half in two vectors, and eight of its second half in
   the others. The input gets the signs. */
ALWAYS_INLINE void add_nvfp4(const uint8_t *codes, const uint8_t *scales, const uint8_t *table,
                             const unit_input *const *x, lanes *sums, const int M) {
    const __m512 own = nvfp4_scales(scales, table);
    const __m512i places = _mm512_setr_epi32(0, 0, 8, 8, 2, 2, 10, 10, 4, 4, 12, 12, 6, 6, 14, 14);
    const __m512 halves[2] = {_mm512_permutexvar_ps(places, own),
                              _mm512_permutexvar_ps(_mm512_add_epi32(places, _mm512_set1_epi32(1)), own)};
    const __m512i sizes = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, 1, 2, 3, 4, 6, 8, 12));
    __m512i four[4];
    __mmask64 negative[4];
    unit_codes(codes, PLLM_GROUPED_NVFP4, four);
    UNROLL for (int i = 0; i < 4; i++) {
        negative[i] = _mm512_test_epi8_mask(four[i], _mm512_set1_epi8(8));
        four[i] = _mm512_shuffle_epi8(sizes, four[i]);
    }
    UNROLL for (int m = 0; m < M; m++) {
        const __m512 by = _mm512_loadu_ps(x[m]->scales);
        UNROLL for (int half = 0; half < 2; half++) {
            __m512i in[2];
            UNROLL for (int i = 0; i < 2; i++) {
                in[i] = _mm512_loadu_si512(x[m]->apart[2 * half + i]);
                in[i] = _mm512_mask_sub_epi8(in[i], negative[2 * half + i], _mm512_setzero_si512(), in[i]);
            }
            const __m512i dots = DOT_OF_TWO(four + 2 * half, in);
            sums[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots), _mm512_mul_ps(halves[half], by), sums[m]);
        }
    }
}

ALWAYS_INLINE void add_unit(const uint8_t *codes, const uint8_t *scales, const uint8_t *biases,
                            const group_reader *reader, const unit_input *const *x, lanes *sums, const int dtype,
                            const int M) {
    if (dtype == PLLM_GROUPED_NVFP4) {
        add_nvfp4(codes, scales, biases, x, sums, M);
        return;
    }
    const float raised = dtype == PLLM_AFFINE8 ? -RAISED8 : dtype == PLLM_OCP_MXFP4 ? FP4_RAISED : 0;
    __m256 added;
    const __m256 own = scales_of(scales, biases, reader, dtype, raised, &added);
    const __m512i blocks = _mm512_setr_epi32(0, 0, 4, 4, 1, 1, 5, 5, 2, 2, 6, 6, 3, 3, 7, 7);
    const __m512 wide = _mm512_permutexvar_ps(blocks, _mm512_castps256_ps512(own));
    const __m512 offsets = _mm512_insertf32x8(_mm512_setzero_ps(), added, 0);
    __m512i four[4];
    unit_codes(codes, dtype, four);
    UNROLL for (int m = 0; m < M; m++) {
        const __m512i dots = DOT(four, in_order(dtype) ? x[m]->codes : x[m]->apart, dtype);
        sums[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots), _mm512_mul_ps(wide, _mm512_loadu_ps(x[m]->scales)), sums[m]);
        sums[m] = _mm512_fmadd_ps(offsets, _mm512_maskz_loadu_ps(0xff, x[m]->sums), sums[m]);
    }
}

#define MOST_TOKENS 8
#define MORE_FORMATS(ROW) ROW(GROUPED_NVFP4)
#include "grouped_rows_template.h"
