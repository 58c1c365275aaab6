/* How queries look at all keys of the past, which of them they read, and what the others weigh at most: looks.c, opened.c
   and unread.c, for recall.c and, of all that lie in cells, for asked.c. */

#pragma once

#include "past.h"

#pragma GCC visibility push(hidden)

typedef int32_t stored_ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* 0, 1, 2, ... */
INLINE ivec lane_numbers(void) {
    static const int32_t lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    ivec lane;
    memcpy(&lane, lanes, sizeof lane);
    return lane;
}

/* A vector (dp) times random signs and Hadamard matrices. */
void turn(const float *from, int dp, float *x);

/* A turned vector (dp) as whole numbers of at most 127 in magnitude, times the step that this returns. */
float whole_of(const float *turned, int dp, int8_t *to);

INLINE int32_t bias_of(const int8_t *query, int dp) {
    int32_t sum = 0;
    for (int p = 0; p < dp; p++) sum += query[p];
    return -128 * sum;
}

/* to (R, LOOKED): the products of R queries (R, dp), AT_ONCE at most, with n keys, LOOKED at most, of panels that lie
   `step` numbers apart. Panels (dp / 4, PANEL) hold four numbers of each key, each 128 more than the number: what
   processors multiply is one with a sign by one without; so products begin at `bias_of` a query. There is memory for AT_ONCE queries and their products, and for the panels of n keys rounded up to
   FOUR. */
void look_at(const int8_t *queries, const int32_t *bias, int R, int dp, const uint8_t *panels, int64_t step, int n,
             int32_t *to);

/* Keys before the place `stop`, of which those before h.paneled are there, to panels. */
void to_panels(Past *h, int64_t stop);

/* The places of the `open` keys that each query that is ahead reads. */
void choose_keys(Past *h, int open);

/* A turned vector (dp), its whole numbers and their step: how far apart these are, and as a query that has read nothing. */
Apart apart_of(const float *turned, int dp, const int8_t *whole, float step);
Unread unread_by(const float *turned, int dp, const int8_t *whole, float step);

/* Sums of what is not read are over 2^top, a whole number, which follows the bar; what is summed up exceeds it by what
   rounding took. */
void raise_to(Unread *u, float bar);

/* Keys of these looks over the step of the query, and of what they are `lost` and their `size`: e^logit over 2^top at most,
   as 2^t on a chord from one whole number to the next, which is what the bits of a float say, OCTAVE (t + 127), and up to
   6% more. Where t is no number or 128, infinity; from below -126, 2^-126. */
#define OCTAVE 0x1p23f

INLINE vec term_of(const Unread *u, vec value, vec lost, vec size) {
    const vec most = (vec){0} + 255 * OCTAVE, least = (vec){0} + OCTAVE;
    const vec t = value * u->each + (lost * u->near + (size * u->lost + u->from));
    return (vec)__builtin_convertvector(choose(t < most, maximum(t, least), most), ivec);
}

/* Adds to what is not read those of n keys from place j, of these looks, that do not exceed the bar; and those of the best
   that do not, but for the first `equal` that reach it. */
void add_below(const Past *h, Unread *u, const int32_t *looks, int64_t j, int n, float bar);
void add_dropped(const Past *h, Unread *u, const Best *best, float bar, int equal);

/* The largest |y| up to each place before `stop`. */
void reach_to(Past *h, int64_t stop);

/* How much of the weight of a query at place j may lie on other keys than it was given, whose weights, `part` of them in
   cells, sum up to `scale` over 2^top. */
float bound_of(const Past *h, const Unread *u, int64_t j, float top, float scale, float part);

/* Looks that are kept of the keys that a query has looked at. */
size_t room_for_best(int64_t open);

#pragma GCC visibility pop
