/* A head with its past: what recall.c and recall_backward.c share. */

#pragma once

#include "near_far.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

enum { PIECE = 48, AT_ONCE = 32, AHEAD = 256 };        /* queries of a piece; that are scored at once, and that are ahead */
enum { PANEL = 16, FOUR = 64, SCORED = 128 };          /* keys of a panel, of four, and that are scored at once */
enum { NEARBY = 1 << 17 };                             /* numbers of the keys that are read before those behind them */

/* How many keys queries behind a renewal at this place read, at most `open`: `Sizes.opens` of choice.py. */
INLINE int64_t opens_at(const NearFar *c, int64_t place) {
    const int64_t square = c->least * c->least * (place > GROWS ? place : GROWS) / GROWS;
    int64_t root = (int64_t)sqrt((double)square);
    while (root * root > square) root--;
    while ((root + 1) * (root + 1) <= square) root++;
    return least_of(root, c->open);
}

/* 8-bit scores and the places of their keys, which rise; behind the last there is room for a whole vector. All that
   exceed `bar` are there. */
typedef struct {
    float *value, bar;
    int32_t *place;
    int n;
} Best;

/* A query that is ahead: head g of the group at place j; the keys before `far` are far from its block. */
typedef struct {
    int64_t g, j;
    int32_t far;
} Query;

/* What queries that are ahead work with, most in pieces of at most PIECE. */
typedef struct {
    int ahead, taken;                                  /* how many there are, and of these that are done */
    Query query[AHEAD];
    float *Q, *O, *top, *scale, *part;                 /* (AHEAD, dp), in base 2, (AHEAD, lv), (AHEAD) thrice */
    int8_t *whole;                                     /* (AHEAD, dp): queries as whole numbers */
    int32_t *bias;                                     /* (AHEAD), of scores */
    int32_t *scores;                                    /* (AT_ONCE, SCORED) */
    Best best[AHEAD];
    float *read;                                       /* (AHEAD, room_to_read): logits, then weights */
    int32_t *places, *count, *from;                    /* (AHEAD, open), of keys that are read, rising; (AHEAD) twice */
    float *Qt, *A;                                     /* of a piece: (d, PIECE), (2 b + n + K, PIECE) */
    float *number, *bar, *along, *turned;              /* of a piece, what is left in the cells: (K, PIECE) keys; (PIECE):
                                                          the least logit that was read, in base 2, and what logits
                                                          deviate by where tau is 1; (PIECE, dp) */
} Work;

/* A head and what the queries of a block see of its past. */
typedef struct {
    const NearFar *c;
    int64_t z, bytes;                                  /* the head; of gaps that are written */
    int64_t t, start, paneled;                         /* the block whose past this is; the place of the renewal; keys
                                                          that lie in panels */
    int64_t near, stop;                                /* the places of near keys */
    int d, dp, dv, lv, n, K, open;
    const uint8_t *keep;                               /* (S), or null */
    Work k;
    int64_t *numbers;                                  /* (4): what is kept of these between calls */
    float *Y, *V;                                      /* (S, dp), (S, lv) */
    uint8_t *panels;                                   /* (S / PANEL up, dp / 4, PANEL, 4): whole numbers, see score_keys */
    float *step, *valid_step;                              /* (S): their steps; the same, NaN for keys that lie in no cell */
    int32_t *heavy;                                    /* (n): places, -1 where there are fewer */
    int32_t *cell;                                     /* (S), -1 for keys that have none */
    float *square;                                     /* (S): |z|^2 */
    float *shared, *values, *high, *mass;              /* (n + K, dp), (n + K, lv): heavy keys, then cells; powers of two
                                                          above N; N */
    float *ysum, *zsum, *squares, *tau;                /* (K, dp) twice, (K): sums over the keys of cells of y, z - centre
                                                          and |z - centre|^2; (K) */
    float *rows, *shift;                               /* (d, dp): root; (dp) */
    float *centres, *offset;                           /* (K, dp), (K): in z; |c|^2 / 2 */
    float *drawn, *counts;                             /* (2 DRAWN K, d), (2 DRAWN K): keys of which centres are made */
    float *X, *apart, *Xt, *dots;                      /* (CHUNK, dp) twice, (dp, CHUNK), (K, CHUNK) */
    float *next;                                       /* (dp) */
    int64_t *nearest;                                  /* (2 DRAWN K) */
} Past;

