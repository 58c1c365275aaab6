/* Causal near-far attention whose memory does not grow: the twin of nearfar/causal.py, whose names these are.
   Measure and centres of the cells are given, of other sequences.

   Where block t begins, the keys of block t - 2 leave the window. Of these and the heavy keys so far the n of the
   largest score are heavy; the others join the cells of the nearest centres with weights u_j = e^(w_j - level), where
   w_j = tilt.(y_j - shift). What queries see of that is as in recall.c, without keys that are read.

   Backward: the past goes by once more, and every STEP blocks the sums of the cells are kept; then blocks are taken from
   the last to the first, the sums of STEP of them computed again from those that were kept. Gradients to sums are added up
   until the block at which a key joined. Per cell, with A, Az, As, AN, AV those to sum u y, u z, u |z|^2, u and u v:
   ds_j = A.y_j + Az.z_j + As |z_j|^2 + AN + AV.v_j is that to u_j, dy_j = u_j (A + ds_j tilt + root (Az + 2 As z_j)),
   dv_j = u_j AV. */

#include "past.h"

INLINE float logit_of(const Past *h, int64_t j) {         /* w */
    return dot(h->tilt, key(h, j), h->s.dp) - dot(h->tilt, h->shift, h->s.dp);
}

static void open_bounded(Past *h) {
    const Recall *c = h->c;
    const int d = h->s.d, dp = h->s.dp, n = h->s.n, K = h->s.K = (int)c->cells;
    load_past(h);
    memset(h->tilt, 0, sizeof(float) * dp);
    memcpy(h->tilt, c->tilt + h->z * d, sizeof(float) * d);
    const float *level = c->level + h->z * K;
    float most = level[0];
    for (int k = 1; k < K; k++) most = level[k] > most ? level[k] : most;
    for (int k = 0; k < K; k++) {
        float *centre = h->centres + k * dp;
        memset(centre, 0, sizeof(float) * dp);
        memcpy(centre, c->centres + (h->z * K + k) * d, sizeof(float) * d);
        h->relative[k] = expf(level[k] - most);
    }
    product(ALL, K, d, d, h->centres, dp, 1, h->rootT, dp, h->turned, dp, 0);
    for (int k = 0; k < K; k++) {
        for (int p = d; p < dp; p++) h->turned[k * dp + p] = 0;
        h->offset[k] = square_sum(h->centres + k * dp, dp) / 2 + dot(h->shift, h->turned + k * dp, d);
    }
    float *sums[SUMS];
    size_t sizes[SUMS];
    sums_of(h, K, sums, sizes);
    for (int i = 0; i < SUMS; i++) memset(sums[i], 0, sizeof(float) * sizes[i]);
    for (int i = 0; i < n; i++) h->heavy[i] = -1;
    h->far = 0;
}

/* Key j, whose z is given, joins its cell. */
static void join(Past *h, int64_t j, const float *z) {
    const int dp = h->s.dp, lv = h->s.lv, n = h->s.n, k = h->cell[j];
    const float u = h->u[j];
    add_row(h->ysum + k * dp, u, key(h, j), dp);
    add_row(h->zsum + k * dp, u, z, dp);
    add_row(h->values + (n + k) * lv, u, h->V + j * lv, lv);
    h->squares[k] += u * h->square[j];
    h->mass[n + k] += u;
}

/* Whether key j is heavy now; otherwise it may have taken the place of `gone`. */
static int takes_a_place(Past *h, int64_t j, int32_t *gone) {
    const int n = h->s.n;
    int32_t *held = h->heavy;
    *gone = -1;
    if (!n || (held[n - 1] >= 0 && !(h->score[j] > h->score[held[n - 1]]))) return 0;
    *gone = held[n - 1];
    int i = n - 1;
    for (; i > 0 && (held[i - 1] < 0 || h->score[held[i - 1]] < h->score[j]); i--) held[i] = held[i - 1];
    held[i] = (int32_t)j;
    return 1;
}

/* The keys of block s become far. */
static void pass_block(Past *h, int64_t s) {
    const Recall *c = h->c;
    const int dp = h->s.dp;
    int32_t out[CHUNK];                                        /* each key that becomes heavy makes one leave at most */
    int leaving = 0;
    for (int64_t j = s * c->block, stop = j + c->block; j < stop; j += CHUNK) {
        const int m = stop - j < CHUNK ? (int)(stop - j) : CHUNK;
        int32_t nearest[CHUNK];
        uint8_t leaves[CHUNK] = {0};
        measure(h, j, m);
        find_nearest(h, j, m, nearest);
        for (int i = 0; i < m; i++) {
            const float w = logit_of(h, j + i), more = w - c->level[h->z * c->cells + nearest[i]];
            h->square[j + i] = square_sum(h->X + i * dp, dp);
            h->score[j + i] = h->square[j + i] / 2 + w;
            h->cell[j + i] = nearest[i];
            h->u[j + i] = expf(more < STEEPEST ? more : STEEPEST);
        }
        for (int i = 0; i < m; i++) {
            int32_t gone;
            if (!there(h, j + i)) continue;
            if (!takes_a_place(h, j + i, &gone)) leaves[i] = 1;
            else if (gone >= j) leaves[gone - j] = 1;
            else if (gone >= 0) out[leaving++] = gone;
        }
        for (int i = 0; i < m; i++)
            if (leaves[i]) join(h, j + i, h->X + i * dp);
        for (int i = 0; i < leaving; i++) {
            measure(h, out[i], 1);
            join(h, out[i], h->X);
        }
        leaving = 0;
    }
}

