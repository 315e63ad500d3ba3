/* Products of many tokens with packed and grouped weights for NEON: bytes times bytes, added up as whole numbers within a
   block of 32 values and scaled once. The including file has included grouped_internal.h, vector_neon.h and
   packed_neon_blocks.h, and has defined

   STEP                         neighbouring codes of a row that are multiplied by one instruction, 4 or 8
   ROWS_OF_VECTOR               rows whose steps fill a vector of codes
   TOKENS_OF_VECTOR             tokens with which it is multiplied at once: a vector of sums has a lane for each pair
   VECTORS                      vectors of the rows of a slice
   exchange(v)                  v[i] = step i of each of the rows whose codes were the vectors
   add_step(whole, w, x, M)     whole[M / TOKENS_OF_VECTOR][VECTORS] += a slice's codes at w, times those of M tokens at x
   row_factors(from, to)        a figure for each row of a slice, in the lanes of its sums: to[VECTORS]
   token_factors(from)          a figure for each of TOKENS_OF_VECTOR tokens, in the lanes of their sums
   load_sums(sums, y, stride, M), store_sums(...)    the sums of a slice's rows and M tokens, y[m * stride + row]
   SET(name)                    the name of this set's copy of a function

   A panel is PANEL_ROWS rows of weights opened once for all tokens, in slices of SLICE_ROWS. In a block of it a slice's
   steps are one after another, and in each of them the rows; in a tile's the tokens. Codes are signed: what the file adds to
   them is taken away when they are opened, so tile_block.raised is not used. */

#define BLOCKS_OF_UNIT (UNIT / INPUT_BLOCK)
#define STEPS (INPUT_BLOCK / STEP)

_Static_assert(sizeof(panel_block) * (PANEL_COLUMNS / INPUT_BLOCK) <= PANEL_BYTES, "a panel of bytes fits where others do");
_Static_assert(PANEL_COLUMNS % UNIT == 0, "whole units are opened");

/* ---- Opening a panel -------------------------------------------------------------------------------------------- */

/* A unit of the slice that begins at `row` of the panel. */
ALWAYS_INLINE void open_codes(const uint8_t *const rows[SLICE_ROWS], panel_block *to, const int64_t row,
                              const int dtype) {
    const int8x16_t raised = vdupq_n_s8((int8_t)raised_in_file(dtype));
    for (int block = 0; block < BLOCKS_OF_UNIT; block += 4)
        UNROLL for (int g = 0; g < 8; g++) {
            int8_t *slice = (int8_t *)to[block + g / 2].codes + row * INPUT_BLOCK;
            UNROLL for (int v = 0; v < VECTORS; v++) {
                int8x16_t codes[ROWS_OF_VECTOR];
                UNROLL for (int r = 0; r < ROWS_OF_VECTOR; r++) {
                    codes[r] = codes_of(rows[ROWS_OF_VECTOR * v + r], 2 * block + g, dtype);
                    if (raised_in_file(dtype) != 0) codes[r] = vsubq_s8(codes[r], raised);
                }
                exchange(codes);
                UNROLL for (int i = 0; i < ROWS_OF_VECTOR; i++)
                    vst1q_s8(slice + (g % 2 * STEPS / 2 + i) * STEP * SLICE_ROWS + GROUP * v, codes[i]);
            }
        }
}

/* Figures of four rows, to their places in eight blocks. */
ALWAYS_INLINE void store_figures(const eight figures[4], float *to) {
    const int64_t apart = sizeof(panel_block) / sizeof(float);
    UNROLL for (int half = 0; half < 2; half++) {
        float32x4_t lanes[4];
        UNROLL for (int r = 0; r < 4; r++) lanes[r] = figures[r].of[half];
        neon_transpose(lanes);
        UNROLL for (int i = 0; i < 4; i++) vst1q_f32(to + (4 * half + i) * apart, lanes[i]);
    }
}

/* The even ones of sixteen figures, or the odd ones. */
ALWAYS_INLINE eight every_second(const sixteen both, const int odd) {
    eight found;
    UNROLL for (int i = 0; i < 2; i++) {
        const float32x4_t a = both.of[2 * i], b = both.of[2 * i + 1];
        found.of[i] = odd ? vuzp2q_f32(a, b) : vuzp1q_f32(a, b);
    }
    return found;
}

