/* Backward pass of causal_forward.c, with stored retrieved keys and log-sums.

   A first sweep repeats the past. It stores the clusters at the end of each epoch, and tau of each block, which
   would lose precision by subtraction. A second sweep visits the blocks in reverse order. Keys leave their clusters
   again, and receive the gradients of means and sums, dy_j = dmu / N and dv_j = dV, of all later blocks. With G =
   [g, -g.out], the gradient of a logit is its weight times G.[v, 1]. */

#include "near_far.h"

enum { SUMS = 3 };                                     /* of clusters */

/* State at the end of an epoch. */
typedef struct {
    int32_t *cluster, *heavy;                            /* (S), (n): cluster of each key; positions, -1 for missing
                                                            ones */
    float *sums;                                       /* ysum, values, mass of the clusters */
    int64_t start;                                     /* position of its renewal */
    int K;
} End;

/* A head in the backward pass. */
typedef struct {
    Past h;
    End *ends;                                         /* of each epoch */
    int64_t first, count, renewals;                    /* first block, numbers of blocks and of renewals */
    float *memory, *tau, *dY, *dV;                     /* (blocks, K); (S, dp), (S, lv) */
    float *sum, *dvalue, *dmu, *dfar;                  /* (K, dp), (K, lv): over blocks; (M, dp), (M, lv) */
    float *A, *B, *Q, *Qt, *G, *Gt, *O;                /* (2 b + M, PIECE) twice, of a piece */
    float top[PIECE], threshold[PIECE];                      /* log-sums; g.out */
} Back;

static void *all_of(size_t bytes) { return aligned_alloc(64, (bytes + 63) / 64 * 64 + 64); }

/* Returns the sums of clusters and their sizes. */
static void sums_of(const Past *h, int K, float *sums[SUMS], size_t sizes[SUMS]) {
    const size_t dp = h->dp, lv = h->lv, n = h->n;
    float *each[SUMS] = {h->ysum, h->values + n * lv, h->mass + n};
    const size_t size[SUMS] = {K * dp, K * lv, K};
    memcpy(sums, each, sizeof each), memcpy(sizes, size, sizeof size);
}

static int keep_end(Back *e) {
    Past *h = &e->h;
    End *end = e->ends + e->renewals++;
    float *sums[SUMS];
    size_t sizes[SUMS], all = 0;
    sums_of(h, h->K, sums, sizes);
    for (int i = 0; i < SUMS; i++) all += sizes[i];
    *end = (End){all_of(sizeof(int32_t) * h->c->S), all_of(sizeof(int32_t) * h->n), all_of(sizeof(float) * all),
                 h->start, h->K};
    if (!end->cluster || !end->heavy || !end->sums) return 0;
    memcpy(end->cluster, h->cluster, sizeof(int32_t) * h->c->S);
    memcpy(end->heavy, h->heavy, sizeof(int32_t) * h->n);
    float *to = end->sums;
    for (int i = 0; i < SUMS; to += sizes[i++]) memcpy(to, sums[i], sizeof(float) * sizes[i]);
    return 1;
}

/* Restores the sums at an end. */
static void load_end(Back *e, const End *end) {
    Past *h = &e->h;
    const float *from = end->sums;
    float *sums[SUMS];
    size_t sizes[SUMS];
    sums_of(h, h->K = end->K, sums, sizes);
    for (int i = 0; i < SUMS; from += sizes[i++]) memcpy(sums[i], from, sizeof(float) * sizes[i]);
}

/* Removes the keys of block t from their clusters. */
static void take_off(Back *e, const int32_t *cluster, int64_t t) {
    Past *h = &e->h;
    const int dp = h->dp, lv = h->lv, n = h->n;
    for (int64_t j = t * h->c->block, stop = j + h->c->block; j < stop; j++) {
        const int k = cluster[j];
        if (k < 0) continue;
        add_row(h->ysum + k * dp, -1, key(h, j), dp);
        add_row(h->values + (n + k) * lv, -1, h->V + j * lv, lv);
        h->mass[n + k] -= 1;
    }
}

