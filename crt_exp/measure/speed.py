"""Time and memory of attention against length: alone, in whole Transformers, in ViTs (Performers Fig. 3, CRT Fig. 4).

Every method takes its turn in every round, so that load from outside hits all alike. A pass without gradients and the
two halves of a training step are timed apart.
"""

import io
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp import samplers
from crt_exp.attention import (
    DenominatorCount,
    attention,
    exact_attention,
    identity_attention,
    uniform_attention,
)
from crt_exp.config import choices
from crt_exp.drawing import colour, colour_by_rule, label, label_ends, new_figure, plain_ticks, save_figure
from crt_exp.features import OPRF, FeatureMap, PosRF, Statistics, TrigRF
from crt_exp.hints import Count, Several
from crt_exp.mechanism import Mechanism
from crt_exp.models.transformer import Transformer
from crt_exp.schema import checked
from crt_exp.measure.base import Series
from crt_exp.times import Watch, added, by_part, in_turns, milliseconds, ratio
from crt_exp.whole_files import write_rows

ALONE, VIT = "attention", "vit"
MODELS = {"large": (8, 6, 2048, 512), "small": (1, 6, 64, 64)}  # (heads, layers, ffn, dim) of Performers Fig. 3, 20, 21
IN_MODELS = ("exact", "identity", "favorp", "favorpp", "favorsharp", "nearfar")
LONGEST_EXACT_MODEL = 4096  # longest sequence for exact attention in whole models
HEADS, D, M = 8, 64, 256    # of attention alone
LONGEST_EXACT = 16384       # longest sequence for the methods that are quadratic in time
# Projections of the bases of hybrids (288, 272 and 256 features), and of trigonometric maps with as many features.
HYBRIDS = {"hrf_angular": 8, "hrf_gaussian": 4, "hrf_cluster": 64}
TWINS = {"hrf_angular": 256, "hrf_gaussian": 136, "hrf_cluster": 128}
TWINS_AT = 4096             # the length at which these take part
SAMPLE = 512                # queries and keys of a head that clusters are fitted to, before any time is taken
PEER_LONGEST = 65536        # where performer-pytorch's feature matrices still fit the memory of a workstation
PEER_CAUSAL = 1024          # performer-pytorch's causal form without its extension keeps L m d numbers
WARMED = 1024               # the longest sequence to warm up on
CAUSAL = " causal"          # at the end of a method's name
PASSES = ("inference", "forward", "backward")
CHUNK = 128                 # tokens of a chunk of `chunked`: of 64, 128 and 256 the fastest at 1024 tokens
Method = Callable[[Tensor, Tensor, Tensor], Tensor]
Step = Callable[[], Any]
Times = dict[str, dict[str, list[float]]]  # method -> pass -> milliseconds of each round


@checked("task")
class Speed(Series):
    """task=speed: milliseconds of each method at each length. `what`: attention, large, small or vit."""

    metric, lower_is_better, over = "ratio", True, "length"

    def __init__(self, what: Literal[ALONE, *MODELS, VIT], lengths: Several[Count], rounds: Count, backward: bool):
        self.what, self.values, self.rounds, self.backward = what, list(lengths), rounds, backward

    def check(self, mechanism: Mechanism) -> None:
        """All methods are timed, whatever the run's own."""

    def of(self, length: int, mechanism: Mechanism, seed: int) -> dict[str, Any]:
        """<method>_ms, and `ratio`, FAVOR++ over the floor (attention) or over exact (models)."""
        steps = {name: work.step if self.backward else work.infer for name, work in works(self.what, length).items()}
        measured = interleaved(steps, self.rounds)
        return {f"{n}_ms": ms for n, (ms, _) in measured.items()} | {"ratio": measured["favorpp"][1]}

    def summary(self, records: list[dict]) -> str:
        """A table: a row a length, milliseconds of each method."""
        names = list(dict.fromkeys(key for record in records for key in record if key.endswith("_ms")))
        cells = [["tokens", *(name.removesuffix("_ms") for name in names)]]
        cells += [[str(record["length"]), *(f"{record[name]:.1f}" if name in record else "" for name in names)]
                  for record in records]
        widths = [max(map(len, column)) for column in zip(*cells)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in cells]
        return "\n".join([f"milliseconds, {self.what}, {'a training step' if self.backward else 'a pass'}:", *lines])

    def keep(self, records: list[dict], directory: Path) -> None:
        """speed.csv, a row a length and method, and speed.png."""
        rows = [(record["length"], key.removesuffix("_ms"), value) for record in records
                for key, value in record.items() if key.endswith("_ms")]
        write_rows(directory / "speed.csv", [("length", "method", "ms"), *rows])
        save_figure(figure(rows), directory / "speed.png")


