"""Time of one training step or pass, interleaved: attention alone, whole Transformers,
ViTs (Performers Fig. 3, CRT Fig. 4).

Every method takes its turn in every round, so that load from outside hits all alike; a result is the median over
rounds, and a ratio the median of the ratios within a round.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from crt_exp import samplers
from crt_exp.attention import DenominatorCount, attention, exact_attention, identity_attention
from crt_exp.features import OPRF, FeatureMap, PosRF, Statistics
from crt_exp.mechanism import Mechanism
from crt_exp.models.transformer import Transformer
from crt_exp.schema import Count, Several, checked

MODELS = {"large": (8, 6, 2048, 512), "small": (1, 6, 64, 64)}  # (heads, layers, ffn, dim) of Performers Fig. 3, 20, 21
LONGEST_EXACT_MODEL = 4096  # longest sequence for exact attention in whole models
HEADS, D, M = 8, 64, 256  # of attention alone
LONGEST_EXACT = 16384     # longest sequence for the methods that are quadratic in time
HYBRIDS = {"hrf_angular": 8, "hrf_gaussian": 4, "hrf_cluster": 64}  # projections of bases: 288, 272 and 256 features
SAMPLE = 512              # queries and keys of a head that clusters are fitted to, before any time is taken
PEER_LONGEST = 65536      # where performer-pytorch's feature matrices still fit the memory of a workstation
PEER_CAUSAL = 2048        # performer-pytorch's causal form without its extension keeps L m d numbers
Method = Callable[[Tensor, Tensor, Tensor], Tensor]
Step = Callable[[], None]


@checked("task")
class Speed:
    """task=speed: milliseconds of each method at each length. `what`: attention, large, small or vit."""

    metric, lower_is_better = "ratio", True

    def __init__(self, what: Literal["attention", *MODELS, "vit"], lengths: Several[Count], rounds: Count,
                 backward: bool):
        self.what, self.lengths, self.rounds, self.backward = what, list(lengths), rounds, backward

    def records(self, mechanism: Mechanism, seed: int, done: list[dict] = ()) -> Iterator[dict[str, Any]]:
        """One record a length: <method>_ms, and `ratio`, FAVOR++ over the floor (attention) or over exact (models)."""
        for step, length in list(enumerate(self.lengths))[len(done):]:
            found = measure(self.what, length, self.rounds, self.backward)
            last = {"split": "test", "final": True} if step == len(self.lengths) - 1 else {"split": "length"}
            yield {"step": step, "epoch": 0, "length": length, **{f"{n}_ms": ms for n, (ms, _) in found.items()},
                   "ratio": found["favor++" if self.what == "attention" else "favorpp"][1], **last}

    def summary(self, records: list[dict]) -> str:
        last = records[-1]
        times = ", ".join(f"{k.removesuffix('_ms')} {v:.1f}" for k, v in last.items() if k.endswith("_ms"))
        return f"ms at length {last['length']}: {times}"


def measure(what: str, length: int, rounds: int, backward: bool) -> dict[str, tuple[float, float | None]]:
    """method -> median milliseconds, and the median ratio to the first method of the kind."""
    steps = {"attention": attention_steps, "vit": vit_steps}.get(what, model_steps)(what, length, backward)
    return interleaved(steps, rounds)


def interleaved(steps: dict[str, Step], rounds: int) -> dict[str, tuple[float, float]]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if turn:  # the first round warms up
                times[name].append(1e3 * (time.perf_counter() - start))
    base = times[next(iter(steps))]
    return {n: (statistics.median(t), statistics.median(a / b for a, b in zip(t, base))) for n, t in times.items()}


def attention_steps(what: str, length: int, backward: bool) -> dict[str, Step]:
    """The eager floor, FAVOR+ and FAVOR++ both ways, hybrids with about as many features, SDPA, performer-pytorch and
    identity, 8 heads, d = 64, m = 256."""
    run, tensors = (forward_backward if backward else forward), inputs(length)
    return {name: lambda method=method: run(method, tensors) for name, method in methods(length).items()}


def model_steps(what: str, length: int, backward: bool) -> dict[str, Step]:
    """A Transformer of one of `MODELS` with each attention, batch 1; exact first, while it is not too long."""
    heads, layers, ffn, dim = MODELS[what]
    x = torch.randn(1, length, dim, generator=torch.Generator().manual_seed(0))
    names = [n for n in ("exact", "identity", "favorp", "favorpp") if n != "exact" or length <= LONGEST_EXACT_MODEL]
    return {name: _step(Transformer(heads, layers, ffn, dim, Mechanism.of(name).layer), x, backward) for name in names}


def vit_steps(what: str, length: int, backward: bool) -> dict[str, Step]:
    """timm's ViT-Ti/16 at the image size that gives about `length` tokens, batch 1, attention swapped."""
    import timm

    from crt_exp import swap_attention

    side = max(1, round(length**0.5))
    image = torch.randn(1, 3, 16 * side, 16 * side, generator=torch.Generator().manual_seed(0))
    names = [n for n in ("exact", "favorp", "favorpp") if n != "exact" or length <= LONGEST_EXACT_MODEL]
    make = lambda: timm.create_model("vit_tiny_patch16_224", img_size=16 * side, num_classes=10)
    return {name: _step(make() if name == "exact" else swap_attention(make(), name), image, backward) for name in names}


