/* What Python calls to go through a sequence, forward and backward: each thread takes one head after the other, by recall.c
   and recall_backward.c, or by bounded.c where measure and centres are given. */

#include "past.h"

static int forward(const Recall *c, int64_t z, float *memory) {
    Past h;
    open_past(&h, c, z, memory);
    const int done = c->tilt ? bounded_head(&h) : recall_head(&h);
    close_past(&h);
    return done;
}

static int backward(const Recall *c, int64_t z, float *memory) {
    Back e;
    const int done = open_back(&e, c, z, memory) && (c->tilt ? bounded_backward(&e) : backward_head(&e));
    if (done) write_gradients(&e);
    close_back(&e);
    return done;
}

/* Places are of 32 bits, and memory is for no more heavy keys, cells (but for given ones) and reads than keys. */
static int fits(const Recall *c) {
    const int64_t most = c->room < c->S ? c->S : c->room, few = 1 << 20;
    const int64_t cells = c->tilt ? few : most;
    return most < INT32_MAX / PAD && c->L <= c->S && c->d > 0 && c->d < few && c->dv > 0 && c->dv < few && c->block > 0 &&
           c->block <= most && c->heavy >= 0 && c->heavy <= most && c->open >= 0 && c->open <= most && c->least >= 0 && c->least <= most && c->cells > 0 &&
           c->cells <= cells;
}

/* body(c, z, memory) returns 0 where memory ended. */
static int each_head(const Recall *c, int (*body)(const Recall *c, int64_t z, float *memory)) {
    int bad = OK;
    if (!fits(c)) return BAD_SIZES;
#pragma omp parallel num_threads((int)least_of(c->threads, c->Z)) reduction(max : bad)
    {
        const unsigned mode = without_denormals();
        float *memory = past_memory(c);
#pragma omp for schedule(dynamic)
        for (int64_t z = 0; z < c->Z; z++)
            if (!memory || !body(c, z, memory)) bad = NO_MEMORY;
        if (!memory) bad = NO_MEMORY;
        free(memory);
        with_mode(mode);
        trim_scratch();
    }
    return bad;
}

int near_far_recall(const Recall *c) { return each_head(c, forward); }

int near_far_recall_backward(const Recall *c) { return each_head(c, backward); }
