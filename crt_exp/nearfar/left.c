/* What cells weigh after queries have read the keys of the largest logits: the twin of left_in_cells and
   log_mean_below in nearfar/choice.py.

   The logits of a cell are taken as normal, with the mean's logit mu and deviation sd; what is left lies below `bar`.
   With t = (bar - mu) / sd, a = t - sd and mills(u) = e^(u^2 / 2) Phi(-u), each of these keys weighs

       e^bar mills(-a) / mills(-t)                  where t <= 0,
       e^(bar - t^2 / 2) mills(-a) / Phi(t)         where a < 0 < t,
       e^(mu + sd^2 / 2) Phi(a) / Phi(t)            else,

   in which no large numbers cancel and none exceeds e^bar but for rounding. */

#include "past.h"

/* For u >= 0, to 3e-7 of it: Numerical Recipes' Chebyshev fit of erfc (6.2), without its e^(-u^2 / 2). */
INLINE vec mills(vec u) {
    const vec t = 1.0f / (1.0f + 0.353553391f * u);
    vec p = 0.17087277f * t - 0.82215223f;
    p = p * t + 1.48851587f;
    p = p * t - 1.13520398f;
    p = p * t + 0.27886807f;
    p = p * t - 0.18628806f;
    p = p * t + 0.09678418f;
    p = p * t + 0.37409196f;
    p = p * t + 1.00002368f;
    p = p * t - 1.26551223f;
    return 0.5f * t * exp2_of(LOG2E * p);
}

INLINE vec magnitude(vec u) { return choose(u < 0.0f, -u, u); }

/* Phi(u), and for u < 0 without its e^(-u^2 / 2); half: u^2 / 2 in base 2. */
INLINE vec phi_of(vec u, vec half) {
    const vec below = mills(magnitude(u));
    return choose(u < 0.0f, below, 1.0f - exp2_of(-half) * below);
}

void begin_left(Past *h, int R, int ld, const float *Q, float factor) {
    const int dp = h->dp;
    Work *left = &h->k;
    for (int k = 0; k < h->K; k++)
        for (int r = 0; r < ld; r++) left->number[k * ld + r] = h->mass[h->n + k];
    product(ALL, R, h->d, h->d, Q, dp, 1, h->rows, dp, left->turned, dp, 0);
    for (int r = 0; r < R; r++) left->along[r] = factor * sqrtf(dot(left->turned + r * dp, left->turned + r * dp, h->d));
    for (int r = 0; r < ld; r++) left->bar[r] = INFINITY;
    for (int r = R; r < ld; r++) left->along[r] = 0;
}

void leave(Past *h, int r, int ld, const int32_t *places, const float *logits, int n, const int32_t *cell) {
    float bar = INFINITY;
    for (int i = 0; i < n; i++) {
        h->k.number[cell[places[i]] * ld + r] -= 1;
        bar = logits[i] < bar ? logits[i] : bar;
    }
    h->k.bar[r] = bar;
}

void weigh_left(const Past *h, const float *top, int ld, float *logits) {
    const Work *left = &h->k;
    const vec least = (vec){0} + SHARPEST, none = {0};
    for (int k = 0; k < h->K; k++) {
        const float tau = sqrtf(h->tau[k]);
        for (int r = 0; r < ld; r += LANES) {
            const vec number = AT(left->number + k * ld + r), bar = AT(left->bar + r) - AT(top + r);
            const vec mu = AT(logits + k * ld + r) - AT(top + r), sd = maximum(tau * AT(left->along + r), least);
            const vec t = LN2 * (bar - mu) / sd, a = t - sd;
            const vec half_t = 0.5f * LOG2E * t * t, half_a = 0.5f * LOG2E * a * a;
            const vec at = choose(t > 0.0f, bar - half_t, bar);
            const vec whole = choose(a < 0.0f, at, mu + 0.5f * LOG2E * sd * sd);
            const vec weight = exp2_of(whole) * phi_of(a, half_a) / phi_of(t, half_t);
            AT(logits + k * ld + r) = choose(number > 0.5f, weight, none);
        }
    }
}
