"""What is timed on the CPU and stands on pages: attention alone, training steps, a drawn letter, a recogniser.

Arms of a probe take turns in each round (see times.py); a page asks for it in several processes. Weights and inputs are
random: time does not depend on them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp.attention import DenominatorCount, Exact, attention, exact_attention
from crt_exp.data.protein import LETTERS, TOKENS
from crt_exp.features import Statistics
from crt_exp.mechanism import Mechanism
from crt_exp.models.conformer_transducer import PRESETS, ConformerTransducer
from crt_exp.models.language import LanguageDescription, LanguageModel, TransformerSizes
from crt_exp.measure.attention_errors import tensors
from crt_exp.swap.calibration import fill_statistics
from crt_exp.times import Call, Update, added, geometric_mean, in_turns, milliseconds

FORMED = "exact, matrix formed"  # softmax of a stored (L, L) matrix: attention before there were fused kernels
PATCH = 16                       # pixels, of vision transformers
RATE, WORDS = 16000, 32          # of audio, and what a recogniser tells apart


class Forward:
    """Attention of one head on random tensors, forward, with projections that are drawn anew in each round.

    Neither the draw nor the fit is timed. Denominators of trigonometric features that are not positive are no matter of
    time.
    """

    def __init__(self, length: int, d: int, m: int, rounds: int):
        self.length, self.d, self.m, self.rounds = length, d, m, rounds

    def records(self, mechanisms: Mapping[str, Mechanism], seed: int) -> Iterator[dict[str, Any]]:
        """arm, ms: the geometric mean over rounds."""
        g = torch.Generator().manual_seed(0)
        draws = {name: partial(self.drawn, mechanism, g) for name, mechanism in mechanisms.items()}
        with torch.no_grad():
            spent = in_turns(draws, self.rounds, lambda draw: milliseconds(draw()))
        for name, times in spent.items():
            yield {"arm": name, "ms": geometric_mean(times)}

    def drawn(self, mechanism: Mechanism, g: torch.Generator) -> Call:
        x, y, v = tensors(self.length, self.d, 1.0, 0)
        if not mechanism.estimates:
            return partial(exact_attention, x, y, v)
        phi, noise = mechanism.map(), mechanism.sampler(self.m, self.d, g)
        return partial(attention, x, y, v, phi, noise, phi.fit(Statistics.of(x[0, 0], y[0, 0])),
                       counter=DenominatorCount())


# ---- training steps of vision transformers


def vit_steps(arms: Sequence[str], tokens: int, m: int, rounds: int, seed: int) -> Iterator[dict[str, Any]]:
    """arm, tokens, and ms of a training step of timm's ViT-Ti/16 on one image in each round."""
    for name, ms in in_turns({name: vit_step(name, tokens, m) for name in arms}, rounds).items():
        yield {"arm": name, "tokens": tokens, "ms": ms}


def vit_memory(arm: str, tokens: int, m: int, seed: int) -> dict[str, float]:
    """mib: at the peak of a training step, beyond weights, gradients and the optimiser's state. For a new process."""
    vit_step(arm, 64, m)()  # libraries and threads
    return {"mib": vit_step(arm, tokens, m).added()}


def vit_step(name: str, tokens: int, m: int) -> Update:
    model, given, label = vit(name, tokens, m), image(tokens), torch.zeros(1, dtype=torch.long)
    return Update(model, lambda model: F.cross_entropy(model(given), label))


def vit(name: str, tokens: int, m: int) -> nn.Module:
    """For images of that many patches; it reads them and a class token. Raises ValueError where that is no square."""
    import timm

    side = round(tokens**0.5)
    if side**2 != tokens:
        raise ValueError(f"{tokens} patches make no square image")
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=PATCH * side, num_classes=10)
    if name == FORMED:
        for block in model.blocks:
            block.attn.fused_attn = False
    return model if name in ("exact", FORMED) else Mechanism.parse(name).projecting(m).swap(model)


def image(tokens: int) -> Tensor:
    side = PATCH * round(tokens**0.5)
    return torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(0))


# ---- unidirectional language models of proteins, and one layer of them


def model_steps(arms: Sequence[str], lengths: Sequence[int], letters: int, rounds: int, sizes: TransformerSizes, m: int,
                seed: int) -> Iterator[dict[str, Any]]:
    """arm, length, and letters_per_s of training steps of a model, in each round.

    Every arm with every length takes its turn in every round. letters: what a step reads, in rows of that length, so
    that length alone differs; at least one row.
    """
    yield from letters_read(partial(model_step, sizes=sizes, m=m), arms, lengths, letters, rounds)


def layer_steps(arms: Sequence[str], lengths: Sequence[int], letters: int, rounds: int, heads: int, d: int, m: int,
                seed: int) -> Iterator[dict[str, Any]]:
    """The same of forward and backward of an attention layer alone."""
    yield from letters_read(partial(LayerStep, heads=heads, d=d, m=m), arms, lengths, letters, rounds)


