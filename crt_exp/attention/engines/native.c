/* Attention with positive exponential features on CPUs, in float32: the twin of closed_form.py, whose formulas and names these
   are. One thread takes one head through chunks of 64 tokens, so that the features of a
   chunk stay in the second-level cache from the product that makes them to the last that needs them.

   Logs are in base 2 and have exact maxima taken off: of the queries along a row, of the keys along a feature, as a running
   maximum, `ref`. A sum taken with an older ref is multiplied by exp2(old - new) <= 1.

   Legend: n tokens of a chunk, M features, d and dv columns of vectors and values. X, Y (n, d); V = [v, 1] and G = [g,
   gradient to the log-sum - g.output] (n, dv + 1); Q, K (n, M) features; S = K' V the state, as (dv + 1, M); D gradients to features. Rows of matrices with M
   columns are `ld` apart, of those with dv + 1 columns `lv`, and what fills them up is 0. */

#include "vectors.h"

static const float NONE = -1e30f;   /* the reference of no key */
static const float FARTHEST = 1e29f;  /* -log of the shortest key: beyond, it would be as good as no key */
static const float UNSEEN = 1e30f;  /* the log-sum of a row that sees no key: its features come out as 0 in the backward pass */

typedef struct {
    int64_t B, H, L, S, d, dv, M, segment, threads;
    double norm_weight;
    View x, y, v, rows, scale, bias, out, logsum, states, logs, grad, dlogsum, dx, dy, dvalues,
        dweights, dbias;  /* null: the map does not learn */
    const uint8_t *keep;  /* (B, S), or null */
    uint8_t *levels;      /* (B, H, chunks): 1 where a chunk was taken token by token */
} Call;

/* ---- One head ---- */

typedef struct {
    const Call *c;
    int64_t b, h;
    int d, dp, dv, dvp, lv, M, Mp, ld;      /* the p-sizes are multiples of PAD */
    float *w, *w2, *wt;                     /* rows (M, dp), in natural and binary units; the latter transposed (d, ld) */
    float *bias;                            /* of queries: twice the bias, -inf for the features that fill up (Mp) */
    float *X, *Y, *V, *G, *dx, *dvalues;    /* (CHUNK, dp or lv) */
    float *Yt, *Vt, *A, *dA;                /* (d, CHUNK), (dv + 1, CHUNK), (CHUNK, CHUNK) twice */
    float *Q, *K, *Kt, *D;                  /* (CHUNK, ld); Kt (Mp, CHUNK) */
    float *S, *St, *dS;                     /* (dv + 1, ld), (Mp, lv) with the transposed state, (dv + 1, ld) */
    float *ref, *fresh, *factor, *offset;   /* (Mp) */
    float *row, *top, *sums;                /* (CHUNK) offsets, maxima and sums of the tokens of a chunk */
    float *dW, *db;                         /* of a map that learns: (d, ld) and (Mp) */
    float *pieces;                          /* of the chunks of a segment, in the causal backward pass */
    int bad;
} Head;

INLINE float *row_of(const Head *e, View t, int64_t token) { return of(t, e->b, e->h) + token * t.token; }

/* Numbers that the backward sweep holds for a piece of `size` tokens: see Piece. */
static size_t piece_size(const Head *e, int size) {
    return ((size_t)(e->dv + 1 + size) * e->ld + 2 * e->Mp + PAD - 1) / PAD * PAD;
}

