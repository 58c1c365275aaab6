/* Numbers that C and Python share: constants.py reads them from here. */

#pragma once

#define DRAWN 16        /* keys for each cell, or up to twice as many, of which centres are made */
#define MIXED 40507     /* of places: what decides which of some keys is drawn */
#define AWAY 1e15f      /* where centres lie for which there is no key */
#define RENEWED 128     /* tokens between renewals at least, */
#define PART 2          /* and as a part of the sequence so far: a half */
#define GROWS 2304      /* tokens from which on queries read more keys, as the root of the place of the renewal */
#define PICKS 8         /* centres that are chosen at a time */
#define RIDGE 1e-4      /* of the mean square of queries, added to their second moments: above what float32 rounds away
                           where they lie in few directions */
#define SAME 1e-6f      /* squared distances that are a smaller part of the squared length are those of equal vectors */
#define SHARPEST 1e-6f  /* the least deviation of the logits of a cell, nats */
#define LEAST 1e-30f    /* weights below it count as none */
#define HIDDEN (-1e30f) /* the logit of a key that is not there */
#define WIDEST 255      /* gaps between keys that are read, from which on they take another byte */
#define TURNED 16       /* columns of vectors that are scored in 8 bits are a multiple of it */
#define SIGNS 2654435769 /* whose multiples decide by which signs these are turned */
