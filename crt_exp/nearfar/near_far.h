/* What the kernels of near-far attention share. One thread takes one head (of keys, with the G query heads that
   share it).

   Notation as in nearfar/call.py: Z heads of keys, G query heads of each, L queries of S keys, d, dv; N blocks of b
   tokens, n heavy hitters, K clusters. Queries of another sequence (`cross`) have no near keys, so that L may be any
   number. Queries x, keys y less their shift, values v; z = y root, w = y.tilt; u_j = exp(w_j - level of the cluster).
   Rows with d columns are dp apart, with dv + 1 columns lv. */

#pragma once

#include "vectors.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

/* Numbers that Python shares: choice.py reads them from here. */
#define DRAWN 16        /* keys for each cluster, or up to twice as many, of which centres are made */
#define MIXED 40507     /* of positions: what decides which of some keys is sampled */
#define AWAY 1e15f      /* where centres lie for which there is no key */
#define RENEWED 128     /* tokens between renewals at least, */
#define PART 2          /* and as a part of the sequence so far: a half */
#define GROWS 2304      /* tokens from which on queries retrieve more, as the root of the position of the renewal */
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

/* ---- Causal: a head with its past ---- */

enum { PIECE = 48, AT_ONCE = 32, AHEAD = 256 };    /* queries of a piece; that are scored at once, and that are ahead */
enum { PANEL = 16, FOUR = 64, SCORED = 128 };          /* keys of a panel, of four, and that are scored at once */
enum { NEARBY = 1 << 17 };                             /* numbers of the retrieved keys before those behind them */

/* How many keys queries behind a renewal at this position retrieve, at most `open`: `Sizes.opens` of choice.py. */
INLINE int64_t opens_at(const NearFar *c, int64_t position) {
    const int64_t square = c->least * c->least * (position > GROWS ? position : GROWS) / GROWS;
    int64_t root = (int64_t)sqrt((double)square);
    while (root * root > square) root--;
    while ((root + 1) * (root + 1) <= square) root++;
    return least_of(root, c->open);
}

/* 8-bit scores and the positions of their keys, which rise; behind the last there is room for a whole vector. All that
   exceed `threshold` are there. */
typedef struct {
    float *value, threshold;
    int32_t *position;
    int n;
} Best;

/* A query that is ahead: head g of the group at position j; the keys before `far` are far from its block. */
typedef struct {
    int64_t g, j;
    int32_t far;
} Query;

/* What queries that are ahead work with, most in pieces of at most PIECE. */
typedef struct {
    int ahead, taken;                        /* how many there are, and of these that are done */
    Query query[AHEAD];
    float *Q, *O, *top, *scale, *part;       /* (AHEAD, dp), in base 2, (AHEAD, lv), (AHEAD) thrice */
    int8_t *integers;                        /* (AHEAD, dp): queries as integers */
    int32_t *bias;                           /* (AHEAD), of scores */
    int32_t *scores;                         /* (AT_ONCE, SCORED) */
    Best best[AHEAD];
    float *retrieved;                        /* (AHEAD, room_for_retrieved): logits, then weights */
    int32_t *positions, *count, *from;       /* (AHEAD, open), of retrieved keys, rising; (AHEAD) twice */
    float *Qt, *A;                           /* of a piece: (d, PIECE), (2 b + n + K, PIECE) */
    float *number, *threshold, *along, *turned;/* of a piece, what is left in the clusters: (K, PIECE) keys; (PIECE):
                                                the least logit that was retrieved, in base 2, and what logits
                                                deviate by where tau is 1; (PIECE, dp) */
} Work;

/* A head and what the queries of a block see of its past. */
typedef struct {
    const NearFar *c;
    int64_t z, bytes;                        /* the head; of gaps that are written */
    int64_t t, start, paneled;               /* the block whose past this is; the position of the renewal; keys
                                                that lie in panels */
    int64_t near, stop;                      /* the positions of near keys */
    int d, dp, dv, lv, n, K, open;
    const uint8_t *keep;                     /* (S), or null */
    Work k;
    int64_t *numbers;                        /* (4): what is kept of these between calls */
    float *Y, *V;                            /* (S, dp), (S, lv) */
    uint8_t *panels;                         /* (S / PANEL up, dp / 4, PANEL, 4): integers, see score_keys */
    float *step, *valid_step;                /* (S): their steps; the same, NaN for keys that lie in no cluster */
    int32_t *heavy;                          /* (n): positions, -1 where there are fewer */
    int32_t *cluster;                        /* (S), -1 for keys that have none */
    float *square;                           /* (S): |z|^2 */
    float *shared, *values, *high, *mass;    /* (n + K, dp), (n + K, lv): heavy hitters, then clusters; powers of two
                                                above N; N */
    float *ysum, *zsum, *squares, *tau;      /* (K, dp) twice, (K): sums over the keys of clusters of y, z - centre
                                                and |z - centre|^2; (K) */
    float *rows, *shift;                     /* (d, dp): root; (dp) */
    float *centres, *offset;                 /* (K, dp), (K): in z; |c|^2 */
    float *sample, *counts;                  /* (2 DRAWN K, d), (2 DRAWN K): keys of which centres are made */
    float *X, *apart, *Xt, *dots;            /* (CHUNK, dp) twice, (dp, CHUNK), (K, CHUNK) */
    float *next;                             /* (dp) */
    int64_t *nearest;                        /* (2 DRAWN K) */
} Past;

