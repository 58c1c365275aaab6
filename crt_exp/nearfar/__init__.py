"""Near-far attention: exact softmax over some keys, cluster means for all others.

Each key is in exactly one of these sets for a query q in block t:

    keys   0 ........................................................................ S
           [ block ][ block ][ block ]  ...  [ t - 1 ][   t   ][ t + 1 ][ block ]  ...
                                             `------- near --------'
               H        R   H  R               each key exactly          H
           ccccc cccccccc ccc cc cccc                           cccccccc ccccccccc

    near   the query's block and its neighbours; causal: block t - 1, and block t up to the query
    H      heavy hitters: the keys with the largest scores, the same for all queries
    R      causal only: retrieved keys, those with the largest 8-bit scores for this query
    c      all other keys, represented by the mean of their cluster; a cluster counts only its far keys

Bidirectional attention (both_directions.py, forward.c, backward.c) is linear in the length. Cross-attention is the same
without near keys:

    metric   = moments of the queries          # |z_j - z_l|^2: the mean squared difference of two keys' logits
    heavy    = the n keys with the largest |z|^2 / 2 + mean logit
    cluster  = nearest of K centres: spread-out keys, then one step to the mean of their members
    for each block t of queries:
        N, V = for each cluster: sums of the weights u and of u v over its keys that are far from t
        logits = [q . near keys, q . heavy hitters, q . cluster means + log(1 + spread / 2) + log N]
        out    = softmax(logits) @ [values of near keys, of heavy hitters, V / N]

Causal attention (causal.py, past.c, causal_forward.c, causal_backward.c) takes quadratic time with a small constant for
8-bit scores:

    before `exact_until`: softmax over all earlier keys
    at renewals, whenever the sequence has grown by a half:
        heavy, centres = from the keys before the window     # metric: from the keys before the first renewal
    for each block t, with the state of the past:
        keys of block t - 2 become far and join their nearest clusters; N, V and means are running sums
        R      = for each query the `open` far keys with the largest 8-bit scores
        rest   = N and V without the keys of R; logits of the rest of a cluster lie below the least logit of R
        logits = [q . near keys up to q, q . heavy hitters, q . keys of R, log mean of e^logit of the rest + log N]
        out    = softmax(logits) @ [values of near keys, of heavy hitters, of R, V / N of the rest]

Prefill and decoding (decoding.py) continue from one state of the past. dispatch.py handles masks, left padding,
precision, groups of heads, and short sequences, which are exact. reference.py has the equations for all pairs.
native.py calls the C sources, which compute the same as the PyTorch operators, in float32 on CPUs.
"""

from crt_exp.nearfar.dispatch import near_far_attention
from crt_exp.nearfar.layer import PRESETS, NearFar

__all__ = ["PRESETS", "NearFar", "near_far_attention"]
