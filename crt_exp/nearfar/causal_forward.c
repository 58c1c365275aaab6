/* Causal near-far attention of the queries of one call: C version of attend_epoch of nearfar/causal.py.

   One thread processes one key head, block by block. Logits are in base 2. Dense logits have keys as rows and queries
   as columns, as in forward.c. Logits of retrieved keys (scores.c) are contiguous for each query. */

#include "near_far.h"

/* ---- Remaining keys: keys of clusters that a query does not retrieve ----

   The logits of a cluster are modelled as normal, with mean mu and standard deviation sd. Remaining keys have logits
   below `threshold`. Let t = (threshold - mu) / sd, a = t - sd and mills(u) = e^(u^2 / 2) Phi(-u). Each remaining key
   has the weight

       e^threshold mills(-a) / mills(-t)               where t <= 0,
       e^(threshold - t^2 / 2) mills(-a) / Phi(t)      where a < 0 < t,
       e^(mu + sd^2 / 2) Phi(a) / Phi(t)               else.

   No large numbers cancel, and no weight exceeds e^threshold, up to rounding. */

/* mills(u) for u >= 0, with relative error 3e-7: the Chebyshev fit of erfc in Numerical Recipes (6.2), without the
   factor e^(-u^2 / 2). */
INLINE vec mills_ratio(vec u) {
    const vec t = 1.0f / (1.0f + 0.353553391f * u);
    vec p = 0.17087277f * t - 0.82215223f;
    p = p * t + 1.48851587f;
    p = p * t - 1.13520398f;
    p = p * t + 0.27886807f;
    p = p * t - 0.18628806f;
    p = p * t + 0.09678418f;
    p = p * t + 0.37409196f;
    p = p * t + 1.00002368f;
    p = p * t - 1.26551223f;
    return 0.5f * t * exp2_vec(LOG2E * p);
}

INLINE vec abs_vec(vec u) { return blend(u < 0.0f, -u, u); }

/* Phi(u), for u < 0 without the factor e^(-u^2 / 2). half = u^2 / 2 in base 2. */
INLINE vec normal_cdf(vec u, vec half) {
    const vec tail = mills_ratio(abs_vec(u));
    return blend(u < 0.0f, tail, 1.0f - exp2_vec(-half) * tail);
}

void start_remainder(Past *h, int R, int ld, const float *Q, float factor) {
    const int dp = h->dp;
    Work *w = &h->work;
    for (int k = 0; k < h->K; k++)
        for (int r = 0; r < ld; r++) w->remaining[k * ld + r] = h->mass[h->n + k];
    matmul(FULL, R, dp, h->d, Q, dp, 1, h->root, dp, w->z_query, dp, 0);
    for (int r = 0; r < R; r++) w->query_norm[r] = factor * sqrtf(squared_norm(w->z_query + r * dp, dp));
    for (int r = 0; r < ld; r++) w->threshold[r] = INFINITY;
    for (int r = R; r < ld; r++) w->query_norm[r] = 0;
}

void remove_retrieved(Past *h, int r, int ld, const int32_t *positions, const float *logits, int n,
                      const int32_t *cluster) {
    float threshold = INFINITY;
    for (int i = 0; i < n; i++) {
        h->work.remaining[cluster[positions[i]] * ld + r] -= 1;
        threshold = logits[i] < threshold ? logits[i] : threshold;
    }
    h->work.threshold[r] = threshold;
}

void remainder_weights(const Past *h, const float *top, int ld, float *logits) {
    const Work *w = &h->work;
    const vec least = (vec){0} + MIN_SD, none = {0};
    for (int k = 0; k < h->K; k++) {
        const float tau = sqrtf(h->tau[k]);
        for (int r = 0; r < ld; r += LANES) {
            const vec number = AT(w->remaining + k * ld + r), threshold = AT(w->threshold + r) - AT(top + r);
            const vec mu = AT(logits + k * ld + r) - AT(top + r), sd = maximum(tau * AT(w->query_norm + r), least);
            const vec t = LN2 * (threshold - mu) / sd, a = t - sd;
            const vec half_t = 0.5f * LOG2E * t * t, half_a = 0.5f * LOG2E * a * a;
            const vec at = blend(t > 0.0f, threshold - half_t, threshold);
            const vec whole = blend(a < 0.0f, at, mu + 0.5f * LOG2E * sd * sd);
            const vec weight = exp2_vec(whole) * normal_cdf(a, half_a) / normal_cdf(t, half_t);
            AT(logits + k * ld + r) = blend(number > 0.5f, weight, none);
        }
    }
}

/* ---- Dot products and sums of rows at a list of positions ---- */

#if defined(__AVX512F__)
enum { SUM_VECTORS = 8 };

