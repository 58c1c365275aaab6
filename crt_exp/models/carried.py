"""Sequences longer than a causal model was trained on, read piece by piece with what it remembers of the pieces before.

Legend: B sequences, T symbols.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from crt_exp.models.language import LanguageModel


@torch.no_grad()
def carried_losses(model: LanguageModel, tokens: Tensor, labels: Tensor, chunk: int,
                   window: int | None = None) -> Iterator[Tensor]:
    """The losses (B, at most chunk), in nats, of labels (B, T) behind tokens (B, T), chunk by chunk.

    With random features the state is O(1) in T, and so are time and memory of a chunk. window: what keeps keys keeps
    those of so many symbols, as many as the last one of a chunk sees; None: of all.
    """
    pasts = model.begin(window)
    for at in range(0, tokens.shape[1], chunk):
        logits = model(tokens[:, at:at + chunk], pasts=pasts).float()
        yield F.cross_entropy(logits.transpose(1, 2), labels[:, at:at + chunk], reduction="none")
