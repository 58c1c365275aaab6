"""Time and memory by length, of attention alone and of whole models.

Performers Figure 3, CRT Figure 4. Methods take turns in each round, so that other load affects them equally. Weights
and inputs are random.
"""

import io
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp.attention import (
    DenominatorCount,
    attention,
    exact_attention,
    identity_attention,
    uniform_attention,
)
from crt_exp.experiments.measure import Measurement, Records, seeded
from crt_exp.experiments.measure.times import Call, Update, in_turns, milliseconds, peak_increase
from crt_exp.experiments.measure.whole_models import whole_model
from crt_exp.experiments.models.language import Transformer
from crt_exp.experiments.tasks.base import task_class
from crt_exp.features import Statistics
from crt_exp.mechanism import Mechanism
from crt_exp.samplers import orthogonal
from crt_exp.validation import Count, FileName, Several, split_words

CAUSAL = " causal"  # suffix of a method's name
CHUNKED = f"chunked{CAUSAL}"
BASELINE = "performer-pytorch"
FORMED = "exact, matrix formed"  # softmax of a stored (L, L) matrix, without fused kernels
NAMES = (CHUNKED, BASELINE, BASELINE + CAUSAL, FORMED)
# sizes of attention alone
HEADS = 8
D = 64
# (heads, layers, ffn, dim) of Performers Fig. 3, 20, 21
MODELS = {"large": (8, 6, 2048, 512), "small": (1, 6, 64, 64)}
# default numbers of projections
M = 256
M_ONE_HEAD = 300
MECHANISMS = ("exact", "nearfar", "favorpp", "favorp", "favorsharp", "uniform", BASELINE)
ALONE = [*MECHANISMS, *(name + CAUSAL for name in MECHANISMS), "identity", CHUNKED]
IN_MODELS = ("exact", "identity", "favorp", "favorpp", "favorsharp", "nearfar")
# Maximum lengths of the default methods; the causal baseline stores L m d numbers.
LONGEST = {"exact": 16384, f"exact{CAUSAL}": 16384, BASELINE: 65536, BASELINE + CAUSAL: 1024}
# Called directly, because their layers copy the scaled queries and keys.
PLAIN = {"exact": exact_attention, "identity": identity_attention, "uniform": uniform_attention}
SAMPLE = 512  # queries and keys of a head to which clusters are fitted, before timing
WARMED = 1024  # maximum length of the warm-up on a CPU
CHUNK = 128  # tokens of a chunk; the fastest of 64, 128 and 256 at 1024 tokens
PATCH = 16  # pixels of a side of a patch
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


# ---- methods


def default_methods(what: str, length: int) -> Sequence[str]:
    """Return the default methods; quadratic ones only up to their maximum length."""
    if what == "attention":
        methods = [name for name in ALONE if length <= LONGEST.get(name, length)]
        if find_spec("performer_pytorch") is None:
            methods = [name for name in methods if not name.startswith(BASELINE)]
        return methods
    if what not in PASSES:
        return []
    return [name for name in IN_MODELS if name != "exact" or length <= 4096]


def mechanism_of(method: str, what: str) -> Mechanism:
    """Parse a method, with the default number of projections of `what`."""
    mechanism = Mechanism.parse(method)
    if "m" in split_words(method)[1]:
        return mechanism
    m = M_ONE_HEAD if what == "one_head" else M
    return mechanism.with_projections(m)


def check_methods(methods: Sequence[str], what: str) -> None:
    """Raise ConfigError for unknown methods."""
    for method in methods:
        if method not in NAMES:
            name = method.removesuffix(CAUSAL) if what == "attention" else method
            mechanism_of(name, what)


def check_model(model: str | None, what: str) -> None:
    """Raise ValueError unless a model is named for what=pretrained alone."""
    if (model is None) == (what == PRETRAINED):
        raise ValueError(
            f"task.model={model}: expected a folder or models/<name> for task.what=pretrained alone"
        )


class Timed(Protocol):
    """What a turn of a measurement times."""

    def times(self) -> dict[str, float]:
        """Return milliseconds by name."""


def times_of(timed: Timed) -> dict[str, float]:
    return timed.times()