/* Sums each of TOTALS vectors. */
INLINE void reduce_sums(const vec *sum, float *to) {
    __m512 two[4], four[2];
    UNROLL for (int i = 0; i < 4; i++) {
        const __m512 a = (__m512)sum[i], b = (__m512)sum[i + 4];
        two[i] = _mm512_shuffle_f32x4(a, b, 0x44) + _mm512_shuffle_f32x4(a, b, 0xee);      /* halves of i and i + 4 */
    }
    UNROLL for (int i = 0; i < 2; i++)                           /* quarters of i, i + 4, i + 2, i + 6 */
        four[i] = _mm512_shuffle_f32x4(two[i], two[i + 2], 0x88) + _mm512_shuffle_f32x4(two[i], two[i + 2], 0xdd);
    const __m512 pairs = _mm512_shuffle_ps(four[0], four[1], 0x88) + _mm512_shuffle_ps(four[0], four[1], 0xdd);
    const __m512 all = pairs + _mm512_shuffle_ps(pairs, pairs, 0xb1);                      /* 0, 1, 4, 5, 2, 3, 6, 7 */
    const __m512i order = _mm512_setr_epi32(0, 2, 8, 10, 4, 6, 12, 14, 0, 0, 0, 0, 0, 0, 0, 0);
    _mm256_storeu_ps(to, _mm512_castps512_ps256(_mm512_permutexvar_ps(order, all)));
}
#else
enum { SUM_VECTORS = 4 };

INLINE void reduce_sums(const vec *sum, float *to) {
    for (int i = 0; i < SUM_VECTORS; i++) to[i] = reduce_sum(sum[i]);
}
#endif

/* Computes the dot products of a vector (dp) with the rows at n ascending positions. `to` has n + 8 elements. */
static void gather_dots(const float *Y, const int32_t *positions, int n, const float *with, int dp, float *to) {
    for (int i = 0; i < n; i += SUM_VECTORS) {
        const float *rows[SUM_VECTORS];
        vec sum[SUM_VECTORS];
        for (int j = 0; j < SUM_VECTORS; j++) {
            rows[j] = Y + (int64_t)positions[i + j < n ? i + j : n - 1] * dp;
            const float *next = Y + (int64_t)positions[i + j + SUM_VECTORS < n ? i + j + SUM_VECTORS : n - 1] * dp;
            for (int p = 0; p < dp; p += 16) __builtin_prefetch(next + p);
            sum[j] = (vec){0};
        }
        for (int p = 0; p < dp; p += LANES) {
            const vec here = AT(with + p);
            UNROLL for (int j = 0; j < SUM_VECTORS; j++) sum[j] += here * AT(rows[j] + p);
        }
        reduce_sums(sum, to + i);
    }
}

/* ---- A piece of queries ---- */

enum { SUM_TILE = 4 };  /* vectors */

/* Adds the weighted sum of the rows at n ascending positions to out (ld). */
static void gather_sum(const float *rows, int ld, const float *weight, const int32_t *positions, int n, float *out) {
    for (int p = 0; p < ld; p += SUM_TILE * LANES) {
        const int wide = ld - p >= SUM_TILE * LANES;
        if (wide) {
            vec sum[SUM_TILE];
            UNROLL for (int i = 0; i < SUM_TILE; i++) sum[i] = AT(out + p + i * LANES);
            for (int j = 0; j < n; j++) {
                const float *row = rows + (int64_t)positions[j] * ld + p;
                UNROLL for (int i = 0; i < SUM_TILE; i++) sum[i] += weight[j] * AT(row + i * LANES);
            }
            UNROLL for (int i = 0; i < SUM_TILE; i++) AT(out + p + i * LANES) = sum[i];
            continue;
        }
        for (int q = p; q < ld; q += LANES) {
            vec sum = AT(out + q);
            for (int j = 0; j < n; j++) sum += weight[j] * AT(rows + (int64_t)positions[j] * ld + q);
            AT(out + q) = sum;
        }
    }
}

/* Replaces the logits of clusters (K, ld) by the weight of each remaining key, for the next R queries. Includes the
   logits of their retrieved keys in the maxima `top`. */
static void compute_remainder(Past *h, int R, float *top, float *logits) {
    Work *w = &h->work;
    const int ld = round_up(R);
    start_remainder(h, R, ld, w->Q + w->finished * h->dp, LN2);
    for (int r = 0; r < R; r++) {
        const int n = w->finished + r, count = w->count[n];
        const float *retrieved = w->retrieved + n * retrieved_size(h);
        remove_retrieved(h, r, ld, w->positions + n * h->open, retrieved, count, h->cluster);
        for (int i = 0; i < count; i++) top[r] = retrieved[i] > top[r] ? retrieved[i] : top[r];
    }
    remainder_weights(h, top, ld, logits);
}

