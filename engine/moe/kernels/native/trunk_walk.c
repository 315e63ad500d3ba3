/* A thread's walk through the layers of the trunk. See trunk_walk.h. */

#define _DEFAULT_SOURCE
#define _DARWIN_C_SOURCE

#include "trunk_walk.h"

#include <time.h>

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

void pllm_mark(walk *w, int64_t layer, int part) {
    if (w->thread) return;
    const double now = seconds_now();
    if (part >= 0) w->job->pass->seconds[layer * PLLM_PARTS + part] += now - w->since;
    w->since = now;
}

void pllm_set_rows(walk *w, int64_t rows) {
    w->rows = rows;
    w->few = rows <= FEW_LIMIT;
    w->h = w->few ? w->own.h : w->job->h;
    w->normed = w->few ? w->own.normed : w->job->normed;
    w->beside = w->few ? w->own.beside : w->job->beside;
}

void pllm_fill_strided(walk *w, const float *x, int64_t stride, const pllm_matrix *matrix) {
    if (!w->few) barrier(w);
    pllm_input_describe(&w->input, w->job->trunk->set, matrix->dtype, w->few ? w->own.input : w->job->input, w->rows,
                        matrix->columns, w->reads);
    pllm_input_fill_part(&w->input, x, stride, w->few ? 0 : w->thread, w->few ? 1 : w->threads);
    if (!w->few) barrier(w);
}

void pllm_fill_input(walk *w, const float *x, const pllm_matrix *matrix) {
    pllm_fill_strided(w, x, matrix->columns, matrix);
}

/* Blocks begin..end) of the rows of several matrices, counted as one. */
static void project_blocks(walk *w, const pllm_matrix *const *matrices, float *const *y, int count, int64_t y_stride,
                           int64_t begin, int64_t end) {
    for (int64_t i = 0, before = 0, own; i < count; i++, before += own) {
        own = divided_up(matrices[i]->rows, PANEL_ROWS);
        const int64_t first = MAX(begin - before, 0), last = MIN(end - before, own);
        if (first < last)
            pllm_linear_rows(&w->input, matrices[i], NULL, y[i], y_stride, 0, first * PANEL_ROWS,
                             MIN(last * PANEL_ROWS, matrices[i]->rows), w->own.linear);
    }
}

static int64_t blocks_of(const pllm_matrix *const *matrices, int count) {
    int64_t blocks = 0;
    for (int i = 0; i < count; i++) blocks += divided_up(matrices[i]->rows, PANEL_ROWS);
    return blocks;
}

void pllm_project_share(walk *w, const pllm_matrix *const *matrices, float *const *y, int count, int64_t y_stride) {
    const int64_t blocks = blocks_of(matrices, count);
    project_blocks(w, matrices, y, count, y_stride, blocks * w->thread / w->threads,
                   blocks * (w->thread + 1) / w->threads);
}

void pllm_project_all(walk *w, const pllm_matrix *const *matrices, float *const *y, int count, int64_t y_stride) {
    if (!w->few) return pllm_project_share(w, matrices, y, count, y_stride);
    const int64_t blocks = blocks_of(matrices, count);
    for (int64_t first, run; (run = pllm_pool_take(w->job->pool, blocks, blocks, &first));)
        project_blocks(w, matrices, y, count, y_stride, first, first + run);
}

void pllm_project(walk *w, const pllm_matrix *matrix, float *y, int64_t y_stride) {
    pllm_project_all(w, &matrix, &y, 1, y_stride);
}

/* Whether the kernels for both take the same input. */
static int read_alike(const pllm_matrix *a, const pllm_matrix *b) {
    if (is_alone(a->dtype) || is_alone(b->dtype)) return a->dtype == b->dtype;
    if (is_grouped(a->dtype)) return is_grouped(b->dtype);
    return is_packed(a->dtype) ? is_packed(b->dtype) : a->dtype == b->dtype;
}

void pllm_project_each(walk *w, const float *x, const pllm_matrix *const *matrices, float *const *y, int count,
                         int64_t y_stride) {
    int done[MOST_BESIDE] = {0};
    for (int i = 0; i < count; i++) {
        const pllm_matrix *alike[MOST_BESIDE];
        float *to[MOST_BESIDE];
        int together = 0;
        for (int j = i; j < count; j++) {
            if (done[j] || !read_alike(matrices[i], matrices[j])) continue;
            done[j] = 1, alike[together] = matrices[j], to[together++] = y[j];
        }
        if (!together) continue;
        pllm_fill_input(w, x, matrices[i]);
        if (i == 0)
            pllm_project_all(w, alike, to, together, y_stride);
        else
            pllm_project_share(w, alike, to, together, y_stride);
    }
}

void pllm_exact_linear(walk *w, const float *x, int64_t rows, const pllm_matrix *matrix, float *y, int alone) {
    pllm_input input;
    pllm_input_describe(&input, w->job->trunk->exact_set, matrix->dtype, w->own.exact, rows, matrix->columns, 0);
    pllm_input_fill_part(&input, x, matrix->columns, 0, 1);
    pllm_linear_part(&input, matrix, NULL, y, matrix->rows, 0, w->own.linear, alone ? 0 : w->thread,
                     alone ? 1 : w->threads);
}
