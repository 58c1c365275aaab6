/* Backward pass of causal_forward.c. The forward pass stores retrieved keys and log-sums.

   The first sweep recomputes the clusters, block by block. It stores the cluster sums at the end of each epoch, and
   tau of each block, because recovering tau by subtraction would lose precision. The second sweep visits the blocks in
   reverse order. It removes the keys of each block from their clusters, and adds to these keys the gradients of means
   and sums of all later blocks: dy_j = dmu / N and dv_j = dV. Let G = [g, -g.out]. The gradient of a logit is its
   weight times G.[v, 1]. */

#include "near_far.h"

enum { SUMS = 3 };  /* arrays of cluster sums: ysum, values, mass */

/* State at the end of an epoch. */
typedef struct {
    int32_t *cluster, *heavy;      /* (S): cluster of each key; (n): positions of heavy hitters, -1 if missing */
    float *sums;                   /* ysum, values and mass of the clusters */
    int64_t renewal;               /* position of the renewal that starts the epoch */
    int K;
} EpochEnd;

/* A head in the backward pass. */
typedef struct {
    Past h;
    EpochEnd *ends;                        /* of each epoch */
    int64_t first, count, renewals;        /* first block; numbers of blocks and of renewals */
    float *memory, *tau, *dY, *dV;         /* all arrays; (count, K); (S, dp), (S, lv) */
    float *dsum, *dvalue_sum;              /* (K, dp), (K, lv): sums over blocks */
    float *dmu, *dvalues;                  /* (M, dp), (M, lv): heavy hitters and clusters of one block */
    float *A, *B;                          /* (2 b + M, PIECE): weights, and gradients of logits */
    float *Q, *Qt, *G, *Gt, *O;            /* of a piece */
    float top[PIECE], grad_out[PIECE];     /* log-sums; g.out */
} Backward;

static void *allocate(size_t bytes) { return aligned_alloc(64, (bytes + 63) / 64 * 64 + 64); }

/* Returns the arrays of cluster sums and their sizes. */
static void cluster_sums(const Past *h, int K, float *sums[SUMS], size_t sizes[SUMS]) {
    const size_t dp = h->dp, lv = h->lv, n = h->n;
    float *each[SUMS] = {h->ysum, h->values + n * lv, h->mass + n};
    const size_t size[SUMS] = {K * dp, K * lv, K};
    memcpy(sums, each, sizeof each), memcpy(sizes, size, sizeof size);
}

static int save_epoch_end(Backward *e) {
    Past *h = &e->h;
    EpochEnd *end = e->ends + e->renewals++;
    float *sums[SUMS];
    size_t sizes[SUMS], all = 0;
    cluster_sums(h, h->K, sums, sizes);
    for (int i = 0; i < SUMS; i++) all += sizes[i];
    *end = (EpochEnd){allocate(sizeof(int32_t) * h->c->S), allocate(sizeof(int32_t) * h->n),
                      allocate(sizeof(float) * all), h->renewal, h->K};
    if (!end->cluster || !end->heavy || !end->sums) return 0;
    memcpy(end->cluster, h->cluster, sizeof(int32_t) * h->c->S);
    memcpy(end->heavy, h->heavy, sizeof(int32_t) * h->n);
    float *to = end->sums;
    for (int i = 0; i < SUMS; to += sizes[i++]) memcpy(to, sums[i], sizeof(float) * sizes[i]);
    return 1;
}

/* Restores the cluster sums at the end of an epoch. */
static void restore_epoch_end(Backward *e, const EpochEnd *end) {
    Past *h = &e->h;
    const float *from = end->sums;
    float *sums[SUMS];
    size_t sizes[SUMS];
    cluster_sums(h, h->K = end->K, sums, sizes);
    for (int i = 0; i < SUMS; from += sizes[i++]) memcpy(sums[i], from, sizeof(float) * sizes[i]);
}

/* Subtracts the keys of block t from the sums of their clusters. */
static void remove_block(Backward *e, const int32_t *cluster, int64_t t) {
    Past *h = &e->h;
    const int dp = h->dp, lv = h->lv, n = h->n;
    for (int64_t j = t * h->c->block, stop = j + h->c->block; j < stop; j++) {
        const int k = cluster[j];
        if (k < 0) continue;
        add_scaled(h->ysum + k * dp, -1, key_row(h, j), dp);
        add_scaled(h->values + (n + k) * lv, -1, h->V + j * lv, lv);
        h->mass[n + k] -= 1;
    }
}

