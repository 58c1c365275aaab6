/* Clusters and heavy hitters of the past of a head, block by block: C version of Epoch of nearfar/causal.py.

   Decoding stores this state between calls. Heavy hitters, masked keys and near keys have cluster -1. */

#include "near_far.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

/* ---- Memory ---- */

size_t assign_buffers(const Buffer *buffers, size_t number, float *at) {
    size_t count = 0;
    for (size_t i = 0; i < number; i++) {
        float *here = at + count;
        if (at) memcpy(buffers[i].pointer, &here, sizeof here);
        count += round_up(buffers[i].count) + PAD;
    }
    return count;
}

/* Assigns `memory`, unless null, to the decoding state. Returns the number of floats. */
static size_t assign_state(Past *h, const NearFar *c, float *memory) {
    const size_t d = c->d, dp = round_up(d), lv = round_up(c->dv), S = c->capacity;
    const size_t n = c->heavy, K = c->clusters, M = n + K;
    const size_t panels = (S + c->block) / PANEL + PANEL_GROUP / PANEL, steps = panels * PANEL;
    const Buffer buffers[] = {
        {&h->counters, PAD}, {&h->panels, panels * PANEL * dp / 4}, {&h->step, steps}, {&h->valid_step, steps},
        {&h->cluster, S}, {&h->square, S},
        {&h->shared, M * dp}, {&h->values, M * lv}, {&h->mass_exponent, M}, {&h->mass, M}, {&h->ysum, K * dp},
        {&h->zsum, K * dp}, {&h->squares, K}, {&h->tau, K}, {&h->heavy, n}, {&h->root, d * dp}, {&h->shift, dp},
        {&h->centres, K * dp}, {&h->centre_square, K}};
    return assign_buffers(buffers, sizeof buffers / sizeof *buffers, memory);
}

static size_t assign_scratch(Past *h, const NearFar *c, float *memory) {
    const size_t d = c->d, dp = round_up(d), lv = round_up(c->dv), S = c->decoding_state ? 0 : c->S;
    const size_t K = c->clusters, M = c->heavy + K;
    const size_t number = 2 * CENTRE_SAMPLES * K, open = c->open, scores_size = top_scores_size(open);
    const size_t ahead = min64(PREFETCH, c->G * c->L) + PAD;
    Work *w = &h->work;
    const Buffer buffers[] = {
        {&h->Y, S * dp}, {&h->V, S * lv}, {&h->sample, number * d}, {&h->sample_weight, number}, {&h->X, CHUNK * dp},
        {&h->centred, CHUNK * dp}, {&h->Xt, dp * CHUNK}, {&h->dots, K * CHUNK}, {&h->zero_tilt, dp},
        {&h->sample_cluster, 2 * number},
        {&w->Q, ahead * dp}, {&w->O, ahead * lv}, {&w->top, ahead}, {&w->scale, ahead},
        {&w->packed, ahead * packed_query_size(dp)}, {&w->bias, ahead}, {&w->scores, SCORE_QUERIES * SCORE_KEYS},
        {&w->top_scores[0].value, ahead * scores_size}, {&w->top_scores[0].position, ahead * scores_size},
        {&w->retrieved, ahead * (round_up(open) + PAD)}, {&w->positions, ahead * open},
        {&w->count, ahead}, {&w->cursor, ahead}, {&w->Qt, d * PIECE}, {&w->A, (2 * c->block + M) * PIECE},
        {&w->remaining, K * PIECE}, {&w->threshold, PIECE}, {&w->query_norm, PIECE}, {&w->z_query, PIECE * dp}};
    const size_t size = assign_buffers(buffers, sizeof buffers / sizeof *buffers, memory);
    for (size_t i = 1; i < ahead - PAD && memory; i++) {
        w->top_scores[i].value = w->top_scores[0].value + i * scores_size;
        w->top_scores[i].position = w->top_scores[0].position + i * scores_size;
    }
    return size;
}

int64_t near_far_causal_size(const NearFar *c) { return assign_state(&(Past){0}, c, NULL); }

/* Allocates memory for one head at a time, or returns null. Huge pages make scattered reads and first use faster. */
static float *allocate_past(const NearFar *c) {
    Past h = {0};
    const size_t size = c->decoding_state ? 0 : assign_state(&h, c, NULL), page = 1 << 21;
    const size_t bytes = sizeof(float) * (assign_scratch(&h, c, NULL) + size), align = bytes > page ? page : 64;
    float *memory = aligned_alloc(align, (bytes + align - 1) / align * align);
#if defined(MADV_HUGEPAGE)
    if (memory && align == page) madvise(memory, bytes, MADV_HUGEPAGE);
#endif
    return memory;
}

