/* Bidirectional and cross near-far attention: C version of Bidirectional.attend of nearfar/both_directions.py.

   Logits have keys as rows and queries as columns: keys and values then need no transposition, and the softmax runs
   over columns. A cluster has the weight N e^logit and adds V e^logit to the output. */

#include "near_far.h"

/* Allocates scratch memory and loads constants and heavy hitters of head z. Returns 0 if out of memory. */
static int init_head(Head *e, const NearFar *c, int64_t z, int backward) {
    *e = (Head){.c = c, .z = z, .b = c->cross ? c->S : c->block, .K = c->clusters};
    e->d = c->d, e->dp = round_up(c->d), e->dv = c->dv, e->lv = round_up(c->dv + 1);
    for (int i = 0; i < c->heavy; i++) e->n += c->there[z * c->heavy + i];
    e->N = (c->S + e->b - 1) / e->b, e->M = e->n + e->K;
    e->T = min64(e->b < SEGMENT ? SEGMENT / e->b : 1, e->N), e->segments = (e->N + e->T - 1) / e->T;
    e->max_queries = min64(round_up(c->G * (c->cross ? c->L : e->b)), QUERIES);
    e->pool = c->pool + z * c->S, e->cluster = c->cluster + z * c->S, e->shift = c->shift + z * c->d;
    e->u = c->u + z * c->S, e->square = c->square + z * c->S;
    e->sums = c->sums + z * c->clusters * (c->d + 2);
    const size_t d = e->d, dp = e->dp, dv = e->dv, lv = e->lv, K = e->K, M = e->M, queries = e->max_queries,
                 state = K * lv, width = lv > dp ? lv : dp, near = c->cross ? 0 : 3 * e->b, key_rows = near + M,
                 grad = backward, slope = c->first_order;
    const Scratch buffers[] = {
        {&e->tilt, dp}, {&e->root, d * dp}, {&e->rootT, d * dp}, {&e->centres, K * dp}, {&e->mean_offset, K * dp},
        {&e->spread, K}, {&e->keys, M * dp}, {&e->values, M * lv}, {&e->bias, M}, {&e->mass_exponent, M}, {&e->mass, M},
        {&e->state_total, state}, {&e->state_before, state}, {&e->state_after, e->T * state},
        {&e->checkpoints, e->segments * state},
        {&e->y, CHUNK * dp}, {&e->residual, CHUNK * dp}, {&e->work, (K > CHUNK ? K : CHUNK) * width},
        {&e->slope, slope * dv * dp}, {&e->slopeT, slope * d * lv}, {&e->weight, K}, {&e->double_sums, 2 * K * (d + 2)},
        {&e->Y, near * dp}, {&e->V, near * lv}, {&e->mask_bias, near}, {&e->A, key_rows * queries},
        {&e->Q, queries * dp}, {&e->X, queries * dp}, {&e->Qt, d * queries}, {&e->O, queries * width},
        {&e->P, queries * width},
        {&e->top, queries}, {&e->scale, queries}, {&e->cluster_share, queries},
        {&e->B, grad * key_rows * queries}, {&e->G, grad * queries * lv}, {&e->Gt, grad * lv * queries},
        {&e->Gs, grad * queries * lv},
        {&e->dY, grad * near * dp}, {&e->dV, grad * near * lv}, {&e->dkeys, grad * M * dp},
        {&e->dvalues, grad * e->n * lv}, {&e->dstates, grad * e->T * state},
        {&e->dsegments, grad * e->segments * state}, {&e->dbefore, grad * state}, {&e->dafter, grad * state},
        {&e->dlog_weight, grad * c->S}, {&e->dbias, grad * K}, {&e->dsums, grad * K * (dp + PAD)},
        {&e->offset_rootT, grad * K * dp},
        {&e->moments, grad * d * dp}, {&e->dslope, grad * slope * dv * dp}, {&e->dslopeT, grad * slope * d * lv},
        {&e->dy_chunk, grad * CHUNK * dp}, {&e->dv_chunk, grad * CHUNK * lv}};
    if (!allocate_scratch(buffers, sizeof buffers / sizeof *buffers)) return 0;
    load_rows((View){c->tilt + z * d, 0, 0, d}, 0, 0, 0, 1, d, 1, NULL, NULL, e->tilt, dp);
    load_rows((View){c->root + z * d * d, 0, 0, d}, 0, 0, 0, d, d, 1, NULL, NULL, e->root, dp);
    load_rows((View){c->centres + z * K * d, 0, 0, d}, 0, 0, 0, K, d, 1, NULL, NULL, e->centres, dp);
    memset(e->rootT, 0, sizeof(float) * d * dp);
    transpose(d, d, e->root, dp, e->rootT, dp);
    for (int i = 0, k = 0; i < c->heavy; i++) {
        if (!c->there[z * c->heavy + i]) continue;
        const int64_t j = c->positions[z * c->heavy + i];
        load_rows(c->y, z, 0, j, 1, d, c->factor, e->shift, NULL, e->keys + k * dp, dp);
        load_rows(c->v, z, 0, j, 1, dv, 1, NULL, NULL, e->values + k * lv, lv);
        e->values[k * lv + dv] = e->mass[k] = 1, e->bias[k] = e->mass_exponent[k] = 0;
        k++;
    }
    return 1;
}

