/* What the kernels of near-far attention share: choice.c chooses the sets, near_far.c takes the queries
   through them, and cells.c has what the cells amount to. One thread takes one head (of keys, with the G query
   heads that share it).

   Legend as in nearfar/call.py: Z heads of keys, G query heads of each, L queries of S keys, d, dv; N blocks of b
   tokens, n heavy keys, K cells. Queries of another sequence (`cross`) have no near keys, so that L may be any number. Queries x, keys y less their shift, values v; z = y root, w = y.tilt; u_j = exp(w_j - level of
   the cell). Rows with d columns are dp apart, with dv + 1 columns lv. */

#pragma once

#include "constants.h"
#include "vectors.h"

typedef struct {
    int64_t Z, G, L, S, d, dv, block, heavy, cells, first_order, cross, threads;
    double factor;                                        /* of queries and keys as they are given */
    View x, y, v, out, grad, dx, dy, dvalues;             /* batch: head of keys; head: query head of it */
    const uint8_t *keep;                                  /* (Z, S), or null */
    float *shift, *tilt, *root, *centres;                 /* (Z, d), (Z, d), (Z, d, d), (Z, K, d) */
    int64_t *places, *cell;                               /* (Z, n) of heavy keys, (Z, S) */
    uint8_t *there, *pool;                                /* (Z, n), (Z, S) */
    float *u, *square;                                    /* (Z, S): |z - centre|^2 */
    float *level, *sums, *spread, *slope;                 /* (Z, K), (Z, K, d + 2), (Z, K), (Z, dv, d) */
    float *logsum, *share;                                /* (Z, G, L): base 2; the weight of the cells */
} NearFar;

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

/* ---- One head, for sets that have been chosen ---- */

enum { QUERIES = 64, SEGMENT = 256 };  /* of a piece; tokens of a segment, unless one block has more */

/* R queries of a piece, `most` at most; T blocks in a segment; M = n + K shared keys: heavy ones, then the means mu of
   cells. A state (K, lv) holds sums [V, N] of u [v, 1] over the keys of some blocks. Logs and logits are in base 2. */
typedef struct {
    const NearFar *c;
    int64_t z, N, segments;
    int d, dp, dv, lv, b, n, K, M, T, most;
    const uint8_t *pool;
    const int64_t *cell;
    const float *shift;
    float *u, *square, *sums;          /* (S), (S), (K, d + 2) */
    float *tilt, *root, *rootT, *moments;  /* (dp), (d, dp): root, its transpose, their product */
    float *centres, *off, *spread;     /* (K, dp) twice: centres, and means as z less these; (K) */
    float *keys, *values;              /* (M, dp), (M, lv): of shared keys; the values of cells are those for a block */
    float *bias, *high, *mass;         /* (M): of logits; powers of two above N; N */
    float *total, *marks, *after, *before;  /* states of all blocks, after segments, after blocks of one, before */
    float *y, *zs, *v, *work;          /* (CHUNK, dp) twice, (CHUNK, lv), (K or CHUNK, dp or lv): keys of a chunk */
    float *slope, *slopeT, *weight;    /* (dv, dp), (d, lv), (K): C and e^(level - the highest) */
    float *doubles;                    /* (K, d + 2), of doubles */
    float *Y, *V, *hidden;             /* ((T + 2) b, dp or lv), ((T + 2) b): a segment, and the blocks around it */
    float *A, *B;                      /* (3 b + M, most): weights, and gradients to logits */
    float *Q, *X, *Qt, *O, *P;         /* (most, dp): queries, these less the tilt; (d, most); (most, dp or lv) twice */
    float *top, *scale, *part;         /* (most): log-sums; 1 / sums; shares of the cells */
    int64_t group[QUERIES], token[QUERIES];  /* of the queries of a piece */
    float *G, *Gt, *Gs;                /* (most, lv), (dv + 1, most), (most, lv) */
    float *dY, *dV, *dkeys, *dvalues;  /* gradients: as Y, V; (M, dp); (n, lv) */
    float *dstates, *dstate;           /* (T, K, lv): to the states of the blocks of a segment; (K, lv): a sum */
    float *dwhole, *dafter;            /* (segments, 3, K, lv): sums over a segment, but for its first block, its last;
                                          (segments, K, lv): over those after it */
    float *rest;                       /* (S): to u, by the states of its own segment */
    float *dbias, *dsums;              /* (K); (K, dp + PAD): the mean |z - centre|^2 in column dp, N in dp + 1 */
    float *back;                       /* (K, dp): off root^T */
    float *dslope, *dslopeT;           /* as slope, slopeT */
    float *to_y, *to_v;                /* (CHUNK, dp or lv) */
    float dslope_slope;                /* their inner product, over the mass */
} Head;

#pragma GCC visibility push(hidden)

/* Centres (K, dp) of cells, as z, of the keys of one head (Z = 1) whose measure is given, with weights (S); `cell` is
   written, and the scratch memory of the thread. Returns 0 where memory ended. */
int centres_of(const NearFar *c, const float *weight, float *centres);

/* Scratch memory, constants and heavy keys of head z. Returns 0 where memory ended. */
int open_head(Head *e, const NearFar *c, int64_t z, int backward);

/* The weights u, levels and sums of cells. */
void sum_cells(Head *e);

/* From the sums: means, spreads and biases of cells, and the states that lie after each segment. */
void place_cells(Head *e);

/* C, of which values to first order are made: after sum_cells and place_cells, or as it was kept. */
void find_slope(Head *e);
void load_slope(Head *e);

/* Turns the gradients to means, biases and slope into those to sums. */
void sums_backward(Head *e);

/* Adds what the gradients to the states of other segments (`cross`: to the one state, in dstate) and to the sums give to
   those of the keys. */
void keys_backward(Head *e);

/* States (states.c). Adds u [v, 1] of the keys of block s to one. */
void add_block(const Head *e, int64_t s, float *state);

/* The state of all blocks, and of those beyond the first after each segment; then those that each block of segment g
   has after it. */
void mark_states(Head *e);
void states_of_segment(Head *e, int64_t g);

/* From the gradients to the states of the blocks of segment g: their sums, and what they give to the gradients of the
   values of the segment, in dV, and of its weights, in `rest`. */
void states_backward(Head *e, int64_t g);

/* Sums of these over segments, for other_segments, which is asked of one block after the other: as dstate, the
   gradients to the states of blocks of other segments that are far from block s. */
void add_up_segments(Head *e);
void other_segments(Head *e, int64_t s);

#pragma GCC visibility pop

INLINE int64_t least_of(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE float *key_of(const Head *e, View view, int64_t j) { return of(view, e->z, 0) + j * view.token; }
INLINE int in_block(const Head *e, int64_t s) { return (int)least_of(e->c->S - s * e->b, e->b); }
