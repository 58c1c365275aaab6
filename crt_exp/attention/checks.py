"""What the attention functions accept: shapes, masks, noise and parameters, each refused with one
sentence that says why.

Legend: B batch, H query heads, Hkv key heads (H is a multiple of it), L queries, S keys, d, dv.
"""

import math

import torch
from torch import Tensor
from torch.autograd import forward_ad

from crt_exp.features.base import can_ask, holds
from crt_exp.samplers.nested_tensors import Nested, leaves
from crt_exp.features.nonfinite import NotFinite
from crt_exp.samplers.noise import Noise, transforming

NOT_FINITE = ("the queries or keys hold NaN or infinite values, or their squared norms overflow: float16 ends at "
              "65504; scale the vectors down, or use bfloat16 or float32")


def check_inputs(x: Tensor, y: Tensor, v: Tensor, noise: Nested, params: Nested, causal: bool,
                 key_mask: Tensor | None) -> None:
    """Raises ValueError unless x (B,H,L,d), y (B,Hkv,S,d), v (B,Hkv,S,dv), key_mask (B,S) and the rest fit together."""
    for name, t in (("x", x), ("y", y), ("v", v)):
        if t.ndim != 4:
            raise ValueError(f"{name} has shape {tuple(t.shape)}: attention needs (batch, heads, length, dimension)")
        if not t.is_floating_point():
            raise ValueError(f"{name} holds {t.dtype}: attention needs floating-point vectors")
    if not x.device == y.device == v.device:
        raise ValueError(f"x is on {x.device}, y on {y.device} and v on {v.device}: all three must be on one device")
    if not x.shape[0] == y.shape[0] == v.shape[0]:
        raise ValueError(f"x, y and v have batch sizes {x.shape[0]}, {y.shape[0]} and {v.shape[0]}: they must agree")
    if x.shape[3] != y.shape[3]:
        raise ValueError(f"x has d = {x.shape[3]} and y has d = {y.shape[3]}: they must agree")
    if y.shape[1:3] != v.shape[1:3]:
        raise ValueError(f"y has (heads, length) {tuple(y.shape[1:3])} and v has {tuple(v.shape[1:3])}: "
                         "they must agree")
    check_shared(x.shape[1], y.shape[1])
    if 0 in (x.shape[3], v.shape[3]):
        raise ValueError(f"d = {x.shape[3]} and dv = {v.shape[3]}: vectors and values need at least one column")
    if 0 in (x.shape[2], y.shape[2]):
        raise ValueError(f"{x.shape[2]} queries and {y.shape[2]} keys: neither may be empty")
    if causal and x.shape[2] > y.shape[2]:
        raise ValueError(f"causal attention with {x.shape[2]} queries and {y.shape[2]} keys: the queries are the last "
                         "ones of the sequence, so there cannot be more of them than keys")
    check_key_mask(key_mask, y)
    for part in leaves(noise):
        _check_noise(part, x)
    for part in leaves(params):
        _check_parameter(part, x)


def check_shared(heads: int, kv_heads: int) -> None:
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} key heads: give a multiple")


def check_key_mask(key_mask: Tensor | None, y: Tensor) -> None:
    if key_mask is None:
        return
    if key_mask.ndim != 2:
        raise ValueError(f"the mask has shape {tuple(key_mask.shape)}: linear attention takes causal=True and a key "
                         "padding mask (batch, keys); an arbitrary (batch, heads, queries, keys) mask cannot be "
                         "linearised")
    if key_mask.device != y.device:
        raise ValueError(f"the key mask is on {key_mask.device} and the keys are on {y.device}: "
                         "they must be on one device")
    if key_mask.dtype != torch.bool:
        raise ValueError(f"the key mask holds {key_mask.dtype}: it must be boolean, True = keep")
    if key_mask.shape != (y.shape[0], y.shape[2]):
        raise ValueError(f"the key mask has shape {tuple(key_mask.shape)} but there are {y.shape[0]} sequences of "
                         f"{y.shape[2]} keys")


