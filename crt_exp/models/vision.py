"""Vision transformers of timm: what decides one, where its weights come from, and the folder in which a run keeps it.

That folder, `<run>/model`, is one that `timm.create_model("local-dir:<run>/model", pretrained=True)` loads: config.json
in timm's form and model.safetensors, with exact attention. Under `crt_exp` config.json says with which attention the
weights were trained; attention.safetensors holds the noise and statistics of that attention.
"""

import difflib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from crt_exp.attention.fitted_once import make_room
from crt_exp.config import ConfigError
from crt_exp.data import DataError
from crt_exp.options import check, format_value
from crt_exp.mechanism import Mechanism
from crt_exp.models.encoders import EXACT, buildable, differing_keys, quiet
from crt_exp.models.folder import MODEL, check_numbers, refuse_adapters, save_tensors, verify, whole_folder
from crt_exp.pretrained.published import fetched
from crt_exp.stored import SavedValue, json_object

SIZED = "vit_tiny_patch16_224"                               # takes any sizes as options; its own are not used
NEW = {"embed_dim": 64, "depth": 4, "num_heads": 4}          # for a new model of which nothing is said
SIZES = {"patch": "patch_size", "width": "embed_dim", "depth": "depth", "heads": "num_heads"}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)     # of ImageNet
ATTENTION = "attention.safetensors"
HEAD = ("head.", "head_dist.", "fc_norm.", "norm.", "attn_pool.")   # what depends on classes and pooling
DEEPEST, LARGEST = 512, 2**13                                # layers and pixels of a side that a file may ask for
FOREIGN = ("decoder", "mask_token")                          # parts of pretraining that a classifier has no place for


@dataclass(frozen=True)
class VisionDescription:
    """All that decides a classifier but its weights and its attention, as config.json keeps it.

    options: of timm.create_model, besides size and classes. classes: None where they are not known (a bare encoder).
    """

    model: str
    size: int                                                # pixels of a side of the images
    options: dict[str, Any] = field(default_factory=dict)
    classes: tuple[str, ...] | None = None
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD
    crop: float = 1.0                                        # of a side that the middle of an image keeps
    interpolation: str = "bicubic"

    def make(self, **options: Any) -> nn.Module:
        """With random weights and exact attention. Raises ConfigError where timm makes no ViT of it."""
        import timm

        with buildable(f"task.model = {self.model} with {self.options | {'img_size': self.size}}"):
            return timm.create_model(self.model, **self.arguments(), **options)

    def arguments(self) -> dict[str, Any]:
        return self.options | {"num_classes": len(self.classes or ()), "img_size": self.size}

    def check(self) -> None:
        """Raises ConfigError for sizes that do not go together, before anything is written."""
        width, heads = self.options.get("embed_dim"), self.options.get("num_heads")
        if width and heads and width % heads:
            raise ConfigError(f"task.sizes.width = {width} is no multiple of task.sizes.heads = {heads}")
        with torch.device("meta"):                           # which takes neither memory nor random numbers
            model = self.make()
        patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
        if patch is None:
            raise ConfigError(f"task.model = {self.model} has no patches: it is not a vision transformer")
        if self.size % patch[0]:
            near = max(patch[0], round(self.size / patch[0]) * patch[0])
            raise ConfigError(f"task.size = {self.size} is no multiple of the patch of {patch[0]} pixels: take "
                              f"task.size={near}")

    def transform(self) -> Callable[[Any], Tensor]:
        """A PIL.Image to (3, size, size) as the model is evaluated on."""
        from timm.data import create_transform

        return create_transform(self.size, interpolation=self.interpolation, mean=self.mean, std=self.std,
                                crop_pct=self.crop)

    # ---- config.json

    def written(self, mechanism: Mechanism) -> dict[str, Any]:
        """In timm's form; `crt_exp` is ours."""
        count = len(self.classes)
        config = {"input_size": [3, self.size, self.size], "fixed_input_size": True, "crop_pct": self.crop,
                  "interpolation": self.interpolation, "mean": self.mean, "std": self.std, "num_classes": count,
                  "label_names": self.classes, "first_conv": "patch_embed.proj", "classifier": "head"}
        return {"architecture": self.model, "num_classes": count, "model_args": self.options | {"img_size": self.size},
                "pretrained_cfg": config,
                "crt_exp": mechanism.saved()}

    @classmethod
    def read(cls, content: dict[str, Any], path: Path) -> "VisionDescription":
        """Raises DataError where it is no configuration of timm or of transformers' ViTMAE."""
        if content.get("model_type") == "vit_mae":
            return cls.of_mae(content)
        if "architecture" not in content:
            raise DataError(f"{path} describes no model of timm, and no ViTMAE of transformers")
        try:
            config = content.get("pretrained_cfg", content)
            config |= {"num_classes": content.get("num_classes", config.get("num_classes"))}
            options = {k: v for k, v in content.get("model_args", {}).items() if k not in ("img_size", "num_classes")}
            check_written(content["architecture"], config, options)
            return cls.of_timm(content["architecture"], config, options)
        except ConfigError as error:
            raise DataError(f"{path}: {error}") from None
        except KeyError as error:
            raise DataError(f"{path} says no {error.args[0]}, which timm writes there") from None
        except (TypeError, AttributeError, IndexError) as error:
            raise DataError(f"{path} is no configuration as timm writes it: {error}") from None

    @classmethod
    def of_timm(cls, model: str, config: dict[str, Any], options: dict[str, Any]) -> "VisionDescription":
        """config: what timm calls a pretrained_cfg."""
        count = config.get("num_classes") or 0
        names = config.get("label_names") or [str(i) for i in range(count)]
        return cls(model, config["input_size"][-1], options, tuple(names) or None, tuple(config["mean"]),
                   tuple(config["std"]), config.get("crop_pct") or 1.0, config.get("interpolation") or "bicubic")

    @classmethod
    def of_mae(cls, content: dict[str, Any]) -> "VisionDescription":
        """What transformers leaves out of config.json has its default value."""
        from transformers import ViTMAEConfig

        config = ViTMAEConfig(**content)
        options = {"patch_size": config.patch_size, "embed_dim": config.hidden_size, "depth": config.num_hidden_layers,
                   "num_heads": config.num_attention_heads, "mlp_ratio": config.intermediate_size / config.hidden_size}
        return cls(SIZED, config.image_size, options)


