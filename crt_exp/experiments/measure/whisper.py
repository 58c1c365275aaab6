"""Pretrained Whisper with another attention in its encoder.

task=dictation: loss without training. task=whisper: fine-tuned after the swap. The loss is that of the transcript by
exact attention. It distinguishes methods whose word error rates saturate near 100%.
"""

import random
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

from crt_exp.experiments.data import speech
from crt_exp.experiments.data.text import generator_of
from crt_exp.experiments.measure import (
    Record,
    Records,
    SwapMeasurement,
    TensorPair,
    model_files,
)
from crt_exp.experiments.measure.adapt import descent
from crt_exp.experiments.measure.bench import Bench, swap_and_fit
from crt_exp.experiments.tasks.base import error_rates, task_class
from crt_exp.mechanism import Mechanism
from crt_exp.validation import Count, FileName, Positive, Several, Whole

RATE = 16_000  # samples a second
# maximum length of a transcript: AT_MOST + A_SECOND * seconds (speech has at most 5.3/s)
AT_MOST = 16
A_SECOND = 8


# ---- utterances


@lru_cache(maxsize=4)
def utterances(subset: str) -> list[speech.Utterance]:
    """Return the utterances of a subset in a fixed random order."""
    readable = list(speech.read_librispeech([subset], None))
    random.Random(0).shuffle(readable)
    return readable


def features(processor: Any, utterance: speech.Utterance) -> Tensor:
    """Return log-mel features (1, bands, frames) of 30 seconds."""
    audio = speech.audio_of(utterance, RATE)
    return processor(audio, sampling_rate=RATE, return_tensors="pt").input_features


# ---- transcripts


class Recogniser(NamedTuple):
    """A Whisper model and its processor."""

    model: nn.Module
    processor: Any

    def calibration_batch(self, utterance: speech.Utterance) -> dict[str, Tensor]:
        """Return the arguments of the encoder."""
        return {"input_features": features(self.processor, utterance)}

    @property
    def prompt(self) -> list[int]:
        """Tokens before a transcript."""
        tokens = [self.model.config.decoder_start_token_id]
        no_timestamps = getattr(self.model.generation_config, "no_timestamps_token_id", None)
        if no_timestamps is not None:
            tokens.append(no_timestamps)
        return tokens

    def transcribe(self, utterance: speech.Utterance) -> Tensor:
        """Generate the tokens of a transcript, up to a maximum length.

        Without a limit, an encoder without information would not end.
        """
        inputs = features(self.processor, utterance).to(self.model.dtype)
        longest = AT_MOST + int(A_SECOND * utterance.seconds)
        return self.model.generate(inputs, max_length=longest)[0]

    def word_error_rate(self, utterances: Sequence[speech.Utterance]) -> float:
        normalize = EnglishTextNormalizer({})
        references = []
        hypotheses = []
        for utterance in utterances:
            tokens = self.transcribe(utterance)
            text = self.processor.decode(tokens, skip_special_tokens=True)
            references.append(normalize(utterance.text))
            hypotheses.append(normalize(text) or "-")
        return error_rates(references, hypotheses)["wer"]

    def score(self, utterance: speech.Utterance, tokens: Tensor) -> TensorPair:
        """Return nats of each token after the prompt, and 1 for correct predictions, (L,)."""
        first = len(self.prompt)
        inputs = features(self.processor, utterance)
        output = self.model(inputs, decoder_input_ids=tokens[:, :-1])
        logits = output.logits[0].float()[first - 1 :]
        labels = tokens[0, first:]
        nats = F.cross_entropy(logits, labels, reduction="none")
        return nats, (logits.argmax(-1) == labels).float()


@lru_cache(maxsize=2)
def load(name: str) -> Recogniser:
    """Load a pretrained model in eval mode."""
    model = model_files.load(name, {"ForConditionalGeneration": "AutoModelForSpeechSeq2Seq"})
    return Recogniser(model, model_files.load_part(name, "AutoProcessor"))


@lru_cache(maxsize=256)
@torch.no_grad()
def exact_transcript(model: str, subset: str, name: str) -> TensorPair:
    """Return the transcript by exact attention, and its nats per token.

    The tokens (1, L) include prompt and end.
    """
    exact = load(model)
    utterance = next(utterance for utterance in utterances(subset) if utterance.name == name)
    words = exact.transcribe(utterance).tolist()
    tokens = torch.tensor([[*exact.prompt, *words, exact.model.config.eos_token_id]])
    return tokens, exact.score(utterance, tokens)[0]


# ---- without training


