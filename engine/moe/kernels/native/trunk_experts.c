/* The experts of a layer of the trunk: where its rows are sent, and what they give. See trunk_experts.h. */

#define _DEFAULT_SOURCE
#define _DARWIN_C_SOURCE

#include "trunk_experts.h"

#include <math.h>
#include <string.h>
#include <sys/mman.h>

/* A router this small is computed by every thread for itself: less work than a barrier. In weights. */
#define SMALL_ROUTER 16384
/* Bytes of one request to read ahead: the system takes about as much at a time. */
#define AHEAD_BYTES (1 << 20)

void pllm_route(walk *w, const pllm_trunk_layer *layer, int32_t *indices, float *weights) {
    const int64_t hidden = w->job->trunk->hidden, k = w->job->trunk->top_k, count = layer->router.rows;
    const int together = w->few && count * hidden > SMALL_ROUTER;
    for (int64_t row = share_start(w); row < share_end(w); row += FEW_LIMIT) {
        const int64_t rows = MIN(FEW_LIMIT, share_end(w) - row);
        float *logits = together ? w->job->router : w->own.logits;
        pllm_exact_linear(w, w->normed + row * hidden, rows, &layer->router, logits, !together);
        if (together) {
            /* Choosing spoils the logits: each thread does it on a copy. */
            barrier(w);
            memcpy(w->own.logits, logits, (size_t)(rows * count) * 4);
            logits = w->own.logits;
        }
        for (int64_t i = 0; i < rows; i++) {
            float *mine = logits + i * count;
            if (layer->router_bias)
                for (int64_t e = 0; e < count; e++) mine[e] += layer->router_bias[e];
            pllm_choose_experts(w->job->trunk, layer, mine, count, indices + (row + i) * k, weights + (row + i) * k);
        }
    }
}

void pllm_read_ahead(const walk *w, const pllm_trunk_layer *layer, const int32_t *indices) {
    const int64_t routes = w->rows * w->job->trunk->top_k;
    for (int64_t route = w->thread; route < routes; route += w->threads) {
        const int64_t expert = indices[route];
        for (int64_t i = layer->ahead_from[expert]; i < layer->ahead_from[expert + 1]; i++) {
            char *const start = layer->ahead[i].start;
            for (size_t at = 0; at < layer->ahead[i].bytes; at += AHEAD_BYTES)
                (void)madvise(start + at, MIN(AHEAD_BYTES, layer->ahead[i].bytes - at), MADV_WILLNEED);
        }
    }
}

static void shared_weights(walk *w, const pllm_trunk_layer *layer, float *weights) {
    const int64_t hidden = w->job->trunk->hidden;
    for (int64_t row = share_start(w); row < share_end(w); row += FEW_LIMIT) {
        const int64_t rows = MIN(FEW_LIMIT, share_end(w) - row);
        if (layer->shared_gate.data)
            pllm_exact_linear(w, w->normed + row * hidden, rows, &layer->shared_gate, weights + row, 1);
        for (int64_t i = 0; i < rows; i++)
            weights[row + i] = layer->shared_gate.data ? 1.0F / (1.0F + expf(-weights[row + i])) : w->job->trunk->shared_scale;
    }
}

void pllm_run_experts(walk *w, const pllm_layer *experts, const float *hidden, const int32_t *indices,
                      const float *weights, int64_t k, int64_t scale_input, float *sum, int64_t *counts) {
    const pllm_routes routes = {.hidden = hidden, .indices = indices, .weights = weights, .tokens = w->rows,
                                .k = k, .scale_input = scale_input, .reads = w->reads, .sum = sum, .counts = counts};
    pllm_experts_part(w->job->pool, experts, &routes, w->own.experts, w->job->experts, w->thread, w->threads);
    barrier(w);
}

void pllm_shared_expert(walk *w, int64_t index) {
    const trunk_job *job = w->job;
    const pllm_trunk_layer *layer = job->trunk->layers + index;
    float *weights = w->few ? w->own.shared_weights : job->shared_weights;
    shared_weights(w, layer, weights);
    barrier(w);
    const float *hidden = layer->norms && layer->norms->experts ? w->beside : w->normed;
    pllm_run_experts(w, layer->shared, hidden, job->zeros, weights, 1, 0, job->shared_out, NULL);
    pllm_mark(w, index, PLLM_OTHER);
}

const float *pllm_narrowed(walk *w, const pllm_trunk_layer *layer) {
    if (!layer->narrow.data) return w->normed;
    pllm_fill_input(w, w->normed, &layer->narrow);
    pllm_project(w, &layer->narrow, w->job->narrow, layer->narrow.rows);
    barrier(w);
    return w->job->narrow;
}

void pllm_widened(walk *w, const pllm_trunk_layer *layer) {
    if (!layer->widen.data) return;
    pllm_fill_input(w, w->job->narrow_sum, &layer->widen);
    pllm_project(w, &layer->widen, w->job->out, layer->widen.rows);
    barrier(w);
}