/* First sweep: recomputes the clusters of all blocks. Returns 0 if out of memory. */
static int replay_past(Backward *e) {
    Past *h = &e->h;
    const NearFar *c = h->c;
    for (int64_t i = 0; i < e->count; i++) {
        if (!advance(h, e->first + i)) return 0;
        summarize_clusters(h);
        memcpy(e->tau + i * c->clusters, h->tau, sizeof(float) * c->clusters);
        const int ends = i + 1 == e->count || (e->first + i + 1) * c->block == next_renewal(h->renewal, c->block);
        if (ends && !save_epoch_end(e)) return 0;
    }
    return 1;
}

/* Adds the gradients of the cluster sums to keys [j, stop) of clusters. */
static void add_key_gradients(Backward *e, const int32_t *cluster, int64_t j, int64_t stop) {
    const int d = e->h.d, dp = e->h.dp, lv = e->h.lv;
    for (; j < stop; j++) {
        const int k = cluster[j];
        if (k < 0) continue;
        add_scaled(e->dY + j * dp, 1, e->dsum + k * dp, d);
        add_scaled(e->dV + j * lv, 1, e->dvalue_sum + k * lv, lv);
    }
}

/* Recomputes the logits of the retrieved keys of R queries, in h.work.retrieved. Replaces the logits of clusters
   (K, ld) by the weights of remaining keys relative to e->top, in base 2. */
static void recompute_retrieved(Backward *e, const int32_t *cluster, const int32_t *positions, int R, int ld,
                                float *logits) {
    Past *h = &e->h;
    const NearFar *c = h->c;
    const int dp = h->dp;
    start_remainder(h, R, ld, e->Q, 1);
    for (int r = 0; r < R; r++) {
        const int32_t *keys = positions + r * c->open;
        float *retrieved = h->work.retrieved + r * retrieved_size(h);
        const int n = h->work.count[r];
        for (int i = 0; i < n; i++) retrieved[i] = LOG2E * dot(e->Q + r * dp, key_row(h, keys[i]), dp);
        remove_retrieved(h, r, ld, keys, retrieved, n, cluster);
    }
    remainder_weights(h, e->top, ld, logits);
}

