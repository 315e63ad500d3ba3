/* The experts of a layer of the trunk, routed and shared; not part of the library's interface. */
#ifndef PRIVATELLM_TRUNK_EXPERTS_H
#define PRIVATELLM_TRUNK_EXPERTS_H

#include "trunk_walk.h"

/* The experts of all rows of w->normed, and their weights: both [rows, top_k]. */
void pllm_route(walk *w, const pllm_trunk_layer *layer, int32_t *indices, float *weights);
/* Tells the system of the chosen experts' pages, so that the disk reads them at once and reads nothing else: page by page
   it would guess what lies around a page to be wanted too. Each thread tells of some. Advice that fails is none. */
void pllm_read_ahead(const walk *w, const pllm_trunk_layer *layer, const int32_t *indices);
/* The weighted sum of `experts` for all rows of `hidden`, each sent to k of them. Arguments are those of pllm_routes. */
void pllm_run_experts(walk *w, const pllm_layer *experts, const float *hidden, const int32_t *indices,
                      const float *weights, int64_t k, int64_t scale_input, float *sum, int64_t *counts);
/* What the shared expert of layer `index` gives, weighted, to job->shared_out. */
void pllm_shared_expert(walk *w, int64_t index);
/* What the routed experts of `layer` read, of all rows. */
const float *pllm_narrowed(walk *w, const pllm_trunk_layer *layer);
/* The routed experts' weighted sum to job->out, where it is narrower than the hidden state. */
void pllm_widened(walk *w, const pllm_trunk_layer *layer);

#endif
