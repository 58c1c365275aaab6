/* The keys of cells that each query in both directions, or to another sequence, asks for: the twin of Both._read in
   nearfar/both.py, by the looks of looks.c and opened.c.

   All keys lie here as they are, less their shift, and as whole numbers. A query looks at those that lie in cells as seen
   from its block: the steps of all others are NaN. */

#include "looks.h"

/* What queries look with, and what they have read: of those of one piece. */
typedef struct {
    Past past;                                         /* of it the parts `s` and `k` */
    float *Y, *V, *steps, *looked, *dY, *dV;           /* (S, dp), (S, lv), (S) twice, of whole numbers; gradients */
    uint8_t *panels;                                   /* as in Seen */
    int32_t *cell;                                     /* (S) */
    float *along;                                      /* (d, dp) */
} Asked;

INLINE Asked *asked_of(const Head *e) { return (Asked *)e->asked; }

static size_t place_asked(Asked *a, const NearFar *c, int most, int backward, float *memory) {
    const size_t d = c->d, dp = up(d), lv = up(c->dv + 1), S = c->S, K = c->cells, open = c->open, back = backward;
    const size_t steps = (S + FOUR - 1) / FOUR * FOUR + LOOKED, rows = most + AT_ONCE, best = room_for_best(open);
    Work *k = &a->past.k;
    const Piece pieces[] = {
        {&a->Y, S * dp}, {&a->V, S * lv}, {&a->steps, steps}, {&a->looked, steps}, {&a->panels, steps * dp / 4},
        {&a->cell, S}, {&a->along, d * dp}, {&a->dY, back * S * dp}, {&a->dV, back * S * lv}, {&k->whole, rows * dp / 4},
        {&k->bias, rows}, {&k->looks, AT_ONCE * LOOKED}, {&k->best[0].value, rows * best},
        {&k->best[0].place, rows * best}, {&k->read, rows * (up(open) + PAD)}, {&k->places, rows * open + PAD},
        {&k->count, rows}, {&k->left.number, K * most}, {&k->left.bar, most}, {&k->left.along, most},
        {&k->left.turned, (size_t)most * dp}};
    const size_t size = place_pieces(pieces, sizeof pieces / sizeof *pieces, memory);
    for (int i = 1; i < most && memory; i++) {
        k->best[i].value = k->best[0].value + i * best;
        k->best[i].place = k->best[0].place + i * best;
    }
    return size;
}

enum { HEAD = (sizeof(Asked) / sizeof(float) + PAD) / PAD * PAD };   /* numbers of what stands before the pieces */

size_t room_for_asked(const NearFar *c, int most, int backward) {
    return HEAD + place_asked(&(Asked){0}, c, most, backward, NULL);
}

/* ---- Keys ---- */

/* Key j as whole numbers: in C and in PyTorch of the same float, which is why the shift is taken off one that was stored. */
static void to_panel(Head *e, int64_t j) {
    Asked *a = asked_of(e);
    const int dp = e->dp;
    int8_t whole[dp];
    float turned[dp];
    uint8_t *panel = a->panels + j / PANEL * PANEL * dp + j % PANEL * 4;
    float *y = a->Y + j * dp;
    for (int p = 0; p < e->d && e->pool[j]; p++) y[p] -= e->shift[p];
    turn(y, dp, turned);
    a->steps[j] = whole_of(turned, dp, whole);
    for (int p = 0; p < dp; p++) panel[p / 4 * 4 * PANEL + p % 4] = (uint8_t)(whole[p] ^ 0x80);
    a->looked[j] = e->pool[j] ? a->steps[j] : NAN;
    a->cell[j] = (int32_t)e->cell[j];
}

void open_asked(Head *e, int backward) {
    const NearFar *c = e->c;
    Asked *a = asked_of(e);
    memset(a, 0, sizeof *a);
    place_asked(a, c, e->most, backward, e->asked + HEAD);
    load_rows(c->y, e->z, 0, 0, c->S, e->d, c->factor, NULL, e->pool, a->Y, e->dp);
    load_rows(c->v, e->z, 0, 0, c->S, e->dv, 1, NULL, e->pool, a->V, e->lv);
    const View rows = {c->along + e->z * c->d * c->d, 0, 0, c->d};
    load_rows(rows, 0, 0, 0, e->d, e->d, 1, NULL, NULL, a->along, e->dp);
    for (int64_t j = 0; j < c->S; j++) to_panel(e, j);
    if (backward) memset(a->dY, 0, sizeof(float) * c->S * e->dp), memset(a->dV, 0, sizeof(float) * c->S * e->lv);
    a->past.paneled = c->S;
    a->past.s = (Seen){.d = e->d, .dp = e->dp, .dv = e->dv, .lv = e->lv, .n = e->n, .K = e->K, .open = c->open,
                       .Y = a->Y, .V = a->V, .cell = a->cell, .panels = a->panels, .looked = a->looked,
                       .mass = e->mass, .rows = a->along, .tau = e->spread};
}

