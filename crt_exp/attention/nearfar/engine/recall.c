/* Causal near-far attention that remembers: the twin of attention/nearfar/{recall,leaves}.py, whose names these are.

   One thread takes one head of keys, block by block. Behind the window the keys go to their cells, and pages of blocks
   are sorted into leaves. A query ranks the leaves, looks at the keys of the best, and reads those of the largest
   logits; what cells weigh for these is taken off. Logits are in base 2; dense ones have keys as rows and the queries of
   a piece as columns, as in near_far.c, those of leaves and of keys that are looked at lie side by side.

   Legend: see head.h; blocks are LEAF times a power of 2. A key that is heavy, masked or near has no cell, -1. */

#include "pairs.h"

/* ---- Rows at some places ---- */

#if defined(__AVX512F__)
enum { AT_ONCE = 8 };

/* The sums of AT_ONCE vectors. */
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
enum { AT_ONCE = 4 };

INLINE void totals(const vec *sum, float *to) {
    for (int i = 0; i < AT_ONCE; i++) to[i] = total(sum[i]);
}
#endif

/* to (n, and room for AT_ONCE more): the products of a vector (dp) with rows of Y. */
static void dots(const float *Y, const int32_t *places, int n, const float *with, int dp, float *to) {
    for (int i = 0; i < n; i += AT_ONCE) {
        const float *rows[AT_ONCE];
        vec sum[AT_ONCE];
        for (int j = 0; j < AT_ONCE; j++) {
            rows[j] = Y + (int64_t)places[i + j < n ? i + j : n - 1] * dp;
            const float *next = Y + (int64_t)places[i + j + AT_ONCE < n ? i + j + AT_ONCE : n - 1] * dp;
            for (int p = 0; p < dp; p += 16) __builtin_prefetch(next + p);
            sum[j] = (vec){0};
        }
        for (int p = 0; p < dp; p += LANES) {
            const vec here = AT(with + p);
            UNROLL for (int j = 0; j < AT_ONCE; j++) sum[j] += here * AT(rows[j] + p);
        }
        totals(sum, to + i);
    }
}

/* ---- Keys that are looked at ---- */

/* Panels and queries hold features in bfloat16: QUAD of a leaf's keys are 2 LEAF pairs of features, those of the first
   two for each key, then of the next two. */
enum { QUAD = 4, TOGETHER = 4, LEAVES = LANES == 16 ? 8 : 4 };

/* A row (dp) as a query: its pairs, and each of them LEAF times. */
static void to_pairs(const float *x, int dp, uint32_t *pairs, uint32_t *spread) {
    for (int p = 0; p < dp / 2; p++) {
        pairs[p] = pair_of(x + 2 * p);
        for (int e = 0; e < LEAF; e++) spread[p * LEAF + e] = pairs[p];
    }
}

/* The products of a query with the keys of LEAVES leaves. */
INLINE void leaf_logits(const uint32_t *const *leaves, const uint32_t *query, int dp, float *to) {
    enum { PARTS = 2 * LEAF / LANES };
    vec sum[LEAVES][PARTS];
    UNROLL for (int i = 0; i < LEAVES; i++)
        UNROLL for (int j = 0; j < PARTS; j++) sum[i][j] = (vec){0};
    for (int p = 0; p < dp / QUAD * 2 * LEAF; p += 2 * LEAF)
        UNROLL for (int j = 0; j < PARTS; j++) {
            const bits q = PAIRS(query + p + j * LANES);
            UNROLL for (int i = 0; i < LEAVES; i++)
                sum[i][j] = add_pairs(sum[i][j], q, PAIRS(leaves[i] + p + j * LANES));
        }
#if defined(__AVX512F__)
    UNROLL for (int i = 0; i < LEAVES; i += 2) {                 /* both halves of two */
        const __m512 one = (__m512)sum[i][0], other = (__m512)sum[i + 1][0];
        AT(to + i * LEAF) = (vec)(_mm512_shuffle_f32x4(one, other, 0x44) + _mm512_shuffle_f32x4(one, other, 0xee));
    }
#else
    UNROLL for (int i = 0; i < LEAVES; i++) {
        float all[2 * LEAF];
        UNROLL for (int j = 0; j < PARTS; j++) AT(all + j * LANES) = sum[i][j];
        for (int e = 0; e < LEAF; e++) to[i * LEAF + e] = all[e] + all[LEAF + e];
    }
#endif
}

/* The keys of n leaves in `looked`, HIDDEN for those that have no cell. */
static void look_at(const Seen *s, Work *k, const uint32_t *query, const int32_t *numbers, int n) {
    const int64_t size = (int64_t)s->dp / 2 * LEAF;
    Some *looked = &k->looked;
    for (int i = 0; i < n; i += LEAVES) {
        const uint32_t *leaves[LEAVES];
        for (int j = 0; j < LEAVES; j++) {
            leaves[j] = s->panels + numbers[i + j < n ? i + j : n - 1] * size;
            const uint32_t *next = s->panels + numbers[i + j + LEAVES < n ? i + j + LEAVES : n - 1] * size;
            for (int64_t p = 0; p < size; p += 16) __builtin_prefetch(next + p);
        }
        leaf_logits(leaves, query, s->dp, looked->value + i * LEAF);
    }
    for (int i = 0; i < n; i++)
        memcpy(looked->place + i * LEAF, s->in_cells + numbers[i] * LEAF, sizeof(int32_t) * LEAF);
    looked->n = n * LEAF;
    for (int i = 0; i < looked->n; i++) looked->value[i] = looked->place[i] < 0 ? HIDDEN : looked->value[i];
}

