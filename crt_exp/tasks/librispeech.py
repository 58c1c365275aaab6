"""Speech recognition with a Conformer transducer: Figure 3 of Chefs' Random Tables, Table 2 of Hybrid Random Features.

Metrics are word and character error rates of the greedy search, each with its substitutions, deletions and insertions,
and the loss in nats an utterance.
Legend: B utterances, T frames of the encoder, U symbols of a transcript, V of the vocabulary.
"""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from crt_exp.config import ConfigError
from crt_exp.data import DataError, speech, speech_table
from crt_exp.data.sources import no_folder
from crt_exp.data.plan import packed
from crt_exp.data.symbols import ALPHABET, Symbols, UnknownSymbol
from crt_exp.options import Count, Positive, Several, Whole, check_options, checked
from crt_exp.mechanism import Mechanism
from crt_exp.tasks.metrics import error_rates
from crt_exp.models import recogniser
from crt_exp.models.conformer_transducer import (
    PRESETS,
    Beam,
    ConformerSizes,
    check_sizes,
    encoder_frames,
    frames_of,
    greedy,
)
from crt_exp.models.recogniser import Recogniser
from crt_exp.data.ranks import rank
from crt_exp.tasks.base import Batch, Plan, Reader, Task
from crt_exp.atomic_write import whole

Share = Annotated[float, Field(ge=0, le=1)]
INPUTS = ("audio", "samples", "targets", "target_lengths", "bands", "spans")  # what a batch gives the model
SPLITS = ("train", "validation", "test")
WINDOW = 16  # micro-batches of a stream that are sorted by length at once


class SplitsHub(speech.SpeechHub):
    """What is read of it."""

    name: str
    train: str
    validation: str
    test: str
    buffer: Whole
    held_out: Count
    transcripts: Count


class Subsets(TypedDict):
    train: Several[str]
    validation: Several[str]
    test: Several[str]


class Strings(TypedDict):
    train: Count
    validation: Count
    test: Count


class SpeechAugment(TypedDict):
    bands: Whole
    band_share: Share
    spans: Whole
    span_share: Share


class SpokenExample(NamedTuple):
    """An utterance with its number, from which speed and masks are drawn."""

    row: int
    utterance: speech.Utterance
    target: np.ndarray


class SpokenSplit(NamedTuple):
    """The utterances of a split, their symbols, and what each costs: seconds of audio when it is slowest."""

    utterances: list[speech.Utterance]
    targets: list[np.ndarray]
    costs: np.ndarray


