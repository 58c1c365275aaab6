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
static void accumulate_state(Head *e, int64_t start, int64_t stop) {
    memset(e->S, 0, sizeof(float) * (e->dv + 1) * e->ld);
    for (int m = 0; m < e->Mp; m++) e->ref[m] = EMPTY_REF;
    for (int64_t t = start; t < stop; t += CHUNK) {
        int n = stop - t < CHUNK ? stop - t : CHUNK;
        load_keys(e, t, n);
        project(e, n, e->Y, e->K);
        update_reference(e, n, e->ref, e->new_ref);
        if (rescale_factors(e->Mp, e->ref, e->new_ref, e->factor)) {
            scale_columns(e, e->S, e->factor, e->S);
            memcpy(e->ref, e->new_ref, sizeof(float) * e->Mp);
        }
        exponentiate(e, n, e->K, e->token_offset, e->ref, -1);
        matmul(FULL, e->dv + 1, e->Mp, n, e->V, 1, e->lv, e->K, e->ld, e->S, e->ld, 1);
    }
}

/* Normalizes the state to [U, 1] and writes log z to `new_ref`. Part 0 of a head stores both in the output. */
static void normalize_state(Head *e) {
    float *logs = head_ptr(e->c->logs, e->b, e->h), *to = head_ptr(e->c->states, e->b, e->h), *z = e->S + e->dv * e->ld;
    for (int m = 0; m < e->Mp; m++) e->factor[m] = m < e->M && z[m] > 0 ? 1 / z[m] : 0;
    for (int m = 0; m < e->M; m++) e->new_ref[m] = z[m] > 0 ? (e->ref[m] + log2f(z[m])) * LN2 : 0;
    scale_columns(e, e->S, e->factor, e->S);
    for (int m = 0; m < e->M; m++) z[m] = 1;
    if (e->part) return;
    memcpy(logs, e->new_ref, sizeof(float) * e->M);
    for (int i = 0; i <= e->dv; i++) memcpy(to + (int64_t)i * e->M, e->S + i * e->ld, sizeof(float) * e->M);
}

static void set_query_offsets(Head *e, const float *logs) {
    for (int m = 0; m < e->Mp; m++) e->offset[m] = m < e->M ? logs[m] * LOG2E + e->bias[m] : -INFINITY;
}

static void queries_forward(Head *e) {
    const Range range = part_range(e, e->c->L);
    transpose(e->dv, e->M, e->S, e->ld, e->St, e->lv);
    set_query_offsets(e, e->new_ref);
    for (int64_t t = range.start; t < range.stop; t += CHUNK) {
        int n = range.stop - t < CHUNK ? range.stop - t : CHUNK;
        load_queries(e, t, n);
        query_features(e, n, e->offset, NULL);
        matmul(FULL, n, e->dvp, e->M, e->Q, e->ld, 1, e->St, e->lv, e->dvalues, e->lv, 0);
        float *logsum = head_ptr(e->c->logsum, e->b, e->h) + t;
        for (int i = 0; i < n; i++) {
            float scale = 1 / e->row_sum[i], *out = e->dvalues + i * e->lv;
            logsum[i] = (e->row_max[i] + log2f(e->row_sum[i])) * LN2;
            for (int p = 0; p < e->dvp; p += LANES) AT(out + p) *= scale;
        }
        store_tokens(e, e->c->out, t, n, e->dv, e->dvalues, e->lv);
    }
}

/* Writes the gradients of queries, and adds the gradient of the state, relative to `ref`, to dS. */
static void queries_backward(Head *e) {
    const Range range = part_range(e, e->c->L);
    const float *logs = head_ptr(e->c->logs, e->b, e->h);
    load_state(e, head_ptr(e->c->states, e->b, e->h), e->S);
    memset(e->dS, 0, sizeof(float) * (e->dv + 1) * e->ld);
    set_query_offsets(e, logs);
    for (int m = 0; m < e->Mp; m++) e->ref[m] = m < e->M ? logs[m] * LOG2E : 0;
    for (int64_t t = range.start; t < range.stop; t += CHUNK) {
        int n = range.stop - t < CHUNK ? range.stop - t : CHUNK;
        const float *logsum = head_ptr(e->c->logsum, e->b, e->h) + t;
        load_queries(e, t, n);
        load_gradients(e, t, n);
        for (int i = 0; i < n; i++) e->token_offset[i] = -logsum[i] * LOG2E;
        project(e, n, e->X, e->Q);
        exponentiate(e, n, e->Q, e->token_offset, e->offset, 1);
        matmul(FULL, n, e->Mp, e->dv + 1, e->G, e->lv, 1, e->S, e->ld, e->D, e->ld, 0);
        matmul(FULL, e->dv + 1, e->Mp, n, e->G, 1, e->lv, e->Q, e->ld, e->dS, e->ld, 1);
        write_query_gradients(e, t, n);
    }
}

