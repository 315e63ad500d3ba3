/* The trunk of a decoder: RMS norm, a mixer of positions, residual, RMS norm, experts, residual. The mixer is rotary
   grouped-query attention, attention over latents, a gated delta-net, a Mamba-2 layer or a short convolution. Some
   families have norms elsewhere (pllm_norms), some give layers an embedding of their own (pllm_own_input), and some have
   several residual streams in place of norms (pllm_streams).

   A dense feed-forward network is one expert that every token is sent to. A pass runs layers first_layer..last_layer)
   for all its positions in one region of the pool; it can be cut between layers, the residual stream stays in the
   workspace. It can also be cut between a layer's routes and its experts, so that another executor runs those: the
   piece up to there, the shared expert, and the rest of the pass are calls of their own. */
#ifndef PRIVATELLM_TRUNK_H
#define PRIVATELLM_TRUNK_H

#include "privatellm_kernels.h"

/* Keys lie in blocks of so many positions, transposed: [block][width][PLLM_KEY_BLOCK]; values lie [position][width of values].
   In bfloat16 two neighbours lie side by side, as dot products of pairs want them: keys
   [block][width / 2][PLLM_KEY_BLOCK][2], values [position / 2][width of values][2]. Widths are even. Values that were never
   written must be finite.
   In Q8_0 a block is its numbers in the order of bfloat16, 8 bits each, and then their scales, bfloat16
   [width / 32][PLLM_KEY_BLOCK]: one for 32 neighbours of a position. Widths are multiples of 32.
   Q4_0 has 4 bits each, the first of a pair in the low half of a byte. Its keys and values are turned by Hadamard matrices
   before they are rounded, which spreads what is large in one dimension over many; queries are turned, too, and what
   attention gathers is turned back. */
#define PLLM_KEY_BLOCK 16

/* Heads of keys and values of a layer. Layers with attention are of one kind or of two (Gemma 4): one that sees a window,
   and one that sees everything, with fewer and wider heads. Values may be narrower or wider than keys (MiMo V2). With
   pllm_indexer the second kind is that of indexers. */
#define PLLM_HEAD_KINDS 2
typedef struct pllm_heads {
    int64_t heads, key_value_heads, width; /* the first: of queries */
    int64_t value_width; /* even; that of keys with latents, whose keys are the values, too */
    int64_t rotated; /* leading values of a head that are rotated; even */
} pllm_heads;

enum { PLLM_NORM_NONE = 0, PLLM_NORM_PER_HEAD = 1, PLLM_NORM_WHOLE = 2 };
enum { PLLM_SOFTMAX = 0, PLLM_SIGMOID = 1 };
enum { PLLM_ATTENTION = 0, PLLM_ROUTER = 1, PLLM_EXPERTS = 2, PLLM_OTHER = 3, PLLM_PARTS = 4 };

/* A gated delta-net in place of attention: every value head keeps a state [delta_key_width, delta_value_width], which
   decays, and in which the value of each token takes the place of what the state answers to the token's key. Queries,
   keys and values first pass a causal convolution of every channel over the last delta_taps tokens, and SiLU.
   With PLLM_MAMBA it is a Mamba-2 layer (Dao and Gu 2024, section 7): its B are the keys, its C the queries, its groups
   the key heads. A token's value times its step, which is softplus(decay + bias) within step_least..step_most, is added
   to the state, whatever that answers. The value times `skip` is added to the result, and the norm is over all heads of
   a group, after the gate.
   With PLLM_KDA (Kimi Delta Attention, 2025) each of a value head's key numbers has a decay of its own, and so have the
   rows of its state; the gate is a sigmoid, not a SiLU. */
