/* The C interface of the native kernels: plain C, no Python, no libtorch. All pointers are the caller's.

   Weights are matrices of rows [rows, columns] as they lie in a file (bfloat16, float16, float32 or packed, any
   alignment);
   activations and results are float32 rows. Functions that can fail return 0 or one of the PLLM_E... codes.

   Functions named ..._part run inside a region (pllm_pool_run): every thread of the pool calls them with its own
   number, and each does its share. They contain barriers only where their comment says so. */
#ifndef PRIVATELLM_KERNELS_H
#define PRIVATELLM_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "formats.h"

#if defined(__GNUC__)
#define PLLM_API __attribute__((visibility("default")))
#else
#define PLLM_API
#endif

/* Raised whenever a structure or a function of this file changes: the Python side refuses another number. */
#define PLLM_VERSION 39

enum { PLLM_OK = 0, PLLM_E_SET = -1, PLLM_E_MEMORY = -2, PLLM_E_ARGUMENT = -3, PLLM_E_STOPPED = -4 };

/* ---- Instruction sets ------------------------------------------------------------------------------------- */

enum { PLLM_SCALAR = 0, PLLM_AVX2 = 1, PLLM_AVX512F = 2, PLLM_AVX512_BF16 = 3, PLLM_NEON = 4, PLLM_SETS = 5 };

PLLM_API int pllm_version(void);
/* Bit s is set when instruction set s is compiled in, and the CPU and the operating system have it. */
PLLM_API uint32_t pllm_available(void);

/* ---- Threads ---------------------------------------------------------------------------------------------- */

typedef struct pllm_pool pllm_pool;
typedef void (*pllm_region)(int thread, int threads, void *argument);
/* Whether work that was begun is not wanted any more. Called by the thread that asked for the work. */
typedef int (*pllm_stop)(void);

/* `threads` counts the caller, which is thread 0 of every region. `cpus` names the CPU each of the other threads is
   pinned to, cpus[1..threads-1], or is NULL. Returns NULL if the threads cannot be had. */
PLLM_API pllm_pool *pllm_pool_create(int threads, const int32_t *cpus);
/* Waits for the threads to end. The pool must be idle. */
PLLM_API void pllm_pool_destroy(pllm_pool *pool);
PLLM_API int pllm_pool_threads(const pllm_pool *pool);
/* Runs `region` on every thread of the pool and returns when all have left it. Calls from several threads of a
   program queue. In a forked child, where the pool's threads do not exist, the region runs with threads = 1. */
PLLM_API void pllm_pool_run(pllm_pool *pool, pllm_region region, void *argument);
/* Inside a region: returns when every thread has arrived. Also sets pllm_pool_next back to 0. */
PLLM_API void pllm_pool_barrier(pllm_pool *pool);
/* Inside a region: 0, 1, 2, ... to whoever asks, counted from the last barrier (or the region's start). */
PLLM_API int64_t pllm_pool_next(pllm_pool *pool);
/* Outside a region: makes every thread's scratch at least `bytes_per_thread` and the shared one `shared_bytes`. */
PLLM_API int pllm_pool_reserve(pllm_pool *pool, size_t bytes_per_thread, size_t shared_bytes);
/* What was reserved, 64-byte aligned. pllm_linear_* and pllm_experts_part use both from their start. */
PLLM_API void *pllm_pool_scratch(pllm_pool *pool, int thread);
PLLM_API void *pllm_pool_shared(pllm_pool *pool);

/* ---- Matrices --------------------------------------------------------------------------------------------- */

/* Those of PLLM_BLOCK_FORMATS are packed: blocks of 32 or 256 values, as GGUF files hold them. PLLM_F16 is IEEE's
   half precision. From PLLM_AFFINE4 on they are grouped: codes of two to eight bits, and in arrays of their own the
   scales and biases of groups of 32, 64 or 128 values, as mlx saves them; PLLM_OCP_MXFP4 has groups of 32 with exponents
   of two (E8M0) for scales, and no biases. PLLM_BLOCK_FP8 has numbers of eight bits (E4M3 without infinities) for codes
   and scales for blocks of 128 rows and 128 columns (`group` 128), for rows (1) or one for all (0); its kernels take the input that plain weights do. */
#define NUMBERED(NAME, ...) PLLM_##NAME,
enum { PLLM_NO_DTYPE, PLLM_FORMATS(NUMBERED) PLLM_DTYPES };
#undef NUMBERED

/* The name of the format with the number `dtype`, and the values and bytes of its blocks, or of its smallest groups without
   their scales; 1 and the bytes of a number where there are neither. NULL if no format has that number. */
PLLM_API const char *pllm_format(int dtype, int64_t *values, int64_t *bytes);

