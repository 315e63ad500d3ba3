/* Products with grouped weights for AVX-512 without VNNI, and the input's conversion for both. */
#include <float.h>

#include "grouped_internal.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c,fma")
#endif

/* Codes of eight bits lend their signs to the input, as 128 * 127 twice just fits into 16 bits; those of six bits fit
   twice, and those of fewer in all, 4 * 2 * 31 * 127. */
static inline __attribute__((always_inline)) __m512i dot(const __m512i codes[4], const int8_t (*in)[64],
                                                         const int dtype) {
    const __m512i ones = _mm512_set1_epi16(1);
    const int wide = group_bits(dtype) > 5;
    __m512i pairs[4];
    UNROLL for (int i = 0; i < 4; i++) {
        __m512i code = codes[i], x = _mm512_loadu_si512(in[i]);
        if (dtype == PLLM_AFFINE8) {
            code = _mm512_xor_si512(code, _mm512_set1_epi8((char)0x80));
            x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(code), _mm512_setzero_si512(), x);
            code = _mm512_abs_epi8(code);
        }
        pairs[i] = _mm512_maddubs_epi16(code, x);
        if (wide) pairs[i] = _mm512_madd_epi16(pairs[i], ones);
    }
    if (wide)
        return _mm512_add_epi32(_mm512_add_epi32(pairs[0], pairs[1]), _mm512_add_epi32(pairs[2], pairs[3]));
    const __m512i all = _mm512_add_epi16(_mm512_add_epi16(pairs[0], pairs[1]), _mm512_add_epi16(pairs[2], pairs[3]));
    return _mm512_madd_epi16(all, ones);
}

static inline __attribute__((always_inline)) __m512i dot_of_two(const __m512i codes[2], const __m512i in[2]) {
    const __m512i pairs = _mm512_add_epi16(_mm512_maddubs_epi16(codes[0], in[0]), _mm512_maddubs_epi16(codes[1], in[1]));
    return _mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
}

#define RAISED8 128
#define DOT_OF_TWO dot_of_two
#define DOT(codes, in, dtype) dot(codes, in, dtype)

#undef SET
#define SET(name) pllm_grouped_avx512f_##name
#include "grouped_avx512_template.h"

/* Eight bytes of block `block` to its place in a vector. */
static inline void put(int8_t *vector, int64_t block, uint64_t bytes) {
    memcpy(vector + 8 * (block % 4 * 2 + block / 4), &bytes, 8);
}

/* As pllm_grouped_scalar_convert, to the bit, in the order of wide_input. */
void pllm_grouped_avx512f_convert(void *row, int64_t first, const float *from, float scale, int64_t count) {
    const __m512 by_scale = _mm512_set1_ps(scale), limit = _mm512_set1_ps(FLT_MAX);
    for (int64_t i = 0; i < count; i += GROUP_VALUES) {
        wide_input *unit = (wide_input *)row + (first + i) / UNIT;
        const int64_t block = (first + i) % UNIT / GROUP_VALUES;
        const __m512 a = _mm512_mul_ps(_mm512_loadu_ps(from + i), by_scale);
        const __m512 b = _mm512_mul_ps(_mm512_loadu_ps(from + i + 16), by_scale);
        const int finite = (_mm512_cmp_ps_mask(_mm512_abs_ps(a), limit, _CMP_LE_OQ) &
                            _mm512_cmp_ps_mask(_mm512_abs_ps(b), limit, _CMP_LE_OQ)) == 0xffff;
        const float most = finite ? _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b))) : 0;
        const float step = finite ? most / 127.0F : __builtin_nanf(""), by = most > 0 ? 127.0F / most : 0;
        const __m512 factor = _mm512_set1_ps(by);
        __m512i low = _mm512_cvtps_epi32(_mm512_mul_ps(a, factor)), high = _mm512_cvtps_epi32(_mm512_mul_ps(b, factor));
        if (!finite) low = high = _mm512_setzero_si512();
        const int sum = _mm512_reduce_add_epi32(_mm512_add_epi32(low, high));
        const __m256i codes = _mm256_set_m128i(_mm512_cvtepi32_epi8(high), _mm512_cvtepi32_epi8(low));
        const __m128i even = _mm256_cvtepi16_epi8(codes), odd = _mm256_cvtepi16_epi8(_mm256_srai_epi16(codes, 8));
        put(unit->codes[0], block, (uint64_t)_mm256_extract_epi64(codes, 0));
        put(unit->codes[1], block, (uint64_t)_mm256_extract_epi64(codes, 2));
        put(unit->codes[2], block, (uint64_t)_mm256_extract_epi64(codes, 1));
        put(unit->codes[3], block, (uint64_t)_mm256_extract_epi64(codes, 3));
        put(unit->apart[0], block, (uint64_t)_mm_extract_epi64(even, 0));
        put(unit->apart[1], block, (uint64_t)_mm_extract_epi64(odd, 0));
        put(unit->apart[2], block, (uint64_t)_mm_extract_epi64(even, 1));
        put(unit->apart[3], block, (uint64_t)_mm_extract_epi64(odd, 1));
        const int64_t lane = block % 4 * 4 + block / 4 * 2;
        unit->scales[lane] = unit->scales[lane + 1] = step;
        unit->sums[block] = step * (float)sum;
    }
}

