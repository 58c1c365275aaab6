"""Near-far attention: few keys exactly, all others by clusters, in one softmax.

What one query q in block t attends to; each key is in exactly one of these sets:

    keys   0 ........................................................................ S
           [ block ][ block ][ block ]  ...  [ t - 1 ][   t   ][ t + 1 ][ block ]  ...
                                             `------- near --------'
               H        R   H  R               each key exactly          H
           ccccc cccccccc ccc cc cccc                           cccccccc ccccccccc

    near   the blocks around the query; causal: block t - 1, and block t up to the query
    H      heavy hitters: the keys of the largest scores, the same for all queries
    R      causal: retrieved keys, those of the largest 8-bit scores of this query
    c      every other key, by the mean of its cluster; a cluster counts its far keys alone

In both directions, or to another sequence, where no key is near (both_directions.py, forward.c, backward.c), in time
linear in the length:

    metric   = moments of the queries          # |z_j - z_l|^2: the mean squared difference of two keys' logits
    heavy    = the n keys of the largest |z|^2 / 2 + mean logit
    cluster  = nearest of K centres, which lie far apart and have moved once to the means of their keys
    for each block t of queries:
        N, V = for each cluster: sums of the weights u and of u v over its keys that are far from t
        logits = [q . near keys, q . heavy hitters, q . cluster means + log(1 + spread / 2) + log N]
        out    = softmax(logits) @ [values of near keys, of heavy hitters, V / N]

Causal (causal.py, past.c, causal_forward.c, causal_backward.c); 8-bit scores take time S^2 by a small constant:

    before `exact_until`: softmax over all earlier keys
    at renewals, whenever the sequence has grown by a half:
        heavy, centres = of the keys before the window       # the metric: of the keys before the first renewal
    for each block t, with the state of the past:
        block t - 2 becomes far: its keys join their nearest clusters, N, V and means are running sums
        R      = for each query the `open` far keys of the largest 8-bit scores
        rest   = N and V less the keys of R; what is left of a cluster lies below the least logit of R
        logits = [q . near keys up to q, q . heavy hitters, q . keys of R, log mean of e^logit of the rest + log N]
        out    = softmax(logits) @ [values of near keys, of heavy hitters, of R, V / N of the rest]

Prefill and decoding (decoding.py) go on from one state of the past. A call is prepared in call.py: masks, left padding,
precision, parts of the heads, exact attention where the sequence is short. native.py calls the C sources, which do the
same as the PyTorch operators in float32 on CPUs.
"""

from crt_exp.nearfar.call import near_far_attention
from crt_exp.nearfar.layer import PRESETS, NearFar

__all__ = ["PRESETS", "NearFar", "near_far_attention"]
