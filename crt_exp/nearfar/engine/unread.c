/* What the keys that queries do not read weigh at most: the twin of nearfar/bound.py.

   A query turned is s a + e and a key s' b + e', with a and b of whole numbers; r times their logit is within
   |s a| |e'| + |e| |t(y)| of s s' a.b. Each key that lies in a cell is added to this sum where it is seen to be below the
   bar of a query, or when it leaves the best ones, and so once if it is not read: nothing is subtracted. */

#include <math.h>

#include "looks.h"

static const float MORE = 1.00001f;                     /* for the rounding of norms and sums */

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

/* 2^t, or up to 6% more: on a chord from one whole number to the next, which is what the bits of a float say. From 128
   on, and of what is no number, infinity; from below -126, 2^-126. */
INLINE vec chord(vec t) {
    const vec most = (vec){0} + 128, least = (vec){0} - 126;
    t = choose(t < most, maximum(t, least), most);
    return (vec)((bits)__builtin_convertvector(t * 0x1p23f, ivec) + (127u << 23));
}

/* Sums are over 2^top, a whole number, which follows the bar; what is summed up exceeds it by what rounding took. */
static void raise_to(Unread *u, float bar) {
    const float top = floorf(bar * u->each);
    if (top - 32 > u->top) u->sum *= exp2((double)u->top - top), u->top = top;
}

INLINE ivec first_lanes(int n) { return lane_numbers() < n; }

void add_below(const Past *h, Unread *u, const int32_t *looks, int64_t j, int n, float bar) {
    const float *looked = h->looked + j, *lost = h->lost + j, *size = h->size + j;
    const vec bars = (vec){0} + bar;
    vec sum = {0};
    if (bar == HIDDEN) return;
    raise_to(u, bar);
    const float each = u->each, near = u->near, lacks = u->lost, top = u->top;
    const int whole = n / LANES * LANES;
    for (int i = 0; i < n; i += LANES) {
        const vec value = __builtin_convertvector(*(const stored_ivec *)(looks + i), vec) * AT(looked + i);
        const vec term = chord(value * each + (AT(lost + i) * near + AT(size + i) * lacks) - top);
        const ivec counts = i < whole ? value <= bars : (value <= bars) & first_lanes(n - i);
        sum += (vec)((bits)term & (bits)counts);
    }
    u->sum += total(sum);
}

static void add_terms(Unread *u, const float *most, int n) {
    vec sum = {0};
    for (int i = 0; i < n; i += LANES)
        sum += (vec)((bits)chord(AT(most + i) - u->top) & (bits)first_lanes(n - i));
    u->sum += total(sum);
}

void add_dropped(const Past *h, Unread *u, const Best *best, float bar, int equal) {
    float most[LOOKED + PAD] = {0};
    int n = 0, i = 0;
    raise_to(u, bar);
#if defined(__AVX512F__)
    vec sum = {0};
    for (; equal <= 0 && i + LANES <= best->n; i += LANES) {
        const vec value = AT(best->value + i);
        const __m512i places = _mm512_loadu_si512(best->place + i);
        const vec lost = (vec)_mm512_i32gather_ps(places, h->lost, 4);
        const vec size = (vec)_mm512_i32gather_ps(places, h->size, 4);
        const vec term = chord(value * u->each + (lost * u->near + size * u->lost) - u->top);
        sum += (vec)((bits)term & (bits)(value <= bar));
    }
    u->sum += total(sum);
#endif
    for (; i < best->n; i++) {
        const int32_t j = best->place[i];
        most[n] = best->value[i] * u->each + (h->lost[j] * u->near + h->size[j] * u->lost);
        n += !(best->value[i] > bar || (best->value[i] == bar && equal-- > 0));
        if (n == LOOKED) add_terms(u, most, n), n = 0;
    }
    add_terms(u, most, n);
}

float bound_of(const Past *h, const Unread *u, int64_t j, float top, float scale, float part) {
    const double far = scale > 0 ? (double)part / scale : 0, left = 1 - SUMMED - far;
    const double rounding = (h->s.d + 16) * 0x1p-24 * LOG2E * u->size * h->reach[j];
    if (u->sum == 0) return (float)far;
    if (!(left > 0 && u->sum < INFINITY)) return 1;      /* too large to be told, or no number, of two such */
    const double read = top + log2(scale) + log2(left) - rounding, unread = u->top + log2(MORE * u->sum);
    const double most = 1 / (1 + exp2(read - unread));
    const float bound = (float)(most <= far ? far : most);
    return bound < LEAST ? LEAST : bound;                /* what underflows is not 0 */
}
