"""Engine in Triton for positive exponential features on GPUs, with the interface in `engines/__init__.py`.

A call takes 3 launches forward and 5 backward, if causal 4 and 8, at any length. Nothing waits for the device.
kernels.py has the formulas.
"""

import functools
import logging
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crt_exp.attention.engines import TRITON, Form, Gradients, Saved, kernels

TILE = kernels.TILE.value
FEATURES = 16  # of a block
SUM_ROWS = 32  # of a block of the scans
PROGRAMS = 1024  # desired number for sums over all tokens


class Program(NamedTuple):
    """Sizes of the programs of a kernel."""

    chunk: int  # tokens
    warps: int
    stages: int  # of loads that overlap


DIAGONAL = Program(TILE, 4, 1)
SCAN = Program(1, 4, 2)


def program(dtype: torch.dtype, d: int) -> Program:
    """Return sizes for vectors of this type and at most d columns.

    No kernel spills registers or needs more than 99 KB of shared memory.
    """
    if dtype == torch.bfloat16 and d <= 64:
        return Program(64, 4, 2)
    return Program(16, 8, 2)


def columns(n: int) -> int:
    """Return the power of two, at least 16, that holds n columns."""
    return max(16, 1 << (n - 1).bit_length())


class Call:
    """Sizes, strides and tensors of one call, by the names that kernels use.

    Query parts and key parts are chunks in causal attention, else the parts of a sum over all tokens.
    """

    def __init__(self, x: Tensor, y: Tensor, v: Tensor, form: Form, causal: bool):
        B, H, L, d = x.shape
        Hkv, S, dv = v.shape[1:]
        M = form.rows.shape[-2]
        rows = contiguous_vectors(form.rows)
        bias = contiguous_vectors(form.bias)  # that of some maps is one number, expanded
        heads_of_map = max(form.rows.shape[1], form.scale.shape[1], form.bias.shape[1])
        HS = Hkv if heads_of_map == 1 else H
        self.causal = causal
        self.device = x.device
        self.shape = (B, H, Hkv, HS, M, dv)
        self.program = program(x.dtype, max(d, dv))
        self.query_chunks = -(-L // self.program.chunk)
        self.key_chunks = -(-S // self.program.chunk)
        self.feature_blocks = -(-M // FEATURES)
        self.scan_blocks = (self.feature_blocks, -(-(dv + 1) // SUM_ROWS))
        before = first = 0
        if causal:
            before = S - L
            first = -(-before // self.program.chunk)
            self.query_parts = self.query_chunks
            self.key_parts = self.key_chunks = first + self.query_chunks
        else:
            self.query_parts = self.parts(self.query_chunks, B * H)
            self.key_parts = self.parts(self.key_chunks, B * HS)
        keep = x if form.keep is None else form.keep.contiguous().view(torch.uint8)
        self.values = dict(
            x=x,
            y=y,
            v=v,
            keep=keep,
            rows=rows,
            scale=form.scale,
            bias=bias,
            rows_m=rows.stride(2),
            norm_weight=form.norm_weight,
            H=H,
            HS=HS,
            L=L,
            S=S,
            M=M,
            N=self.key_parts,
            first=first,
            before=before,
            D=d,
            DV=dv,
            ROWS=dv + 1,
            BLOCK_D=columns(d),
            BLOCK_V=columns(dv),
            BLOCK_M=FEATURES,
            BLOCK_R=SUM_ROWS,
            CHUNK=self.program.chunk,
            GROUP=H // Hkv,
            SHARED=H // HS,
            KEYS_OF_STATE=HS // Hkv,
            CAUSAL=causal,
            MASKED=form.keep is not None,
            HALF=x.dtype != torch.float32,
        )
        for name, t in (("x", x), ("y", y), ("v", v)):
            self.add_strides(name, t)
        for name, t in (("rows", rows), ("scale", form.scale), ("bias", bias)):
            self.values[f"{name}_b"] = t.stride(0) if t.shape[0] > 1 else 0
            self.values[f"{name}_h"] = t.stride(1) if t.shape[1] > 1 else 0

    def add_strides(self, name: str, t: Tensor) -> None:
        for dim, axis in enumerate("bht"):
            self.values[f"{name}_{axis}"] = t.stride(dim)

    def parts(self, chunks: int, heads: int) -> int:
        """Return into how many parts a sum over tokens is split, for enough programs."""
        return max(1, min(chunks, PROGRAMS // max(1, heads * self.feature_blocks)))

    def tokens_of_part(self, chunks: int, parts: int) -> int:
        return -(-chunks // parts) * self.program.chunk

    def new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def launch(self, kernel, *grid: int, program: Program | None = None, **values: Any) -> None:
        """Launch a kernel with the values that it names."""
        program = program or self.program
        values = self.values | values
        arguments = {name: values[name] for name in kernel.arg_names}
        with torch.cuda.device_of(values["y"]):  # a launch goes to the current device
            kernel[grid](**arguments, num_warps=program.warps, num_stages=program.stages)

    def sum_keys(self) -> tuple[Tensor, Tensor]:
        """Return sums before each chunk, and over all keys in the last slot, with references."""
        B, _, _, HS, M, dv = self.shape
        slots = (B, HS, self.key_parts + 1)
        states = self.new(*slots, dv + 1, M)
        own = self.new(*slots, M)
        references = self.new(*slots, M)
        self.launch(
            kernels.key_sums,
            *(self.key_parts * self.feature_blocks, B * HS),
            states=states,
            references=own,
            tokens=self.tokens_of_part(self.key_chunks, self.key_parts),
        )
        self.launch(
            kernels.scan,
            *(B * HS, *self.scan_blocks),
            program=SCAN,
            states=states,
            chunk_references=own,
            references=references,
        )
        return states, references

    def sum_queries(self) -> Tensor:
        """Return the sums of the gradients of outputs after each chunk, and over all queries."""
        B, H, _, HS, M, dv = self.shape
        count = self.query_parts
        dstates = self.new(B, H, count + 1, dv + 1, M)
        self.launch(
            kernels.query_sums,
            *(count * self.feature_blocks, B * H),
            dstates=dstates,
            count=count,
            tokens=self.tokens_of_part(self.query_chunks, count),
        )
        self.launch(
            kernels.scan_back,
            *(B * HS, *self.scan_blocks),
            program=SCAN,
            dstates=dstates,
            count=count,
        )
        return dstates


class Engine:
    """Bidirectional or causal engine. The states of causal attention are summed again for gradients."""

    unit = math.log(2)

    def __init__(self, causal: bool):
        self.causal = causal

    def empty(self, x: Tensor, y: Tensor, v: Tensor, form: Form) -> Saved:
        B, H, L, _ = x.shape
        call = Call(x, y, v, form, self.causal)
        states = logs = diagonal = (0,)
        if self.causal:
            diagonal = (B, H, L, TILE)
        else:
            logs = (B, call.shape[3], call.key_parts + 1, form.rows.shape[-2])
            states = (*logs[:3], v.shape[-1] + 1, form.rows.shape[-2])
        return Saved(
            out=v.new_empty(B, H, L, v.shape[-1]),
            logsum=form.rows.new_empty(B, H, L),
            states=form.rows.new_empty(states),
            logs=form.rows.new_empty(logs),
            levels=form.rows.new_empty(diagonal),
        )

    def forward(self, x: Tensor, y: Tensor, v: Tensor, form: Form) -> Saved:
        x, y, v = (contiguous_vectors(t) for t in (x, y, v))
        call = Call(x, y, v, form, self.causal)
        B, H, L, _ = x.shape
        out = v.new_empty(B, H, L, v.shape[-1])
        logsum = call.new(B, H, L)
        diagonal = call.new(0)
        if self.causal:
            diagonal = call.new(B, H, L, TILE)
            grid = (-(-L // TILE), B * H)
            call.launch(kernels.diagonal_logs, *grid, program=DIAGONAL, diagonal=diagonal)
        states, references = call.sum_keys()
        call.launch(
            kernels.outputs,
            *(call.query_chunks, B * H),
            states=states,
            references=references,
            diagonal=diagonal,
            out=out,
            logsum=logsum,
        )
        if self.causal:  # an operator may not return a tensor twice
            states, references = call.new(0), call.new(0)
        return Saved(out, logsum, states, references, diagonal)

    def backward(self, x, y, v, form: Form, saved: Saved, grad, grad_logsum=None) -> Gradients:
        x, y, v, grad = (contiguous_vectors(t) for t in (x, y, v, grad))
        call = Call(x, y, v, form, self.causal)
        call.add_strides("g", grad)
        dlogsum = saved.logsum if grad_logsum is None else grad_logsum.contiguous()
        call.values |= {"grad": grad, "out": saved.out, "logsum": saved.logsum}
        call.values |= {"dlogsum": dlogsum, "HAS_DLOGSUM": grad_logsum is not None}
        states, references = saved.states, saved.logs
        if self.causal:
            states, references = call.sum_keys()
        call.values |= {"states": states, "references": references, "diagonal": saved.levels}
        grads = Gradients.empty(x, y, v, form.rows, learned=False)
        B, H, L, d = x.shape
        key_heads = B * v.shape[1]
        dx_of_diagonal = dy_of_diagonal = call.new(0)
        if self.causal:
            dx_of_diagonal = call.new(B, H, L, d)
            dy_of_diagonal = call.new(key_heads, L, d)
            call.launch(
                kernels.diagonal_gradients,
                *(-(-L // TILE), key_heads),
                program=DIAGONAL,
                dx=dx_of_diagonal,
                dy=dy_of_diagonal,
            )
        call.values |= {"dx_of_diagonal": dx_of_diagonal, "dy_of_diagonal": dy_of_diagonal}
        call.values |= {"dstates": call.sum_queries(), "count": call.query_parts}
        call.launch(kernels.query_gradients, call.query_chunks, B * H, dx=grads.x)
        for of_keys in (True, False):
            grid = (call.key_chunks, key_heads)
            call.launch(kernels.key_gradients, *grid, dy=grads.y, dv=grads.v, OF_KEYS=of_keys)
        return grads

    def sum_keys(self, y: Tensor, v: Tensor, form: Form) -> tuple[Tensor, Tensor]:
        y, v = contiguous_vectors(y), contiguous_vectors(v)
        call = Call(y[:, :, :1], y, v, form, causal=False)
        states, references = call.sum_keys()
        return states[:, :, -1], references[:, :, -1] * self.unit


def contiguous_vectors(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


bidirectional = Engine(False)
causal = Engine(True)


@functools.cache
def works(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether outputs and gradients agree with those of plain operations on this device.

    A small random case is computed once for each type. A difference, or a failure to compile, is reported by one
    warning.
    """
    try:
        error = max(largest_error(device, dtype, causal) for causal in (False, True))
    except Exception as e:  # compilers and drivers raise many types
        lines = str(e).strip().splitlines() or [type(e).__name__]
        return warn_unused(device, dtype, lines[0])
    limit = 1e-3 if dtype == torch.float32 else 5e-2
    if not error <= limit:  # also if NaN
        return warn_unused(device, dtype, f"relative error {error:.1e}, expected at most {limit:g}")
    return True


# set by torch.compiler.assume_constant_result, which would import the compiler
works._dynamo_marked_constant = True


def warn_unused(device: torch.device, dtype: torch.dtype, reason: str) -> bool:
    logging.getLogger(__name__).warning(
        "the Triton kernels are not used for %s on %s (%s): using PyTorch, which takes several times as long. "
        "CRT_EXP_ENGINE=plain hides this warning",
        *(dtype, device, reason),
    )
    return False


@torch.inference_mode(False)
@torch.enable_grad()
def largest_error(device: torch.device, dtype: torch.dtype, causal: bool) -> float:
    """Return the largest relative error of outputs and gradients of the operator in a small random case."""
    g = torch.Generator().manual_seed(0)
    shapes = ((1, 2, 80, 32), (1, 1, 100, 32), (1, 1, 100, 32), (1, 2, 80, 32))
    x, y, v, grad = (torch.randn(shape, generator=g).to(device, dtype) for shape in shapes)
    rows = torch.randn(1, 2, 48, 32, generator=g).to(device)
    keep = (torch.rand(1, 100, generator=g) < 0.8).to(device)
    one = torch.ones(1, 1, 1, 1, device=device)
    form = Form(rows, one, torch.zeros(1, 1, 1, device=device).expand(1, 1, 48), 0.5, keep)
    inputs = [t.requires_grad_() for t in (x, y, v)]
    out = torch.ops.crt_exp.attention(*inputs, *form, TRITON, causal)[0]
    computed = (out, *torch.autograd.grad(out, inputs, grad))

    inputs = [t.detach().double().requires_grad_() for t in inputs]
    keys, values = (t.expand(-1, 2, -1, -1) for t in inputs[1:])
    a = inputs[0] @ rows.double().mT
    b = keys @ rows.double().mT - 0.5 * keys.square().sum(-1, keepdim=True)
    visible = keep[:, None, None].expand(1, 2, 80, 100)
    if causal:
        visible = visible & torch.ones(80, 100, dtype=torch.bool, device=device).tril(20)
    logits = torch.logsumexp(a.unsqueeze(-2) + b.unsqueeze(-3), -1)
    weights = torch.softmax(logits.masked_fill(~visible, -1e9), -1)
    out = weights @ values
    expected = (out, *torch.autograd.grad(out, inputs, grad.double()))
    errors = []
    for ours, theirs in zip(computed, expected):
        errors.append((ours.double() - theirs).detach().norm() / theirs.detach().norm())
    return float(torch.stack(errors).max())