def figure(rows: list[tuple[int, str, float]]):
    """Milliseconds against the length, a line a method."""
    drawn, axes = new_figure(figsize=(7, 4.2))
    ends = []
    for name in dict.fromkeys(method for _, method, _ in rows):
        line = [(length, ms) for length, method, ms in rows if method == name]
        ink = colour(name) if name in choices("attention") else colour_by_rule(name)
        axes.plot(*zip(*line), marker="o", ms=3, color=ink)
        ends.append((label(name), *line[-1], ink))
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="milliseconds")
    plain_ticks(axes.xaxis), plain_ticks(axes.yaxis)
    label_ends(axes, ends)
    return drawn


def interleaved(steps: dict[str, Step], rounds: int) -> dict[str, tuple[float, float]]:
    """Median milliseconds, and the median ratio to the first step within a round."""
    times = in_turns(steps, rounds)
    base = times[next(iter(steps))]
    return {name: (statistics.median(each), ratio(each, base)) for name, each in times.items()}


# ---- a process's share of a report


def sample(arms: Sequence[str], cases: Sequence[tuple[str, int, int]], seed: int) -> Iterator[dict[str, Any]]:
    """Those of the methods that there are in each case, one case after the other: rows with what, length, arm and, in
    each round, the milliseconds of each of PASSES and of `training`, forward and backward.

    cases: what, length and rounds. The first of each kind begins with a round that is not kept, at WARMED tokens if it
    has more. seed: the number of the process, by which the order of the methods is rotated.
    """
    warm = set()
    for what, length, rounds in cases:
        if what not in warm:
            times_of(works(what, min(length, WARMED), arms), 1)
        warm.add(what)
        for name, spent in times_of(works(what, length, arms), rounds, seed).items():
            both = [sum(each) for each in zip(spent["forward"], spent["backward"])]
            yield {"what": what, "length": length, "arm": name, **spent, "training": both}


def times_of(made: dict[str, "Work"], rounds: int, turn: int = 0) -> Times:
    return {name: by_part(each) for name, each in in_turns(made, rounds, Work.times, warm=0, turn=turn).items()}


# ---- what is timed


class Work(NamedTuple):
    """A method on its inputs. forward: what backward takes. model: the module whose mode a pass without gradients and
    a training step differ in; None where they do not."""

    forward: Callable[[], Tensor]
    backward: Callable[[Tensor], None]
    model: nn.Module | None = None

    def times(self) -> dict[str, float]:
        """Milliseconds of each of PASSES."""
        self._mode(False)
        inference = milliseconds(self.infer)
        self._mode(True)
        with Watch() as forward:
            out = self.forward()
        return dict(zip(PASSES, (inference, forward.ms, milliseconds(self.backward, out))))

    @torch.no_grad()
    def infer(self) -> None:
        self.forward()

    def step(self) -> None:
        self.backward(self.forward())

    def _mode(self, training: bool) -> None:
        if self.model is not None:
            self.model.train(training)


def works(what: str, length: int, chosen: Sequence[str] | None = None) -> dict[str, Work]:
    """Of attention alone, 8 heads, d = 64, m = 256; of a Transformer of one of MODELS; or of timm's ViT-Ti/16 at the
    image size that gives about `length` tokens. Batch 1; the first is what ratios are taken to."""
    if what == ALONE:
        tensors = inputs(length)
        return {name: alone(method, tensors) for name, method in methods(length, chosen).items()}
    make = vit if what == VIT else transformer
    names = [n for n in IN_MODELS if n in (chosen or IN_MODELS) and (n != "exact" or length <= LONGEST_EXACT_MODEL)]
    return {name: whole(*make(what, length, name)) for name in names}


