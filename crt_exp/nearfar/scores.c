/* The products of queries with all keys of the past, as integers: exact, so the same in vectors and in PyTorch
   (nearfar/retrieval.py). */

#include "past.h"


typedef int32_t stored_ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* ---- Whole numbers ---- */

/* 0, 1, 2, ... */
INLINE ivec lane_numbers(void) {
    static const int32_t lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    ivec lane;
    memcpy(&lane, lanes, sizeof lane);
    return lane;
}

/* Signs, and within vectors (a + b, a - b) of columns that lie `half` apart; then of vectors that do. Element by
   element, in an order that retrieval.py keeps. */
static void turn(const float *from, int dp, float *x) {
    const int run = dp & -dp;
    const ivec lane = lane_numbers();
    for (int p = 0; p < dp; p += LANES) {
        vec here = (vec)((bits)AT(from + p) ^ ((bits)(lane + p + 1) * (uint32_t)SIGNS & 0x80000000u));
        UNROLL for (int half = 1; half < LANES; half *= 2)
            here = shuffle(here, here, lane ^ half) + choose((lane & half) != 0, -here, here);
        AT(x + p) = here;
    }
    for (int half = LANES; half < run; half *= 2)
        for (int from = 0; from < dp; from += 2 * half)
            for (int p = from; p < from + half; p += LANES) {
                const vec even = AT(x + p), odd = AT(x + p + half);
                AT(x + p) = even + odd, AT(x + p + half) = even - odd;
            }
}

/* Halves are rounded away from 0: twice a number is cut, and nothing is added to a product, which some processors do
   without rounding between. */
float whole_of(const float *from, int dp, int8_t *to) {
    float turned[dp];
    turn(from, dp, turned);
    vec most_of = {0};
    for (int p = 0; p < dp; p += LANES) most_of = maximum(most_of, maximum(AT(turned + p), -AT(turned + p)));
    const float most = largest(most_of), twice = most > LEAST ? 254 / most : 0;
    for (int p = 0; p < dp; p++) {
        const int cut = (int)(turned[p] * twice);
        to[p] = (int8_t)((cut + (cut > 0) - (cut < 0)) / 2);
    }
    return most > LEAST ? most / 127 : 0;
}

/* ---- Vectors ---- */

typedef uint32_t stored_bits __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
#define FOURS(p) (*(const stored_bits *)(p))

/* Pairs of the numbers 0 and 2, or 1 and 3, of a query's four, in 16 bits each. */
INLINE uint32_t pair_of(int32_t low, int32_t high) { return ((uint32_t)low & 0xffff) | (uint32_t)high << 16; }

/* sum + the products of four numbers of keys with four of a query. */
INLINE ivec add_fours(ivec sum, bits keys, uint32_t query) {
#if defined(__AVX512VNNI__)
    return (ivec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)keys, _mm512_set1_epi32((int)query));
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
    return (ivec)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)keys, _mm256_set1_epi32((int)query));
#else
    const bits even = keys & 0x00ff00ffu, odd = keys >> 8 & 0x00ff00ffu;
    const int32_t q[4] = {(int8_t)query, (int8_t)(query >> 8), (int8_t)(query >> 16), (int8_t)(query >> 24)};
#if defined(__AVX512BW__)
    const __m512i a = _mm512_madd_epi16((__m512i)even, _mm512_set1_epi32((int)pair_of(q[0], q[2])));
    return sum + (ivec)a + (ivec)_mm512_madd_epi16((__m512i)odd, _mm512_set1_epi32((int)pair_of(q[1], q[3])));
#elif defined(__AVX2__)
    const __m256i a = _mm256_madd_epi16((__m256i)even, _mm256_set1_epi32((int)pair_of(q[0], q[2])));
    return sum + (ivec)a + (ivec)_mm256_madd_epi16((__m256i)odd, _mm256_set1_epi32((int)pair_of(q[1], q[3])));
#else
    const ivec low = (ivec)(even & 0xffffu) * q[0] + (ivec)(odd & 0xffffu) * q[1];
    return sum + low + (ivec)(even >> 16) * q[2] + (ivec)(odd >> 16) * q[3];
#endif
#endif
}

enum { WIDE = LANES == 16 ? 4 : 2, BESIDE = 4 };        /* vectors of keys and queries at once */

INLINE void score_in_vectors(const int rows, const int8_t *queries, int dp, const uint8_t *panels, int64_t step, int j,
                            const int32_t *bias, int32_t *to) {
    ivec sum[BESIDE][WIDE];
    const uint8_t *at[WIDE];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int e = 0; e < WIDE; e++) sum[i][e] = (ivec){0} + bias[i];
    UNROLL for (int e = 0; e < WIDE; e++) {
        const int key = j + e * LANES;
        at[e] = panels + key / PANEL * step + key % PANEL * 4;
    }
    for (int p = 0; p < dp; p += 4) {
        bits y[WIDE];
        UNROLL for (int e = 0; e < WIDE; e++) y[e] = FOURS(at[e] + p * PANEL);
        UNROLL for (int i = 0; i < rows; i++) {
            uint32_t four;
            memcpy(&four, queries + i * dp + p, sizeof four);
            UNROLL for (int e = 0; e < WIDE; e++) sum[i][e] = add_fours(sum[i][e], y[e], four);
        }
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int e = 0; e < WIDE; e++) *(stored_ivec *)(to + i * SCORED + j + e * LANES) = sum[i][e];
}

void score_keys(const int8_t *queries, const int32_t *bias, int R, int dp, const uint8_t *panels, int64_t step, int n,
             int32_t *to) {
    for (int j = 0; j < n; j += WIDE * LANES) {
        int i = 0;
        for (; i + BESIDE <= R; i += BESIDE)
            score_in_vectors(BESIDE, queries + i * dp, dp, panels, step, j, bias + i, to + i * SCORED);
        for (; i < R; i++) score_in_vectors(1, queries + i * dp, dp, panels, step, j, bias + i, to + i * SCORED);
    }
}
