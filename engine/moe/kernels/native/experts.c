/* All experts of one layer in one call: routes are sorted by expert, each weight row is read once for all its tokens.

   The work is one list of tasks, (expert, block of rows of gate and up), taken by whichever thread is free; then,
   after a barrier, a second list of blocks of the output's columns, each for all experts, so that the sum over a
   token's routes is made by one thread in the order of k, without another barrier. Few tokens are bound by reading:
   neighbouring tasks are taken together and their rows read in one piece, because the memory is slow at first wherever
   reading begins anew. */
#include <string.h>

#include "kernels_internal.h"

#define CHUNK_TOKENS 1024
#define MOST_ROWS 64       /* rows of a task, when there are plenty */
#define LONGEST_RUN 512    /* rows that are multiplied in one piece at most, and, of so many routes that the results */
#define RUN_RESULTS 16384  /* would be more than these, fewer: they stay in a cache */
#define TASKS_PER_THREAD 8 /* so that the thread that ends last does not end much later */
#define PANEL_RUN 8        /* panels in a row that one thread opens, each fetched while the one before is multiplied */
#define OWN_ELEMENTS 65536 /* input values up to which each thread converts its own copy instead of meeting the others */

/* Rows as the kernels of one kind of weights read them. An expert whose routes are not taken as few has tiles instead of
   rows. */
typedef struct form {
    const kernel_set *kernels;
    int64_t stride; /* of a row, in elements */
    int64_t *row_offset; /* [active]: the first of an expert's rows in `tiles` */
    char *rows, *tiles;
    char *own; /* this thread's rows */
} form;

/* What every thread knows of a call; each makes it for itself from the same input. */
typedef struct plan {
    const pllm_layer *layer;
    const pllm_routes *routes;
    int64_t active;                /* experts that have routes, or are run all the same */
    int64_t alone_count;           /* those of them that have none */
    int64_t ffn_rows, hidden_rows; /* of a task */
    int64_t run_rows;              /* most rows multiplied in one piece, whole tasks: the stride of `part` */
    int64_t tasks;
    int any_many, any_few, own_input;
    int32_t *first;  /* [count + 1]: where each expert's routes begin in `sorted` */
    int32_t *sorted; /* route numbers, token * k + position, by expert and then ascending; 0 for an extra expert */
    int32_t *place;  /* [tokens * k]: where a route is in `sorted`, or -1 */
    int32_t *list;   /* [active]: the experts */
    int32_t *alone;  /* [alone_count]: those without routes */
    form inputs[2];  /* tokens (sorted routes, if the input is scaled) for gate, and for up if it reads another form */
    int input_forms; /* how many of them there are */
    form act;        /* shared: what goes into the down projections; rows and tiles by expert in the same place */
    float *part, *other; /* this thread's: [routes][run_rows] */
    void *panel;
} plan;

/* Hands out parts of one block of memory; without a base it only counts. */
typedef struct arena {
    char *base;
    size_t used;
} arena;

static void *take(arena *from, size_t bytes) {
    char *part = from->base ? from->base + from->used : NULL;
    from->used += aligned(bytes);
    return part;
}

