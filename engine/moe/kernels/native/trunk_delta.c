/* Gated delta-nets: the convolution before, the recurrent states of the heads, and the gated norm after. */

#include "trunk_attention.h"

#include <math.h>
#include <string.h>

int64_t pllm_delta_channels(const pllm_trunk *trunk) {
    return 2 * trunk->delta_key_heads * trunk->delta_key_width + trunk->delta_value_heads * trunk->delta_value_width;
}

int64_t pllm_delta_decays(const pllm_trunk *trunk) { return trunk->delta_kind == PLLM_KDA ? trunk->delta_key_width : 1; }

int64_t pllm_delta_padded(const pllm_trunk *trunk) {
    return divided_up(trunk->delta_value_width, PLLM_STATE_COLUMNS) * PLLM_STATE_COLUMNS;
}

int64_t pllm_delta_head(const pllm_trunk *trunk) { return trunk->delta_key_width * pllm_delta_padded(trunk); }

int64_t pllm_delta_inputs(const pllm_trunk *trunk) { return trunk->delta_value_heads * pllm_delta_head(trunk); }

int64_t pllm_delta_start_of(const pllm_trunk *trunk, int64_t place) {
    return place * (pllm_delta_inputs(trunk) + (trunk->delta_taps - 1) * pllm_delta_channels(trunk));
}

int64_t pllm_delta_start(const pllm_trunk *trunk, int64_t layer) {
    return pllm_delta_start_of(trunk, trunk->layers[layer].place);
}

static float sigmoid(float x) { return 1.0F / (1.0F + expf(-x)); }

float pllm_softplus(float x) { return x > 20.0F ? x : log1pf(expf(x)); }

/* One head of one row, over all tokens of the pass. */
static void run_head(const trunk_job *job, const own_area *own, int64_t layer, int64_t row, int64_t head) {
    const pllm_trunk *trunk = job->trunk;
    const pllm_pass *pass = job->pass;
    const pllm_delta *delta = trunk->layers[layer].delta;
    const int64_t keys = trunk->delta_key_width, values = trunk->delta_value_width, padded_values = pllm_delta_padded(trunk);
    const int64_t key_heads = trunk->delta_key_heads, heads = trunk->delta_value_heads;
    const int64_t channels = pllm_delta_channels(trunk), gates = channels + head * values;
    const int64_t of_head = pllm_delta_decays(trunk), before_decays = channels + heads * values;
    const int64_t decays = before_decays + head * of_head, rates = before_decays + heads * of_head + head;
    const int wide = trunk->delta_kind == PLLM_KDA;
    const int64_t key_head = trunk->tiled_heads ? head % key_heads : head / (heads / key_heads);
    const int64_t query = key_head * keys, key = (key_heads + key_head) * keys, value = 2 * key_heads * keys + head * values;
    const int last = (int)trunk->delta_taps;
    const float *before = pass->states_before[row], *history = NULL;
    float *after = pass->states_after[row] + pllm_delta_start(trunk, layer) + head * pllm_delta_head(trunk);
    if (before) {
        before += pllm_delta_start(trunk, layer);
        history = before + pllm_delta_inputs(trunk);
        before += head * pllm_delta_head(trunk);
    }
    float decay[DELTA_TOKENS], rate[DELTA_TOKENS], product[DELTA_TOKENS];
    for (int64_t done = 0; done < pass->tokens; done += DELTA_TOKENS) {
        const int64_t count = MIN(DELTA_TOKENS, pass->tokens - done);
        for (int64_t t = 0; t < count; t++) {
            const float *input = job->qkv + (row * pass->tokens + done + t) * job->projected;
            const float *taps[3][PLLM_MOST_TAPS];
            int first = 0;
            for (int i = 0; i < last; i++) {
                const int64_t at = done + t + i - (last - 1);
                const float *from = at >= 0 ? input + (i - (last - 1)) * job->projected
                                            : history ? history + (at + last - 1) * channels : NULL;
                if (!from) {
                    first = i + 1;
                    continue;
                }
                taps[0][i] = from + query, taps[1][i] = from + key, taps[2][i] = from + value;
            }
            float *q = own->delta_queries + t * keys, *k = own->delta_keys + t * keys;
            float *v = own->delta_values + t * padded_values;
            job->set->convolve(q, taps[0], delta->kernel + query, NULL, channels, first, last, keys);
            job->set->convolve(k, taps[1], delta->kernel + key, NULL, channels, first, last, keys);
            job->set->convolve(v, taps[2], delta->kernel + value, NULL, channels, first, last, values);
            memset(v + values, 0, (size_t)(padded_values - values) * 4);
            product[t] = job->set->unit(q, k, 1.0F / sqrtf((float)keys), keys);
            rate[t] = sigmoid(input[rates]);
            if (!wide) {
                decay[t] = expf(delta->decay_scale[head] * pllm_softplus(input[decays] + delta->decay_bias[head]));
                continue;
            }
            float *by = own->delta_decays + t * keys;
            job->set->decay(by, input + decays, delta->decay_bias + head * keys, delta->decay_scale[head],
                            trunk->decay_least, keys);
            job->set->multiply(own->delta_decayed + t * keys, k, by, keys);
            job->set->multiply(q, q, by, keys);
        }
        const delta_run run = {.before = before, .after = after, .queries = own->delta_queries, .keys = own->delta_keys,
                               .values = own->delta_values, .results = own->delta_results,
                               .decays = wide ? own->delta_decays : decay, .rates = rate, .products = product,
                               .decayed = own->delta_decayed, .tokens = count, .key_width = keys,
                               .value_width = padded_values, .wide = wide};
        job->set->recur(&run);
        before = after;
        for (int64_t t = 0; t < count; t++) {
            const int64_t position = row * pass->tokens + done + t;
            float *to = job->attended + (position * heads + head) * values, *result = own->delta_results + t * padded_values;
            const float *gate = job->qkv + position * job->projected + gates;
            if (trunk->sigmoid_gates) {
                memcpy(to, result, (size_t)values * 4);
                job->set->norm(to, delta->norm, trunk->epsilon, values);
                job->set->gate(to, gate, values);
            } else
                job->set->gated_norm(to, result, gate, delta->norm, trunk->epsilon, values);
        }
    }
}

