/* Several residual streams; not part of the library's interface. */
#ifndef PRIVATELLM_TRUNK_STREAMS_H
#define PRIVATELLM_TRUNK_STREAMS_H

#include "trunk_walk.h"

/* Makes all streams of a row those of its first one. */
void pllm_repeat_streams(const pllm_trunk *trunk, float *h);
/* What a part of a layer reads of the streams of all rows, to w->normed, and the factors of what it gives. */
void pllm_read_streams(walk *w, const pllm_streams *streams);
/* Adds `out`, and `other` if it is not NULL, [rows, hidden] to the streams, by the factors that were read with them. */
void pllm_add_to_streams(walk *w, const float *out, const float *other);
/* Only the row `last` goes on from here. */
void pllm_keep_row_of_streams(walk *w, int64_t last);
/* Adds what layer `index` makes of the embeddings of n-grams, and keeps the last inputs of its convolution. */
void pllm_add_lexical(walk *w, int64_t index);

#endif
