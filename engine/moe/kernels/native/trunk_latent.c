/* Attention over latents: what comes before and after attention itself, which sees one head of keys and values. */

#include "trunk_attention.h"

#include <string.h>

static int64_t latents(const pllm_trunk *trunk) { return trunk->kinds[0].width - trunk->kinds[0].rotated; }

void pllm_latent_norm_rank(const trunk_job *job, int64_t layer, int64_t first, int64_t last, float *to) {
    const pllm_trunk *trunk = job->trunk;
    const int64_t rank = trunk->latent_rank;
    for (int64_t row = first; row < last; row++) {
        float *mine = to + row * rank;
        memcpy(mine, job->latent_rows + row * job->latent_stride + trunk->kinds[0].width, (size_t)rank * 4);
        job->set->norm(mine, trunk->layers[layer].latent->query_norm, trunk->latent_epsilon, rank);
    }
}

/* The part of a head that is rotated, by the angles at `step`, and scaled. */
static void rotate(const trunk_job *job, float *to, const float *from, int64_t step, float scale) {
    const head_shape *shape = job->shapes;
    const int64_t rotated = shape->rotated, half = rotated / 2;
    for (int64_t d = 0; d < rotated; d++) to[job->trunk->paired_rotary ? d / 2 + d % 2 * half : d] = from[d];
    job->set->rotate(to, shape->cosine + step * half, shape->sine + step * half, scale, half);
}

void pllm_latent_keys(const trunk_job *job, int64_t layer, int64_t first, int64_t last, float *scratch) {
    const pllm_trunk *trunk = job->trunk;
    const int64_t count = latents(trunk), rotated = trunk->kinds[0].rotated;
    for (int64_t index = first; index < last; index++) {
        const float *down = job->latent_rows + index * job->latent_stride;
        int64_t row = index;
        const pllm_group *group = group_of(job->pass, &row);
        rotate(job, scratch, down + count, angles_at(job->pass, index), 1.0F);
        memcpy(scratch + rotated, down, (size_t)count * 4);
        job->set->norm(scratch + rotated, trunk->layers[layer].latent->norm, trunk->latent_epsilon, count);
        pllm_store_key_value(job, group, row, 0, trunk->layers[layer].place, position_at(job->pass, index), scratch,
                             NULL);
    }
}

/* y [rows, matrix.rows] = x · matrixᵀ, by this thread alone. */
static void multiply(const trunk_job *job, const own_area *own, const pllm_matrix *matrix, const float *x,
                     int64_t x_stride, int64_t rows, float *y, int64_t y_stride, int reads) {
    pllm_input input;
    pllm_input_describe(&input, job->trunk->set, matrix->dtype, own->latent_input, rows, matrix->columns, reads);
    pllm_input_fill_part(&input, x, x_stride, 0, 1);
    pllm_linear_rows(&input, matrix, NULL, y, y_stride, 0, 0, matrix->rows, own->linear);
}

void pllm_latent_queries(const trunk_job *job, const own_area *own, int64_t layer, int64_t first, int64_t count, int reads) {
    const pllm_trunk *trunk = job->trunk;
    const pllm_latent *latent = trunk->layers[layer].latent;
    const int64_t width = trunk->kinds[0].width, rotated = trunk->kinds[0].rotated;
    const int64_t plain = trunk->latent_plain, each = plain + rotated;
    const int64_t stride = trunk->latent_rank ? job->latent_query_stride : job->latent_stride;
    const float *growth = trunk->layers[layer].grown ? job->pass->query_scale : NULL;
    const float *queries = trunk->latent_rank ? job->latent_queries : job->latent_rows + width;
    queries += first * stride;
    for (int64_t head; (head = pllm_pool_next(job->pool)) < trunk->heads;) {
        const float *from = queries + head * each;
        float *to = job->qkv + first * job->projected + head * width;
        multiply(job, own, latent->keys + head, from, stride, count, to + rotated, job->projected, reads);
        for (int64_t i = 0; i < count; i++) {
            float *query = to + i * job->projected;
            const int64_t step = angles_at(job->pass, first + i);
            const float scale = trunk->attention_scale * (growth ? growth[step] : 1.0F);
            rotate(job, query, from + i * stride + plain, step, scale);
            for (int64_t d = rotated; d < width; d++) query[d] *= scale;
            pllm_turn(trunk, query, width);
        }
    }
}

void pllm_latent_values(const trunk_job *job, const own_area *own, int64_t layer, const float *joined, int64_t rows,
                        int reads) {
    const pllm_trunk *trunk = job->trunk;
    const pllm_latent *latent = trunk->layers[layer].latent;
    const head_shape *shape = job->shapes;
    const int64_t each = trunk->latent_values;
    for (int64_t head; (head = pllm_pool_next(job->pool)) < trunk->heads;)
        multiply(job, own, latent->values + head, joined + head * shape->width + shape->rotated, shape->joined, rows,
                 job->latent_values + head * each, trunk->heads * each, reads);
}
