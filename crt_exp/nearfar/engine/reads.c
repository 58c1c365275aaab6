/* The keys that each query reads for itself (nearfar/recall.py): their logits, and the sum of their values by
   weights. Rows are gathered from where they lie; nothing of the size of queries x keys x d is made. A thread takes
   some queries of a head.

   Legend: Z heads of keys, R queries of each, o places that a query reads, -1 for none, among S keys of d columns. */

#include "head.h"

typedef struct {
    int64_t Z, R, o, d, head, threads;   /* head: numbers from one head's keys to the next one's */
    const int64_t *places;               /* (Z, R, o) */
    const float *rows;                   /* (Z, S, d): keys, or values */
    const float *given;                  /* (Z, R, d): queries; or (Z, R, o): weights */
    float *out;                          /* (Z, R, o): logits, HIDDEN for none; or (Z, R, d): sums */
} Reads;

enum { AHEAD = 6 };  /* rows that are on their way to the cache */

INLINE void fetch(const float *row, int64_t d) {
    for (int64_t i = 0; i < d; i += 16) __builtin_prefetch(row + i);
}

int near_far_read_logits(const Reads *c) {
    const int64_t o = c->o, d = c->d;
#pragma omp parallel for schedule(static) num_threads((int)c->threads)
    for (int64_t row = 0; row < c->Z * c->R; row++) {
        const float *rows = c->rows + row / c->R * c->head, *q = c->given + row * d;
        const int64_t *places = c->places + row * o;
        for (int64_t j = 0; j < o; j++) {
            if (j + AHEAD < o && places[j + AHEAD] >= 0) fetch(rows + places[j + AHEAD] * d, d);
            c->out[row * o + j] = places[j] < 0 ? HIDDEN : dot(q, rows + places[j] * d, (int)d);
        }
    }
    return OK;
}

int near_far_read_sums(const Reads *c) {
    const int64_t o = c->o, d = c->d;
#pragma omp parallel for schedule(static) num_threads((int)c->threads)
    for (int64_t row = 0; row < c->Z * c->R; row++) {
        const float *rows = c->rows + row / c->R * c->head, *weight = c->given + row * o;
        const int64_t *places = c->places + row * o;
        float *out = c->out + row * d;
        for (int64_t i = 0; i < d; i++) out[i] = 0;
        for (int64_t j = 0; j < o; j++) {
            if (j + AHEAD < o && places[j + AHEAD] >= 0) fetch(rows + places[j + AHEAD] * d, d);
            if (places[j] < 0) continue;
            add_row(out, weight[j], rows + places[j] * d, d);
        }
    }
    return OK;
}
