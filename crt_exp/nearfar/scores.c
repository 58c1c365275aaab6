/* Retrieved keys of each query: those with the largest 8-bit scores (nearfar/retrieval.py).

   A key is scored for many queries at once and thus read from memory once. Each query stores the keys above a
   threshold, which rises as keys are added. A sample of the keys sets the first threshold. A query that stores too few
   keys scores all keys again without that threshold. */

#include "near_far.h"

typedef int32_t unaligned_ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
#define IVEC_AT(p) (*(unaligned_ivec *)(p))

/* ---- 8-bit scores: integer dot products of queries with all keys of the past ---- */

/* 0, 1, 2, ... */
INLINE ivec lane_numbers(void) {
    static const int32_t lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    ivec lane;
    memcpy(&lane, lanes, sizeof lane);
    return lane;
}

/* Multiplies by random signs, then by Hadamard matrices: (a + b, a - b) for columns at distance `half`. The order of
   operations is that of retrieval.py. */
static void rotate(const float *from, int dp, float *x) {
    const int period = dp & -dp;
    const ivec lane = lane_numbers();
    for (int p = 0; p < dp; p += LANES) {
        vec here = (vec)((uvec)AT(from + p) ^ ((uvec)(lane + p + 1) * (uint32_t)SIGN_FACTOR & 0x80000000u));
        UNROLL for (int half = 1; half < LANES; half *= 2)
            here = shuffle(here, here, lane ^ half) + blend((lane & half) != 0, -here, here);
        AT(x + p) = here;
    }
    for (int half = LANES; half < period; half *= 2)
        for (int from = 0; from < dp; from += 2 * half)
            for (int p = from; p < from + half; p += LANES) {
                const vec even = AT(x + p), odd = AT(x + p + half);
                AT(x + p) = even + odd, AT(x + p + half) = even - odd;
            }
}

/* Truncating the doubled number rounds halves away from 0. Adding 0.5 to a product instead would depend on whether the
   processor fuses multiplication and addition. Returns the step. */
static float quantize(const float *from, int dp, int8_t *to) {
    float rotated[dp];
    rotate(from, dp, rotated);
    vec max_vec = {0};
    for (int p = 0; p < dp; p += LANES) max_vec = maximum(max_vec, maximum(AT(rotated + p), -AT(rotated + p)));
    const float max_abs = reduce_max(max_vec), scale = max_abs > MIN_WEIGHT ? 254 / max_abs : 0;
    for (int p = 0; p < dp; p++) {
        const int doubled = (int)(rotated[p] * scale);
        to[p] = (int8_t)((doubled + (doubled > 0) - (doubled < 0)) / 2);
    }
    return max_abs > MIN_WEIGHT ? max_abs / 127 : 0;
}

void pack_keys(Past *h, int64_t stop) {
    const int dp = h->dp;
    int8_t integers[dp];
    for (int64_t j = h->packed; j < stop; j++) {
        uint8_t *panel = h->panels + j / PANEL * PANEL * dp + j % PANEL * 4;
        h->step[j] = quantize(key_row(h, j), dp, integers);
        h->valid_step[j] = unmasked(h, j) ? h->step[j] : NAN;
        for (int p = 0; p < dp; p++) panel[p / 4 * 4 * PANEL + p % 4] = (uint8_t)(integers[p] ^ 0x80);
    }
    h->packed = stop > h->packed ? stop : h->packed;
}

/* Words that hold four numbers of a query: one if the processor multiplies 8-bit numbers, two if it multiplies 16-bit
   numbers. */
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
enum { QUERY_WORDS = 1 };
#else
enum { QUERY_WORDS = 2 };
#endif

INLINE uint32_t pack_pair(int32_t low, int32_t high) { return ((uint32_t)low & 0xffff) | (uint32_t)high << 16; }

int64_t packed_query_size(int dp) { return dp / 4 * QUERY_WORDS; }

int32_t pack_query(const float *from, int dp, uint32_t *to) {
    int8_t integers[dp];
    int32_t sum = 0;
    quantize(from, dp, integers);
    for (int p = 0; p < dp; p++) sum += integers[p];
    if (QUERY_WORDS == 1) memcpy(to, integers, dp);
    else
        for (int p = 0; p < dp; p += 4) {
            *to++ = pack_pair(integers[p], integers[p + 2]);
            *to++ = pack_pair(integers[p + 1], integers[p + 3]);
        }
    return -128 * sum;
}

typedef uint32_t unaligned_uvec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t short_uvec __attribute__((vector_size(4 * LANES)));
#define UVEC_AT(p) (*(const unaligned_uvec *)(p))

/* Selects those of four numbers of each key that belong to a word of the query. */
INLINE uvec key_numbers(uvec keys, int word) {
    if (QUERY_WORDS == 1) return keys;
    return word ? (uvec)((short_uvec)keys >> 8) : keys & 0x00ff00ffu;
}

