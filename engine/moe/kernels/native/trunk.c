/* The trunk of a decoder, layer by layer, inside one region of the pool. See trunk.h. */

#include "trunk_altup.h"
#include "trunk_experts.h"
#include "trunk_streams.h"

#include <math.h>
#include <string.h>

/* A row of a table of embeddings, multiplied by `scale`. */
static void open_embedding(const trunk_job *job, const pllm_matrix *table, int64_t row, float scale, float *to) {
    if (is_packed(table->dtype) || is_grouped(table->dtype) || table->dtype == PLLM_F16) {
        pllm_open_row(table, row, to);
        job->set->load(to, to, scale, table->columns, PLLM_F32);
    } else {
        const char *from = (const char *)table->data + row * bytes_of_values(table->dtype, table->row_stride);
        job->set->load(to, from, scale, table->columns, table->dtype);
    }
}

/* What is given of the token `id` below 0: in place of its embedding, or behind the first `layers` layers. */
static const float *given_row(const trunk_job *job, int64_t id, int64_t layers) {
    const pllm_pass *pass = job->pass;
    return pass->given + ((-1 - id) * (1 + pass->given_layers) + layers) * job->trunk->hidden;
}

static void embed(walk *w) {
    const pllm_trunk *trunk = w->job->trunk;
    const pllm_pass *pass = w->job->pass;
    for (int64_t row = share_start(w); row < share_end(w); row++) {
        const int64_t id = pass->ids[row];
        float *to = w->h + row * wide_of(trunk);
        if (id < 0)
            memcpy(to, given_row(w->job, id, 0), (size_t)trunk->hidden * 4);
        else
            open_embedding(w->job, &trunk->embedding, id, trunk->embedding_scale, to);
        pllm_repeat_streams(trunk, to);
    }
}

/* Every layer's own embedding of each token, in job->own_input: what is stored of the token, added to the normed
   projection of its embedding. */
static void embed_own(walk *w) {
    const trunk_job *job = w->job;
    const pllm_trunk *trunk = job->trunk;
    const int64_t width = trunk->own_width, all = trunk->layer_count * width;
    pllm_fill_strided(w, w->h, wide_of(trunk), &trunk->own_projection);
    pllm_project(w, &trunk->own_projection, job->own_input, all);
    barrier(w);
    const int64_t last = job->positions * (w->thread + 1) / w->threads;
    for (int64_t row = job->positions * w->thread / w->threads; row < last; row++) {
        float *to = job->own_input + row * all, *stored = w->own.own_input;
        const int64_t id = job->pass->ids[row] < 0 ? job->pass->given_id : job->pass->ids[row];
        open_embedding(job, &trunk->own_embedding, id < trunk->own_embedding.rows ? id : 0, sqrtf((float)width), stored);
        for (int64_t d = 0; d < all; d++) to[d] *= 1.0F / sqrtf((float)trunk->hidden);
        for (int64_t at = 0; at < all; at += width) job->set->norm(to + at, trunk->own_norm, trunk->epsilon, width);
        for (int64_t d = 0; d < all; d++) to[d] = (to[d] + stored[d]) * 0.70710678F;
    }
    barrier(w);
}

/* to = one row `h` of the hidden state as what stands behind `weight` reads it; NULL: as it is. */
static void read_hidden(const trunk_job *job, float *h, const float *weight, float *to) {
    const int64_t hidden = job->trunk->hidden;
    if (weight && job->trunk->centred) {
        double sum = 0;
        for (int64_t d = 0; d < hidden; d++) sum += h[d];
        const float mean = (float)(sum / (double)hidden);
        for (int64_t d = 0; d < hidden; d++) to[d] = h[d] - mean;
        job->set->norm(to, weight, job->trunk->epsilon, hidden);
    } else if (weight)
        job->set->residual_norm(h, NULL, NULL, NULL, 1, weight, job->trunk->epsilon, to, hidden);
    else
        memcpy(to, h, (size_t)hidden * 4);
}

/* Adds `out`, `bias` and `other` to the hidden state. `bias` and `other` may be NULL. */
static void residual(walk *w, const float *out, const float *bias, const float *other) {
    const trunk_job *job = w->job;
    const int64_t hidden = job->trunk->hidden;
    const float scale = job->trunk->residual_scale;
    for (int64_t row = share_start(w); row < share_end(w); row++) {
        const int64_t at = row * hidden;
        float *h = w->h + at;
        for (int64_t d = 0; d < hidden; d++) h[d] += scale * out[at + d];
        for (int64_t d = 0; bias && d < hidden; d++) h[d] += scale * bias[d];
        for (int64_t d = 0; other && d < hidden; d++) h[d] += scale * other[at + d];
    }
}

/* The hidden state as another part of a layer reads it, in w->normed. */
static void norm_again(walk *w, const float *weight) {
    const int64_t hidden = w->job->trunk->hidden;
    for (int64_t at = share_start(w) * hidden; at < share_end(w) * hidden; at += hidden)
        read_hidden(w->job, w->h + at, weight, w->normed + at);
}

