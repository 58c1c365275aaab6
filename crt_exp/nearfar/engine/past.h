/* A head with its past: what recall.c, recall_backward.c, bounded.c and recall_calls.c share. */

#pragma once

#include "head.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

enum { PIECE = 48, AT_ONCE = 32, AHEAD = 256 };        /* queries of a piece; that look at once, and that are ahead */
enum { PANEL = 16, FOUR = 64, LOOKED = 128 };          /* keys of a panel, of four, and that are looked at at once */
enum { NEARBY = 1 << 17 };                             /* numbers of the keys that are read before those behind them */

typedef struct {
    int64_t Z, G, L, S, d, dv, block, heavy, cells, open, least, until;
    int64_t bounds, room, bytes;       /* whether there are bounds; tokens; a head's memory of gaps */
    int64_t threads;                   /* of the processor */
    double factor;                     /* of queries and keys as they are given */
    View x, y, v, out;                 /* the last L queries of S keys, all from the place `until` on */
    View grad, dx, dy, dvalues;        /* of the backward pass */
    const uint8_t *keep;               /* (Z, S), or null */
    const float *shift, *root;         /* (Z, d), (Z, d, d) */
    const float *tilt, *centres, *level;  /* bounded.c: (Z, d), (Z, K, d) as z, (Z, K); else null */
    uint8_t *gaps;                     /* (Z, bytes): between the keys that are read, see put_gaps; null: not kept */
    int64_t *gaps_at;                  /* (Z, G, L): where those of a query begin */
    float *logsum, *share;             /* (Z, G, L): base 2; the weight of the cells */
    float *bound;                      /* (Z, G, L), where there are bounds: of the weight of keys that are not read */
    float *spread;                     /* (Z): mean tau of the cells of the last block */
    float *kept;                       /* (Z, near_far_recall_size): of decoding, for at most `room` tokens; or null */
} Recall;

/* How many keys queries behind a renewal at this place read, at most `open`: `Sizes.opens` of choice.py. */
INLINE int64_t opens_at(const Recall *c, int64_t place) {
    const int64_t square = c->least * c->least * (place > GROWS ? place : GROWS) / GROWS;
    int64_t root = (int64_t)sqrt((double)square);
    while (root * root > square) root--;
    while ((root + 1) * (root + 1) <= square) root++;
    return least_of(root, c->open);
}

/* What the queries of a block see. */
typedef struct {
    int d, dp, dv, lv, n, K, open, bounds;
    const float *Y, *V;                                /* (S, dp), (S, lv) */
    const int32_t *cell;                               /* (S), -1 for keys that have none */
    const uint8_t *panels;                             /* (S / PANEL up, dp / 4, PANEL, 4): whole numbers, as in looks.h */
    const float *looked;                               /* (S): their steps, NaN for keys that lie in no cell */
    const float *shared, *values, *bias, *high, *mass; /* (n + K, dp), (n + K, lv): heavy keys, then cells */
    const float *rows, *tau;                           /* (d, dp): root; (K): of the cells */
    const uint8_t *keep;                               /* (S), or null */
    int64_t near, stop;                                /* the places of near keys */
} Seen;

/* Looks and the places of their keys, which rise; behind the last there is room for a whole vector. All that exceed
   `bar` are there. */
typedef struct {
    float *value, bar;
    int32_t *place;
    int n;
} Best;

/* A turned vector: its norm, that of its whole numbers times their step, and that of the difference, all at most. */
typedef struct {
    float size, near, lost;
} Apart;

/* What a query does not read: the sum of e^logit, at most, over 2^top; what that is made of (looks.h, unread.c); the norm
   of the query. */
typedef struct {
    float each, near, lost, from, size, top;
    double sum;
} Unread;

/* A query that is ahead: head g of the group at place j; the keys before `far` are far from its block. */
typedef struct {
    int64_t g, j;
    int32_t far;
} Asks;