class Work(NamedTuple):
    """A method on its inputs.

    forward: returns the argument of backward. model: module to switch between eval and training mode.
    """

    forward: Callable[[], Tensor]
    backward: Callable[[Tensor], None]
    model: nn.Module = nn.Identity()

    def times(self) -> dict[str, float]:
        """Return milliseconds of inference, and of training (forward and backward pass)."""
        self.model.eval()
        inference = milliseconds(torch.no_grad()(self.forward))
        self.model.train()
        training = milliseconds(lambda: self.backward(self.forward()))
        return {"inference": inference, "training": training}


class Step(NamedTuple):
    """A training step."""

    call: Call

    def times(self) -> dict[str, float]:
        return {"ms": milliseconds(self.call)}


# ---- attention alone: queries, keys and values (1, HEADS, length, D), with scale d^(-1/4) applied


def attention_work(method: str, length: int, device: str = "cpu") -> Work:
    q, k, v, gradient = inputs(length, device)

    def backward(out: Tensor) -> None:
        out.backward(gradient)
        for t in (q, k, v):
            t.grad = None

    return Work(partial(attention_function(method, device), q, k, v), backward)


def attention_function(method: str, device: str = "cpu") -> Attend:
    """Return the attention function of a method; fits to statistics are timed with it."""
    name = method.removesuffix(CAUSAL)
    causal = method.endswith(CAUSAL)
    if method == CHUNKED:
        noise = orthogonal(M, D, seeded(0), batch=(HEADS,))
        return chunked(noise.rows().to(device))
    if name in PLAIN:
        return partial(PLAIN[name], causal=causal)
    if name == BASELINE:
        return performer_pytorch(D, M, causal).to(device)
    mechanism = mechanism_of(name, "attention")
    if mechanism.estimates:
        return feature_map_attention(mechanism, causal, device)
    layer = mechanism.layer(HEADS, D, scaling=1.0, causal=causal)
    return layer.to(device).eval()


def feature_map_attention(
    mechanism: Mechanism, causal: bool = False, device: str = "cpu"
) -> Attend:
    """Return attention by a feature map; clusters are fitted before, as in a layer."""
    phi = mechanism.map()
    noise = mechanism.noise(D, seeded(0), (HEADS,)).to(device)
    counter = DenominatorCount()
    options = {"causal": causal, "counter": counter}

    def fit_and_attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        params = phi.fit(Statistics.of(q, k))
        return attention(q, k, v, phi, noise, params, **options)

    if phi.fitted and not phi.on_vectors:
        return fit_and_attend
    queries, keys, *_ = inputs(SAMPLE, device)
    statistics = Statistics.of(queries.detach()[0], keys.detach()[0])
    params = phi.fit(statistics)
    return partial(attention, phi=phi, noise=noise, params=params, **options)


