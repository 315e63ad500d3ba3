/* Products with packed weights in plain C. */
#include <float.h>
#include <math.h>

#include "packed_internal.h"

/* `count` is a multiple of INPUT_BLOCK. A block with a value that is infinite or no number gives no numbers. */
void pllm_packed_scalar_convert(void *row, int64_t first, const float *from, float scale, int64_t count) {
    for (int64_t i = 0; i < count; i += INPUT_BLOCK) {
        packed_input *unit = (packed_input *)row + (first + i) / UNIT;
        const int64_t at = (first + i) % UNIT;
        float values[INPUT_BLOCK], most = 0;
        int finite = 1;
        for (int j = 0; j < INPUT_BLOCK; j++) {
            values[j] = from[i + j] * scale;
            const float size = fabsf(values[j]);
            finite &= size <= FLT_MAX;
            most = MAX(most, size);
        }
        const float step = finite ? most / 127.0F : NAN, by = finite && most > 0 ? 127.0F / most : 0;
        for (int part = 0; part < INPUT_BLOCK / FINEST; part++) {
            int sum = 0;
            for (int j = 0; j < FINEST; j++) {
                const int code = finite ? (int)lrintf(values[part * FINEST + j] * by) : 0;
                unit->codes[at + part * FINEST + j] = (int8_t)code;
                sum += code;
            }
            unit->scales[at / FINEST + part] = step;
            unit->sums[at / FINEST + part] = step * (float)sum;
        }
    }
}

void pllm_packed_scalar_pad(void *row, int64_t columns) {
    const int64_t at = columns % UNIT;
    if (!at) return;
    packed_input *unit = (packed_input *)row + columns / UNIT;
    memset(unit->codes + at, 0, (size_t)(UNIT - at));
    memset(unit->scales + at / FINEST, 0, (size_t)(UNIT_SCALES - at / FINEST) * 4);
    memset(unit->sums + at / FINEST, 0, (size_t)(UNIT_SCALES - at / FINEST) * 4);
}

void pllm_packed_scalar_few(const void *weights, int dtype, int64_t stride, int64_t rows, int64_t columns,
                            const void *const *x, int64_t tokens, float *y, int64_t y_stride, int add) {
    const uint8_t *w = weights;
    const int64_t row_bytes = bytes_of_values(dtype, stride);
    for (int64_t row = 0; row < rows; row++, w += row_bytes) {
        float sums[FEW_LIMIT] = {0};
        for (int64_t k = 0; k < columns; k += UNIT) {
            packed_unit unit;
            pllm_open_unit(dtype, w + bytes_of_values(dtype, k), MIN(UNIT, columns - k), &unit);
            for (int64_t m = 0; m < tokens; m++) {
                const packed_input *in = (const packed_input *)x[m] + k / UNIT;
                for (int part = 0; part < UNIT_SCALES; part++) {
                    int sum = 0;
                    for (int i = part * FINEST; i < (part + 1) * FINEST; i++) sum += unit.codes[i] * in->codes[i];
                    sums[m] += unit.scales[part] * in->scales[part] * (float)sum;
                    sums[m] -= unit.minimums[part] * in->sums[part];
                }
            }
        }
        for (int64_t m = 0; m < tokens; m++) y[m * y_stride + row] = add ? y[m * y_stride + row] + sums[m] : sums[m];
    }
}