int pllm_in_place(const pllm_pass *pass, int64_t row) { return pass->states_before[row] == pass->states_after[row]; }

void pllm_delta_heads(const trunk_job *job, const own_area *own, int64_t layer) {
    for (int64_t head; (head = pllm_pool_next(job->pool)) < job->trunk->delta_value_heads;)
        for (int stays = 0; stays < 2; stays++)
            for (int64_t row = 0; row < job->pass->rows; row++) {
                if (pllm_in_place(job->pass, row) != stays) continue;
                if (job->trunk->delta_kind == PLLM_MAMBA)
                    pllm_mamba_head(job, own, layer, row, head);
                else
                    run_head(job, own, layer, row, head);
            }
}

void pllm_keep_columns(const trunk_job *job, const convolved *inputs, int64_t row, int64_t first, int64_t count) {
    const pllm_pass *pass = job->pass;
    const float *before = pass->states_before[row];
    for (int64_t i = 0; i < inputs->kept; i++) { /* ascending, as what is read lies behind what is written */
        float *to = pass->states_after[row] + inputs->start + i * inputs->channels + first;
        const int64_t token = pass->tokens - inputs->kept + i;
        if (token >= 0)
            memcpy(to, inputs->from + (row * pass->tokens + token) * inputs->stride + first, (size_t)count * 4);
        else if (before)
            memcpy(to, before + inputs->start + (pass->tokens + i) * inputs->channels + first, (size_t)count * 4);
        else
            memset(to, 0, (size_t)count * 4);
    }
}

void pllm_keep_inputs(const trunk_job *job, const convolved *inputs, int thread, int threads) {
    const int64_t first = inputs->channels * thread / threads, count = inputs->channels * (thread + 1) / threads - first;
    for (int stays = 0; stays < 2; stays++)
        for (int64_t row = 0; row < job->pass->rows; row++)
            if (pllm_in_place(job->pass, row) == stays) pllm_keep_columns(job, inputs, row, first, count);
}

void pllm_delta_keep(const trunk_job *job, int64_t layer, int thread, int threads) {
    const pllm_trunk *trunk = job->trunk;
    const convolved inputs = {.from = job->qkv, .stride = job->projected,
                              .start = pllm_delta_start(trunk, layer) + pllm_delta_inputs(trunk),
                              .channels = pllm_delta_channels(trunk), .kept = trunk->delta_taps - 1};
    pllm_keep_inputs(job, &inputs, thread, threads);
}