def alone(method: Method, tensors: tuple[Tensor, ...]) -> Work:
    *given, gradient = tensors

    def backward(out: Tensor) -> None:
        out.backward(gradient)
        for t in given:
            t.grad = None
    return Work(partial(method, *given), backward)


def whole(model: nn.Module, x: Tensor) -> Work:
    def backward(loss: Tensor) -> None:
        loss.backward()
        model.zero_grad(set_to_none=True)
    return Work(lambda: model(x).square().mean(), backward, model)


def transformer(what: str, length: int, name: str) -> tuple[nn.Module, Tensor]:
    heads, layers, ffn, dim = MODELS[what]
    x = torch.randn(1, length, dim, generator=torch.Generator().manual_seed(0))
    return Transformer(heads, layers, ffn, dim, mechanism(name).layer), x


def vit(what: str, length: int, name: str) -> tuple[nn.Module, Tensor]:
    import timm

    side = max(1, round(length**0.5))
    image = torch.randn(1, 3, 16 * side, 16 * side, generator=torch.Generator().manual_seed(0))
    model = timm.create_model("vit_tiny_patch16_224", img_size=16 * side, num_classes=10)
    return (model if name == "exact" else mechanism(name).swap(model)), image


def mechanism(name: str) -> Mechanism:
    """m = M where there are projections."""
    return Mechanism.parse(name).projecting(M)


# ---- attention alone


def methods(length: int, chosen: Sequence[str] | None = None) -> dict[str, Method]:
    """Attention of queries, keys and values (1, HEADS, length, D), queries and keys already scaled by d^(-1/4): all, or
    those chosen."""
    return {name: make() for name, make in makers(length).items() if chosen is None or name in chosen}


