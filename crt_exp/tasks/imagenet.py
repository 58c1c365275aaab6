"""Image classification with vision transformers of timm and any attention: ImageNet, or any folder in its layout.

Legend: B rows of a batch, C classes, H = W pixels of a side.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from crt_exp.config import ConfigError
from crt_exp.data import check_classes
from crt_exp.data.loading import Draw, drawing
from crt_exp.options import Count, NotNegative, checked
from crt_exp.mechanism import Mechanism
from crt_exp.models import vision
from crt_exp.features.nonfinite import NotFinite
from crt_exp.tasks import pictures
from crt_exp.tasks.base import Batch, Plan, Reader
from crt_exp.tasks.image_task import ImageTask

Share = Annotated[float, Field(ge=0, le=1)]
NAMED_CLASSES = 5                                            # top-5 accuracy is ImageNet's


class VisionSizes(TypedDict):
    """Of a new model (task.model=null); null: those of task.init, or small ones."""

    patch: Count | None
    width: Count | None
    depth: Count | None
    heads: Count | None


class ImageAugment(TypedDict):
    """What timm does to a training image, and to pairs of them."""

    scale: tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]]
    flip: Share
    color: NotNegative | None
    policy: str | None
    erase: Share
    repeats: Count
    mixup: NotNegative
    cutmix: NotNegative
    mix_share: Share
    mix_switch: Share
    mix_mode: Literal["batch", "pair", "elem"]


@checked("task")
@dataclass(eq=False)
class ImageNet(ImageTask):
    """See `conf/task/imagenet.yaml` for the options.

    Raises DataError for images or weights that cannot be had, ConfigError for options that do not go together.
    """

    model: str | None
    sizes: VisionSizes
    size: Count | None
    pool: Literal["token", "avg"] | None
    init: str
    new_head: bool
    crop: Annotated[float, Field(gt=0, le=1)]
    interpolation: Literal["bilinear", "bicubic"]
    augment: ImageAugment
    smoothing: Annotated[float, Field(ge=0, lt=1)]
    drop_path: Annotated[float, Field(ge=0, lt=1)]
    layer_decay: Annotated[float, Field(gt=0, le=1)]
    ema: Annotated[float, Field(gt=0, lt=1)] | None

    metric = "accuracy"

    def __post_init__(self):
        super().__post_init__()
        check_classes(self.classes, self.source_name)
        self.description = self.described()
        self.description.check()
        self.mixes = bool(self.augment["mixup"] or self.augment["cutmix"])
        self.training = training_transform(self.augment, self.description)
        self.average = Average(self.ema) if self.ema else None
        self.layers, self.confusion, self.mechanism = {}, None, None

    # ---- the model

    def described(self) -> vision.VisionDescription:
        """Of task.model, of what task.init names, or of a new model of task.sizes."""
        sizes = {vision.SIZES[key]: value for key, value in self.sizes.items() if value is not None}
        checkpoint = vision.checkpoint_of(self.init)
        description = checkpoint.description if checkpoint else None
        if self.model is not None:
            if sizes:
                raise ConfigError("task.sizes is for a new model (task.model=null): task.model has sizes of its own")
            description = vision.known(self.model)
        elif self.init == "pretrained":
            raise ConfigError("task.init=pretrained takes the weights of a model of timm: name it, task.model=...")
        elif description is None:
            description = self.new_model(sizes)
        else:
            self.check_sizes(sizes, description)
        options = description.options | ({"global_pool": self.pool} if self.pool else {})
        return replace(description, classes=self.classes, size=self.size or description.size, options=options,
                       crop=self.crop, interpolation=self.interpolation)

    def new_model(self, sizes: dict[str, int]) -> vision.VisionDescription:
        size, patch = (8, 2) if self.embedded else (224, 16)
        return vision.VisionDescription(vision.SIZED, size, vision.NEW | {"patch_size": patch} | sizes)

    def check_sizes(self, sizes: dict[str, int], description: vision.VisionDescription) -> None:
        """Sizes that are given with a checkpoint must be its own."""
        for name, key in vision.SIZES.items():
            theirs = description.options.get(key, sizes.get(key))
            if key in sizes and sizes[key] != theirs:
                raise ConfigError(f"task.sizes.{name} = {sizes[key]}: the checkpoint task.init = {self.init} has "
                                  f"{theirs}. Leave it out, or choose another checkpoint")

    def build(self, mechanism: Mechanism) -> nn.Module:
        model = vision.build(self.description, mechanism, self.init, self.new_head, self.drop_path)
        self.mechanism, self.layers = mechanism, layers_of(model)
        if self.average:
            self.average.begin(model)
        return model

    def lr_scale(self, name: str) -> float:
        """Layer-wise decay by timm's own grouping of layers: 1 for the head, a power of task.layer_decay below it."""
        top = max(self.layers.values())
        return self.layer_decay ** (top - self.layers.get(name, top))

    # ---- batches

    def batches(self, split: str, plan: Plan) -> Iterator[Batch]:
        train = split == "train"
        transform = self.training if train else self.description.transform()
        yield from self.read(split, plan, transform, self.mixed if train and self.mixes else plain,
                             self.augment["repeats"])

    def mixed(self, images: Tensor, labels: Tensor, draws: list[Draw]) -> Batch:
        """mixup and cutmix by timm, drawn from the first row's generator. targets: (B, C), smoothed.

        Each image is mixed with its mirror in the order of the batch; of an odd number the last stays as it is.
        """
        from timm.data.mixup import Mixup, mixup_target

        o = self.augment
        mix = Mixup(o["mixup"], o["cutmix"], None, o["mix_share"], o["mix_switch"], o["mix_mode"],
                    label_smoothing=self.smoothing, num_classes=len(self.classes))
        targets = mixup_target(labels, len(self.classes), smoothing=self.smoothing)
        even = len(images) // 2 * 2
        if even:
            with drawing(draws[0]):
                images[:even], targets[:even] = mix(images[:even].clone(), labels[:even])
        return {"images": images, "targets": targets}

    # ---- training

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        logits, targets = model(batch["images"]).float(), batch["targets"]
        return F.cross_entropy(logits, targets, label_smoothing=0.0 if targets.dim() == 2 else self.smoothing)

    def check_shards(self) -> None:
        if self.average:
            raise ConfigError("task.ema averages whole weights, and trainer=fsdp splits them: leave one out")

    def check_adapters(self) -> None:
        if self.average:
            raise ConfigError("task.ema averages all weights, of which trainer.adapt=lora trains none: leave one out")

    def updated(self, model: nn.Module, step: int) -> None:
        if self.average:
            self.average.update(model)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.average.values) if self.average else {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if self.average:
            self.average.values = dict(state)

    # ---- results

    def evaluate(self, model: nn.Module, split: str, reader: Reader) -> dict[str, float]:
        """Loss in nats, top-1 and top-5 accuracy of the images that can be read; of averaged weights with task.ema."""
        rows, loss, before = [], 0.0, self.loader.left_out
        with self.average.within(model) if self.average else unchanged():
            for batch in reader.batches(split):
                logits, labels = model(batch["images"]).float(), batch["targets"]
                loss += float(F.cross_entropy(logits, labels, reduction="sum").double())
                best = logits.topk(min(NAMED_CLASSES, len(self.classes))).indices
                rows += torch.cat([labels[:, None], best], 1).tolist()
        predicted = np.array(reader.gather(rows))                # (n, 1 + 5): the label, then the likeliest classes
        loss, left_out = reader.sum(loss, self.loader.left_out - before)
        if not np.isfinite(loss):
            raise NotFinite("the model predicts classes with a loss that is not finite; a lower trainer.lr may help")
        self.confusion = pictures.counts(predicted[:, 0], predicted[:, 1], len(self.classes))
        right = predicted[:, :1] == predicted[:, 1:]
        metrics = {"accuracy": right[:, 0].mean(), "accuracy_top5": right.any(1).mean(), "loss": loss / len(predicted)}
        return metrics | ({"unreadable_images": left_out} if left_out else {})

    def export(self, model: nn.Module, tensors: dict[str, Tensor], directory: Path) -> None:
        """`<run>/model`, averaged weights with task.ema, and the confusion of classes as confusion.csv and .png."""
        if self.average:
            tensors = tensors | {name: tensor for name, tensor in self.average.values.items() if name in tensors}
        vision.keep(self.description, self.mechanism, tensors, directory)
        pictures.confusion(self.confusion, self.classes, directory)

    def summary(self, records: list[dict]) -> str:
        last = records[-1]
        averaged = ", averaged weights" if self.average else ""
        return (f"imagenet ({self.source_name}): accuracy {last['accuracy']:.4f}, top-5 {last['accuracy_top5']:.4f}, "
                f"loss {last['loss']:.4f} ({last['split']}, step {last['step']}{averaged})")


def plain(images: Tensor, labels: Tensor, draws: list[Draw]) -> Batch:
    return {"images": images, "targets": labels}


def training_transform(augment: ImageAugment, description: vision.VisionDescription) -> Any:
    """timm's, from a PIL.Image to (3, H, W). Raises ConfigError for a policy that timm does not know."""
    from timm.data import create_transform

    try:
        return create_transform(
            description.size, is_training=True, scale=tuple(augment["scale"]), hflip=augment["flip"],
            color_jitter=augment["color"], auto_augment=augment["policy"], re_prob=augment["erase"], re_mode="pixel",
            interpolation=description.interpolation, mean=description.mean, std=description.std)
    except (AssertionError, ValueError, KeyError, IndexError):
        raise ConfigError(f"task.augment.policy = {augment['policy']}: timm has no such policy; take "
                          "rand-m9-mstd0.5-inc1 (RandAugment), augmix-m5-w4-d2, or null") from None


def layers_of(model: nn.Module) -> dict[str, int]:
    """The layer of each parameter, from the first up, by timm's grouping."""
    from timm.models import group_parameters

    return group_parameters(model, model.group_matcher(coarse=False), reverse=True)


@contextmanager
def unchanged() -> Iterator[None]:
    yield


class Average:
    """An exponential moving average of a model's parameters, `values` by name.

    Each step makes it decay * values + (1 - decay) * weights.
    """

    def __init__(self, decay: float):
        self.decay, self.values = decay, {}

    def begin(self, model: nn.Module) -> None:
        self.values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.values[name] = self.values[name].to(parameter.device).lerp_(parameter.detach(), 1 - self.decay)

    @contextmanager
    def within(self, model: nn.Module) -> Iterator[None]:
        """The model with averaged weights; its own come back at the end, bit for bit."""
        compiled = "_orig_mod."                              # which torch.compile puts before each name
        own = {name.removeprefix(compiled): parameter for name, parameter in model.named_parameters()}
        kept = {name: parameter.detach().clone() for name, parameter in own.items()}
        try:
            copy_into(own, self.values)
            yield
        finally:
            copy_into(own, kept)


@torch.no_grad()
def copy_into(parameters: dict[str, nn.Parameter], values: dict[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(values[name])