def check_written(model: Any, config: dict[str, Any], options: dict[str, Any]) -> None:
    """Raises ConfigError for what a file may not say: another name than timm's, values that are none, huge sizes."""
    import timm

    if not isinstance(model, str) or not timm.is_model(model.partition(".")[0]):
        raise ConfigError(f"architecture = {format_value(model)}: timm has no such model")
    sizes = {"num_classes": config["num_classes"] or 0, "input_size": list(config["input_size"])}
    for key, value in (options | sizes).items():
        check(f"options.{key}", value, SavedValue)
    if not 0 < options.get("depth", 1) <= DEEPEST or max(config["input_size"]) > LARGEST:
        raise ConfigError(f"depth={format_value(options.get('depth'))}, input_size={format_value(config['input_size'])}"
                          f": expected at most {DEEPEST} layers and {LARGEST} pixels")


def known(model: str) -> VisionDescription:
    """A name of timm, such as vit_base_patch16_224 or vit_base_patch16_224.mae. Raises ConfigError for another."""
    import timm

    base, _, tag = model.partition(".")
    names = timm.list_models(f"{base}*", pretrained=bool(tag))
    if not timm.is_model(base) or (tag and model not in names):
        near = difflib.get_close_matches(model, timm.list_models("*vit*"), n=1) if not names else names[:5]
        raise ConfigError(f"task.model = {model}: timm has no such model{'; it has ' if near else ''}{', '.join(near)}")
    config = timm.get_pretrained_cfg(model)
    if config is None:
        return VisionDescription(model, 224)
    return VisionDescription.of_timm(model, config.to_dict(), {})


# ---- where weights come from

class Checkpoint(NamedTuple):
    """A file of weights, or a folder that says what they are of."""

    named: str                                                # as the user named it
    path: Path                                               # a file, or a folder with config.json
    description: VisionDescription | None
    attention: dict[str, Any]                                # `crt_exp` of config.json; empty for exact attention

    @property
    def described(self) -> dict[str, Any]:
        return self.attention.get("described", EXACT)

    def state(self) -> dict[str, Tensor]:
        """By timm's names, without noise. Raises DataError."""
        verify(self.path, self.named)
        config = self.path / "config.json"
        if config.is_file() and json_object(config).get("model_type") == "vit_mae":
            return mae_state(self.path, self.named)
        tensors = tensors_of(weights_in(self.path), self.named)
        return {name: tensor for name, tensor in tensors.items() if ".swapped." not in name}


