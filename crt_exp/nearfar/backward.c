/* Backward pass of forward.c, block by block.

   Let G = [g, -g.out]. The gradient of a logit is e^logit G.[v, 1] for a single key and e^logit G.[V, N] for a
   cluster. With first-order values, out = o + share C (x - tilt), clusters add g.C (x - tilt) to the last column of
   G. */

#include "near_far.h"

/* ---- Queries ---- */

/* Loads G and its transpose. First-order values also need Gs = share g, P = C^T g and g.C (x - tilt) in `scale`. */
static void load_gradients(Head *e, int R) {
    const int ld = round_up(R), lv = e->lv, dv = e->dv;
    for (int r = 0; r < R; r++) {
        float *g = e->G + r * lv;
        memcpy(g, query_ptr(e, e->c->grad, r), sizeof(float) * dv);
        g[dv] = -dot(g, query_ptr(e, e->c->out, r), dv);
        for (int p = 0; p < lv && e->c->first_order; p += LANES)
            AT(e->Gs + r * lv + p) = e->cluster_share[r] * AT(g + p);
    }
    memset(e->G + R * lv, 0, sizeof(float) * (ld - R) * lv);
    transpose(ld, dv + 1, e->G, lv, e->Gt, ld);
    if (!e->c->first_order) return;
    matmul(FULL, R, e->d, dv, e->G, lv, 1, e->slope, e->dp, e->P, e->dp, 0);
    for (int r = 0; r < R; r++) e->scale[r] = dot(e->P + r * e->dp, e->X + r * e->dp, e->d);
}

/* Adds g.C (x - tilt) to the last column of G, for clusters. */
static void add_slope_gradient(Head *e, int R) {
    const int ld = round_up(R);
    for (int r = 0; r < R && e->c->first_order; r++) {
        e->G[r * e->lv + e->dv] += e->scale[r];
        e->Gt[e->dv * ld + r] += e->scale[r];
    }
}

/* Turns B from gradients of e^logit into gradients of logits. Adds the gradients of cluster biases. */
static void logits_backward(Head *e, const Block *at, int ld) {
    const int rows = at->near + e->M;
    for (int64_t i = 0; i < (int64_t)rows * ld; i += LANES) AT(e->B + i) *= AT(e->A + i);
    for (int k = 0; k < e->K; k++) {
        const float *from = e->B + (at->near + e->n + k) * ld;
        vec sum = {0};
        for (int j = 0; j < ld; j += LANES) sum += AT(from + j);
        e->dbias[k] += reduce_sum(sum);
    }
}

static void attend_backward(Head *e, const Block *at, int i, int R) {
    const int ld = round_up(R), lv = e->lv, dv = e->dv, dp = e->dp, d = e->d, near = at->near;
    float *A = e->A + near * ld, *B = e->B + near * ld, *clusters_A = A + e->n * ld, *clusters_B = B + e->n * ld;
    load_queries(e, at, i, R);
    for (int r = 0; r < ld; r++) e->top[r] = r < R ? e->c->logsum[query_index(e, r)] : 0;
    exponentiate(e, at, ld);
    load_gradients(e, R);
    matmul(FULL, near, ld, dv + 1, e->V, lv, 1, e->Gt, ld, e->B, ld, 0);
    matmul(FULL, e->n, ld, dv + 1, e->values, lv, 1, e->Gt, ld, B, ld, 0);
    add_slope_gradient(e, R);
    matmul(FULL, e->K, ld, dv + 1, e->values + e->n * lv, lv, 1, e->Gt, ld, clusters_B, ld, 0);
    logits_backward(e, at, ld);

    matmul(FULL, near, dv, R, e->A, ld, 1, e->G, lv, e->dV, lv, 1);
    matmul(FULL, e->n, dv, R, A, ld, 1, e->G, lv, e->dvalues, lv, 1);
    matmul(FULL, e->K, dv + 1, R, clusters_A, ld, 1, e->G, lv, e->dstates + at->t % e->T * e->K * lv, lv, i > 0);
    matmul(FULL, near, d, R, e->B, ld, 1, e->Q, dp, e->dY, dp, 1);
    float *dx = e->O;
    if (e->c->first_order) {
        matmul(FULL, dv, d, R, e->Gs, 1, lv, e->X, dp, e->dslope, dp, 1);
        for (int r = 0; r < R; r++)
            for (int p = 0; p < dp; p += LANES) AT(dx + r * dp + p) = e->cluster_share[r] * AT(e->P + r * dp + p);
    }
    else memset(dx, 0, sizeof(float) * R * dp);
    matmul(FULL, R, d, near, e->B, 1, ld, e->Y, dp, dx, dp, 1);
    matmul(FULL, e->M, d, R, B, ld, 1, e->Q, dp, e->dkeys, dp, 1);
    matmul(FULL, R, d, e->M, B, 1, ld, e->keys, dp, dx, dp, 1);
    for (int r = 0; r < R; r++) set_scaled(query_ptr(e, e->c->dx, r), e->c->factor, dx + r * dp, d);
}