ALWAYS_INLINE void open_scales(const uint8_t *const rows[SLICE_ROWS], panel_block *to, const int64_t row,
                               const int dtype) {
    const int halves = is_halved(dtype) ? 2 : 1;
    UNROLL for (int first = 0; first < SLICE_ROWS; first += 4) {
        const uint8_t *const *four = rows + first;
        UNROLL for (int half = 0; half < halves; half++) {
            eight figures[4];
            UNROLL for (int r = 0; r < 4; r++)
                figures[r] = halves == 2 ? every_second(halved_scales(four[r], dtype), half) : eight_scales(four[r], dtype);
            store_figures(figures, to->scales[half] + row + first);
            if (!has_minimums(dtype)) continue;
            UNROLL for (int r = 0; r < 4; r++)
                figures[r] = halves == 2 ? every_second(halved_minimums(four[r]), half)
                                         : eight_minimums(four[r], dtype);
            store_figures(figures, to->minimums[half] + row + first);
        }
    }
}

/* Of grouped weights: those of row `own` of the matrix, which is `row` of the panel, for blocks from column `first` on. */
ALWAYS_INLINE void open_group_scales(const pllm_matrix *matrix, const int64_t own, panel_block *to, const int64_t row,
                                     const int64_t first, const int64_t blocks, const int dtype) {
    const group_reader reader = reader_of(matrix);
    const uint8_t *scales = (const uint8_t *)matrix->scales + own * reader.scale_bytes;
    const uint8_t *biases = biases_of(matrix);
    if (dtype == PLLM_GROUPED_NVFP4) {
        scales += first / FINEST;
        for (int64_t i = 0; i < 2 * blocks; i++)
            to[i / 2].scales[i % 2][row] = group_scale(scales + i, dtype, reader.kind, biases);
        return;
    }
    biases += own * reader.scale_bytes;
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t at = (first + block * INPUT_BLOCK) / matrix->group * reader.width;
        const float scale = group_number(scales + at, reader.kind);
        to[block].scales[0][row] = scale;
        if (dtype == PLLM_OCP_MXFP4) continue;
        const float bias = group_number(biases + at, reader.kind);
        to[block].minimums[0][row] = -(dtype == PLLM_AFFINE8 ? bias + 128 * scale : bias);
    }
}

/* Where a panel's weights are; `grouped` with its first row, or NULL. */
typedef struct panel_source {
    const uint8_t *codes;
    const pllm_matrix *grouped;
    int64_t row, rows, row_bytes; /* rows: that there are; the others get the last one's */
    int64_t column, columns;
    int64_t ahead; /* bytes from a row to its place in the next panel, which is fetched meanwhile */
} panel_source;

ALWAYS_INLINE void open_panel(panel_block *panel, const panel_source *from, const int dtype) {
    for (int64_t row = 0; row < PANEL_ROWS; row += SLICE_ROWS) {
        panel_block *to = panel;
        for (int64_t first = 0; first < from->columns; first += UNIT, to += BLOCKS_OF_UNIT) {
            const int64_t values = MIN(UNIT, from->columns - first);
            uint8_t ends[SLICE_ROWS][UNIT_BYTES_LIMIT];
            const uint8_t *rows[SLICE_ROWS];
            for (int r = 0; r < SLICE_ROWS; r++) {
                const int64_t own = MIN(row + r, from->rows - 1);
                rows[r] = from->codes + own * from->row_bytes + bytes_of_values(dtype, first);
                for (int64_t line = 0; line < bytes_of_values(dtype, UNIT); line += 64)
                    __builtin_prefetch(rows[r] + from->ahead + line, 0, 2);
                if (is_grouped(dtype))
                    open_group_scales(from->grouped, from->row + own, to, row + r, from->column + first,
                                      values / INPUT_BLOCK, dtype);
                if (values == UNIT) continue;
                memset(ends[r], 0, sizeof ends[r]); /* so that nothing is read past the row */
                rows[r] = memcpy(ends[r], rows[r], (size_t)bytes_of_values(dtype, values));
            }
            open_codes(rows, to, row, dtype);
            if (!is_grouped(dtype)) open_scales(rows, to, row, dtype);
        }
    }
}