static void show_heavy(Past *h, const int32_t *held) {
    for (int i = 0; i < h->s.n; i++) h->bias[i] = 0, h->high[i] = held[i] >= 0 ? 0 : HIDDEN;
    load_heavy(h, held, h->shared, h->values, h->mass);
}

/* The past of block t. */
static void bring_to(Past *h, int64_t t) {
    for (; h->far < t - 1; h->far++) pass_block(h, h->far);
}

int bounded_head(Past *h) {
    const Recall *c = h->c;
    open_bounded(h);
    for (int64_t t = (c->S - c->L) / c->block; t <= (c->S - 1) / c->block; t++) {
        bring_to(h, t);
        show_heavy(h, h->heavy);
        c->spread[h->z] = place_cells_of(h);
        attend_block(h, t);
    }
    return 1;
}

/* ---- Backward ---- */

static void copy_sums(const Past *h, float *kept, int back) {
    float *sums[SUMS];
    size_t sizes[SUMS];
    sums_of(h, h->s.K, sums, sizes);
    for (int i = 0; i < SUMS; kept += sizes[i++])
        if (back) memcpy(sums[i], kept, sizeof(float) * sizes[i]);
        else memcpy(kept, sums[i], sizeof(float) * sizes[i]);
}

/* From the gradients of a block to means, biases, numbers and values of cells: those to their sums. */
static void add_to_sums(Back *e, const float *dN) {
    Past *h = &e->h;
    const int d = h->s.d, dp = h->s.dp, lv = h->s.lv, n = h->s.n;
    for (int k = 0; k < h->s.K; k++) {
        const float N = h->mass[n + k], *mu = h->shared + (n + k) * dp, *zmean = e->zmean + k * dp;
        if (!(N > LEAST)) continue;
        float *dmu = e->dmu + (n + k) * dp;
        add_row(dmu, -e->dbias[k], h->tilt, d);
        const float dtau = h->tau[k] > 0 ? e->dbias[k] / (2 + h->tau[k]) / N : 0;
        e->weight[k] += dN[k] - dot(dmu, mu, d) / N + dtau * (2 * square_sum(zmean, dp) - h->squares[k] / N);
        add_row(e->dvalue + k * lv, 1, e->dfar + (n + k) * lv, lv);
        add_row(e->sum + k * dp, 1 / N, dmu, d);
        add_row(e->zslope + k * dp, -2 * dtau, zmean, dp);
        e->slope[k] += dtau;
    }
}

/* Gradients to key j, whose z is given, from those to the sums of its cell; z becomes that to itself. */
static void give(Back *e, int64_t j, float *z) {
    Past *h = &e->h;
    const int d = h->s.d, dp = h->s.dp, lv = h->s.lv, k = h->cell[j];
    const float u = h->u[j], level = h->c->level[h->z * h->c->cells + k], *v = h->V + j * lv, *A = e->sum + k * dp;
    const float s = dot(A, key(h, j), dp) + dot(e->zslope + k * dp, z, dp) + e->slope[k] * h->square[j] + e->weight[k] +
                    dot(e->dvalue + k * lv, v, lv);
    add_row(e->dY + j * dp, u, A, d);
    if (logit_of(h, j) - level < STEEPEST) add_row(e->dY + j * dp, u * s, h->tilt, d);
    add_row(e->dV + j * lv, u, e->dvalue + k * lv, lv);
    for (int p = 0; p < dp; p += LANES)
        AT(z + p) = u * (AT(e->zslope + k * dp + p) + 2 * e->slope[k] * AT(z + p));
}

static int is_in(const int32_t *held, int n, int64_t j) {
    for (int i = 0; i < n; i++)
        if (held[i] == j) return 1;
    return 0;
}

