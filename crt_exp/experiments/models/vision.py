"""Vision transformers of timm: description, weights, and saved folders.

`timm.create_model("local-dir:<run>/model", pretrained=True)` loads the folder `<run>/model`, with exact attention:
config.json in timm's form, and model.safetensors. `crt_exp` in config.json records the attention of training.
attention.safetensors holds its random projections and statistics.
"""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from crt_exp.attention.state import make_room
from crt_exp.experiments.data import DataError, sources
from crt_exp.experiments.data.sources import reason_of
from crt_exp.experiments.models.encoders import EXACT, attention_changes, buildable, quiet
from crt_exp.experiments.models.folder import (
    CONFIG,
    Tensors,
    folder_of,
    mismatch,
    save_tensors,
    whole_folder,
    without,
)
from crt_exp.mechanism import Mechanism
from crt_exp.registry import ConfigError, differences, fetched, json_object
from crt_exp.validation import did_you_mean

SIZED = "vit_tiny_patch16_224"  # accepts any sizes as options; its own sizes are not used
NEW = {"embed_dim": 64, "depth": 4, "num_heads": 4}  # default sizes of a new model
SIZES = {"patch": "patch_size", "width": "embed_dim", "depth": "depth", "heads": "num_heads"}
# of ImageNet
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
# arguments of timm's transforms; crop_pct: fraction of a side that the centre crop keeps
PREPROCESSING = {"crop_pct": 1.0, "interpolation": "bicubic", "mean": MEAN, "std": STD}
ATTENTION = "attention.safetensors"
HEAD = (
    "head.",
    "head_dist.",
    "fc_norm.",
    "norm.",
    "attn_pool.",
)  # parts that depend on classes and pooling
MAE_NAMES = {  # names in transformers -> names in timm
    r"^embeddings\.patch_embeddings\.projection": "patch_embed.proj",
    r"^embeddings\.position_embeddings": "pos_embed",
    r"^embeddings\.cls_token": "cls_token",
    r"^layers": "blocks",
    r"^layernorm\.": "norm.",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    r"attention\.o_proj": "attn.proj",
}
FOREIGN = ("decoder", "mask_token")  # parts of pretraining that a classifier does not have


