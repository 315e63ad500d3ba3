/* Products with packed weights for AVX2: 32 codes of two to eight bits at a time, sums of products in whole numbers,
   eight lanes of four values each. */
#include <float.h>
#include <math.h>

#include "grouped_internal.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#include "packed_codes_x86.h"
#include "packed_scales_x86.h"
#include "vector_avx2.h"

#define GROUP 32 /* codes of a vector */
#define GROUPS (UNIT / GROUP)
#define MOST_ROWS 4
#define MOST_TOKENS 4
/* Bytes from the weights that are multiplied to those that are fetched. The processor's own prefetching ends with each
   page of 4 KB. */
#define AHEAD 2048

/* packed_input as this file reads it: eight figures of a kind side by side, one for each group. */
typedef struct unit_input {
    int8_t codes[UNIT];
    float scales[GROUPS], sums[GROUPS], half_sums[2][GROUPS]; /* the sums of the values, and of each half of them */
    int32_t code_sums[3][GROUPS];                             /* of the codes of each half, and of both */
    int16_t half_code_sums[2 * GROUPS];                       /* the same of the halves, in their order */
} unit_input;

_Static_assert(sizeof(unit_input) <= FEWEST_STRIDE * PACKED_ROW_ELEMENT, "a unit fits into the shortest row");

/* By how much the codes of a format, as they are multiplied, are above what they stand for. */
ALWAYS_INLINE int raised_by(const int dtype) { return above_of(dtype); }

/* Whether the codes of a format are signed. The others are small enough to be added up in pairs in 16 bits. */
ALWAYS_INLINE int is_signed(const int dtype) { return !has_minimums(dtype) && raised_by(dtype) == 0; }

/* The largest size of a code. */
ALWAYS_INLINE int largest(const int dtype) { return code_bits(dtype) == 8 ? 128 : (1 << code_bits(dtype)) - 1; }

ALWAYS_INLINE __m256i masked(__m256i v, int bits) { return _mm256_and_si256(v, _mm256_set1_epi8((char)bits)); }

ALWAYS_INLINE __m256i loaded(const uint8_t *from) { return thirty_two(from); }

/* Low nibbles of 16 bytes, then high nibbles. */
ALWAYS_INLINE __m256i nibbles(const uint8_t *from) {
    const __m128i bytes = _mm_loadu_si128((const __m128i *)(const void *)from);
    return masked(_mm256_set_m128i(_mm_srli_epi16(bytes, 4), bytes), 15);
}

ALWAYS_INLINE __m256i looked_up(__m256i codes, const int dtype) {
    static const int8_t iq4[16] = {IQ4_VALUES}, fp4[16] = {FP4_VALUES};
    __m128i table = _mm_loadu_si128((const __m128i *)(const void *)(table_of(dtype) == IQ4_TABLE ? iq4 : fp4));
    if (raised_by(dtype) > 0) table = _mm_add_epi8(table, _mm_set1_epi8((char)raised_by(dtype)));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), codes);
}

/* 16 added to the codes whose bit is set in the four bytes at `bits`. */
ALWAYS_INLINE __m256i with_fifth_bits(__m256i codes, const uint8_t *bits) {
    return _mm256_or_si256(codes, masked(bytes_of_bits(word_at(bits)), 16));
}