static void residual_norm(walk *w, const float *out, const float *bias, const float *other, const float *weight) {
    if (w->job->trunk->centred) {
        residual(w, out, bias, other);
        norm_again(w, weight);
        return;
    }
    const trunk_job *job = w->job;
    const int64_t hidden = job->trunk->hidden;
    for (int64_t row = share_start(w); row < share_end(w); row++) {
        const int64_t at = row * hidden;
        job->set->residual_norm(w->h + at, out ? out + at : NULL, bias, other ? other + at : NULL,
                                job->trunk->residual_scale, weight, job->trunk->epsilon, w->normed + at, hidden);
    }
}

/* ---- Attention -------------------------------------------------------------------------------------------- */

/* Only the last position of a text goes on from here: the logits after it are all that is wanted. It is always alone here,
   so that it can be multiplied as one that is written, which is faster. */
static void keep_last(walk *w) {
    pllm_keep_row_of_streams(w, w->rows - 1);
    w->reads = 0;
}

/* From what a layer without keys has gathered of all positions to the output projection. */
static int project_gathered(walk *w, int64_t index, int last) {
    const trunk_job *job = w->job;
    const pllm_trunk_layer *layer = job->trunk->layers + index;
    if (last && !job->pass->logits) return 0;
    const float *joined = job->attended;
    if (last && is_text(job->pass)) {
        joined += (job->positions - 1) * layer->output.columns;
        keep_last(w);
    }
    pllm_fill_input(w, joined, &layer->output);
    pllm_project(w, &layer->output, job->out, job->trunk->hidden);
    barrier(w);
    return 1;
}

/* As attend_layer, of a layer with a short convolution. */
static int convolution_layer(walk *w, int64_t index, int last) {
    const trunk_job *job = w->job;
    const pllm_matrix *input = &job->trunk->layers[index].convolution->input;
    pllm_fill_input(w, w->normed, input);
    pllm_project(w, input, job->qkv, job->projected);
    barrier(w);
    pllm_convolve(job, index, w->thread, w->threads);
    barrier(w);
    return project_gathered(w, index, last);
}

/* As attend_layer, of a Mamba-2 layer. Its states go on with every position, whatever is wanted. */
static int mamba_layer(walk *w, int64_t index, int last) {
    const trunk_job *job = w->job;
    const pllm_matrix *output = &job->trunk->layers[index].output;
    const pllm_delta *delta = job->trunk->layers[index].delta;
    const pllm_matrix *matrices[] = {&delta->input, &delta->gate, &delta->decay};
    float *results[3], *to = job->qkv;
    for (int i = 0; i < 3; to += matrices[i]->rows, i++) results[i] = to;
    pllm_project_each(w, w->normed, matrices, results, 3, job->projected);
    barrier(w);
    pllm_mamba_convolve(job, index, w->thread, w->threads);
    barrier(w);
    pllm_delta_heads(job, &w->own, index);
    barrier(w);
    if (last && !job->pass->logits) return 0;
    if (last && is_text(job->pass)) keep_last(w);
    float *joined = w->few ? w->own.joined : job->attended;
    const int64_t first = job->positions - w->rows + share_start(w);
    pllm_mamba_norm(job, index, first, share_end(w) - share_start(w), joined + share_start(w) * output->columns);
    pllm_fill_input(w, joined, output);
    pllm_project(w, output, job->out, job->trunk->hidden);
    barrier(w);
    return 1;
}

/* As attend_layer, of a layer with a delta-net. Its states go on with every position, whatever is wanted. */
static int delta_layer(walk *w, int64_t index, int last) {
    const trunk_job *job = w->job;
    const pllm_trunk *trunk = job->trunk;
    const pllm_delta *delta = trunk->layers[index].delta;
    const pllm_matrix *const wide[] = {&delta->gate, &delta->decay}, *const down[] = {&delta->gate_down, &delta->decay_down};
    const pllm_matrix *const all[] = {&delta->input, &delta->key, &delta->value, wide[0], wide[1], &delta->rate};
    const pllm_matrix *matrices[MOST_BESIDE];
    float *results[MOST_BESIDE], *wide_results[2], *to = job->qkv;
    int count = 0;
    for (int i = 0; i < 6; to += all[i]->rows, i++) {
        const int second = i == 3 || i == 4;
        if (second) wide_results[i - 3] = to;
        if (all[i]->data && !(second && down[i - 3]->data)) matrices[count] = all[i], results[count++] = to;
    }
    float *const ranks[] = {to, to + delta->gate_down.rows};
    for (int i = 0; i < 2; i++)
        if (down[i]->data) matrices[count] = down[i], results[count++] = ranks[i];
    pllm_project_each(w, w->normed, matrices, results, count, job->projected);
    barrier(w);
    for (int i = 0; i < 2; i++) {
        if (!down[i]->data) continue;
        pllm_fill_strided(w, ranks[i], job->projected, wide[i]);
        pllm_project_share(w, wide + i, wide_results + i, 1, job->projected);
    }
    if (trunk->delta_ranks) barrier(w);
    pllm_delta_heads(job, &w->own, index);
    barrier(w);
    pllm_delta_keep(job, index, w->thread, w->threads);
    return project_gathered(w, index, last);
}

