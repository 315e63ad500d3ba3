/* Products of bytes for AVX-512 with VNNI. */

static inline __attribute__((always_inline)) __m512i SET(dot)(const __m512i codes[4], const int8_t (*in)[64],
                                                              const int32_t *raised, const int dtype) {
    /* 128 or less: taken away as whole numbers, before anything is added. */
    const unsigned less = (unsigned)raised_shift(raised_by(dtype));
    __m512i sums[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()}; /* two, so that neither waits long for itself */
    if (raised_by(dtype) > 0) sums[0] = _mm512_srai_epi32(_mm512_loadu_si512(raised), less);
    UNROLL for (int i = 0; i < 4; i++) sums[i % 2] = _mm512_dpbusd_epi32(sums[i % 2], codes[i], _mm512_loadu_si512(in[i]));
    return _mm512_add_epi32(sums[0], sums[1]);
}
