/* Products of a few tokens with packed weights for AVX-512. The including file says what packed_avx512_template.h wants,
   has included it, and says

   DOT(codes, in, dtype)   for each lane the sum of the products of its 16 codes, which lie in four vectors, with those
                           of a wide_input
   LARGE_CODES             whether all codes may have eight bits: high nibbles are multiplied where they lie then, and
                           the scale is a sixteenth
   LOOKS_UP                whether all its formats have a grid and are opened by packed_grids_avx512_vbmi.h
   FEW_OF_OTHERS(...)      kernel_set.few of formats that are not in PACKED_FORMATS */

/* Each of the 16 lanes of a unit has 16 values of its own, half a block of 32, so that a lane's products are added up as
   whole numbers and scaled once. Lane 4 l + p has the half l % 2 of block 4 (p % 2) + 2 (l / 2) + p / 2. Four values of
   a lane, one after the other, lie in each of four vectors; in blocks of odd number the first and second vector are
   exchanged, and the third and fourth: so nibbles of Q4_K need fewest shuffles. */
typedef struct wide_input {
    int8_t codes[4][64];
    float scales[16];
    float sums[16];     /* eight zeros, and the sums of the values of each block */
    int32_t raised[16]; /* -128 times the sum of a lane's codes: what is too much with codes raised by 128 */
} wide_input;

_Static_assert(sizeof(wide_input) <= FEWEST_STRIDE * PACKED_ROW_ELEMENT, "a unit fits into the shortest row");

/* Input that is passed by a group of rows before the next part of it is wanted, in bytes: it stays in the first-level
   cache. One token is passed whole, so that the weights are read from end to end. */
#define SPAN_BYTES 20480
#define GROUP_ROWS 16
#define LARGE_UNITS 36 /* of one token's input: half of a small first-level cache */
#define ROWS_TOGETHER 8 /* that share a part of such an input */
#define NEXT_BYTES 256
#define FAR_BYTES 3072
#define NEAR_BYTES 512
#define ROOMY_BYTES 49152 /* of a first-level cache that holds an input and, beside it, weights fetched far ahead */
#define ROOMY_AHEAD 8192
#define MOST_TOKENS 8

ALWAYS_INLINE int lane_of(int block, int half) { return 4 * (block / 2 % 2 * 2 + half) + block / 4 + block % 2 * 2; }

/* The four vectors of a unit from those of blocks 0 and 2, 1 and 3, 4 and 6, 5 and 7. */
ALWAYS_INLINE void spread(__m512i a, __m512i b, __m512i c, __m512i d, __m512i to[4]) {
    const __m512i even = _mm512_unpacklo_epi32(a, c), odd = _mm512_unpacklo_epi32(b, d);
    const __m512i even_end = _mm512_unpackhi_epi32(a, c), odd_end = _mm512_unpackhi_epi32(b, d);
    to[0] = _mm512_mask_mov_epi64(even, 0xaa, odd);
    to[1] = _mm512_alignr_epi8(odd, even, 8);
    to[2] = _mm512_mask_mov_epi64(even_end, 0xaa, odd_end);
    to[3] = _mm512_alignr_epi8(odd_end, even_end, 8);
}

/* The same from 128 bytes that hold a value in each nibble, blocks 0 and 2 in the low ones of the first half and 1 and 3
   in the high ones, 4 to 7 in the second half. The nibbles of the other block are still there. */
ALWAYS_INLINE void spread_nibbles(const uint8_t *from, __m512i to[4]) {
    __m512i a = loaded(from), b = loaded(from + 64);
    __asm__("" : "+x"(a), "+x"(b)); /* or they are loaded twice, and most of them cross a line */
    to[0] = _mm512_unpacklo_epi32(a, b);
    to[1] = _mm512_shuffle_epi32(to[0], 0x4e);
    to[2] = _mm512_unpackhi_epi32(a, b);
    to[3] = _mm512_shuffle_epi32(to[2], 0x4e);
}

/* The bits of each byte that belong to the lane's block; and they, brought to the bottom, with others above them. */
ALWAYS_INLINE __m512i nibble_bits(void) {
    const int low = 0x0f0f0f0f;
    return _mm512_broadcast_i32x4(_mm_setr_epi32(low, low, ~low, ~low));
}

ALWAYS_INLINE __m512i nibbles_lowered(__m512i v) {
    return _mm512_srlv_epi32(v, _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0, 4, 4)));
}

/* The four vectors of eight blocks `step` bytes apart, of 16 bytes each whose low nibbles are the first half. */
ALWAYS_INLINE __m256i two_blocks(const uint8_t *a, const uint8_t *b) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)a)),
                                   _mm_loadu_si128((const __m128i *)(const void *)b), 1);
}