/* ---- The largest of many ---- */

/* Those above a bar, and the others where they are wanted. */
INLINE void part(const Some *from, float bar, Some *more, Some *rest) {
    more->n = 0;
    if (rest) rest->n = 0;
    int i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= from->n; i += 16) {
        const __m512 value = _mm512_loadu_ps(from->value + i);
        const __m512i place = _mm512_loadu_si512(from->place + i);
        const __mmask16 high = _mm512_cmp_ps_mask(value, _mm512_set1_ps(bar), _CMP_GT_OQ), low = ~high;
        _mm512_storeu_ps(more->value + more->n, _mm512_maskz_compress_ps(high, value));
        _mm512_storeu_si512(more->place + more->n, _mm512_maskz_compress_epi32(high, place));
        more->n += __builtin_popcount(high);
        if (!rest) continue;
        _mm512_storeu_ps(rest->value + rest->n, _mm512_maskz_compress_ps(low, value));
        _mm512_storeu_si512(rest->place + rest->n, _mm512_maskz_compress_epi32(low, place));
        rest->n += __builtin_popcount(low);
    }
#endif
    for (; i < from->n; i++) {
        const int high = from->value[i] > bar;
        more->value[more->n] = from->value[i], more->place[more->n] = from->place[i];
        more->n += high;
        if (!rest) continue;
        rest->value[rest->n] = from->value[i], rest->place[rest->n] = from->place[i];
        rest->n += !high;
    }
}

INLINE Some behind(Some s, int n) { return (Some){s.value + n, s.place + n, s.n - n}; }

/* The largest and the least of some numbers, but for those that are HIDDEN. Returns a guess at what k of them exceed:
   what as many of a normal law would. */
INLINE float range(Some s, int k, float *most, float *least) {
    vec high = {0}, low = {0}, sum = {0}, square = {0}, count = {0};
    high += HIDDEN, low -= HIDDEN;
    int i = 0;
    for (; i + LANES <= s.n; i += LANES) {
        const vec here = AT(s.value + i), one = (vec){0} + 1.0f;
        const ivec there = here > HIDDEN;
        const vec seen = choose(there, here, (vec){0});
        high = maximum(high, here);
        low = minimum(low, choose(there, here, low));
        sum += seen, square += seen * seen, count += choose(there, one, (vec){0});
    }
    *most = largest(high), *least = -largest(-low);
    float n = total(count), mean = total(sum), moment = total(square);
    for (; i < s.n; i++) {
        *most = s.value[i] > *most ? s.value[i] : *most;
        *least = s.value[i] > HIDDEN && s.value[i] < *least ? s.value[i] : *least;
    }
    if (!(n > 2 * k)) return 0.5f * (*most + *least);
    mean /= n, moment = moment / n - mean * mean;
    const float t = sqrtf(-2 * logf(k / n));                     /* Hastings' rational approximation of the quantile */
    const float quantile = t - (2.30753f + 0.27061f * t) / (1 + t * (0.99229f + 0.04481f * t));
    return mean + sqrtf(moment > 0 ? moment : 0) * quantile;
}

/* The k largest of some numbers, of those above HIDDEN, come first in `to`, with their places. Returns how many there
   are. */
static int select_largest(Some from, int k, Some to, const Some spare[2]) {
    float most, least;
    int taken = 0;
    const float guess = range(from, k + k / 8 + 4, &most, &least);
    if (guess < most && guess > least) {                         /* most likely the k largest are above */
        Some more = spare[0];
        part(&from, guess, &more, NULL);
        if (more.n >= k) from = more, least = guess;
    }
    while (taken < k) {
        const float bar = from.n <= k - taken ? HIDDEN : 0.5f * (most + least);
        Some more = behind(to, taken), rest = spare[from.value == spare[0].value];
        if (bar == HIDDEN || !(bar < most && bar > least)) {     /* all that are left, or any, being alike */
            part(&from, HIDDEN, &more, &rest);
            return taken + (int)least_of(more.n, k - taken);
        }
        part(&from, bar, &more, &rest);
        if (more.n > k - taken) {
            memcpy(rest.value, more.value, sizeof(float) * more.n);
            memcpy(rest.place, more.place, sizeof(int32_t) * more.n);
            rest.n = more.n, least = bar;
        } else {
            taken += more.n, most = bar;
        }
        from = rest;
    }
    return k;
}

/* ---- A piece of queries ---- */

