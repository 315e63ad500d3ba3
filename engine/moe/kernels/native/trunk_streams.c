/* Several residual streams: how parts of a layer read them and add to them, and what embeddings of n-grams add. */

#include "trunk_streams.h"

#include <math.h>
#include <string.h>

static float sigmoid(float x) { return 1.0F / (1.0F + expf(-x)); }

static float *wide(const walk *w) { return w->few ? w->own.wide : w->job->wide; }

static float *injection(const walk *w) { return w->few ? w->own.injection : w->job->injection; }

/* Norms each stream of `x` by itself. */
static void norm_streams(const trunk_job *job, float *x, const float *weight) {
    const int64_t hidden = job->trunk->hidden;
    for (int64_t at = 0; at < wide_of(job->trunk); at += hidden)
        job->set->norm(x + at, weight + at, job->trunk->epsilon, hidden);
}

void pllm_repeat_streams(const pllm_trunk *trunk, float *h) {
    for (int64_t stream = 1; stream < trunk->streams; stream++)
        memcpy(h + stream * trunk->hidden, h, (size_t)trunk->hidden * 4);
}

void pllm_read_streams(walk *w, const pllm_streams *streams) {
    const trunk_job *job = w->job;
    const pllm_trunk *trunk = job->trunk;
    const int64_t hidden = trunk->hidden, count = trunk->streams, all = wide_of(trunk), rank = trunk->stream_rank;
    const int64_t mixed = rank + count;
    const float share = 1.0F / (float)count;
    float *normed = wide(w), *ranks = w->few ? w->own.stream_ranks : job->stream_ranks, *factors = injection(w);
    for (int64_t row = share_start(w); row < share_end(w); row++) {
        memcpy(normed + row * all, w->h + row * all, (size_t)all * 4);
        norm_streams(job, normed + row * all, streams->norm);
    }
    const pllm_matrix *matrices[] = {&streams->down, &streams->inject};
    float *results[] = {job->mixes, job->mixes + rank};
    pllm_project_each(w, normed, matrices, results, streams->inject.data ? 2 : 1, mixed);
    barrier(w);
    for (int64_t row = share_start(w); row < share_end(w); row++) {
        float *to = ranks + row * rank;
        for (int64_t i = 0; i < rank; i++) to[i] = job->mixes[row * mixed + i] * share;
        job->set->gate(to, to, rank);
        for (int64_t s = 0; streams->inject.data && s < count; s++)
            factors[row * count + s] = 2.0F * sigmoid(job->mixes[row * mixed + rank + s] * share);
    }
    pllm_fill_input(w, ranks, &streams->up);
    pllm_project(w, &streams->up, job->stream_gates, all);
    barrier(w);
    for (int64_t row = share_start(w); row < share_end(w); row++) {
        float *to = w->normed + row * hidden, *from = normed + row * all;
        job->set->gate(from, job->stream_gates + row * all, all);
        for (int64_t d = 0; d < hidden; d++) to[d] = from[d];
        for (int64_t s = 1; s < count; s++)
            for (int64_t d = 0; d < hidden; d++) to[d] += from[s * hidden + d];
        for (int64_t d = 0; d < hidden; d++) to[d] *= share;
    }
}

void pllm_add_to_streams(walk *w, const float *out, const float *other) {
    const pllm_trunk *trunk = w->job->trunk;
    const int64_t hidden = trunk->hidden, all = wide_of(trunk);
    const float *factors = injection(w);
    float *given = w->own.row;
    for (int64_t row = share_start(w); row < share_end(w); row++) {
        for (int64_t d = 0; d < hidden; d++) given[d] = out[row * hidden + d] + (other ? other[row * hidden + d] : 0);
        for (int64_t s = 0; s < trunk->streams; s++) {
            float *h = w->h + row * all + s * hidden;
            const float by = factors[row * trunk->streams + s];
            for (int64_t d = 0; d < hidden; d++) h[d] += by * given[d];
        }
    }
}

