/* Numbers that C and Python share: constants.py reads them from here. */

#pragma once

#define CHUNK 64           /* tokens that a thread takes together */
#define TINY 1e-25f        /* a smaller denominator could miss terms that float32 rounds to 0 */
#define NOT_FINITE 1       /* what a call returns in place of 0: queries, keys or values are not finite, */
#define BAD_DIRECTIONS 2   /* noise or parameters are not, */
#define NO_MEMORY 3        /* memory ended, */
