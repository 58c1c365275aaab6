"""task=advise: `crt_exp.advise` for a model in a folder, a run or on the hub, and text, images or audio in files."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from crt_exp.advice.bench import Bench
from crt_exp.advice.bench_pieces import BatchBench
from crt_exp.advice.call import SAMPLES, advice_of, measured, mechanisms, spread, text_bench, to_stderr
from crt_exp.advice.language import LEAST, length_of, opened, refuse_other, rows_of
from crt_exp.advice.verdict import Advice
from crt_exp.data import DataError, images, speech
from crt_exp.data.files import IMAGES, files_ending
from crt_exp.options import Count, Positive, checked
from crt_exp.mechanism import Mechanism
from crt_exp.measure import Measurement
from crt_exp.models import conformer_transducer, encoders, vision
from crt_exp.models.folder import CONFIG
from crt_exp.config import json_object


@checked("task")
class Advise(Measurement):
    """task=advise; see conf/task/advise.yaml for the options. The last row holds the recommendation."""

    metric = "above"
    uses: frozenset[str] = frozenset()  # attention is named by task.attentions

    def __init__(self, model: str | None, text: str | Sequence[str] | None, images: str | None, audio: str | None,
                 tokenizer: str | None, length: Count | None, attentions: Sequence[str] | None, quick: bool,
                 samples: Count | None, calibration: Count, rounds: Count, tolerance: Positive, cache_dir: str | None):
        if model is None or [text, images, audio].count(None) != 2:
            raise ValueError("task=advise needs task.model (a folder, a run or a hub name) and one of task.text, "
                             "task.images and task.audio (which the model was not trained on)")
        if text is None and (given := [key for key, value in (("tokenizer", tokenizer), ("length", length)) if value]):
            raise ValueError(f"task.{given[0]} is of texts: leave it out with task.images and task.audio")
        self.model, self.text, self.tokenizer, self.length = model, text, tokenizer, length
        self.images, self.audio = images, audio
        self.attentions, self.quick, self.samples, self.calibration = attentions, quick, samples, calibration
        if attentions is not None:
            mechanisms(attentions)
        self.rounds, self.tolerance, self.cache_dir = rounds, tolerance, cache_dir
        self.advice: Advice | None = None

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        bench, records = self.bench(seed), []
        methods = mechanisms(self.attentions, self.quick, seed)
        for record in measured(bench, methods, self.rounds, to_stderr):
            records.append(record)
            yield record
        self.advice = advice_of(bench, methods, records, self.tolerance)
        chosen = self.advice.chosen or self.advice.rows[0]
        yield {"above": chosen.above, "above_ci95": chosen.above_ci95, "speedup": chosen.speedup,
               "attention": chosen.attention, "advice": self.advice.sentence, "table": str(self.advice)}

    def inputs(self) -> list[Path]:
        """The audio that a table names."""
        table = Path(self.audio or "").expanduser()
        return [Path(name) for name in speech.read_table(table).audio] if table.is_file() else []

    def bench(self, seed: int) -> Bench:
        """Raises DataError and ValueError for a model, data and a length that do not go together."""
        if self.images is not None:
            return of_images(self.model, self.images, self.samples, self.calibration, seed)
        if self.audio is not None:
            return of_audio(self.model, self.audio, self.samples, self.calibration, seed)
        model, predicts, tokenizer = opened(self.model, self.tokenizer)
        rows = rows_of(self.text, predicts, tokenizer, length_of(model, self.length, LEAST), self.cache_dir)
        return text_bench(model, rows, self.samples, self.calibration, tokenizer, seed)

    def summary(self, records: list[dict]) -> str:
        return records[-1]["table"]

    def keep(self, records: list[dict], directory: Path) -> None:
        """advise.csv, advise.md and advise.png in the run directory."""
        if self.advice is not None:
            self.advice.save(directory)


# ---- models of images and audio, with files of their input


OURS = "crt_exp"
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.json")
CTC, CLASSES = "AutoModelForCTC", "AutoModelForAudioClassification"
HEARERS = {"ForCTC": CTC, "ForAudioClassification": CLASSES, "ForSequenceClassification": CLASSES}


# ---- images

def of_images(model: str, folder: str, samples: int | None, calibration: int, seed: int) -> BatchBench:
    """model: a run of task=imagenet, a folder of timm or transformers, or a name of either. Raises DataError."""
    loaded, classes, transform = classifier(model)
    place = Path(folder).expanduser()
    if not place.is_dir():
        raise DataError(f"task.images = {folder}: there is no such folder")
    files = files_ending(place, IMAGES)
    judged, training = spread(len(files), samples or SAMPLES["images"], calibration, f"images in {folder}")

    def read(i: int) -> Tensor:
        return transform(images.read(files[i]))[None]

    labels = [label_of(files[i][len(str(place)):], classes) for i in judged]
    return BatchBench(loaded, [read(i) for i in judged], [read(i) for i in training], noun="images", seed=seed,
                      labels=None if None in labels else [torch.tensor([label]) for label in labels])


def label_of(path: str, classes: tuple[str, ...]) -> int | None:
    """The class after which the last such folder of a path is named."""
    named = [part for part in Path(path).parts[:-1] if part in classes]
    return classes.index(named[-1]) if named else None


def classifier(name: str) -> tuple[nn.Module, tuple[str, ...], Callable[[Any], Tensor]]:
    """In eval mode, with its classes and what makes its input of an image."""
    config = config_of(name)
    if config is None and is_of_timm(name):
        description = vision.known(name)
        return vision.build(description, Mechanism.of("exact"), "pretrained").eval(), description.classes, \
            description.transform()
    if config is not None and "architecture" in config:
        refuse_other(name, config.get(OURS, {}).get("described", encoders.EXACT))
        return vision.load(name)
    loaded = of_transformers(name, {"ForImageClassification": "AutoModelForImageClassification"}, "images")
    processor = part_of(name, "AutoImageProcessor")
    return (loaded, tuple(loaded.config.id2label[i] for i in range(loaded.config.num_labels)),
            lambda image: processor(image, return_tensors="pt")["pixel_values"][0])


def is_of_timm(name: str) -> bool:
    import timm

    return timm.is_model(name.partition(".")[0])


# ---- audio

def of_audio(model: str, source: str, samples: int | None, calibration: int, seed: int) -> BatchBench:
    """model: a run of task=librispeech, or a model of transformers for CTC or classes of audio. Raises DataError."""
    utterances = spoken(source)
    judged, training = spread(len(utterances), samples or SAMPLES["pieces"], calibration, f"utterances in {source}")
    config = config_of(model)
    if config is not None and config.get("kind") == conformer_transducer.KIND:
        loaded, batch = transducer(model)
    else:
        loaded, batch = hearer(model)
    try:
        made = [batch(utterances[i]) for i in [*judged, *training]]
    except speech.BadAudio as error:
        raise DataError(f"task.audio = {source}: {error}") from None
    if len({"labels" in each for each in made}) > 1:
        raise DataError(f"task.audio = {source}: some utterances have labels that the model knows, and others do not")
    return BatchBench(loaded, made[:len(judged)], made[len(judged):], noun="utterances", seed=seed)


def spoken(source: str) -> list[speech.Utterance]:
    """Of a table that names files and their text, or of a folder of audio, without text."""
    path, faults = Path(source).expanduser(), speech.Faults("error", "utterances of task.audio")
    if path.is_file():
        heard = [each for split in speech.SPLITS for each in speech.table_utterances(path, split, faults)]
    else:
        heard = [speech.Utterance(file.stem, "", (speech.AudioPart(str(file), speech.seconds_of(file, str(file))),))
                 for file in speech.audio_files(source, "task.audio")]
    faults.settle(len(heard))
    return speech.usable(heard, float("inf"), faults)


def transducer(run: str) -> tuple[nn.Module, Callable[[speech.Utterance], dict[str, Tensor]]]:
    known, tensors = conformer_transducer.load(run, "task.model")
    refuse_other(run, known.mechanism.describe())

    def batch(utterance: speech.Utterance) -> dict[str, Tensor]:
        if not utterance.text:
            raise DataError(f"{utterance.name}: a run of task=librispeech is judged by transcripts: give task.audio a "
                            "csv, tsv or jsonl file with the columns audio and text")
        audio = torch.from_numpy(speech.as_int16(speech.audio_of(utterance, known.rate)))[None]
        targets = torch.tensor([known.symbols.encode(utterance.text)], dtype=torch.int32)
        return {"audio": audio, "samples": torch.tensor([audio.shape[1]]), "targets": targets,
                "target_lengths": torch.tensor([targets.shape[1]], dtype=torch.int32)}

    return known.build(tensors), batch


def hearer(name: str) -> tuple[nn.Module, Callable[[speech.Utterance], dict[str, Any]]]:
    loaded, extractor = of_transformers(name, HEARERS, "audio"), part_of(name, "AutoFeatureExtractor")
    folder = Path(encoders.folder_of(name, "task.model"))
    written = not folder.is_dir() or any((folder / file).is_file() for file in TOKENIZERS)
    tokenizer = part_of(name, "AutoTokenizer") if written and type(loaded).__name__.endswith("ForCTC") else None

    def batch(utterance: speech.Utterance) -> dict[str, Any]:
        audio = speech.audio_of(utterance, extractor.sampling_rate)
        made = extractor(audio, sampling_rate=extractor.sampling_rate, return_tensors="pt")
        return dict(made) | labels_of(loaded, tokenizer, utterance.text)

    return loaded, batch


def labels_of(model: nn.Module, tokenizer: Any, text: str) -> dict[str, Tensor]:
    """Of a transcript, or of the name of a class; none where the model knows neither."""
    if text in model.config.label2id:
        return {"labels": torch.tensor([model.config.label2id[text]])}
    return {"labels": torch.tensor([tokenizer(text).input_ids])} if text and tokenizer is not None else {}


# ---- folders

def config_of(name: str) -> Mapping[str, Any] | None:
    """config.json of a folder or a run; None for a name of a hub. Raises DataError."""
    file = Path(encoders.folder_of(name, "task.model")) / CONFIG
    return json_object(file) if file.is_file() else None


def of_transformers(name: str, kinds: Mapping[str, str], reads: str) -> nn.Module:
    """In eval mode, float32. Raises DataError, and ValueError for a model of another kind."""
    origin = encoders.Origin(encoders.folder_of(name, "task.model"), "task.model", weights=True, noise=False)
    config = encoders.load_config(origin)
    refuse_other(name, encoders.saved_attention(config))
    auto = [kind for architecture in config.architectures or () for end, kind in kinds.items()
            if architecture.endswith(end)]
    if not auto:
        made = ", ".join(config.architectures or ["model without a head"])
        raise ValueError(f"task.model = {name} is a {made}: with task.{reads} advise takes a model of transformers "
                         f"{' or '.join(kinds)}")
    return encoders.load_model(auto[0], config, origin, Mechanism.of("exact")).eval()


def part_of(name: str, kind: str) -> Any:
    """What makes the model's input, of the class `kind` of transformers. Raises DataError where its folder has none."""
    import transformers

    origin = encoders.Origin(encoders.folder_of(name, "task.model"), "task.model", weights=True, noise=False)
    load = partial(getattr(transformers, kind).from_pretrained, origin.name, trust_remote_code=False)
    return encoders.loaded(load, origin, kind[4:])
