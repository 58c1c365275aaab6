/* Numbers that C and Python share: constants.py reads them from here. */

#pragma once

#define LEAF 8          /* keys of a leaf, at least */
#define GROWN 4         /* pages of which the next larger one is made */
#define TURNS 3         /* of the power iteration that finds a main axis */
#define SAMPLED 64      /* keys of a node, about, from which it is estimated */
#define SPREADS 2.0f    /* standard deviations by which the best key of a leaf is guessed to exceed its mean */
#define LOOKED 6        /* times as many keys as are read are looked at, */
#define SHARE 16        /* or one of so many of all */
#define AWAY 1e15f      /* where centres lie for which there is no key */
#define RENEWED 128     /* tokens between renewals at least, */
#define PART 2          /* and as a part of the sequence so far: a half */
#define PICKS 8         /* centres that are chosen at a time */
#define RIDGE 1e-6      /* of the mean square of queries, added to their second moments */
#define STEEPEST 60.0f  /* nats by which the weight of a key may exceed that of its cell's centre, where that is older */
#define LEAST 1e-30f    /* weights below it count as none */
#define HIDDEN (-1e30f) /* the logit of a key that is not there */