enum { PLLM_DELTA = 0, PLLM_MAMBA = 1, PLLM_KDA = 2 };
typedef struct pllm_delta {
    pllm_matrix input;        /* [channels, hidden]: queries of all key heads, then their keys, then all values; with
                                 PLLM_MAMBA values, then keys, then queries */
    pllm_matrix key, value;   /* with PLLM_KDA: those rows apart, and `input` has the queries alone; data NULL: it has all */
    pllm_matrix gate;         /* [value heads * value width, hidden or rank] */
    pllm_matrix decay;        /* [value heads, hidden]; with PLLM_KDA [value heads * key width, hidden or rank] */
    pllm_matrix rate;         /* [value heads, hidden]; not with PLLM_MAMBA */
    pllm_matrix gate_down, decay_down; /* [rank, hidden], with PLLM_KDA: what `gate` and `decay` read of the hidden state;
                                          data NULL: all of it */
    const float *kernel;      /* [delta_taps, channels], the latest token's last */
    const float *kernel_bias; /* [channels], with PLLM_MAMBA; or NULL */
    const float *decay_scale; /* [value heads]: the logarithm of a decay is scale * softplus(decay + bias) */
    const float *decay_bias;  /* [value heads]; with PLLM_KDA [value heads * key width] */
    const float *skip;        /* [value heads], with PLLM_MAMBA */
    const float *norm;        /* [value width]; with PLLM_MAMBA [value heads * value width] */
} pllm_delta;

/* A short convolution in place of attention (LFM2): of the three parts that `input` gives, the first and the third are
   multiplied, pass a causal convolution of every number over the last convolution_taps tokens, and are multiplied by the
   second. */
typedef struct pllm_convolution {
    pllm_matrix input;   /* [3 * hidden, hidden] */
    const float *kernel; /* [convolution_taps, hidden], the latest token's last */
} pllm_convolution;

/* Value columns of a state that lie together: a head's state is [value width / PLLM_STATE_COLUMNS, rounded up][key width]
   [PLLM_STATE_COLUMNS], float32. The states of a row are, for each delta-net or Mamba-2 layer, those of its heads and then the inputs of
   the convolution's last delta_taps - 1 tokens, [delta_taps - 1, channels]; and for each short convolution its last
   inputs, [convolution_taps - 1, hidden]. A model has delta-nets or short convolutions. Behind those of all delta-nets come,
   for each layer with pllm_lexical, the last inputs of its convolution,
   [(lexical_taps - 1) * lexical_apart, streams * hidden]. What comes behind them is not used. */
#define PLLM_STATE_COLUMNS 32
#define PLLM_MOST_TAPS 16
#define PLLM_MOST_STREAMS 16 /* with pllm_altup */

/* Attention over latents (DeepSeek V2, section 2.1): what a position leaves behind is one vector of `latents` numbers, from
   which every head would make its keys and values, and one rotated key of all heads. A head's matrix for keys is applied
   to its query instead, and that for values to what it has gathered, so that the cache holds no keys and values of heads:
   it has one head of width = rotated + latents numbers, which are keys and values at once. */
typedef struct pllm_latent {
    const struct pllm_indexer *indexer; /* NULL: the layer's queries see what those of an earlier one have chosen */
    pllm_matrix query_down;  /* [rank, hidden]; data NULL: `query` reads the hidden state */
    pllm_matrix query;       /* [heads * (plain + rotated), rank or hidden]; of each head the rotated numbers last */
    pllm_matrix down;        /* [latents + rotated, hidden] */
    const pllm_matrix *keys; /* [heads] of [latents, plain] */
    const pllm_matrix *values; /* [heads] of [value width, latents] */
    const float *query_norm; /* [rank], or NULL */
    const float *norm;       /* [latents] */
} pllm_latent;

/* Indexers of attention over latents (DeepSeek-V3.2): a query sees only the index_top positions, of those before it and
   its own, that score highest. A position's score is the sum over the indexer's heads of weight * max(0, query * key). All
   heads have the same key, which is normed, with the mean taken from it. Leading numbers of queries and keys are rotated.
   Heads of indexers are kinds[1], and the cache holds keys of that kind. */