static void forward_single(Head *e) {
    accumulate_state(e, 0, e->c->S);
    normalize_state(e);
    queries_forward(e);
}

static void backward_single(Head *e) {
    queries_backward(e);
    keys_backward(e, 0, e->c->S, e->dS, e->ref);
}

/* Several threads per head: each thread writes its partial sum (dv + 2, Mp), with the reference as the last row. After
   all threads have finished, each thread adds the partial sums of the head. */
static float *partial_sum(const Head *e, int64_t part) {
    return e->partial_sums + ((e->b * e->c->H + e->h) * e->parts + part) * (e->dv + 2) * e->Mp;
}

static void store_partial_sum(Head *e, const float *S) {
    float *to = partial_sum(e, e->part);
    for (int i = 0; i <= e->dv; i++) memcpy(to + i * e->Mp, S + i * e->ld, sizeof(float) * e->Mp);
    memcpy(to + (e->dv + 1) * e->Mp, e->ref, sizeof(float) * e->Mp);
}

static void reduce_partial_sums(Head *e, float *S) {
    const int last = (e->dv + 1) * e->Mp;
    memset(S, 0, sizeof(float) * (e->dv + 1) * e->ld);
    for (int m = 0; m < e->Mp; m += LANES) {
        vec top = AT(partial_sum(e, 0) + last + m);
        for (int64_t s = 1; s < e->parts; s++) top = maximum(top, AT(partial_sum(e, s) + last + m));
        AT(e->ref + m) = top;
        for (int64_t s = 0; s < e->parts; s++) {
            const float *from = partial_sum(e, s) + m;
            vec factor = exp2_vec(AT(from + last) - top);
            for (int i = 0; i <= e->dv; i++) AT(S + i * e->ld + m) += factor * AT(from + i * e->Mp);
        }
    }
}

static void forward_partial(Head *e) {
    const Range range = part_range(e, e->c->S);
    accumulate_state(e, range.start, range.stop);
    store_partial_sum(e, e->S);
}

static void forward_finish(Head *e) {
    reduce_partial_sums(e, e->S);
    normalize_state(e);
    queries_forward(e);
}

static void backward_partial(Head *e) {
    queries_backward(e);
    store_partial_sum(e, e->dS);
}

static void backward_finish(Head *e) {
    const Range range = part_range(e, e->c->S);
    reduce_partial_sums(e, e->dS);
    keys_backward(e, range.start, range.stop, e->dS, e->ref);
}

static int for_each_shared_head(const Call *c, void (*single)(Head *e), void (*partial)(Head *e),
                                void (*finish)(Head *e)) {
    const int64_t heads = c->B * c->H, parts = c->dweights.data || !heads ? 1 : c->threads / heads;
    if (parts < 2) return for_each_head(c, 1, NULL, single);
    float *partial_sums = aligned_alloc(64, sizeof(float) * round_up(c->M) * (c->dv + 2) * heads * parts);
    if (!partial_sums) return NO_MEMORY;
    int error = for_each_head(c, parts, partial_sums, partial);
    if (error == OK) error = for_each_head(c, parts, partial_sums, finish);
    free(partial_sums);
    return error;
}

int bidirectional_forward(const Call *c) {
    return for_each_shared_head(c, forward_single, forward_partial, forward_finish);
}

int bidirectional_backward(const Call *c) {
    return for_each_shared_head(c, backward_single, backward_partial, backward_finish);
}

/* ---- Causal: query i attends to keys up to i + S - L ---- */

/* Sets A to 0 above the diagonal where matmul with LOWER_A or UPPER_A reads A. */
static void clear_upper(float *A, int n) {
    for (int i = 0; i < n; i++) {
        int stop = (i / ROWS + 1) * ROWS;
        for (int j = i + 1; j < (stop < n ? stop : n); j++) A[i * CHUNK + j] = 0;
    }
}

/* Forward pass of n tokens. The state St (Mp, lv), with z in column dv, is relative to ref. If a denominator is below
   TINY, returns 0 and leaves the state unchanged: a later key of the chunk makes the terms of an earlier row
   underflow. A single token always succeeds, because its largest term is at least 1. */
