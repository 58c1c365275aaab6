/* Metric of keys, heavy hitters and clusters: C version of KeyMetric.fit and choose_sets of nearfar/choice.py.

   Transposed chunks of 64 tokens store the keys in z: distances to centres are then matrix products with few rows. */

#include "near_far.h"

typedef struct {
    const NearFar *c;
    int64_t z, chunks;
    int d, dp, K, n;
    const uint8_t *keep;              /* (S), or null */
    float *X, *Xt, *root;             /* (CHUNK, dp), (dp, CHUNK): vectors of a chunk; (d, dp) */
    float *Z, *dots;                  /* (chunks, dp, CHUNK), (K or CENTRE_BATCH, CHUNK) */
    float *moments, *sums, *centres;  /* (d, dp), (K, dp), (K, dp) */
    float *root_double;               /* (d, d), of doubles */
    float *centre_square, *mass;      /* (K) */
    float *w, *square, *log_u, *u;    /* (chunks CHUNK): 0, or -inf for log_u, beyond the last key */
    float *D, *score;                 /* (chunks CHUNK): squared distance to the nearest centre; |z|^2 / 2 + w */
    int error;
} Selection;

static int init_selection(Selection *e, const NearFar *c, int64_t z) {
    const size_t d = c->d, dp = round_up(c->d), K = c->clusters, rows = K > CENTRE_BATCH ? K : CENTRE_BATCH;
    *e = (Selection){.c = c, .z = z, .chunks = (c->S + CHUNK - 1) / CHUNK, .d = d, .dp = dp, .K = K, .n = c->heavy};
    e->keep = c->keep ? c->keep + z * c->S : NULL;
    const size_t tokens = e->chunks * CHUNK;
    const Scratch buffers[] = {
        {&e->X, CHUNK * dp}, {&e->Xt, CHUNK * dp}, {&e->root, d * dp}, {&e->Z, dp * tokens}, {&e->dots, rows * CHUNK},
        {&e->moments, d * dp}, {&e->root_double, 2 * d * d}, {&e->sums, K * dp}, {&e->centres, rows * dp},
        {&e->centre_square, rows}, {&e->mass, K}, {&e->w, tokens}, {&e->square, tokens}, {&e->log_u, tokens},
        {&e->u, tokens}, {&e->D, tokens}, {&e->score, tokens}};
    return allocate_scratch(buffers, sizeof buffers / sizeof *buffers);
}

INLINE int chunk_tokens(const Selection *e, int64_t t) { return e->c->S - t < CHUNK ? e->c->S - t : CHUNK; }

/* ---- Metric of keys ---- */

/* Computes the mean of a tensor over tokens and heads, in `to` (d). */
static void compute_mean(Selection *e, View t, int64_t heads, float *to) {
    double total[e->dp];
    int64_t count = 0;
    for (int p = 0; p < e->d; p++) total[p] = 0;
    for (int64_t g = 0; g < heads; g++)
        for (int64_t j = 0; j < e->c->S; j += CHUNK) {
            float sums[e->dp];
            const int n = chunk_tokens(e, j);
            for (int p = 0; p < e->d; p++) sums[p] = 0;
            for (int i = 0; i < n; i++)
                if (!e->keep || e->keep[j + i]) {
                    add_scaled(sums, 1, head_ptr(t, e->z, g) + (j + i) * t.token, e->d);
                    count++;
                }
            for (int p = 0; p < e->d; p++) total[p] += sums[p];
        }
    for (int p = 0; p < e->d; p++) to[p] = (float)(e->c->factor * total[p] / (count ? count : 1));
}

/* Computes the Cholesky factor of a matrix (d, dp) from its lower triangle. L (d, d) is scratch. A pivot below half of
   the ridge, and its column, consist of rounding error: the pivot becomes the ridge, and the column 0. */
