"""The encoder of a Conformer transducer on audio of any length: its time with each attention, and the memory of one.

Recognition: evaluation mode, no gradient, one recording. Legend: T frames of the encoder, 25 a second.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from crt_exp.mechanism import Mechanism
from crt_exp.models.conformer_transducer import PRESETS, ConformerTransducer
from crt_exp.times import added, in_turns

RATE, WORDS = 16000, 32


def encoder(arm: str, layers: int) -> nn.Module:
    """Of the paper's sizes but for the number of layers, with random weights: time does not depend on them."""
    torch.manual_seed(0)
    model = ConformerTransducer(WORDS, RATE, PRESETS["paper"] | {"layers": layers})
    return (model if arm == "exact" else Mechanism.parse(arm).swap(model)).encoder.eval()


def audio(seconds: int) -> Tensor:
    """(1, samples) int16: noise."""
    drawn = 3000 * torch.randn(1, seconds * RATE, generator=torch.Generator().manual_seed(0))
    return drawn.clamp(-32768, 32767).to(torch.int16)


@torch.no_grad()
def hear(model: nn.Module, given: Tensor) -> None:
    model(given, torch.tensor([given.shape[1]]))


def times(arm: Mapping[str, str], seconds: int, layers: int, heard: int, seed: int) -> Iterator[dict[str, Any]]:
    """`seconds` of each arm in each round; every arm takes its turn in every round. heard: seconds of audio in all, for
    more rounds of short audio, which varies more; at least three."""
    given = audio(seconds)
    turns = in_turns({name: partial(hear, encoder(text, layers), given) for name, text in arm.items()},
                     max(3, heard // seconds))
    for name, rounds in turns.items():
        yield {"arm": name, "seconds": [ms / 1e3 for ms in rounds]}


def memory(arm: str, seconds: int, layers: int, seed: int) -> dict[str, float]:
    """MiB at the peak beyond weights and audio. For a new process."""
    model, given = encoder(arm, layers), audio(seconds)
    hear(model, audio(1))  # libraries and threads
    return {"mib": added(partial(hear, model, given))}
