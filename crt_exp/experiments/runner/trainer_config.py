"""Options of `conf/trainer/`: optimiser, schedule, frozen weights and adapters.

Adapters (LoRA, Hu et al., 2022) are those of the library peft. With adapters, only the adapters, newly initialised
modules and the modules of `trainer.lora.also` are trained. Checkpoints then contain a digest of the frozen weights
instead of the weights.
"""

import hashlib
import importlib.util
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict

import torch
from torch import Tensor, nn

from crt_exp.attention.base import AttentionLayer
from crt_exp.experiments.models.folder import ADAPTER, TRAINED, save_tensors, whole_folder
from crt_exp.experiments.tasks.base import Task
from crt_exp.registry import ConfigError, unknown
from crt_exp.swap import families
from crt_exp.validation import Count, NotNegative, Positive, Rate, Whole, checked

OPTIMIZERS = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}


class Lora(TypedDict):
    """Options of `trainer.lora`, explained in conf/trainer/default.yaml."""

    rank: Count
    alpha: Positive
    dropout: Rate
    targets: Sequence[str] | None
    also: Sequence[str]
    merge: bool


@checked("trainer")
@dataclass(frozen=True)
class TrainerConfig:
    """Training options, explained in conf/trainer/default.yaml. Raises ConfigError."""

    batch: Count
    epochs: Positive
    steps: Whole | None
    accumulate: Count
    eval_batch: Count | None
    optimizer: Literal["adamw", "adam"]
    lr: Positive
    betas: tuple[Rate, Rate]
    eps: Positive
    weight_decay: NotNegative
    schedule: Literal["linear", "cosine", "constant", "inverse_sqrt"]
    warmup: NotNegative
    clip: Positive | None
    precision: Literal["no", "bf16", "fp16"]
    compile: bool
    strategy: Literal["ddp", "fsdp"]
    cpu: bool
    eval_every: Count | None
    evaluate: Count | None
    log_every: Count
    save_every: Count | None
    save_minutes: Positive | None
    keep: Count
    select: Literal["best", "last"]
    prefetch: Whole
    adapt: Literal["lora"] | None
    lora: Lora
    freeze: Sequence[str]

    def __post_init__(self):
        if self.strategy == "fsdp" and self.precision == "fp16":
            raise ConfigError("trainer.precision=fp16: not supported with trainer=fsdp; use bf16")
        if self.strategy == "fsdp" and self.adapt:
            raise ConfigError(
                "trainer.adapt=lora: not supported with trainer=fsdp; remove trainer=fsdp"
            )
        if self.adapt and importlib.util.find_spec("peft") is None:
            raise ConfigError("trainer.adapt=lora: peft is missing; pip install 'crt_exp[adapt]'")


def make_optimizer(model: nn.Module, config: TrainerConfig, task: Task) -> torch.optim.Optimizer:
    """Create Adam or AdamW with one parameter group per learning-rate factor and weight decay of the task.

    Each group stores its peak learning rate as `peak`. Raises ConfigError if no parameter is trained.
    """
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    fused = True
    for name, parameter in model.named_parameters():
        factor = task.lr_scale(name)
        if factor == 0:
            parameter.requires_grad_(False)
        if parameter.requires_grad:
            groups.setdefault((factor, task.decays(name, parameter)), []).append(parameter)
            supported = parameter.device.type in ("cpu", "cuda")
            fused = fused and supported and parameter.is_floating_point()
    if not groups:
        raise ConfigError(
            "no trainable parameters; set attention.learn=parameters, or trainer.steps=0 to evaluate"
        )
    options = []
    for (factor, decayed), parameters in groups.items():
        lr = config.lr * factor
        weight_decay = config.weight_decay * decayed
        options.append({"params": parameters, "lr": lr, "peak": lr, "weight_decay": weight_decay})
    return OPTIMIZERS[config.optimizer](
        options, betas=tuple(config.betas), eps=config.eps, fused=fused
    )


def schedule(kind: str, step: int, total: int | None, warmup: float) -> float:
    """Return the factor on the learning rate: linear warm-up, then decay.

    Args:
        kind: linear or cosine (to 0 at `total`), constant, or inverse_sqrt: as 1 / sqrt(step) after the warm-up
            (Vaswani et al., 2017).
        step: Steps done; 0 for the first step.
        warmup: Steps; below 1, a fraction of `total`.
    """
    first = warmup if warmup >= 1 else math.ceil(warmup * (total or 0))
    if step < first:
        return (step + 1) / (first + 1)
    if kind == "constant":
        return 1.0
    if kind == "inverse_sqrt":
        return math.sqrt((first + 1) / (step + 1))
    left = max(0.0, (total - step) / max(1, total - first))  # 1 at the end of the warm-up
    return left if kind == "linear" else (1 - math.cos(math.pi * left)) / 2


# ---- frozen weights, and adapters


