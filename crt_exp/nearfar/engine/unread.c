/* What the keys that queries do not read weigh at most: the twin of nearfar/bound.py.

   A query turned is s a + e and a key s' b + e', with a and b of whole numbers; r times their logit is within
   |s a| |e'| + |e| |t(y)| of s s' a.b. Each key that lies in a cell is added to this sum where it is seen to be below the
   bar of a query, or when it leaves the best ones, and so once if it is not read: nothing is subtracted. */

#include <math.h>

#include "looks.h"

static const float MORE = 1.00001f;                     /* for the rounding of norms and sums */
static const float HUGE_LOGIT = 1e30f, LOW_LOGIT = 0.9f * HIDDEN;       /* what is beyond counts as these */

/* Relative to the step nothing overflows or underflows. */
Apart apart_of(const float *x, int dp, const int8_t *whole, float step) {
    float turned[dp], number[dp];
    vec sizes = {0}, nears = {0}, losses = {0};
    if (!(step > 0)) return (Apart){dp * LEAST, 0, dp * LEAST};
    memcpy(turned, x, sizeof turned);
    turn(dp, turned);
    const float times = 1 / step;
    for (int p = 0; p < dp; p++) number[p] = whole[p];
    for (int p = 0; p < dp; p += LANES) {
        const vec exact = AT(turned + p) * times, near = AT(number + p), loss = exact - near;
        sizes += exact * exact, nears += near * near, losses += loss * loss;
    }
    const float size = MORE * step * sqrtf(total(sizes)), near = MORE * step * sqrtf(total(nears));
    return (Apart){size, near, MORE * step * sqrtf(total(losses)) + ROUNDED * size};
}

void reach_to(Past *h, int64_t stop) {
    const int dp = h->s.dp;
    for (int64_t j = h->reached; j < stop; j++) {
        float most = 0, sum = 0;
        for (int p = 0; p < dp; p++) most = fabsf(key(h, j)[p]) > most ? fabsf(key(h, j)[p]) : most;
        for (int p = 0; p < dp && most > LEAST; p++) sum += key(h, j)[p] / most * (key(h, j)[p] / most);
        const float size = MORE * most * sqrtf(sum > 1 ? sum : 1), before = j ? h->reach[j - 1] : 0;
        h->reach[j] = size > before ? size : before;
    }
    h->reached = stop > h->reached ? stop : h->reached;
}

/* A logit over r is a look over the step of the query times `each`; logs are in base 2. */
Unread unread_by(const float *x, int dp, const int8_t *whole, float step) {
    const int run = dp & -dp;
    const Apart apart = apart_of(x, dp, whole, step);
    const float scale = LOG2E / run;
    return (Unread){.each = scale * step, .near = scale * apart.near, .lost = scale * apart.lost,
                    .size = apart.size / sqrtf(run), .top = HIDDEN, .sum = 0};
}

/* Adds e^ of n logits at most, of which there is room for a whole vector more; they are overwritten. */
static void add_terms(Unread *u, float *most, int n) {
    vec tops = {0}, sum = {0};
    tops += u->top;
    for (int i = n; i < up(n); i++) most[i] = HIDDEN;
    for (int i = 0; i < n; i += LANES) tops = maximum(tops, AT(most + i));
    const float top = largest(tops);
    if (top == HIDDEN) return;
    if (top > u->top) u->sum *= exp2((double)u->top - top), u->top = top;
    for (int i = 0; i < n; i += LANES) sum += exp2_of(AT(most + i) - top);
    u->sum += total(sum);
}

void add_below(const Past *h, Unread *u, const int32_t *looks, int64_t j, int n, float bar) {
    const float *looked = h->looked + j, *lost = h->lost + j, *size = h->size + j;
    float most[LOOKED + PAD];
    const vec huge = (vec){0} + HUGE_LOGIT, low = (vec){0} + LOW_LOGIT, none = (vec){0} + HIDDEN;
    for (int i = 0; i < n; i += LANES) {
        const vec value = __builtin_convertvector(*(const stored_ivec *)(looks + i), vec) * AT(looked + i);
        const vec logit = value * u->each + (AT(lost + i) * u->near + AT(size + i) * u->lost);
        AT(most + i) = choose(value <= bar, maximum(minimum(logit, huge), low), none);
    }
    add_terms(u, most, n);
}

void add_dropped(const Past *h, Unread *u, const Best *best, float bar, int equal) {
    float most[LOOKED + PAD];
    int n = 0;
    for (int i = 0; i < best->n; i++) {
        if (best->value[i] > bar || (best->value[i] == bar && equal-- > 0)) continue;
        const int32_t j = best->place[i];
        const float logit = best->value[i] * u->each + (h->lost[j] * u->near + h->size[j] * u->lost);
        most[n++] = !(logit < HUGE_LOGIT) ? HUGE_LOGIT : logit > LOW_LOGIT ? logit : LOW_LOGIT;
        if (n == LOOKED) add_terms(u, most, n), n = 0;
    }
    if (n) add_terms(u, most, n);
}

float bound_of(const Past *h, const Unread *u, int64_t j, float top, float scale, float part) {
    const double far = scale > 0 ? (double)part / scale : 0, left = 1 - SUMMED - far;
    const double rounding = (h->s.d + 16) * 0x1p-24 * LOG2E * u->size * h->reach[j];
    if (!(u->sum > 0)) return (float)far;
    if (!(left > 0)) return 1;
    const double read = top + log2(scale) + log2(left) - rounding, unread = u->top + log2(MORE * u->sum);
    const double most = 1 / (1 + exp2(read - unread));
    const float bound = (float)(most <= far ? far : most);
    return bound < LEAST ? LEAST : bound;                /* what underflows is not 0 */
}
