/* Keys and values into the cache, and attention over it: of a prompt's many positions, or of one position per row. */

#include "trunk_attention.h"

#include <math.h>
#include <string.h>

#define MOST_CHUNKS 16
/* Queries of a single row that a task takes: a key/value head may have many, and be the only one. */
#define SPLIT_QUERIES 8

/* Enough tasks for many threads, and not so many that joining them costs. The number of threads has no part in it, so
   that nodes of a ring that have more or fewer compute the same to the bit. */
static int64_t chunk_length(int64_t positions) {
    return divided_up(divided_up(positions, MOST_CHUNKS), SCORE_TILE) * SCORE_TILE;
}

int64_t pllm_chunk_limit(int64_t positions) { return MIN(MOST_CHUNKS, divided_up(positions, SCORE_TILE)); }

static int64_t lowest(const pllm_trunk_layer *layer, int64_t position) {
    if (layer->chunked && layer->window) return position - position % layer->window;
    return layer->window ? MAX(0, position - layer->window + 1) : 0;
}

/* The position behind those that a token of the pass sees. */
static int64_t behind_seen(const trunk_job *job, int64_t layer, int64_t index) {
    const pllm_pass *pass = job->pass;
    const int64_t own = pass->groups->start + index + 1;
    const int further = pass->seen && (pass->seen_in_full || job->trunk->layers[layer].window);
    return further ? MAX(own, pass->seen[index]) : own;
}

/* ---- Heads ------------------------------------------------------------------------------------------------ */

/* 1 / the root mean square of a whole projection, for families that norm all its heads as one. The squares are added in
   the order in which the rows are stored. */
static float whole_scale(const trunk_job *job, const head_shape *shape, const float *x, const float *bias, int64_t heads) {
    if (job->trunk->head_norm != PLLM_NORM_WHOLE) return 0;
    const int64_t count = heads * shape->width;
    float total = 0;
    for (int64_t i = 0; i < count; i++) {
        const float value = x[i] + (bias ? bias[i] : 0);
        total += value * value;
    }
    return 1.0F / sqrtf(total / (float)count + job->trunk->epsilon);
}

/* A head of a projection: bias, order, norm, clip. `paired`: the values that a rotation turns together lie side by side,
   and are brought apart, so that everything after is the same to the bit in either order. Head norms are
   in the order of `to`. `from` and `to` do not overlap. */
static void ready_head(const trunk_job *job, const head_shape *shape, int64_t width, float *to, const float *from,
                       const float *bias, const float *norm, float whole, int64_t head, int paired) {
    const pllm_trunk *trunk = job->trunk;
    const int64_t base = head * width, half = shape->rotated / 2;
    for (int64_t d = 0; d < width; d++) {
        const int64_t place = paired && d < shape->rotated ? d / 2 + d % 2 * half : d;
        to[place] = from[d] + (bias ? bias[base + d] : 0);
    }
    if (norm && trunk->head_norm == PLLM_NORM_PER_HEAD && !trunk->rotated_first)
        job->set->norm(to, norm, trunk->epsilon, width);
    if (norm && trunk->head_norm == PLLM_NORM_WHOLE)
        for (int64_t d = 0; d < width; d++) to[d] *= whole * norm[base + d];
    if (trunk->clip > 0)
        for (int64_t d = 0; d < width; d++) /* what is no number stays so */
            to[d] = to[d] < -trunk->clip ? -trunk->clip : to[d] > trunk->clip ? trunk->clip : to[d];
}

const pllm_segment *pllm_segment_of(const pllm_group *group, int64_t position) {
    const pllm_segment *segment = group->segments + group->segment_count - 1;
    while (segment->start > position) segment--;
    return segment;
}

/* A head's place among those of all layers of its kind. */
static int64_t head_of(const trunk_job *job, int64_t layer, int64_t head) {
    const int64_t place = job->keys_are_gathered ? 0 : job->trunk->layers[layer].place;
    return place * shape_of(job, layer)->key_value_heads + head;
}

