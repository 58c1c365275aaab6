/* Shared by the kernels of near-far attention. One thread processes one key head with the G query heads that share it.

   Notation as in nearfar/dispatch.py: Z key heads, G query heads of each, L queries of S keys, d, dv; N blocks of b
   tokens, n heavy hitters, K clusters. In cross-attention (`cross`) no key is near, and L is arbitrary. Queries x,
   keys y minus their shift, values v; z = y root, w = y.tilt; u_j = exp(w_j - level of the cluster). Rows with d
   columns have stride dp, those with dv + 1 columns lv. */

#pragma once

#include "vectors.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

/* Constants that choice.py reads from this file. */
#define CENTRE_SAMPLES 16       /* minimal number of sampled keys per centre; the maximum is twice this */
#define SAMPLE_FACTOR 40507     /* varies the position of a sampled key within its interval */
#define EMPTY_CENTRE 1e15f      /* coordinates of centres without keys */
#define MIN_RENEWAL 128         /* tokens between renewals: at least this, */
#define RENEWAL_DIVISOR 2       /* and at least the current position divided by this */
#define GROWTH_START 2304       /* beyond this position, the number of retrieved keys grows with its square root */
#define CENTRE_BATCH 8          /* initial centres selected per step */
#define RIDGE 1e-4              /* ridge of the second moments of queries, relative to their mean square; exceeds
                                   float32 rounding if queries span few dimensions */
#define EQUAL_TOLERANCE 1e-6f   /* vectors count as equal below this squared distance, relative to the squared norm */
#define MIN_SD 1e-6f            /* minimal standard deviation of the logits of a cluster, in nats */
#define MIN_WEIGHT 1e-30f       /* smaller weights count as 0 */
#define MASKED (-1e30f)         /* logit of a masked key */
#define MAX_GAP 255             /* longer gaps take several bytes, see encode_gaps */
#define QUANTIZED_PAD 16        /* quantized vectors are padded to a multiple of this */
#define SIGN_FACTOR 2654435769  /* the random signs of the rotation are the highest bits of its multiples */

/* A call of the library: bidirectional, cross or causal. native.py reads the fields from here. */
typedef struct {
    int64_t Z, G, L, S, d, dv, block, heavy, clusters, first_order, cross;
    int64_t open, open_first, first_renewal;  /* causal: keys that the last and the first queries retrieve; position */
    int64_t capacity, gap_capacity;   /* causal: tokens that the state can hold; bytes of gaps per head */
    int64_t threads;
    double factor;                    /* of queries and keys */
    View x, y, v, out;                /* batch: key head; head: its query heads. Causal: the last L queries */
    View grad, dx, dy, dvalues;       /* of the backward pass */
    const uint8_t *keep;              /* (Z, S): key mask, or null */
    float *shift, *tilt;              /* (Z, d) */
    float *root, *centres;            /* (Z, d, d), (Z, K, d) */
    int64_t *positions, *cluster;     /* (Z, n): positions of heavy hitters; (Z, S): cluster of each key */
    uint8_t *there, *pool;            /* (Z, n): 0 for missing heavy hitters; (Z, S): 1 for keys of clusters */
    float *u, *square;                /* (Z, S): u; |z - centre|^2 */
    float *level, *sums, *spread;     /* (Z, K), (Z, K, d + 2), (Z, K) */
    float *slope;                     /* (Z, dv, d) */
    float *logsum;                    /* (Z, G, L): base 2 */
    uint8_t *gaps;                    /* (Z, gap_capacity): positions of retrieved keys, see encode_gaps; or null */
    int64_t *gap_offset;              /* (Z, G, L): offset of the first gap of a query */
    float *decoding_state;            /* (Z, near_far_causal_size): decoding state, or null */
} NearFar;

INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

/* log2 with an error of 2e-6, which suffices to compare weights; -inf at 0. */
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

enum { QUERIES = 64, SEGMENT = 256 };  /* queries of a piece; tokens of a segment, at least one block */

/* A head of bidirectional or cross-attention. A piece has R <= Rmax = max_queries queries. There are M = n + K shared
   keys: heavy hitters, then the cluster means mu. A state (K, lv) contains sums [V, N] of u [v, 1] over the keys of
   some blocks. A segment has T blocks. Logs and logits are in base 2. */