ALWAYS_INLINE __m512i both_nibbles(__m256i v) {
    const __m512i all = _mm512_castsi256_si512(v);
    return nibbles(_mm512_shuffle_i64x2(all, all, 0x50));
}

ALWAYS_INLINE void spread_blocks(const uint8_t *from, const int64_t step, __m512i to[4]) {
    const __m256i a = two_blocks(from, from + 2 * step), b = two_blocks(from + step, from + 3 * step);
    const __m256i c = two_blocks(from + 4 * step, from + 6 * step), d = two_blocks(from + 5 * step, from + 7 * step);
    const __m256i even = _mm256_unpacklo_epi32(a, c), odd = _mm256_unpacklo_epi32(b, d);
    const __m256i even_end = _mm256_unpackhi_epi32(a, c), odd_end = _mm256_unpackhi_epi32(b, d);
    to[0] = both_nibbles(_mm256_blend_epi32(even, odd, 0xcc));
    to[1] = both_nibbles(_mm256_alignr_epi8(odd, even, 8));
    to[2] = both_nibbles(_mm256_blend_epi32(even_end, odd_end, 0xcc));
    to[3] = both_nibbles(_mm256_alignr_epi8(odd_end, even_end, 8));
}

ALWAYS_INLINE __m512i two_of_five_bits(const uint8_t *a, const uint8_t *b, const int64_t high, const int64_t codes) {
    uint32_t first, second;
    memcpy(&first, a + high, 4);
    memcpy(&second, b + high, 4);
    const __m512i low = nibbles(pair_of_blocks(a + codes, b + codes));
    return _mm512_mask_add_epi8(low, (__mmask64)first | (__mmask64)second << 32, low, _mm512_set1_epi8(16));
}

ALWAYS_INLINE __m512i two_of_eight_bits(const uint8_t *a, const uint8_t *b) {
    const __m256i low = _mm256_loadu_si256((const __m256i *)(const void *)a);
    const __m256i high = _mm256_loadu_si256((const __m256i *)(const void *)b);
    return _mm512_xor_si512(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1), _mm512_set1_epi8((char)0x80));
}

/* Two blocks of Q6_K whose low four bits are a nibble each of the same 32 bytes; the others are rotated by `turns`. */
ALWAYS_INLINE __m512i two_of_six_bits(const uint8_t *low, const uint8_t *high, __m512i turns) {
    return masked(joined(halves_shifted(twice(low), 0, 4), _mm512_rolv_epi32(twice(high), turns), 15), 63);
}

/* Units of two bits whose codes are four blocks of 32 in the same 32 bytes: bits 2 b and 2 b + 1 are of block b. Those of the
   other blocks are still there. */
ALWAYS_INLINE void spread_twos(const uint8_t *from, __m512i to[4]) {
    const __m512i a = twice(from), b = twice(from + 32);
    const __m512i right = _mm512_setr_epi32(0, 0, 2, 2, 0, 0, 2, 2, 4, 4, 6, 6, 4, 4, 6, 6);
    to[0] = _mm512_unpacklo_epi32(a, b);
    to[1] = _mm512_shuffle_epi32(to[0], 0x4e);
    to[2] = _mm512_unpackhi_epi32(a, b);
    to[3] = _mm512_shuffle_epi32(to[2], 0x4e);
    UNROLL for (int i = 0; i < 4; i++) to[i] = _mm512_srlv_epi32(to[i], right);
}

/* Of 32 bytes, for each of the four vectors those of the values of each lane, turned left by `turns`. */
ALWAYS_INLINE void spread_bits(const uint8_t *from, __m512i turns, __m512i to[4]) {
    const __m512i bits = twice(from);
    to[0] = _mm512_rolv_epi32(_mm512_shuffle_epi32(bits, 0x50), turns);
    to[1] = _mm512_rolv_epi32(_mm512_shuffle_epi32(bits, 0x05), turns);
    to[2] = _mm512_rolv_epi32(_mm512_shuffle_epi32(bits, 0xfa), turns);
    to[3] = _mm512_rolv_epi32(_mm512_shuffle_epi32(bits, 0xaf), turns);
}

/* The codes of two blocks of NVFP4, by lane: of first and second halves those of even groups, then those of odd ones. */
ALWAYS_INLINE __m512i two_of_nvfp4(const uint8_t *from) {
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(thirty_two(from)),
                                            thirty_two(from + block_bytes(PLLM_NVFP4)), 1);
    return _mm512_permutex_epi64(both, 0xd8);
}

