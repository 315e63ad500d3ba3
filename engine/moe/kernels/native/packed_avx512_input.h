/* Rows of input for AVX-512, as packed_avx512_few_template.h and packed_avx512_many_template.h multiply them. Include after
   the first of them. */

/* The codes of a block of an input row times `scale`, in two halves, and their scale: the numbers of
   pllm_packed_scalar_convert. */
ALWAYS_INLINE float rounded_block(const float *from, const float scale, __m512i halves[2]) {
    const __m512 factor = _mm512_set1_ps(scale), largest = _mm512_set1_ps(3.40282347e38F);
    const __m512i zero = _mm512_setzero_si512();
    const __m512 low = _mm512_mul_ps(_mm512_loadu_ps(from), factor);
    const __m512 high = _mm512_mul_ps(_mm512_loadu_ps(from + 16), factor);
    const __m512 low_size = _mm512_abs_ps(low), high_size = _mm512_abs_ps(high);
    const int finite = _mm512_cmp_ps_mask(low_size, largest, _CMP_LE_OQ) == 0xffff &&
                       _mm512_cmp_ps_mask(high_size, largest, _CMP_LE_OQ) == 0xffff;
    const float most = finite ? _mm512_reduce_max_ps(_mm512_max_ps(low_size, high_size)) : 0;
    const __m512 by = _mm512_set1_ps(most > 0 ? 127.0F / most : 0);
    halves[0] = finite ? _mm512_cvtps_epi32(_mm512_mul_ps(low, by)) : zero;
    halves[1] = finite ? _mm512_cvtps_epi32(_mm512_mul_ps(high, by)) : zero;
    return finite ? most / 127.0F : __builtin_nanf("");
}

void SET(convert)(void *row, int64_t first, const float *from, float scale, int64_t count) {
    for (int64_t i = 0; i < count; i += INPUT_BLOCK) {
        wide_input *unit = (wide_input *)row + (first + i) / UNIT;
        const int block = (int)((first + i) % UNIT / INPUT_BLOCK);
        __m512i halves[2];
        const float step = rounded_block(from + i, scale, halves);
        int total = 0;
        UNROLL for (int half = 0; half < 2; half++) {
            const int lane = lane_of(block, half), sum = _mm512_reduce_add_epi32(halves[half]);
            uint32_t words[4];
            _mm_storeu_si128((__m128i *)(void *)words, _mm512_cvtepi32_epi8(halves[half]));
            UNROLL for (int step_of = 0; step_of < 4; step_of++)
                memcpy(unit->codes[step_of ^ (block & 1)] + 4 * lane, &words[step_of], 4);
            unit->scales[lane] = step;
            unit->raised[lane] = -128 * sum;
            total += sum;
        }
        unit->sums[block] = 0;
        unit->sums[8 + block] = step * (float)total;
    }
}

/* Zeros in the blocks of the last unit that have no values. */
void SET(pad)(void *row, int64_t columns) {
    wide_input *unit = (wide_input *)row + columns / UNIT;
    for (int block = (int)(columns % UNIT / INPUT_BLOCK); block % 8; block++) {
        for (int half = 0; half < 2; half++) {
            const int lane = lane_of(block, half);
            for (int step = 0; step < 4; step++) memset(unit->codes[step] + 4 * lane, 0, 4);
            unit->scales[lane] = 0;
            unit->raised[lane] = 0;
        }
        unit->sums[block] = unit->sums[8 + block] = 0;
    }
}
