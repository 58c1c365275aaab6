"""Light training: low-rank adapters (LoRA, Hu et al., 2022) through the library peft, and weights that stay.

With adapters only they, what a run starts from random weights and what `trainer.lora.also` names are trained.
Checkpoints leave out the weights that stay, and hold a digest of them: a run that goes on must start from the same
ones.
"""

import hashlib
import importlib.util
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

import torch
from pydantic import Field
from torch import Tensor, nn

from crt_exp.attention.base import AttentionLayer
from crt_exp.config import ConfigError, unknown
from crt_exp.options import Count, Positive
from crt_exp.models.folder import ADAPTER, TRAINED, save_tensors, whole_folder
from crt_exp.swap import families

INSTALL = "trainer.adapt=lora needs the package peft: pip install 'crt_exp[adapt]'"


class Lora(TypedDict):
    """The keys of `trainer.lora`; `conf/trainer/default.yaml` explains each."""

    rank: Count
    alpha: Positive
    dropout: Annotated[float, Field(ge=0, lt=1)]
    targets: Sequence[str] | None
    also: Sequence[str]
    merge: bool


def check_installed() -> None:
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(INSTALL)


# ---- names


def holds(name: str, part: str) -> bool:
    """Whether a dotted name has these parts, one after another: "layer.0" in "encoder.layer.0.output"."""
    return f".{part}." in f".{name}."


def named(names: Iterable[str], parts: Sequence[str], option: str) -> list[str]:
    """Those that hold one of the parts. Raises ConfigError for parts that no name holds."""
    names = list(names)
    for part in parts:
        if not any(holds(name, part) for name in names):
            known = sorted({piece for name in names for piece in name.split(".") if not piece.isdigit()})
            raise unknown(f"name in {option}, which no module or parameter of this model has,", part, known)
    return [name for name in names if any(holds(name, part) for part in parts)]


def freeze(model: nn.Module, parts: Sequence[str]) -> None:
    """Parameters whose names hold one of the parts stay as they are. Raises ConfigError for a part of no name."""
    parameters = dict(model.named_parameters())
    for name in named(parameters, parts, "trainer.freeze"):
        parameters[name].requires_grad_(False)


def made_anew(model: nn.Module) -> list[str]:
    """Parameters that the source of the weights does not have, such as the head of another task."""
    return [f"{path}.{name}" if path else name for path, part in model.named_modules()
            for name in part.__dict__.get("made_anew", ())]


# ---- targets


def adaptable(model: nn.Module) -> dict[str, nn.Module]:
    """Linear layers that are called, by their paths: torch's MultiheadAttention reads the weights of its own."""
    from transformers.pytorch_utils import Conv1D

    read = {f"{path}.{name}" for path, part in model.named_modules() if isinstance(part, nn.MultiheadAttention)
            for name, _ in part.named_children()}
    return {path: part for path, part in model.named_modules()
            if isinstance(part, (nn.Linear, Conv1D)) and path not in read}


def chosen(model: nn.Module, lora: Lora) -> dict[str, nn.Module]:
    """The linear layers that get adapters. Raises ConfigError for targets that are not there, and for a rank above the
    width of one."""
    linear = adaptable(model)
    names = projections(model, linear) if lora["targets"] is None else targets(linear, lora["targets"])
    for name in names:
        width = min(linear[name].weight.shape)
        if lora["rank"] > width:
            sizes = " x ".join(map(str, linear[name].weight.shape))
            raise ConfigError(f"trainer.lora.rank = {lora['rank']}: {name} is {sizes}, so its rank is at most {width}")
    return {name: linear[name] for name in names}


def projections(model: nn.Module, linear: dict[str, nn.Module]) -> list[str]:
    """The linear layers that stand directly in modules of attention."""
    result = [f"{path}.{name}" if path else name for path, part in model.named_modules()
             if families.family(part) or any(isinstance(child, AttentionLayer) for child in part.children())
             for name, _ in part.named_children()]
    result = [name for name in result if name in linear]
    if not result:
        raise ConfigError("trainer.lora.targets = null: this model has no projections of attention; name linear layers "
                          f"of it: {', '.join(endings(linear))}")
    return result


