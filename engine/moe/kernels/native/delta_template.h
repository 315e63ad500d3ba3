/* Gated delta-nets and Mamba-2 layers for one instruction set, with the vectors of attention_template.h. */

/* Vectors of a state's columns that are taken together, and rows of it: enough sums that do not wait for each other. */
#define STATE_VECTORS (PLLM_STATE_COLUMNS / LANES < 4 ? PLLM_STATE_COLUMNS / LANES : 4)
#define STATE_ROWS (4 / STATE_VECTORS)

ALWAYS_INLINE lanes chosen(lanes_i mask, lanes a, lanes b) {
    return (lanes)(((lanes_i)a & mask) | ((lanes_i)b & ~mask));
}

/* What is no number stays so. */
ALWAYS_INLINE lanes sigmoid_of(lanes x) {
    const lanes small = exp_of(chosen(x > (lanes){0}, -x, x)), one = all(1.0f);
    const lanes value = chosen(x > (lanes){0}, one, small) / (one + small);
    return chosen(x == x, value, x);
}

ALWAYS_INLINE float sigmoid_one(float x) { return 1.0f / (1.0f + expf(-x)); }

static void NAME(gate)(float *x, const float *gate, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store_f32(x + i, load_f32(x + i) * sigmoid_of(load_f32(gate + i)));
    for (; i < count; i++) x[i] *= sigmoid_one(gate[i]);
}

static void NAME(convolve)(float *to, const float *const *taps, const float *kernel, const float *bias, int64_t stride,
                           int first, int last, int64_t count) {
    int64_t c = 0;
    for (; c + LANES <= count; c += LANES) {
        lanes sum = bias ? load_f32(bias + c) : (lanes){0};
        for (int i = first; i < last; i++) sum += load_f32(taps[i] + c) * load_f32(kernel + i * stride + c);
        store_f32(to + c, sum * sigmoid_of(sum));
    }
    for (; c < count; c++) {
        float sum = bias ? bias[c] : 0;
        for (int i = first; i < last; i++) sum += taps[i][c] * kernel[i * stride + c];
        to[c] = sum * sigmoid_one(sum);
    }
}

ALWAYS_INLINE float product_of(const float *a, const float *b, int64_t count) {
    lanes even = {0}, odd = {0};
    int64_t i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES) {
        even += load_f32(a + i) * load_f32(b + i);
        odd += load_f32(a + i + LANES) * load_f32(b + i + LANES);
    }
    float total = sum_of(even + odd);
    for (; i < count; i++) total += a[i] * b[i];
    return total;
}

static float NAME(product)(const float *a, const float *b, int64_t count) { return product_of(a, b, count); }

static float NAME(unit)(float *query, float *key, float scale, int64_t count) {
    const float of_query = scale / sqrtf(product_of(query, query, count) + 1e-6f);
    const float of_key = 1.0f / sqrtf(product_of(key, key, count) + 1e-6f);
    for (int64_t i = 0; i < count; i++) {
        query[i] *= of_query;
        key[i] *= of_key;
    }
    return product_of(query, key, count);
}

/* Decays of the rows of a state; see trunk_set. log(1 + y) is twice the inverse hyperbolic tangent of y / (2 + y), which
   is at most 1 / 3: eight terms of its series are exact in float32. What is no number stays so. */
ALWAYS_INLINE lanes softplus_of(lanes x) {
    const lanes small = exp_of(chosen(x > (lanes){0}, -x, x)), z = small / (all(2.0f) + small), w = z * z;
    lanes sum = all(1.0f / 15);
    for (int n = 13; n > 0; n -= 2) sum = sum * w + all(1.0f / (float)n);
    const lanes value = chosen(x > (lanes){0}, x, (lanes){0}) + all(2.0f) * z * sum;
    return chosen(x == x, value, x);
}

ALWAYS_INLINE float softplus_one(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

static void NAME(decay)(float *to, const float *x, const float *bias, float scale, float least, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const lanes input = load_f32(x + i) + load_f32(bias + i);
        const lanes power = least < 0 ? all(least) * sigmoid_of(all(-scale) * input) : all(scale) * softplus_of(input);
        store_f32(to + i, chosen(power == power, exp_of(power), power));
    }
    for (; i < count; i++) {
        const float input = x[i] + bias[i];
        to[i] = expf(least < 0 ? least * sigmoid_one(-scale * input) : scale * softplus_one(input));
    }
}

static void NAME(multiply)(float *to, const float *a, const float *b, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store_f32(to + i, load_f32(a + i) * load_f32(b + i));
    for (; i < count; i++) to[i] = a[i] * b[i];
}

/* One pass over STATE_VECTORS columns of a state, of `rows` rows. With `from` a state becomes
   from * decay + key * change, put to `to`; with `fresh` there was none. With `decays` each row has its own. Where there is a next token, `results` is the
   product of its query with the state that is now there, and with `asks`, `answers` that of its key. What is not wanted is
   a constant of the compiler. */