static void cholesky(int d, int dp, const float *from, double ridge, double *L, float *to) {
    for (int j = 0; j < d; j++) {
        double pivot = from[j * dp + j] + ridge;
        for (int p = 0; p < j; p++) pivot -= L[j * d + p] * L[j * d + p];
        const int degenerate = !(pivot > ridge / 2);
        L[j * d + j] = sqrt(degenerate ? ridge : pivot);
        for (int i = j + 1; i < d; i++) {
            double rest = from[i * dp + j];
            for (int p = 0; p < j; p++) rest -= L[i * d + p] * L[j * d + p];
            L[i * d + j] = degenerate ? 0 : rest / L[j * d + j];
        }
    }
    for (int i = 0; i < d; i++)
        for (int j = 0; j < d; j++) to[i * d + j] = j <= i ? (float)L[i * d + j] : 0;
}

static void load_root(Selection *e) {
    const int d = e->d, dp = e->dp;
    for (int p = 0; p < d; p++) {
        memcpy(e->root + p * dp, e->c->root + (e->z * d + p) * d, sizeof(float) * d);
        for (int q = d; q < dp; q++) e->root[p * dp + q] = 0;
    }
}

static void fit_metric(Selection *e) {
    const NearFar *c = e->c;
    const int d = e->d, dp = e->dp;
    float *shift = c->shift + e->z * d, *tilt = c->tilt + e->z * d, *root = c->root + e->z * d * d;
    compute_mean(e, c->y, 1, shift);
    compute_mean(e, c->x, c->G, tilt);
    memset(e->moments, 0, sizeof(float) * d * dp);
    int64_t count = 0;
    for (int64_t j = 0; j < c->S; j++) count += !e->keep || e->keep[j];
    for (int64_t g = 0; g < c->G; g++)
        for (int64_t t = 0; t < c->S; t += CHUNK) {
            const int n = chunk_tokens(e, t);
            load_rows(c->x, e->z, g, t, n, d, c->factor, tilt, e->keep, e->X, dp);
            matmul(LOWER_C, d, d, n, e->X, 1, dp, e->X, dp, e->moments, dp, 1);
        }
    double trace = 0, length = 0;
    const float scale = 1.0f / (count ? count * c->G : 1);
    for (int i = 0; i < d * dp; i++) e->moments[i] *= scale;
    for (int p = 0; p < d; p++) trace += e->moments[p * dp + p], length += shift[p] * (double)shift[p];
    if (!(trace + length < 3e38)) {
        e->error = NOT_FINITE;
        return;
    }
    cholesky(d, dp, e->moments, RIDGE * trace / d + sqrt(1.17549435e-38), (double *)e->root_double, root);
    load_root(e);
}

/* Computes z of all keys, |z|^2, w and the scores |z|^2 / 2 + w. */
static void transform_keys(Selection *e) {
    const NearFar *c = e->c;
    const float *shift = c->shift + e->z * e->d, *tilt = c->tilt + e->z * e->d;
    for (int64_t t = 0; t < c->S; t += CHUNK) {
        const int n = chunk_tokens(e, t);
        float *Z = e->Z + t * e->dp;
        load_rows(c->y, e->z, 0, t, n, e->d, c->factor, shift, e->keep, e->X, e->dp);
        memset(e->X + n * e->dp, 0, sizeof(float) * (CHUNK - n) * e->dp);
        transpose(CHUNK, e->d, e->X, e->dp, e->Xt, CHUNK);
        matmul(e->d <= 96 ? UPPER_A : FULL, e->d, CHUNK, e->d, e->root, 1, e->dp, e->Xt, CHUNK, Z, CHUNK, 0);
        for (int j = 0; j < CHUNK; j += LANES) {
            vec square = {0}, w = {0};
            for (int p = 0; p < e->d; p++) {
                square += AT(Z + p * CHUNK + j) * AT(Z + p * CHUNK + j);
                w += tilt[p] * AT(e->Xt + p * CHUNK + j);
            }
            AT(e->square + t + j) = square;
            AT(e->w + t + j) = w;
            AT(e->score + t + j) = square * 0.5f + w;
        }
        for (int j = 0; j < CHUNK; j++)
            if (j >= n || (e->keep && !e->keep[t + j])) e->score[t + j] = -INFINITY;
    }
}

