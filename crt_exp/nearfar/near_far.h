/* Shared by the kernels of near-far attention. One thread processes one key head with the G query heads that share it.

   Notation as in nearfar/call.py: Z key heads, G query heads of each, L queries of S keys, d, dv; N blocks of b
   tokens, n heavy hitters, K clusters. In cross-attention (`cross`) no key is near, and L is arbitrary. Queries x,
   keys y minus their shift, values v; z = y root, w = y.tilt; u_j = exp(w_j - level of the cluster). Rows with d
   columns have stride dp, those with dv + 1 columns lv. */

#pragma once

#include "vectors.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

/* Constants that choice.py reads from this file. */
#define DRAWN 16        /* keys sampled for each cluster's centre, up to twice as many */
#define MIXED 40507     /* multiplier that varies the sampled position */
#define AWAY 1e15f      /* coordinate of centres without keys */
#define RENEWED 128     /* minimal number of tokens between renewals */
#define PART 2          /* otherwise the sequence so far divided by this */
#define GROWS 2304      /* tokens beyond which the retrieved keys grow with the root of the renewal's position */
#define PICKS 8         /* centres chosen at a time */
#define RIDGE 1e-4      /* ridge on the second moments of queries relative to their mean square; exceeds float32
                           rounding for queries in few directions */
#define SAME 1e-6f      /* vectors are equal if their squared distance is below this part of the squared length */
#define SHARPEST 1e-6f  /* minimal standard deviation of the logits of a cluster, nats */
#define LEAST 1e-30f    /* smaller weights count as 0 */
#define HIDDEN (-1e30f) /* logit of a missing key */
#define WIDEST 255      /* gaps of at least this size take another byte */
#define TURNED 16       /* columns of 8-bit vectors are padded to a multiple of this */
#define SIGNS 2654435769 /* its multiples define the random signs of the rotation */

/* A call of the library: bidirectional, cross or causal. */
typedef struct {
    int64_t Z, G, L, S, d, dv, block, heavy, clusters, first_order, cross;
    int64_t open, least, until;        /* causal only, as is the next line: keys that the last and the first queries
                                          retrieve; the first renewal */
    int64_t room, bytes, threads;      /* tokens; bytes of a head for gaps; processor threads */
    double factor;                     /* of queries and keys */
    View x, y, v, out;                 /* batch: key head; head: its query heads. Causal: the last L queries */
    View grad, dx, dy, dvalues;        /* of the backward pass */
    const uint8_t *keep;               /* (Z, S), or null */
    float *shift, *tilt, *root, *centres;  /* (Z, d), (Z, d), (Z, d, d), (Z, K, d) */
    int64_t *positions, *cluster;            /* (Z, n) of heavy hitters, (Z, S) */
    uint8_t *there, *pool;             /* (Z, n), (Z, S) */
    float *u, *square;                 /* (Z, S): |z - centre|^2 */
    float *level, *sums, *spread, *slope;  /* (Z, K), (Z, K, d + 2), (Z, K), (Z, dv, d) */
    float *logsum;                     /* (Z, G, L): base 2 */
    uint8_t *gaps;                   /* (Z, bytes): gaps between retrieved keys, see put_gaps; null without gradients */
    int64_t *gaps_at;                  /* (Z, G, L): start of a query's gaps */
    float *kept;                       /* (Z, near_far_causal_size): decoding state for at most `room` tokens, or
                                          null */
} NearFar;

INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

/* log2 to 2e-6, accurate enough for choices; -inf at 0. */
INLINE vec log2_vec(vec t) {
    ivec exponent = (ivec)((uvec)t >> 23) - 127;
    vec m = (vec)(((uvec)t & 0x7fffff) | 0x3f800000) - 1.5f;
    vec p = -0.0251232033f * m + 0.0439286278f;
    p = p * m - 0.0705896757f;
    p = p * m + 0.141718159f;
    p = p * m - 0.320632333f;
    p = p * m + 0.961821228f;
    p = p * m + 0.584962765f;
    return blend(t > 0.0f, p + __builtin_convertvector(exponent, vec), (vec){0} - INFINITY);
}