typedef struct {
    void *to;                                /* where the address of a piece is to be */
    size_t count;
} Piece;

#pragma GCC visibility push(hidden)

/* A head, in memory of the thread. */
void open_past(Past *h, const NearFar *c, int64_t z, float *memory);

/* Each thread takes one head after the other; body(c, z, memory) returns 0 where memory ended. */
int each_past_head(const NearFar *c, int (*body)(const NearFar *c, int64_t z, float *memory));

/* Keeps what the next call of a decoding state goes on from. */
void close_past(Past *h);

/* Brings the past to that of block t; 0 where memory ended. */
int advance(Past *h, int64_t t);

/* Rows, values and mass of the heavy hitters at these positions, -1 for none. */
void load_heavy(const Past *h, const int32_t *heavy, float *keys, float *values, float *mass);

/* Gives each piece its place from `at` on, where that is not null; returns how many numbers they take. */
size_t place_pieces(const Piece *pieces, size_t number, float *at);

/* Means, tau and powers of two above N of the clusters, from their sums. */
void summarize_clusters(Past *h);

/* Clusters after reads (causal_forward.c). R queries (R, dp), times `factor`, that have retrieved nothing yet; the r-th
   one reads n keys of these clusters and logits, in base 2. */
void begin_left(Past *h, int R, int ld, const float *Q, float factor);
void leave(Past *h, int r, int ld, const int32_t *positions, const float *logits, int n, const int32_t *cluster);

/* From logits (K, ld) of the means of clusters, in base 2: what each of the keys that are left weighs relative to e^top
   (ld), 0 where there are none. */
void weigh_left(const Past *h, const float *top, int ld, float *logits);

/* A vector (dp), times random signs and Hadamard matrices, as integers of at most 127 in magnitude, times the step
   that this returns. */
float integers_of(const float *from, int dp, int8_t *to);

/* to (R, SCORED): the products of R queries (R, dp), AT_ONCE at most, with n keys, SCORED at most, of panels that
   lie `step` numbers apart. Panels (dp / 4, PANEL) hold four numbers of each key, each 128 more than the number:
   what processors multiply is one with a sign by one without; so products begin at the bias of a query, -128 times
   its sum. There is memory for AT_ONCE queries and their products, and for the panels of n keys rounded up to FOUR. */
void score_keys(const int8_t *queries, const int32_t *bias, int R, int dp, const uint8_t *panels, int64_t step, int n,
             int32_t *to);

/* Keys before the position `stop`, of which those before h.paneled are there, to panels. */
void to_panels(Past *h, int64_t stop);

/* The positions of the `open` keys that each query that is ahead retrieves. */
void retrieve(Past *h, int open);

/* 8-bit scores that are kept of the keys that a query has scored. */
size_t room_for_best(int64_t open);

#pragma GCC visibility pop

INLINE int room_for_retrieved(const Past *h) { return up(h->open) + PAD; }
INLINE int there(const Past *h, int64_t j) { return !h->keep || h->keep[j]; }
INLINE const float *key(const Past *h, int64_t j) { return h->Y + j * h->dp; }

/* Places of keys, which rise, as what each is more than the one before: a byte, behind as many of WIDEST as it
   needs, which stand for WIDEST - 1 each; 0 ends. Of S keys n take n + S / (WIDEST - 1) + 1 at most. put_gaps
   returns their number, get_gaps that of the keys. */

INLINE int64_t put_gaps(uint8_t *to, const int32_t *positions, int n) {
    const uint8_t *start = to;
    for (int32_t i = 0, last = -1; i < n; last = positions[i++]) {
        int32_t gap = positions[i] - last;
        for (; gap >= WIDEST; gap -= WIDEST - 1) *to++ = WIDEST;
        *to++ = (uint8_t)gap;
    }
    *to++ = 0;
    return to - start;
}

INLINE int get_gaps(const uint8_t *from, int32_t *positions) {
    int32_t n = 0, last = -1;
    for (; *from; from++) {
        last += *from - (*from == WIDEST);
        if (*from != WIDEST) positions[n++] = last;
    }
    return n;
}

/* The position of the renewal behind one. */
INLINE int64_t following(int64_t position, int64_t b) {
    const int64_t more = position / PART > RENEWED ? position / PART : RENEWED;
    return position + (more + b - 1) / b * b;
}
