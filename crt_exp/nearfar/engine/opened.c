/* Which keys of the past a query reads: of those that lie in cells the `open` of the largest logits, in bfloat16.

   Keys are looked at by many queries at a time, so that they come from memory once for all of these. Each keeps those
   above its bar, which is raised as they get more. What a query sees of an eighth of the keys sets the first bar, at which
   it will most likely keep enough; where it does not, it looks at all of them again. */

#include "looks.h"

/* ---- The largest of many ---- */

/* Those above a bar, and the others where they are wanted. */
INLINE void part(const Some *from, float bar, Some *more, Some *rest) {
    more->n = 0;
    if (rest) rest->n = 0;
    int i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= from->n; i += 16) {
        const __m512 value = _mm512_loadu_ps(from->value + i);
        const __m512i place = _mm512_loadu_si512(from->place + i);
        const __mmask16 high = _mm512_cmp_ps_mask(value, _mm512_set1_ps(bar), _CMP_GT_OQ), low = ~high;
        _mm512_storeu_ps(more->value + more->n, _mm512_maskz_compress_ps(high, value));
        _mm512_storeu_si512(more->place + more->n, _mm512_maskz_compress_epi32(high, place));
        more->n += __builtin_popcount(high);
        if (!rest) continue;
        _mm512_storeu_ps(rest->value + rest->n, _mm512_maskz_compress_ps(low, value));
        _mm512_storeu_si512(rest->place + rest->n, _mm512_maskz_compress_epi32(low, place));
        rest->n += __builtin_popcount(low);
    }
#endif
    for (; i < from->n; i++) {
        const int high = from->value[i] > bar;
        more->value[more->n] = from->value[i], more->place[more->n] = from->place[i];
        more->n += high;
        if (!rest) continue;
        rest->value[rest->n] = from->value[i], rest->place[rest->n] = from->place[i];
        rest->n += !high;
    }
}

INLINE Some behind(Some s, int n) { return (Some){s.value + n, s.place + n, s.n - n}; }

/* The largest and the least of some numbers, but for those that are HIDDEN. Returns a guess at what k of them exceed:
   what as many of a normal law would. */
INLINE float range(Some s, int k, float *most, float *least) {
    vec high = {0}, low = {0}, sum = {0}, square = {0}, count = {0};
    high += HIDDEN, low -= HIDDEN;
    int i = 0;
    for (; i + LANES <= s.n; i += LANES) {
        const vec here = AT(s.value + i), one = (vec){0} + 1.0f;
        const ivec there = here > HIDDEN;
        const vec seen = choose(there, here, (vec){0});
        high = maximum(high, here);
        low = minimum(low, choose(there, here, low));
        sum += seen, square += seen * seen, count += choose(there, one, (vec){0});
    }
    *most = largest(high), *least = -largest(-low);
    float n = total(count), mean = total(sum), moment = total(square);
    for (; i < s.n; i++) {
        *most = s.value[i] > *most ? s.value[i] : *most;
        *least = s.value[i] > HIDDEN && s.value[i] < *least ? s.value[i] : *least;
    }
    if (!(n > 2 * k)) return 0.5f * (*most + *least);
    mean /= n, moment = moment / n - mean * mean;
    const float t = sqrtf(-2 * logf(k / n));                     /* Hastings' rational approximation of the quantile */
    const float quantile = t - (2.30753f + 0.27061f * t) / (1 + t * (0.99229f + 0.04481f * t));
    return mean + sqrtf(moment > 0 ? moment : 0) * quantile;
}

/* The k largest of some numbers, of those above HIDDEN, come first in `to`, with their places. Returns how many there
   are. */
static int select_largest(Some from, int k, Some to, const Some spare[2]) {
    float most, least;
    int taken = 0;
    const float guess = range(from, k + k / 8 + 4, &most, &least);
    if (guess < most && guess > least) {                         /* most likely the k largest are above */
        Some more = spare[0];
        part(&from, guess, &more, NULL);
        if (more.n >= k) from = more, least = guess;
    }
    while (taken < k) {
        const float bar = from.n <= k - taken ? HIDDEN : 0.5f * (most + least);
        Some more = behind(to, taken), rest = spare[from.value == spare[0].value];
        if (bar == HIDDEN || !(bar < most && bar > least)) {     /* all that are left, or any, being alike */
            part(&from, HIDDEN, &more, &rest);
            return taken + (int)least_of(more.n, k - taken);
        }
        part(&from, bar, &more, &rest);
        if (more.n > k - taken) {
            memcpy(rest.value, more.value, sizeof(float) * more.n);
            memcpy(rest.place, more.place, sizeof(int32_t) * more.n);
            rest.n = more.n, least = bar;
        } else {
            taken += more.n, most = bar;
        }
        from = rest;
    }
    return k;
}

/* ---- Looking ---- */

/* One of SHARE panels sets the first bar, where they hold MANY times as many keys as are read; so many standard
   deviations more than these are let through. */
enum { SHARE = 8, MANY = 2, SURELY = 3 };

/* Where more are kept, the bar is raised. */
INLINE int most_kept(int64_t open) { return (int)(2 * open > LOOKED ? 2 * open : LOOKED); }

size_t room_for_best(int64_t open) { return most_kept(open) + LOOKED + 2 * PAD; }

