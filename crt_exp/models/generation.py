"""Drawing sequences from a sequence model, symbol by symbol.

Each sequence has a generator of its own, so that what it becomes depends on its seed and not on the others of a batch.
Legend: B sequences at once, V kinds of symbols.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from crt_exp.models.language import LanguageModel


@dataclass(frozen=True)
class TokenChoice:
    """How a symbol is drawn from logits: at a temperature (0: the most likely one), of the top_k most likely, and of
    the fewest whose chances sum to at least top_p. None: of all. Several at once hold in this order."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def chances(self, logits: Tensor) -> Tensor:
        """(B, V) -> (B, V) float64, each row of sum 1; symbols whose logit is -inf have none."""
        logits = logits.double()
        if self.temperature == 0:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
        logits = logits / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k, -1).values[..., -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        chances = logits.softmax(-1)
        if self.top_p is not None:
            ordered, order = chances.sort(dim=-1, descending=True, stable=True)
            kept = ordered.cumsum(-1) - ordered < self.top_p                    # the sum before it is still too little
            chances = torch.zeros_like(chances).scatter(-1, order, torch.where(kept, ordered, 0.0))
        return chances / chances.sum(-1, keepdim=True)

    def draw(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """(B, V) and numbers (B,) in [0, 1) -> symbols (B,)."""
        chances = self.chances(logits)
        sums, places = chances.cumsum(-1), torch.arange(chances.shape[-1], device=chances.device)
        last = torch.where(chances > 0, places, 0).amax(-1)                     # rounding may lead beyond it
        return torch.searchsorted(sums, uniform[:, None] * sums[:, -1:], right=True)[:, 0].minimum(last)


@torch.no_grad()
def generate(model: LanguageModel, prompt: Tensor, count: int, choice: TokenChoice, seeds: Sequence[int], *,
             never: Iterable[int] = (), end: int | None = None) -> list[list[int]]:
    """At most `count` new symbols behind a prompt (P,), one sequence for each seed, without the prompt.

    never: symbols that are not drawn. end: the symbol that ends a sequence, which is not part of it. The model is in
    eval mode. Time for a symbol does not depend on the place with random features; else it is linear in it.
    """
    device = prompt.device
    banned = torch.tensor(sorted(never), dtype=torch.long, device=device)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    pasts, tokens = model.begin(), prompt.expand(len(generators), -1)
    rows, going = [[] for _ in generators], set(range(len(generators)))
    for _ in range(count):
        logits = model(tokens, pasts=pasts)[:, -1].index_fill(-1, banned, -torch.inf)
        uniform = torch.stack([torch.rand((), generator=g, dtype=torch.float64) for g in generators]).to(device)
        drawn = choice.draw(logits, uniform)
        going -= {i for i in going if int(drawn[i]) == end}
        if not going:
            break
        for i in going:
            rows[i].append(int(drawn[i]))
        tokens = drawn[:, None]
    return rows
