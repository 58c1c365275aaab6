/* Shared by the CPU kernels: float vectors, matrix products (products.c) and per-thread scratch memory.

   Rows of matrices in scratch memory have a stride that is a multiple of PAD floats. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

/* Constants that Python reads from this file. */
#define CHUNK 64           /* tokens of a chunk */
#define TINY 1e-25f        /* a smaller denominator may lack terms that underflow in float32 */
#define NOT_FINITE 1       /* return codes other than 0: queries, keys or values are not finite */
#define BAD_DIRECTIONS 2   /* projections or parameters are not finite */
#define NO_MEMORY 3        /* out of memory */

#if defined(__AVX512F__)
enum { LANES = 16, ROWS = 6, VECTORS = 4 };  /* register tile of a product */
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
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef float unaligned_vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
#define INLINE static inline __attribute__((always_inline))
/* The LANES floats at an address of any alignment, as a vector. */
#define AT(p) (*(unaligned_vec *)(p))
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

#if defined(__clang__)  /* without __builtin_shuffle; each unrolled loop becomes one instruction */
INLINE vec shuffle(vec a, vec b, ivec from) {
    vec c;
    UNROLL for (int e = 0; e < LANES; e++) c[e] = from[e] < LANES ? a[from[e] % LANES] : b[from[e] % LANES];
    return c;
}
#else
#define shuffle __builtin_shuffle
#endif

INLINE vec blend(ivec first, vec a, vec b) { return (vec)(((ivec)a & first) | ((ivec)b & ~first)); }
INLINE vec maximum(vec a, vec b) { return blend(a > b, a, b); }
INLINE vec minimum(vec a, vec b) { return blend(a < b, a, b); }

INLINE float reduce_max(vec a) {
    float max = a[0];
    for (int i = 1; i < LANES; i++) max = a[i] > max ? a[i] : max;
    return max;
}

INLINE float reduce_sum(vec a) {
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

INLINE float squared_norm(const float *x, int n) {
    vec sum = {0};
    for (int p = 0; p < n; p += LANES) sum += AT(x + p) * AT(x + p);
    return reduce_sum(sum);
}

INLINE float dot(const float *a, const float *b, int n) {
    vec sum = {0};
    float rest = 0;
    int p = 0;
    for (; p + LANES <= n; p += LANES) sum += AT(a + p) * AT(b + p);
    for (; p < n; p++) rest += a[p] * b[p];
    return reduce_sum(sum) + rest;
}

/* 2^t for t <= 127, to 2 units in the last place; 0 for t < -126, also for -inf. */
INLINE vec exp2_vec(vec t) {
    vec shifted = t + 12582912.0f;  /* 1.5 2^23: the last bits of the sum are the nearest integer */
    vec f = t - (shifted - 12582912.0f);
    vec p = 1.5469732e-4f * f + 1.3390048e-3f;
    p = p * f + 9.6180016e-3f;
    p = p * f + 5.5503409e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    ivec normal = t >= -126.0f;
    return (vec)(((uvec)p + ((uvec)shifted << 23)) & (uvec)normal);
}

/* Entries of c = a b that matmul computes or reads, if one matrix is triangular. */
typedef enum {
    FULL,
    LOWER_C,    /* c: at least the columns up to the row number */
    LOWER_A,    /* a: columns up to the row number */
    UPPER_A      /* a: columns from the row number on */
} Triangle;

#pragma GCC visibility push(hidden)

/* c (m, n) = or += a (m, k) b (k, n), where a has strides (ar, ac). n is rounded up to whole vectors. LOWER_A and
   UPPER_A need k <= 96. */
void matmul(Triangle part, int m, int n, int k, const float *a, int64_t ar, int64_t ac, const float *b, int64_t ldb,
            float *c, int64_t ldc, int add);

/* to (n, m) = from (m, n)'. */
void transpose(int m, int n, const float *from, int64_t ldf, float *to, int64_t ldt);

/* Writes rows [start, start + n) of a tensor with d columns, times `factor` and minus `shift` (if not null), to
   `to`. Columns d to ld are 0. Rows that `mask` excludes are 0, whatever their memory contains. */
void load_rows(View t, int64_t z, int64_t g, int64_t start, int n, int d, float factor, const float *shift,
               const uint8_t *mask, float *to, int ld);

/* Allocates n scratch buffers with undefined contents. Returns 0 if out of memory. A thread reuses its memory in later
   calls, because new pages cost more time than the arithmetic. */
typedef struct {
    float **pointer;
    size_t count;
} Scratch;
int allocate_scratch(const Scratch *buffers, size_t n);

/* Frees the scratch memory of this thread if it exceeds MAX_ARENA. */
void trim_scratch(void);

#pragma GCC visibility pop

INLINE int round_up(int64_t n) { return (int)((n + PAD - 1) / PAD * PAD); }
INLINE float *head_ptr(View t, int64_t b, int64_t h) { return t.data + b * t.batch + h * t.head; }

/* Treats denormal numbers as 0, for speed. Returns the previous mode for restore_float_mode. */
INLINE unsigned flush_denormals(void) {
#if defined(__SSE__)
    unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | 0x8040);
    return mode;
#else
    return 0;
#endif
}

INLINE void restore_float_mode(unsigned mode) {
#if defined(__SSE__)
    _mm_setcsr(mode);
#else
    (void)mode;
#endif
}