/* Attention after the projections, of all positions, or in the last layer of a prompt of its last one: `qkv` is that of
   the rows that go on, which are `step` positions after their start. `stored`: keys are in the cache and queries ready.
   Returns [rows, heads * value width]. */
static const float *gathered(walk *w, int64_t index, int last, const float *qkv, int64_t step, int stored) {
    const trunk_job *job = w->job;
    if (job->pass->tokens > 1 && !last && !job->pass->reads) {
        pllm_attend_steps(job, &w->own, index);
        barrier(w);
        pllm_join_steps(job, index, share_start(w), share_end(w), w->own.joined);
        return w->own.joined;
    }
    if (job->pass->reads && !last) {
        pllm_attend_prompt(job, &w->own, index);
        barrier(w);
        return job->attended;
    }
    pllm_attend_rows(job, &w->own, index, qkv, step, stored);
    barrier(w);
    float *joined = w->few ? w->own.joined : job->attended;
    pllm_join_rows(job, index, qkv, step, share_start(w), share_end(w), joined);
    return joined;
}

/* What positions from `first` on see, by the indexer of this layer or of an earlier one. `alone`: each of a prompt's
   positions is attended to by itself, and not in parts. */
static void choose_positions(walk *w, int64_t index, int64_t first, int alone) {
    const trunk_job *job = w->job;
    const int chooses = job->trunk->layers[index].latent->indexer != NULL;
    if (alone) {
        if (!chooses) return;
        pllm_choose_prompt(job, &w->own, index, MAX(first, pllm_unchosen(job)));
        barrier(w);
        return;
    }
    if (chooses) {
        pllm_score_rows(job, &w->own, index, first);
        barrier(w);
        pllm_choose_rows(job, first);
        barrier(w);
    }
    pllm_gather_rows(job, index, first);
    barrier(w);
}

/* As attend_layer, with latents. */
static int latent_layer(walk *w, int64_t index, int last) {
    const trunk_job *job = w->job;
    const pllm_trunk *trunk = job->trunk;
    const pllm_trunk_layer *layer = trunk->layers + index;
    const pllm_latent *latent = layer->latent;
    const int prompt = is_text(job->pass), wanted = !last || job->pass->logits != NULL;
    const int ranked = trunk->latent_rank > 0;
    const pllm_indexer *indexer = latent->indexer;
    const int chooses = wanted && indexer && job->picked;
    const pllm_matrix *matrices[MOST_BESIDE], *gate = &layer->gate;
    float *results[MOST_BESIDE], *second = job->latent_rows + trunk->kinds[0].width;
    float *gates = job->qkv + job->shapes->gates;
    int count = 0;
    matrices[count] = &latent->down, results[count++] = job->latent_rows;
    if (indexer) matrices[count] = &indexer->key, results[count++] = job->latent_rows + job->latent_index;
    if (wanted) matrices[count] = ranked ? &latent->query_down : &latent->query, results[count++] = second;
    if (chooses) matrices[count] = &indexer->weights, results[count++] = job->latent_rows + job->latent_index + indexer->key.rows;
    pllm_project_each(w, w->normed, matrices, results, count, job->latent_stride);
    if (wanted && gate->data) {
        pllm_fill_input(w, w->normed, gate);
        pllm_project_share(w, &gate, &gates, 1, job->projected);
    }
    barrier(w);
    if (!w->few || w->thread == 0) {
        pllm_latent_keys(job, index, share_start(w), share_end(w), w->own.rotated);
        if (indexer) pllm_index_keys(job, index, share_start(w), share_end(w), w->own.rotated);
    }
    if (wanted && ranked) {
        float *normed = w->few ? w->own.latent_rank : job->latent_rank;
        pllm_latent_norm_rank(job, index, share_start(w), share_end(w), normed);
        const pllm_matrix *const queries[] = {&latent->query, chooses ? &indexer->query : NULL};
        float *const to[] = {job->latent_queries, job->latent_queries + latent->query.rows};
        pllm_project_each(w, normed, queries, to, chooses ? 2 : 1, job->latent_query_stride);
    }
    if (!wanted) return 0;
    barrier(w);
    const int64_t first = prompt && last ? job->positions - 1 : 0;
    if (job->picked) choose_positions(w, index, first, job->pass->reads && !last);
    pllm_latent_queries(job, &w->own, index, first, job->positions - first, w->reads && !last);
    barrier(w);
    if (prompt && last) keep_last(w);
    const float *joined = gathered(w, index, last, job->qkv + first * job->projected, first, 1);
    if (!w->few) barrier(w);
    pllm_latent_values(job, &w->own, index, joined, w->rows, w->reads);
    barrier(w);
    pllm_fill_input(w, job->latent_values, &layer->output);
    pllm_project(w, &layer->output, job->out, trunk->hidden);
    barrier(w);
    return 1;
}

