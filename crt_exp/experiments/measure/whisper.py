"""Pretrained Whisper with another attention in its encoder.

task=swap_speech: word error rate without training. task=dictation: loss without training. task=whisper: fine-tuned
after the swap. The loss is that of the transcript by exact attention. It distinguishes methods whose word error rates
saturate near 100%.
"""

import random
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForSpeechSeq2Seq, AutoProcessor
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

from crt_exp.experiments.data import speech
from crt_exp.experiments.data.text import generator_of
from crt_exp.experiments.measure import SwapMeasurement
from crt_exp.experiments.measure.adapt import descent
from crt_exp.experiments.measure.bench import Bench, fit_attention, quiet
from crt_exp.experiments.measure.pretrained import DTYPES, folder_of, with_attention
from crt_exp.experiments.tasks.base import error_rates
from crt_exp.mechanism import Mechanism
from crt_exp.validation import Count, FileName, Positive, Several, Whole, checked

RATE = 16_000  # samples a second
AT_MOST, A_SECOND = (
    16,
    8,
)  # maximum length of a transcript: AT_MOST + A_SECOND * seconds (speech has at most 5.3/s)


@lru_cache(maxsize=1)
def load(model: str) -> tuple[nn.Module, Any]:
    """Return the model in eval mode, and its processor."""
    folder = folder_of(model)
    made = AutoModelForSpeechSeq2Seq.from_pretrained(folder, dtype=torch.float32).eval()
    return made, AutoProcessor.from_pretrained(folder)


@lru_cache(maxsize=4)
def utterances(subset: str) -> list[speech.Utterance]:
    """Return the utterances of a subset in a fixed random order."""
    faults = speech.Faults("error", subset)
    found = list(speech.official([subset], None, faults))
    faults.report(len(found))
    random.Random(0).shuffle(found)
    return found


def group(subset: str, count: int, number: int, fit: int) -> list[speech.Utterance]:
    """Return utterances number * count to (number + 1) * count.

    Raises ValueError if the group is incomplete or contains one of the last `fit` utterances, which are for
    calibration.
    """
    every = utterances(subset)
    found = every[number * count : (number + 1) * count]
    if len(found) < count or (number + 1) * count > len(every) - fit:
        raise ValueError(
            f"seed={number}: expected a group of task.count={count} utterances within the "
            f"{len(every) - fit} available; use a smaller seed or task.count"
        )
    return found


def features(processor: Any, utterance: speech.Utterance) -> Tensor:
    """Return log-mel features (1, bands, frames) of 30 seconds."""
    return processor(
        speech.audio_of(utterance, RATE), sampling_rate=RATE, return_tensors="pt"
    ).input_features


def encoder_bench(model: str, subset: str, fit: int) -> Bench:
    """Return a bench of the encoder, with the last `fit` utterances for calibration."""
    made, processor = load(model)
    last = [{"input_features": features(processor, each)} for each in utterances(subset)[-fit:]]
    return Bench(made.get_encoder(), training=last)


def transcript(model: nn.Module, processor: Any, utterance: speech.Utterance) -> Tensor:
    """Generate the tokens of a transcript, up to a maximum length.

    Without a limit, an encoder without information would not end.
    """
    return model.generate(
        features(processor, utterance).to(model.dtype),
        max_length=AT_MOST + int(A_SECOND * utterance.seconds),
    )[0]


def word_error_rate(
    processor: Any, spoken: Sequence[speech.Utterance], written: Sequence[Tensor]
) -> float:
    normal = EnglishTextNormalizer({})
    return error_rates(
        [normal(each.text) for each in spoken],
        [normal(processor.decode(each, skip_special_tokens=True)) or "-" for each in written],
    )["wer"]


def prompt(model: nn.Module) -> list[int]:
    """Return the tokens before a transcript."""
    plain = getattr(model.generation_config, "no_timestamps_token_id", None)
    return [model.config.decoder_start_token_id, *([] if plain is None else [plain])]


def token_losses(
    model: nn.Module, processor: Any, utterance: speech.Utterance, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """Return nats of each token after the prompt, and 1 for correct predictions, (L,)."""
    logits = (
        model(features(processor, utterance), decoder_input_ids=tokens[:, :-1]).logits[0].float()
    )
    first = len(prompt(model))
    logits, asked = logits[first - 1 :], tokens[0, first:]
    return F.cross_entropy(logits, asked, reduction="none"), (logits.argmax(-1) == asked).float()


@lru_cache(maxsize=256)
@torch.no_grad()
def exact_transcript(model: str, subset: str, name: str) -> tuple[Tensor, Tensor]:
    """Return the transcript by exact attention, and its nats per token.

    The tokens (1, L) include prompt and end.
    """
    made, processor = load(model)
    utterance = next(each for each in utterances(subset) if each.name == name)
    tokens = [
        *prompt(made),
        *transcript(made, processor, utterance).tolist(),
        made.config.eos_token_id,
    ]
    return torch.tensor([tokens]), token_losses(made, processor, utterance, torch.tensor([tokens]))[
        0
    ]


@checked("task")
class SwapSpeech(SwapMeasurement):
    """task=swap_speech: word error rate `wer` of a group of utterances after a swap.

    The group has number `seed` and `count` utterances. Attention is fitted to `fit` other utterances. With `dtype`, the
    whole model has that type and exact attention.
    """

    metric = "wer"

    def __init__(
        self, model: FileName, subset: str, count: Count, dtype: Literal[*DTYPES] | None, fit: Count
    ):
        self.model, self.subset, self.count, self.dtype, self.fit = model, subset, count, dtype, fit

    @torch.no_grad()
    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, float]]:
        made, processor = load(self.model)
        spoken = group(self.subset, self.count, seed, self.fit)
        bench = encoder_bench(self.model, self.subset, self.fit)
        with with_attention(mechanism, bench, made, seed, self.dtype) as model:
            written = [transcript(model, processor, each) for each in spoken]
        yield {"wer": word_error_rate(processor, spoken, written)}