@task_class
class Dictation(SwapMeasurement):
    """task=dictation: loss increase on a group of utterances after a swap in the encoder.

    The group has number `seed` and `count` utterances. Attention is fitted to `fit` other utterances. `above`: nats per
    token minus those of exact attention. `agrees`: share of tokens that are the most likely ones.
    """

    metric = "above"

    model: FileName
    subset: str
    count: Count
    fit: Count

    def group(self, number: int) -> list[speech.Utterance]:
        """Return utterances number * count to (number + 1) * count.

        Raises ValueError if the group is incomplete or contains one of the last `fit` utterances, which are for
        calibration.
        """
        available = utterances(self.subset)[: -self.fit]
        group = available[number * self.count : (number + 1) * self.count]
        if len(group) < self.count:
            raise ValueError(
                f"seed={number}: expected a group of task.count={self.count} utterances within the "
                f"{len(available)} available; use a smaller seed or task.count"
            )
        return group

    @torch.no_grad()
    def rows(self, mechanism: Mechanism, seed: int) -> Records:
        recogniser = load(self.model)
        group = self.group(seed)
        transcripts = [exact_transcript(self.model, self.subset, said.name) for said in group]
        tokens, exact = zip(*transcripts)
        training = utterances(self.subset)[-self.fit :]
        batches = [recogniser.calibration_batch(utterance) for utterance in training]
        with Bench(recogniser.model.get_encoder(), training=batches).approximated(mechanism):
            swapped, agrees = zip(*map(recogniser.score, group, tokens))
        loss = torch.cat(swapped).mean().item()
        exact_loss = torch.cat(exact).mean().item()
        yield {"above": loss - exact_loss, "agrees": torch.cat(agrees).mean().item()}


# ---- fine-tuned


@task_class
class Whisper(SwapMeasurement):
    """task=whisper: fine-tune the encoder after a swap, one utterance per step.

    After each of `steps` there is one row with lists over the evaluated utterances, which are of other speakers.
    `above`: nats per token minus those of exact attention without fine-tuning. `agrees`: share of tokens that are the
    most likely ones. `wer`: word error rate.
    """

    metric = "mean_above"

    model: FileName
    subset: str
    speakers: Several[str]
    tested: Count
    steps: Several[Whole]
    lr: Positive

    def split_utterances(self) -> tuple[list[speech.Utterance], list[speech.Utterance]]:
        """Return test utterances, and training utterances of other speakers.

        Raises ValueError if there are too few.
        """
        tested = []
        training = []
        for utterance in utterances(self.subset):
            speaker = utterance.name.partition("-")[0]
            part = tested if speaker in self.speakers else training
            part.append(utterance)
        if len(tested) < self.tested or not training:
            raise ValueError(
                f"task.tested={self.tested}: expected at most {len(tested)} utterances of "
                "task.speakers, and at least one other speaker"
            )
        return tested[: self.tested], training

    def rows(self, mechanism: Mechanism, seed: int) -> Records:
        tested, training = self.split_utterances()
        order = torch.randperm(len(training), generator=generator_of(seed)).tolist()
        student = self.student(replace(mechanism, seed=seed), training[-1])

        def loss(step: int) -> Tensor:
            return self.loss(student, training[order[step % len(order)]])

        steps = descent(student.model, loss, self.steps[-1], self.lr)
        for step in chain([0], steps):
            if step in self.steps:
                yield {"steps": step, **self.evaluate(student, tested)}

    def student(self, mechanism: Mechanism, calibration: speech.Utterance) -> Recogniser:
        """Return a copy with swapped and fitted encoder; only the encoder is trained."""
        exact = load(self.model)
        model = deepcopy(exact.model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and "encoder" in name.split("."))
        swap_and_fit(model.get_encoder(), mechanism, [exact.calibration_batch(calibration)])
        return exact._replace(model=model)

    def loss(self, student: Recogniser, utterance: speech.Utterance) -> Tensor:
        tokens, _ = exact_transcript(self.model, self.subset, utterance.name)
        student.model.train()
        return student.score(utterance, tokens)[0].mean()

    @torch.no_grad()
    def evaluate(self, student: Recogniser, tested: list[speech.Utterance]) -> Record:
        student.model.eval()
        row: Record = {"above": [], "agrees": [], "wer": []}
        for utterance in tested:
            tokens, exact = exact_transcript(self.model, self.subset, utterance.name)
            nats, agrees = student.score(utterance, tokens)
            row["above"].append(float(nats.mean() - exact.mean()))
            row["agrees"].append(float(agrees.mean()))
            row["wer"].append(student.word_error_rate([utterance]))
        return row | {"mean_above": sum(row["above"]) / len(tested)}