/* ---- Heavy hitters ---- */

INLINE int ranks_below(const float *score, int64_t a, int64_t b) {
    return score[a] < score[b] || (score[a] == score[b] && a > b);
}

/* Restores the heap property at position i. The root has the lowest score; of equal scores, the last position. */
static void sift_down(const float *score, int64_t *heap, int n, int i) {
    for (int child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && ranks_below(score, heap[child + 1], heap[child])) child++;
        if (!ranks_below(score, heap[child], heap[i])) return;
        int64_t moved = heap[i];
        heap[i] = heap[child];
        heap[child] = moved;
    }
}

/* Selects the keys of head z with the largest scores (S). Writes `positions`, `there` and `pool`. */
static void select_heavy_hitters(const NearFar *c, int64_t z, const float *score) {
    const int n = (int)c->heavy;
    int64_t *heap = c->positions + z * n;
    uint8_t *valid = c->there + z * n, *pool = c->pool + z * c->S;
    for (int i = 0; i < n; i++) heap[i] = i;
    for (int i = n / 2 - 1; i >= 0; i--) sift_down(score, heap, n, i);
    for (int64_t j = n; j < c->S && n; j++)
        if (score[j] > score[heap[0]]) {
            heap[0] = j;
            sift_down(score, heap, n, 0);
        }
    for (int64_t j = 0; j < c->S; j++) pool[j] = !c->keep || c->keep[z * c->S + j];
    for (int i = 0; i < n; i++) {
        valid[i] = score[heap[i]] > -INFINITY;
        pool[heap[i]] = 0;
    }
}

/* ---- Clusters ---- */

/* Computes the weights u of the clustered keys, relative to the largest weight, and log u. */
static void compute_weights(Selection *e) {
    const uint8_t *pool = e->c->pool + e->z * e->c->S;
    const int64_t tokens = e->chunks * CHUNK;
    float top = -INFINITY;
    for (int64_t j = 0; j < tokens; j++) {
        e->log_u[j] = j < e->c->S && pool[j] ? e->w[j] * LOG2E : -INFINITY;
        top = e->log_u[j] > top ? e->log_u[j] : top;
    }
    if (top == -INFINITY) top = 0;
    for (int64_t j = 0; j < tokens; j += LANES) AT(e->u + j) = exp2_vec(AT(e->log_u + j) - top);
}

/* Sets the first centre to the weighted mean of z. */
static void set_first_centre(Selection *e) {
    vec sums[e->d], all = {0};
    memset(sums, 0, sizeof sums);
    for (int64_t j = 0; j < e->chunks * CHUNK; j += LANES) {
        const float *Z = e->Z + j / CHUNK * CHUNK * e->dp + j % CHUNK;
        vec u = AT(e->u + j);
        all += u;
        for (int p = 0; p < e->d; p++) sums[p] += u * AT(Z + p * CHUNK);
    }
    const float mass = reduce_sum(all);
    for (int p = 0; p < e->d; p++) e->centres[p] = reduce_sum(sums[p]) / (mass > MIN_WEIGHT ? mass : MIN_WEIGHT);
}

/* Computes |c|^2 of centres [first, first + m). */
static void compute_centre_squares(Selection *e, int first, int m) {
    for (int k = first; k < first + m; k++) {
        float square = 0;
        for (int p = 0; p < e->d; p++) square += e->centres[k * e->dp + p] * e->centres[k * e->dp + p];
        e->centre_square[k] = square;
    }
}

typedef struct {
    int count;
    float value[CENTRE_BATCH];
    int64_t key[CENTRE_BATCH];
} Farthest;

/* Returns whether two keys are equal. */
static int same_key(const Selection *e, int64_t i, int64_t j) {
    const float *a = e->Z + i / CHUNK * CHUNK * e->dp + i % CHUNK, *b = e->Z + j / CHUNK * CHUNK * e->dp + j % CHUNK;
    float distance = 0;
    for (int p = 0; p < e->d; p++) distance += (a[p * CHUNK] - b[p * CHUNK]) * (a[p * CHUNK] - b[p * CHUNK]);
    return distance <= EQUAL_TOLERANCE * e->square[j];
}

