/* Causal near-far attention of the queries of one call: attend_epoch of nearfar/causal.py in C.

   One thread processes one key head, block by block. Logits are in base 2. Dense logits have keys as rows and the
   queries of a piece as columns, as in forward.c; logits of retrieved keys (scores.c) are contiguous for each query. */

#include "near_far.h"

/* ---- Rest of the clusters after retrieval ----

   Logits of a cluster are modelled as normal, with the logit mu of its mean and standard deviation sd. Remaining keys
   lie below `threshold`. With t = (threshold - mu) / sd, a = t - sd and mills(u) = e^(u^2 / 2) Phi(-u), each of them
   has the weight

       e^threshold mills(-a) / mills(-t)               where t <= 0,
       e^(threshold - t^2 / 2) mills(-a) / Phi(t)      where a < 0 < t,
       e^(mu + sd^2 / 2) Phi(a) / Phi(t)               else.

   No large numbers cancel, and no weight exceeds e^threshold, up to rounding. */

/* For u >= 0, with relative error 3e-7: the Chebyshev fit of erfc in Numerical Recipes (6.2), without its factor
   e^(-u^2 / 2). */
INLINE vec mills(vec u) {
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
    return 0.5f * t * exp2_of(LOG2E * p);
}

INLINE vec magnitude(vec u) { return choose(u < 0.0f, -u, u); }

/* Phi(u), for u < 0 without its factor e^(-u^2 / 2); half is u^2 / 2 in base 2. */
INLINE vec phi_of(vec u, vec half) {
    const vec below = mills(magnitude(u));
    return choose(u < 0.0f, below, 1.0f - exp2_of(-half) * below);
}

void begin_left(Past *h, int R, int ld, const float *Q, float factor) {
    const int dp = h->dp;
    Work *left = &h->k;
    for (int k = 0; k < h->K; k++)
        for (int r = 0; r < ld; r++) left->number[k * ld + r] = h->mass[h->n + k];
    product(ALL, R, dp, h->d, Q, dp, 1, h->rows, dp, left->turned, dp, 0);
    for (int r = 0; r < R; r++) left->along[r] = factor * sqrtf(square_sum(left->turned + r * dp, dp));
    for (int r = 0; r < ld; r++) left->threshold[r] = INFINITY;
    for (int r = R; r < ld; r++) left->along[r] = 0;
}

void leave(Past *h, int r, int ld, const int32_t *positions, const float *logits, int n, const int32_t *cluster) {
    float threshold = INFINITY;
    for (int i = 0; i < n; i++) {
        h->k.number[cluster[positions[i]] * ld + r] -= 1;
        threshold = logits[i] < threshold ? logits[i] : threshold;
    }
    h->k.threshold[r] = threshold;
}

void weigh_left(const Past *h, const float *top, int ld, float *logits) {
    const Work *left = &h->k;
    const vec least = (vec){0} + SHARPEST, none = {0};
    for (int k = 0; k < h->K; k++) {
        const float tau = sqrtf(h->tau[k]);
        for (int r = 0; r < ld; r += LANES) {
            const vec number = AT(left->number + k * ld + r), threshold = AT(left->threshold + r) - AT(top + r);
            const vec mu = AT(logits + k * ld + r) - AT(top + r), sd = maximum(tau * AT(left->along + r), least);
            const vec t = LN2 * (threshold - mu) / sd, a = t - sd;
            const vec half_t = 0.5f * LOG2E * t * t, half_a = 0.5f * LOG2E * a * a;
            const vec at = choose(t > 0.0f, threshold - half_t, threshold);
            const vec whole = choose(a < 0.0f, at, mu + 0.5f * LOG2E * sd * sd);
            const vec weight = exp2_of(whole) * phi_of(a, half_a) / phi_of(t, half_t);
            AT(logits + k * ld + r) = choose(number > 0.5f, weight, none);
        }
    }
}

/* ---- Rows at given positions ---- */

#if defined(__AVX512F__)
enum { TOTALS = 8 };