/* The keys that query r reads, of those in the leaves that rank highest, which are given with their numbers. */
static void open_keys(const Seen *s, Work *k, int r) {
    const int leaves = select_largest(k->leaves, s->looked, k->chosen, k->spare);
    const float *q = k->Q + r * s->dp;
    look_at(s, k, k->spread + (int64_t)r * s->dp / 2 * LEAF, k->chosen.place, leaves);
    const int read = select_largest(k->looked, s->open, k->chosen, k->spare);
    int32_t *places = k->places + r * s->open;
    float *logits = k->read + r * up(s->open), top = k->top[r];
    dots(s->Y, k->chosen.place, read, q, s->dp, logits);
    memcpy(places, k->chosen.place, sizeof(int32_t) * read);
    for (int i = 0; i < read; i++) top = logits[i] > top ? logits[i] : top;
    for (int i = read; i < s->open; i++) places[i] = -1;
    k->count[r] = read;
    k->top[r] = top;
}

static void open_all(const Seen *s, Work *k, int R) {
    const int step = ranked_at_once(s->dp);
    for (int i = 0; i < R; i += step) {
        const int here = R - i < step ? R - i : step, ld = up(s->leaves);
        const int64_t wide = s->most;
        rank_leaves(k->pairs + i * s->dp / 2, here, s->dp, s->means, s->most, ld, k->ranks, wide);
        for (int r = 0; r < here; r++) {
            const float *ranks = k->ranks + r * wide;
            const float length = LN2 * sqrtf(square_sum(k->Q + (i + r) * s->dp, s->dp));
            for (int64_t l = 0; l < ld; l += LANES) {
                const vec reach = AT(s->reach + l), none = (vec){0} + HIDDEN;
                AT(k->leaves.value + l) = choose(reach > none, AT(ranks + l) + length * reach, none);
            }
            k->leaves.n = (int)s->leaves;
            open_keys(s, k, i + r);
        }
    }
}

/* out (ld) += the sum of weight_j times row places_j, over n rows. */
static void add_rows(const float *rows, int ld, const float *weight, const int32_t *places, int n, float *out) {
    for (int p = 0; p < ld; p += TOGETHER * LANES) {
        const int wide = ld - p >= TOGETHER * LANES;
        if (wide) {
            vec sum[TOGETHER];
            UNROLL for (int i = 0; i < TOGETHER; i++) sum[i] = AT(out + p + i * LANES);
            for (int j = 0; j < n; j++) {
                const float *row = rows + (int64_t)places[j] * ld + p;
                UNROLL for (int i = 0; i < TOGETHER; i++) sum[i] += weight[j] * AT(row + i * LANES);
            }
            UNROLL for (int i = 0; i < TOGETHER; i++) AT(out + p + i * LANES) = sum[i];
            continue;
        }
        for (int q = p; q < ld; q += LANES) {
            vec sum = AT(out + q);
            for (int j = 0; j < n; j++) sum += weight[j] * AT(rows + (int64_t)places[j] * ld + q);
            AT(out + q) = sum;
        }
    }
}

/* Queries (R, dp) in Q, in base 2, of which r sees the near keys before until[r]: O, with total weights in `scale`, logs
   of them in `top`, and in `part` what lies in cells. */
static void attend_piece(const Seen *s, Work *k, int R, const int64_t *until) {
    const int ld = up(R), near = (int)(s->stop - s->near), M = s->n + s->K, lv = s->lv;
    memset(k->Q + R * s->dp, 0, sizeof(float) * (ld - R) * s->dp);
    transpose(ld, s->d, k->Q, s->dp, k->Qt, ld);
    product(ALL, near, ld, s->d, s->Y + s->near * s->dp, s->dp, 1, k->Qt, ld, k->A, ld, 0);
    float *shared = k->A + near * ld;
    product(ALL, M, ld, s->d, s->shared, s->dp, 1, k->Qt, ld, shared, ld, 0);
    for (int i = 0; i < near; i++)
        for (int r = 0; r < R; r++)
            if (s->near + i >= until[r] || (s->keep && !s->keep[s->near + i])) k->A[i * ld + r] = HIDDEN;
    for (int j = 0; j < ld; j += LANES) {
        vec top = {0};
        top += HIDDEN;
        for (int i = 0; i < near; i++) top = maximum(top, AT(k->A + i * ld + j));
        for (int i = 0; i < M; i++) top = maximum(top, AT(shared + i * ld + j) + (s->bias[i] + s->high[i]));
        AT(k->top + j) = top;
    }
    if (s->open) open_all(s, k, R);
    else memset(k->count, 0, sizeof(int32_t) * R);
    const vec most = (vec){0} + 126.0f;
    for (int j = 0; j < ld; j += LANES) {
        vec sum = {0}, far = {0}, top = AT(k->top + j);
        for (int i = 0; i < near; i++) sum += AT(k->A + i * ld + j) = exp2_of(AT(k->A + i * ld + j) - top);
        for (int i = 0; i < M; i++) {
            float *A = shared + i * ld + j;
            vec weight = AT(A) = s->mass[i] > 0 ? exp2_of(minimum(AT(A) + s->bias[i] - top, most)) : (vec){0};
            if (i < s->n) sum += weight;
            else far += s->mass[i] * weight;
        }
        AT(k->scale + j) = sum + far;
        AT(k->part + j) = far;
    }
    product(ALL, R, s->dv, near, k->A, 1, ld, s->V + s->near * lv, lv, k->O, lv, 0);
    product(ALL, R, s->dv, M, shared, 1, ld, s->values, lv, k->O, lv, 1);
    for (int r = 0; r < R; r++) {
        float *change = k->read + r * up(s->open), all = 0, taken = 0;
        const int32_t *places = k->places + r * s->open;
        const int n = k->count[r];
        for (int j = 0; j < n; j += LANES) {
            float less[LANES];
            const int here = n - j < LANES ? n - j : LANES;
            for (int e = 0; e < LANES; e++) {
                less[e] = e < here ? shared[(s->n + s->cell[places[j + e]]) * ld + r] : 0;
                if (e >= here) change[j + e] = -INFINITY;
            }
            AT(change + j) = exp2_of(AT(change + j) - k->top[r]) - AT(less);
            all += total(AT(change + j)), taken += total(AT(less));
        }
        k->scale[r] += all;
        k->part[r] -= taken;
        add_rows(s->V, lv, change, places, n, k->O + r * lv);
    }
}

