/* What the keys of a head leave in its cells, and the gradients of that: see head.h. The formulas are those of
   engine/cell_sums.py and nearfar/choice.py. */

#include "head.h"

int open_head(Head *e, const NearFar *c, int64_t z, int backward) {
    *e = (Head){.c = c, .z = z, .b = c->block, .K = c->cells};
    e->d = c->d, e->dp = up(c->d), e->dv = c->dv, e->lv = up(c->dv + 1);
    for (int i = 0; i < c->heavy; i++) e->n += c->there[z * c->heavy + i];
    e->N = (c->S + e->b - 1) / e->b, e->M = e->n + e->K;
    e->T = least_of(e->b < SEGMENT ? SEGMENT / e->b : 1, e->N);
    e->segments = (e->N + e->T - 1) / e->T;
    e->most = least_of(up(c->G * (c->cross ? c->L : e->b)), QUERIES);
    e->pool = c->pool + z * c->S, e->cell = c->cell + z * c->S, e->shift = c->shift + z * c->d;
    e->u = c->u + z * c->S, e->square = c->square + z * c->S;
    e->sums = c->sums + z * c->cells * (c->d + 2);
    const size_t d = e->d, dp = e->dp, dv = e->dv, lv = e->lv, K = e->K, M = e->M, most = e->most, state = K * lv,
                 wide = lv > dp ? lv : dp, rows = (size_t)(e->T + 2) * e->b, back = backward, slope = c->first_order;
    const Scratch pieces[] = {
        {&e->tilt, dp}, {&e->root, d * dp}, {&e->rootT, d * dp}, {&e->centres, K * dp}, {&e->off, K * dp},
        {&e->spread, K}, {&e->keys, M * dp}, {&e->values, M * lv}, {&e->bias, M}, {&e->high, M}, {&e->mass, M},
        {&e->total, state}, {&e->marks, e->segments * state}, {&e->after, e->T * state}, {&e->before, state},
        {&e->y, CHUNK * dp}, {&e->zs, CHUNK * dp}, {&e->v, CHUNK * lv}, {&e->work, (K > CHUNK ? K : CHUNK) * wide},
        {&e->slope, slope * dv * dp}, {&e->slopeT, slope * d * lv}, {&e->weight, K}, {&e->doubles, 2 * K * (d + 2)},
        {&e->Y, rows * dp}, {&e->V, rows * lv}, {&e->hidden, rows}, {&e->A, (3 * e->b + M) * most},
        {&e->Q, most * dp}, {&e->X, most * dp}, {&e->Qt, d * most}, {&e->O, most * wide}, {&e->P, most * wide},
        {&e->top, most}, {&e->scale, most}, {&e->part, most},
        {&e->B, back * (3 * e->b + M) * most}, {&e->G, back * most * lv}, {&e->Gt, back * lv * most},
        {&e->Gs, back * most * lv}, {&e->dY, back * rows * dp}, {&e->dV, back * rows * lv}, {&e->dkeys, back * M * dp},
        {&e->dvalues, back * e->n * lv}, {&e->dstates, back * e->T * state}, {&e->dstate, back * state},
        {&e->dwhole, back * 3 * e->segments * state}, {&e->dafter, back * e->segments * state},
        {&e->rest, back * c->S}, {&e->dbias, back * K}, {&e->dsums, back * K * (dp + PAD)}, {&e->back, back * K * dp},
        {&e->moments, back * d * dp}, {&e->dslope, back * slope * dv * dp}, {&e->dslopeT, back * slope * d * lv},
        {&e->to_y, back * CHUNK * dp}, {&e->to_v, back * CHUNK * lv}};
    if (!take_scratch(pieces, sizeof pieces / sizeof *pieces)) return 0;
    const float *root = c->root + z * d * d, *tilt = c->tilt + z * d, *centres = c->centres + z * K * d;
    const View rows_of_root = {(float *)root, 0, 0, d}, rows_of_centres = {(float *)centres, 0, 0, d};
    load_rows((View){(float *)tilt, 0, 0, d}, 0, 0, 0, 1, d, 1, NULL, NULL, e->tilt, dp);
    load_rows(rows_of_root, 0, 0, 0, d, d, 1, NULL, NULL, e->root, dp);
    load_rows(rows_of_centres, 0, 0, 0, K, d, 1, NULL, NULL, e->centres, dp);
    memset(e->rootT, 0, sizeof(float) * d * dp);
    transpose(d, d, e->root, dp, e->rootT, dp);
    for (int i = 0, k = 0; i < c->heavy; i++) {
        if (!c->there[z * c->heavy + i]) continue;
        const int64_t j = c->places[z * c->heavy + i];
        load_rows(c->y, z, 0, j, 1, d, c->factor, e->shift, NULL, e->keys + k * dp, dp);
        load_rows(c->v, z, 0, j, 1, dv, 1, NULL, NULL, e->values + k * lv, lv);
        e->values[k * lv + dv] = e->mass[k] = 1, e->bias[k] = e->high[k] = 0;
        k++;
    }
    return 1;
}

