/* What the kernels of near-far attention share. One thread takes one head (of keys, with the G query heads that
   share it).

   Notation as in nearfar/call.py: Z heads of keys, G query heads of each, L queries of S keys, d, dv; N blocks of b
   tokens, n heavy hitters, K clusters. Queries of another sequence (`cross`) have no near keys, so that L may be any
   number. Queries x, keys y less their shift, values v; z = y root, w = y.tilt; u_j = exp(w_j - level of the cluster).
   Rows with d columns are dp apart, with dv + 1 columns lv. */

#pragma once

#include "vectors.h"

/* Numbers that Python shares: choice.py reads them from here. */
#define DRAWN 16        /* keys for each cluster, or up to twice as many, of which centres are made */
#define MIXED 40507     /* of positions: what decides which of some keys is number */
#define AWAY 1e15f      /* where centres lie for which there is no key */
#define RENEWED 128     /* tokens between renewals at least, */
#define PART 2          /* and as a part of the sequence so far: a half */
#define GROWS 2304      /* tokens from which on queries read more keys, as the root of the position of the renewal */
#define PICKS 8         /* centres that are chosen at a time */
#define RIDGE 1e-4      /* of the mean square of queries, added to their second moments: above what float32 rounds away
                           where they lie in few directions */
#define SAME 1e-6f      /* squared distances that are a smaller part of the squared length are those of equal vectors */
#define SHARPEST 1e-6f  /* the least deviation of the logits of a cluster, nats */
#define LEAST 1e-30f    /* weights below it count as none */
#define HIDDEN (-1e30f) /* the logit of a key that is not there */
#define WIDEST 255      /* gaps between retrieved keys, from which on they take another byte */
#define TURNED 16       /* columns of vectors that are scored in 8 bits are a multiple of it */
#define SIGNS 2654435769 /* whose multiples decide by which signs these are turned */

/* A call of the library, in both directions, to another sequence or causal. */
typedef struct {
    int64_t Z, G, L, S, d, dv, block, heavy, clusters, first_order, cross;
    int64_t open, least, until;        /* causal, as are all of the next line: keys that the last and the first queries
                                          retrieve, the first renewal */
    int64_t room, bytes, threads;      /* tokens; a head's memory of gaps; of the processor */
    double factor;                     /* of queries and keys as they are given */
    View x, y, v, out;                 /* batch: head of keys; head: query head of it. Causal: the last L queries */
    View grad, dx, dy, dvalues;        /* of the backward pass */
    const uint8_t *keep;               /* (Z, S), or null */
    float *shift, *tilt, *root, *centres;  /* (Z, d), (Z, d), (Z, d, d), (Z, K, d) */
    int64_t *positions, *cluster;            /* (Z, n) of heavy hitters, (Z, S) */
    uint8_t *there, *pool;             /* (Z, n), (Z, S) */
    float *u, *square;                 /* (Z, S): |z - centre|^2 */
    float *level, *sums, *spread, *slope;  /* (Z, K), (Z, K, d + 2), (Z, K), (Z, dv, d) */
    float *logsum;                     /* (Z, G, L): base 2 */
    uint8_t *gaps;                   /* (Z, bytes): between the keys that are retrieved, see put_gaps; null: not kept */
    int64_t *gaps_at;                  /* (Z, G, L): where those of a query begin */
    float *kept;                       /* (Z, near_far_causal_size): of decoding, for at most `room` tokens; or null */
} NearFar;

INLINE int64_t least_of(int64_t a, int64_t b) { return a < b ? a : b; }

/* log2 to 2e-6, which is enough to choose by; -inf at 0. */
INLINE vec log2_of(vec t) {
    ivec exponent = (ivec)((bits)t >> 23) - 127;
    vec m = (vec)(((bits)t & 0x7fffff) | 0x3f800000) - 1.5f;
    vec p = -0.0251232033f * m + 0.0439286278f;
    p = p * m - 0.0705896757f;
    p = p * m + 0.141718159f;
    p = p * m - 0.320632333f;
    p = p * m + 0.961821228f;
    p = p * m + 0.584962765f;
    return choose(t > 0.0f, p + __builtin_convertvector(exponent, vec), (vec){0} - INFINITY);
}

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

enum { QUERIES = 64, SEGMENT = 256 };  /* of a piece; tokens of a segment, unless one block has more */

/* A head in both directions or across. R queries of a piece, `most` at most; M = n + K shared keys: heavy hitters, then
   the means mu of clusters. A state (K, lv) holds sums [V, N] of u [v, 1] over the keys of some blocks; segments have T
   blocks. Logs and logits are in base 2. */