/* What one head of a row keeps in a page: its keys, and its values, or NULL where the keys are the values. */
static char *keys_of(const trunk_job *job, const pllm_segment *segment, int64_t row, int64_t layer, int64_t head) {
    return kept_keys(job, segment, row, shape_of(job, layer)->kind, head_of(job, layer, head));
}

static char *kept_values(const trunk_job *job, const pllm_segment *segment, int64_t row, int64_t kind, int64_t head) {
    const int64_t each = cached_bytes(job->trunk->cache_dtype, job->shapes[kind].value_width);
    return (char *)segment->values[kind] + row * segment->value_stride[kind] + head * segment->capacity * each;
}

static char *values_of(const trunk_job *job, const pllm_segment *segment, int64_t row, int64_t layer, int64_t head) {
    if (job->trunk->latent_values) return NULL;
    return kept_values(job, segment, row, shape_of(job, layer)->kind, head_of(job, layer, head));
}

/* Multiplies `x` by a symmetric orthogonal matrix: Hadamard matrices, as large as `width` allows, along its diagonal. Done
   twice it changes nothing. */
static void turn(float *x, int64_t width) {
    const int64_t size = width & -width;
    const float scale = 1.0F / sqrtf((float)size);
    for (int64_t half = 1; half < size; half *= 2)
        for (int64_t first = 0; first < width; first += 2 * half)
            for (int64_t d = first; d < first + half; d++) {
                const float a = x[d], b = x[d + half];
                x[d] = a + b;
                x[d + half] = a - b;
            }
    for (int64_t d = 0; d < width; d++) x[d] *= scale;
}

void pllm_turn(const pllm_trunk *trunk, float *x, int64_t width) {
    if (trunk->cache_dtype == PLLM_Q4_0) turn(x, width);
}

/* The scale of a group of numbers, rounded away from zero to bfloat16, so that no number is cut off that need not be: in
   8 bits -127 to 127 are used; in 4 bits -8 to 7, and the largest number is -8. It is no number if one of the group is
   none. */
static float group_scale(const float *from, int bits, uint16_t *stored) {
    float most = 0, sum = 0;
    for (int64_t d = 0; d < CACHE_GROUP; d++) {
        if (fabsf(from[d]) > fabsf(most)) most = from[d];
        sum += from[d];
    }
    float scale = isfinite(sum) ? bits == 8 ? fabsf(most) / 127.0F : most / -8.0F : NAN;
    uint32_t word;
    memcpy(&word, &scale, 4);
    if (scale == scale) word = (word + 0xffffU) & 0xffff0000U;
    *stored = (uint16_t)(word >> 16);
    memcpy(&scale, &word, 4);
    return scale;
}

/* A key or value in 8 or 4 bits: `step` pairs from one pair to the next. A pair is of two dimensions, or of two positions of
   one, whose `side` this is. */
static void store_packed(const float *from, uint8_t *to, uint16_t *scales, int64_t width, int bits, int64_t step, int side) {
    for (int64_t first = 0; first < width; first += CACHE_GROUP) {
        const float scale = group_scale(from + first, bits, scales + first / CACHE_GROUP * PLLM_KEY_BLOCK);
        const float by = scale == scale && scale != 0 ? 1.0F / scale : 0;
        for (int64_t d = first; d < first + CACHE_GROUP; d++) {
            const int code = (int)lrintf(from[d] == from[d] ? from[d] * by : 0);
            const int64_t pair = side < 0 ? d / 2 : d;
            const int second = side < 0 ? (int)(d % 2) : side;
            if (bits == 8) {
                to[2 * pair * step + second] = (uint8_t)code;
            } else {
                uint8_t *both = to + pair * step;
                const int nibble = MIN(code, 7) & 15;
                *both = (uint8_t)(second ? (*both & 15) | nibble << 4 : (*both & 240) | nibble);
            }
        }
    }
}