/* What is left in the cells: how many keys, the least logit that was read, in base 2, and what logits deviate by where tau
   is 1. */
typedef struct {
    float *number, *bar, *along, *turned;              /* (K, PIECE), (PIECE), (PIECE), (PIECE, dp) */
} Left;

/* What queries that are ahead work with, most in pieces of at most PIECE. */
typedef struct {
    int ahead, taken;                                  /* how many there are, and of these that are done */
    Asks asks[AHEAD];
    float *Q, *O, *top, *scale, *part;                 /* (AHEAD, dp), in base 2, (AHEAD, lv), (AHEAD) thrice */
    int8_t *whole;                                     /* (AHEAD, dp): queries as whole numbers */
    int32_t *bias;                                     /* (AHEAD), of looks */
    int32_t *looks;                                    /* (AT_ONCE, LOOKED) */
    Best best[AHEAD];
    Unread unread[AHEAD];
    float *read;                                       /* (AHEAD, room_to_read): logits, then weights */
    int32_t *places, *count, *from;                    /* (AHEAD, open), of keys that are read, rising; (AHEAD) twice */
    float *Qt, *A;                                     /* of a piece: (d, PIECE), (2 b + n + K, PIECE) */
    Left left;                                         /* of a piece */
} Work;

typedef struct {
    const Recall *c;
    int64_t z, far;                                    /* blocks that are far (bounded.c) */
    int64_t bytes;                                     /* of gaps that are written */
    int64_t t, start, paneled, reached;                /* the block whose past this is; the place of the renewal; keys
                                                          that lie in panels, and of which `reach` is known */
    Seen s;
    Work k;
    int64_t *numbers;                                  /* (5): what is kept of these between calls */
    float *Y, *V;
    uint8_t *panels;
    float *step, *looked;                              /* (S): of whole numbers; the same, as in Seen */
    float *size, *lost, *reach;                        /* (S), for bounds: as in Apart; the largest |y| up to a place */
    int32_t *heavy;                                    /* (n): places, -1 where there are fewer */
    int32_t *cell;                                     /* (S) */
    float *square;                                     /* (S): |z|^2 */
    float *shared, *values, *bias, *high, *mass;
    float *ysum, *zsum, *squares, *tau;                /* (K, dp) twice, (K): sums over the keys of cells; (K) */
    float *rows, *rootT, *shift;                       /* (d, dp) twice, (dp) */
    float *centres, *turned, *offset;                  /* (K, dp) twice, (K): in z; root c; |c|^2 / 2 + shift . root c */
    float *drawn, *counts;                             /* (2 DRAWN K, d), (2 DRAWN K): keys of which centres are made */
    float *X, *apart, *Xt, *dots;                      /* (CHUNK, dp) twice, (dp, CHUNK), (K, CHUNK) */
    float *next;                                       /* (dp) */
    int64_t *nearest;                                  /* (2 DRAWN K) */
    float *score, *u, *tilt, *relative;                /* bounded.c: (S) twice, (dp), (K): e^(level - the highest) */
} Past;

/* A head in the backward pass. */
typedef struct {
    Past h;
    struct End *ends;                                  /* of each renewal */
    int64_t first, count, renewals;                    /* the first block, how many there are, renewals */
    float *memory, *dY, *dV;                           /* (S, dp), (S, lv) */
    float *sum, *dvalue, *dmu, *dfar;                  /* (K, dp), (K, lv): over blocks; (M, dp), (M, lv) */
    float *A, *B, *Q, *Qt, *G, *Gt, *O;                /* (2 b + M, PIECE) twice, of a piece */
    float *zmean, *dbias, *dN;                         /* bounded.c: (K, dp), (K), (K): of a block */
    float *slope, *zslope, *weight;                    /* bounded.c: (K), (K, dp), (K): over blocks */
    float *states;                                     /* bounded.c: (STEP, states_size) */
    float top[PIECE], bar[PIECE];                      /* log-sums; g.out */
} Back;

