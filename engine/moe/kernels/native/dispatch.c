/* Which instruction sets there are, and the calls that need no more than one matrix. */
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#undef MAX /* it brings its own */
#undef MIN
#endif

#include "kernels_internal.h"

int pllm_version(void) { return PLLM_VERSION; }

#define FORMAT_NAME(NAME, ...) [PLLM_##NAME] = #NAME,

const char *pllm_format(int dtype, int64_t *values, int64_t *bytes) {
    static const char *const names[PLLM_DTYPES] = {PLLM_FORMATS(FORMAT_NAME)};
    if (dtype <= PLLM_NO_DTYPE || dtype >= PLLM_DTYPES) return NULL;
    *values = block_values(dtype);
    *bytes = block_bytes(dtype);
    return names[dtype];
}

/* Whether the CPU adds up products of four bytes by itself: AVX-512 with VNNI, or NEON with dot products (every Apple
   processor). What comes out is the same to the bit with AVX-512 without it. */
static int has_byte_products(void) {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx512vnni") != 0;
#elif defined(__aarch64__) && defined(__linux__)
    return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
    return 1;
#endif
}

#if defined(__aarch64__)
#if defined(__linux__) && !defined(HWCAP2_I8MM)
#define HWCAP2_I8MM (1UL << 13)
#endif

/* Whether it also multiplies eight bytes of two rows with those of two others at once (i8mm). */
static int has_byte_matrices(void) {
#if defined(__linux__)
    return has_byte_products() && (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0;
#elif defined(__APPLE__)
    static int known; /* 1 no, 2 yes: the same value whoever writes it */
    int has = 0;
    size_t size = sizeof has;
    if (!known) known = sysctlbyname("hw.optional.arm.FEAT_I8MM", &has, &size, NULL, 0) == 0 && has ? 2 : 1;
    return known == 2;
#else
    return 0;
#endif
}
#endif

int64_t pllm_first_level_bytes(void) {
    static atomic_long known; /* the same value whoever writes it */
    long found = atomic_load_explicit(&known, memory_order_relaxed);
    if (found > 0) return found;
#if defined(_SC_LEVEL1_DCACHE_SIZE)
    found = sysconf(_SC_LEVEL1_DCACHE_SIZE);
#endif
    if (found <= 0) found = 32768;
    atomic_store_explicit(&known, found, memory_order_relaxed);
    return found;
}

#if defined(__x86_64__)
/* Whether the CPU also looks bytes up in registers (VBMI), but lacks AVX512_BF16, as Ice Lake: with both, the other set has
   these kernels, and this one is what older CPUs have. */
static int has_byte_lookups(void) {
    return has_byte_products() && __builtin_cpu_supports("avx512vbmi") && !__builtin_cpu_supports("avx512bf16");
}

/* Whether the CPU converts numbers of half precision. Clang before 19 does not know the feature by name. */
static int has_half_conversions(void) {
    unsigned eax, ebx, ecx = 0, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C) != 0;
}
#endif

uint32_t pllm_available(void) {
    uint32_t sets = 1U << PLLM_SCALAR;
#if defined(__x86_64__)
    __builtin_cpu_init(); /* asks the operating system too whether it saves the registers */
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_half_conversions())
        sets |= 1U << PLLM_AVX2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && has_half_conversions()) {
        sets |= 1U << PLLM_AVX512F;
        if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") && has_byte_products())
            sets |= 1U << PLLM_AVX512_BF16;
    }
#endif
#if defined(__aarch64__)
    sets |= 1U << PLLM_NEON;
#endif
    return sets;
}

int pllm_has(int set) {
    static uint32_t known; /* the same value whoever writes it */
    if (!known) known = pllm_available();
    return set >= 0 && set < PLLM_SETS && (known >> set & 1U);
}