/* Inserts a key into the list `best`, unless the list contains an equal key. */
static void insert_farthest(const Selection *e, Farthest *best, int limit, float value, int64_t key) {
    if (!(value > -INFINITY) || (best->count == limit && !(value > best->value[limit - 1]))) return;
    for (int i = 0; i < best->count; i++)
        if (same_key(e, best->key[i], key)) return;
    int i = best->count < limit ? best->count++ : limit - 1;
    for (; i > 0 && best->value[i - 1] < value; i--) {
        best->value[i] = best->value[i - 1];
        best->key[i] = best->key[i - 1];
    }
    best->value[i] = value;
    best->key[i] = key;
}

/* Updates the squared distances D of keys to the nearest centre with centres [first, first + m). `begin` initializes
   D. Returns the keys with the largest u D; of equal keys, the first. */
static Farthest farthest_keys(Selection *e, int first, int m, int begin, int limit) {
    Farthest best = {0};
    compute_centre_squares(e, first, m);
    for (int64_t t = 0; t < e->chunks * CHUNK; t += CHUNK) {
        matmul(FULL, m, CHUNK, e->d, e->centres + first * e->dp, e->dp, 1, e->Z + t * e->dp, CHUNK, e->dots, CHUNK, 0);
        for (int j = 0; j < CHUNK; j += LANES) {
            vec near = e->centre_square[first] - 2.0f * AT(e->dots + j), zero = {0};
            for (int k = 1; k < m; k++)
                near = minimum(near, e->centre_square[first + k] - 2.0f * AT(e->dots + k * CHUNK + j));
            /* a key equal to the mean ranks last */
            const vec square = AT(e->square + t + j), none = zero + (begin ? MIN_WEIGHT : 0);
            near = blend(near + square > EQUAL_TOLERANCE * square, near + square, none);
            vec D = AT(e->D + t + j) = begin ? near : minimum(near, AT(e->D + t + j));
            vec value = AT(e->log_u + t + j) + log2_vec(D);
            if (best.count == limit && !(reduce_max(value) > best.value[limit - 1])) continue;
            for (int i = 0; i < LANES; i++) insert_farthest(e, &best, limit, value[i], t + j + i);
        }
    }
    return best;
}

static void select_centres(Selection *e) {
    set_first_centre(e);
    for (int count = 0, first = 0, m = 1; count < e->K;) {
        const int limit = e->K - count < CENTRE_BATCH ? e->K - count : CENTRE_BATCH;
        Farthest best = farthest_keys(e, first, m, count == 0, limit);
        for (int i = 0; i < limit; i++) {  /* fewer different keys than clusters: no key */
            float *centre = e->centres + (count + i) * e->dp;
            if (i >= best.count) {
                for (int p = 0; p < e->d && count + i > 0; p++) centre[p] = EMPTY_CENTRE;  /* centre 0 is the mean */
                continue;
            }
            const int64_t j = best.key[i];
            const float *Z = e->Z + j / CHUNK * CHUNK * e->dp + j % CHUNK;
            for (int p = 0; p < e->d; p++) centre[p] = Z[p * CHUNK];
            e->D[j] = 0;
        }
        first = count, m = limit, count += limit;
    }
}

void nearest_centres(int K, int d, const float *centres, const float *squares, const float *Zt, int n, float *dots,
                     int32_t *nearest) {
    matmul(FULL, K, CHUNK, d, centres, round_up(d), 1, Zt, CHUNK, dots, CHUNK, 0);
    for (int i = 0; i < n; i += LANES) {
        vec best = AT(dots + i) - 0.5f * squares[0];
        ivec which = {0};
        for (int k = 1; k < K; k++) {
            vec here = AT(dots + k * CHUNK + i) - 0.5f * squares[k];
            ivec better = here > best;
            best = blend(better, here, best);
            which = (better & k) | (~better & which);
        }
        memcpy(nearest + i, &which, sizeof which);
    }
}