static void lay_out(plan *p, const pllm_layer *layer, int64_t tokens, int64_t k, int64_t extra, arena *own,
                    arena *shared) {
    const int64_t routes = MAX(tokens * k, 1) + extra;
    const int64_t rows = routes + MIN(routes, layer->count) * (TILE_LIMIT - 1); /* an expert's last tile may be nearly empty */
    p->layer = layer;
    p->inputs[0].kernels = pllm_kernels(layer->set, layer->gate_dtype);
    p->inputs[1].kernels = pllm_kernels(layer->set, layer->up_dtype);
    p->act.kernels = pllm_kernels(layer->set, layer->down_dtype);
    p->input_forms = p->inputs[0].kernels == p->inputs[1].kernels ? 1 : 2;
    p->first = take(own, (size_t)(layer->count + 1) * 4);
    p->sorted = take(own, (size_t)routes * 4);
    p->place = take(own, (size_t)routes * 4);
    p->list = take(own, (size_t)layer->count * 4);
    p->alone = take(own, (size_t)extra * 4);
    p->panel = take(own, PANEL_BYTES);
    p->part = take(own, (size_t)MAX(routes * MOST_ROWS, RUN_RESULTS) * 4);
    p->other = take(own, (size_t)MAX(routes * MOST_ROWS, RUN_RESULTS) * 4);
    for (int i = 0; i < p->input_forms; i++) {
        form *input = p->inputs + i;
        input->stride = row_stride(layer->hidden);
        input->row_offset = take(own, (size_t)layer->count * 8);
        input->own = take(own, (size_t)OWN_ELEMENTS * 4);
        input->rows = take(shared, (size_t)(MAX(routes, tokens) * input->stride) * 4);
        input->tiles = take(shared, (size_t)(rows * padded(layer->hidden)) * 4);
    }
    p->act.stride = row_stride(layer->ffn);
    p->act.row_offset = take(own, (size_t)layer->count * 8);
    p->act.rows = p->act.tiles = take(shared, (size_t)(rows * p->act.stride) * 4);
}

static int64_t routes_of(const plan *p, int64_t expert) { return p->first[expert + 1] - p->first[expert]; }

/* Whether so many routes of an expert go through `few`. The number has no part in it where tokens are read, so that a
   token's results do not depend on how many others chose its experts. */
static int takes_few(const plan *p, int64_t count) {
    return !p->routes->reads && count <= FEW_LIMIT;
}

static void sort_routes(plan *p) {
    const int64_t count = p->layer->count, all = p->routes->tokens * p->routes->k;
    const int32_t *indices = p->routes->indices, *extra = p->routes->extra;
    memset(p->first, 0, (size_t)(count + 1) * 4);
    for (int64_t i = 0; i < all; i++)
        if (indices[i] >= 0) p->first[indices[i] + 1]++;
    /* Not beside routes: with one more an expert could have many instead of few, and the additions another order. */
    p->alone_count = 0;
    for (int64_t i = 0; i < (p->routes->tokens ? p->routes->extra_count : 0); i++) {
        if (p->first[extra[i] + 1]) continue;
        p->first[extra[i] + 1] = 1;
        p->alone[p->alone_count++] = extra[i];
    }
    p->active = 0;
    for (int64_t e = 0; e < count; e++) {
        if (p->first[e + 1]) p->list[p->active++] = (int32_t)e;
        p->first[e + 1] += p->first[e];
    }
    for (int64_t i = 0; i < all; i++) {
        p->place[i] = -1;
        if (indices[i] < 0) continue;
        p->place[i] = p->first[indices[i]]++; /* moves each start to the next one's; moved back below */
        p->sorted[p->place[i]] = (int32_t)i;
    }
    for (int64_t i = 0; i < p->alone_count; i++) p->sorted[p->first[p->alone[i]]++] = 0;
    memmove(p->first + 1, p->first, (size_t)count * 4);
    p->first[0] = 0;
}

/* Rows of a task such that every thread gets several. Many tokens want whole panels. */
static int64_t rows_of_a_task(int64_t experts, int64_t rows, int64_t fewest, int any_many, int threads) {
    if (any_many) return PANEL_ROWS;
    int64_t each = MOST_ROWS;
    while (each > fewest && experts * divided_up(rows, each) < (int64_t)TASKS_PER_THREAD * threads) each /= 2;
    return each;
}

/* Where the experts' rows begin. */
static void place_rows(const plan *p, form *f) {
    const int64_t tile = f->kernels->tile_tokens;
    int64_t rows = 0;
    for (int64_t i = 0; i < p->active; i++) {
        const int64_t count = routes_of(p, p->list[i]);
        f->row_offset[i] = rows;
        rows += takes_few(p, count) ? count : divided_up(count, tile) * tile;
    }
}