/* Scratch memory and the packed directions of head `index` of B x H. Returns 0 where memory ended. */
static int open_head(Head *e, const Call *c, int64_t index) {
    e->c = c, e->b = index / c->H, e->h = index % c->H, e->bad = OK;
    e->d = c->d, e->dp = up(c->d), e->dv = c->dv, e->dvp = up(c->dv), e->lv = up(c->dv + 1);
    e->M = c->M, e->Mp = up(c->M), e->ld = e->Mp + PAD;  /* rows a power of two apart would fall on the same cache lines */
    int dp = e->dp, ld = e->ld, lv = e->lv, Mp = e->Mp;
    const int sweeps = c->levels && c->dx.data, learns = c->dweights.data != NULL;
    const Scratch parts[] = {
        {&e->w, (size_t)Mp * dp}, {&e->w2, (size_t)Mp * dp}, {&e->wt, (size_t)e->d * ld}, {&e->bias, Mp},
        {&e->X, CHUNK * dp}, {&e->Y, CHUNK * dp}, {&e->V, CHUNK * lv}, {&e->G, CHUNK * lv}, {&e->dx, CHUNK * dp},
        {&e->dvalues, CHUNK * lv}, {&e->Yt, (size_t)dp * CHUNK}, {&e->Vt, (size_t)lv * CHUNK}, {&e->A, CHUNK * CHUNK},
        {&e->dA, CHUNK * CHUNK}, {&e->Q, (size_t)CHUNK * ld}, {&e->K, (size_t)CHUNK * ld}, {&e->Kt, (size_t)CHUNK * Mp},
        {&e->D, (size_t)CHUNK * ld}, {&e->S, (size_t)(e->dv + 1) * ld}, {&e->St, (size_t)Mp * lv},
        {&e->dS, (size_t)(e->dv + 1) * ld}, {&e->ref, Mp}, {&e->fresh, Mp}, {&e->factor, Mp}, {&e->offset, Mp},
        {&e->row, CHUNK}, {&e->top, CHUNK}, {&e->sums, CHUNK},
        {&e->dW, learns ? (size_t)e->d * ld : 0}, {&e->db, learns ? Mp : 0},
        {&e->pieces, sweeps ? piece_size(e, CHUNK) * (c->segment / CHUNK) : 0}};
    if (!take_scratch(parts, sizeof parts / sizeof *parts)) return 0;
    float scale = *of(c->scale, e->b, e->h), *bias = of(c->bias, e->b, e->h);
    const Scratch zeros[] = {{&e->wt, e->d * ld}, {&e->w, Mp * dp}, {&e->X, CHUNK * dp}, {&e->Y, CHUNK * dp},
                             {&e->V, CHUNK * lv}, {&e->G, CHUNK * lv}, {&e->Yt, CHUNK * dp}, {&e->Vt, CHUNK * lv},
                             {&e->dW, learns ? e->d * ld : 0}, {&e->db, learns ? Mp : 0}};
    for (size_t i = 0; i < sizeof zeros / sizeof *zeros; i++) memset(*zeros[i].to, 0, sizeof(float) * zeros[i].count);
    for (int m = 0; m < e->M; m++) {
        const float *from = row_of(e, c->rows, m);
        for (int p = 0; p < e->d; p++) e->w[m * dp + p] = from[p] * scale;
    }
    for (int i = 0; i < Mp * dp; i++) e->w2[i] = e->w[i] * LOG2E;
    transpose(e->M, e->d, e->w2, dp, e->wt, ld);
    for (int m = 0; m < Mp; m++) e->bias[m] = m < e->M ? 2 * bias[m] * LOG2E : -INFINITY;
    for (int m = 0; m < e->M; m++)
        if (!isfinite(square_sum(e->w2 + m * dp, dp)) || !isfinite(e->bias[m])) e->bad = BAD_DIRECTIONS;
    return 1;
}

/* Rows [start, start + n) of a tensor with d columns into `to`, whose rows are ld apart. */
static void load(const Head *e, View t, int64_t start, int n, int d, float *to, int ld) {
    for (int i = 0; i < n; i++) memcpy(to + i * ld, row_of(e, t, start + i), sizeof(float) * d);
}

static void save(const Head *e, View t, int64_t start, int n, int d, const float *from, int ld) {
    for (int i = 0; i < n; i++) memcpy(row_of(e, t, start + i), from + i * ld, sizeof(float) * d);
}

static int masked(const Head *e, int64_t key) { return e->c->keep && !e->c->keep[e->b * e->c->S + key]; }

/* X, and a note where it is not finite. */
static void load_queries(Head *e, int64_t start, int n) {
    load(e, e->c->x, start, n, e->d, e->X, e->dp);
    for (int i = 0; i < n; i++)
        if (!(square_sum(e->X + i * e->dp, e->dp) < FARTHEST)) e->bad = NOT_FINITE;
}

/* Y, V and the offsets -norm_weight |y|^2 of the keys in `row`; masked keys, whose memory may hold anything, are 0 and -inf. */
static void load_keys(Head *e, int64_t start, int n) {
    load(e, e->c->y, start, n, e->d, e->Y, e->dp);
    load(e, e->c->v, start, n, e->dv, e->V, e->lv);
    for (int j = 0; j < n; j++) {
        float *y = e->Y + j * e->dp, *v = e->V + j * e->lv;
        if (masked(e, start + j)) {
            memset(y, 0, sizeof(float) * e->d);
            memset(v, 0, sizeof(float) * e->dv);
            e->row[j] = -INFINITY;
        } else {
            float square = square_sum(y, e->dp);
            e->row[j] = -(float)e->c->norm_weight * LOG2E * square;
            if (!(e->row[j] > -FARTHEST)) e->bad = NOT_FINITE;
        }
        v[e->dv] = 1;
    }
}

