/* Causal near-far attention that remembers: the twin of attention/nearfar/{recall,leaves}.py, whose names these are.

   One thread takes one head of keys, block by block. Behind the window the keys go to their cells, and pages of blocks
   are sorted into leaves. A query ranks the leaves, looks at the keys of the best, and reads those of the largest
   logits; what cells weigh for these is taken off. Logits are in base 2; dense ones have keys as rows and the queries of
   a piece as columns, as in near_far.c, those of leaves and of keys that are looked at lie side by side.

   Legend: see near_far.h; blocks are LEAF times a power of 2. A key that is heavy, masked or near has no cell, -1. */

#include "recall.h"

/* ---- The logits of a leaf ---- */

/* The products of a query with the keys of a leaf, features one after the other, LEAF keys each; query: each number LEAF
   times. */
INLINE void leaf_logits(const float *leaf, const float *query, int dp, float *to) {
    enum { BOTH = 2 * LEAF, PARTS = BOTH / LANES };
    vec sum[2 * PARTS];
    UNROLL for (int i = 0; i < 2 * PARTS; i++) sum[i] = (vec){0};
    for (int i = 0; i < LEAF * dp; i += 2 * BOTH)
        UNROLL for (int j = 0; j < 2 * PARTS; j++) sum[j] += AT(leaf + i + j * LANES) * AT(query + i + j * LANES);
    float all[BOTH];
    UNROLL for (int j = 0; j < PARTS; j++) AT(all + j * LANES) = sum[j] + sum[PARTS + j];
    for (int e = 0; e < LEAF; e++) to[e] = all[e] + all[LEAF + e];
}

/* ---- The largest of many ---- */

/* Those above a bar, and the others. */
INLINE void part(const Some *from, float bar, Some *more, Some *rest) {
    more->n = rest->n = 0;
    int i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= from->n; i += 16) {
        const __m512 value = _mm512_loadu_ps(from->value + i);
        const __m512i place = _mm512_loadu_si512(from->place + i);
        const __mmask16 high = _mm512_cmp_ps_mask(value, _mm512_set1_ps(bar), _CMP_GT_OQ), low = ~high;
        _mm512_storeu_ps(more->value + more->n, _mm512_maskz_compress_ps(high, value));
        _mm512_storeu_si512(more->place + more->n, _mm512_maskz_compress_epi32(high, place));
        more->n += __builtin_popcount(high);
        _mm512_storeu_ps(rest->value + rest->n, _mm512_maskz_compress_ps(low, value));
        _mm512_storeu_si512(rest->place + rest->n, _mm512_maskz_compress_epi32(low, place));
        rest->n += __builtin_popcount(low);
    }
#endif
    for (; i < from->n; i++) {
        const int high = from->value[i] > bar;
        more->value[more->n] = rest->value[rest->n] = from->value[i];
        more->place[more->n] = rest->place[rest->n] = from->place[i];
        more->n += high, rest->n += !high;
    }
}

INLINE Some behind(Some s, int n) { return (Some){s.value + n, s.place + n, s.n - n}; }

/* The largest and the least of some numbers, but for those that are HIDDEN. */
INLINE void range(Some s, float *most, float *least) {
    vec high = {0}, low = {0};
    high += HIDDEN, low -= HIDDEN;
    int i = 0;
    for (; i + LANES <= s.n; i += LANES) {
        const vec here = AT(s.value + i);
        high = maximum(high, here);
        low = minimum(low, choose(here > HIDDEN, here, low));
    }
    *most = largest(high), *least = -largest(-low);
    for (; i < s.n; i++) {
        *most = s.value[i] > *most ? s.value[i] : *most;
        *least = s.value[i] > HIDDEN && s.value[i] < *least ? s.value[i] : *least;
    }
}

/* The k largest of some numbers, of those above HIDDEN, come first in `to`, with their places. Returns how many there
   are. */
