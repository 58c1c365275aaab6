/* One head of attention with positive exponential features, on one thread: memory, vectors and features.

   Logs are in base 2. The maximum is subtracted before each exponential. Queries use the maximum of their row. Keys
   use the running maximum of each feature, `ref`. When `ref` rises, older sums are multiplied by
   exp2(ref - new_ref) <= 1.

   Notation: n tokens of a chunk, M features, d and dv columns of vectors and values. X, Y (n, d); V = [v, 1] and G =
   [g, grad_logsum - g.output] (n, dv + 1); Q, K (n, M) features; S = K' V the state, stored as (dv + 1, M); D
   gradients of features. Matrices with M columns have row stride `ld`, those with dv + 1 columns `lv`; padding is 0. */

#pragma once

#include "vectors.h"

static const float EMPTY_REF = -1e30f;    /* reference before the first key */
static const float MAX_SQUARE = 1e29f;    /* bound on squared norms and offsets: a larger key would count as masked */
static const float EMPTY_LOGSUM = 1e30f;  /* log-sum of a row without keys: the backward pass sets its features to 0 */

typedef struct {
    int64_t B, H, L, S, d, dv, M, segment, threads;
    double norm_weight;
    View x, y, v, rows, scale, bias, out, logsum, states, logs, grad, dlogsum, dx, dy, dvalues,
        dweights, dbias;  /* null unless the map learns */
    const uint8_t *keep;  /* (B, S), or null */
    uint8_t *levels;      /* (B, H, chunks): 1 if a chunk was processed token by token */
} Call;

typedef struct {
    const Call *c;
    int64_t b, h, part, parts;              /* this thread's part of the tokens; number of parts */
    float *partial_sums;                    /* of all parts of all heads */
    int d, dp, dv, dvp, lv, M, Mp, ld;      /* dp, dvp, lv, Mp: rounded up to PAD */
    float *w, *w2, *wt;                     /* projections (M, dp), natural and binary logs; w2' (d, ld) */
    float *bias;                            /* (Mp): twice the bias for queries; -inf for padding */
    float *X, *Y, *V, *G, *dx, *dvalues;    /* (CHUNK, dp or lv) */
    float *Yt, *Vt, *A, *dA;                /* (d, CHUNK), (dv + 1, CHUNK), (CHUNK, CHUNK) twice */
    float *Q, *K, *Kt, *D;                  /* (CHUNK, ld); Kt (Mp, CHUNK) */
    float *S, *St, *dS;                     /* (dv + 1, ld), transposed state (Mp, lv), (dv + 1, ld) */
    float *ref, *new_ref, *factor, *offset;   /* (Mp) */
    float *token_offset, *row_max, *row_sum;  /* (CHUNK) */
    float *dW, *db;                         /* (d, ld), (Mp): gradients of learned projections */
    float *pieces;                          /* of a segment, for the causal backward pass */
    int error;
} Head;

typedef struct {
    int64_t start, stop;
} Range;

/* Returns this thread's range of n tokens, in whole chunks. */
static Range part_range(const Head *e, int64_t n) {
    const int64_t chunks = (n + CHUNK - 1) / CHUNK, stop = chunks * (e->part + 1) / e->parts * CHUNK;
    return (Range){chunks * e->part / e->parts * CHUNK, stop < n ? stop : n};
}

INLINE float *token_ptr(const Head *e, View t, int64_t token) { return head_ptr(t, e->b, e->h) + token * t.token; }

/* Number of floats that the causal backward pass stores for a piece of `size` tokens: see Piece. */
static size_t piece_floats(const Head *e, int size) {
    return ((size_t)(e->dv + 1 + size) * e->ld + 2 * e->Mp + PAD - 1) / PAD * PAD;
}