void pllm_store_key_value(const trunk_job *job, const pllm_group *group, int64_t row, int64_t kind, int64_t head,
                          int64_t position, float *key, float *value) {
    const pllm_trunk *trunk = job->trunk;
    const pllm_segment *segment = pllm_segment_of(group, position);
    const head_shape *shape = job->shapes + kind;
    const int64_t width = shape->width, value_width = shape->value_width, at = segment->offset + position - segment->start;
    const int64_t lane = at % PLLM_KEY_BLOCK, block = at - lane;
    char *key_block = kept_keys(job, segment, row, kind, head) + block * cached_bytes(trunk->cache_dtype, width);
    char *value_block = value ? kept_values(job, segment, row, kind, head) : NULL;
    if (value) value_block += block * cached_bytes(trunk->cache_dtype, value_width);
    if (trunk->cache_dtype == PLLM_F32) {
        float *keys = (float *)key_block + lane;
        for (int64_t d = 0; d < width; d++) keys[d * PLLM_KEY_BLOCK] = key[d];
        if (value) memcpy((float *)value_block + lane * value_width, value, (size_t)value_width * 4);
        return;
    }
    const int bits = packed_bits(trunk->cache_dtype);
    if (bits) {
        const int64_t scales = PLLM_KEY_BLOCK * width * bits / 8;
        pllm_turn(trunk, key, width);
        store_packed(key, (uint8_t *)key_block + lane * bits / 4, (uint16_t *)(key_block + scales) + lane, width, bits,
                     PLLM_KEY_BLOCK, -1);
        if (!value) return;
        pllm_turn(trunk, value, value_width);
        store_packed(value, (uint8_t *)value_block + lane / 2 * value_width * bits / 4,
                     (uint16_t *)(value_block + PLLM_KEY_BLOCK * value_width * bits / 8) + lane, value_width, bits, 1,
                     (int)(lane % 2));
        return;
    }
    const uint16_t *key_words = (const uint16_t *)key, *value_words = (const uint16_t *)value;
    job->set->store(key, key, width, PLLM_BF16);
    uint16_t *keys = (uint16_t *)key_block + 2 * lane;
    for (int64_t d = 0; d < width; d += 2) {
        keys[d * PLLM_KEY_BLOCK] = key_words[d];
        keys[d * PLLM_KEY_BLOCK + 1] = key_words[d + 1];
    }
    if (!value) return;
    job->set->store(value, value, value_width, PLLM_BF16);
    uint16_t *values = (uint16_t *)value_block + lane / 2 * 2 * value_width + lane % 2;
    for (int64_t d = 0; d < value_width; d++) values[2 * d] = value_words[d];
}

/* The new key and value of one head, from `qkv` of its row, into the cache. `scratch`: floats of both. */
static void add_key_value(const trunk_job *job, const pllm_group *group, const float *qkv, int64_t row, int64_t layer,
                          int64_t head, int64_t position, float whole, float *scratch) {
    const pllm_trunk *trunk = job->trunk;
    const pllm_trunk_layer *weights = trunk->layers + layer;
    const head_shape *shape = shape_of(job, layer);
    const int64_t width = shape->width, value_width = shape->value_width;
    const int64_t half = shape->rotated / 2, step = angle_of(job->pass, group, position);
    const float *keys = qkv + shape->queries, *values = weights->value.data ? qkv + shape->values : keys;
    float *key = scratch, *value = scratch + width;
    ready_head(job, shape, width, key, keys + head * width, weights->key_bias, weights->key_norm, whole, head,
               trunk->paired_rotary);
    job->set->rotate(key, shape->cosine + step * half, shape->sine + step * half, 1.0F, half);
    if (trunk->rotated_first && weights->key_norm) job->set->norm(key, weights->key_norm, trunk->epsilon, width);
    ready_head(job, shape, value_width, value, values + head * value_width, weights->value_bias, NULL, 0, head, 0);
    if (weights->value_norm) job->set->norm(value, weights->value_norm, trunk->epsilon, value_width);
    for (int64_t d = 0; trunk->value_scale != 1 && d < value_width; d++) value[d] *= trunk->value_scale;
    pllm_store_key_value(job, group, row, shape->kind, head_of(job, layer, head), position, key, value);
}