/* First sweep: repeats the past of all blocks. */
static int go_by(Back *e) {
    Past *h = &e->h;
    const NearFar *c = h->c;
    for (int64_t i = 0; i < e->count; i++) {
        if (!advance(h, e->first + i)) return 0;
        summarize_clusters(h);
        memcpy(e->tau + i * c->clusters, h->tau, sizeof(float) * c->clusters);
        const int ends = i + 1 == e->count || (e->first + i + 1) * c->block == following(h->start, c->block);
        if (ends && !keep_end(e)) return 0;
    }
    return 1;
}

/* Adds the gradients of the sums to the clustered keys [j, stop). */
static void give_keys(Back *e, const int32_t *cluster, int64_t j, int64_t stop) {
    const int d = e->h.d, dp = e->h.dp, lv = e->h.lv;
    for (; j < stop; j++) {
        const int k = cluster[j];
        if (k < 0) continue;
        add_row(e->dY + j * dp, 1, e->sum + k * dp, d);
        add_row(e->dV + j * lv, 1, e->dvalue + k * lv, lv);
    }
}

/* Recomputes the logits of the keys that R queries have retrieved, in h.k.retrieved, and replaces the logits of
   clusters (K, ld) by weights of remaining keys relative to top (ld), in base 2. */
static void retrieve_again(Back *e, const int32_t *cluster, const int32_t *positions, int R, int ld, float *logits) {
    Past *h = &e->h;
    const NearFar *c = h->c;
    const int dp = h->dp;
    begin_left(h, R, ld, e->Q, 1);
    for (int r = 0; r < R; r++) {
        const int32_t *own = positions + r * c->open;
        float *retrieved = h->k.retrieved + r * room_for_retrieved(h);
        const int n = h->k.count[r];
        for (int i = 0; i < n; i++) retrieved[i] = LOG2E * dot(e->Q + r * dp, key(h, own[i]), dp);
        leave(h, r, ld, own, retrieved, n, cluster);
    }
    weigh_left(h, e->top, ld, logits);
}

