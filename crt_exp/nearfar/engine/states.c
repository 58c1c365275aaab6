/* Sums of the keys of a head over its cells and over the blocks that are far from a block, and the gradients of that:
   the twin of engine/block_sums.py; see head.h. Only what is there is added up, never a total less what is not:
   positive sums stay exactly 0 where no key is left, and large terms of near blocks leave no trace. */

#include "head.h"

void add_block(const Head *e, int64_t s, float *state) {
    const int64_t first = s * e->b, stop = first + in_block(e, s);
    for (int64_t j = first; j < stop; j++) {
        const float u = e->u[j], *v = key_of(e, e->c->v, j);
        if (!(u > 0)) continue;
        float *to = state + e->cell[j] * e->lv;
        add_row(to, u, v, e->dv);
        to[e->dv] += u;
    }
}

void mark_states(Head *e) {
    const size_t size = sizeof(float) * e->K * e->lv;
    memset(e->total, 0, size);
    for (int64_t g = e->segments - 1; g >= 0; g--) {
        memcpy(e->marks + g * e->K * e->lv, e->total, size);  /* of the blocks beyond the first after the segment */
        for (int64_t s = least_of((g + 1) * e->T, e->N - 1); s > (g ? g * e->T : -1); s--) add_block(e, s, e->total);
    }
}

void states_of_segment(Head *e, int64_t g) {
    const int64_t state = e->K * e->lv, first = g * e->T, last = least_of(first + e->T, e->N) - 1;
    float *after = e->after + (last - first) * state;
    memcpy(after, e->marks + g * state, sizeof(float) * state);
    for (int64_t t = last - 1; t >= first; t--, after -= state) {
        memcpy(after - state, after, sizeof(float) * state);
        if (t + 2 < e->N) add_block(e, t + 2, after - state);
    }
}

/* What key j of the segment, in row i of V, gains by two gradients to states. */
static void key_of_states(Head *e, int64_t j, int64_t i, const float *before, const float *after) {
    const int64_t at = e->cell[j] * e->lv;
    const float *v = e->V + i * e->lv;
    add_row(e->dV + i * e->lv, e->u[j], before + at, e->dv);
    add_row(e->dV + i * e->lv, e->u[j], after + at, e->dv);
    e->rest[j] = before[at + e->dv] + after[at + e->dv] + dot(before + at, v, e->dv) + dot(after + at, v, e->dv);
}

void states_backward(Head *e, int64_t g) {
    const int64_t state = e->K * e->lv, first = g * e->T, count = least_of(e->T, e->N - first);
    const size_t size = sizeof(float) * state;
    float *whole = e->dwhole + 3 * g * state, *but_first = whole + state, *but_last = but_first + state;
    for (int64_t i = count - 1; i >= 0; i--) {      /* of the states two blocks later and more */
        float *after = e->after + i * state;
        if (i + 1 < count) memcpy(after, after + state, size);
        else memset(after, 0, size);
        if (i + 2 < count) add_row(after, 1, e->dstates + (i + 2) * state, state);
    }
    memset(but_last, 0, size);
    for (int64_t i = 0; i < count; i++) {           /* but_last: of those two blocks before and more */
        if (i >= 2) add_row(but_last, 1, e->dstates + (i - 2) * state, state);
        const int64_t start = (first + i) * e->b, row = (i + 1) * e->b;
        const int tokens = in_block(e, first + i);
        for (int j = 0; j < tokens; j++)
            if (e->u[start + j] > 0) key_of_states(e, start + j, row + j, but_last, e->after + i * state);
    }
    memcpy(but_first, e->after, size);
    if (count > 1) {
        add_row(but_first, 1, e->dstates + state, state);
        add_row(but_last, 1, e->dstates + (count - 2) * state, state);
    }
    memcpy(whole, but_last, size);
    add_row(whole, 1, e->dstates + (count - 1) * state, state);
}

void add_up_segments(Head *e) {
    const int64_t state = e->K * e->lv;
    const size_t size = sizeof(float) * state;
    memset(e->before, 0, size);
    memset(e->dafter + (e->segments - 1) * state, 0, size);
    for (int64_t g = e->segments - 2; g >= 0; g--) {
        memcpy(e->dafter + g * state, e->dafter + (g + 1) * state, size);
        add_row(e->dafter + g * state, 1, e->dwhole + 3 * (g + 1) * state, state);
    }
}

void other_segments(Head *e, int64_t s) {
    const int64_t state = e->K * e->lv, g = s / e->T, first = g * e->T, last = first + e->T - 1;
    const float *earlier = e->dwhole + 3 * (g - 1) * state + (s == first ? 2 * state : 0);
    const float *later = e->dwhole + 3 * (g + 1) * state + (s == last ? state : 0);
    if (s == first && g >= 2) add_row(e->before, 1, e->dwhole + 3 * (g - 2) * state, state);
    if (s > first + 1 && s < last) return;    /* as of the block before */
    memcpy(e->dstate, e->before, sizeof(float) * state);
    if (g > 0) add_row(e->dstate, 1, earlier, state);
    if (g + 1 >= e->segments) return;
    add_row(e->dstate, 1, later, state);
    add_row(e->dstate, 1, e->dafter + (g + 1) * state, state);
}
