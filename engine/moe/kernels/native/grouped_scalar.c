/* Grouped weights in plain C: what the instruction sets are compared with, and what runs where there is none. */
#include <float.h>
#include <math.h>

#include "grouped_internal.h"

static const int8_t FP4[16] = {FP4_VALUES};

/* The code of value i of the row whose codes are at `codes`. */
static int code_of(const uint8_t *codes, int dtype, int64_t i) {
    const int bits = group_bits(dtype);
    const int64_t at = i * bits;
    const uint8_t *from = codes + at / 8;
    const int beyond = at % 8 + bits > 8; /* the code ends in the next byte */
    const int code = (from[0] | from[beyond] << 8 * beyond) >> at % 8 & ((1 << bits) - 1);
    return dtype == PLLM_OCP_MXFP4 || dtype == PLLM_GROUPED_NVFP4 ? FP4[code] : code;
}

void pllm_grouped_scalar_open(const pllm_matrix *matrix, int64_t row, int64_t first, int64_t count, float *to) {
    const group_reader reader = reader_of(matrix);
    const uint8_t *codes = (const uint8_t *)matrix->data + row * reader.code_bytes;
    const uint8_t *scales = (const uint8_t *)matrix->scales + row * reader.scale_bytes;
    const uint8_t *biases = biases_of(matrix) + row * reader.scale_bytes;
    float scale = 0, bias = 0;
    for (int64_t i = first; i < first + count; i++) {
        if (i == first || i % matrix->group == 0) {
            const int64_t at = i / matrix->group * reader.width;
            scale = group_scale(scales + at, matrix->dtype, reader.kind, matrix->biases);
            bias = reader.kind ? group_number(biases + at, reader.kind) : 0;
        }
        /* Two roundings, the product's and the sum's, as in the reference: nothing may be fused here. */
        const volatile float product = scale * (float)code_of(codes, matrix->dtype, i);
        to[i - first] = reader.kind ? product + bias : product;
    }
}

void pllm_open_row(const pllm_matrix *matrix, int64_t row, float *to) {
    if (matrix->dtype == PLLM_BLOCK_FP8) {
        const uint8_t *codes = (const uint8_t *)matrix->data + row * matrix->row_stride;
        for (int64_t i = 0; i < matrix->columns; i++) {
            const uint16_t half = fp8_as_half(codes[i]);
            to[i] = half_to_float(&half) * FP8_LIFT * fp8_scale(matrix, fp8_scales(matrix, row), i / FP8_SIDE);
        }
        return;
    }
    if (is_grouped(matrix->dtype)) {
        pllm_grouped_scalar_open(matrix, row, 0, matrix->columns, to);
        return;
    }
    const int64_t bytes = bytes_of_values(matrix->dtype, matrix->row_stride);
    pllm_unpack_row(matrix->dtype, (const char *)matrix->data + row * bytes, to, matrix->columns);
}

/* ---- Input ---------------------------------------------------------------------------------------------------- */

/* `count` is a multiple of GROUP_VALUES. A group with a value that is infinite or no number gives no numbers. */
void pllm_grouped_scalar_convert(void *row, int64_t first, const float *from, float scale, int64_t count) {
    for (int64_t i = 0; i < count; i += GROUP_VALUES) {
        grouped_input *unit = (grouped_input *)row + (first + i) / UNIT;
        const int64_t at = (first + i) % UNIT;
        float values[GROUP_VALUES], most = 0;
        int finite = 1, sum = 0;
        for (int j = 0; j < GROUP_VALUES; j++) {
            values[j] = from[i + j] * scale;
            const float size = fabsf(values[j]);
            finite &= size <= FLT_MAX;
            most = MAX(most, size);
        }
        const float step = finite ? most / 127.0F : NAN, by = finite && most > 0 ? 127.0F / most : 0;
        for (int j = 0; j < GROUP_VALUES; j++) {
            const int code = finite ? (int)lrintf(values[j] * by) : 0;
            unit->codes[at + j] = (int8_t)code;
            unit->apart[at / 2 + j / 2 + j % 2 * (UNIT / 2)] = (int8_t)code;
            sum += code;
        }
        unit->scales[at / GROUP_VALUES] = step;
        unit->sums[at / GROUP_VALUES] = step * (float)sum;
    }
}

void pllm_grouped_scalar_pad(void *row, int64_t columns) {
    const size_t at = (size_t)(columns % UNIT), groups = at / GROUP_VALUES;
    if (!at) return;
    grouped_input *unit = (grouped_input *)row + columns / UNIT;
    memset(unit->codes + at, 0, UNIT - at);
    memset(unit->apart + at / 2, 0, (UNIT - at) / 2);
    memset(unit->apart + UNIT / 2 + at / 2, 0, (UNIT - at) / 2);
    memset(unit->scales + groups, 0, (UNIT_GROUPS - groups) * 4);
    memset(unit->sums + groups, 0, (UNIT_GROUPS - groups) * 4);
}

/* ---- Products ------------------------------------------------------------------------------------------------- */

void pllm_grouped_scalar_few(const void *w, int dtype, int64_t stride, int64_t rows, int64_t columns,
                             const void *const *x, int64_t tokens, float *y, int64_t y_stride, int add) {
    const pllm_matrix *matrix = w;
    const group_reader reader = reader_of(matrix);
    (void)stride;
    for (int64_t row = 0; row < rows; row++) {
        const uint8_t *codes = (const uint8_t *)matrix->data + row * reader.code_bytes;
        const uint8_t *scales = (const uint8_t *)matrix->scales + row * reader.scale_bytes;
        const uint8_t *biases = biases_of(matrix) + row * reader.scale_bytes;
        float sums[FEW_LIMIT] = {0};
        const int width = MIN(GROUP_VALUES, matrix->group);
        for (int64_t k = 0; k < columns; k += width) {
            int own[GROUP_VALUES];
            const int64_t at = k / matrix->group * reader.width;
            const float scale = group_scale(scales + at, dtype, reader.kind, matrix->biases);
            const float bias = reader.kind ? group_number(biases + at, reader.kind) : 0;
            for (int i = 0; i < width; i++) own[i] = code_of(codes, dtype, k + i);
            for (int64_t m = 0; m < tokens; m++) {
                const grouped_input *in = (const grouped_input *)x[m] + k / UNIT;
                const int64_t group = k % UNIT / GROUP_VALUES;
                int sum = 0;
                for (int i = 0; i < width; i++) sum += own[i] * in->codes[k % UNIT + i];
                sums[m] += scale * in->scales[group] * (float)sum;
                sums[m] += bias * in->sums[group];
            }
        }
        for (int64_t m = 0; m < tokens; m++) y[m * y_stride + row] = add ? y[m * y_stride + row] + sums[m] : sums[m];
    }
}