/* Codes of a group of 32, and of the one after the next. */
ALWAYS_INLINE __m512i two_groups(const uint8_t *codes) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(thirty_two(codes)), thirty_two(codes + 64), 1);
}

/* The unsigned codes of the unit at b. */
ALWAYS_INLINE void unit_codes(const uint8_t *b, const int dtype, __m512i to[4]) {
    const int64_t size = block_bytes(dtype);
    switch (dtype) {
    case PLLM_Q2_K:
    case PLLM_TQ2_0:
        spread_twos(b + codes_at(dtype), to);
        UNROLL for (int i = 0; i < 4; i++) to[i] = masked(to[i], 3);
        return;
    case PLLM_Q3_K: {
        __m512i high[4];
        /* From the bit of a block's number to bit 2. */
        spread_bits(b, _mm512_setr_epi32(2, 30, 1, 29, 2, 30, 1, 29, 0, 28, 31, 27, 0, 28, 31, 27), high);
        spread_twos(b + codes_at(dtype), to);
        UNROLL for (int i = 0; i < 4; i++) to[i] = masked(joined(to[i], high[i], 3), 7);
        return;
    }
    case PLLM_NVFP4: {
        const __m512i first = two_of_nvfp4(b + codes_at(dtype)), second = two_of_nvfp4(b + codes_at(dtype) + 2 * size);
        const __m512i low = _mm512_unpacklo_epi32(first, second), high = _mm512_unpackhi_epi32(first, second);
        const __m512i even = _mm512_mask_mov_epi64(low, 0xaa, high), odd = _mm512_alignr_epi8(high, low, 8);
        to[0] = looked_up(masked(even, 15), dtype);
        to[1] = looked_up(masked(odd, 15), dtype);
        to[2] = looked_up(masked(_mm512_srli_epi16(even, 4), 15), dtype);
        to[3] = looked_up(masked(_mm512_srli_epi16(odd, 4), 15), dtype);
        return;
    }
    case PLLM_Q4_K:
        spread_nibbles(b + codes_at(dtype), to);
        UNROLL for (int i = 0; i < 4; i++)
            to[i] = LARGE_CODES ? _mm512_and_si512(to[i], nibble_bits()) : masked(nibbles_lowered(to[i]), 15);
        return;
    case PLLM_Q5_K: {
        /* From the bit of a block's number to bit 4. */
        const __m512i turns = _mm512_setr_epi32(4, 0, 3, 31, 4, 0, 3, 31, 2, 30, 1, 29, 2, 30, 1, 29);
        __m512i high[4];
        spread_bits(b + Q5_K_HIGH, turns, high);
        spread_nibbles(b + codes_at(dtype), to);
        UNROLL for (int i = 0; i < 4; i++) to[i] = masked(joined(nibbles_lowered(to[i]), high[i], 15), 31);
        return;
    }
    case PLLM_Q6_K: {
        const __m512i first = _mm512_inserti64x4(_mm512_set1_epi32(4), _mm256_setzero_si256(), 1);
        const __m512i second = _mm512_inserti64x4(_mm512_set1_epi32(2), _mm256_set1_epi32(30), 1);
        const uint8_t *high = b + Q6_K_HIGH;
        spread(two_of_six_bits(b, high, first), two_of_six_bits(b + 32, high, second),
               two_of_six_bits(b + 64, high + 32, first), two_of_six_bits(b + 96, high + 32, second), to);
        return;
    }
    case PLLM_Q8_0:
        b += codes_at(dtype);
        spread(two_of_eight_bits(b, b + 2 * size), two_of_eight_bits(b + size, b + 3 * size),
               two_of_eight_bits(b + 4 * size, b + 6 * size), two_of_eight_bits(b + 5 * size, b + 7 * size), to);
        return;
    default: {
        const int64_t at = codes_at(dtype);
        if (has_few_bits(dtype)) {
            uint8_t room[UNIT];
            codes_table[dtype](b, room);
            spread(two_groups(room), two_groups(room + 32), two_groups(room + 128), two_groups(room + 160), to);
            return;
        }
        if (has_fifth_bits(dtype)) {
            spread(two_of_five_bits(b, b + 2 * size, at - 4, at),
                   two_of_five_bits(b + size, b + 3 * size, at - 4, at),
                   two_of_five_bits(b + 4 * size, b + 6 * size, at - 4, at),
                   two_of_five_bits(b + 5 * size, b + 7 * size, at - 4, at), to);
            return;
        }
        spread_blocks(b + at, codes_apart(dtype), to);
        if (table_of(dtype) != NO_TABLE) UNROLL for (int i = 0; i < 4; i++) to[i] = looked_up(to[i], dtype);
    }
    }
}