/* G = [g, gradient to the log-sum - g.output]. */
static void load_gradients(Head *e, int64_t start, int n) {
    load(e, e->c->grad, start, n, e->dv, e->G, e->lv);
    for (int i = 0; i < n; i++) {
        const float *g = e->G + i * e->lv, *out = row_of(e, e->c->out, start + i);
        e->G[i * e->lv + e->dv] = (e->c->dlogsum.data ? *row_of(e, e->c->dlogsum, start + i) : 0) - dot(g, out, e->dv);
    }
}

/* F (n, ld) = W x of n tokens. */
static void project(const Head *e, int n, const float *x, float *F) {
    product(ALL, n, e->Mp, e->d, x, e->dp, 1, e->wt, e->ld, F, e->ld, 0);
}

/* fresh = max(ref, logs of the keys K + row). */
static void raise_reference(Head *e, int n, const float *ref, float *fresh) {
    for (int m = 0; m < e->Mp; m += LANES) {
        vec top = AT(ref + m);
        for (int j = 0; j < n; j++) top = maximum(top, AT(e->K + j * e->ld + m) + e->row[j]);
        AT(fresh + m) = top;
    }
}

/* factor = exp2(from - to); returns whether any is not 1. */
static int factors(int Mp, const float *from, const float *to, float *factor) {
    int changed = 0;
    for (int m = 0; m < Mp; m++) changed |= from[m] != to[m];
    if (changed)
        for (int m = 0; m < Mp; m += LANES) AT(factor + m) = exp2_of(AT(from + m) - AT(to + m));
    return changed;
}

/* to = from with columns times factor, (dv + 1, ld). */
static void scale_columns(const Head *e, const float *from, const float *factor, float *to) {
    for (int i = 0; i <= e->dv; i++)
        for (int m = 0; m < e->Mp; m += LANES) AT(to + i * e->ld + m) = AT(from + i * e->ld + m) * AT(factor + m);
}

/* Features exp2(F + row + sign offset) of n tokens, in place. */
static void exponentiate(const Head *e, int n, float *F, const float *row, const float *offset, float sign) {
    const vec most = (vec){0} + 127.0f;
    for (int i = 0; i < n; i++) {
        float *f = F + (int64_t)i * e->ld;
        for (int m = 0; m < e->Mp; m += LANES) {
            vec t = AT(f + m) + row[i] + sign * AT(offset + m);
            AT(f + m) = exp2_of(minimum(t, most));  /* below 84 but for rounding, which grows with the vectors */
        }
    }
}

/* Q = exp2(logs + offset - top) with the maximum of each row in `top`, and sum_m Q_m weight_m (or Q_m, for null) in `sums`. */
static void query_features(Head *e, int n, const float *offset, const float *weight) {
    project(e, n, e->X, e->Q);
    for (int i = 0; i < n; i++) {
        float *q = e->Q + (int64_t)i * e->ld;
        vec top = AT(q) + AT(offset), sum = {0};
        for (int m = 0; m < e->Mp; m += LANES) {
            AT(q + m) += AT(offset + m);
            top = maximum(top, AT(q + m));
        }
        float highest = e->top[i] = largest(top);
        for (int m = 0; m < e->Mp; m += LANES) {
            vec f = AT(q + m) = exp2_of(AT(q + m) - highest);
            if (weight) f *= AT(weight + m);
            sum += f;
        }
        e->sums[i] = total(sum);
    }
}

/* Adds the gradients to the directions and the bias that come through n tokens t (n, dp), from D, those to their logs. */
static void learn(Head *e, int n, const float *t) {
    if (!e->c->dweights.data) return;
    product(ALL, e->d, e->Mp, n, t, 1, e->dp, e->D, e->ld, e->dW, e->ld, 1);
    for (int i = 0; i < n; i++)
        for (int m = 0; m < e->Mp; m += LANES) AT(e->db + m) += AT(e->D + (int64_t)i * e->ld + m);
}