typedef struct pllm_indexer {
    pllm_matrix query;       /* [heads * width, rank]: reads what the layer's queries read */
    pllm_matrix key;         /* [width, hidden] */
    pllm_matrix weights;     /* [heads, hidden] */
    const float *norm, *norm_bias; /* [width] */
    int64_t place;           /* among the layers that have one */
} pllm_indexer;

/* Whole pages of a mapped file. */
typedef struct pllm_pages {
    void *start;
    size_t bytes;
} pllm_pages;

/* A layer whose parts norm what they give before it is added. All norms are [hidden]. In Gemma 4 a feed-forward network
   may run beside the experts: it is the shared expert, and reads what ffn_norm gives. */
typedef struct pllm_norms {
    const float *attention;                    /* of what attention gives */
    const float *router, *experts;             /* of the hidden state, as the router and the experts read it; NULL: both
                                                  read what ffn_norm gives, and no network runs beside the experts */
    const float *shared_after, *experts_after; /* of what that network and the experts give */
    const float *after;                        /* of what the feed-forward network gives, or of the sum of the two */
    float scale;                               /* of the hidden state after the layer */
    int32_t reserved;
} pllm_norms;

/* What a layer reads of an embedding of its own (Gemma 4 E2B): the activated result of `gate`, multiplied by the layer's
   part of the token's embedding, goes through `projection`, is normed, and is added to the hidden state. */
typedef struct pllm_own_input {
    pllm_matrix gate;       /* [own_width, hidden] */
    pllm_matrix projection; /* [hidden, own_width] */
    const float *norm;      /* [hidden] */
} pllm_own_input;

/* How a part of a layer reads several residual streams, and how it adds to them (Qwen3.8-Flash-Next). All streams are
   normed, each by itself. What it reads is their mean after each number was multiplied by the sigmoid of `up` times
   SiLU(`down` / streams). What it gives is added to each stream, multiplied by 2 sigmoid(`inject` / streams). */
typedef struct pllm_streams {
    pllm_matrix down;   /* [stream_rank, streams * hidden] */
    pllm_matrix up;     /* [streams * hidden, stream_rank] */
    pllm_matrix inject; /* [streams, streams * hidden]; data NULL behind the last layer, where nothing is added */
    const float *norm;  /* [streams * hidden] */
} pllm_streams;

/* Alternating updates of several residual streams (Gemma 3n; Baykal et al. 2023). A layer first predicts all streams from
   what they are, runs on the first one, and corrects all by what it has changed there. Modes are the tanh of `router` of
   the normed first stream, divided by its width. Beside attention what it reads passes two narrow matrices, is normed and
   added to itself; half of the sum of both, times the root of 2, goes on. pllm_own_input reads the first stream and adds
   to the others. All layers have norms and pllm_own_input. */
typedef struct pllm_altup {
    pllm_matrix router;       /* [streams, hidden] */
    pllm_matrix down, up;     /* [laurel_rank, hidden], [hidden, laurel_rank] */
    const float *router_norm; /* [hidden] */
    const float *prediction;  /* [streams * streams, streams]: from modes to factors, [to, from] */
    const float *correction;  /* [streams, streams]: from modes to factors, less 1 */
    const float *norm;        /* [hidden], of what `up` gives */
    const float *scale;       /* [hidden], of the first stream as pllm_own_input reads it; NULL: none */
} pllm_altup;

/* A feed-forward network of whose gates those count that exceed their mean by `deviations` standard deviations, by what
   exceeds it (Gemma 3n). It is activated as pllm_own_input is. */
typedef struct pllm_sparse {
    pllm_matrix gate, up, down; /* [sparse_width, hidden], [sparse_width, hidden], [hidden, sparse_width] */
    float deviations;
    int32_t reserved;
} pllm_sparse;