/* From the norm to the output projection, in job->out. Returns 0 if nothing more is wanted of the pass. */
static int attend_layer(walk *w, int64_t index, int last) {
    const trunk_job *job = w->job;
    const pllm_trunk_layer *layer = job->trunk->layers + index;
    if (layer->delta) return job->trunk->delta_kind == PLLM_MAMBA ? mamba_layer(w, index, last) : delta_layer(w, index, last);
    if (layer->latent) return latent_layer(w, index, last);
    if (layer->convolution) return convolution_layer(w, index, last);
    const pllm_pass *pass = job->pass;
    const head_shape *shape = shape_of(job, index);
    const int64_t keys = shape->queries, values = shape->values, gates = shape->gates;
    const int prompt = is_text(pass), wanted = !last || pass->logits != NULL;
    const float *qkv = job->qkv;
    int64_t step = 0;
    const pllm_matrix *matrices[MOST_BESIDE];
    float *results[MOST_BESIDE];
    int count = 0;
    if (layer->key.data) matrices[count] = &layer->key, results[count++] = job->qkv + keys;
    if (layer->value.data) matrices[count] = &layer->value, results[count++] = job->qkv + values;
    if (wanted && !(prompt && last)) matrices[count] = &layer->query, results[count++] = job->qkv;
    if (layer->gate.data && wanted && !(prompt && last))
        matrices[count] = &layer->gate, results[count++] = job->qkv + gates;
    const pllm_blocks *blocks = layer->blocks;
    const int chooses = blocks && wanted && pllm_any_chooses(job);
    if (blocks) matrices[count] = &blocks->key, results[count++] = pllm_block_columns(job, index, 0) + blocks->query.rows;
    if (chooses && !(prompt && last)) matrices[count] = &blocks->query, results[count++] = pllm_block_columns(job, index, 0);
    pllm_project_each(w, w->normed, matrices, results, count, job->projected);
    if (wanted && prompt && last) {
        /* The last row's query by itself, from its own copy of the input. */
        const float *normed = w->normed + (w->rows - 1) * job->trunk->hidden;
        qkv = job->qkv + (job->positions - 1) * job->projected;
        step = job->positions - 1;
        keep_last(w);
        const pllm_matrix *const alone[] = {&layer->query, &layer->gate, chooses ? &blocks->query : NULL};
        float *const to[] = {(float *)qkv, (float *)qkv + gates, (float *)qkv + shape->blocks};
        for (int i = 0; i < 3; i++) {
            if (!alone[i] || !alone[i]->data) continue;
            pllm_fill_input(w, normed, alone[i]);
            pllm_project_share(w, alone + i, to + i, 1, job->projected);
        }
    }
    barrier(w);
    if (blocks) pllm_keep_block_keys(job, &w->own, index, w->thread, w->threads);
    if (chooses) {
        const int64_t first = prompt && last ? job->positions - 1 : 0;
        barrier(w);
        pllm_score_blocks(job, &w->own, index, first, w->thread, w->threads);
        barrier(w);
        pllm_choose_blocks(job, &w->own, first, w->thread, w->threads);
        barrier(w);
    }
    if (prompt || !wanted) {
        const int64_t first_query = !wanted ? job->positions : last ? job->positions - 1 : 0;
        pllm_prepare_prompt(job, &w->own, index, first_query, w->thread, w->threads);
        if (!wanted) return 0;
        barrier(w);
    }
    pllm_fill_input(w, gathered(w, index, last, qkv, step, prompt), &layer->output);
    pllm_project(w, &layer->output, job->out, job->trunk->hidden);
    barrier(w);
    return 1;
}

/* ---- Feed-forward networks ---------------------------------------------------------------------------------- */

/* Adds what attention has given, normed, and norms the sum for the feed-forward network, or for the one beside the
   experts. */
static void add_attention(walk *w, const pllm_trunk_layer *layer) {
    const trunk_job *job = w->job;
    const int64_t hidden = job->trunk->hidden;
    float *normed = layer->norms->experts ? w->beside : w->normed;
    for (int64_t at = share_start(w) * hidden; at < share_end(w) * hidden; at += hidden) {
        float *given = w->own.row, *h = w->h + at;
        memcpy(given, job->out + at, (size_t)hidden * 4);
        for (int64_t d = 0; layer->output_bias && d < hidden; d++) given[d] += layer->output_bias[d];
        job->set->norm(given, layer->norms->attention, job->trunk->epsilon, hidden);
        for (int64_t d = 0; d < hidden; d++) h[d] += given[d];
        read_hidden(job, h, layer->ffn_norm, normed + at);
    }
}