/* ---- States ---- */

/* Adds the gradients of the keys of block s from a gradient of states: of values, and of log weights in
   `dlog_weight`. */
static void state_to_key_gradients(Head *e, int64_t s, const float *dstate) {
    for (int64_t j = s * e->b, stop = j + block_tokens(e, s); j < stop; j++) {
        if (!(e->u[j] > 0)) continue;
        const float *from = dstate + e->cluster[j] * e->lv;
        e->dlog_weight[j] += dot(from, key_ptr(e, e->c->v, j), e->dv) + from[e->dv];
        add_scaled(key_ptr(e, e->c->dvalues, j), e->u[j], from, e->dv);
    }
}

/* Adds the gradients of keys from the states of block t. A running sum, dbefore, covers later keys. Earlier keys
   follow after the last block t of the segment, whose first block is `first`: blocks first - 1 to t - 2 here, blocks up
   to first - 2 in backward_head, from the sum `dsegments`. */
static void states_backward(Head *e, int64_t t) {
    const int64_t state = e->K * e->lv, first = t / e->T * e->T;
    add_scaled(e->dbefore, 1, e->dstates + (t - first) * state, state);
    if (t + 2 < e->N) state_to_key_gradients(e, t + 2, e->dbefore);
    if (t + 1 < e->N && (t + 1) % e->T) return;
    float *after = e->dsegments + first / e->T * state;
    memset(after, 0, sizeof(float) * state);
    for (int64_t s = t - 2; s >= first - 2; s--) {
        add_scaled(after, 1, e->dstates + (s + 2 - first) * state, state);
        if (s > first - 2 && s >= 0) state_to_key_gradients(e, s, after);
    }
}

/* Adds the window gradients of block s to dy and dvalues, and clears them for the next block. */
static void write_window_gradients(Head *e, int64_t s) {
    const NearFar *c = e->c;
    float *dY = e->dY + s % 3 * e->b * e->dp, *dV = e->dV + s % 3 * e->b * e->lv;
    for (int i = 0, n = block_tokens(e, s); i < n; i++) {
        add_scaled(key_ptr(e, c->dy, s * e->b + i), c->factor, dY + i * e->dp, e->d);
        add_scaled(key_ptr(e, c->dvalues, s * e->b + i), 1, dV + i * e->lv, e->dv);
    }
    memset(dY, 0, sizeof(float) * e->b * e->dp);
    memset(dV, 0, sizeof(float) * e->b * e->lv);
}

/* ---- Keys ---- */