def match_names(names: Iterable[str], parts: Sequence[str], option: str) -> list[str]:
    """Return the dotted names that contain one of the parts, such as "layer.0".

    Raises ConfigError for parts that no name contains.
    """
    names = list(names)
    matched = set()
    for part in parts:
        matches = [name for name in names if f".{part}." in f".{name}."]
        if not matches:
            pieces = set(".".join(names).split("."))
            raise unknown(f"name in {option}", part, sorted(pieces))
        matched.update(matches)
    return [name for name in names if name in matched]


def freeze(model: nn.Module, parts: Sequence[str]) -> None:
    parameters = dict(model.named_parameters())
    for name in match_names(parameters, parts, "trainer.freeze"):
        parameters[name].requires_grad_(False)


def linear_layers(model: nn.Module, targets: Sequence[str] | None) -> list[str]:
    """Return the paths of linear layers that get adapters. Raises ConfigError.

    targets: parts of names. None: the projections of attention.
    """
    from transformers.pytorch_utils import Conv1D

    parents = {}
    for path, layer in model.named_modules():
        if isinstance(layer, (nn.Linear, Conv1D)):
            parent = model.get_submodule(path.rpartition(".")[0])
            # nn.MultiheadAttention reads the weights of its layers without calling them: adapters have no effect
            if not isinstance(parent, nn.MultiheadAttention):
                parents[path] = parent
    if targets is not None:
        return match_names(parents, targets, "trainer.lora.targets")
    projections = []  # of attention of a known family, or beside an attention layer
    for path, parent in parents.items():
        if families.family(parent) or any(isinstance(m, AttentionLayer) for m in parent.children()):
            projections.append(path)
    if not projections:
        raise ConfigError(
            "trainer.lora.targets=null: no projections found; set names such as "
            f"{', '.join([*parents][:3])}"
        )
    return projections


class Adapters:
    """Low-rank adapters, added to a model by the constructor. Raises ConfigError.

    Attributes:
        stay: Names of the frozen weights.
        digest: SHA-256 of the frozen weights.
    """

    def __init__(self, model: nn.Module, lora: Lora):
        from peft import LoraConfig, inject_adapter_in_model

        parameters = dict(model.named_parameters())
        trained = match_names(parameters, lora["also"], "trainer.lora.also")
        for path, module in model.named_modules():
            for name in module.__dict__.get("made_anew", ()):  # such as a new head
                trained.append(f"{path}.{name}".lstrip("."))
        targets = linear_layers(model, lora["targets"])
        # modules of each weight: a head may be tied to the embeddings
        owners: Counter[int] = Counter()
        for module in model.modules():
            owners.update(id(parameter) for parameter in module.parameters(recurse=False))
        for path in targets:
            if lora["merge"] and owners[id(model.get_submodule(path).weight)] > 1:
                raise ConfigError(
                    f"trainer.lora.merge=true: {path} is tied to other weights; remove it from trainer.lora.targets, "
                    "or set trainer.lora.merge=false"
                )
        self.model = model
        self.config = LoraConfig(
            r=lora["rank"],
            lora_alpha=lora["alpha"],
            lora_dropout=lora["dropout"],
            target_modules=targets,
        )
        with warnings.catch_warnings():
            # peft corrects the option for Conv1D
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
            inject_adapter_in_model(self.config, model)
        for name in parameters.keys() & trained:
            parameters[name].requires_grad_(True)
        self.stay: set[str] = set()
        digest = hashlib.sha256()
        for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
            if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
                self.stay.add(name)
                values = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
                digest.update(name.encode() + values.numpy().tobytes())
        self.digest = digest.hexdigest()

    def save(self, tensors: dict[str, Tensor], directory: Path) -> None:
        """Write `<directory>/adapter` in peft's format, and other trained weights."""
        from transformers import PreTrainedModel

        inner = ""  # prefix of the names in a transformers model
        for path, part in self.model.named_modules():
            if isinstance(part, PreTrainedModel):
                inner = f"{path}.".lstrip(".")
                break
        adapters = {}
        others = {}
        for name, tensor in tensors.items():
            short = name.removeprefix(inner)
            if ".lora_" in short:
                adapters[f"base_model.model.{short.replace('.default.', '.')}"] = tensor
            elif name not in self.stay:
                others[short.replace(".base_layer.", ".")] = tensor
        targets = self.config.target_modules
        self.config.target_modules = {name.removeprefix(inner) for name in targets}
        with whole_folder(directory, ADAPTER) as folder:
            save_tensors(adapters, folder / "adapter_model.safetensors")
            self.config.save_pretrained(str(folder))
            if others:
                save_tensors(others, folder / TRAINED)

    def merge(self) -> None:
        """Merge the adapters into the weights, in place; layers become plain again."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        for path, part in list(self.model.named_modules()):
            if isinstance(part, BaseTunerLayer):
                part.merge()
                self.model.set_submodule(path, part.get_base_layer())
