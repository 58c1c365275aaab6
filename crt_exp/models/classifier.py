"""A classifier of sequences, or of pairs of them: the sequence model, the mean of its states, two layers on it.

Legend: B sequences, L symbols, d.
"""

import torch
from torch import Tensor, nn

from crt_exp.models.language import LanguageDescription, SequenceModel
from crt_exp.swap.swap import LayerMaker


class Classifier(SequenceModel):
    """Logits of classes. together: 1, or 2 for pairs of sequences, which the same model reads one by one and which the
    head compares: [a, b, a b, a - b], as the Long Range Arena does.
    """

    def __init__(self, description: LanguageDescription, classes: int, make: LayerMaker, checkpointing: bool = False,
                 together: int = 1):
        super().__init__(description, make, checkpointing)
        d, self.together = description.sizes["d"], together
        self.head = nn.Sequential(nn.Linear(d if together == 1 else 4 * d, d), nn.GELU(), nn.Linear(d, classes))
        self.begin_small()

    def forward(self, tokens: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """tokens (B, L) -> (B / together, classes). key_mask (B, L), True = keep."""
        states = self.norm(self.states(tokens, key_mask))
        if key_mask is None:
            key_mask = states.new_ones(states.shape[:2], dtype=torch.bool)
        sums = torch.where(key_mask[..., None], states, 0.0).sum(1)
        pooled = sums / key_mask.sum(1, keepdim=True).to(sums).clamp(min=1)              # the mean of what is kept
        if self.together == 2:
            a, b = pooled.unflatten(0, (-1, 2)).unbind(1)
            pooled = torch.cat([a, b, a * b, a - b], -1)
        return self.head(pooled)