typedef struct {
    const NearFar *c;
    int64_t z, N, T, segments;
    int d, dp, dv, lv, b, n, K, M, max_queries;
    const uint8_t *pool;
    const int64_t *cluster;
    const float *shift;
    float *u, *square, *sums;           /* (S), (S), (K, d + 2) */
    float *tilt;                        /* (dp) */
    float *root, *rootT, *moments;      /* (d, dp): root, its transpose, their product */
    float *centres, *mean_offset;       /* (K, dp): centres; mean of z - centre */
    float *spread;                      /* (K) */
    float *keys, *values;               /* (M, dp), (M, lv): shared keys; cluster values are those of one block */
    float *bias, *mass_exponent, *mass; /* (M): bias of logits; exponent of the power of two above N; N */
    float *state_total, *state_before;  /* states of all blocks; of the far blocks before the current block */
    float *state_after;                 /* (T, K, lv): states of the far blocks after each block of a segment */
    float *checkpoints;                 /* (segments, K, lv): states of the blocks after each segment */
    float *y, *residual;                /* (CHUNK, dp): keys of a chunk; z - centre */
    float *work;                        /* (K or CHUNK, dp or lv) */
    float *slope, *slopeT, *weight;     /* (dv, dp): C; (d, lv); (K): e^(level - highest level) */
    float *double_sums;                 /* (K, d + 2), of doubles */
    float *Y, *V, *mask_bias;           /* (3 b, dp), (3 b, lv), (3 b): keys, [v, 1] and mask of the window */
    float *A, *B;                       /* (3 b + M, Rmax): weights, and gradients of logits */
    float *Q, *X, *Qt;                  /* (Rmax, dp): queries; queries - tilt; (d, Rmax) */
    float *O, *P;                       /* (Rmax, dp or lv) */
    float *top, *scale, *cluster_share; /* (Rmax): log-sums; 1 / sums; share of clusters in the weights */
    int64_t group[QUERIES], token[QUERIES];  /* of the queries of a piece */
    float *G, *Gt, *Gs;                 /* (Rmax, lv), (dv + 1, Rmax), (Rmax, lv) */
    float *dY, *dV, *dkeys, *dvalues;   /* gradients: as Y, V; (M, dp); (n, lv) */
    float *dstates, *dsegments;         /* of states: (T, K, lv) per block; (segments, K, lv) per segment */
    float *dbefore, *dafter;            /* (K, lv): sums over earlier blocks; over later segments */
    float *dlog_weight;                 /* (S): gradients of log u */
    float *dbias, *dsums;               /* (K); (K, dp + PAD): of y, |z - centre|^2 (column dp), N (dp + 1) */
    float *offset_rootT;                /* (K, dp): mean_offset root^T */
    float *dslope, *dslopeT;            /* as slope, slopeT */
    float *dy_chunk, *dv_chunk;         /* (CHUNK, dp or lv) */
    float dslope_slope;                 /* inner product of dslope and slope, divided by the mass */
} Head;

/* Block t of queries, with the number of near keys in its window. */
typedef struct {
    int64_t t;
    int tokens, near;
} Block;

INLINE int block_tokens(const Head *e, int64_t s) { return (int)min64(e->c->S - s * e->b, e->b); }
INLINE float *key_ptr(const Head *e, View view, int64_t j) { return head_ptr(view, e->z, 0) + j * view.token; }

#pragma GCC visibility push(hidden)

/* Finds the nearest of the centres (K, dp), with squares |c|^2, for n <= CHUNK keys Zt (d, CHUNK); dots (K, CHUNK)
   is scratch. */
void nearest_centres(int K, int d, const float *centres, const float *squares, const float *Zt, int n, float *dots,
                     int32_t *nearest);

/* Computes centres (K, dp), in z, for the keys of one head (Z = 1), from a metric and weights (S). Writes `cluster`,
   and uses the scratch memory of the thread. Returns 0 if out of memory. */
int compute_centres(const NearFar *c, const float *weight, float *centres);

/* Runs `body` for each head. `backward` allocates the buffers of the backward pass. */
int for_each_head(const NearFar *c, int backward, void (*body)(Head *e));

/* Computes means, biases and states of the clusters from their sums. */
void compute_cluster_keys(Head *e);

/* Computes V (K, lv) of all keys, with weights that are comparable between clusters, in `work`. Returns the total
   weight. */
float weighted_value_sums(Head *e);
void load_slope(Head *e);

/* Computes the values of keys [start, start + n) times u and the weight of the cluster, in `work`. */
void scale_values(Head *e, int64_t start, int n);

/* Loads the window of block t and the cluster states of its far keys. */
Block load_window(Head *e, int64_t t);

/* Loads queries [i, i + R) of a block, one query head after the other, and computes their logits without biases. */
void load_queries(Head *e, const Block *at, int i, int R);

/* Replaces logits by 2^(logit - top). Writes the sums to `scale`, and the sums over clusters to `cluster_share`. */
void exponentiate(Head *e, const Block *at, int ld);
#pragma GCC visibility pop

INLINE float *query_ptr(const Head *e, View view, int r) {
    return head_ptr(view, e->z, e->group[r]) + e->token[r] * view.token;
}

INLINE int64_t query_index(const Head *e, int r) { return (e->z * e->c->G + e->group[r]) * e->c->L + e->token[r]; }