/* Allocates scratch memory and loads the projections of head `index` of B x H. Returns 0 if out of memory. */
static int init_head(Head *e, const Call *c, int64_t index) {
    e->c = c, e->b = index / c->H, e->h = index % c->H, e->error = OK;
    e->d = c->d, e->dp = round_up(c->d), e->dv = c->dv, e->dvp = round_up(c->dv), e->lv = round_up(c->dv + 1);
    e->M = c->M, e->Mp = round_up(c->M), e->ld = e->Mp + PAD;  /* a power-of-two stride would cause cache conflicts */
    int dp = e->dp, ld = e->ld, lv = e->lv, Mp = e->Mp;
    const int needs_pieces = c->levels && c->dx.data, learnable = c->dweights.data != NULL;
    const Scratch buffers[] = {
        {&e->w, (size_t)Mp * dp}, {&e->w2, (size_t)Mp * dp}, {&e->wt, (size_t)e->d * ld}, {&e->bias, Mp},
        {&e->X, CHUNK * dp}, {&e->Y, CHUNK * dp}, {&e->V, CHUNK * lv}, {&e->G, CHUNK * lv}, {&e->dx, CHUNK * dp},
        {&e->dvalues, CHUNK * lv}, {&e->Yt, (size_t)dp * CHUNK}, {&e->Vt, (size_t)lv * CHUNK}, {&e->A, CHUNK * CHUNK},
        {&e->dA, CHUNK * CHUNK}, {&e->Q, (size_t)CHUNK * ld}, {&e->K, (size_t)CHUNK * ld}, {&e->Kt, (size_t)CHUNK * Mp},
        {&e->D, (size_t)CHUNK * ld}, {&e->S, (size_t)(e->dv + 1) * ld}, {&e->St, (size_t)Mp * lv},
        {&e->dS, (size_t)(e->dv + 1) * ld}, {&e->ref, Mp}, {&e->new_ref, Mp}, {&e->factor, Mp}, {&e->offset, Mp},
        {&e->token_offset, CHUNK}, {&e->row_max, CHUNK}, {&e->row_sum, CHUNK},
        {&e->dW, learnable ? (size_t)e->d * ld : 0}, {&e->db, learnable ? Mp : 0},
        {&e->pieces, needs_pieces ? piece_floats(e, CHUNK) * (c->segment / CHUNK) : 0}};
    if (!allocate_scratch(buffers, sizeof buffers / sizeof *buffers)) return 0;
    float scale = *head_ptr(c->scale, e->b, e->h), *bias = head_ptr(c->bias, e->b, e->h);
    const Scratch zeros[] = {{&e->wt, e->d * ld}, {&e->w, Mp * dp}, {&e->X, CHUNK * dp}, {&e->Y, CHUNK * dp},
                             {&e->V, CHUNK * lv}, {&e->G, CHUNK * lv}, {&e->Yt, CHUNK * dp}, {&e->Vt, CHUNK * lv},
                             {&e->dW, learnable ? e->d * ld : 0}, {&e->db, learnable ? Mp : 0}};
    for (size_t i = 0; i < sizeof zeros / sizeof *zeros; i++)
        memset(*zeros[i].pointer, 0, sizeof(float) * zeros[i].count);
    for (int m = 0; m < e->M; m++) {
        const float *from = token_ptr(e, c->rows, m);
        for (int p = 0; p < e->d; p++) e->w[m * dp + p] = from[p] * scale;
    }
    for (int i = 0; i < Mp * dp; i++) e->w2[i] = e->w[i] * LOG2E;
    transpose(e->M, e->d, e->w2, dp, e->wt, ld);
    for (int m = 0; m < Mp; m++) e->bias[m] = m < e->M ? 2 * bias[m] * LOG2E : -INFINITY;
    for (int m = 0; m < e->M; m++)
        if (!isfinite(squared_norm(e->w2 + m * dp, dp)) || !isfinite(e->bias[m])) e->error = BAD_DIRECTIONS;
    return 1;
}

/* Loads rows [start, start + n) of a tensor with d columns; `to` has row stride ld. */
static void load_tokens(const Head *e, View t, int64_t start, int n, int d, float *to, int ld) {
    for (int i = 0; i < n; i++) memcpy(to + i * ld, token_ptr(e, t, start + i), sizeof(float) * d);
}

static void store_tokens(const Head *e, View t, int64_t start, int n, int d, const float *from, int ld) {
    for (int i = 0; i < n; i++) memcpy(token_ptr(e, t, start + i), from + i * ld, sizeof(float) * d);
}

static int masked(const Head *e, int64_t key) { return e->c->keep && !e->c->keep[e->b * e->c->S + key]; }

/* Loads X. Sets `error` if X is not finite. */
static void load_queries(Head *e, int64_t start, int n) {
    load_tokens(e, e->c->x, start, n, e->d, e->X, e->dp);
    for (int i = 0; i < n; i++)
        if (!(squared_norm(e->X + i * e->dp, e->dp) < MAX_SQUARE)) e->error = NOT_FINITE;
}