/* Adds what a layer's feed-forward network, or its experts and what runs beside them, have given, normed. */
static void add_feed_forward(walk *w, const pllm_trunk_layer *layer) {
    const trunk_job *job = w->job;
    const pllm_norms *norms = layer->norms;
    const int64_t hidden = job->trunk->hidden;
    const float epsilon = job->trunk->epsilon;
    for (int64_t at = share_start(w) * hidden; at < share_end(w) * hidden; at += hidden) {
        float *sum = w->normed + at, *routed = w->own.row, *h = w->h + at;
        const int beside = layer->router.data && layer->shared;
        memcpy(sum, (beside ? job->shared_out : job->out) + at, (size_t)hidden * 4);
        if (beside) {
            memcpy(routed, job->out + at, (size_t)hidden * 4);
            if (norms->experts) job->set->norm(sum, norms->shared_after, epsilon, hidden);
            if (norms->experts) job->set->norm(routed, norms->experts_after, epsilon, hidden);
            for (int64_t d = 0; d < hidden; d++) sum[d] += routed[d];
        }
        job->set->norm(sum, norms->after, epsilon, hidden);
        for (int64_t d = 0; d < hidden; d++) h[d] += sum[d];
    }
}

/* Adds what `layer`, number `index`, makes of its own embeddings of the rows and of `from` [rows, hidden]: to the hidden
   state, or to all streams but the first. */
static void add_own_input(walk *w, const pllm_trunk_layer *layer, int64_t index, const float *from) {
    const trunk_job *job = w->job;
    const pllm_trunk *trunk = job->trunk;
    const pllm_own_input *own = layer->own_input;
    const int64_t hidden = trunk->hidden, width = trunk->own_width, first = job->positions - w->rows;
    pllm_fill_input(w, from, &own->gate);
    pllm_project(w, &own->gate, job->gated, width);
    barrier(w);
    float *gated = w->few ? w->own.gated : job->gated;
    for (int64_t row = share_start(w); row < share_end(w); row++) {
        float *mine = gated + row * width;
        if (w->few) memcpy(mine, job->gated + row * width, (size_t)width * 4);
        pllm_gate(trunk->set, &trunk->own_activation, mine,
                  job->own_input + ((first + row) * trunk->layer_count + index) * width, width);
    }
    pllm_fill_input(w, gated, &own->projection);
    pllm_project(w, &own->projection, job->out, hidden);
    barrier(w);
    for (int64_t row = share_start(w); row < share_end(w); row++) {
        memcpy(w->own.row, job->out + row * hidden, (size_t)hidden * 4);
        job->set->norm(w->own.row, own->norm, trunk->epsilon, hidden);
        float *h = w->h + row * wide_of(trunk);
        for (int64_t at = trunk->streams > 1 ? hidden : 0; at < wide_of(trunk); at += hidden)
            for (int64_t d = 0; d < hidden; d++) h[at + d] += w->own.row[d];
    }
}

/* Adds what `layer`, number `index`, has given behind its attention, and norms the result with `weight`. */
static void end_normed(walk *w, const pllm_trunk_layer *layer, int64_t index, const float *weight) {
    const int64_t hidden = w->job->trunk->hidden;
    add_feed_forward(w, layer);
    if (layer->own_input) add_own_input(w, layer, index, w->h);
    for (int64_t at = share_start(w) * hidden; at < share_end(w) * hidden; at += hidden) {
        for (int64_t d = 0; d < hidden; d++) w->h[at + d] *= layer->norms->scale;
        read_hidden(w->job, w->h + at, weight, w->normed + at);
    }
}

