/* Attention with positive exponential features on CPUs, in float32: loops over the tokens of a head (head.h).

   closed_form.py has the formulas and names. A thread processes a head, or a part of it, in chunks of 64 tokens. The
   features of a chunk stay in the second-level cache during all their products. */

#include "head.h"

/* ---- Bidirectional ---- */

static void load_state(const Head *e, const float *from, float *S) {
    for (int i = 0; i <= e->dv; i++) {
        memcpy(S + i * e->ld, from + (int64_t)i * e->M, sizeof(float) * e->M);
        memset(S + i * e->ld + e->M, 0, sizeof(float) * (e->ld - e->M));
    }
}

/* Computes the state S of keys [start, stop) and its reference. */
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

/* Normalizes the state to [U, 1] and puts log z into `fresh`. The first part of a head writes both. */
static void normalise(Head *e) {
    float *logs = of(e->c->logs, e->b, e->h), *to = of(e->c->states, e->b, e->h), *z = e->S + e->dv * e->ld;
    for (int m = 0; m < e->Mp; m++) e->factor[m] = m < e->M && z[m] > 0 ? 1 / z[m] : 0;
    for (int m = 0; m < e->M; m++) e->fresh[m] = z[m] > 0 ? (e->ref[m] + log2f(z[m])) * LN2 : 0;
    scale_columns(e, e->S, e->factor, e->S);
    for (int m = 0; m < e->M; m++) z[m] = 1;
    if (e->part) return;
    memcpy(logs, e->fresh, sizeof(float) * e->M);
    for (int i = 0; i <= e->dv; i++) memcpy(to + (int64_t)i * e->M, e->S + i * e->ld, sizeof(float) * e->M);
}

static void query_offsets(Head *e, const float *logs) {
    for (int m = 0; m < e->Mp; m++) e->offset[m] = m < e->M ? logs[m] * LOG2E + e->bias[m] : -INFINITY;
}