typedef struct {
    const NearFar *c;
    int64_t z, N, T, segments;
    int d, dp, dv, lv, b, n, K, M, most;
    const uint8_t *pool;
    const int64_t *cluster;
    const float *shift;
    float *u, *square, *sums;          /* (S), (S), (K, d + 2) */
    float *tilt, *root, *rootT, *moments;  /* (dp), (d, dp): root, its transpose, their product */
    float *centres, *off, *spread;     /* (K, dp) twice: centres, and means as z less these; (K) */
    float *keys, *values;           /* (M, dp), (M, lv): of shared keys; the values of clusters are those for a block */
    float *bias, *high, *mass;         /* (M): of logits; powers of two above N; N */
    float *total, *before, *after;    /* states of all blocks; of those before a block that are far from it; (T, K, lv):
                                          of those behind each block of a segment */
    float *marks;                      /* (segments, K, lv): states behind the last block of each */
    float *y, *zs, *work;              /* (CHUNK, dp) twice, (K or CHUNK, dp or lv): keys of a chunk */
    float *slope, *slopeT, *weight;    /* (dv, dp), (d, lv), (K): C and e^(level - the highest) */
    float *doubles;                    /* (K, d + 2), of doubles */
    float *Y, *V, *hidden;             /* (3 b, dp or lv), (3 b): keys of the window, 0 outside the pool, [v, 1] */
    float *A, *B;                      /* (3 b + M, most): weights, and gradients to logits */
    float *Q, *X, *Qt, *O, *P;         /* (most, dp): queries, these less the tilt; (d, most); (most, dp or lv) twice */
    float *top, *scale, *part;         /* (most): log-sums; 1 / sums; shares of the clusters */
    int64_t group[QUERIES], token[QUERIES];  /* of the queries of a piece */
    float *G, *Gt, *Gs;                /* (most, lv), (dv + 1, most), (most, lv) */
    float *dY, *dV, *dkeys, *dvalues;  /* gradients: as Y, V; (M, dp); (n, lv) */
    float *dstates, *dwhole;           /* to states: (T, K, lv) of a segment's blocks, (segments, K, lv) of segments, */
    float *dbefore, *dafter, *gain;    /* (K, lv) sums over earlier blocks and later segments; (S): to log weights */
    float *dbias, *dsums;              /* (K); (K, dp + PAD): the mean |z - centre|^2 in column dp, N in dp + 1 */
    float *back;                       /* (K, dp): off root^T */
    float *dslope, *dslopeT;           /* as slope, slopeT */
    float *to_y, *to_v;                /* (CHUNK, dp or lv) */
    float dslope_slope;                /* their inner product, over the mass */
} Head;

/* A block of queries, which sees `near` keys of the window. */
typedef struct {
    int64_t t;
    int tokens, near;
} Block;

INLINE int in_block(const Head *e, int64_t s) { return (int)least_of(e->c->S - s * e->b, e->b); }
INLINE float *key_of(const Head *e, View view, int64_t j) { return of(view, e->z, 0) + j * view.token; }

#pragma GCC visibility push(hidden)

/* Heavy hitters of head z, by the scores (S) of its keys: their positions, and the pool of the others. */
void find_heavy(const NearFar *c, int64_t z, const float *score);

/* Which of the centres (K, dp), of squares |c|^2, is nearest to each of n <= CHUNK keys Zt (d, CHUNK); dots (K, CHUNK)
   is scratch memory. */
void find_nearest(int K, int d, const float *centres, const float *squares, const float *Zt, int n, float *dots,
                  int32_t *nearest);

/* Centres (K, dp) of clusters, as z, of the keys of one head (Z = 1) whose measure is given, with weights (S);
   `cluster` is written, and the scratch memory of the thread. Returns 0 where memory ended. */
int centres_of(const NearFar *c, const float *weight, float *centres);

/* The next functions are those of forward.c that backward.c needs too. */

/* Runs `body` for each head, with its scratch memory; for the backward pass more of it. */
int each_near_far_head(const NearFar *c, int backward, void (*body)(Head *e));

/* Means, biases and states of the clusters, from their sums. */
void clusters_as_keys(Head *e);

/* V (K, lv) of all keys of the clusters, by how their weights compare, in `work`; returns the sum of these weights. */
float weighted_values(Head *e);
void load_slope(Head *e);

/* Values of keys [start, start + n), times u and the weights of their clusters, in `work`. */
void weigh_values(Head *e, int64_t start, int n);

/* Block t, with its window and the states that it sees. */
Block next_block(Head *e, int64_t t);

/* Queries [i, i + R) of a block, those of one query head after the other, and the logits of their keys, less biases. */
void load_queries(Head *e, const Block *at, int i, int R);

/* Logits become e^(logit - top), in binary units; their sums in `scale`, those of clusters in `part`. */
void exponentiate(Head *e, const Block *at, int ld);
#pragma GCC visibility pop

INLINE float *query_of(const Head *e, View view, int r) {
    return of(view, e->z, e->group[r]) + e->token[r] * view.token;
}

INLINE int64_t number_of(const Head *e, int r) { return (e->z * e->c->G + e->group[r]) * e->c->L + e->token[r]; }
