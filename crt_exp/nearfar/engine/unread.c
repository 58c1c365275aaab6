/* What the keys that queries do not read weigh at most: the twin of nearfar/bound.py.

   A query turned is s a + e and a key s' b + e', with a and b of whole numbers; r times their logit is within
   |s a| |e'| + |e| |t(y)| of s s' a.b. Each key that lies in a cell is added to this sum where it is seen to be below the
   bar of a query, or when it leaves the best ones, and so once if it is not read: nothing is subtracted. */

#include <math.h>

#include "looks.h"

static const float MORE = 1.00001f, CHORDS = 1.00005f;    /* for the rounding of norms, and of sums of chords */

/* Relative to the step nothing overflows or underflows. */
Apart apart_of(const float *turned, int dp, const int8_t *whole, float step) {
    float number[dp];
    vec sizes = {0}, nears = {0}, losses = {0};
    if (!(step > 0)) return (Apart){dp * LEAST, 0, dp * LEAST};
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
        const float *y = key(h, j), before = j ? h->reach[j - 1] : 0;
        vec most_of = {0}, sums = {0};
        for (int p = 0; p < dp; p += LANES) most_of = maximum(most_of, maximum(AT(y + p), -AT(y + p)));
        const float most = largest(most_of), times = most > LEAST ? 1 / most : 0;
        for (int p = 0; p < dp; p += LANES) sums += (AT(y + p) * times) * (AT(y + p) * times);
        const float sum = total(sums), size = MORE * most * sqrtf(sum > 1 ? sum : 1);
        h->reach[j] = size > before ? size : before;
    }
    h->reached = stop > h->reached ? stop : h->reached;
}

/* A logit over r is a look over the step of the query times `each`; logs are in base 2, in units of OCTAVE. */
Unread unread_by(const float *turned, int dp, const int8_t *whole, float step) {
    const int run = dp & -dp;
    const Apart apart = apart_of(turned, dp, whole, step);
    const float scale = OCTAVE * LOG2E / run;
    return (Unread){.each = scale * step, .near = scale * apart.near, .lost = scale * apart.lost,
                    .size = apart.size / sqrtf(run), .top = HIDDEN, .sum = 0};
}

void raise_to(Unread *u, float bar) {
    const float top = floorf(bar * u->each / OCTAVE);
    if (top - 32 > u->top) u->sum *= exp2((double)u->top - top), u->top = top, u->from = (127 - top) * OCTAVE;
}

INLINE ivec first_lanes(int n) { return lane_numbers() < n; }

void add_below(const Past *h, Unread *u, const int32_t *looks, int64_t j, int n, float bar) {
    vec sum = {0};
    const int whole = n / LANES * LANES;
    for (int i = 0; i < n; i += LANES) {
        const vec value = __builtin_convertvector(*(const stored_ivec *)(looks + i), vec) * AT(h->looked + j + i);
        const ivec counts = i < whole ? value <= bar : (value <= bar) & first_lanes(n - i);
        sum += (vec)((bits)term_of(u, value, AT(h->lost + j + i), AT(h->size + j + i)) & (bits)counts);
    }
    u->sum += total(sum);
}

void add_dropped(const Past *h, Unread *u, const Best *best, float bar, int equal) {
    float value[LANES], lost[LANES], size[LANES];
    int n = 0, i = 0;
    raise_to(u, bar);
#if defined(__AVX512F__)
    vec sum = {0};
    for (; equal <= 0 && i + LANES <= best->n; i += LANES) {
        const vec value = AT(best->value + i);
        const __m512i places = _mm512_loadu_si512(best->place + i);
        const vec lost = (vec)_mm512_i32gather_ps(places, h->lost, 4);
        const vec size = (vec)_mm512_i32gather_ps(places, h->size, 4);
        sum += (vec)((bits)term_of(u, value, lost, size) & (bits)(value <= bar));
    }
    u->sum += total(sum);
#endif
    memset(value, 0, sizeof value), memset(lost, 0, sizeof lost), memset(size, 0, sizeof size);
    for (; i < best->n; i++) {
        const int32_t j = best->place[i];
        value[n] = best->value[i], lost[n] = h->lost[j], size[n] = h->size[j];
        n += !(best->value[i] > bar || (best->value[i] == bar && equal-- > 0));
        if (n == LANES || i + 1 == best->n)
            u->sum += total((vec)((bits)term_of(u, AT(value), AT(lost), AT(size)) & (bits)first_lanes(n))), n = 0;
    }
}

float bound_of(const Past *h, const Unread *u, int64_t j, float top, float scale, float part) {
    const double far = scale > 0 ? (double)part / scale : 0, left = 1 - SUMMED - far;
    const double rounding = (h->s.d + 16) * 0x1p-24 * LOG2E * u->size * h->reach[j];
    if (u->sum == 0) return (float)far;
    if (!(left > 0 && u->sum < INFINITY)) return 1;      /* too large to be told, or no number, of two such */
    const double read = top + log2(scale) + log2(left) - rounding, unread = u->top + log2(CHORDS * u->sum);
    const double most = 1 / (1 + exp2(read - unread));
    const float bound = (float)(most <= far ? far : most);
    return bound < LEAST ? LEAST : bound;                /* what underflows is not 0 */
}