/* ---- States ---- */

/* Adds u [v, 1] of the keys of block s to a state. */
static void add_block_to_state(const Head *e, int64_t s, float *state) {
    for (int64_t j = s * e->b, stop = j + block_tokens(e, s); j < stop; j++) {
        if (!(e->u[j] > 0)) continue;
        float *to = state + e->cluster[j] * e->lv;
        add_scaled(to, e->u[j], key_ptr(e, e->c->v, j), e->dv);
        to[e->dv] += e->u[j];
    }
}

/* Computes the state of the blocks after each segment, and the state of all blocks. Only additions are used: an empty
   state stays exactly 0, and subtracting large terms of near blocks would leave rounding errors. */
static void compute_checkpoints(Head *e) {
    const size_t state = e->K * e->lv, size = sizeof(float) * state;
    memset(e->state_before, 0, size);
    memset(e->state_total, 0, size);
    for (int64_t g = e->segments - 1; g >= 0; g--) {
        memcpy(e->checkpoints + g * state, e->state_total, size);
        for (int64_t s = min64((g + 1) * e->T, e->N - 1); s > (g ? g * e->T : -1); s--)
            add_block_to_state(e, s, e->state_total);
    }
}

/* Computes the states of the far blocks after each block of segment g. */
static void compute_segment_states(Head *e, int64_t g) {
    const int64_t state = e->K * e->lv, first = g * e->T, last = min64(first + e->T, e->N) - 1;
    float *after = e->state_after + (last - first) * state;
    memcpy(after, e->checkpoints + g * state, sizeof(float) * state);
    for (int64_t t = last - 1; t >= first; t--, after -= state) {
        memcpy(after - state, after, sizeof(float) * state);
        if (t + 2 < e->N) add_block_to_state(e, t + 2, after - state);
    }
}

/* Computes values, masses N and mass exponents of clusters from the far keys of block t. */
static void load_block_states(Head *e, int64_t t) {
    const int64_t state = e->K * e->lv;
    float *to = e->values + e->n * e->lv;
    if (!e->c->cross && t % e->T == 0) compute_segment_states(e, t / e->T);
    if (t >= 2) add_block_to_state(e, t - 2, e->state_before);
    const float *after = e->c->cross ? e->state_total : e->state_after + t % e->T * state;
    for (int i = 0; i < state; i += LANES) AT(to + i) = AT(e->state_before + i) + AT(after + i);
    for (int k = e->n; k < e->M; k++, to += e->lv) {
        e->mass[k] = to[e->dv] > MIN_WEIGHT ? to[e->dv] : 0;
        e->mass_exponent[k] = to[e->dv] > MIN_WEIGHT ? (float)ilogbf(to[e->dv]) + 1 : MASKED;
    }
}

/* ---- Sums over the keys of a cluster ---- */

/* Loads keys [start, start + n): y (0 outside the pool), and the residuals z - centre. */
static void load_residuals(Head *e, int64_t start, int n) {
    load_rows(e->c->y, e->z, 0, start, n, e->d, e->c->factor, e->shift, e->pool, e->y, e->dp);
    matmul(FULL, n, e->d, e->d, e->y, e->dp, 1, e->root, e->dp, e->residual, e->dp, 0);
    for (int i = 0; i < n; i++) {
        const float *centre = e->centres + e->cluster[start + i] * e->dp;
        float *z = e->residual + i * e->dp;
        for (int p = 0; p < e->dp; p += LANES) AT(z + p) -= AT(centre + p);
        for (int p = e->d; p < e->dp; p++) z[p] = 0;
    }
}