/* ---- Scales ---------------------------------------------------------------------------------------------------- */

/* For `headers`: where the words are in the 64 of two_pairs, twice. */
ALWAYS_INLINE __m256i header_order(const int size, const int at, const int last) {
    int16_t of[8];
    UNROLL for (int i = 0; i < 8; i++) of[i] = (int16_t)(i / 2 * 16 + (i % 2 * size + at) / 2);
    if (last)
        return _mm256_setr_epi16(of[0], of[1], of[2], of[3], of[4], of[5], of[6], of[7],
                                 of[0], of[1], of[2], of[3], of[4], of[5], of[6], of[7]);
    return _mm256_setr_epi16(of[0], of[4], of[1], of[5], of[0], of[4], of[1], of[5],
                             of[2], of[6], of[3], of[7], of[2], of[6], of[3], of[7]);
}

/* The 16 bits `at` bytes after the beginning of each of eight blocks of up to 30 bytes, by lane, or, `last`, those of
   the blocks 0 to 7 in the last eight lanes. Nothing is read beyond the blocks. */
ALWAYS_INLINE __m256i headers(const uint8_t *b, const int size, const int at, const int last) {
    const __m512i order = _mm512_castsi256_si512(header_order(size, at, last));
    return _mm512_castsi512_si256(_mm512_permutex2var_epi16(two_pairs(b, b + 2 * size), order,
                                                            two_pairs(b + 4 * size, b + 6 * size)));
}

/* The same for the scales of Q8_0, whose blocks are larger. */
ALWAYS_INLINE __m256i wide_headers(const uint8_t *b) {
    const int size = 34;
    const __m512i order = _mm512_castsi256_si512(
        _mm256_setr_epi16(0, 0, 17, 17, 0, 0, 17, 17, 32, 32, 49, 49, 32, 32, 49, 49));
    const __m512i first = _mm512_permutex2var_epi16(loaded(b), order, loaded(b + 2 * size));
    const __m512i second = _mm512_permutex2var_epi16(loaded(b + 4 * size), order, loaded(b + 6 * size));
    return _mm256_mask_mov_epi16(_mm512_castsi512_si256(first), 0xaaaa, _mm512_castsi512_si256(second));
}

/* Two to the power of (exponent - 127), which is twice the scale of MXFP4; 0 and infinity at the ends. */
ALWAYS_INLINE __m512 powers(const uint8_t *b) {
    const int size = 17;
    /* Word 2 lane + 1: the exponent and the byte after it, or, of an odd block, before it. */
    const __m512i order = _mm512_slli_epi32(_mm512_cvtepu16_epi32(header_order(size, 0, 0)), 16);
    const __m512i words = _mm512_permutex2var_epi16(two_pairs(b, b + 2 * size), order,
                                                    two_pairs(b + 4 * size, b + 6 * size));
    const __m512i turns = _mm512_broadcast_i32x4(_mm_setr_epi32(7, 7, 31, 31));
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_rolv_epi32(words, turns), _mm512_set1_epi32(0x7f800000)));
}

ALWAYS_INLINE __m512 half_in_all(const uint8_t *from) {
    return _mm512_cvtph_ps(_mm256_set1_epi16((short)half_at(from)));
}

/* Sixteen bytes in the order of the halves of groups as one of each lane. */
ALWAYS_INLINE __m128i by_lane(__m128i bytes) {
    return _mm_shuffle_epi8(bytes, _mm_setr_epi8(0, 8, 2, 10, 1, 9, 3, 11, 4, 12, 6, 14, 5, 13, 7, 15));
}

ALWAYS_INLINE __m512 sixteen_times(__m128i bytes, const float by) {
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(by_lane(bytes))), _mm512_set1_ps(by));
}

/* For halves of groups eight bytes whose low nibbles are of the first ones, as numbers that are one more than twice as
   large, times the factor of a unit with a grid. */
ALWAYS_INLINE __m512 sixteen_odd(const uint8_t *from, const uint8_t *b) {
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)from), nibble = _mm_set1_epi8(15);
    const __m128i apart = _mm_unpacklo_epi8(_mm_and_si128(bytes, nibble), _mm_and_si128(_mm_srli_epi16(bytes, 4), nibble));
    return sixteen_times(_mm_or_si128(_mm_add_epi8(apart, apart), _mm_set1_epi8(1)), widened(b) * 0.125F);
}