ALWAYS_INLINE void state_sweep(const float *from, float *to, int64_t rows, const float *key, lanes decay,
                               const float *decays, const lanes *change, const float *next_key, const float *next_query, lanes *answers,
                               lanes *results, const int fresh, const int changes, const int next, const int asks) {
    lanes k[STATE_ROWS][STATE_VECTORS], q[STATE_ROWS][STATE_VECTORS];
    for (int r = 0; r < STATE_ROWS; r++)
        for (int v = 0; v < STATE_VECTORS; v++) k[r][v] = q[r][v] = (lanes){0};
    for (int64_t i = 0; i < rows; i += STATE_ROWS)
        for (int r = 0; r < STATE_ROWS; r++) {
            const int64_t row = i + r;
            if (STATE_ROWS > 1 && row == rows) break;
            const lanes by = decays && !fresh ? all(decays[row]) : decay;
            for (int v = 0; v < STATE_VECTORS; v++) {
                const int64_t at = row * PLLM_STATE_COLUMNS + v * LANES;
                lanes state = fresh ? (lanes){0} : load_f32(from + at);
                if (changes) {
                    state = all(key[row]) * change[v] + (fresh ? (lanes){0} : state * by);
                    store_f32(to + at, state);
                }
                if (next) {
                    if (asks) k[r][v] += all(next_key[row]) * state;
                    q[r][v] += all(next_query[row]) * state;
                }
            }
        }
    if (!next) return;
    for (int v = 0; v < STATE_VECTORS; v++) {
        answers[v] = k[0][v], results[v] = q[0][v];
        for (int r = 1; r < STATE_ROWS; r++) answers[v] += k[r][v], results[v] += q[r][v];
    }
}

/* The state of a token is read once: while it is written, it answers to the key and the query of the next. */
ALWAYS_INLINE void recur_columns(const delta_run *run, const float *before, float *after, int64_t column, const int asks,
                                 const int wide) {
    const int64_t rows = run->key_width;
    const float *asked = wide ? run->decayed : run->keys;
    lanes answers[STATE_VECTORS], results[STATE_VECTORS], change[STATE_VECTORS];
    for (int v = 0; v < STATE_VECTORS; v++) answers[v] = results[v] = (lanes){0};
    if (before)
        state_sweep(before, NULL, rows, NULL, all(0), NULL, NULL, asked, run->queries, answers, results, 0, 0, 1, asks);
    for (int64_t t = 0; t < run->tokens; t++) {
        const float *key = run->keys + t * rows, *value = run->values + t * run->value_width + column;
        const float *next_key = asked + (t + 1) * rows, *next_query = run->queries + (t + 1) * rows;
        /* What is asked of a state whose rows decay by themselves is multiplied by that already. */
        const float *decays = wide ? run->decays + t * rows : NULL;
        const lanes decay = wide ? all(1.0f) : all(run->decays[t]), rate = all(run->rates[t]), product = all(run->products[t]);
        float *to = run->results + t * run->value_width + column;
        for (int v = 0; v < STATE_VECTORS; v++) {
            const lanes given = load_f32(value + v * LANES);
            change[v] = (asks ? given - answers[v] * decay : given) * rate;
            store_f32(to + v * LANES, results[v] * decay + product * change[v]);
        }
        const float *from = t > 0 ? after : before;
        const int more = t + 1 < run->tokens;
        if (from && more)
            state_sweep(from, after, rows, key, decay, decays, change, next_key, next_query, answers, results, 0, 1, 1, asks);
        else if (from)
            state_sweep(from, after, rows, key, decay, decays, change, NULL, NULL, NULL, NULL, 0, 1, 0, asks);
        else if (more)
            state_sweep(NULL, after, rows, key, decay, decays, change, next_key, next_query, answers, results, 1, 1, 1, asks);
        else
            state_sweep(NULL, after, rows, key, decay, decays, change, NULL, NULL, NULL, NULL, 1, 1, 0, asks);
    }
}

static void NAME(recur)(const delta_run *run) {
    for (int64_t column = 0; column < run->value_width; column += STATE_VECTORS * LANES) {
        const int64_t inside = column % PLLM_STATE_COLUMNS, at = (column - inside) * run->key_width + inside;
        const float *before = run->before ? run->before + at : NULL;
        if (run->adds)
            recur_columns(run, before, run->after + at, column, 0, 0);
        else if (run->wide)
            recur_columns(run, before, run->after + at, column, 1, 1);
        else
            recur_columns(run, before, run->after + at, column, 1, 0);
    }
}

static void NAME(gated_norm)(float *to, const float *x, const float *gate, const float *weight, float epsilon,
                             int64_t count) {
    const float by = 1.0f / sqrtf(mean_square(x, count) + epsilon);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const lanes z = load_f32(gate + i);
        store_f32(to + i, load_f32(x + i) * by * load_f32(weight + i) * (z * sigmoid_of(z)));
    }
    for (; i < count; i++) to[i] = x[i] * by * weight[i] * (gate[i] * sigmoid_one(gate[i]));
}
