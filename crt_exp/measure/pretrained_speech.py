"""A pretrained recogniser whose encoder gets other attention and is trained on.

Every arm starts from the published weights and reads the same utterances in the same order, of speakers who are not
judged. It learns to write what the model with exact attention writes, each token given those before it: what people
wrote of these recordings has no points and one kind of letters, and would have to be learned first.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

from crt_exp.data import speech
from crt_exp.data.text import generator_of
from crt_exp.mechanism import Mechanism
from crt_exp.metrics import error_rates
from crt_exp.measure import pretrained_encoders as encoders
from crt_exp.measure.adapt import descent, low_rank
from crt_exp.advice.bench import fitted, quiet
from crt_exp.swap.transfer import transfer_attention


TAUGHT = 4    # utterances of the transfer


def speaker(utterance: speech.Utterance) -> str:
    return utterance.name.partition("-")[0]


@dataclass(frozen=True)
class Trained:
    """speakers: those who are judged, by so many `tested` utterances; all others are trained on. steps: of an utterance
    each, after which it is judged, in rising order. decoder: whether it is trained, too, or stays as it is. transfer:
    steps of attention transfer before, on TAUGHT utterances, of attention that learns by gradients. rank: of adapters
    of the encoder, which are trained in the place of its weights; 0: none."""

    model: str
    subset: str
    speakers: Sequence[str]
    tested: int
    steps: Sequence[int]
    lr: float
    decoder: bool
    transfer: int = 0
    rank: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError where the speakers say less than is to be judged, or nobody is left to be trained on."""
        if len(self.judged) < self.tested or not self.read:
            raise ValueError(f"{self.subset} has {len(self.judged)} utterances of {', '.join(self.speakers)} and "
                             f"{len(self.read)} of others: {self.tested} are to be judged")

    @property
    def judged(self) -> list[speech.Utterance]:
        return [each for each in encoders.utterances(self.subset) if speaker(each) in self.speakers][:self.tested]

    @property
    def read(self) -> list[speech.Utterance]:
        return [each for each in encoders.utterances(self.subset) if speaker(each) not in self.speakers]

    def records(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        """After so many `steps`, of each judged utterance: nats a token of what exact attention writes, `above` those
        of the published model; `agrees`, the share of tokens that are the likeliest; and `wer` of what it writes."""
        order = torch.randperm(len(self.read), generator=generator_of(seed)).tolist()
        model = self.swapped(mechanism, seed)
        if 0 in self.steps:
            yield self.reading(model, 0)
        for step in descent(model, lambda i: self.loss(model, self.read[order[i % len(order)]]), self.steps[-1],
                            self.lr):
            if step in self.steps:
                yield self.reading(model, step)

    def swapped(self, mechanism: Mechanism, seed: int) -> nn.Module:
        """A copy whose encoder has the arm's attention, fitted to an utterance that is not judged, and taught."""
        made, processor = encoders.hearer(self.model)
        model = deepcopy(made)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and (self.decoder or "encoder" in name.split(".")))
        if not mechanism.is_exact:
            heard = [{"input_features": encoders.features(processor, each)}
                     for each in self.read[-TAUGHT if self.transfer else -1:]]
            with quiet():
                replace(mechanism, seed=seed).swap(model.get_encoder(), saved=False)
                fitted(model.get_encoder(), heard[-1:])
                if self.transfer:
                    transfer_attention(model.get_encoder(), heard, self.transfer, captured=True)
        if self.rank:
            low_rank(model.get_encoder(), self.rank, seed)
        return model

    def loss(self, model: nn.Module, utterance: speech.Utterance) -> Tensor:
        tokens, _ = encoders.script(self.model, self.subset, utterance.name)
        return encoders.judged(model.train(), encoders.hearer(self.model)[1], utterance, tokens)[0].mean()

    @torch.no_grad()
    def reading(self, model: nn.Module, steps: int) -> dict[str, Any]:
        processor, normal = encoders.hearer(self.model)[1], EnglishTextNormalizer({})
        model.eval()
        row: dict[str, Any] = {"steps": steps, "above": [], "agrees": [], "wer": []}
        for each in self.judged:
            tokens, exact = encoders.script(self.model, self.subset, each.name)
            nats, agrees = encoders.judged(model, processor, each, tokens)
            written = normal(processor.decode(encoders.heard(model, processor, each), skip_special_tokens=True)) or "-"
            row["above"].append(float(nats.mean() - exact.mean()))
            row["agrees"].append(float(agrees.mean()))
            row["wer"].append(error_rates([normal(each.text)], [written])["wer"])
        return row