static void save_learned(const Head *e) {
    const Call *c = e->c;
    if (!c->dweights.data) return;
    transpose(e->d, e->M, e->dW, e->ld, of(c->dweights, e->b, e->h), e->d);
    memcpy(of(c->dbias, e->b, e->h), e->db, sizeof(float) * e->M);
}

/* Writes the gradients to n keys, from D, those to their features, and those to n values. */
static void finish_keys(Head *e, int64_t start, int n) {
    const float twice = 2 * (float)e->c->norm_weight;
    for (int j = 0; j < n; j++) {
        float *D = e->D + (int64_t)j * e->ld, *K = e->K + (int64_t)j * e->ld;
        vec sum = {0};
        for (int m = 0; m < e->Mp; m += LANES) sum += AT(D + m) *= AT(K + m);
        e->sums[j] = total(sum);
    }
    learn(e, n, e->Y);
    product(ALL, n, e->dp, e->M, e->D, e->ld, 1, e->w, e->dp, e->dx, e->dp, 0);
    for (int j = 0; j < n; j++)
        for (int p = 0; p < e->dp; p += LANES) AT(e->dx + j * e->dp + p) -= twice * e->sums[j] * AT(e->Y + j * e->dp + p);
    save(e, e->c->dy, start, n, e->d, e->dx, e->dp);
    save(e, e->c->dvalues, start, n, e->dv, e->dvalues, e->lv);
}

/* Writes the gradients to n queries from D, those to their features. */
static void finish_queries(Head *e, int64_t start, int n) {
    for (int i = 0; i < n; i++)
        for (int m = 0; m < e->Mp; m += LANES) AT(e->D + (int64_t)i * e->ld + m) *= AT(e->Q + (int64_t)i * e->ld + m);
    learn(e, n, e->X);
    product(ALL, n, e->dp, e->M, e->D, e->ld, 1, e->w, e->dp, e->dx, e->dp, 0);
    save(e, e->c->dx, start, n, e->d, e->dx, e->dp);
}

/* Writes the gradients to keys [start, stop), which act through the state alone: dS is the gradient to it, in reference `ref`. */
static void keys_backward(Head *e, int64_t start, int64_t stop, const float *dS, const float *ref) {
    transpose(e->dv, e->M, dS, e->ld, e->St, e->lv);
    for (int64_t t = start; t < stop; t += CHUNK) {
        int n = stop - t < CHUNK ? stop - t : CHUNK;
        load_keys(e, t, n);
        project(e, n, e->Y, e->K);
        exponentiate(e, n, e->K, e->row, ref, -1);
        product(ALL, n, e->dvp, e->M, e->K, e->ld, 1, e->St, e->lv, e->dvalues, e->lv, 0);
        product(ALL, n, e->Mp, e->dv + 1, e->V, e->lv, 1, dS, e->ld, e->D, e->ld, 0);
        finish_keys(e, t, n);
    }
}

/* ---- Bidirectional ---- */

static void load_state(const Head *e, const float *from, float *S) {
    for (int i = 0; i <= e->dv; i++) {
        memcpy(S + i * e->ld, from + (int64_t)i * e->M, sizeof(float) * e->M);
        memset(S + i * e->ld + e->M, 0, sizeof(float) * (e->ld - e->M));
    }
}

/* The state S of keys [start, stop), and its reference. */
static void summarise(Head *e, int64_t start, int64_t stop) {
    memset(e->S, 0, sizeof(float) * (e->dv + 1) * e->ld);
    for (int m = 0; m < e->Mp; m++) e->ref[m] = NONE;
    for (int64_t t = start; t < stop; t += CHUNK) {
        int n = stop - t < CHUNK ? stop - t : CHUNK;
        load_keys(e, t, n);
        project(e, n, e->Y, e->K);
        raise_reference(e, n, e->ref, e->fresh);
        if (factors(e->Mp, e->ref, e->fresh, e->factor)) {
            scale_columns(e, e->S, e->factor, e->S);
            memcpy(e->ref, e->fresh, sizeof(float) * e->Mp);
        }
        exponentiate(e, n, e->K, e->row, e->ref, -1);
        product(ALL, e->dv + 1, e->Mp, n, e->V, 1, e->lv, e->K, e->ld, e->S, e->ld, 1);
    }
}

