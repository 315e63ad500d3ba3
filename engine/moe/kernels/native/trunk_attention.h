/* The parts of the trunk that trunk.c and trunk_attention.c share; not part of the library's interface. */
#ifndef PRIVATELLM_TRUNK_ATTENTION_H
#define PRIVATELLM_TRUNK_ATTENTION_H

#include "trunk_internal.h"

/* Rows of a decoding pass that look at shared positions together, at most. */
#define ROW_GROUP 16
/* Queries that they have if there is one key/value head, at most: there have to be tasks for all threads. */
#define TOGETHER_QUERIES 64

/* Tokens of a prompt that a head of a delta-net takes at a time, so that what they need stays in the cache. */
#define DELTA_TOKENS 16

/* Positions of one page, as a decoding pass cuts them for its threads. */
typedef struct chunk {
    const pllm_segment *segment;
    int64_t first, last; /* positions */
    int64_t groups;      /* of rows that are taken together; the rows if none are */
    int together;
} chunk;

/* What one thread has to itself. With few positions every thread computes the cheap things (residual, norms, routes)
   for itself, which is faster than waiting for another to do it. */
typedef struct own_area {
    float *h, *normed, *beside, *joined, *shared_weights, *logits, *weights;
    float *row; /* [hidden] */
    float *wide, *stream_ranks, *injection; /* as trunk_job's, of few positions */
    float *convolved; /* [streams * hidden] */
    float *modes;     /* [FEW_LIMIT, streams], with pllm_altup */
    float *sparse;    /* [positions, sparse_width], of few positions */
    const uint8_t **chosen; /* [queries] */
    float *block_queries, *block_key, *block_scores; /* [block_heads, block_width], [2, block_width], [blocks] */
    int32_t *block_heap;
    float *own_input; /* [layers * own_width] */
    float *gated;     /* [positions, own_width], of few positions */
    int32_t *indices;
    void *input, *exact, *linear, *experts;
    float *rotated, *scores, *maximum, *total, *sum;
    const float **queries;
    uint32_t *packed_queries, *packed_weights;
    uint16_t *opened;
    void *turned;
    int64_t *low, *high;
    float *delta_queries, *delta_keys, *delta_values, *delta_results; /* of DELTA_TOKENS tokens of one head */
    float *delta_decays, *delta_decayed; /* the same: decays of keys, and keys times those; with PLLM_KDA alone */
    float *latent_rank; /* as trunk_job's, of few positions */
    void *latent_input; /* of one head of all positions */
    float *index_scores; /* of all positions that a prompt's token may see */
    void *gathered;      /* the keys that it has chosen */
} own_area;

/* A kind of heads, and what follows from it. */
typedef struct head_shape {
    const float *cosine, *sine;
    int64_t heads, width, value_width, rotated, key_value_heads, kind;
    int64_t joined;    /* heads * value_width */
    int64_t queries;   /* columns of qkv that are queries, with their gates: keys follow, */
    int64_t values, gates, blocks; /* and from these columns on values, a gate, and queries and the key of pllm_blocks */
    int64_t query;     /* columns from one head's query to the next */
    int64_t group;     /* query heads per key/value head */
    int64_t row_group; /* rows of a decoding pass that are taken together */
    int64_t block;     /* positions of a prefill's query block */
} head_shape;

