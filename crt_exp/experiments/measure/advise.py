"""task=advise: `crt_exp.advise` for a model and data in files.

Loads models from folders, runs or the hub, and text, images or audio from files. task=fidelity also uses
`load_language_model`, `rows_of` and `length_in`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from crt_exp.experiments.data import DataError, images, speech
from crt_exp.experiments.data.files import IMAGES, files_ending
from crt_exp.experiments.data.text import (
    bert_tokenizer,
    check_vocabulary,
    local_blocks,
    running_blocks,
)
from crt_exp.experiments.measure import Measurement
from crt_exp.experiments.measure.advice import (
    LEAST,
    SAMPLES,
    Advice,
    advice_of,
    measure_mechanism,
    mechanisms,
    spread,
    text_bench,
)
from crt_exp.experiments.measure.bench import (
    HEADS,
    MASKED,
    NEXT,
    BatchBench,
    Bench,
    length_of,
    positions,
    predicts,
)
from crt_exp.experiments.models import encoders, vision
from crt_exp.experiments.models.folder import CONFIG, TRANSDUCER, block_of
from crt_exp.mechanism import Mechanism
from crt_exp.registry import json_object
from crt_exp.validation import Count, FileName, Positive, checked

PREDICTING = {MASKED: "AutoModelForMaskedLM", NEXT: "AutoModelForCausalLM"}
TEXT = {
    end: PREDICTING[kind] for end, kind in HEADS.items()
}  # suffix of an architecture -> class of transformers
VISION = {"ForImageClassification": "AutoModelForImageClassification"}
CTC = "AutoModelForCTC"
CLASSES = "AutoModelForAudioClassification"
AUDIO = {"ForCTC": CTC, "ForAudioClassification": CLASSES, "ForSequenceClassification": CLASSES}
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.json")


@checked("task")
class Advise(Measurement):
    """task=advise: compare attention methods in a pretrained model, recommend one.

    conf/task/advise.yaml explains the options. The last row contains the recommendation.
    """

    metric = "above"
    uses: frozenset[str] = frozenset()  # attention is named by task.attentions

    def __init__(
        self,
        model: FileName | None,
        text: FileName | Sequence[FileName] | None,
        images: FileName | None,
        audio: FileName | None,
        tokenizer: FileName | None,
        length: Count | None,
        attentions: Sequence[str] | None,
        samples: Count | None,
        calibration: Count,
        rounds: Count,
        tolerance: Positive,
        cache_dir: str | None,
    ):
        if model is None or [text, images, audio].count(None) != 2:
            raise ValueError(
                "task=advise: expected task.model (a folder, a run or a hub name), and held-out data in "
                "one of task.text, task.images and task.audio"
            )
        if text is None and (
            given := [key for key, value in (("tokenizer", tokenizer), ("length", length)) if value]
        ):
            raise ValueError(f"task.{given[0]}: only for task.text; remove it")
        self.model = model
        self.text = text
        self.images = images
        self.audio = audio
        self.tokenizer = tokenizer
        self.length = length
        self.attentions = attentions
        self.samples = samples
        self.calibration = calibration
        self.rounds = rounds
        self.tolerance = tolerance
        self.cache_dir = cache_dir
        mechanisms(attentions)
        self.advice: Advice | None = None

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        bench = self.bench(seed)
        records = []
        methods = mechanisms(self.attentions, seed)
        for record in measure_mechanism(bench, methods, self.rounds):
            records.append(record)
            yield record
        self.advice = advice_of(bench, methods, records, self.tolerance)
        chosen = self.advice.chosen or self.advice.rows[0]
        yield {
            "above": chosen.above,
            "above_ci95": chosen.above_ci95,
            "speedup": chosen.speedup,
            "attention": chosen.attention,
            "advice": self.advice.sentence,
            "table": str(self.advice),
        }

    def inputs(self) -> list[Path]:
        """Return the audio files that a table names."""
        table = Path(self.audio or "").expanduser()
        return [Path(name) for name in speech.read_table(table).audio] if table.is_file() else []

    def bench(self, seed: int) -> Bench:
        """Load model and data. Raises DataError and ValueError if they do not match."""
        if self.images is not None:
            return image_bench(self.model, self.images, self.samples, self.calibration, seed)
        if self.audio is not None:
            return audio_bench(self.model, self.audio, self.samples, self.calibration, seed)
        model, tokenizer = load_language_model(self.model, self.tokenizer)
        rows = rows_of(
            self.text, model, tokenizer, length_in(model, self.length, LEAST), self.cache_dir
        )
        return text_bench(model, rows, self.samples, self.calibration, tokenizer, seed)

    def summary(self, records: list[dict]) -> str:
        return records[-1]["table"]

    def save_results(self, records: list[dict], directory: Path) -> None:
        """Write advise.csv, advise.md and advise.png to the run directory."""
        if self.advice is not None:
            self.advice.save(directory)


# ---- models in folders, runs and on the hub


def origin_of(name: str) -> encoders.Origin:
    return encoders.Origin(
        encoders.folder_of(name, "task.model"), "task.model", weights=True, noise=False
    )


def load(name: str, kinds: Mapping[str, str], otherwise: str | None = None) -> nn.Module:
    """Load a model of transformers in eval mode, float32.

    kinds: suffix of an architecture -> class of transformers. otherwise: the class for other architectures.
    """
    origin = origin_of(name)
    config = encoders.load_config(origin)
    encoders.check_exact(f"task.model={name}", encoders.saved_attention(config))
    known = []
    for architecture in config.architectures or ():
        known += [kind for suffix, kind in kinds.items() if architecture.endswith(suffix)]
    if not known and otherwise is None:
        raise ValueError(
            f"task.model={name}: expected a transformers model {' or '.join(kinds)}, got "
            f"{', '.join(config.architectures or ['no head'])}"
        )
    return encoders.load_model([*known, otherwise][0], config, origin, Mechanism.of("exact")).eval()


def part_of(name: str, kind: str) -> Any:
    """Load a processor of the class `kind` of transformers. Raises DataError."""
    import transformers

    origin = origin_of(name)
    return encoders.load_or_explain(
        partial(getattr(transformers, kind).from_pretrained, origin.name, trust_remote_code=False),
        origin,
        kind[4:],
    )


def config_of(name: str) -> Mapping[str, Any] | None:
    """Return config.json of a folder or run; None for a hub name.

    Raises DataError for a damaged file.
    """
    file = Path(encoders.folder_of(name, "task.model")) / CONFIG
    return json_object(file) if file.is_file() else None


# ---- text


def load_language_model(name: str, tokenizer: str | None) -> tuple[nn.Module, Any]:
    """Load a language model in eval mode, and its tokenizer or task.tokenizer.

    Raises ValueError for models that are not encoders or decoders of text.
    """
    model = load(name, TEXT, "AutoModel")
    if model.main_input_name != "input_ids" or model.config.is_encoder_decoder:
        raise ValueError(
            f"task.model={name}: expected a text encoder or decoder, got {type(model).__name__}"
        )
    if tokenizer is not None and tokenizer.endswith(".txt"):
        made = bert_tokenizer(tokenizer)
    else:
        made = encoders.load_tokenizer(
            origin_of(name)
            if tokenizer is None
            else encoders.Origin(tokenizer, "task.tokenizer", True, False)
        )
    check_vocabulary(made, model.config.vocab_size)
    return model, made


def length_in(model: nn.Module, length: int | None, least: int = 1) -> int:
    """Return the number of tokens of a string.

    Default: the block of the model's run; for other models 512, or the maximum of the model if that is less.
    """
    block = block_of(model.config.name_or_path or "")
    return length_of(model, length or (block and min(max(block, least), positions(model))), least)


def rows_of(
    text: str | Sequence[str],
    model: nn.Module,
    tokenizer: Any,
    length: int,
    cache_dir: str | Path | None,
) -> Tensor:
    """Return token ids (n, length) of all the text, with [CLS] and [SEP] for encoders."""
    framed = predicts(model) != NEXT and tokenizer.cls_token_id is not None
    rows = (local_blocks if framed else running_blocks)(text, tokenizer, length, cache_dir)
    return torch.from_numpy(rows.astype(np.int64))


# ---- images


def image_bench(
    model: str, folder: str, samples: int | None, calibration: int, seed: int
) -> BatchBench:
    """Load an image classifier and its test and calibration images.

    model: a run of task=imagenet, or a folder or name of timm or transformers. Raises DataError.
    """
    loaded, classes, transform = classifier(model)
    place = Path(folder).expanduser()
    if not place.is_dir():
        raise DataError(f"task.images={folder}: no such folder")
    files = files_ending(place, IMAGES)
    judged, training = spread(
        len(files), samples or SAMPLES["images"], calibration, f"images in {folder}"
    )
    pieces = {i: transform(images.read_image(files[i]))[None] for i in [*judged, *training]}
    labels = [label_of(files[i][len(str(place)) :], classes) for i in judged]
    return BatchBench(
        loaded,
        [pieces[i] for i in judged],
        [pieces[i] for i in training],
        noun="images",
        seed=seed,
        labels=None if None in labels else [torch.tensor([label]) for label in labels],
    )


def label_of(path: str, classes: tuple[str, ...]) -> int | None:
    """Return the class of the last folder in a path that has the name of a class."""
    named = [part for part in Path(path).parts[:-1] if part in classes]
    return classes.index(named[-1]) if named else None


def classifier(name: str) -> tuple[nn.Module, tuple[str, ...], Callable[[Any], Tensor]]:
    """Load an image classifier in eval mode, its classes and its transform."""
    config = config_of(name)
    if config is None and is_of_timm(name):
        description = vision.timm_description(name)
        return (
            vision.build(description, Mechanism.of("exact"), "pretrained").eval(),
            description.classes,
            description.transform(),
        )
    if config is not None and "architecture" in config:
        encoders.check_exact(
            f"task.model={name}", config.get("crt_exp", {}).get("described", encoders.EXACT)
        )
        return vision.load(name)
    loaded = load(name, VISION)
    processor = part_of(name, "AutoImageProcessor")
    return (
        loaded,
        tuple(loaded.config.id2label[i] for i in range(loaded.config.num_labels)),
        lambda image: processor(image, return_tensors="pt")["pixel_values"][0],
    )


def is_of_timm(name: str) -> bool:
    import timm

    return timm.is_model(name.partition(".")[0])


# ---- audio


def audio_bench(
    model: str, source: str, samples: int | None, calibration: int, seed: int
) -> BatchBench:
    """Load a speech model and its test and calibration utterances.

    model: a run of task=librispeech, or a model of transformers for CTC or audio classification. Raises DataError.
    """
    utterances = read_utterances(source)
    config = config_of(model)
    judged, training = spread(
        len(utterances), samples or SAMPLES["pieces"], calibration, f"utterances in {source}"
    )
    is_run = config is not None and config.get("kind") == TRANSDUCER
    loaded, batch = (transducer if is_run else load_hub_speech_model)(model)
    try:
        made = [batch(utterances[i]) for i in [*judged, *training]]
    except speech.BadAudio as error:
        raise DataError(f"task.audio={source}: {error}") from None
    if len({"labels" in each for each in made}) > 1:
        raise DataError(f"task.audio={source}: only some utterances have labels known to the model")
    return BatchBench(
        loaded, made[: len(judged)], made[len(judged) :], noun="utterances", seed=seed
    )


def read_utterances(source: str) -> list[speech.Utterance]:
    """Return the utterances of a table with transcripts, or of a folder without."""
    path = Path(source).expanduser()
    utterances = []
    if path.is_file():
        for split in speech.SPLITS:
            utterances += speech.table_utterances(path, split)
    else:
        for file in speech.audio_files(source, "task.audio"):
            part = speech.AudioPart(str(file), speech.seconds_of(file, str(file)))
            utterances.append(speech.Utterance(file.stem, "", (part,)))
    if not utterances:
        raise DataError(f"task.audio={source}: no utterances; expected at least one")
    return speech.checked_lengths(utterances)


def transducer(run: str) -> tuple[nn.Module, Callable[[speech.Utterance], dict[str, Tensor]]]:
    from crt_exp.experiments.models import conformer_transducer

    known, tensors = conformer_transducer.load(run, "task.model")
    encoders.check_exact(f"task.model={run}", known.mechanism.describe())

    def batch(utterance: speech.Utterance) -> dict[str, Tensor]:
        if not utterance.text:
            raise DataError(
                f"{utterance.name}: no transcript; for a run of task=librispeech set task.audio to a csv, "
                "tsv or jsonl file with columns audio and text"
            )
        audio = torch.from_numpy(speech.as_int16(speech.audio_of(utterance, known.rate)))[None]
        targets = torch.tensor([known.symbols.encode(utterance.text)], dtype=torch.int32)
        return {
            "audio": audio,
            "samples": torch.tensor([audio.shape[1]]),
            "targets": targets,
            "target_lengths": torch.tensor([targets.shape[1]], dtype=torch.int32),
        }

    return known.build(tensors), batch


def load_hub_speech_model(
    name: str,
) -> tuple[nn.Module, Callable[[speech.Utterance], dict[str, Any]]]:
    loaded = load(name, AUDIO)
    extractor = part_of(name, "AutoFeatureExtractor")
    folder = Path(encoders.folder_of(name, "task.model"))
    written = not folder.is_dir() or any((folder / file).is_file() for file in TOKENIZERS)
    tokenizer = (
        part_of(name, "AutoTokenizer")
        if written and type(loaded).__name__.endswith("ForCTC")
        else None
    )

    def batch(utterance: speech.Utterance) -> dict[str, Any]:
        audio = speech.audio_of(utterance, extractor.sampling_rate)
        made = dict(extractor(audio, sampling_rate=extractor.sampling_rate, return_tensors="pt"))
        if utterance.text in loaded.config.label2id:
            return made | {"labels": torch.tensor([loaded.config.label2id[utterance.text]])}
        if utterance.text and tokenizer is not None:
            made["labels"] = torch.tensor([tokenizer(utterance.text).input_ids])
        return made

    return loaded, batch