/* Turns the sums of the state into [U, 1], and writes these and log z. */
static void normalise(Head *e) {
    float *logs = of(e->c->logs, e->b, e->h), *z = e->S + e->dv * e->ld;
    for (int m = 0; m < e->Mp; m++) e->factor[m] = m < e->M && z[m] > 0 ? 1 / z[m] : 0;
    for (int m = 0; m < e->M; m++) logs[m] = z[m] > 0 ? (e->ref[m] + log2f(z[m])) * LN2 : 0;
    scale_columns(e, e->S, e->factor, e->S);
    for (int m = 0; m < e->M; m++) z[m] = 1;
    float *to = of(e->c->states, e->b, e->h);
    for (int i = 0; i <= e->dv; i++) memcpy(to + (int64_t)i * e->M, e->S + i * e->ld, sizeof(float) * e->M);
}

static void query_offsets(Head *e) {
    const float *logs = of(e->c->logs, e->b, e->h);
    for (int m = 0; m < e->Mp; m++) e->offset[m] = m < e->M ? logs[m] * LOG2E + e->bias[m] : -INFINITY;
}

static void forward_whole(Head *e) {
    summarise(e, 0, e->c->S);
    normalise(e);
    transpose(e->dv, e->M, e->S, e->ld, e->St, e->lv);
    query_offsets(e);
    for (int64_t t = 0; t < e->c->L; t += CHUNK) {
        int n = e->c->L - t < CHUNK ? e->c->L - t : CHUNK;
        load_queries(e, t, n);
        query_features(e, n, e->offset, NULL);
        product(ALL, n, e->dvp, e->M, e->Q, e->ld, 1, e->St, e->lv, e->dvalues, e->lv, 0);
        float *logsum = of(e->c->logsum, e->b, e->h) + t;
        for (int i = 0; i < n; i++) {
            float scale = 1 / e->sums[i], *out = e->dvalues + i * e->lv;
            logsum[i] = (e->top[i] + log2f(e->sums[i])) * LN2;
            for (int p = 0; p < e->dvp; p += LANES) AT(out + p) *= scale;
        }
        save(e, e->c->out, t, n, e->dv, e->dvalues, e->lv);
    }
}

static void backward_whole(Head *e) {
    const float *logs = of(e->c->logs, e->b, e->h);
    load_state(e, of(e->c->states, e->b, e->h), e->S);
    memset(e->dS, 0, sizeof(float) * (e->dv + 1) * e->ld);
    query_offsets(e);
    for (int64_t t = 0; t < e->c->L; t += CHUNK) {
        int n = e->c->L - t < CHUNK ? e->c->L - t : CHUNK;
        const float *logsum = of(e->c->logsum, e->b, e->h) + t;
        load_queries(e, t, n);
        load_gradients(e, t, n);
        for (int i = 0; i < n; i++) e->row[i] = -logsum[i] * LOG2E;
        project(e, n, e->X, e->Q);
        exponentiate(e, n, e->Q, e->row, e->offset, 1);
        product(ALL, n, e->Mp, e->dv + 1, e->G, e->lv, 1, e->S, e->ld, e->D, e->ld, 0);
        product(ALL, e->dv + 1, e->Mp, n, e->G, 1, e->lv, e->Q, e->ld, e->dS, e->ld, 1);
        finish_queries(e, t, n);
    }
    for (int m = 0; m < e->Mp; m++) e->ref[m] = m < e->M ? logs[m] * LOG2E : 0;
    keys_backward(e, 0, e->c->S, e->dS, e->ref);
}

/* Runs `body` for all heads on the call's threads. Denormal numbers, which are slow, count as 0 in it. */
static int run(const Call *c, void (*body)(Head *e)) {
    int bad = OK;
#pragma omp parallel for schedule(dynamic) num_threads((int)c->threads) reduction(max : bad)
    for (int64_t head = 0; head < c->B * c->H; head++) {
        unsigned mode = without_denormals();
        Head e;
        if (open_head(&e, c, head)) {
            body(&e);
            save_learned(&e);
            if (e.bad > bad) bad = e.bad;
        } else
            bad = NO_MEMORY;
        with_mode(mode);
        trim_scratch();
    }
    return bad;
}

int bidirectional_forward(const Call *c) { return run(c, forward_whole); }

int bidirectional_backward(const Call *c) { return run(c, backward_whole); }

/* ---- Causal: query i sees keys up to i + S - L ---- */