/* Computes the weights of the retrieved keys of the next R queries, minus the weight (K, ld) of a remaining key of the
   same cluster, which the cluster sum includes. */
static void compute_retrieved_weights(Past *h, int R, const float *cluster_weights) {
    Work *w = &h->work;
    const int ld = round_up(R);
    for (int r = 0; r < R; r++) {
        const int at = w->finished + r, n = w->count[at];
        const int32_t *positions = w->positions + at * h->open;
        float *logits = w->retrieved + at * retrieved_size(h);
        for (int j = n; j < round_up(n); j++) logits[j] = -INFINITY;
        for (int j = 0; j < n; j += LANES) {
            AT(logits + j) = exp2_vec(AT(logits + j) - w->top[at]);
            w->scale[at] += reduce_sum(AT(logits + j));
        }
        for (int j = 0; j < n; j++) logits[j] -= cluster_weights[h->cluster[positions[j]] * ld + r];
    }
}

/* Calls `body` for the retrieved keys [from, to) of each query, one range of positions after the other. Each key is
   thus read from memory once for all queries. */
INLINE void for_key_ranges(Past *h, void (*body)(Past *h, int r, int from, int to), int row) {
    Work *w = &h->work;
    const int64_t step = CACHE_FLOATS / row, last = w->query[w->query_count - 1].far;
    memset(w->cursor, 0, sizeof(int32_t) * w->query_count);
    for (int64_t stop = step; stop < last + step; stop += step)
        for (int r = 0; r < w->query_count; r++) {
            const int32_t *positions = w->positions + r * h->open;
            const int from = w->cursor[r];
            int to = from;
            while (to < w->count[r] && positions[to] < stop) to++;
            if (to > from) body(h, r, from, to);
            w->cursor[r] = to;
        }
}

static void compute_retrieved_logits(Past *h, int r, int from, int to) {
    const int32_t *positions = h->work.positions + r * h->open + from;
    gather_dots(h->Y, positions, to - from, h->work.Q + r * h->dp, h->dp,
                h->work.retrieved + r * retrieved_size(h) + from);
}

static void add_retrieved_values(Past *h, int r, int from, int to) {
    const int32_t *positions = h->work.positions + r * h->open + from;
    gather_sum(h->V, h->lv, h->work.retrieved + r * retrieved_size(h) + from, positions, to - from,
               h->work.O + r * h->lv);
}

/* Computes the outputs of the next R queries in O, without the values of retrieved keys. Writes the weights of
   retrieved keys to `retrieved`, total weights to `scale`, and maximum logits to `top`. */
static void attend_piece(Past *h, int R) {
    Work *w = &h->work;
    const Query *query = w->query + w->finished;
    const float *Q = w->Q + w->finished * h->dp;
    float *O = w->O + w->finished * h->lv, max_logit[PIECE];
    const int ld = round_up(R), near = (int)(h->stop - h->near), M = h->n + h->K, lv = h->lv;
    transpose(ld, h->d, Q, h->dp, w->Qt, ld);
    matmul(FULL, near, ld, h->d, h->Y + h->near * h->dp, h->dp, 1, w->Qt, ld, w->A, ld, 0);
    float *shared = w->A + near * ld;
    matmul(FULL, M, ld, h->d, h->shared, h->dp, 1, w->Qt, ld, shared, ld, 0);
    int64_t first = query[0].j;                                     /* all queries attend to keys up to here */
    for (int r = 1; r < R; r++) first = min64(first, query[r].j);
    for (int64_t j = h->near; j < h->stop; j++)
        for (int r = 0; r < R && (j > first || !unmasked(h, j)); r++)
            if (j > query[r].j || !unmasked(h, j)) w->A[(j - h->near) * ld + r] = MASKED;
    for (int j = 0; j < ld; j += LANES) {
        vec top = {0};
        top += MASKED;
        for (int i = 0; i < near; i++) top = maximum(top, AT(w->A + i * ld + j));
        for (int i = 0; i < M; i++) top = maximum(top, AT(shared + i * ld + j) + h->mass_exponent[i]);
        AT(max_logit + j) = top;
    }
    compute_remainder(h, R, max_logit, shared + h->n * ld);
    const vec limit = (vec){0} + 126.0f;
    for (int j = 0; j < ld; j += LANES) {
        vec sum = {0}, far = {0}, top = AT(max_logit + j);
        for (int i = 0; i < near; i++) sum += AT(w->A + i * ld + j) = exp2_vec(AT(w->A + i * ld + j) - top);
        for (int i = 0; i < M; i++) {
            float *A = shared + i * ld + j;
            if (i < h->n) sum += AT(A) = h->mass[i] > 0 ? exp2_vec(minimum(AT(A) - top, limit)) : (vec){0};
            else far += AT(A) * AT(w->remaining + (i - h->n) * ld + j);
        }
        AT(w->scale + w->finished + j) = sum + far;
        AT(w->top + w->finished + j) = top;
    }
    matmul(FULL, R, h->dv, near, w->A, 1, ld, h->V + h->near * lv, lv, O, lv, 0);
    matmul(FULL, R, h->dv, M, shared, 1, ld, h->values, lv, O, lv, 1);
    compute_retrieved_weights(h, R, shared + h->n * ld);
    w->finished += R;
}