static void ready_query(const trunk_job *job, const pllm_group *group, float *to, const float *qkv, int64_t layer,
                        int64_t head, int64_t position, float whole) {
    const pllm_trunk *trunk = job->trunk;
    const pllm_trunk_layer *weights = trunk->layers + layer;
    const head_shape *shape = shape_of(job, layer);
    const int64_t half = shape->rotated / 2, step = angle_of(job->pass, group, position);
    ready_head(job, shape, shape->width, to, qkv + head * shape->query, weights->query_bias, weights->query_norm, whole, head,
               trunk->paired_rotary);
    float scale = trunk->attention_scale;
    if (weights->grown && job->pass->query_scale) scale *= job->pass->query_scale[step];
    if (trunk->rotated_first) {
        job->set->rotate(to, shape->cosine + step * half, shape->sine + step * half, 1.0F, half);
        if (weights->query_norm) job->set->norm(to, weights->query_norm, trunk->epsilon, shape->width);
        for (int64_t d = 0; d < shape->width; d++) to[d] *= scale;
        pllm_turn(trunk, to, shape->width);
        return;
    }
    job->set->rotate(to, shape->cosine + step * half, shape->sine + step * half, scale, half);
    for (int64_t d = shape->rotated; d < shape->width; d++) to[d] *= scale;
    pllm_turn(trunk, to, shape->width);
}

/* Scales what a head has gathered by its gate, from `qkv` of its row. */
static void gate_head(const trunk_job *job, int64_t layer, const float *qkv, int64_t head, float *gathered) {
    const pllm_trunk *trunk = job->trunk;
    const head_shape *shape = shape_of(job, layer);
    const int64_t width = shape->value_width, rows = trunk->layers[layer].gate.rows;
    if (trunk->gated_queries) job->set->gate(gathered, qkv + head * shape->query + shape->width, width);
    if (!rows) return;
    const float *gates = qkv + shape->gates;
    if (rows > shape->heads && !trunk->softplus_gates) {
        job->set->gate(gathered, gates + head * width, width);
        return;
    }
    const int64_t each = rows > shape->heads;
    for (int64_t d = 0; d < width; d++) {
        const float value = gates[each ? head * width + d : head];
        gathered[d] *= trunk->softplus_gates ? pllm_softplus(value) : 1.0F / (1.0F + expf(-value));
    }
}

/* ---- A prompt --------------------------------------------------------------------------------------------- */

void pllm_prepare_prompt(const trunk_job *job, const own_area *own, int64_t layer, int64_t first_query, int thread,
                         int threads) {
    const pllm_trunk *trunk = job->trunk;
    const pllm_trunk_layer *weights = trunk->layers + layer;
    const head_shape *shape = shape_of(job, layer);
    const pllm_group *group = job->pass->groups;
    const int64_t start = group->start, end = start + job->positions;
    /* Two neighbouring values may share bytes, so that one thread has both of them. */
    const int64_t low = thread ? (start + job->positions * thread / threads) / 2 * 2 : start;
    const int64_t high = thread + 1 < threads ? (start + job->positions * (thread + 1) / threads) / 2 * 2 : end;
    for (int64_t t = MAX(low - start, 0); t < high - start; t++) {
        float *qkv = job->qkv + t * job->projected;
        const int64_t position = start + t;
        const int64_t added = weights->key.data ? shape->key_value_heads : 0;
        float whole = added ? whole_scale(job, shape, qkv + shape->queries, weights->key_bias, added) : 0;
        for (int64_t head = 0; head < added; head++)
            add_key_value(job, group, qkv, 0, layer, head, position, whole, own->rotated);
        if (t < first_query) continue;
        whole = whole_scale(job, shape, qkv, weights->query_bias, shape->heads);
        for (int64_t head = 0; head < shape->heads; head++) {
            ready_query(job, group, own->rotated, qkv, layer, head, position, whole);
            memcpy(qkv + head * shape->query, own->rotated, (size_t)shape->width * 4);
        }
    }
}

/* `sinks`: of the heads of the group, or NULL. A sink counts as a key that was seen before the others. */
static void reset(const own_area *own, int64_t count, int64_t width, const float *sinks, int64_t group) {
    for (int64_t i = 0; i < count; i++) {
        own->maximum[i] = sinks ? sinks[i % group] : -INFINITY;
        own->total[i] = sinks ? 1 : 0;
    }
    for (int64_t i = 0; i < count * width; i++) own->sum[i] = 0;
}