/* to += factor from */
INLINE void add_scaled(float *to, float factor, const float *from, int64_t n) {
    int64_t p = 0;
    for (; p + LANES <= n; p += LANES) AT(to + p) += factor * AT(from + p);
    for (; p < n; p++) to[p] += factor * from[p];
}

/* to = factor from */
INLINE void set_scaled(float *to, float factor, const float *from, int n) {
    int p = 0;
    for (; p + LANES <= n; p += LANES) AT(to + p) = factor * AT(from + p);
    for (; p < n; p++) to[p] = factor * from[p];
}

enum { QUERIES = 64, SEGMENT = 256 };  /* of a piece; tokens of a segment, unless a block has more */

/* A head of bidirectional or cross-attention. A piece has R queries, at most `most`. There are M = n + K shared
   keys: heavy hitters, then the cluster means mu. A state (K, lv) holds sums [V, N] of u [v, 1] over the keys of
   some blocks; a segment has T blocks. Logs and logits are in base 2. */
typedef struct {
    const NearFar *c;
    int64_t z, N, T, segments;
    int d, dp, dv, lv, b, n, K, M, max_queries;
    const uint8_t *pool;
    const int64_t *cluster;
    const float *shift;
    float *u, *square, *sums;          /* (S), (S), (K, d + 2) */
    float *tilt, *root, *rootT, *moments;  /* (dp), (d, dp): root, its transpose, their product */
    float *centres, *mean_offset, *spread;     /* (K, dp) twice: centres, and means in z minus centres; (K) */
    float *keys, *values;           /* (M, dp), (M, lv): of shared keys; cluster values are those of one block */
    float *bias, *mass_exponent, *mass;         /* (M): of logits; powers of two above N; N */
    float *state_total, *state_before; /* states of all blocks; of the far blocks before the current block */
    float *state_after;                /* (T, K, lv): states of the far blocks after each block of a segment */
    float *checkpoints;                      /* (segments, K, lv): states of the blocks behind each segment */
    float *y, *residual, *work;              /* (CHUNK, dp) twice, (K or CHUNK, dp or lv): keys of a chunk */
    float *slope, *slopeT, *weight;    /* (dv, dp), (d, lv), (K): C and e^(level - highest level) */
    float *double_sums;                    /* (K, d + 2), of doubles */
    float *Y, *V, *mask_bias;             /* (3 b, dp or lv), (3 b): keys of the window (0 outside the pool), [v, 1] */
    float *A, *B;                      /* (3 b + M, most): weights, and gradients of logits */
    float *Q, *X, *Qt, *O, *P;         /* (most, dp): queries, queries minus tilt; (d, most); (most, dp or lv) twice */
    float *top, *scale, *cluster_share;         /* (most): log-sums; 1 / sums; weight share of clusters */
    int64_t group[QUERIES], token[QUERIES];  /* of the queries of a piece */
    float *G, *Gt, *Gs;                /* (most, lv), (dv + 1, most), (most, lv) */
    float *dY, *dV, *dkeys, *dvalues;  /* gradients: as Y, V; (M, dp); (n, lv) */
    float *dstates, *dsegments;           /* of states: (T, K, lv) for the blocks of a segment, (segments, K, lv) for
                                          segments, */
    float *dbefore, *dafter;           /* (K, lv): sums over earlier blocks; over later segments */
    float *dlog_weight;                /* (S): gradients of log u */
    float *dbias, *dsums;              /* (K); (K, dp + PAD): mean |z - centre|^2 in column dp, N in dp + 1 */
    float *offset_rootT;                       /* (K, dp): off root^T */
    float *dslope, *dslopeT;           /* as slope, slopeT */
    float *dy_chunk, *dv_chunk;                /* (CHUNK, dp or lv) */
    float dslope_slope;                /* inner product of dslope and slope, over the mass */
} Head;