/* What a layer adds to the residual streams before it reads them, from embeddings of the last tokens together: `value` of
   them, multiplied for each stream by the sigmoid of how well `key` of them fits the stream, and that again, normed,
   through a causal convolution over lexical_taps tokens that are lexical_apart apart, and SiLU. */
typedef struct pllm_lexical {
    pllm_matrix key;   /* [streams * hidden, lexical_width] */
    pllm_matrix value; /* [hidden, lexical_width] */
    const float *key_norm, *query_norm, *input_norm; /* [streams * hidden], of each stream by itself */
    const float *kernel; /* [lexical_taps, streams * hidden], the latest token's last */
} pllm_lexical;

/* The choice of what attention sees where a text is long (Qwen3.8-Flash-Next): whole blocks of block_size positions, as
   many as have block_budget positions, and the positions behind the last whole block. A block's key is the mean of its
   positions' keys, normed, and rotated as its first position is. The blocks with the largest sums over the heads of what
   is positive of query times key are chosen. */
typedef struct pllm_blocks {
    pllm_matrix query; /* [block_heads * block_width, hidden] */
    pllm_matrix key;   /* [block_width, hidden] */
    const float *query_norm, *key_norm; /* [block_width] */
} pllm_blocks;

typedef struct pllm_trunk_layer {
    pllm_matrix query;
    pllm_matrix output;      /* data NULL: the layer has a feed-forward network or experts alone (Nemotron-H), which read
                                what attention_norm gives */
    pllm_matrix key;         /* data NULL: keys and values are those of an earlier layer of the same kind and `place` */
    pllm_matrix value;       /* data NULL: values are the keys before they are normed and rotated */
    pllm_matrix router;      /* data NULL: every token goes to expert 0 with weight 1 */
    pllm_matrix gate;        /* [heads * value width, hidden] or [heads, hidden]: its activated result scales what each number
                                or each head has gathered (afmoe, laguna); over latents [heads, hidden], and a sigmoid
                                (bailing_hybrid); data NULL: nothing does */
    pllm_matrix shared_gate; /* [1, hidden]: its sigmoid scales the shared expert; data NULL: nothing does */
    pllm_matrix narrow;      /* [width, hidden]: what the routed experts read of the hidden state; data NULL: all of it */
    pllm_matrix widen;       /* [hidden, width]: from their weighted sum to the hidden state, where they have `narrow` */
    const float *attention_norm, *ffn_norm; /* [hidden]; NULL: the part reads the hidden state as it is */
    const float *query_norm, *key_norm;     /* [width] or the whole projection; NULL: none here */
    const float *value_norm;                /* [value width], of each head; or NULL */
    const float *query_bias, *key_bias, *value_bias, *output_bias; /* or NULL */
    const float *router_bias; /* [experts], added to the router's logits; or NULL */
    const float *correction;  /* [experts], added to the experts' scores where they are compared; or NULL */
    const float *sinks;       /* [heads]: a logit that every query of the head has besides those of its keys, for a value
                                 of zeros; or NULL */
    const float *expert_scale; /* [experts], of the weights of chosen experts; or NULL */
    const pllm_norms *norms;   /* NULL: none but attention_norm and ffn_norm. All layers have some, or none has */
    const pllm_own_input *own_input; /* NULL: none. All layers have one, or none has */
    const pllm_blocks *blocks; /* NULL: attention sees all positions of its window */
    const pllm_streams *attention_streams, *ffn_streams; /* in place of attention_norm and ffn_norm; NULL: there is one
                                                            stream. All layers have both, or none has */
    const pllm_altup *altup;   /* NULL: there is one stream, or pllm_streams. All layers have one, or none has */
    const pllm_sparse *sparse; /* in place of experts; NULL: none */
    const pllm_lexical *lexical; /* NULL: none; with streams only, in layers with a delta-net */
    const pllm_layer *experts; /* NULL with a router: they are run elsewhere, and the pass is cut before them; without:
                                  the layer has neither them nor a feed-forward network */
    const pllm_layer *shared; /* NULL: none */
    int64_t *counts;          /* [experts]: routes of each, added to what is there; or NULL */
    const pllm_pages *ahead;  /* the pages of the experts, one expert after the other, which the system is told of as soon
                                 as a step's routes are known, because memory may not hold them; NULL: not told */
    const int64_t *ahead_from; /* [experts + 1]: an expert's first one in `ahead` */
    const pllm_delta *delta;  /* in place of query, key, value; NULL: attention */
    const pllm_latent *latent; /* in their place, too; NULL: attention without latents */
    const pllm_convolution *convolution; /* in their place, too; NULL: attention */
    int64_t window;           /* positions a query sees, its own included; 0: all */
    int64_t kind;             /* of its heads */
    int64_t place;            /* among the layers with attention of its kind, with a delta-net, or with a convolution */
    int64_t lexical_place;    /* among the layers with `lexical` */
    int32_t chunked;          /* a query sees the positions from the last multiple of `window` on */
    int32_t grown;            /* the pass's query_scale holds for its queries */
} pllm_trunk_layer;