def _step(model: torch.nn.Module, x: torch.Tensor, backward: bool) -> Step:
    def step():
        if not backward:
            with torch.no_grad():
                model(x)
            return
        model(x).square().mean().backward()
        model.zero_grad(set_to_none=True)
    return step


# ---- attention alone ------------------------------------------------------------------------------------------


def methods(length: int) -> dict[str, Method]:
    """Attention of queries, keys and values (1, HEADS, length, D), all of them already scaled by d^(-1/4)."""
    noise = samplers.orthogonal(M, D, torch.Generator().manual_seed(0), batch=(HEADS,))
    weight = noise.rows()

    def floor(q, k, v):
        return torch.exp(q @ weight.mT) @ (torch.exp(k @ weight.mT).mT @ v)

    def ours(phi, causal):
        def run(q, k, v):  # the fit is part of what FAVOR++ costs
            return attention(q, k, v, phi, noise, phi.fit(Statistics.of(q, k)), causal=causal)
        return run

    found = {"floor": floor, "favor+": ours(PosRF(), False), "favor++": ours(OPRF(), False),
             "favor+ causal": ours(PosRF(), True), "favor++ causal": ours(OPRF(), True), "identity": identity_attention,
             **{name: hybrid(Mechanism.of(name).map(), m, length) for name, m in HYBRIDS.items()}}
    if length <= LONGEST_EXACT:
        found["sdpa"] = exact_attention
        found["sdpa causal"] = lambda q, k, v: exact_attention(q, k, v, causal=True)
    return found | near_far() | peers(length)


def near_far() -> dict[str, Method]:
    """Near-far attention with its preset `default`; the codebook of the causal one is of other queries and keys."""
    make = Mechanism.of("nearfar").layer
    both, causal = (make(HEADS, D, scaling=1.0, causal=causal).eval() for causal in (False, True))
    with torch.no_grad(), causal.calibration():
        causal(*inputs(2048)[:3])
    return {"near-far": both, "near-far causal": causal}


def hybrid(phi: FeatureMap, m: int, length: int) -> Method:
    """A map with m projections, a fit to statistics included; clusters are fitted before, as in a layer."""
    g = torch.Generator().manual_seed(0)
    noise = phi.noise(m, lambda p: samplers.orthogonal(p.m, D, g, batch=(HEADS,)))
    q, k = (t.detach()[0, :, :SAMPLE] for t in inputs(length)[:2])
    kept = phi.fit(Statistics.of(q, k)) if phi.on_vectors or not phi.fitted else None

    def run(q, k, v):
        params = phi.fit(Statistics.of(q, k)) if kept is None else kept
        return attention(q, k, v, phi, noise, params, counter=DenominatorCount())
    return run


def peers(length: int) -> dict[str, Method]:
    """performer-pytorch, where it is installed (a dev dependency)."""
    try:
        from performer_pytorch.performer_pytorch import FastAttention
    except ImportError:
        return {}
    found = {"performer-pytorch": FastAttention(D, M)} if length <= PEER_LONGEST else {}
    if length <= PEER_CAUSAL:
        found["performer-pytorch causal"] = FastAttention(D, M, causal=True)
    return found


def inputs(length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries and keys with |x + y|^2 of 10 or so, as pretrained models have; values and an incoming gradient."""
    g = torch.Generator().manual_seed(1)
    draw = lambda scale: (scale * torch.randn(1, HEADS, length, D, generator=g))
    return *(draw(s).requires_grad_() for s in (0.28, 0.28, 1.0)), draw(1.0)


def forward(method: Method, tensors) -> None:
    with torch.no_grad():
        method(*(t.detach() for t in tensors[:3]))


def forward_backward(method: Method, tensors) -> None:
    out = method(*tensors[:3])
    out.backward(tensors[3])
    for t in tensors[:3]:
        t.grad = None