/* ---- Sums over the keys of a cell ---- */

/* Keys [start, start + n) as y, and as z less the centres of their cells; those outside the pool are 0 in y. */
static void measure_keys(Head *e, int64_t start, int n) {
    load_rows(e->c->y, e->z, 0, start, n, e->d, e->c->factor, e->shift, e->pool, e->y, e->dp);
    product(ALL, n, e->d, e->d, e->y, e->dp, 1, e->root, e->dp, e->zs, e->dp, 0);
    for (int i = 0; i < n; i++) {
        const float *centre = e->centres + e->cell[start + i] * e->dp;
        float *z = e->zs + i * e->dp;
        for (int p = 0; p < e->dp; p += LANES) AT(z + p) -= AT(centre + p);
        for (int p = e->d; p < e->dp; p++) z[p] = 0;
    }
}

static void find_levels(Head *e, float *level) {
    for (int k = 0; k < e->K; k++) level[k] = -INFINITY;
    for (int64_t t = 0; t < e->c->S; t += CHUNK) {
        const int n = least_of(e->c->S - t, CHUNK);
        load_rows(e->c->y, e->z, 0, t, n, e->d, e->c->factor, e->shift, e->pool, e->y, e->dp);
        for (int i = 0; i < n; i++) {
            float w = e->u[t + i] = dot(e->y + i * e->dp, e->tilt, e->dp), *top = level + e->cell[t + i];
            if (e->pool[t + i] && w > *top) *top = w;
        }
    }
    for (int k = 0; k < e->K; k++)
        if (level[k] == -INFINITY) level[k] = 0;
}

/* e^(level - the highest of a cell that has keys), by which the weights u of cells compare. */
static void find_weights(Head *e) {
    const float *level = e->c->level + e->z * e->K;
    float highest = -INFINITY;
    for (int k = 0; k < e->K; k++)
        if (e->sums[k * (e->d + 2) + e->d + 1] > LEAST) highest = fmaxf(highest, level[k]);
    for (int k = 0; k < e->K; k++) {
        const int there = e->sums[k * (e->d + 2) + e->d + 1] > LEAST;
        e->weight[k] = there ? expf(level[k] - highest) : 0;
    }
}

void sum_cells(Head *e) {
    const int d = e->d;
    float *level = e->c->level + e->z * e->K;
    double *sums = (double *)e->doubles;
    find_levels(e, level);
    memset(sums, 0, sizeof(double) * e->K * (d + 2));
    for (int64_t t = 0; t < e->c->S; t += CHUNK) {
        const int n = least_of(e->c->S - t, CHUNK);
        float u[CHUNK];
        measure_keys(e, t, n);
        for (int i = 0; i < CHUNK; i++) {
            const int there = i < n && e->pool[t + i];
            u[i] = there ? (e->u[t + i] - level[e->cell[t + i]]) * LOG2E : -INFINITY;
        }
        for (int i = 0; i < CHUNK; i += LANES) AT(u + i) = exp2_of(AT(u + i));
        memcpy(e->u + t, u, sizeof(float) * n);
        for (int i = 0; i < n; i++) {
            e->square[t + i] = dot(e->zs + i * e->dp, e->zs + i * e->dp, e->dp);
            if (!(u[i] > 0)) continue;
            const float *y = e->y + i * e->dp;
            double *to = sums + e->cell[t + i] * (d + 2);
            for (int p = 0; p < d; p++) to[p] += u[i] * y[p];
            to[d] += u[i] * e->square[t + i];
            to[d + 1] += u[i];
        }
    }
    for (int i = 0; i < e->K * (d + 2); i++) e->sums[i] = (float)sums[i];
}

/* ---- Cells as keys ---- */