@checked("task")
class Dictation(SwapMeasurement):
    """task=dictation: loss increase on a group of utterances after a swap.

    The group has number `seed` and `count` utterances. `above`: nats per token minus those of exact attention.
    `agrees`: share of tokens that are the most likely ones. Attention is fitted to `fit` other utterances.
    """

    metric = "above"

    def __init__(self, model: FileName, subset: str, count: Count, fit: Count):
        self.model, self.subset, self.count, self.fit = model, subset, count, fit

    @torch.no_grad()
    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, float]]:
        made, processor = load(self.model)
        spoken = group(self.subset, self.count, seed, self.fit)
        exact = [exact_transcript(self.model, self.subset, each.name) for each in spoken]
        bench = encoder_bench(self.model, self.subset, self.fit)
        with bench.swapped(None if mechanism.is_exact else replace(mechanism, seed=seed)), quiet():
            found = [
                token_losses(made, processor, each, tokens)
                for each, (tokens, _) in zip(spoken, exact)
            ]
        nats, agrees = (torch.cat(parts).mean().item() for parts in zip(*found))
        yield {
            "above": nats - torch.cat([each for _, each in exact]).mean().item(),
            "agrees": agrees,
        }


@checked("task")
class Whisper(SwapMeasurement):
    """task=whisper: fine-tune the encoder after a swap, one utterance per step.

    After each of `steps` there is one row with lists over the evaluated utterances, which are of other speakers.
    `above`: nats per token minus those of exact attention without fine-tuning. `agrees`: share of tokens that are the
    most likely ones. `wer`: word error rate.
    """

    metric = "mean_above"

    def __init__(
        self,
        model: FileName,
        subset: str,
        speakers: Several[str],
        tested: Count,
        steps: Several[Whole],
        lr: Positive,
    ):
        self.model, self.subset, self.speakers, self.tested = model, subset, speakers, tested
        self.steps, self.lr = steps, lr

    def utterances(self) -> tuple[list[speech.Utterance], list[speech.Utterance]]:
        """Return test utterances, and training utterances of other speakers.

        Raises ValueError if there are too few.
        """
        every = utterances(self.subset)
        ours = [each for each in every if each.name.partition("-")[0] in self.speakers]
        others = [each for each in every if each not in ours]
        if len(ours) < self.tested or not others:
            raise ValueError(
                f"task.tested={self.tested}: expected at most {len(ours)} utterances of task.speakers, "
                "and at least one other speaker"
            )
        return ours[: self.tested], others

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        tested, read = self.utterances()
        order = torch.randperm(len(read), generator=generator_of(seed)).tolist()
        model = self.swapped(mechanism, seed, read[-1])
        trained = descent(
            model, lambda i: self.loss(model, read[order[i % len(order)]]), self.steps[-1], self.lr
        )
        for step in chain([0], trained):
            if step in self.steps:
                yield self.evaluated(model, tested, step)

    def swapped(self, mechanism: Mechanism, seed: int, fit: speech.Utterance) -> nn.Module:
        """Return a copy with swapped and fitted encoder; only the encoder is trained."""
        made, processor = load(self.model)
        model = deepcopy(made)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and "encoder" in name.split("."))
        if not mechanism.is_exact:
            with quiet():
                replace(mechanism, seed=seed).swap(model.get_encoder(), saved=False)
                fit_attention(model.get_encoder(), [{"input_features": features(processor, fit)}])
        return model

    def loss(self, model: nn.Module, utterance: speech.Utterance) -> Tensor:
        tokens, _ = exact_transcript(self.model, self.subset, utterance.name)
        return token_losses(model.train(), load(self.model)[1], utterance, tokens)[0].mean()

    @torch.no_grad()
    def evaluated(
        self, model: nn.Module, tested: list[speech.Utterance], step: int
    ) -> dict[str, Any]:
        processor = load(self.model)[1]
        model.eval()
        row: dict[str, Any] = {"steps": step, "above": [], "agrees": [], "wer": []}
        for each in tested:
            tokens, exact = exact_transcript(self.model, self.subset, each.name)
            nats, agrees = token_losses(model, processor, each, tokens)
            row["above"].append(float(nats.mean() - exact.mean()))
            row["agrees"].append(float(agrees.mean()))
            row["wer"].append(
                word_error_rate(processor, [each], [transcript(model, processor, each)])
            )
        return row | {"mean_above": sum(row["above"]) / len(tested)}