void init_past(Past *h, const NearFar *c, int64_t z, float *memory) {
    *h = (Past){.c = c, .z = z, .d = c->d, .dp = round_up(c->d), .dv = c->dv, .lv = round_up(c->dv), .n = c->heavy,
                .K = c->clusters, .open = c->open, .keep = c->keep ? c->keep + z * c->S : NULL};
    const size_t size = assign_state(h, c, NULL), scratch = assign_scratch(h, c, memory);
    assign_state(h, c, c->decoding_state ? c->decoding_state + z * size : memory + scratch);
    if (c->decoding_state) h->Y = head_ptr(c->y, z, 0), h->V = head_ptr(c->v, z, 0);
    else h->counters[0] = 0;
    h->t = h->counters[0];
    if (h->t) h->renewal = h->counters[1], h->K = (int)h->counters[2], h->packed = h->counters[3];
}

void save_past(Past *h) {
    const int64_t counters[] = {h->t, h->renewal, h->K, h->packed};
    memcpy(h->counters, counters, sizeof counters);
}

static void load_past(Past *h) {
    const NearFar *c = h->c;
    const int d = h->d, dp = h->dp;
    if (!c->decoding_state) {
        load_rows(c->y, h->z, 0, 0, c->S, d, c->factor, NULL, h->keep, h->Y, dp);
        load_rows(c->v, h->z, 0, 0, c->S, c->dv, 1, NULL, h->keep, h->V, h->lv);
    }
    for (int64_t j = 0; j < c->capacity; j++) h->cluster[j] = -1;
    memset(h->shift, 0, sizeof(float) * dp);
    memcpy(h->shift, c->shift + h->z * d, sizeof(float) * d);
    memset(h->root, 0, sizeof(float) * d * dp);
    for (int p = 0; p < d; p++) memcpy(h->root + p * dp, c->root + (h->z * d + p) * d, sizeof(float) * d);
}

/* ---- Clusters ---- */

/* Adds keys [j, j + m), m <= CHUNK, with z in X, to the sums of their nearest centres. Replaces X by z - centre, whose
   squares are precise even if all keys are similar. */
static void add_to_clusters(Past *h, int64_t j, int m) {
    const int dp = h->dp, lv = h->lv, n = h->n;
    int32_t nearest[CHUNK];
    transpose(m, h->d, h->X, dp, h->Xt, CHUNK);
    nearest_centres(h->K, h->d, h->centres, h->centre_square, h->Xt, m, h->dots, nearest);
    for (int i = 0; i < m; i++) {
        const int64_t at = j + i;
        if (h->cluster[at] == -2 || !unmasked(h, at)) {                        /* heavy or masked */
            h->cluster[at] = -1;
            h->valid_step[at] = NAN;
            continue;
        }
        const int k = h->cluster[at] = nearest[i];
        h->valid_step[at] = h->step[at];
        add_scaled(h->ysum + k * dp, 1, key_row(h, at), dp);
        add_scaled(h->X + i * dp, -1, h->centres + k * dp, dp);
        add_scaled(h->zsum + k * dp, 1, h->X + i * dp, dp);
        add_scaled(h->values + (n + k) * lv, 1, h->V + at * lv, lv);
        h->squares[k] += squared_norm(h->X + i * dp, dp);
        h->mass[n + k] += 1;
    }
}

/* Computes z of keys [j, j + m), m <= CHUNK, in X. Rows of masked keys are 0. */
static void transform_keys(Past *h, int64_t j, int m) {
    const int d = h->d, dp = h->dp;
    for (int i = 0; i < m; i++)
        for (int p = 0; p < dp; p += LANES)
            AT(h->centred + i * dp + p) =
                unmasked(h, j + i) ? (vec)(AT(key_row(h, j + i) + p) - AT(h->shift + p)) : (vec){0};
    matmul(FULL, m, d, d, h->centred, dp, 1, h->root, dp, h->X, dp, 0);
    for (int i = 0; i < m; i++)
        for (int p = d; p < dp; p++) h->X[i * dp + p] = 0;
}

/* Computes |z|^2 of the keys of block t. With `add`, adds the keys to clusters. */
static void transform_block(Past *h, int64_t t, int add) {
    for (int64_t j = t * h->c->block, stop = j + h->c->block; j < stop; j += CHUNK) {
        const int m = stop - j < CHUNK ? stop - j : CHUNK;
        transform_keys(h, j, m);
        for (int i = 0; i < m; i++) h->square[j + i] = squared_norm(h->X + i * h->dp, h->dp);
        if (add) add_to_clusters(h, j, m);
    }
}

void load_heavy(const Past *h, const int32_t *heavy, float *keys, float *values, float *mass) {
    const int dp = h->dp, lv = h->lv;
    for (int i = 0; i < h->n; i++) {
        mass[i] = heavy[i] >= 0;
        memset(keys + i * dp, 0, sizeof(float) * dp);
        memset(values + i * lv, 0, sizeof(float) * lv);
        if (heavy[i] < 0) continue;
        memcpy(keys + i * dp, key_row(h, heavy[i]), sizeof(float) * dp);
        memcpy(values + i * lv, h->V + heavy[i] * lv, sizeof(float) * lv);
    }
}