def letters_read(step: Callable[[str, int, int], Call], arms: Sequence[str], lengths: Sequence[int], letters: int,
                 rounds: int) -> Iterator[dict[str, Any]]:
    rows = {length: max(1, letters // length) for length in lengths}
    steps = {(name, length): step(name, length, rows[length]) for name in arms for length in lengths}
    for (name, length), times in in_turns(steps, rounds).items():
        yield {"arm": name, "length": length, "letters_per_s": [1e3 * rows[length] * length / ms for ms in times]}


def model_memory(arm: str, length: int, sizes: TransformerSizes, m: int, seed: int) -> dict[str, float]:
    """mib: at the peak of a step on one row, beyond weights, gradients and the optimiser's state. For a new process."""
    model_step(arm, 64, 1, sizes, m)()  # libraries and threads
    return {"mib": model_step(arm, length, 1, sizes, m).added()}


def model_step(name: str, length: int, rows: int, sizes: TransformerSizes, m: int) -> Update:
    """Next-letter training; no row is padded."""
    tokens = random_letters(rows, length + 1)
    return Update(language_model(name, length, sizes, m),
                  lambda model: F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()))


class LayerStep:
    """Forward and backward of one attention layer in training, as a call without arguments."""

    def __init__(self, name: str, length: int, rows: int, heads: int, d: int, m: int):
        self.layer = causal_layer(name, m, heads, d, causal=True)
        g = torch.Generator().manual_seed(0)
        self.given = [torch.randn(rows, heads, length, d, generator=g).requires_grad_() for _ in range(3)]
        self.gradient = torch.randn(rows, heads, length, d, generator=g)

    def __call__(self) -> None:
        self.layer(*self.given).backward(self.gradient)
        for t in self.given:
            t.grad = None


def language_model(name: str, length: int, sizes: TransformerSizes, m: int) -> LanguageModel:
    """With random weights, and positions for rows of that length."""
    torch.manual_seed(0)
    described = LanguageDescription(TOKENS, length, sizes, causal=True)
    return LanguageModel(described, lambda heads, d, **more: causal_layer(name, m, heads, d, **more))


def causal_layer(name: str, m: int, heads: int, d: int, **sizes) -> nn.Module:
    """Causal attention of that name; m is for those that have projections."""
    if name == FORMED:
        return Formed(heads, d, **sizes)
    return Mechanism.parse(name).projecting(m).layer(heads, d, **sizes)


class Formed(Exact):
    """Causal softmax attention that forms its matrix."""

    def attend(self, x, y, v, *, causal, key_mask):
        later = torch.ones(x.shape[2], y.shape[2], dtype=torch.bool, device=x.device).triu(1)
        return (x @ y.mT).masked_fill(later, -torch.inf).softmax(-1) @ v


def random_letters(*shape: int) -> Tensor:
    return torch.randint(len(LETTERS), shape, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def drawn_letters(arms: Sequence[str], positions: Sequence[int], rounds: int, warm: int, sizes: TransformerSizes,
                  m: int, seed: int) -> Iterator[dict[str, Any]]:
    """arm, position, and ms of a letter behind so many, in each round.

    Every arm at every position takes its turn in every round, and each goes on from where its last letter was. warm:
    letters of each before time counts.
    """
    calls, token = {}, random_letters(1, 1)
    for name in arms:
        model = language_model(name, max(positions) + rounds + warm, sizes, m).eval()
        if name != FORMED and Mechanism.parse(name).draws:
            fill_statistics(model, [random_letters(1, min(positions))])
        for position in positions:
            pasts = model.begin()
            model(random_letters(1, position), pasts=pasts)
            calls[name, position] = partial(model, token, pasts=pasts)
    for (name, position), times in in_turns(calls, rounds, warm=warm).items():
        yield {"arm": name, "position": position, "ms": times}


# ---- the encoder of a Conformer transducer, in evaluation mode, on one recording


def encoder_times(arm: Mapping[str, str], seconds: int, layers: int, heard: int, seed: int
                  ) -> Iterator[dict[str, Any]]:
    """`seconds` of each arm in each round; every arm takes its turn in every round. heard: seconds of audio in all, for
    more rounds of short audio, which varies more; at least three."""
    given = audio(seconds)
    turns = in_turns({name: partial(hear, encoder(text, layers), given) for name, text in arm.items()},
                     max(3, heard // seconds))
    for name, rounds in turns.items():
        yield {"arm": name, "seconds": [ms / 1e3 for ms in rounds]}


def encoder_memory(arm: str, seconds: int, layers: int, seed: int) -> dict[str, float]:
    """MiB at the peak beyond weights and audio. For a new process."""
    model, given = encoder(arm, layers), audio(seconds)
    hear(model, audio(1))  # libraries and threads
    return {"mib": added(partial(hear, model, given))}


def encoder(arm: str, layers: int) -> nn.Module:
    """Of the paper's sizes but for the number of layers."""
    torch.manual_seed(0)
    model = ConformerTransducer(WORDS, RATE, PRESETS["paper"] | {"layers": layers})
    return (model if arm == "exact" else Mechanism.parse(arm).swap(model)).encoder.eval()


def audio(seconds: int) -> Tensor:
    """(1, samples) int16: noise."""
    noise = 3000 * torch.randn(1, seconds * RATE, generator=torch.Generator().manual_seed(0))
    return noise.clamp(-32768, 32767).to(torch.int16)


@torch.no_grad()
def hear(model: nn.Module, given: Tensor) -> None:
    model(given, torch.tensor([given.shape[1]]))
