/* Near-far attention of a sequence to itself in both directions, or to another one, for sets that have been chosen:
   the C version of Both.attend in nearfar/both.py, whose formulas and names these are. See near_far.h.

   One thread takes one head, block by block. Logits have keys as rows and the queries of a block as columns, so that
   keys and values are read as they lie and a softmax goes down the columns. In the sets N e^logit is the weight of a
   key and V e^logit what it adds. With G = [g, -g.out] the gradient to a logit of the window is e^logit G.[v, 1], of
   a set e^logit G.[V, N]; with values to first order, out = o + share C (x - tilt), G of the cells has g.C (x -
   tilt) more in its last column. */

#include "near_far.h"

enum { QUERIES = 64 };                 /* of a piece */

/* R queries of a piece, `most` at most; M = n + K shared keys: heavy ones, then the means mu of cells. A state (K, lv)
   holds sums [V, N] of u [v, 1] over the keys of some blocks. Logs and logits are in base 2. */
typedef struct {
    const NearFar *c;
    int64_t z, N;
    int d, dp, dv, lv, b, n, K, M, most;
    const uint8_t *pool;
    const int64_t *cell;
    const float *shift;
    float *u, *square, *sums;          /* (S), (S), (K, d + 2) */
    float *tilt, *root, *rootT, *moments;  /* (dp), (d, dp): root, its transpose, their product */
    float *centres, *off, *spread;     /* (K, dp) twice: centres, and means as z less these; (K) */
    float *keys, *values;              /* (M, dp), (M, lv): of shared keys; the values of cells are those for a block */
    float *bias, *high, *mass;         /* (M): of logits; powers of two above N; N */
    float *total, *before, *after;     /* states of all blocks; of those before a block that are far from it, (N, K, lv)
                                          of those behind */
    float *zs, *work;                  /* (CHUNK, dp), (K or CHUNK, dp or lv): keys of a chunk */
    float *slope, *slopeT, *weight;    /* (dv, dp), (d, lv), (K): C and e^(level - the highest) */
    float *doubles;                    /* (K, d + 2), of doubles */
    float *Y, *V, *hidden;             /* (S, dp or lv), (S): keys, 0 outside the pool, and [v, 1] */
    float *A, *B;                      /* (3 b + M, most): weights, and gradients to logits */
    float *Q, *X, *Qt, *O, *P;         /* (most, dp): queries, these less the tilt; (d, most); (most, dp or lv) twice */
    float *top, *scale, *part;         /* (most): log-sums; 1 / sums; shares of the cells */
    int64_t group[QUERIES], token[QUERIES];  /* of the queries of a piece */
    float *G, *Gt, *Gs;                /* (most, lv), (dv + 1, most), (most, lv) */
    float *dY, *dV, *dkeys, *dvalues;  /* gradients: as Y, V; (M, dp); (n, lv) */
    float *dstates, *dstate;           /* (N, K, lv): to the states that each block sees; (K, lv): a sum */
    float *dbias, *dsums;              /* (K); (K, dp + PAD): the mean |z - centre|^2 in column dp, N in dp + 1 */
    float *back;                       /* (K, dp): off root^T */
    float *dslope, *dslopeT;           /* as slope, slopeT */
    float *to_y, *to_v;                /* (CHUNK, dp or lv) */
    float dslope_slope;                /* their inner product, over the mass */
} Head;

INLINE int in_block(const Head *e, int64_t s) { return (int)least_of(e->c->S - s * e->b, e->b); }
INLINE float *key_of(const Head *e, View view, int64_t j) { return of(view, e->z, 0) + j * view.token; }

