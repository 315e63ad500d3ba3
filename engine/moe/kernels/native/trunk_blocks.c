/* Attention to chosen blocks of positions: the keys of blocks, and which of them each position chooses. See pllm_blocks. */

#include "trunk_attention.h"

#include <math.h>
#include <string.h>

static int32_t stored_dtype(const pllm_trunk *trunk) { return trunk->cache_dtype == PLLM_F32 ? PLLM_F32 : PLLM_BF16; }

/* Where a layer keeps what it has of `position` of a row. */
static void *place_of(const trunk_job *job, const pllm_segment *segment, int64_t row, int64_t layer, int64_t position) {
    const pllm_trunk *trunk = job->trunk;
    const int64_t bytes = bytes_of_values(stored_dtype(trunk), trunk->block_width);
    const int64_t at = trunk->layers[layer].place * segment->capacity + segment->offset + position - segment->start;
    return (char *)segment->blocks + row * segment->block_stride + at * bytes;
}

/* Norms and rotates a key or a query of the position `at`. */
static void ready(const trunk_job *job, float *x, const float *norm, int64_t at) {
    const int64_t half = job->trunk->kinds[0].rotated / 2;
    job->set->norm(x, norm, job->trunk->epsilon, job->trunk->block_width);
    job->set->rotate(x, job->pass->block_cosine + at * half, job->pass->block_sine + at * half, 1.0F, half);
}

/* Keeps the key of a position, or if it ends a block, that of the block. */
static void keep_key(const trunk_job *job, const own_area *own, int64_t layer, int64_t row, int64_t token) {
    const pllm_trunk *trunk = job->trunk;
    const int64_t width = trunk->block_width, size = trunk->block_size;
    const int64_t index = row * job->pass->tokens + token, position = position_at(job->pass, index);
    const int32_t dtype = stored_dtype(trunk);
    const float *key = pllm_block_columns(job, layer, index) + trunk->block_heads * width;
    const pllm_group *group = group_of(job->pass, &row);
    void *to = place_of(job, pllm_segment_of(group, position), row, layer, position);
    job->set->store(to, key, width, dtype);
    if ((position + 1) % size) return;
    float *mean = own->block_key, *each = own->block_key + width;
    memset(mean, 0, (size_t)width * 4);
    for (int64_t at = position + 1 - size; at <= position; at++) {
        job->set->load(each, place_of(job, pllm_segment_of(group, at), row, layer, at), 1.0F, width, dtype);
        for (int64_t d = 0; d < width; d++) mean[d] += each[d];
    }
    for (int64_t d = 0; d < width; d++) mean[d] *= 1.0F / (float)size;
    ready(job, mean, trunk->layers[layer].blocks->key_norm, position + 1 - size);
    job->set->store(to, mean, width, dtype);
}

void pllm_keep_block_keys(const trunk_job *job, const own_area *own, int64_t layer, int thread, int threads) {
    const pllm_pass *pass = job->pass;
    if (pass->tokens == 1) {
        for (int64_t row = thread; row < pass->rows; row += threads) keep_key(job, own, layer, row, 0);
        return;
    }
    /* A block's keys are read by the thread that has kept those of this pass. */
    const int64_t size = job->trunk->block_size, start = pass->groups->start, end = start + pass->tokens;
    const int64_t first = start / size, blocks = divided_up(end, size) - first;
    const int64_t from = (first + blocks * thread / threads) * size, to = (first + blocks * (thread + 1) / threads) * size;
    for (int64_t at = MAX(from, start); at < MIN(to, end); at++) keep_key(job, own, layer, 0, at - start);
}

int64_t pllm_block_limit(const trunk_job *job) {
    int64_t longest = 0;
    for (int64_t i = 0; i < job->pass->group_count; i++) longest = MAX(longest, job->pass->groups[i].start);
    return (longest + job->pass->tokens) / job->trunk->block_size + 1;
}

static int64_t whole_blocks(const trunk_job *job, int64_t index) {
    return (position_at(job->pass, index) + 1) / job->trunk->block_size;
}

int pllm_chooses(const trunk_job *job, int64_t index) {
    return whole_blocks(job, index) > job->trunk->block_budget / job->trunk->block_size;
}

int pllm_any_chooses(const trunk_job *job) {
    return pllm_block_limit(job) - 1 > job->trunk->block_budget / job->trunk->block_size;
}