#define OPEN_PANEL(NAME, ...)                                                                                      \
    NOINLINE void NAME##_panel(panel_block *to, const panel_source *from) { open_panel(to, from, PLLM_##NAME); }
#define PANEL_NAME(NAME, ...) [PLLM_##NAME] = NAME##_panel,

PLLM_BLOCK_FORMATS(OPEN_PANEL)
PLLM_GROUPED_FORMATS(OPEN_PANEL)
OPEN_PANEL(GROUPED_NVFP4)

typedef void (*open_function)(panel_block *to, const panel_source *from);

static const open_function open_table[PLLM_DTYPES] = {
    PLLM_BLOCK_FORMATS(PANEL_NAME) PLLM_GROUPED_FORMATS(PANEL_NAME) PANEL_NAME(GROUPED_NVFP4)
};

/* ---- Products --------------------------------------------------------------------------------------------------- */

/* Whether a format's blocks have one scale, a minimum besides, or these for each half. */
enum { PLAIN = 0, LOWERED = 1, HALVED = 2, HALVED_LOWERED = 3 };

ALWAYS_INLINE int kind_of(const int dtype) {
    if (is_halved(dtype)) return has_minimums(dtype) ? HALVED_LOWERED : HALVED;
    return has_minimums(dtype) || (is_grouped(dtype) && dtype != PLLM_OCP_MXFP4) ? LOWERED : PLAIN;
}

/* What a panel's products have in common. */
typedef struct panel_task {
    const panel_block *panel;
    int64_t blocks, y_stride, rows; /* rows: of the panel that there are */
    int more;                       /* whether y is added to */
} panel_task;

/* Nothing is loaded before here: compilers would load the codes of several steps, and there are registers for the sums and
   one step only. */
#define IN_ORDER() __asm__ volatile("" : : : "memory")

/* sums[M / TOKENS_OF_VECTOR][VECTORS] += a slice of the panel, which begins at `row`, times M tokens. */
ALWAYS_INLINE void multiply_blocks(const panel_task *task, const tile_block *tile, const int64_t row,
                                   float32x4_t sums[][VECTORS], const int kind, const int M) {
    const int groups = (M + TOKENS_OF_VECTOR - 1) / TOKENS_OF_VECTOR, halves = kind >= HALVED ? 2 : 1;
    const panel_block *panel = task->panel;
    for (int64_t block = 0; block < task->blocks; block++, panel++, tile++) {
        float32x4_t own[VECTORS];
        UNROLL for (int half = 0; half < halves; half++) {
            int32x4_t whole[BYTE_TILE_TOKENS / TOKENS_OF_VECTOR][VECTORS];
            UNROLL for (int m = 0; m < groups; m++) UNROLL for (int v = 0; v < VECTORS; v++) whole[m][v] = vdupq_n_s32(0);
            UNROLL for (int step = half * STEPS / halves; step < (half + 1) * STEPS / halves; step++) {
                IN_ORDER();
                add_step(whole, (const int8_t *)panel->codes + row * INPUT_BLOCK + step * STEP * SLICE_ROWS,
                         (const int8_t *)tile->codes + step * STEP * BYTE_TILE_TOKENS, M);
            }
            IN_ORDER();
            row_factors(panel->scales[half] + row, own);
            UNROLL for (int m = 0; m < groups; m++) {
                const float32x4_t by = token_factors(tile->scales + m * TOKENS_OF_VECTOR);
                UNROLL for (int v = 0; v < VECTORS; v++)
                    sums[m][v] = vfmaq_f32(sums[m][v], vcvtq_f32_s32(whole[m][v]), vmulq_f32(own[v], by));
            }
        }
        if (kind == PLAIN || kind == HALVED) continue;
        UNROLL for (int half = 0; half < halves; half++) {
            row_factors(panel->minimums[half] + row, own);
            UNROLL for (int m = 0; m < groups; m++) {
                const float *added = halves == 2 ? tile->half_sums[half] : tile->sums;
                const float32x4_t by = token_factors(added + m * TOKENS_OF_VECTOR);
                UNROLL for (int v = 0; v < VECTORS; v++) sums[m][v] = vfmsq_f32(sums[m][v], own[v], by);
            }
        }
    }
}

