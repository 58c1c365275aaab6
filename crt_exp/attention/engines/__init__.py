"""Interface of the engines for positive exponential features.

closed_form.py has the formulas, for every device and precision; native.py and native.c implement them in C. chunks.py
serves every map by plain operations and does not have this interface.

An engine has a `unit` and three functions:

    empty(x, v, rows)           a `Saved` like that of `forward`, of which only shapes and dtypes matter
    forward(x, y, v, form)      a `Saved`: out, logsum, and what the backward pass needs
    backward(x, y, v, form, saved, grad, grad_logsum)
                                `Gradients`, from `Saved` and the gradients of out and logsum

x (B,H,L,d), y (B,H,S,d), v (B,H,S,dv). unit * logsum is the log of a row's denominator in nats, without -norm_weight
|x|^2, which all features of a row share and the caller adds (`Form.shared_logs`).
An engine that works in binary logarithms has the unit log 2, because its backward pass needs exactly the numbers of its
forward pass.
logsum is undefined in rows without keys, and its gradient there is 0.

Let da and db be the gradients of the log features of queries and keys. The gradient of the directions W = scale rows is
da^T x + db^T y, and that of the bias is the sum of da and db over the tokens.
Let g be the gradient of the output and G = [g, grad_logsum - g.output] that of [output, 1]. With G the formulas of the
engines include the gradient of the log-sum.

Notation: B, H, L queries x, S keys y, d, values v of dimension dv, M features, N segments.
"""

import re
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from crt_exp.attention.checks import check_result

BLOCK = 512  # tokens whose products with gradients are formed at once


def numbers(header: Path) -> dict[str, str]:
    """Return the numbers that a C header defines, as strings without suffixes."""
    return dict(re.findall(r"^#define (\w+) +\(?([-+.e\d]+)", header.read_text(), re.MULTILINE))


_NUMBERS = numbers(Path(__file__).with_name("vectors.h"))
CHUNK = int(_NUMBERS["CHUNK"])
NOT_FINITE = int(_NUMBERS["NOT_FINITE"])
BAD_DIRECTIONS = int(_NUMBERS["BAD_DIRECTIONS"])
NO_MEMORY = int(_NUMBERS["NO_MEMORY"])
TINY = float(_NUMBERS["TINY"])


class Saved(NamedTuple):
    """Result of a forward pass, with what its backward pass needs."""

    out: Tensor  # (B,H,L,dv)
    logsum: Tensor  # (B,H,L)
    states: Tensor  # (B,H,dv+1,M): [U, 1], values of the features as virtual keys; causal: (B,H,N,dv+1,M), sums over
    # the keys before each segment, relative to exp(logs)
    logs: Tensor  # (B,H,M): log weights of the virtual keys, without the bias of keys; causal: (B,H,N,M)
    levels: Tensor  # (B,H,.) uint8: where shorter pieces were needed; empty if bidirectional

    def of_tile(self, index: tuple[slice, slice]) -> "Saved":
        """Return views of some batch entries and heads."""
        return Saved(*(t[index] for t in self))


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

    @property
    def width(self) -> int:
        return self.rows.shape[-2]

    def shared_logs(self, x: Tensor) -> Tensor:
        """Return -norm_weight |x|^2 of all tokens, (B, H, L)."""
        return -self.norm_weight * x.to(self.rows.dtype).square().sum(-1)

    def key_offsets(self, y: Tensor) -> Tensor:
        """Return -norm_weight |y|^2, -inf where masked, (B, H, S).

        Raises NotFinite, a ValueError, if |y|^2 is not finite (CPU).
        """
        squares = torch.linalg.vector_norm(y, dim=-1, dtype=self.rows.dtype).square_()
        if self.keep is not None:
            squares.masked_fill_(~self.keep[:, None], 0)  # padding may hold NaN
        check_result(squares)
        offsets = squares.mul_(-self.norm_weight)
        if self.keep is not None:
            offsets.masked_fill_(~self.keep[:, None], -torch.inf)
        return offsets


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


def denominator_gradients(
    grad: Tensor, out: Tensor, grad_logsum: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return the last column of G, grad_logsum - g.output, (B, H, L)."""
    dots = []
    for grad_block, out_block in zip(grad.split(BLOCK, 2), out.split(BLOCK, 2)):
        dots.append((grad_block.to(dtype) * out_block).sum(-1))
    dots = torch.cat(dots, 2)
    return -dots if grad_logsum is None else grad_logsum - dots