/* What `count` queries of a key/value head have gathered, from position `first` of the pass on, into job->attended. */
static void finish(const trunk_job *job, const own_area *own, int64_t layer, int64_t head, int64_t first, int64_t count) {
    const head_shape *shape = shape_of(job, layer);
    const int64_t width = shape->value_width, group = shape->group;
    for (int64_t i = 0; i < count; i++) {
        float *to = job->attended + (first + i / group) * shape->joined + (head * group + i % group) * width;
        const float by = 1.0F / own->total[i];
        for (int64_t d = 0; d < width; d++) to[d] = own->sum[i * width + d] * by;
        pllm_turn(job->trunk, to, width);
        gate_head(job, layer, job->qkv + (first + i / group) * job->projected, head * group + i % group, to);
    }
}

/* Attention of position `index` of a prompt to what it has chosen. */
static void attend_chosen(const trunk_job *job, const own_area *own, int64_t layer, int64_t index) {
    const pllm_trunk *trunk = job->trunk;
    const head_shape *shape = shape_of(job, layer);
    pllm_gather(job, layer, index, 0, trunk->index_top, own->gathered);
    reset(own, shape->heads, shape->value_width, NULL, shape->group);
    for (int64_t i = 0; i < shape->heads; i++) {
        own->queries[i] = job->qkv + index * job->projected + i * shape->query;
        own->low[i] = 0;
        own->high[i] = trunk->index_top;
    }
    const attention a = {.queries = own->queries, .low = own->low, .high = own->high, .keys = own->gathered,
                         .scores = own->scores, .packed_queries = own->packed_queries,
                         .packed_weights = own->packed_weights, .opened = own->opened, .turned = own->turned,
                         .maximum = own->maximum, .total = own->total, .sum = own->sum, .count = shape->heads,
                         .width = shape->width, .value_width = shape->value_width, .last = trunk->index_top, .dtype = trunk->cache_dtype, .cap = trunk->scores_cap};
    job->set->attend(&a);
    finish(job, own, layer, 0, index, shape->heads);
}

static void attend_block(const trunk_job *job, const own_area *own, int64_t layer, int64_t head, int64_t first,
                         int64_t last) {
    const pllm_trunk *trunk = job->trunk;
    const pllm_group *rows = job->pass->groups;
    const head_shape *shape = shape_of(job, layer);
    const int64_t width = shape->value_width, group = shape->group, count = (last - first) * group;
    const int64_t lowest_seen = lowest(trunk->layers + layer, rows->start + first);
    int64_t behind = 0;
    for (int64_t index = first; index < last; index++) behind = MAX(behind, behind_seen(job, layer, index));
    const float *sinks = trunk->layers[layer].sinks;
    reset(own, count, width, sinks ? sinks + head * group : NULL, group);
    for (int64_t i = 0; i < count; i++)
        own->queries[i] = job->qkv + (first + i / group) * job->projected + (head * group + i % group) * shape->query;
    const int chooses = trunk->layers[layer].blocks && pllm_chooses(job, last - 1);
    for (int64_t i = 0; chooses && i < count; i++) own->chosen[i] = pllm_chosen(job, layer, first + i / group);
    for (int64_t s = 0; s < rows->segment_count; s++) {
        const pllm_segment *segment = rows->segments + s;
        const int64_t from = MAX(segment->start, lowest_seen);
        const int64_t to = MIN(segment->start + segment->count, behind);
        if (from >= to) continue;
        const int64_t shift = segment->offset - segment->start;
        for (int64_t i = 0; i < count; i++) {
            const int64_t index = first + i / group;
            own->low[i] = lowest(trunk->layers + layer, rows->start + index) + shift;
            own->high[i] = behind_seen(job, layer, index) + shift;
        }
        const attention a = {.queries = own->queries, .low = own->low, .high = own->high,
                             .keys = keys_of(job, segment, 0, layer, head),
                             .values = values_of(job, segment, 0, layer, head),
                             .scores = own->scores, .packed_queries = own->packed_queries,
                             .packed_weights = own->packed_weights, .opened = own->opened, .turned = own->turned,
                             .chosen = chooses ? own->chosen : NULL, .chosen_size = trunk->block_size, .chosen_start = shift,
                             .maximum = own->maximum, .total = own->total, .sum = own->sum, .count = count,
                             .width = shape->width, .value_width = width, .first = from + shift, .last = to + shift, .dtype = trunk->cache_dtype, .cap = trunk->scores_cap};
        job->set->attend(&a);
    }
    finish(job, own, layer, head, first, count);
}

