/* Alternating updates of residual streams, and networks with few gates; not part of the library's interface. */
#ifndef PRIVATELLM_TRUNK_ALTUP_H
#define PRIVATELLM_TRUNK_ALTUP_H

#include "trunk_walk.h"

/* Makes the other streams of all rows from their first one. */
void pllm_spread_streams(walk *w);
/* Predicts all streams, and norms the first one with `weight` to w->normed. */
void pllm_predict_streams(walk *w, const pllm_altup *altup, const float *weight);
/* From what attention gives, in job->out, and what it read, in w->normed, to what the network reads there. What it is added
   to is kept in w->beside. */
void pllm_add_laurel(walk *w, const pllm_trunk_layer *layer);
/* A network that reads w->normed, to job->out. */
void pllm_sparse_network(walk *w, const pllm_sparse *sparse);
/* Corrects all streams by what `layer` has given, in job->out; what its own input reads to w->normed. */
void pllm_correct_streams(walk *w, const pllm_trunk_layer *layer);
/* The mean of all streams, normed with `weight`, to w->normed. */
void pllm_gather_streams(walk *w, const float *weight);

#endif