static void make_plan(plan *p, int threads) {
    sort_routes(p);
    for (int64_t i = 0; i < p->active; i++) {
        const int few = takes_few(p, routes_of(p, p->list[i]));
        p->any_few |= few;
        p->any_many |= !few;
    }
    place_rows(p, &p->act);
    int64_t fewest = p->act.kernels->task_rows; /* a task's results are converted for the down projection */
    for (int i = 0; i < p->input_forms; i++) {
        place_rows(p, p->inputs + i);
        fewest = MAX(fewest, p->inputs[i].kernels->task_rows);
    }
    const int64_t inputs = p->routes->scale_input ? p->first[p->layer->count] : p->routes->tokens;
    p->own_input = !p->any_many && inputs * p->inputs[0].stride <= OWN_ELEMENTS;
    for (int i = 0; i < p->input_forms && p->own_input; i++) p->inputs[i].rows = p->inputs[i].own;
    p->ffn_rows = rows_of_a_task(p->active, p->layer->ffn, fewest, p->any_many, threads);
    p->hidden_rows = rows_of_a_task(1, p->layer->hidden, fewest, p->any_many, threads);
    const int64_t routes = MAX(p->first[p->layer->count], 1), run = MIN(LONGEST_RUN, RUN_RESULTS / routes);
    p->run_rows = p->any_many ? PANEL_ROWS : MAX(run / MOST_ROWS * MOST_ROWS, MOST_ROWS);
    p->tasks = p->active * divided_up(p->layer->ffn, p->ffn_rows);
}

/* ---- Inputs -------------------------------------------------------------------------------------------------- */

static const float *hidden_of(const plan *p, int64_t route) {
    return p->routes->hidden + route / p->routes->k * p->layer->hidden;
}

static void fill_rows(const plan *p, const form *input, int thread, int threads) {
    const int64_t hidden = p->layer->hidden, bytes = input->stride * input->kernels->row_element;
    if (p->routes->scale_input) {
        for (int64_t i = thread; i < p->first[p->layer->count]; i += threads)
            pllm_fill_row(input->kernels, input->rows + i * bytes, hidden_of(p, p->sorted[i]),
                          p->routes->weights[p->sorted[i]], hidden);
    } else {
        for (int64_t t = thread; t < p->routes->tokens; t += threads)
            pllm_fill_row(input->kernels, input->rows + t * bytes, p->routes->hidden + t * hidden, 1.0F, hidden);
    }
}

static void fill_tiles(const plan *p, const form *input, int thread, int threads) {
    const int64_t tile = input->kernels->tile_tokens, bytes = padded(p->layer->hidden) * input->kernels->element;
    int64_t turn = 0;
    for (int64_t i = 0; i < p->active; i++) {
        const int64_t count = routes_of(p, p->list[i]);
        if (takes_few(p, count)) continue;
        const int32_t *routes = p->sorted + p->first[p->list[i]];
        for (int64_t m = 0; m < count; m += tile) {
            if (turn++ % threads != thread) continue;
            const float *rows[TILE_LIMIT];
            float scales[TILE_LIMIT];
            const int64_t width = MIN(tile, count - m);
            for (int64_t j = 0; j < width; j++) {
                rows[j] = hidden_of(p, routes[m + j]);
                scales[j] = p->routes->weights[routes[m + j]];
            }
            input->kernels->tile(input->tiles + (input->row_offset[i] + m) * bytes, rows,
                                 p->routes->scale_input ? scales : NULL, width, 0, p->layer->hidden);
        }
    }
}

/* ---- Gate and up ---------------------------------------------------------------------------------------------- */

static void multiply(const plan *p, const kernel_set *kernels, const pllm_matrix *matrix, const void *bias,
                     int64_t bias_stride, const void *const *rows, const void *tiles, int64_t count, int64_t first,
                     int64_t number, float *y, int64_t y_stride, const void *next) {
    pllm_matrix part;
    const void *w = rows_from(matrix, first, &part);
    if (takes_few(p, count))
        kernels->few(w, matrix->dtype, matrix->row_stride, number, matrix->columns, rows, count, y, y_stride, 0);
    else
        kernels->many(w, matrix->dtype, matrix->row_stride, number, matrix->columns, tiles, count, y, y_stride, 0,
                      p->panel, next);
    pllm_add_bias(y, y_stride, count, bias, p->layer->bias_dtype, bias_stride, first, number);
}