@dataclass(frozen=True)
class VisionDescription:
    """The architecture and preprocessing of a classifier, as in config.json.

    Weights and attention are not part of it.

    Attributes:
        options: further arguments of timm.create_model.
        classes: names of the classes; None if unknown (a bare encoder).
    """

    model: str
    size: int  # pixels of a side of the images
    options: dict[str, Any] = field(default_factory=dict)
    classes: tuple[str, ...] | None = None
    preprocessing: dict[str, Any] = field(default_factory=PREPROCESSING.copy)

    def make(self, **options: Any) -> nn.Module:
        """Build the model with random weights and exact attention.

        Raises ConfigError if timm cannot build it.
        """
        import timm

        with buildable(
            f"task.model={self.model} with {self.options | {'img_size': self.size}}", "timm"
        ):
            return timm.create_model(self.model, **self.arguments(), **options)

    def arguments(self) -> dict[str, Any]:
        return self.options | {"num_classes": len(self.classes or ()), "img_size": self.size}

    def check(self) -> None:
        """Raise ConfigError for inconsistent sizes."""
        with torch.device("meta"), buildable(f"task.model={self.model}", "timm"):  # takes no memory
            check_patch(self.size, self.make().patch_embed.patch_size[0])

    def transform(self) -> Callable[[Any], Tensor]:
        """The evaluation transform: PIL.Image -> tensor (3, size, size)."""
        from timm.data import create_transform

        return create_transform(self.size, **self.preprocessing)

    # ---- config.json

    def written(self, mechanism: Mechanism) -> dict[str, Any]:
        """The content of config.json in timm's form; the key `crt_exp` is ours."""
        count = len(self.classes)
        config = {
            "input_size": [3, self.size, self.size],
            "fixed_input_size": True,
            **self.preprocessing,
            "num_classes": count,
            "label_names": self.classes,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        }
        return {
            "architecture": self.model,
            "num_classes": count,
            "model_args": self.options | {"img_size": self.size},
            "pretrained_cfg": config,
            "crt_exp": mechanism.to_saved(),
        }

    @classmethod
    def read(cls, content: dict[str, Any], path: Path) -> "VisionDescription":
        """Read a config.json of timm or of transformers' ViTMAE. Raises DataError."""
        if content.get("model_type") == "vit_mae":
            from transformers import ViTMAEConfig

            mae = ViTMAEConfig(**content)  # missing keys have their defaults
            options = {
                "patch_size": mae.patch_size,
                "embed_dim": mae.hidden_size,
                "depth": mae.num_hidden_layers,
                "num_heads": mae.num_attention_heads,
                "mlp_ratio": mae.intermediate_size / mae.hidden_size,
            }
            return cls(SIZED, mae.image_size, options)
        try:
            config = content.get("pretrained_cfg", content)
            config |= {"num_classes": content.get("num_classes", config.get("num_classes"))}
            options = dict(content.get("model_args", {}))
            for key in ("img_size", "num_classes"):
                options.pop(key, None)
            return cls.of_timm(content["architecture"], config, options)
        except (ConfigError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise DataError(
                f"{path}: not a configuration of timm: {type(error).__name__}: {error}"
            ) from None

    @classmethod
    def of_timm(
        cls, model: str, config: dict[str, Any], options: dict[str, Any]
    ) -> "VisionDescription":
        """Build from a pretrained_cfg of timm."""
        names = config.get("label_names") or [str(i) for i in range(config.get("num_classes") or 0)]
        read = {key: config.get(key) or default for key, default in PREPROCESSING.items()}
        return cls(model, config["input_size"][-1], options, tuple(names) or None, read)


def check_patch(size: int, patch: int) -> None:
    """Raise ConfigError if the image side is not a multiple of the patch side."""
    if size % patch:
        raise ConfigError(
            f"task.size={size}: expected a multiple of the patch size, {patch} pixels"
        )


def timm_description(model: str) -> VisionDescription:
    """The description of a timm model, such as vit_base_patch16_224.mae.

    Raises ConfigError for an unknown name.
    """
    import timm

    base, _, tag = model.partition(".")
    if not timm.is_model(base) or tag and not timm.is_model_pretrained(model):
        near = did_you_mean(model, timm.list_models("*vit*", pretrained=bool(tag)))
        raise ConfigError(f"task.model={model}: unknown to timm{near}")
    config = timm.get_pretrained_cfg(model)
    if config is None:
        return VisionDescription(model, 224)
    return VisionDescription.of_timm(model, config.to_dict(), {})


# ---- sources of weights


class Checkpoint(NamedTuple):
    """A file of weights, or a folder of weights with config.json."""

    named: str  # name in errors
    path: Path  # a file, or a folder with config.json
    description: VisionDescription | None
    attention: dict[str, Any]  # `crt_exp` of config.json; empty for exact attention

    def weights(self) -> Tensors:
        """The weights with timm's names, without random projections. Raises DataError."""
        config = self.path / CONFIG
        if config.is_file() and json_object(config).get("model_type") == "vit_mae":
            return mae_weights(self.path, self.named)
        return without(tensors_of(self.path, self.named), ".swapped.")


def checkpoint_of(init: str) -> Checkpoint | None:
    """Resolve task.init to a checkpoint; None for random weights and timm's hub.

    A name such as models/... is a fetched model. Raises DataError if nothing is found.
    """
    if init in ("scratch", "pretrained"):
        return None
    path = fetched(init, "task.init") or Path(init).expanduser()
    named = f"task.init={init}"
    if path.is_file():
        return Checkpoint(named, path, None, {})
    wanted = (
        f"scratch, pretrained, a file of weights, a model folder with {CONFIG}, or a run of task=imagenet or "
        f"task=mae{did_you_mean(init, ('scratch', 'pretrained'))}"
    )
    folder = folder_of(path, "task.init", wanted)
    content = json_object(folder / CONFIG)
    own = content.get("crt_exp", {})
    if not isinstance(own, dict):
        raise DataError(f"{folder / CONFIG}: crt_exp: expected keys with values")
    attention = own if differences(own.get("described", EXACT), EXACT) else {}
    description = VisionDescription.read(content, folder / CONFIG)
    return Checkpoint(named, folder, description, attention)


def tensors_of(path: Path, named: str) -> Tensors:
    """Load the tensors of a safetensors or torch.save file, or of a folder. Raises DataError."""
    from timm.models import load_state_dict

    file = path if path.is_file() else path / "model.safetensors"
    try:
        return load_state_dict(file, use_ema=False, weights_only=True)
    except Exception as error:  # safetensors, zipfile and pickle raise their own exceptions
        raise DataError(f"{named}: {file}: not readable as weights: {reason_of(error)}") from None


def mae_weights(folder: Path, named: str) -> Tensors:
    """The encoder of transformers' ViTMAE with timm's names.

    The outputs are equal if the norms have the same epsilon. Raises DataError.
    """
    from transformers import ViTMAEModel

    try:
        with quiet():
            # reads files of all versions of transformers
            theirs = ViTMAEModel.from_pretrained(folder, dtype=torch.float32).state_dict()
    except Exception as error:
        raise DataError(f"{named}: weights are not readable: {reason_of(error)}") from None
    weights = {}
    for name, tensor in theirs.items():
        for old, new in MAE_NAMES.items():
            name = re.sub(old, new, name)
        weights[name] = tensor
    # timm has queries, keys and values in one matrix
    for name in [name for name in weights if ".q_proj." in name]:
        parts = [weights.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        weights[name.replace("attention.q_proj", "attn.qkv")] = torch.cat(parts)
    return weights


# ---- the model of a run


def build(
    description: VisionDescription,
    mechanism: Mechanism,
    init: str = "scratch",
    new_head: bool = False,
    drop_path: float = 0.0,
) -> nn.Module:
    """Build the model in float32 with the weights of `init` and the given attention.

    A run with the same attention also gives its random projections. A run with exact attention is swapped to new random
    projections. Raises DataError for weights that are missing or do not fit, and ConfigError for another attention or
    other classes.
    """
    checkpoint = checkpoint_of(init)
    if init == "pretrained":
        model = from_hub(description, new_head, drop_path)
    else:
        model = description.make(drop_path_rate=drop_path)
        if checkpoint is not None:
            check_attention(checkpoint, mechanism)
            theirs = checkpoint.description and checkpoint.description.classes
            check_classes(checkpoint.named, theirs, description.classes, new_head)
            load_weights(model, checkpoint.weights(), checkpoint.named, new_head)
    if not mechanism.is_exact:
        mechanism.swap(model)
    if checkpoint is not None and checkpoint.attention:
        load_noise(model, checkpoint)
    return model.float()


def from_hub(description: VisionDescription, new_head: bool, drop_path: float) -> nn.Module:
    """Load timm's pretrained weights.

    `new_head` allows a randomly initialised head for other classes.
    """
    import timm

    name = description.model
    config = timm.get_pretrained_cfg(name)
    theirs = tuple(str(number) for number in range(config.num_classes or 0))
    check_classes(f"task.model={name}", theirs, description.classes, new_head)
    options = description.arguments() | {"pretrained": True, "drop_path_rate": drop_path}
    with quiet():
        model = sources.from_hub(
            partial(timm.create_model, name, **options),
            f"task.init=pretrained: weights of task.model={name}",
            f"Or `hf download timm/{name} --local-dir DIR`, then task.init=DIR",
        )
    if new_head and config.num_classes:
        model.reset_classifier(len(description.classes))
    return model


def check_classes(
    named: str, theirs: tuple[str, ...] | None, ours: tuple[str, ...], new_head: bool
) -> None:
    """Raise ConfigError if the head of weights has other classes; numbers are unknown names."""
    if new_head or not theirs or theirs == ours:
        return
    different = (len(theirs), len(ours))
    if len(theirs) == len(ours):
        if theirs == tuple(str(number) for number in range(len(theirs))):
            return
        different = next(pair for pair in zip(theirs, ours) if pair[0] != pair[1])
    raise ConfigError(
        f"{named}: trained on other classes ({different[0]}, expected {different[1]}); "
        "task.new_head=true trains a new head"
    )


def check_attention(checkpoint: Checkpoint, mechanism: Mechanism) -> None:
    """Raise ConfigError if the weights were trained with another linear attention.

    The error names the keys that differ.
    """
    if not checkpoint.attention:
        return
    if changed := attention_changes(checkpoint.attention["described"], mechanism.describe()):
        raise ConfigError(
            f"{checkpoint.named}: trained with another attention; these keys differ: "
            f"{changed}. Use that attention, or only the weights: "
            f"task.init={checkpoint.path / 'model.safetensors'}"
        )


def load_weights(model: nn.Module, weights: Tensors, named: str, new_head: bool) -> None:
    """Load weights with timm's names; timm interpolates position embeddings.

    A missing head stays as it is. Raises DataError for weights of another width, depth or kind.
    """
    adapt = getattr(
        sys.modules[type(model).__module__], "checkpoint_filter_fn", lambda weights, model: weights
    )
    try:
        with quiet():
            weights = adapt(dict(weights), model)
        weights = {
            name: tensor
            for name, tensor in weights.items()
            if not (new_head and name.startswith("head."))
        }
        absent, unexpected = model.load_state_dict(weights, strict=False)
    except RuntimeError as error:
        absent = [" ".join(str(error).split())[:300]]
        unexpected = []
    wrong = [name for name in absent if not name.startswith(HEAD)]
    wrong += [name for name in unexpected if not name.startswith((*HEAD, *FOREIGN))]
    if wrong:
        raise DataError(
            f"{named}: does not match task.model at {wrong[0]}; for other classes set task.new_head=true"
        )


def load_noise(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Load the random projections and statistics of the attention of training."""
    file = checkpoint.path / ATTENTION
    noise = tensors_of(file, checkpoint.named) if file.is_file() else {}
    make_room(model, noise)
    state = model.state_dict()
    own = {name: state[name] for name in state.keys() - without(state, ".swapped.").keys()}
    if wrong := mismatch(own, noise):
        raise DataError(f"{checkpoint.named}: {file} does not match the model: {wrong}")
    model.load_state_dict(noise, strict=False)


# ---- the folder of a run


def save_model(
    description: VisionDescription,
    mechanism: Mechanism,
    tensors: Tensors,
    directory: Path,
) -> None:
    """Write `<directory>/model` atomically from the model's weights. Raises OSError."""
    weights = without(tensors, ".swapped.")
    noise = {name: tensors[name] for name in tensors.keys() - weights.keys()}
    with whole_folder(directory) as folder:
        (folder / "config.json").write_text(
            json.dumps(description.written(mechanism), indent=1) + "\n"
        )
        save_tensors(weights, folder / "model.safetensors")
        if noise:
            save_tensors(noise, folder / ATTENTION)


class SavedClassifier(NamedTuple):
    """A saved model in eval mode, its class names, and its input transform.

    The transform takes a PIL.Image in RGB.
    """

    model: nn.Module
    classes: tuple[str, ...]
    transform: Callable[[Any], Tensor]


def load(run: str | Path) -> SavedClassifier:
    """Load the model of a run of task=imagenet, with the attention of training.

    `unswap_attention` restores exact attention. Raises DataError if the run is unfinished or of another task. Raises
    ConfigError if the name of its attention has another meaning in conf/.
    """
    checkpoint = checkpoint_of(str(run))
    if (
        checkpoint is None
        or checkpoint.description is None
        or checkpoint.description.classes is None
    ):
        raise DataError(f"{run}: no classifier; expected the directory of a run of task=imagenet")
    description = checkpoint.description
    saved = checkpoint.attention
    mechanism = Mechanism.from_saved(saved, checkpoint.named) if saved else Mechanism.of("exact")
    return SavedClassifier(
        build(description, mechanism, str(run)).eval(), description.classes, description.transform()
    )