static int forward_tokens(Head *e, int64_t start, int n, float *ref, int *any_key) {
    const int64_t key = start + e->c->S - e->c->L;
    const int columns = round_up(n);
    load_queries(e, start, n);
    load_keys(e, key, n);
    for (int j = n; j < columns; j++) e->token_offset[j] = -INFINITY;
    transpose(n, e->d, e->Y, e->dp, e->Yt, CHUNK);
    matmul(FULL, e->Mp, columns, e->d, e->w2, e->dp, 1, e->Yt, CHUNK, e->Kt, CHUNK, 0);
    float *z_past = e->dS, *z_new = e->dS + e->Mp;  /* sums of features: earlier keys; keys of this chunk */
    for (int m = 0; m < e->Mp; m++) {
        float *k = e->Kt + m * CHUNK;
        vec top = AT(k) + AT(e->token_offset), sum = {0};
        for (int j = LANES; j < columns; j += LANES) top = maximum(top, AT(k + j) + AT(e->token_offset + j));
        float chunk_max = reduce_max(top), new_ref = chunk_max > ref[m] ? chunk_max : ref[m];
        for (int j = 0; j < columns; j += LANES)
            sum += AT(k + j) = exp2_vec(AT(k + j) + AT(e->token_offset + j) - new_ref);
        e->new_ref[m] = new_ref;
        z_new[m] = reduce_sum(sum);
    }
    int changed = rescale_factors(e->Mp, ref, e->new_ref, e->factor);
    for (int m = 0; m < e->Mp; m++) z_past[m] = e->St[m * e->lv + e->dv] * (changed ? e->factor[m] : 1);
    for (int m = 0; m < e->Mp; m++) e->offset[m] = e->new_ref[m] + e->bias[m];
    query_features(e, n, e->offset, z_past);
    matmul(LOWER_C, n, columns, e->M, e->Q, e->ld, 1, e->Kt, CHUNK, e->A, CHUNK, 0);
    clear_upper(e->A, n);
    int has_key[CHUNK];
    for (int i = 0; i < n; i++) {
        has_key[i] = i ? has_key[i - 1] : *any_key;
        has_key[i] |= !masked(e, key + i);
        for (int j = 0; j <= i; j++) e->row_sum[i] += e->A[i * CHUNK + j];
        if (n > 1 && has_key[i] && e->row_sum[i] < TINY) return 0;
    }
    *any_key = has_key[n - 1];
    if (changed) {
        for (int m = 0; m < e->M; m++)
            for (int p = 0; p < e->lv; p += LANES) AT(e->St + m * e->lv + p) *= e->factor[m];
        memcpy(ref, e->new_ref, sizeof(float) * e->Mp);
    }
    matmul(FULL, n, e->dvp, e->M, e->Q, e->ld, 1, e->St, e->lv, e->dvalues, e->lv, 0);
    matmul(LOWER_A, n, e->dvp, n, e->A, CHUNK, 1, e->V, e->lv, e->dvalues, e->lv, 1);
    float *logsum = head_ptr(e->c->logsum, e->b, e->h) + start;
    for (int i = 0; i < n; i++) {
        float *out = e->dvalues + i * e->lv, scale = has_key[i] ? 1 / e->row_sum[i] : 0;
        logsum[i] = has_key[i] ? e->row_max[i] + log2f(e->row_sum[i]) : EMPTY_LOGSUM;
        for (int p = 0; p < e->dvp; p += LANES) AT(out + p) *= scale;
    }
    store_tokens(e, e->c->out, start, n, e->dv, e->dvalues, e->lv);
    matmul(FULL, e->M, e->dvp, n, e->Kt, CHUNK, 1, e->V, e->lv, e->St, e->lv, 1);
    for (int m = 0; m < e->M; m++) e->St[m * e->lv + e->dv] = z_past[m] + z_new[m];
    return 1;
}

static int64_t segment_count(const Call *c) { return (c->L + c->segment - 1) / c->segment; }
static int64_t chunk_count(int64_t n) { return (n + CHUNK - 1) / CHUNK; }

/* State (dv + 1, M) before segment i, and its reference, as the forward pass stores them. */
static float *saved_state(const Head *e, int64_t i) {
    return head_ptr(e->c->states, e->b, e->h) + i * (e->dv + 1) * e->M;
}
static float *saved_reference(const Head *e, int64_t i) { return head_ptr(e->c->logs, e->b, e->h) + i * e->M; }