typedef struct pllm_trunk {
    const pllm_trunk_layer *layers;
    pllm_matrix embedding, head;
    const float *final_norm;
    const pllm_streams *final_streams; /* in place of final_norm */
    const pllm_matrix *spread, *gather; /* [streams - 1] of [hidden, hidden], with pllm_altup: from the embedding to the
                                           other streams, and from those to the end. Results get the length of the first */
    pllm_matrix own_embedding;  /* [tokens, layers * own_width]: every layer's own embedding of a token; tokens behind
                                   them have that of token 0 */
    pllm_matrix own_projection; /* [layers * own_width, hidden]: of the embedding; normed by layer, and added to them */
    const float *own_norm;      /* [own_width] */
    int64_t own_width;          /* 0: layers have no embeddings of their own */
    pllm_activation own_activation; /* of the gates of pllm_own_input and pllm_sparse */
    pllm_heads kinds[PLLM_HEAD_KINDS];
    int64_t kind_count, layer_count, hidden, heads, top_k;
    int64_t delta_layers, delta_key_heads, delta_value_heads, delta_key_width, delta_value_width, delta_taps;
    int64_t delta_ranks; /* rows of gate_down and decay_down together; 0: none */
    int64_t convolution_layers, convolution_taps;
    int64_t streams, stream_rank; /* residual streams, 1 without pllm_streams and pllm_altup, and rows of their `down` */
    int64_t laurel_rank, sparse_width; /* of pllm_altup and pllm_sparse; 0 without */
    int64_t block_heads, block_width, block_size, block_budget; /* with pllm_blocks, all layers with attention having some */
    int64_t lexical_width, lexical_taps, lexical_apart;
    int64_t latent_plain, latent_values; /* numbers of a head's query that are not rotated, and of its values; 0 without
                                            latents, which all layers with attention or none have */
    int64_t latent_rank; /* of query_down; 0: none */
    int64_t index_top;   /* positions that a query sees, at most; 0: there are no indexers */
    int64_t expert_groups, kept_groups; /* only experts of the best groups are chosen; 1: all are one group */
    int32_t set;         /* kernels of the projections and experts */
    int32_t exact_set;   /* kernels that keep activations in float32: routers and gates */
    int32_t cache_dtype; /* of keys and values */
    int32_t head_norm, normalise;
    int32_t scoring;     /* PLLM_SOFTMAX, PLLM_SIGMOID: what an expert's logit becomes */
    int32_t rotated_first; /* heads are normed after they are rotated, not before */
    int32_t paired_rotary; /* rows of queries and keys, and their biases, lie so that a rotation turns values 2 i and
                              2 i + 1 of a head, as llama.cpp stores them; 0: i and i + rotated / 2 */
    int32_t group_best;    /* experts that a group is compared by: its best one, or its best two together */
    int32_t softplus_gates; /* what a layer's `gate` is activated by; 0: the sigmoid */
    int32_t gated_queries; /* behind each head's query lies its gate, whose sigmoid scales the head's result */
    int32_t sigmoid_gates; /* gates of delta-nets are activated by the sigmoid; 0: by SiLU */
    int32_t delta_kind;    /* PLLM_DELTA, PLLM_MAMBA, PLLM_KDA: what all pllm_delta are */
    int32_t tiled_heads;   /* value head h belongs to key head h % key heads, as llama.cpp stores them; 0: to
                              h / (value heads / key heads) */
    int32_t parallel;      /* the feed-forward network, or the experts, read what attention reads, and ffn_norm is not used */
    int32_t centred;       /* attention_norm, ffn_norm and final_norm take the mean from what they norm */
    int32_t paired_index;  /* what paired_rotary says, of indexers */
    int32_t scale_input;   /* weights of chosen experts multiply their inputs, not their outputs */
    float epsilon, clip, embedding_scale, attention_scale, residual_scale, logits_divisor;
    float logits_cap;    /* logits are cap * tanh(logits / cap); 0: they are not limited */
    float scores_cap;    /* the same of the scores of attention (gemma2) */
    float value_scale;   /* of values as attention adds them up (MiMo V2) */
    float shared_scale;  /* of a shared expert without a gate */
    float routed_scale;  /* of the weights of chosen experts */
    float least_sum;     /* added to the sum that `normalise` divides by; with PLLM_SOFTMAX the least that it is */
    float latent_epsilon; /* of the norms of pllm_latent */
    float step_least, step_most; /* limits of a Mamba-2 layer's steps */
    float decay_least; /* the logarithm of a decay is this times the sigmoid of -scale * (decay + bias); 0: as decay_scale
                          says */
} pllm_trunk;

