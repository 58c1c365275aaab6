"""Models in folders, runs and on the hub, and benches of them on files of text, images or audio."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from crt_exp.experiments.data import DataError, images, speech
from crt_exp.experiments.data.files import IMAGES, files_ending
from crt_exp.experiments.data.text import (
    Paths,
    bert_tokenizer,
    local_blocks,
    running_blocks,
)
from crt_exp.experiments.measure.bench import (
    HEADS,
    MASKED,
    NEXT,
    BatchBench,
    Split,
    length_of,
    positions,
    predicts,
)
from crt_exp.experiments.models import encoders, vision
from crt_exp.experiments.models.folder import CONFIG, TRANSDUCER, trained_length
from crt_exp.mechanism import Mechanism
from crt_exp.registry import json_object

PREDICTING = {MASKED: "AutoModelForMaskedLM", NEXT: "AutoModelForCausalLM"}
TEXT = {
    end: PREDICTING[kind] for end, kind in HEADS.items()
}  # suffix of an architecture -> class of transformers
VISION = {"ForImageClassification": "AutoModelForImageClassification"}
CTC = "AutoModelForCTC"
CLASSES = "AutoModelForAudioClassification"
AUDIO = {"ForCTC": CTC, "ForAudioClassification": CLASSES, "ForSequenceClassification": CLASSES}
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.json")


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
    kind = otherwise
    for architecture in config.architectures or ():
        for suffix, known in kinds.items():
            if architecture.endswith(suffix):
                kind = known
    if kind is None:
        raise ValueError(
            f"task.model={name}: expected a transformers model {' or '.join(kinds)}, got "
            f"{', '.join(config.architectures or ['no head'])}"
        )
    return encoders.load_model(kind, config, origin, Mechanism.of("exact")).eval()


def load_part(name: str, kind: str) -> Any:
    """Load a processor of the class `kind` of transformers. Raises DataError."""
    import transformers

    origin = origin_of(name)
    read = getattr(transformers, kind).from_pretrained
    return encoders.load_or_explain(
        partial(read, origin.name, trust_remote_code=False), origin, kind[4:]
    )


def config_of(name: str) -> Mapping[str, Any] | None:
    """Return config.json of a folder or run; None for a hub name.

    Raises DataError for a damaged file.
    """
    file = Path(encoders.folder_of(name, "task.model")) / CONFIG
    return json_object(file) if file.is_file() else None


# ---- text


def load_language_model(name: str, tokenizer: str | None = None) -> tuple[nn.Module, Any]:
    """Load a language model in eval mode, and its tokenizer or task.tokenizer.

    Raises ValueError for models that are not encoders or decoders of text.
    """
    model = load(name, TEXT, "AutoModel")
    if model.main_input_name != "input_ids" or model.config.is_encoder_decoder:
        raise ValueError(
            f"task.model={name}: expected a text encoder or decoder, got {type(model).__name__}"
        )
    if tokenizer is None:
        loaded = encoders.load_tokenizer(origin_of(name))
    elif tokenizer.endswith(".txt"):
        loaded = bert_tokenizer(tokenizer)
    else:
        loaded = encoders.load_tokenizer(
            encoders.Origin(tokenizer, "task.tokenizer", weights=True, noise=False)
        )
    encoders.check_vocabulary(loaded, model.config.vocab_size)
    return model, loaded


def length_in(model: nn.Module, length: int | None, least: int = 1) -> int:
    """Return the number of tokens of a string.

    Default: the length of the training rows of the model's run; for other models 512, or the maximum of the model if
    that is less.
    """
    trained = trained_length(model.config.name_or_path or "")
    if length is None and trained:
        length = min(max(trained, least), positions(model))
    return length_of(model, length, least)


def rows_of(
    text: Paths,
    model: nn.Module,
    tokenizer: Any,
    length: int,
    cache_dir: str | Path | None,
) -> Tensor:
    """Return token ids (n, length) of all the text, with [CLS] and [SEP] for encoders."""
    framed = predicts(model) != NEXT and tokenizer.cls_token_id is not None
    read_blocks = local_blocks if framed else running_blocks
    return torch.from_numpy(read_blocks(text, tokenizer, length, cache_dir).astype(np.int64))


# ---- images


def image_bench(model: str, folder: str, split: Split) -> BatchBench:
    """Load an image classifier and its test and calibration images.

    model: a run of task=imagenet, or a folder or name of timm or transformers. Raises DataError.
    """
    loaded, classes, transform = classifier(model)
    place = Path(folder).expanduser()
    if not place.is_dir():
        raise DataError(f"task.images={folder}: no such folder")
    files = files_ending(place, IMAGES)
    judged, training = split.indices(len(files), f"images in {folder}", "images")

    def batches(indices: Sequence[int]) -> list[Tensor]:
        return [transform(images.read_image(files[i]))[None] for i in indices]

    numbers = [label_of(files[i].relative_to(place), classes) for i in judged]
    labels = None
    if None not in numbers:
        labels = [torch.tensor([number]) for number in numbers]
    return BatchBench(loaded, batches(judged), batches(training), noun="images", labels=labels)


def label_of(path: str | Path, classes: tuple[str, ...]) -> int | None:
    """Return the class of the last folder in a path that has the name of a class."""
    named = [part for part in Path(path).parts[:-1] if part in classes]
    return classes.index(named[-1]) if named else None


def classifier(name: str) -> tuple[nn.Module, tuple[str, ...], Callable[[Any], Tensor]]:
    """Load an image classifier in eval mode, its classes and its transform."""
    config = config_of(name)
    if config is None and is_of_timm(name):
        description = vision.timm_description(name)
        model = vision.build(description, Mechanism.of("exact"), "pretrained")
        return model.eval(), description.classes, description.transform()
    if config is not None and "architecture" in config:
        encoders.check_exact(
            f"task.model={name}", config.get("crt_exp", {}).get("described", encoders.EXACT)
        )
        return vision.load(name)
    loaded = load(name, VISION)
    processor = load_part(name, "AutoImageProcessor")
    classes = tuple(loaded.config.id2label[i] for i in range(loaded.config.num_labels))
    return loaded, classes, lambda image: processor(image, return_tensors="pt")["pixel_values"][0]


def is_of_timm(name: str) -> bool:
    import timm

    return timm.is_model(name.partition(".")[0])


# ---- audio


def audio_bench(model: str, source: str, split: Split) -> BatchBench:
    """Load a speech model and its test and calibration utterances.

    model: a run of task=librispeech, or a model of transformers for CTC or audio classification. Raises DataError.
    """
    utterances = read_utterances(source)
    config = config_of(model)
    judged, fitted = split.indices(len(utterances), f"utterances in {source}", "pieces")
    is_run = config is not None and config.get("kind") == TRANSDUCER
    load_model = load_transducer if is_run else load_hub_speech_model
    loaded, make_batch = load_model(model)
    try:
        batches = [make_batch(utterances[i]) for i in [*judged, *fitted]]
    except DataError as error:
        raise DataError(f"task.audio={source}: {error}") from None
    if len({"labels" in batch for batch in batches}) > 1:
        raise DataError(f"task.audio={source}: only some utterances have labels known to the model")
    training = batches[len(judged) :]
    return BatchBench(loaded, batches[: len(judged)], training, noun="utterances")


def read_utterances(source: str) -> list[speech.Utterance]:
    """Return the utterances of a table with transcripts, or of a folder without."""
    path = Path(source).expanduser()
    utterances = []
    if path.is_file():
        for split in speech.SPLITS:
            utterances += speech.table_utterances(path, split)
    else:
        for file in speech.audio_files(source, "task.audio"):
            part = speech.audio_part(str(file))
            utterances.append(speech.Utterance(file.stem, "", (part,)))
    if not utterances:
        raise DataError(f"task.audio={source}: no utterances; expected at least one")
    return utterances


# a speech model, and the function that makes its arguments from an utterance
SpeechModel = tuple[nn.Module, Callable[[speech.Utterance], dict[str, Any]]]


def load_transducer(run: str) -> SpeechModel:
    from crt_exp.experiments.models import conformer_transducer

    recogniser, tensors = conformer_transducer.load(run, "task.model")
    encoders.check_exact(f"task.model={run}", recogniser.mechanism.describe())

    def batch(utterance: speech.Utterance) -> dict[str, Tensor]:
        if not utterance.text:
            raise DataError(
                f"{utterance.name}: no transcript; for a run of task=librispeech set task.audio to a csv, "
                "tsv or jsonl file with columns audio and text"
            )
        audio = torch.from_numpy(speech.as_int16(speech.audio_of(utterance, recogniser.rate)))[None]
        targets = torch.tensor([recogniser.symbols.encode(utterance.text)], dtype=torch.int32)
        return {
            "audio": audio,
            "samples": torch.tensor([audio.shape[1]]),
            "targets": targets,
            "target_lengths": torch.tensor([targets.shape[1]], dtype=torch.int32),
        }

    return recogniser.build(tensors), batch


def load_hub_speech_model(name: str) -> SpeechModel:
    loaded = load(name, AUDIO)
    extractor = load_part(name, "AutoFeatureExtractor")
    folder = Path(encoders.folder_of(name, "task.model"))
    written = not folder.is_dir() or any((folder / file).is_file() for file in TOKENIZERS)
    tokenizer = None
    if written and type(loaded).__name__.endswith("ForCTC"):
        tokenizer = load_part(name, "AutoTokenizer")

    def batch(utterance: speech.Utterance) -> dict[str, Any]:
        audio = speech.audio_of(utterance, extractor.sampling_rate)
        rate = extractor.sampling_rate
        inputs = dict(extractor(audio, sampling_rate=rate, return_tensors="pt"))
        if utterance.text in loaded.config.label2id:
            inputs["labels"] = torch.tensor([loaded.config.label2id[utterance.text]])
        elif utterance.text and tokenizer is not None:
            inputs["labels"] = torch.tensor([tokenizer(utterance.text).input_ids])
        return inputs

    return loaded, batch