/* Codes 32 g .. 32 g + 31 of the unit at b, raised. */
ALWAYS_INLINE __m256i codes_of(const uint8_t *b, const grid_unit *unit, const int g, const int dtype) {
    const uint8_t *from = b + codes_at(dtype) + g * codes_apart(dtype);
    if (has_few_bits(dtype)) return few_bits(b, unit, g, dtype);
    switch (dtype) {
    case PLLM_Q4_K: {
        const __m256i both = loaded(b + codes_at(dtype) + g / 2 * 32);
        return masked(g % 2 ? _mm256_srli_epi16(both, 4) : both, 15);
    }
    case PLLM_Q5_K: {
        const __m256i both = loaded(b + codes_at(dtype) + g / 2 * 32), high = loaded(b + Q5_K_HIGH);
        const __m256i low = masked(g % 2 ? _mm256_srli_epi16(both, 4) : both, 15);
        return _mm256_or_si256(low, _mm256_slli_epi16(masked(_mm256_srli_epi16(high, g), 1), 4));
    }
    case PLLM_Q6_K: {
        const int quarter = g % 4;
        const __m256i both = loaded(b + g / 4 * 64 + quarter % 2 * 32), high = loaded(b + Q6_K_HIGH + g / 4 * 32);
        const __m256i low = masked(quarter / 2 ? _mm256_srli_epi16(both, 4) : both, 15);
        return _mm256_or_si256(low, _mm256_slli_epi16(masked(_mm256_srli_epi16(high, 2 * quarter), 3), 4));
    }
    case PLLM_Q8_0: return loaded(from);
    default: {
        const __m256i low = nibbles(from);
        if (table_of(dtype) != NO_TABLE) return looked_up(low, dtype);
        return has_fifth_bits(dtype) ? with_fifth_bits(low, from - 4) : low;
    }
    }
}

/* Sums of the products of four neighbours. 128 * 127 twice just fits into 16 bits. */
ALWAYS_INLINE __m256i dots(__m256i codes, __m256i in, const int dtype) {
    if (is_signed(dtype)) {
        in = _mm256_sign_epi8(in, codes);
        codes = _mm256_abs_epi8(codes);
    }
    return _mm256_madd_epi16(_mm256_maddubs_epi16(codes, in), _mm256_set1_epi16(1));
}

/* Neighbours of a and b added up, in each half of the vectors; of a first. `limit`: no sum is larger. */
ALWAYS_INLINE __m256i merged(__m256i a, __m256i b, const int limit) {
    if (limit <= INT16_MAX)
        return _mm256_madd_epi16(_mm256_packs_epi32(a, b), _mm256_set1_epi16(1));
    const __m256 first = _mm256_castsi256_ps(a), second = _mm256_castsi256_ps(b);
    return _mm256_add_epi32(_mm256_castps_si256(_mm256_shuffle_ps(first, second, 0x88)),
                            _mm256_castps_si256(_mm256_shuffle_ps(first, second, 0xdd)));
}

/* The sums of four groups' products: of their first halves, then of their second ones. `signs`: of the codes, if apart. */
ALWAYS_INLINE __m256i four_dots(const __m256i codes[4], const __m256i *signs, const int8_t *in, const int dtype) {
    __m256i sums[4];
    UNROLL for (int g = 0; g < 4; g++) {
        const __m256i own = loaded((const uint8_t *)in + GROUP * g);
        sums[g] = dots(codes[g], signs ? _mm256_sign_epi8(own, signs[g]) : own, dtype);
    }
    const int limit = 4 * 127 * (signs ? above_of(dtype) : largest(dtype)); /* raised codes are above zero */
    return merged(merged(sums[0], sums[1], limit), merged(sums[2], sums[3], limit), 2 * limit);
}

/* A unit of a format with a grid as it is multiplied, for inputs that come in several parts. */
typedef struct opened_unit {
    uint8_t codes[UNIT];
    float scales[2][GROUPS];
} opened_unit;

/* Whether a block of a format is a unit. */
ALWAYS_INLINE int is_unit(const int dtype) { return block_values(dtype) == UNIT; }

ALWAYS_INLINE int has_grid(const int dtype) { return table_of(dtype) == GRID; }

/* Whether the signs of codes with a grid are apart from their sizes. */
ALWAYS_INLINE int has_signs_apart(const int dtype) { return has_grid(dtype) && has_signed_points(dtype); }

/* Sums of products with raised codes less what they were raised by, times the sums of the other codes. `more`: the groups of
   IQ1_S whose codes are to be lower by two. */
ALWAYS_INLINE __m256i lowered(__m256i sums, const int32_t *code_sums, const __m256i *more, const int dtype) {
    const int shift = above_of(dtype) == 16 ? 4 : above_of(dtype) == 32 ? 5 : 6;
    const __m256i own = loaded((const uint8_t *)code_sums);
    if (more) sums = _mm256_sub_epi32(sums, _mm256_and_si256(_mm256_add_epi32(own, own), *more));
    return _mm256_sub_epi32(sums, _mm256_slli_epi32(own, shift));
}

