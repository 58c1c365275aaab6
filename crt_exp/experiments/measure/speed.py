"""Time and memory by length, of attention alone and of whole models.

Performers Figure 3, CRT Figure 4. Methods take turns in each round, so that other load affects them equally. Weights
and inputs are random, except those of pretrained models.
"""

import io
import operator
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PretrainedConfig

from crt_exp.attention import (
    DenominatorCount,
    attention,
    exact_attention,
    identity_attention,
    uniform_attention,
)
from crt_exp.experiments.measure import Measurement, Records, seeded
from crt_exp.experiments.measure.bench import NEXT, predicts, swap_and_fit
from crt_exp.experiments.measure.pretrained import passage
from crt_exp.experiments.measure.times import Update, in_turns, milliseconds, peak_increase
from crt_exp.experiments.models.encoders import folder_of
from crt_exp.experiments.models.language import Transformer
from crt_exp.experiments.tasks.base import task_class
from crt_exp.features import Statistics
from crt_exp.mechanism import Mechanism
from crt_exp.samplers import Noise, orthogonal
from crt_exp.validation import Count, FileName, Several, split_words

CAUSAL = " causal"  # suffix of a method's name
CHUNKED = f"chunked{CAUSAL}"
BASELINE = "performer-pytorch"
FORMED = "exact, matrix formed"  # softmax of a stored (L, L) matrix, without fused kernels
# sizes of attention alone
HEADS = 8
D = 64
# (heads, layers, ffn, dim) of Performers Fig. 3, 20, 21
MODELS = {"large": (8, 6, 2048, 512), "small": (1, 6, 64, 64)}
VITS = {"vit": "tiny", "vit_s": "small"}
PRETRAINED = "pretrained"
# inference and training are timed separately
PASSES = ("attention", *MODELS, *VITS, PRETRAINED)
FITTED = 256  # tokens of the calibration row of a pretrained model; times do not depend on the fit
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


def mechanism_of(method: str, m: int = M) -> Mechanism:
    """Parse a method, with a default number of projections."""
    mechanism = Mechanism.parse(method)
    if "m" in split_words(method)[1]:
        return mechanism
    return mechanism.with_projections(m)


def check_model(model: str | None, what: str) -> None:
    """Raise ValueError unless a model is named for what=pretrained alone."""
    if (model is None) == (what == PRETRAINED):
        raise ValueError(
            f"task.model={model}: expected a folder or models/<name> for task.what=pretrained alone"
        )


Times = dict[str, float]  # milliseconds by name


class Work(NamedTuple):
    """A method on its inputs.

    leaves: tensors whose gradients are computed. gradient: that of the output; None for a loss. model: module to switch
    between eval and training mode.
    """

    forward: Callable[[], Tensor]
    leaves: Sequence[Tensor]
    gradient: Tensor | None = None
    model: nn.Module = nn.Identity()

    @classmethod
    def of_model(cls, model: nn.Module, forward: Callable[[], Tensor]) -> "Work":
        """Return the work of a model; forward returns a loss."""
        return cls(forward, [*model.parameters()], model=model)

    def train(self) -> None:
        """Do a forward and a backward pass, and drop the gradients."""
        self.forward().backward(self.gradient)
        for leaf in self.leaves:
            leaf.grad = None

    def times(self) -> Times:
        """Return milliseconds of inference, and of training (forward and backward pass)."""
        self.model.eval()
        inference = milliseconds(torch.no_grad()(self.forward))
        self.model.train()
        training = milliseconds(self.train)
        return {"inference": inference, "training": training}


# ---- attention alone: queries, keys and values (1, HEADS, length, D), with scale d^(-1/4) applied


def attention_work(method: str, length: int, device: str = "cpu") -> Work:
    *leaves, gradient = inputs(length, device)
    forward = partial(attention_function(method, device), *leaves)
    return Work(forward, leaves, gradient)


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
    mechanism = mechanism_of(name)
    if not mechanism.estimates:
        layer = mechanism.layer(HEADS, D, scaling=1.0, causal=causal)
        return layer.to(device).eval()
    phi = mechanism.map()
    noise = mechanism.noise(D, seeded(0), (HEADS,)).to(device)
    if phi.fitted and not phi.on_vectors:
        return lambda q, k, v: fitted_attention(mechanism, noise, q, k, causal)(q, k, v)
    queries, keys, *_ = inputs(SAMPLE, device)  # clusters are fitted before, as in a layer
    return fitted_attention(mechanism, noise, queries.detach()[0], keys.detach()[0], causal)


def fitted_attention(
    mechanism: Mechanism, noise: Noise, q: Tensor, k: Tensor, causal: bool = False
) -> Attend:
    """Return attention by a feature map that is fitted to queries and keys."""
    phi = mechanism.map()
    params = phi.fit(Statistics.of(q, k))
    options = {"causal": causal, "counter": DenominatorCount()}
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


def one_head(method: str, length: int) -> Callable[[], Times]:
    """Return the timing of one head with d = 16, with new projections in each call.

    The time excludes the sampling of projections and the fit.
    """
    mechanism = mechanism_of(method, M_ONE_HEAD)
    g = seeded(0)
    x, y, v = torch.randn(3, 1, 1, length, 16, generator=seeded(0))
    x = x / 2  # d^(-1/4)
    y = y / 2

    @torch.no_grad()
    def times() -> Times:
        if mechanism.estimates:
            noise = mechanism.noise(16, g)
            attend = fitted_attention(mechanism, noise, x[0, 0], y[0, 0])
        else:
            attend = mechanism.layer(1, 16, scaling=1.0).eval()
        return {"ms": milliseconds(attend, x, y, v)}

    return times