/* As scales_of, for formats that are halved. */
ALWAYS_INLINE __m512 halved_scales(const uint8_t *b, const int dtype) {
    switch (dtype) {
    case PLLM_Q2_K: return sixteen_times(_mm_and_si128(sixteen_bytes(b), _mm_set1_epi8(15)), widened(b + Q2_K_SCALE));
    case PLLM_Q3_K: return sixteen_times(sixteen_of_q3_k(b + Q3_K_SCALES), widened(b + Q3_K_SCALE));
    case PLLM_Q6_K: return sixteen_times(sixteen_bytes(b + Q6_K_SCALES), widened(b + Q6_K_SCALE));
    case PLLM_IQ2_XS: return sixteen_odd(b + IQ2_XS_SCALES, b);
    case PLLM_IQ2_S: return sixteen_odd(b + IQ2_S_SCALES, b);
    default: {
        __m256 own[2];
        scales_of(b, own, dtype);
        return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 1, 5, 8, 12, 9, 13, 2, 6, 3, 7, 10, 14, 11, 15),
                                     _mm512_insertf32x8(_mm512_castps256_ps512(own[0]), own[1], 1));
    }
    }
}

/* The scales of a unit by lane, and in the last eight lanes of `minimums` what is to be taken away from each block, if
   its format has that; of formats that are halved by lane a 128th of it, as `raised` is what it is multiplied with. For
   Q4_K and Q5_K see below. */
ALWAYS_INLINE __m512 unit_scales(const uint8_t *b, const int dtype, __m512 *minimums) {
    const int size = (int)block_bytes(dtype);
    if (is_halved(dtype)) {
        if (has_minimums(dtype)) { /* only Q2_K */
            const __m128i own = _mm_and_si128(_mm_srli_epi16(sixteen_bytes(b), 4), _mm_set1_epi8(15));
            *minimums = _mm512_mul_ps(sixteen_times(own, widened(b + Q2_K_MINIMUM)), _mm512_set1_ps(-1.0F / 128));
        }
        return halved_scales(b, dtype);
    }
    switch (dtype) {
    case PLLM_MXFP4: return powers(b);
    case PLLM_Q8_0: return _mm512_cvtph_ps(wide_headers(b));
    default:
        if (block_values(dtype) != 32)
            return _mm512_permutexvar_ps(lanes_of_blocks(), _mm512_castps256_ps512(eight_scales(b, dtype)));
        if (has_minimums(dtype))
            *minimums = _mm512_sub_ps(_mm512_setzero_ps(), _mm512_cvtph_ps(headers(b, size, 2, 1)));
        return _mm512_cvtph_ps(headers(b, size, 0, 0));
    }
}

/* Those of four blocks of Q4_K or Q5_K, a quarter of a vector each: the 6-bit numbers of k_scale as bytes, eight scales
   and eight minimums, and their factors. `large`: codes of odd blocks are sixteen times as large. */
ALWAYS_INLINE void four_k_scales(const uint8_t *const b[4], __m512 scales[4], __m512 minimums[4], const int large) {
    __m512i heads = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(const void *)b[0]));
    heads = _mm512_mask_broadcast_i32x4(heads, 0x00f0, _mm_loadu_si128((const __m128i *)(const void *)b[1]));
    heads = _mm512_mask_broadcast_i32x4(heads, 0x0f00, _mm_loadu_si128((const __m128i *)(const void *)b[2]));
    heads = _mm512_mask_broadcast_i32x4(heads, 0xf000, _mm_loadu_si128((const __m128i *)(const void *)b[3]));
    const __m512i words = _mm512_srlv_epi32(_mm512_shuffle_epi32(heads, (_MM_PERM_ENUM)(1 | 3 << 2 | 2 << 4 | 3 << 6)),
                                            _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0, 0, 4)));
    const __m512i kept = _mm512_and_si512(
        words, _mm512_broadcast_i32x4(_mm_setr_epi32(0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f)));
    const __m512i high = _mm512_maskz_shuffle_epi32(0xaaaa, heads, (_MM_PERM_ENUM)(1 << 2 | 2 << 6));
    const __m512i bytes = _mm512_ternarylogic_epi32(kept, _mm512_srli_epi32(high, 2), _mm512_set1_epi8(0x30), 0xf8);
    const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
    __m512 factors = _mm512_cvtph_ps(_mm512_castsi512_si256(_mm512_permutexvar_epi32(firsts, heads)));
    if (large) factors = _mm512_mask_mul_ps(factors, 0xff00, factors, _mm512_set1_ps(1.0F / 16));
    const __m512i places = _mm512_setr_epi32(0, 8, 0, 8, 0, 8, 0, 8, 1, 1, 1, 1, 1, 1, 1, 1);