/* dots[M]: the sums of products of the unit at w and the codes in[M] of as many tokens, in whole numbers: of the groups' first
   halves, then of their second ones. `points`: codes are those of the grid without what else the file says of them, except
   their signs where there is one token. */
ALWAYS_INLINE void unit_dots(const void *w, const grid_unit *grid, const int8_t *const *in, __m256i dots[MOST_TOKENS][2],
                             const int dtype, const int opened, const int points, const int M) {
    const opened_unit *unit = w;
    const int apart = points && M == 1 && has_signs_apart(dtype);
    __m256i low[MOST_TOKENS], high[MOST_TOKENS]; /* products of groups 0 to 3, and 4 to 7 */
    UNROLL for (int four = 0; four < 2; four++) {
        __m256i codes[4], signs[4];
        UNROLL for (int g = 0; g < 4; g++) {
            const int group = 4 * four + g;
            if (apart) signs[g] = signs_of(w, grid, group, dtype);
            codes[g] = opened   ? loaded(unit->codes + GROUP * group)
                       : points ? points_of(w, grid, group, dtype)
                                : codes_of(w, grid, group, dtype);
        }
        UNROLL for (int m = 0; m < M; m++)
            (four ? high : low)[m] = four_dots(codes, apart ? signs : NULL, in[m] + 4 * GROUP * four, dtype);
    }
    UNROLL for (int m = 0; m < M; m++) {
        dots[m][0] = _mm256_permute2x128_si256(low[m], high[m], 0x20);
        dots[m][1] = _mm256_permute2x128_si256(low[m], high[m], 0x31);
    }
}

/* sums[M] += the unit at w, an opened_unit or the file's and what grid_unit has of it, times those at x. Of one token the
   inputs get the signs of codes that have these apart; so that the results are the same, the sums are whole numbers until
   what codes were raised by is taken away. Groups that are not there are zeros. A unit adds to the float32 sums once or
   twice: with an addition for each group, one row of one token would wait for its own sums. */
ALWAYS_INLINE void add_one(const void *w, const grid_unit *grid, const unit_input *const *x, __m256 sums[MOST_TOKENS],
                           const int dtype, const int opened, const int M) {
    const opened_unit *unit = w;
    const int apart = M == 1 && !opened && has_signs_apart(dtype), is_below = dtype == PLLM_IQ1_S && !opened;
    const int8_t *in_codes[MOST_TOKENS];
    __m256i dots[MOST_TOKENS][2];
    UNROLL for (int m = 0; m < M; m++) in_codes[m] = x[m]->codes;
    unit_dots(w, grid, in_codes, dots, dtype, opened, apart || is_below, M);
    __m256 scales[2], minimums[2];
    if (opened)
        UNROLL for (int half = 0; half < 2; half++) scales[half] = _mm256_loadu_ps(unit->scales[half]);
    else
        scales_of(w, scales, dtype);
    if (has_minimums(dtype)) minimums_of(w, minimums, dtype);
    __m256i below; /* all bits of the groups that are */
    if (is_below) {
        const __m256i high = _mm256_cvtepi16_epi32(sixteen_bytes((const uint8_t *)w + IQ1_S_HIGH));
        below = _mm256_srai_epi32(high, 31);
    }
    UNROLL for (int m = 0; m < M; m++) {
        const unit_input *in = x[m];
        const __m256i first = dots[m][0], second = dots[m][1];
        const __m256 by = _mm256_loadu_ps(in->scales);
        if (has_grid(dtype)) {
            if (is_halved(dtype)) {
                const __m256i less[2] = {lowered(first, in->code_sums[0], NULL, dtype),
                                         lowered(second, in->code_sums[1], NULL, dtype)};
                const __m256 a = _mm256_cvtepi32_ps(apart ? first : less[0]);
                const __m256 b = _mm256_cvtepi32_ps(apart ? second : less[1]);
                const __m256 both = _mm256_fmadd_ps(b, scales[1], _mm256_mul_ps(a, scales[0]));
                sums[m] = _mm256_fmadd_ps(both, by, sums[m]);
            } else {
                __m256i both = _mm256_add_epi32(first, second);
                if (!apart) both = lowered(both, in->code_sums[2], is_below ? &below : NULL, dtype);
                sums[m] = _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(both), by), scales[0], sums[m]);
            }
            continue;
        }
        if (is_halved(dtype)) {
            const __m256i halves[2] = {first, second};
            UNROLL for (int half = 0; half < 2; half++) {
                const __m256 own = _mm256_loadu_ps(in->half_sums[half]);
                const __m256 raised = _mm256_mul_ps(_mm256_set1_ps(raised_by(dtype)), own);
                const __m256 products = _mm256_fmsub_ps(_mm256_cvtepi32_ps(halves[half]), by, raised);
                sums[m] = _mm256_fmadd_ps(products, scales[half], sums[m]);
                if (has_minimums(dtype)) sums[m] = _mm256_fnmadd_ps(minimums[half], own, sums[m]);
            }
            continue;
        }
        __m256 products = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_add_epi32(first, second)), by);
        if (raised_by(dtype) > 0)
            products = _mm256_fnmadd_ps(_mm256_set1_ps(raised_by(dtype)), _mm256_loadu_ps(in->sums), products);
        sums[m] = _mm256_fmadd_ps(products, scales[0], sums[m]);
        if (has_minimums(dtype)) sums[m] = _mm256_fnmadd_ps(minimums[0], _mm256_loadu_ps(in->sums), sums[m]);
    }
}

