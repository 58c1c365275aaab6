"""Weights in other formats as folders of transformers or timm: safetensors, config.json, tokenizer.

Each converter takes the files of a wheel in one folder and writes to another. Nothing is unpickled but tensors.
"""

import json
import shutil
import struct
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from crt_exp.experiments.data import DataError
from crt_exp.experiments.models.encoders import quiet
from crt_exp.experiments.models.folder import save_tensors
from crt_exp.registry import json_object
from wheel_models import ctranslate2, onnx

# Tokens of reactions: atoms, bonds, brackets, as rxnfp 0.1.0 and rxnmapper 0.4.3 take strings apart.
SMILES = (
    r"\%\([0-9]{3}\)|\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\||\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|"
    r"\%[0-9]{2}|[0-9]"
)
TEXTS = ("LICENSE", "README.md")


def convert(model: Any, source: Path, folder: Path) -> None:
    """Writes the model whose files lie in `source` to `folder`; model: a row of the table (`fetch_wheel_models.Wheel`).
    Raises DataError for files of another kind."""
    try:
        with quiet():
            CONVERTERS[model.kind](model, source, folder)
    except DataError as error:
        raise DataError(f"{model.name}: {error}") from None
    for name in TEXTS:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def as_it_is(model: Any, source: Path, folder: Path) -> None:
    for member in model.members:
        shutil.copyfile(source / member.file, folder / member.file)


# ---- weights of torch.save, tokens by a pattern


def symbols(model: Any, source: Path, folder: Path) -> None:
    """Of models of reactions, whose tokens are the matches of SMILES, one a line of vocab.txt."""
    import transformers

    auto = getattr(transformers, model.architecture)
    config = auto.config_class.from_dict(
        json_object(source / "config.json") | {"architectures": [model.architecture]}
    )
    made_of(auto, config, tensors_of(source / model.weights.file)).save_pretrained(folder)
    tokenizer_of(source / "vocab.txt", config.max_position_embeddings).save_pretrained(folder)


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """Of a file of torch.save that holds tensors by names, and nothing else. Raises DataError."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, ValueError, UnpicklingError) as error:
        raise DataError(
            f"{path.name} is no file of tensors: {str(error).partition('.')[0]}"
        ) from None
    return state


def made_of(auto: type, config: Any, state: dict[str, torch.Tensor]) -> Any:
    """The model of the class `auto` with these weights, in float32. Raises DataError where it lacks one."""
    model, info = auto.from_pretrained(
        None, config=config, state_dict=state, dtype=torch.float32, output_loading_info=True
    )
    odd = sorted(info["missing_keys"]) + [name for name, *_ in info["mismatched_keys"]]
    if odd:
        raise DataError(
            f"its weights lack {odd[0]}, or have it in another shape than config.json says"
        )
    return model


def tokenizer_of(vocabulary: Path, most: int) -> Any:
    """[CLS] tokens [SEP], as BERT's; what SMILES does not match is left out."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = {}
    for i, word in enumerate(vocabulary.read_text(encoding="utf-8").splitlines()):
        ids[word] = i
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(SMILES), behavior="removed", invert=True)
    tokenizer.post_processor = processors.BertProcessing(
        ("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"])
    )
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=most,
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        pad_token="[PAD]",
        mask_token="[MASK]",
    )


# ---- GGUF


def gguf(model: Any, source: Path, folder: Path) -> None:
    """Rounded weights as the float32 numbers that they stand for."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    file = source / model.weights.file
    kind = architecture(file)
    if kind != model.architecture:
        raise DataError(
            f"its weights are a GGUF of architecture {kind!r}; this reader takes {model.architecture!r}"
        )
    with redirect_stderr(StringIO()):  # a bar that no setting of transformers takes away
        rounded = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=file.name, dtype=torch.float32
        )
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file.name)
    del rounded.config.quantization_config  # of the file: its numbers are float32 now
    made = made_of(type(rounded), rounded.config, rounded.state_dict())
    tokenizer.model_max_length = made.config.max_position_embeddings
    ids = {}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids[name] = getattr(tokenizer, name)
    made.generation_config = GenerationConfig(**ids)
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def architecture(file: Path) -> str:
    """That of a GGUF file: its first fact. Raises DataError for another file."""
    with open(file, "rb") as stream:
        head = stream.read(4 + 4 + 16 + 8 + 256)
    try:
        magic, _, _, _, length = struct.unpack_from("<4sIQQQ", head)
        key, kind = struct.unpack_from(f"<{min(length, 64)}sI", head, 32)
        if magic != b"GGUF" or key != b"general.architecture" or kind != 8:
            raise ValueError
        start = 32 + length + 4 + 8
        (size,) = struct.unpack_from("<Q", head, start - 8)
        return head[start : start + size].decode()
    except (struct.error, ValueError):
        raise DataError(f"{file.name} is no GGUF file that begins with its architecture") from None


# ---- CTranslate2


def speech(model: Any, source: Path, folder: Path) -> None:
    """Whisper for English, with what its generation takes."""
    from transformers import (
        GenerationConfig,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperTokenizer,
    )

    sizes, state = ctranslate2.whisper(*ctranslate2.read(source / model.weights.file))
    tokenizer = WhisperTokenizer.from_pretrained(source)
    ids = special_ids(tokenizer, json_object(source / "ids.json"))
    made = made_of(WhisperForConditionalGeneration, WhisperConfig(**sizes, **ids), state)
    made.generation_config = GenerationConfig(
        **ids,
        is_multilingual=False,
        max_length=sizes["max_target_positions"],
        return_timestamps=False,
        no_timestamps_token_id=tokenizer.convert_tokens_to_ids("<|notimestamps|>"),
    )
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=sizes["num_mel_bins"]).save_pretrained(folder)


def special_ids(tokenizer: Any, listed: dict[str, Any]) -> dict[str, Any]:
    end, start = (
        tokenizer.convert_tokens_to_ids(word) for word in ("<|endoftext|>", "<|startoftranscript|>")
    )
    return {
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
        "decoder_start_token_id": start,
        "suppress_tokens": listed["suppress_ids"],
        "begin_suppress_tokens": listed["suppress_ids_begin"],
    }


# ---- ONNX


def images(model: Any, source: Path, folder: Path) -> None:
    """A ViT as a folder of timm, which task.init and timm.create_model("local-dir:...") take."""
    config, state = onnx.dinov2(onnx.read(source / model.weights.file), model.architecture)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_tensors(state, folder / "model.safetensors")


CONVERTERS = {
    "folder": as_it_is,
    "smiles": symbols,
    "gguf": gguf,
    "ctranslate2": speech,
    "onnx": images,
}