/* ---- One head ---- */

/* Leaves whose keys are looked at, where so many keys are far. */
INLINE int64_t looked_at(const Recall *c, int64_t far) {
    const int64_t keys = LOOKED * c->open > far / SHARE ? LOOKED * c->open : far / SHARE;
    return keys / LEAF + 1;
}

/* Of so many leaves there is room, whole tiles of them. */
INLINE int64_t most_leaves(const Recall *c) {
    return ((c->room + c->block) / LEAF + WIDE) / WIDE * WIDE;
}

size_t place_pieces(const Piece *pieces, size_t number, float *at) {
    size_t count = 0;
    for (size_t i = 0; i < number; i++) {
        float *here = at + count;
        if (at) memcpy(pieces[i].to, &here, sizeof here);
        count += up(pieces[i].count) + PAD;
    }
    return count;
}

/* What lasts from block to block, in `memory` where there is some; returns its size. */
static size_t place_kept(Past *h, const Recall *c, float *memory) {
    const size_t d = c->d, dp = up(d), lv = up(c->dv), S = c->room, n = c->heavy, K = c->cells, M = n + K;
    const size_t fit = (S + c->block) / LEAF + 1;
    const Piece pieces[] = {
        {&h->numbers, PAD}, {&h->means, dp / 2 * most_leaves(c)}, {&h->reach, up(fit)}, {&h->panels, fit * LEAF * dp / 2},
        {&h->order, S + c->block}, {&h->in_cells, S + c->block}, {&h->cell, S}, {&h->square, S},
        {&h->shared, M * dp}, {&h->values, M * lv}, {&h->bias, M}, {&h->high, M}, {&h->mass, M}, {&h->ysum, K * dp},
        {&h->zsum, K * dp}, {&h->squares, K}, {&h->heavy, n}, {&h->rows, d * dp}, {&h->rootT, d * dp}, {&h->shift, dp},
        {&h->centres, K * dp}, {&h->turned, K * dp}, {&h->offset, K}};
    return place_pieces(pieces, sizeof pieces / sizeof *pieces, memory);
}

static size_t place_scratch(Past *h, const Recall *c, float *memory) {
    const size_t d = c->d, dp = up(d), lv = up(c->dv), S = c->kept ? 0 : c->S, K = c->cells, M = c->heavy + K;
    const size_t fit = (c->room + c->block) / LEAF + 1, most = most_leaves(c), looked = looked_at(c, c->room);
    const size_t seen = (looked < fit ? looked : fit) * LEAF, open = up(c->open);
    const size_t more = (most > seen ? most : seen) + LEAVES * LEAF + 2 * PAD, bounded = c->tilt ? S : 0;
    Work *k = &h->k;
    const Piece pieces[] = {
        {&h->Y, S * dp}, {&h->V, S * lv}, {&h->pooled, fit * d}, {&h->counts, fit}, {&h->X, CHUNK * dp},
        {&h->apart, CHUNK * dp}, {&h->Xt, dp * CHUNK}, {&h->dots, K * CHUNK}, {&h->along, c->room + PAD}, {&h->sample, c->room},
        {&h->axis, dp}, {&h->next, dp}, {&h->mean, dp}, {&h->pairs, LANES * dp / 2}, {&h->nearest, 2 * fit},
        {&k->Q, PIECE * dp}, {&k->Qt, d * PIECE}, {&k->A, (2 * c->block + M) * PIECE}, {&k->O, PIECE * lv},
        {&k->ranks, RANKED * most}, {&k->pairs, PIECE * dp / 2}, {&k->spread, PIECE * dp / 2 * LEAF},
        {&k->top, PIECE}, {&k->scale, PIECE}, {&k->part, PIECE}, {&k->read, PIECE * open + PAD},
        {&k->places, PIECE * open}, {&k->count, PIECE}, {&k->leaves.value, more}, {&k->leaves.place, more},
        {&k->looked.value, more}, {&k->looked.place, more}, {&k->chosen.value, more}, {&k->chosen.place, more},
        {&k->spare[0].value, more}, {&k->spare[0].place, more}, {&k->spare[1].value, more},
        {&k->spare[1].place, more}, {&h->score, bounded}, {&h->u, bounded}, {&h->tilt, dp}, {&h->relative, K}};
    return place_pieces(pieces, sizeof pieces / sizeof *pieces, memory);
}