/* ---- Q2_K, whose scales are whole numbers, and the sums of products of halves fit into 16 bits -------------------- */

#define EXCHANGED(a, b, bits) _mm256_add_epi16(_mm256_unpacklo_epi##bits(a, b), _mm256_unpackhi_epi##bits(a, b))

/* Halves of vectors added up to two words each: those of the four first, twice. */
ALWAYS_INLINE __m256i four_added_up(const __m256i of[4]) {
    return EXCHANGED(EXCHANGED(of[0], of[1], 16), EXCHANGED(of[2], of[3], 16), 32);
}

/* The sums of eight such halves' words, in the order of the halves. */
ALWAYS_INLINE __m256i half_sums_of(__m256i first, __m256i second) {
    const __m256i apart = _mm256_permute4x64_epi64(EXCHANGED(first, second, 64), 0xd8); /* first halves, second halves */
    const __m128i order = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    return _mm256_shuffle_epi8(apart, _mm256_broadcastsi128_si256(order));
}

#undef EXCHANGED

/* As unit_dots: the sums of halves side by side in two words, four times them of odd groups, whose codes are not shifted. */
ALWAYS_INLINE void q2_k_words(const uint8_t *w, const int8_t *const *in, __m256i words[MOST_TOKENS], const int M) {
    __m256i parts[MOST_TOKENS][2];
    UNROLL for (int four = 0; four < 2; four++) {
        __m256i codes[4];
        const __m256i low = loaded(w + codes_at(PLLM_Q2_K) + 32 * four), high = _mm256_srli_epi16(low, 4);
        UNROLL for (int g = 0; g < 4; g++) codes[g] = masked(g < 2 ? low : high, g % 2 ? 12 : 3);
        UNROLL for (int m = 0; m < M; m++) {
            __m256i products[4];
            UNROLL for (int g = 0; g < 4; g++)
                products[g] = _mm256_maddubs_epi16(codes[g], loaded((const uint8_t *)in[m] + GROUP * (4 * four + g)));
            parts[m][four] = four_added_up(products);
        }
    }
    UNROLL for (int m = 0; m < M; m++) words[m] = half_sums_of(parts[m][0], parts[m][1]);
}

/* unit_dots of Q2_K. */
ALWAYS_INLINE void q2_k_dots(const uint8_t *w, const int8_t *const *in, __m256i dots[MOST_TOKENS][2], const int M) {
    const __m256i shifts = _mm256_setr_epi32(16, 18, 16, 18, 16, 18, 16, 18);
    __m256i words[MOST_TOKENS];
    q2_k_words(w, in, words, M);
    UNROLL for (int m = 0; m < M; m++) {
        dots[m][0] = _mm256_srav_epi32(_mm256_slli_epi32(words[m], 16), shifts);
        dots[m][1] = _mm256_srav_epi32(words[m], shifts);
    }
}