@lru_cache(maxsize=4)
def inputs(length: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys, values and the gradient of the output, on a GPU in bfloat16.

    The mean |x + y|^2 is about 10, as in pretrained models.
    """
    g = seeded(1)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16

    def sample(scale: float) -> Tensor:
        t = torch.randn(1, HEADS, length, D, generator=g)
        return scale * t.to(device, dtype)

    q = sample(0.28).requires_grad_()
    k = sample(0.28).requires_grad_()
    v = sample(1.0).requires_grad_()
    return q, k, v, sample(1.0)


def chunked(weight: Tensor, chunk: int = CHUNK) -> Attend:
    """Return causal attention with FAVOR+ features, by chunks, in plain torch.

    Within a chunk it forms the attention matrix; earlier chunks contribute by their sums. Memory: O(L (m + chunk)).
    There is no stabiliser, which would take time, so vectors must have moderate norms.
    """

    def features(x: Tensor) -> Tensor:
        squares = x.square().sum(-1, keepdim=True)
        return torch.exp(x @ weight.mT.to(x.dtype) - squares / 2)

    def parts(t: Tensor) -> Tensor:
        """(..., L, n) -> (..., L / chunk, chunk, n), with zero padding at the end."""
        padding = -t.shape[-2] % chunk
        padded = F.pad(t, (0, 0, 0, padding))
        return padded.unflatten(-2, (-1, chunk))

    def run(x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        queries = parts(features(x))
        keys = parts(features(y))
        values = parts(F.pad(v, (0, 1), value=1.0))
        sums = (keys.mT @ values).cumsum(-3)
        sums = F.pad(sums, (0, 0, 0, 0, 1, -1))  # of earlier chunks
        within = (queries @ keys.mT).tril() @ values
        out = (queries @ sums + within).flatten(-3, -2)
        out = out[..., : x.shape[-2], :]
        return out[..., :-1] / out[..., -1:]

    return run


def performer_pytorch(d: int, m: int, causal: bool) -> Attend:
    """Return the attention of performer-pytorch. Raises ImportError."""
    from performer_pytorch.performer_pytorch import FastAttention

    with redirect_stdout(io.StringIO()):  # the package prints that its extension is missing
        return FastAttention(d, m, causal=causal)


class OneHead:
    """One head with d = 16, forward pass, with new projections in each round.

    The time excludes the sampling of projections and the fit.
    """

    def __init__(self, method: str, length: int):
        self.mechanism = mechanism_of(method, "one_head")
        self.g = seeded(0)
        x, y, self.v = torch.randn(3, 1, 1, length, 16, generator=seeded(0))
        self.x = x / 2  # d^(-1/4)
        self.y = y / 2

    @torch.no_grad()
    def times(self) -> dict[str, float]:
        attend = self.sample_attention()
        return {"ms": milliseconds(attend, self.x, self.y, self.v)}

    def sample_attention(self) -> Attend:
        if not self.mechanism.estimates:
            return self.mechanism.layer(1, 16, scaling=1.0).eval()
        phi = self.mechanism.map()
        noise = self.mechanism.noise(16, self.g)
        statistics = Statistics.of(self.x[0, 0], self.y[0, 0])
        params = phi.fit(statistics)
        counter = DenominatorCount()
        return partial(attention, phi=phi, noise=noise, params=params, counter=counter)


# ---- Transformers and vision transformers, batch 1


def transformer(what: str, method: str, length: int) -> Work:
    heads, layers, ffn, dim = MODELS[what]
    make_layer = mechanism_of(method, what).layer
    x = torch.randn(1, length, dim, generator=seeded(0))
    return model_work(Transformer(heads, layers, ffn, dim, make_layer), x)


def model_work(model: nn.Module, x: Tensor) -> Work:
    def backward(loss: Tensor) -> None:
        loss.backward()
        model.zero_grad(set_to_none=True)

    def forward() -> Tensor:
        return model(x).square().mean()

    return Work(forward, backward, model)


def vit(method: str, tokens: int, size: str = "tiny") -> tuple[nn.Module, Tensor]:
    """Return timm's ViT of patch size 16, and an image of about `tokens` patches.

    The model reads a class token in addition.
    """
    import timm

    side = PATCH * max(1, round(tokens**0.5))
    torch.manual_seed(0)
    model = timm.create_model(f"vit_{size}_patch16_224", img_size=side, num_classes=10)
    if method == FORMED:
        for block in model.blocks:
            block.attn.fused_attn = False
    elif method != "exact":
        mechanism_of(method, "vit").swap(model)
    image = torch.randn(1, 3, side, side, generator=seeded(0))
    return model, image


def vit_step(method: str, tokens: int) -> Update:
    model, image = vit(method, tokens)
    label = torch.zeros(1, dtype=torch.long)
    return Update(model, lambda model: F.cross_entropy(model(image), label))


# ---- values of `what`


TIMED: dict[str, Callable[[str, int], Timed]] = {
    "attention": attention_work,
    **{what: partial(transformer, what) for what in MODELS},
    "vit": lambda method, length: model_work(*vit(method, length)),
    "vit_s": lambda method, length: model_work(*vit(method, length, "small")),
    "vit_ti": lambda method, length: Step(vit_step(method, length)),
    "one_head": OneHead,
}
PRETRAINED = "pretrained"
# inference and training are timed separately
PASSES = ("attention", *MODELS, "vit", "vit_s", PRETRAINED)


def pretrained_work(model: str, method: str, length: int) -> Work:
    whole = whole_model(model, mechanism_of(method, PRETRAINED), length)
    return Work(whole.forward, whole.backward, whole.model)


def training_memory(method: str, length: int) -> float:
    vit_step(method, 64)()  # libraries and threads
    return vit_step(method, length).peak_increase()


def pretrained_memory(model: str, method: str, length: int) -> float:
    work = pretrained_work(model, method, length)
    work.model.train()
    for parameter in work.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return peak_increase(lambda: work.forward().backward())


# ---- the tasks


@task_class
class Speed(Measurement):
    """task=speed: one row for each length, method and round.

    Rows have `ms`, or the milliseconds of `inference` and `training`.

    Args:
        what: "attention" alone, "large" or "small" (Transformers), "vit", "vit_s" or "pretrained" (the model
            `model`): inference, and training (forward and backward pass). "vit_ti": a training step with AdamW's
            update. "one_head": a forward pass, with new projections in each round.
        model: A folder, or models/<name> of `python -m crt_exp data`, for what=pretrained.
        methods: As for `Mechanism.parse`, or one of NAMES. For attention alone, methods can end in " causal". Default:
            a list, and for "vit_ti" and "one_head" the attention of the run. The seed rotates their order.
        device: "cuda" times attention alone on a GPU, in bfloat16.
    """

    what: Literal[*TIMED, PRETRAINED]
    lengths: Several[Count]
    rounds: Count
    methods: Several[str] | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    model: FileName | None = None

    def __post_init__(self):
        check_model(self.model, self.what)
        check_methods(self.methods or (), self.what)
        possible = self.what == "attention" and torch.cuda.is_available()
        if self.device == "cuda" and not possible:
            raise ValueError("task.device=cuda: expected task.what=attention, and a GPU")
        self.metric = "training" if self.what in PASSES else "ms"

    def rows(self, mechanism: Mechanism, seed: int) -> Records:
        cases = []
        for length in self.lengths:
            methods = self.methods or default_methods(self.what, length) or [str(mechanism)]
            cases += [(length, method) for method in methods]
        longest = WARMED
        if self.device == "cuda":
            longest = max(self.lengths)
        elif self.what == PRETRAINED:
            longest = min(self.lengths)
        warm_up = {}
        for length, method in cases:
            case = (min(length, longest), method)
            warm_up[case] = self.timed(*case)
        in_turns(warm_up, 1, times_of, warm=0)
        timed = {case: self.timed(*case) for case in cases}
        times = in_turns(timed, self.rounds, times_of, warm=0, turn=seed)
        for length, method in cases:
            for record in times[length, method]:
                yield {"length": length, "method": method, **record}

    def timed(self, length: int, method: str) -> Timed:
        if self.device == "cuda":
            return attention_work(method, length, self.device)
        if self.model is not None:
            return pretrained_work(self.model, method, length)
        return TIMED[self.what](method, length)

    def summary(self, records: list[dict]) -> str:
        """Return a table of median milliseconds: one row per length."""
        import pandas as pd

        kind = "a training step" if self.what in PASSES else "in turns"
        medians = pd.DataFrame(records).pivot_table(
            self.metric, "length", "method", "median", sort=False
        )
        medians = medians.rename_axis(index=None, columns="tokens")
        table = medians.to_string(float_format="%.1f", na_rep="")
        return f"milliseconds, {self.what}, {kind}:\n{table}"


@task_class
class Memory(Measurement):
    """task=memory: peak memory in MiB, `mib`, of the run's attention or of `method`.

    pretrained: a forward and backward pass of the model `model`, in addition to weights and gradients. vit_ti: a
    training step, in addition to weights, gradients and optimiser state. Run the task in a separate process, because
    allocators keep memory that earlier calls freed.
    """

    metric = "mib"

    what: Literal["vit_ti", PRETRAINED]
    length: Count
    method: str | None = None
    model: FileName | None = None

    def __post_init__(self):
        check_model(self.model, self.what)
        if self.method is not None:
            check_methods([self.method], self.what)

    def rows(self, mechanism: Mechanism, seed: int) -> Records:
        method = self.method or str(mechanism)
        if self.model is None:
            mib = training_memory(method, self.length)
        else:
            mib = pretrained_memory(self.model, method, self.length)
        yield {"length": self.length, "mib": mib}
