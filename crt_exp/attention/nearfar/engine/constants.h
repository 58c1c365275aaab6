/* Numbers that C and Python share: constants.py reads them from here. */

#pragma once

#define PICKS 8         /* centres that are chosen at a time */
#define RIDGE 1e-6      /* of the mean square of queries, added to their second moments */
#define LEAST 1e-30f    /* weights below it count as none */
#define HIDDEN (-1e30f) /* the logit of a key that is not there */