/* Divides the gradient of C (dv, d) by the mass. Adds the gradients of the means, and computes dslope_slope. */
static void slope_backward(Head *e, float *dmu) {
    const float mass = weighted_value_sums(e);
    float inner = 0;
    for (int q = 0; q < e->dv; q++)
        for (int p = 0; p < e->d; p++) {
            float *g = e->dslope + q * e->dp + p;
            *g /= mass;
            inner += *g * e->slope[q * e->dp + p];
        }
    e->dslope_slope = inner;
    transpose(e->dv, e->d, e->dslope, e->dp, e->dslopeT, e->lv);
    for (int i = 0; i < e->K * e->lv; i++) e->work[i] *= -1;
    matmul(FULL, e->K, e->d, e->dv, e->work, e->lv, 1, e->dslope, e->dp, dmu, e->dp, 1);
}

/* Computes the gradients of the cluster sums from the gradients of means, biases and slope. */
static void sums_backward(Head *e) {
    const int d = e->d, dp = e->dp, width = dp + PAD;
    float *mu = e->keys + e->n * dp, *dmu = e->dkeys + e->n * dp;
    if (e->c->first_order) slope_backward(e, dmu);
    matmul(FULL, e->K, d, d, e->mean_offset, dp, 1, e->rootT, dp, e->offset_rootT, dp, 0);
    matmul(FULL, d, d, d, e->root, dp, 1, e->rootT, dp, e->moments, dp, 0);
    for (int k = 0; k < e->K; k++) {
        const float *sums = e->sums + k * (d + 2), N = sums[d + 1], inverse = N > MIN_WEIGHT ? 1 / N : 0;
        const float dspread = e->spread[k] > 0 ? 0.5f * e->dbias[k] / (1 + e->spread[k] / 2) : 0;
        float *to = e->dsums + k * width, *g = dmu + k * dp;
        for (int p = 0; p < dp; p++) {
            g[p] = p < d ? g[p] - e->dbias[k] * e->tilt[p] - 2 * dspread * e->offset_rootT[k * dp + p] : 0;
            to[p] = g[p] * inverse;
        }
        to[dp] = dspread * inverse;
        to[dp + 1] = -(dot(to, mu + k * dp, dp) + to[dp] * sums[d] * inverse);
    }
}

/* Returns the gradient of the log weight of key j, which is key i of the chunk. Adds the first-order gradient of the
   value of key j. */
static float weight_backward(Head *e, int64_t j, int i) {
    const int64_t k = e->cluster[j];
    const float *sums = e->dsums + k * (e->dp + PAD), *slope = e->dv_chunk + i * e->lv, g = e->weight[k], u = e->u[j];
    float gain = e->dlog_weight[j] + dot(sums, e->y + i * e->dp, e->dp) + sums[e->dp] * e->square[j] + sums[e->dp + 1];
    if (!e->c->first_order) return u * gain;
    gain += g * (dot(slope, key_ptr(e, e->c->v, j), e->dv) - e->dslope_slope);
    add_scaled(key_ptr(e, e->c->dvalues, j), u * g, slope, e->dv);
    return u * gain;
}

/* Adds the gradients of n keys of one block through weights and cluster sums. z - centre = (y - mu) root +
   mean_offset. For first-order values dv_chunk = (y - mu) D^T, where D is the gradient of C. */
