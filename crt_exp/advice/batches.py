"""A model of images or audio, or any other that gives class scores or a loss, and batches of its input.

With labels, a loss is the model's own; without, it is the cross-entropy with the probabilities of the model as it was,
of which the part above the model's own attention is the Kullback-Leibler divergence.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp.advice.panel import Panel
from crt_exp.mechanism import Mechanism
from crt_exp.swap.calibration import call, swapped_states
from crt_exp.swap.swap import unswap_attention

CUTS = (4, 2, 1)                                     # of the longest piece of audio, the parts that are timed
WAVES = ("input_values", "audio")                    # keys of batches that hold (B, samples)
BESIDE = ("attention_mask", "padding_mask")          # of the same shape
UNLABELLED = ("There are no labels: nats are those by which the outputs differ from the model's own, the divergence of "
              "their probabilities.")


class BatchPanel(Panel):
    """Pieces are what `calibrate_attention` takes: a dictionary of arguments or one tensor.

    labels: of each judged piece (B,), where the model does not take them itself. Raises ValueError for attention that
    cannot be swapped, and for a model that gives neither a loss nor class scores.
    """

    def __init__(self, model: nn.Module, judged: Sequence[Any], training: Sequence[Any], *,
                 labels: Sequence[Tensor] | None = None, noun: str = "pieces", seed: int = 0):
        super().__init__(model, len(judged), training, seed)
        self.judged, self.labels, self.noun = judged, labels, noun
        longest = max(judged, key=_numbers)
        self.pieces = {self._tokens(piece): piece for piece in _parts(longest)}
        with torch.no_grad():
            outputs = [self.run(piece) for piece in judged]
        self.labelled = labels is not None or own_loss(outputs[0], judged[0]) is not None
        self.own = None if self.labelled else [scores(out).float().softmax(-1).flatten(0, -2) for out in outputs]

    def run(self, piece: Any) -> Any:
        return call(self.model, piece)

    def loss(self, i: int) -> float:
        out = self.run(self.judged[i])
        if (loss := own_loss(out, self.judged[i])) is not None:
            return float(loss)
        wanted = self.own[i] if self.labels is None else self.labels[i].to(self.device)
        return float(F.cross_entropy(scores(out).float().flatten(0, -2), wanted))

    def step(self, piece: Any) -> Tensor:
        out = self.run(piece)
        loss = own_loss(out, piece)
        return scores(out).float().square().mean() if loss is None else loss

    def timed(self) -> dict[int, Any]:
        return self.pieces

    @torch.no_grad()
    def _tokens(self, piece: Any) -> int:
        """The most queries that a layer of attention has."""
        Mechanism.of("exact").swap(self.model, saved=False)
        lengths: list[int] = []
        hooks = [state.register_forward_pre_hook(lambda state, given: lengths.append(given[0].shape[2]))
                 for state in swapped_states(self.model)]
        try:
            self.run(piece)
        finally:
            for hook in hooks:
                hook.remove()
            unswap_attention(self.model)
        if not lengths:
            raise ValueError(f"none of the attention layers of this {type(self.model).__name__} ran on this input")
        return max(lengths)


def own_loss(out: Any, piece: Any) -> Tensor | None:
    """What a model that was given labels makes of them: `loss`, or a loss of each row, (B,)."""
    if getattr(out, "loss", None) is not None:
        return out.loss.float()
    given = isinstance(piece, Mapping) and "targets" in piece
    return out.float().mean() if given and isinstance(out, Tensor) and out.ndim == 1 else None


def scores(out: Any) -> Tensor:
    """(B, ..., C)."""
    out = getattr(out, "logits", out)
    if not isinstance(out, Tensor) or out.ndim < 2 or not out.is_floating_point():
        raise ValueError("the model gives neither a loss nor class scores, so there is nothing to compare: load it "
                         "with its head, or put labels into the batches")
    return out


def _numbers(piece: Any) -> int:
    tensors = piece.values() if isinstance(piece, Mapping) else [piece]
    return sum(t.numel() for t in tensors if isinstance(t, Tensor))


def _parts(piece: Any) -> list[Any]:
    """The first quarter and half of audio, and the whole; of other input the whole."""
    waves = [key for key in WAVES if isinstance(piece, Mapping) and key in piece]
    if waves:
        size = piece[waves[0]].shape[1]
        return [_cut(piece, size // part) for part in CUTS]
    if isinstance(piece, Tensor) and piece.ndim == 2:
        return [piece[:, :piece.shape[1] // part] for part in CUTS]
    return [piece]


def _cut(piece: Mapping[str, Any], size: int) -> dict[str, Any]:
    cut = {key: value[:, :size] if key in WAVES + BESIDE else value for key, value in piece.items()}
    return cut | ({"samples": piece["samples"].clamp(max=size)} if "samples" in piece else {})