int64_t near_far_recall_size(const Recall *c) { return place_kept(&(Past){0}, c, NULL); }

float *past_memory(const Recall *c) {
    Past h = {0};
    const size_t size = c->kept ? 0 : place_kept(&h, c, NULL);
    const size_t bytes = sizeof(float) * (place_scratch(&h, c, NULL) + size);
    return aligned_alloc(64, (bytes + 63) / 64 * 64);
}

void open_past(Past *h, const Recall *c, int64_t z, float *memory) {
    *h = (Past){.c = c, .z = z, .fit = (c->room + c->block) / LEAF + 1};
    const size_t size = place_kept(h, c, NULL), scratch = place_scratch(h, c, memory);
    place_kept(h, c, c->kept ? c->kept + z * size : memory + scratch);
    if (c->kept) {
        h->Y = of(c->y, z, 0), h->V = of(c->v, z, 0);
    } else {
        h->numbers[0] = 0;
    }
    for (int64_t l = 0; l < h->fit; l++) h->k.leaves.place[l] = (int32_t)l;
    h->pages = 1;
    h->s = (Seen){.d = c->d, .dp = up(c->d), .dv = c->dv, .lv = up(c->dv), .n = c->heavy, .K = c->cells,
                  .open = c->open, .most = most_leaves(c), .Y = h->Y, .V = h->V, .in_cells = h->in_cells,
                  .cell = h->cell, .means = h->means, .reach = h->reach, .panels = h->panels, .shared = h->shared,
                  .values = h->values, .bias = h->bias, .high = h->high, .mass = h->mass,
                  .keep = c->keep ? c->keep + z * c->S : NULL};
    h->t = h->numbers[0];
    if (h->t) h->far = h->numbers[1], h->start = h->numbers[2], h->s.leaves = h->numbers[3], h->s.K = h->numbers[4];
}

void close_past(Past *h) {
    const int64_t numbers[] = {h->t, h->far, h->start, h->s.leaves, h->s.K};
    memcpy(h->numbers, numbers, sizeof numbers);
}

void load_past(Past *h) {
    const Recall *c = h->c;
    const int d = h->s.d, dp = h->s.dp;
    if (!c->kept) {
        load_rows(c->y, h->z, 0, 0, c->S, d, c->factor, NULL, h->s.keep, h->Y, dp);
        load_rows(c->v, h->z, 0, 0, c->S, c->dv, 1, NULL, h->s.keep, h->V, h->s.lv);
    }
    for (int64_t j = 0; j < c->room; j++) h->cell[j] = -1;
    memset(h->shift, 0, sizeof(float) * dp);
    memcpy(h->shift, c->shift + h->z * d, sizeof(float) * d);
    memset(h->rows, 0, sizeof(float) * d * dp);
    for (int p = 0; p < d; p++) memcpy(h->rows + p * dp, c->root + (h->z * d + p) * d, sizeof(float) * d);
    transpose(d, d, h->rows, dp, h->rootT, dp);
    for (int p = 0; p < d; p++)
        for (int q = d; q < dp; q++) h->rootT[p * dp + q] = 0;
}

/* ---- Leaves ---- */

/* The keys of a node from one end of its main axis to the other, those of the lower half first. */
static void halve(Past *h, int32_t *at, int64_t m) {
    const int d = h->s.d, dp = h->s.dp;
    float *mean = h->mean, *axis = h->axis, *next = h->next, *along = h->along;
    int32_t *sample = h->sample;
    int count = 0, farthest = -1;
    memset(mean, 0, sizeof(float) * dp);
    for (int64_t i = 0, step = m > SAMPLED ? m / SAMPLED : 1; i < m; i++)          /* a power of 2, as m is */
        if (!(at[i] & (step - 1)) && there(h, at[i])) sample[count] = at[i], along[count++] = 1;
    add_rows(h->Y, dp, along, sample, count, mean);
    for (int p = 0; p < dp; p++) mean[p] /= count ? count : 1;
    float most = -1;
    for (int i = 0; i < count; i++) {
        vec sum = {0};
        for (int p = 0; p < dp; p += LANES) {
            vec apart = AT(key(h, sample[i]) + p) - AT(mean + p);
            sum += apart * apart;
        }
        const float square = total(sum);
        if (square > most) most = square, farthest = i;
    }
    for (int p = 0; p < dp; p++) axis[p] = count ? key(h, sample[farthest])[p] - mean[p] : 0;
    for (int turn = 0; turn < TURNS; turn++) {
        const float offset = dot(mean, axis, dp);
        float all = 0;
        memset(next, 0, sizeof(float) * dp);
        dots(h->Y, sample, count, axis, dp, along);
        for (int i = 0; i < count; i++) all += along[i] -= offset;
        add_rows(h->Y, dp, along, sample, count, next);
        for (int p = 0; p < d; p++) next[p] -= all * mean[p];
        const float length = sqrtf(square_sum(next, dp));
        for (int p = 0; p < dp; p++) axis[p] = next[p] / (length > LEAST ? length : LEAST);
    }
    dots(h->Y, at, (int)m, axis, dp, along);
    for (int64_t i = 0; i < m && h->s.keep; i++) along[i] = there(h, at[i]) ? along[i] : INFINITY;
    for (int64_t low = 0, high = m - 1, half = m / 2; low < high;) {     /* Hoare's selection */
        const float bar = along[(low + high) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (along[i] < bar) i++;
            while (along[j] > bar) j--;
            if (i > j) break;
            const float one = along[i];
            const int32_t other = at[i];
            along[i] = along[j], at[i] = at[j];
            along[j] = one, at[j] = other;
            i++, j--;
        }
        if (j < half) low = i;
        if (half < i) high = j;
    }
}

