"""What other attention makes of a pretrained recogniser without training: task=swap_speech; and the time and memory of
models with other attention in turns: task=swap_times."""

import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModelForSpeechSeq2Seq, AutoProcessor
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

from crt_exp.advice.bench import Bench
from crt_exp.data import speech
from crt_exp.hints import Count, NotNegative, Several
from crt_exp.measure.base import Measurement, SwapMeasurement
from crt_exp.measure.pretrained import DTYPES, ROWS, arranged, bench_of, folder_of
from crt_exp.measure.recall import attention_of
from crt_exp.mechanism import Mechanism
from crt_exp.metrics import error_rates
from crt_exp.schema import checked

RATE = 16_000                 # samples a second
AT_MOST, A_SECOND = 16, 8     # tokens that are written for a clip, and more for each second: people say up to 5.3


@lru_cache(maxsize=1)
def hearer(model: str) -> tuple[nn.Module, Any]:
    folder = folder_of(model)
    made = AutoModelForSpeechSeq2Seq.from_pretrained(folder, dtype=torch.float32).eval()
    return made, AutoProcessor.from_pretrained(folder)


@lru_cache(maxsize=4)
def utterances(subset: str, seconds: float = 0) -> list[speech.Utterance]:
    """In an order that was drawn once; with seconds, those that follow each other `joined`."""
    found = speech.official([subset], None, speech.Faults("error", subset))
    found = joined(found, seconds) if seconds else found
    random.Random(0).shuffle(found)
    return found


def joined(found: Sequence[speech.Utterance], seconds: float) -> list[speech.Utterance]:
    """As many of a chapter, one after another, as so many seconds hold; what is left at its end is left out."""
    made = []
    for _, chapter in groupby(found, lambda each: each.name.rpartition("-")[0]):
        held: list[speech.Utterance] = []
        for each in chapter:
            if held and sum(one.seconds for one in [*held, each]) > seconds:
                made.append(speech.Utterance(held[0].name, " ".join(one.text for one in held),
                                             tuple(part for one in held for part in one.parts),
                                             (0.0,) * (sum(len(one.parts) for one in held) - 1)))
                held = []
            held.append(each)
    return made


def features(processor: Any, utterance: speech.Utterance) -> Tensor:
    """(1, bands, frames) of half a minute."""
    return processor(speech.audio_of(utterance, RATE), sampling_rate=RATE, return_tensors="pt").input_features


def encoder_bench(model: str, subset: str, seconds: float = 0) -> Bench:
    """Of the encoder, fitted to the last utterance or clip, which is not judged."""
    made, processor = hearer(model)
    last = utterances(subset, seconds)[-1]
    return Bench(made.get_encoder(), training=[{"input_features": features(processor, last)}])


@checked("task")
class SwapSpeech(SwapMeasurement):
    """task=swap_speech: word error rate, `wer`, of the group number `seed` of `count` utterances, or clips of `seconds`
    of them, each heard alone, with another attention in the encoder. With dtype the whole model computes in that type,
    with exact attention."""

    metric = "wer"

    def __init__(self, model: str, subset: str, count: Count, seconds: NotNegative, dtype: Literal[*DTYPES] | None):
        self.model, self.subset, self.count, self.seconds, self.dtype = model, subset, count, seconds, dtype

    @torch.no_grad()
    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, float]]:
        made, processor = hearer(self.model)
        said, normal = group(self.subset, self.count, seed, self.seconds), EnglishTextNormalizer({})
        bench = encoder_bench(self.model, self.subset, self.seconds)
        with arranged(mechanism, bench, made, seed, self.dtype) as hearing:
            found = [processor.decode(heard(hearing, processor, each), skip_special_tokens=True) for each in said]
        rates = error_rates([normal(each.text) for each in said], [normal(each) or "-" for each in found])
        yield {"wer": rates["wer"]}


def group(subset: str, count: int, number: int, seconds: float = 0) -> list[speech.Utterance]:
    """Raises ValueError where there are not so many utterances besides the last, to which attention is fitted."""
    every = utterances(subset, seconds)
    said = every[number * count:(number + 1) * count]
    if len(said) < count or every[-1] in said:
        raise ValueError(f"{subset} has {len(every)} utterances: group {number} of {count} is not there")
    return said


def heard(model: nn.Module, processor: Any, utterance: speech.Utterance) -> Tensor:
    """The tokens that are written for it; attention that hears nothing would go on for ever."""
    return model.generate(features(processor, utterance).to(model.dtype),
                          max_length=AT_MOST + int(A_SECOND * utterance.seconds))[0]


# ---- time and memory


@checked("task")
class SwapTimes(Measurement):
    """task=swap_times: milliseconds of a pass without gradient in each of `rounds`, in which all `methods` take their
    turn, `ms`, and MiB at its peak, `mib`: of the layers of a language model on `length` tokens, or, with `subset`, of
    the encoder of a recogniser on one utterance."""

    metric = "mib"
    uses: frozenset[str] = frozenset()  # attention is named by task.methods

    def __init__(self, model: str, length: Count, subset: str | None, methods: Several[str], rounds: Count):
        self.model, self.length, self.subset, self.methods, self.rounds = model, length, subset, methods, rounds

    def rows(self, mechanism: Mechanism | None, seed: int) -> Iterator[dict[str, Any]]:
        if self.subset:
            bench = encoder_bench(self.model, self.subset)
            piece, body = bench.training[0], None
        else:
            row = ROWS["new"](self.model, self.length, seed)
            bench = bench_of(self.model, row, self.length)
            piece, body = row.ids, torch.no_grad()(bench.body)
        attentions = {text: attention_of(text) for text in self.methods}
        for text, ms in bench.times(attentions, piece, self.rounds, body).items():
            yield {"method": text, "ms": ms, "mib": bench.memory(attentions[text], piece)}