static void forward_head(Head *e) {
    const Call *c = e->c;
    const int64_t before = c->S - c->L;
    uint8_t *levels = c->levels + (e->b * c->H + e->h) * chunk_count(c->L);
    int any_key = 0;
    accumulate_state(e, 0, before);
    for (int64_t j = 0; j < before; j++) any_key |= !masked(e, j);
    memset(e->St, 0, sizeof(float) * e->Mp * e->lv);
    transpose(e->dv + 1, e->M, e->S, e->ld, e->St, e->lv);
    for (int64_t t = 0; t < c->L; t += CHUNK) {
        int n = c->L - t < CHUNK ? c->L - t : CHUNK;
        if (t % c->segment == 0) {
            transpose(e->M, e->dv + 1, e->St, e->lv, saved_state(e, t / c->segment), e->M);
            memcpy(saved_reference(e, t / c->segment), e->ref, sizeof(float) * e->M);
        }
        if (!(levels[t / CHUNK] = !forward_tokens(e, t, n, e->ref, &any_key))) continue;
        for (int i = 0; i < n; i++) forward_tokens(e, t + i, 1, e->ref, &any_key);
    }
}

/* A piece of tokens in the backward pass: features K (size, ld); the state S (dv + 1, ld) before the piece, relative
   to `ref_before`; the reference `ref` after the piece. */
typedef struct {
    float *K, *S, *ref_before, *ref;
} Piece;

static Piece piece_at(const Head *e, float *memory, int size, int i) {
    float *K = memory + i * piece_floats(e, size), *S = K + (size_t)size * e->ld;
    float *ref_before = S + (size_t)(e->dv + 1) * e->ld;
    return (Piece){K, S, ref_before, ref_before + e->Mp};
}

/* Writes the gradients of n tokens. On entry dS is the gradient of the state after the tokens, on return of the state
   before the tokens, relative to `ref`. */
static void backward_tokens(Head *e, int64_t start, int n, Piece *piece) {
    const int64_t key = start + e->c->S - e->c->L;
    const int columns = round_up(n);
    const float *logsum = head_ptr(e->c->logsum, e->b, e->h) + start;
    if (rescale_factors(e->Mp, piece->ref, e->ref, e->factor)) {
        scale_columns(e, e->dS, e->factor, e->dS);
        memcpy(e->ref, piece->ref, sizeof(float) * e->Mp);
    }
    if (rescale_factors(e->Mp, piece->ref_before, piece->ref, e->factor))
        scale_columns(e, piece->S, e->factor, piece->S);
    load_queries(e, start, n);
    load_gradients(e, start, n);
    load_keys(e, key, n);
    float *scratch = e->K;
    e->K = piece->K;
    for (int m = 0; m < e->Mp; m++) e->offset[m] = piece->ref[m] + e->bias[m];
    for (int i = 0; i < n; i++) e->token_offset[i] = -logsum[i];
    project(e, n, e->X, e->Q);
    exponentiate(e, n, e->Q, e->token_offset, e->offset, 1);

    transpose(n, e->dv + 1, e->V, e->lv, e->Vt, CHUNK);
    transpose(n, e->M, e->K, e->ld, e->Kt, CHUNK);
    matmul(LOWER_C, n, columns, e->dv + 1, e->G, e->lv, 1, e->Vt, CHUNK, e->dA, CHUNK, 0);
    matmul(LOWER_C, n, columns, e->M, e->Q, e->ld, 1, e->Kt, CHUNK, e->A, CHUNK, 0);
    clear_upper(e->dA, n);
    clear_upper(e->A, n);

    matmul(FULL, n, e->Mp, e->dv + 1, e->G, e->lv, 1, piece->S, e->ld, e->D, e->ld, 0);
    matmul(LOWER_A, n, e->Mp, n, e->dA, CHUNK, 1, e->K, e->ld, e->D, e->ld, 1);
    write_query_gradients(e, start, n);

    transpose(e->dv, e->M, e->dS, e->ld, e->St, e->lv);
    matmul(FULL, n, e->dvp, e->M, e->K, e->ld, 1, e->St, e->lv, e->dvalues, e->lv, 0);
    matmul(UPPER_A, n, e->dvp, n, e->A, 1, CHUNK, e->G, e->lv, e->dvalues, e->lv, 1);
    matmul(FULL, n, e->Mp, e->dv + 1, e->V, e->lv, 1, e->dS, e->ld, e->D, e->ld, 0);
    matmul(UPPER_A, n, e->Mp, n, e->dA, 1, CHUNK, e->Q, e->ld, e->D, e->ld, 1);
    write_key_gradients(e, key, n);

    matmul(FULL, e->dv + 1, e->Mp, n, e->G, 1, e->lv, e->Q, e->ld, e->dS, e->ld, 1);
    e->K = scratch;
}