#define K_SCALES(i)                                                                                                \
    minimums[i] = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(bytes, i))),     \
                                _mm512_permutexvar_ps(_mm512_add_epi32(places, _mm512_set1_epi32(2 * (i))), factors)); \
    scales[i] = _mm512_permutexvar_ps(lanes_of_blocks(), minimums[i]);
    K_SCALES(0)
    K_SCALES(1)
    K_SCALES(2)
    K_SCALES(3)
#undef K_SCALES
}

/* ---- Products ---------------------------------------------------------------------------------------------------- */

/* Fetches what lies `ahead` of the unit at w, if it is not 0; `past` the caches. */
ALWAYS_INLINE void fetch_ahead(const uint8_t *w, const int64_t ahead, const int past, const int dtype, const int M) {
    if (!ahead) return;
    for (int64_t line = 0; line < bytes_of_values(dtype, UNIT); line += 64) {
        const char *at = (const char *)w + ahead + line;
        if (M > 1)
            __builtin_prefetch(at, 0, 2);
        else if (past)
            __builtin_prefetch(at, 0, 0);
        else
            __builtin_prefetch(at, 0, 3);
    }
}

/* sums[M] += the codes of a unit times those at x. */
ALWAYS_INLINE void add_codes(const __m512i codes[4], const __m512 scales, const __m512 minimums,
                             const wide_input *const *x, int64_t unit, __m512 *sums, const int dtype, const int M) {
    UNROLL for (int m = 0; m < M; m++) {
        const wide_input *in = x[m] + unit;
        const __m512 by = _mm512_mul_ps(scales, _mm512_loadu_ps(in->scales));
        sums[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(DOT(codes, in, dtype)), by, sums[m]);
        if (!has_minimums(dtype)) continue;
        const __m512 own = is_halved(dtype) ? _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_loadu_si512(in->raised)),
                                                            _mm512_loadu_ps(in->scales))
                                            : _mm512_loadu_ps(in->sums);
        sums[m] = _mm512_fnmadd_ps(minimums, own, sums[m]);
    }
}

/* sums[M] += the unit at w times those at x. */
ALWAYS_INLINE void add_unit(const uint8_t *w, const int64_t ahead, const int past, const __m512 scales,
                            const __m512 minimums, const wide_input *const *x, int64_t unit, __m512 *sums,
                            const int dtype, const int M) {
    __m512i codes[4];
    fetch_ahead(w, ahead, past, dtype, M);
    unit_codes(w, dtype, codes);
    add_codes(codes, scales, minimums, x, unit, sums, dtype, M);
}

#if LOOKS_UP
/* The same of `units` units, two at a time. What is looked up for two is not there yet when it is wanted at once: it is
   looked up while the two before them are multiplied. */
ALWAYS_INLINE void add_pairs(const uint8_t *w, const int64_t first, const int64_t units, const int64_t ahead,
                             const wide_input *const *x, __m512 *sums, const int dtype, const int M) {
    const int64_t size = bytes_of_values(dtype, UNIT);
    const __m512 none = _mm512_setzero_ps(); /* no such format has minimums */
    __m512 minimums;
    unit_pair next = look_up_two(w, w + (first + 1 < units) * size, dtype);
    for (int64_t unit = first; unit < units; unit += 2, w += 2 * size) {
        const unit_pair pair = next;
        const int64_t left = units - unit;
        __m512i codes[4];
        if (left > 2) next = look_up_two(w + 2 * size, w + (2 + (left > 3)) * size, dtype);
        fetch_ahead(w, ahead, 0, dtype, M);
        fetch_ahead(w + size, ahead, 0, dtype, M);
        codes_of_pair(&pair, 0, dtype, codes);
        add_codes(codes, unit_scales(w, dtype, &minimums), none, x, unit, sums, dtype, M);
        if (left < 2) break;
        codes_of_pair(&pair, 1, dtype, codes);
        add_codes(codes, unit_scales(w + size, dtype, &minimums), none, x, unit + 1, sums, dtype, M);
    }
}
#else
#define add_pairs(...) (void)0
#endif

