/* Alternating updates of residual streams (pllm_altup), and networks with few gates (pllm_sparse). See trunk.h. */

#include "trunk_altup.h"

#include <math.h>
#include <string.h>

static double mean_square(const float *x, int64_t count) {
    double sum = 0;
    for (int64_t d = 0; d < count; d++) sum += (double)x[d] * x[d];
    return sum / (double)count;
}

/* The other streams' products with `matrices`, to job->others. `first`, `next`: in a row of the hidden state the input of
   the first one, and numbers from one's to the next's. */
static void project_others(walk *w, const pllm_matrix *matrices, int64_t first, int64_t next) {
    const pllm_trunk *trunk = w->job->trunk;
    const int64_t hidden = trunk->hidden, all = wide_of(trunk);
    for (int64_t s = 0; s + 1 < trunk->streams; s++) {
        const pllm_matrix *const one = matrices + s;
        float *const to = w->job->others + s * hidden;
        pllm_fill_strided(w, w->h + first + s * next, all, one);
        pllm_project_share(w, &one, &to, 1, all - hidden);
    }
    barrier(w);
}

/* The factor that gives what is in job->others of a row the length of `like`. */
static float factor_of(const float *other, const float *like, int64_t hidden) {
    const double own = mean_square(other, hidden);
    return (float)(sqrt(mean_square(like, hidden)) / sqrt(own > 1e-5 || own != own ? own : 1e-5));
}

void pllm_spread_streams(walk *w) {
    const pllm_trunk *trunk = w->job->trunk;
    const int64_t hidden = trunk->hidden, all = wide_of(trunk);
    project_others(w, trunk->spread, 0, 0);
    for (int64_t row = share_start(w); row < share_end(w); row++) {
        float *h = w->h + row * all;
        for (int64_t at = hidden; at < all; at += hidden) {
            const float *other = w->job->others + row * (all - hidden) + at - hidden;
            const float factor = factor_of(other, h, hidden);
            for (int64_t d = 0; d < hidden; d++) h[at + d] = other[d] * factor;
        }
    }
}

void pllm_gather_streams(walk *w, const float *weight) {
    const pllm_trunk *trunk = w->job->trunk;
    const int64_t hidden = trunk->hidden, all = wide_of(trunk);
    project_others(w, trunk->gather, hidden, hidden);
    for (int64_t row = share_start(w); row < share_end(w); row++) {
        const float *h = w->h + row * all;
        float *to = w->normed + row * hidden;
        memcpy(to, h, (size_t)hidden * 4);
        for (int64_t at = 0; at < all - hidden; at += hidden) {
            const float *other = w->job->others + row * (all - hidden) + at;
            const float factor = factor_of(other, h, hidden);
            for (int64_t d = 0; d < hidden; d++) to[d] += other[d] * factor;
        }
        for (int64_t d = 0; d < hidden; d++) to[d] /= (float)trunk->streams;
        w->job->set->norm(to, weight, trunk->epsilon, hidden);
    }
}

/* The modes of rows of `x`, `stride` apart, to own.modes; at most FEW_LIMIT. Spoils their rows of w->normed. */
static void find_modes(walk *w, const pllm_altup *altup, const float *x, int64_t stride, int64_t row, int64_t rows) {
    const pllm_trunk *trunk = w->job->trunk;
    const int64_t hidden = trunk->hidden;
    float *normed = w->normed + row * hidden;
    for (int64_t i = 0; i < rows; i++) {
        memcpy(normed + i * hidden, x + (row + i) * stride, (size_t)hidden * 4);
        w->job->set->norm(normed + i * hidden, altup->router_norm, trunk->epsilon, hidden);
        for (int64_t d = 0; d < hidden; d++) normed[i * hidden + d] /= (float)hidden;
    }
    pllm_exact_linear(w, normed, rows, &altup->router, w->own.modes, 1);
    for (int64_t i = 0; i < rows * trunk->streams; i++) w->own.modes[i] = tanhf(w->own.modes[i]);
}

/* to [count] = matrix [count, streams] times modes */
static void factors_of(const float *matrix, const float *modes, int64_t count, int64_t streams, float *to) {
    for (int64_t i = 0; i < count; i++) {
        to[i] = 0;
        for (int64_t s = 0; s < streams; s++) to[i] += matrix[i * streams + s] * modes[s];
    }
}

void pllm_predict_streams(walk *w, const pllm_altup *altup, const float *weight) {
    const pllm_trunk *trunk = w->job->trunk;
    const int64_t hidden = trunk->hidden, all = wide_of(trunk), streams = trunk->streams;
    float factors[PLLM_MOST_STREAMS * PLLM_MOST_STREAMS], were[PLLM_MOST_STREAMS];
    for (int64_t first = share_start(w); first < share_end(w); first += FEW_LIMIT) {
        const int64_t rows = MIN(FEW_LIMIT, share_end(w) - first);
        find_modes(w, altup, w->h, all, first, rows);
        for (int64_t row = first; row < first + rows; row++) {
            float *h = w->h + row * all, *to = w->normed + row * hidden;
            factors_of(altup->prediction, w->own.modes + (row - first) * streams, streams * streams, streams, factors);
            for (int64_t d = 0; d < hidden; d++) {
                for (int64_t s = 0; s < streams; s++) were[s] = h[s * hidden + d];
                for (int64_t s = 0; s < streams; s++)
                    for (int64_t from = 0; from < streams; from++) h[s * hidden + d] += factors[s * streams + from] * were[from];
            }
            memcpy(to, h, (size_t)hidden * 4);
            w->job->set->norm(to, weight, trunk->epsilon, hidden);
        }
    }
}