static void compute_levels(Head *e, float *level) {
    for (int k = 0; k < e->K; k++) level[k] = -INFINITY;
    for (int64_t t = 0; t < e->c->S; t += CHUNK) {
        const int n = min64(e->c->S - t, CHUNK);
        load_rows(e->c->y, e->z, 0, t, n, e->d, e->c->factor, e->shift, e->pool, e->y, e->dp);
        for (int i = 0; i < n; i++) {
            float w = e->u[t + i] = dot(e->y + i * e->dp, e->tilt, e->dp), *top = level + e->cluster[t + i];
            if (e->pool[t + i] && w > *top) *top = w;
        }
    }
    for (int k = 0; k < e->K; k++)
        if (level[k] == -INFINITY) level[k] = 0;
}

/* Computes e^(level - highest level of nonempty clusters). This factor makes u comparable between clusters. */
static void compute_weights(Head *e) {
    const float *level = e->c->level + e->z * e->K;
    float highest = -INFINITY;
    for (int k = 0; k < e->K; k++) {
        e->weight[k] = e->sums[k * (e->d + 2) + e->d + 1] > MIN_WEIGHT ? level[k] : -INFINITY;
        highest = fmaxf(highest, e->weight[k]);
    }
    for (int k = 0; k < e->K; k++) e->weight[k] = e->weight[k] > -INFINITY ? expf(e->weight[k] - highest) : 0;
}

static void sum_clusters(Head *e) {
    const int d = e->d;
    float *level = e->c->level + e->z * e->K;
    double *sums = (double *)e->double_sums;
    compute_levels(e, level);
    memset(sums, 0, sizeof(double) * e->K * (d + 2));
    for (int64_t t = 0; t < e->c->S; t += CHUNK) {
        const int n = min64(e->c->S - t, CHUNK);
        float u[CHUNK];
        load_residuals(e, t, n);
        for (int i = 0; i < CHUNK; i++) {
            const int valid = i < n && e->pool[t + i];
            u[i] = valid ? (e->u[t + i] - level[e->cluster[t + i]]) * LOG2E : -INFINITY;
        }
        for (int i = 0; i < CHUNK; i += LANES) AT(u + i) = exp2_vec(AT(u + i));
        memcpy(e->u + t, u, sizeof(float) * n);
        for (int i = 0; i < n; i++) {
            e->square[t + i] = dot(e->residual + i * e->dp, e->residual + i * e->dp, e->dp);
            if (!(u[i] > 0)) continue;
            const float *y = e->y + i * e->dp;
            double *to = sums + e->cluster[t + i] * (d + 2);
            for (int p = 0; p < d; p++) to[p] += u[i] * y[p];
            to[d] += u[i] * e->square[t + i];
            to[d + 1] += u[i];
        }
    }
    for (int i = 0; i < e->K * (d + 2); i++) e->sums[i] = (float)sums[i];
}

/* ---- Clusters as keys ---- */

void compute_cluster_keys(Head *e) {
    const float *level = e->c->level + e->z * e->K;
    float *mu = e->keys + e->n * e->dp, *spread = e->c->spread + e->z * e->K;
    for (int k = 0; k < e->K; k++) {
        const float *sums = e->sums + k * (e->d + 2), inverse = sums[e->d + 1] > MIN_WEIGHT ? 1 / sums[e->d + 1] : 0;
        for (int p = 0; p < e->dp; p++) mu[k * e->dp + p] = p < e->d ? sums[p] * inverse : 0;
    }
    matmul(FULL, e->K, e->d, e->d, mu, e->dp, 1, e->root, e->dp, e->mean_offset, e->dp, 0);
    for (int k = 0; k < e->K; k++) {
        const float *sums = e->sums + k * (e->d + 2), N = sums[e->d + 1];
        float *off = e->mean_offset + k * e->dp;
        for (int p = 0; p < e->dp; p++) off[p] = p < e->d ? off[p] - e->centres[k * e->dp + p] : 0;
        float tau = N > MIN_WEIGHT ? sums[e->d] / N - dot(off, off, e->dp) : 0;
        spread[k] = e->spread[k] = tau > 0 ? tau : 0;
        e->bias[e->n + k] = (level[k] - dot(mu + k * e->dp, e->tilt, e->dp) + log1pf(e->spread[k] / 2)) * LOG2E;
    }
    compute_weights(e);
    compute_checkpoints(e);
}

