"""Whisper with other attention in its encoder, judged by the text that it writes with exact attention, each token given
those before it: word error rates end near 100%, where an attention that is a little nearer to exact looks like any
other.
"""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

from crt_exp.advice.bench import fitted, quiet
from crt_exp.data import speech
from crt_exp.data.text import generator_of
from crt_exp.hints import Count, Positive, Several, Whole
from crt_exp.measure import pretrained_encoders as encoders
from crt_exp.measure.adapt import descent, low_rank
from crt_exp.measure.base import Measurement
from crt_exp.mechanism import Mechanism
from crt_exp.metrics import error_rates
from crt_exp.schema import checked
from crt_exp.swap.transfer import transfer_attention

TRANSFERRED = 4    # utterances of attention transfer


@lru_cache(maxsize=256)
@torch.no_grad()
def script(model: str, subset: str, name: str) -> tuple[Tensor, Tensor]:
    """What exact attention writes for an utterance: its tokens (1, L), between those that begin and end it, and their
    nats."""
    made, processor = encoders.hearer(model)
    utterance = next(each for each in encoders.utterances(subset) if each.name == name)
    tokens = [*begin(made), *encoders.heard(made, processor, utterance).tolist(), made.config.eos_token_id]
    return torch.tensor([tokens]), judged(made, processor, utterance, torch.tensor([tokens]))[0]


def begin(model: nn.Module) -> list[int]:
    """The tokens with which it begins to write."""
    plain = getattr(model.generation_config, "no_timestamps_token_id", None)
    return [model.config.decoder_start_token_id, *([] if plain is None else [plain])]


def judged(model: nn.Module, processor: Any, utterance: speech.Utterance, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Nats of each token behind those that begin, and whether it is the likeliest, (L,) both."""
    logits = model(encoders.features(processor, utterance), decoder_input_ids=tokens[:, :-1]).logits[0].float()
    first = len(begin(model))
    logits, asked = logits[first - 1:], tokens[0, first:]
    return F.cross_entropy(logits, asked, reduction="none"), (logits.argmax(-1) == asked).float()


@checked("task")
class Dictation(Measurement):
    """task=dictation: nats a token `above` those of exact attention, and `agrees`, the share of tokens that are the
    likeliest, of the group of utterances that the seed numbers; nothing is trained."""

    metric = "above"

    def __init__(self, model: str, subset: str, count: Count):
        self.model, self.subset, self.count = model, subset, count

    @torch.no_grad()
    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, float]]:
        made, processor = encoders.hearer(self.model)
        said = encoders.group(self.subset, self.count, seed)
        exact = [script(self.model, self.subset, each.name) for each in said]
        bench = encoders.encoder_bench(self.model, self.subset)
        with bench.swapped(None if mechanism.is_exact else replace(mechanism, seed=seed)), quiet():
            found = [judged(made, processor, each, tokens) for each, (tokens, _) in zip(said, exact)]
        nats, agrees = (torch.cat(parts).mean().item() for parts in zip(*found))
        yield {"above": nats - torch.cat([each for _, each in exact]).mean().item(), "agrees": agrees}


@checked("task")
class Whisper(Measurement):
    """task=whisper: fine-tuned after the swap to write what the published model writes, utterance by utterance; those
    that are judged are by other speakers. One row for each of `steps`: of each judged utterance nats a token `above`
    those of the published model, `agrees`, the share of tokens that are the likeliest, and `wer` of what it writes.
    """

    metric = "mean_above"

    def __init__(self, model: str, subset: str, speakers: Several[str], tested: Count, steps: Several[Whole],
                 lr: Positive, decoder: bool = False, transfer: Whole = 0, rank: Whole = 0):
        self.model, self.subset, self.speakers, self.tested = model, subset, speakers, tested
        self.steps, self.lr, self.decoder, self.transfer, self.rank = steps, lr, decoder, transfer, rank

    def utterances(self) -> tuple[list[speech.Utterance], list[speech.Utterance]]:
        """Those that are judged, and those of other speakers, that are trained on. Raises ValueError for too few."""
        every = encoders.utterances(self.subset)
        ours = [each for each in every if each.name.partition("-")[0] in self.speakers]
        others = [each for each in every if each not in ours]
        if len(ours) < self.tested or not others:
            raise ValueError(f"{self.subset} has {len(ours)} utterances of {', '.join(self.speakers)} and "
                             f"{len(others)} of others: {self.tested} are to be judged")
        return ours[:self.tested], others

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        tested, read = self.utterances()
        order = torch.randperm(len(read), generator=generator_of(seed)).tolist()
        model = self.swapped(mechanism, seed, read)
        if 0 in self.steps:
            yield self.reading(model, tested, 0)
        for step in descent(model, lambda i: self.loss(model, read[order[i % len(order)]]), self.steps[-1], self.lr):
            if step in self.steps:
                yield self.reading(model, tested, step)

    def swapped(self, mechanism: Mechanism, seed: int, read: list[speech.Utterance]) -> nn.Module:
        """A copy whose encoder has the attention, fitted to an utterance that is not judged, after transfer."""
        made, processor = encoders.hearer(self.model)
        model = deepcopy(made)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and (self.decoder or "encoder" in name.split(".")))
        if not mechanism.is_exact:
            heard = [{"input_features": encoders.features(processor, each)}
                     for each in read[-TRANSFERRED if self.transfer else -1:]]
            with quiet():
                replace(mechanism, seed=seed).swap(model.get_encoder(), saved=False)
                fitted(model.get_encoder(), heard[-1:])
                if self.transfer:
                    transfer_attention(model.get_encoder(), heard, self.transfer, captured=True)
        if self.rank:
            low_rank(model.get_encoder(), self.rank, seed)
        return model

    def loss(self, model: nn.Module, utterance: speech.Utterance) -> Tensor:
        tokens, _ = script(self.model, self.subset, utterance.name)
        return judged(model.train(), encoders.hearer(self.model)[1], utterance, tokens)[0].mean()

    @torch.no_grad()
    def reading(self, model: nn.Module, tested: list[speech.Utterance], step: int) -> dict[str, Any]:
        processor, normal = encoders.hearer(self.model)[1], EnglishTextNormalizer({})
        model.eval()
        row: dict[str, Any] = {"steps": step, "above": [], "agrees": [], "wer": []}
        for each in tested:
            tokens, exact = script(self.model, self.subset, each.name)
            nats, agrees = judged(model, processor, each, tokens)
            written = normal(processor.decode(encoders.heard(model, processor, each), skip_special_tokens=True)) or "-"
            row["above"].append(float(nats.mean() - exact.mean()))
            row["agrees"].append(float(agrees.mean()))
            row["wer"].append(error_rates([normal(each.text)], [written])["wer"])
        return row | {"mean_above": sum(row["above"]) / len(tested)}
