/* Products of bytes for AVX-512 with VNNI. */

static inline __attribute__((always_inline)) __m512i SET(dot)(const __m512i codes[4], const int8_t (*in)[64],
                                                              const int32_t *raised, const int dtype) {
    /* 128 or less: taken away as whole numbers, before anything is added. */
    const unsigned less = (unsigned)raised_shift(raised_by(dtype));
    __m512i sum = _mm512_setzero_si512();
    if (raised_by(dtype) > 0) sum = _mm512_srai_epi32(_mm512_loadu_si512(raised), less);
    UNROLL for (int i = 0; i < 4; i++) sum = _mm512_dpbusd_epi32(sum, codes[i], _mm512_loadu_si512(in[i]));
    return sum;
}