/* sum + dot products of the selected numbers of each key with a word of the query. */
INLINE ivec add_products(ivec sum, uvec keys, uint32_t query) {
#if defined(__AVX512VNNI__)
    return (ivec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)keys, _mm512_set1_epi32((int)query));
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
    return (ivec)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)keys, _mm256_set1_epi32((int)query));
#elif defined(__AVX512BW__)
    return sum + (ivec)_mm512_madd_epi16((__m512i)keys, _mm512_set1_epi32((int)query));
#elif defined(__AVX2__)
    return sum + (ivec)_mm256_madd_epi16((__m256i)keys, _mm256_set1_epi32((int)query));
#else
    return sum + (ivec)(keys & 0xffffu) * (int16_t)query + (ivec)(keys >> 16) * ((int32_t)query >> 16);
#endif
}

enum { KEY_VECTORS = LANES == 16 ? 4 : 2, QUERY_ROWS = 4 };        /* register tile of scores */

INLINE void score_tile(const int rows, const uint32_t *queries, int64_t size, const uint8_t *panels, int64_t step,
                       int j, const int32_t *bias, int32_t *to) {
    ivec sum[QUERY_ROWS][KEY_VECTORS];
    const uint8_t *at[KEY_VECTORS];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int e = 0; e < KEY_VECTORS; e++) sum[i][e] = (ivec){0} + bias[i];
    UNROLL for (int e = 0; e < KEY_VECTORS; e++) {
        const int key = j + e * LANES;
        at[e] = panels + key / PANEL * step + key % PANEL * 4;
    }
    for (int64_t p = 0; p < size; p += QUERY_WORDS) {
        uvec y[KEY_VECTORS];
        UNROLL for (int e = 0; e < KEY_VECTORS; e++) y[e] = UVEC_AT(at[e] + p * (4 * PANEL / QUERY_WORDS));
        UNROLL for (int word = 0; word < QUERY_WORDS; word++) {
            uvec numbers[KEY_VECTORS];
            UNROLL for (int e = 0; e < KEY_VECTORS; e++) numbers[e] = key_numbers(y[e], word);
            UNROLL for (int i = 0; i < rows; i++) {
                const uint32_t query = queries[i * size + p + word];
                UNROLL for (int e = 0; e < KEY_VECTORS; e++) sum[i][e] = add_products(sum[i][e], numbers[e], query);
            }
        }
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int e = 0; e < KEY_VECTORS; e++)
            IVEC_AT(to + i * SCORE_KEYS + j + e * LANES) = sum[i][e];
}

void score_keys(const uint32_t *queries, const int32_t *bias, int R, int dp, const uint8_t *panels, int64_t step,
                int n, int32_t *to) {
    const int64_t size = packed_query_size(dp);
    for (int j = 0; j < n; j += KEY_VECTORS * LANES) {
        int i = 0;
        for (; i + QUERY_ROWS <= R; i += QUERY_ROWS)
            score_tile(QUERY_ROWS, queries + i * size, size, panels, step, j, bias + i, to + i * SCORE_KEYS);
        for (; i < R; i++) score_tile(1, queries + i * size, size, panels, step, j, bias + i, to + i * SCORE_KEYS);
    }
}

/* ---- Selection of the largest scores ---- */

INLINE int count_above(const float *value, int n, float threshold) {
    int count = 0, i = 0;
#if defined(__AVX512F__)
    const __m512 least = _mm512_set1_ps(threshold);
    for (; i + 16 <= n; i += 16)
        count += __builtin_popcount(_mm512_cmp_ps_mask(_mm512_loadu_ps(value + i), least, _CMP_GT_OQ));
#else
    ivec counts = {0};
    for (; i + LANES <= n; i += LANES) counts -= AT(value + i) > threshold;
    for (int lane = 0; lane < LANES; lane++) count += counts[lane];
#endif
    for (; i < n; i++) count += value[i] > threshold;
    return count;
}

#if defined(__AVX2__) && !defined(__AVX512F__)
/* For each set of lanes, one bit each: the lanes in the set, in ascending order. */
static uint8_t lanes_of_set[1 << LANES][LANES];

__attribute__((constructor)) static void list_lanes(void) {
    for (int set = 0; set < 1 << LANES; set++)
        for (int lane = 0, count = 0; lane < LANES; lane++)
            if (set >> lane & 1) lanes_of_set[set][count++] = (uint8_t)lane;
}
#endif

/* Stores the values above the threshold and their positions, in vectors with undefined remaining lanes. Returns the
   number of values. */
