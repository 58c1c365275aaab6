"""Bidirectional attention with positive exponential features on a GPU in half precision,
as two fused softmax attentions.

With b the log features of keys and a those of queries, as in closed_form.py,
    U_m = sum_j softmax_j(b_jm) v_j,  log z_m = logsumexp_j b_jm,    output_i = sum_m softmax_m(a_im + log z_m) U_m:
the directions attend to the keys, then the queries to the directions. Both are softmax attentions whose logits are a
product and an offset of the key (-norm_weight |y|^2; log z + 2 bias), so torch's flash kernels compute them, and no
feature ever reaches the memory of the device. Derived here.

The kernels take no offsets, so these go into PARTS more columns, as a sum of half-precision numbers, that meet ones of
the query. They take no gradient of the logsumexp either: it adds to the gradient of every logit what the kernels
subtract as output . gradient, and so enters as one more column, which is 0 in the values, 1 in the output and minus
that gradient in the gradient of the output. So does the gradient to the log-sums of the rows themselves.
"""

import torch
from torch import Tensor

from crt_exp.attention.engines.protocol import Bidirectional, Form, row_dots

PARTS = 3         # of an offset: 24 bits in bfloat16
MASKED = -3e4     # the offset of a masked key: its weight underflows to 0
LARGEST_D = 256   # columns that the kernels take
unit = 1.0
HALF = (torch.bfloat16, torch.float16)


def applies(x: Tensor, y: Tensor, v: Tensor) -> bool:
    """Whether these tensors are for this engine: all of them half precision, on a GPU, and not too wide."""
    same = x.dtype == y.dtype == v.dtype and x.dtype in HALF
    return x.device.type == "cuda" and same and width(x.shape[-1], v.shape[-1]) <= LARGEST_D


def width(d: int, dv: int) -> int:
    """Columns of all operands: vectors and offset, or values and one more, in whole eights."""
    return -(-max(d + PARTS, dv + 1) // 8) * 8


def empty(x: Tensor, v: Tensor, rows: Tensor) -> Bidirectional:
    """The state is U (B, H, M, width)."""
    (B, H, L, d), dv, M = x.shape, v.shape[-1], rows.shape[-2]
    return Bidirectional(v.new_empty(B, H, L, dv), rows.new_empty(B, H, L), v.new_empty(B, H, M, width(d, dv)),
                         rows.new_empty(B, H, M))


def forward(x: Tensor, y: Tensor, v: Tensor, form: Form) -> Bidirectional:
    directions, keys, values = extended_keys(x, y, v, form)
    U, log_z = softmax_attention(directions, keys, values)
    queries, virtual, top = extended_queries(x, directions, log_z, form)
    out, logsum = softmax_attention(queries, virtual, U)
    out = out[..., :v.shape[-1]]
    if form.keep is not None:  # a sequence without keys: U is the mean of what was masked
        out = out.masked_fill(~form.keep.any(-1)[:, None, None, None], 0)
    return Bidirectional(out.contiguous(), logsum + top, U, log_z)


def backward(x: Tensor, y: Tensor, v: Tensor, form: Form, kept: Bidirectional, grad: Tensor,
             grad_logsum: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    d, dv, U = x.shape[-1], v.shape[-1], kept.state
    if form.keep is not None:
        grad = grad.masked_fill(~form.keep.any(-1)[:, None, None, None], 0)
    directions, keys, values = extended_keys(x, y, v, form)
    queries, virtual, top = extended_queries(x, directions, kept.log_z, form)
    columns = U.shape[-1]
    out, grad = pad(kept.out, columns), pad(grad, columns)
    if grad_logsum is not None:
        out[..., dv], grad[..., dv] = 1, -grad_logsum
    dqueries, dvirtual, dU = softmax_attention_backward(queries, virtual, U, out, kept.logsum - top, grad)
    U, dU = U.clone(), pad(dU[..., :dv], columns)
    U[..., dv], dU[..., dv] = 1, -dvirtual[..., d]
    _, dkeys, dvalues = softmax_attention_backward(directions, keys, values, U, kept.log_z, dU)
    dy = torch.addcmul(dkeys[..., :d], y, dkeys[..., d:d + 1], value=-2 * form.norm_weight)
    dvalues = dvalues[..., :dv]
    if form.keep is not None:
        dy, dvalues = (t.masked_fill(~form.keep[:, None, :, None], 0) for t in (dy, dvalues))
    return dqueries[..., :d].contiguous(), dy, dvalues.contiguous()


def extended_keys(x: Tensor, y: Tensor, v: Tensor, form: Form) -> tuple[Tensor, Tensor, Tensor]:
    """Directions [W, 1, ...] (B,H,M,width), keys [y, offset, ...] (B,H,S,width) and values [v, 0, ...]."""
    columns = width(y.shape[-1], v.shape[-1])
    rows = (form.rows * form.scale).to(x.dtype).expand(*x.shape[:2], -1, -1)
    if form.keep is not None:  # padding may hold NaN
        y, v = (t.masked_fill(~form.keep[:, None, :, None], 0) for t in (y, v))
    offsets = -form.norm_weight * row_dots(y, y, torch.float32)
    if form.keep is not None:
        offsets = offsets.masked_fill(~form.keep[:, None], MASKED)
    ones = rows.new_ones(*rows.shape[:-1], PARTS)
    keys = torch.cat([y, parts(offsets, y.dtype)], -1)
    return pad(torch.cat([rows, ones], -1), columns), pad(keys, columns), pad(v, columns)


def extended_queries(x: Tensor, directions: Tensor, log_z: Tensor, form: Form) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [x, 1, ...] (B,H,L,width), virtual keys [W, log z + 2 bias - top, ...] (B,H,M,width), and top (B,H,1)."""
    d, columns = x.shape[-1], directions.shape[-1]
    offsets = log_z + 2 * form.bias
    top = offsets.amax(-1, keepdim=True)  # smaller numbers, the same attention
    virtual = torch.cat([directions[..., :d], parts(offsets - top, x.dtype)], -1)
    return pad(torch.cat([x, x.new_ones(*x.shape[:-1], PARTS)], -1), columns), pad(virtual, columns), top


def parts(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers (...) as PARTS half-precision ones (..., PARTS) whose sum they are."""
    terms = []
    for _ in range(PARTS):
        terms.append(t.to(dtype))
        t = t - terms[-1]
    return torch.stack(terms, -1)


def pad(t: Tensor, columns: int) -> Tensor:
    """Zero columns behind those of t, up to `columns`."""
    return torch.nn.functional.pad(t, (0, columns - t.shape[-1]))


def softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """softmax(q k^T) v (B,H,L,columns) and the logsumexp of its rows (B,H,L) float32."""
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=1.0)
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, scale=1.0)[:2]


def softmax_attention_backward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsums: Tensor,
                               grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to q, k and v."""
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, logsums, 0.0, False, scale=1.0)
    random = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the state of a dropout that there is not
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, logsums, None, None, q.shape[2], k.shape[2], 0.0, False, random, random.new_empty(()),
        scale=1.0)
