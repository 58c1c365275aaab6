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
# maximum length of a transcript: AT_MOST + A_SECOND * seconds (speech has at most 5.3/s)
AT_MOST = 16
A_SECOND = 8


@lru_cache(maxsize=1)
def load(model: str) -> tuple[nn.Module, Any]:
    """Return the model in eval mode, and its processor."""
    folder = folder_of(model)
    made = AutoModelForSpeechSeq2Seq.from_pretrained(folder, dtype=torch.float32).eval()
    return made, AutoProcessor.from_pretrained(folder)


@lru_cache(maxsize=4)
def utterances(subset: str) -> list[speech.Utterance]:
    """Return the utterances of a subset in a fixed random order."""
    found = list(speech.read_librispeech([subset], None))
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
    audio = speech.audio_of(utterance, RATE)
    return processor(audio, sampling_rate=RATE, return_tensors="pt").input_features


def encoder_bench(model: str, subset: str, fit: int) -> Bench:
    """Return a bench of the encoder, with the last `fit` utterances for calibration."""
    exact, processor = load(model)
    training = []
    for utterance in utterances(subset)[-fit:]:
        training.append({"input_features": features(processor, utterance)})
    return Bench(exact.get_encoder(), training=training)


def transcript(model: nn.Module, processor: Any, utterance: speech.Utterance) -> Tensor:
    """Generate the tokens of a transcript, up to a maximum length.

    Without a limit, an encoder without information would not end.
    """
    return model.generate(
        features(processor, utterance).to(model.dtype),
        max_length=AT_MOST + int(A_SECOND * utterance.seconds),
    )[0]


def word_error_rate(
    processor: Any, utterances: Sequence[speech.Utterance], transcripts: Sequence[Tensor]
) -> float:
    normalize = EnglishTextNormalizer({})
    references = [normalize(utterance.text) for utterance in utterances]
    hypotheses = []
    for tokens in transcripts:
        text = processor.decode(tokens, skip_special_tokens=True)
        hypotheses.append(normalize(text) or "-")
    return error_rates(references, hypotheses)["wer"]


def prompt(model: nn.Module) -> list[int]:
    """Return the tokens before a transcript."""
    tokens = [model.config.decoder_start_token_id]
    no_timestamps = getattr(model.generation_config, "no_timestamps_token_id", None)
    if no_timestamps is not None:
        tokens.append(no_timestamps)
    return tokens


def token_losses(
    model: nn.Module, processor: Any, utterance: speech.Utterance, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """Return nats of each token after the prompt, and 1 for correct predictions, (L,)."""
    first = len(prompt(model))
    output = model(features(processor, utterance), decoder_input_ids=tokens[:, :-1])
    logits = output.logits[0].float()[first - 1 :]
    labels = tokens[0, first:]
    nats = F.cross_entropy(logits, labels, reduction="none")
    return nats, (logits.argmax(-1) == labels).float()


@lru_cache(maxsize=256)
@torch.no_grad()
def exact_transcript(model: str, subset: str, name: str) -> tuple[Tensor, Tensor]:
    """Return the transcript by exact attention, and its nats per token.

    The tokens (1, L) include prompt and end.
    """
    exact, processor = load(model)
    utterance = next(utterance for utterance in utterances(subset) if utterance.name == name)
    words = transcript(exact, processor, utterance).tolist()
    tokens = torch.tensor([[*prompt(exact), *words, exact.config.eos_token_id]])
    nats, _ = token_losses(exact, processor, utterance, tokens)
    return tokens, nats


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
        self.model = model
        self.subset = subset
        self.count = count
        self.dtype = dtype
        self.fit = fit

    @torch.no_grad()
    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, float]]:
        exact, processor = load(self.model)
        spoken = group(self.subset, self.count, seed, self.fit)
        bench = encoder_bench(self.model, self.subset, self.fit)
        with with_attention(mechanism, bench, exact, seed, self.dtype) as model:
            transcripts = [transcript(model, processor, utterance) for utterance in spoken]
        yield {"wer": word_error_rate(processor, spoken, transcripts)}


@checked("task")
class Dictation(SwapMeasurement):
    """task=dictation: loss increase on a group of utterances after a swap.

    The group has number `seed` and `count` utterances. `above`: nats per token minus those of exact attention.
    `agrees`: share of tokens that are the most likely ones. Attention is fitted to `fit` other utterances.
    """

    metric = "above"

    def __init__(self, model: FileName, subset: str, count: Count, fit: Count):
        self.model = model
        self.subset = subset
        self.count = count
        self.fit = fit

    @torch.no_grad()
    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, float]]:
        model, processor = load(self.model)
        spoken = group(self.subset, self.count, seed, self.fit)
        exact = []
        for utterance in spoken:
            exact.append(exact_transcript(self.model, self.subset, utterance.name))
        bench = encoder_bench(self.model, self.subset, self.fit)
        losses, correct = [], []
        seeded = None if mechanism.is_exact else replace(mechanism, seed=seed)
        with bench.swapped(seeded), quiet():
            for utterance, (tokens, _) in zip(spoken, exact):
                nats, agrees = token_losses(model, processor, utterance, tokens)
                losses.append(nats)
                correct.append(agrees)
        exact_nats = torch.cat([nats for _, nats in exact])
        yield {
            "above": torch.cat(losses).mean().item() - exact_nats.mean().item(),
            "agrees": torch.cat(correct).mean().item(),
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
        self.model = model
        self.subset = subset
        self.speakers = speakers
        self.tested = tested
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

        def loss(step: int) -> Tensor:
            return self.loss(model, read[order[step % len(order)]])

        trained = descent(model, loss, self.steps[-1], self.lr)
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