typedef struct {
    void *to;                                          /* where the address of a piece is to be */
    size_t count;
} Piece;

#pragma GCC visibility push(hidden)

/* Memory for one head at a time, or null. */
float *past_memory(const Recall *c);

/* A head, in that memory; what is kept is written when it is closed. */
void open_past(Past *h, const Recall *c, int64_t z, float *memory);
void close_past(Past *h);

/* Brings the past to that of block t; 0 where memory ended. */
int advance(Past *h, int64_t t);

/* z of keys [j, j + m), m <= CHUNK, in X; 0 for those that are masked. */
void measure(Past *h, int64_t j, int m);

/* Rows, values and mass of the heavy keys at these places, -1 for none. */
void load_heavy(const Past *h, const int32_t *heavy, float *keys, float *values, float *mass);

/* Gives each piece its place from `at` on, where that is not null; returns how many numbers they take. */
size_t place_pieces(const Piece *pieces, size_t number, float *at);

/* Means, biases and powers of two above N of the cells, from their sums; returns the mean tau. */
float place_cells_of(Past *h);

/* The queries of block t among the last L, with the past of that block. */
void attend_block(Past *h, int64_t t);

/* A head whose queries have been taken through it, with all that it needs. */
void load_past(Past *h);

/* Which of the centres is nearest to keys [j, j + m), m <= CHUNK. */
void find_nearest(Past *h, int64_t j, int m, int32_t *which);

/* Cells after reads (left.c). R queries (R, dp), times `factor`, that have read nothing yet; the r-th one reads n keys of
   these cells and logits, in base 2. */
void begin_left(const Seen *s, Left *left, int R, int ld, const float *Q, float factor);
void leave(Left *left, int r, int ld, const int32_t *places, const float *logits, int n, const int32_t *cell);

/* From logits (K, ld) of the means of cells, in base 2: what each of the keys that are left weighs relative to e^top (ld),
   0 where there are none. */
void weigh_left(const Seen *s, const Left *left, const float *top, int ld, float *logits);

/* Rows at n places, which rise. to (n, and room for 8 more): the products of a vector (dp) with them. out (ld) += their sum
   by weights. */
void dots(const float *Y, const int32_t *places, int n, const float *with, int dp, float *to);
void add_rows(const float *rows, int ld, const float *weight, const int32_t *places, int n, float *out);

/* Backward (recall_backward.c). The sums of the cells, each with its numbers. */
enum { SUMS = 5 };
void sums_of(const Past *h, int K, float *sums[SUMS], size_t sizes[SUMS]);

/* The head in the backward pass, in that memory and more. open_back returns 0 where memory ended; what it took is given
   back by close_back all the same. */
int open_back(Back *e, const Recall *c, int64_t z, float *memory);
void close_back(Back *e);
void write_gradients(const Back *e);

/* The gradients of queries [i, i + R) of block t; cell (S): of keys that are read. */
void piece_backward(Back *e, const int32_t *cell, int64_t t, int64_t i, int R);

/* All queries of a head, forward and backward: those that remember (recall.c, recall_backward.c), and those of bounded.c.
   Return 0 where memory ended. */
int recall_head(Past *h);
int backward_head(Back *e);
int bounded_head(Past *h);
int bounded_backward(Back *e);
enum { STEP = 16 };                                    /* blocks from one mark to the next */

#pragma GCC visibility pop

INLINE int room_to_read(const Seen *s) { return up(s->open) + PAD; }
INLINE int there(const Past *h, int64_t j) { return !h->s.keep || h->s.keep[j]; }
INLINE const float *key(const Past *h, int64_t j) { return h->Y + j * h->s.dp; }

/* Places of keys, which rise, as what each is more than the one before: a byte, behind as many of WIDEST as it needs, which
   stand for WIDEST - 1 each; 0 ends. Of S keys n take n + S / (WIDEST - 1) + 1 at most. put_gaps returns their number,
   get_gaps that of the keys. */

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
