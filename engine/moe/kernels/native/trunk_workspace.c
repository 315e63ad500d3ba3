/* The memory of a pass: what all threads share, and what each has to itself. See trunk_attention.h. */

#include "trunk_attention.h"

/* Values of a prefill's query block, per head group; the larger, the more often a key is used once it is loaded. */
#define BLOCK_QUERIES 48

static const trunk_set *trunk_set_of(int set) {
    switch (set) {
#if defined(__x86_64__)
    case PLLM_AVX2: return &pllm_trunk_avx2;
    case PLLM_AVX512F: return &pllm_trunk_avx512f;
    case PLLM_AVX512_BF16: return &pllm_trunk_avx512_bf16;
#endif
#if defined(__aarch64__)
    case PLLM_NEON: return &pllm_trunk_neon;
#endif
    default: return &pllm_trunk_scalar;
    }
}

static void *take(char **at, int64_t count, size_t size) {
    void *place = *at;
    *at += aligned((size_t)count * size);
    return place;
}

static int64_t expert_count(const pllm_trunk *trunk) {
    int64_t most = 1;
    for (int64_t i = 0; i < trunk->layer_count; i++) most = MAX(most, trunk->layers[i].router.rows);
    return most;
}

static void experts_bytes(const trunk_job *job, size_t *own, size_t *shared) {
    *own = *shared = 0;
    for (int64_t i = 0; i < job->trunk->layer_count; i++) {
        const pllm_trunk_layer *layer = job->trunk->layers + i;
        size_t one = 0, all = 0;
        if (layer->experts)
            pllm_experts_bytes(layer->experts, job->positions, layer->router.data ? job->trunk->top_k : 1, 0, &one, &all);
        *own = MAX(*own, one), *shared = MAX(*shared, all);
        if (!layer->shared) continue;
        pllm_experts_bytes(layer->shared, job->positions, 1, 0, &one, &all);
        *own = MAX(*own, one), *shared = MAX(*shared, all);
    }
}

/* Numbers that routed experts read of a narrowed hidden state, at most. */
static int64_t narrow_most(const pllm_trunk *trunk) {
    int64_t most = 0;
    for (int64_t i = 0; i < trunk->layer_count; i++)
        if (trunk->layers[i].narrow.data) most = MAX(most, trunk->layers[i].narrow.rows);
    return most;
}

static int has_norms(const pllm_trunk *trunk) { return trunk->layers[0].norms != NULL; }

static int64_t widest_head(const pllm_trunk *trunk) {
    int64_t most = 0;
    for (int64_t kind = 0; kind < trunk->kind_count; kind++) most = MAX(most, trunk->kinds[kind].width);
    return most;
}

static int64_t widest_value(const pllm_trunk *trunk) {
    int64_t most = 0;
    for (int64_t kind = 0; kind < trunk->kind_count; kind++) most = MAX(most, trunk->kinds[kind].value_width);
    return most;
}

static int64_t most_heads(const pllm_trunk *trunk) {
    int64_t most = 0;
    for (int64_t kind = 0; kind < trunk->kind_count; kind++) most = MAX(most, trunk->kinds[kind].heads);
    return most;
}

/* Rows of the largest gate of what attention has gathered. */
static int64_t most_gates(const pllm_trunk *trunk) {
    int64_t most = 0;
    for (int64_t i = 0; i < trunk->layer_count; i++) most = MAX(most, trunk->layers[i].gate.rows);
    return most;
}

/* The last layer that adds keys or changes a state. Behind it only rows whose logits are wanted go on. */
static int64_t last_kept(const pllm_trunk *trunk, const pllm_pass *pass) {
    int64_t last = trunk->layer_count - 1;
    if (pass->every) return trunk->layer_count;
    for (; last > 0; last--) {
        const pllm_trunk_layer *layer = trunk->layers + last;
        if (layer->key.data || layer->delta || layer->latent || layer->convolution) break;
    }
    return last;
}

/* Values of a position that an output projection reads, at most. */
static int64_t joined_most(const pllm_trunk *trunk) {
    const int64_t delta = trunk->delta_value_heads * trunk->delta_value_width;
    return MAX(MAX(most_heads(trunk) * widest_value(trunk), delta), trunk->convolution_layers ? trunk->hidden : 0);
}

