/* Metric of keys, heavy hitters and clusters: KeyMetric.of and Choice.of of nearfar/choice.py in C.

   Keys in z are stored in transposed chunks of 64 tokens, so that distances to centres are products with few rows. */

#include "near_far.h"

typedef struct {
    const NearFar *c;
    int64_t z, chunks;
    int d, dp, K, n;
    const uint8_t *keep;              /* (S), or null */
    float *X, *Xt, *rows;             /* (CHUNK, dp), (dp, CHUNK): vectors of a chunk; root (d, dp) */
    float *Z, *dots;                  /* (chunks, dp, CHUNK), (K or PICKS, CHUNK) */
    float *moments, *sums, *centres;  /* (d, dp), (K, dp), (K, dp) */
    float *root;                      /* (d, d), of doubles */
    float *offset, *mass;             /* (K) */
    float *w, *square, *log_u, *u, *D, *score;  /* (chunks CHUNK): 0 or -inf beyond the last key */
    int bad;
} Pick;

static int open_pick(Pick *e, const NearFar *c, int64_t z) {
    const size_t d = c->d, dp = up(c->d), K = c->clusters, most = K > PICKS ? K : PICKS;
    *e = (Pick){.c = c, .z = z, .chunks = (c->S + CHUNK - 1) / CHUNK, .d = d, .dp = dp, .K = K, .n = c->heavy};
    e->keep = c->keep ? c->keep + z * c->S : NULL;
    const size_t tokens = e->chunks * CHUNK;
    const Scratch pieces[] = {
        {&e->X, CHUNK * dp}, {&e->Xt, CHUNK * dp}, {&e->rows, d * dp}, {&e->Z, dp * tokens}, {&e->dots, most * CHUNK},
        {&e->moments, d * dp}, {&e->root, 2 * d * d}, {&e->sums, K * dp}, {&e->centres, most * dp},
        {&e->offset, most}, {&e->mass, K}, {&e->w, tokens}, {&e->square, tokens}, {&e->log_u, tokens},
        {&e->u, tokens}, {&e->D, tokens}, {&e->score, tokens}};
    return take_scratch(pieces, sizeof pieces / sizeof *pieces);
}

INLINE int in_chunk(const Pick *e, int64_t t) { return e->c->S - t < CHUNK ? e->c->S - t : CHUNK; }

/* ---- Metric of keys ---- */

/* Computes the mean over the heads g of a tensor, in `to` (d). */
static void mean_of(Pick *e, View t, int64_t heads, float *to) {
    double total_of[e->dp];
    int64_t count = 0;
    for (int p = 0; p < e->d; p++) total_of[p] = 0;
    for (int64_t g = 0; g < heads; g++)
        for (int64_t j = 0; j < e->c->S; j += CHUNK) {
            float sums[e->dp];
            const int n = in_chunk(e, j);
            for (int p = 0; p < e->d; p++) sums[p] = 0;
            for (int i = 0; i < n; i++)
                if (!e->keep || e->keep[j + i]) {
                    add_row(sums, 1, of(t, e->z, g) + (j + i) * t.token, e->d);
                    count++;
                }
            for (int p = 0; p < e->d; p++) total_of[p] += sums[p];
        }
    for (int p = 0; p < e->d; p++) to[p] = (float)(e->c->factor * total_of[p] / (count ? count : 1));
}

/* Cholesky factor of a matrix (d, dp) whose lower part is given; L (d, d) is scratch. A pivot below half of the
   ridge is only rounding error, and so is its column. The pivot then becomes the ridge, and the rest of the column
   0. */
static void cholesky(int d, int dp, const float *from, double ridge, double *L, float *to) {
    for (int j = 0; j < d; j++) {
        double pivot = from[j * dp + j] + ridge;
        for (int p = 0; p < j; p++) pivot -= L[j * d + p] * L[j * d + p];
        const int alone = !(pivot > ridge / 2);
        L[j * d + j] = sqrt(alone ? ridge : pivot);
        for (int i = j + 1; i < d; i++) {
            double left = from[i * dp + j];
            for (int p = 0; p < j; p++) left -= L[i * d + p] * L[j * d + p];
            L[i * d + j] = alone ? 0 : left / L[j * d + j];
        }
    }
    for (int i = 0; i < d; i++)
        for (int j = 0; j < d; j++) to[i * d + j] = j <= i ? (float)L[i * d + j] : 0;
}