/* A block of queries that sees `near` keys of the window. */
typedef struct {
    int64_t t;
    int tokens, near;
} Block;

INLINE int block_tokens(const Head *e, int64_t s) { return (int)min64(e->c->S - s * e->b, e->b); }
INLINE float *key_ptr(const Head *e, View view, int64_t j) { return head_ptr(view, e->z, 0) + j * view.token; }

#pragma GCC visibility push(hidden)

/* Chooses the heavy hitters of head z by the scores (S) of its keys; writes their positions and the pool of other
   keys. */
void select_heavy_hitters(const NearFar *c, int64_t z, const float *score);

/* Finds the nearest of the centres (K, dp), with squares |c|^2, for n <= CHUNK keys Zt (d, CHUNK); dots (K, CHUNK)
   is scratch. */
void nearest_centres(int K, int d, const float *centres, const float *squares, const float *Zt, int n, float *dots,
                     int32_t *nearest);

/* Computes centres (K, dp), in z, for the keys of one head (Z = 1) with given metric and weights (S). Writes
   `cluster` and uses the thread's scratch memory. Returns 0 if out of memory. */
int compute_centres(const NearFar *c, const float *weight, float *centres);

/* Runs `body` for each head with its scratch memory; the backward pass needs more of it. */
int for_each_head(const NearFar *c, int backward, void (*body)(Head *e));

/* Computes means, biases and states of the clusters from their sums. */
void compute_cluster_keys(Head *e);

/* Computes V (K, lv) over all keys, with weights that are comparable between clusters, in `work`. Returns the sum of
   these weights. */
float weighted_value_sums(Head *e);
void load_slope(Head *e);

/* Computes values of keys [start, start + n) times u and the weights of their clusters, in `work`. */
void scale_values(Head *e, int64_t start, int n);

/* Loads block t with its window and the states that it sees. */
Block load_window(Head *e, int64_t t);

/* Loads queries [i, i + R) of a block, one query head after the other, and computes their logits without biases. */
void load_queries(Head *e, const Block *at, int i, int R);

/* Replaces logits by e^(logit - top), in base 2, with sums in `scale` and those over clusters in `part`. */
void exponentiate(Head *e, const Block *at, int ld);
#pragma GCC visibility pop

INLINE float *query_ptr(const Head *e, View view, int r) {
    return head_ptr(view, e->z, e->group[r]) + e->token[r] * view.token;
}

INLINE int64_t query_index(const Head *e, int r) { return (e->z * e->c->G + e->group[r]) * e->c->L + e->token[r]; }

/* ---- Causal: a head with its past ---- */

enum { PIECE = 48, SCORE_QUERIES = 32, PREFETCH = 256 };    /* queries of a piece; scored together; prepared ahead */
enum { PANEL = 16, PANEL_GROUP = 64, SCORE_KEYS = 128 };          /* keys of a panel; of four panels; scored together */
enum { CACHE_FLOATS = 1 << 17 };                             /* floats of retrieved rows that fit the cache */

/* Returns how many keys queries retrieve after a renewal at this position, at most `open`: `Sizes.opens` of
   choice.py. */
INLINE int64_t retrieval_count(const NearFar *c, int64_t position) {
    const int64_t square = c->least * c->least * (position > GROWS ? position : GROWS) / GROWS;
    int64_t root = (int64_t)sqrt((double)square);
    while (root * root > square) root--;
    while ((root + 1) * (root + 1) <= square) root++;
    return min64(root, c->open);
}

/* 8-bit scores of keys and their positions in ascending order, with room for one vector at the end. Contains all
   scores above `threshold`. */
typedef struct {
    float *value, threshold;
    int32_t *position;
    int n;
} TopScores;

