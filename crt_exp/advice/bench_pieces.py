"""What a bench reads: rows of tokens, or batches of images, audio and whatever else a model takes.

With labels, a loss of batches is the model's own; without, it is the cross-entropy with the probabilities of the model
as it was, of which the part above the model's own attention is the Kullback-Leibler divergence.
Legend: B batch, L tokens of a row, V tokens of a vocabulary, C classes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp.data.text import IGNORED
from crt_exp.models.folder import block_of
from crt_exp.advice.bench import Bench, Swap, fitted
from crt_exp.swap.saved import holders

MASKED, NEXT = "masked", "next"
HEADS = {"ForMaskedLM": MASKED, "ForPreTraining": MASKED, "ForCausalLM": NEXT, "LMHeadModel": NEXT}
LENGTH = 512        # tokens of a piece of text, where nothing says more
SHARE = 0.15        # of the tokens is masked
UNSURE = 16         # tokens of the second half after which a model can know where it stands
REPEATED = 4        # rows, of those that judge
SHORTEST = 128      # of the lengths that are timed
AT_ONCE = 256       # places of which losses are computed at a time
CUTS = (4, 2, 1)                                     # of the longest piece of audio, the parts that are timed
WAVES = ("input_values", "audio")                    # keys of batches that hold (B, samples)
BESIDE = ("attention_mask", "padding_mask")          # of the same shape


# ---- rows of tokens


class TextBench(Bench):
    """A model of transformers, `rows` (n, L) of tokens to judge on and `training` (k, L).

    mask: the id of the mask token, of masked models. special: ids that are never masked. Repeated rows say their first
    half twice: what a causal model loses on the second half is what it can no longer look up.
    """

    noun = "texts"

    def __init__(self, model: nn.Module, rows: Tensor, training: Tensor | None = None, *, mask: int | None = None,
                 special: Sequence[int] = (), seed: int = 0):
        super().__init__(model, rows, None if training is None else training.split(1), seed)
        self.predicts = predicts(model)
        self.rows, self.mask, self.special = rows, mask, torch.tensor(list(special), dtype=torch.long)
        self.trained_on = trained_on(model)

    @property
    def causal(self) -> bool:
        return self.predicts == NEXT

    @property
    def repeats(self) -> int:
        """Rows that can be repeated and judged."""
        return min(REPEATED, len(self.rows)) if self.causal and self.rows.shape[1] >= 4 * UNSURE else 0

    def fit(self, attention: Swap) -> None:
        """Without the logits of all tokens, as `body`."""
        fitted(self.model.base_model, [{"input_ids": piece, **self._call} for piece in self.training])

    def run(self, ids: Tensor, **options: Any) -> Any:
        return self.model(input_ids=ids.to(self.device), **self._call, **options)

    def body(self, ids: Tensor) -> None:
        """Without the logits of all tokens, which would hide the rest."""
        self.model.base_model(input_ids=ids.to(self.device), **self._call)

    @property
    def _call(self) -> dict[str, bool]:
        return {"use_cache": False} if self.causal else {}

    def timed(self) -> dict[int, Tensor]:
        """Powers of two below the length of the rows, and that."""
        L = self.rows.shape[1]
        lengths = [*(2**k for k in range(SHORTEST.bit_length() - 1, L.bit_length()) if 2**k < L), L]
        return {length: self.rows[:1, :length] for length in lengths}

    # ---- losses

    def loss(self, i: int) -> float:
        """Nats a predicted token of row i."""
        return float(self.nats(*self.asked(i)).mean())

    def repeated_loss(self, i: int) -> float:
        """Of the second half of a row that says the first half of row i twice."""
        half = self.rows.shape[1] // 2
        inputs, labels = following(self.rows[i:i + 1, :half].repeat(1, 2))
        labels[:, :half + UNSURE - 1] = IGNORED
        return float(self.nats(inputs, labels).mean())

    def nats(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Of each place that labels (1, L) ask for, float64."""
        return nats(self.run(inputs).logits, labels)

    def asked(self, i: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels of row i, (1, L) each: the same for all attention."""
        row = self.rows[i:i + 1]
        if self.causal:
            return following(row)
        hidden = self._places(i)
        return row.masked_fill(hidden, self.mask), row.masked_fill(~hidden, IGNORED)

    def _places(self, i: int) -> Tensor:
        """Which tokens of row i are masked."""
        draw = torch.rand(self.rows.shape[1], generator=torch.Generator().manual_seed(1000 * self.seed + i))
        draw[torch.isin(self.rows[i], self.special)] = 1.0
        return draw <= max(SHARE, float(draw.min()))


def following(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Ids (1, L) and the token that comes next; behind the last one nothing is asked for."""
    return ids, F.pad(ids[:, 1:], (0, 1), value=IGNORED)


def nats(logits: Tensor, labels: Tensor) -> Tensor:
    """logits (B, L, V), labels (B, L) -> the losses of the places that are asked for, float64."""
    asked = (labels != IGNORED).to(logits.device)
    wanted = labels.to(logits.device)[asked]
    return torch.cat([F.cross_entropy(part.double(), each, reduction="none")
                      for part, each in zip(logits[asked].split(AT_ONCE), wanted.split(AT_ONCE))])


def predicts(model: nn.Module) -> str | None:
    """Which tokens a model of transformers predicts, by the name of its class; None for a bare encoder and others."""
    name = next((type(part).__name__ for part in holders(model)), "")
    return next((kind for end, kind in HEADS.items() if name.endswith(end)), None)


def trained_on(model: nn.Module) -> int | None:
    """Tokens of the blocks on which its run trained a model of transformers; None for one of another origin."""
    config = getattr(next(iter(holders(model)), None), "config", None)
    return block_of(getattr(config, "name_or_path", None) or "")


# ---- batches


class BatchBench(Bench):
    """Pieces are what `calibrate_attention` takes: a dictionary of arguments or one tensor.

    labels: of each judged piece (B,), where the model does not take them itself. Raises ValueError for attention that
    cannot be swapped, and for a model that gives neither a loss nor class scores.
    """

    def __init__(self, model: nn.Module, judged: Sequence[Any], training: Sequence[Any], *,
                 labels: Sequence[Tensor] | None = None, noun: str = "pieces", seed: int = 0):
        super().__init__(model, judged, training, seed)
        self.labels, self.noun = labels, noun
        longest = max(judged, key=_numbers)
        self.pieces = {self._tokens(piece): piece for piece in _parts(longest)}
        with torch.no_grad():
            outputs = [self.run(piece) for piece in judged]
        self.labelled = labels is not None or own_loss(outputs[0], judged[0]) is not None
        self.own = None if self.labelled else [scores(out).float().softmax(-1).flatten(0, -2) for out in outputs]

    def loss(self, i: int) -> float:
        out = self.run(self.judged[i])
        if (loss := own_loss(out, self.judged[i])) is not None:
            return float(loss)
        wanted = self.own[i] if self.labels is None else self.labels[i].to(self.device)
        return float(F.cross_entropy(scores(out).float().flatten(0, -2), wanted))

    def timed(self) -> dict[int, Any]:
        return self.pieces

    def _tokens(self, piece: Any) -> int:
        """The most queries that a layer of attention has."""
        lengths, _ = self.watched(piece, lambda state, given, out: given[0].shape[2])
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