/* A set the CPU lacks is never run, whoever asks: plain C answers instead, and the calls that can fail say so. */
const kernel_set *pllm_kernels(int set, int dtype) {
    const int packed = is_packed(dtype), grouped = is_grouped(dtype), fp8 = dtype == PLLM_BLOCK_FP8;
    if (!pllm_has(set)) set = PLLM_SCALAR;
    switch (set) {
#if defined(__x86_64__)
    case PLLM_AVX2:
        if (fp8) return &pllm_set_avx2_fp8;
        return packed ? &pllm_set_avx2_packed : grouped ? &pllm_set_avx2_grouped : &pllm_set_avx2;
    case PLLM_AVX512F:
        if (fp8) return &pllm_set_avx512f_fp8;
        if (grouped) return has_byte_products() ? &pllm_set_avx512_vnni_grouped : &pllm_set_avx512f_grouped;
        if (packed && has_byte_lookups()) return &pllm_set_avx512_vbmi_packed;
        if (packed) return has_byte_products() ? &pllm_set_avx512_vnni_packed : &pllm_set_avx512f_packed;
        return &pllm_set_avx512f;
    case PLLM_AVX512_BF16:
        if (fp8) return &pllm_set_avx512_bf16_fp8;
        if (packed) return &pllm_set_avx512_bf16_packed;
        if (grouped) return &pllm_set_avx512_bf16_grouped;
        return dtype == PLLM_BF16 ? &pllm_set_avx512_bf16 : &pllm_set_avx512f;
#endif
#if defined(__aarch64__)
    case PLLM_NEON:
        if (fp8) return &pllm_set_neon_fp8;
        if (!packed && !grouped) return &pllm_set_neon;
        if (has_byte_matrices()) return packed ? &pllm_set_neon_i8mm_packed : &pllm_set_neon_i8mm_grouped;
        if (has_byte_products()) return packed ? &pllm_set_neon_dot_packed : &pllm_set_neon_dot_grouped;
        return packed ? &pllm_set_neon_packed : &pllm_set_neon_grouped;
#endif
    default:
        if (fp8) return &pllm_set_scalar_fp8;
        return packed ? &pllm_set_scalar_packed : grouped ? &pllm_set_scalar_grouped : &pllm_set_scalar;
    }
}

void pllm_gate(int set, const pllm_activation *activation, float *gate, const float *up, int64_t count) {
    pllm_kernels(set, PLLM_F32)->gate(activation, gate, up, count);
}

float pllm_exp_sum(int set, float *values, float shift, int64_t count) {
    return pllm_kernels(set, PLLM_F32)->exp_sum(values, shift, count);
}

void pllm_add_bias(float *y, int64_t y_stride, int64_t tokens, const void *bias, int dtype, int64_t stride,
                   int64_t first, int64_t count) {
    if (!bias) return;
    for (int64_t n = 0; n < count; n++) {
        float value;
        if (dtype == PLLM_BF16) {
            uint16_t half;
            memcpy(&half, (const char *)bias + (first + n) * stride * 2, 2);
            const uint32_t word = (uint32_t)half << 16;
            memcpy(&value, &word, 4);
        } else if (dtype == PLLM_F16) {
            value = half_to_float((const char *)bias + (first + n) * stride * 2);
        } else {
            memcpy(&value, (const char *)bias + (first + n) * stride * 4, 4);
        }
        for (int64_t m = 0; m < tokens; m++) y[m * y_stride + n] += value;
    }
}

/* ---- One matrix ---------------------------------------------------------------------------------------------- */

/* Whether what grouped weights have besides their codes can be read. */
static int is_sound(const pllm_matrix *w) {
    if (!is_grouped(w->dtype)) return 1;
    const int plain = w->scale_dtype == PLLM_BF16 || w->scale_dtype == PLLM_F16 || w->scale_dtype == PLLM_F32;
    if (w->dtype == PLLM_BLOCK_FP8) {
        const int known = w->group == FP8_SIDE || w->group == 1 || w->group == 0;
        return plain && w->scales && known && w->row_stride == w->columns && w->skipped_rows == 0;
    }
    if (w->dtype == PLLM_GROUPED_NVFP4)
        return w->group == 16 && w->scales && w->biases && w->columns % 32 == 0 && w->row_stride % 32 == 0;
    const int fits = w->group == 32 || w->group == 64 || w->group == 128;
    if (!fits || !w->scales || w->columns % w->group || w->row_stride % w->group) return 0;
    if (w->dtype == PLLM_OCP_MXFP4) return w->group == 32;
    return w->biases && plain;
}

size_t pllm_input_bytes(int64_t rows, int64_t columns) {
    return aligned((size_t)((rows + TILE_LIMIT) * row_stride(columns)) * 4);
}

size_t pllm_linear_scratch(void) { return aligned(PANEL_BYTES); }

void pllm_input_describe(pllm_input *input, int set, int dtype, void *data, int64_t rows, int64_t columns, int reads) {
    *input = (pllm_input){.data = data, .rows = rows, .columns = columns, .stride = row_stride(columns), .set = set,
                          .dtype = dtype, .few = !reads && rows <= FEW_LIMIT};
}

void pllm_fill_row(const kernel_set *kernels, void *to, const float *from, float scale, int64_t columns) {
    kernels->convert(to, 0, from, scale, columns);
    kernels->pad(to, columns);
}

