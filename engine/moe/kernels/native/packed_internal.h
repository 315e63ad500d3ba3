/* Products with packed weights, and how a set is put together; not part of the library's interface. */
#ifndef PRIVATELLM_PACKED_INTERNAL_H
#define PRIVATELLM_PACKED_INTERNAL_H

#include "kernels_internal.h"
#include "packed_blocks.h"

/* A unit of an input row: value i is scales[i / FINEST] * codes[i]. The scale is one for each 32 values, so that an
   outlier costs its neighbours little (one per 256 loses two to three percent there). `sums`: of the values. */
typedef struct packed_input {
    int8_t codes[UNIT];
    float scales[UNIT_SCALES], sums[UNIT_SCALES];
} packed_input;

/* Values that share a scale. A part of a row that is converted by itself begins and ends at a multiple of it. */
#define INPUT_BLOCK 32

/* kernel_set.few for packed weights, by instruction set. */
#define PACKED_FEW(SET)                                                                                            \
    void pllm_packed_##SET##_few(const void *w, int dtype, int64_t stride, int64_t rows, int64_t columns,          \
                                 const void *const *x, int64_t tokens, float *y, int64_t y_stride, int add);
/* kernel_set.convert and .pad of sets that are faster at it than plain C. */
#define PACKED_ROWS(SET)                                                                                           \
    void pllm_packed_##SET##_convert(void *row, int64_t first, const float *from, float scale, int64_t count);     \
    void pllm_packed_##SET##_pad(void *row, int64_t columns);
/* kernel_set.many and .tile of sets that multiply panels of bytes. */
#define PACKED_MANY(SET)                                                                                           \
    void pllm_packed_##SET##_many(const void *w, int dtype, int64_t stride, int64_t rows, int64_t columns,         \
                                  const void *tiles, int64_t tokens, float *y, int64_t y_stride, int add,          \
                                  void *panel, const void *next);                                                  \
    void pllm_packed_##SET##_tile(void *tile, const float *const *rows, const float *scales, int64_t tokens,       \
                                  int64_t column, int64_t count);
PACKED_FEW(scalar)
#if defined(__x86_64__)
PACKED_FEW(avx2)
PACKED_MANY(avx2)
PACKED_ROWS(avx2)
PACKED_FEW(avx512f)
PACKED_ROWS(avx512f)
/* Rows opened as float32. */
void pllm_packed_avx512f_open_row(int dtype, const void *from, float *to, int64_t count);
PACKED_FEW(avx512_vnni)
PACKED_FEW(avx512_vbmi)
PACKED_ROWS(avx512_vnni)
PACKED_MANY(avx512_vnni)
#endif
#if defined(__aarch64__)
PACKED_FEW(neon)
PACKED_MANY(neon)
PACKED_MANY(neon_i8mm)
#endif
void pllm_packed_scalar_convert(void *row, int64_t first, const float *from, float scale, int64_t count);
void pllm_packed_scalar_pad(void *row, int64_t columns);

#define PACKED_ROW_ELEMENT 4
/* Tiles of bytes: six tokens have as many sums of whole numbers and of products as there are registers. */
#define BYTE_TILE_TOKENS 6
#define BYTE_TILE_ELEMENT 2

/* INPUT_BLOCK columns of a tile of bytes: four codes of one token after those of another, or eight with NEON's i8mm. */
typedef struct tile_block {
    int32_t codes[8][BYTE_TILE_TOKENS];
    float scales[BYTE_TILE_TOKENS], sums[BYTE_TILE_TOKENS];
    int32_t raised[3][BYTE_TILE_TOKENS]; /* of each half, and of both, -128 times the sum of the codes */
    float half_sums[2][BYTE_TILE_TOKENS];
    char unused[BYTE_TILE_TOKENS * 4];
} tile_block;

_Static_assert(sizeof(tile_block) == BYTE_TILE_TOKENS * INPUT_BLOCK * BYTE_TILE_ELEMENT, "tiles lie where they are looked for");

/* INPUT_BLOCK columns of a panel of bytes. Codes as packed_avx512_template.h raises them, or, with NEON, signed and in the
   order of packed_neon_many_template.h. Formats that are halved have a scale for each half, and a minimum. */
typedef struct panel_block {
    uint8_t codes[8][PANEL_ROWS * 4];
    float scales[2][PANEL_ROWS], minimums[2][PANEL_ROWS];
} panel_block;

_Static_assert(sizeof(packed_input) <= FEWEST_STRIDE * PACKED_ROW_ELEMENT, "a unit fits into the shortest row");
/* The kernels for packed weights of a set whose other kernels were defined above it. */
#define PACKED_FEW_SET(FEW, CONVERT)                                                                               \
    .row_element = PACKED_ROW_ELEMENT, .task_rows = INPUT_BLOCK, .few = pllm_packed_##FEW##_few,                   \
    .convert = pllm_packed_##CONVERT##_convert, .pad = pllm_packed_##CONVERT##_pad, .gate = SET(gate),             \
    .exp_sum = SET(exp_sum), .add_scaled = SET(add_scaled)
/* Panels of weights as the set's own activations are. */
#define PACKED_SET(FEW, CONVERT)                                                                                   \
    PACKED_FEW_SET(FEW, CONVERT), .element = 4 / PER_WORD, .tile_tokens = TILE_TOKENS,                             \
    .many = SET(many), .tile = SET(tile)
/* Panels of bytes. */
#define BYTE_PANELS(MANY)                                                                                          \
    .element = BYTE_TILE_ELEMENT, .tile_tokens = BYTE_TILE_TOKENS,                                                 \
    .many = pllm_packed_##MANY##_many, .tile = pllm_packed_##MANY##_tile
#define PACKED_AVX2_SET PACKED_FEW_SET(avx2, avx2), BYTE_PANELS(avx2)
#define PACKED_NEON_SET(MANY) PACKED_FEW_SET(neon, scalar), BYTE_PANELS(MANY)
#define PACKED_VNNI_SET PACKED_FEW_SET(avx512_vnni, avx512_vnni), BYTE_PANELS(avx512_vnni)
#define PACKED_VBMI_SET PACKED_FEW_SET(avx512_vbmi, avx512_vnni), BYTE_PANELS(avx512_vnni)
#define PLAIN_SET PLAIN_SET_OF(few)
#define FP8_SET PLAIN_SET_OF(few_fp8)
#define PLAIN_SET_OF(FEW)                                                                                          \
    .element = 4 / PER_WORD, .row_element = 4 / PER_WORD, .task_rows = 16, .tile_tokens = TILE_TOKENS,             \
    .few = SET(FEW), .many = SET(many), .convert = SET(convert), .pad = SET(pad),                                  \
    .tile = SET(tile), .gate = SET(gate), .exp_sum = SET(exp_sum), .add_scaled = SET(add_scaled)

#endif
