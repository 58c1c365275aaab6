/* How queries look at all keys of the past, and which of them they read: looks.c and opened.c, for recall.c. */

#pragma once

#include "past.h"

/* The pair of two numbers in bfloat16, each rounded to the nearest. */
INLINE uint32_t pair_of(const float *x) {
    uint32_t two[2];
    memcpy(two, x, sizeof two);
    for (int i = 0; i < 2; i++) two[i] += 0x7fff + (two[i] >> 16 & 1);
    return two[0] >> 16 | (two[1] & 0xffff0000u);
}

/* The place of the first query of block t, and how many there are. */
INLINE int64_t first_query(const Recall *c, int64_t t) {
    return t * c->block > c->S - c->L ? t * c->block : c->S - c->L;
}
INLINE int64_t queries_of(const Recall *c, int64_t t) {
    return least_of((t + 1) * c->block, c->S) - first_query(c, t);
}

/* `factor` times the query at place j of head g of the group. */
INLINE void load_query(const Past *h, float factor, int64_t g, int64_t j, float *q) {
    const Recall *c = h->c;
    put_row(q, factor, of(c->x, h->z, g) + (j - c->S + c->L) * c->x.token, h->s.d);
    for (int p = h->s.d; p < h->s.dp; p++) q[p] = 0;
}

#pragma GCC visibility push(hidden)

/* to (R, LOOKED): the products of R queries (R, dp / 2), AT_ONCE at most, with n keys of panels that lie `step` numbers
   apart, LOOKED keys at most. There is memory for AT_ONCE queries and their products, and for the panels of n keys
   rounded up to FOUR. */
void look_at(const uint32_t *queries, int R, int dp, const uint32_t *panels, int step, int n, float *to);

/* AHEAD queries from the i-th of block t on, and on to the next blocks for which the same keys are heavy, look at the
   keys that are far from block t. */
void look_ahead(Past *h, int64_t t, int64_t i);

/* The next R queries, of one block, look at the other keys that are far from it. */
void look_further(Past *h, int R);

/* The places of the keys that the next query reads, `open` at most; returns how many. */
int take_best(Past *h, int32_t *places);

/* Numbers that are kept of the keys that a query has looked at. */
size_t room_for_best(int64_t open);

#pragma GCC visibility pop