/* sums[M] += the unit at w times those at x. */
ALWAYS_INLINE void add_q2_k(const uint8_t *w, const unit_input *const *x, __m256 sums[MOST_TOKENS], const int M) {
    const __m128i bytes = sixteen_bytes(w), nibble = _mm_set1_epi8(15);
    /* The sums of odd groups are four times theirs; so the others' scales are, too. */
    const __m256i times = _mm256_set1_epi64x(4 | 4LL << 16 | 1LL << 32 | 1LL << 48);
    const __m256i scales = _mm256_mullo_epi16(_mm256_cvtepu8_epi16(_mm_and_si128(bytes, nibble)), times);
    const __m256i own_minimums = _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16(bytes, 4), nibble));
    const __m256 scale = _mm256_set1_ps(widened(w + Q2_K_SCALE) * 0.25F);
    const __m256 minimum = _mm256_set1_ps(widened(w + Q2_K_MINIMUM));
    const int8_t *in[MOST_TOKENS];
    __m256i words[MOST_TOKENS];
    UNROLL for (int m = 0; m < M; m++) in[m] = x[m]->codes;
    q2_k_words(w, in, words, M);
    UNROLL for (int m = 0; m < M; m++) {
        const __m256i whole = _mm256_madd_epi16(words[m], scales);
        const __m256i less = _mm256_madd_epi16(own_minimums, loaded((const uint8_t *)x[m]->half_code_sums));
        const __m256 products = _mm256_mul_ps(_mm256_cvtepi32_ps(whole), scale);
        const __m256 lowered = _mm256_fnmadd_ps(_mm256_cvtepi32_ps(less), minimum, products);
        sums[m] = _mm256_fmadd_ps(lowered, _mm256_loadu_ps(x[m]->scales), sums[m]);
    }
}

/* ---- Units of all formats ---------------------------------------------------------------------------------------- */

/* Fetches the weights that are multiplied a while after the unit at w. */
ALWAYS_INLINE void fetch_ahead(const uint8_t *w, const int dtype) {
    UNROLL for (int64_t line = 0; line < bytes_of_values(dtype, UNIT); line += 64)
        __builtin_prefetch(w + AHEAD + line, 0, 3);
}

/* sums[R][M] += the units at w, one of each row, times those at x. */
ALWAYS_INLINE void add_unit(const uint8_t *const *w, const unit_input *const *x, const int groups,
                            __m256 sums[MOST_ROWS][MOST_TOKENS], const int dtype, const int R, const int M) {
    (void)groups; /* zeros are multiplied faster than the compiler's branches are taken */
    UNROLL for (int r = 0; r < R; r++) {
        fetch_ahead(w[r], dtype);
        add_one(w[r], NULL, x, sums[r], dtype, 0, M);
    }
}

typedef __m256 lanes;

ALWAYS_INLINE lanes no_lanes(void) { return _mm256_setzero_ps(); }

ALWAYS_INLINE float added_up(__m256 v) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/* ---- Rows of formats whose blocks are units ---------------------------------------------------------------------- */

ALWAYS_INLINE void write_sums(const __m256 sums[MOST_TOKENS], float *y, const int64_t y_stride, const int add,
                              const int M) {
    UNROLL for (int m = 0; m < M; m++) {
        const float sum = added_up(sums[m]);
        y[m * y_stride] = add ? y[m * y_stride] + sum : sum;
    }
}

#define OPENED_UNITS 64 /* of a row at most: 20 KB */