static void load_root(Pick *e) {
    const int d = e->d, dp = e->dp;
    for (int p = 0; p < d; p++) {
        memcpy(e->rows + p * dp, e->c->root + (e->z * d + p) * d, sizeof(float) * d);
        for (int q = d; q < dp; q++) e->rows[p * dp + q] = 0;
    }
}

static void fit_measure(Pick *e) {
    const NearFar *c = e->c;
    const int d = e->d, dp = e->dp;
    float *shift = c->shift + e->z * d, *tilt = c->tilt + e->z * d, *root = c->root + e->z * d * d;
    mean_of(e, c->y, 1, shift);
    mean_of(e, c->x, c->G, tilt);
    memset(e->moments, 0, sizeof(float) * d * dp);
    int64_t count = 0;
    for (int64_t j = 0; j < c->S; j++) count += !e->keep || e->keep[j];
    for (int64_t g = 0; g < c->G; g++)
        for (int64_t t = 0; t < c->S; t += CHUNK) {
            const int n = in_chunk(e, t);
            load_rows(c->x, e->z, g, t, n, d, c->factor, tilt, e->keep, e->X, dp);
            product(LOWER, d, d, n, e->X, 1, dp, e->X, dp, e->moments, dp, 1);
        }
    double trace = 0, length = 0;
    const float scale = 1.0f / (count ? count * c->G : 1);
    for (int i = 0; i < d * dp; i++) e->moments[i] *= scale;
    for (int p = 0; p < d; p++) trace += e->moments[p * dp + p], length += shift[p] * (double)shift[p];
    if (!(trace + length < 3e38)) {
        e->bad = NOT_FINITE;
        return;
    }
    cholesky(d, dp, e->moments, RIDGE * trace / d + sqrt(1.17549435e-38), (double *)e->root, root);
    load_root(e);
}

