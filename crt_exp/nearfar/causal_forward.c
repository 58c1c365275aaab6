/* Causal near-far attention: the C version of nearfar/recall.py, whose names these are.

   One thread takes one head of keys, block by block. Behind the window the keys go to their cells. A query scores
   all of them in 8 bits and retrieves those of the largest scores; cells weigh what is left in them (left.c). Logits
   are in base 2; dense ones have keys as rows and the queries of a piece as columns, as in near_far.c, those of
   retrieved keys lie side by side.

   Notation: see near_far.h. A key that is heavy, masked or near has no cell, -1. */

#include "past.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

/* ---- Rows at some places ---- */

#if defined(__AVX512F__)
enum { TOTALS = 8 };

/* The sums of TOTALS vectors. */
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

/* to (n, and room for 8 more): the products of a vector (dp) with the rows at n places, which rise. */
static void dots(const float *Y, const int32_t *places, int n, const float *with, int dp, float *to) {
    for (int i = 0; i < n; i += TOTALS) {
        const float *rows[TOTALS];
        vec sum[TOTALS];
        for (int j = 0; j < TOTALS; j++) {
            rows[j] = Y + (int64_t)places[i + j < n ? i + j : n - 1] * dp;
            const float *next = Y + (int64_t)places[i + j + TOTALS < n ? i + j + TOTALS : n - 1] * dp;
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

/* out (ld) += the sum by weights of the rows at n places, which rise. */
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

/* From the logits of cells (K, ld) what each key that is left weighs; the largest logits of the next R queries get
   those of the keys that they read. */
static void leave_cells(Past *h, int R, float *top, float *logits) {
    Work *k = &h->k;
    const int ld = up(R);
    begin_left(h, R, ld, k->Q + k->taken * h->dp, LN2);
    for (int r = 0; r < R; r++) {
        const int n = k->taken + r, count = k->count[n];
        const float *read = k->read + n * room_to_read(h);
        leave(h, r, ld, k->places + n * h->open, read, count, h->cell);
        for (int i = 0; i < count; i++) top[r] = read[i] > top[r] ? read[i] : top[r];
    }
    weigh_left(h, top, ld, logits);
}

/* The weights of the keys that the next R queries read: more than as one of those that are left in their cells,
   which weigh `left` (K, ld). */
static void weigh_read(Past *h, int R, const float *left) {
    Work *k = &h->k;
    const int ld = up(R);
    for (int r = 0; r < R; r++) {
        const int at = k->taken + r, n = k->count[at];
        const int32_t *places = k->places + at * h->open;
        float *more = k->read + at * room_to_read(h);
        for (int j = n; j < up(n); j++) more[j] = -INFINITY;
        for (int j = 0; j < n; j += LANES) {
            AT(more + j) = exp2_of(AT(more + j) - k->top[at]);
            k->scale[at] += total(AT(more + j));
        }
        for (int j = 0; j < n; j++) more[j] -= left[h->cell[places[j]] * ld + r];
    }
}

/* Of each query that is ahead the reads [from, to) of keys before a place, for all places in steps: keys come from
   memory once for all queries. */
INLINE void read_nearby(Past *h, void (*read)(Past *h, int r, int from, int to), int row) {
    Work *k = &h->k;
    const int64_t step = NEARBY / row, last = k->query[k->ahead - 1].far;
    memset(k->from, 0, sizeof(int32_t) * k->ahead);
    for (int64_t stop = step; stop < last + step; stop += step)
        for (int r = 0; r < k->ahead; r++) {
            const int32_t *places = k->places + r * h->open;
            const int from = k->from[r];
            int to = from;
            while (to < k->count[r] && places[to] < stop) to++;
            if (to > from) read(h, r, from, to);
            k->from[r] = to;
        }
}

static void read_keys(Past *h, int r, int from, int to) {
    const int32_t *places = h->k.places + r * h->open + from;
    dots(h->Y, places, to - from, h->k.Q + r * h->dp, h->dp, h->k.read + r * room_to_read(h) + from);
}

static void read_values(Past *h, int r, int from, int to) {
    const int32_t *places = h->k.places + r * h->open + from;
    add_rows(h->V, h->lv, h->k.read + r * room_to_read(h) + from, places, to - from, h->k.O + r * h->lv);
}

/* The next R queries: in O what they gather but for the values of the keys that they read, whose weights are then in
   `read`; total weights in `scale` and logs of them in `top`. */
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
    int64_t all = query[0].j;                                     /* keys up to there are seen by all */
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
    leave_cells(h, R, top_of, shared + h->n * ld);
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
    weigh_read(h, R, shared + h->n * ld);
    k->taken += R;
}

/* ---- One head ---- */

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
static size_t place_kept(Past *h, const NearFar *c, float *memory) {
    const size_t d = c->d, dp = up(d), lv = up(c->dv), S = c->room, n = c->heavy, K = c->cells, M = n + K;
    const size_t panels = (S + c->block) / PANEL + FOUR / PANEL, steps = panels * PANEL;
    const Piece pieces[] = {
        {&h->numbers, PAD}, {&h->panels, panels * PANEL * dp / 4}, {&h->step, steps}, {&h->valid_step, steps},
        {&h->cell, S}, {&h->square, S},
        {&h->shared, M * dp}, {&h->values, M * lv}, {&h->high, M}, {&h->mass, M}, {&h->ysum, K * dp},
        {&h->zsum, K * dp}, {&h->squares, K}, {&h->tau, K}, {&h->heavy, n}, {&h->rows, d * dp}, {&h->shift, dp},
        {&h->centres, K * dp}, {&h->offset, K}};
    return place_pieces(pieces, sizeof pieces / sizeof *pieces, memory);
}

static size_t place_scratch(Past *h, const NearFar *c, float *memory) {
    const size_t d = c->d, dp = up(d), lv = up(c->dv), S = c->kept ? 0 : c->S, K = c->cells, M = c->heavy + K;
    const size_t drawn = 2 * DRAWN * K, open = c->open, best = room_for_best(open);
    const size_t ahead = least_of(AHEAD, c->G * c->L) + PAD;
    Work *k = &h->k;
    const Piece pieces[] = {
        {&h->Y, S * dp}, {&h->V, S * lv}, {&h->drawn, drawn * d}, {&h->counts, drawn}, {&h->X, CHUNK * dp},
        {&h->apart, CHUNK * dp}, {&h->Xt, dp * CHUNK}, {&h->dots, K * CHUNK}, {&h->next, dp}, {&h->nearest, 2 * drawn},
        {&k->Q, ahead * dp}, {&k->O, ahead * lv}, {&k->top, ahead}, {&k->scale, ahead},
        {&k->whole, ahead * dp / 4}, {&k->bias, ahead}, {&k->scores, AT_ONCE * SCORED}, {&k->best[0].value, ahead * best},
        {&k->best[0].place, ahead * best}, {&k->read, ahead * (up(open) + PAD)}, {&k->places, ahead * open},
        {&k->count, ahead}, {&k->from, ahead}, {&k->Qt, d * PIECE}, {&k->A, (2 * c->block + M) * PIECE},
        {&k->number, K * PIECE}, {&k->bar, PIECE}, {&k->along, PIECE}, {&k->turned, PIECE * dp}};
    const size_t size = place_pieces(pieces, sizeof pieces / sizeof *pieces, memory);
    for (size_t i = 1; i < ahead - PAD && memory; i++) {
        k->best[i].value = k->best[0].value + i * best;
        k->best[i].place = k->best[0].place + i * best;
    }
    return size;
}

int64_t near_far_recall_size(const NearFar *c) { return place_kept(&(Past){0}, c, NULL); }

/* Memory for one head at a time, or null. In large pages, where there are such: rows are read here and there, and
   each of the small ones has to be valid_step up. */
static float *past_memory(const NearFar *c) {
    Past h = {0};
    const size_t size = c->kept ? 0 : place_kept(&h, c, NULL), page = 1 << 21;
    const size_t bytes = sizeof(float) * (place_scratch(&h, c, NULL) + size), align = bytes > page ? page : 64;
    float *memory = aligned_alloc(align, (bytes + align - 1) / align * align);
#if defined(MADV_HUGEPAGE)
    if (memory && align == page) madvise(memory, bytes, MADV_HUGEPAGE);
#endif
    return memory;
}

void open_past(Past *h, const NearFar *c, int64_t z, float *memory) {
    *h = (Past){.c = c, .z = z, .d = c->d, .dp = up(c->d), .dv = c->dv, .lv = up(c->dv), .n = c->heavy, .K = c->cells,
                .open = c->open, .keep = c->keep ? c->keep + z * c->S : NULL};
    const size_t size = place_kept(h, c, NULL), scratch = place_scratch(h, c, memory);
    place_kept(h, c, c->kept ? c->kept + z * size : memory + scratch);
    if (c->kept) h->Y = of(c->y, z, 0), h->V = of(c->v, z, 0);
    else h->numbers[0] = 0;
    h->t = h->numbers[0];
    if (h->t) h->start = h->numbers[1], h->K = (int)h->numbers[2], h->paneled = h->numbers[3];
}

static void close_past(Past *h) {
    const int64_t numbers[] = {h->t, h->start, h->K, h->paneled};
    memcpy(h->numbers, numbers, sizeof numbers);
}

static void load_past(Past *h) {
    const NearFar *c = h->c;
    const int d = h->d, dp = h->dp;
    if (!c->kept) {
        load_rows(c->y, h->z, 0, 0, c->S, d, c->factor, NULL, h->keep, h->Y, dp);
        load_rows(c->v, h->z, 0, 0, c->S, c->dv, 1, NULL, h->keep, h->V, h->lv);
    }
    for (int64_t j = 0; j < c->room; j++) h->cell[j] = -1;
    memset(h->shift, 0, sizeof(float) * dp);
    memcpy(h->shift, c->shift + h->z * d, sizeof(float) * d);
    memset(h->rows, 0, sizeof(float) * d * dp);
    for (int p = 0; p < d; p++) memcpy(h->rows + p * dp, c->root + (h->z * d + p) * d, sizeof(float) * d);
}

/* ---- Cells ---- */

/* Which of the centres is nearest to the m <= CHUNK keys that are measured. */
static void find_nearest(Past *h, int m, int32_t *nearest) {
    const int d = h->d, dp = h->dp;
    transpose(m, d, h->X, dp, h->Xt, CHUNK);
    product(ALL, h->K, m, d, h->centres, dp, 1, h->Xt, CHUNK, h->dots, CHUNK, 0);
    for (int i = 0; i < m; i += LANES) {
        vec best = AT(h->dots + i) - h->offset[0];
        ivec which = {0};
        for (int k = 1; k < h->K; k++) {
            vec here = AT(h->dots + k * CHUNK + i) - h->offset[k];
            ivec better = here > best;
            best = choose(better, here, best);
            which = (better & k) | (~better & which);
        }
        for (int e = 0; e < LANES && i + e < m; e++) nearest[i + e] = which[e];
    }
}

/* Adds keys [j, j + m), m <= CHUNK, which are measured, to the sums of their nearest centres. X then holds each key
   less its centre, whose squares stay precise where keys are alike. */
static void to_cells(Past *h, int64_t j, int m) {
    const int dp = h->dp, lv = h->lv, n = h->n;
    int32_t nearest[CHUNK];
    find_nearest(h, m, nearest);
    for (int i = 0; i < m; i++) {
        const int64_t at = j + i;
        if (h->cell[at] == -2 || !there(h, at)) {                        /* heavy, or masked */
            h->cell[at] = -1;
            h->valid_step[at] = NAN;
            continue;
        }
        const int k = h->cell[at] = nearest[i];
        h->valid_step[at] = h->step[at];
        add_row(h->ysum + k * dp, 1, key(h, at), dp);
        add_row(h->X + i * dp, -1, h->centres + k * dp, dp);
        add_row(h->zsum + k * dp, 1, h->X + i * dp, dp);
        add_row(h->values + (n + k) * lv, 1, h->V + at * lv, lv);
        h->squares[k] += square_sum(h->X + i * dp, dp);
        h->mass[n + k] += 1;
    }
}

/* z of keys [j, j + m), m <= CHUNK, in X; 0 for those that are masked. */
static void measure(Past *h, int64_t j, int m) {
    const int d = h->d, dp = h->dp;
    for (int i = 0; i < m; i++)
        for (int p = 0; p < dp; p += LANES)
            AT(h->apart + i * dp + p) = there(h, j + i) ? (vec)(AT(key(h, j + i) + p) - AT(h->shift + p)) : (vec){0};
    product(ALL, m, d, d, h->apart, dp, 1, h->rows, dp, h->X, dp, 0);
    for (int i = 0; i < m; i++)
        for (int p = d; p < dp; p++) h->X[i * dp + p] = 0;
}

void to_panels(Past *h, int64_t stop) {
    const int dp = h->dp;
    int8_t whole[dp];
    for (int64_t j = h->paneled; j < stop; j++) {
        uint8_t *panel = h->panels + j / PANEL * PANEL * dp + j % PANEL * 4;
        h->step[j] = whole_of(key(h, j), dp, whole);
        h->valid_step[j] = there(h, j) ? h->step[j] : NAN;
        for (int p = 0; p < dp; p++) panel[p / 4 * 4 * PANEL + p % 4] = (uint8_t)(whole[p] ^ 0x80);
    }
    h->paneled = stop > h->paneled ? stop : h->paneled;
}

/* The keys of block t become far: what they are measured by, and where they join cells, these. */
static void measure_block(Past *h, int64_t t, int joins) {
    for (int64_t j = t * h->c->block, stop = j + h->c->block; j < stop; j += CHUNK) {
        const int m = stop - j < CHUNK ? stop - j : CHUNK;
        measure(h, j, m);
        for (int i = 0; i < m; i++) h->square[j + i] = square_sum(h->X + i * h->dp, h->dp);
        if (joins) to_cells(h, j, m);
    }
}

void load_heavy(const Past *h, const int32_t *heavy, float *keys, float *values, float *mass) {
    const int dp = h->dp, lv = h->lv;
    for (int i = 0; i < h->n; i++) {
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
    const int n = h->n;
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
    for (int i = 0; i < n; i++) h->high[i] = i < count ? 0 : HIDDEN;
    load_heavy(h, held, h->shared, h->values, h->mass);
}

/* Heavy keys and cells of the keys before the window of block t, where a renewal lies. */
static int renew(Past *h, int64_t t) {
    const NearFar *c = h->c;
    const int64_t far = (t - 1) * c->block, many = DRAWN * c->cells, step = far > many ? far / many : 1;
    const int64_t drawn = far / step;
    const int d = h->d, dp = h->dp, n = h->n;
    to_panels(h, far);
    find_heavy(h, far);
    for (int64_t i = 0; i < drawn; i++) {
        const int64_t j = i * step + i * MIXED % step;
        h->counts[i] = h->cell[j] != -2 && there(h, j);
        put_row(h->drawn + i * d, h->counts[i], key(h, j), d);
    }
    const int K = h->K = (int)least_of(c->cells, drawn);
    NearFar keys = {.Z = 1, .G = 1, .S = drawn, .d = d, .dv = d, .block = 1, .cells = K, .factor = 1,
                     .y = {h->drawn, 0, 0, d}, .shift = (float *)c->shift + h->z * d, .tilt = h->next,
                     .root = (float *)c->root + h->z * d * d, .cell = h->nearest};
    memset(h->next, 0, sizeof(float) * dp);
    if (!centres_of(&keys, h->counts, h->centres)) return 0;
    for (int k = 0; k < K; k++) h->offset[k] = square_sum(h->centres + k * dp, dp) / 2;
    memset(h->ysum, 0, sizeof(float) * K * dp);
    memset(h->zsum, 0, sizeof(float) * K * dp);
    memset(h->squares, 0, sizeof(float) * K);
    memset(h->mass + n, 0, sizeof(float) * K);
    memset(h->values + n * h->lv, 0, sizeof(float) * K * h->lv);
    for (int64_t j = 0; j < far; j += CHUNK) {
        const int m = far - j < CHUNK ? far - j : CHUNK;
        measure(h, j, m);
        to_cells(h, j, m);
    }
    return 1;
}

void place_cells_of(Past *h) {
    const int dp = h->dp, n = h->n;
    for (int k = 0; k < h->K; k++) {
        const float N = h->mass[n + k], scale = N > 0 ? 1 / N : 0;
        put_row(h->shared + (n + k) * dp, scale, h->ysum + k * dp, dp);
        const float tau = scale * (h->squares[k] - scale * square_sum(h->zsum + k * dp, dp));
        h->tau[k] = tau > 0 ? tau : 0;
        h->high[n + k] = N > 0 ? (float)ilogbf(N) + 1 : HIDDEN;
    }
}

/* ---- All queries ---- */

/* The place of the first query of block t, and how many there are. */
INLINE int64_t first_query(const NearFar *c, int64_t t) {
    return t * c->block > c->S - c->L ? t * c->block : c->S - c->L;
}
INLINE int64_t queries_of(const NearFar *c, int64_t t) {
    return least_of((t + 1) * c->block, c->S) - first_query(c, t);
}

static float *out_of(const Past *h, const Query *query) {
    return of(h->c->out, h->z, query->g) + (query->j - h->c->S + h->c->L) * h->c->out.token;
}

/* AHEAD queries from the i-th of block t on, or as many as there are, also of the next blocks, for which the same
   keys are heavy. */
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
        *query = (Query){i / queries_of(c, t), first_query(c, t) + i % queries_of(c, t), t > 0 ? (t - 1) * c->block : 0};
        put_row(q, (float)c->factor, of(c->x, h->z, query->g) + (query->j - c->S + c->L) * c->x.token, c->d);
        for (int p = c->d; p < dp; p++) q[p] = 0;
        int8_t *whole = k->whole + k->ahead * dp;
        whole_of(q, dp, whole);
        k->bias[k->ahead] = 0;
        for (int p = 0; p < dp; p++) k->bias[k->ahead] -= 128 * whole[p];
        for (int p = 0; p < dp; p++) q[p] *= LOG2E;
        k->ahead++;
    }
    memset(k->Q + k->ahead * dp, 0, sizeof(float) * PAD * dp);
    memset(k->count, 0, sizeof(int32_t) * k->ahead);
    k->taken = 0;
    retrieve(h, (int)opens_at(c, h->start));
    read_nearby(h, read_keys, dp);
}

/* The outputs of all that were ahead. */
static void give_out(Past *h) {
    const NearFar *c = h->c;
    Work *k = &h->k;
    read_nearby(h, read_values, h->lv);
    for (int r = 0; r < k->ahead; r++) {
        const Query *query = k->query + r;
        const int64_t number = (h->z * c->G + query->g) * c->L + query->j - c->S + c->L;
        const float scale = k->scale[r] > 0 ? 1 / k->scale[r] : 0;
        put_row(out_of(h, query), scale, k->O + r * h->lv, c->dv);
        c->logsum[number] = k->top[r] + log2f(k->scale[r]);
        if (!c->gaps) continue;
        c->gaps_at[number] = h->bytes;
        h->bytes += put_gaps(c->gaps + h->z * c->bytes + h->bytes, k->places + r * c->open, k->count[r]);
    }
}

/* The queries of block t among the last L, with the past of that block. */
static void attend_block(Past *h, int64_t t) {
    const NearFar *c = h->c;
    Work *k = &h->k;
    const int64_t queries = queries_of(c, t) * c->G;
    h->near = t > 0 ? (t - 1) * c->block : 0, h->stop = first_query(c, t) + queries_of(c, t);
    for (int64_t i = 0, R; i < queries; i += R) {
        if (k->taken == k->ahead) load_ahead(h, t, i);
        R = least_of(least_of(PIECE, queries - i), k->ahead - k->taken);
        attend_piece(h, (int)R);
        if (k->taken == k->ahead) give_out(h);
    }
}

int advance(Past *h, int64_t t) {
    const NearFar *c = h->c;
    const int64_t b = c->block;
    if (!h->t) {
        load_past(h);
        for (h->start = c->until; following(h->start, b) <= t * b;) h->start = following(h->start, b);
        h->t = h->start / b;
        for (int64_t s = 0; s < h->t - 1; s++) measure_block(h, s, 0);
        if (!renew(h, h->t)) return 0;
    }
    while (h->t < t) {
        h->t++;
        const int renews = h->t * b == following(h->start, b);
        measure_block(h, h->t - 2, !renews);
        if (!renews) continue;
        h->start = h->t * b;
        if (!renew(h, h->t)) return 0;
    }
    return 1;
}

static int recall_head(const NearFar *c, int64_t z, float *memory) {
    Past h;
    open_past(&h, c, z, memory);
    int done = 1;
    for (int64_t t = (c->S - c->L) / c->block; done && t <= (c->S - 1) / c->block; t++) {
        if (!(done = advance(&h, t))) break;
        place_cells_of(&h);
        attend_block(&h, t);
    }
    close_past(&h);
    return done;
}

/* ---- All heads ---- */

/* Each thread takes one head after the other; body(c, z, memory) returns 0 where memory ended. */
static int each_head(const NearFar *c, int (*body)(const NearFar *c, int64_t z, float *memory)) {
    int bad = OK;
#pragma omp parallel num_threads((int)least_of(c->threads, c->Z)) reduction(max : bad)
    {
        const unsigned mode = without_denormals();
        float *memory = past_memory(c);
#pragma omp for schedule(dynamic)
        for (int64_t z = 0; z < c->Z; z++)
            if (!memory || !body(c, z, memory)) bad = NO_MEMORY;
        if (!memory) bad = NO_MEMORY;
        free(memory);
        with_mode(mode);
        trim_scratch();
    }
    return bad;
}

int near_far_recall(const NearFar *c) { return each_head(c, recall_head); }

int near_far_recall_backward(const NearFar *c) { return each_head(c, recall_backward_head); }