/* The k largest alone, where there are as many; returns the least of them, or HIDDEN. */
static float keep_largest(Work *k, int most, Some *best) {
    if (best->n < most) return HIDDEN;
    best->n = select_largest(*best, most, k->chosen, k->spare);
    memcpy(best->value, k->chosen.value, sizeof(float) * best->n);
    memcpy(best->place, k->chosen.place, sizeof(int32_t) * best->n);
    float least = best->value[0];
    for (int i = 1; i < best->n; i++) least = best->value[i] < least ? best->value[i] : least;
    return least;
}

/* Adds those of n keys that lie in cells and whose logits exceed a bar. The first is at place j, and panels follow each
   other `share` panels apart. */
static void add_above(const Seen *s, const float *looks, int64_t j, int n, int share, float bar, Some *best) {
    float *value = best->value;
    int32_t *place = best->place;
    int i = 0, count = best->n;
#if defined(__AVX512F__)
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i none = _mm512_setzero_si512();
    const __m512 above = _mm512_set1_ps(bar);
    for (; i + PANEL <= n; i += PANEL) {
        const __m512 here = _mm512_loadu_ps(looks + i);
        const __m512i cell = _mm512_loadu_si512(s->cell + j + i * share);
        const __mmask16 high = _mm512_mask_cmp_ps_mask(_mm512_cmpge_epi32_mask(cell, none), here, above, _CMP_GT_OQ);
        const __m512i places = _mm512_add_epi32(_mm512_set1_epi32((int)j + i * share), first);
        _mm512_storeu_ps(value + count, _mm512_maskz_compress_ps(high, here));
        _mm512_storeu_si512(place + count, _mm512_maskz_compress_epi32(high, places));
        count += __builtin_popcount(high);
    }
#endif
    for (; i < n; i++) {
        const int64_t at = j + i / PANEL * PANEL * share + i % PANEL;
        value[count] = looks[i], place[count] = (int32_t)at;
        count += looks[i] > bar && s->cell[at] >= 0;
    }
    best->n = count;
}

/* R queries from the r-th on look at n keys from place j, the first of a panel, or of one of `share` panels, but for the
   first `known` of them; they keep their `most` best, or more. */
static void look(Past *h, int r, int R, int64_t j, int64_t n, int known, int share, int most) {
    const Seen *s = &h->s;
    Work *k = &h->k;
    const int panel = PANEL * s->dp / 2;
    for (; n > 0; j += LOOKED * share, n -= LOOKED, known = 0)
        for (int i = r; i < r + R; i += AT_ONCE) {
            const int here = (int)least_of(AT_ONCE, r + R - i), keys = (int)least_of(LOOKED, n);
            look_at(k->pairs + i * s->dp / 2, here, s->dp, s->panels + j / PANEL * panel, share * panel, keys, k->looks);
            for (int e = 0; e < here; e++) {
                Some *best = &k->best[i + e];
                add_above(s, k->looks + e * LOOKED + known, j + known, keys - known, share, k->bar[i + e], best);
                if (best->n > most_kept(most)) k->bar[i + e] = keep_largest(k, most, best);
            }
        }
}

/* The first bars: many enough of the keys of some panels exceed them, so that most likely `open` of all do. */
static void set_bars(Past *h) {
    const Seen *s = &h->s;
    Work *k = &h->k;
    const float expected = (float)s->open / SHARE;
    const int most = (int)(expected + SURELY * sqrtf(expected)) + 1;
    look(h, 0, k->ahead, 0, s->near / (FOUR * SHARE) * FOUR, 0, SHARE, most);
    for (int r = 0; r < k->ahead; r++) {
        k->bar[r] = keep_largest(k, most, &k->best[r]);
        k->best[r].n = 0;
    }
}

void look_ahead(Past *h, int64_t t, int64_t i) {
    const Recall *c = h->c;
    const Seen *s = &h->s;
    Work *k = &h->k;
    k->taken = k->ahead = 0, k->seen = s->near;
    for (; k->ahead < AHEAD; i++) {
        if (i == queries_of(c, t) * c->G) {
            t++, i = 0;
            if (t * c->block >= c->S || t * c->block == following(h->start, c->block)) break;
        }
        const int64_t tokens = queries_of(c, t);
        load_query(h, (float)c->factor, i / tokens, first_query(c, t) + i % tokens, k->Q);
        for (int p = 0; p < s->dp; p += 2) k->pairs[(k->ahead * s->dp + p) / 2] = pair_of(k->Q + p);
        k->bar[k->ahead] = HIDDEN, k->best[k->ahead].n = 0;
        k->ahead++;
    }
    if (s->near >= MANY * SHARE * s->open) set_bars(h);
    look(h, 0, k->ahead, 0, s->near, 0, 1, s->open);
}

void look_further(Past *h, int R) {
    const int known = h->k.seen % PANEL;
    look(h, h->k.taken, R, h->k.seen - known, h->s.near - h->k.seen + known, known, 1, h->s.open);
}

int take_best(Past *h, int32_t *places) {
    const Seen *s = &h->s;
    Work *k = &h->k;
    const int r = k->taken++;
    Some *best = &k->best[r];
    if (best->n < s->open && k->bar[r] > HIDDEN) {               /* the first bar was too high */
        best->n = 0, k->bar[r] = HIDDEN;
        look(h, r, 1, 0, s->near, 0, 1, s->open);
    }
    const int read = select_largest(*best, s->open, k->chosen, k->spare);
    memcpy(places, k->chosen.place, sizeof(int32_t) * read);
    return read;
}