/* Sums each of TOTALS vectors. */
INLINE void totals(const vec *sum, float *to) {
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
enum { TOTALS = 4 };

INLINE void totals(const vec *sum, float *to) {
    for (int i = 0; i < TOTALS; i++) to[i] = total(sum[i]);
}
#endif

/* Computes the products of a vector (dp) with the rows at n ascending positions, in `to` (n, with room for 8 more). */
static void dots(const float *Y, const int32_t *positions, int n, const float *with, int dp, float *to) {
    for (int i = 0; i < n; i += TOTALS) {
        const float *rows[TOTALS];
        vec sum[TOTALS];
        for (int j = 0; j < TOTALS; j++) {
            rows[j] = Y + (int64_t)positions[i + j < n ? i + j : n - 1] * dp;
            const float *next = Y + (int64_t)positions[i + j + TOTALS < n ? i + j + TOTALS : n - 1] * dp;
            for (int p = 0; p < dp; p += 16) __builtin_prefetch(next + p);
            sum[j] = (vec){0};
        }
        for (int p = 0; p < dp; p += LANES) {
            const vec here = AT(with + p);
            UNROLL for (int j = 0; j < TOTALS; j++) sum[j] += here * AT(rows[j] + p);
        }
        totals(sum, to + i);
    }
}

/* ---- A piece of queries ---- */

enum { TOGETHER = 4 };  /* vectors */

/* Adds the weighted sum of the rows at n ascending positions to out (ld). */
static void add_rows(const float *rows, int ld, const float *weight, const int32_t *positions, int n, float *out) {
    for (int p = 0; p < ld; p += TOGETHER * LANES) {
        const int wide = ld - p >= TOGETHER * LANES;
        if (wide) {
            vec sum[TOGETHER];
            UNROLL for (int i = 0; i < TOGETHER; i++) sum[i] = AT(out + p + i * LANES);
            for (int j = 0; j < n; j++) {
                const float *row = rows + (int64_t)positions[j] * ld + p;
                UNROLL for (int i = 0; i < TOGETHER; i++) sum[i] += weight[j] * AT(row + i * LANES);
            }
            UNROLL for (int i = 0; i < TOGETHER; i++) AT(out + p + i * LANES) = sum[i];
            continue;
        }
        for (int q = p; q < ld; q += LANES) {
            vec sum = AT(out + q);
            for (int j = 0; j < n; j++) sum += weight[j] * AT(rows + (int64_t)positions[j] * ld + q);
            AT(out + q) = sum;
        }
    }
}

/* Replaces the logits of clusters (K, ld) by the weight of each remaining key. Raises `top` of the next R queries to
   the logits of their retrieved keys. */
static void leave_clusters(Past *h, int R, float *top, float *logits) {
    Work *k = &h->k;
    const int ld = up(R);
    begin_left(h, R, ld, k->Q + k->taken * h->dp, LN2);
    for (int r = 0; r < R; r++) {
        const int n = k->taken + r, count = k->count[n];
        const float *retrieved = k->retrieved + n * room_for_retrieved(h);
        leave(h, r, ld, k->positions + n * h->open, retrieved, count, h->cluster);
        for (int i = 0; i < count; i++) top[r] = retrieved[i] > top[r] ? retrieved[i] : top[r];
    }
    weigh_left(h, top, ld, logits);
}

/* Computes the weights of the keys that the next R queries retrieve, minus the weight `left` (K, ld) of a remaining
   key of the same cluster. */
static void weigh_retrieved(Past *h, int R, const float *left) {
    Work *k = &h->k;
    const int ld = up(R);
    for (int r = 0; r < R; r++) {
        const int at = k->taken + r, n = k->count[at];
        const int32_t *positions = k->positions + at * h->open;
        float *more = k->retrieved + at * room_for_retrieved(h);
        for (int j = n; j < up(n); j++) more[j] = -INFINITY;
        for (int j = 0; j < n; j += LANES) {
            AT(more + j) = exp2_of(AT(more + j) - k->top[at]);
            k->scale[at] += total(AT(more + j));
        }
        for (int j = 0; j < n; j++) more[j] -= left[h->cluster[positions[j]] * ld + r];
    }
}

/* Calls `each` for the retrieved keys [from, to) of every query, range of positions by range, so that keys are read
   from memory once for all queries. */
INLINE void in_memory_order(Past *h, void (*each)(Past *h, int r, int from, int to), int row) {
    Work *k = &h->k;
    const int64_t step = NEARBY / row, last = k->query[k->ahead - 1].far;
    memset(k->from, 0, sizeof(int32_t) * k->ahead);
    for (int64_t stop = step; stop < last + step; stop += step)
        for (int r = 0; r < k->ahead; r++) {
            const int32_t *positions = k->positions + r * h->open;
            const int from = k->from[r];
            int to = from;
            while (to < k->count[r] && positions[to] < stop) to++;
            if (to > from) each(h, r, from, to);
            k->from[r] = to;
        }
}

static void retrieve_logits(Past *h, int r, int from, int to) {
    const int32_t *positions = h->k.positions + r * h->open + from;
    dots(h->Y, positions, to - from, h->k.Q + r * h->dp, h->dp, h->k.retrieved + r * room_for_retrieved(h) + from);
}

static void retrieve_values(Past *h, int r, int from, int to) {
    const int32_t *positions = h->k.positions + r * h->open + from;
    add_rows(h->V, h->lv, h->k.retrieved + r * room_for_retrieved(h) + from, positions, to - from, h->k.O + r * h->lv);
}

/* Computes the outputs of the next R queries in O, without the values of retrieved keys, whose weights are then in
   `retrieved`. Total weights are in `scale`, and the logs of their reference in `top`. */
static void attend_piece(Past *h, int R) {
    Work *k = &h->k;
    const Query *query = k->query + k->taken;
    const float *Q = k->Q + k->taken * h->dp;
    float *O = k->O + k->taken * h->lv, top_of[PIECE];
    const int ld = up(R), near = (int)(h->stop - h->near), M = h->n + h->K, lv = h->lv;
    transpose(ld, h->d, Q, h->dp, k->Qt, ld);
    product(ALL, near, ld, h->d, h->Y + h->near * h->dp, h->dp, 1, k->Qt, ld, k->A, ld, 0);
    float *shared = k->A + near * ld;
    product(ALL, M, ld, h->d, h->shared, h->dp, 1, k->Qt, ld, shared, ld, 0);
    int64_t all = query[0].j;                                     /* all queries see keys up to this position */
    for (int r = 1; r < R; r++) all = least_of(all, query[r].j);
    for (int64_t j = h->near; j < h->stop; j++)
        for (int r = 0; r < R && (j > all || !there(h, j)); r++)
            if (j > query[r].j || !there(h, j)) k->A[(j - h->near) * ld + r] = HIDDEN;
    for (int j = 0; j < ld; j += LANES) {
        vec top = {0};
        top += HIDDEN;
        for (int i = 0; i < near; i++) top = maximum(top, AT(k->A + i * ld + j));
        for (int i = 0; i < M; i++) top = maximum(top, AT(shared + i * ld + j) + h->high[i]);
        AT(top_of + j) = top;
    }
    leave_clusters(h, R, top_of, shared + h->n * ld);
    const vec most = (vec){0} + 126.0f;
    for (int j = 0; j < ld; j += LANES) {
        vec sum = {0}, far = {0}, top = AT(top_of + j);
        for (int i = 0; i < near; i++) sum += AT(k->A + i * ld + j) = exp2_of(AT(k->A + i * ld + j) - top);
        for (int i = 0; i < M; i++) {
            float *A = shared + i * ld + j;
            if (i < h->n) sum += AT(A) = h->mass[i] > 0 ? exp2_of(minimum(AT(A) - top, most)) : (vec){0};
            else far += AT(A) * AT(k->number + (i - h->n) * ld + j);
        }
        AT(k->scale + k->taken + j) = sum + far;
        AT(k->top + k->taken + j) = top;
    }
    product(ALL, R, h->dv, near, k->A, 1, ld, h->V + h->near * lv, lv, O, lv, 0);
    product(ALL, R, h->dv, M, shared, 1, ld, h->values, lv, O, lv, 1);
    weigh_retrieved(h, R, shared + h->n * ld);
    k->taken += R;
}

/* ---- All queries ---- */

/* First query of block t, and the number of queries. */
INLINE int64_t first_query(const NearFar *c, int64_t t) {
    return t * c->block > c->S - c->L ? t * c->block : c->S - c->L;
}
INLINE int64_t queries_of(const NearFar *c, int64_t t) {
    return least_of((t + 1) * c->block, c->S) - first_query(c, t);
}

/* Number of keys far from block t: those before its window. */
INLINE int64_t far_of(const NearFar *c, int64_t t) { return t > 0 ? (t - 1) * c->block : 0; }

static float *out_of(const Past *h, const Query *query) {
    return of(h->c->out, h->z, query->g) + (query->j - h->c->S + h->c->L) * h->c->out.token;
}

/* Prepares up to AHEAD queries from the i-th of block t on, also of the next blocks with the same heavy hitters. */
static void load_ahead(Past *h, int64_t t, int64_t i) {
    const NearFar *c = h->c;
    const int dp = h->dp;
    Work *k = &h->k;
    for (k->ahead = 0; k->ahead < AHEAD; i++) {
        if (i == queries_of(c, t) * c->G) {
            t++, i = 0;
            if (t * c->block >= c->S || t * c->block == following(h->start, c->block)) break;
        }
        Query *query = k->query + k->ahead;
        float *q = k->Q + k->ahead * dp;
        *query = (Query){i / queries_of(c, t), first_query(c, t) + i % queries_of(c, t), (int32_t)far_of(c, t)};
        put_row(q, (float)c->factor, of(c->x, h->z, query->g) + (query->j - c->S + c->L) * c->x.token, c->d);
        for (int p = c->d; p < dp; p++) q[p] = 0;
        int8_t *integers = k->integers + k->ahead * dp;
        integers_of(q, dp, integers);
        k->bias[k->ahead] = 0;
        for (int p = 0; p < dp; p++) k->bias[k->ahead] -= 128 * integers[p];
        for (int p = 0; p < dp; p++) q[p] *= LOG2E;
        k->ahead++;
    }
    memset(k->Q + k->ahead * dp, 0, sizeof(float) * PAD * dp);
    memset(k->count, 0, sizeof(int32_t) * k->ahead);
    k->taken = 0;
    retrieve(h, (int)opens_at(c, h->start));
    in_memory_order(h, retrieve_logits, dp);
}

/* Writes the outputs of all queries prepared ahead. */
static void give_out(Past *h) {
    const NearFar *c = h->c;
    Work *k = &h->k;
    in_memory_order(h, retrieve_values, h->lv);
    for (int r = 0; r < k->ahead; r++) {
        const Query *query = k->query + r;
        const int64_t number = (h->z * c->G + query->g) * c->L + query->j - c->S + c->L;
        const float scale = k->scale[r] > 0 ? 1 / k->scale[r] : 0;
        put_row(out_of(h, query), scale, k->O + r * h->lv, c->dv);
        c->logsum[number] = k->top[r] + log2f(k->scale[r]);
        if (!c->gaps) continue;
        c->gaps_at[number] = h->bytes;
        h->bytes += put_gaps(c->gaps + h->z * c->bytes + h->bytes, k->positions + r * c->open, k->count[r]);
    }
}

/* Processes the queries of block t among the last L, with the past of that block. */
static void attend_block(Past *h, int64_t t) {
    const NearFar *c = h->c;
    Work *k = &h->k;
    const int64_t queries = queries_of(c, t) * c->G;
    h->near = far_of(c, t), h->stop = first_query(c, t) + queries_of(c, t);
    for (int64_t i = 0, R; i < queries; i += R) {
        if (k->taken == k->ahead) load_ahead(h, t, i);
        R = least_of(least_of(PIECE, queries - i), k->ahead - k->taken);
        attend_piece(h, (int)R);
        if (k->taken == k->ahead) give_out(h);
    }
}

static int forward_past(const NearFar *c, int64_t z, float *memory) {
    Past h;
    open_past(&h, c, z, memory);
    int done = 1;
    for (int64_t t = (c->S - c->L) / c->block; done && t <= (c->S - 1) / c->block; t++) {
        if (!(done = advance(&h, t))) break;
        summarize_clusters(&h);
        attend_block(&h, t);
    }
    close_past(&h);
    return done;
}

int near_far_causal(const NearFar *c) { return each_past_head(c, forward_past); }