/* Those to m keys from j on, m <= CHUNK, but for those that are heavy. */
static void give_keys(Back *e, int64_t j, int m, const int32_t *held) {
    Past *h = &e->h;
    const int d = h->s.d, dp = h->s.dp;
    measure(h, j, m);
    for (int i = 0; i < m; i++) {
        if (there(h, j + i) && !is_in(held, h->s.n, j + i)) give(e, j + i, h->X + i * dp);
        else memset(h->X + i * dp, 0, sizeof(float) * dp);
    }
    product(ALL, m, d, d, h->X, dp, 1, h->rootT, dp, h->apart, dp, 0);
    for (int i = 0; i < m; i++) add_row(e->dY + (j + i) * dp, 1, h->apart + i * dp, d);
}

/* Block t, whose past h has; before: the heavy keys of the block before, or null. */
static void block_backward(Back *e, int64_t t, const int32_t *held, const int32_t *before) {
    Past *h = &e->h;
    const Recall *c = h->c;
    const int dp = h->s.dp, lv = h->s.lv, n = h->s.n, K = h->s.K;
    const int64_t b = c->block, first = c->S - c->L, start = t * b > first ? t * b : first;
    const int64_t tokens = least_of((t + 1) * b, c->S) - start, near = least_of((t + 1) * b, c->S) - (t ? t - 1 : 0) * b;
    float *dN = e->dN;
    show_heavy(h, held);
    place_cells_of(h);
    for (int k = 0; k < K; k++) {
        const float N = h->mass[n + k];
        put_row(e->zmean + k * dp, N > 0 ? 1 / N : 0, h->zsum + k * dp, dp);
    }
    memset(e->dmu, 0, sizeof(float) * (n + K) * dp);
    memset(e->dfar, 0, sizeof(float) * (n + K) * lv);
    memset(e->dbias, 0, sizeof(float) * K);
    memset(dN, 0, sizeof(float) * K);
    for (int64_t i = 0; i < tokens * c->G; i += PIECE) {
        const int R = (int)least_of(PIECE, tokens * c->G - i), ld = up(R);
        piece_backward(e, NULL, t, i, R);
        for (int k = 0; k < K; k++)
            for (int r = 0; r < R; r++) dN[k] -= e->A[(near + n + k) * ld + r] * e->bar[r];
    }
    for (int i = 0; i < n; i++) {
        if (held[i] < 0) continue;
        add_row(e->dY + held[i] * dp, 1, e->dmu + i * dp, dp);
        add_row(e->dV + held[i] * lv, 1, e->dfar + i * lv, lv);
    }
    add_to_sums(e, dN);
    const int64_t joins = before ? t - 2 : 0;                  /* the first block of those that joined here */
    for (int64_t j = joins > 0 ? joins * b : 0; j < (t - 1) * b; j += CHUNK)
        give_keys(e, j, (int)least_of(CHUNK, (t - 1) * b - j), held);
    for (int i = 0; before && i < n; i++)
        if (before[i] >= 0 && !is_in(held, n, before[i])) give_keys(e, before[i], 1, held);
}

int bounded_backward(Back *e) {
    Past *h = &e->h;
    const Recall *c = h->c;
    const int dp = h->s.dp, lv = h->s.lv, n = h->s.n, K = (int)c->cells;
    const size_t size = (size_t)K * (2 * dp + lv + 2);
    float *marks = malloc(sizeof(float) * size * ((e->count + STEP - 1) / STEP));
    int32_t *held = malloc(sizeof(int32_t) * (e->count * n + 1));
    if (!marks || !held) {
        free(marks), free(held);
        return 0;
    }
    open_bounded(h);
    for (int64_t i = 0; i < e->count; i++) {
        bring_to(h, e->first + i);
        memcpy(held + i * n, h->heavy, sizeof(int32_t) * n);
        if (i % STEP == 0) copy_sums(h, marks + i / STEP * size, 0);
    }
    memset(e->sum, 0, sizeof(float) * K * dp), memset(e->zslope, 0, sizeof(float) * K * dp);
    memset(e->dvalue, 0, sizeof(float) * K * lv), memset(e->slope, 0, sizeof(float) * K);
    memset(e->weight, 0, sizeof(float) * K);
    for (int64_t from = (e->count - 1) / STEP * STEP; from >= 0; from -= STEP) {
        const int64_t to = least_of(from + STEP, e->count);
        copy_sums(h, marks + from / STEP * size, 1);
        memcpy(h->heavy, held + from * n, sizeof(int32_t) * n);
        h->far = e->first + from > 1 ? e->first + from - 1 : 0;
        for (int64_t i = from; i < to; i++) {
            bring_to(h, e->first + i);
            copy_sums(h, e->states + (i - from) * size, 0);
        }
        for (int64_t i = to - 1; i >= from; i--) {
            copy_sums(h, e->states + (i - from) * size, 1);
            block_backward(e, e->first + i, held + i * n, i ? held + (i - 1) * n : NULL);
        }
    }
    free(marks), free(held);
    return 1;
}