/* Loads Y, V and the offsets -norm_weight |y|^2. Masked keys are 0 with offset -inf. */
static void load_keys(Head *e, int64_t start, int n) {
    load_tokens(e, e->c->y, start, n, e->d, e->Y, e->dp);
    load_tokens(e, e->c->v, start, n, e->dv, e->V, e->lv);
    for (int j = 0; j < n; j++) {
        float *y = e->Y + j * e->dp, *v = e->V + j * e->lv;
        if (masked(e, start + j)) {
            memset(y, 0, sizeof(float) * e->d);
            memset(v, 0, sizeof(float) * e->dv);
            e->token_offset[j] = -INFINITY;
        } else {
            float square = squared_norm(y, e->dp);
            e->token_offset[j] = -(float)e->c->norm_weight * LOG2E * square;
            if (!(e->token_offset[j] > -MAX_SQUARE)) e->error = NOT_FINITE;
        }
        v[e->dv] = 1;
    }
}

/* G = [g, gradient of the log-sum - g.output]. */
static void load_gradients(Head *e, int64_t start, int n) {
    load_tokens(e, e->c->grad, start, n, e->dv, e->G, e->lv);
    for (int i = 0; i < n; i++) {
        const float *g = e->G + i * e->lv, *out = token_ptr(e, e->c->out, start + i);
        const float dlogsum = e->c->dlogsum.data ? *token_ptr(e, e->c->dlogsum, start + i) : 0;
        e->G[i * e->lv + e->dv] = dlogsum - dot(g, out, e->dv);
    }
}

/* F (n, ld) = W x of n tokens. */
static void project(const Head *e, int n, const float *x, float *F) {
    matmul(FULL, n, e->Mp, e->d, x, e->dp, 1, e->wt, e->ld, F, e->ld, 0);
}

/* new_ref = max(ref, maximum over keys of K + token_offset). */
static void update_reference(Head *e, int n, const float *ref, float *new_ref) {
    for (int m = 0; m < e->Mp; m += LANES) {
        vec top = AT(ref + m);
        for (int j = 0; j < n; j++) top = maximum(top, AT(e->K + j * e->ld + m) + e->token_offset[j]);
        AT(new_ref + m) = top;
    }
}

/* factor = exp2(from - to). Returns whether any factor differs from 1. */
static int rescale_factors(int Mp, const float *from, const float *to, float *factor) {
    int changed = 0;
    for (int m = 0; m < Mp; m++) changed |= from[m] != to[m];
    if (changed)
        for (int m = 0; m < Mp; m += LANES) AT(factor + m) = exp2_vec(AT(from + m) - AT(to + m));
    return changed;
}

/* Multiplies the columns of a matrix (dv + 1, ld) by `factor`. */
static void scale_columns(const Head *e, const float *from, const float *factor, float *to) {
    for (int i = 0; i <= e->dv; i++)
        for (int m = 0; m < e->Mp; m += LANES) AT(to + i * e->ld + m) = AT(from + i * e->ld + m) * AT(factor + m);
}

/* Features of n tokens: F = exp2(F + token_offset + sign offset). */
static void exponentiate(const Head *e, int n, float *F, const float *token_offset, const float *offset, float sign) {
    const vec limit = (vec){0} + 127.0f;
    for (int i = 0; i < n; i++) {
        float *f = F + (int64_t)i * e->ld;
        for (int m = 0; m < e->Mp; m += LANES) {
            vec t = AT(f + m) + token_offset[i] + sign * AT(offset + m);
            AT(f + m) = exp2_vec(minimum(t, limit));  /* exact t < 84; rounding grows with the norms */
        }
    }
}

/* Features of queries: Q = exp2(logs + offset - row_max), row_sum = sum_m Q_m weight_m (null: weights 1). */
static void query_features(Head *e, int n, const float *offset, const float *weight) {
    project(e, n, e->X, e->Q);
    for (int i = 0; i < n; i++) {
        float *q = e->Q + (int64_t)i * e->ld;
        vec top = AT(q) + AT(offset), sum = {0};
        for (int m = 0; m < e->Mp; m += LANES) {
            AT(q + m) += AT(offset + m);
            top = maximum(top, AT(q + m));
        }
        float maximum_log = e->row_max[i] = reduce_max(top);
        for (int m = 0; m < e->Mp; m += LANES) {
            vec f = AT(q + m) = exp2_vec(AT(q + m) - maximum_log);
            if (weight) f *= AT(weight + m);
            sum += f;
        }
        e->row_sum[i] = reduce_sum(sum);
    }
}