static void mark(Past *h, int64_t first, int64_t stop) {
    for (int64_t i = first; i < stop; i++) h->in_cells[i] = h->cell[h->order[i]] >= 0 ? h->order[i] : -1;
}

static void sort_page(Past *h, int64_t first, int64_t size) {
    const int dp = h->s.dp, d = h->s.d;
    int32_t *order = h->order + first;
    for (int64_t i = 0; i < size; i++) order[i] = (int32_t)(first + i);
    for (int64_t m = size; m > LEAF; m /= 2)
        for (int64_t i = 0; i < size; i += m) halve(h, order + i, m);
    for (int64_t i = 0; i < size; i += LEAF) {
        float *mean = h->mean;
        vec square = {0};
        const int64_t leaf = (first + i) / LEAF;
        int count = 0;
        memset(mean, 0, sizeof(float) * dp);
        for (int j = 0; j < LEAF; j++)
            if (there(h, order[i + j])) add_row(mean, 1, key(h, order[i + j]), dp), count++;
        for (int p = 0; p < dp; p++) mean[p] /= count ? count : 1;
        for (int j = 0; j < LEAF; j++)
            for (int p = 0; p < dp && there(h, order[i + j]); p += LANES) {
                const vec apart = AT(key(h, order[i + j]) + p) - AT(mean + p);
                square += apart * apart;
            }
        for (int p = 0; p < dp; p += 2) h->pairs[i / LEAF % LANES * dp / 2 + p / 2] = pair_of(mean + p);
        const int64_t last = i / LEAF % LANES;
        if (last == LANES - 1 || i + LEAF >= size)
            transpose(last + 1, dp / 2, (float *)h->pairs, dp / 2, (float *)h->means + leaf - last, h->s.most);
        for (int p = 0; p < dp; p += 2)
            for (int j = 0; j < LEAF; j++)
                h->panels[(leaf * dp + p) / 2 * LEAF + j] = pair_of(key(h, order[i + j]) + p);
        h->reach[leaf] = count ? SPREADS * sqrtf(total(square) / count / d) : HIDDEN;
    }
    mark(h, first, first + size);
}

/* Sorts the pages of `blocks` blocks that the pages of fewer, those before, do not have. */
static void grow_pages(Past *h, int64_t blocks) {
    const int64_t b = h->c->block;
    int64_t size = 1, before = 1;
    while (size * GROWN <= blocks) size *= GROWN;
    while (before * GROWN <= h->far) before *= GROWN;
    for (int64_t first = 0, old = 0; first < blocks; first += size) {
        while (size > blocks - first) size /= GROWN;
        while (before > 1 && before > h->far - old) before /= GROWN;
        if (old == first && before == size && old + before <= h->far) {
            old += before;
            continue;
        }
        old = -1;                                      /* from here on they differ */
        sort_page(h, first * b, size * b);
    }
    h->far = blocks;
    h->s.leaves = blocks * b / LEAF;
}

/* ---- Cells ---- */

void find_nearest(Past *h, int64_t j, int m, int32_t *nearest) {
    const int d = h->s.d, dp = h->s.dp;
    transpose(m, d, key(h, j), dp, h->Xt, CHUNK);
    product(ALL, h->s.K, m, d, h->turned, dp, 1, h->Xt, CHUNK, h->dots, CHUNK, 0);
    for (int i = 0; i < m; i += LANES) {
        vec best = AT(h->dots + i) - h->offset[0];
        ivec which = {0};
        for (int k = 1; k < h->s.K; k++) {
            vec here = AT(h->dots + k * CHUNK + i) - h->offset[k];
            ivec better = here > best;
            best = choose(better, here, best);
            which = (better & k) | (~better & which);
        }
        for (int e = 0; e < LANES && i + e < m; e++) nearest[i + e] = which[e];
    }
}

/* The nearest centres of keys [j, j + m), m <= CHUNK, whose sums get them; Z: their z, where these sums get it too. */
static void to_cells(Past *h, int64_t j, int m, const float *Z) {
    const int dp = h->s.dp, lv = h->s.lv, n = h->s.n;
    int32_t nearest[CHUNK];
    find_nearest(h, j, m, nearest);
    for (int i = 0; i < m; i++) {
        const int64_t at = j + i;
        if (h->cell[at] == -2 || !there(h, at)) {                        /* heavy, or masked */
            h->cell[at] = -1;
            continue;
        }
        const int k = h->cell[at] = nearest[i];
        add_row(h->ysum + k * dp, 1, key(h, at), dp);
        if (Z) add_row(h->zsum + k * dp, 1, Z + i * dp, dp);
        add_row(h->values + (n + k) * lv, 1, h->V + at * lv, lv);
        h->squares[k] += h->square[at];
        h->mass[n + k] += 1;
    }
}