/* The activated values of rows [first, first + number) to where the down projection reads them. */
static void store_act(const plan *p, int64_t i, int64_t count, int64_t first, int64_t number) {
    const kernel_set *kernels = p->act.kernels;
    const int64_t tile = kernels->tile_tokens, ffn = p->layer->ffn, bytes = p->act.stride * kernels->row_element;
    char *act = p->act.rows + p->act.row_offset[i] * bytes;
    if (takes_few(p, count)) {
        for (int64_t m = 0; m < count; m++) {
            kernels->convert(act + m * bytes, first, p->part + m * p->run_rows, 1.0F, number);
            if (first + number == ffn) kernels->pad(act + m * bytes, ffn);
        }
        return;
    }
    for (int64_t m = 0; m < count; m += tile) {
        const float *rows[TILE_LIMIT];
        const int64_t width = MIN(tile, count - m);
        for (int64_t j = 0; j < width; j++) rows[j] = p->part + (m + j) * p->run_rows;
        kernels->tile(act + m * padded(ffn) * kernels->element, rows, NULL, width, first, number);
    }
}

/* Rows [first, first + number) of the product of expert i of the list and its gate or up `matrix`, which reads `input`. */
static void project_rows(const plan *p, const form *input, int64_t i, const pllm_matrix *matrix, const void *bias,
                         int64_t first, int64_t number, float *y, const void *next) {
    const int64_t e = p->list[i], count = routes_of(p, e);
    const void *rows[FEW_LIMIT];
    for (int64_t m = 0; m < MIN(count, FEW_LIMIT); m++) {
        const int64_t place = p->first[e] + m;
        const int64_t row = p->routes->scale_input ? place : p->sorted[place] / p->routes->k;
        rows[m] = input->rows + row * input->stride * input->kernels->row_element;
    }
    const char *tiles = input->tiles + input->row_offset[i] * padded(p->layer->hidden) * input->kernels->element;
    multiply(p, input->kernels, matrix, bias, MAX(p->layer->bias_stride, 1), rows, tiles, count, first, number, y,
             p->run_rows, next);
}

/* Rows [first, first + number) of the gate and up projections of expert i of the list. */
static void gate_rows(const plan *p, int64_t i, int64_t first, int64_t number) {
    const int64_t count = routes_of(p, p->list[i]), stride = p->run_rows;
    const pllm_expert *expert = &p->layer->experts[p->list[i]];
    const int ended = first + number >= p->layer->ffn;
    const pllm_matrix *next = &p->layer->experts[p->list[MIN(i + ended, p->active - 1)]].gate;
    project_rows(p, p->inputs, i, &expert->gate, expert->gate_bias, first, number, p->part, row_at(&expert->up, first));
    const float *up = p->part; /* of an expert without a gate: its other matrix is both */
    if (expert->up.data != expert->gate.data) {
        project_rows(p, p->inputs + p->input_forms - 1, i, &expert->up, expert->up_bias, first, number, p->other,
                     row_at(next, ended ? 0 : first + number));
        up = p->other;
    }
    for (int64_t m = 0; m < count; m++)
        p->act.kernels->gate(&p->layer->activation, p->part + m * stride, up + m * stride, number);
    store_act(p, i, count, first, number);
}

static void gate_tasks(const plan *p, int64_t task, int64_t count) {
    const int64_t blocks = divided_up(p->layer->ffn, p->ffn_rows), most = p->run_rows / p->ffn_rows;
    for (int64_t some; count > 0; task += some, count -= some) {
        const int64_t block = task % blocks, first = block * p->ffn_rows;
        some = MIN(MIN(count, most), blocks - block);
        gate_rows(p, task / blocks, first, MIN(some * p->ffn_rows, p->layer->ffn - first));
    }
}

/* ---- Down, and the sum ---------------------------------------------------------------------------------------- */