float weighted_value_sums(Head *e) {
    double mass = 0;
    for (int k = 0; k < e->K; k++) {
        for (int p = 0; p < e->lv; p++)
            e->work[k * e->lv + p] = p < e->dv ? e->weight[k] * e->state_total[k * e->lv + p] : 0;
        mass += e->weight[k] * e->sums[k * (e->d + 2) + e->d + 1];
    }
    return mass > MIN_WEIGHT ? (float)mass : MIN_WEIGHT;
}

void load_slope(Head *e) {
    const View slope = {e->c->slope + e->z * e->dv * e->d, 0, 0, e->d};
    load_rows(slope, 0, 0, 0, e->dv, e->d, 1, NULL, NULL, e->slope, e->dp);
    transpose(e->dv, e->d, e->slope, e->dp, e->slopeT, e->lv);
}

void scale_values(Head *e, int64_t start, int n) {
    load_rows(e->c->v, e->z, 0, start, n, e->dv, 1, NULL, e->pool, e->work, e->lv);
    for (int i = 0; i < n; i++)
        set_scaled(e->work + i * e->lv, e->u[start + i] * e->weight[e->cluster[start + i]], e->work + i * e->lv, e->lv);
}

static void compute_slope(Head *e) {
    float *out = e->c->slope + e->z * e->dv * e->d;
    const float *mu = e->keys + e->n * e->dp, mass = weighted_value_sums(e);
    matmul(FULL, e->dv, e->d, e->K, e->work, 1, e->lv, mu, e->dp, e->slope, e->dp, 0);
    for (int i = 0; i < e->dv * e->dp; i++) e->slope[i] *= -1;
    for (int64_t t = 0; t < e->c->S; t += CHUNK) {
        const int n = min64(e->c->S - t, CHUNK);
        load_rows(e->c->y, e->z, 0, t, n, e->d, e->c->factor, e->shift, e->pool, e->y, e->dp);
        scale_values(e, t, n);
        matmul(FULL, e->dv, e->d, n, e->work, 1, e->lv, e->y, e->dp, e->slope, e->dp, 1);
    }
    for (int q = 0; q < e->dv; q++)
        for (int p = 0; p < e->d; p++) out[q * e->d + p] = e->slope[q * e->dp + p] / mass;
    load_slope(e);
}

/* ---- Queries ---- */

/* Replaces block s - 3 of the window by block s. A missing block is masked. */
static void load_block(Head *e, int64_t s) {
    const NearFar *c = e->c;
    const int64_t row = (s + 3) % 3 * e->b, start = s * e->b;
    const int n = s >= 0 && s < e->N ? block_tokens(e, s) : 0;
    load_rows(c->y, e->z, 0, start, n, e->d, c->factor, e->shift, e->pool, e->Y + row * e->dp, e->dp);
    load_rows(c->v, e->z, 0, start, n, e->dv, 1, NULL, e->pool, e->V + row * e->lv, e->lv);
    memset(e->Y + (row + n) * e->dp, 0, sizeof(float) * (e->b - n) * e->dp);
    memset(e->V + (row + n) * e->lv, 0, sizeof(float) * (e->b - n) * e->lv);
    for (int i = 0; i < e->b; i++) {
        e->V[(row + i) * e->lv + e->dv] = 1;
        e->mask_bias[row + i] = i < n && e->pool[start + i] ? 0 : MASKED;
    }
}

Block load_window(Head *e, int64_t t) {
    load_block_states(e, t);
    if (e->c->cross) return (Block){.tokens = e->c->L};
    for (int64_t s = t ? t + 1 : -1; s <= t + 1; s++) load_block(e, s);
    return (Block){t, block_tokens(e, t), (int)min64(e->N, 3) * e->b};
}

void load_queries(Head *e, const Block *at, int i, int R) {
    const int ld = round_up(R);
    for (int r = 0, g = i / at->tokens, t = i % at->tokens; r < R; r++) {
        e->group[r] = g, e->token[r] = at->t * e->b + t;
        if (++t == at->tokens) t = 0, g++;
    }
    memset(e->Q + R * e->dp, 0, sizeof(float) * (ld - R) * e->dp);
    for (int r = 0; r < R; r++) {
        float *q = e->Q + r * e->dp;
        set_scaled(q, e->c->factor, query_ptr(e, e->c->x, r), e->d);
        for (int p = e->d; p < e->dp; p++) q[p] = 0;
        for (int p = 0; p < e->dp; p += LANES) AT(e->X + r * e->dp + p) = AT(q + p) - AT(e->tilt + p);
    }
    transpose(ld, e->d, e->Q, e->dp, e->Qt, ld);
    for (int j = 0; j < e->d * ld; j += LANES) AT(e->Qt + j) *= LOG2E;
    matmul(FULL, at->near, ld, e->d, e->Y, e->dp, 1, e->Qt, ld, e->A, ld, 0);
    matmul(FULL, e->M, ld, e->d, e->keys, e->dp, 1, e->Qt, ld, e->A + at->near * ld, ld, 0);
}