void pllm_add_laurel(walk *w, const pllm_trunk_layer *layer) {
    const trunk_job *job = w->job;
    const pllm_trunk *trunk = job->trunk;
    const pllm_altup *altup = layer->altup;
    const int64_t hidden = trunk->hidden, all = wide_of(trunk);
    pllm_fill_input(w, w->normed, &altup->down);
    pllm_project(w, &altup->down, job->laurel, trunk->laurel_rank);
    barrier(w);
    pllm_fill_input(w, job->laurel, &altup->up);
    pllm_project(w, &altup->up, job->shared_out, hidden);
    barrier(w);
    for (int64_t row = share_start(w); row < share_end(w); row++) {
        const float *h = w->h + row * all;
        float *to = w->normed + row * hidden, *kept = w->beside + row * hidden, *attended = w->own.row;
        memcpy(kept, job->shared_out + row * hidden, (size_t)hidden * 4);
        job->set->norm(kept, altup->norm, trunk->epsilon, hidden);
        memcpy(attended, job->out + row * hidden, (size_t)hidden * 4);
        for (int64_t d = 0; layer->output_bias && d < hidden; d++) attended[d] += layer->output_bias[d];
        job->set->norm(attended, layer->norms->attention, trunk->epsilon, hidden);
        for (int64_t d = 0; d < hidden; d++) kept[d] = (h[d] + attended[d] + (to[d] + kept[d])) * 0.70710678F;
        memcpy(to, kept, (size_t)hidden * 4);
        job->set->norm(to, layer->ffn_norm, trunk->epsilon, hidden);
    }
}

/* x = what of each number exceeds the mean by so many standard deviations, or 0. */
static void cut_off(float *x, float deviations, int64_t count) {
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < count; i++) sum += x[i];
    const double mean = sum / (double)count;
    for (int64_t i = 0; i < count; i++) squares += (x[i] - mean) * (x[i] - mean);
    const float least = (float)(mean + deviations * sqrt(squares / (double)count));
    for (int64_t i = 0; i < count; i++) x[i] = x[i] > least ? x[i] - least : x[i] == x[i] ? 0 : x[i];
}

void pllm_sparse_network(walk *w, const pllm_sparse *sparse) {
    const trunk_job *job = w->job;
    const pllm_trunk *trunk = job->trunk;
    const int64_t width = sparse->gate.rows, both = 2 * width;
    const pllm_matrix *const matrices[] = {&sparse->gate, &sparse->up};
    float *const results[] = {job->sparse, job->sparse + width};
    pllm_project_each(w, w->normed, matrices, results, 2, both);
    barrier(w);
    float *gates = w->few ? w->own.sparse : job->sparse;
    const int64_t stride = w->few ? width : both;
    for (int64_t row = share_start(w); row < share_end(w); row++) {
        float *mine = gates + row * stride;
        if (w->few) memcpy(mine, job->sparse + row * both, (size_t)width * 4);
        cut_off(mine, sparse->deviations, width);
        pllm_gate(trunk->set, &trunk->own_activation, mine, job->sparse + row * both + width, width);
    }
    pllm_fill_strided(w, gates, stride, &sparse->down);
    pllm_project(w, &sparse->down, job->out, trunk->hidden);
    barrier(w);
}

void pllm_correct_streams(walk *w, const pllm_trunk_layer *layer) {
    const trunk_job *job = w->job;
    const pllm_trunk *trunk = job->trunk;
    const pllm_altup *altup = layer->altup;
    const int64_t hidden = trunk->hidden, all = wide_of(trunk), streams = trunk->streams;
    float factors[PLLM_MOST_STREAMS];
    for (int64_t first = share_start(w); first < share_end(w); first += FEW_LIMIT) {
        const int64_t rows = MIN(FEW_LIMIT, share_end(w) - first);
        for (int64_t row = first; row < first + rows; row++) {
            float *given = w->own.row, *kept = w->beside + row * hidden;
            memcpy(given, job->out + row * hidden, (size_t)hidden * 4);
            job->set->norm(given, layer->norms->after, trunk->epsilon, hidden);
            for (int64_t d = 0; d < hidden; d++) kept[d] += given[d];
        }
        find_modes(w, altup, w->beside, hidden, first, rows);
        for (int64_t row = first; row < first + rows; row++) {
            float *h = w->h + row * all, *to = w->normed + row * hidden, *change = w->beside + row * hidden;
            factors_of(altup->correction, w->own.modes + (row - first) * streams, streams, streams, factors);
            for (int64_t d = 0; d < hidden; d++) change[d] -= h[d];
            for (int64_t s = 0; s < streams; s++)
                for (int64_t d = 0; d < hidden; d++) h[s * hidden + d] += change[d] * (factors[s] + 1.0F);
            for (int64_t d = 0; d < hidden; d++) to[d] = altup->scale ? h[d] * altup->scale[d] : h[d];
        }
    }
}
