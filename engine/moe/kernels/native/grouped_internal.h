/* Weights whose codes, scales and biases lie in arrays of their own, as safetensors files hold them: mlx's affine formats,
   and MXFP4 and NVFP4 as their authors publish them. Not part of the library's interface.

   Value i of a row is scale * code + bias of its group. Codes lie in the order of the values, the first in the lowest bits
   of a byte; those of three, five and six bits may begin in one byte and end in the next. The kernels are given a pllm_matrix whose pointers are at the first row that is wanted. */
#ifndef PRIVATELLM_GROUPED_INTERNAL_H
#define PRIVATELLM_GROUPED_INTERNAL_H

#include "packed_internal.h"

/* Values of the smallest group, and of the smallest part of a row that is converted by itself. */
#define GROUP_VALUES 32
#define UNIT_GROUPS (UNIT / GROUP_VALUES)
/* What the codes of MXFP4 are raised by to be unsigned; they stand for twice their values, and the scale is halved. */
#define FP4_RAISED 12

/* Bits of a code of grouped weights. */
static inline int group_bits(int dtype) { return (int)(8 * block_bytes(dtype) / block_values(dtype)); }

/* Whether two codes are neither a byte nor two. They lie in a word of 16 bits at a whole byte, whatever pair of eight it
   is: pair k begins in byte PAIR_BYTE of the sixteen codes, and moved up by PAIR_SHIFT bits it ends where the word does. */
static inline int has_pairs(int dtype) { return group_bits(dtype) % 4 != 0; }
#define PAIR_BYTE(k, bits) ((k) * (bits) / 4)
#define PAIR_SHIFT(k, bits) (16 - 2 * (bits) - (k) * (bits) % 4 * 2)

/* Where 16 bytes are loaded to have codes 16 g and following, g < 4, of 64 at `from`, and nothing beyond these; `skipped`:
   those before the first code's byte. */
static inline const uint8_t *sixteen_from(const uint8_t *from, int g, int bits, int *skipped) {
    const int first = 2 * bits * g, last = 8 * bits - 16;
    *skipped = first > last ? first - last : 0;
    return from + first - *skipped;
}

/* A unit of an input row: value i is scales[i / GROUP_VALUES] * codes[i]. `apart` holds the codes of even places, and
   from UNIT / 2 on those of odd ones, to be multiplied with the two halves of a byte. `sums`: of the values. */
typedef struct grouped_input {
    int8_t codes[UNIT], apart[UNIT];
    float scales[UNIT_GROUPS], sums[UNIT_GROUPS];
} grouped_input;

/* How the scales of a matrix are to be read. */
typedef struct group_reader {
    int64_t code_bytes, scale_bytes; /* from one row to the next */
    int32_t groups;                  /* of a unit: 16, 8, 4 or 2 */
    int32_t width;                   /* bytes of a scale */
    int32_t kind;                    /* PLLM_BF16, PLLM_F16, PLLM_F32, or 0 for bytes, which have no biases */
} group_reader;

static inline group_reader reader_of(const pllm_matrix *matrix) {
    const int bytes = matrix->dtype == PLLM_OCP_MXFP4 || matrix->dtype == PLLM_GROUPED_NVFP4;
    const int kind = bytes ? 0 : matrix->scale_dtype;
    const int width = kind == 0 ? 1 : kind == PLLM_F32 ? 4 : 2;
    return (group_reader){.code_bytes = bytes_of_values(matrix->dtype, matrix->row_stride),
                          .scale_bytes = matrix->row_stride / matrix->group * width,
                          .groups = UNIT / matrix->group,
                          .width = width,
                          .kind = kind};
}

/* The rows' first biases; anything where there are none. */
static inline const uint8_t *biases_of(const pllm_matrix *matrix) {
    return matrix->biases ? matrix->biases : matrix->scales;
}

