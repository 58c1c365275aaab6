"""Time and memory against length (Performers Figure 3, CRT Figure 4): attention alone, in whole models, in layers.

Every method takes its turn in every round, so that load from outside hits all alike. Weights and inputs are random:
time does not depend on them.
"""

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp import mechanism_text
from crt_exp.attention import (DenominatorCount, Exact, attention, exact_attention, identity_attention,
                               uniform_attention)
from crt_exp.config import choices
from crt_exp.data.protein import LETTERS, TOKENS
from crt_exp.drawing import colour, colour_by_rule, label, label_ends, new_figure, plain_ticks, save_figure
from crt_exp.features import Statistics
from crt_exp.hints import Count, Several
from crt_exp.mechanism import Mechanism
from crt_exp.models.conformer_transducer import PRESETS, ConformerTransducer
from crt_exp.models.language import LanguageDescription, LanguageModel, TransformerSizes
from crt_exp.models.transformer import Transformer
from crt_exp.samplers import orthogonal
from crt_exp.schema import checked
from crt_exp.measure.base import Measurement
from crt_exp.swap.calibration import fill_statistics
from crt_exp.times import Call, Update, Watch, added, in_turns, milliseconds
from crt_exp.whole_files import write_rows

CAUSAL = " causal"          # at the end of a method's name
FLOOR, CHUNKED, PEER = "floor", f"chunked{CAUSAL}", "performer-pytorch"
FORMED = "exact, matrix formed"  # softmax of a stored (L, L) matrix: attention before there were fused kernels
NAMES = (FLOOR, CHUNKED, PEER, PEER + CAUSAL, FORMED)
HEADS, D = 8, 64            # of attention alone
MODELS = {"large": (8, 6, 2048, 512), "small": (1, 6, 64, 64)}  # (heads, layers, ffn, dim) of Performers Fig. 3, 20, 21
PROTEINS: dict[str, TransformerSizes] = {
    "protein_model": {"heads": 8, "layers": 1, "d_ff": 256, "d": 256},
    "protein_wide": {"heads": 8, "layers": 1, "d_ff": 2048, "d": 512},
    "protein_letter": {"heads": 8, "layers": 6, "d_ff": 2048, "d": 512}}
READ = {"protein_layer": 32768, "protein_model": 32768, "protein_wide": 8192}  # letters of a step; at least one row
M = {"protein_layer": 128, "protein_model": 64, "protein_wide": 128, "protein_letter": 128, "one_head": 300}
OTHER_M = 256               # projections where neither the method nor `M` says how many
ALONE = (FLOOR, *(f"{name}{end}" for end in ("", CAUSAL) for name in ("favorp", "favorpp", "favorsharp", "nearfar")),
         "favorsharp m=128", "hrf_angular m=8", "hrf_gaussian m=4", "hrf_cluster m=64", "identity", "uniform",
         f"uniform{CAUSAL}", "exact", f"exact{CAUSAL}", CHUNKED, PEER, PEER + CAUSAL)
IN_MODELS = ("exact", "identity", "favorp", "favorpp", "favorsharp", "nearfar")
# The longest sequences where no methods are named; the causal peer keeps L m d numbers.
LONGEST = {"exact": 16384, f"exact{CAUSAL}": 16384, PEER: 65536, PEER + CAUSAL: 1024}
# Not by their layers, which copy what they scale.
PLAIN = {"exact": exact_attention, "identity": identity_attention, "uniform": uniform_attention}
SAMPLE = 512                # queries and keys of a head that clusters are fitted to, before any time is taken
WARMED = 1024               # the longest sequence to warm up on
CHUNK = 128                 # tokens of a chunk of `chunked`: of 64, 128 and 256 the fastest at 1024 tokens
PATCH, RATE, WORDS = 16, 16000, 32  # pixels; of audio, and what a recogniser tells apart
CONFORMER = PRESETS["paper"] | {"layers": 4}
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


# ---- methods


def at_hand(what: str, length: int) -> Sequence[str]:
    """Those that are timed where none are named: all, what is quadratic in time while that is not too long."""
    if what == "attention":
        peer = find_spec("performer_pytorch") is not None
        return [name for name in ALONE if length <= LONGEST.get(name, length) and (peer or not name.startswith(PEER))]
    return [name for name in IN_MODELS if name != "exact" or length <= 4096] if what in PASSES else []