/* Backward pass of queries [i, i + R) of block t; cluster (S) gives the clusters of retrieved keys. */
static void piece_backward(Back *e, const int32_t *cluster, int64_t t, int64_t i, int R) {
    Past *h = &e->h;
    const NearFar *c = h->c;
    const int d = h->d, dp = h->dp, dv = h->dv, lv = h->lv, n = h->n, M = n + h->K, ld = up(R);
    const int64_t first = c->S - c->L, b = c->block, from = t > 0 ? (t - 1) * b : 0;
    int32_t *positions = h->k.positions;
    const int64_t start = t * b > first ? t * b : first, stop = least_of((t + 1) * b, c->S), tokens = stop - start;
    const int near = (int)(stop - from);
    float *A = e->A, *B = e->B, *shared = A + near * ld, *dshared = B + near * ld;
    memset(e->Q, 0, sizeof(float) * ld * dp);
    memset(e->G, 0, sizeof(float) * ld * lv);
    for (int r = 0; r < R; r++) {
        const int64_t g = (i + r) / tokens, j = start + (i + r) % tokens, at = (h->z * c->G + g) * c->L + j - first;
        const float *grad = of(c->grad, h->z, g) + (j - first) * c->grad.token;
        put_row(e->Q + r * dp, (float)c->factor, of(c->x, h->z, g) + (j - first) * c->x.token, d);
        memcpy(e->G + r * lv, grad, sizeof(float) * dv);
        e->threshold[r] = dot(grad, of(c->out, h->z, g) + (j - first) * c->out.token, dv);
        e->top[r] = c->logsum[at];
        h->k.count[r] = get_gaps(c->gaps + h->z * c->bytes + c->gaps_at[at], positions + r * c->open);
    }
    transpose(ld, d, e->Q, dp, e->Qt, ld);
    for (int p = 0; p < d * ld; p += LANES) AT(e->Qt + p) *= LOG2E;
    transpose(ld, dv, e->G, lv, e->Gt, ld);
    for (int r = R; r < ld; r++) e->top[r] = e->threshold[r] = 0;
    product(ALL, near, ld, d, h->Y + from * dp, dp, 1, e->Qt, ld, A, ld, 0);
    product(ALL, M, ld, d, h->shared, dp, 1, e->Qt, ld, shared, ld, 0);
    product(ALL, near, ld, dv, h->V + from * lv, lv, 1, e->Gt, ld, B, ld, 0);
    product(ALL, M, ld, dv, h->values, lv, 1, e->Gt, ld, dshared, ld, 0);
    for (int j = 0; j < near; j++)
        for (int r = 0; r < R; r++) {
            const int64_t position = start + (i + r) % tokens;
            if (from + j > position || !there(h, from + j)) A[j * ld + r] = HIDDEN;
        }
    const vec most = (vec){0} + 126.0f;
    retrieve_again(e, cluster, positions, R, ld, shared + n * ld);
    for (int j = 0; j < near; j++)
        for (int r = 0; r < ld; r += LANES) {
            const vec weight = AT(A + j * ld + r) = exp2_of(AT(A + j * ld + r) - AT(e->top + r));
            AT(B + j * ld + r) = weight * (AT(B + j * ld + r) - AT(e->threshold + r));
        }
    for (int j = 0; j < M; j++)
        for (int r = 0; r < ld; r += LANES) {
            float *a = shared + j * ld + r, *g = dshared + j * ld + r;
            const float mass = h->mass[j];
            if (j < n) AT(a) = mass > 0 ? exp2_of(minimum(AT(a) - AT(e->top + r), most)) : (vec){0};
            AT(g) = AT(a) * (AT(g) - mass * AT(e->threshold + r));
        }
    memset(e->O, 0, sizeof(float) * ld * dp);
    for (int r = 0; r < R; r++) {                       /* retrieved keys */
        const float *q = e->Q + r * dp, *grad = e->G + r * lv, *retrieved = h->k.retrieved + r * room_for_retrieved(h);
        for (int o = 0; o < h->k.count[r]; o++) {
            const int64_t position = positions[r * c->open + o];
            const float *y = key(h, position), *v = h->V + position * lv;
            const int k = n + cluster[position];
            const float weight = exp2f(retrieved[o] - e->top[r]), less = shared[k * ld + r];
            const float gain = dot(grad, v, lv) - e->threshold[r];
            add_row(e->dV + position * lv, weight - less, grad, lv);
            add_row(e->dY + position * dp, weight * gain, q, dp);
            add_row(e->O + r * dp, weight * gain, y, dp);
            dshared[k * ld + r] -= less * gain;
        }
    }
    product(ALL, near, dv, R, A, ld, 1, e->G, lv, e->dV + from * lv, lv, 1);
    product(ALL, near, d, R, B, ld, 1, e->Q, dp, e->dY + from * dp, dp, 1);
    product(ALL, M, dv, R, shared, ld, 1, e->G, lv, e->dfar, lv, 1);
    product(ALL, M, d, R, dshared, ld, 1, e->Q, dp, e->dmu, dp, 1);
    product(ALL, R, d, near, B, 1, ld, h->Y + from * dp, dp, e->O, dp, 1);
    product(ALL, R, d, M, dshared, 1, ld, h->shared, dp, e->O, dp, 1);
    for (int r = 0; r < R; r++) {
        const int64_t g = (i + r) / tokens, j = start + (i + r) % tokens;
        put_row(of(c->dx, h->z, g) + (j - first) * c->dx.token, (float)c->factor, e->O + r * dp, d);
    }
}

/* Adds the gradients of a block's cluster means and values to those of the sums. */
static void add_sums(Back *e) {
    Past *h = &e->h;
    const int d = h->d, dp = h->dp, lv = h->lv, n = h->n;
    for (int k = 0; k < h->K; k++) {
        const float N = h->mass[n + k];
        add_row(e->sum + k * dp, N > 0 ? 1 / N : 0, e->dmu + (n + k) * dp, d);
        add_row(e->dvalue + k * lv, N > 0, e->dfar + (n + k) * lv, lv);
    }
}