/* ---- All queries ---- */

/* First query of block t, and number of queries of block t. */
INLINE int64_t first_query(const NearFar *c, int64_t t) {
    return t * c->block > c->S - c->L ? t * c->block : c->S - c->L;
}
INLINE int64_t block_queries(const NearFar *c, int64_t t) {
    return min64((t + 1) * c->block, c->S) - first_query(c, t);
}

/* Number of keys far from block t: those before its window. */
INLINE int64_t far_keys(const NearFar *c, int64_t t) { return t > 0 ? (t - 1) * c->block : 0; }

static float *output_ptr(const Past *h, const Query *query) {
    return head_ptr(h->c->out, h->z, query->g) + (query->j - h->c->S + h->c->L) * h->c->out.token;
}

/* Prepares up to PREFETCH queries, from query i of block t up to the last block before the next renewal. */
static void prepare_queries(Past *h, int64_t t, int64_t i) {
    const NearFar *c = h->c;
    const int dp = h->dp;
    Work *w = &h->work;
    for (w->query_count = 0; w->query_count < PREFETCH; i++) {
        if (i == block_queries(c, t) * c->G) {
            t++, i = 0;
            if (t * c->block >= c->S || t * c->block == next_renewal(h->renewal, c->block)) break;
        }
        Query *query = w->query + w->query_count;
        float *q = w->Q + w->query_count * dp;
        *query = (Query){i / block_queries(c, t), first_query(c, t) + i % block_queries(c, t), (int32_t)far_keys(c, t)};
        set_scaled(q, (float)c->factor, head_ptr(c->x, h->z, query->g) + (query->j - c->S + c->L) * c->x.token, c->d);
        for (int p = c->d; p < dp; p++) q[p] = 0;
        w->bias[w->query_count] = pack_query(q, dp, w->packed + w->query_count * packed_query_size(dp));
        for (int p = 0; p < dp; p++) q[p] *= LOG2E;
        w->query_count++;
    }
    memset(w->Q + w->query_count * dp, 0, sizeof(float) * PAD * dp);
    memset(w->count, 0, sizeof(int32_t) * w->query_count);
    w->finished = 0;
    retrieve_keys(h, (int)retrieval_count(c, h->renewal));
    for_key_ranges(h, compute_retrieved_logits, dp);
}

/* Writes the outputs of all prepared queries. */
static void write_outputs(Past *h) {
    const NearFar *c = h->c;
    Work *w = &h->work;
    for_key_ranges(h, add_retrieved_values, h->lv);
    for (int r = 0; r < w->query_count; r++) {
        const Query *query = w->query + r;
        const int64_t number = (h->z * c->G + query->g) * c->L + query->j - c->S + c->L;
        const float scale = w->scale[r] > 0 ? 1 / w->scale[r] : 0;
        set_scaled(output_ptr(h, query), scale, w->O + r * h->lv, c->dv);
        c->logsum[number] = w->top[r] + log2f(w->scale[r]);
        if (!c->gaps) continue;
        c->gap_offset[number] = h->gap_bytes;
        h->gap_bytes += encode_gaps(c->gaps + h->z * c->gap_capacity + h->gap_bytes, w->positions + r * c->open,
                                    w->count[r]);
    }
}

/* Processes the queries of block t. The past `h` must be at block t. */
static void attend_block(Past *h, int64_t t) {
    const NearFar *c = h->c;
    Work *w = &h->work;
    const int64_t queries = block_queries(c, t) * c->G;
    h->near = far_keys(c, t), h->stop = first_query(c, t) + block_queries(c, t);
    for (int64_t i = 0, R; i < queries; i += R) {
        if (w->finished == w->query_count) prepare_queries(h, t, i);
        R = min64(min64(PIECE, queries - i), w->query_count - w->finished);
        attend_piece(h, (int)R);
        if (w->finished == w->query_count) write_outputs(h);
    }
}

static int forward_past(const NearFar *c, int64_t z, float *memory) {
    Past h;
    init_past(&h, c, z, memory);
    int done = 1;
    for (int64_t t = (c->S - c->L) / c->block; done && t <= (c->S - 1) / c->block; t++) {
        if (!(done = advance(&h, t))) break;
        summarize_clusters(&h);
        attend_block(&h, t);
    }
    save_past(&h);
    return done;
}

int near_far_causal(const NearFar *c) { return for_each_past(c, forward_past); }