typedef struct trunk_job {
    pllm_pool *pool;
    const pllm_trunk *trunk;
    const pllm_pass *pass;
    const trunk_set *set;
    int64_t positions; /* rows * tokens */
    int64_t last_kept; /* the last layer that adds keys or changes a state */
    int64_t projected; /* columns of qkv */
    head_shape shapes[PLLM_HEAD_KINDS];
    int64_t chunk_limit;
    int64_t part_rows; /* positions whose attention is in parts at a time */
    uint8_t *chosen;     /* [positions, pllm_block_limit()]: whether a position sees each block */
    float *block_scores; /* of few positions, the same */
    float *wide;         /* [positions, streams * hidden]: the residual streams, normed */
    float *mixes;        /* [positions, stream_rank + streams]: results of pllm_streams' down and inject */
    float *stream_ranks; /* [positions, stream_rank]: the first ones, activated */
    float *stream_gates; /* [positions, streams * hidden] */
    float *injection;    /* [positions, streams]: factors of what the layer's part gives */
    float *others;       /* [positions, streams - 1, hidden]: results of the trunk's `spread` and `gather` */
    float *laurel;       /* [positions, laurel_rank] */
    float *sparse;       /* [positions, 2 * sparse_width]: gates, and what they multiply */
    float *lexical;        /* [positions, (streams + 1) * hidden]: results of pllm_lexical's key and value */
    float *lexical_inputs; /* [positions, streams * hidden]: those of its convolution */
    float *beside; /* what a shared expert reads if it has a norm of its own */
    float *own_input; /* [positions, layers, own_width]: every layer's own embedding of each token */
    float *gated;     /* [positions, own_width] */
    float *h, *normed, *qkv, *attended, *out, *shared_out, *router, *weights, *shared_weights;
    float *narrow, *narrow_sum; /* [positions, narrow.rows]: what experts read, and their weighted sum, where they have such */
    float *latent_rows;    /* [positions, latent_stride]: results of pllm_latent's down, of the first matrix of queries, and
                              of an indexer's key and weights */
    float *latent_rank;    /* [positions, latent_rank]: those of query_down, normed */
    float *latent_queries; /* [positions, latent_query_stride]: heads * (plain + rotated), and an indexer's; without
                              query_down they are in latent_rows */
    float *latent_values;  /* [positions, heads * value width] */
    int64_t latent_stride, latent_index; /* columns of latent_rows, and that from which on they are an indexer's key and
                                            weights */
    int64_t latent_query_stride;
    int32_t *picked;      /* [positions, index_top]: what each position that does not see all has chosen, ascending; kept
                             from layer to layer. NULL: all see all */
    float *index_scores;  /* [chosen_rows, index_length] */
    int64_t index_length; /* positions of the longest row */
    char *gathered;       /* [chosen_rows], gathered_bytes each: the keys that were chosen, as in a page */
    int64_t chosen_rows;  /* positions whose attention is in parts, at most */
    int64_t gathered_bytes;
    int32_t keys_are_gathered; /* pages hold the keys of one layer alone */
    int32_t *indices, *zeros;
    void *input, *experts;
    float *part_maximum, *part_total, *part_sum; /* [key/value head][chunk][row * group + i]([value_width]) */
    char *own;
    size_t own_bytes, own_experts;
    pllm_cut *cut;        /* NULL: the routed experts are run here too */
    int64_t shared_layer; /* pllm_trunk_shared: the layer */
} trunk_job;

/* Describes a pass in `job` and lays out its workspace for so many threads. Returns the bytes that it takes. */
size_t pllm_trunk_layout(trunk_job *job, const pllm_trunk *trunk, const pllm_pass *pass, int threads);

/* Lays out what one thread has to itself, from `base` on. Returns the bytes that it takes. */
size_t pllm_own_layout(const trunk_job *job, own_area *own, char *base);

/* Numbers of a position's residual streams. */
static inline int64_t wide_of(const pllm_trunk *trunk) { return trunk->streams * trunk->hidden; }

static inline const head_shape *shape_of(const trunk_job *job, int64_t layer) {
    return job->shapes + job->trunk->layers[layer].kind;
}

/* Whether the pass is over tokens of one row, of which the last one alone may go on to logits. */
static inline int is_text(const pllm_pass *pass) { return pass->tokens > 1 || pass->reads; }

/* The group of a row of the pass, or of the only row's tokens, and its number in it. */
static inline const pllm_group *group_of(const pllm_pass *pass, int64_t *row) {
    const pllm_group *group = pass->groups;
    if (pass->tokens > 1)
        *row = 0;
    else
        for (; *row >= group->rows; group++) *row -= group->rows;
    return group;
}

/* Where the angles of a group's position are. */
static inline int64_t angle_of(const pllm_pass *pass, const pllm_group *group, int64_t position) {
    return group - pass->groups + position - group->start;
}

/* The position in its conversation of the position `index` of the pass. */
static inline int64_t position_at(const pllm_pass *pass, int64_t index) {
    int64_t row = index;
    return group_of(pass, &row)->start + (pass->tokens > 1 ? index : 0);
}

static inline float *pllm_block_columns(const trunk_job *job, int64_t layer, int64_t index) {
    return job->qkv + index * job->projected + shape_of(job, layer)->blocks;
}

const pllm_segment *pllm_segment_of(const pllm_group *group, int64_t position);
/* A thread's share of keeping the keys by which blocks are chosen, of all positions. */
void pllm_keep_block_keys(const trunk_job *job, const own_area *own, int64_t layer, int thread, int threads);
/* Blocks of a position, at most. */
int64_t pllm_block_limit(const trunk_job *job);
/* Whether the position `index` of the pass has more blocks before it than its budget, and whether any has. */
int pllm_chooses(const trunk_job *job, int64_t index);
int pllm_any_chooses(const trunk_job *job);
/* A thread's share of comparing the blocks for positions from `first` on, after a barrier behind pllm_keep_block_keys, and
   after another one of choosing. Of many positions the first function does both. */