/* Blocks of a position from which some have to be chosen; 0 where all are seen. */
static int64_t most_blocks(const trunk_job *job) {
    return job->trunk->block_size && pllm_any_chooses(job) ? pllm_block_limit(job) : 0;
}

/* Numbers of a position's residual streams, if there are several. */
static int64_t streams_most(const pllm_trunk *trunk) { return trunk->stream_rank ? MAX(wide_of(trunk), trunk->stream_rank) : 0; }

/* Columns of the widest matrix that reads job->input or a thread's own. */
static int64_t widest_input(const pllm_trunk *trunk) {
    const int64_t latent = MAX(trunk->latent_rank, trunk->heads * trunk->latent_values);
    const int64_t most = MAX(MAX(trunk->hidden, joined_most(trunk)), MAX(latent, trunk->own_width));
    const int64_t streams = MAX(MAX(streams_most(trunk), trunk->lexical_width), MAX(trunk->laurel_rank, trunk->sparse_width));
    return MAX(MAX(most, narrow_most(trunk)), streams);
}

size_t pllm_own_layout(const trunk_job *job, own_area *own, char *base) {
    const pllm_trunk *trunk = job->trunk;
    const int64_t few = MIN(job->positions, FEW_LIMIT), widest = widest_input(trunk);
    const int64_t width = widest_head(trunk), values = widest_value(trunk), k = MAX(trunk->top_k, 1);
    int64_t queries = 0;
    for (int64_t kind = 0; kind < trunk->kind_count; kind++) {
        const head_shape *heads = job->shapes + kind;
        const int64_t together = is_text(job->pass) ? heads->block : MIN(job->pass->rows, heads->row_group);
        queries = MAX(queries, together * heads->group);
    }
    char *at = base;
    own->h = take(&at, few * wide_of(trunk), 4);
    own->normed = take(&at, few * trunk->hidden, 4);
    own->beside = take(&at, has_norms(trunk) ? few * trunk->hidden : 0, 4);
    own->own_input = take(&at, trunk->own_width ? trunk->layer_count * trunk->own_width : 0, 4);
    own->gated = take(&at, few * trunk->own_width, 4);
    own->row = take(&at, trunk->hidden, 4);
    own->wide = take(&at, few * streams_most(trunk), 4);
    own->stream_ranks = take(&at, few * trunk->stream_rank, 4);
    own->injection = take(&at, few * trunk->streams, 4);
    const int64_t blocks = most_blocks(job);
    own->chosen = take(&at, blocks ? queries : 0, sizeof(uint8_t *));
    own->block_queries = take(&at, trunk->block_heads * trunk->block_width, 4);
    own->block_key = take(&at, 2 * trunk->block_width, 4);
    own->block_scores = take(&at, job->positions > FEW_LIMIT ? blocks : 0, 4);
    own->block_heap = take(&at, blocks ? trunk->block_budget / trunk->block_size : 0, 4);
    own->modes = take(&at, trunk->spread ? FEW_LIMIT * trunk->streams : 0, 4);
    own->sparse = take(&at, few * trunk->sparse_width, 4);
    own->convolved = take(&at, trunk->lexical_taps ? wide_of(trunk) : 0, 4);
    own->joined = take(&at, few * joined_most(trunk), 4);
    own->shared_weights = take(&at, few, 4);
    own->logits = take(&at, FEW_LIMIT * expert_count(trunk), 4);
    own->weights = take(&at, few * k, 4);
    own->indices = take(&at, few * k, 4);
    own->input = take(&at, 1, pllm_input_bytes(few, widest));
    own->exact = take(&at, 1, pllm_input_bytes(FEW_LIMIT, trunk->hidden));
    own->linear = take(&at, 1, pllm_linear_scratch());
    own->experts = take(&at, 1, job->own_experts);
    own->rotated = take(&at, MAX(queries * width, width + values), 4);
    own->scores = take(&at, queries * SCORE_TILE, 4);
    own->packed_queries = take(&at, queries * width, 2);
    own->packed_weights = take(&at, queries * SCORE_TILE, 2);
    own->opened = take(&at, packed_bits(trunk->cache_dtype) ? SCORE_TILE * MAX(width, values) : 0, 2);
    const size_t number = trunk->cache_dtype == PLLM_F32 ? 4 : 2;
    own->turned = take(&at, trunk->latent_values ? SCORE_TILE * width : 0, number);
    own->maximum = take(&at, queries, 4);
    own->total = take(&at, queries, 4);
    own->sum = take(&at, queries * values, 4);
    own->queries = take(&at, queries, sizeof(float *));
    own->low = take(&at, queries, 8);
    own->high = take(&at, queries, 8);
    own->delta_queries = take(&at, DELTA_TOKENS * trunk->delta_key_width, 4);
    own->delta_keys = take(&at, DELTA_TOKENS * trunk->delta_key_width, 4);
    own->delta_values = take(&at, DELTA_TOKENS * pllm_delta_padded(trunk), 4);
    own->delta_results = take(&at, DELTA_TOKENS * pllm_delta_padded(trunk), 4);
    const int64_t decays = trunk->delta_kind == PLLM_KDA ? DELTA_TOKENS * trunk->delta_key_width : 0;
    own->delta_decays = take(&at, decays, 4);
    own->delta_decayed = take(&at, decays, 4);
    if (trunk->latent_values) {
        own->latent_rank = take(&at, few * trunk->latent_rank, 4);
        own->latent_input = take(&at, 1, pllm_input_bytes(job->positions, MAX(trunk->latent_plain, width)));
    }
    if (job->picked && job->pass->reads) {
        own->index_scores = take(&at, job->index_length, 4);
        own->gathered = take(&at, job->gathered_bytes, 1);
    }
    /* A page apart, so that threads never write into each other's. */
    return (size_t)(at - base) + 4096;
}