static void queries_forward(Head *e) {
    const Range range = part_of(e, e->c->L);
    transpose(e->dv, e->M, e->S, e->ld, e->St, e->lv);
    query_offsets(e, e->fresh);
    for (int64_t t = range.start; t < range.stop; t += CHUNK) {
        int n = range.stop - t < CHUNK ? range.stop - t : CHUNK;
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

/* Writes the gradients of queries, and that of the state relative to `ref` into dS. */
static void queries_backward(Head *e) {
    const Range range = part_of(e, e->c->L);
    const float *logs = of(e->c->logs, e->b, e->h);
    load_state(e, of(e->c->states, e->b, e->h), e->S);
    memset(e->dS, 0, sizeof(float) * (e->dv + 1) * e->ld);
    query_offsets(e, logs);
    for (int m = 0; m < e->Mp; m++) e->ref[m] = m < e->M ? logs[m] * LOG2E : 0;
    for (int64_t t = range.start; t < range.stop; t += CHUNK) {
        int n = range.stop - t < CHUNK ? range.stop - t : CHUNK;
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
}

static void forward_whole(Head *e) {
    summarise(e, 0, e->c->S);
    normalise(e);
    queries_forward(e);
}

static void backward_whole(Head *e) {
    queries_backward(e);
    keys_backward(e, 0, e->c->S, e->dS, e->ref);
}

/* Variants for threads that share the tokens of a head. Each thread writes its sums, (dv + 2, Mp) with the reference
   last, to `shared`. Then each adds up the sums of all. */
static float *sums_of(const Head *e, int64_t part) {
    return e->shared + ((e->b * e->c->H + e->h) * e->parts + part) * (e->dv + 2) * e->Mp;
}

static void leave_sums(Head *e, const float *S) {
    float *to = sums_of(e, e->part);
    for (int i = 0; i <= e->dv; i++) memcpy(to + i * e->Mp, S + i * e->ld, sizeof(float) * e->Mp);
    memcpy(to + (e->dv + 1) * e->Mp, e->ref, sizeof(float) * e->Mp);
}

static void add_sums(Head *e, float *S) {
    const int last = (e->dv + 1) * e->Mp;
    memset(S, 0, sizeof(float) * (e->dv + 1) * e->ld);
    for (int m = 0; m < e->Mp; m += LANES) {
        vec top = AT(sums_of(e, 0) + last + m);
        for (int64_t s = 1; s < e->parts; s++) top = maximum(top, AT(sums_of(e, s) + last + m));
        AT(e->ref + m) = top;
        for (int64_t s = 0; s < e->parts; s++) {
            const float *from = sums_of(e, s) + m;
            vec factor = exp2_of(AT(from + last) - top);
            for (int i = 0; i <= e->dv; i++) AT(S + i * e->ld + m) += factor * AT(from + i * e->Mp);
        }
    }
}

static void sum_keys(Head *e) {
    const Range range = part_of(e, e->c->S);
    summarise(e, range.start, range.stop);
    leave_sums(e, e->S);
}

static void read_sums(Head *e) {
    add_sums(e, e->S);
    normalise(e);
    queries_forward(e);
}

static void sum_gradients(Head *e) {
    queries_backward(e);
    leave_sums(e, e->dS);
}

static void read_gradients(Head *e) {
    const Range range = part_of(e, e->c->S);
    add_sums(e, e->dS);
    keys_backward(e, range.start, range.stop, e->dS, e->ref);
}

static int run_shared(const Call *c, void (*whole)(Head *e), void (*sum)(Head *e), void (*read)(Head *e)) {
    const int64_t heads = c->B * c->H, parts = c->dweights.data || !heads ? 1 : c->threads / heads;
    if (parts < 2) return run(c, 1, NULL, whole);
    float *shared = aligned_alloc(64, sizeof(float) * up(c->M) * (c->dv + 2) * heads * parts);
    if (!shared) return NO_MEMORY;
    int bad = run(c, parts, shared, sum);
    if (bad == OK) bad = run(c, parts, shared, read);
    free(shared);
    return bad;
}

int bidirectional_forward(const Call *c) { return run_shared(c, forward_whole, sum_keys, read_sums); }

int bidirectional_backward(const Call *c) { return run_shared(c, backward_whole, sum_gradients, read_gradients); }

/* ---- Causal: query i sees keys up to i + S - L ---- */

/* Clears A above the diagonal where triangular products read it. */
static void clear_upper(float *A, int n) {
    for (int i = 0; i < n; i++) {
        int stop = (i / ROWS + 1) * ROWS;
        for (int j = i + 1; j < (stop < n ? stop : n); j++) A[i * CHUNK + j] = 0;
    }
}

/* Forward pass of n tokens. St (Mp, lv), with z in column dv, is the state relative to ref. Returns 0 and leaves the
   state unchanged if a denominator is below TINY: a later key of the chunk is so large that terms of an earlier row
   underflow. A single token cannot fail, because its largest term is at least 1. */
static int forward_tokens(Head *e, int64_t start, int n, float *ref, int *seen) {
    const int64_t key = start + e->c->S - e->c->L;
    const int columns = up(n);
    load_queries(e, start, n);
    load_keys(e, key, n);
    for (int j = n; j < columns; j++) e->row[j] = -INFINITY;
    transpose(n, e->d, e->Y, e->dp, e->Yt, CHUNK);
    product(ALL, e->Mp, columns, e->d, e->w2, e->dp, 1, e->Yt, CHUNK, e->Kt, CHUNK, 0);
    float *z_now = e->dS, *z_new = e->dS + e->Mp;  /* feature sums of earlier keys, and of these keys */
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

/* Stored state (dv + 1, M) before segment i, and its reference. */
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

/* Data of a piece of tokens in the backward sweep: features K (size, ld), the state S before it (dv + 1, ld)
   relative to `old`, and its own reference `ref`. */
typedef struct {
    float *K, *S, *old, *ref;
} Piece;

static Piece piece_at(const Head *e, float *memory, int size, int i) {
    float *K = memory + i * piece_size(e, size), *S = K + (size_t)size * e->ld, *old = S + (size_t)(e->dv + 1) * e->ld;
    return (Piece){K, S, old, old + e->Mp};
}

/* Writes the gradients of n tokens. Updates dS, the gradient of the state relative to `ref`, from after to before
   them. */
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

/* Computes the pieces of `count` tokens from the state S before them, relative to `old`. */
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

/* Backward sweep over `count` tokens in pieces of `size`; pieces with level 1 go token by token. S and old are the
   state and reference before them. */
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
    for (int m = 0; m < e->Mp; m++) e->ref[m] = m < e->M ? -NONE : 0;  /* no token follows */
    for (int64_t i = segments(c) - 1; i >= 0; i--) {
        int64_t start = i * c->segment, count = c->L - start < c->segment ? c->L - start : c->segment;
        load_state(e, kept_state(e, i), e->S);
        memcpy(e->fresh, kept_ref(e, i), sizeof(float) * e->M);
        for (int m = e->M; m < e->Mp; m++) e->fresh[m] = 0;  /* padding has logs below 0, so that its reference stays */
        sweep(e, start, count, CHUNK, levels + start / CHUNK, e->S, e->fresh, e->pieces);
    }
    memset(e->fresh, 0, sizeof(float) * e->Mp);
    memcpy(e->fresh, kept_ref(e, 0), sizeof(float) * e->M);
    if (factors(e->Mp, e->fresh, e->ref, e->factor)) scale_columns(e, e->dS, e->factor, e->dS);
    keys_backward(e, 0, c->S - c->L, e->dS, e->fresh);
}

int causal_forward(const Call *c) { return run(c, 1, NULL, forward_head); }

int causal_backward(const Call *c) { return run(c, 1, NULL, backward_head); }