/* From the second norm to the experts' weighted sum in job->out, or to the routes if the pass is cut there; 0 then. */
static int feed_forward(walk *w, int64_t index) {
    const trunk_job *job = w->job;
    const pllm_trunk_layer *layer = job->trunk->layers + index;
    if (layer->altup)
        pllm_add_laurel(w, layer);
    else if (layer->ffn_streams) {
        pllm_add_to_streams(w, job->out, NULL);
        pllm_read_streams(w, layer->ffn_streams);
    } else if (layer->norms)
        add_attention(w, layer);
    else if (job->trunk->parallel)
        residual(w, job->out, layer->output_bias, NULL);
    else if (layer->output.data)
        residual_norm(w, job->out, layer->output_bias, NULL, layer->ffn_norm);
    pllm_mark(w, index, PLLM_OTHER);
    int32_t *indices = w->few ? w->own.indices : job->indices;
    float *weights = w->few ? w->own.weights : job->weights;
    if (layer->sparse) {
        pllm_sparse_network(w, layer->sparse);
        pllm_mark(w, index, PLLM_OTHER);
        return 1;
    }
    const float *hidden = w->normed;
    float *sum = layer->widen.data ? job->narrow_sum : job->out;
    if (layer->router.data) {
        if (layer->shared && !job->cut) pllm_shared_expert(w, index);
        const int beside = layer->norms && layer->norms->experts;
        if (beside) norm_again(w, layer->norms->router);
        pllm_route(w, layer, indices, weights);
        if (beside) norm_again(w, layer->norms->experts);
        pllm_mark(w, index, PLLM_ROUTER);
        hidden = pllm_narrowed(w, layer);
        if (job->cut) {
            if (w->thread == 0) *job->cut = (pllm_cut){hidden, indices, weights, sum, w->rows, index, w->reads};
            return 0;
        }
        /* A prompt uses nearly all experts, and perhaps more than memory holds at once. */
        if (layer->ahead && w->few) pllm_read_ahead(w, layer, indices);
    } else {
        for (int64_t row = share_start(w); row < share_end(w); row++) weights[row] = 1, indices[row] = 0;
    }
    if (!w->few) barrier(w);
    pllm_run_experts(w, layer->experts, hidden, indices, weights, layer->router.data ? job->trunk->top_k : 1,
                layer->router.data && job->trunk->scale_input, sum, layer->router.data ? layer->counts : NULL);
    pllm_widened(w, layer);
    pllm_mark(w, index, layer->router.data ? PLLM_EXPERTS : PLLM_OTHER);
    return 1;
}

static int has_network(const pllm_trunk_layer *layer) {
    return layer->experts || layer->router.data || layer->sparse;
}

/* As add_layer, with alternating updates. */
static void update_streams(walk *w, int64_t index, const float *weight) {
    const pllm_trunk *trunk = w->job->trunk;
    if (index > 0) {
        const pllm_trunk_layer *before = trunk->layers + index - 1;
        pllm_correct_streams(w, before);
        add_own_input(w, before, index - 1, w->normed);
    }
    if (index < trunk->layer_count)
        pllm_predict_streams(w, trunk->layers[index].altup, weight);
    else
        pllm_gather_streams(w, weight);
}

/* As add_layer, with several streams, which `streams` then reads. */
static void add_layer_to_streams(walk *w, int64_t index, const pllm_streams *streams) {
    const pllm_trunk *trunk = w->job->trunk;
    const pllm_trunk_layer *before = trunk->layers + index - 1;
    if (index > 0) pllm_add_to_streams(w, w->job->out, before->router.data && before->shared ? w->job->shared_out : NULL);
    if (index < trunk->layer_count && trunk->layers[index].lexical) pllm_add_lexical(w, index);
    pllm_read_streams(w, streams);
}

/* Adds what is given of tokens behind the first `layers` layers. */
static void add_given(walk *w, int64_t layers) {
    const trunk_job *job = w->job;
    const int64_t hidden = job->trunk->hidden, first = job->positions - w->rows;
    if (!job->pass->given || layers > job->pass->given_layers) return;
    for (int64_t row = share_start(w); row < share_end(w); row++) {
        const int64_t id = job->pass->ids[first + row];
        if (id >= 0) continue;
        const float *from = given_row(job, id, layers);
        for (int64_t d = 0; d < hidden; d++) w->h[row * hidden + d] += from[d];
    }
}

/* Adds what the layer before `index` has given, and norms the sum with `weight`. */
static void add_layer(walk *w, int64_t index, const float *weight) {
    if (index == 0) {
        const int64_t hidden = w->job->trunk->hidden;
        for (int64_t at = share_start(w) * hidden; at < share_end(w) * hidden; at += hidden)
            read_hidden(w->job, w->h + at, weight, w->normed + at);
        return;
    }
    add_given(w, index);
    const pllm_trunk_layer *layer = w->job->trunk->layers + index - 1;
    if (layer->norms) return end_normed(w, layer, index - 1, weight);
    residual_norm(w, w->job->out, has_network(layer) ? NULL : layer->output_bias,
                  layer->router.data && layer->shared ? w->job->shared_out : NULL, weight);
}

/* A thread's share of logits that are divided or limited. */
static void finish_logits(const walk *w) {
    const pllm_trunk *trunk = w->job->trunk;
    const int64_t count = w->rows * trunk->head.rows;
    float *logits = w->job->pass->logits;
    for (int64_t i = count * w->thread / w->threads; i < count * (w->thread + 1) / w->threads; i++) {
        logits[i] /= trunk->logits_divisor;
        if (trunk->logits_cap > 0) logits[i] = trunk->logits_cap * tanhf(logits[i] / trunk->logits_cap);
    }
}

static void head(walk *w) {
    const trunk_job *job = w->job;
    const pllm_trunk *trunk = job->trunk;
    if (trunk->final_streams)
        add_layer_to_streams(w, trunk->layer_count, trunk->final_streams);
    else if (trunk->gather)
        update_streams(w, trunk->layer_count, trunk->final_norm);
    else
        add_layer(w, trunk->layer_count, trunk->final_norm);
    pllm_fill_input(w, w->normed, &trunk->head);
    pllm_project(w, &trunk->head, job->pass->logits, trunk->head.rows);
    if (trunk->logits_divisor == 1.0F && trunk->logits_cap == 0) return;
    barrier(w);
    finish_logits(w);
}

