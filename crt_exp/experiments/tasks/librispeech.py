"""Speech recognition with a Conformer transducer (CRT Figure 3, HRF Table 2).

CRT is Chefs' Random Tables, HRF is Hybrid Random Features. Metrics are word and character error rates of greedy search,
with their substitutions, deletions and insertions, and the loss in nats per utterance.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from crt_exp.experiments.data import DataError, speech
from crt_exp.experiments.data.loading import Workers, by_workers
from crt_exp.experiments.data.plan import SPLITS
from crt_exp.experiments.data.sources import Place, is_on_hub, stand_in, task_folder
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
from crt_exp.experiments.tasks.base import (
    Batch,
    Metrics,
    Plan,
    Reader,
    Task,
    Tensors,
    error_rates,
    task_class,
)
from crt_exp.mechanism import Mechanism
from crt_exp.registry import ConfigError
from crt_exp.validation import Count, Files, Positive, Several, Share, Whole, check_options, warn

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


@task_class
class LibriSpeech(Task):
    """Speech recognition; see `conf/task/librispeech.yaml` for the options.

    Raises:
        DataError: data are missing, malformed or unusable, or a run cannot be loaded.
        ConfigError: options contradict each other.
    """

    corpus: Literal["librispeech", "fsdd", "table"]
    source: Place
    data_dir: str | None
    subsets: Subsets
    strings: Strings
    hub: speech.SpeechHub
    rate: Annotated[int, Field(ge=4000)] | None
    max_seconds: Positive
    workers: Workers
    symbols: Literal["characters", "words", "pieces"] | None
    pieces: Count
    batch_seconds: Positive
    speeds: Several[Annotated[float, Field(ge=0.5, le=2)]]
    augment: SpeechAugment
    preset: Literal[*PRESETS]
    sizes: dict[str, Any]
    init: Annotated[str, Files(("scratch",))]

    metric = "wer"
    predictions = True
    lower_is_better = True
    reported = ("cer",)

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
        self.splits = self.read_splits()
        self.origin = None if self.init == "scratch" else self.load_origin()

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
        """Read and check all splits, without training utterances of more than max_seconds."""
        utterances = {}
        for split in SPLITS:
            utterances[split] = list(self.read(split))
            if split == "train":
                every = utterances[split]
                utterances[split] = [part for part in every if part.seconds <= self.max_seconds]
                if longer := len(every) - len(utterances[split]):
                    warn(
                        f"task.max_seconds={self.max_seconds:g}: {longer} of {len(every)} training "
                        "utterances are longer and left out"
                    )
            if not utterances[split]:
                raise DataError(f"{split}: no utterances; expected at least one")
        if self.corpus == "librispeech":
            files = []
            for split, of_split in utterances.items():
                parts = chain.from_iterable(utterance.parts for utterance in of_split)
                files += [(part.name, split) for part in parts if part.content is None]
            speech.check_disjoint(files, "task.subsets")
        if self.symbols == "characters" and self.corpus == "librispeech":
            self.vocabulary = Symbols("characters", tuple(LETTERS))
        else:
            texts = [utterance.text for utterance in utterances["train"]]
            self.vocabulary = Symbols.from_texts(self.symbols, texts, self.pieces)
        return {split: self.encode_split(split, of_split) for split, of_split in utterances.items()}

    def read(self, split: str) -> Iterable[speech.Utterance]:
        if self.on_hub:
            return speech.hub_utterances(self.hub, split)
        if self.corpus == "fsdd":
            return speech.digit_strings(self.recordings, split, self.strings[split])
        if self.corpus == "table":
            return speech.table_utterances(self.data_dir, split)
        return speech.read_librispeech(self.subsets[split], self.data_dir)

    @cached_property
    def recordings(self) -> list[speech.AudioPart]:
        return speech.read_recordings(self.data_dir)

    def inputs(self) -> Iterator[Path]:
        for split in self.splits.values():
            for utterance in split.utterances:
                for part in utterance.parts:
                    if part.content is None:
                        yield Path(part.name)

    def encode_split(self, split: str, utterances: list[speech.Utterance]) -> SpokenSplit:
        """Symbol ids and costs; raises DataError for an unknown symbol, ConfigError for long audio."""
        slowest = min(self.speeds) if split == "train" else 1.0
        targets = []
        costs = []
        for utterance in utterances:
            try:
                targets.append(np.array(self.vocabulary.encode(utterance.text), np.int32))
            except DataError as error:
                raise DataError(f"{utterance.name}: its transcript: {error}") from None
            # quarters of a second: rows of equal cost are permuted, so that batches differ between epochs
            costs.append(math.ceil(4 * utterance.seconds / slowest) / 4)
        if max(costs) > self.batch_seconds:
            raise ConfigError(
                f"task.batch_seconds={self.batch_seconds:g}: expected at least {max(costs):g} ({split})"
            )
        return SpokenSplit(utterances, targets, np.array(costs))

    def length(self, split: str) -> int:
        return len(self.splits[split].utterances)

    def epoch_steps(self, plan: Plan) -> int:
        return plan.steps(self.splits["train"].costs, self.batch_seconds)

    def batches(self, split: str, plan: Plan) -> Iterator[Batch]:
        data = self.splits[split]
        training = split == "train"
        order = np.arange(len(data.costs)) if training else np.argsort(data.costs, kind="stable")
        asked = (
            order[places] for places in plan.by_cost(data.costs[order], self.batch_seconds, split)
        )
        drawing = plan if training else None
        make = partial(self.batch, data, drawing)
        yield from by_workers(make, asked, self.workers)

    def batch(self, data: SpokenSplit, plan: Plan | None, rows: Sequence[int]) -> Batch:
        """Batch of CPU tensors; raises DataError.

        plan: that of training, which draws speeds and masks for each row; None in evaluation.
        """
        audio = []
        masks = []
        for row in map(int, rows):
            rng = plan and plan.rng(row)
            speed = self.speeds[rng.integers(len(self.speeds))] if rng else 1.0
            samples = speech.audio_of(data.utterances[row], self.rate, speed)
            audio.append(speech.as_int16(samples))
            if rng and (self.augment["bands"] or self.augment["spans"]):
                masks.append(self.draw_masks(rng, len(samples)))
        targets = [data.targets[row] for row in rows]
        batch = {
            "rows": [int(row) for row in rows],
            "audio": speech.pad_audio(audio),
            "samples": torch.tensor([len(samples) for samples in audio]),
            "targets": speech.pad_audio(targets),
            "target_lengths": torch.tensor([len(target) for target in targets]).int(),
        }
        if masks:
            bands, spans = zip(*masks)
            batch["bands"] = torch.from_numpy(np.stack(bands))
            batch["spans"] = torch.from_numpy(np.stack(spans))
        return batch

    def draw_masks(self, rng: np.random.Generator, samples: int) -> tuple[np.ndarray, np.ndarray]:
        """Bands of mels and spans of frames for SpecAugment, see `apply_spec_augment`."""
        options = self.augment
        frames = frames_of(samples, self.rate)
        bands = speech.random_intervals(
            rng, options["bands"], options["band_share"], self.sizes["mels"]
        )
        spans = speech.random_intervals(rng, options["spans"], options["span_share"], frames)
        return bands, spans

    # ---- model

    def load_origin(self) -> Tensors:
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

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(**self.model_inputs(batch)).mean()

    def weight(self, batch: Batch) -> int:
        return len(batch["rows"])

    def evaluate(self, model: nn.Module, split: str, reader: Reader) -> Metrics:
        loss = 0.0
        rows = []
        for batch in reader.batches(split):
            losses, hypotheses = model(**self.model_inputs(batch), search=greedy)
            loss += float(losses.double().sum())
            for row, hypothesis in zip(batch["rows"], hypotheses):
                rows.append((row, self.vocabulary.decode(hypothesis.symbols)))
        (loss,) = reader.sum(loss)
        rows = sorted(reader.gather(rows))
        self.predicted = []
        for row, recognised in rows:
            utterance = self.splits[split].utterances[row]
            answer = {"label": utterance.text, "prediction": recognised}
            self.predicted.append({"example": utterance.name, **answer})
        texts = [answer["label"] for answer in self.predicted]
        recognised = [answer["prediction"] for answer in self.predicted]
        rates = error_rates(texts, recognised)
        return {"loss": loss / len(rows), "utterances": len(rows)} | rates

    def export(self, model: nn.Module, tensors: Tensors, directory: Path) -> None:
        """Save <run>/model."""
        conformer_transducer.save_model(self.recogniser, tensors, directory)