void pllm_input_fill_part(const pllm_input *input, const float *x, int64_t x_stride, int thread, int threads) {
    const kernel_set *kernels = pllm_kernels(input->set, input->dtype);
    if (input->few) {
        for (int64_t row = input->rows * thread / threads; row < input->rows * (thread + 1) / threads; row++)
            pllm_fill_row(kernels, (char *)input->data + row * input->stride * kernels->row_element, x + row * x_stride,
                          1.0F, input->columns);
        return;
    }
    const int64_t tokens = kernels->tile_tokens, tiles = divided_up(input->rows, tokens);
    for (int64_t tile = tiles * thread / threads; tile < tiles * (thread + 1) / threads; tile++) {
        const int64_t count = MIN(tokens, input->rows - tile * tokens);
        const float *rows[TILE_LIMIT];
        for (int64_t i = 0; i < count; i++) rows[i] = x + (tile * tokens + i) * x_stride;
        kernels->tile((char *)input->data + tile * tokens * padded(input->columns) * kernels->element, rows, NULL,
                      count, 0, input->columns);
    }
}

void pllm_linear_rows(const pllm_input *input, const pllm_matrix *weight, const void *bias, float *y,
                      int64_t y_stride, int add, int64_t first, int64_t last, void *scratch) {
    if (last <= first || input->rows == 0) return;
    const kernel_set *kernels = pllm_kernels(input->set, input->dtype);
    pllm_matrix part;
    const void *w = rows_from(weight, first, &part);
    if (input->few) {
        const void *rows[FEW_LIMIT];
        for (int64_t m = 0; m < input->rows; m++)
            rows[m] = (const char *)input->data + m * input->stride * kernels->row_element;
        kernels->few(w, weight->dtype, weight->row_stride, last - first, weight->columns, rows, input->rows, y + first,
                     y_stride, add);
    } else {
        kernels->many(w, weight->dtype, weight->row_stride, last - first, weight->columns, input->data, input->rows,
                      y + first, y_stride, add, scratch, row_at(weight, last));
    }
    pllm_add_bias(y + first, y_stride, input->rows, bias, weight->dtype, 1, first, last - first);
}

void pllm_linear_part(const pllm_input *input, const pllm_matrix *weight, const void *bias, float *y,
                      int64_t y_stride, int add, void *scratch, int thread, int threads) {
    const int64_t panels = divided_up(weight->rows, PANEL_ROWS);
    const int64_t first = panels * thread / threads * PANEL_ROWS;
    const int64_t last = MIN(panels * (thread + 1) / threads * PANEL_ROWS, weight->rows);
    pllm_linear_rows(input, weight, bias, y, y_stride, add, first, last, scratch);
}

typedef struct linear_call {
    pllm_pool *pool;
    const pllm_matrix *weight;
    const void *bias;
    const float *x;
    float *y;
    int64_t x_stride, y_stride;
    pllm_input input;
} linear_call;

static void linear_region(int thread, int threads, void *argument) {
    linear_call *call = argument;
    pllm_input_fill_part(&call->input, call->x, call->x_stride, thread, threads);
    pllm_pool_barrier(call->pool);
    pllm_linear_part(&call->input, call->weight, call->bias, call->y, call->y_stride, 0,
                     pllm_pool_scratch(call->pool, thread), thread, threads);
}

int pllm_linear(pllm_pool *pool, int set, const pllm_matrix *weight, const void *bias, const float *x,
                int64_t x_stride, int64_t rows, float *y, int64_t y_stride) {
    if (!pllm_has(set)) return PLLM_E_SET;
    if (rows < 0 || weight->dtype < PLLM_BF16 || weight->dtype >= PLLM_DTYPES) return PLLM_E_ARGUMENT;
    if (!is_sound(weight)) return PLLM_E_ARGUMENT;
    linear_call call = {.pool = pool, .weight = weight, .bias = bias, .x = x, .y = y, .x_stride = x_stride,
                        .y_stride = y_stride};
    pllm_pool_lock(pool);
    int result = pllm_pool_reserve_locked(pool, pllm_linear_scratch(), pllm_input_bytes(rows, weight->columns));
    if (result == PLLM_OK) {
        pllm_input_describe(&call.input, set, weight->dtype, pllm_pool_shared(pool), rows, weight->columns, 0);
        pllm_pool_run_locked(pool, linear_region, &call);
    }
    pllm_pool_unlock(pool);
    return result;
}