void pllm_attend_prompt(const trunk_job *job, const own_area *own, int64_t layer) {
    const head_shape *shape = shape_of(job, layer);
    const int64_t whole = pllm_unchosen(job), chosen = job->positions - whole;
    const int64_t heads = shape->key_value_heads, blocks = divided_up(whole, shape->block);
    /* Later blocks see more and take longer: they go first. */
    for (int64_t task; !pllm_pool_stopped(job->pool) && (task = pllm_pool_next(job->pool)) < chosen + heads * blocks;) {
        if (task < chosen) {
            attend_chosen(job, own, layer, whole + task);
            continue;
        }
        task -= chosen;
        const int64_t block = blocks - 1 - task / heads, first = block * shape->block;
        attend_block(job, own, layer, task % heads, first, MIN(first + shape->block, whole));
    }
}

/* ---- One position per row --------------------------------------------------------------------------------- */

/* The keys that rows of a group have chosen, as a group of their own. */
typedef struct gathered_keys {
    trunk_job job;
    pllm_group group;
    pllm_segment segment;
} gathered_keys;

/* The keys that queries see, and the last position among them. */
typedef struct seen_by {
    const trunk_job *job;
    const pllm_group *group;
    int64_t at;
} seen_by;

/* What the queries of a group's rows at a position see: the group's keys up to there, or those that they have chosen.
   `place`: of the first row in job->gathered. */
static seen_by seen_at(const trunk_job *job, const pllm_group *group, int64_t place, int64_t at, gathered_keys *gathered) {
    const int64_t top = job->trunk->index_top;
    if (!job->picked || at < top) return (seen_by){job, group, at};
    gathered->segment = (pllm_segment){.keys = {job->gathered + place * job->gathered_bytes},
                                       .key_stride = {group->rows > 1 ? job->gathered_bytes : 0},
                                       .capacity = divided_up(top, PLLM_KEY_BLOCK) * PLLM_KEY_BLOCK,
                                       .count = top};
    gathered->group = (pllm_group){.segments = &gathered->segment, .segment_count = 1, .rows = group->rows};
    gathered->job = *job;
    gathered->job.keys_are_gathered = 1;
    return (seen_by){&gathered->job, &gathered->group, top - 1};
}

/* The chunk after `previous` (NULL: the first), of what a query at `at` sees; 0 at the end. */
static int next_chunk(const trunk_job *job, const pllm_group *group, int64_t layer, int64_t at, int64_t first,
                      chunk *next) {
    first = MAX(first, lowest(job->trunk->layers + layer, at));
    if (first > at) return 0;
    const pllm_segment *segment = pllm_segment_of(group, first);
    const int64_t end = MIN(segment->start + segment->count, at + 1), length = chunk_length(at + 1);
    const int64_t last = MIN(end, (first / length + 1) * length);
    const head_shape *shape = shape_of(job, layer);
    const int shared = group->rows > 1 && segment->key_stride[shape->kind] == 0;
    *next = (chunk){segment, first, last, shared ? divided_up(group->rows, shape->row_group) : group->rows, shared};
    return 1;
}

static int64_t part_index(const trunk_job *job, const head_shape *shape, int64_t head, int64_t index, int64_t row) {
    return ((head * job->chunk_limit + index) * job->part_rows + row) * shape->group;
}

/* `task` of the chunk: rows of `head` that are taken together, or of a single row one of `splits` parts of the head's
   queries. `qkv` is the first row's of `rows_of`, and `place` that row's place among the parts. */