void exponentiate(Head *e, const Block *at, int ld) {
    const vec limit = (vec){0} + 126.0f;
    for (int j = 0; j < ld; j += LANES) {
        float *A = e->A + j;
        vec sum = {0}, far = {0}, top = AT(e->top + j);
        for (int i = 0; i < at->near; i++, A += ld)
            sum += AT(A) = exp2_vec(minimum(AT(A) + e->mask_bias[i] - top, limit));
        for (int i = 0; i < e->M; i++, A += ld) {
            vec weight = AT(A) = e->mass[i] > 0 ? exp2_vec(minimum(AT(A) + e->bias[i] - top, limit)) : (vec){0};
            if (i < e->n) sum += weight;
            else far += e->mass[i] * weight;
        }
        AT(e->scale + j) = sum + far, AT(e->cluster_share + j) = far;
    }
}

/* ---- Forward ---- */

static void attend_queries(Head *e, const Block *at, int i, int R) {
    const int ld = round_up(R), lv = e->lv, dv = e->dv;
    load_queries(e, at, i, R);
    for (int j = 0; j < ld; j += LANES) {        /* no exponential term exceeds e^top */
        const float *A = e->A + j;
        vec top = (vec){0} + MASKED;
        for (int k = 0; k < at->near; k++, A += ld) top = maximum(top, AT(A) + e->mask_bias[k]);
        for (int k = 0; k < e->M; k++, A += ld) top = maximum(top, AT(A) + (e->bias[k] + e->mass_exponent[k]));
        AT(e->top + j) = top;
    }
    exponentiate(e, at, ld);
    matmul(FULL, R, dv, at->near, e->A, 1, ld, e->V, lv, e->O, lv, 0);
    matmul(FULL, R, dv, e->M, e->A + at->near * ld, 1, ld, e->values, lv, e->O, lv, at->near > 0);
    for (int j = 0; j < ld; j += LANES) {
        const vec all = AT(e->scale + j);
        AT(e->scale + j) = blend(all > 0.0f, 1.0f / all, (vec){0});    /* cross-attention: possibly no key */
        AT(e->cluster_share + j) *= AT(e->scale + j);
    }
    if (e->c->first_order) matmul(FULL, R, dv, e->d, e->X, e->dp, 1, e->slopeT, lv, e->P, lv, 0);
    for (int r = 0; r < R; r++) {
        float *out = query_ptr(e, e->c->out, r);
        const int64_t number = query_index(e, r);
        for (int p = 0; p < dv; p++) out[p] = e->O[r * lv + p] * e->scale[r];
        if (e->c->first_order) add_scaled(out, e->cluster_share[r], e->P + r * lv, dv);
        e->c->logsum[number] = e->scale[r] > 0 ? e->top[r] - log2f(e->scale[r]) : MASKED;
    }
}

static void forward_head(Head *e) {
    sum_clusters(e);
    compute_cluster_keys(e);
    if (e->c->first_order) compute_slope(e);
    for (int64_t t = 0; t < e->N; t++) {
        const Block at = load_window(e, t);
        for (int i = 0, all = at.tokens * e->c->G; i < all; i += QUERIES)
            attend_queries(e, &at, i, min64(all - i, QUERIES));
    }
}

/* ---- All heads ---- */

int for_each_head(const NearFar *c, int backward, void (*body)(Head *e)) {
    int bad = OK;
#pragma omp parallel num_threads((int)c->threads) reduction(max : bad)
    {
        const unsigned mode = flush_denormals();
#pragma omp for schedule(dynamic)
        for (int64_t z = 0; z < c->Z; z++) {
            Head e;
            if (init_head(&e, c, z, backward)) body(&e);
            else bad = NO_MEMORY;
        }
        restore_float_mode(mode);
        trim_scratch();      /* once, because new memory for each head is slower */
    }
    return bad;
}

int near_far(const NearFar *c) { return for_each_head(c, 0, forward_head); }