/* ---- Causal attention ---- */

enum { PIECE = 48, SCORE_QUERIES = 32, PREFETCH = 256 };   /* queries: of a piece; scored together; prepared together */
enum { PANEL = 16, PANEL_GROUP = 64, SCORE_KEYS = 128 };   /* keys: of a panel; of four panels; scored together */
enum { CACHE_FLOATS = 1 << 17 };                           /* floats of retrieved rows that fit the cache */

/* Returns the number of keys that a query retrieves after a renewal at this position, at most `open`. C version of
   `Sizes.retrieval_count` of choice.py. */
INLINE int64_t retrieval_count(const NearFar *c, int64_t position) {
    const int64_t growth = position > GROWTH_START ? position : GROWTH_START;
    const int64_t square = c->open_first * c->open_first * growth / GROWTH_START;
    int64_t root = (int64_t)sqrt((double)square);
    while (root * root > square) root--;
    while ((root + 1) * (root + 1) <= square) root++;
    return min64(root, c->open);
}

/* All 8-bit scores above `threshold`, and the ascending positions of their keys. Arrays have one more vector at the
   end. */
typedef struct {
    float *value, threshold;
    int32_t *position;
    int n;
} TopScores;

/* A prepared query: query head g of the group, position j. Keys before position `far` are far from its block. */
typedef struct {
    int64_t g, j;
    int32_t far;
} Query;

/* Buffers of prepared queries. */
typedef struct {
    int query_count, finished;               /* numbers of prepared and of finished queries */
    Query query[PREFETCH];
    float *Q, *O;                            /* (PREFETCH, dp), in base 2; (PREFETCH, lv) */
    float *top, *scale;                      /* (PREFETCH): maximum logits; total weights */
    uint32_t *packed;                        /* (PREFETCH, packed_query_size): 8-bit queries */
    int32_t *bias;                           /* (PREFETCH), of scores */
    int32_t *scores;                         /* (SCORE_QUERIES, SCORE_KEYS) */
    TopScores top_scores[PREFETCH];
    float *retrieved;                        /* (PREFETCH, retrieved_size): logits, then weights */
    int32_t *positions;                      /* (PREFETCH, open): ascending positions of retrieved keys */
    int32_t *count, *cursor;                 /* (PREFETCH): number of retrieved keys; next retrieved key */
    float *Qt, *A;                           /* of a piece: (d, PIECE), (2 b + n + K, PIECE) */
    /* Remaining keys of clusters, for a piece: */
    float *remaining;                        /* (K, PIECE): number of remaining keys */
    float *threshold;                        /* (PIECE): smallest retrieved logit, in base 2 */
    float *query_norm;                       /* (PIECE): standard deviation of the logits for tau = 1 */
    float *z_query;                          /* (PIECE, dp): queries times root */
} Work;

/* The past of a head: the keys before block t, which all queries of block t share. */
typedef struct {
    const NearFar *c;
    int64_t z, gap_bytes;                    /* head; bytes of gaps written */
    int64_t t, renewal, packed;              /* block; position of the last renewal; number of keys in panels */
    int64_t near, stop;                      /* range of near keys */
    int d, dp, dv, lv, n, K, open;
    const uint8_t *keep;                     /* (S): key mask, or null */
    Work work;
    int64_t *counters;                       /* t, renewal, K and packed, stored between decoding calls */
    float *Y, *V;                            /* (S, dp), (S, lv) */
    uint8_t *panels;                         /* (ceil(S / PANEL), dp / 4, PANEL, 4): 8-bit keys, see score_keys */
    float *step, *valid_step;                /* (S): steps; steps with NaN for keys outside clusters */
    int32_t *heavy;                          /* (n): positions of heavy hitters, -1 if missing */
    int32_t *cluster;                        /* (S): -1 for keys outside clusters */
    float *square;                           /* (S): |z|^2 */
    float *shared, *values;                  /* (n + K, dp), (n + K, lv): heavy hitters, then clusters */
    float *mass_exponent, *mass;             /* (n + K): exponent of the power of two above N; N */
    float *ysum, *zsum, *squares;            /* (K, dp), (K, dp), (K): sums of y, z - centre, |z - centre|^2 */
    float *tau;                              /* (K): variance of z in a cluster, summed over dimensions */
    float *root, *shift;                     /* (d, dp), (dp) */
    float *centres, *centre_square;          /* (K, dp): in z; (K): |c|^2 */
    float *sample, *sample_weight;           /* (2 CENTRE_SAMPLES K, d); 1, or 0 for excluded keys */
    float *X, *centred, *Xt, *dots;          /* (CHUNK, dp): z; y - shift; (dp, CHUNK); (K, CHUNK) */
    float *zero_tilt;                        /* (dp): zeros */
    int64_t *sample_cluster;                 /* (2 CENTRE_SAMPLES K) */
} Past;