static void attend_chunk(const trunk_job *job, const own_area *own, const pllm_group *rows_of, int64_t layer,
                         const float *qkv, int64_t at, int stored, const chunk *c, int64_t index, int64_t head,
                         int64_t task, int64_t splits, int64_t place) {
    const pllm_trunk *trunk = job->trunk;
    const pllm_trunk_layer *weights = trunk->layers + layer;
    const head_shape *shape = shape_of(job, layer);
    const int64_t width = shape->width, value_width = shape->value_width, group = shape->group;
    const int64_t row = c->together ? task * shape->row_group : task / splits;
    const int64_t rows = c->together ? MIN(shape->row_group, rows_of->rows - row) : 1;
    const int64_t begin = group * (task % splits) / splits, count = rows * (group * (task % splits + 1) / splits - begin);
    const int64_t shift = c->segment->offset - c->segment->start;
    if (!stored && weights->key.data && c->first <= at && at < c->last) {
        const float *mine = qkv + row * job->projected;
        const float whole = whole_scale(job, shape, mine + shape->queries, weights->key_bias, shape->key_value_heads);
        add_key_value(job, rows_of, mine, row, layer, head, at, whole, own->rotated);
    }
    const int chooses = weights->blocks && pllm_chooses(job, (qkv - job->qkv) / job->projected);
    for (int64_t i = 0; i < count; i++) {
        const float *mine = qkv + (row + i / group) * job->projected;
        const int64_t query = head * group + begin + i % group;
        if (chooses) own->chosen[i] = pllm_chosen(job, layer, (mine - job->qkv) / job->projected);
        own->low[i] = c->first + shift;
        own->high[i] = c->last + shift;
        if (stored) {
            own->queries[i] = mine + query * shape->query;
        } else {
            const float whole = whole_scale(job, shape, mine, weights->query_bias, shape->heads);
            ready_query(job, rows_of, own->rotated + i * width, mine, layer, query, at, whole);
            own->queries[i] = own->rotated + i * width;
        }
    }
    const int64_t part = part_index(job, shape, head, index, row + place) + begin;
    for (int64_t i = 0; i < count; i++) {
        job->part_maximum[part + i] = -INFINITY;
        job->part_total[part + i] = 0;
    }
    float *sum = job->part_sum + part * value_width;
    for (int64_t i = 0; i < count * value_width; i++) sum[i] = 0;
    const attention a = {.queries = own->queries, .low = own->low, .high = own->high,
                         .keys = keys_of(job, c->segment, row, layer, head),
                         .values = values_of(job, c->segment, row, layer, head),
                         .scores = own->scores, .packed_queries = own->packed_queries,
                         .packed_weights = own->packed_weights, .opened = own->opened, .turned = own->turned,
                         .chosen = chooses ? own->chosen : NULL, .chosen_size = trunk->block_size, .chosen_start = shift,
                         .maximum = job->part_maximum + part, .total = job->part_total + part, .sum = sum,
                         .count = count, .width = width, .value_width = value_width, .first = c->first + shift, .last = c->last + shift,
                         .dtype = trunk->cache_dtype, .cap = trunk->scores_cap};
    job->set->attend(&a);
}

/* One query per row of a group, at `at`. `task` is the thread's next one, counted from `before`, where those of this
   position begin; both go on behind it. */
static void attend_position(const trunk_job *job, const own_area *own, const pllm_group *group, int64_t layer,
                            const float *qkv, int64_t at, int stored, int64_t place, int64_t *before, int64_t *task) {
    const head_shape *shape = shape_of(job, layer);
    const int64_t heads = shape->key_value_heads;
    chunk c = {0};
    int64_t index = 0;
    for (int64_t first = 0; next_chunk(job, group, layer, at, first, &c); first = c.last, index++) {
        /* A key that is not stored yet is stored by the one task that needs it first. */
        const int64_t splits = stored && !c.together ? divided_up(shape->group, SPLIT_QUERIES) : 1;
        const int64_t tasks = heads * c.groups * splits;
        for (; *task < *before + tasks; *task = pllm_pool_next(job->pool))
            attend_chunk(job, own, group, layer, qkv, at, stored, &c, index, (*task - *before) % heads,
                         (*task - *before) / heads, splits, place);
        *before += tasks;
    }
}