void pllm_score_blocks(const trunk_job *job, const own_area *own, int64_t layer, int64_t first, int thread, int threads);
void pllm_choose_blocks(const trunk_job *job, const own_area *own, int64_t first, int thread, int threads);
/* The blocks that the position `index` of the pass sees; NULL: all. */
const uint8_t *pllm_chosen(const trunk_job *job, int64_t layer, int64_t index);

/* Chunks that a query sees of so many positions, at most, but for the ends of pages. */
int64_t pllm_chunk_limit(int64_t positions);

/* Turns a query, or what attention has gathered, as the cache's keys and values are turned, if they are. */
void pllm_turn(const pllm_trunk *trunk, float *x, int64_t width);
/* Keys of a row's head in a page. `head`: counted over all layers of the kind. */
static inline char *kept_keys(const trunk_job *job, const pllm_segment *segment, int64_t row, int64_t kind, int64_t head) {
    const int64_t each = cached_bytes(job->trunk->cache_dtype, job->shapes[kind].width);
    return (char *)segment->keys[kind] + row * segment->key_stride[kind] + head * segment->capacity * each;
}

/* A key and its value of a group's row into the cache, of a `head` as kept_keys counts it; both are rounded in place on
   the way. `value` NULL: the key is the value. */
void pllm_store_key_value(const trunk_job *job, const pllm_group *group, int64_t row, int64_t kind, int64_t head,
                          int64_t position, float *key, float *value);
/* Adds keys and values of all positions of the (only) row to the cache, and makes their queries ready in
   place, from `first_query` on. No barrier. */
void pllm_prepare_prompt(const trunk_job *job, const own_area *own, int64_t layer, int64_t first_query, int thread,
                         int threads);
/* Attention of every position of a prompt, into job->attended. Takes tasks with pllm_pool_next. */
void pllm_attend_prompt(const trunk_job *job, const own_area *own, int64_t layer);
/* One query per row, `step` positions after its start, from `qkv` [rows, projected]. `stored`: its key and value are in
   the cache already, and the queries are ready. Takes tasks with pllm_pool_next; the parts are joined after a barrier. */
void pllm_attend_rows(const trunk_job *job, const own_area *own, int64_t layer, const float *qkv, int64_t step,
                      int stored);
/* The same of each position of the (only) row, which sees those up to its own; keys are in the cache, queries ready. */
void pllm_attend_steps(const trunk_job *job, const own_area *own, int64_t layer);
/* Joins the parts of rows first..last) into `to` [rows, heads * value_width]. */
void pllm_join_rows(const trunk_job *job, int64_t layer, const float *qkv, int64_t step, int64_t first, int64_t last,
                    float *to);
/* Joins the parts of positions first..last) of the (only) row, after pllm_attend_steps. */
void pllm_join_steps(const trunk_job *job, int64_t layer, int64_t first, int64_t last, float *to);

/* Attention over latents: the normed results of query_down of rows first..last). */
void pllm_latent_norm_rank(const trunk_job *job, int64_t layer, int64_t first, int64_t last, float *to);
/* Rotated keys and latents of positions first..last) into the cache. `scratch`: floats of a head. */
void pllm_latent_keys(const trunk_job *job, int64_t layer, int64_t first, int64_t last, float *scratch);
/* Queries of `count` positions from `first` on, multiplied by their heads' matrices for keys and ready for attention.
   Takes heads with pllm_pool_next. */
void pllm_latent_queries(const trunk_job *job, const own_area *own, int64_t layer, int64_t first, int64_t count, int reads);
/* The heads' values of `rows` rows, from what attention has gathered to job->latent_values. Takes heads with
   pllm_pool_next. */
void pllm_latent_values(const trunk_job *job, const own_area *own, int64_t layer, const float *joined, int64_t rows,
                        int reads);

/* Where the angles of row `index` of the pass are, or of token `index` of its only row. */
static inline int64_t angles_at(const pllm_pass *pass, int64_t index) {
    return pass->tokens > 1 ? index : group_of(pass, &index) - pass->groups;
}
/* Positions of a prompt that see all before them: the first ones. */
static inline int64_t pllm_unchosen(const trunk_job *job) {
    const int64_t seen = job->trunk->index_top - job->pass->groups->start;
    return job->picked ? MAX(MIN(seen, job->positions), 0) : job->positions;
}
/* Indexers' keys of positions first..last) into the cache. `scratch`: floats of a head. */
void pllm_index_keys(const trunk_job *job, int64_t layer, int64_t first, int64_t last, float *scratch);
/* What each position of a prompt from `first` on sees, into job->picked. Takes tasks with pllm_pool_next. */
void pllm_choose_prompt(const trunk_job *job, const own_area *own, int64_t layer, int64_t first);
/* The same of few positions from `first` on, whose attention is in parts, in two pieces with a barrier after each: scores
   into job->index_scores, and the choice. Both take tasks with pllm_pool_next. */