void place_cells(Head *e) {
    const float *level = e->c->level + e->z * e->K;
    float *mu = e->keys + e->n * e->dp, *spread = e->c->spread + e->z * e->K;
    for (int k = 0; k < e->K; k++) {
        const float *sums = e->sums + k * (e->d + 2), over = sums[e->d + 1] > LEAST ? 1 / sums[e->d + 1] : 0;
        for (int p = 0; p < e->dp; p++) mu[k * e->dp + p] = p < e->d ? sums[p] * over : 0;
    }
    product(ALL, e->K, e->d, e->d, mu, e->dp, 1, e->root, e->dp, e->off, e->dp, 0);
    for (int k = 0; k < e->K; k++) {
        const float *sums = e->sums + k * (e->d + 2), N = sums[e->d + 1];
        float *off = e->off + k * e->dp;
        for (int p = 0; p < e->dp; p++) off[p] = p < e->d ? off[p] - e->centres[k * e->dp + p] : 0;
        float tau = N > LEAST ? sums[e->d] / N - dot(off, off, e->dp) : 0;
        spread[k] = e->spread[k] = tau > 0 ? tau : 0;
        e->bias[e->n + k] = (level[k] - dot(mu + k * e->dp, e->tilt, e->dp) + log1pf(e->spread[k] / 2)) * LOG2E;
    }
    find_weights(e);
    mark_states(e);
}

/* V (K, lv) of all keys of the cells, by how their weights compare, in `work`; returns the sum of these weights. */
static float weighted_values(Head *e) {
    double mass = 0;
    for (int k = 0; k < e->K; k++) {
        for (int p = 0; p < e->lv; p++) e->work[k * e->lv + p] = p < e->dv ? e->weight[k] * e->total[k * e->lv + p] : 0;
        mass += e->weight[k] * e->sums[k * (e->d + 2) + e->d + 1];
    }
    return mass > LEAST ? (float)mass : LEAST;
}

void find_slope(Head *e) {
    float *out = e->c->slope + e->z * e->dv * e->d;
    const float *mu = e->keys + e->n * e->dp, mass = weighted_values(e);
    product(ALL, e->dv, e->d, e->K, e->work, 1, e->lv, mu, e->dp, e->slope, e->dp, 0);
    for (int q = 0; q < e->dv; q++)
        for (int p = 0; p < e->d; p++) e->slope[q * e->dp + p] *= -1;
    for (int64_t t = 0; t < e->c->S; t += CHUNK) {
        const int n = least_of(e->c->S - t, CHUNK);
        load_rows(e->c->y, e->z, 0, t, n, e->d, e->c->factor, e->shift, e->pool, e->y, e->dp);
        load_rows(e->c->v, e->z, 0, t, n, e->dv, 1, NULL, e->pool, e->v, e->lv);
        for (int i = 0; i < n; i++) {
            const float g = e->u[t + i] * e->weight[e->cell[t + i]];
            for (int p = 0; p < e->lv; p += LANES) AT(e->v + i * e->lv + p) *= g;
        }
        product(ALL, e->dv, e->d, n, e->v, 1, e->lv, e->y, e->dp, e->slope, e->dp, 1);
    }
    for (int q = 0; q < e->dv; q++)
        for (int p = 0; p < e->d; p++) out[q * e->d + p] = e->slope[q * e->dp + p] / mass;
    load_slope(e);
}

void load_slope(Head *e) {
    const float *from = e->c->slope + e->z * e->dv * e->d;
    load_rows((View){(float *)from, 0, 0, e->d}, 0, 0, 0, e->dv, e->d, 1, NULL, NULL, e->slope, e->dp);
    transpose(e->dv, e->d, e->slope, e->dp, e->slopeT, e->lv);
}

/* ---- Gradients ---- */

/* From that to C (dv, d), over the mass: to the means; and what the gradients to keys need of it. */
static void slope_backward(Head *e, float *dmu) {
    const float mass = weighted_values(e);
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
    product(ALL, e->K, e->d, e->dv, e->work, e->lv, 1, e->dslope, e->dp, dmu, e->dp, 1);
}

void sums_backward(Head *e) {
    const int d = e->d, dp = e->dp, width = dp + PAD;
    float *mu = e->keys + e->n * dp, *dmu = e->dkeys + e->n * dp;
    if (e->c->first_order) slope_backward(e, dmu);
    product(ALL, e->K, d, d, e->off, dp, 1, e->rootT, dp, e->back, dp, 0);
    product(ALL, d, d, d, e->root, dp, 1, e->rootT, dp, e->moments, dp, 0);
    for (int k = 0; k < e->K; k++) {
        const float *sums = e->sums + k * (d + 2), N = sums[d + 1], over = N > LEAST ? 1 / N : 0;
        const float to_spread = e->spread[k] > 0 ? 0.5f * e->dbias[k] / (1 + e->spread[k] / 2) : 0;
        float *to = e->dsums + k * width, *g = dmu + k * dp;
        for (int p = 0; p < dp; p++) {
            g[p] = p < d ? g[p] - e->dbias[k] * e->tilt[p] - 2 * to_spread * e->back[k * dp + p] : 0;
            to[p] = g[p] * over;
        }
        to[dp] = to_spread * over;
        to[dp + 1] = -(dot(to, mu + k * dp, dp) + to[dp] * sums[d] * over);
    }
}