/* The thread's own memory, and what goes on after `layers` layers. */
static void set_out(walk *w, int thread, int threads, const trunk_job *job, int64_t layers) {
    *w = (walk){.job = job, .thread = thread, .threads = threads};
    pllm_own_layout(job, &w->own, job->own + (size_t)thread * job->own_bytes);
    /* keep_last: after the attention of the last layer that keeps anything a prompt is one row. */
    const int last = layers > job->last_kept && is_text(job->pass);
    pllm_set_rows(w, last ? 1 : job->positions);
    w->reads = job->pass->reads && !last;
    pllm_mark(w, 0, -1);
}

static void region(int thread, int threads, void *argument) {
    const trunk_job *job = argument;
    const pllm_trunk *trunk = job->trunk;
    const pllm_pass *pass = job->pass;
    walk w;
    set_out(&w, thread, threads, job, pass->first_layer);
    if (pass->first_layer == 0) embed(&w);
    if (pass->first_layer == 0 && trunk->own_width) embed_own(&w);
    if (pass->first_layer == 0 && trunk->spread) pllm_spread_streams(&w);
    pllm_mark(&w, 0, -1);
    /* A pass that was cut goes on behind the routed experts. */
    if (job->cut && pass->first_layer > 0) pllm_widened(&w, trunk->layers + pass->first_layer - 1);
    for (int64_t i = pass->first_layer; i < pass->last_layer; i++) {
        if (i > job->last_kept && !pass->logits) return;
        if (trunk->layers[i].attention_streams)
            add_layer_to_streams(&w, i, trunk->layers[i].attention_streams);
        else if (trunk->layers[i].altup)
            update_streams(&w, i, trunk->layers[i].attention_norm);
        else
            add_layer(&w, i, trunk->layers[i].attention_norm);
        pllm_mark(&w, i, PLLM_OTHER);
        if (trunk->layers[i].output.data) {
            const int more = attend_layer(&w, i, i >= job->last_kept);
            pllm_mark(&w, i, PLLM_ATTENTION);
            if (!more) return;
        }
        if (has_network(trunk->layers + i) && !feed_forward(&w, i)) return;
    }
    if (pass->last_layer == trunk->layer_count && pass->logits) head(&w);
}

static void shared_region(int thread, int threads, void *argument) {
    const trunk_job *job = argument;
    walk w;
    set_out(&w, thread, threads, job, job->shared_layer + 1);
    pllm_shared_expert(&w, job->shared_layer);
}

_Static_assert(PLLM_STEPS == FEW_LIMIT, "steps are few rows for all kernels");