void pllm_keep_row_of_streams(walk *w, int64_t last) {
    const int64_t all = wide_of(w->job->trunk), count = w->job->trunk->streams;
    const float *h = w->h + last * all, *normed = w->normed + last * w->job->trunk->hidden;
    const float *factors = injection(w) + last * count;
    pllm_set_rows(w, 1);
    memmove(w->h, h, (size_t)all * 4);
    memmove(w->normed, normed, (size_t)w->job->trunk->hidden * 4);
    if (w->job->trunk->stream_rank) memmove(injection(w), factors, (size_t)count * 4);
}

/* ---- Embeddings of n-grams -------------------------------------------------------------------------------- */

/* One stream of a row: what is added to it, before the convolution, in place of the row's key, and the convolution's
   input. */
static void fit(const walk *w, const pllm_lexical *lexical, int64_t row, int64_t stream) {
    const trunk_job *job = w->job;
    const int64_t hidden = job->trunk->hidden, all = wide_of(job->trunk), at = stream * hidden;
    const float epsilon = job->trunk->epsilon;
    float *key = job->lexical + row * (all + hidden) + at, *query = w->own.row;
    const float *value = job->lexical + row * (all + hidden) + all;
    float *input = job->lexical_inputs + row * all + at;
    memcpy(query, w->h + row * all + at, (size_t)hidden * 4);
    job->set->norm(query, lexical->query_norm + at, epsilon, hidden);
    job->set->norm(key, lexical->key_norm + at, epsilon, hidden);
    const float fits = job->set->product(key, query, hidden) / sqrtf((float)hidden);
    const float root = sqrtf(fabsf(fits) > 1e-6F || fits != fits ? fabsf(fits) : 1e-6F);
    const float by = sigmoid(fits > 0 ? root : fits < 0 ? -root : fits);
    for (int64_t d = 0; d < hidden; d++) input[d] = key[d] = by * value[d];
    job->set->norm(input, lexical->input_norm + at, epsilon, hidden);
}

void pllm_add_lexical(walk *w, int64_t index) {
    const trunk_job *job = w->job;
    const pllm_trunk *trunk = job->trunk;
    const pllm_pass *pass = job->pass;
    const pllm_lexical *lexical = trunk->layers[index].lexical;
    const int64_t place = trunk->layers[index].lexical_place, count = trunk->streams, all = wide_of(trunk);
    const int64_t hidden = trunk->hidden, kept = (trunk->lexical_taps - 1) * trunk->lexical_apart;
    const int64_t start = pllm_delta_start_of(trunk, trunk->delta_layers) + place * kept * all;
    const pllm_matrix *matrices[] = {&lexical->key, &lexical->value};
    float *results[] = {job->lexical, job->lexical + all};
    pllm_project_each(w, pass->lexical + place * job->positions * trunk->lexical_width, matrices, results, 2, all + hidden);
    barrier(w);
    for (int64_t task = w->thread; task < job->positions * count; task += w->threads)
        fit(w, lexical, task / count, task % count);
    barrier(w);
    const int last = (int)trunk->lexical_taps;
    for (int64_t position = share_start(w); position < share_end(w); position++) {
        const int64_t row = position / pass->tokens, token = position % pass->tokens;
        const float *history = pass->states_before[row] ? pass->states_before[row] + start : NULL;
        const float *taps[PLLM_MOST_TAPS];
        int first = 0;
        for (int i = 0; i < last; i++) {
            const int64_t at = token - (last - 1 - i) * trunk->lexical_apart;
            if (at < 0 && !history) first = i + 1;
            taps[i] = at >= 0 ? job->lexical_inputs + (row * pass->tokens + at) * all : history ? history + (kept + at) * all : NULL;
        }
        float *convolved = w->own.convolved, *h = w->h + position * all;
        const float *given = job->lexical + position * (all + hidden);
        job->set->convolve(convolved, taps, lexical->kernel, NULL, all, first, last, all);
        for (int64_t d = 0; d < all; d++) h[d] += given[d] + convolved[d];
    }
    barrier(w); /* every thread has read the inputs of before, which may lie where they are kept */
    const convolved inputs = {.from = job->lexical_inputs, .stride = all, .start = start, .channels = all, .kept = kept};
    pllm_keep_inputs(job, &inputs, w->thread, w->threads);
}