void pllm_grouped_avx512f_pad(void *row, int64_t columns) {
    wide_input *unit = (wide_input *)row + columns / UNIT;
    if (columns % UNIT == 0) return;
    for (int64_t block = columns % UNIT / GROUP_VALUES; block < UNIT_GROUPS; block++) {
        const int64_t lane = block % 4 * 4 + block / 4 * 2;
        for (int i = 0; i < 4; i++) {
            put(unit->codes[i], block, 0);
            put(unit->apart[i], block, 0);
        }
        unit->scales[lane] = unit->scales[lane + 1] = unit->sums[block] = 0;
    }
}

/* ---- Rows opened for panels ---------------------------------------------------------------------------------- */

#define CODE_BYTES(k) (char)((k) * bits / 8), (char)((k) * bits / 8 + 1), -1, -1
#define CODE_SHIFTS(k) (k) * bits % 8, ((k) + 1) * bits % 8, ((k) + 2) * bits % 8, ((k) + 3) * bits % 8

/* Sixteen codes that have pairs. */
ALWAYS_INLINE __m512i sixteen_codes(const uint8_t *from, const int bits) {
    const __m128i bytes = _mm_maskz_loadu_epi8((__mmask16)((1 << 2 * bits) - 1), from);
    const char places[64] = {CODE_BYTES(0),  CODE_BYTES(1),  CODE_BYTES(2),  CODE_BYTES(3),
                               CODE_BYTES(4),  CODE_BYTES(5),  CODE_BYTES(6),  CODE_BYTES(7),
                               CODE_BYTES(8),  CODE_BYTES(9),  CODE_BYTES(10), CODE_BYTES(11),
                               CODE_BYTES(12), CODE_BYTES(13), CODE_BYTES(14), CODE_BYTES(15)};
    const int32_t shifts[16] = {CODE_SHIFTS(0), CODE_SHIFTS(4), CODE_SHIFTS(8), CODE_SHIFTS(12)};
    const __m512i words = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(bytes), _mm512_loadu_si512(places));
    return _mm512_and_si512(_mm512_srlv_epi32(words, _mm512_loadu_si512(shifts)), _mm512_set1_epi32((1 << bits) - 1));
}

/* Codes i .. i + 15 of a row, as what they stand for without scale and bias. */
ALWAYS_INLINE __m512 sixteen_values(const uint8_t *codes, const int64_t i, const int dtype) {
    if (dtype == PLLM_AFFINE8)
        return _mm512_cvtepi32_ps(
            _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)(codes + i))));
    if (has_pairs(dtype))
        return _mm512_cvtepi32_ps(sixteen_codes(codes + i / 8 * group_bits(dtype), group_bits(dtype)));
    /* Each byte in 16 bits, the second half of it moved up to the next eight. */
    const __m128i wide = _mm_cvtepu8_epi16(four_words(codes + i / 2));
    const __m128i bytes = _mm_and_si128(_mm_or_si128(wide, _mm_slli_epi16(wide, 4)), _mm_set1_epi8(15));
    const __m512i code = _mm512_cvtepu8_epi32(bytes);
    if (dtype == PLLM_AFFINE4) return _mm512_cvtepi32_ps(code);
    static const float fp4[16] = {FP4_VALUES};
    return _mm512_permutexvar_ps(code, _mm512_loadu_ps(fp4));
}

ALWAYS_INLINE void open_row(const pllm_matrix *matrix, int64_t row, int64_t first, int64_t count, float *to,
                            const int dtype) {
    const group_reader reader = reader_of(matrix);
    const uint8_t *codes = (const uint8_t *)matrix->data + row * reader.code_bytes;
    const uint8_t *scales = (const uint8_t *)matrix->scales + row * reader.scale_bytes;
    const uint8_t *biases = biases_of(matrix) + row * reader.scale_bytes;
    for (int64_t group = 0; group < count; group += GROUP_VALUES) {
        const int64_t at = (first + group) / matrix->group * reader.width;
        const __m512 scale = _mm512_set1_ps(group_number(scales + at, reader.kind));
        const __m512 bias = _mm512_set1_ps(dtype == PLLM_OCP_MXFP4 ? 0 : group_number(biases + at, reader.kind));
        UNROLL for (int part = 0; part < GROUP_VALUES / 16; part++) {
            const int64_t i = group + 16 * part;
            const __m512 values = _mm512_fmadd_ps(sixteen_values(codes, first + i, dtype), scale, bias);
            _mm512_storeu_ps(to + i, values);
        }
    }
}

#define OPEN_ROW(NAME, ...)                                                                                        \
    case PLLM_##NAME: open_row(matrix, row, first, count, to, PLLM_##NAME); break;

void pllm_grouped_avx512f_open(const pllm_matrix *matrix, int64_t row, int64_t first, int64_t count, float *to) {
    switch (matrix->dtype) {
        PLLM_GROUPED_FORMATS(OPEN_ROW)
    default: pllm_grouped_scalar_open(matrix, row, first, count, to);
    }
}

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