void measure(Past *h, int64_t j, int m) {
    const int d = h->s.d, dp = h->s.dp;
    for (int i = 0; i < m; i++)
        for (int p = 0; p < dp; p += LANES)
            AT(h->apart + i * dp + p) = there(h, j + i) ? (vec)(AT(key(h, j + i) + p) - AT(h->shift + p)) : (vec){0};
    product(ALL, m, d, d, h->apart, dp, 1, h->rows, dp, h->X, dp, 0);
    for (int i = 0; i < m; i++)
        for (int p = d; p < dp; p++) h->X[i * dp + p] = 0;
}

/* The keys of block t become far: what they are measured by, and where they join cells, these. */
static void measure_block(Past *h, int64_t t, int joins) {
    for (int64_t j = t * h->c->block, stop = j + h->c->block; j < stop; j += CHUNK) {
        const int m = stop - j < CHUNK ? stop - j : CHUNK;
        measure(h, j, m);
        for (int i = 0; i < m; i++) h->square[j + i] = square_sum(h->X + i * h->s.dp, h->s.dp);
        if (joins) to_cells(h, j, m, h->X);
    }
}

void load_heavy(const Past *h, const int32_t *heavy, float *keys, float *values, float *mass) {
    const int dp = h->s.dp, lv = h->s.lv;
    for (int i = 0; i < h->s.n; i++) {
        mass[i] = heavy[i] >= 0;
        memset(keys + i * dp, 0, sizeof(float) * dp);
        memset(values + i * lv, 0, sizeof(float) * lv);
        if (heavy[i] < 0) continue;
        memcpy(keys + i * dp, key(h, heavy[i]), sizeof(float) * dp);
        memcpy(values + i * lv, h->V + heavy[i] * lv, sizeof(float) * lv);
    }
}

/* Heavy keys, of the keys before the window: those of the largest |z|^2. */
static void find_heavy(Past *h, int64_t far) {
    const int n = h->s.n;
    int32_t *held = h->heavy;
    int count = 0;
    for (int64_t j = 0; j < far && n; j++) {
        if (!there(h, j) || (count == n && !(h->square[j] > h->square[held[n - 1]]))) continue;
        int i = count < n ? count++ : n - 1;
        for (; i > 0 && h->square[held[i - 1]] < h->square[j]; i--) held[i] = held[i - 1];
        held[i] = (int32_t)j;
    }
    for (int64_t j = 0; j < far; j++) h->cell[j] = -1;
    for (int i = 0; i < count; i++) h->cell[held[i]] = -2;
    for (int i = count; i < n; i++) held[i] = -1;
    for (int i = 0; i < n; i++) h->bias[i] = 0, h->high[i] = i < count ? 0 : HIDDEN;
    load_heavy(h, held, h->shared, h->values, h->mass);
}

/* Heavy keys and cells of the keys before the window of block t, where a renewal lies. */
static int renew(Past *h, int64_t t) {
    const Recall *c = h->c;
    const int64_t far = (t - 1) * c->block, leaves = h->s.leaves;
    const int d = h->s.d, dp = h->s.dp, n = h->s.n;
    find_heavy(h, far);
    for (int64_t leaf = 0; leaf < leaves; leaf++) {
        float *mean = h->pooled + leaf * d, count = 0;
        memset(mean, 0, sizeof(float) * d);
        for (int i = 0; i < LEAF; i++) {
            const int64_t j = h->order[leaf * LEAF + i];
            if (h->cell[j] == -2 || !there(h, j)) continue;
            add_row(mean, 1, key(h, j), d);
            count++;
        }
        for (int p = 0; p < d; p++) mean[p] /= count > 0 ? count : 1;
        h->counts[leaf] = count;
    }
    const int K = h->s.K = least_of(c->cells, leaves);
    NearFar means = {.Z = 1, .G = 1, .S = leaves, .d = d, .dv = d, .block = 1, .cells = K, .factor = 1,
                     .y = {h->pooled, 0, 0, d}, .shift = (float *)c->shift + h->z * d, .tilt = h->next,
                     .root = (float *)c->root + h->z * d * d, .cell = h->nearest};
    memset(h->next, 0, sizeof(float) * dp);
    if (!centres_of(&means, h->counts, h->centres)) return 0;
    product(ALL, K, d, d, h->centres, dp, 1, h->rootT, dp, h->turned, dp, 0);
    for (int k = 0; k < K; k++) {
        for (int p = d; p < dp; p++) h->turned[k * dp + p] = 0;
        h->offset[k] = square_sum(h->centres + k * dp, dp) / 2 + dot(h->shift, h->turned + k * dp, d);
    }
    memset(h->ysum, 0, sizeof(float) * K * dp);
    memset(h->squares, 0, sizeof(float) * K);
    memset(h->mass + n, 0, sizeof(float) * K);
    memset(h->values + n * h->s.lv, 0, sizeof(float) * K * h->s.lv);
    for (int64_t j = 0; j < far; j += CHUNK) to_cells(h, j, far - j < CHUNK ? far - j : CHUNK, NULL);
    for (int k = 0; k < K; k++) {
        float apart[dp];
        for (int p = 0; p < dp; p++) apart[p] = h->ysum[k * dp + p] - h->mass[n + k] * h->shift[p];
        product(ALL, 1, d, d, apart, dp, 1, h->rows, dp, h->zsum + k * dp, dp, 0);
        for (int p = d; p < dp; p++) h->zsum[k * dp + p] = 0;
    }
    mark(h, 0, far);
    return 1;
}

