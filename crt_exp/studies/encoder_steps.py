"""The encoder of a Conformer transducer on audio of any length: its time with each attention, and the memory of one.

Recognition: evaluation mode, no gradient, one recording. Legend: T frames of the encoder, 25 a second.
"""

from functools import partial

import torch
from torch import Tensor, nn

from crt_exp.mechanism import Mechanism
from crt_exp.models.conformer_transducer import PRESETS, ConformerTransducer
from crt_exp.times import added, in_turns

RATE, LAYERS = 16000, 4  # of the paper's 17 layers: the others take as long, and no more memory
SIZES = PRESETS["paper"] | {"layers": LAYERS}
METHODS = {"exact": ("exact", None), "FAVOR++, m = 16": ("favorpp", 16), "FAVOR++, m = 256": ("favorpp", 256),
           "uniform": ("uniform", None)}


def encoder(method: str) -> nn.Module:
    """With random weights: time does not depend on them."""
    torch.manual_seed(0)
    name, m = METHODS[method]
    model = ConformerTransducer(32, RATE, SIZES)
    return (model if name == "exact" else Mechanism.of(name, m=m).swap(model)).encoder.eval()


def audio(seconds: int) -> Tensor:
    """(1, samples) int16: noise."""
    drawn = 3000 * torch.randn(1, seconds * RATE, generator=torch.Generator().manual_seed(0))
    return drawn.clamp(-32768, 32767).to(torch.int16)


@torch.no_grad()
def hear(model: nn.Module, given: Tensor) -> None:
    model(given, torch.tensor([given.shape[1]]))


def times(seconds: int, rounds: int) -> dict[str, list[float]]:
    """method -> milliseconds in each round; every method takes its turn in every round."""
    given = audio(seconds)
    return in_turns({method: partial(hear, encoder(method), given) for method in METHODS}, rounds)


def memory(seconds: int, method: str) -> float:
    """MiB at the peak beyond weights and audio. For a new process."""
    model, given = encoder(method), audio(seconds)
    hear(model, audio(1))  # libraries and threads
    return added(partial(hear, model, given))