/* y[m][row..row + SLICE_ROWS) (+)= panel * tile for M tokens; KIND and M are constants of the compiler. */
ALWAYS_INLINE void multiply_slice(const panel_task *task, const tile_block *tile, const int64_t row, float *y,
                                  const int kind, const int M) {
    const int groups = (M + TOKENS_OF_VECTOR - 1) / TOKENS_OF_VECTOR;
    const int64_t there = MIN(SLICE_ROWS, task->rows - row);
    const size_t bytes = (size_t)there * sizeof(float);
    float ends[BYTE_TILE_TOKENS][SLICE_ROWS] = {{0}}; /* instead of y, where it has fewer rows */
    float *to = there < SLICE_ROWS ? ends[0] : y + row;
    const int64_t stride = there < SLICE_ROWS ? SLICE_ROWS : task->y_stride;
    float32x4_t sums[BYTE_TILE_TOKENS / TOKENS_OF_VECTOR][VECTORS];
    if (task->more) {
        if (there < SLICE_ROWS)
            for (int m = 0; m < M; m++) memcpy(ends[m], y + m * task->y_stride + row, bytes);
        load_sums(sums, to, stride, M);
    } else {
        UNROLL for (int m = 0; m < groups; m++) UNROLL for (int v = 0; v < VECTORS; v++) sums[m][v] = vdupq_n_f32(0);
    }
    multiply_blocks(task, tile, row, sums, kind, M);
    store_sums(sums, to, stride, M);
    if (there < SLICE_ROWS)
        for (int m = 0; m < M; m++) memcpy(y + m * task->y_stride + row, ends[m], bytes);
}

typedef void (*slice_function)(const panel_task *task, const tile_block *tile, int64_t row, float *y);

#define MULTIPLY(KIND, M)                                                                                          \
    NOINLINE void KIND##_##M(const panel_task *task, const tile_block *tile, int64_t row, float *y) {              \
        multiply_slice(task, tile, row, y, KIND, M);                                                               \
    }
#define MULTIPLY_ALL(KIND)                                                                                         \
    MULTIPLY(KIND, 1) MULTIPLY(KIND, 2) MULTIPLY(KIND, 3) MULTIPLY(KIND, 4) MULTIPLY(KIND, 5) MULTIPLY(KIND, 6)
MULTIPLY_ALL(PLAIN)
MULTIPLY_ALL(LOWERED)
MULTIPLY_ALL(HALVED)
MULTIPLY_ALL(HALVED_LOWERED)

#define MULTIPLY_NAMES(KIND) {KIND##_1, KIND##_2, KIND##_3, KIND##_4, KIND##_5, KIND##_6}
static const slice_function slice_table[4][BYTE_TILE_TOKENS] = {
    MULTIPLY_NAMES(PLAIN), MULTIPLY_NAMES(LOWERED), MULTIPLY_NAMES(HALVED), MULTIPLY_NAMES(HALVED_LOWERED),
};