ALWAYS_INLINE void open_row(const uint8_t *w, const int64_t units, opened_unit *to, const int dtype) {
    for (const opened_unit *end = to + units; to < end; to++, w += block_bytes(dtype)) {
        fetch_ahead(w, dtype);
        grid_unit grid;
        open_grid_unit(w, &grid, dtype);
        for (int g = 0; g < GROUPS; g++)
            _mm256_storeu_si256((__m256i *)(void *)(to->codes + GROUP * g), codes_of(w, &grid, g, dtype));
        __m256 scales[2];
        scales_of(w, scales, dtype);
        _mm256_storeu_ps(to->scales[0], scales[0]);
        if (is_halved(dtype)) _mm256_storeu_ps(to->scales[1], scales[1]);
    }
}

ALWAYS_INLINE void opened_products(const opened_unit *w, const int64_t units, const void *const *x, float *y,
                                   const int64_t y_stride, const int add, const int dtype, const int M) {
    __m256 sums[MOST_TOKENS];
    const unit_input *in[MOST_TOKENS];
    UNROLL for (int m = 0; m < M; m++) {
        sums[m] = _mm256_setzero_ps();
        in[m] = x[m];
    }
    for (int64_t unit = 0; unit < units; unit++) {
        add_one(w + unit, NULL, in, sums, dtype, 1, M);
        UNROLL for (int m = 0; m < M; m++) in[m]++;
    }
    write_sums(sums, y, y_stride, add, M);
}

typedef struct opened_format {
    void (*open)(const uint8_t *w, int64_t units, opened_unit *to);
    void (*products[MOST_TOKENS])(const opened_unit *w, int64_t units, const void *const *x, float *y, int64_t y_stride,
                                  int add);
} opened_format;

/* Units of which grid_unit is put together before they are multiplied. It would not be there yet if it were wanted at once:
   the processor does not look further ahead than about a unit. */
#define UNITS_AHEAD 8

/* sums[M] += the row at w times those at x, of a format with a grid. */
ALWAYS_INLINE void add_grid_row(const uint8_t *w, const int64_t units, const unit_input **x, __m256 sums[MOST_TOKENS],
                                const int dtype, const int M) {
    grid_unit grids[UNITS_AHEAD];
    for (int64_t left = units; left > 0; left -= UNITS_AHEAD) {
        const int64_t count = MIN(left, UNITS_AHEAD);
        _Pragma("GCC unroll 1") for (int64_t unit = 0; unit < count; unit++)
            open_grid_unit(w + unit * block_bytes(dtype), grids + unit, dtype);
        for (int64_t unit = 0; unit < count; unit++, w += block_bytes(dtype)) {
            fetch_ahead(w, dtype);
            add_one(w, grids + unit, x, sums, dtype, 0, M);
            UNROLL for (int m = 0; m < M; m++) x[m]++;
        }
    }
}

/* The same of another one. */
ALWAYS_INLINE void add_row(const uint8_t *w, const int64_t units, const unit_input **x, __m256 sums[MOST_TOKENS],
                           const int dtype, const int M) {
    for (const uint8_t *end = w + units * block_bytes(dtype); w < end; w += block_bytes(dtype)) {
        fetch_ahead(w, dtype);
        if (dtype == PLLM_Q2_K)
            add_q2_k(w, x, sums, M);
        else
            add_one(w, NULL, x, sums, dtype, 0, M);
        UNROLL for (int m = 0; m < M; m++) x[m]++;
    }
}

/* y[m * y_stride + r] (+)= W[r] · x[m]. All rows are one call: what is the same for all stays in registers. */
ALWAYS_INLINE void unit_products(const uint8_t *w, const int64_t row_bytes, const int64_t rows, const int64_t units,
                                 const void *const *x, float *y, const int64_t y_stride, const int add, const int dtype,
                                 const int M) {
    for (int64_t row = 0; row < rows; row++) {
        __m256 sums[MOST_TOKENS];
        const unit_input *in[MOST_TOKENS];
        UNROLL for (int m = 0; m < M; m++) {
            sums[m] = _mm256_setzero_ps();
            in[m] = x[m];
        }
        if (has_grid(dtype))
            add_grid_row(w + row * row_bytes, units, in, sums, dtype, M);
        else
            add_row(w + row * row_bytes, units, in, sums, dtype, M);
        write_sums(sums, y + row, y_stride, add, M);
    }
}

