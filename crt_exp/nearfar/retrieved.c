/* Which keys of the past queries retrieve: of those that lie in cells so many of the largest logits, as whole
   numbers tell them, of equal ones the first.

   Keys are scored by many queries at a time, so that they come from memory once for all of these. Each keeps those
   above its bar, which is raised as they get more. What a query sees of a part of the keys sets the first bar, at
   which it will most likely keep enough; where it does not, it scores all of them again. */

#include "past.h"

/* ---- The largest of many ---- */

INLINE int above(const float *value, int n, float bar) {
    int count = 0, i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= n; i += 16)
        count += __builtin_popcount(_mm512_cmp_ps_mask(_mm512_loadu_ps(value + i), _mm512_set1_ps(bar), _CMP_GT_OQ));
#endif
    for (; i < n; i++) count += value[i] > bar;
    return count;
}

/* A little less, also where it is 0 and denormal numbers count as that. */
INLINE float below(float x) { return x - fabsf(x) * 1e-6f - 1e-37f; }

/* The least and the largest of n numbers, and a guess at what k of them exceed: what as many of a normal law would. */
static float range(const float *value, int n, int k, float *least, float *most) {
    vec sums = {0}, squares = {0}, low = {0}, high = {0};
    int i = 0;
    low += value[0], high += value[0];
    for (; i + LANES <= n; i += LANES) {
        const vec here = AT(value + i);
        sums += here, squares += here * here, low = minimum(low, here), high = maximum(high, here);
    }
    *least = -largest(-low), *most = largest(high);
    const float count = i > 0 ? i : 1, mean = total(sums) / count, moment = total(squares) / count - mean * mean;
    for (; i < n; i++) *least = value[i] < *least ? value[i] : *least, *most = value[i] > *most ? value[i] : *most;
    const float part = (float)k / n, t = sqrtf(-2 * logf(part < 0.5f ? part : 1 - part));
    const float quantile = t - (2.30753f + 0.27061f * t) / (1 + t * (0.99229f + 0.04481f * t));    /* Hastings */
    return mean + sqrtf(moment > 0 ? moment : 0) * (part < 0.5f ? quantile : -quantile);
}

/* Of more than k numbers, all finite: a bar which k to `most` of them exceed; or where equal ones leave none, the
   largest that fewer exceed and k reach. */
static float bar_of(const float *value, int n, int k, int most) {
    float low, high, bar = range(value, n, k, &low, &high);
    low = below(low);
    for (int step = 0, over = n, under = 0;; step++) {
        if (!(bar > low && bar < high)) bar = low + (high - low) / 2;
        if (!(bar > low && bar < high)) return high;
        const int count = above(value, n, bar);
        if (count >= k && count <= most) return bar;
        if (count > most) low = bar, over = count;
        else high = bar, under = count;
        const float part = step % 3 == 2 ? 0.5f : (k + 0.5f - under) / (over - under + 1);
        bar = high - (high - low) * part;
    }
}

/* Keeps those above a bar, which k of them exceed, or, where they are equal ones, reach: these alone, the first
   ones. */
static void keep_above(Best *best, float bar, int k) {
    float *value = best->value;
    int32_t *place = best->place;
    int equal = k - above(value, best->n, bar), count = 0, i = 0;
#if defined(__AVX512F__)
    for (; equal <= 0 && i + 16 <= best->n; i += 16) {
        const __m512 here = _mm512_loadu_ps(value + i);
        const __m512i places = _mm512_loadu_si512(place + i);
        const __mmask16 high = _mm512_cmp_ps_mask(here, _mm512_set1_ps(bar), _CMP_GT_OQ);
        _mm512_storeu_ps(value + count, _mm512_maskz_compress_ps(high, here));
        _mm512_storeu_si512(place + count, _mm512_maskz_compress_epi32(high, places));
        count += __builtin_popcount(high);
    }
#endif
    for (; i < best->n; i++) {
        const int stays = value[i] > bar || (value[i] == bar && equal-- > 0);
        value[count] = value[i], place[count] = place[i];
        count += stays;
    }
    best->n = count;
    best->bar = bar > best->bar ? bar : best->bar;
}

/* ---- Scores ---- */

/* One of SHARE panels sets the first bar, where they hold as many keys as are read; so many standard deviations more
   than these are let through. CACHED keys stay in the cache. */
enum { SHARE = 16, SURELY = 3, CACHED = 32 * SCORED };

/* Where more are kept, the bar is raised. */
INLINE int most_kept(int64_t open) { return (int)(4 * open > SCORED ? 4 * open : SCORED); }