const uint8_t *pllm_chosen(const trunk_job *job, int64_t layer, int64_t index) {
    if (!job->trunk->layers[layer].blocks || !pllm_chooses(job, index)) return NULL;
    return job->chosen + index * pllm_block_limit(job);
}

/* How well blocks first..last) suit the query of a position: the sum over the heads of what is positive. */
static void score(const trunk_job *job, const own_area *own, int64_t layer, int64_t index, int64_t first, int64_t last,
                  float *scores) {
    const pllm_trunk *trunk = job->trunk;
    const int64_t width = trunk->block_width, size = trunk->block_size, heads = trunk->block_heads;
    const int64_t position = position_at(job->pass, index);
    int64_t row = index;
    const pllm_group *group = group_of(job->pass, &row);
    float *queries = own->block_queries, *key = own->block_key;
    memcpy(queries, pllm_block_columns(job, layer, index), (size_t)(heads * width) * 4);
    for (int64_t head = 0; head < heads; head++)
        ready(job, queries + head * width, trunk->layers[layer].blocks->query_norm, position);
    const pllm_segment *segment = group->segments;
    for (int64_t block = first; block < last; block++) {
        const int64_t at = (block + 1) * size - 1;
        while (segment->start + segment->count <= at) segment++;
        job->set->load(key, place_of(job, segment, row, layer, at), 1.0F, width, stored_dtype(trunk));
        float sum = 0;
        for (int64_t head = 0; head < heads; head++) {
            const float fits = job->set->product(queries + head * width, key, width);
            if (fits > 0) sum += fits;
        }
        scores[block] = sum;
    }
}

/* Whether block `a` is chosen after block `b`. Of blocks that suit alike the first goes first. */
static int worse(const float *scores, int32_t a, int32_t b) {
    return scores[a] < scores[b] || (scores[a] == scores[b] && a > b);
}

/* Marks the `most` best of `count` blocks, and the tokens behind the last one. `heap`: `most` numbers, the worst block that is kept on top. */
static void choose(const float *scores, int64_t count, int64_t most, int32_t *heap, uint8_t *chosen) {
    int64_t filled = 0;
    for (int32_t block = 0; block < count; block++) {
        int64_t at;
        if (filled < most) {
            for (at = filled++; at > 0 && worse(scores, block, heap[(at - 1) / 2]); at = (at - 1) / 2)
                heap[at] = heap[(at - 1) / 2];
        } else {
            if (!worse(scores, heap[0], block)) continue;
            at = 0;
            for (int64_t child; (child = 2 * at + 1) < filled; at = child) {
                if (child + 1 < filled && worse(scores, heap[child + 1], heap[child])) child++;
                if (!worse(scores, heap[child], block)) break;
                heap[at] = heap[child];
            }
        }
        heap[at] = block;
    }
    for (int64_t i = 0; i < filled; i++) chosen[heap[i]] = 1;
    chosen[count] = 1;
}

static void choose_of(const trunk_job *job, const own_area *own, int64_t index, const float *scores) {
    uint8_t *chosen = job->chosen + index * pllm_block_limit(job);
    memset(chosen, 0, (size_t)pllm_block_limit(job));
    choose(scores, whole_blocks(job, index), job->trunk->block_budget / job->trunk->block_size, own->block_heap, chosen);
}

void pllm_score_blocks(const trunk_job *job, const own_area *own, int64_t layer, int64_t first, int thread, int threads) {
    const int apart = job->positions - first <= FEW_LIMIT;
    for (int64_t index = first; index < job->positions; index++) {
        if (!pllm_chooses(job, index)) continue;
        const int64_t count = whole_blocks(job, index);
        if (apart) {
            float *scores = job->block_scores + (index - first) * pllm_block_limit(job);
            score(job, own, layer, index, count * thread / threads, count * (thread + 1) / threads, scores);
        } else if (index % threads == thread) {
            score(job, own, layer, index, 0, count, own->block_scores);
            choose_of(job, own, index, own->block_scores);
        }
    }
}

void pllm_choose_blocks(const trunk_job *job, const own_area *own, int64_t first, int thread, int threads) {
    if (job->positions - first > FEW_LIMIT) return;
    for (int64_t index = first + thread; index < job->positions; index += threads)
        if (pllm_chooses(job, index))
            choose_of(job, own, index, job->block_scores + (index - first) * pllm_block_limit(job));
}