static void write_key_gradients(Head *e, int64_t start, int n) {
    const int dp = e->dp, lv = e->lv, slope = e->c->first_order;
    const float *mu = e->keys + e->n * dp;
    load_rows(e->c->y, e->z, 0, start, n, e->d, e->c->factor, e->shift, e->pool, e->y, dp);
    for (int i = 0; i < n; i++)
        for (int p = 0; p < dp; p += LANES)
            AT(e->work + i * dp + p) = AT(e->y + i * dp + p) - AT(mu + e->cluster[start + i] * dp + p);
    matmul(FULL, n, e->d, e->d, e->work, dp, 1, e->moments, dp, e->dy_chunk, dp, 0);
    if (slope) matmul(FULL, n, e->dv, e->d, e->work, dp, 1, e->dslopeT, lv, e->dv_chunk, lv, 0);
    for (int i = 0; i < n; i++) {
        const int64_t j = start + i, k = e->cluster[j];
        const float u = e->u[j], *sums = e->dsums + k * (dp + PAD), twice = 2 * u * sums[dp];
        const float gain = u > 0 ? weight_backward(e, j, i) : 0;
        for (int p = 0; p < dp; p += LANES) {
            const vec step = AT(e->dy_chunk + i * dp + p) + AT(e->offset_rootT + k * dp + p);
            AT(e->dy_chunk + i * dp + p) = twice * step + u * AT(sums + p) + gain * AT(e->tilt + p);
        }
    }
    if (slope) {
        scale_values(e, start, n);
        matmul(FULL, n, e->d, e->dv, e->work, lv, 1, e->dslope, dp, e->dy_chunk, dp, 1);
    }
    for (int i = 0; i < n; i++)
        if (e->u[start + i] > 0) add_scaled(key_ptr(e, e->c->dy, start + i), e->c->factor, e->dy_chunk + i * dp, e->d);
}

static void clear_gradients(Head *e) {
    const NearFar *c = e->c;
    const size_t number = sizeof(float), state = number * e->K * e->lv, near = c->cross ? 0 : number * 3 * e->b;
    memset(key_ptr(e, c->dy, 0), 0, number * c->S * e->d);
    memset(key_ptr(e, c->dvalues, 0), 0, number * c->S * e->dv);
    memset(e->dY, 0, near * e->dp);
    memset(e->dV, 0, near * e->lv);
    memset(e->dkeys, 0, number * e->M * e->dp);
    memset(e->dvalues, 0, number * e->n * e->lv);
    memset(e->dbefore, 0, state);
    memset(e->dafter, 0, state);
    memset(e->dlog_weight, 0, number * c->S);
    memset(e->dbias, 0, number * e->K);
    if (c->first_order) memset(e->dslope, 0, number * e->dv * e->dp);
}

static void backward_head(Head *e) {
    const NearFar *c = e->c;
    const int64_t state = e->K * e->lv;
    compute_cluster_keys(e);
    if (c->first_order) load_slope(e);
    clear_gradients(e);
    for (int64_t t = 0; t < e->N; t++) {
        if (t >= 2) write_window_gradients(e, t - 2);
        const Block at = load_window(e, t);
        for (int i = 0, all = at.tokens * c->G; i < all; i += QUERIES)
            attend_backward(e, &at, i, min64(all - i, QUERIES));
        if (c->cross) state_to_key_gradients(e, 0, e->dstates);
        else states_backward(e, t);
    }
    for (int64_t s = e->N > 1 ? e->N - 2 : 0; s < e->N && !c->cross; s++) write_window_gradients(e, s);
    sums_backward(e);
    for (int64_t s = e->N - 1; s >= 0; s--) {
        if ((s + 2) % e->T == 0 && s + 2 < e->N) add_scaled(e->dafter, 1, e->dsegments + (s + 2) / e->T * state, state);
        state_to_key_gradients(e, s, e->dafter);
        for (int i = 0, tokens = block_tokens(e, s); i < tokens; i += CHUNK)
            write_key_gradients(e, s * e->b + i, min64(tokens - i, CHUNK));
    }
    for (int i = 0, k = 0; i < c->heavy; i++) {
        if (!c->there[e->z * c->heavy + i]) continue;
        const int64_t j = c->positions[e->z * c->heavy + i];
        set_scaled(key_ptr(e, c->dy, j), c->factor, e->dkeys + k * e->dp, e->d);
        memcpy(key_ptr(e, c->dvalues, j), e->dvalues + k++ * e->lv, sizeof(float) * e->dv);
    }
}

int near_far_backward(const NearFar *c) { return for_each_head(c, 1, backward_head); }