INLINE int store_above(vec value, ivec position, float threshold, float *values, int32_t *positions) {
#if defined(__AVX512F__)
    const __mmask16 high = _mm512_cmp_ps_mask((__m512)value, _mm512_set1_ps(threshold), _CMP_GT_OQ);
    _mm512_storeu_ps(values, _mm512_maskz_compress_ps(high, (__m512)value));
    _mm512_storeu_si512(positions, _mm512_maskz_compress_epi32(high, (__m512i)position));
    return __builtin_popcount(high);
#elif defined(__AVX2__)
    const int high = _mm256_movemask_ps((__m256)(value > threshold));
    const __m256i order = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)lanes_of_set[high]));
    _mm256_storeu_ps(values, _mm256_permutevar8x32_ps((__m256)value, order));
    _mm256_storeu_si256((__m256i *)positions, _mm256_permutevar8x32_epi32((__m256i)position, order));
    return __builtin_popcount(high);
#else
    int count = 0;
    for (int lane = 0; lane < LANES; lane++) {
        values[count] = value[lane], positions[count] = position[lane];
        count += value[lane] > threshold;
    }
    return count;
#endif
}

/* Slightly less than x, even if x is 0 and denormal numbers count as 0. */
INLINE float slightly_below(float x) { return x - fabsf(x) * 1e-6f - 1e-37f; }

/* Finds minimum and maximum of n numbers. Estimates a threshold that k numbers exceed, from a normal distribution. */
static float estimate_threshold(const float *value, int n, int k, float *min, float *max) {
    vec sums = {0}, squares = {0}, low = {0}, high = {0};
    int i = 0;
    low += value[0], high += value[0];
    for (; i + LANES <= n; i += LANES) {
        const vec here = AT(value + i);
        sums += here, squares += here * here, low = minimum(low, here), high = maximum(high, here);
    }
    *min = -reduce_max(-low), *max = reduce_max(high);
    const float count = i > 0 ? i : 1, mean = reduce_sum(sums) / count;
    const float variance = reduce_sum(squares) / count - mean * mean;
    for (; i < n; i++) *min = value[i] < *min ? value[i] : *min, *max = value[i] > *max ? value[i] : *max;
    const float share = (float)k / n, t = sqrtf(-2 * logf(share < 0.5f ? share : 1 - share));
    const float quantile = t - (2.30753f + 0.27061f * t) / (1 + t * (0.99229f + 0.04481f * t));    /* Hastings */
    return mean + sqrtf(variance > 0 ? variance : 0) * (share < 0.5f ? quantile : -quantile);
}

/* Returns a threshold that at least k and at most `limit` of n > k finite numbers exceed. If ties prevent that, returns
   the number that is the k-th largest. */
static float find_threshold(const float *value, int n, int k, int limit) {
    float low, high, threshold = estimate_threshold(value, n, k, &low, &high);
    low = slightly_below(low);
    for (int step = 0, count_low = n, count_high = 0;; step++) {
        if (!(threshold > low && threshold < high)) threshold = low + (high - low) / 2;
        if (!(threshold > low && threshold < high)) return high;
        const int count = count_above(value, n, threshold);
        if (count >= k && count <= limit) return threshold;
        if (count > limit) low = threshold, count_low = count;
        else high = threshold, count_high = count;
        const float fraction = step % 3 == 2 ? 0.5f : (k + 0.5f - count_high) / (count_low - count_high + 1);
        threshold = high - (high - low) * fraction;
    }
}

/* Removes the scores that do not exceed the threshold. If fewer than k scores exceed the threshold, the first scores
   equal to the threshold remain, k scores in all. */
static void prune(TopScores *scores, float threshold, int k) {
    float *value = scores->value;
    int32_t *position = scores->position;
    int equal = k - count_above(value, scores->n, threshold), count = 0, i = 0;
    for (; equal <= 0 && i + LANES <= scores->n; i += LANES)
        count += store_above(AT(value + i), IVEC_AT(position + i), threshold, value + count, position + count);
    for (; i < scores->n; i++) {
        const int keep = value[i] > threshold || (value[i] == threshold && equal-- > 0);
        value[count] = value[i], position[count] = position[i];
        count += keep;
    }
    scores->n = count;
    scores->threshold = threshold > scores->threshold ? threshold : scores->threshold;
}

/* ---- Retrieved keys of each query ---- */

/* A sample of one in SAMPLE_STRIDE panels sets the first threshold, if the sample has enough keys. The expected number
   of sampled keys above the threshold is raised by SAMPLE_SIGMAS standard deviations. CACHE_KEYS keys fit the cache. */
enum { SAMPLE_STRIDE = 16, SAMPLE_SIGMAS = 3, CACHE_KEYS = 32 * SCORE_KEYS };

/* Number of stored scores above which the threshold rises. */
INLINE int max_scores(int64_t open) { return (int)(4 * open > SCORE_KEYS ? 4 * open : SCORE_KEYS); }