static int select_largest(Some from, int k, Some to, const Some spare[2]) {
    float most, least;
    int found = 0;
    range(from, &most, &least);
    while (found < k) {
        const float bar = from.n <= k - found ? HIDDEN : 0.5f * (most + least);
        Some more = behind(to, found), rest = spare[from.value == spare[0].value];
        if (bar == HIDDEN || !(bar < most && bar > least)) {     /* all that are left, or any, being alike */
            part(&from, HIDDEN, &more, &rest);
            return found + (int)least_of(more.n, k - found);
        }
        part(&from, bar, &more, &rest);
        if (more.n > k - found) {
            memcpy(rest.value, more.value, sizeof(float) * more.n);
            memcpy(rest.place, more.place, sizeof(int32_t) * more.n);
            rest.n = more.n, least = bar;
        } else {
            found += more.n, most = bar;
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
    Some *looked = &k->looked;
    for (int p = 0; p < s->dp; p++)
        for (int e = 0; e < LEAF; e++) k->each[p * LEAF + e] = q[p];
    for (int i = 0; i < leaves; i++) {
        const int64_t leaf = k->chosen.place[i];
        leaf_logits(s->panels + leaf * LEAF * s->dp, k->each, s->dp, looked->value + i * LEAF);
        for (int e = 0; e < LEAF; e++) {
            const int32_t place = looked->place[i * LEAF + e] = s->in_cells[leaf * LEAF + e];
            looked->value[i * LEAF + e] = place < 0 ? HIDDEN : looked->value[i * LEAF + e];
        }
    }
    looked->n = leaves * LEAF;
    const int read = select_largest(*looked, s->open, k->chosen, k->spare);
    int32_t *places = k->places + r * s->open;
    float *logits = k->read + r * up(s->open), top = k->top[r];
    for (int i = 0; i < read; i++) {
        places[i] = k->chosen.place[i];
        logits[i] = k->chosen.value[i];
        top = logits[i] > top ? logits[i] : top;
    }
    for (int i = read; i < s->open; i++) places[i] = -1;
    k->count[r] = read;
    k->top[r] = top;
}

static void open_all(const Seen *s, Work *k, int R) {
    for (int i = 0; i < R; i += RANKED) {
        const int here = R - i < RANKED ? R - i : RANKED, ld = up(s->leaves);
        product(ALL, here, s->leaves, s->d, k->Q + i * s->dp, s->dp, 1, s->means, s->most, k->ranks, ld, 0);
        for (int r = 0; r < here; r++) {
            const float *ranks = k->ranks + r * ld, length = sqrtf(square_sum(k->Q + (i + r) * s->dp, s->dp));
            for (int64_t l = 0; l < ld; l += LANES) {
                const vec reach = AT(s->reach + l), none = (vec){0} + HIDDEN;
                AT(k->leaves.value + l) = choose(reach > none, AT(ranks + l) + length * reach, none);
            }
            k->leaves.n = (int)s->leaves;
            open_keys(s, k, i + r);
        }
    }
}

/* out (dv) += sum of change_j v_j over the n keys of a query. */
static void add_values(const Seen *s, const float *change, const int32_t *places, int n, float *out) {
    enum { TOGETHER = 4 };
    for (int p = 0; p < s->lv; p += TOGETHER * LANES) {
        const int wide = s->lv - p >= TOGETHER * LANES;
        if (wide) {
            vec sum[TOGETHER];
            UNROLL for (int i = 0; i < TOGETHER; i++) sum[i] = AT(out + p + i * LANES);
            for (int j = 0; j < n; j++) {
                const float *row = s->V + (int64_t)places[j] * s->lv + p;
                UNROLL for (int i = 0; i < TOGETHER; i++) sum[i] += change[j] * AT(row + i * LANES);
            }
            UNROLL for (int i = 0; i < TOGETHER; i++) AT(out + p + i * LANES) = sum[i];
            continue;
        }
        for (int q = p; q < s->lv; q += LANES) {
            vec sum = AT(out + q);
            for (int j = 0; j < n; j++) sum += change[j] * AT(s->V + (int64_t)places[j] * s->lv + q);
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
    open_all(s, k, R);
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
        add_values(s, change, places, n, k->O + r * lv);
    }
}

/* ---- One head ---- */

/* Leaves whose keys are looked at, where so many keys are far. */
INLINE int64_t looked_at(const Recall *c, int64_t far) {
    const int64_t keys = LOOKED * c->open > far / SHARE ? LOOKED * c->open : far / SHARE;
    return keys / LEAF + 1;
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
        {&h->numbers, PAD}, {&h->means, d * up(fit)}, {&h->reach, up(fit)}, {&h->panels, fit * LEAF * dp},
        {&h->order, S + c->block}, {&h->in_cells, S + c->block}, {&h->cell, S}, {&h->square, S},
        {&h->shared, M * dp}, {&h->values, M * lv}, {&h->bias, M}, {&h->high, M}, {&h->mass, M}, {&h->ysum, K * dp},
        {&h->zsum, K * dp}, {&h->squares, K}, {&h->heavy, n}, {&h->rows, d * dp}, {&h->rootT, d * dp}, {&h->shift, dp},
        {&h->centres, K * dp}, {&h->turned, K * dp}, {&h->offset, K}};
    return place_pieces(pieces, sizeof pieces / sizeof *pieces, memory);
}

static size_t place_scratch(Past *h, const Recall *c, float *memory) {
    const size_t d = c->d, dp = up(d), lv = up(c->dv), S = c->kept ? 0 : c->S, K = c->cells, M = c->heavy + K;
    const size_t fit = (c->room + c->block) / LEAF + 1, most = up(fit), looked = looked_at(c, c->room);
    const size_t seen = (looked < fit ? looked : fit) * LEAF, open = up(c->open);
    const size_t more = (most > seen ? most : seen) + 2 * PAD;
    Work *k = &h->k;
    const Piece pieces[] = {
        {&h->Y, S * dp}, {&h->V, S * lv}, {&h->pooled, fit * d}, {&h->counts, fit}, {&h->X, CHUNK * dp},
        {&h->apart, CHUNK * dp}, {&h->Xt, dp * CHUNK}, {&h->dots, K * CHUNK}, {&h->along, c->room}, {&h->axis, dp},
        {&h->next, dp}, {&h->mean, dp}, {&h->nearest, 2 * fit}, {&k->Q, PIECE * dp}, {&k->Qt, d * PIECE},
        {&k->A, (2 * c->block + M) * PIECE}, {&k->O, PIECE * lv}, {&k->ranks, RANKED * most}, {&k->each, LEAF * dp},
        {&k->top, PIECE}, {&k->scale, PIECE}, {&k->part, PIECE}, {&k->read, PIECE * open + LANES},
        {&k->places, PIECE * open}, {&k->count, PIECE}, {&k->leaves.value, more}, {&k->leaves.place, more},
        {&k->looked.value, more}, {&k->looked.place, more}, {&k->chosen.value, more}, {&k->chosen.place, more},
        {&k->spare[0].value, more}, {&k->spare[0].place, more}, {&k->spare[1].value, more},
        {&k->spare[1].place, more}};
    return place_pieces(pieces, sizeof pieces / sizeof *pieces, memory);
}

int64_t near_far_recall_size(const Recall *c) { return place_kept(&(Past){0}, c, NULL); }

int open_past(Past *h, const Recall *c, int64_t z) {
    *h = (Past){.c = c, .z = z, .fit = (c->room + c->block) / LEAF + 1};
    const size_t size = place_kept(h, c, NULL), scratch = place_scratch(h, c, NULL);
    const size_t bytes = sizeof(float) * (scratch + (c->kept ? 0 : size));
    if (!(h->memory = aligned_alloc(64, (bytes + 63) / 64 * 64))) return 0;
    place_scratch(h, c, h->memory);
    place_kept(h, c, c->kept ? c->kept + z * size : h->memory + scratch);
    if (c->kept) {
        h->Y = of(c->y, z, 0), h->V = of(c->v, z, 0);
    } else {
        h->numbers[0] = 0;
    }
    for (int64_t l = 0; l < h->fit; l++) h->k.leaves.place[l] = (int32_t)l;
    h->pages = 1;
    h->s = (Seen){.d = c->d, .dp = up(c->d), .dv = c->dv, .lv = up(c->dv), .n = c->heavy, .K = c->cells,
                  .open = c->open, .most = up(h->fit), .Y = h->Y, .V = h->V, .in_cells = h->in_cells,
                  .cell = h->cell, .means = h->means, .reach = h->reach, .panels = h->panels, .shared = h->shared,
                  .values = h->values, .bias = h->bias, .high = h->high, .mass = h->mass,
                  .keep = c->keep ? c->keep + z * c->S : NULL};
    h->t = h->numbers[0];
    if (h->t) h->far = h->numbers[1], h->start = h->numbers[2], h->s.leaves = h->numbers[3], h->s.K = h->numbers[4];
    return 1;
}

void close_past(Past *h) {
    const int64_t numbers[] = {h->t, h->far, h->start, h->s.leaves, h->s.K};
    if (h->memory) memcpy(h->numbers, numbers, sizeof numbers);
    free(h->memory);
}

static void load_past(Past *h) {
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
    int64_t count = 0, farthest = -1;
    memset(mean, 0, sizeof(float) * dp);
    for (int64_t i = 0; i < m; i++)
        if (there(h, at[i])) add_row(mean, 1, key(h, at[i]), dp), count++;
    for (int p = 0; p < dp; p++) mean[p] /= count ? count : 1;
    float most = -1;
    for (int64_t i = 0; i < m; i++) {
        if (!there(h, at[i])) continue;
        vec sum = {0};
        for (int p = 0; p < dp; p += LANES) {
            vec apart = AT(key(h, at[i]) + p) - AT(mean + p);
            sum += apart * apart;
        }
        const float square = total(sum);
        if (square > most) most = square, farthest = i;
    }
    for (int p = 0; p < dp; p++) axis[p] = count ? key(h, at[farthest])[p] - mean[p] : 0;
    for (int turn = 0; turn < TURNS; turn++) {
        const float offset = dot(mean, axis, dp);
        float all = 0;
        memset(next, 0, sizeof(float) * dp);
        for (int64_t i = 0; i < m; i++) {
            if (!there(h, at[i])) continue;
            const float *y = key(h, at[i]), part = dot(y, axis, dp) - offset;
            add_row(next, part, y, dp);
            all += part;
        }
        for (int p = 0; p < d; p++) next[p] -= all * mean[p];
        const float length = sqrtf(square_sum(next, dp));
        for (int p = 0; p < dp; p++) axis[p] = next[p] / (length > LEAST ? length : LEAST);
    }
    for (int64_t i = 0; i < m; i++) along[i] = there(h, at[i]) ? dot(key(h, at[i]), axis, dp) : INFINITY;
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
        float *mean = h->mean, square = 0;
        const int64_t leaf = (first + i) / LEAF;
        int count = 0;
        memset(mean, 0, sizeof(float) * dp);
        for (int j = 0; j < LEAF; j++)
            if (there(h, order[i + j])) add_row(mean, 1, key(h, order[i + j]), dp), count++;
        for (int p = 0; p < dp; p++) mean[p] /= count ? count : 1;
        for (int j = 0; j < LEAF; j++)
            for (int p = 0; p < d && there(h, order[i + j]); p++) {
                const float apart = key(h, order[i + j])[p] - mean[p];
                square += apart * apart;
            }
        for (int p = 0; p < d; p++) h->means[p * h->s.most + leaf] = mean[p];
        for (int p = 0; p < dp; p++)
            for (int j = 0; j < LEAF; j++) h->panels[(leaf * dp + p) * LEAF + j] = key(h, order[i + j])[p];
        h->reach[leaf] = count ? SPREADS * sqrtf(square / count / d) : HIDDEN;
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

/* The nearest centres of keys [j, j + m), m <= CHUNK, whose sums get them; Z: their z, where these sums get it too. */
static void to_cells(Past *h, int64_t j, int m, const float *Z) {
    const int d = h->s.d, dp = h->s.dp, lv = h->s.lv, n = h->s.n;
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
        for (int e = 0; e < LANES && i + e < m; e++) {
            const int64_t at = j + i + e;
            if (h->cell[at] == -2 || !there(h, at)) {                    /* heavy, or masked */
                h->cell[at] = -1;
                continue;
            }
            const int k = h->cell[at] = which[e];
            add_row(h->ysum + k * dp, 1, key(h, at), dp);
            if (Z) add_row(h->zsum + k * dp, 1, Z + (i + e) * dp, dp);
            add_row(h->values + (n + k) * lv, 1, h->V + at * lv, lv);
            h->squares[k] += h->square[at];
            h->mass[n + k] += 1;
        }
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
        spread += N * tau, all += N;
    }
    return all > 0 ? (float)(spread / all) : 0;
}

/* ---- All queries ---- */

/* The queries of block t among the last L. */
static void attend_block(Past *h, int64_t t) {
    const Recall *c = h->c;
    Seen *s = &h->s;
    Work *k = &h->k;
    const int64_t first = c->S - c->L, b = c->block, far = (t - 1) * b;
    const int64_t start = t * b > first ? t * b : first, stop = least_of((t + 1) * b, c->S), tokens = stop - start;
    s->near = far, s->stop = stop;
    s->looked = (int)least_of(looked_at(c, far), s->leaves);
    for (int64_t i = 0; i < tokens * c->G; i += PIECE) {
        const int R = (int)least_of(PIECE, tokens * c->G - i);
        int64_t until[PIECE], number[PIECE];
        for (int r = 0; r < R; r++) {
            const int64_t g = (i + r) / tokens, j = start + (i + r) % tokens;
            float *q = k->Q + r * s->dp;
            put_row(q, (float)c->factor * LOG2E, of(c->x, h->z, g) + (j - first) * c->x.token, s->d);
            for (int p = s->d; p < s->dp; p++) q[p] = 0;
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
            memcpy(c->places + number[r] * c->open, k->places + r * c->open, sizeof(int32_t) * c->open);
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

static int recall_head(Past *h) {
    const Recall *c = h->c;
    for (int64_t t = (c->S - c->L) / c->block; t <= (c->S - 1) / c->block; t++) {
        if (!advance(h, t)) return 0;
        c->spread[h->z] = place_cells_of(h);
        attend_block(h, t);
    }
    return 1;
}

int near_far_recall(const Recall *c) {
    int bad = OK;
#pragma omp parallel for schedule(dynamic) num_threads((int)c->threads) reduction(max : bad)
    for (int64_t z = 0; z < c->Z; z++) {
        const unsigned mode = without_denormals();
        Past h;
        if (!open_past(&h, c, z) || !recall_head(&h)) bad = NO_MEMORY;
        close_past(&h);
        with_mode(mode);
        trim_scratch();
    }
    return bad;
}
