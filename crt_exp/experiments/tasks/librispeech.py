"""Speech recognition with a Conformer transducer (CRT Figure 3, HRF Table 2).

CRT is Chefs' Random Tables, HRF is Hybrid Random Features. Metrics are word and character error rates of greedy search,
with their substitutions, deletions and insertions, and the loss in nats per utterance.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from crt_exp.atomic_write import atomic_path
from crt_exp.experiments.data import DataError, speech, warn
from crt_exp.experiments.data.loading import Workers, by_workers
from crt_exp.experiments.data.sources import is_on_hub, stand_in, task_folder
from crt_exp.experiments.data.vocabularies import LETTERS, Symbols
from crt_exp.experiments.models import conformer_transducer
from crt_exp.experiments.models.conformer_transducer import (
    PRESETS,
    ConformerSizes,
    Recogniser,
    check_sizes,
    frames_of,
    greedy,
)
from crt_exp.experiments.models.folder import take_weights
from crt_exp.experiments.tasks.base import Batch, Plan, Reader, Task, error_rates
from crt_exp.mechanism import Mechanism
from crt_exp.registry import ConfigError
from crt_exp.validation import Count, Files, Positive, Several, Whole, check_options, checked

Share = Annotated[float, Field(ge=0, le=1)]
INPUTS = (
    "audio",
    "samples",
    "targets",
    "target_lengths",
    "bands",
    "spans",
)  # model inputs in a batch
SPLITS = ("train", "validation", "test")


Subsets = TypedDict("Subsets", dict.fromkeys(SPLITS, Several[str]))
Strings = TypedDict("Strings", dict.fromkeys(SPLITS, Count))


class SpeechAugment(TypedDict):
    bands: Whole
    band_share: Share
    spans: Whole
    span_share: Share


class SpokenSplit(NamedTuple):
    """Utterances of a split, their symbol ids, and their costs.

    costs: seconds of audio at the slowest speed.
    """

    utterances: list[speech.Utterance]
    targets: list[np.ndarray]
    costs: np.ndarray


@checked("task")
@dataclass(eq=False)
class LibriSpeech(Task):
    """Speech recognition; see `conf/task/librispeech.yaml` for the options.

    Raises:
        DataError: data are missing, malformed or unusable, or a run cannot be loaded.
        ConfigError: options contradict each other.
    """

    corpus: Literal["librispeech", "fsdd", "table"]
    source: Literal["auto", "files", "hub"]
    data_dir: str | None
    subsets: Subsets
    strings: Strings
    hub: speech.SpeechHub
    rate: Annotated[int, Field(ge=4000)] | None
    max_seconds: Positive
    bad: Literal["error", "skip"]
    workers: Workers
    symbols: Literal["characters", "words", "pieces"] | None
    pieces: Count
    batch_seconds: Positive
    speeds: Several[Annotated[float, Field(ge=0.5, le=2)]]
    augment: SpeechAugment
    preset: Literal[*PRESETS]
    sizes: dict[str, Any]
    init: Annotated[str, Files(("scratch",))]

    metric, lower_is_better = "wer", True

    def __post_init__(self):
        digits = self.corpus == "fsdd"
        if digits:
            self.stand_in = stand_in(
                "LibriSpeech", "strings of digits", "corpus=librispeech", "speech/LibriSpeech"
            )
        self.rate = self.rate or (8000 if digits else 16000)
        self.symbols = self.symbols or ("words" if digits else "characters")
        self.check_options(digits)
        folder = task_folder("speech/LibriSpeech", self.data_dir)
        self.on_hub = self.corpus == "librispeech" and is_on_hub(
            self.source,
            "speech/LibriSpeech/train-clean-100",
            folder and folder / self.subsets["train"][0],
            self.data_dir,
        )
        if self.on_hub and self.hub["train"] in (self.hub["validation"], self.hub["test"]):
            raise ConfigError(
                f"task.hub.train={self.hub['train']}: also the validation or test split; expected another"
            )
        self.faults = {split: speech.Faults(self.bad, f"{split} utterances") for split in SPLITS}
        self.splits = self.read_splits()
        self.origin = None if self.init == "scratch" else self.load_origin()
        self.transcripts: list[tuple] = []

    def check_options(self, digits: bool) -> None:
        self.sizes = PRESETS[self.preset] | self.sizes
        check_options("task.sizes", ConformerSizes, self.sizes)
        check_sizes(self.sizes)
        if self.source == "hub" and (self.corpus != "librispeech" or self.data_dir):
            raise ConfigError(
                "task.source=hub: expected task.corpus=librispeech and no task.data_dir"
            )
        if self.corpus == "table" and not self.data_dir:
            raise ConfigError(
                "task.corpus=table: expected task.data_dir=FILE, a csv, tsv or jsonl file"
            )

    # ---- data

    def read_splits(self) -> dict[str, SpokenSplit]:
        """Read all splits; report unusable utterances of each split."""
        usable = {
            split: speech.usable(self.read(split), self.max_seconds, self.faults[split])
            for split in SPLITS
        }
        if self.corpus == "librispeech":
            files = []
            for split, utterances in usable.items():
                parts = chain.from_iterable(each.parts for each in utterances)
                files += [(part.name, split) for part in parts if part.content is None]
            speech.check_disjoint(files, "task.subsets")
        if not usable["train"]:
            self.faults["train"].report(0)
        if self.symbols == "characters" and self.corpus == "librispeech":
            self.vocabulary = Symbols("characters", tuple(LETTERS))
        else:
            self.vocabulary = Symbols.of(
                self.symbols, [each.text for each in usable["train"]], self.pieces
            )
        splits = {
            split: self.encode_split(split, utterances) for split, utterances in usable.items()
        }
        for split, coded in splits.items():
            self.faults[split].report(len(coded.utterances))
            if (longest := coded.costs.max()) > self.batch_seconds:
                raise ConfigError(
                    f"task.batch_seconds={self.batch_seconds:g}: expected at least {longest:g} ({split})"
                )
        return splits

    def read(self, split: str) -> Iterable[speech.Utterance]:
        faults = self.faults[split]
        if self.on_hub:
            return speech.hub_utterances(self.hub, split, faults)
        if self.corpus == "fsdd":
            return speech.digit_strings(self.recordings, split, self.strings[split])
        if self.corpus == "table":
            return speech.table_utterances(self.data_dir, split, faults)
        return speech.official(self.subsets[split], self.data_dir, faults)

    @cached_property
    def recordings(self) -> list[speech.AudioPart]:
        return speech.recordings(self.data_dir)

    def inputs(self) -> Iterator[Path]:
        for split in self.splits.values():
            for utterance in split.utterances:
                for part in utterance.parts:
                    if part.content is None:
                        yield Path(part.name)

    def encode_split(self, split: str, utterances: list[speech.Utterance]) -> SpokenSplit:
        kept, targets = [], []
        for utterance in utterances:
            try:
                targets.append(np.array(self.vocabulary.encode(utterance.text), np.int32))
                kept.append(utterance)
            except DataError as error:
                self.faults[split].add(f"{utterance.name}: its transcript: {error}")
        slowest = min(self.speeds) if split == "train" else 1.0
        # quarters of a second: rows of equal cost are permuted, so that batches differ between epochs
        return SpokenSplit(
            kept, targets, np.array([math.ceil(4 * each.seconds / slowest) / 4 for each in kept])
        )

    def length(self, split: str) -> int:
        return len(self.splits[split].utterances)

    def epoch_steps(self, plan: Plan) -> int:
        return plan.steps(self.splits["train"].costs, self.batch_seconds)

    def batches(self, split: str, plan: Plan) -> Iterator[Batch]:
        data, training = self.splits[split], split == "train"
        order = np.arange(len(data.costs)) if training else np.argsort(data.costs, kind="stable")
        asked = (
            order[places] for places in plan.by_cost(data.costs[order], self.batch_seconds, split)
        )
        make = partial(self.batch, data, plan if training else None)
        for batch, problems in by_workers(make, asked, self.workers):
            if problems and self.bad == "error":
                raise speech.BadAudio(problems[0])
            for problem in problems:
                warn("%s: skipped", problem)
            yield batch

    def batch(
        self, data: SpokenSplit, plan: Plan | None, rows: Sequence[int]
    ) -> tuple[Batch, list[str]]:
        """Batch of CPU tensors, and problems of rows that are left out.

        plan: that of training, which draws speeds and masks for each row; None in evaluation.
        """
        read, problems = [], []
        for row in map(int, rows):
            rng = plan and plan.rng(row)
            speed = self.speeds[rng.integers(len(self.speeds))] if rng else 1.0
            try:
                audio = speech.as_int16(speech.audio_of(data.utterances[row], self.rate, speed))
                read.append((row, audio, data.targets[row], rng))
            except speech.BadAudio as error:
                problems.append(str(error))  # an error that leaves a worker loses its words
        if read:
            return self.collated(*zip(*read)), problems
        silence = np.zeros(math.ceil(self.rate * speech.SHORTEST), np.int16)
        return self.collated([0], [silence], [np.zeros(1, np.int32)], [None]) | {
            "rows": []
        }, problems

    def collated(
        self,
        rows: Sequence[int],
        audio: Sequence[np.ndarray],
        targets: Sequence[np.ndarray],
        rngs: Sequence[np.random.Generator | None],
    ) -> Batch:
        batch = {
            "rows": list(rows),
            "audio": speech.pad_audio(audio),
            "samples": torch.tensor([*map(len, audio)]),
            "targets": speech.pad_audio(targets),
            "target_lengths": torch.tensor([*map(len, targets)]).int(),
        }
        if rngs[0] is not None and (self.augment["bands"] or self.augment["spans"]):
            options, mels = self.augment, self.sizes["mels"]
            drawn = [
                (
                    speech.random_intervals(rng, options["bands"], options["band_share"], mels),
                    speech.random_intervals(
                        rng,
                        options["spans"],
                        options["span_share"],
                        frames_of(len(each), self.rate),
                    ),
                )
                for rng, each in zip(rngs, audio)
            ]
            batch["bands"], batch["spans"] = (
                torch.from_numpy(np.stack(part)) for part in zip(*drawn)
            )
        return batch

    # ---- model

    def load_origin(self) -> dict[str, Tensor]:
        """Weights of the run in task.init, which must have the same symbols and rate."""
        known, tensors = conformer_transducer.load(self.init, "task.init")
        if known.symbols != self.vocabulary:
            raise ConfigError(
                f"task.init={self.init}: trained with {len(known.symbols)} {known.symbols.kind}, "
                f"expected {len(self.vocabulary)} {self.vocabulary.kind}; use the task.symbols, "
                "task.pieces and data of that run"
            )
        if known.rate != self.rate:
            raise ConfigError(
                f"task.rate={self.rate}: expected {known.rate} Hz, as in task.init={self.init}"
            )
        return tensors

    def build(self, mechanism: Mechanism) -> nn.Module:
        self.recogniser = Recogniser(self.vocabulary, self.rate, self.sizes, mechanism)
        model = self.recogniser.build()
        if self.origin is not None:
            take_weights(model, self.origin, f"task.init={self.init}")
        return model

    def model_inputs(self, batch: Batch) -> dict[str, Tensor]:
        return {name: batch[name] for name in INPUTS if name in batch}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(**self.model_inputs(batch)).mean()

    def weight(self, batch: Batch) -> int:
        return len(batch["rows"])  # 0 if no audio could be read

    def evaluate(self, model: nn.Module, split: str, reader: Reader) -> dict[str, float]:
        loss, rows = 0.0, []
        for batch in reader.batches(split):
            losses, hypotheses = model(**self.model_inputs(batch), search=greedy)
            loss += float(losses.double().sum()) if batch["rows"] else 0.0
            rows += [
                (row, self.vocabulary.decode(each.symbols))
                for row, each in zip(batch["rows"], hypotheses)
            ]
        (loss,) = reader.sum(loss)
        rows = sorted(reader.gather(rows))
        said = [self.splits[split].utterances[row] for row, _ in rows]
        self.transcripts = [
            (split, each.name, each.text, heard) for each, (_, heard) in zip(said, rows)
        ]
        rates = error_rates([each.text for each in said], [heard for _, heard in rows])
        return {"loss": loss / len(rows), "utterances": len(rows)} | rates

    def export(self, model: nn.Module, tensors: dict[str, Tensor], directory: Path) -> None:
        """Save <run>/model, and <run>/transcripts.tsv of the last evaluated split."""
        conformer_transducer.save_model(self.recogniser, tensors, directory)
        rows = [("split", "utterance", "transcript", "greedy"), *self.transcripts]
        with atomic_path(directory / "transcripts.tsv") as part:
            part.write_text("".join("\t".join(row) + "\n" for row in rows))

    def summary(self, records: list[dict]) -> str:
        last = records[-1]
        return f"librispeech: WER {last['wer']:.2%}, CER {last['cer']:.2%} ({last['split']}, step {last['step']})"