/* Zeros above the diagonal of A, as far as products with triangles read it. */
static void clear_upper(float *A, int n) {
    for (int i = 0; i < n; i++) {
        int stop = (i / ROWS + 1) * ROWS;
        for (int j = i + 1; j < (stop < n ? stop : n); j++) A[i * CHUNK + j] = 0;
    }
}

/* Takes n tokens through the forward pass: St (Mp, lv) with z in column dv is the state, of reference ref. Returns 0, and leaves
   the state as it was, where a denominator comes out below TINY: a later key of the chunk is so large that the terms of an
   earlier row were rounded to 0. A single token cannot do that, for its largest term is at least 1. */
static int forward_tokens(Head *e, int64_t start, int n, float *ref, int *seen) {
    const int64_t key = start + e->c->S - e->c->L;
    const int columns = up(n);
    load_queries(e, start, n);
    load_keys(e, key, n);
    for (int j = n; j < columns; j++) e->row[j] = -INFINITY;
    transpose(n, e->d, e->Y, e->dp, e->Yt, CHUNK);
    product(ALL, e->Mp, columns, e->d, e->w2, e->dp, 1, e->Yt, CHUNK, e->Kt, CHUNK, 0);
    float *z_now = e->dS, *z_new = e->dS + e->Mp;  /* sums of the features of the keys before, and of these keys */
    for (int m = 0; m < e->Mp; m++) {
        float *k = e->Kt + m * CHUNK;
        vec top = AT(k) + AT(e->row), sum = {0};
        for (int j = LANES; j < columns; j += LANES) top = maximum(top, AT(k + j) + AT(e->row + j));
        float now = largest(top), fresh = now > ref[m] ? now : ref[m];
        for (int j = 0; j < columns; j += LANES) sum += AT(k + j) = exp2_of(AT(k + j) + AT(e->row + j) - fresh);
        e->fresh[m] = fresh;
        z_new[m] = total(sum);
    }
    int changed = factors(e->Mp, ref, e->fresh, e->factor);
    for (int m = 0; m < e->Mp; m++) z_now[m] = e->St[m * e->lv + e->dv] * (changed ? e->factor[m] : 1);
    for (int m = 0; m < e->Mp; m++) e->offset[m] = e->fresh[m] + e->bias[m];
    query_features(e, n, e->offset, z_now);
    product(LOWER, n, columns, e->M, e->Q, e->ld, 1, e->Kt, CHUNK, e->A, CHUNK, 0);
    clear_upper(e->A, n);
    int sees[CHUNK];
    for (int i = 0; i < n; i++) {
        sees[i] = i ? sees[i - 1] : *seen;
        sees[i] |= !masked(e, key + i);
        for (int j = 0; j <= i; j++) e->sums[i] += e->A[i * CHUNK + j];
        if (n > 1 && sees[i] && e->sums[i] < TINY) return 0;
    }
    *seen = sees[n - 1];
    if (changed) {
        for (int m = 0; m < e->M; m++)
            for (int p = 0; p < e->lv; p += LANES) AT(e->St + m * e->lv + p) *= e->factor[m];
        memcpy(ref, e->fresh, sizeof(float) * e->Mp);
    }
    product(ALL, n, e->dvp, e->M, e->Q, e->ld, 1, e->St, e->lv, e->dvalues, e->lv, 0);
    product(UP_TO, n, e->dvp, n, e->A, CHUNK, 1, e->V, e->lv, e->dvalues, e->lv, 1);
    float *logsum = of(e->c->logsum, e->b, e->h) + start;
    for (int i = 0; i < n; i++) {
        float *out = e->dvalues + i * e->lv, scale = sees[i] ? 1 / e->sums[i] : 0;
        logsum[i] = sees[i] ? e->top[i] + log2f(e->sums[i]) : UNSEEN;
        for (int p = 0; p < e->dvp; p += LANES) AT(out + p) *= scale;
    }
    save(e, e->c->out, start, n, e->dv, e->dvalues, e->lv);
    product(ALL, e->M, e->dvp, n, e->Kt, CHUNK, 1, e->V, e->lv, e->St, e->lv, 1);
    for (int m = 0; m < e->M; m++) e->St[m * e->lv + e->dv] = z_now[m] + z_new[m];
    return 1;
}

static int64_t segments(const Call *c) { return (c->L + c->segment - 1) / c->segment; }
static int64_t chunks_of(int64_t n) { return (n + CHUNK - 1) / CHUNK; }

