/* What the kernels of near-far attention share. One thread takes one head (of keys, with the G query heads that
   share it).

   Notation as in nearfar/call.py: Z heads of keys, G query heads of each, L queries of S keys, d, dv; N blocks of b
   tokens, n heavy keys, K cells. Queries of another sequence (`cross`) have no near keys, so that L may be any
   number. Queries x, keys y less their shift, values v; z = y root, w = y.tilt; u_j = exp(w_j - level of the cell).
   Rows with d columns are dp apart, with dv + 1 columns lv. */

#pragma once

#include "constants.h"
#include "vectors.h"

/* A call of the library, in both directions, to another sequence or causal. */
typedef struct {
    int64_t Z, G, L, S, d, dv, block, heavy, cells, first_order, cross;
    int64_t open, least, until;        /* causal, as are all of the next line: keys that the last and the first queries
                                          retrieve, the first renewal */
    int64_t room, bytes, threads;      /* tokens; a head's memory of gaps; of the processor */
    double factor;                     /* of queries and keys as they are given */
    View x, y, v, out;                 /* batch: head of keys; head: query head of it. Causal: the last L queries */
    View grad, dx, dy, dvalues;        /* of the backward pass */
    const uint8_t *keep;               /* (Z, S), or null */
    float *shift, *tilt, *root, *centres;  /* (Z, d), (Z, d), (Z, d, d), (Z, K, d) */
    int64_t *places, *cell;            /* (Z, n) of heavy keys, (Z, S) */
    uint8_t *there, *pool;             /* (Z, n), (Z, S) */
    float *u, *square;                 /* (Z, S): |z - centre|^2 */
    float *level, *sums, *spread, *slope;  /* (Z, K), (Z, K, d + 2), (Z, K), (Z, dv, d) */
    float *logsum, *share;             /* (Z, G, L): base 2; the weight of the cells */
    uint8_t *gaps;                     /* (Z, bytes): between the keys that are retrieved, see put_gaps; null: not kept */
    int64_t *gaps_at;                  /* (Z, G, L): where those of a query begin */
    float *kept;                       /* (Z, near_far_recall_size): of decoding, for at most `room` tokens; or null */
} NearFar;

INLINE int64_t least_of(int64_t a, int64_t b) { return a < b ? a : b; }

/* to += factor from */
INLINE void add_row(float *to, float factor, const float *from, int64_t n) {
    int64_t p = 0;
    for (; p + LANES <= n; p += LANES) AT(to + p) += factor * AT(from + p);
    for (; p < n; p++) to[p] += factor * from[p];
}

/* to = factor from */
INLINE void put_row(float *to, float factor, const float *from, int n) {
    int p = 0;
    for (; p + LANES <= n; p += LANES) AT(to + p) = factor * AT(from + p);
    for (; p < n; p++) to[p] = factor * from[p];
}

/* Centres (K, dp) of cells, as z, of the keys of one head (Z = 1) whose measure is given, with weights (S); `cell` is
   written, and the scratch memory of the thread. Returns 0 where memory ended. */
#pragma GCC visibility push(hidden)
int centres_of(const NearFar *c, const float *weight, float *centres);
#pragma GCC visibility pop