/* A query prepared ahead: head g of the group at position j; keys before `far` are far from its block. */
typedef struct {
    int64_t g, j;
    int32_t far;
} Query;

/* Working memory of queries prepared ahead; most arrays belong to pieces of at most PIECE queries. */
typedef struct {
    int query_count, finished;                        /* number of queries, and of finished ones */
    Query query[PREFETCH];
    float *Q, *O, *top, *scale, *cluster_share;       /* (AHEAD, dp), in base 2, (AHEAD, lv), (AHEAD) thrice */
    int8_t *quantized;                        /* (AHEAD, dp): queries as integers */
    int32_t *bias;                           /* (AHEAD), of scores */
    int32_t *scores;                         /* (AT_ONCE, SCORED) */
    TopScores top_scores[PREFETCH];
    float *retrieved;                        /* (AHEAD, room_for_retrieved): logits, then weights */
    int32_t *positions, *count, *cursor;       /* (AHEAD, open), of retrieved keys, ascending; (AHEAD) twice */
    float *Qt, *A;                           /* of a piece: (d, PIECE), (2 b + n + K, PIECE) */
    /* Data of a piece for the remaining keys of clusters: */
    float *remaining;                        /* (K, PIECE): number of remaining keys */
    float *threshold;                        /* (PIECE): smallest retrieved logit, in base 2 */
    float *query_norm;                       /* (PIECE): standard deviation of the logits for tau = 1 */
    float *z_query;                          /* (PIECE, dp): queries times root */
} Work;

/* A head and its past, as the queries of a block see it. */
typedef struct {
    const NearFar *c;
    int64_t z, gap_bytes;                        /* the head; bytes of gaps written */
    int64_t t, renewal, packed;               /* block of this past; position of the last renewal; number of keys in
                                                panels */
    int64_t near, stop;                      /* range of near keys */
    int d, dp, dv, lv, n, K, open;
    const uint8_t *keep;                     /* (S), or null */
    Work work;
    int64_t *counters;                        /* (4): t, start, K and paneled, stored between calls */
    float *Y, *V;                            /* (S, dp), (S, lv) */
    uint8_t *panels;                         /* (S / PANEL up, dp / 4, PANEL, 4): integers, see score_keys */
    float *step, *valid_step;                /* (S): steps; steps with NaN for keys outside clusters */
    int32_t *heavy;                          /* (n): positions, -1 for missing ones */
    int32_t *cluster;                        /* (S), -1 for keys outside clusters */
    float *square;                           /* (S): |z|^2 */
    float *shared, *values;                  /* (n + K, dp), (n + K, lv): heavy hitters, then clusters */
    float *mass_exponent, *mass;             /* (n + K): exponent of the power of two above N; N */
    float *ysum, *zsum, *squares, *tau;      /* (K, dp) twice, (K): sums over the keys of clusters of y, z - centre
                                                and |z - centre|^2; (K) */
    float *root, *shift;                     /* (d, dp): root; (dp) */
    float *centres, *centre_square;                 /* (K, dp), (K): in z; |c|^2 */
    float *sample, *sample_weight;                  /* (2 DRAWN K, d), (2 DRAWN K): sample of keys for centres */
    float *X, *centred, *Xt, *dots;            /* (CHUNK, dp) twice, (dp, CHUNK), (K, CHUNK) */
    float *zero_tilt;                             /* (dp) */
    int64_t *sample_cluster;                        /* (2 DRAWN K) */
} Past;

typedef struct {
    void *pointer;                                /* address of the pointer to set */
    size_t count;
} Buffer;

#pragma GCC visibility push(hidden)

/* Prepares a head in the thread's memory. */
void init_past(Past *h, const NearFar *c, int64_t z, float *memory);

/* Runs body(c, z, memory) for each head, which returns 0 if out of memory. */
int for_each_past(const NearFar *c, int (*body)(const NearFar *c, int64_t z, float *memory));

/* Stores the state for the next call of decoding. */
void save_past(Past *h);