/* What the log weight of key start + i of a chunk gains, and the gradients to its value. */
static float weight_backward(Head *e, int64_t start, int i) {
    const int64_t j = start + i, k = e->cell[j];
    const int dp = e->dp, dv = e->dv;
    const float u = e->u[j], *state = e->dstate + k * e->lv, *sums = e->dsums + k * (dp + PAD), *v = e->v + i * e->lv;
    float *to = key_of(e, e->c->dvalues, j);
    float gain = e->rest[j] + state[dv] + dot(state, v, dv) + dot(sums, e->y + i * dp, dp);
    gain += sums[dp] * e->square[j] + sums[dp + 1];
    add_row(to, u, state, dv);
    if (!e->c->first_order) return u * gain;
    const float g = e->weight[k], *slope = e->to_v + i * e->lv;
    gain += g * (dot(slope, v, dv) - e->dslope_slope);
    add_row(to, u * g, slope, dv);
    return u * gain;
}

/* Completes the gradients to n keys of one block, in which stands what near queries and the states of the own segment
   give; dstate: those to the states of others. z - centre = (y - mu) root + off; with values to first order
   to_v = (y - mu) D^T for the gradient D to C. */
static void finish_keys(Head *e, int64_t start, int n) {
    const int dp = e->dp, lv = e->lv, slope = e->c->first_order;
    const float *mu = e->keys + e->n * dp;
    float gain[CHUNK];
    load_rows(e->c->y, e->z, 0, start, n, e->d, e->c->factor, e->shift, e->pool, e->y, dp);
    load_rows(e->c->v, e->z, 0, start, n, e->dv, 1, NULL, e->pool, e->v, lv);
    for (int i = 0; i < n; i++)
        for (int p = 0; p < dp; p += LANES)
            AT(e->work + i * dp + p) = AT(e->y + i * dp + p) - AT(mu + e->cell[start + i] * dp + p);
    product(ALL, n, e->d, e->d, e->work, dp, 1, e->moments, dp, e->to_y, dp, 0);
    if (slope) product(ALL, n, e->dv, e->d, e->work, dp, 1, e->dslopeT, lv, e->to_v, lv, 0);
    for (int i = 0; i < n; i++) {
        const int64_t k = e->cell[start + i];
        const float u = e->u[start + i], *sums = e->dsums + k * (dp + PAD), twice = 2 * u * sums[dp];
        const float g = slope ? u * e->weight[k] : 0;
        gain[i] = u > 0 ? weight_backward(e, start, i) : 0;
        for (int p = 0; p < dp; p += LANES) {
            const vec step = AT(e->to_y + i * dp + p) + AT(e->back + k * dp + p);
            AT(e->to_y + i * dp + p) = twice * step + u * AT(sums + p) + gain[i] * AT(e->tilt + p);
        }
        for (int p = 0; slope && p < lv; p += LANES) AT(e->v + i * lv + p) *= g;
    }
    if (slope) product(ALL, n, e->d, e->dv, e->v, lv, 1, e->dslope, dp, e->to_y, dp, 1);
    for (int i = 0; i < n; i++)
        if (e->u[start + i] > 0) add_row(key_of(e, e->c->dy, start + i), e->c->factor, e->to_y + i * dp, e->d);
}

void keys_backward(Head *e) {
    const NearFar *c = e->c;
    if (!c->cross) add_up_segments(e);
    for (int64_t s = 0; s < e->N; s++) {
        const int tokens = in_block(e, s);
        if (!c->cross) other_segments(e, s);
        for (int i = 0; i < tokens; i += CHUNK) finish_keys(e, s * e->b + i, least_of(tokens - i, CHUNK));
    }
    for (int i = 0, k = 0; i < c->heavy; i++) {
        if (!c->there[e->z * c->heavy + i]) continue;
        const int64_t j = c->places[e->z * c->heavy + i];
        put_row(key_of(e, c->dy, j), c->factor, e->dkeys + k * e->dp, e->d);
        memcpy(key_of(e, c->dvalues, j), e->dvalues + k * e->lv, sizeof(float) * e->dv);
        k++;
    }
}
