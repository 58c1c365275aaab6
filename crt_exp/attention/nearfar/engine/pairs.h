/* Features in pairs of bfloat16, and their products, for recall.c and ranks.c. */

#pragma once

#include "past.h"

typedef uint32_t stored_bits __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
#define PAIRS(p) (*(const stored_bits *)(p))

/* The pair of two numbers, each rounded to the nearest. */
INLINE uint32_t pair_of(const float *x) {
    uint32_t two[2];
    memcpy(two, x, sizeof two);
    for (int i = 0; i < 2; i++) two[i] += 0x7fff + (two[i] >> 16 & 1);
    return two[0] >> 16 | (two[1] & 0xffff0000u);
}

/* sum + the products of pairs. */
INLINE vec add_pairs(vec sum, bits q, bits y) {
#if defined(__AVX512BF16__)
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)q, (__m512bh)y);
#else
    return sum + (vec)(q << 16) * (vec)(y << 16) + (vec)(q & 0xffff0000u) * (vec)(y & 0xffff0000u);
#endif
}

#pragma GCC visibility push(hidden)

/* How many queries are ranked at once, RANKED at most. */
int ranked_at_once(int dp);

/* to (R, ld): the products of R queries (R, dp / 2) with the means of n leaves, whole vectors of them. There is memory for
   RANKED queries and their products. */
void rank_leaves(const uint32_t *queries, int R, int dp, const uint32_t *means, int64_t most, int n, float *to,
                 int64_t ld);

#pragma GCC visibility pop