def makers(length: int) -> dict[str, Callable[[], Method]]:
    """How to make each of them, by the names of conf/attention and those of peers; causal ones have it behind theirs.
    What is quadratic in time, or needs the memory of a matrix, is there while that is not too long."""
    noise = samplers.orthogonal(M, D, torch.Generator().manual_seed(0), batch=(HEADS,))
    half = {"m": M // 2}
    made: dict[str, Callable[[], Method]] = {"floor": lambda: floor(noise.rows())}
    for causal, end in ((False, ""), (True, CAUSAL)):
        made |= {f"favorp{end}": partial(ours, PosRF(), noise, causal),
                  f"favorpp{end}": partial(ours, OPRF(), noise, causal),
                  f"favorsharp{end}": partial(mapped, "favorsharp", M, causal),
                  f"nearfar{end}": partial(near_far, causal)}
    made |= {f"favorsharp m={M // 2}": partial(mapped, "favorsharp", **half)}
    made |= {name: partial(mapped, name, m) for name, m in HYBRIDS.items()}
    if length == TWINS_AT:
        made |= {f"trig m={m}": partial(fitted, TrigRF(), m) for m in TWINS.values()}
    made |= {"identity": lambda: identity_attention, "uniform": lambda: uniform_attention,
              f"uniform{CAUSAL}": lambda: partial(uniform_attention, causal=True)}
    if length <= LONGEST_EXACT:
        made |= {"exact": lambda: exact_attention, f"exact{CAUSAL}": lambda: partial(exact_attention, causal=True)}
    return made | {f"chunked{CAUSAL}": lambda: chunked(noise.rows())} | peers(length)


def ours(phi: FeatureMap, noise: samplers.Noise, causal: bool) -> Method:
    """With the same noise for all; the fit is part of what FAVOR++ costs."""
    def run(q, k, v):
        return attention(q, k, v, phi, noise, phi.fit(Statistics.of(q, k)), causal=causal)
    return run


def mapped(name: str, m: int, causal: bool = False) -> Method:
    """The map of a file of conf/attention."""
    return fitted(Mechanism.of(name).map(), m, causal)


def fitted(phi: FeatureMap, m: int, causal: bool = False) -> Method:
    """A map with m projections, a fit to statistics included; clusters are fitted before, as in a layer."""
    g = torch.Generator().manual_seed(0)
    noise = phi.noise(m, lambda p: samplers.orthogonal(p.m, D, g, batch=(HEADS,)))
    kept = None
    if phi.on_vectors or not phi.fitted:
        kept = phi.fit(Statistics.of(*(t.detach()[0] for t in inputs(SAMPLE)[:2])))

    def run(q, k, v):
        params = phi.fit(Statistics.of(q, k)) if kept is None else kept
        return attention(q, k, v, phi, noise, params, causal=causal, counter=DenominatorCount())
    return run


def near_far(causal: bool) -> Method:
    return Mechanism.of("nearfar").layer(HEADS, D, scaling=1.0, causal=causal).eval()


def peers(length: int) -> dict[str, Callable[[], Method]]:
    """performer-pytorch, where it is installed."""
    if find_spec("performer_pytorch") is None:
        return {}
    made = {"performer-pytorch": partial(performer_pytorch, D, M)} if length <= PEER_LONGEST else {}
    if length <= PEER_CAUSAL:
        made[f"performer-pytorch{CAUSAL}"] = partial(performer_pytorch, D, M, causal=True)
    return made


def inputs(length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries and keys with |x + y|^2 of 10 or so, as pretrained models have; values and an incoming gradient."""
    g = torch.Generator().manual_seed(1)
    q, k, v, grad = (scale * torch.randn(1, HEADS, length, D, generator=g) for scale in (0.28, 0.28, 1.0, 1.0))
    return *(t.requires_grad_() for t in (q, k, v)), grad


def forward_backward(method: Method, tensors) -> None:
    out = method(*tensors[:3])
    out.backward(tensors[3])
    for t in tensors[:3]:
        t.grad = None


# ---- as others write it, with `weight` (..., m, d) of projections


def floor(weight: Tensor) -> Method:
    """exp(x W^T) (exp(y W^T)^T v): the two products alone, without norms, stabiliser and denominator."""
    def run(x, y, v):
        return torch.exp(x @ weight.mT) @ (torch.exp(y @ weight.mT).mT @ v)
    return run


def chunked(weight: Tensor, chunk: int = CHUNK) -> Method:
    """Causal attention with FAVOR+'s features in whole-tensor operations and autograd: within a chunk by its matrix,
    to the chunks before by their sums. O(L (m + chunk)) memory. Without a stabiliser, which would cost it time, so for
    vectors of moderate size alone."""
    def run(x, y, v):
        length = x.shape[-2]
        x, y, v = (_chunks(t, chunk) for t in (_features(x, weight), _features(y, weight), F.pad(v, (0, 1), value=1.0)))
        sums = F.pad(y.mT @ v, (0, 0, 0, 0, 1, -1)).cumsum(-3)  # of the chunks before each
        out = (x @ sums + (x @ y.mT).tril() @ v).flatten(-3, -2)[..., :length, :]
        return out[..., :-1] / out[..., -1:]
    return run


def _features(x: Tensor, weight: Tensor) -> Tensor:
    return torch.exp(x @ weight.mT - x.square().sum(-1, keepdim=True) / 2)


def _chunks(t: Tensor, chunk: int) -> Tensor:
    """(..., L, n) -> (..., L / chunk, chunk, n), zeros behind the last token."""
    return F.pad(t, (0, 0, 0, -t.shape[-2] % chunk)).unflatten(-2, (-1, chunk))


def performer_pytorch(d: int, m: int, causal: bool = False) -> Method:
    """That package's attention. Raises ImportError where it is not installed (a dev dependency)."""
    from performer_pytorch.performer_pytorch import FastAttention

    with redirect_stdout(io.StringIO()):  # it prints that its extension is not there
        return FastAttention(d, m, causal=causal)


# ---- memory


def held_by(arm: str, length: int, seed: int = 0, threads: int | None = None) -> dict[str, float]:
    """`held` of one of `methods`, as mib, and the seed, the number of the process: for one of its own."""
    torch.set_num_threads(threads or torch.get_num_threads())
    return {"mib": held(methods(length, [arm])[arm], length), "seed": seed}


def held(method: Method, length: int) -> float:
    """MiB at the peak of a forward and backward pass beyond inputs, incoming gradient, output and gradients."""
    tensors = inputs(length)
    forward_backward(method, inputs(256))  # libraries and threads
    theirs = 4 * tensors[0].numel() * tensors[0].element_size()  # output and three gradients
    return added(lambda: method(*tensors[:3]).backward(tensors[3])) - theirs / 2**20