# ---- Transformers, batch 1


def transformer(what: str, method: str, length: int) -> Work:
    heads, layers, ffn, dim = MODELS[what]
    make_layer = mechanism_of(method).layer
    model = Transformer(heads, layers, ffn, dim, make_layer)
    x = torch.randn(1, length, dim, generator=seeded(0))
    return Work.of_model(model, lambda: model(x).square().mean())


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
        mechanism_of(method).swap(model)
    image = torch.randn(1, 3, side, side, generator=seeded(0))
    return model, image


def vit_step(method: str, tokens: int) -> Update:
    model, image = vit(method, tokens)
    label = torch.zeros(1, dtype=torch.long)
    return Update(model, lambda model: F.cross_entropy(model(image), label))


# ---- pretrained models, batch 1


def pretrained_work(name: str, method: str, length: int) -> Work:
    """Return a method in models/<name> or a folder, with `length` tokens of WikiText-2.

    A decoder computes its loss, output head included, and encoders of text and speech their last states. The input of a
    speech encoder has two frames for each of its `length` positions. Raises ValueError for more positions than the
    model has.
    """
    model = pretrained_model(name, mechanism_of(method))
    config = model.config
    is_speech = hasattr(config, "num_mel_bins")
    positions = config.max_source_positions if is_speech else config.max_position_embeddings
    if length > positions or (is_speech and length != positions):
        expected = f"{positions}" if is_speech else f"at most {positions}"
        raise ValueError(f"task.lengths={length}: expected {expected}, the positions of {name}")
    if is_speech:
        inputs = {"input_features": random_frames(config, 0)}
    else:
        inputs = {"input_ids": passage(name, "valid", 0, length)[None]}
    if predicts(model) == NEXT:
        inputs["labels"] = inputs["input_ids"]

    def forward() -> Tensor:
        output = model(**inputs)
        return output.loss if "labels" in inputs else output.last_hidden_state.square().mean()

    return Work.of_model(model, forward)


@lru_cache(maxsize=8)
def pretrained_model(name: str, mechanism: Mechanism) -> nn.Module:
    """Return a decoder or encoder, fitted to the start of WikiText-2's training split or to noise."""
    folder = folder_of(name, "task.model")
    # dropout of weights, which only exact attention has, would slow it down in training
    options = {"use_cache": False, "attention_probs_dropout_prob": 0.0}
    config = AutoConfig.from_pretrained(folder, **options)
    is_decoder = config.architectures[0].endswith("ForCausalLM")
    kind = AutoModelForCausalLM if is_decoder else AutoModel
    model = kind.from_pretrained(folder, config=config, dtype=torch.float32)
    if hasattr(config, "num_mel_bins"):
        model = model.get_encoder()
        calibration = {"input_features": random_frames(config, 1)}
    else:
        calibration = {"input_ids": passage(name, "train", 0, FITTED)[None]}
    return swap_and_fit(model, mechanism, [calibration])


def random_frames(config: PretrainedConfig, seed: int) -> Tensor:
    frames = 2 * config.max_source_positions
    return torch.randn(1, config.num_mel_bins, frames, generator=seeded(seed))


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
        methods: As for `Mechanism.parse`, or CHUNKED, BASELINE and FORMED. For attention alone, methods can end in
            " causal". Default: a list, and for "vit_ti" and "one_head" the attention of the run. The seed rotates their
            order.
        device: "cuda" times attention alone on a GPU, in bfloat16.
    """

    what: Literal[*PASSES, "vit_ti", "one_head"]
    lengths: Several[Count]
    rounds: Count
    methods: Several[str] | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    model: FileName | None = None

    def __post_init__(self):
        check_model(self.model, self.what)
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
        for case in dict.fromkeys((min(length, longest), method) for length, method in cases):
            self.turn(*case)()  # warm-up
        turns = {case: self.turn(*case) for case in cases}
        times = in_turns(turns, self.rounds, operator.call, turn=seed)
        for length, method in cases:
            for record in times[length, method]:
                yield {"length": length, "method": method, **record}

    def turn(self, length: int, method: str) -> Callable[[], Times]:
        """Return a function that times a method once."""
        if self.what == "one_head":
            return one_head(method, length)
        if self.what == "vit_ti":
            step = vit_step(method, length)
            return lambda: {"ms": milliseconds(step)}
        if self.what == PRETRAINED:
            return pretrained_work(self.model, method, length).times
        if self.what == "attention":
            return attention_work(method, length, self.device).times
        if self.what in MODELS:
            return transformer(self.what, method, length).times
        model, image = vit(method, length, VITS[self.what])
        return Work.of_model(model, lambda: model(image).square().mean()).times

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

    def rows(self, mechanism: Mechanism, seed: int) -> Records:
        method = self.method or str(mechanism)
        if self.model is None:
            vit_step(method, 64)()  # libraries and threads
            mib = vit_step(method, self.length).peak_increase()
        else:
            work = pretrained_work(self.model, method, self.length)
            work.model.train()
            for parameter in work.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            mib = peak_increase(lambda: work.forward().backward())
        yield {"length": self.length, "mib": mib}