/* Adds the gradients of projections and bias from n tokens t (n, dp). D is the gradient of their log features. */
static void accumulate_map_gradients(Head *e, int n, const float *t) {
    if (!e->c->dweights.data) return;
    matmul(FULL, e->d, e->Mp, n, t, 1, e->dp, e->D, e->ld, e->dW, e->ld, 1);
    for (int i = 0; i < n; i++)
        for (int m = 0; m < e->Mp; m += LANES) AT(e->db + m) += AT(e->D + (int64_t)i * e->ld + m);
}

static void store_map_gradients(const Head *e) {
    const Call *c = e->c;
    if (!c->dweights.data) return;
    transpose(e->d, e->M, e->dW, e->ld, head_ptr(c->dweights, e->b, e->h), e->d);
    memcpy(head_ptr(c->dbias, e->b, e->h), e->db, sizeof(float) * e->M);
}

/* Writes the gradients of n keys and values; D is the gradient of the key features. */
static void write_key_gradients(Head *e, int64_t start, int n) {
    const float twice = 2 * (float)e->c->norm_weight;
    for (int j = 0; j < n; j++) {
        float *D = e->D + (int64_t)j * e->ld, *K = e->K + (int64_t)j * e->ld;
        vec sum = {0};
        for (int m = 0; m < e->Mp; m += LANES) sum += AT(D + m) *= AT(K + m);
        e->row_sum[j] = reduce_sum(sum);
    }
    accumulate_map_gradients(e, n, e->Y);
    matmul(FULL, n, e->dp, e->M, e->D, e->ld, 1, e->w, e->dp, e->dx, e->dp, 0);
    for (int j = 0; j < n; j++)
        for (int p = 0; p < e->dp; p += LANES)
            AT(e->dx + j * e->dp + p) -= twice * e->row_sum[j] * AT(e->Y + j * e->dp + p);
    store_tokens(e, e->c->dy, start, n, e->d, e->dx, e->dp);
    store_tokens(e, e->c->dvalues, start, n, e->dv, e->dvalues, e->lv);
}

/* Writes the gradients of n queries; D is the gradient of their features. */
static void write_query_gradients(Head *e, int64_t start, int n) {
    for (int i = 0; i < n; i++)
        for (int m = 0; m < e->Mp; m += LANES) AT(e->D + (int64_t)i * e->ld + m) *= AT(e->Q + (int64_t)i * e->ld + m);
    accumulate_map_gradients(e, n, e->X);
    matmul(FULL, n, e->dp, e->M, e->D, e->ld, 1, e->w, e->dp, e->dx, e->dp, 0);
    store_tokens(e, e->c->dx, start, n, e->d, e->dx, e->dp);
}

/* Writes the gradients of keys [start, stop) from the gradient dS of the state, which is relative to `ref`. */
static void keys_backward(Head *e, int64_t start, int64_t stop, const float *dS, const float *ref) {
    transpose(e->dv, e->M, dS, e->ld, e->St, e->lv);
    for (int64_t t = start; t < stop; t += CHUNK) {
        int n = stop - t < CHUNK ? stop - t : CHUNK;
        load_keys(e, t, n);
        project(e, n, e->Y, e->K);
        exponentiate(e, n, e->K, e->token_offset, ref, -1);
        matmul(FULL, n, e->dvp, e->M, e->K, e->ld, 1, e->St, e->lv, e->dvalues, e->lv, 0);
        matmul(FULL, n, e->Mp, e->dv + 1, e->V, e->lv, 1, dS, e->ld, e->D, e->ld, 0);
        write_key_gradients(e, t, n);
    }
}

/* Runs `body` for all parts of all heads on the threads of the call. */
static int for_each_head(const Call *c, int64_t parts, float *partial_sums, void (*body)(Head *e)) {
    int error = OK;
#pragma omp parallel for schedule(dynamic) num_threads((int)c->threads) reduction(max : error)
    for (int64_t job = 0; job < c->B * c->H * parts; job++) {
        unsigned mode = flush_denormals();
        Head e = {.part = job % parts, .parts = parts, .partial_sums = partial_sums};
        if (init_head(&e, c, job / parts)) {
            body(&e);
            store_map_gradients(&e);
            if (e.error > error) error = e.error;
        } else
            error = NO_MEMORY;
        restore_float_mode(mode);
        trim_scratch();
    }
    return error;
}
