/* State of a head's past, between blocks and decoding steps: Epoch of nearfar/causal.py in C.

   Heavy hitters, masked and near keys have cluster -1. */

#include "near_far.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

/* ---- Memory ---- */

size_t place_pieces(const Piece *pieces, size_t number, float *at) {
    size_t count = 0;
    for (size_t i = 0; i < number; i++) {
        float *here = at + count;
        if (at) memcpy(pieces[i].to, &here, sizeof here);
        count += up(pieces[i].count) + PAD;
    }
    return count;
}

/* Places the data that last between blocks in `memory`, unless it is null. Returns their size. */
static size_t place_kept(Past *h, const NearFar *c, float *memory) {
    const size_t d = c->d, dp = up(d), lv = up(c->dv), S = c->room, n = c->heavy, K = c->clusters, M = n + K;
    const size_t panels = (S + c->block) / PANEL + FOUR / PANEL, steps = panels * PANEL;
    const Piece pieces[] = {
        {&h->numbers, PAD}, {&h->panels, panels * PANEL * dp / 4}, {&h->step, steps}, {&h->valid_step, steps},
        {&h->cluster, S}, {&h->square, S},
        {&h->shared, M * dp}, {&h->values, M * lv}, {&h->high, M}, {&h->mass, M}, {&h->ysum, K * dp},
        {&h->zsum, K * dp}, {&h->squares, K}, {&h->tau, K}, {&h->heavy, n}, {&h->rows, d * dp}, {&h->shift, dp},
        {&h->centres, K * dp}, {&h->offset, K}};
    return place_pieces(pieces, sizeof pieces / sizeof *pieces, memory);
}

static size_t place_scratch(Past *h, const NearFar *c, float *memory) {
    const size_t d = c->d, dp = up(d), lv = up(c->dv), S = c->kept ? 0 : c->S, K = c->clusters, M = c->heavy + K;
    const size_t number = 2 * DRAWN * K, open = c->open, best = room_for_best(open);
    const size_t ahead = least_of(AHEAD, c->G * c->L) + PAD;
    Work *k = &h->k;
    const Piece pieces[] = {
        {&h->Y, S * dp}, {&h->V, S * lv}, {&h->sample, number * d}, {&h->counts, number}, {&h->X, CHUNK * dp},
        {&h->apart, CHUNK * dp}, {&h->Xt, dp * CHUNK}, {&h->dots, K * CHUNK}, {&h->next, dp}, {&h->nearest, 2 * number},
        {&k->Q, ahead * dp}, {&k->O, ahead * lv}, {&k->top, ahead}, {&k->scale, ahead},
        {&k->integers, ahead * dp / 4}, {&k->bias, ahead}, {&k->scores, AT_ONCE * SCORED},
        {&k->best[0].value, ahead * best}, {&k->best[0].position, ahead * best},
        {&k->retrieved, ahead * (up(open) + PAD)}, {&k->positions, ahead * open},
        {&k->count, ahead}, {&k->from, ahead}, {&k->Qt, d * PIECE}, {&k->A, (2 * c->block + M) * PIECE},
        {&k->number, K * PIECE}, {&k->threshold, PIECE}, {&k->along, PIECE}, {&k->turned, PIECE * dp}};
    const size_t size = place_pieces(pieces, sizeof pieces / sizeof *pieces, memory);
    for (size_t i = 1; i < ahead - PAD && memory; i++) {
        k->best[i].value = k->best[0].value + i * best;
        k->best[i].position = k->best[0].position + i * best;
    }
    return size;
}

int64_t near_far_causal_size(const NearFar *c) { return place_kept(&(Past){0}, c, NULL); }

/* Allocates memory for one head at a time, or returns null. Huge pages, where available, reduce the cost of
   scattered reads and of first use. */
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
    *h = (Past){.c = c, .z = z, .d = c->d, .dp = up(c->d), .dv = c->dv, .lv = up(c->dv), .n = c->heavy,
                .K = c->clusters, .open = c->open, .keep = c->keep ? c->keep + z * c->S : NULL};
    const size_t size = place_kept(h, c, NULL), scratch = place_scratch(h, c, memory);
    place_kept(h, c, c->kept ? c->kept + z * size : memory + scratch);
    if (c->kept) h->Y = of(c->y, z, 0), h->V = of(c->v, z, 0);
    else h->numbers[0] = 0;
    h->t = h->numbers[0];
    if (h->t) h->start = h->numbers[1], h->K = (int)h->numbers[2], h->paneled = h->numbers[3];
}

void close_past(Past *h) {
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
    for (int64_t j = 0; j < c->room; j++) h->cluster[j] = -1;
    memset(h->shift, 0, sizeof(float) * dp);
    memcpy(h->shift, c->shift + h->z * d, sizeof(float) * d);
    memset(h->rows, 0, sizeof(float) * d * dp);
    for (int p = 0; p < d; p++) memcpy(h->rows + p * dp, c->root + (h->z * d + p) * d, sizeof(float) * d);
}

/* ---- Clusters ---- */

/* Adds keys [j, j + m), m <= CHUNK, whose z is in X, to the sums of their nearest centres. X then holds z minus the
   centre, whose squares stay precise for similar keys. */