float place_cells_of(Past *h) {
    const int dp = h->s.dp, n = h->s.n;
    double spread = 0, all = 0;
    for (int k = 0; k < h->s.K; k++) {
        const float N = h->mass[n + k], scale = N > 0 ? 1 / N : 0;
        put_row(h->shared + (n + k) * dp, scale, h->ysum + k * dp, dp);
        float tau = scale * (h->squares[k] - scale * square_sum(h->zsum + k * dp, dp));
        if (!(tau > 0)) tau = 0;
        h->bias[n + k] = log2f(1 + tau / 2);
        h->high[n + k] = N > 0 ? (float)ilogbf(N) + 1 : HIDDEN;
        float weight = N;
        if (h->c->tilt) {
            const float *mu = h->shared + (n + k) * dp;
            h->bias[n + k] += LOG2E * (h->c->level[h->z * h->c->cells + k] - dot(h->tilt, mu, dp) +
                                       dot(h->tilt, h->shift, dp));
            weight *= h->relative[k];
        }
        spread += weight * tau, all += weight;
    }
    return all > 0 ? (float)(spread / all) : 0;
}

/* ---- All queries ---- */

void attend_block(Past *h, int64_t t) {
    const Recall *c = h->c;
    Seen *s = &h->s;
    Work *k = &h->k;
    const int64_t first = c->S - c->L, b = c->block, far = t > 0 ? (t - 1) * b : 0;
    const int64_t start = t * b > first ? t * b : first, stop = least_of((t + 1) * b, c->S), tokens = stop - start;
    s->near = far, s->stop = stop;
    s->looked = (int)least_of(looked_at(c, far), s->leaves);
    for (int64_t i = 0; i < tokens * c->G; i += PIECE) {
        const int R = (int)least_of(PIECE, tokens * c->G - i);
        int64_t until[PIECE], number[PIECE];
        for (int r = 0; r < R; r++) {
            const int64_t g = (i + r) / tokens, j = start + (i + r) % tokens;
            float *q = k->Q + r * s->dp;
            put_row(q, (float)c->factor, of(c->x, h->z, g) + (j - first) * c->x.token, s->d);
            for (int p = s->d; p < s->dp; p++) q[p] = 0;
            if (c->open) to_pairs(q, s->dp, k->pairs + r * s->dp / 2, k->spread + (int64_t)r * s->dp / 2 * LEAF);
            put_row(q, LOG2E, q, s->dp);
            until[r] = j + 1;
            number[r] = (h->z * c->G + g) * c->L + j - first;
        }
        attend_piece(s, k, R, until);
        for (int r = 0; r < R; r++) {
            const int64_t g = (i + r) / tokens, j = start + (i + r) % tokens;
            float *out = of(c->out, h->z, g) + (j - first) * c->out.token;
            const float scale = k->scale[r] > 0 ? 1 / k->scale[r] : 0;
            put_row(out, scale, k->O + r * s->lv, s->dv);
            c->logsum[number[r]] = k->top[r] + log2f(k->scale[r]);
            c->share[number[r]] = k->part[r] * scale;
            if (c->open) memcpy(c->places + number[r] * c->open, k->places + r * c->open, sizeof(int32_t) * c->open);
        }
    }
}

int advance(Past *h, int64_t t) {
    const Recall *c = h->c;
    const int64_t b = c->block;
    if (!h->t) {
        load_past(h);
        for (h->start = c->until; following(h->start, b) <= t * b;) h->start = following(h->start, b);
        h->t = h->start / b;
        for (int64_t s = 0; s < h->t - 1; s++) measure_block(h, s, 0);
        grow_pages(h, h->t - 1);
        if (!renew(h, h->t)) return 0;
    }
    while (h->t < t) {
        h->t++;
        const int renews = h->t * b == following(h->start, b);
        measure_block(h, h->t - 2, !renews);
        if (!renews) continue;
        h->start = h->t * b;
        grow_pages(h, h->t - 1);
        if (!renew(h, h->t)) return 0;
    }
    if (h->far < t - 1 && h->pages) grow_pages(h, t - 1);
    return 1;
}

int recall_head(Past *h) {
    const Recall *c = h->c;
    for (int64_t t = (c->S - c->L) / c->block; t <= (c->S - 1) / c->block; t++) {
        if (!advance(h, t)) return 0;
        c->spread[h->z] = place_cells_of(h);
        attend_block(h, t);
    }
    return 1;
}
