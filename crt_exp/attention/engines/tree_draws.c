/* Draws of classes down a tree of sums, and products of queries with rows of its table: the twin of sampled_softmax/tree.py and
   of what sampled_softmax/tree_features.py does for positive maps. A thread takes one query at a time.

   Level 0 of the tree is the table (rows, M), a row of each level above the sum of FAN rows below, in float64. */

#include "vectors.h"

enum { FAN_BITS = 4, AHEAD = 4 };
_Static_assert(1 << FAN_BITS == FAN, "places of children are found by shifts");

typedef struct {
    int64_t B, k, M, rows, nodes, start, threads;  /* nodes of level `start`, where the way down begins */
    const double *mass;                            /* (B, M): a column is drawn in proportion to it */
    const double *ends;                            /* (M, nodes): the sums of a column up to each node */
    const double *u;                               /* (B, k, start + 2): in [0, 1) */
    const float *table;
    const double *levels[LEVELS];                  /* from 1 on, those below `start` */
    const int64_t *without;                        /* (B,): a row that is left out, or null */
    const float *weight;                           /* (B, M) */
    int64_t *ids;                                  /* (B, k) */
    float *products;                               /* (B, k) */
} Draws;

/* How many of n > 0 ascending numbers are at most x, without a branch that nobody can foresee. */
INLINE int64_t at_most(const double *ends, int64_t n, double x) {
    const double *from = ends;
    while (n > 1) {
        const int64_t half = n / 2;
        from += (from[half - 1] <= x) * half;
        n -= half;
    }
    return from - ends + (*from <= x);
}

INLINE int64_t below(int64_t number, int64_t count) { return number < count ? number : count - 1; }

/* The nodes of a level that have rows: those behind them fill it up to a multiple of FAN. */
INLINE int64_t nodes_of(const Draws *c, int64_t number) { return ((c->rows - 1) >> FAN_BITS * number) + 1; }

/* The way down of the draws of one query, all of them a level at a time: while one is at work, the rows of those that
   follow are on their way to the cache. */
typedef struct {
    const Draws *c;
    int64_t b, out;                 /* the query; the row that is left out, or -1 */
    double *masses;                 /* (M): sums of the masses up to each column */
    int64_t *column, *node;         /* (k) */
} Query;

INLINE double taken(const Query *q, int64_t column) {
    return q->out < 0 ? 0 : q->c->table[q->out * q->c->M + column];
}

/* A child of a node of the level above `number`, in proportion to their column. */
INLINE int64_t child(const Query *q, int64_t number, int64_t node, int64_t column, double u) {
    const Draws *c = q->c;
    const int64_t first = node * FAN, place = first * c->M + column;
    double ends[FAN], sum = 0;
    if (number)
        for (int i = 0; i < FAN; i++) ends[i] = c->levels[number][place + i * c->M];
    else
        for (int i = 0; i < FAN; i++) ends[i] = c->table[place + i * c->M];
    const int64_t mine = q->out >> FAN_BITS * number;
    if (q->out >= 0 && mine >> FAN_BITS == node) {
        double *held = ends + mine % FAN, rest = number ? *held - taken(q, column) : 0;
        *held = rest > EXHAUSTED * *held ? rest : 0;
    }
    for (int i = 0; i < FAN; i++) ends[i] = sum += ends[i];
    int64_t chosen = 0;
    for (int i = 0; i < FAN; i++) chosen += ends[i] <= u * sum;
    return below(first + below(chosen, FAN), nodes_of(c, number));
}

INLINE void fetch(const Query *q, int64_t number, int64_t j) {
    const Draws *c = q->c;
    const int64_t place = q->node[j] * FAN * c->M + q->column[j];
    for (int i = 0; i < FAN; i++)
        if (number) __builtin_prefetch(c->levels[number] + place + i * c->M);
        else __builtin_prefetch(c->table + place + i * c->M);
}

static void level_down(const Query *q, int64_t number, const double *u, int64_t step) {
    const int64_t k = q->c->k;
    for (int64_t j = 0; j < AHEAD && j < k; j++) fetch(q, number, j);
    for (int64_t j = 0; j < k; j++) {
        if (j + AHEAD < k) fetch(q, number, j + AHEAD);
        q->node[j] = child(q, number, q->node[j], q->column[j], u[j * step]);
    }
}

static void draw(const Query *q) {
    const Draws *c = q->c;
    const int64_t step = c->start + 2;
    const double *u = c->u + q->b * c->k * step;
    double sum = 0;
    for (int64_t i = 0; i < c->M; i++) q->masses[i] = sum += c->mass[q->b * c->M + i];
    for (int64_t j = 0; j < c->k; j++) {
        const int64_t column = below(at_most(q->masses, c->M, u[j * step] * sum), c->M);
        const double *ends = c->ends + column * c->nodes, less = taken(q, column);
        double x = u[j * step + 1] * (ends[c->nodes - 1] - less);
        if (q->out >= 0 && x >= ends[q->out >> FAN_BITS * c->start] - less) x += less;  /* behind what is left out */
        q->column[j] = column;
        q->node[j] = below(at_most(ends, c->nodes, x), nodes_of(c, c->start));
    }
    for (int64_t number = c->start - 1; number >= 0; number--) level_down(q, number, u + c->start + 1 - number, step);
    for (int64_t j = 0; j < c->k; j++) c->ids[q->b * c->k + j] = q->node[j];
}

/* ids: rows, each in proportion to a column that is drawn in proportion to the mass of its query. */
int tree_draw(const Draws *c) {
    int bad = OK;
#pragma omp parallel num_threads((int)c->threads) reduction(max : bad)
    {
        double *masses = malloc(sizeof(double) * c->M + 2 * sizeof(int64_t) * c->k);
        int64_t *column = (int64_t *)(masses + c->M), *node = column + c->k;
        if (!masses) bad = NO_MEMORY;
#pragma omp for schedule(static)
        for (int64_t b = 0; b < c->B; b++)
            if (masses) draw(&(Query){c, b, c->without ? c->without[b] : -1, masses, column, node});
        free(masses);
    }
    return bad;
}

/* products: of the weight of each query with the rows of its ids. */
int tree_products(const Draws *c) {
#pragma omp parallel for schedule(static) num_threads((int)c->threads)
    for (int64_t b = 0; b < c->B; b++)
        for (int64_t j = b * c->k; j < (b + 1) * c->k; j++)
            c->products[j] = dot(c->weight + b * c->M, c->table + c->ids[j] * c->M, (int)c->M);
    return OK;
}
