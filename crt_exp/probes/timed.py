"""What is timed of this package on the CPU and stands on pages: attention alone and training steps.

Arms of a probe take turns in each round (see times.py); a page asks for it in several processes.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp.attention import DenominatorCount, attention, exact_attention
from crt_exp.features import Statistics
from crt_exp.mechanism import Mechanism
from crt_exp.probes.attention_errors import tensors
from crt_exp.times import Call, Update, geometric_mean, in_turns, milliseconds

FORMED = "exact, matrix formed"  # softmax of a stored (L, L) matrix: attention before there were fused kernels
PATCH = 16                       # pixels, of vision transformers


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