static int go_back(Back *e) {
    Past *h = &e->h;
    const NearFar *c = h->c;
    const int dp = h->dp, lv = h->lv, n = h->n, K = (int)c->clusters;
    const int64_t b = c->block;
    if (!go_by(e)) return 0;
    const End *end = e->ends + e->renewals - 1;
    load_end(e, end);
    memset(e->sum, 0, sizeof(float) * K * dp);
    memset(e->dvalue, 0, sizeof(float) * K * lv);
    for (int64_t t = e->first + e->count - 1; t >= e->first; t--) {
        const int64_t tokens = least_of((t + 1) * b, c->S) - (t * b > c->S - c->L ? t * b : c->S - c->L);
        load_heavy(h, end->heavy, h->shared, h->values, h->mass);
        summarize_clusters(h);
        memcpy(h->tau, e->tau + (t - e->first) * K, sizeof(float) * K);
        memset(e->dmu, 0, sizeof(float) * (n + K) * dp);
        memset(e->dfar, 0, sizeof(float) * (n + K) * lv);
        for (int64_t i = 0; i < tokens * c->G; i += PIECE)
            piece_backward(e, end->cluster, t, i, (int)least_of(PIECE, tokens * c->G - i));
        for (int i = 0; i < n; i++) {
            if (end->heavy[i] < 0) continue;
            add_row(e->dY + end->heavy[i] * dp, 1, e->dmu + i * dp, dp);
            add_row(e->dV + end->heavy[i] * lv, 1, e->dfar + i * lv, lv);
        }
        add_sums(e);
        if (t * b != end->start && t > e->first) {
            give_keys(e, end->cluster, (t - 2) * b, (t - 1) * b);
            take_off(e, end->cluster, t - 2);
            continue;
        }
        give_keys(e, end->cluster, 0, (t - 1) * b);
        memset(e->sum, 0, sizeof(float) * K * dp);
        memset(e->dvalue, 0, sizeof(float) * K * lv);
        if (t > e->first) load_end(e, --end);
    }
    return 1;
}

static void write_gradients(const Back *e) {
    const NearFar *c = e->h.c;
    for (int64_t j = 0; j < c->S; j++) {
        put_row(of(c->dy, e->h.z, 0) + j * c->dy.token, (float)c->factor, e->dY + j * e->h.dp, c->d);
        memcpy(of(c->dvalues, e->h.z, 0) + j * c->dvalues.token, e->dV + j * e->h.lv, sizeof(float) * c->dv);
    }
}

/* close_back frees the memory, also after a return of 0. */
static int open_back(Back *e, const NearFar *c, int64_t z, float *memory) {
    const size_t d = c->d, dp = up(d), lv = up(c->dv), S = c->S, K = c->clusters, M = c->heavy + K;
    const size_t wide = (2 * c->block + M) * PIECE;
    *e = (Back){.first = (c->S - c->L) / c->block};
    e->count = (c->S - 1) / c->block - e->first + 1;
    open_past(&e->h, c, z, memory);
    const Piece pieces[] = {
        {&e->tau, e->count * K}, {&e->dY, S * dp}, {&e->dV, S * lv}, {&e->sum, K * dp}, {&e->dvalue, K * lv},
        {&e->dmu, M * dp}, {&e->dfar, M * lv}, {&e->A, wide}, {&e->B, wide}, {&e->Q, PIECE * dp}, {&e->Qt, d * PIECE},
        {&e->G, PIECE * lv}, {&e->Gt, lv * PIECE}, {&e->O, PIECE * dp}};
    const size_t number = sizeof pieces / sizeof *pieces;
    e->memory = all_of(sizeof(float) * place_pieces(pieces, number, NULL));
    e->ends = calloc(e->count + 1, sizeof *e->ends);
    if (!e->memory || !e->ends) return 0;
    place_pieces(pieces, number, e->memory);
    memset(e->dY, 0, sizeof(float) * S * dp);
    memset(e->dV, 0, sizeof(float) * S * lv);
    return 1;
}

static void close_back(Back *e) {
    for (int64_t i = 0; e->ends && i < e->renewals; i++)
        free(e->ends[i].cluster), free(e->ends[i].heavy), free(e->ends[i].sums);
    free(e->ends), free(e->memory);
}

static int backward_past(const NearFar *c, int64_t z, float *memory) {
    Back e;
    const int done = open_back(&e, c, z, memory) && go_back(&e);
    if (done) write_gradients(&e);
    close_back(&e);
    return done;
}

int near_far_causal_backward(const NearFar *c) { return each_past_head(c, backward_past); }