/* `units` whole units of ROWS_TOGETHER rows with those at x: a row's sum is what it is by itself. */
ALWAYS_INLINE void add_together(const uint8_t *w, const int64_t row_bytes, const int64_t units, const wide_input *x,
                                __m512 *all, const int dtype) {
    const int64_t size = bytes_of_values(dtype, UNIT);
    __m512 sums[ROWS_TOGETHER];
    UNROLL for (int r = 0; r < ROWS_TOGETHER; r++) sums[r] = _mm512_setzero_ps();
    if (dtype == PLLM_Q4_K || dtype == PLLM_Q5_K) {
        for (int64_t unit = 0; unit < units; unit += 4) {
            __m512 scales[ROWS_TOGETHER][4], minimums[ROWS_TOGETHER][4];
            const int64_t some = MIN(4, units - unit), end = some - 1;
            UNROLL for (int r = 0; r < ROWS_TOGETHER; r++) {
                const uint8_t *at = w + r * row_bytes + unit * size;
                const uint8_t *const four[4] = {at, at + MIN(1, end) * size, at + MIN(2, end) * size, at + end * size};
                four_k_scales(four, scales[r], minimums[r], LARGE_CODES && dtype == PLLM_Q4_K);
            }
            for (int64_t i = 0; i < some; i++)
                UNROLL for (int r = 0; r < ROWS_TOGETHER; r++)
                    add_unit(w + r * row_bytes + (unit + i) * size, NEXT_BYTES, 0, scales[r][i], minimums[r][i], &x,
                             unit + i, &sums[r], dtype, 1);
        }
    } else {
        for (int64_t unit = 0; unit < units; unit++)
            UNROLL for (int r = 0; r < ROWS_TOGETHER; r++) {
                const uint8_t *at = w + r * row_bytes + unit * size;
                __m512 minimums;
                const __m512 scales = unit_scales(at, dtype, &minimums);
                add_unit(at, NEXT_BYTES, 0, scales, minimums, &x, unit, &sums[r], dtype, 1);
            }
    }
    UNROLL for (int r = 0; r < ROWS_TOGETHER; r++) _mm512_storeu_ps((float *)&all[r], sums[r]);
}

/* Units first..last) of `rows` rows, from `w` on, added to sums[rows][M], which are new if `fresh`. `values`: those of a
   whole row, whose last unit may be a part of one. */
ALWAYS_INLINE void add_rows(const uint8_t *w, const int64_t row_bytes, const int64_t rows, const int64_t first,
                            const int64_t last, const int64_t values, const void *const *x, __m512 *all,
                            const int fresh, const int dtype, const int M) {
    const int k = dtype == PLLM_Q4_K || dtype == PLLM_Q5_K;
    const int64_t size = bytes_of_values(dtype, UNIT), whole = MIN(last, values / UNIT);
    /* Of several tokens the same columns of the next group. One token's weights are fetched far ahead where they fit
       beside the input. Where they don't, the processor fetches them faster by itself, but for formats for which it
       falls behind: where it meets lines out of order, because the scales of four blocks are read first, these are
       fetched in order a little before, and MXFP4 past the caches. */
    const int64_t cache = M == 1 ? pllm_first_level_bytes() : 0;
    const int roomy = cache >= ROOMY_BYTES && (last - first) * (int64_t)sizeof(wide_input) + 2 * ROOMY_AHEAD <= cache;
    const int past = dtype == PLLM_MXFP4 && !roomy;
    const int64_t ahead = M > 1 ? GROUP_ROWS * row_bytes : roomy ? ROOMY_AHEAD : past ? FAR_BYTES : k ? NEAR_BYTES : 0;
    const wide_input *in[MOST_TOKENS];
    UNROLL for (int m = 0; m < M; m++) in[m] = x[m];
    int64_t row = 0;
    /* An input that nearly fills the first-level cache is pushed out of it by one row of weights. */
    if (M == 1 && !roomy && last - first > LARGE_UNITS && values % UNIT == 0 && !LOOKS_UP)
        for (; row + ROWS_TOGETHER <= rows; row += ROWS_TOGETHER, w += ROWS_TOGETHER * row_bytes, all += ROWS_TOGETHER)
            add_together(w, row_bytes, last, in[0], all, dtype);
    for (; row < rows; row++, w += row_bytes, all += M) {
        const uint8_t *at = w;
        __m512 sums[MOST_TOKENS];
        UNROLL for (int m = 0; m < M; m++) sums[m] = fresh ? _mm512_setzero_ps() : _mm512_loadu_ps((float *)&all[m]);
        int64_t unit = first;
        if (k) {
            for (; unit < whole; unit += 4) {
                __m512 scales[4], minimums[4];
                const int64_t some = MIN(4, whole - unit), end = some - 1;
                const uint8_t *const four[4] = {at, at + MIN(1, end) * size, at + MIN(2, end) * size, at + end * size};
                four_k_scales(four, scales, minimums, LARGE_CODES && dtype == PLLM_Q4_K);
                for (int64_t i = 0; i < some; i++, at += size)
                    add_unit(at, ahead, past, scales[i], minimums[i], in, unit + i, sums, dtype, M);
            }
        } else if (LOOKS_UP) {
            add_pairs(at, first, whole, ahead, in, sums, dtype, M);
        } else {
            for (; unit < whole; unit++, at += size) {
                __m512 minimums;
                const __m512 scales = unit_scales(at, dtype, &minimums);
                add_unit(at, ahead, past, scales, minimums, in, unit, sums, dtype, M);
            }
            if (block_values(dtype) < UNIT && unit < last) { /* zeros follow, so that nothing is read past the row */
                uint8_t block[UNIT_BYTES_LIMIT] = {0};
                __m512 minimums;
                memcpy(block, at, (size_t)bytes_of_values(dtype, values % UNIT));
                const __m512 scales = unit_scales(block, dtype, &minimums);
                add_unit(block, 0, 0, scales, minimums, in, unit, sums, dtype, M);
            }
        }
        UNROLL for (int m = 0; m < M; m++) _mm512_storeu_ps((float *)&all[m], sums[m]);
    }
}

