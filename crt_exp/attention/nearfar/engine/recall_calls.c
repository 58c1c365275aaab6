/* What Python calls to go through a sequence, forward and backward: each thread takes one head after the other, by recall.c
   and recall_backward.c, or by bounded.c where measure and centres are given. */

#include "past.h"

int near_far_recall(const Recall *c) {
    int bad = OK;
#pragma omp parallel num_threads((int)least_of(c->threads, c->Z)) reduction(max : bad)
    {
        const unsigned mode = without_denormals();
        float *memory = past_memory(c);
#pragma omp for schedule(dynamic)
        for (int64_t z = 0; z < c->Z; z++) {
            Past h;
            if (!memory) continue;
            open_past(&h, c, z, memory);
            if (!(c->tilt ? bounded_head(&h) : recall_head(&h))) bad = NO_MEMORY;
            close_past(&h);
        }
        if (!memory) bad = NO_MEMORY;
        free(memory);
        with_mode(mode);
        trim_scratch();
    }
    return bad;
}

int near_far_recall_backward(const Recall *c) {
    int bad = OK;
#pragma omp parallel num_threads((int)least_of(c->threads, c->Z)) reduction(max : bad)
    {
        const unsigned mode = without_denormals();
        float *memory = past_memory(c);
#pragma omp for schedule(dynamic)
        for (int64_t z = 0; z < c->Z; z++) {
            Back e;
            if (!memory) continue;
            if (!open_back(&e, c, z, memory) || !(c->tilt ? bounded_backward(&e) : backward_head(&e))) bad = NO_MEMORY;
            else write_gradients(&e);
            close_back(&e);
        }
        if (!memory) bad = NO_MEMORY;
        free(memory);
        with_mode(mode);
        trim_scratch();
    }
    return bad;
}