static int check(const pllm_trunk *trunk, const pllm_pass *pass) {
    if (pass->rows < 1 || pass->tokens < 1 || (pass->rows > 1 && pass->tokens > 1) || pass->first_layer < 0 ||
        pass->last_layer > trunk->layer_count || pass->first_layer > pass->last_layer || pass->group_count < 1)
        return PLLM_E_ARGUMENT;
    int64_t rows = 0;
    for (int64_t i = 0; i < pass->group_count; i++) {
        const pllm_group *group = pass->groups + i;
        const pllm_segment *last = group->segments + group->segment_count - 1;
        if (group->rows < 1 || group->segment_count < 1 || group->segments->start != 0 ||
            last->start + last->count < group->start + pass->tokens)
            return PLLM_E_ARGUMENT;
        rows += group->rows;
    }
    if (rows != pass->rows) return PLLM_E_ARGUMENT;
    if (pass->reads ? pass->rows > 1 : pass->tokens > PLLM_STEPS) return PLLM_E_ARGUMENT;
    if (pass->seen && !pass->reads) return PLLM_E_ARGUMENT;
    if (pass->every && (pass->reads || pass->rows > 1)) return PLLM_E_ARGUMENT;
    for (int64_t i = 0; i < pass->rows * pass->tokens; i++)
        if (pass->ids[i] < 0 && !pass->given) return PLLM_E_ARGUMENT;
    if (pass->given_layers < 0 || (pass->given_layers && trunk->streams > 1)) return PLLM_E_ARGUMENT;
    if (trunk->convolution_layers > 0 && (trunk->convolution_taps < 1 || !(pass->states_before && pass->states_after)))
        return PLLM_E_ARGUMENT;
    if (trunk->delta_layers > 0 &&
        (trunk->delta_taps < 1 || trunk->delta_taps > PLLM_MOST_TAPS || trunk->delta_key_heads < 1 ||
         trunk->delta_value_heads < 1 || trunk->delta_value_heads % trunk->delta_key_heads ||
         (trunk->delta_kind == PLLM_KDA && trunk->delta_value_heads != trunk->delta_key_heads) ||
         !(pass->states_before && pass->states_after)))
        return PLLM_E_ARGUMENT;
    for (int64_t i = 0; i < trunk->layer_count; i++)
        if (trunk->layers[i].blocks &&
            (trunk->block_size < 1 || trunk->block_budget < 1 || trunk->kinds[0].rotated > trunk->block_width || pass->seen))
            return PLLM_E_ARGUMENT;
    if (pass->seen_in_full && trunk->latent_plain) return PLLM_E_ARGUMENT;
    if (trunk->streams < 1 || trunk->lexical_taps > PLLM_MOST_TAPS) return PLLM_E_ARGUMENT;
    for (int64_t i = 0; i < trunk->layer_count; i++) {
        const pllm_trunk_layer *layer = trunk->layers + i;
        const int altup = layer->altup != NULL;
        if (altup != (trunk->spread != NULL) || altup != (trunk->gather != NULL) || (layer->sparse && trunk->sparse_width < 1) ||
            (altup && (trunk->streams > PLLM_MOST_STREAMS || !layer->norms || !layer->own_input || trunk->laurel_rank < 1)))
            return PLLM_E_ARGUMENT;
    }
    for (int64_t i = 0; i < trunk->layer_count; i++)
        if (trunk->layers[i].lexical && !(pass->lexical && trunk->layers[i].delta && trunk->lexical_taps > 0))
            return PLLM_E_ARGUMENT;
    const int packed = packed_bits(trunk->cache_dtype);
    if (trunk->cache_dtype != PLLM_F32 && trunk->cache_dtype != PLLM_BF16 && !packed) return PLLM_E_ARGUMENT;
    if (trunk->kind_count < 1 || trunk->kind_count > PLLM_HEAD_KINDS) return PLLM_E_ARGUMENT;
    for (int64_t kind = 0; kind < trunk->kind_count; kind++)
        if (trunk->kinds[kind].width % (packed ? CACHE_GROUP : 2) || trunk->kinds[kind].heads < 1 ||
            trunk->kinds[kind].value_width % (packed ? CACHE_GROUP : 2))
            return PLLM_E_ARGUMENT;
    if (trunk->index_top && (trunk->index_top < 0 || trunk->kind_count != 2 || trunk->latent_rank < 1 ||
                             !trunk->layers[0].latent || !trunk->layers[0].latent->indexer))
        return PLLM_E_ARGUMENT;
    if (trunk->expert_groups < 1 || trunk->kept_groups < 1 || trunk->kept_groups > trunk->expert_groups)
        return PLLM_E_ARGUMENT;
    for (int64_t i = 0; i < trunk->layer_count; i++)
        if (trunk->layers[i].router.rows % trunk->expert_groups) return PLLM_E_ARGUMENT;
    return pllm_has(trunk->set) && pllm_has(trunk->exact_set) ? PLLM_OK : PLLM_E_SET;
}

static int run(pllm_pool *pool, const pllm_trunk *trunk, const pllm_pass *pass, pllm_cut *cut) {
    const int wrong = check(trunk, pass);
    if (wrong) return wrong;
    for (int64_t i = pass->first_layer; i < pass->last_layer; i++)
        if (!trunk->layers[i].experts && (trunk->layers[i].router.data ? !cut : !trunk->layers[i].output.data))
            return PLLM_E_ARGUMENT;
    trunk_job job;
    pllm_trunk_layout(&job, trunk, pass, pllm_pool_threads(pool));
    job.pool = pool;
    job.cut = cut;
    if (pass->first_layer == 0) memset(job.zeros, 0, (size_t)job.positions * 4);
    return pllm_pool_run_until(pool, region, &job, pass->stop, pass->stop_interval) ? PLLM_E_STOPPED : PLLM_OK;
}

int pllm_trunk_run(pllm_pool *pool, const pllm_trunk *trunk, const pllm_pass *pass) {
    return run(pool, trunk, pass, NULL);
}

int pllm_trunk_to_routes(pllm_pool *pool, const pllm_trunk *trunk, const pllm_pass *pass, pllm_cut *cut) {
    *cut = (pllm_cut){.layer = -1};
    return run(pool, trunk, pass, cut);
}

int pllm_trunk_shared(pllm_pool *pool, const pllm_trunk *trunk, const pllm_pass *pass, int64_t layer) {
    const int wrong = check(trunk, pass);
    if (wrong || layer < 0 || layer >= trunk->layer_count) return wrong ? wrong : PLLM_E_ARGUMENT;
    if (!trunk->layers[layer].shared) return PLLM_OK;
    trunk_job job;
    pllm_trunk_layout(&job, trunk, pass, pllm_pool_threads(pool));
    job.pool = pool;
    job.shared_layer = layer;
    pllm_pool_run(pool, shared_region, &job);
    return PLLM_OK;
}