static void describe_heads(trunk_job *job, int64_t kind) {
    const pllm_heads *heads = job->trunk->kinds + kind;
    const int64_t group = heads->heads / heads->key_value_heads;
    const int64_t query = job->trunk->gated_queries ? 2 * heads->width : heads->width;
    job->shapes[kind] = (head_shape){
        .cosine = job->pass->cosine[kind],
        .sine = job->pass->sine[kind],
        .heads = heads->heads,
        .width = heads->width,
        .value_width = heads->value_width,
        .rotated = heads->rotated,
        .key_value_heads = heads->key_value_heads,
        .kind = kind,
        .joined = heads->heads * heads->value_width,
        .queries = heads->heads * query,
        .values = heads->heads * query + heads->key_value_heads * heads->width,
        .gates = heads->heads * query + heads->key_value_heads * (heads->width + heads->value_width),
        .blocks = heads->heads * query + heads->key_value_heads * (heads->width + heads->value_width) + most_gates(job->trunk),
        .query = query,
        .group = group,
        .row_group = heads->key_value_heads > 1 ? ROW_GROUP : MAX(1, MIN(ROW_GROUP, TOGETHER_QUERIES / group)),
        .block = MAX(16, divided_up(BLOCK_QUERIES, group)),
    };
}

size_t pllm_trunk_layout(trunk_job *job, const pllm_trunk *trunk, const pllm_pass *pass, int threads) {
    *job = (trunk_job){.trunk = trunk, .pass = pass, .set = trunk_set_of(trunk->set), .last_kept = last_kept(trunk, pass)};
    const int64_t positions = job->positions = pass->rows * pass->tokens, k = MAX(trunk->top_k, 1);
    const int64_t of_head = trunk->delta_value_width + pllm_delta_decays(trunk) + 1;
    const int64_t delta = pllm_delta_channels(trunk) + trunk->delta_value_heads * of_head + trunk->delta_ranks;
    job->projected = MAX(delta, trunk->convolution_layers ? 3 * trunk->hidden : 0);
    for (int64_t kind = 0; kind < trunk->kind_count; kind++) {
        describe_heads(job, kind);
        const head_shape *heads = job->shapes + kind;
        job->projected = MAX(job->projected, heads->blocks + (trunk->block_heads + 1) * trunk->block_width);
    }
    for (int64_t i = 0; i < pass->group_count; i++) {
        const pllm_group *group = pass->groups + i;
        const int64_t length = group->start + pass->tokens;
        job->chunk_limit = MAX(job->chunk_limit, pllm_chunk_limit(length) + group->segment_count);
        job->index_length = MAX(job->index_length, length);
    }
    job->part_rows = pass->reads ? 1 : positions;
    const int64_t parts = most_heads(trunk) * job->chunk_limit * job->part_rows;
    const int64_t many = positions > FEW_LIMIT ? positions : 0;
    size_t shared;
    experts_bytes(job, &job->own_experts, &shared);
    char *at = pass->workspace;
    job->h = take(&at, many * wide_of(trunk), 4);
    job->normed = take(&at, many * trunk->hidden, 4);
    job->beside = take(&at, has_norms(trunk) ? many * trunk->hidden : 0, 4);
    job->own_input = take(&at, positions * trunk->layer_count * trunk->own_width, 4);
    job->gated = take(&at, positions * trunk->own_width, 4);
    job->chosen = take(&at, positions * most_blocks(job), 1);
    job->block_scores = take(&at, MIN(positions, FEW_LIMIT) * most_blocks(job), 4);
    job->wide = take(&at, many * streams_most(trunk), 4);
    job->mixes = take(&at, trunk->stream_rank ? positions * (trunk->stream_rank + trunk->streams) : 0, 4);
    job->stream_ranks = take(&at, many * trunk->stream_rank, 4);
    job->stream_gates = take(&at, positions * streams_most(trunk), 4);
    job->injection = take(&at, many * trunk->streams, 4);
    job->others = take(&at, trunk->spread ? positions * (wide_of(trunk) - trunk->hidden) : 0, 4);
    job->laurel = take(&at, positions * trunk->laurel_rank, 4);
    job->sparse = take(&at, positions * 2 * trunk->sparse_width, 4);
    job->lexical = take(&at, trunk->lexical_taps ? positions * (wide_of(trunk) + trunk->hidden) : 0, 4);
    job->lexical_inputs = take(&at, trunk->lexical_taps ? positions * wide_of(trunk) : 0, 4);
    job->qkv = take(&at, positions * job->projected, 4);
    job->attended = take(&at, positions * joined_most(trunk), 4);
    job->out = take(&at, positions * trunk->hidden, 4);
    job->shared_out = take(&at, positions * trunk->hidden, 4);
    job->narrow = take(&at, positions * narrow_most(trunk), 4);
    job->narrow_sum = take(&at, positions * narrow_most(trunk), 4);
    job->router = take(&at, FEW_LIMIT * expert_count(trunk), 4);
    job->weights = take(&at, positions * k, 4);
    job->shared_weights = take(&at, positions, 4);
    job->indices = take(&at, positions * k, 4);
    job->zeros = take(&at, positions, 4);
    job->input = take(&at, 1, pllm_input_bytes(positions, widest_input(trunk)));
    job->experts = take(&at, 1, shared);
    if (trunk->latent_values) {
        const pllm_heads *index = trunk->kinds + 1;
        const int64_t queries = trunk->heads * (trunk->latent_plain + trunk->kinds[0].rotated);
        job->latent_index = trunk->kinds[0].width + (trunk->latent_rank ? trunk->latent_rank : queries);
        job->latent_stride = job->latent_index + (trunk->index_top ? index->width + index->heads : 0);
        job->latent_query_stride = queries + (trunk->index_top ? index->heads * index->width : 0);
        job->latent_rows = take(&at, positions * job->latent_stride, 4);
        job->latent_rank = take(&at, many * trunk->latent_rank, 4);
        job->latent_queries = take(&at, trunk->latent_rank ? positions * job->latent_query_stride : 0, 4);
        job->latent_values = take(&at, positions * trunk->heads * trunk->latent_values, 4);
    }
    if (trunk->index_top && job->index_length > trunk->index_top) {
        const int64_t kept = divided_up(trunk->index_top, PLLM_KEY_BLOCK) * PLLM_KEY_BLOCK;
        job->chosen_rows = pass->reads ? 1 : positions;
        job->gathered_bytes = (int64_t)aligned((size_t)(kept * cached_bytes(trunk->cache_dtype, trunk->kinds[0].width)));
        job->picked = take(&at, positions * trunk->index_top, 4);
        job->index_scores = take(&at, job->chosen_rows * job->index_length, 4);
        job->gathered = take(&at, job->chosen_rows * job->gathered_bytes, 1);
    }
    job->part_maximum = take(&at, parts, 4);
    job->part_total = take(&at, parts, 4);
    job->part_sum = take(&at, parts * widest_value(trunk), 4);
    job->own = at;
    own_area area;
    job->own_bytes = aligned(pllm_own_layout(job, &area, at));
    return (size_t)(at - (char *)pass->workspace) + job->own_bytes * (size_t)threads;
}

size_t pllm_trunk_bytes(const pllm_trunk *trunk, const pllm_pass *pass, int threads) {
    trunk_job job;
    return pllm_trunk_layout(&job, trunk, pass, threads);
}