@checked("task")
@dataclass(eq=False)
class LibriSpeech(Task):
    """See `conf/task/librispeech.yaml` for the options.

    Raises DataError for missing, malformed or unusable data and for runs that cannot be loaded, ConfigError for
    options that do not go together.
    """

    corpus: Literal["librispeech", "fsdd", "table"]
    source: Literal["files", "hub"]
    data_dir: str | None
    subsets: Subsets
    strings: Strings
    held_out_speaker: str | None
    hub: SplitsHub
    rate: Annotated[int, Field(ge=4000)] | None
    max_seconds: Positive
    bad: Literal["error", "skip"]
    symbols: Literal["characters", "words", "pieces"] | None
    pieces: Count
    batch_seconds: Positive
    speeds: Several[Annotated[float, Field(ge=0.5, le=2)]]
    augment: SpeechAugment
    preset: Literal[*PRESETS]
    sizes: dict[str, Any]
    init: str
    beam: Count | None
    cache_dir: str | None

    metric, lower_is_better = "wer", True

    def __post_init__(self):
        digits = self.corpus == "fsdd"
        self.rate = self.rate or (8000 if digits else 16000)
        self.symbols = self.symbols or ("words" if digits else "characters")
        self.check_options(digits)
        self.streamed = self.source == "hub"
        self.faults = {split: speech.Faults(self.bad, f"{split} utterances") for split in SPLITS}
        self.splits = self.read_splits()
        self.origin = None if self.init == "scratch" else self.load_origin()
        self.transcripts: list[tuple] = []
        self.heard = 0                                       # utterances whose audio could be read
        self.pace = Pace()

    def check_options(self, digits: bool) -> None:
        self.sizes = PRESETS[self.preset] | self.sizes
        check_options("task.sizes", ConformerSizes, self.sizes)
        check_sizes(self.sizes)
        if self.corpus != "librispeech" and self.source == "hub":
            raise ConfigError(f"task.corpus={self.corpus} reads files: leave task.source=hub out")
        if self.corpus == "table" and not self.data_dir:
            raise ConfigError("task.corpus=table needs task.data_dir=FILE.csv or FILE.jsonl, which names audio files "
                              "and their transcripts")
        if self.held_out_speaker and not digits:
            raise ConfigError("task.held_out_speaker is for task.corpus=fsdd")

    # ---- data

    def read_splits(self) -> dict[str, SpokenSplit]:
        """Everything but streamed audio; what cannot be used is reported split by split."""
        usable = {split: speech.usable(self.read(split), self.max_seconds, self.faults[split])
                 for split in SPLITS if not (self.streamed and split == "train")}
        if usable.get("train") == []:
            self.faults["train"].settle(0)
        self.vocabulary = self.new_symbols(usable)
        splits = {split: self.coded(split, utterances) for split, utterances in usable.items()}
        for split, coded in splits.items():
            self.faults[split].settle(len(coded.utterances))
            self.check_budget(split, coded)
        return splits

    def read(self, split: str) -> Iterable[speech.Utterance]:
        faults = self.faults[split]
        if self.streamed:
            no_folder(self.data_dir, "task.source=hub", "leave it out, or set task.source=files")
            return islice(self.hub_pass(split, faults)(0), self.hub["held_out"])
        if self.corpus == "fsdd":
            return speech.digit_strings(self.recordings, split, self.strings[split], self.held_out_speaker)
        if self.corpus == "table":
            return speech_table.utterances(self.data_dir, split, faults)
        return speech.official(self.subsets[split], self.data_dir, faults)

    @cached_property
    def recordings(self) -> list[speech.Recording]:
        faults = speech.Faults(self.bad, "recordings of digits")
        result = speech.recordings(self.data_dir, faults)
        faults.settle(len(result))
        return result

    def hub_pass(self, split: str, faults: speech.Faults, **options: Any):
        return speech.hub_utterances(self.hub, self.hub[split], faults, **options)

    def inputs(self) -> Iterator[Path]:
        for split in self.splits.values():
            yield from (Path(part.name) for each in split.utterances for part in each.parts if part.content is None)

    def new_symbols(self, utterances: dict[str, list[speech.Utterance]]) -> Symbols:
        """Characters of LibriSpeech are known beforehand; the rest is made from the transcripts of training."""
        if self.symbols == "characters" and self.corpus == "librispeech":
            return Symbols("characters", tuple(ALPHABET))
        texts = self.hub_texts() if self.streamed else [utterance.text for utterance in utterances["train"]]
        return Symbols.of(self.symbols, texts, self.pieces, self.cache_dir)

    def hub_texts(self) -> list[str]:
        stream = self.hub_pass("train", speech.Faults("skip", "training rows"))(0)
        return [utterance.text for utterance in islice(stream, self.hub["transcripts"])]

    def coded(self, split: str, utterances: list[speech.Utterance]) -> SpokenSplit:
        kept, targets = [], []
        for utterance in utterances:
            if (numbers := self.encoded(utterance, self.faults[split])) is not None:
                kept.append(utterance)
                targets.append(numbers)
        slowest = min(self.speeds) if split == "train" else 1.0
        return SpokenSplit(kept, targets, np.array([speech.rounded_up(each.seconds / slowest) for each in kept]))

    def encoded(self, utterance: speech.Utterance, faults: speech.Faults) -> np.ndarray | None:
        try:
            return np.array(self.vocabulary.encode(utterance.text), np.int32)
        except UnknownSymbol as error:
            return faults.add(utterance.name, f"its transcript: {error}")

    def check_budget(self, split: str, coded: SpokenSplit) -> None:
        if len(coded.costs) and coded.costs.max() > self.batch_seconds:
            longest = coded.utterances[int(coded.costs.argmax())]
            raise ConfigError(f"task.batch_seconds = {self.batch_seconds:g}: {longest.name} of the {split} split alone "
                              f"takes {coded.costs.max():g} s, task.speeds included; raise it, or lower "
                              "task.max_seconds with task.bad=skip")

    def length(self, split: str) -> int | None:
        return None if split not in self.splits else len(self.splits[split].utterances)

    def epoch_steps(self, plan: Plan) -> int | None:
        return None if self.streamed else plan.steps(self.splits["train"].costs, self.batch_seconds)

    def batches(self, split: str, plan: Plan) -> Iterator[Batch]:
        if split not in self.splits:
            yield from self.stream(plan)
            return
        data, training = self.splits[split], split == "train"
        order = np.arange(len(data.costs)) if training else np.argsort(data.costs, kind="stable")
        for places in plan.by_cost(data.costs[order], self.batch_seconds, split):
            rows = order[places]
            examples = [SpokenExample(int(i), data.utterances[i], data.targets[i]) for i in rows]
            yield self.batch(examples, [plan.rng(i) for i in rows] if training else None)

    def batch(self, examples: list[SpokenExample], rngs: list[np.random.Generator] | None) -> Batch:
        """CPU tensors; with generators, one for each utterance, speeds and masks are drawn."""
        rows, faults = [], speech.Faults(self.bad, "utterances of a batch")
        for i, (row, utterance, target) in enumerate(examples):
            rng = None if rngs is None else rngs[i]
            speed = 1.0 if rng is None else self.speeds[rng.integers(len(self.speeds))]
            try:
                rows.append((row, speech.as_int16(speech.audio_of(utterance, self.rate, speed)), target, rng))
            except speech.BadAudio as error:
                faults.add(utterance.name, str(error))
        self.heard += len(rows)
        faults.settle(self.heard)
        if rows:
            return self.collated(*zip(*rows))
        silent = np.zeros(math.ceil(self.rate * speech.SHORTEST), np.int16), np.zeros(1, np.int32)
        return self.collated([0], *([part] for part in silent), [None]) | {"rows": []}

    def collated(self, rows: Sequence[int], audio: Sequence[np.ndarray], targets: Sequence[np.ndarray],
                 rngs: Sequence[np.random.Generator | None]) -> Batch:
        lengths = [torch.tensor([len(each) for each in part]) for part in (audio, targets)]
        batch = {"rows": list(rows), "seconds": int(lengths[0].sum()) / self.rate,
                 "audio": speech.padded(audio, np.int16), "samples": lengths[0],
                 "targets": speech.padded(targets, np.int32), "target_lengths": lengths[1].int()}
        if rngs[0] is not None and (self.augment["bands"] or self.augment["spans"]):
            drawn = [self.masks(rng, frames_of(len(each), self.rate)) for rng, each in zip(rngs, audio)]
            batch["bands"], batch["spans"] = (torch.from_numpy(np.stack(part)) for part in zip(*drawn))
        return batch

    def masks(self, rng: np.random.Generator, frames: int) -> tuple[np.ndarray, np.ndarray]:
        options = self.augment
        return (speech.stretches(rng, options["bands"], options["band_share"], self.sizes["mels"]),
                speech.stretches(rng, options["spans"], options["span_share"], frames))

    def stream(self, plan: Plan) -> Iterator[Batch]:
        """Without end. A continued run reads the rows before its step again, but decodes none of them."""
        faults = speech.Faults(self.bad, "streamed utterances")
        read = self.hub_pass("train", faults, rank=plan.rank, world=plan.world, seed=plan.seed,
                             buffer=self.hub["buffer"])
        for number, examples in enumerate(self.stream_batches(read, faults, plan)):
            if number >= plan.start * plan.micro:
                yield self.batch(examples, [plan.rng(example.row) for example in examples])

    def cost(self, example: SpokenExample) -> float:
        """Seconds that an utterance takes of a batch, at its slowest."""
        return speech.rounded_up(example.utterance.seconds / min(self.speeds))

    def stream_batches(self, read, faults: speech.Faults, plan: Plan) -> Iterator[list[SpokenExample]]:
        """Utterances of like length together, among those of a few batches."""
        rows = self.stream_rows(read, faults, plan)
        rng = np.random.default_rng([plan.seed, plan.rank, 4])
        while True:
            window, seconds = [], 0.0
            while seconds < WINDOW * self.batch_seconds:
                window.append(next(rows))
                seconds += self.cost(window[-1])
            window.sort(key=lambda example: example.utterance.seconds)
            sizes = packed(np.array([self.cost(example) for example in window]), self.batch_seconds)
            ends = np.cumsum(sizes)
            for i in rng.permutation(len(sizes)):
                yield window[ends[i] - sizes[i]:ends[i]]

    def stream_rows(self, read, faults: speech.Faults, plan: Plan) -> Iterator[SpokenExample]:
        number, epoch = 0, 0
        longest = min(self.max_seconds, (self.batch_seconds - 0.25) * min(self.speeds))  # costs are rounded up
        while True:
            before = number
            for utterance in read(epoch):
                good = speech.usable([utterance], longest, faults)
                target = self.encoded(utterance, faults) if good else None
                if faults.noted:
                    faults.settle(1)
                    faults.noted.clear()
                if target is not None:
                    yield SpokenExample(plan.rank + plan.world * number, utterance, target)
                    number += 1
            if number == before:
                raise DataError(f"{self.hub['name']}, {self.hub['train']}: process {plan.rank} finds no utterance")
            epoch += 1

    # ---- model

    def load_origin(self) -> dict[str, Tensor]:
        """The weights of the run that task.init names, which must write the same symbols."""
        source = f"task.init = {self.init}"
        known, tensors = recogniser.load(self.init, "task.init")
        if known.symbols != self.vocabulary:
            raise ConfigError(f"{source}: it writes {len(known.symbols)} {known.symbols.kind}, this run "
                              f"{len(self.vocabulary)} {self.vocabulary.kind} that are not the same: choose "
                              "task.symbols, task.pieces and training data as they were there")
        if known.rate != self.rate:
            raise ConfigError(f"{source}: it hears {known.rate} Hz, this run {self.rate} Hz: choose "
                              f"task.rate={known.rate}")
        return tensors

    def build(self, mechanism: Mechanism) -> nn.Module:
        self.recogniser = Recogniser(self.vocabulary, self.rate, self.sizes, mechanism)
        model = self.recogniser.build()
        if self.origin is not None:
            recogniser.take_weights(model, self.origin, f"task.init = {self.init}")
        if rank() == 0 and not self.streamed:
            print(self.described_joiner())
        return model

    def joiner_cells(self) -> int:
        """Bound of B x T x (U + 1) of a micro-batch: of its seconds, and of the longest transcript."""
        longest = max(len(target) for data in self.splits.values() for target in data.targets)
        return encoder_frames(round(self.batch_seconds * self.rate), self.rate) * (longest + 1)

    def described_joiner(self) -> str:
        cells, symbols = self.joiner_cells(), len(self.vocabulary) + 1
        logits, before = (f"{4 * cells * width / 1e6:.3g} MB" for width in (symbols, self.sizes["joiner"]))
        return (f"joiner: a micro-batch of {self.batch_seconds:g} s holds at most {cells} cells (utterances x frames x "
                f"symbols), {logits} of logits for {symbols} symbols and {before} before them")

    def arguments(self, batch: Batch) -> dict[str, Tensor]:
        return {name: batch[name] for name in INPUTS if name in batch}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        self.pace.begin("training", batch["seconds"])
        return model(**self.arguments(batch)).mean()

    def weight(self, batch: Batch) -> int:
        return len(batch["rows"])                            # none where none could be read

    def updated(self, model: nn.Module, step: int) -> None:
        self.pace.end("training")

    def evaluate(self, model: nn.Module, split: str, reader: Reader) -> dict[str, float]:
        loss, rows, searches = 0.0, {}, self.searches(split)
        for name, search in searches.items():
            for batch in reader.batches(split):
                self.pace.begin(name, batch["seconds"])
                losses, hypotheses = model(**self.arguments(batch), search=search)
                self.pace.end(name)
                loss += float(losses.double().sum()) if name == "greedy" and batch["rows"] else 0.0
                for row, hypothesis in zip(batch["rows"], hypotheses):
                    rows.setdefault(row, []).append(self.vocabulary.decode(hypothesis.symbols))
        loss, = reader.sum(loss)
        return self.scores(split, dict(sorted(reader.gather(list(rows.items())))), loss, list(searches))

    def searches(self, split: str) -> dict[str, Any]:
        """All splits are searched greedily, the test split by beam too where that is wanted: it takes longer."""
        return {"greedy": greedy} | ({"beam": Beam(self.beam)} if self.beam and split == "test" else {})

    def scores(self, split: str, rows: dict[int, list[str]], loss: float, searches: list[str]) -> dict[str, float]:
        said = [self.splits[split].utterances[row] for row in rows]
        self.transcripts = [(split, each.name, each.text, *texts) for each, texts in zip(said, rows.values())]
        texts = [each.text for each in said]
        scores = {"loss": loss / len(rows), "utterances": len(rows)}
        for i, name in enumerate(searches):
            rates = error_rates(texts, [hypotheses[i] for hypotheses in rows.values()])
            scores |= {key if name == "greedy" else f"{key}_{name}": value for key, value in rates.items()}
        return scores

    def export(self, model: nn.Module, tensors: dict[str, Tensor], directory: Path) -> None:
        """<run>/model, and what was recognised of the split that was evaluated last as <run>/transcripts.tsv."""
        recogniser.keep(self.recogniser, tensors, directory)
        heads = ("split", "utterance", "transcript", "greedy", *(("beam",) if self.beam else ()))
        lines = ["\t".join(row) for row in (heads, *self.transcripts)]
        with whole(directory / "transcripts.tsv") as part:
            part.write_text("\n".join(lines) + "\n")

    def summary(self, records: list[dict]) -> str:
        last = records[-1]
        beam = f", by beam search {last['wer_beam']:.2%}" if "wer_beam" in last else ""
        return (f"librispeech: WER {last['wer']:.2%}{beam}, CER {last['cer']:.2%} ({last['split']}, step "
                f"{last['step']}){self.pace.described()}")


class Pace:
    """Seconds of work for a second of audio, by what was done."""

    def __init__(self):
        self.spent: dict[str, float] = {}
        self.audio: dict[str, float] = {}
        self.begun: dict[str, float] = {}

    def begin(self, what: str, seconds: float) -> None:
        self.begun.setdefault(what, time.perf_counter())
        self.audio[what] = self.audio.get(what, 0.0) + seconds

    def end(self, what: str) -> None:
        self.spent[what] = self.spent.get(what, 0.0) + time.perf_counter() - self.begun.pop(what)

    def described(self) -> str:
        parts = [f"{what} {self.spent[what] / self.audio[what]:.3g}" for what in self.spent]
        return f"; real-time factors: {', '.join(parts)}" if parts else ""