def mechanism_of(method: str, what: str) -> Mechanism:
    """With the projections of `what`, where the text does not say how many."""
    made = Mechanism.parse(method)
    return made if "m" in mechanism_text.read(method)[1] else made.projecting(M.get(what, OTHER_M))


def check_methods(texts: Sequence[str], what: str) -> None:
    """Raises ConfigError."""
    for text in texts:
        if text not in NAMES:
            mechanism_of(text.removesuffix(CAUSAL) if what == "attention" else text, what)


class Work(NamedTuple):
    """A method on its inputs. forward: what backward takes. model: the module whose mode a pass without gradients and
    a training step differ in."""

    forward: Callable[[], Tensor]
    backward: Callable[[Tensor], None]
    model: nn.Module = nn.Identity()

    def times(self, backward: bool = True) -> dict[str, float]:
        """Milliseconds of each pass; training: forward and backward."""
        self.model.eval()
        inference = milliseconds(torch.no_grad()(self.forward))
        if not backward:
            return {"inference": inference}
        self.model.train()
        with Watch() as forward:
            out = self.forward()
        back = milliseconds(self.backward, out)
        return {"inference": inference, "forward": forward.ms, "backward": back, "training": forward.ms + back}


# ---- attention alone: of queries, keys and values (1, HEADS, length, D), already scaled by d^(-1/4)


def alone(method: str, length: int) -> Work:
    *given, gradient = inputs(length)

    def backward(out: Tensor) -> None:
        out.backward(gradient)
        for t in given:
            t.grad = None
    return Work(partial(attend_by(method), *given), backward)


def attend_by(method: str) -> Attend:
    """A fit to statistics is part of what a map costs."""
    name, causal = method.removesuffix(CAUSAL), method.endswith(CAUSAL)
    if method in (FLOOR, CHUNKED):
        weight = orthogonal(OTHER_M, D, torch.Generator().manual_seed(0), batch=(HEADS,)).rows()
        return (floor if method == FLOOR else chunked)(weight)
    if name in PLAIN:
        return partial(PLAIN[name], causal=causal)
    if name == PEER:
        return performer_pytorch(D, OTHER_M, causal)
    mechanism = mechanism_of(name, "attention")
    return of_map(mechanism, causal) if mechanism.estimates else mechanism.layer(HEADS, D, scaling=1.0,
                                                                                 causal=causal).eval()


def of_map(mechanism: Mechanism, causal: bool = False) -> Attend:
    """Clusters are fitted before, as in a layer."""
    phi = mechanism.map()
    noise = mechanism.noise(D, torch.Generator().manual_seed(0), (HEADS,))
    seen = Statistics.of(*(t.detach()[0] for t in inputs(SAMPLE)[:2]))
    kept = phi.fit(seen) if phi.on_vectors or not phi.fitted else None

    def run(q, k, v):
        params = phi.fit(Statistics.of(q, k)) if kept is None else kept
        return attention(q, k, v, phi, noise, params, causal=causal, counter=DenominatorCount())
    return run