/* Backward pass of queries [i, i + R) of block t; cluster (S) contains the cluster of each key. */
static void piece_backward(Backward *e, const int32_t *cluster, int64_t t, int64_t i, int R) {
    Past *h = &e->h;
    const NearFar *c = h->c;
    const int d = h->d, dp = h->dp, dv = h->dv, lv = h->lv, n = h->n, M = n + h->K, ld = round_up(R);
    const int64_t first = c->S - c->L, b = c->block, from = t > 0 ? (t - 1) * b : 0;
    int32_t *positions = h->work.positions;
    const int64_t start = t * b > first ? t * b : first, stop = min64((t + 1) * b, c->S), tokens = stop - start;
    const int near = (int)(stop - from);
    float *A = e->A, *B = e->B, *shared = A + near * ld, *dshared = B + near * ld;
    memset(e->Q, 0, sizeof(float) * ld * dp);
    memset(e->G, 0, sizeof(float) * ld * lv);
    for (int r = 0; r < R; r++) {
        const int64_t g = (i + r) / tokens, j = start + (i + r) % tokens, at = (h->z * c->G + g) * c->L + j - first;
        const float *grad = head_ptr(c->grad, h->z, g) + (j - first) * c->grad.token;
        set_scaled(e->Q + r * dp, (float)c->factor, head_ptr(c->x, h->z, g) + (j - first) * c->x.token, d);
        memcpy(e->G + r * lv, grad, sizeof(float) * dv);
        e->grad_out[r] = dot(grad, head_ptr(c->out, h->z, g) + (j - first) * c->out.token, dv);
        e->top[r] = c->logsum[at];
        h->work.count[r] = decode_gaps(c->gaps + h->z * c->gap_capacity + c->gap_offset[at], positions + r * c->open);
    }
    transpose(ld, d, e->Q, dp, e->Qt, ld);
    for (int p = 0; p < d * ld; p += LANES) AT(e->Qt + p) *= LOG2E;
    transpose(ld, dv, e->G, lv, e->Gt, ld);
    for (int r = R; r < ld; r++) e->top[r] = e->grad_out[r] = 0;
    matmul(FULL, near, ld, d, h->Y + from * dp, dp, 1, e->Qt, ld, A, ld, 0);
    matmul(FULL, M, ld, d, h->shared, dp, 1, e->Qt, ld, shared, ld, 0);
    matmul(FULL, near, ld, dv, h->V + from * lv, lv, 1, e->Gt, ld, B, ld, 0);
    matmul(FULL, M, ld, dv, h->values, lv, 1, e->Gt, ld, dshared, ld, 0);
    for (int j = 0; j < near; j++)
        for (int r = 0; r < R; r++) {
            const int64_t position = start + (i + r) % tokens;
            if (from + j > position || !unmasked(h, from + j)) A[j * ld + r] = MASKED;
        }
    const vec limit = (vec){0} + 126.0f;
    recompute_retrieved(e, cluster, positions, R, ld, shared + n * ld);
    for (int j = 0; j < near; j++)
        for (int r = 0; r < ld; r += LANES) {
            const vec weight = AT(A + j * ld + r) = exp2_vec(AT(A + j * ld + r) - AT(e->top + r));
            AT(B + j * ld + r) = weight * (AT(B + j * ld + r) - AT(e->grad_out + r));
        }
    for (int j = 0; j < M; j++)
        for (int r = 0; r < ld; r += LANES) {
            float *a = shared + j * ld + r, *g = dshared + j * ld + r;
            const float mass = h->mass[j];
            if (j < n) AT(a) = mass > 0 ? exp2_vec(minimum(AT(a) - AT(e->top + r), limit)) : (vec){0};
            AT(g) = AT(a) * (AT(g) - mass * AT(e->grad_out + r));
        }
    memset(e->O, 0, sizeof(float) * ld * dp);
    for (int r = 0; r < R; r++) {                       /* retrieved keys */
        const float *q = e->Q + r * dp, *grad = e->G + r * lv, *retrieved = h->work.retrieved + r * retrieved_size(h);
        for (int o = 0; o < h->work.count[r]; o++) {
            const int64_t position = positions[r * c->open + o];
            const float *y = key_row(h, position), *v = h->V + position * lv;
            const int k = n + cluster[position];
            const float weight = exp2f(retrieved[o] - e->top[r]), cluster_weight = shared[k * ld + r];
            const float gain = dot(grad, v, lv) - e->grad_out[r];
            add_scaled(e->dV + position * lv, weight - cluster_weight, grad, lv);
            add_scaled(e->dY + position * dp, weight * gain, q, dp);
            add_scaled(e->O + r * dp, weight * gain, y, dp);
            dshared[k * ld + r] -= cluster_weight * gain;
        }
    }
    matmul(FULL, near, dv, R, A, ld, 1, e->G, lv, e->dV + from * lv, lv, 1);
    matmul(FULL, near, d, R, B, ld, 1, e->Q, dp, e->dY + from * dp, dp, 1);
    matmul(FULL, M, dv, R, shared, ld, 1, e->G, lv, e->dvalues, lv, 1);
    matmul(FULL, M, d, R, dshared, ld, 1, e->Q, dp, e->dmu, dp, 1);
    matmul(FULL, R, d, near, B, 1, ld, h->Y + from * dp, dp, e->O, dp, 1);
    matmul(FULL, R, d, M, dshared, 1, ld, h->shared, dp, e->O, dp, 1);
    for (int r = 0; r < R; r++) {
        const int64_t g = (i + r) / tokens, j = start + (i + r) % tokens;
        set_scaled(head_ptr(c->dx, h->z, g) + (j - first) * c->dx.token, (float)c->factor, e->O + r * dp, d);
    }
}

/* Adds the gradients of the cluster sums from the cluster means and values of one block. */
static void accumulate_sum_gradients(Backward *e) {
    Past *h = &e->h;
    const int d = h->d, dp = h->dp, lv = h->lv, n = h->n;
    for (int k = 0; k < h->K; k++) {
        const float N = h->mass[n + k];
        add_scaled(e->dsum + k * dp, N > 0 ? 1 / N : 0, e->dmu + (n + k) * dp, d);
        add_scaled(e->dvalue_sum + k * lv, N > 0, e->dvalues + (n + k) * lv, lv);
    }
}

