/* Products with grouped weights for AVX-512 with VNNI. */
#include "grouped_internal.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c,fma")
#endif

static inline __attribute__((always_inline)) __m512i dot(const __m512i codes[4], const int8_t (*in)[64]) {
    __m512i sum = _mm512_setzero_si512();
    UNROLL for (int i = 0; i < 4; i++) sum = _mm512_dpbusd_epi32(sum, codes[i], _mm512_loadu_si512(in[i]));
    return sum;
}

static inline __attribute__((always_inline)) __m512i dot_of_two(const __m512i codes[2], const __m512i in[2]) {
    return _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), codes[0], in[0]), codes[1], in[1]);
}

#define RAISED8 0
#define DOT_OF_TWO dot_of_two
#define DOT(codes, in, dtype) dot(codes, in)

#include "vector_avx512f.h"

#undef SET
#define SET(name) pllm_grouped_avx512_vnni_##name
#include "grouped_avx512_template.h"

/* ---- Panels of bytes ------------------------------------------------------------------------------------------ */

/* The first `count` of 64 codes at `from`, in order, as they are multiplied; zeros after them. */
ALWAYS_INLINE __m512i codes_in_order(const uint8_t *from, const int64_t count, const int dtype) {
    if (dtype == PLLM_AFFINE8)
        return count < 64 ? _mm512_maskz_loadu_epi8(0xffffffffULL, from) : _mm512_loadu_si512(from);
    if (has_pairs(dtype)) return paired_codes(from, count < 64 ? 32 : 64, group_bits(dtype));
    const __m256i bytes = count < 64 ? _mm256_zextsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)from))
                                     : _mm256_loadu_si256((const __m256i *)(const void *)from);
    /* Each byte in 16 bits, the second half of it moved up to the next eight. */
    const __m512i wide = _mm512_cvtepu8_epi16(bytes);
    const __m512i codes = _mm512_and_si512(_mm512_or_si512(wide, _mm512_slli_epi16(wide, 4)), _mm512_set1_epi8(15));
    if (table_of(dtype) == FP4_TABLE) return _mm512_shuffle_epi8(fp4_table(above_of(dtype)), codes);
    return dtype == PLLM_OCP_MXFP4 ? _mm512_shuffle_epi8(fp4_table(FP4_RAISED), codes) : codes;
}

/* For sixteen rows, those of vector v, a unit of up to UNIT values; `blocks` of 32. */
ALWAYS_INLINE void open_unit(panel_block *to, const int v, const uint8_t *const codes[16],
                             const uint8_t *const scales[16], const uint8_t *const biases[16],
                             const group_reader *reader, const int64_t blocks, const int dtype) {
    const float raised = dtype == PLLM_OCP_MXFP4 ? FP4_RAISED : 0;
    __m512 lanes[16];
    for (int64_t pair = 0; pair < blocks; pair += 2) {
        const int64_t left = (blocks - pair) * GROUP_VALUES, at = bytes_of_values(dtype, pair * GROUP_VALUES);
        UNROLL for (int r = 0; r < 16; r++) lanes[r] = _mm512_castsi512_ps(codes_in_order(codes[r] + at, left, dtype));
        avx512f_transpose(lanes);
        UNROLL for (int i = 0; i < 16; i++)
            if (pair + i / 8 < blocks) _mm512_storeu_ps((float *)(void *)(to[pair + i / 8].codes[i % 8] + 64 * v), lanes[i]);
    }
    if (dtype == PLLM_GROUPED_NVFP4) {
        const __m512i apart = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
        for (int r = 0; r < 16; r++) {
            uint8_t own[UNIT_SCALES] = {0};
            memcpy(own, scales[r], (size_t)blocks * 2);
            lanes[r] = _mm512_permutexvar_ps(apart, nvfp4_scales(own, biases[r]));
        }
        avx512f_transpose(lanes);
        for (int block = 0; block < blocks; block++)
            UNROLL for (int half = 0; half < 2; half++)
                _mm512_storeu_ps(to[block].scales[half] + 16 * v, lanes[8 * half + block]);
        return;
    }
    const size_t bytes = (size_t)(divided_up(blocks * reader->groups, UNIT_GROUPS) * reader->width);
    for (int r = 0; r < 16; r++) {
        uint8_t own[4 * UNIT_GROUPS] = {0}, more[4 * UNIT_GROUPS] = {0}; /* so that nothing is read past the row */
        memcpy(own, scales[r], bytes);
        if (dtype != PLLM_OCP_MXFP4) memcpy(more, biases[r], bytes);
        __m256 added;
        const __m256 each = scales_of(own, more, reader, dtype, raised, &added);
        lanes[r] = _mm512_insertf32x8(_mm512_castps256_ps512(each), added, 1);
    }
    avx512f_transpose(lanes);
    for (int block = 0; block < blocks; block++) {
        _mm512_storeu_ps(to[block].scales[0] + 16 * v, lanes[block]);
        _mm512_storeu_ps(to[block].minimums[0] + 16 * v, _mm512_sub_ps(_mm512_setzero_ps(), lanes[8 + block]));
    }
}

ALWAYS_INLINE void open_panel(panel_block *to, const pllm_matrix *matrix, const int64_t row, const int64_t rows,
                              const int64_t first, const int64_t count, const int dtype) {
    const group_reader reader = reader_of(matrix);
    for (int64_t k = 0; k < count; k += UNIT, to += UNIT_GROUPS) {
        const int64_t at = (first + k) / matrix->group * reader.width;
        for (int v = 0; v < PANEL_ROWS / 16; v++) {
            const uint8_t *codes[16], *scales[16], *biases[16];
            for (int r = 0; r < 16; r++) { /* those that are not there get the last one's */
                const int64_t own = row + MIN(16 * v + r, rows - 1);
                codes[r] = (const uint8_t *)matrix->data + own * reader.code_bytes + bytes_of_values(dtype, first + k);
                scales[r] = (const uint8_t *)matrix->scales + own * reader.scale_bytes + at;
                biases[r] = biases_of(matrix) + (dtype == PLLM_GROUPED_NVFP4 ? 0 : own * reader.scale_bytes + at);
            }
            open_unit(to, v, codes, scales, biases, &reader, MIN(UNIT, count - k) / GROUP_VALUES, dtype);
        }
    }
}

#define OPEN_PANEL(NAME, ...)                                                                                      \
    case PLLM_##NAME: open_panel(to, matrix, row, rows, first, count, PLLM_##NAME); break;

void pllm_grouped_avx512_vnni_open_panel(panel_block *to, const pllm_matrix *matrix, int64_t row, int64_t rows,
                                         int64_t first, int64_t count) {
    switch (matrix->dtype) {
        PLLM_GROUPED_FORMATS(OPEN_PANEL)
        MORE_FORMATS(OPEN_PANEL)
    default: break;
    }
}

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