/* Positions start..start+count) of every row, in a page of `capacity` positions from `offset` on. For each kind of heads a
   page holds the keys of its layers, [row][layer][head][capacity / PLLM_KEY_BLOCK][width][PLLM_KEY_BLOCK], and their
   values, [row][layer][head][capacity][value width]. With latents the keys are the values, too, and `values` is not used.
   With pllm_blocks there are also the keys of positions, and in the place of the last one of a whole block that of the
   block, [row][layer][capacity][block_width], in float32 where keys and values are, and else in bfloat16. Strides from one
   row to the next are in bytes; 0: all rows share the page. */
typedef struct pllm_segment {
    void *keys[PLLM_HEAD_KINDS], *values[PLLM_HEAD_KINDS];
    int64_t key_stride[PLLM_HEAD_KINDS], value_stride[PLLM_HEAD_KINDS];
    void *blocks;
    int64_t block_stride;
    int64_t capacity, offset, start, count;
} pllm_segment;

/* Rows of one length, whose keys and values lie in one table of segments. */
typedef struct pllm_group {
    const pllm_segment *segments; /* ascending, covering 0..start + tokens) */
    int64_t segment_count, rows;
    int64_t start; /* position of their first token in the pass */
} pllm_group;

/* Tokens that are few for all kernels: each gets the bits that it would have alone. */
#define PLLM_STEPS 16

