"""What other attention makes of pretrained encoders: sentences and paragraphs, speech.

Nothing is padded: what is read together has one length. Models are those of `python -m crt_exp.data fetch`, or folders.
Legend: B texts, L tokens, h the width of states.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import spearmanr
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForSpeechSeq2Seq, AutoProcessor, AutoTokenizer
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

from crt_exp.data import glue, speech
from crt_exp.data.text import lines_of, local_blocks, official_file
from crt_exp.metrics import error_rates
from crt_exp.advice.bench import Bench
from crt_exp.measure.pretrained import arranged, folder_of
from crt_exp.measure.recall import attention_of
from crt_exp.measure.texts import FOLDER

TOGETHER = 32                 # texts
FITTED = 64                   # sentences or paragraphs that attention is fitted to
NEAREST = 10                  # paragraphs that are retrieved
RATE = 16_000                 # samples a second
AT_MOST, A_SECOND = 16, 8     # tokens that are written for a clip, and more for each second: people say up to 5.3


# ---- sentences and paragraphs


@lru_cache(maxsize=1)
def opened(model: str) -> tuple[nn.Module, Any]:
    folder = folder_of(model)
    return AutoModel.from_pretrained(folder, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(folder)


def alike(rows: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], Tensor]]:
    """Numbers of rows of one length, and their tokens (B, L)."""
    by_length: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        by_length.setdefault(len(row), []).append(i)
    for same in by_length.values():
        for i in range(0, len(same), TOGETHER):
            part = same[i:i + TOGETHER]
            yield part, torch.tensor([rows[each] for each in part])


@torch.no_grad()
def states(model: nn.Module, rows: Sequence[Sequence[int]]) -> Tensor:
    """The mean state of each, (n, h)."""
    found = [(i, model(input_ids=ids).last_hidden_state.mean(1)) for i, ids in alike(rows)]
    order = torch.tensor([each for i, _ in found for each in i])
    return torch.cat([each for _, each in found])[order.argsort()]


def swapped_states(arm: str, model: nn.Module, rows: Sequence[Sequence[int]], fitted_to: Sequence[Sequence[int]],
                   seed: int) -> Tensor:
    bench = Bench(model, training=[ids for _, ids in alike(fitted_to)])
    with bench.swapped(attention_of(arm, seed=seed)):
        return states(model, rows)


def sentences(arm: str, model: str, split: str, parts: int, seed: int) -> dict[str, Any]:
    """STS-B: Spearman's correlation of the scores with the cosine of the mean states, over all pairs and over each of
    so many disjoint `parts` of them."""
    encoder, tokenizer = opened(model)
    given, train = glue.load("sts-b", split), glue.load("sts-b", "train").subsample(FITTED)
    rows = tokenizer([*given.sentence1, *given.sentence2])["input_ids"]
    first, second = swapped_states(arm, encoder, rows, tokenizer(train.sentence1)["input_ids"], seed).chunk(2)
    cosines, scores = F.cosine_similarity(first, second).numpy(), np.array(given.labels)
    by_part = [spearmanr(cosines[i::parts], scores[i::parts])[0] for i in range(parts)]
    return {"all": float(spearmanr(cosines, scores)[0]), "parts": list(map(float, by_part))}


@lru_cache(maxsize=4)
def blocks(model: str, split: str, length: int) -> Tensor:
    """(n, length), pieces of WikiText-2 with the model's marks."""
    rows = local_blocks(official_file("wikitext2", split), opened(model)[1], length, FOLDER / "tokens")
    return torch.from_numpy(rows.astype(np.int64))


def cosines(arm: str, model: str, length: int, texts: int, seed: int) -> dict[str, Any]:
    """Of the mean state of each text with exact attention's."""
    encoder = opened(model)[0]
    rows, train = (blocks(model, split, length) for split in ("valid", "train"))
    rows, train = rows[::max(len(rows) // texts, 1)][:texts].tolist(), train[:4].tolist()
    exact, found = (swapped_states(each, encoder, rows, train, seed) for each in ("exact", arm))
    return {"cosines": F.cosine_similarity(found, exact).tolist()}


@lru_cache(maxsize=4)
def paragraphs(model: str, split: str, length: int, count: int) -> list[list[int]]:
    """The first `length` tokens of the first so many paragraphs that have as many. Raises ValueError for fewer."""
    found: list[list[int]] = []
    for line in lines_of([official_file("wikitext2", split)]):
        ids = opened(model)[1](line.strip(), truncation=True, max_length=length)["input_ids"]
        found += [ids] if len(ids) == length else []
        if len(found) == count:
            return found
    raise ValueError(f"the {split} text of WikiText-2 has {len(found)} paragraphs of {length} tokens, not {count}")


def retrieval(arm: str, model: str, length: int, texts: int, seed: int) -> dict[str, Any]:
    """Of each paragraph the share of its nearest ones, by the cosine with exact attention, that stay so."""
    encoder = opened(model)[0]
    rows, train = paragraphs(model, "valid", length, texts), paragraphs(model, "train", length, FITTED // 8)
    exact, found = (nearest(swapped_states(each, encoder, rows, train, seed)) for each in ("exact", arm))
    kept = (exact.unsqueeze(2) == found.unsqueeze(1)).any(2).float().mean(1)
    return {"kept": kept.tolist()}


def nearest(found: Tensor) -> Tensor:
    """(n, NEAREST): of each row those of the largest cosine with it, itself apart."""
    unit = F.normalize(found, dim=-1)
    return (unit @ unit.mT).fill_diagonal_(-torch.inf).topk(min(NEAREST, len(unit) - 1), -1).indices


# ---- speech


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


@torch.no_grad()
def words(arm: str, model: str, subset: str, count: int, seed: int, seconds: float = 0) -> dict[str, float]:
    """Word error rate of the next so many utterances, or clips of so many seconds of them, each heard alone, with that
    attention in the encoder; "exact dtype=bfloat16" is of the whole model."""
    made, processor = hearer(model)
    said, normal = group(subset, count, seed, seconds), EnglishTextNormalizer({})
    with arranged(arm, encoder_bench(model, subset, seconds), made, seed) as hearing:
        written = [processor.decode(heard(hearing, processor, each), skip_special_tokens=True) for each in said]
    rates = error_rates([normal(each.text) for each in said], [normal(each) or "-" for each in written])
    return {"wer": rates["wer"], "cer": rates["cer"]}


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


def encoder_times(arm: Mapping[str, str], model: str, subset: str, rounds: int, seed: int) -> list[dict[str, Any]]:
    """Milliseconds of the encoder for one clip, in rounds in which all take their turn, and MiB at the peak."""
    bench = encoder_bench(model, subset)
    arms = {name: attention_of(each) for name, each in arm.items()}
    spent = bench.times(arms, bench.training[0], rounds)
    return [{"arm": name, "ms": each, "mib": bench.memory(arms[name], bench.training[0])}
            for name, each in spent.items()]
