/* Shared by the C files of the library; not part of its interface. */
#ifndef PRIVATELLM_KERNELS_INTERNAL_H
#define PRIVATELLM_KERNELS_INTERNAL_H

#include "packed_blocks.h"
#include "privatellm_kernels.h"

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))
/* Loops over registers: each count is a constant of the compiler. */
#define UNROLL _Pragma("GCC unroll 16")
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

/* Up to here an expert's rows are "few": each weight row is streamed once past all of them, and each of them gets the bits
   that it gets alone. Above, panels of weights are packed and multiplied as an outer product. Beyond 16 rows the products
   take several times as long as the reading that is shared, so that a further row hardly saves anything. */
#define FEW_LIMIT 16
/* Rows of W in a packed panel, whatever the set; results do not depend on how rows are divided at multiples of it. */
#define PANEL_ROWS 32
/* Columns of W packed at a time. */
#define PANEL_COLUMNS 1024
/* Input rows are padded with zeros to a multiple of this, in elements. */
#define PADDING 32
/* Most tokens of a tile of any set. */
#define TILE_LIMIT 12
/* A packed panel, results of a tile, and rows of packed weights that were opened for the panel. */
#define PANEL_WORDS ((size_t)PANEL_ROWS * (PANEL_COLUMNS + PADDING))
#define PANEL_BYTES ((PANEL_WORDS + (size_t)TILE_LIMIT * PANEL_ROWS + (size_t)PANEL_ROWS * PANEL_COLUMNS) * 4 + 64)
/* Fewest elements from one input row to the next: a unit of grouped weights' input needs so many. */
#define FEWEST_STRIDE 160

/* Rows, and columns, of a block of PLLM_BLOCK_FP8. */
#define FP8_SIDE 128

static inline int64_t divided_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

/* Bytes of a scale that is a plain number. */
static inline int64_t scale_width(const pllm_matrix *matrix) { return matrix->scale_dtype == PLLM_F32 ? 4 : 2; }

/* What an instruction set brings. W is `rows` rows of `columns` elements of `dtype`, `stride` elements apart. */
typedef struct kernel_set {
    int element;     /* bytes of an activation in a tile: 2 (bfloat16) or 4 (float32) */
    int row_element; /* bytes that an input row has for each element of its stride */
    int task_rows;   /* rows of W that one task takes at least: its results are converted by themselves */
    int tile_tokens; /* tokens of a tile */
    /* y[m * y_stride + n] (+)= W[n] · x[m], for m < tokens <= FEW_LIMIT; x[m] padded with zeros. As many tokens as the
       registers hold pass a few rows of W, then the next ones pass the same rows, which are in a cache by then. */
    void (*few)(const void *w, int dtype, int64_t stride, int64_t rows, int64_t columns, const void *const *x,
                int64_t tokens, float *y, int64_t y_stride, int add);
    /* The same for any number of tokens, from tiles; `panel`: PANEL_BYTES of scratch. `next`: the first of the rows that
       this thread probably opens after these, as far apart, which may be fetched meanwhile. */
    void (*many)(const void *w, int dtype, int64_t stride, int64_t rows, int64_t columns, const void *tiles,
                 int64_t tokens, float *y, int64_t y_stride, int add, void *panel, const void *next);
    /* Values first..first + count) of an input row = from * scale; `first` a multiple of task_rows. */
    void (*convert)(void *row, int64_t first, const float *from, float scale, int64_t count);
    /* Zeros after the `columns` values of an input row, as far as `few` reads. */
    void (*pad)(void *row, int64_t columns);
    /* tile[column..column + count) = rows; `column` even; up to tile_tokens rows, scales NULL or one for each. */
    void (*tile)(void *tile, const float *const *rows, const float *scales, int64_t tokens, int64_t column,
                 int64_t count);
    void (*gate)(const pllm_activation *activation, float *gate, const float *up, int64_t count);
    float (*exp_sum)(float *values, float shift, int64_t count);
    /* to[i] += from[i] * scale */
    void (*add_scaled)(float *to, const float *from, float scale, int64_t count);
} kernel_set;

/* Each has others for packed, for grouped and for FP8 weights. */
extern const kernel_set pllm_set_scalar, pllm_set_scalar_packed, pllm_set_scalar_grouped, pllm_set_scalar_fp8;
#if defined(__x86_64__)
extern const kernel_set pllm_set_avx2, pllm_set_avx2_packed, pllm_set_avx2_grouped, pllm_set_avx2_fp8;
extern const kernel_set pllm_set_avx512f, pllm_set_avx512f_packed, pllm_set_avx512_vnni_packed, pllm_set_avx512_vbmi_packed;
extern const kernel_set pllm_set_avx512f_grouped, pllm_set_avx512_vnni_grouped, pllm_set_avx512_bf16_grouped;
extern const kernel_set pllm_set_avx512_bf16, pllm_set_avx512_bf16_packed, pllm_set_avx512_bf16_fp8;
extern const kernel_set pllm_set_avx512f_fp8;
#endif
#if defined(__aarch64__)
extern const kernel_set pllm_set_neon, pllm_set_neon_fp8;
extern const kernel_set pllm_set_neon_packed, pllm_set_neon_dot_packed, pllm_set_neon_i8mm_packed;
extern const kernel_set pllm_set_neon_grouped, pllm_set_neon_dot_grouped, pllm_set_neon_i8mm_grouped;
#endif