/* Where the state before segment i, (dv + 1, M), and its reference are kept. */
static float *kept_state(const Head *e, int64_t i) { return of(e->c->states, e->b, e->h) + i * (e->dv + 1) * e->M; }
static float *kept_ref(const Head *e, int64_t i) { return of(e->c->logs, e->b, e->h) + i * e->M; }

static void forward_head(Head *e) {
    const Call *c = e->c;
    const int64_t before = c->S - c->L;
    uint8_t *levels = c->levels + (e->b * c->H + e->h) * chunks_of(c->L);
    int seen = 0;
    summarise(e, 0, before);
    for (int64_t j = 0; j < before; j++) seen |= !masked(e, j);
    memset(e->St, 0, sizeof(float) * e->Mp * e->lv);
    transpose(e->dv + 1, e->M, e->S, e->ld, e->St, e->lv);
    for (int64_t t = 0; t < c->L; t += CHUNK) {
        int n = c->L - t < CHUNK ? c->L - t : CHUNK;
        if (t % c->segment == 0) {
            transpose(e->M, e->dv + 1, e->St, e->lv, kept_state(e, t / c->segment), e->M);
            memcpy(kept_ref(e, t / c->segment), e->ref, sizeof(float) * e->M);
        }
        if (!(levels[t / CHUNK] = !forward_tokens(e, t, n, e->ref, &seen))) continue;
        for (int i = 0; i < n; i++) forward_tokens(e, t + i, 1, e->ref, &seen);
    }
}

/* What the backward sweep holds for each piece of tokens: features K (size, ld), the state S before it (dv + 1, ld) in reference
   `old`, and its own reference `ref`. */
typedef struct {
    float *K, *S, *old, *ref;
} Piece;

static Piece piece_at(const Head *e, float *memory, int size, int i) {
    float *K = memory + i * piece_size(e, size), *S = K + (size_t)size * e->ld, *old = S + (size_t)(e->dv + 1) * e->ld;
    return (Piece){K, S, old, old + e->Mp};
}

/* Writes the gradients to n tokens. Given dS, the gradient to the state after them, of reference `ref`; leaves that before. */
static void backward_tokens(Head *e, int64_t start, int n, Piece *piece) {
    const int64_t key = start + e->c->S - e->c->L;
    const int columns = up(n);
    const float *logsum = of(e->c->logsum, e->b, e->h) + start;
    if (factors(e->Mp, piece->ref, e->ref, e->factor)) {
        scale_columns(e, e->dS, e->factor, e->dS);
        memcpy(e->ref, piece->ref, sizeof(float) * e->Mp);
    }
    if (factors(e->Mp, piece->old, piece->ref, e->factor)) scale_columns(e, piece->S, e->factor, piece->S);
    load_queries(e, start, n);
    load_gradients(e, start, n);
    load_keys(e, key, n);
    float *scratch = e->K;
    e->K = piece->K;
    for (int m = 0; m < e->Mp; m++) e->offset[m] = piece->ref[m] + e->bias[m];
    for (int i = 0; i < n; i++) e->row[i] = -logsum[i];
    project(e, n, e->X, e->Q);
    exponentiate(e, n, e->Q, e->row, e->offset, 1);

    transpose(n, e->dv + 1, e->V, e->lv, e->Vt, CHUNK);
    transpose(n, e->M, e->K, e->ld, e->Kt, CHUNK);
    product(LOWER, n, columns, e->dv + 1, e->G, e->lv, 1, e->Vt, CHUNK, e->dA, CHUNK, 0);
    product(LOWER, n, columns, e->M, e->Q, e->ld, 1, e->Kt, CHUNK, e->A, CHUNK, 0);
    clear_upper(e->dA, n);
    clear_upper(e->A, n);

    product(ALL, n, e->Mp, e->dv + 1, e->G, e->lv, 1, piece->S, e->ld, e->D, e->ld, 0);
    product(UP_TO, n, e->Mp, n, e->dA, CHUNK, 1, e->K, e->ld, e->D, e->ld, 1);
    finish_queries(e, start, n);

    transpose(e->dv, e->M, e->dS, e->ld, e->St, e->lv);
    product(ALL, n, e->dvp, e->M, e->K, e->ld, 1, e->St, e->lv, e->dvalues, e->lv, 0);
    product(FROM, n, e->dvp, n, e->A, 1, CHUNK, e->G, e->lv, e->dvalues, e->lv, 1);
    product(ALL, n, e->Mp, e->dv + 1, e->V, e->lv, 1, e->dS, e->ld, e->D, e->ld, 0);
    product(FROM, n, e->Mp, n, e->dA, 1, CHUNK, e->Q, e->ld, e->D, e->ld, 1);
    finish_keys(e, key, n);

    product(ALL, e->dv + 1, e->Mp, n, e->G, 1, e->lv, e->Q, e->ld, e->dS, e->ld, 1);
    e->K = scratch;
}