static void hand_out(const plan *p, int64_t first, int64_t number) {
    const pllm_routes *r = p->routes;
    const int64_t hidden = p->layer->hidden;
    for (int64_t t = 0; t < r->tokens; t++) {
        float *sum = r->sum ? r->sum + t * hidden + first : NULL;
        if (sum) memset(sum, 0, (size_t)number * 4);
        for (int64_t route = t * r->k; route < (t + 1) * r->k; route++) {
            const int32_t place = p->place[route];
            float *output = r->outputs ? r->outputs + route * hidden + first : NULL;
            if (place < 0) {
                if (output) memset(output, 0, (size_t)number * 4);
                continue;
            }
            const float *result = p->part + place * p->run_rows;
            if (output) memcpy(output, result, (size_t)number * 4);
            if (sum) p->act.kernels->add_scaled(sum, result, r->scale_input ? 1.0F : r->weights[route], number);
        }
    }
}

/* Rows [first, first + number) of the down projections of all experts. */
static void down_rows(const plan *p, int64_t first, int64_t number) {
    const int64_t bytes = p->act.stride * p->act.kernels->row_element;
    for (int64_t i = 0; i < p->active; i++) {
        const int64_t e = p->list[i], count = routes_of(p, e);
        const pllm_expert *expert = &p->layer->experts[e];
        const char *act = p->act.rows + p->act.row_offset[i] * bytes;
        const void *rows[FEW_LIMIT];
        for (int64_t m = 0; m < MIN(count, FEW_LIMIT); m++) rows[m] = act + m * bytes;
        const int ended = i + 1 == p->active;
        multiply(p, p->act.kernels, &expert->down, expert->down_bias, 1, rows, act, count, first, number,
                 p->part + p->first[e] * p->run_rows, p->run_rows,
                 row_at(&p->layer->experts[p->list[ended ? 0 : i + 1]].down, ended ? first + number : first));
    }
    hand_out(p, first, number);
}

static void down_tasks(const plan *p, int64_t task, int64_t count) {
    const int64_t most = p->run_rows / p->hidden_rows;
    for (int64_t some; count > 0; task += some, count -= some) {
        const int64_t first = task * p->hidden_rows;
        some = MIN(count, most);
        down_rows(p, first, MIN(some * p->hidden_rows, p->layer->hidden - first));
    }
}

void pllm_experts_part(pllm_pool *pool, const pllm_layer *layer, const pllm_routes *routes, void *scratch,
                       void *shared, int thread, int threads) {
    plan p = {.routes = routes};
    arena own = {.base = scratch}, common = {.base = shared};
    lay_out(&p, layer, routes->tokens, routes->k, routes->extra_count, &own, &common);
    make_plan(&p, threads);
    for (int i = 0; i < p.input_forms; i++) {
        const form *input = p.inputs + i;
        if (p.own_input) {
            fill_rows(&p, input, 0, 1);
            continue;
        }
        if (p.any_few) fill_rows(&p, input, thread, threads);
        if (p.any_many) fill_tiles(&p, input, thread, threads);
    }
    if (!p.own_input) pllm_pool_barrier(pool);
    const int64_t blocks = divided_up(layer->hidden, p.hidden_rows);
    int64_t task, count;
    while ((count = pllm_pool_take(pool, p.tasks, p.any_many ? PANEL_RUN : p.tasks, &task))) gate_tasks(&p, task, count);
    pllm_pool_barrier(pool);
    while ((count = pllm_pool_take(pool, blocks, p.any_many ? 1 : blocks, &task))) down_tasks(&p, task, count);
    if (thread > 0 || !routes->counts || pllm_pool_stopped(pool)) return;
    for (int64_t i = 0; i < p.active; i++) routes->counts[p.list[i]] += routes_of(&p, p.list[i]);
    for (int64_t i = 0; i < p.alone_count; i++) routes->counts[p.alone[i]]--;
}

void pllm_experts_bytes(const pllm_layer *layer, int64_t tokens, int64_t k, int64_t extra_count, size_t *per_thread,
                        size_t *shared) {
    plan p;
    arena own = {0}, common = {0};
    lay_out(&p, layer, tokens, k, extra_count, &own, &common);
    *per_thread = own.used;
    *shared = common.used;
}

typedef struct experts_call {
    pllm_pool *pool;
    const pllm_layer *layer;
    pllm_routes routes;
} experts_call;

static void experts_region(int thread, int threads, void *argument) {
    experts_call *call = argument;
    pllm_experts_part(call->pool, call->layer, &call->routes, pllm_pool_scratch(call->pool, thread),
                      pllm_pool_shared(call->pool), thread, threads);
}