typedef struct pllm_matrix {
    const void *data;
    int64_t rows, columns;
    int64_t row_stride; /* in elements; whole blocks where they are packed, whole groups where they are grouped, and
                           `columns` with PLLM_BLOCK_FP8 */
    int32_t dtype;
    int32_t group;               /* values of a group, of grouped weights only; so are the following three */
    const void *scales, *biases; /* [rows, columns / group], row_stride / group apart from row to row; of
                                    PLLM_BLOCK_FP8 [blocks of rows, blocks of columns], and no biases; of
                                    PLLM_GROUPED_NVFP4 bytes, and what half of each of the 256 stands for, float32 */
    int32_t scale_dtype;         /* of both: PLLM_BF16, PLLM_F16 or PLLM_F32 */
    int32_t skipped_rows;        /* of the first block of rows; PLLM_BLOCK_FP8 only, and 0 in a caller's matrices */
} pllm_matrix;

/* Packed weights or PLLM_F16 as float32, to the bit what ggml gives; `values` are whole blocks. */
PLLM_API void pllm_unpack_row(int dtype, const void *from, float *to, int64_t values);
/* A row of a matrix that is packed, grouped or PLLM_F16 as float32; of grouped weights the product and the sum are
   rounded each. */
PLLM_API void pllm_open_row(const pllm_matrix *matrix, int64_t row, float *to);

/* Input rows in the form the kernels of `set` read for weights of `dtype`: padded, rounded to bfloat16 for
   PLLM_AVX512_BF16 with PLLM_BF16 weights, to eight bits and a scale for 32 values with packed weights (all packed
   formats alike, and all grouped ones but PLLM_BLOCK_FP8, whose input is rounded as for PLLM_BF16 weights), and in tiles
   when `few` is 0: of rows that are read, or of more than 16. Where panels of bytes are multiplied, which are of packed and
   grouped weights with AVX2, AVX-512 VNNI and NEON, tiles hold the same eight bits, and elsewhere float32.
   What a row gives is the same to the bit whatever other rows are beside it, as long as `few` is the same, and whatever
   the number of threads; between few and many the order of the additions differs. */
typedef struct pllm_input {
    void *data;
    int64_t rows, columns;
    int64_t stride; /* of a row, in elements; few rows only */
    int32_t set, dtype, few, reserved;
} pllm_input;

/* Bytes pllm_input.data needs for so many rows: 64-byte aligned, whatever the set. */
PLLM_API size_t pllm_input_bytes(int64_t rows, int64_t columns);
/* Bytes of each thread's scratch that pllm_linear_rows and pllm_linear_part need. */
PLLM_API size_t pllm_linear_scratch(void);
/* Fills in everything but the numbers. `reads`: rows are those of tokens that are read, and are never few. */
PLLM_API void pllm_input_describe(pllm_input *input, int set, int dtype, void *data, int64_t rows, int64_t columns,
                                  int reads);
/* A thread's share of converting x [rows, columns] (x_stride in elements) into `input`. All of it with 0 of 1. */
PLLM_API void pllm_input_fill_part(const pllm_input *input, const float *x, int64_t x_stride, int thread, int threads);
/* y[rows, first..last) = input · W[first..last)ᵀ + bias; added to y if `add`. y points at row 0, column 0 of the whole
   result. `scratch`: pllm_linear_scratch() bytes of this thread, 64-byte aligned. `bias` has W's dtype (float32 if that is packed or grouped), or
   is NULL.
   `first` a multiple of 32 keeps every result independent of how the rows are divided. */
PLLM_API void pllm_linear_rows(const pllm_input *input, const pllm_matrix *weight, const void *bias, float *y,
                               int64_t y_stride, int add, int64_t first, int64_t last, void *scratch);
/* A thread's equal share of the rows of W. */
PLLM_API void pllm_linear_part(const pllm_input *input, const pllm_matrix *weight, const void *bias, float *y,
                               int64_t y_stride, int add, void *scratch, int thread, int threads);
/* y [rows, W.rows] = x [rows, W.columns] · Wᵀ + bias, on all threads. */
PLLM_API int pllm_linear(pllm_pool *pool, int set, const pllm_matrix *weight, const void *bias, const float *x,
                         int64_t x_stride, int64_t rows, float *y, int64_t y_stride);

/* ---- Activations ------------------------------------------------------------------------------------------ */

enum {
    PLLM_SILU = 0, PLLM_GELU = 1, PLLM_GELU_TANH = 2, PLLM_RELU = 3, PLLM_CLAMPED = 4, PLLM_CLAMPED_SILU = 5,
    PLLM_XIELU = 6
};

/* PLLM_CLAMPED: g = min(gate, limit); u = clamp(up, -limit, limit); (u + beta) * g * sigmoid(alpha * g). beta is 1 in
   gpt-oss; with alpha 1 and beta 0 it is SiLU with limits (DeepSeek V4).
   PLLM_CLAMPED_SILU (Step 3.5): min(gate * sigmoid(gate), limit) * clamp(up, -limit, limit).
   PLLM_XIELU (Huang and Schlag 2025), without `up`: from 0 on alpha * gate^2 + beta * gate, below
   limit * (exp(min(gate, epsilon)) - 1 - gate) + beta * gate. */
typedef struct pllm_activation {
    int32_t kind;
    float alpha, limit, beta, epsilon;
    int32_t reserved;
} pllm_activation;