/* The pieces of `count` tokens from the state S before them, in reference `old`. */
static void find_pieces(Head *e, int64_t start, int count, int size, const float *S, const float *old, float *memory) {
    const size_t state = sizeof(float) * (e->dv + 1) * e->ld, references = sizeof(float) * e->Mp;
    float *scratch = e->K;
    for (int t = 0, i = 0; t < count; t += size, i++) {
        const int n = count - t < size ? count - t : size;
        Piece piece = piece_at(e, memory, size, i), next = piece_at(e, memory, size, i + 1);
        if (i == 0) {
            memcpy(piece.S, S, state);
            memcpy(piece.old, old, references);
        }
        e->K = piece.K;
        load_keys(e, start + t + e->c->S - e->c->L, n);
        project(e, n, e->Y, e->K);
        raise_reference(e, n, piece.old, piece.ref);
        exponentiate(e, n, e->K, e->row, piece.ref, -1);
        if (t + size >= count) break;
        if (factors(e->Mp, piece.old, piece.ref, e->factor)) scale_columns(e, piece.S, e->factor, next.S);
        else memcpy(next.S, piece.S, state);
        memcpy(next.old, piece.ref, references);
        product(ALL, e->dv + 1, e->Mp, n, e->V, 1, e->lv, e->K, e->ld, next.S, e->ld, 1);
    }
    e->K = scratch;
}

/* Sweeps back over `count` tokens in pieces of `size`, and over those whose level is 1 token by token. S and old are state and
   reference before them. */
static void sweep(Head *e, int64_t start, int count, int size, const uint8_t *levels, const float *S, const float *old,
                  float *memory) {
    find_pieces(e, start, count, size, S, old, memory);
    for (int i = (count - 1) / size; i >= 0; i--) {
        Piece piece = piece_at(e, memory, size, i);
        const int64_t first = start + i * size;
        const int n = count - i * size < size ? count - i * size : size;
        if (!levels || !levels[i]) {
            backward_tokens(e, first, n, &piece);
            continue;
        }
        float *tokens = aligned_alloc(64, sizeof(float) * n * piece_size(e, 1));
        if (tokens) sweep(e, first, n, 1, NULL, piece.S, piece.old, tokens);
        else e->bad = NO_MEMORY;
        free(tokens);
    }
}

static void backward_head(Head *e) {
    const Call *c = e->c;
    const uint8_t *levels = c->levels + (e->b * c->H + e->h) * chunks_of(c->L);
    memset(e->dS, 0, sizeof(float) * (e->dv + 1) * e->ld);
    for (int m = 0; m < e->Mp; m++) e->ref[m] = m < e->M ? -NONE : 0;  /* nothing comes later */
    for (int64_t i = segments(c) - 1; i >= 0; i--) {
        int64_t start = i * c->segment, count = c->L - start < c->segment ? c->L - start : c->segment;
        load_state(e, kept_state(e, i), e->S);
        memcpy(e->fresh, kept_ref(e, i), sizeof(float) * e->M);
        for (int m = e->M; m < e->Mp; m++) e->fresh[m] = 0;  /* what fills up has logs below 0: its reference stays */
        sweep(e, start, count, CHUNK, levels + start / CHUNK, e->S, e->fresh, e->pieces);
    }
    memset(e->fresh, 0, sizeof(float) * e->Mp);
    memcpy(e->fresh, kept_ref(e, 0), sizeof(float) * e->M);
    if (factors(e->Mp, e->fresh, e->ref, e->factor)) scale_columns(e, e->dS, e->factor, e->dS);
    keys_backward(e, 0, c->S - c->L, e->dS, e->fresh);
}

int causal_forward(const Call *c) { return run(c, forward_head); }

int causal_backward(const Call *c) { return run(c, backward_head); }