void pllm_attend_rows(const trunk_job *job, const own_area *own, int64_t layer, const float *qkv, int64_t step,
                      int stored) {
    int64_t before = 0, task = pllm_pool_next(job->pool), row = 0;
    for (int64_t i = 0; i < job->pass->group_count; i++) {
        const pllm_group *group = job->pass->groups + i;
        gathered_keys gathered;
        seen_by seen = seen_at(job, group, row, group->start + step, &gathered);
        attend_position(seen.job, own, seen.group, layer, qkv + row * job->projected, seen.at, stored, row, &before, &task);
        row += group->rows;
    }
}

void pllm_attend_steps(const trunk_job *job, const own_area *own, int64_t layer) {
    int64_t before = 0, task = pllm_pool_next(job->pool);
    for (int64_t i = 0; i < job->positions; i++) {
        gathered_keys gathered;
        seen_by seen = seen_at(job, job->pass->groups, i, job->pass->groups->start + i, &gathered);
        attend_position(seen.job, own, seen.group, layer, job->qkv + i * job->projected, seen.at, 1, i, &before, &task);
    }
}

/* Joins the parts of rows first..last) of a group at a position, whose first row is at `place` among the parts. */
static void join(const trunk_job *job, const pllm_group *rows, int64_t layer, const float *qkv, int64_t at, int64_t first,
                 int64_t last, int64_t place, float *to) {
    const head_shape *shape = shape_of(job, layer);
    const int64_t width = shape->value_width, heads = shape->heads;
    const float *sinks = job->trunk->layers[layer].sinks;
    chunk c = {0};
    int64_t chunks = 0;
    for (int64_t from = 0; next_chunk(job, rows, layer, at, from, &c); from = c.last) chunks++;
    for (int64_t row = first; row < last; row++)
        for (int64_t head = 0; head < heads; head++) {
            const int64_t group = head / shape->group, query = head % shape->group;
            float *result = to + row * shape->joined + head * width;
            float most = sinks ? sinks[head] : -INFINITY;
            for (int64_t i = 0; i < chunks; i++)
                most = MAX(most, job->part_maximum[part_index(job, shape, group, i, row + place) + query]);
            float total = sinks ? expf(sinks[head] - most) : 0;
            for (int64_t d = 0; d < width; d++) result[d] = 0;
            for (int64_t i = 0; i < chunks; i++) {
                const int64_t part = part_index(job, shape, group, i, row + place) + query;
                const float by = expf(job->part_maximum[part] - most);
                const float *sum = job->part_sum + part * width;
                total += job->part_total[part] * by;
                for (int64_t d = 0; d < width; d++) result[d] += sum[d] * by;
            }
            for (int64_t d = 0; d < width; d++) result[d] /= total;
            pllm_turn(job->trunk, result, width);
            gate_head(job, layer, qkv + row * job->projected, head, result);
        }
}

void pllm_join_rows(const trunk_job *job, int64_t layer, const float *qkv, int64_t step, int64_t first, int64_t last,
                    float *to) {
    int64_t row = 0;
    for (int64_t i = 0; i < job->pass->group_count; i++) {
        const pllm_group *group = job->pass->groups + i;
        gathered_keys gathered;
        seen_by seen = seen_at(job, group, row, group->start + step, &gathered);
        join(seen.job, seen.group, layer, qkv + row * job->projected, seen.at, MAX(first - row, 0),
             MIN(last - row, group->rows), row, to + row * shape_of(job, layer)->joined);
        row += group->rows;
    }
}

void pllm_join_steps(const trunk_job *job, int64_t layer, int64_t first, int64_t last, float *to) {
    for (int64_t i = first; i < last; i++) {
        gathered_keys gathered;
        seen_by seen = seen_at(job, job->pass->groups, i, job->pass->groups->start + i, &gathered);
        join(seen.job, seen.group, layer, job->qkv + i * job->projected, seen.at, 0, 1, i,
             to + i * shape_of(job, layer)->joined);
    }
}
