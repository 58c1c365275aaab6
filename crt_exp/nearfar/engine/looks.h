/* How queries look at all keys of the past, and which of them they read: looks.c and opened.c, for recall.c. */

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
   processors multiply is one with a sign by one without; so products begin at `bias_of` a query. There is memory for
   AT_ONCE queries and their products, and for the panels of n keys rounded up to FOUR. */
void look_at(const int8_t *queries, const int32_t *bias, int R, int dp, const uint8_t *panels, int64_t step, int n,
             int32_t *to);

/* Keys before the place `stop`, of which those before h.paneled are there, to panels. */
void to_panels(Past *h, int64_t stop);

/* The places of the `open` keys that each query that is ahead reads. */
void choose_keys(Past *h, int open);

/* Looks that are kept of the keys that a query has looked at. */
size_t room_for_best(int64_t open);

#pragma GCC visibility pop