def targets(linear: dict[str, nn.Module], wanted: Sequence[str]) -> list[str]:
    for target in wanted:
        if not any(ends(name, target) for name in linear):
            raise unknown("target of trainer.lora.targets, which no linear layer of this model is,", target,
                          endings(linear))
    return [name for name in linear if any(ends(name, target) for target in wanted)]


def ends(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")


def endings(names: Iterable[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in names})


# ---- the adapters of a model


class Adapters:
    """Those of a model, put in place by the constructor. Raises ConfigError as `chosen` does."""

    def __init__(self, model: nn.Module, lora: Lora):
        from peft import LoraConfig, inject_adapter_in_model

        self.model, self.lora = model, lora
        names, anew, parameters = list(chosen(model, lora)), made_anew(model), dict(model.named_parameters())
        also = named(parameters, lora["also"], "trainer.lora.also")
        self.config = LoraConfig(r=lora["rank"], lora_alpha=lora["alpha"], lora_dropout=lora["dropout"],
                                 target_modules=names)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")  # of Conv1D; peft sets it right
            inject_adapter_in_model(self.config, model)
        self.whole = [name for name in {**dict.fromkeys(anew), **dict.fromkeys(also)} if name in parameters]
        for name in self.whole:
            parameters[name].requires_grad_(True)
        self.stay = {name for name, t in model.state_dict(keep_vars=True).items()
                     if isinstance(t, nn.Parameter) and not t.requires_grad}
        self.digest = digest_of(model.state_dict(), self.stay)

    def keep(self, tensors: dict[str, Tensor], directory: Path) -> None:
        """Writes `<directory>/adapter`, in peft's format, for the model that the task's module holds, and next to it
        what else was trained. Raises OSError where it cannot."""
        with whole_folder(directory, ADAPTER) as folder:
            self.write(tensors, inner(self.model), folder)

    def write(self, tensors: dict[str, Tensor], prefix: str, folder: Path) -> None:
        from safetensors.torch import save_file

        low = {name: t for name, t in tensors.items() if ".lora_" in name}
        own = {f"base_model.model.{name.removeprefix(prefix).replace('.default.', '.')}": t for name, t in low.items()}
        save_file({name: t.detach().cpu().contiguous() for name, t in own.items()},
                  folder / "adapter_model.safetensors", metadata={"format": "pt"})
        self.config.target_modules = {name.removeprefix(prefix) for name in self.config.target_modules}
        self.config.save_pretrained(str(folder))
        rest = {name.removeprefix(prefix).replace(".base_layer.", "."): t for name, t in tensors.items()
                if name not in low and name not in self.stay}
        if rest:
            save_tensors(rest, folder / TRAINED)

    def merge(self) -> None:
        """Adds the adapters to the weights, in place: the model is again one of plain layers."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        for path, part in list(self.model.named_modules()):
            if isinstance(part, BaseTunerLayer):
                part.merge()
                parent, _, name = path.rpartition(".")
                setattr(self.model.get_submodule(parent), name, part.get_base_layer())


def inner(model: nn.Module) -> str:
    """The path, with its last dot, of the model of a library within a task's module."""
    from transformers import PreTrainedModel

    return next((f"{path}." if path else "" for path, part in model.named_modules()
                 if isinstance(part, PreTrainedModel)), "")


def digest_of(tensors: dict[str, Tensor], names: Iterable[str]) -> str:
    """SHA-256 of the tensors of these names, with their names."""
    digest = hashlib.sha256()
    for name in sorted(names):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def lightened(model: nn.Module, config: Any) -> Adapters | None:
    """What `trainer.adapt`, `trainer.lora` and `trainer.freeze` make of a task's model, in place."""
    adapters = Adapters(model, config.lora) if config.adapt else None
    freeze(model, config.freeze)
    return adapters
