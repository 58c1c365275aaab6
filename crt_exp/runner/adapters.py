"""Light training: low-rank adapters (LoRA, Hu et al., 2022) through the library peft, and weights that stay.

With adapters only they, what a run starts from random weights and what `trainer.lora.also` names are trained.
Checkpoints leave out the weights that stay, and hold a digest of them.
"""

import hashlib
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, TypedDict

import torch
from pydantic import Field
from torch import Tensor, nn

from crt_exp.attention.base import AttentionLayer
from crt_exp.config import ConfigError, unknown
from crt_exp.options import Count, Positive
from crt_exp.models.folder import ADAPTER, TRAINED, save_tensors, whole_folder
from crt_exp.swap import families


class Lora(TypedDict):
    """The keys of `trainer.lora`; `conf/trainer/default.yaml` explains each."""

    rank: Count
    alpha: Positive
    dropout: Annotated[float, Field(ge=0, lt=1)]
    targets: Sequence[str] | None
    also: Sequence[str]
    merge: bool


def named(names: Iterable[str], parts: Sequence[str], option: str) -> list[str]:
    """Dotted names that hold one of the parts, such as "layer.0". Raises ConfigError for parts that no name holds."""
    names = list(names)
    for part in parts:
        if not any(f".{part}." in f".{name}." for name in names):
            raise unknown(f"name in {option}", part, sorted({piece for name in names for piece in name.split(".")}))
    return [name for name in names if any(f".{part}." in f".{name}." for part in parts)]


def freeze(model: nn.Module, parts: Sequence[str]) -> None:
    parameters = dict(model.named_parameters())
    for name in named(parameters, parts, "trainer.freeze"):
        parameters[name].requires_grad_(False)


def linear_layers(model: nn.Module, targets: Sequence[str] | None) -> list[str]:
    """Paths of the linear layers that get adapters; null: the projections of attention. Raises ConfigError."""
    from transformers.pytorch_utils import Conv1D

    parents = {path: model.get_submodule(path.rpartition(".")[0]) for path, part in model.named_modules()
               if isinstance(part, (nn.Linear, Conv1D))}
    # torch's attention reads the weights of its layers and does not call them
    linear = {path: part for path, part in parents.items() if not isinstance(part, nn.MultiheadAttention)}
    if targets is not None:
        return named(linear, targets, "trainer.lora.targets")
    found = [name for name, part in linear.items()
             if families.family(part) or any(isinstance(child, AttentionLayer) for child in part.children())]
    if not found:
        raise ConfigError("trainer.lora.targets=null: this model has no projections of attention; expected linear "
                          f"layers such as {', '.join([*linear][:3])}")
    return found


class Adapters:
    """The adapters of a model, put in place by the constructor. Raises ConfigError.

    Attributes: `stay`, the names of the weights that are not trained; `digest`, SHA-256 of them.
    """

    def __init__(self, model: nn.Module, lora: Lora):
        from peft import LoraConfig, inject_adapter_in_model

        parameters = dict(model.named_parameters())
        anew = [f"{path}.{name}".lstrip(".") for path, part in model.named_modules()
                for name in part.__dict__.get("made_anew", ())]  # such as the head of another task
        whole = [*anew, *named(parameters, lora["also"], "trainer.lora.also")]
        targets = linear_layers(model, lora["targets"])
        self.model, self.config = model, LoraConfig(r=lora["rank"], lora_alpha=lora["alpha"],
                                                    lora_dropout=lora["dropout"], target_modules=targets)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")  # of Conv1D; peft sets it right
            inject_adapter_in_model(self.config, model)
        for name in parameters.keys() & whole:
            parameters[name].requires_grad_(True)
        stay = {name: t.detach() for name, t in sorted(model.state_dict(keep_vars=True).items())
                if isinstance(t, nn.Parameter) and not t.requires_grad}
        digest = hashlib.sha256()
        for name, t in stay.items():
            digest.update(name.encode() + t.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        self.stay, self.digest = {*stay}, digest.hexdigest()

    def save(self, tensors: dict[str, Tensor], directory: Path) -> None:
        """Write `<directory>/adapter` in peft's format, for the library's model, and what else was trained."""
        from transformers import PreTrainedModel

        inner = next((f"{path}.".lstrip(".") for path, part in self.model.named_modules()
                      if isinstance(part, PreTrainedModel)), "")
        short = {name.removeprefix(inner): t for name, t in tensors.items() if name not in self.stay}
        self.config.target_modules = {name.removeprefix(inner) for name in self.config.target_modules}
        with whole_folder(directory, ADAPTER) as folder:
            save_tensors({f"base_model.model.{name.replace('.default.', '.')}": t for name, t in short.items()
                          if ".lora_" in name}, folder / "adapter_model.safetensors")
            self.config.save_pretrained(str(folder))
            if rest := {name.replace(".base_layer.", "."): t for name, t in short.items() if ".lora_" not in name}:
                save_tensors(rest, folder / TRAINED)

    def merge(self) -> None:
        """Add the adapters to the weights, in place: the model is again one of plain layers."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        for path, part in list(self.model.named_modules()):
            if isinstance(part, BaseTunerLayer):
                part.merge()
                self.model.set_submodule(path, part.get_base_layer())