typedef struct pllm_pass {
    const int32_t *ids;          /* [rows, tokens]; -1 - i: row i of `given` stands in place of an embedding */
    const float *given;          /* [..., 1 + given_layers, hidden]: what stands in place of the embedding, then what is
                                    added to the hidden state behind each of the first layers; NULL without such tokens */
    const float *lexical;        /* [layers with pllm_lexical, rows * tokens, lexical_width]: embeddings of each token and
                                    those before it; NULL without such layers */
    const int64_t *seen;         /* [tokens]: in layers with a window, with seen_in_full in all, a query sees the positions
                                    before this one, if it is behind its own; NULL: up to its own. Only with `reads` */
    const float *cosine[PLLM_HEAD_KINDS], *sine[PLLM_HEAD_KINDS]; /* [groups or tokens, rotated / 2]: of each group's
                                    position, or of the tokens of the only one */
    const float *block_cosine, *block_sine; /* with pllm_blocks: [.., rotated / 2], of positions from 0 on */
    const float *query_scale;    /* [the same]: further factors of queries in layers that are `grown`; NULL: none */
    const pllm_group *groups;    /* in the order of rows; several only of one token a row */
    float *logits;               /* [rows, vocabulary], after each row's last token; with `every` [tokens, vocabulary];
                                    NULL: not wanted */
    const float *const *states_before; /* [rows]: each row's states; NULL in it: zeros */
    float *const *states_after;  /* [rows]: where they are put. A row's own place before, or one that no row has before */
    double *seconds;             /* [layer_count, PLLM_PARTS], added */
    void *workspace;             /* pllm_trunk_bytes() bytes, 64-byte aligned; kept between the calls of one pass */
    pllm_stop stop;              /* ends pllm_trunk_run early; NULL: nothing does */
    int64_t stop_interval;       /* nanoseconds between two calls of stop, at least */
    int64_t group_count, rows, tokens, first_layer, last_layer;
    int64_t reads;               /* tokens of the only row are read: what comes out equals, to the bit, what passes over parts of
                                    them give; 0: they are written, and it equals one pass for each token, of at most
                                    PLLM_STEPS of one row */
    int64_t every;               /* 1: logits after every token of the only row, which are written and not read */
    int64_t given_id;            /* the token whose own embeddings (own_embedding) `given` rows have */
    int64_t given_layers;        /* 0 with several residual streams */
    int64_t seen_in_full;        /* `seen` counts in layers without a window, too; 0 with latent attention */
} pllm_pass;

/* Where a pass stopped before the routed experts of `layer`. The addresses lie in the pass's workspace. */
typedef struct pllm_cut {
    const float *hidden;    /* [rows, hidden, or narrow.rows]: what the experts read */
    const int32_t *indices; /* [rows, top_k] */
    const float *weights;   /* [rows, top_k] */
    float *sum;             /* [rows, the same]: where the experts' weighted sum is to be put */
    int64_t rows;           /* positions that go on from here */
    int64_t layer;          /* -1: the pass did not stop, all its layers were run */
    int64_t reads;          /* as of pllm_routes */
} pllm_cut;

/* Workspace of a pass, whatever layers it is cut into. */
PLLM_API size_t pllm_trunk_bytes(const pllm_trunk *trunk, const pllm_pass *pass, int threads);
/* Layers first_layer..last_layer). `tokens` above 1 need rows = 1. Keys and values of the new positions are written
   into the segments, and states of layers that are run into states_after. With the last layer, the logits. In it, only the rows whose logits are wanted are computed
   beyond keys and values. PLLM_E_ARGUMENT: numbers that do not fit together. PLLM_E_STOPPED:
   `stop` ended it; what it would have written means nothing, and the pass cannot go on. */
PLLM_API int pllm_trunk_run(pllm_pool *pool, const pllm_trunk *trunk, const pllm_pass *pass);
/* The same up to the routes of the first of these layers that has a router; `cut` says which. The pass goes on with
   first_layer = cut->layer + 1, in a call of this function, once `sum` is filled and pllm_trunk_shared was called; with
   first_layer = last_layer = layer_count only the logits are left. */
PLLM_API int pllm_trunk_to_routes(pllm_pool *pool, const pllm_trunk *trunk, const pllm_pass *pass, pllm_cut *cut);
/* The shared expert of `layer`, at whose routes the pass stopped; nothing where there is none. */
PLLM_API int pllm_trunk_shared(pllm_pool *pool, const pllm_trunk *trunk, const pllm_pass *pass, int64_t layer);

#endif
