/* Short convolutions. */

#include "trunk_attention.h"

/* The product of the first and the third part of a row's token, which the first part becomes. */
static void multiply_parts(float *parts, int64_t hidden, int64_t first, int64_t last) {
    for (int64_t d = first; d < last; d++) parts[d] *= parts[2 * hidden + d];
}

void pllm_convolve(const trunk_job *job, int64_t layer, int thread, int threads) {
    const pllm_trunk *trunk = job->trunk;
    const pllm_pass *pass = job->pass;
    const int64_t hidden = trunk->hidden, kept = trunk->convolution_taps - 1, tokens = pass->tokens;
    const int64_t first = hidden * thread / threads, last = hidden * (thread + 1) / threads;
    const int64_t start = trunk->layers[layer].place * kept * hidden;
    const float *kernel = trunk->layers[layer].convolution->kernel;
    for (int64_t row = 0; row < pass->rows; row++) {
        const float *history = pass->states_before[row] ? pass->states_before[row] + start : NULL;
        for (int64_t t = 0; t < tokens; t++) {
            const int64_t position = row * tokens + t;
            float *parts = job->qkv + position * job->projected, *to = job->attended + position * hidden;
            multiply_parts(parts, hidden, first, last);
            for (int64_t d = first; d < last; d++) to[d] = 0;
            for (int64_t tap = 0; tap <= kept; tap++) {
                const int64_t before = kept - tap;
                const float *from = parts - before * job->projected;
                if (before > t) {
                    if (!history) continue;
                    from = history + (t + tap) * hidden;
                }
                for (int64_t d = first; d < last; d++) to[d] += from[d] * kernel[tap * hidden + d];
            }
            for (int64_t d = first; d < last; d++) to[d] *= parts[hidden + d];
        }
    }
    const convolved inputs = {.from = job->qkv, .stride = job->projected, .start = start, .channels = hidden, .kept = kept};
    pllm_keep_inputs(job, &inputs, thread, threads);
}