void SET(many)(const void *weights, int dtype, int64_t stride, int64_t rows, int64_t columns, const void *tiles,
               int64_t tokens, float *y, int64_t y_stride, int add, void *scratch, const void *after) {
    const pllm_matrix *grouped = is_grouped(dtype) ? weights : NULL;
    const uint8_t *data = grouped ? grouped->data : weights;
    const int64_t row_bytes = bytes_of_values(dtype, stride), tile_blocks = padded(columns) / INPUT_BLOCK;
    for (int64_t n = 0; n < rows; n += PANEL_ROWS) {
        for (int64_t k = 0; k < columns; k += PANEL_COLUMNS) {
            const int64_t depth = MIN(PANEL_COLUMNS, columns - k);
            const uint8_t *codes = data + n * row_bytes + bytes_of_values(dtype, k);
            const char *next = panel_after((const char *)codes, dtype, row_bytes, n, rows, k, depth, columns, after);
            const panel_source from = {.codes = codes,
                                       .grouped = grouped,
                                       .row = n,
                                       .rows = MIN(PANEL_ROWS, rows - n),
                                       .row_bytes = row_bytes,
                                       .column = k,
                                       .columns = depth,
                                       .ahead = (intptr_t)next - (intptr_t)codes};
            open_table[dtype](scratch, &from);
            const panel_task task = {.panel = scratch, .blocks = depth / INPUT_BLOCK, .y_stride = y_stride,
                                     .rows = from.rows, .more = add || k > 0};
            for (int64_t m = 0; m < tokens; m += BYTE_TILE_TOKENS) {
                const tile_block *tile = (const tile_block *)tiles + m / BYTE_TILE_TOKENS * tile_blocks + k / INPUT_BLOCK;
                const slice_function multiply = slice_table[kind_of(dtype)][MIN(BYTE_TILE_TOKENS, tokens - m) - 1];
                for (int64_t row = 0; row < from.rows; row += SLICE_ROWS)
                    multiply(&task, tile, row, y + m * y_stride + n);
            }
        }
    }
}

/* ---- Tiles ------------------------------------------------------------------------------------------------------- */

/* INPUT_BLOCK values rounded to whole numbers, their common scale, as pllm_packed_scalar_convert does, and the sum of each
   half. */
ALWAYS_INLINE float rounded_block(const float *from, const float scale, int8_t codes[INPUT_BLOCK], int sums[2]) {
    float32x4_t values[8], most = vdupq_n_f32(0);
    uint32x4_t finite = vdupq_n_u32(UINT32_MAX);
    UNROLL for (int i = 0; i < 8; i++) {
        values[i] = vmulq_n_f32(vld1q_f32(from + 4 * i), scale);
        const float32x4_t size = vabsq_f32(values[i]);
        finite = vandq_u32(finite, vcleq_f32(size, vdupq_n_f32(FLT_MAX)));
        most = vmaxq_f32(most, size);
    }
    sums[0] = sums[1] = 0;
    if (vminvq_u32(finite) == 0) {
        memset(codes, 0, INPUT_BLOCK);
        return NAN;
    }
    const float size = vmaxvq_f32(most), by = size > 0 ? 127.0F / size : 0;
    UNROLL for (int half = 0; half < 2; half++) {
        int16x4_t whole[4];
        UNROLL for (int i = 0; i < 4; i++)
            whole[i] = vqmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(values[4 * half + i], by)));
        const int8x16_t bytes = vcombine_s8(vqmovn_s16(vcombine_s16(whole[0], whole[1])),
                                            vqmovn_s16(vcombine_s16(whole[2], whole[3])));
        vst1q_s8(codes + 16 * half, bytes);
        sums[half] = vaddlvq_s8(bytes);
    }
    return size / 127.0F;
}

/* A token that is not there, but whose lane is multiplied, gets what the last one does. */
void SET(tile)(void *tile, const float *const *rows, const float *scales, int64_t tokens, int64_t column,
               int64_t count) {
    for (int64_t m = 0; m < divided_up(tokens, TOKENS_OF_VECTOR) * TOKENS_OF_VECTOR; m++) {
        const int64_t token = MIN(m, tokens - 1);
        tile_block *to = (tile_block *)tile + column / INPUT_BLOCK;
        for (int64_t i = 0; i < count; i += INPUT_BLOCK, to++) {
            int8_t codes[INPUT_BLOCK];
            int sums[2];
            const float step = rounded_block(rows[token] + i, scales ? scales[token] : 1.0F, codes, sums);
            UNROLL for (int j = 0; j < STEPS; j++)
                memcpy((int8_t *)to->codes + (j * BYTE_TILE_TOKENS + m) * STEP, codes + j * STEP, STEP);
            to->scales[m] = step;
            to->sums[m] = step * (float)(sums[0] + sums[1]);
            UNROLL for (int half = 0; half < 2; half++) to->half_sums[half][m] = step * (float)sums[half];
        }
    }
}