/* Advances the past to block t. Returns 0 if out of memory. */
int advance(Past *h, int64_t t);

/* Loads keys, values and mass of the heavy hitters at these positions, -1 for none. */
void load_heavy(const Past *h, const int32_t *heavy, float *keys, float *values, float *mass);

/* Assigns memory from `at` on to each piece, unless it is null. Returns the number of floats. */
size_t assign_buffers(const Buffer *pieces, size_t number, float *at);

/* Computes means, tau and powers of two above N of the clusters, from their sums. */
void summarize_clusters(Past *h);

/* Rest of the clusters after retrieval (causal_forward.c). begin_left starts R queries (R, dp), times `factor`. In
   `leave` the r-th query retrieves n keys with these clusters and logits in base 2. */
void start_remainder(Past *h, int R, int ld, const float *Q, float factor);
void remove_retrieved(Past *h, int r, int ld, const int32_t *positions, const float *logits, int n,
                      const int32_t *cluster);

/* Replaces logits (K, ld) of cluster means, in base 2, by the weight of each remaining key relative to e^top (ld), 0
   for empty clusters. */
void remainder_weights(const Past *h, const float *top, int ld, float *logits);

/* Rotates a vector (dp) by random signs and Hadamard matrices and quantizes it to integers of magnitude at most 127.
   Returns the step. */
float quantize(const float *from, int dp, int8_t *to);

/* Computes products (R, SCORED) of R <= AT_ONCE queries (R, dp) with n <= SCORED keys in panels with stride `step`.
   A panel (dp / 4, PANEL) holds four numbers of each key, shifted by 128, because processors multiply unsigned with
   signed numbers. Products therefore start at the bias of the query, -128 times its sum. Memory must suffice for
   AT_ONCE queries and their products, and for the panels of n keys rounded up to FOUR. */
void score_keys(const int8_t *queries, const int32_t *bias, int R, int dp, const uint8_t *panels, int64_t step, int n,
                int32_t *to);

/* Adds the keys before position `stop` to the panels. */
void pack_keys(Past *h, int64_t stop);

/* Finds the `open` keys that each query prepared ahead retrieves. */
void retrieve_keys(Past *h, int open);

/* Returns the number of scores that a query can store. */
size_t top_scores_size(int64_t open);

#pragma GCC visibility pop

INLINE int retrieved_size(const Past *h) { return round_up(h->open) + PAD; }
INLINE int unmasked(const Past *h, int64_t j) { return !h->keep || h->keep[j]; }
INLINE const float *key_row(const Past *h, int64_t j) { return h->Y + j * h->dp; }

/* Encodes ascending positions as differences. A difference takes one byte, preceded by bytes WIDEST that each stand
   for WIDEST - 1; 0 ends the list. n of S keys take at most n + S / (WIDEST - 1) + 1 bytes. put_gaps returns the
   number of bytes, get_gaps the number of keys. */

INLINE int64_t encode_gaps(uint8_t *to, const int32_t *positions, int n) {
    const uint8_t *start = to;
    for (int32_t i = 0, last = -1; i < n; last = positions[i++]) {
        int32_t gap = positions[i] - last;
        for (; gap >= WIDEST; gap -= WIDEST - 1) *to++ = WIDEST;
        *to++ = (uint8_t)gap;
    }
    *to++ = 0;
    return to - start;
}

INLINE int decode_gaps(const uint8_t *from, int32_t *positions) {
    int32_t n = 0, last = -1;
    for (; *from; from++) {
        last += *from - (*from == WIDEST);
        if (*from != WIDEST) positions[n++] = last;
    }
    return n;
}

/* Returns the position of the renewal after the one at `position`. */
INLINE int64_t next_renewal(int64_t position, int64_t b) {
    const int64_t more = position / PART > RENEWED ? position / PART : RENEWED;
    return position + (more + b - 1) / b * b;
}