/* Computes z of all keys, |z|^2, w and the scores |z|^2 / 2 + w. */
static void measure_keys(Pick *e) {
    const NearFar *c = e->c;
    const float *shift = c->shift + e->z * e->d, *tilt = c->tilt + e->z * e->d;
    for (int64_t t = 0; t < c->S; t += CHUNK) {
        const int n = in_chunk(e, t);
        float *Z = e->Z + t * e->dp;
        load_rows(c->y, e->z, 0, t, n, e->d, c->factor, shift, e->keep, e->X, e->dp);
        memset(e->X + n * e->dp, 0, sizeof(float) * (CHUNK - n) * e->dp);
        transpose(CHUNK, e->d, e->X, e->dp, e->Xt, CHUNK);
        product(e->d <= 96 ? FROM : ALL, e->d, CHUNK, e->d, e->rows, 1, e->dp, e->Xt, CHUNK, Z, CHUNK, 0);
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

/* ---- Clusters ---- */

/* Computes the weights u of the pool's keys, relative to the largest, and their logs. */
static void weigh_keys(Pick *e) {
    const uint8_t *pool = e->c->pool + e->z * e->c->S;
    const int64_t tokens = e->chunks * CHUNK;
    float top = -INFINITY;
    for (int64_t j = 0; j < tokens; j++) {
        e->log_u[j] = j < e->c->S && pool[j] ? e->w[j] * LOG2E : -INFINITY;
        top = e->log_u[j] > top ? e->log_u[j] : top;
    }
    if (top == -INFINITY) top = 0;
    for (int64_t j = 0; j < tokens; j += LANES) AT(e->u + j) = exp2_of(AT(e->log_u + j) - top);
}

/* Makes the weighted mean of z the first centre. */
static void take_mean(Pick *e) {
    vec sums[e->d], all = {0};
    memset(sums, 0, sizeof sums);
    for (int64_t j = 0; j < e->chunks * CHUNK; j += LANES) {
        const float *Z = e->Z + j / CHUNK * CHUNK * e->dp + j % CHUNK;
        vec u = AT(e->u + j);
        all += u;
        for (int p = 0; p < e->d; p++) sums[p] += u * AT(Z + p * CHUNK);
    }
    const float mass = total(all);
    for (int p = 0; p < e->d; p++) e->centres[p] = total(sums[p]) / (mass > LEAST ? mass : LEAST);
}

/* Computes the offsets |c|^2 of centres [first, first + m). */
static void offsets(Pick *e, int first, int m) {
    for (int k = first; k < first + m; k++) {
        float square = 0;
        for (int p = 0; p < e->d; p++) square += e->centres[k * e->dp + p] * e->centres[k * e->dp + p];
        e->offset[k] = square;
    }
}

typedef struct {
    int count;
    float value[PICKS];
    int64_t key[PICKS];
} Farthest;

/* Returns whether two keys are equal. */
static int alike(const Pick *e, int64_t i, int64_t j) {
    const float *a = e->Z + i / CHUNK * CHUNK * e->dp + i % CHUNK, *b = e->Z + j / CHUNK * CHUNK * e->dp + j % CHUNK;
    float apart = 0;
    for (int p = 0; p < e->d; p++) apart += (a[p * CHUNK] - b[p * CHUNK]) * (a[p * CHUNK] - b[p * CHUNK]);
    return apart <= SAME * e->square[j];
}

static void consider(const Pick *e, Farthest *best, int most, float value, int64_t key) {
    if (!(value > -INFINITY) || (best->count == most && !(value > best->value[most - 1]))) return;
    for (int i = 0; i < best->count; i++)
        if (alike(e, best->key[i], key)) return;
    int i = best->count < most ? best->count++ : most - 1;
    for (; i > 0 && best->value[i - 1] < value; i--) {
        best->value[i] = best->value[i - 1];
        best->key[i] = best->key[i - 1];
    }
    best->value[i] = value;
    best->key[i] = key;
}

/* Lowers the squared distances D by those to centres [first, first + m), or initializes them. Returns the keys with
   the largest u D, the first of equal keys. */
static Farthest farthest(Pick *e, int first, int m, int begin, int most) {
    Farthest best = {0};
    offsets(e, first, m);
    for (int64_t t = 0; t < e->chunks * CHUNK; t += CHUNK) {
        product(ALL, m, CHUNK, e->d, e->centres + first * e->dp, e->dp, 1, e->Z + t * e->dp, CHUNK, e->dots, CHUNK, 0);
        for (int j = 0; j < CHUNK; j += LANES) {
            vec near = e->offset[first] - 2.0f * AT(e->dots + j), zero = {0};
            for (int k = 1; k < m; k++) near = minimum(near, e->offset[first + k] - 2.0f * AT(e->dots + k * CHUNK + j));
            /* at first a key equal to the mean comes last */
            const vec square = AT(e->square + t + j), none = zero + (begin ? LEAST : 0);
            near = choose(near + square > SAME * square, near + square, none);
            vec D = AT(e->D + t + j) = begin ? near : minimum(near, AT(e->D + t + j));
            vec value = AT(e->log_u + t + j) + log2_of(D);
            if (best.count == most && !(largest(value) > best.value[most - 1])) continue;
            for (int i = 0; i < LANES; i++) consider(e, &best, most, value[i], t + j + i);
        }
    }
    return best;
}

static void find_picks(Pick *e) {
    take_mean(e);
    for (int count = 0, first = 0, m = 1; count < e->K;) {
        const int most = e->K - count < PICKS ? e->K - count : PICKS;
        Farthest best = farthest(e, first, m, count == 0, most);
        for (int i = 0; i < most; i++) {  /* missing if there are fewer different keys than clusters */
            float *centre = e->centres + (count + i) * e->dp;
            if (i >= best.count) {
                for (int p = 0; p < e->d && count + i > 0; p++) centre[p] = AWAY;  /* the first centre is the mean */
                continue;
            }
            const int64_t j = best.key[i];
            const float *Z = e->Z + j / CHUNK * CHUNK * e->dp + j % CHUNK;
            for (int p = 0; p < e->d; p++) centre[p] = Z[p * CHUNK];
            e->D[j] = 0;
        }
        first = count, m = most, count += most;
    }
}

void find_nearest(int K, int d, const float *centres, const float *squares, const float *Zt, int n, float *dots,
                  int32_t *nearest) {
    product(ALL, K, CHUNK, d, centres, up(d), 1, Zt, CHUNK, dots, CHUNK, 0);
    for (int i = 0; i < n; i += LANES) {
        vec best = AT(dots + i) - 0.5f * squares[0];
        ivec which = {0};
        for (int k = 1; k < K; k++) {
            vec here = AT(dots + k * CHUNK + i) - 0.5f * squares[k];
            ivec better = here > best;
            best = choose(better, here, best);
            which = (better & k) | (~better & which);
        }
        memcpy(nearest + i, &which, sizeof which);
    }
}

/* Finds the nearest centre of each key. */
static void nearest_centres(Pick *e) {
    int64_t *cluster = e->c->cluster + e->z * e->c->S;
    offsets(e, 0, e->K);
    for (int64_t t = 0; t < e->c->S; t += CHUNK) {
        int32_t nearest[CHUNK];
        find_nearest(e->K, e->d, e->centres, e->offset, e->Z + t * e->dp, CHUNK, e->dots, nearest);
        for (int i = 0, n = in_chunk(e, t); i < n; i++) cluster[t + i] = nearest[i];
    }
}

/* One step of Lloyd's algorithm: moves centres to the weighted means of their keys. */
static void move_centres(Pick *e) {
    const NearFar *c = e->c;
    const int64_t *cluster = c->cluster + e->z * c->S;
    const float *shift = c->shift + e->z * e->d;
    memset(e->sums, 0, sizeof(float) * e->K * e->dp);
    memset(e->mass, 0, sizeof(float) * e->K);
    for (int64_t j = 0; j < c->S; j++) {
        if (!(e->u[j] > 0)) continue;
        const float *y = of(c->y, e->z, 0) + j * c->y.token;
        const float u = e->u[j], factor = c->factor;
        float *to = e->sums + cluster[j] * e->dp;
        for (int p = 0; p < e->d; p++) to[p] += u * (factor * y[p] - shift[p]);
        e->mass[cluster[j]] += u;
    }
    for (int k = 0; k < e->K; k++) {
        if (!(e->mass[k] > LEAST)) continue;
        for (int p = 0; p < e->d; p++) e->sums[k * e->dp + p] /= e->mass[k];
        product(ALL, 1, e->d, e->d, e->sums + k * e->dp, e->dp, 1, e->rows, e->dp, e->centres + k * e->dp, e->dp, 0);
    }
}

static void choose_head(Pick *e) {
    const NearFar *c = e->c;
    if (c->cross) load_root(e);          /* the metric is given */
    else fit_measure(e);
    if (e->bad) return;
    measure_keys(e);
    find_heavy(c, e->z, e->score);
    weigh_keys(e);
    find_picks(e);
    nearest_centres(e);
    move_centres(e);
    nearest_centres(e);
    for (int k = 0; k < e->K; k++)
        memcpy(c->centres + (e->z * e->K + k) * e->d, e->centres + k * e->dp, sizeof(float) * e->d);
}

int centres_of(const NearFar *c, const float *weight, float *centres) {
    Pick e;
    if (!open_pick(&e, c, 0)) return 0;
    load_root(&e);
    measure_keys(&e);
    for (int64_t j = 0; j < e.chunks * CHUNK; j++) e.u[j] = j < c->S ? weight[j] : 0;
    for (int64_t j = 0; j < e.chunks * CHUNK; j += LANES) AT(e.log_u + j) = log2_of(AT(e.u + j));
    find_picks(&e);
    nearest_centres(&e);
    move_centres(&e);
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
        const unsigned mode = without_denormals();
        Pick e;
        if (open_pick(&e, c, z)) choose_head(&e);
        else e.bad = NO_MEMORY;
        if (e.bad > bad) bad = e.bad;
        with_mode(mode);
        trim_scratch();
    }
    return bad;
}