def _check_noise(noise: Noise, x: Tensor) -> None:
    if not isinstance(noise, Noise):
        raise ValueError(f"the noise is a {type(noise).__name__}: it must be what a sampler draws, or a tuple of these")
    if noise.d != x.shape[3]:
        raise ValueError(f"the noise has d = {noise.d} but the vectors have d = {x.shape[3]}")
    if not _broadcasts(noise.batch, x.shape[:2]):
        raise ValueError(f"the noise has batch {noise.batch}: it must broadcast to (batch, heads) = "
                         f"{tuple(x.shape[:2])}")


def _check_parameter(parameter: Tensor, x: Tensor) -> None:
    if not isinstance(parameter, Tensor):
        raise ValueError(f"a parameter is a {type(parameter).__name__}: it must be a tensor, in a tuple as `fit` "
                         "gives it")
    if parameter.ndim > 2 and not _broadcasts(parameter.shape[:-2], x.shape[:2]):
        raise ValueError(f"a parameter has shape {tuple(parameter.shape)}: it must broadcast to (batch, heads, 1, ...) "
                         f"= {(*x.shape[:2], 1)}")


def _broadcasts(shape, batch) -> bool:
    return len(shape) <= 2 and all(a in (1, b) for a, b in zip(reversed(tuple(shape)), reversed(tuple(batch))))


def repeat_heads(t: Tensor, heads: int) -> Tensor:
    """(B, Hkv, S, k) -> (B, H, S, k): query heads h * H / Hkv ... share key head h."""
    if t.shape[1] == heads:
        return t
    return t[:, :, None].expand(-1, -1, heads // t.shape[1], -1, -1).flatten(1, 2)


def entries(rows: Tensor, batch: int) -> Tensor:
    """The numbers of the batch entries that any index of one dimension means: numbers, those counted from the end, a
    boolean mask."""
    return torch.arange(batch, device=rows.device)[rows]


def finite(top: Tensor) -> Tensor:
    """A maximum that may be subtracted: 0 for the empty set, so that exp(-inf - 0) = 0 and not NaN."""
    return torch.where(top == -torch.inf, 0.0, top)


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 where one of them is, else float32: sums of many terms are not left to half precision."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def transformed(*tensors: Tensor) -> bool:
    """Whether operators that torch cannot look into would lose something: under a transform of torch.func (grad, vmap,
    jvp, ...), and where a tensor carries a tangent of forward-mode differentiation. Then plain operations of torch do
    the work."""
    return transforming() or (forward_ad._current_level >= 0
                              and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors))


def learning(noise: Nested, params: Nested) -> bool:
    """Whether rows or parameters are to get a gradient."""
    held = (t for n in leaves(noise) for t in n.tensors())
    return torch.is_grad_enabled() and any(t.requires_grad for t in (*held, *leaves(params)))


def check_gradient(grad: Tensor) -> None:
    """Raises ValueError for a batch of gradients as torch.autograd makes it, and for one with a tangent."""
    if torch._C._dispatch_keys(grad).has(torch._C._parse_dispatch_key("Batched")) or transformed(grad):
        raise ValueError("attention takes no batches of gradients (is_grads_batched=True, vectorize=True) and no "
                         "tangents of gradients: use torch.func.jacrev, jacfwd, hessian or vmap")


def check_result(logs: Tensor) -> None:
    """Raises where a log-sum or a squared norm is NaN or +inf: then queries or keys were not finite. CPU only:
    elsewhere the answer would have to be waited for."""
    if can_ask(logs) and not holds(logs < torch.inf):
        raise NotFinite(NOT_FINITE)


def all_finite(t: Tensor) -> bool:
    """Whether the sum of all entries is finite, where it may be asked: one pass and two operators, which is what a
    short call can bear."""
    return not can_ask(t) or math.isfinite(t.sum(dtype=compute_dtype(t)).item())


def check_entries(t: Tensor) -> None:
    """Raises as `check_result` where they are not `all_finite`."""
    if not all_finite(t):
        raise NotFinite(NOT_FINITE)