@lru_cache(maxsize=4)
def inputs(length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries and keys with |x + y|^2 of 10 or so, as pretrained models have; values and an incoming gradient."""
    g = torch.Generator().manual_seed(1)
    q, k, v, grad = (scale * torch.randn(1, HEADS, length, D, generator=g) for scale in (0.28, 0.28, 1.0, 1.0))
    return *(t.requires_grad_() for t in (q, k, v)), grad


def floor(weight: Tensor) -> Attend:
    """exp(x W^T) (exp(y W^T)^T v), projections W (..., m, d): the two products alone, without norms, stabiliser and
    denominator."""
    return lambda x, y, v: torch.exp(x @ weight.mT) @ (torch.exp(y @ weight.mT).mT @ v)


def chunked(weight: Tensor, chunk: int = CHUNK) -> Attend:
    """Causal attention with FAVOR+'s features in whole-tensor operations and autograd: within a chunk by its matrix,
    to the chunks before by their sums. O(L (m + chunk)) memory. Without a stabiliser, which would cost it time, so for
    vectors of moderate size alone."""
    def features(x):
        return torch.exp(x @ weight.mT - x.square().sum(-1, keepdim=True) / 2)
    def parts(t):
        """(..., L, n) -> (..., L / chunk, chunk, n), zeros behind the last token."""
        return F.pad(t, (0, 0, 0, -t.shape[-2] % chunk)).unflatten(-2, (-1, chunk))

    def run(x, y, v):
        length = x.shape[-2]
        x, y, v = (parts(t) for t in (features(x), features(y), F.pad(v, (0, 1), value=1.0)))
        sums = F.pad(y.mT @ v, (0, 0, 0, 0, 1, -1)).cumsum(-3)  # of the chunks before each
        out = (x @ sums + (x @ y.mT).tril() @ v).flatten(-3, -2)[..., :length, :]
        return out[..., :-1] / out[..., -1:]
    return run


def performer_pytorch(d: int, m: int, causal: bool) -> Attend:
    """That package's attention. Raises ImportError where it is not installed (a dev dependency)."""
    from performer_pytorch.performer_pytorch import FastAttention

    with redirect_stdout(io.StringIO()):  # it prints that its extension is not there
        return FastAttention(d, m, causal=causal)


class OneHead:
    """d = 16, forward. Neither the projections, which are drawn anew each time, nor the fit is timed."""

    def __init__(self, method: str, length: int):
        self.mechanism, self.g = mechanism_of(method, "one_head"), torch.Generator().manual_seed(0)
        x, y, self.v = torch.randn(3, 1, 1, length, 16, generator=torch.Generator().manual_seed(0))
        self.x, self.y = x / 2, y / 2  # d^(-1/4)

    @torch.no_grad()
    def times(self, backward: bool) -> dict[str, float]:
        return {"ms": milliseconds(self.drawn(), self.x, self.y, self.v)}

    def drawn(self) -> Attend:
        if not self.mechanism.estimates:
            return self.mechanism.layer(1, 16, scaling=1.0).eval()
        phi = self.mechanism.map()
        return partial(attention, phi=phi, noise=self.mechanism.noise(16, self.g),
                       params=phi.fit(Statistics.of(self.x[0, 0], self.y[0, 0])), counter=DenominatorCount())


# ---- Transformers and vision transformers, batch 1


def transformer(what: str, method: str, length: int) -> Work:
    heads, layers, ffn, dim = MODELS[what]
    x = torch.randn(1, length, dim, generator=torch.Generator().manual_seed(0))
    return whole(Transformer(heads, layers, ffn, dim, mechanism_of(method, what).layer), x)


def whole(model: nn.Module, x: Tensor) -> Work:
    def backward(loss: Tensor) -> None:
        loss.backward()
        model.zero_grad(set_to_none=True)
    return Work(lambda: model(x).square().mean(), backward, model)


def vit(method: str, tokens: int) -> tuple[nn.Module, Tensor]:
    """timm's ViT-Ti/16 and an image of about so many patches, besides which it reads a class token."""
    import timm

    side = PATCH * max(1, round(tokens**0.5))
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=side, num_classes=10)
    if method == FORMED:
        for block in model.blocks:
            block.attn.fused_attn = False
    elif method != "exact":
        mechanism_of(method, "vit").swap(model)
    return model, torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(0))


def vit_step(method: str, tokens: int) -> Update:
    model, image = vit(method, tokens)
    return Update(model, lambda model: F.cross_entropy(model(image), torch.zeros(1, dtype=torch.long)))


# ---- unidirectional language models of proteins, a layer of them, a drawn letter


def causal_layer(what: str, method: str, heads: int, d: int, **sizes: Any) -> nn.Module:
    return Formed(heads, d, **sizes) if method == FORMED else mechanism_of(method, what).layer(heads, d, **sizes)


class Formed(Exact):
    """Causal softmax attention that forms its matrix."""

    def attend(self, x, y, v, *, causal, key_mask):
        later = torch.ones(x.shape[2], y.shape[2], dtype=torch.bool, device=x.device).triu(1)
        return (x @ y.mT).masked_fill(later, -torch.inf).softmax(-1) @ v


