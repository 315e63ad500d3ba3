/* Mamba-2: the convolution of all channels, the recurrent states of the heads, and the gated norm of their groups. The
   states are those of delta-nets (trunk_delta.c). */

#include "trunk_attention.h"

#include <math.h>
#include <string.h>

/* Channels that are convolved together. Blocks begin at the same channels for any number of threads. */
#define BLOCK_CHANNELS 128

/* Channels first..first + count) of one row, the latest token first, as each is read by those after it. */
static void convolve_block(const trunk_job *job, int64_t layer, int64_t row, int64_t first, int64_t count) {
    const pllm_trunk *trunk = job->trunk;
    const pllm_pass *pass = job->pass;
    const pllm_delta *delta = trunk->layers[layer].delta;
    const int64_t channels = pllm_delta_channels(trunk), kept = trunk->delta_taps - 1;
    const int64_t start = pllm_delta_start(trunk, layer) + pllm_delta_inputs(trunk);
    const float *before = pass->states_before[row];
    float history[PLLM_MOST_TAPS][BLOCK_CHANNELS] = {0};
    for (int64_t i = 0; before && i < kept; i++)
        memcpy(history[i], before + start + i * channels + first, (size_t)count * 4);
    const convolved inputs = {.from = job->qkv, .stride = job->projected, .start = start, .channels = channels, .kept = kept};
    pllm_keep_columns(job, &inputs, row, first, count);
    for (int64_t t = pass->tokens - 1; t >= 0; t--) {
        float *input = job->qkv + (row * pass->tokens + t) * job->projected + first;
        const float *taps[PLLM_MOST_TAPS];
        for (int64_t i = 0; i <= kept; i++) taps[i] = t + i < kept ? history[t + i] : input + (i - kept) * job->projected;
        job->set->convolve(input, taps, delta->kernel + first, delta->kernel_bias ? delta->kernel_bias + first : NULL,
                           channels, 0, (int)kept + 1, count);
    }
}

void pllm_mamba_convolve(const trunk_job *job, int64_t layer, int thread, int threads) {
    const int64_t channels = pllm_delta_channels(job->trunk), blocks = divided_up(channels, BLOCK_CHANNELS);
    for (int64_t block = blocks * thread / threads; block < blocks * (thread + 1) / threads; block++)
        for (int stays = 0; stays < 2; stays++)
            for (int64_t row = 0; row < job->pass->rows; row++)
                if (pllm_in_place(job->pass, row) == stays)
                    convolve_block(job, layer, row, block * BLOCK_CHANNELS,
                                   MIN(BLOCK_CHANNELS, channels - block * BLOCK_CHANNELS));
}

/* What is no number stays so. */
static float limited(float x, float least, float most) { return x < least ? least : x > most ? most : x; }

void pllm_mamba_head(const trunk_job *job, const own_area *own, int64_t layer, int64_t row, int64_t head) {
    const pllm_trunk *trunk = job->trunk;
    const pllm_pass *pass = job->pass;
    const pllm_delta *delta = trunk->layers[layer].delta;
    const int64_t keys = trunk->delta_key_width, values = trunk->delta_value_width, padded = pllm_delta_padded(trunk);
    const int64_t groups = trunk->delta_key_heads, heads = trunk->delta_value_heads, group = head / (heads / groups);
    const int64_t key = heads * values + group * keys, query = key + groups * keys;
    const int64_t step = pllm_delta_channels(trunk) + heads * values + head;
    const int64_t state = pllm_delta_start(trunk, layer) + head * pllm_delta_head(trunk);
    const float *before = pass->states_before[row] ? pass->states_before[row] + state : NULL;
    float *after = pass->states_after[row] + state;
    float decays[DELTA_TOKENS], steps[DELTA_TOKENS], products[DELTA_TOKENS];
    for (int64_t done = 0; done < pass->tokens; done += DELTA_TOKENS) {
        const int64_t count = MIN(DELTA_TOKENS, pass->tokens - done);
        for (int64_t t = 0; t < count; t++) {
            const float *input = job->qkv + (row * pass->tokens + done + t) * job->projected;
            float *q = own->delta_queries + t * keys, *k = own->delta_keys + t * keys, *v = own->delta_values + t * padded;
            memcpy(q, input + query, (size_t)keys * 4);
            memcpy(k, input + key, (size_t)keys * 4);
            memcpy(v, input + head * values, (size_t)values * 4);
            memset(v + values, 0, (size_t)(padded - values) * 4);
            products[t] = job->set->product(q, k, keys);
            steps[t] = limited(pllm_softplus(input[step] + delta->decay_bias[head]), trunk->step_least, trunk->step_most);
            decays[t] = expf(delta->decay_scale[head] * steps[t]);
        }
        const delta_run run = {.before = before, .after = after, .queries = own->delta_queries, .keys = own->delta_keys,
                               .values = own->delta_values, .results = own->delta_results, .decays = decays,
                               .rates = steps, .products = products, .tokens = count, .key_width = keys,
                               .value_width = padded, .adds = 1};
        job->set->recur(&run);
        before = after;
        for (int64_t t = 0; t < count; t++) {
            float *to = job->attended + ((row * pass->tokens + done + t) * heads + head) * values;
            const float *result = own->delta_results + t * padded, *value = own->delta_values + t * padded;
            for (int64_t i = 0; i < values; i++) to[i] = result[i] + delta->skip[head] * value[i];
        }
    }
}

void pllm_mamba_norm(const trunk_job *job, int64_t layer, int64_t first, int64_t rows, float *to) {
    const pllm_trunk *trunk = job->trunk;
    const int64_t columns = trunk->delta_value_heads * trunk->delta_value_width, group = columns / trunk->delta_key_heads;
    for (int64_t row = 0; row < rows; row++, to += columns) {
        const float *result = job->attended + (first + row) * columns;
        const float *gate = job->qkv + (first + row) * job->projected + pllm_delta_channels(trunk);
        for (int64_t i = 0; i < columns; i++) to[i] = result[i] * gate[i];
        job->set->gate(to, gate, columns);
        for (int64_t at = 0; at < columns; at += group)
            job->set->norm(to + at, trunk->layers[layer].delta->norm + at, trunk->epsilon, group);
    }
}
