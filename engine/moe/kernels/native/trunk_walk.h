/* A thread's walk through the layers of the trunk: its rows, and projections of them; not part of the library's interface. */
#ifndef PRIVATELLM_TRUNK_WALK_H
#define PRIVATELLM_TRUNK_WALK_H

#include "trunk_attention.h"

/* Matrices of a layer that read the same rows, at most. */
#define MOST_BESIDE 6

typedef struct walk {
    const trunk_job *job;
    own_area own;
    pllm_input input;
    int64_t rows; /* positions that are computed: all, or in the last layer those whose logits are wanted */
    float *h, *normed, *beside;
    double since;
    int thread, threads, few;
    int reads; /* whether the rows are multiplied as those of tokens that are read; see pllm_input */
} walk;

static inline void barrier(walk *w) { pllm_pool_barrier(w->job->pool); }

/* The rows of a thread's share: all of them where every thread has its own copy. */
static inline int64_t share_start(const walk *w) { return w->few ? 0 : w->rows * w->thread / w->threads; }
static inline int64_t share_end(const walk *w) { return w->few ? w->rows : w->rows * (w->thread + 1) / w->threads; }

/* Seconds since the last mark go to `part` of `layer`; thread 0's clock stands for all. */
void pllm_mark(walk *w, int64_t layer, int part);
/* `rows` go on from here. */
void pllm_set_rows(walk *w, int64_t rows);
/* x [rows, columns], `stride` from one row to the next, as the kernels read it for weights like `matrix`. */
void pllm_fill_strided(walk *w, const float *x, int64_t stride, const pllm_matrix *matrix);
void pllm_fill_input(walk *w, const float *x, const pllm_matrix *matrix);
/* A thread's share of the rows of several matrices, taken as one. */
void pllm_project_share(walk *w, const pllm_matrix *const *matrices, float *const *y, int count, int64_t y_stride);
/* The same. No task may have been taken since the last barrier. Of few tokens a thread that is held up, by another program
   or by the memory, gets less. */
void pllm_project_all(walk *w, const pllm_matrix *const *matrices, float *const *y, int count, int64_t y_stride);
void pllm_project(walk *w, const pllm_matrix *matrix, float *y, int64_t y_stride);
/* Products of x [rows, columns] and up to MOST_BESIDE matrices, each of any dtype. Those that are alike are taken together.
   No task may have been taken since the last barrier. */
void pllm_project_each(walk *w, const float *x, const pllm_matrix *const *matrices, float *const *y, int count,
                       int64_t y_stride);
/* y [rows, matrix.rows] of at most FEW_LIMIT rows, by this thread alone or its share of the matrix. */
void pllm_exact_linear(walk *w, const float *x, int64_t rows, const pllm_matrix *matrix, float *y, int alone);

#endif