typedef struct {
    void *pointer;  /* address of the pointer to set */
    size_t count;
} Buffer;

#pragma GCC visibility push(hidden)

/* Initializes the past of head z in `memory`, or from the decoding state. */
void init_past(Past *h, const NearFar *c, int64_t z, float *memory);

/* Runs body(c, z, memory) for each head. The body returns 0 if out of memory. */
int for_each_past(const NearFar *c, int (*body)(const NearFar *c, int64_t z, float *memory));

/* Stores the state for the next decoding call. */
void save_past(Past *h);

/* Advances the past to block t. Returns 0 if out of memory. */
int advance(Past *h, int64_t t);

/* Loads keys, values and mass of the heavy hitters at the positions `heavy`; -1 means a missing one, with mass 0. */
void load_heavy(const Past *h, const int32_t *heavy, float *keys, float *values, float *mass);

/* Divides the memory at `at`, unless null, among the buffers. Returns the number of floats. */
size_t assign_buffers(const Buffer *buffers, size_t number, float *at);

/* Computes means, tau and mass exponents of the clusters, from their sums. */
void summarize_clusters(Past *h);

/* Remaining keys of clusters (causal_forward.c), for a piece of R queries Q (R, dp), times `factor`. At first no key is
   retrieved. */
void start_remainder(Past *h, int R, int ld, const float *Q, float factor);

/* Removes the n keys that query r retrieves from the remaining keys. Logits are in base 2; `cluster` (S) contains the
   cluster of each key. */
void remove_retrieved(Past *h, int r, int ld, const int32_t *positions, const float *logits, int n,
                      const int32_t *cluster);

/* Replaces logits (K, ld) of cluster means, in base 2, by the weight of each remaining key relative to 2^top (ld).
   The weight is 0 if no key remains. */
void remainder_weights(const Past *h, const float *top, int ld, float *logits);

/* Number of words of a packed query. */
int64_t packed_query_size(int dp);

/* Quantizes a query (dp) and packs it for score_keys. Returns its bias. */
int32_t pack_query(const float *from, int dp, uint32_t *to);

/* Computes integer dot products (R, SCORE_KEYS) of R <= SCORE_QUERIES packed queries with n <= SCORE_KEYS keys, in
   panels with stride `step`. Each entry of a panel (dp / 4, PANEL) packs four numbers of a key, plus 128, because
   processors multiply unsigned with signed numbers. Dot products therefore start at the bias of the query: -128 times
   the sum of its numbers. The caller allocates n rounded up to a multiple of PANEL_GROUP. */
void score_keys(const uint32_t *queries, const int32_t *bias, int R, int dp, const uint8_t *panels, int64_t step,
                int n, int32_t *to);

/* Quantizes the keys before position `stop` that are not yet in panels. */
void pack_keys(Past *h, int64_t stop);

/* Finds the positions of the `open` keys with the largest scores, for each prepared query. */
void retrieve_keys(Past *h, int open);

/* Returns the number of scores that the arrays of a query can hold. */
size_t top_scores_size(int64_t open);

#pragma GCC visibility pop

INLINE int retrieved_size(const Past *h) { return round_up(h->open) + PAD; }
INLINE int unmasked(const Past *h, int64_t j) { return !h->keep || h->keep[j]; }
INLINE const float *key_row(const Past *h, int64_t j) { return h->Y + j * h->dp; }

/* Ascending positions encoded as gaps, the differences between them. Each byte MAX_GAP adds MAX_GAP - 1 to the
   next gap. The last byte is 0. n of S keys take at most n + S / (MAX_GAP - 1) + 1 bytes. encode_gaps returns the
   number of bytes, decode_gaps the number of keys. */

INLINE int64_t encode_gaps(uint8_t *to, const int32_t *positions, int n) {
    const uint8_t *start = to;
    for (int32_t i = 0, last = -1; i < n; last = positions[i++]) {
        int32_t gap = positions[i] - last;
        for (; gap >= MAX_GAP; gap -= MAX_GAP - 1) *to++ = MAX_GAP;
        *to++ = (uint8_t)gap;
    }
    *to++ = 0;
    return to - start;
}

INLINE int decode_gaps(const uint8_t *from, int32_t *positions) {
    int32_t n = 0, last = -1;
    for (; *from; from++) {
        last += *from - (*from == MAX_GAP);
        if (*from != MAX_GAP) positions[n++] = last;
    }
    return n;
}

/* Returns the position of the renewal after the one at `position`. */
INLINE int64_t next_renewal(int64_t position, int64_t b) {
    const int64_t more = position / RENEWAL_DIVISOR > MIN_RENEWAL ? position / RENEWAL_DIVISOR : MIN_RENEWAL;
    return position + (more + b - 1) / b * b;
}