typedef struct {
    void *to;                                          /* where the address of a piece is to be */
    size_t count;
} Piece;

#pragma GCC visibility push(hidden)

/* A head, in memory of the thread. */
void open_past(Past *h, const NearFar *c, int64_t z, float *memory);

/* Brings the past to that of block t; 0 where memory ended. */
int advance(Past *h, int64_t t);

/* Rows, values and mass of the heavy keys at these places, -1 for none. */
void load_heavy(const Past *h, const int32_t *heavy, float *keys, float *values, float *mass);

/* Gives each piece its place from `at` on, where that is not null; returns how many numbers they take. */
size_t place_pieces(const Piece *pieces, size_t number, float *at);

/* Means, tau and powers of two above N of the cells, from their sums. */
void place_cells_of(Past *h);

/* Cells after reads (left.c). R queries (R, dp), times `factor`, that have read nothing yet; the r-th one reads n
   keys of these cells and logits, in base 2. */
void begin_left(Past *h, int R, int ld, const float *Q, float factor);
void leave(Past *h, int r, int ld, const int32_t *places, const float *logits, int n, const int32_t *cell);

/* From logits (K, ld) of the means of cells, in base 2: what each of the keys that are left weighs relative to e^top
   (ld), 0 where there are none. */
void weigh_left(const Past *h, const float *top, int ld, float *logits);

/* A vector (dp), times random signs and Hadamard matrices, as whole numbers of at most 127 in magnitude, times the step
   that this returns. */
float whole_of(const float *from, int dp, int8_t *to);

/* to (R, SCORED): the products of R queries (R, dp), AT_ONCE at most, with n keys, SCORED at most, of panels that
   lie `step` numbers apart. Panels (dp / 4, PANEL) hold four numbers of each key, each 128 more than the number:
   what processors multiply is one with a sign by one without; so products begin at the bias of a query, -128 times
   its sum. There is memory for AT_ONCE queries and their products, and for the panels of n keys rounded up to FOUR. */
void score_keys(const int8_t *queries, const int32_t *bias, int R, int dp, const uint8_t *panels, int64_t step, int n,
             int32_t *to);

/* Keys before the place `stop`, of which those before h.paneled are there, to panels. */
void to_panels(Past *h, int64_t stop);

/* The places of the `open` keys that each query that is ahead retrieves. */
void retrieve(Past *h, int open);

/* 8-bit scores that are kept of the keys that a query has scored. */
size_t room_for_best(int64_t open);

/* The gradients of head z, with memory of the thread (recall_backward.c); 0 where memory ended. */
int recall_backward_head(const NearFar *c, int64_t z, float *memory);

#pragma GCC visibility pop

INLINE int room_to_read(const Past *h) { return up(h->open) + PAD; }
INLINE int there(const Past *h, int64_t j) { return !h->keep || h->keep[j]; }
INLINE const float *key(const Past *h, int64_t j) { return h->Y + j * h->dp; }

/* Places of keys, which rise, as what each is more than the one before: a byte, behind as many of WIDEST as it
   needs, which stand for WIDEST - 1 each; 0 ends. Of S keys n take n + S / (WIDEST - 1) + 1 at most. put_gaps
   returns their number, get_gaps that of the keys. */

INLINE int64_t put_gaps(uint8_t *to, const int32_t *places, int n) {
    const uint8_t *start = to;
    for (int32_t i = 0, last = -1; i < n; last = places[i++]) {
        int32_t gap = places[i] - last;
        for (; gap >= WIDEST; gap -= WIDEST - 1) *to++ = WIDEST;
        *to++ = (uint8_t)gap;
    }
    *to++ = 0;
    return to - start;
}

INLINE int get_gaps(const uint8_t *from, int32_t *places) {
    int32_t n = 0, last = -1;
    for (; *from; from++) {
        last += *from - (*from == WIDEST);
        if (*from != WIDEST) places[n++] = last;
    }
    return n;
}

/* The place of the renewal behind one. */
INLINE int64_t following(int64_t place, int64_t b) {
    const int64_t more = place / PART > RENEWED ? place / PART : RENEWED;
    return place + (more + b - 1) / b * b;
}
