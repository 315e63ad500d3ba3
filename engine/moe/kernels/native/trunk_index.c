/* Indexers of attention over latents: which positions a query sees, and their keys brought together. See pllm_indexer. */

#include "trunk_attention.h"

#include <math.h>
#include <string.h>

/* Positions whose scores are one task of a decoding pass. */
#define SCORED_TOGETHER 1024
/* Keys that are one task of bringing them together. */
#define GATHERED_TOGETHER 128
#define KEY_EPSILON 1e-6

/* What a position of the pass has projected for an indexer: its key, and then the weights of heads. */
static float *projected(const trunk_job *job, int64_t index) {
    return job->latent_rows + index * job->latent_stride + job->latent_index;
}

/* Rotates a key, or a query, of the position `index` of the pass. */
static void rotate(const trunk_job *job, float *to, const float *from, int64_t index) {
    const head_shape *shape = job->shapes + 1;
    const int64_t rotated = shape->rotated, half = rotated / 2, step = angles_at(job->pass, index);
    for (int64_t d = 0; d < shape->width; d++)
        to[job->trunk->paired_index && d < rotated ? d / 2 + d % 2 * half : d] = from[d];
    job->set->rotate(to, shape->cosine + step * half, shape->sine + step * half, 1.0F, half);
}

/* x = (x - mean) / deviation * weight + bias */
static void norm(float *x, const float *weight, const float *bias, int64_t count) {
    double sum = 0, squares = 0;
    for (int64_t d = 0; d < count; d++) sum += x[d];
    const double mean = sum / (double)count;
    for (int64_t d = 0; d < count; d++) squares += (x[d] - mean) * (x[d] - mean);
    const double by = 1.0 / sqrt(squares / (double)count + KEY_EPSILON);
    for (int64_t d = 0; d < count; d++) x[d] = (float)((x[d] - mean) * by) * weight[d] + bias[d];
}

void pllm_index_keys(const trunk_job *job, int64_t layer, int64_t first, int64_t last, float *scratch) {
    const pllm_indexer *indexer = job->trunk->layers[layer].latent->indexer;
    for (int64_t index = first; index < last; index++) {
        float *key = projected(job, index);
        int64_t row = index;
        const pllm_group *group = group_of(job->pass, &row);
        norm(key, indexer->norm, indexer->norm_bias, job->shapes[1].width);
        rotate(job, scratch, key, index);
        pllm_store_key_value(job, group, row, 1, indexer->place, position_at(job->pass, index), scratch, NULL);
    }
}

/* Scores of positions begin..end) for a position of the pass. Factors that all scores have change no choice, and are left
   out. */
static void score(const trunk_job *job, const own_area *own, int64_t layer, int64_t index, int64_t begin, int64_t end,
                  float *to) {
    const pllm_trunk *trunk = job->trunk;
    const head_shape *shape = job->shapes + 1;
    const pllm_indexer *indexer = trunk->layers[layer].latent->indexer;
    int64_t row = index;
    const pllm_group *group = group_of(job->pass, &row);
    const float *queries = job->latent_queries + index * job->latent_query_stride + trunk->layers[layer].latent->query.rows;
    for (int64_t head = 0; head < shape->heads; head++) {
        float *query = own->rotated + head * shape->width;
        rotate(job, query, queries + head * shape->width, index);
        pllm_turn(trunk, query, shape->width);
        own->queries[head] = query;
    }
    for (int64_t from = begin, until; from < end; from = until) {
        const pllm_segment *segment = pllm_segment_of(group, from);
        until = MIN(end, segment->start + segment->count);
        const int64_t shift = segment->offset - segment->start;
        const attention a = {.queries = own->queries,
                             .keys = kept_keys(job, segment, row, 1, indexer->place),
                             .scores = own->scores, .packed_queries = own->packed_queries, .opened = own->opened,
                             .count = shape->heads, .width = shape->width, .first = from + shift, .last = until + shift,
                             .dtype = trunk->cache_dtype};
        job->set->index(&a, projected(job, index) + shape->width, to + from - begin);
    }
}

/* Whole numbers in the order of the numbers they stand for. */
static uint32_t in_order(float x) {
    uint32_t word;
    memcpy(&word, &x, 4);
    return word & 0x80000000U ? ~word : word | 0x80000000U;
}

/* The places of the `top` largest of `count` scores, ascending; of equal ones the first. */
static void choose(const float *scores, int64_t count, int64_t top, int32_t *to) {
    uint32_t border = 0, known = 0;
    int64_t left = top; /* places that go to scores which begin as the border does */
    for (int shift = 24; shift >= 0; shift -= 8) {
        int64_t counts[256] = {0};
        for (int64_t i = 0; i < count; i++) {
            const uint32_t word = in_order(scores[i]);
            if ((word & known) == border) counts[word >> shift & 255]++;
        }
        uint32_t digit = 255;
        for (; counts[digit] < left; digit--) left -= counts[digit];
        border |= digit << shift;
        known |= 255U << shift;
    }
    for (int64_t i = 0; i < count; i++) {
        const uint32_t word = in_order(scores[i]);
        if (word < border || (word == border && left-- <= 0)) continue;
        *to++ = (int32_t)i;
    }
}