def checkpoint_of(init: str) -> Checkpoint | None:
    """What task.init means; None for random weights and those of timm's hub; models/... is one that was fetched.
    Raises DataError for what is not there."""
    if init in ("scratch", "pretrained"):
        return None
    path = fetched(init, "task.init") or Path(init).expanduser()
    if path.is_file():
        return Checkpoint(f"task.init = {init}", path, None, {})
    for folder in (path / MODEL, path):
        if (folder / "config.json").is_file():
            content = json_object(folder / "config.json")
            own = content.get("crt_exp", {})
            if not isinstance(own, dict):
                raise ConfigError(f"{folder / 'config.json'}: crt_exp={format_value(own)}: expected keys with values")
            return Checkpoint(f"task.init = {init}", folder, VisionDescription.read(content, folder / "config.json"),
                              {} if own.get("described") == EXACT or "described" not in own else own)
    refuse_adapters(path, f"task.init = {init}")
    if (path / "config.yaml").is_file():
        raise DataError(f"task.init = {init}: this run has not ended, so it holds no {MODEL}/ yet. Continue it with "
                        f"resume=auto hydra.run.dir={init}")
    near = difflib.get_close_matches(init, ("scratch", "pretrained"), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise DataError(f"task.init = {init}: it takes scratch, pretrained, a file of weights, or a folder with "
                    f"config.json, a model's or that of a run of task=imagenet or task=mae, and there is none{hint}")


def weights_in(path: Path) -> Path:
    """The file of weights, of a folder the one that timm writes."""
    files = [file for file in (path, path / "model.safetensors", path / "pytorch_model.bin") if file.is_file()]
    if not files:
        raise DataError(f"{path} has a config.json and no model.safetensors")
    return files[0]


def tensors_of(file: Path, named: str) -> dict[str, Tensor]:
    """Of safetensors, or of torch.save (tensors alone, nothing else is unpickled). Raises DataError."""
    from safetensors.torch import load_file

    try:
        safe = file.suffix == ".safetensors"
        tensors = load_file(file) if safe else torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # safetensors, zipfile and pickle have their own
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        raise DataError(f"{named}: {file} cannot be read as weights: {reason}") from None
    for key in ("model", "state_dict"):                      # as training scripts wrap them
        tensors = tensors.get(key, tensors) if isinstance(tensors.get(key), dict) else tensors
    return {name.removeprefix("module."): tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}


def mae_state(folder: Path, named: str) -> dict[str, Tensor]:
    """The encoder of transformers' ViTMAE by timm's names: equal outputs, where the norms have the same epsilon."""
    from transformers import ViTMAEModel

    try:
        with quiet():
            model = ViTMAEModel.from_pretrained(folder, dtype=torch.float32)   # files of all versions
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        raise DataError(f"{named}: its weights cannot be read: {reason}") from None
    embeddings = model.embeddings
    state = {"cls_token": embeddings.cls_token, "pos_embed": embeddings.position_embeddings,
             **prefixed("patch_embed.proj", embeddings.patch_embeddings.projection),
             **prefixed("norm", model.layernorm)}
    for i, layer in enumerate(model.layers):
        state |= block(f"blocks.{i}", layer)
    return {name: tensor.detach() for name, tensor in state.items()}


def block(name: str, layer: nn.Module) -> dict[str, Tensor]:
    """One layer of transformers' ViTMAE; timm has queries, keys and values in one matrix."""
    parts = [layer.attention.q_proj, layer.attention.k_proj, layer.attention.v_proj]
    state = {f"{name}.attn.qkv.weight": torch.cat([part.weight for part in parts])}
    if parts[0].bias is not None:
        state[f"{name}.attn.qkv.bias"] = torch.cat([part.bias for part in parts])
    for own, module in {"attn.proj": layer.attention.o_proj, "norm1": layer.layernorm_before,
                        "norm2": layer.layernorm_after, "mlp.fc1": layer.mlp.fc1, "mlp.fc2": layer.mlp.fc2}.items():
        state |= prefixed(f"{name}.{own}", module)
    return state


def prefixed(name: str, module: nn.Module) -> dict[str, Tensor]:
    return {f"{name}.{key}": tensor for key, tensor in module.named_parameters()}


# ---- the model of a run

def build(description: VisionDescription, mechanism: Mechanism, init: str = "scratch", new_head: bool = False,
          drop_path: float = 0.0) -> nn.Module:
    """The model in float32, with the weights that `init` names and `mechanism` for its attention.

    A run of the same attention gives its noise too; one of exact attention is uptrained: it gets new noise. Raises
    DataError where weights are missing or do not fit, ConfigError for another attention or other classes.
    """
    checkpoint = checkpoint_of(init)
    if init == "pretrained":
        model = from_hub(description, new_head, drop_path)
    else:
        model = description.make(drop_path_rate=drop_path)
        if checkpoint is not None:
            check_attention(checkpoint, mechanism)
            check_classes(checkpoint, description, new_head)
            state = checkpoint.state()
            check_numbers(state.items(), checkpoint.named)
            fill(model, state, checkpoint.named, new_head)
    if not mechanism.is_exact:
        mechanism.swap(model)
    if checkpoint is not None and checkpoint.attention:
        load_noise(model, checkpoint)
    return model.float()


def from_hub(description: VisionDescription, new_head: bool, drop_path: float) -> nn.Module:
    """timm's own weights; a head for other classes starts from random weights only where that is asked for."""
    import timm

    config, name = timm.get_pretrained_cfg(description.model), description.model
    if config is None or not config.has_weights:
        raise ConfigError(f"task.init = pretrained: timm has no weights of task.model = {name}")
    if config.num_classes and not new_head and config.num_classes != len(description.classes):
        raise other_classes(f"task.model = {name}", config.num_classes, len(description.classes))
    try:
        with quiet():
            model = timm.create_model(name, pretrained=True, drop_path_rate=drop_path, **description.arguments())
    except (OSError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        raise DataError(f"task.init = pretrained: the weights of task.model = {name} are not on this machine, and the "
                        f"Hugging Face hub does not give them: {reason}\nWith network: `hf download timm/{name} "
                        "--local-dir DIR`. Without: copy that folder (config.json, model.safetensors) here. Then set "
                        "task.init=DIR.") from None
    if new_head and config.num_classes:
        model.reset_classifier(len(description.classes))
    return model


def other_classes(named: str, theirs: int, ours: int) -> ConfigError:
    return ConfigError(f"{named} was trained on {theirs} classes, and the images have {ours}: task.new_head=true "
                       "starts a new head on the same encoder")


def check_classes(checkpoint: Checkpoint, description: VisionDescription, new_head: bool) -> None:
    """Raises ConfigError where the checkpoint has a head for other classes, in number or, where known, in name."""
    theirs = checkpoint.description.classes if checkpoint.description else None
    if new_head or theirs is None:
        return
    if len(theirs) != len(description.classes):
        raise other_classes(checkpoint.named, len(theirs), len(description.classes))
    numbers = tuple(str(i) for i in range(len(theirs)))      # what stands for names where a checkpoint has none
    if theirs != description.classes and theirs != numbers:
        place = next(i for i, (a, b) in enumerate(zip(theirs, description.classes)) if a != b)
        raise ConfigError(f"{checkpoint.named} was trained on other classes: its class {place} is {theirs[place]}, "
                          f"that of the images is {description.classes[place]}. task.new_head=true starts a new head "
                          "on the same encoder")


def check_attention(checkpoint: Checkpoint, mechanism: Mechanism) -> None:
    """Raises ConfigError, naming the keys that differ, for weights of another attention that is not the exact one."""
    changed = differing_keys(checkpoint.described, mechanism.describe()) if checkpoint.attention else []
    if changed:
        raise ConfigError(f"{checkpoint.named} was trained with another attention; these keys differ: "
                          f"{', '.join(changed)}. Choose the same, or take its weights alone with new noise: "
                          f"task.init={checkpoint.path / 'model.safetensors'}")


def fill(model: nn.Module, state: dict[str, Tensor], named: str, new_head: bool) -> None:
    """Loads weights of timm's names, position embeddings interpolated to the model's grid by timm.

    A missing head stays as it is. Raises DataError for weights of another width, depth or kind, ConfigError for a head
    of other classes.
    """
    stem = state.get("patch_embed.proj.weight")
    if stem is None:
        raise DataError(f"{named} holds no weights of a vision transformer: patch_embed.proj.weight is missing")
    own = model.state_dict()
    width = own["patch_embed.proj.weight"].shape[0]
    if stem.shape[0] != width:
        raise DataError(f"{named} is a checkpoint of width {stem.shape[0]}, and the model's is {width}: choose the "
                        "task.model or task.sizes.width that it was trained with")
    adapt = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", lambda state, model: state)
    with quiet():
        state = adapt(state, model)
    head = {name for name in own if name.startswith("head.")}
    theirs = {name: tensor for name, tensor in state.items() if name in own and not (new_head and name in head)}
    shapes = [name for name in theirs if theirs[name].shape != own[name].shape]
    if set(shapes) & head:
        raise other_classes(named, len(state["head.weight"]), len(own["head.weight"]))
    check_fit([name for name in own if name not in theirs and not name.startswith(HEAD)], "lacks", named)
    more = [name for name in state if name not in own and not name.startswith((*HEAD, *FOREIGN))]
    check_fit(more, "holds, besides the model's,", named)
    check_fit(shapes, "has another shape of", named)
    model.load_state_dict(theirs, strict=False)


def check_fit(names: list[str], what: str, named: str) -> None:
    if names:
        more = f" and {len(names) - 1} more such weights" if names[1:] else ""
        raise DataError(f"{named} {what} {sorted(names)[0]}{more}: not a checkpoint of this task.model with these "
                        "task.sizes")


def load_noise(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Noise and statistics of the attention that the weights were trained with."""
    file = checkpoint.path / ATTENTION
    noise = tensors_of(file, checkpoint.named) if file.is_file() else {}
    make_room(model, noise)
    own = {name: tensor for name, tensor in model.state_dict().items() if ".swapped." in name}
    wrong = sorted(set(own) ^ set(noise)) or [name for name in own if own[name].shape != noise[name].shape]
    if wrong:
        raise DataError(f"{checkpoint.named}: {checkpoint.path / ATTENTION} does not fit this model: {wrong[0]}")
    model.load_state_dict(noise, strict=False)


# ---- the folder of a run

def keep(description: VisionDescription, mechanism: Mechanism, tensors: dict[str, Tensor], directory: Path) -> None:
    """Writes `<directory>/model`, whole or not at all; `tensors` are the model's state. Raises OSError."""
    noise = {name: tensor for name, tensor in tensors.items() if ".swapped." in name}
    weights = {name: tensor for name, tensor in tensors.items() if name not in noise}
    with whole_folder(directory) as folder:
        (folder / "config.json").write_text(json.dumps(description.written(mechanism), indent=1) + "\n")
        save_tensors(weights, folder / "model.safetensors")
        if noise:
            save_tensors(noise, folder / ATTENTION)


def check_memory(checkpoint: Checkpoint) -> None:
    """Raises DataError for a description of a far larger model than its weights are of, before it takes memory."""
    kept = sum(tensor.numel() for tensor in checkpoint.state().values())
    with torch.device("meta"):
        described = sum(weight.numel() for weight in checkpoint.description.make().parameters())
    if described > 2 * kept:
        raise DataError(f"{checkpoint.named}: its config.json describes a model of {described} numbers, and its "
                        f"weights have {kept}")


class KeptClassifier(NamedTuple):
    """The model of a run in eval mode, the names of its classes, and what makes its input of a PIL.Image in RGB."""

    model: nn.Module
    classes: tuple[str, ...]
    transform: Callable[[Any], Tensor]


def load(run: str | Path, size: int | None = None) -> KeptClassifier:
    """What a run of task=imagenet kept, with the attention it was trained with; `unswap_attention` takes that out.

    size: of the images, where it is another than the run's; position embeddings are interpolated. Raises DataError
    where the run has not ended or is of another task, ConfigError where its attention's name is another one in conf/.
    """
    checkpoint = checkpoint_of(str(run))
    if checkpoint is None or checkpoint.description is None or checkpoint.description.classes is None:
        raise DataError(f"{run} holds no classifier: give the directory of a run of task=imagenet")
    description = replace(checkpoint.description, size=size or checkpoint.description.size)
    description.check()
    check_memory(checkpoint)
    saved = checkpoint.attention
    mechanism = Mechanism.of_saved(saved, checkpoint.named) if saved else Mechanism.of("exact")
    model = build(description, mechanism, str(run))
    return KeptClassifier(model.eval(), description.classes, description.transform())
