/* A head with its past: what past.c, scores.c, causal_forward.c and causal_backward.c share. */

#pragma once

#include "near_far.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

enum { PIECE = 48, AT_ONCE = 32, AHEAD = 256 };    /* queries of a piece; that are scored at once, and that are ahead */
enum { PANEL = 16, FOUR = 64, SCORED = 128 };          /* keys of a panel, of four, and that are scored at once */
enum { NEARBY = 1 << 17 };                             /* numbers of the retrieved keys before those behind them */

/* How many keys queries behind a renewal at this position read, at most `open`: `Sizes.opens` of choice.py. */
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
                                                the least logit that was read, in base 2, and what logits
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

/* Gives each piece its position from `at` on, where that is not null; returns how many numbers they take. */
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