void pllm_score_rows(const trunk_job *job, const own_area *own, int64_t layer, int64_t first);
void pllm_choose_rows(const trunk_job *job, int64_t first);
/* Those positions' chosen keys into job->gathered. Takes tasks with pllm_pool_next. */
void pllm_gather_rows(const trunk_job *job, int64_t layer, int64_t first);
/* Chosen keys begin..end) of a position of the pass to `to`; `begin` is a multiple of PLLM_KEY_BLOCK. */
void pllm_gather(const trunk_job *job, int64_t layer, int64_t index, int64_t begin, int64_t end, char *to);

/* A thread's share of the numbers of a short convolution: from job->qkv [positions, projected] (the three parts) to
   job->attended [positions, hidden]. */
void pllm_convolve(const trunk_job *job, int64_t layer, int thread, int threads);

/* Chooses experts by a router's `logits` [count], which it spoils: trunk->top_k indices and weights. Where a logit is no
   number, the weights are none either, as everything that comes of them. */
void pllm_choose_experts(const pllm_trunk *trunk, const pllm_trunk_layer *layer, float *logits, int64_t count,
                         int32_t *indices, float *weights);

/* Channels of a delta-net's convolution, decays of a head, the values of a head, padded to whole PLLM_STATE_COLUMNS, and
   the numbers of its state. */
int64_t pllm_delta_channels(const pllm_trunk *trunk);
int64_t pllm_delta_decays(const pllm_trunk *trunk);
int64_t pllm_delta_padded(const pllm_trunk *trunk);
int64_t pllm_delta_head(const pllm_trunk *trunk);
/* Where in a row's states those of a delta-net begin, and where in them the inputs of its convolution do. */
int64_t pllm_delta_start(const pllm_trunk *trunk, int64_t layer);
int64_t pllm_delta_start_of(const pllm_trunk *trunk, int64_t place);
int64_t pllm_delta_inputs(const pllm_trunk *trunk);
float pllm_softplus(float x);
/* Whether a row's states stay where they are. Rows that go on in another place than before come first: it may have been
   that of a row that stays in its own. */
int pllm_in_place(const pllm_pass *pass, int64_t row);
/* The inputs of a convolution: the first `channels` columns of `from` [positions, stride], the last `kept` of which are
   kept at `start` in a row's states, [kept, channels]. */
typedef struct convolved {
    const float *from;
    int64_t stride, start, channels, kept;
} convolved;
/* Keeps channels first..first + count) of a row. */
void pllm_keep_columns(const trunk_job *job, const convolved *inputs, int64_t row, int64_t first, int64_t count);
/* A thread's share of keeping those of all rows. */
void pllm_keep_inputs(const trunk_job *job, const convolved *inputs, int thread, int threads);
/* The heads of a delta-net: from job->qkv [positions, projected] (input, gate, decay, rate) to job->attended
   [positions, value heads * value width], and the heads' states. Takes tasks with pllm_pool_next. */
void pllm_delta_heads(const trunk_job *job, const own_area *own, int64_t layer);
/* A thread's share of keeping the last inputs of the convolution. After pllm_delta_heads and a barrier. */
void pllm_delta_keep(const trunk_job *job, int64_t layer, int thread, int threads);

/* A thread's share of the channels of a Mamba-2 layer's convolution, in place in job->qkv [positions, projected] (input,
   gate, step), and of keeping its last inputs. Before pllm_delta_heads and a barrier. */
void pllm_mamba_convolve(const trunk_job *job, int64_t layer, int thread, int threads);
/* One head of one row of a Mamba-2 layer, over all tokens of the pass, for pllm_delta_heads. */
void pllm_mamba_head(const trunk_job *job, const own_area *own, int64_t layer, int64_t row, int64_t head);
/* Gates and norms results of `rows` positions from `first` on: from job->attended to `to` [rows, value heads * value
   width], which may be their own place. */
void pllm_mamba_norm(const trunk_job *job, int64_t layer, int64_t first, int64_t rows, float *to);

#endif