size_t room_for_best(int64_t open) { return most_kept(open) + SCORED + 2 * PAD; }

/* Adds those of n keys that lie in cells and whose logits, over the step of the query, exceed the bar. The first is at
   place j, and panels follow each other `share` panels apart. */
INLINE void add_above(const Past *h, const int32_t *scores, int64_t j, int n, int share, Best *best) {
    const float *valid_step = h->valid_step + j;
    float *value = best->value;
    int32_t *place = best->place;
    int i = 0, count = best->n;
#if defined(__AVX512F__)
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 bar = _mm512_set1_ps(best->bar);
    for (; i + PANEL <= n; i += PANEL) {
        const __m512 here = _mm512_cvtepi32_ps(_mm512_loadu_si512(scores + i)) * _mm512_loadu_ps(valid_step + i * share);
        const __mmask16 high = _mm512_cmp_ps_mask(here, bar, _CMP_GT_OQ);
        const __m512i places = _mm512_add_epi32(_mm512_set1_epi32((int)j + i * share), first);
        _mm512_storeu_ps(value + count, _mm512_maskz_compress_ps(high, here));
        _mm512_storeu_si512(place + count, _mm512_maskz_compress_epi32(high, places));
        count += __builtin_popcount(high);
    }
#endif
    for (; i < n; i++) {
        const int64_t at = i / PANEL * PANEL * share + i % PANEL;
        value[count] = (float)scores[i] * valid_step[at], place[count] = (int32_t)(j + at);
        count += value[count] > best->bar;
    }
    best->n = count;
}

/* AT_ONCE queries at most, from the i-th on, score n keys from place j, the first of a panel, or of one of `share`
   panels, as far as they are far from them; they keep their k best, or more. */
static void score_part(Past *h, int i, int R, int64_t j, int64_t n, int share, int k) {
    Work *w = &h->k;
    const int64_t panel = PANEL * h->dp;
    for (; n > 0; j += SCORED * share, n -= SCORED) {
        const int keys = (int)least_of(SCORED, n);
        score_keys(w->whole + i * h->dp, w->bias + i, R, h->dp, h->panels + j / PANEL * panel, share * panel, keys, w->scores);
        for (int e = 0; e < R; e++) {
            Best *best = &w->best[i + e];
            const int own = (int)least_of(keys, w->query[i + e].far - j);
            if (own > 0) add_above(h, w->scores + e * SCORED, j, own, share, best);
            if (best->n > most_kept(k)) keep_above(best, bar_of(best->value, best->n, k, k + k / 4), k);
        }
    }
}

/* Queries [r, stop): some keys at a time, which stay in the cache, as does what few queries keep. */
static void score(Past *h, int r, int stop, int64_t j, int64_t n, int share, int k) {
    for (; n > 0; j += CACHED * share, n -= CACHED)
        for (int i = r; i < stop; i += AT_ONCE)
            score_part(h, i, (int)least_of(AT_ONCE, stop - i), j, least_of(CACHED, n), share, k);
}

/* The first bars: many enough of the keys of some panels exceed them, so that most likely `open` of all do. */
static void set_bars(Past *h, int64_t open) {
    const float expected = (float)open / SHARE;
    const int k = (int)(expected + SURELY * sqrtf(expected)) + 1;
    score(h, 0, h->k.ahead, 0, h->k.query[0].far / (FOUR * SHARE) * FOUR, SHARE, k);
    for (int r = 0; r < h->k.ahead; r++) {
        Best *best = &h->k.best[r];
        if (best->n > k) best->bar = below(bar_of(best->value, best->n, k, k + k / 8));         /* equal ones pass */
        best->n = 0;
    }
}

void retrieve(Past *h, int open) {
    Work *k = &h->k;
    const int64_t far = k->query[k->ahead - 1].far;
    to_panels(h, far);
    for (int r = 0; r < k->ahead; r++) k->best[r].bar = HIDDEN, k->best[r].n = 0;
    if (k->query[0].far >= SHARE * open) set_bars(h, open);
    score(h, 0, k->ahead, 0, far, 1, open);
    for (int r = 0; r < k->ahead; r++) {
        Best *best = &k->best[r];
        if (best->n < open && best->bar > HIDDEN) {           /* the first bar was too high */
            best->n = 0, best->bar = HIDDEN;
            score(h, r, r + 1, 0, k->query[r].far, 1, open);
        }
        if (best->n > open) keep_above(best, bar_of(best->value, best->n, open, open), open);
        k->count[r] = best->n;
        memcpy(k->places + r * h->open, best->place, sizeof(int32_t) * best->n);
    }
}
