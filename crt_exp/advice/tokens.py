"""A language model and rows of tokens.

Legend: L tokens of a row. Repeated rows say their first half twice: what a causal model loses on the second half is
what it can no longer look up.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp.advice.panel import Panel
from crt_exp.swap.record import holders

MASKED, NEXT = "masked", "next"
HEADS = {"ForMaskedLM": MASKED, "ForPreTraining": MASKED, "ForCausalLM": NEXT, "LMHeadModel": NEXT}
SHARE = 0.15        # of the tokens is masked
UNSURE = 16         # tokens of the second half after which a model can know where it stands
REPEATED = 4        # rows, of those that judge
SHORTEST = 128      # of the lengths that are timed


class TokenPanel(Panel):
    """A model of transformers, `rows` (n, L) to judge on and `training` (k, L) to fit to.

    mask: the id of the mask token, of masked models. special: ids that are never masked. Raises ValueError for models
    that predict neither masked nor next tokens.
    """

    noun = "texts"

    def __init__(self, model: nn.Module, rows: Tensor, training: Tensor, *, mask: int | None = None,
                 special: Sequence[int] = (), seed: int = 0):
        self.predicts = predicts(model)
        if self.predicts == MASKED and mask is None:
            raise ValueError(f"{type(model).__name__} predicts masked tokens, and its tokenizer has no mask token: "
                             "give tokenizer=... that has one")
        super().__init__(model, len(rows), training.split(1), seed)
        self.rows, self.mask, self.special = rows, mask, torch.tensor(list(special), dtype=torch.long)
        self.twice = torch.cat([rows[:REPEATED, :rows.shape[1] // 2]] * 2, 1)

    @property
    def causal(self) -> bool:
        return self.predicts == NEXT

    @property
    def recalls(self) -> bool:
        """Whether repeated rows can be judged."""
        return self.causal and self.rows.shape[1] >= 4 * UNSURE

    def run(self, ids: Tensor) -> Any:
        return self.model(input_ids=ids.to(self.device), **self._call)

    def body(self, ids: Tensor) -> None:
        """Without the logits of all tokens, which would hide the rest."""
        self.model.base_model(input_ids=ids.to(self.device), **self._call)

    def step(self, ids: Tensor) -> Tensor:
        return self.run(ids).logits.float().square().mean()

    def timed(self) -> dict[int, Tensor]:
        """Powers of two below the length of the rows, and that."""
        L = self.rows.shape[1]
        lengths = [*(2**k for k in range(SHORTEST.bit_length() - 1, L.bit_length()) if 2**k < L), L]
        return {length: self.rows[:1, :length] for length in lengths}

    @property
    def _call(self) -> dict[str, bool]:
        return {"use_cache": False} if self.causal else {}

    # ---- losses

    def loss(self, i: int) -> float:
        """Nats a predicted token of row i."""
        return self._next(self.rows[i:i + 1], 0) if self.causal else self._masked(i)

    def again(self) -> dict[str, list[float]]:
        """Of the second half of repeated rows."""
        half = self.twice.shape[1] // 2
        return {"again": [self._next(row[None], half + UNSURE - 1) for row in self.twice]} if self.recalls else {}

    def _next(self, row: Tensor, start: int) -> float:
        logits = self.run(row).logits[0, start:-1].float()
        return float(F.cross_entropy(logits, row[0, start + 1:].to(self.device)))

    def _masked(self, i: int) -> float:
        row, hidden = self.rows[i], self._places(i)
        logits = self.run(torch.where(hidden, self.mask, row)[None]).logits[0]
        return float(F.cross_entropy(logits[hidden.to(self.device)].float(), row[hidden].to(self.device)))

    def _places(self, i: int) -> Tensor:
        """Which tokens of row i are masked, the same for all attention."""
        draw = torch.rand(self.rows.shape[1], generator=torch.Generator().manual_seed(1000 * self.seed + i))
        draw[torch.isin(self.rows[i], self.special)] = 1.0
        return draw <= max(SHARE, float(draw.min()))


def predicts(model: nn.Module) -> str:
    """Which tokens a model predicts, by the name of its class."""
    parts = holders(model)
    if not parts or not hasattr(parts[0].config, "vocab_size"):
        raise ValueError(f"{type(model).__name__}: for texts advise takes a language model of transformers that "
                         "predicts masked or next tokens; models of images and speech take images, or batches")
    name = type(parts[0]).__name__
    kinds = [kind for end, kind in HEADS.items() if name.endswith(end)]
    if not kinds:
        raise ValueError(f"{name} predicts no tokens, so it has no loss to compare: load it by AutoModelForCausalLM or "
                         "AutoModelForMaskedLM; task=fidelity compares the hidden states of bare encoders")
    return kinds[0]