typedef void (*add_rows_function)(const uint8_t *w, int64_t row_bytes, int64_t rows, int64_t first, int64_t last,
                                  int64_t values, const void *const *x, __m512 *all, int fresh);

#define ADD_ROWS(NAME, M)                                                                                          \
    NOINLINE void NAME##_##M(const uint8_t *w, int64_t row_bytes, int64_t rows, int64_t first, int64_t last,       \
                             int64_t values, const void *const *x, __m512 *all, int fresh) {                       \
        add_rows(w, row_bytes, rows, first, last, values, x, all, fresh, PLLM_##NAME, M);                          \
    }
#define ALL(NAME, ...)                                                                                             \
    ADD_ROWS(NAME, 1) ADD_ROWS(NAME, 2) ADD_ROWS(NAME, 3) ADD_ROWS(NAME, 4)                                        \
    ADD_ROWS(NAME, 5) ADD_ROWS(NAME, 6) ADD_ROWS(NAME, 7) ADD_ROWS(NAME, 8)
#define NAMES(NAME, ...)                                                                                           \
    [PLLM_##NAME] = {NAME##_1, NAME##_2, NAME##_3, NAME##_4, NAME##_5, NAME##_6, NAME##_7, NAME##_8},

PACKED_FORMATS(ALL)

/* By dtype and tokens. */
static const add_rows_function add_rows_table[PLLM_DTYPES][MOST_TOKENS] = {PACKED_FORMATS(NAMES)};

/* The lanes of each of `count` vectors added up. */
static void add_lanes(const __m512 *sums, int64_t count, float *to) {
    for (int64_t i = 0; i < count; i += 4) {
        const __m512 *last = sums + count - 1, *of = sums + i;
        avx512f_sum4(*of, *MIN(of + 1, last), *MIN(of + 2, last), *MIN(of + 3, last), to + i);
    }
}

void SET(few)(const void *weights, int dtype, int64_t stride, int64_t rows, int64_t columns, const void *const *x,
              int64_t tokens, float *y, int64_t y_stride, int add) {
    if (!add_rows_table[dtype][0]) {
        FEW_OF_OTHERS(weights, dtype, stride, rows, columns, x, tokens, y, y_stride, add);
        return;
    }
    const int64_t row_bytes = bytes_of_values(dtype, stride), parts = divided_up(tokens, MOST_TOKENS);
    const int64_t units = divided_up(columns, UNIT), most = divided_up(tokens, parts);
    const int64_t spans = most == 1 ? 1 : divided_up(units * most * (int64_t)sizeof(wide_input), SPAN_BYTES);
    for (int64_t group = 0; group < rows; group += GROUP_ROWS) {
        const uint8_t *w = (const uint8_t *)weights + group * row_bytes;
        const int64_t count = MIN(GROUP_ROWS, rows - group);
        for (int64_t part = 0; part < parts; part++) {
            const int64_t m = tokens * part / parts, width = tokens * (part + 1) / parts - m;
            __m512 sums[GROUP_ROWS * MOST_TOKENS];
            float totals[GROUP_ROWS * MOST_TOKENS + 4];
            for (int64_t span = 0; span < spans; span++) {
                const int64_t first = units * span / spans, last = units * (span + 1) / spans;
                add_rows_table[dtype][width - 1](w + bytes_of_values(dtype, first * UNIT), row_bytes, count, first,
                                                 last, columns, x + m, sums, span == 0);
            }
            add_lanes(sums, count * width, totals);
            const float by = dtype == PLLM_MXFP4 ? 0.5F : 1.0F; /* see powers */
            for (int64_t i = 0; i < width; i++) {
                float *to = y + (m + i) * y_stride + group;
                for (int64_t r = 0; r < count; r++)
                    to[r] = add ? to[r] + by * totals[r * width + i] : by * totals[r * width + i];
            }
        }
    }
}
