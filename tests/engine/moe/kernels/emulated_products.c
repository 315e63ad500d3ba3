/* Products with packed and grouped weights, for a processor that is emulated. From standard input: `head`, the codes, the
   scales and biases of grouped weights, and rows of input. To standard output: the products of the first row, of the first
   two, and so on, each first as those of tokens that are written and then as those of tokens that are read. */
#define _DEFAULT_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "privatellm_kernels.h"

#define PAGE 65536

enum { DTYPE, GROUP, SCALE_DTYPE, ROWS, COLUMNS, TOKENS, CODE_BYTES, SCALE_BYTES, BIAS_BYTES, HEAD };

/* So many bytes of the input, behind which nothing can be read. */
static void *received(size_t bytes) {
    const size_t held = (bytes + PAGE - 1) / PAGE * PAGE;
    char *memory = mmap(NULL, held + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory + held, PAGE, PROT_NONE) != 0) exit(3);
    if (fread(memory + held - bytes, 1, bytes, stdin) != bytes) exit(4);
    return memory + held - bytes;
}

/* As pllm_linear, of rows of tokens that are read. Their input lies where something else did before. */
static void multiply_read(const pllm_matrix *weight, const float *x, int64_t count, float *y) {
    const size_t bytes = pllm_input_bytes(count, weight->columns);
    void *data = aligned_alloc(64, bytes), *scratch = aligned_alloc(64, pllm_linear_scratch());
    if (!data || !scratch) exit(7);
    memset(data, 0xff, bytes);
    pllm_input input;
    pllm_input_describe(&input, PLLM_NEON, weight->dtype, data, count, weight->columns, 1);
    pllm_input_fill_part(&input, x, weight->columns, 0, 1);
    pllm_linear_rows(&input, weight, NULL, y, weight->rows, 0, 0, weight->rows, scratch);
    free(data);
    free(scratch);
}

int main(void) {
    int64_t head[HEAD];
    if (fread(head, sizeof head[0], HEAD, stdin) != HEAD) return 2;
    const size_t rows = (size_t)head[ROWS], columns = (size_t)head[COLUMNS], tokens = (size_t)head[TOKENS];
    pllm_matrix weight = {.rows = head[ROWS], .columns = head[COLUMNS], .row_stride = head[COLUMNS],
                          .dtype = (int32_t)head[DTYPE], .group = (int32_t)head[GROUP],
                          .scale_dtype = (int32_t)head[SCALE_DTYPE]};
    weight.data = received((size_t)head[CODE_BYTES]);
    if (head[SCALE_BYTES]) weight.scales = received((size_t)head[SCALE_BYTES]);
    if (head[BIAS_BYTES]) weight.biases = received((size_t)head[BIAS_BYTES]);
    const float *x = received(tokens * columns * sizeof(float));
    float *y = malloc(tokens * rows * sizeof(float));
    for (size_t count = 1; count <= tokens; count++) {
        pllm_pool *pool = pllm_pool_create(1 + count % 2, NULL);
        if (!y || !pool) return 5;
        if (pllm_linear(pool, PLLM_NEON, &weight, NULL, x, head[COLUMNS], (int64_t)count, y, head[ROWS])) return 6;
        fwrite(y, sizeof *y, count * rows, stdout);
        multiply_read(&weight, x, (int64_t)count, y);
        fwrite(y, sizeof *y, count * rows, stdout);
        pllm_pool_destroy(pool);
    }
    return 0;
}