/* Whether all of `experts` [number] are there. Below 0 is nobody, which only routes may be. */
static int all_there(const pllm_layer *layer, const int32_t *experts, int64_t number, int32_t lowest) {
    for (int64_t i = 0; i < number; i++)
        if (experts[i] < lowest || experts[i] >= layer->count ||
            (experts[i] >= 0 && !layer->experts[experts[i]].gate.data))
            return 0;
    return 1;
}

int pllm_experts(pllm_pool *pool, const pllm_layer *layer, const float *hidden, const int32_t *indices,
                 const float *weights, int64_t tokens, int64_t k, int64_t scale_input, int64_t reads, float *sum,
                 float *outputs, int64_t *counts, const int32_t *extra, int64_t extra_count) {
    if (!pllm_has(layer->set)) return PLLM_E_SET;
    if (tokens < 0 || k < 1 || extra_count < 0 || extra_count > layer->count) return PLLM_E_ARGUMENT;
    if (!all_there(layer, indices, tokens * k, INT32_MIN) || !all_there(layer, extra, extra_count, 0))
        return PLLM_E_ARGUMENT;
    size_t per_thread, shared;
    pllm_experts_bytes(layer, MIN(tokens, CHUNK_TOKENS), k, extra_count, &per_thread, &shared);
    pllm_pool_lock(pool);
    int result = pllm_pool_reserve_locked(pool, per_thread, shared);
    for (int64_t t = 0; t < tokens && result == PLLM_OK; t += CHUNK_TOKENS) {
        experts_call call = {.pool = pool, .layer = layer};
        call.routes = (pllm_routes){
            .hidden = hidden + t * layer->hidden,
            .indices = indices + t * k,
            .weights = weights + t * k,
            .tokens = MIN(CHUNK_TOKENS, tokens - t),
            .k = k,
            .scale_input = scale_input,
            .reads = reads,
            .sum = sum ? sum + t * layer->hidden : NULL,
            .outputs = outputs ? outputs + t * k * layer->hidden : NULL,
            .counts = counts,
            .extra = t ? NULL : extra,
            .extra_count = t ? 0 : extra_count,
        };
        pllm_pool_run_locked(pool, experts_region, &call);
    }
    pllm_pool_unlock(pool);
    return result;
}

/* ---- What was computed elsewhere ------------------------------------------------------------------------------ */

/* Values up to which the sum is made by the caller alone: less work than waking the others. */
#define ALONE_VALUES 65536

typedef struct sum_call {
    const kernel_set *kernels;
    const float *outputs, *weights;
    float *sum;
    int64_t tokens, k, hidden;
} sum_call;

static void sum_region(int thread, int threads, void *argument) {
    const sum_call *call = argument;
    const int64_t hidden = call->hidden;
    for (int64_t t = call->tokens * thread / threads; t < call->tokens * (thread + 1) / threads; t++) {
        float *sum = call->sum + t * hidden;
        memset(sum, 0, (size_t)hidden * 4);
        for (int64_t route = t * call->k; route < (t + 1) * call->k; route++)
            call->kernels->add_scaled(sum, call->outputs + route * hidden, call->weights[route], hidden);
    }
}

void pllm_weighted_sum(pllm_pool *pool, int set, int dtype, const float *outputs, const float *weights, int64_t tokens,
                       int64_t k, int64_t hidden, float *sum) {
    sum_call call = {pllm_kernels(set, dtype), outputs, weights, sum, tokens, k, hidden};
    if (tokens * k * hidden <= ALONE_VALUES)
        sum_region(0, 1, &call);
    else
        pllm_pool_run(pool, sum_region, &call);
}

int pllm_count_routes(const int32_t *indices, int64_t routes, int64_t count, int64_t *counts) {
    for (int64_t i = 0; i < routes; i++)
        if (indices[i] < 0 || indices[i] >= count) return PLLM_E_ARGUMENT;
    for (int64_t i = 0; i < routes; i++) counts[indices[i]]++;
    return PLLM_OK;
}