void pass_by(Head *e, int64_t before, int64_t from, int64_t stop) {
    Asked *a = asked_of(e);
    for (int64_t j = before; j < from; j++) a->looked[j] = e->pool[j] ? a->steps[j] : NAN;
    for (int64_t j = from; j < stop; j++) a->looked[j] = NAN;
}

/* ---- Queries ---- */

static void read_logits(Head *e, int R) {
    Asked *a = asked_of(e);
    Work *k = &a->past.k;
    for (int r = 0; r < R; r++) {
        float *read = k->read + r * room_to_read(&a->past.s);
        dots(a->Y, k->places + r * e->c->open, k->count[r], e->Q + r * e->dp, e->dp, read);
        for (int i = 0; i < k->count[r]; i++) read[i] *= LOG2E;
    }
}

void ask(Head *e, int R, const int64_t *number) {
    const int64_t open = e->c->open;
    Asked *a = asked_of(e);
    Work *k = &a->past.k;
    float turned[e->dp];
    k->ahead = R;
    for (int r = 0; r < R; r++) {
        k->asks[r].far = (int32_t)e->c->S;
        turn(e->Q + r * e->dp, e->dp, turned);
        whole_of(turned, e->dp, k->whole + r * e->dp);
        k->bias[r] = bias_of(k->whole + r * e->dp, e->dp);
    }
    choose_keys(&a->past, a->past.s.open);
    for (int r = 0; r < R; r++)
        for (int i = 0; i < open; i++) e->c->read[number[r] * open + i] = i < k->count[r] ? k->places[r * open + i] : -1;
    read_logits(e, R);
}

void ask_again(Head *e, int R, const int64_t *number) {
    const int64_t open = e->c->open;
    Work *k = &asked_of(e)->past.k;
    for (int r = 0; r < R; r++) {
        const int32_t *places = e->c->read + number[r] * open;
        for (k->count[r] = 0; k->count[r] < open && places[k->count[r]] >= 0;) k->count[r]++;
        memcpy(k->places + r * open, places, sizeof(int32_t) * open);
    }
    read_logits(e, R);
}

void weigh_cells(Head *e, int R, float *top, float *logits) {
    Asked *a = asked_of(e);
    Work *k = &a->past.k;
    const int ld = up(R);
    begin_left(&a->past.s, &k->left, R, ld, e->Q, 1);
    for (int r = 0; r < R; r++) {
        const float *read = k->read + r * room_to_read(&a->past.s);
        leave(&k->left, r, ld, k->places + r * e->c->open, read, k->count[r], a->cell);
        for (int i = 0; i < k->count[r]; i++) top[r] = read[i] > top[r] ? read[i] : top[r];
    }
    weigh_left(&a->past.s, &k->left, top, ld, logits);
}

const float *left_in(const Head *e, int k, int ld) { return asked_of(e)->past.k.left.number + k * ld; }

void add_asked(Head *e, int R, const float *left, float *all, float *O) {
    Asked *a = asked_of(e);
    Work *k = &a->past.k;
    const int ld = up(R);
    for (int r = 0; r < R; r++) {
        const int32_t *places = k->places + r * e->c->open;
        const int n = k->count[r];
        float *more = k->read + r * room_to_read(&a->past.s);
        for (int j = n; j < up(n); j++) more[j] = -INFINITY;
        for (int j = 0; j < n; j += LANES) {
            AT(more + j) = exp2_of(AT(more + j) - e->top[r]);
            all[r] += total(AT(more + j));
        }
        for (int j = 0; j < n; j++) more[j] -= left[a->cell[places[j]] * ld + r];
        add_rows(a->V, e->lv, more, places, n, O + r * e->lv);
    }
}

/* ---- Gradients ---- */

void asked_backward(Head *e, int R, const float *left, const float *more, float *dx, float *B) {
    Asked *a = asked_of(e);
    const Work *k = &a->past.k;
    const int ld = up(R), dp = e->dp, lv = e->lv;
    for (int r = 0; r < R; r++) {
        const float *q = e->Q + r * dp, *grad = e->G + r * lv, *read = k->read + r * room_to_read(&a->past.s);
        const float of_cells = more ? more[r] : 0, bar = grad[e->dv] - of_cells;   /* G has them for the cells by now */
        for (int i = 0; i < k->count[r]; i++) {
            const int64_t j = k->places[r * e->c->open + i], cell = a->cell[j] * ld + r;
            const float weight = exp2f(read[i] - e->top[r]), less = left[cell];
            const float gain = dot(grad, a->V + j * lv, e->dv) + bar;
            add_row(a->dV + j * lv, weight - less, grad, e->dv);
            add_row(a->dY + j * dp, weight * gain, q, dp);
            add_row(dx + r * dp, weight * gain, a->Y + j * dp, dp);
            B[cell] -= less * (gain + of_cells);
        }
    }
}

void give_asked(Head *e) {
    const Asked *a = asked_of(e);
    for (int64_t j = 0; j < e->c->S; j++) {
        if (!e->pool[j]) continue;
        add_row(key_of(e, e->c->dy, j), (float)e->c->factor, a->dY + j * e->dp, e->d);
        add_row(key_of(e, e->c->dvalues, j), 1, a->dV + j * e->lv, e->dv);
    }
}