void pllm_choose_prompt(const trunk_job *job, const own_area *own, int64_t layer, int64_t first) {
    const int64_t top = job->trunk->index_top, count = job->positions - first;
    /* Later positions see more and take longer: they go first. */
    for (int64_t task; !pllm_pool_stopped(job->pool) && (task = pllm_pool_next(job->pool)) < count;) {
        const int64_t index = job->positions - 1 - task, seen = position_at(job->pass, index) + 1;
        score(job, own, layer, index, 0, seen, own->index_scores);
        choose(own->index_scores, seen, top, job->picked + index * top);
    }
}

/* Positions from `first` on whose attention is in parts. */
static int64_t few_from(const trunk_job *job, int64_t first) { return MIN(job->chosen_rows, job->positions - first); }

/* The scores of one of them. */
static float *scores_of(const trunk_job *job, int64_t row) { return job->index_scores + row * job->index_length; }

/* Whether a position of the pass does not see all before it. */
static int has_choice(const trunk_job *job, int64_t index) {
    return position_at(job->pass, index) >= job->trunk->index_top;
}

void pllm_score_rows(const trunk_job *job, const own_area *own, int64_t layer, int64_t first) {
    const int64_t parts = divided_up(job->index_length, SCORED_TOGETHER);
    for (int64_t task; (task = pllm_pool_next(job->pool)) < few_from(job, first) * parts;) {
        const int64_t row = task / parts, index = first + row, begin = task % parts * SCORED_TOGETHER;
        const int64_t end = MIN(begin + SCORED_TOGETHER, position_at(job->pass, index) + 1);
        if (begin < end && has_choice(job, index))
            score(job, own, layer, index, begin, end, scores_of(job, row) + begin);
    }
}

void pllm_choose_rows(const trunk_job *job, int64_t first) {
    const int64_t top = job->trunk->index_top;
    for (int64_t row; (row = pllm_pool_next(job->pool)) < few_from(job, first);)
        if (has_choice(job, first + row))
            choose(scores_of(job, row), position_at(job->pass, first + row) + 1, top, job->picked + (first + row) * top);
}

/* Copies `count` units of `size` bytes, PLLM_KEY_BLOCK units from one to the next. */
static void copy_units(char *to, const char *from, int64_t count, size_t size) {
    for (int64_t i = 0; i < count; i++) memcpy(to + i * PLLM_KEY_BLOCK * (int64_t)size, from + i * PLLM_KEY_BLOCK * (int64_t)size, size);
}

/* Copies the key of a place in one block to a place in another. */
static void copy_key(char *to, int64_t to_lane, const char *from, int64_t from_lane, int32_t dtype, int64_t width) {
    const int bits = packed_bits(dtype);
    if (dtype == PLLM_F32) {
        copy_units(to + to_lane * 4, from + from_lane * 4, width, 4);
    } else if (bits == 8) {
        copy_units(to + to_lane * 2, from + from_lane * 2, width / 2, 2);
    } else if (bits) {
        copy_units(to + to_lane, from + from_lane, width / 2, 1);
    } else {
        copy_units(to + to_lane * 4, from + from_lane * 4, width / 2, 4);
    }
    const int64_t scales = PLLM_KEY_BLOCK * width * bits / 8;
    if (bits) copy_units(to + scales + to_lane * 2, from + scales + from_lane * 2, width / CACHE_GROUP, 2);
}

void pllm_gather(const trunk_job *job, int64_t layer, int64_t index, int64_t begin, int64_t end, char *to) {
    const pllm_trunk *trunk = job->trunk;
    const int64_t width = job->shapes[0].width, each = cached_bytes(trunk->cache_dtype, width);
    int64_t row = index;
    const pllm_group *group = group_of(job->pass, &row);
    const int32_t *chosen = job->picked + index * trunk->index_top;
    /* Weights of 0 do not hide what is no number. */
    if (end % PLLM_KEY_BLOCK) memset(to + end / PLLM_KEY_BLOCK * PLLM_KEY_BLOCK * each, 0, (size_t)(PLLM_KEY_BLOCK * each));
    for (int64_t i = begin; i < end; i++) {
        const pllm_segment *segment = pllm_segment_of(group, chosen[i]);
        const int64_t at = segment->offset + chosen[i] - segment->start, lane = at % PLLM_KEY_BLOCK;
        const char *keys = kept_keys(job, segment, row, 0, trunk->layers[layer].place);
        const int64_t to_lane = i % PLLM_KEY_BLOCK;
        copy_key(to + (i - to_lane) * each, to_lane, keys + (at - lane) * each, lane, trunk->cache_dtype, width);
    }
}

void pllm_gather_rows(const trunk_job *job, int64_t layer, int64_t first) {
    const int64_t top = job->trunk->index_top, parts = divided_up(top, GATHERED_TOGETHER);
    for (int64_t task; (task = pllm_pool_next(job->pool)) < few_from(job, first) * parts;) {
        const int64_t row = task / parts, begin = task % parts * GATHERED_TOGETHER;
        if (has_choice(job, first + row))
            pllm_gather(job, layer, first + row, begin, MIN(begin + GATHERED_TOGETHER, top),
                        job->gathered + row * job->gathered_bytes);
    }
}
