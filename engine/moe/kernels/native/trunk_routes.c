/* Which experts a token goes to, by its router's logits. */

#include "trunk_attention.h"

#include <math.h>

/* What experts are compared by. */
static float rank_of(const pllm_trunk_layer *layer, const float *scores, int64_t expert) {
    return scores[expert] + (layer->correction ? layer->correction[expert] : 0);
}

/* How good a group of experts is: as its best one, or as its best two together. */
static float group_rank(const pllm_trunk_layer *layer, const float *scores, int64_t begin, int64_t end, int best_two) {
    float first = -INFINITY, second = -INFINITY;
    for (int64_t expert = begin; expert < end; expert++) {
        const float rank = rank_of(layer, scores, expert);
        if (rank > first)
            second = first, first = rank;
        else if (rank > second)
            second = rank;
    }
    return best_two ? first + second : first;
}

/* Puts the experts out of reach that are not of the best groups. Of equal groups the last goes first. */
static void keep_groups(const pllm_trunk *trunk, const pllm_trunk_layer *layer, float *scores, int64_t count) {
    const int64_t each = count / trunk->expert_groups;
    for (int64_t left = trunk->expert_groups; left > trunk->kept_groups; left--) {
        int64_t worst = -1;
        float least = INFINITY;
        for (int64_t begin = 0; begin < count; begin += each) {
            const float rank = group_rank(layer, scores, begin, begin + each, trunk->group_best > 1);
            if (rank != -INFINITY && rank <= least) worst = begin, least = rank;
        }
        for (int64_t i = 0; worst >= 0 && i < each; i++) scores[worst + i] = -INFINITY;
    }
}

/* The best of equals is the first. */
void pllm_choose_experts(const pllm_trunk *trunk, const pllm_trunk_layer *layer, float *logits, int64_t count,
                         int32_t *indices, float *weights) {
    const int sigmoid = trunk->scoring == PLLM_SIGMOID;
    float largest = -INFINITY, chosen = 0, total = 1;
    int none = 0;
    for (int64_t i = 0; i < count; i++) {
        largest = MAX(largest, logits[i]);
        none |= isnan(logits[i]);
    }
    if (none || isinf(largest)) {
        for (int64_t slot = 0; slot < trunk->top_k; slot++) indices[slot] = (int32_t)slot, weights[slot] = NAN;
        return;
    }
    if (sigmoid)
        for (int64_t i = 0; i < count; i++) logits[i] = 1.0F / (1.0F + expf(-logits[i]));
    else
        total = pllm_exp_sum(trunk->exact_set, logits, largest, count);
    if (layer->correction && total != 1) {
        for (int64_t i = 0; i < count; i++) logits[i] /= total;
        total = 1;
    }
    if (trunk->kept_groups < trunk->expert_groups) keep_groups(trunk, layer, logits, count);
    for (int64_t slot = 0; slot < trunk->top_k; slot++) {
        int64_t best = 0;
        float most = -INFINITY;
        for (int64_t i = 0; i < count; i++) {
            const float rank = rank_of(layer, logits, i);
            if (rank > most) best = i, most = rank;
        }
        indices[slot] = (int32_t)best;
        weights[slot] = logits[best];
        chosen += logits[best];
        logits[best] = -INFINITY;
    }
    const float sum = sigmoid ? chosen + trunk->least_sum : MAX(chosen, trunk->least_sum);
    const float by = trunk->routed_scale / (trunk->normalise ? sum : total);
    for (int64_t slot = 0; slot < trunk->top_k; slot++)
        weights[slot] *= by * (layer->expert_scale ? layer->expert_scale[indices[slot]] : 1);
}
