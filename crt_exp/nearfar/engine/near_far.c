/* Near-far attention of a sequence to itself in both directions, or to another one, for sets that have been chosen: the
   twin of Both.attend in nearfar/both.py, whose formulas (engine/sets.py) and names these are.

   One thread takes one head, block by block. Logits have keys as rows and the queries of a block as columns, so that
   keys and values are read as they lie and a softmax goes down the columns. What cells weigh for block t is the state
   of the blocks up to t - 2, added up on the way, and of those from t + 2 on, which is added up from the end: one state
   a segment of blocks is kept, those within are made again. In the sets N e^logit is the weight of a key and V e^logit
   what it adds. With G = [g, -g.out] the gradient to a logit of the window is e^logit G.[v, 1], of a set
   e^logit G.[V, N]; with values to first order, out = o + share C (x - tilt), G of the cells has g.C (x - tilt) more
   in its last column. */

#include "head.h"

/* ---- Keys around a segment ---- */

/* Blocks first - 1 to first + T as Y, V = [v, 1] and hidden. */
static void load_segment(Head *e, int64_t first) {
    const int64_t start = (first - 1) * e->b, from = start < 0 ? 0 : start, at = from - start;
    const int64_t stop = least_of((first + e->T + 1) * e->b, e->c->S);
    load_rows(e->c->y, e->z, 0, from, stop - from, e->d, e->c->factor, e->shift, e->pool, e->Y + at * e->dp, e->dp);
    load_rows(e->c->v, e->z, 0, from, stop - from, e->dv, 1, NULL, e->pool, e->V + at * e->lv, e->lv);
    for (int64_t j = from; j < stop; j++) {
        e->V[(j - start) * e->lv + e->dv] = 1;
        e->hidden[j - start] = e->pool[j] ? 0 : HIDDEN;
    }
}

/* Of the states of cells in `values`, the masses N and the powers of two above them. */
static void weigh_states(Head *e) {
    for (int k = e->n; k < e->M; k++) {
        const float N = e->values[k * e->lv + e->dv];
        e->mass[k] = N > LEAST ? N : 0;
        e->high[k] = N > LEAST ? (float)ilogbf(N) + 1 : HIDDEN;
    }
}

/* What the cells weigh for block t of the segment that begins at `first`. */
static void take_states(Head *e, int64_t first, int64_t t) {
    if (t >= 2) add_block(e, t - 2, e->before);
    const float *after = e->after + (t - first) * e->K * e->lv;
    float *to = e->values + e->n * e->lv;
    for (int i = 0; i < e->K * e->lv; i += LANES) AT(to + i) = AT(e->before + i) + AT(after + i);
    weigh_states(e);
}

/* What they weigh where no block is near. */
static void take_total(Head *e) {
    memcpy(e->values + e->n * e->lv, e->total, sizeof(float) * e->K * e->lv);
    weigh_states(e);
}

/* A block of queries and its window: `near` keys from row `at` of the segment. */
typedef struct {
    int64_t t;
    int tokens, at, near;
} Block;

static Block block_at(const Head *e, int64_t first, int64_t t) {
    const int64_t from = t ? t - 1 : 0, stop = least_of((t + 2) * e->b, e->c->S);
    return (Block){t, in_block(e, t), (int)((from - first + 1) * e->b), (int)(stop - from * e->b)};
}

/* ---- Queries ---- */

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

/* Of column j of the logits: no term of a sum of exponentials is larger. What is left in cells lies below what is read. */
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

/* Takes the queries of segment g, piece by piece, through `each`; returns the block behind its last. */
INLINE int64_t take_segment(Head *e, int64_t g, void (*each)(Head *e, const Block *at, int i, int R)) {
    const int64_t first = g * e->T, stop = least_of(first + e->T, e->N);
    load_segment(e, first);
    states_of_segment(e, g);
    for (int64_t t = first; t < stop; t++) {
        const Block at = block_at(e, first, t);
        const int all = at.tokens * e->c->G;
        take_states(e, first, t);
        for (int i = 0; i < all; i += QUERIES) each(e, &at, i, all - i < QUERIES ? all - i : QUERIES);
    }
    return stop;
}