typedef struct unit_format {
    void (*open)(const uint8_t *w, int64_t units, opened_unit *to);
    void (*opened[MOST_TOKENS])(const opened_unit *w, int64_t units, const void *const *x, float *y, int64_t y_stride,
                                int add);
    void (*products[MOST_TOKENS])(const uint8_t *w, int64_t row_bytes, int64_t rows, int64_t units,
                                  const void *const *x, float *y, int64_t y_stride, int add);
} unit_format;

#define UNIT_PRODUCTS(NAME, M)                                                                                     \
    NOINLINE void NAME##_opened_##M(const opened_unit *w, int64_t units, const void *const *x, float *y,           \
                                    int64_t y_stride, int add) {                                                   \
        if (has_grid(PLLM_##NAME)) opened_products(w, units, x, y, y_stride, add, PLLM_##NAME, M);                 \
    }                                                                                                              \
    NOINLINE void NAME##_units_##M(const uint8_t *w, int64_t row_bytes, int64_t rows, int64_t units,                \
                                  const void *const *x, float *y, int64_t y_stride, int add) {                     \
        if (is_unit(PLLM_##NAME))                                                                                  \
            unit_products(w, row_bytes, rows, units, x, y, y_stride, add, PLLM_##NAME, M);                         \
    }
#define UNIT_FUNCTIONS(NAME, ...)                                                                                  \
    NOINLINE void NAME##_open(const uint8_t *w, int64_t units, opened_unit *to) {                                  \
        if (has_grid(PLLM_##NAME)) open_row        (w, units, to, PLLM_##NAME);                                    \
    }                                                                                                              \
    UNIT_PRODUCTS(NAME, 1) UNIT_PRODUCTS(NAME, 2) UNIT_PRODUCTS(NAME, 3) UNIT_PRODUCTS(NAME, 4)
#define UNIT_NAMES(NAME, ...)                                                                                      \
    [PLLM_##NAME] = {NAME##_open,                                                                                  \
                     {NAME##_opened_1, NAME##_opened_2, NAME##_opened_3, NAME##_opened_4},                         \
                     {NAME##_units_1, NAME##_units_2, NAME##_units_3, NAME##_units_4}},

PLLM_BLOCK_FORMATS(UNIT_FUNCTIONS)

static const unit_format unit_table[PLLM_DTYPES] = {PLLM_BLOCK_FORMATS(UNIT_NAMES)};

/* As kernel_set.few. Points of a grid cost more than products with them: for more tokens than are taken together each row is
   opened once. */
static void unit_rows(const uint8_t *w, int dtype, int64_t row_bytes, int64_t rows, int64_t columns,
                      const void *const *x, int64_t tokens, float *y, int64_t y_stride, int add) {
    const int64_t units = columns / UNIT, parts = divided_up(tokens, MOST_TOKENS);
    const unit_format *format = unit_table + dtype;
    const int opens = has_grid(dtype) && parts > 1 && units <= OPENED_UNITS;
    const int64_t together = parts == 1 ? rows : opens ? 1 : MOST_ROWS; /* few, so that the cache has them for each part */
    for (int64_t row = 0; row < rows; row += together) {
        opened_unit opened[OPENED_UNITS];
        const uint8_t *from = w + row * row_bytes;
        if (opens) format->open(from, units, opened);
        for (int64_t part = 0; part < parts; part++) {
            const int64_t first = tokens * part / parts, width = tokens * (part + 1) / parts - first;
            float *to = y + first * y_stride + row;
            if (opens)
                format->opened[width - 1](opened, units, x + first, to, y_stride, add);
            else
                format->products[width - 1](from, row_bytes, MIN(together, rows - row), units, x + first, to, y_stride,
                                            add);
        }
    }
}

#undef SET
#define SET(name) pllm_packed_avx2_##name
#define IS_OWN is_unit
#define OWN unit_rows
#define ROWS_OF_1 1 /* from end to end: the processor fetches one stream best */
#define ROWS_OF_2 1
#define ROWS_OF_3 1
#define ROWS_OF_4 1
#include "packed_rows_template.h"

#include "packed_avx2_many.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