/* gate[i] = activation(gate[i]) * up[i] (or one of the other forms), for count values. Any set of pllm_available(). */
PLLM_API void pllm_gate(int set, const pllm_activation *activation, float *gate, const float *up, int64_t count);
/* values[i] = exp(values[i] - shift); returns their sum. Relative error about 1e-7 above -87; 0 far below. */
PLLM_API float pllm_exp_sum(int set, float *values, float shift, int64_t count);

/* ---- Experts ---------------------------------------------------------------------------------------------- */

typedef struct pllm_expert {
    pllm_matrix gate, up, down; /* without a gate: `gate` is `up`, and is multiplied once */
    const void *gate_bias, *up_bias, *down_bias; /* or NULL */
} pllm_expert;

/* All experts of one layer. Their gates are all of one dtype, or all packed, or all grouped, each in a format of its own;
   so are their ups, and their downs. Biases are of one plain dtype. Built once per layer. */
typedef struct pllm_layer {
    const pllm_expert *experts; /* [count] */
    int64_t count, hidden, ffn;
    pllm_activation activation;
    int32_t set, gate_dtype, up_dtype, down_dtype; /* of an expert that is there */
    int32_t bias_dtype;
    int32_t bias_stride; /* elements from one value of the biases of gate and up to the next; 2 where they alternate */
} pllm_layer;

typedef struct pllm_routes {
    const float *hidden;    /* [tokens, layer.hidden], contiguous */
    const int32_t *indices; /* [tokens, k]; -1: not run here */
    const float *weights;   /* [tokens, k] */
    int64_t tokens, k;
    int64_t scale_input; /* not 0: the weight multiplies an expert's input and not its output */
    int64_t reads;       /* not 0: the tokens are read, and those of an expert are never few; see pllm_input */
    float *sum;          /* [tokens, hidden]: the weighted sum, added up in the order of k, or NULL */
    float *outputs;      /* [tokens * k, hidden]: each route's own, un-weighted result (0 for -1), or NULL */
    int64_t *counts;     /* [count]: routes of each expert, added to what is there, or NULL */
    const int32_t *extra; /* [extra_count]: experts to be run on the first token as well, the results thrown away;
                             those that have routes are run for these alone. Not without tokens */
    int64_t extra_count;
} pllm_routes;

/* Bytes of scratch and shared memory pllm_experts_part needs for up to `tokens` tokens and `extra_count` experts. */
PLLM_API void pllm_experts_bytes(const pllm_layer *layer, int64_t tokens, int64_t k, int64_t extra_count,
                                 size_t *per_thread, size_t *shared);
/* Inside a region; `scratch` and `shared` of the sizes above, 64-byte aligned. Holds one barrier, or two when there
   are many tokens, and uses pllm_pool_next: call it directly after a barrier. When it returns on one thread the others
   may still be writing their part of the result: a barrier must follow. Indices must be below layer.count. */
PLLM_API void pllm_experts_part(pllm_pool *pool, const pllm_layer *layer, const pllm_routes *routes, void *scratch,
                                void *shared, int thread, int threads);
/* The whole layer on all threads, in chunks of at most 1024 tokens. Arguments are those of pllm_routes.
   PLLM_E_ARGUMENT: an index is not below layer.count, or names an expert whose matrices are not there (data NULL). */
PLLM_API int pllm_experts(pllm_pool *pool, const pllm_layer *layer, const float *hidden, const int32_t *indices,
                          const float *weights, int64_t tokens, int64_t k, int64_t scale_input, int64_t reads,
                          float *sum, float *outputs, int64_t *counts, const int32_t *extra, int64_t extra_count);
/* sum[tokens, hidden] of un-weighted results `outputs` [tokens * k, hidden] and `weights` [tokens, k], to the bit what
   pllm_experts gives for `sum` with a layer of that set, whatever its dtypes. `set` must be available. */
PLLM_API void pllm_weighted_sum(pllm_pool *pool, int set, int dtype, const float *outputs, const float *weights,
                                int64_t tokens, int64_t k, int64_t hidden, float *sum);
/* counts[e] += how often e is among `indices` [routes]. Nothing is added and PLLM_E_ARGUMENT returned if one of them is
   not an expert below `count`. */
PLLM_API int pllm_count_routes(const int32_t *indices, int64_t routes, int64_t count, int64_t *counts);

/* ---- Measuring -------------------------------------------------------------------------------------------- */

/* Reads `bytes` of `data` once on all threads and returns the seconds: the streaming-read rate. */
PLLM_API double pllm_read_seconds(pllm_pool *pool, const void *data, size_t bytes);

/* ---- Mapped files that become unreadable -------------------------------------------------------------------- */

/* From now on a page of [start, start + bytes) that cannot be read is replaced with zeros and counted, instead of ending
   the process with SIGBUS. Returns the place of the range, or a PLLM_E_... code. The range must be taken out before it
   is unmapped. */
PLLM_API int pllm_guard_add(const void *start, size_t bytes);
/* Pages of the range at `place` that could not be read. */
PLLM_API int64_t pllm_guard_faults(int place);
PLLM_API void pllm_guard_remove(int place);

#endif