/* One scale or bias. Of exponents half the power of two. */
static inline float group_number(const uint8_t *from, int kind) {
    float value;
    uint16_t half;
    switch (kind) {
    case 0: return e8m0_half(*from);
    case PLLM_F16: return half_to_float(from);
    case PLLM_F32: memcpy(&value, from, 4); return value;
    default: break;
    }
    memcpy(&half, from, 2);
    const uint32_t word = (uint32_t)half << 16;
    memcpy(&value, &word, 4);
    return value;
}

/* The scale at `from`, halved if it is a byte; `table`: what the bytes of NVFP4 stand for. */
static inline float group_scale(const uint8_t *from, int dtype, int kind, const uint8_t *table) {
    float value;
    if (dtype != PLLM_GROUPED_NVFP4) return group_number(from, kind);
    memcpy(&value, table + 4 * *from, 4);
    return value;
}

/* kernel_set.few, .convert and .pad, and rows opened for panels: `count` values of `row` from column `first` on, a
   multiple of UNIT; or a panel of bytes of them, for `rows` rows. */
#define GROUPED_FEW(SET)                                                                                           \
    void pllm_grouped_##SET##_few(const void *w, int dtype, int64_t stride, int64_t rows, int64_t columns,         \
                                  const void *const *x, int64_t tokens, float *y, int64_t y_stride, int add);
GROUPED_FEW(scalar)
void pllm_grouped_scalar_open(const pllm_matrix *matrix, int64_t row, int64_t first, int64_t count, float *to);
void pllm_grouped_scalar_convert(void *row, int64_t first, const float *from, float scale, int64_t count);
void pllm_grouped_scalar_pad(void *row, int64_t columns);
#if defined(__x86_64__)
GROUPED_FEW(avx2)
/* What lies `ahead` bytes further on is fetched meanwhile. */
void pllm_grouped_avx2_open_panel(struct panel_block *to, const pllm_matrix *matrix, int64_t row, int64_t rows,
                                  int64_t first, int64_t count, int64_t ahead);
GROUPED_FEW(avx512f)
GROUPED_FEW(avx512_vnni)
void pllm_grouped_avx512f_open(const pllm_matrix *matrix, int64_t row, int64_t first, int64_t count, float *to);
void pllm_grouped_avx512_vnni_open_panel(struct panel_block *to, const pllm_matrix *matrix, int64_t row, int64_t rows,
                                         int64_t first, int64_t count);
void pllm_grouped_avx512f_convert(void *row, int64_t first, const float *from, float scale, int64_t count);
void pllm_grouped_avx512f_pad(void *row, int64_t columns);
#endif

_Static_assert(sizeof(grouped_input) <= FEWEST_STRIDE * 4, "a unit fits into the shortest row");

/* The kernels for grouped weights of a set whose other kernels were defined above it. */
#define GROUPED_FEW_SET(FEW, CONVERT)                                                                              \
    .row_element = 4, .task_rows = GROUP_VALUES, .few = pllm_grouped_##FEW##_few,                                  \
    .convert = pllm_grouped_##CONVERT##_convert, .pad = pllm_grouped_##CONVERT##_pad, .gate = SET(gate),           \
    .exp_sum = SET(exp_sum), .add_scaled = SET(add_scaled)
#define GROUPED_SET(FEW, CONVERT)                                                                                  \
    GROUPED_FEW_SET(FEW, CONVERT), .element = 4 / PER_WORD, .tile_tokens = TILE_TOKENS,                            \
    .many = SET(many), .tile = SET(tile)
#define GROUPED_AVX2_SET GROUPED_FEW_SET(avx2, scalar), BYTE_PANELS(avx2)
#define GROUPED_NEON_SET(MANY) GROUPED_FEW_SET(scalar, scalar), BYTE_PANELS(MANY)
#define GROUPED_VNNI_SET GROUPED_FEW_SET(avx512_vnni, avx512f), BYTE_PANELS(avx512_vnni)

#endif
