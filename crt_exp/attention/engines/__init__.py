"""Interface of the engines for positive exponential features.

native.py has the engine in C for CPUs, gpu.py that in Triton for GPUs, and selection.py chooses. chunks.py serves every
map by plain operations and does not have this interface.

An engine has a `unit` and four functions:

    empty(x, y, v, form)        a `Saved` like that of `forward`, of which only shapes and dtypes matter
    forward(x, y, v, form)      a `Saved`: out, logsum, and what the backward pass needs
    backward(x, y, v, form, saved, grad, grad_logsum)
                                `Gradients`, from `Saved` and the gradients of out and logsum (None for 0)
    sum_keys(y, v, form)        exp(-top) sum_j [v_j, 1] phi(y_j) (B,H,dv+1,M) and top (B,H,M), in nats

x (B,H,L,d), y (B,H,S,d), v (B,H,S,dv). unit * logsum is the log of a row's denominator in nats, without -norm_weight
|x|^2, which all features of a row share. It is undefined in rows without keys, and its gradient there is 0.
An engine that works in binary logarithms has the unit log 2, because its backward pass needs exactly the numbers of its
forward pass.

Bidirectional. With log features a_im of queries and b_jm of keys, z_m = sum_j exp(b_jm), U_m = sum_j exp(b_jm) v_j /
z_m and l_i = log sum_m exp(a_im + log z_m),

    output_i = sum_m exp(a_im + log z_m - l_i) U_m:

queries attend to M virtual keys with logits a + log z and values U, and each virtual key attends to the true keys.
Let g be the gradient of the output and G = [g, grad_logsum - g.output] that of [output, 1]; with G the formulas include
the gradient of the log-sum. With Q_im = exp(a_im + log z_m - l_i) and K_jm = exp(b_jm - log z_m), whose sums are 1,

    dQ = G [U, 1]^T,  d[U, 1] = Q^T G,  dv = K dU,  dK = [v, 1] d[U, 1]^T.

Causal. Query i sees keys j <= i + S - L. Chunks of tokens read the sums over all earlier chunks and multiply the
features of their own tokens; the backward pass visits the chunks in reverse with the gradient of the sums.

With da and db, the gradients of the log features, the gradient of the directions W = scale rows is da^T x + db^T y, and
that of the bias is the sum of da and db over the tokens.

Notation: B, H, L queries x, S keys y, d, values v of dimension dv, M features, N segments.
"""

import os
from typing import NamedTuple

import torch
from torch import Tensor

# names of the engines
C = "c"
TRITON = "triton"
PLAIN = "plain"
PLAIN_CHOSEN = os.environ.get("CRT_EXP_ENGINE") == PLAIN  # by the user, for everything

# those of vectors.h
CHUNK = 64  # tokens
TINY = 1e-25  # a smaller denominator may lack terms that underflow in float32
NOT_FINITE = 1
BAD_DIRECTIONS = 2
NO_MEMORY = 3


class Saved(NamedTuple):
    """Result of a forward pass, with what its backward pass needs."""

    out: Tensor  # (B,H,L,dv)
    logsum: Tensor  # (B,H,L)
    states: Tensor  # (B,H,dv+1,M): [U, 1], values of the features as virtual keys; causal: (B,H,N,dv+1,M), sums over
    # the keys before each segment, relative to exp(logs)
    logs: Tensor  # (B,H,M): log weights of the virtual keys, without the bias of keys; causal: (B,H,N,M)
    levels: Tensor  # causal: of the engine in C (B,H,.) uint8, where shorter pieces were needed; of that in Triton
    # (B,H,L,16), logs of the pairs of a tile


class Form(NamedTuple):
    """Exponent of a positive map, and options of the engines.

    log phi(x) = scale rows.x + bias - norm_weight |x|^2.
    """

    rows: Tensor  # (B or 1, H or 1, M, d)
    scale: Tensor  # (B or 1, H or 1, 1, 1)
    bias: Tensor  # (B or 1, H or 1, M)
    norm_weight: float
    keep: Tensor | None  # (B, S)
    learned: bool = False  # whether rows, scale or bias need a gradient


class Gradients(NamedTuple):
    """Gradients of queries, keys and values, and of the parts of a learned map."""

    x: Tensor
    y: Tensor
    v: Tensor
    weights: Tensor  # (B,H,M,d), of scale rows by batch entry and head; empty unless the map learns
    bias: Tensor  # (B,H,M), or empty

    @classmethod
    def empty(cls, x: Tensor, y: Tensor, v: Tensor, rows: Tensor, learned: bool) -> "Gradients":
        """Return empty gradients for a map with these rows, which may be learned."""
        B, H, _, d = x.shape
        weights_shape = (0,)
        bias_shape = (0,)
        if learned:
            weights_shape = (B, H, rows.shape[-2], d)
            bias_shape = weights_shape[:-1]
        return cls(
            x=torch.empty_like(x, memory_format=torch.contiguous_format),
            y=torch.empty_like(y, memory_format=torch.contiguous_format),
            v=torch.empty_like(v, memory_format=torch.contiguous_format),
            weights=rows.new_empty(weights_shape),
            bias=rows.new_empty(bias_shape),
        )

    def of_map(self, form: Form) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of rows, scale and bias, summed over what shares them."""
        rows = (self.weights * form.scale).sum_to_size(form.rows.shape)
        scale = (self.weights * form.rows).sum((-2, -1), keepdim=True)
        bias = self.bias.sum_to_size(form.bias.shape)
        return rows, scale.sum_to_size(form.scale.shape), bias