/* Selects the keys before the window with the largest |z|^2 as heavy hitters. */
static void select_past_heavy_hitters(Past *h, int64_t far) {
    const int n = h->n;
    int32_t *heavy = h->heavy;
    int count = 0;
    for (int64_t j = 0; j < far && n; j++) {
        if (!unmasked(h, j) || (count == n && !(h->square[j] > h->square[heavy[n - 1]]))) continue;
        int i = count < n ? count++ : n - 1;
        for (; i > 0 && h->square[heavy[i - 1]] < h->square[j]; i--) heavy[i] = heavy[i - 1];
        heavy[i] = (int32_t)j;
    }
    for (int64_t j = 0; j < far; j++) h->cluster[j] = -1;
    for (int i = 0; i < count; i++) h->cluster[heavy[i]] = -2;
    for (int i = count; i < n; i++) heavy[i] = -1;
    for (int i = 0; i < n; i++) h->mass_exponent[i] = i < count ? 0 : MASKED;
    load_heavy(h, heavy, h->shared, h->values, h->mass);
}

/* Selects heavy hitters and clusters from the keys before the window of block t. Returns 0 if out of memory. */
static int renew_clusters(Past *h, int64_t t) {
    const NearFar *c = h->c;
    const int64_t far = (t - 1) * c->block, many = CENTRE_SAMPLES * c->clusters, step = far > many ? far / many : 1;
    const int64_t number = far / step;
    const int d = h->d, dp = h->dp, n = h->n;
    pack_keys(h, far);
    select_past_heavy_hitters(h, far);
    for (int64_t i = 0; i < number; i++) {
        const int64_t j = i * step + i * SAMPLE_FACTOR % step;
        h->sample_weight[i] = h->cluster[j] != -2 && unmasked(h, j);
        set_scaled(h->sample + i * d, h->sample_weight[i], key_row(h, j), d);
    }
    const int K = h->K = (int)min64(c->clusters, number);
    NearFar keys = {.Z = 1, .G = 1, .S = number, .d = d, .dv = d, .block = 1, .clusters = K, .factor = 1,
                     .y = {h->sample, 0, 0, d}, .shift = (float *)c->shift + h->z * d, .tilt = h->zero_tilt,
                     .root = (float *)c->root + h->z * d * d, .cluster = h->sample_cluster};
    memset(h->zero_tilt, 0, sizeof(float) * dp);
    if (!compute_centres(&keys, h->sample_weight, h->centres)) return 0;
    for (int k = 0; k < K; k++) h->centre_square[k] = squared_norm(h->centres + k * dp, dp);
    memset(h->ysum, 0, sizeof(float) * K * dp);
    memset(h->zsum, 0, sizeof(float) * K * dp);
    memset(h->squares, 0, sizeof(float) * K);
    memset(h->mass + n, 0, sizeof(float) * K);
    memset(h->values + n * h->lv, 0, sizeof(float) * K * h->lv);
    for (int64_t j = 0; j < far; j += CHUNK) {
        const int m = far - j < CHUNK ? far - j : CHUNK;
        transform_keys(h, j, m);
        add_to_clusters(h, j, m);
    }
    return 1;
}

void summarize_clusters(Past *h) {
    const int dp = h->dp, n = h->n;
    for (int k = 0; k < h->K; k++) {
        const float N = h->mass[n + k], scale = N > 0 ? 1 / N : 0;
        set_scaled(h->shared + (n + k) * dp, scale, h->ysum + k * dp, dp);
        const float tau = scale * (h->squares[k] - scale * squared_norm(h->zsum + k * dp, dp));
        h->tau[k] = tau > 0 ? tau : 0;
        h->mass_exponent[n + k] = N > 0 ? (float)ilogbf(N) + 1 : MASKED;
    }
}

/* ---- From block to block ---- */

int advance(Past *h, int64_t t) {
    const NearFar *c = h->c;
    const int64_t b = c->block;
    if (!h->t) {
        load_past(h);
        for (h->renewal = c->first_renewal; next_renewal(h->renewal, b) <= t * b;)
            h->renewal = next_renewal(h->renewal, b);
        h->t = h->renewal / b;
        for (int64_t s = 0; s < h->t - 1; s++) transform_block(h, s, 0);
        if (!renew_clusters(h, h->t)) return 0;
    }
    while (h->t < t) {
        h->t++;
        const int renews = h->t * b == next_renewal(h->renewal, b);
        transform_block(h, h->t - 2, !renews);
        if (!renews) continue;
        h->renewal = h->t * b;
        if (!renew_clusters(h, h->t)) return 0;
    }
    return 1;
}

int for_each_past(const NearFar *c, int (*body)(const NearFar *c, int64_t z, float *memory)) {
    int bad = OK;
#pragma omp parallel num_threads((int)min64(c->threads, c->Z)) reduction(max : bad)
    {
        const unsigned mode = flush_denormals();
        float *memory = allocate_past(c);
#pragma omp for schedule(dynamic)
        for (int64_t z = 0; z < c->Z; z++)
            if (!memory || !body(c, z, memory)) bad = NO_MEMORY;
        if (!memory) bad = NO_MEMORY;
        free(memory);
        restore_float_mode(mode);
        trim_scratch();
    }
    return bad;
}