size_t top_scores_size(int64_t open) { return max_scores(open) + SCORE_KEYS + 2 * PAD; }

/* Appends those of n keys whose score exceeds the threshold. A score is the logit divided by the step of the query;
   NaN excludes keys outside clusters. The first key has position j, and successive panels are `stride` panels apart. */
INLINE void append_above(const Past *h, const int32_t *scores, int64_t j, int n, int stride, TopScores *top) {
    const float *valid_step = h->valid_step + j;
    float *value = top->value;
    int32_t *position = top->position;
    int i = 0, count = top->n;
    for (; i + LANES <= n; i += LANES) {
        const int at = i / PANEL * PANEL * stride + i % PANEL;
        const vec score = __builtin_convertvector(IVEC_AT(scores + i), vec) * AT(valid_step + at);
        const ivec positions = lane_numbers() + (int32_t)(j + at);
        count += store_above(score, positions, top->threshold, value + count, position + count);
    }
    for (; i < n; i++) {
        const int at = i / PANEL * PANEL * stride + i % PANEL;
        value[count] = (float)scores[i] * valid_step[at], position[count] = (int32_t)(j + at);
        count += value[count] > top->threshold;
    }
    top->n = count;
}

/* Scores n keys from position j, in every `stride`-th panel, for queries [i, i + R), R <= SCORE_QUERIES. Each query
   stores at least the k largest scores of its far keys. */
static void score_queries(Past *h, int i, int R, int64_t j, int64_t n, int stride, int k) {
    Work *w = &h->work;
    const int64_t panel = PANEL * h->dp;
    const uint32_t *queries = w->packed + i * packed_query_size(h->dp);
    for (; n > 0; j += SCORE_KEYS * stride, n -= SCORE_KEYS) {
        const int keys = (int)min64(SCORE_KEYS, n);
        const uint8_t *panels = h->panels + j / PANEL * panel;
        score_keys(queries, w->bias + i, R, h->dp, panels, stride * panel, keys, w->scores);
        for (int e = 0; e < R; e++) {
            TopScores *top = &w->top_scores[i + e];
            const int far_keys = (int)min64(keys, w->query[i + e].far - j);
            if (far_keys > 0) append_above(h, w->scores + e * SCORE_KEYS, j, far_keys, stride, top);
            if (top->n > max_scores(k)) prune(top, find_threshold(top->value, top->n, k, k + k / 4), k);
        }
    }
}

/* Scores keys for queries [r, stop), CACHE_KEYS keys at a time, so that keys and scores stay in the cache. */
static void score_range(Past *h, int r, int stop, int64_t j, int64_t n, int stride, int k) {
    for (; n > 0; j += CACHE_KEYS * stride, n -= CACHE_KEYS)
        for (int i = r; i < stop; i += SCORE_QUERIES)
            score_queries(h, i, (int)min64(SCORE_QUERIES, stop - i), j, min64(CACHE_KEYS, n), stride, k);
}

/* Sets the first thresholds from a sample of panels: most likely, at least `open` keys exceed the threshold. */
static void sample_thresholds(Past *h, int64_t open) {
    const float expected = (float)open / SAMPLE_STRIDE;
    const int k = (int)(expected + SAMPLE_SIGMAS * sqrtf(expected)) + 1;
    const int64_t keys = h->work.query[0].far / (PANEL_GROUP * SAMPLE_STRIDE) * PANEL_GROUP;
    score_range(h, 0, h->work.query_count, 0, keys, SAMPLE_STRIDE, k);
    for (int r = 0; r < h->work.query_count; r++) {
        TopScores *top = &h->work.top_scores[r];
        if (top->n > k) top->threshold = slightly_below(find_threshold(top->value, top->n, k, k + k / 8));
        top->n = 0;
    }
}

void retrieve_keys(Past *h, int open) {
    Work *w = &h->work;
    const int64_t far = w->query[w->query_count - 1].far;
    pack_keys(h, far);
    for (int r = 0; r < w->query_count; r++) w->top_scores[r].threshold = MASKED, w->top_scores[r].n = 0;
    if (w->query[0].far >= SAMPLE_STRIDE * open) sample_thresholds(h, open);
    score_range(h, 0, w->query_count, 0, far, 1, open);
    for (int r = 0; r < w->query_count; r++) {
        TopScores *top = &w->top_scores[r];
        if (top->n < open && top->threshold > MASKED) {           /* the sampled threshold is too high */
            top->n = 0, top->threshold = MASKED;
            score_range(h, r, r + 1, 0, w->query[r].far, 1, open);
        }
        if (top->n > open) prune(top, find_threshold(top->value, top->n, open, open), open);
        w->count[r] = top->n;
        memcpy(w->positions + r * h->open, top->position, sizeof(int32_t) * top->n);
    }
}