/* Takes all queries of another sequence, piece by piece, through `each`: one block that has no window. */
INLINE void take_others(Head *e, void (*each)(Head *e, const Block *at, int i, int R)) {
    const Block at = {.tokens = e->c->L};
    const int all = e->c->L * e->c->G;
    take_total(e);
    for (int i = 0; i < all; i += QUERIES) each(e, &at, i, all - i < QUERIES ? all - i : QUERIES);
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
    if (e->c->cross) {
        take_others(e, attend);
        return;
    }
    memset(e->before, 0, sizeof(float) * e->K * e->lv);
    for (int64_t g = 0; g < e->segments; g++) take_segment(e, g, attend);
}

/* ---- Backward ---- */

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
    product(ALL, e->K, dv + 1, R, cells_A, ld, 1, e->G, lv, e->dstates + at->t % e->T * e->K * lv, lv, i > 0);
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

/* Writes the gradients to the keys of block s as far as near queries and the states of its segment give them.
   row: where they begin in dY. */
static void flush(Head *e, int64_t s, int row) {
    for (int i = 0; i < in_block(e, s); i++) {
        const int64_t j = s * e->b + i;
        put_row(key_of(e, e->c->dy, j), e->c->factor, e->dY + (row + i) * e->dp, e->d);
        memcpy(key_of(e, e->c->dvalues, j), e->dV + (row + i) * e->lv, sizeof(float) * e->dv);
    }
}

/* Moves the last two blocks of gradients to the keys of a segment, which are not whole yet, to the front of the next
   segment's. */
static void turn_segment(Head *e) {
    const size_t rows = 2 * (size_t)e->b, from = (size_t)e->T * e->b;
    memmove(e->dY, e->dY + from * e->dp, sizeof(float) * rows * e->dp);
    memmove(e->dV, e->dV + from * e->lv, sizeof(float) * rows * e->lv);
    memset(e->dY + rows * e->dp, 0, sizeof(float) * from * e->dp);
    memset(e->dV + rows * e->lv, 0, sizeof(float) * from * e->lv);
}

static void begin_backward(Head *e) {
    const size_t rows = (size_t)(e->T + 2) * e->b, state = sizeof(float) * e->K * e->lv;
    memset(e->before, 0, state);
    memset(e->dY, 0, sizeof(float) * rows * e->dp);
    memset(e->dV, 0, sizeof(float) * rows * e->lv);
    memset(e->dkeys, 0, sizeof(float) * e->M * e->dp);
    memset(e->dvalues, 0, sizeof(float) * e->n * e->lv);
    memset(e->dbias, 0, sizeof(float) * e->K);
    if (e->c->first_order) memset(e->dslope, 0, sizeof(float) * e->dv * e->dp);
}

static void segments_backward(Head *e) {
    for (int64_t g = 0; g < e->segments; g++) {
        const int64_t first = g * e->T, stop = take_segment(e, g, attend_backward);
        states_backward(e, g);
        const int64_t whole = stop == e->N ? stop : stop - 1;
        for (int64_t s = first ? first - 1 : 0; s < whole; s++) flush(e, s, (s - first + 1) * e->b);
        turn_segment(e);
    }
}

/* No key is near: what the queries give to keys is in the gradient to the one state. */
static void others_backward(Head *e) {
    take_others(e, attend_backward);
    memcpy(e->dstate, e->dstates, sizeof(float) * e->K * e->lv);
    memset(e->rest, 0, sizeof(float) * e->c->S);
    for (int64_t s = 0; s < e->N; s++) flush(e, s, 0);       /* dY and dV are 0 */
}

static void backward_head(Head *e) {
    place_cells(e);
    if (e->c->first_order) load_slope(e);
    begin_backward(e);
    if (e->c->cross) others_backward(e);
    else segments_backward(e);
    sums_backward(e);
    keys_backward(e);
}

/* ---- All heads ---- */

static int run(const NearFar *c, int backward, void (*body)(Head *e)) {
    int bad = OK;
#pragma omp parallel for schedule(dynamic) num_threads((int)c->threads) reduction(max : bad)
    for (int64_t z = 0; z < c->Z; z++) {
        const unsigned mode = without_denormals();
        Head e;
        if (open_head(&e, c, z, backward)) body(&e);
        else bad = NO_MEMORY;
        with_mode(mode);
        trim_scratch();
    }
    return bad;
}

int near_far_forward(const NearFar *c) { return run(c, 0, forward_head); }

int near_far_backward(const NearFar *c) { return run(c, 1, backward_head); }