/* Finds the nearest centre of each key. */
static void assign_clusters(Selection *e) {
    int64_t *cluster = e->c->cluster + e->z * e->c->S;
    compute_centre_squares(e, 0, e->K);
    for (int64_t t = 0; t < e->c->S; t += CHUNK) {
        int32_t nearest[CHUNK];
        nearest_centres(e->K, e->d, e->centres, e->centre_square, e->Z + t * e->dp, CHUNK, e->dots, nearest);
        for (int i = 0, n = chunk_tokens(e, t); i < n; i++) cluster[t + i] = nearest[i];
    }
}

/* One step of Lloyd's algorithm: sets each centre to the weighted mean of its keys. */
static void lloyd_step(Selection *e) {
    const NearFar *c = e->c;
    const int64_t *cluster = c->cluster + e->z * c->S;
    const float *shift = c->shift + e->z * e->d;
    memset(e->sums, 0, sizeof(float) * e->K * e->dp);
    memset(e->mass, 0, sizeof(float) * e->K);
    for (int64_t j = 0; j < c->S; j++) {
        if (!(e->u[j] > 0)) continue;
        const float *y = head_ptr(c->y, e->z, 0) + j * c->y.token;
        const float u = e->u[j], factor = c->factor;
        float *to = e->sums + cluster[j] * e->dp;
        for (int p = 0; p < e->d; p++) to[p] += u * (factor * y[p] - shift[p]);
        e->mass[cluster[j]] += u;
    }
    for (int k = 0; k < e->K; k++) {
        if (!(e->mass[k] > MIN_WEIGHT)) continue;
        for (int p = 0; p < e->d; p++) e->sums[k * e->dp + p] /= e->mass[k];
        matmul(FULL, 1, e->d, e->d, e->sums + k * e->dp, e->dp, 1, e->root, e->dp, e->centres + k * e->dp, e->dp, 0);
    }
}

static void cluster_head(Selection *e) {
    const NearFar *c = e->c;
    if (c->cross) load_root(e);          /* the caller sets the metric */
    else fit_metric(e);
    if (e->error) return;
    transform_keys(e);
    select_heavy_hitters(c, e->z, e->score);
    compute_weights(e);
    select_centres(e);
    assign_clusters(e);
    lloyd_step(e);
    assign_clusters(e);
    for (int k = 0; k < e->K; k++)
        memcpy(c->centres + (e->z * e->K + k) * e->d, e->centres + k * e->dp, sizeof(float) * e->d);
}

int compute_centres(const NearFar *c, const float *weight, float *centres) {
    Selection e;
    if (!init_selection(&e, c, 0)) return 0;
    load_root(&e);
    transform_keys(&e);
    for (int64_t j = 0; j < e.chunks * CHUNK; j++) e.u[j] = j < c->S ? weight[j] : 0;
    for (int64_t j = 0; j < e.chunks * CHUNK; j += LANES) AT(e.log_u + j) = log2_vec(AT(e.u + j));
    select_centres(&e);
    assign_clusters(&e);
    lloyd_step(&e);
    for (int k = 0; k < e.K; k++) {
        memcpy(centres + k * e.dp, e.centres + k * e.dp, sizeof(float) * e.d);
        for (int p = e.d; p < e.dp; p++) centres[k * e.dp + p] = 0;
    }
    return 1;
}

int near_far_choose(const NearFar *c) {
    int bad = OK;
#pragma omp parallel for schedule(dynamic) num_threads((int)c->threads) reduction(max : bad)
    for (int64_t z = 0; z < c->Z; z++) {
        const unsigned mode = flush_denormals();
        Selection e;
        if (init_selection(&e, c, z)) cluster_head(&e);
        else e.error = NO_MEMORY;
        if (e.error > bad) bad = e.error;
        restore_float_mode(mode);
        trim_scratch();
    }
    return bad;
}
