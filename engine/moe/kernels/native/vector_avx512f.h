/* Vectors of sixteen lanes with AVX-512; include inside the target's pragmas. */
#define V __m512
#define W 16
#define SET(name) avx512f_##name
#define FEW_TOKENS 6
#define TILE_TOKENS 12

/* The four quarters of each of a, b, c, d added up, and then their lanes. */
ALWAYS_INLINE void avx512f_sum4(__m512 a, __m512 b, __m512 c, __m512 d, float *to) {
    __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    /* a b c d, a quarter each */
    __m512 all = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    all = _mm512_add_ps(all, _mm512_permute_ps(all, 0x4e));
    all = _mm512_add_ps(all, _mm512_permute_ps(all, 0xb1));
    const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
    _mm_storeu_ps(to, _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, all)));
}

ALWAYS_INLINE __m512 avx512f_load_bf16(const uint16_t *from) {
    __m256i halves = _mm256_loadu_si256((const __m256i *)(const void *)from);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

/* As fp8_as_half. */
ALWAYS_INLINE void avx512f_load_fp8(const uint8_t *from, __m512 to[2]) {
    const __m512i codes = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(const void *)from));
    const __m512i size = _mm512_set1_epi16(0x7f);
    const __mmask32 none = _mm512_cmpeq_epi16_mask(_mm512_and_si512(codes, size), size);
    const __m512i sized = _mm512_and_si512(_mm512_slli_epi16(codes, 7), _mm512_set1_epi16((short)0xbf80));
    const __m512i halves = _mm512_mask_mov_epi16(sized, none, _mm512_set1_epi16(0x7fff));
    to[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
    to[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
}

ALWAYS_INLINE __m512 avx512f_low_f16(__m512i words) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words)); }

ALWAYS_INLINE __m512 avx512f_pow2(__m512 v) {
    __m512i n = _mm512_add_epi32(_mm512_cvtps_epi32(v), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(n, 23));
}

ALWAYS_INLINE void avx512f_transpose(__m512 r[16]) {
    __m512 a[16], b[16];
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        a[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i += 4) {
        b[i] = _mm512_shuffle_ps(a[i], a[i + 2], 0x44);
        b[i + 1] = _mm512_shuffle_ps(a[i], a[i + 2], 0xee);
        b[i + 2] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0x44);
        b[i + 3] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0xee);
    }
    /* b[4 g + c]: column 4 q + c of rows 4 g .. 4 g + 3 in quarter q */
    _Pragma("GCC unroll 16") for (int c = 0; c < 4; c++) {
        __m512 low01 = _mm512_shuffle_f32x4(b[c], b[4 + c], 0x88), high01 = _mm512_shuffle_f32x4(b[c], b[4 + c], 0xdd);
        __m512 low23 = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0x88);
        __m512 high23 = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0xdd);
        r[c] = _mm512_shuffle_f32x4(low01, low23, 0x88);
        r[8 + c] = _mm512_shuffle_f32x4(low01, low23, 0xdd);
        r[4 + c] = _mm512_shuffle_f32x4(high01, high23, 0x88);
        r[12 + c] = _mm512_shuffle_f32x4(high01, high23, 0xdd);
    }
}

#define V_ZERO _mm512_setzero_ps()
#define V_SET1(value) _mm512_set1_ps(value)
#define V_LOAD(from) _mm512_loadu_ps(from)
#define V_STORE(to, v) _mm512_storeu_ps(to, v)
#define V_ADD(a, b) _mm512_add_ps(a, b)
#define V_SUB(a, b) _mm512_sub_ps(a, b)
#define V_MUL(a, b) _mm512_mul_ps(a, b)
#define V_DIV(a, b) _mm512_div_ps(a, b)
#define V_FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
#define V_MIN(a, b) _mm512_min_ps(a, b)
#define V_MAX(a, b) _mm512_max_ps(a, b)
#define V_ROUND(v) _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define V_POW2(v) avx512f_pow2(v)
#define V_SUM(v) _mm512_reduce_add_ps(v)
#define V_SUM4(a, b, c, d, to) avx512f_sum4(a, b, c, d, to)
#define V_LOAD_BF16(from) avx512f_load_bf16(from)
#define V_LOW(v) _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(v), 16))
#define V_HIGH(v) \
    _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32((int)0xffff0000U)))
#define V_LOAD_F16(from) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)(from)))
#define V_LOAD_FP8(from, to) avx512f_load_fp8(from, to)
#define V_LOW_F16(v) avx512f_low_f16(_mm512_castps_si512(v))
#define V_HIGH_F16(v) avx512f_low_f16(_mm512_srli_epi32(_mm512_castps_si512(v), 16))
#define V_TRANSPOSE(rows) avx512f_transpose(rows)
#define V_SELECT_POSITIVE(v, a, b) _mm512_mask_blend_ps(_mm512_cmp_ps_mask(v, V_ZERO, _CMP_GE_OQ), b, a)