/* The kernels that `set` uses for weights of `dtype`; never NULL for an available set. */
const kernel_set *pllm_kernels(int set, int dtype);

int pllm_has(int set);
/* Bytes of a processor's first-level cache of data; 32 KB where the system does not know. */
int64_t pllm_first_level_bytes(void);
/* One row of `columns` values as an activation, padded with zeros. */
void pllm_fill_row(const kernel_set *kernels, void *to, const float *from, float scale, int64_t columns);
/* y[m * y_stride + n] += bias[(first + n) * stride] for n < count; bias may be NULL. */
void pllm_add_bias(float *y, int64_t y_stride, int64_t tokens, const void *bias, int dtype, int64_t stride,
                   int64_t first, int64_t count);

void pllm_pool_lock(pllm_pool *pool);
void pllm_pool_unlock(pllm_pool *pool);
void pllm_pool_run_locked(pllm_pool *pool, pllm_region region, void *argument);
/* Runs `region`, which `stop` may end early: it is asked between two tasks of the caller, every `interval` nanoseconds
   at most. From then on nobody gets a task. Returns whether it was ended. */
int pllm_pool_run_until(pllm_pool *pool, pllm_region region, void *argument, pllm_stop stop, int64_t interval);
/* Inside a region: whether it was ended. Asks, if the time for it has come. */
int pllm_pool_stopped(pllm_pool *pool);
/* As pllm_pool_next, of `total` tasks: a run of at most `longest` neighbours beginning at *first. Runs are long at first,
   so that what neighbours share is used, and short in the end, so that threads end together. Returns how many, 0 where
   none is left. Not mixed with pllm_pool_next between two barriers. Asks whether the region was ended. */
int64_t pllm_pool_take(pllm_pool *pool, int64_t total, int64_t longest, int64_t *first);
int pllm_pool_reserve_locked(pllm_pool *pool, size_t bytes_per_thread, size_t shared_bytes);

/* Where row `row` of `matrix` lies, or its codes. */
static inline const char *row_at(const pllm_matrix *matrix, int64_t row) {
    return (const char *)matrix->data + row * bytes_of_values(matrix->dtype, matrix->row_stride);
}

/* What is opened after the panel at `from`, columns k to k + depth of rows n and following: the next columns of these
   rows, the next rows, or what `after` says. */
static inline const char *panel_after(const char *from, int dtype, int64_t row_bytes, int64_t n, int64_t rows,
                                      int64_t k, int64_t depth, int64_t columns, const void *after) {
    if (k + depth < columns) return from + bytes_of_values(dtype, depth);
    return n + PANEL_ROWS < rows ? from + PANEL_ROWS * row_bytes - bytes_of_values(dtype, k) : after;
}

/* Rows of `matrix` from row `first` on, as kernel_set.few and .many take them; `part` is where they may lie. */
static inline const void *rows_from(const pllm_matrix *matrix, int64_t first, pllm_matrix *part) {
    const char *codes = row_at(matrix, first);
    if (!is_grouped(matrix->dtype)) return codes;
    if (matrix->dtype == PLLM_BLOCK_FP8) {
        const int64_t skipped = matrix->skipped_rows + first, blocks = divided_up(matrix->columns, FP8_SIDE);
        *part = *matrix;
        part->data = codes;
        if (matrix->group != FP8_SIDE) {
            part->scales = (const char *)matrix->scales + first * matrix->group * scale_width(matrix);
            return part;
        }
        part->scales = (const char *)matrix->scales + skipped / FP8_SIDE * blocks * scale_width(matrix);
        part->skipped_rows = (int32_t)(skipped % FP8_SIDE);
        return part;
    }
    const int nvfp4 = matrix->dtype == PLLM_GROUPED_NVFP4;
    const int width = nvfp4 || matrix->dtype == PLLM_OCP_MXFP4 ? 1 : matrix->scale_dtype == PLLM_F32 ? 4 : 2;
    const int64_t scales = first * (matrix->row_stride / matrix->group) * width;
    *part = *matrix;
    part->data = codes;
    part->scales = (const char *)matrix->scales + scales;
    if (!nvfp4) part->biases = matrix->biases ? (const char *)matrix->biases + scales : part->scales;
    return part;
}

/* The scales of a row of PLLM_BLOCK_FP8 weights. */
static inline const char *fp8_scales(const pllm_matrix *w, int64_t row) {
    const int64_t at = w->group == FP8_SIDE ? (w->skipped_rows + row) / FP8_SIDE * divided_up(w->columns, FP8_SIDE)
                                            : row * w->group;
    return (const char *)w->scales + at * scale_width(w);
}

/* That of a block of its columns. */
static inline float fp8_scale(const pllm_matrix *w, const char *scales, int64_t block) {
    const char *from = w->group == FP8_SIDE ? scales + block * scale_width(w) : scales;
    uint32_t word = 0;
    float value;
    if (w->scale_dtype == PLLM_F16) return half_to_float(from);
    memcpy(&word, from, (size_t)scale_width(w));
    if (w->scale_dtype == PLLM_BF16) word <<= 16;
    memcpy(&value, &word, 4);
    return value;
}

static inline int64_t padded(int64_t columns) { return (columns + PADDING - 1) / PADDING * PADDING; }
/* Elements from one input row to the next. The odd number keeps rows of 2^n bytes out of each other's cache sets. */
static inline int64_t row_stride(int64_t columns) { return MAX(padded(columns) + PADDING, FEWEST_STRIDE); }
static inline size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

#endif