def rows_read(what: str, length: int) -> int:
    """Of a step, so that length alone differs."""
    return max(1, READ[what] // length)


def layer_step(method: str, length: int) -> Call:
    """Forward and backward of one attention layer in training: two heads, d = 64."""
    layer, g = causal_layer("protein_layer", method, 2, D, causal=True), torch.Generator().manual_seed(0)
    *given, gradient = torch.randn(4, rows_read("protein_layer", length), 2, length, D, generator=g)
    for t in given:
        t.requires_grad_()

    def step() -> None:
        layer(*given).backward(gradient)
        for t in given:
            t.grad = None
    return step


def language_model(what: str, method: str, length: int) -> LanguageModel:
    """With random weights, and positions for rows of that length."""
    torch.manual_seed(0)
    return LanguageModel(LanguageDescription(TOKENS, length, PROTEINS[what], causal=True),
                         partial(causal_layer, what, method))


def protein_step(what: str, method: str, length: int, rows: int | None = None) -> Update:
    """Next-letter training on so many rows, of which none is padded."""
    tokens = letters(rows or rows_read(what, length), length + 1)
    return Update(language_model(what, method, length),
                  lambda model: F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()))


def letters(*shape: int) -> Tensor:
    return torch.randint(len(LETTERS), shape, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def drawn_letter(method: str, position: int) -> Call:
    """The next letter behind so many, each call one further; three are behind it that do not count."""
    model = language_model("protein_letter", method, position + SAMPLE).eval()
    if method != FORMED and mechanism_of(method, "protein_letter").draws:
        fill_statistics(model, [letters(1, min(position, SAMPLE))])
    pasts = model.begin()
    model(letters(1, position), pasts=pasts)
    draw = torch.no_grad()(partial(model, letters(1, 1), pasts=pasts))
    for _ in range(3):
        draw()
    return draw


# ---- the encoder of a Conformer transducer of the paper's sizes with four layers, on one recording


def encoder(method: str) -> nn.Module:
    torch.manual_seed(0)
    model = ConformerTransducer(WORDS, RATE, CONFORMER)
    return (model if method == "exact" else mechanism_of(method, "conformer").swap(model)).encoder.eval()


def hearing(model: nn.Module, seconds: int) -> Call:
    noise = 3000 * torch.randn(1, seconds * RATE, generator=torch.Generator().manual_seed(0))
    audio = noise.clamp(-32768, 32767).to(torch.int16)
    return torch.no_grad()(partial(model, audio, torch.tensor([audio.shape[1]])))


# ---- what `what` stands for


TIMED: dict[str, Callable[[str, int], Work | Call]] = {
    "attention": alone, **{what: partial(transformer, what) for what in MODELS},
    "vit": lambda method, length: whole(*vit(method, length)), "vit_ti": vit_step,
    "conformer": lambda method, length: hearing(encoder(method), length), "protein_layer": layer_step,
    **{what: partial(protein_step, what) for what in ("protein_model", "protein_wide")},
    "protein_letter": drawn_letter, "one_head": OneHead}
PASSES = ("attention", *MODELS, "vit")  # whose passes are timed apart


def held_alone(method: str, length: int) -> float:
    warm, work = alone(method, 256), alone(method, length)
    warm.backward(warm.forward())  # libraries and threads
    theirs = 4 * inputs(length)[3].nbytes  # output and three gradients
    return added(lambda: work.backward(work.forward())) - theirs / 2**20


def held_by_step(step: Callable[[str, int], Update], method: str, length: int) -> float:
    step(method, 64)()  # libraries and threads
    return step(method, length).added()


def held_by_encoder(method: str, seconds: int) -> float:
    model = encoder(method)
    hearing(model, 1)()
    return added(hearing(model, seconds))


HELD: dict[str, Callable[[str, int], float]] = {
    "attention": held_alone, "vit_ti": partial(held_by_step, vit_step), "conformer": held_by_encoder,
    **{what: partial(held_by_step, partial(protein_step, what, rows=1)) for what in ("protein_model", "protein_wide")}}


# ---- the tasks


@checked("task")
class Speed(Measurement):
    """task=speed: a row for each length, method and round: `ms`, or the milliseconds of each pass.

    what: "attention" alone, "large", "small" (Transformers), "vit": inference, forward, backward and training, both of
    them; "vit_ti", "protein_layer", "protein_model", "protein_wide": a training step, of proteins with
    letters_per_s; "protein_letter": a letter drawn behind so many; "conformer": `seconds` of its encoder on so many
    seconds of audio; "one_head": a pass without gradients, with projections drawn anew in each round.
    methods: as Mechanism.parse reads them, or NAMES; those of attention alone may end in " causal". Default: all, of
    other `what` than the first four the attention of the run. The order is rotated by the seed.
    """

    metric = "ms"  # training or inference where passes are timed apart

    def __init__(self, what: Literal[*TIMED], lengths: Several[Count], rounds: Count, backward: bool,
                 methods: Several[str] | None = None):
        if not backward and what not in PASSES:
            raise ValueError(f"task.backward=false is for task.what={' or '.join(PASSES)}")
        check_methods(methods or (), what)
        self.what, self.lengths, self.rounds, self.backward, self.methods = what, lengths, rounds, backward, methods
        if what in PASSES:
            self.metric = "training" if backward else "inference"

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        places = [(length, method) for length in self.lengths
                  for method in self.methods or at_hand(self.what, length) or [str(mechanism)]]
        warm = dict.fromkeys((min(length, WARMED), method) for length, method in places)
        in_turns({place: self.turn(*place) for place in warm}, 1, lambda turn: turn(), warm=0)
        found = in_turns({place: self.turn(*place) for place in places}, self.rounds, lambda turn: turn(), 0, seed)
        for length, method in places:
            for times in found[length, method]:
                s = times[self.metric] / 1e3
                more = {"letters_per_s": rows_read(self.what, length) * length / s} if self.what in READ else {}
                yield {"length": length, "method": method, **times, "seconds": s, **more}

    def turn(self, length: int, method: str) -> Callable[[], dict[str, float]]:
        made = TIMED[self.what](method, length)
        return partial(made.times, self.backward) if hasattr(made, "times") else lambda: {"ms": milliseconds(made)}

    def summary(self, records: list[dict]) -> str:
        """A table: a row a length, milliseconds of each method."""
        kind = ("a training step" if self.backward else "a pass") if self.what in PASSES else "in turns"
        table = medians(records, self.metric).rename_axis(index=None, columns="tokens")
        return f"milliseconds, {self.what}, {kind}:\n{table.to_string(float_format='%.1f', na_rep='')}"

    def keep(self, records: list[dict], directory: Path) -> None:
        """speed.csv, a row a length and method, and speed.png."""
        found = medians(records, self.metric)
        write_rows(directory / "speed.csv", [("length", "method", "ms"), *(
            (length, name, ms) for length in found.index for name, ms in found.loc[length].dropna().items())])
        drawn, axes = new_figure(figsize=(7, 4.2))
        ends = []
        for name, line in found.items():
            line, ink = line.dropna(), colour(name) if name in choices("attention") else colour_by_rule(name)
            axes.plot(line, marker="o", ms=3, color=ink)
            ends.append((label(name), line.index[-1], line.iloc[-1], ink))
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="milliseconds")
        plain_ticks(axes.xaxis), plain_ticks(axes.yaxis)
        label_ends(axes, ends)
        save_figure(drawn, directory / "speed.png")


def medians(records: list[dict], metric: str) -> Any:
    """A data frame of milliseconds: a row a length, a column a method."""
    import pandas as pd

    return pd.DataFrame(records).pivot_table(metric, "length", "method", "median", sort=False)


@checked("task")
class Memory(Measurement):
    """task=memory: `mib`, the most that is held beyond what stays, by the attention of the run, or by `method`.

    Of attention alone: of a forward and backward pass beyond inputs, output and gradients. Of vit_ti and protein
    models, on one row: of a training step beyond weights, gradients and the optimiser's state. Of the conformer's
    encoder: beyond weights and audio. An allocator keeps what earlier calls freed: one run in each process.
    """

    metric = "mib"

    def __init__(self, what: Literal[*HELD], length: Count, method: str | None = None):
        check_methods([method] if method else (), what)
        self.what, self.length, self.method = what, length, method

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        yield {"length": self.length, "mib": HELD[self.what](self.method or str(mechanism), self.length)}