static void join_clusters(Past *h, int64_t j, int m) {
    const int dp = h->dp, lv = h->lv, n = h->n;
    int32_t nearest[CHUNK];
    transpose(m, h->d, h->X, dp, h->Xt, CHUNK);
    find_nearest(h->K, h->d, h->centres, h->offset, h->Xt, m, h->dots, nearest);
    for (int i = 0; i < m; i++) {
        const int64_t at = j + i;
        if (h->cluster[at] == -2 || !there(h, at)) {                        /* heavy or masked */
            h->cluster[at] = -1;
            h->valid_step[at] = NAN;
            continue;
        }
        const int k = h->cluster[at] = nearest[i];
        h->valid_step[at] = h->step[at];
        add_row(h->ysum + k * dp, 1, key(h, at), dp);
        add_row(h->X + i * dp, -1, h->centres + k * dp, dp);
        add_row(h->zsum + k * dp, 1, h->X + i * dp, dp);
        add_row(h->values + (n + k) * lv, 1, h->V + at * lv, lv);
        h->squares[k] += square_sum(h->X + i * dp, dp);
        h->mass[n + k] += 1;
    }
}

/* Computes z of keys [j, j + m), m <= CHUNK, in X; 0 for masked keys. */
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
    int8_t integers[dp];
    for (int64_t j = h->paneled; j < stop; j++) {
        uint8_t *panel = h->panels + j / PANEL * PANEL * dp + j % PANEL * 4;
        h->step[j] = integers_of(key(h, j), dp, integers);
        h->valid_step[j] = there(h, j) ? h->step[j] : NAN;
        for (int p = 0; p < dp; p++) panel[p / 4 * 4 * PANEL + p % 4] = (uint8_t)(integers[p] ^ 0x80);
    }
    h->paneled = stop > h->paneled ? stop : h->paneled;
}

/* Makes the keys of block t far: computes |z|^2 and, with `joins`, adds them to clusters. */
static void measure_block(Past *h, int64_t t, int joins) {
    for (int64_t j = t * h->c->block, stop = j + h->c->block; j < stop; j += CHUNK) {
        const int m = stop - j < CHUNK ? stop - j : CHUNK;
        measure(h, j, m);
        for (int i = 0; i < m; i++) h->square[j + i] = square_sum(h->X + i * h->dp, h->dp);
        if (joins) join_clusters(h, j, m);
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

/* Chooses the heavy hitters among the keys before the window: those with the largest |z|^2. */
static void find_heavy_before(Past *h, int64_t far) {
    const int n = h->n;
    int32_t *held = h->heavy;
    int count = 0;
    for (int64_t j = 0; j < far && n; j++) {
        if (!there(h, j) || (count == n && !(h->square[j] > h->square[held[n - 1]]))) continue;
        int i = count < n ? count++ : n - 1;
        for (; i > 0 && h->square[held[i - 1]] < h->square[j]; i--) held[i] = held[i - 1];
        held[i] = (int32_t)j;
    }
    for (int64_t j = 0; j < far; j++) h->cluster[j] = -1;
    for (int i = 0; i < count; i++) h->cluster[held[i]] = -2;
    for (int i = count; i < n; i++) held[i] = -1;
    for (int i = 0; i < n; i++) h->high[i] = i < count ? 0 : HIDDEN;
    load_heavy(h, held, h->shared, h->values, h->mass);
}

/* Renewal at block t: chooses heavy hitters and clusters from the keys before its window. Returns 0 if out of
   memory. */
static int renew(Past *h, int64_t t) {
    const NearFar *c = h->c;
    const int64_t far = (t - 1) * c->block, many = DRAWN * c->clusters, step = far > many ? far / many : 1;
    const int64_t number = far / step;
    const int d = h->d, dp = h->dp, n = h->n;
    to_panels(h, far);
    find_heavy_before(h, far);
    for (int64_t i = 0; i < number; i++) {
        const int64_t j = i * step + i * MIXED % step;
        h->counts[i] = h->cluster[j] != -2 && there(h, j);
        put_row(h->sample + i * d, h->counts[i], key(h, j), d);
    }
    const int K = h->K = (int)least_of(c->clusters, number);
    NearFar keys = {.Z = 1, .G = 1, .S = number, .d = d, .dv = d, .block = 1, .clusters = K, .factor = 1,
                     .y = {h->sample, 0, 0, d}, .shift = (float *)c->shift + h->z * d, .tilt = h->next,
                     .root = (float *)c->root + h->z * d * d, .cluster = h->nearest};
    memset(h->next, 0, sizeof(float) * dp);
    if (!centres_of(&keys, h->counts, h->centres)) return 0;
    for (int k = 0; k < K; k++) h->offset[k] = square_sum(h->centres + k * dp, dp);
    memset(h->ysum, 0, sizeof(float) * K * dp);
    memset(h->zsum, 0, sizeof(float) * K * dp);
    memset(h->squares, 0, sizeof(float) * K);
    memset(h->mass + n, 0, sizeof(float) * K);
    memset(h->values + n * h->lv, 0, sizeof(float) * K * h->lv);
    for (int64_t j = 0; j < far; j += CHUNK) {
        const int m = far - j < CHUNK ? far - j : CHUNK;
        measure(h, j, m);
        join_clusters(h, j, m);
    }
    return 1;
}

void summarize_clusters(Past *h) {
    const int dp = h->dp, n = h->n;
    for (int k = 0; k < h->K; k++) {
        const float N = h->mass[n + k], scale = N > 0 ? 1 / N : 0;
        put_row(h->shared + (n + k) * dp, scale, h->ysum + k * dp, dp);
        const float tau = scale * (h->squares[k] - scale * square_sum(h->zsum + k * dp, dp));
        h->tau[k] = tau > 0 ? tau : 0;
        h->high[n + k] = N > 0 ? (float)ilogbf(N) + 1 : HIDDEN;
    }
}

/* ---- From block to block ---- */

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

int each_past_head(const NearFar *c, int (*body)(const NearFar *c, int64_t z, float *memory)) {
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