/* Scratch memory, constants and keys of head z. Returns 0 where memory ended. */
static int open_head(Head *e, const NearFar *c, int64_t z, int backward) {
    *e = (Head){.c = c, .z = z, .b = c->cross ? c->S : c->block, .K = c->cells};
    e->d = c->d, e->dp = up(c->d), e->dv = c->dv, e->lv = up(c->dv + 1);
    for (int i = 0; i < c->heavy; i++) e->n += c->there[z * c->heavy + i];
    e->N = (c->S + e->b - 1) / e->b, e->M = e->n + e->K;
    e->most = least_of(up(c->G * (c->cross ? c->L : e->b)), QUERIES);
    e->pool = c->pool + z * c->S, e->cell = c->cell + z * c->S, e->shift = c->shift + z * c->d;
    e->u = c->u + z * c->S, e->square = c->square + z * c->S;
    e->sums = c->sums + z * c->cells * (c->d + 2);
    const size_t d = e->d, dp = e->dp, dv = e->dv, lv = e->lv, K = e->K, M = e->M, most = e->most, S = c->S,
                 wide = lv > dp ? lv : dp, seen = (c->cross ? 0 : 3 * e->b) + M, back = backward,
                 slope = c->first_order;
    const Scratch pieces[] = {
        {&e->tilt, dp}, {&e->root, d * dp}, {&e->rootT, d * dp}, {&e->centres, K * dp}, {&e->off, K * dp},
        {&e->spread, K}, {&e->keys, M * dp}, {&e->values, M * lv}, {&e->bias, M}, {&e->high, M}, {&e->mass, M},
        {&e->total, K * lv}, {&e->before, K * lv}, {&e->after, e->N * K * lv},
        {&e->zs, CHUNK * dp}, {&e->work, (K > CHUNK ? K : CHUNK) * wide},
        {&e->slope, slope * dv * dp}, {&e->slopeT, slope * d * lv}, {&e->weight, K}, {&e->doubles, 2 * K * (d + 2)},
        {&e->Y, S * dp}, {&e->V, S * lv}, {&e->hidden, S}, {&e->A, seen * most},
        {&e->Q, most * dp}, {&e->X, most * dp}, {&e->Qt, d * most}, {&e->O, most * wide}, {&e->P, most * wide},
        {&e->top, most}, {&e->scale, most}, {&e->part, most},
        {&e->B, back * seen * most}, {&e->G, back * most * lv}, {&e->Gt, back * lv * most}, {&e->Gs, back * most * lv},
        {&e->dY, back * S * dp}, {&e->dV, back * S * lv}, {&e->dkeys, back * M * dp}, {&e->dvalues, back * e->n * lv},
        {&e->dstates, back * e->N * K * lv}, {&e->dstate, back * K * lv}, {&e->dbias, back * K},
        {&e->dsums, back * K * (dp + PAD)}, {&e->back, back * K * dp},
        {&e->moments, back * d * dp}, {&e->dslope, back * slope * dv * dp}, {&e->dslopeT, back * slope * d * lv},
        {&e->to_y, back * CHUNK * dp}, {&e->to_v, back * CHUNK * lv}};
    if (!take_scratch(pieces, sizeof pieces / sizeof *pieces)) return 0;
    const View root = {c->root + z * d * d, 0, 0, d}, centres = {c->centres + z * K * d, 0, 0, d};
    load_rows((View){c->tilt + z * d, 0, 0, d}, 0, 0, 0, 1, d, 1, NULL, NULL, e->tilt, dp);
    load_rows(root, 0, 0, 0, d, d, 1, NULL, NULL, e->root, dp);
    load_rows(centres, 0, 0, 0, K, d, 1, NULL, NULL, e->centres, dp);
    memset(e->rootT, 0, sizeof(float) * d * dp);
    transpose(d, d, e->root, dp, e->rootT, dp);
    load_rows(c->y, z, 0, 0, S, d, c->factor, e->shift, e->pool, e->Y, dp);
    load_rows(c->v, z, 0, 0, S, dv, 1, NULL, e->pool, e->V, lv);
    for (size_t j = 0; j < S; j++) {
        e->V[j * lv + dv] = 1;
        e->hidden[j] = e->pool[j] ? 0 : HIDDEN;
    }
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

/* ---- States ---- */

/* Adds u [v, 1] of the keys of block s to a state. */
static void add_block(const Head *e, int64_t s, float *state) {
    for (int64_t j = s * e->b, stop = j + in_block(e, s); j < stop; j++)
        if (e->u[j] > 0) add_row(state + e->cell[j] * e->lv, e->u[j], e->V + j * e->lv, e->lv);
}

/* The same of the gradients to the states of queries of block s. */
static void add_gradients(const Head *e, int64_t s, float *state) {
    add_row(state, 1, e->dstates + s * e->K * e->lv, e->K * e->lv);
}

/* What `add` adds up over the blocks that lie behind each block and are far from it, or over all where queries are
   of another sequence. What is there is added up, never a total less what is not: positive sums stay exactly 0 where
   no key is left, and large terms of near blocks leave no trace. */
INLINE void sum_states(Head *e, void (*add)(const Head *e, int64_t s, float *state)) {
    const size_t state = e->K * e->lv, size = sizeof(float) * state;
    memset(e->before, 0, size);
    memset(e->total, 0, size);
    for (int64_t t = e->N - 1; t >= 0; t--) {
        if (t + 2 < e->N) add(e, t + 2, e->total);
        memcpy(e->after + t * state, e->total, size);
    }
    for (int64_t t = 0; t < least_of(e->N, 2); t++) add(e, t, e->total);
    if (e->c->cross) memcpy(e->after, e->total, size);
}

/* To those of the blocks up to t - 2, in `before`, block t - 2 is added; `to` is their sum with those behind. */
INLINE void far_states(Head *e, int64_t t, void (*add)(const Head *e, int64_t s, float *state), float *to) {
    const float *after = e->after + t * e->K * e->lv;
    if (t >= 2) add(e, t - 2, e->before);
    for (int i = 0; i < e->K * e->lv; i += LANES) AT(to + i) = AT(e->before + i) + AT(after + i);
}

/* ---- Sums over the keys of a cell ---- */

/* Keys [start, start + n) as z less the centres of their cells. */
static void measure_keys(Head *e, int64_t start, int n) {
    product(ALL, n, e->d, e->d, e->Y + start * e->dp, e->dp, 1, e->root, e->dp, e->zs, e->dp, 0);
    for (int i = 0; i < n; i++) {
        const float *centre = e->centres + e->cell[start + i] * e->dp;
        float *z = e->zs + i * e->dp;
        for (int p = 0; p < e->dp; p += LANES) AT(z + p) -= AT(centre + p);
        for (int p = e->d; p < e->dp; p++) z[p] = 0;
    }
}

static void find_levels(Head *e, float *level) {
    for (int k = 0; k < e->K; k++) level[k] = -INFINITY;
    for (int64_t j = 0; j < e->c->S; j++) {
        float w = e->u[j] = dot(e->Y + j * e->dp, e->tilt, e->dp), *top = level + e->cell[j];
        if (e->pool[j] && w > *top) *top = w;
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

static void sum_cells(Head *e) {
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
            const float *y = e->Y + (t + i) * e->dp;
            double *to = sums + e->cell[t + i] * (d + 2);
            for (int p = 0; p < d; p++) to[p] += u[i] * y[p];
            to[d] += u[i] * e->square[t + i];
            to[d + 1] += u[i];
        }
    }
    for (int i = 0; i < e->K * (d + 2); i++) e->sums[i] = (float)sums[i];
}

/* ---- Cells as keys ---- */

static void place_cells(Head *e) {
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
    sum_states(e, add_block);
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

static void load_slope(Head *e) {
    const float *from = e->c->slope + e->z * e->dv * e->d;
    load_rows((View){(float *)from, 0, 0, e->d}, 0, 0, 0, e->dv, e->d, 1, NULL, NULL, e->slope, e->dp);
    transpose(e->dv, e->d, e->slope, e->dp, e->slopeT, e->lv);
}

static void find_slope(Head *e) {
    float *out = e->c->slope + e->z * e->dv * e->d;
    const float *mu = e->keys + e->n * e->dp, mass = weighted_values(e);
    product(ALL, e->dv, e->d, e->K, e->work, 1, e->lv, mu, e->dp, e->slope, e->dp, 0);
    for (int i = 0; i < e->dv * e->dp; i++) e->slope[i] *= -1;
    for (int64_t t = 0; t < e->c->S; t += CHUNK) {
        const int n = least_of(e->c->S - t, CHUNK);
        for (int i = 0; i < n; i++)
            put_row(e->work + i * e->lv, e->u[t + i] * e->weight[e->cell[t + i]], e->V + (t + i) * e->lv, e->lv);
        product(ALL, e->dv, e->d, n, e->work, 1, e->lv, e->Y + t * e->dp, e->dp, e->slope, e->dp, 1);
    }
    for (int q = 0; q < e->dv; q++)
        for (int p = 0; p < e->d; p++) out[q * e->d + p] = e->slope[q * e->dp + p] / mass;
    load_slope(e);
}

/* ---- Queries ---- */

/* A block of queries and its window: `near` keys from place `at` on. */
typedef struct {
    int64_t t, at;
    int tokens, near;
} Block;

static Block block_at(const Head *e, int64_t t) {
    if (e->c->cross) return (Block){.tokens = e->c->L};
    const int64_t from = t ? (t - 1) * e->b : 0, stop = least_of((t + 2) * e->b, e->c->S);
    return (Block){t, from, in_block(e, t), (int)(stop - from)};
}

/* What the cells weigh for block t: the masses N and the powers of two above them. */
static void take_states(Head *e, int64_t t) {
    far_states(e, t, add_block, e->values + e->n * e->lv);
    for (int k = e->n; k < e->M; k++) {
        const float N = e->values[k * e->lv + e->dv];
        e->mass[k] = N > LEAST ? N : 0;
        e->high[k] = N > LEAST ? (float)ilogbf(N) + 1 : HIDDEN;
    }
}

INLINE float *query_of(const Head *e, View view, int r) {
    return of(view, e->z, e->group[r]) + e->token[r] * view.token;
}

INLINE int64_t number_of(const Head *e, int r) { return (e->z * e->c->G + e->group[r]) * e->c->L + e->token[r]; }

/* Queries [i, i + R) of a block, those of one query head after the other, and the logits of their keys, less biases. */
static void load_queries(Head *e, const Block *at, int i, int R) {
    const int ld = up(R);
    for (int r = 0, g = i / at->tokens, t = i % at->tokens; r < R; r++) {
        e->group[r] = g, e->token[r] = at->t * e->b + t;
        if (++t == at->tokens) t = 0, g++;
    }
    memset(e->Q + R * e->dp, 0, sizeof(float) * (ld - R) * e->dp);
    for (int r = 0; r < R; r++) {
        float *q = e->Q + r * e->dp;
        put_row(q, e->c->factor, query_of(e, e->c->x, r), e->d);
        for (int p = e->d; p < e->dp; p++) q[p] = 0;
        for (int p = 0; p < e->dp; p += LANES) AT(e->X + r * e->dp + p) = AT(q + p) - AT(e->tilt + p);
    }
    transpose(ld, e->d, e->Q, e->dp, e->Qt, ld);
    for (int j = 0; j < e->d * ld; j += LANES) AT(e->Qt + j) *= LOG2E;
    product(ALL, at->near, ld, e->d, e->Y + at->at * e->dp, e->dp, 1, e->Qt, ld, e->A, ld, 0);
    product(ALL, e->M, ld, e->d, e->keys, e->dp, 1, e->Qt, ld, e->A + at->near * ld, ld, 0);
}

/* Of column j of the logits: no term of a sum of exponentials is larger. What is left in cells lies below what is
   read. */
INLINE vec highest(const Head *e, const Block *at, int ld, int j) {
    const float *hidden = e->hidden + at->at, *A = e->A + j;
    vec top = {0};
    top += HIDDEN;
    for (int i = 0; i < at->near; i++, A += ld) top = maximum(top, AT(A) + hidden[i]);
    for (int i = 0; i < e->M; i++, A += ld) top = maximum(top, AT(A) + (e->bias[i] + e->high[i]));
    return top;
}

/* Logits of column j become e^(logit - top), in binary units. The sums of all weights, and of those of cells. */
INLINE void exponentiate(Head *e, const Block *at, int ld, int j, vec top, vec *all, vec *cells) {
    const float *hidden = e->hidden + at->at;
    const vec most = (vec){0} + 126.0f;
    float *A = e->A + j;
    vec sum = {0}, far = {0};
    for (int i = 0; i < at->near; i++, A += ld) sum += AT(A) = exp2_of(minimum(AT(A) + hidden[i] - top, most));
    for (int i = 0; i < e->M; i++, A += ld) {
        vec weight = AT(A) = e->mass[i] > 0 ? exp2_of(minimum(AT(A) + e->bias[i] - top, most)) : (vec){0};
        if (i < e->n) sum += weight;
        else far += e->mass[i] * weight;
    }
    *all = sum + far, *cells = far;
}

/* Takes all queries, piece by piece, through `each`. */
INLINE void take_queries(Head *e, void (*each)(Head *e, const Block *at, int i, int R)) {
    for (int64_t t = 0; t < e->N; t++) {
        const Block at = block_at(e, t);
        const int all = at.tokens * e->c->G;
        take_states(e, t);
        for (int i = 0; i < all; i += QUERIES) each(e, &at, i, all - i < QUERIES ? all - i : QUERIES);
    }
}

/* ---- Forward ---- */

static void attend(Head *e, const Block *at, int i, int R) {
    const int ld = up(R), lv = e->lv, dv = e->dv;
    load_queries(e, at, i, R);
    for (int j = 0; j < ld; j += LANES) AT(e->top + j) = highest(e, at, ld, j);
    for (int j = 0; j < ld; j += LANES) {
        vec all, far;
        exponentiate(e, at, ld, j, AT(e->top + j), &all, &far);
        AT(e->scale + j) = all, AT(e->part + j) = far;
    }
    product(ALL, R, dv, at->near, e->A, 1, ld, e->V + at->at * lv, lv, e->O, lv, 0);
    product(ALL, R, dv, e->M, e->A + at->near * ld, 1, ld, e->values, lv, e->O, lv, at->near > 0);
    for (int j = 0; j < ld; j += LANES) {
        const vec all = AT(e->scale + j);
        AT(e->scale + j) = choose(all > 0.0f, 1.0f / all, (vec){0});    /* across, a query may see no key */
        AT(e->part + j) *= AT(e->scale + j);
    }
    if (e->c->first_order) product(ALL, R, dv, e->d, e->X, e->dp, 1, e->slopeT, lv, e->P, lv, 0);
    for (int r = 0; r < R; r++) {
        float *out = query_of(e, e->c->out, r);
        const int64_t number = number_of(e, r);
        for (int p = 0; p < dv; p++) out[p] = e->O[r * lv + p] * e->scale[r];
        if (e->c->first_order) add_row(out, e->part[r], e->P + r * lv, dv);
        e->c->logsum[number] = e->scale[r] > 0 ? e->top[r] - log2f(e->scale[r]) : HIDDEN;
        e->c->share[number] = e->part[r];
    }
}

static void forward_head(Head *e) {
    sum_cells(e);
    place_cells(e);
    if (e->c->first_order) find_slope(e);
    take_queries(e, attend);
}

/* ---- Backward: queries ---- */

/* G, transposed too; and with values to first order Gs = share g, P = C^T g and in `scale` g.C (x - tilt). */
static void load_gradients(Head *e, int R) {
    const int ld = up(R), lv = e->lv, dv = e->dv;
    for (int r = 0; r < R; r++) {
        float *g = e->G + r * lv;
        const int64_t number = number_of(e, r);
        memcpy(g, query_of(e, e->c->grad, r), sizeof(float) * dv);
        g[dv] = -dot(g, query_of(e, e->c->out, r), dv);
        e->top[r] = e->c->logsum[number];
        e->part[r] = e->c->share[number];
        for (int p = 0; p < lv && e->c->first_order; p += LANES) AT(e->Gs + r * lv + p) = e->part[r] * AT(g + p);
    }
    for (int r = R; r < ld; r++) e->top[r] = 0;
    memset(e->G + R * lv, 0, sizeof(float) * (ld - R) * lv);
    transpose(ld, dv + 1, e->G, lv, e->Gt, ld);
    if (!e->c->first_order) return;
    product(ALL, R, e->d, dv, e->G, lv, 1, e->slope, e->dp, e->P, e->dp, 0);
    for (int r = 0; r < R; r++) e->scale[r] = dot(e->P + r * e->dp, e->X + r * e->dp, e->d);
}

/* The last column of G for the cells. */
static void turn_to_cells(Head *e, int R) {
    const int ld = up(R);
    for (int r = 0; r < R && e->c->first_order; r++) {
        e->G[r * e->lv + e->dv] += e->scale[r];
        e->Gt[e->dv * ld + r] += e->scale[r];
    }
}

/* Gradients B to logits: those to the terms times these. */
static void logits_backward(Head *e, const Block *at, int ld) {
    const int rows = at->near + e->M;
    for (int64_t i = 0; i < (int64_t)rows * ld; i += LANES) AT(e->B + i) *= AT(e->A + i);
    for (int k = 0; k < e->K; k++) {
        const float *from = e->B + (at->near + e->n + k) * ld;
        vec sum = {0};
        for (int j = 0; j < ld; j += LANES) sum += AT(from + j);
        e->dbias[k] += total(sum);
    }
}

static void attend_backward(Head *e, const Block *at, int i, int R) {
    const int ld = up(R), lv = e->lv, dv = e->dv, dp = e->dp, d = e->d, near = at->near;
    float *A = e->A + near * ld, *B = e->B + near * ld, *cells_A = A + e->n * ld, *cells_B = B + e->n * ld;
    load_queries(e, at, i, R);
    load_gradients(e, R);
    for (int j = 0; j < ld; j += LANES) {
        vec all, cells;
        exponentiate(e, at, ld, j, AT(e->top + j), &all, &cells);
    }
    product(ALL, near, ld, dv + 1, e->V + at->at * lv, lv, 1, e->Gt, ld, e->B, ld, 0);
    product(ALL, e->n, ld, dv + 1, e->values, lv, 1, e->Gt, ld, B, ld, 0);
    turn_to_cells(e, R);
    product(ALL, e->K, ld, dv + 1, e->values + e->n * lv, lv, 1, e->Gt, ld, cells_B, ld, 0);
    logits_backward(e, at, ld);

    product(ALL, near, dv, R, e->A, ld, 1, e->G, lv, e->dV + at->at * lv, lv, 1);
    product(ALL, e->n, dv, R, A, ld, 1, e->G, lv, e->dvalues, lv, 1);
    product(ALL, e->K, dv + 1, R, cells_A, ld, 1, e->G, lv, e->dstates + at->t * e->K * lv, lv, i > 0);
    product(ALL, near, d, R, e->B, ld, 1, e->Q, dp, e->dY + at->at * dp, dp, 1);
    float *dx = e->O;
    if (e->c->first_order) {
        product(ALL, dv, d, R, e->Gs, 1, lv, e->X, dp, e->dslope, dp, 1);
        for (int r = 0; r < R; r++)
            for (int p = 0; p < dp; p += LANES) AT(dx + r * dp + p) = e->part[r] * AT(e->P + r * dp + p);
    }
    else memset(dx, 0, sizeof(float) * R * dp);
    product(ALL, R, d, near, e->B, 1, ld, e->Y + at->at * dp, dp, dx, dp, 1);
    product(ALL, e->M, d, R, B, ld, 1, e->Q, dp, e->dkeys, dp, 1);
    product(ALL, R, d, e->M, B, 1, ld, e->keys, dp, dx, dp, 1);
    for (int r = 0; r < R; r++) put_row(query_of(e, e->c->dx, r), e->c->factor, dx + r * dp, d);
}

/* ---- Backward: keys ---- */

/* From the gradient to C (dv, d), over the mass, to that to the means; and what the gradients to keys need of it. */
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

/* Turns the gradients to means, biases and slope into those to sums. */
static void sums_backward(Head *e) {
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

/* What the log weight of key j, the i-th of a chunk, gains from the gradient to its far state; and to its value. */
static float weight_backward(Head *e, int64_t j, int i) {
    const int64_t k = e->cell[j];
    const int dp = e->dp, dv = e->dv;
    const float u = e->u[j], *state = e->dstate + k * e->lv, *sums = e->dsums + k * (dp + PAD),
                *v = e->V + j * e->lv;
    float *to = e->dV + j * e->lv;
    float gain = dot(state, v, dv + 1) + dot(sums, e->Y + j * dp, dp) + sums[dp] * e->square[j] + sums[dp + 1];
    add_row(to, u, state, dv);
    if (!e->c->first_order) return u * gain;
    const float g = e->weight[k], *slope = e->to_v + i * e->lv;
    gain += g * (dot(slope, v, dv) - e->dslope_slope);
    add_row(to, u * g, slope, dv);
    return u * gain;
}

/* Adds what the gradients to far states, in dstate, and to the sums give to those of n keys of one block. z - centre
   = (y - mu) root + off; with values to first order to_v = (y - mu) D^T for the gradient D to C. */
static void finish_keys(Head *e, int64_t start, int n) {
    const int dp = e->dp, lv = e->lv, slope = e->c->first_order;
    const float *mu = e->keys + e->n * dp;
    for (int i = 0; i < n; i++)
        for (int p = 0; p < dp; p += LANES)
            AT(e->work + i * dp + p) = AT(e->Y + (start + i) * dp + p) - AT(mu + e->cell[start + i] * dp + p);
    product(ALL, n, e->d, e->d, e->work, dp, 1, e->moments, dp, e->to_y, dp, 0);
    if (slope) product(ALL, n, e->dv, e->d, e->work, dp, 1, e->dslopeT, lv, e->to_v, lv, 0);
    for (int i = 0; i < n; i++) {
        const int64_t j = start + i, k = e->cell[j];
        const float u = e->u[j], *sums = e->dsums + k * (dp + PAD), twice = 2 * u * sums[dp];
        const float gain = u > 0 ? weight_backward(e, j, i) : 0;
        for (int p = 0; p < dp; p += LANES) {
            const vec step = AT(e->to_y + i * dp + p) + AT(e->back + k * dp + p);
            AT(e->to_y + i * dp + p) = twice * step + u * AT(sums + p) + gain * AT(e->tilt + p);
        }
        if (slope) put_row(e->work + i * lv, u * e->weight[k], e->V + j * lv, lv);
    }
    if (slope) product(ALL, n, e->d, e->dv, e->work, lv, 1, e->dslope, dp, e->to_y, dp, 1);
    for (int i = 0; i < n; i++)
        if (e->u[start + i] > 0) add_row(e->dY + (start + i) * dp, 1, e->to_y + i * dp, dp);
}

static void backward_head(Head *e) {
    const NearFar *c = e->c;
    const int dp = e->dp, lv = e->lv;
    place_cells(e);
    if (c->first_order) load_slope(e);
    memset(e->dY, 0, sizeof(float) * c->S * dp);
    memset(e->dV, 0, sizeof(float) * c->S * lv);
    memset(e->dkeys, 0, sizeof(float) * e->M * dp);
    memset(e->dvalues, 0, sizeof(float) * e->n * lv);
    memset(e->dbias, 0, sizeof(float) * e->K);
    if (c->first_order) memset(e->dslope, 0, sizeof(float) * e->dv * dp);
    take_queries(e, attend_backward);
    sums_backward(e);
    sum_states(e, add_gradients);
    for (int64_t s = 0; s < e->N; s++) {
        far_states(e, s, add_gradients, e->dstate);
        for (int i = 0, tokens = in_block(e, s); i < tokens; i += CHUNK)
            finish_keys(e, s * e->b + i, least_of(tokens - i, CHUNK));
    }
    for (int i = 0, k = 0; i < c->heavy; i++) {
        if (!c->there[e->z * c->heavy + i]) continue;
        const int64_t j = c->places[e->z * c->heavy + i];
        memcpy(e->dY + j * dp, e->dkeys + k * dp, sizeof(float) * dp);
        memcpy(e->dV + j * lv, e->dvalues + k++ * lv, sizeof(float) * lv);
    }
    for (int64_t j = 0; j < c->S; j++) {
        put_row(key_of(e, c->dy, j), c->factor, e->dY + j * dp, e->d);
        memcpy(key_of(e, c->dvalues, j), e->dV + j * lv, sizeof(float) * e->dv);
    }
}

/* ---- All heads ---- */

static int run(const NearFar *c, int backward, void (*body)(Head *e)) {
    int bad = OK;
#pragma omp parallel num_threads((int)c->threads) reduction(max : bad)
    {
        const unsigned mode = without_denormals();
#pragma omp for schedule(dynamic)
        for (int64_t z = 0; z < c->Z; z++) {
            Head e;
            if (open_head(&e, c, z, backward)) body(&e);
            else bad = NO_MEMORY;
        }
        with_mode(mode);
        trim_scratch();      /* behind the last head: fresh memory for each one takes longer */
    }
    return bad;
}

int near_far(const NearFar *c) { return run(c, 0, forward_head); }

int near_far_backward(const NearFar *c) { return run(c, 1, backward_head); }