/* Computes the pieces of `count` tokens from the state S before the tokens, relative to `ref_before`. */
static void compute_pieces(Head *e, int64_t start, int count, int size, const float *S, const float *ref_before,
                           float *memory) {
    const size_t state = sizeof(float) * (e->dv + 1) * e->ld, references = sizeof(float) * e->Mp;
    float *scratch = e->K;
    for (int t = 0, i = 0; t < count; t += size, i++) {
        const int n = count - t < size ? count - t : size;
        Piece piece = piece_at(e, memory, size, i), next = piece_at(e, memory, size, i + 1);
        if (i == 0) {
            memcpy(piece.S, S, state);
            memcpy(piece.ref_before, ref_before, references);
        }
        e->K = piece.K;
        load_keys(e, start + t + e->c->S - e->c->L, n);
        project(e, n, e->Y, e->K);
        update_reference(e, n, piece.ref_before, piece.ref);
        exponentiate(e, n, e->K, e->token_offset, piece.ref, -1);
        if (t + size >= count) break;
        if (rescale_factors(e->Mp, piece.ref_before, piece.ref, e->factor))
            scale_columns(e, piece.S, e->factor, next.S);
        else memcpy(next.S, piece.S, state);
        memcpy(next.ref_before, piece.ref, references);
        matmul(FULL, e->dv + 1, e->Mp, n, e->V, 1, e->lv, e->K, e->ld, next.S, e->ld, 1);
    }
    e->K = scratch;
}

/* Backward pass of `count` tokens in pieces of `size`, last piece first. A piece with level 1 is processed token by
   token. S and ref_before are the state and reference before the tokens. */
static void backward_pieces(Head *e, int64_t start, int count, int size, const uint8_t *levels, const float *S,
                            const float *ref_before, float *memory) {
    compute_pieces(e, start, count, size, S, ref_before, memory);
    for (int i = (count - 1) / size; i >= 0; i--) {
        Piece piece = piece_at(e, memory, size, i);
        const int64_t first = start + i * size;
        const int n = count - i * size < size ? count - i * size : size;
        if (!levels || !levels[i]) {
            backward_tokens(e, first, n, &piece);
            continue;
        }
        float *tokens = aligned_alloc(64, sizeof(float) * n * piece_floats(e, 1));
        if (tokens) backward_pieces(e, first, n, 1, NULL, piece.S, piece.ref_before, tokens);
        else e->error = NO_MEMORY;
        free(tokens);
    }
}

static void backward_head(Head *e) {
    const Call *c = e->c;
    const uint8_t *levels = c->levels + (e->b * c->H + e->h) * chunk_count(c->L);
    memset(e->dS, 0, sizeof(float) * (e->dv + 1) * e->ld);
    for (int m = 0; m < e->Mp; m++) e->ref[m] = m < e->M ? -EMPTY_REF : 0;  /* no token follows */
    for (int64_t i = segment_count(c) - 1; i >= 0; i--) {
        int64_t start = i * c->segment, count = c->L - start < c->segment ? c->L - start : c->segment;
        load_state(e, saved_state(e, i), e->S);
        memcpy(e->new_ref, saved_reference(e, i), sizeof(float) * e->M);
        for (int m = e->M; m < e->Mp; m++) e->new_ref[m] = 0;  /* logs of padding are below 0: its reference stays 0 */
        backward_pieces(e, start, count, CHUNK, levels + start / CHUNK, e->S, e->new_ref, e->pieces);
    }
    memset(e->new_ref, 0, sizeof(float) * e->Mp);
    memcpy(e->new_ref, saved_reference(e, 0), sizeof(float) * e->M);
    if (rescale_factors(e->Mp, e->new_ref, e->ref, e->factor)) scale_columns(e, e->dS, e->factor, e->dS);
    keys_backward(e, 0, c->S - c->L, e->dS, e->new_ref);
}

int causal_forward(const Call *c) { return for_each_head(c, 1, NULL, forward_head); }

int causal_backward(const Call *c) { return for_each_head(c, 1, NULL, backward_head); }
