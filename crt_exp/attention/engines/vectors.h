/* What the kernels for CPUs share: vectors of floats, products of matrices (products.c) and scratch memory of threads.

   Rows of matrices in scratch memory are multiples of PAD floats apart. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

/* Numbers that Python reads from here. */
#define CHUNK 64           /* tokens that a thread takes together */
#define TINY 1e-25f        /* a smaller denominator could miss terms that float32 rounds to 0 */
#define NOT_FINITE 1       /* what a call returns in place of 0: queries, keys or values are not finite, */
#define BAD_DIRECTIONS 2   /* noise or parameters are not, */
#define NO_MEMORY 3        /* memory ended, */

#if defined(__AVX512F__)
enum { LANES = 16, ROWS = 6, VECTORS = 4 };  /* of the tile of a product that is held in registers */
#elif defined(__AVX__)
enum { LANES = 8, ROWS = 6, VECTORS = 2 };
#elif defined(__aarch64__)
enum { LANES = 4, ROWS = 6, VECTORS = 4 };
#else
enum { LANES = 4, ROWS = 6, VECTORS = 2 };
#endif
enum { PAD = 16, OK = 0 };

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));
typedef float stored __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
#define INLINE static inline __attribute__((always_inline))
#define AT(p) (*(stored *)(p))
INLINE vec load_vec(const float *p) { return AT(p); }
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

static const float LOG2E = 1.44269504088896341f, LN2 = 0.693147180559945309f;

typedef struct {
    float *data;
    int64_t batch, head, token;  /* strides; the last dimension has stride 1 */
} View;

#if defined(__clang__)  /* has no __builtin_shuffle; with the loops around it unrolled, these are single instructions */
INLINE vec shuffle(vec a, vec b, ivec from) {
    vec c;
    UNROLL for (int e = 0; e < LANES; e++) c[e] = from[e] < LANES ? a[from[e] % LANES] : b[from[e] % LANES];
    return c;
}
#else
#define shuffle __builtin_shuffle
#endif

INLINE vec choose(ivec first, vec a, vec b) { return (vec)(((ivec)a & first) | ((ivec)b & ~first)); }
INLINE vec maximum(vec a, vec b) { return choose(a > b, a, b); }
INLINE vec minimum(vec a, vec b) { return choose(a < b, a, b); }

INLINE float largest(vec a) {
    float top = a[0];
    for (int i = 1; i < LANES; i++) top = a[i] > top ? a[i] : top;
    return top;
}

INLINE float total(vec a) {
    typedef float half __attribute__((vector_size(2 * LANES)));
    typedef float quarter __attribute__((vector_size(LANES)));
    union {
        vec all;
        half part[2];
    } halves = {a};
    union {
        half all;
        quarter part[2];
    } quarters = {halves.part[0] + halves.part[1]};
    quarter last = quarters.part[0] + quarters.part[1];
    float sum = 0;
    for (int i = 0; i < LANES / 4; i++) sum += last[i];
    return sum;
}

INLINE float square_sum(const float *x, int n) {
    vec sum = {0};
    for (int p = 0; p < n; p += LANES) sum += AT(x + p) * AT(x + p);
    return total(sum);
}

INLINE float dot(const float *a, const float *b, int n) {
    vec sum = {0};
    float rest = 0;
    int p = 0;
    for (; p + LANES <= n; p += LANES) sum += AT(a + p) * AT(b + p);
    for (; p < n; p++) rest += a[p] * b[p];
    return total(sum) + rest;
}

/* 2^t for t <= 127, to 2 units in the last place; 0 below -126, -inf among it. */
INLINE vec exp2_of(vec t) {
    vec shifted = t + 12582912.0f;  /* 1.5 2^23: the sum ends in the nearest integer */
    vec f = t - (shifted - 12582912.0f);
    vec p = 1.5469732e-4f * f + 1.3390048e-3f;
    p = p * f + 9.6180016e-3f;
    p = p * f + 5.5503409e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    ivec normal = t >= -126.0f;
    return (vec)(((bits)p + ((bits)shifted << 23)) & (bits)normal);
}

/* Which part of a product is wanted, where one matrix is a triangle. */
typedef enum {
    ALL,
    LOWER,    /* the product: columns up to that of the row (and some more) */
    UP_TO,    /* a: columns up to that of the row */
    FROM      /* a: columns from that of the row on */
} Part;

#pragma GCC visibility push(hidden)

/* c (m, n) = or += a (m, k) b (k, n), a with strides (ar, ac). n is rounded up to whole vectors. UP_TO and FROM need
   k <= 96. */
void product(Part part, int m, int n, int k, const float *a, int64_t ar, int64_t ac, const float *b, int64_t ldb,
             float *c, int64_t ldc, int add);

/* to (n, m) = from (m, n)'. */
void transpose(int m, int n, const float *from, int64_t ldf, float *to, int64_t ldt);

/* Rows [start, start + n) of a tensor with d columns, times `factor` and less `shift` where there is one, with zeros up
   to column ld, in `to`. Rows that `there` excludes, whose memory may hold anything, are 0. */
void load_rows(View t, int64_t z, int64_t g, int64_t start, int n, int d, float factor, const float *shift,
               const uint8_t *there, float *to, int ld);

/* Gives each of n pieces its place in scratch memory that the thread keeps from call to call: fresh pages cost more
   than the arithmetic on them. What is there is of earlier calls. Returns 0 where memory ended. */
typedef struct {
    float **to;
    size_t count;
} Scratch;
int take_scratch(const Scratch *pieces, size_t n);

/* Gives back what is too much to keep. */
void trim_scratch(void);

#pragma GCC visibility pop

INLINE int up(int64_t n) { return (int)((n + PAD - 1) / PAD * PAD); }
INLINE float *of(View t, int64_t b, int64_t h) { return t.data + b * t.batch + h * t.head; }

/* Denormal numbers, which are slow, count as 0 until the mode that this returns is given back. */
INLINE unsigned without_denormals(void) {
#if defined(__SSE__)
    unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | 0x8040);
    return mode;
#else
    return 0;
#endif
}

INLINE void with_mode(unsigned mode) {
#if defined(__SSE__)
    _mm_setcsr(mode);
#else
    (void)mode;
#endif
}