static int backward_blocks(Backward *e) {
    Past *h = &e->h;
    const NearFar *c = h->c;
    const int dp = h->dp, lv = h->lv, n = h->n, K = (int)c->clusters;
    const int64_t b = c->block;
    if (!replay_past(e)) return 0;
    const EpochEnd *end = e->ends + e->renewals - 1;
    restore_epoch_end(e, end);
    memset(e->dsum, 0, sizeof(float) * K * dp);
    memset(e->dvalue_sum, 0, sizeof(float) * K * lv);
    for (int64_t t = e->first + e->count - 1; t >= e->first; t--) {
        const int64_t tokens = min64((t + 1) * b, c->S) - (t * b > c->S - c->L ? t * b : c->S - c->L);
        load_heavy(h, end->heavy, h->shared, h->values, h->mass);
        summarize_clusters(h);
        memcpy(h->tau, e->tau + (t - e->first) * K, sizeof(float) * K);
        memset(e->dmu, 0, sizeof(float) * (n + K) * dp);
        memset(e->dvalues, 0, sizeof(float) * (n + K) * lv);
        for (int64_t i = 0; i < tokens * c->G; i += PIECE)
            piece_backward(e, end->cluster, t, i, (int)min64(PIECE, tokens * c->G - i));
        for (int i = 0; i < n; i++) {
            if (end->heavy[i] < 0) continue;
            add_scaled(e->dY + end->heavy[i] * dp, 1, e->dmu + i * dp, dp);
            add_scaled(e->dV + end->heavy[i] * lv, 1, e->dvalues + i * lv, lv);
        }
        accumulate_sum_gradients(e);
        if (t * b != end->renewal && t > e->first) {
            add_key_gradients(e, end->cluster, (t - 2) * b, (t - 1) * b);
            remove_block(e, end->cluster, t - 2);
            continue;
        }
        add_key_gradients(e, end->cluster, 0, (t - 1) * b);
        memset(e->dsum, 0, sizeof(float) * K * dp);
        memset(e->dvalue_sum, 0, sizeof(float) * K * lv);
        if (t > e->first) restore_epoch_end(e, --end);
    }
    return 1;
}

static void write_gradients(const Backward *e) {
    const NearFar *c = e->h.c;
    for (int64_t j = 0; j < c->S; j++) {
        set_scaled(head_ptr(c->dy, e->h.z, 0) + j * c->dy.token, (float)c->factor, e->dY + j * e->h.dp, c->d);
        memcpy(head_ptr(c->dvalues, e->h.z, 0) + j * c->dvalues.token, e->dV + j * e->h.lv, sizeof(float) * c->dv);
    }
}

/* Returns 0 if out of memory. free_backward frees the memory in both cases. */
static int init_backward(Backward *e, const NearFar *c, int64_t z, float *memory) {
    const size_t d = c->d, dp = round_up(d), lv = round_up(c->dv), S = c->S, K = c->clusters, M = c->heavy + K;
    const size_t weights = (2 * c->block + M) * PIECE;
    *e = (Backward){.first = (c->S - c->L) / c->block};
    e->count = (c->S - 1) / c->block - e->first + 1;
    init_past(&e->h, c, z, memory);
    const Buffer buffers[] = {
        {&e->tau, e->count * K}, {&e->dY, S * dp}, {&e->dV, S * lv}, {&e->dsum, K * dp}, {&e->dvalue_sum, K * lv},
        {&e->dmu, M * dp}, {&e->dvalues, M * lv}, {&e->A, weights}, {&e->B, weights}, {&e->Q, PIECE * dp},
        {&e->Qt, d * PIECE}, {&e->G, PIECE * lv}, {&e->Gt, lv * PIECE}, {&e->O, PIECE * dp}};
    const size_t number = sizeof buffers / sizeof *buffers;
    e->memory = allocate(sizeof(float) * assign_buffers(buffers, number, NULL));
    e->ends = calloc(e->count + 1, sizeof *e->ends);
    if (!e->memory || !e->ends) return 0;
    assign_buffers(buffers, number, e->memory);
    memset(e->dY, 0, sizeof(float) * S * dp);
    memset(e->dV, 0, sizeof(float) * S * lv);
    return 1;
}

static void free_backward(Backward *e) {
    for (int64_t i = 0; e->ends && i < e->renewals; i++)
        free(e->ends[i].cluster), free(e->ends[i].heavy), free(e->ends[i].sums);
    free(e->ends), free(e->memory);
}

static int backward_past(const NearFar *c, int64_t z, float *memory) {
    Backward e;
    const int done = init_backward(&e, c, z, memory) && backward_blocks(&e);
    if (done) write_gradients(&e);
    free_backward(&e);
    return done;
}

int near_far_causal_backward(const NearFar *c) { return for_each_past(c, backward_past); }
