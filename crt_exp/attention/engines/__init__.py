"""Engines for positive exponential features: what they are given, what they return, the numbers they share with C.

closed_form.py has the formulas, for every device and precision; native.py and native.c do the same in C. chunks.py
serves every map by plain operations, and is not one of these.

Notation: B, H, L queries x, S keys y, d, values v of dimension dv, M features, N segments. An engine has a `unit` and
three functions:

    empty(x, v, rows)           a record like that of `forward`, of which only sizes and types count
    forward(x, y, v, form)      the record: out, logsum, and what else the engine wants for its backward pass
    backward(x, y, v, form, kept, grad, grad_logsum)
                                Gradients, of the record and the gradients to out and logsum

x (B,H,L,d), y (B,H,S,d), v (B,H,S,dv). unit * logsum is the log of a row's denominator in nats, up to
-norm_weight |x|^2, which all features of a row share and the caller adds (`Form.shared_logs`). An engine that works in
binary logarithms has the unit log 2: its backward pass needs the very numbers of the forward pass.

With da and db those to the log features of queries and keys, the gradients to the directions W = scale rows and to the
bias are da^T x + db^T y and the sums of both over the tokens.

The gradient to the log-sum enters where the denominator's own does: with G = [g, gradient to the log-sum - g.output] as
that to [output, 1], every formula of the engines stays as it is. What stands in `logsum` for a row that sees no key
means nothing; its gradient is 0.
"""

import re
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from crt_exp.attention.checks import check_result

BLOCK = 512  # tokens whose products with gradients are formed at once


def numbers(header: Path) -> dict[str, str]:
    """The value of each number that a C header defines, as it is written there without a suffix."""
    return dict(re.findall(r"^#define (\w+) +\(?([-+.e\d]+)", header.read_text(), re.MULTILINE))


_NUMBERS = numbers(Path(__file__).with_name("vectors.h"))
CHUNK, NOT_FINITE, BAD_DIRECTIONS, NO_MEMORY = (
    int(_NUMBERS[name]) for name in ("CHUNK", "NOT_FINITE", "BAD_DIRECTIONS", "NO_MEMORY"))
TINY = float(_NUMBERS["TINY"])


class Kept(NamedTuple):
    """What the forward pass returns and keeps."""

    out: Tensor     # (B,H,L,dv)
    logsum: Tensor  # (B,H,L)
    states: Tensor  # (B,H,dv+1,M): [U, 1], the values of the features, as virtual keys; causal: (B,H,N,dv+1,M), what
                    # the keys before each segment have left, over exp(logs)
    logs: Tensor    # (B,H,M): log weights of the virtual keys, of the keys without the bias; causal: (B,H,N,M)
    levels: Tensor  # (B,H,.) uint8: where shorter pieces had to be taken; none in both directions


class Form(NamedTuple):
    """log phi(x) = scale rows.x + bias - norm_weight |x|^2, with what the engines are given besides the vectors."""

    rows: Tensor                # (B or 1, H or 1, M, d)
    scale: Tensor               # (B or 1, H or 1, 1, 1)
    bias: Tensor                # (B or 1, H or 1, M)
    norm_weight: float
    keep: Tensor | None         # (B, S)
    learned: bool = False       # whether rows, scale or bias get a gradient

    @property
    def width(self) -> int:
        return self.rows.shape[-2]

    def shared_logs(self, x: Tensor) -> Tensor:
        """-norm_weight |x|^2 of all tokens, (B, H, L)."""
        return -self.norm_weight * x.to(self.rows.dtype).square().sum(-1)

    def key_offsets(self, y: Tensor) -> Tensor:
        """-norm_weight |y|^2, -inf where masked, (B, H, S). Raises ValueError where it is not finite (CPU)."""
        squares = torch.linalg.vector_norm(y, dim=-1, dtype=self.rows.dtype).square_()
        if self.keep is not None:
            squares.masked_fill_(~self.keep[:, None], 0)  # padding may hold NaN
        check_result(squares)
        offsets = squares.mul_(-self.norm_weight)
        return offsets if self.keep is None else offsets.masked_fill_(~self.keep[:, None], -torch.inf)


class Gradients(NamedTuple):
    """What the backward pass gives: to queries, keys, values and, of a map that learns, what it is made of."""

    x: Tensor
    y: Tensor
    v: Tensor
    weights: Tensor  # (B,H,M,d), to scale rows of each batch entry and head; empty for a map that does not learn
    bias: Tensor     # (B,H,M); empty as well

    @classmethod
    def empty(cls, x: Tensor, y: Tensor, v: Tensor, form: Form) -> "Gradients":
        B, H, d = *x.shape[:2], x.shape[-1]
        sizes = [(B, H, form.width, d), (B, H, form.width)] if form.learned else [(0,), (0,)]
        return cls(*(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, y, v)),
                   *(form.rows.new_empty(size) for size in sizes))

    def of_map(self, form: Form) -> tuple[Tensor, Tensor, Tensor]:
        """To rows, scale and bias, which may serve several batch entries and heads."""
        scale = (self.weights * form.rows).sum((-2, -1), keepdim=True)
        return ((self.weights * form.scale).sum_to_size(form.rows.shape), scale.sum_to_size(form.scale.shape),
                self.bias.sum_to_size(form.bias.shape))


def denominator_gradients(grad: Tensor, out: Tensor, grad_logsum: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The last column of G, grad_logsum - g.output (B, H, L)."""
    blocks = zip(grad.split(BLOCK, 2), out.split(BLOCK, 2))  # without products of the size of the output
    dots = torch.cat([(g.to(dtype) * o).sum(-1) for g, o in blocks], 2)
    return -dots if grad_logsum is None else grad_logsum - dots
