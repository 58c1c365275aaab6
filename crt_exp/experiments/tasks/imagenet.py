"""Image classification with timm's vision transformers, on ImageNet or a folder.

`ImageTask` holds what image tasks share: the source of the images, and batches from worker processes.
Notation: B rows of a batch, C classes, H = W pixels of a side.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from crt_exp.experiments.data import check_classes
from crt_exp.experiments.data import images as data
from crt_exp.experiments.data.loading import (
    Generator,
    Workers,
    by_workers,
    evaluation_order,
    image_batch,
    listed_rows,
    seeded_globals,
)
from crt_exp.experiments.data.sources import SOURCES, Place, is_on_hub, refuse_data_dir, task_folder
from crt_exp.experiments.models import vision
from crt_exp.experiments.tasks.base import Batch, Metrics, Plan, Reader, Task, Tensors, task_class
from crt_exp.features.base import NotFinite
from crt_exp.mechanism import Mechanism
from crt_exp.registry import ConfigError
from crt_exp.validation import Count, Files, NotNegative, Rate, Share

TOKENS = ("cls_token", "mask_token", "reg_token", "dist_token", "pos_embed", "position_embeddings")
Part = Annotated[float, Field(gt=0, le=1)]
NAMED_CLASSES = 5  # ImageNet reports top-5 accuracy


@dataclass(eq=False)
class ImageTask(Task):
    """Base class of image tasks: a folder, a set of the hub, or the embedded digits.

    The validation split `val` is also the test split.
    """

    model: str | None
    size: Count | None
    init: Annotated[str, Files(("scratch", "pretrained"))]
    dataset: str
    data_dir: str | None
    source: Place
    hub: data.ImageHub
    workers: Workers

    validation = "val"
    test = "val"

    def __post_init__(self):
        name = f"images/{self.dataset}"
        if (
            self.hub["name"] is None
            and name in SOURCES
            and SOURCES[name].hub
            and is_on_hub(self.source, name, task_folder(name), self.data_dir)
        ):
            self.hub = self.hub | {"name": SOURCES[name].hub}
        if self.source == "hub" and self.hub["name"] is None:
            raise ConfigError(
                f"task.source=hub: task.dataset={self.dataset} has no known hub name; set task.hub.name"
            )
        self.embedded = not self.inputs() and self.hub["name"] is None
        self.stand_in = data.STAND_IN if self.embedded else ""
        if self.hub["name"] is None:
            self.splits = data.load(self.dataset, self.data_dir)
        else:
            refuse_data_dir(self.data_dir, f"task.hub.name={self.hub['name']}")
            self.splits = data.load_hub(self.hub)
        self.classes = self.splits["train"].classes
        if self.embedded and self.workers is None:  # workers do not pay for 8 x 8 pixels
            self.workers = 0

    def inputs(self) -> list[Path | None]:
        if self.hub["name"] is not None:
            return []
        return data.image_folders(self.dataset, self.data_dir)

    def read(
        self,
        split: str,
        plan: Plan,
        transform: Callable[[Any], Tensor],
        finish: Callable[[Tensor, Tensor, list[Generator]], Batch],
        repeats: int = 1,
    ) -> Iterator[Batch]:
        """Yield batches; `finish` makes them from images, labels and row generators.

        Raises DataError for an unreadable image.
        """
        part = self.splits[split]
        make = partial(image_batch, part, plan.rng, transform, finish)
        yield from by_workers(make, listed_rows(len(part), split, plan, repeats), self.workers)

    def decays(self, name: str, parameter: nn.Parameter) -> bool:
        """Exclude position embeddings and tokens from weight decay, as MAE and DeiT do."""
        return parameter.dim() >= 2 and name.split(".")[-1] not in TOKENS


# ---- task=imagenet


class VisionSizes(TypedDict):
    """Sizes of a new model (task.model=null).

    null: the size of the model of task.init, or a small default.
    """

    patch: Count | None
    width: Count | None
    depth: Count | None
    heads: Count | None


class ImageAugment(TypedDict):
    """timm's augmentation of training images and of pairs (mixup, cutmix)."""

    scale: tuple[Part, Part]
    flip: Share
    policy: str | None
    erase: Share
    repeats: Count
    mixup: NotNegative
    cutmix: NotNegative


@task_class
class ImageNet(ImageTask):
    """Image classification; see `conf/task/imagenet.yaml` for the options.

    Raises:
        DataError: images or weights are unavailable.
        ConfigError: options contradict each other.
    """

    sizes: VisionSizes
    pool: Literal["token", "avg"] | None
    new_head: bool
    crop: Part
    augment: ImageAugment
    smoothing: Rate
    drop_path: Rate
    layer_decay: Part

    metric = "accuracy"
    predictions = True

    def __post_init__(self):
        super().__post_init__()
        check_classes(self.classes, self.hub["name"] or self.data_dir or self.dataset)
        self.description = self.model_description()
        self.description.check()
        self.training = training_transform(self.augment, self.description)

    # ---- the model

    def model_description(self) -> vision.VisionDescription:
        """Description of the model of task.model, task.init or task.sizes."""
        sizes = {vision.SIZES[key]: value for key, value in self.sizes.items() if value is not None}
        checkpoint = vision.checkpoint_of(self.init)
        description = checkpoint.description if checkpoint else None
        if self.model is not None:
            description = vision.timm_description(self.model)
        elif self.init == "pretrained":
            raise ConfigError("task.init=pretrained: expected task.model=<timm model>")
        elif description is None:
            size, patch = (8, 2) if self.embedded else (224, 16)
            description = vision.VisionDescription(
                vision.SIZED, size, vision.NEW | {"patch_size": patch} | sizes
            )
        if any(description.options.get(key) != value for key, value in sizes.items()):
            raise ConfigError(
                "task.sizes: only for a new model; remove it with task.model or task.init=<run>"
            )
        options = description.options | ({"global_pool": self.pool} if self.pool else {})
        return replace(
            description,
            classes=self.classes,
            size=self.size or description.size,
            options=options,
            preprocessing=description.preprocessing | {"crop_pct": self.crop},
        )

    def build(self, mechanism: Mechanism) -> nn.Module:
        from timm.models import group_parameters

        model = vision.build(self.description, mechanism, self.init, self.new_head, self.drop_path)
        self.mechanism = mechanism
        self.layers = group_parameters(model, model.group_matcher(coarse=False), reverse=True)
        return model

    def lr_scale(self, name: str) -> float:
        """Layer-wise learning-rate decay by timm's groups of layers.

        The factor is 1 for the head and a power of task.layer_decay below the head.
        """
        top = max(self.layers.values())
        return self.layer_decay ** (top - self.layers.get(name, top))

    # ---- batches

    def batches(self, split: str, plan: Plan) -> Iterator[Batch]:
        if split != "train":
            return self.read(split, plan, self.description.transform(), plain)
        mixes = self.augment["mixup"] or self.augment["cutmix"]
        finish = self.mixed if mixes else plain
        return self.read(split, plan, self.training, finish, self.augment["repeats"])

    def mixed(self, images: Tensor, labels: Tensor, draws: list[Generator]) -> Batch:
        """Apply timm's mixup and cutmix, drawn from the first row's generator.

        targets: (B, C), smoothed. Each image is mixed with the image at the mirrored position of the batch. If B is
        odd, the last image stays as it is.
        """
        from timm.data.mixup import Mixup, mixup_target

        mix = Mixup(
            self.augment["mixup"],
            self.augment["cutmix"],
            label_smoothing=self.smoothing,
            num_classes=len(self.classes),
        )
        targets = mixup_target(labels, len(self.classes), smoothing=self.smoothing)
        even = len(images) // 2 * 2
        if even:
            with seeded_globals(draws[0]):
                images[:even], targets[:even] = mix(images[:even].clone(), labels[:even])
        return {"images": images, "targets": targets}

    # ---- training

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["images"]).float()
        targets = batch["targets"]
        smoothing = 0.0 if targets.dim() == 2 else self.smoothing
        return F.cross_entropy(logits, targets, label_smoothing=smoothing)

    # ---- results

    def evaluate(self, model: nn.Module, split: str, reader: Reader) -> Metrics:
        """Loss in nats, top-1 and top-5 accuracy."""
        answers = []

        def measure(batch: Batch) -> dict[str, Any]:
            logits = model(batch["images"]).float()
            labels = batch["targets"]
            likely = logits.topk(min(NAMED_CLASSES, len(self.classes))).indices
            hits = likely == labels[:, None]
            answers.extend(zip(labels.tolist(), likely[:, 0].tolist()))
            return {
                "accuracy": hits[:, 0].sum(),
                "accuracy_top5": hits.sum(),
                "loss": F.cross_entropy(logits, labels, reduction="sum"),
                "count": len(labels),
            }

        means = reader.means(split, measure)
        if not math.isfinite(means["loss"]):
            raise NotFinite("the loss is not finite; try a lower trainer.lr")
        every = reader.gather(answers)
        self.predicted = []
        rows = self.length(split)
        order = evaluation_order(rows)[reader.plan.evaluated(rows)]
        for name, (label, answer) in zip(self.splits[split].names(order), every):
            row = {"label": self.classes[label], "prediction": self.classes[answer]}
            self.predicted.append({"example": name, **row})
        return means

    def export(self, model: nn.Module, tensors: Tensors, directory: Path) -> None:
        """Save the model as `<run>/model`."""
        vision.save_model(self.description, self.mechanism, tensors, directory)


def plain(images: Tensor, labels: Tensor, draws: list[Generator]) -> Batch:
    return {"images": images, "targets": labels}


def training_transform(augment: ImageAugment, description: vision.VisionDescription) -> Any:
    """timm's training transform, from PIL.Image to (3, H, W).

    Raises ConfigError for a policy that timm does not know.
    """
    from timm.data import create_transform

    try:
        return create_transform(
            description.size,
            is_training=True,
            scale=tuple(augment["scale"]),
            hflip=augment["flip"],
            color_jitter=None,
            auto_augment=augment["policy"],
            re_prob=augment["erase"],
            re_mode="pixel",
            **description.preprocessing,
        )
    except (AssertionError, ValueError, KeyError, IndexError):
        raise ConfigError(
            f"task.augment.policy={augment['policy']}: expected null or a policy of timm, such as "
            "rand-m9-mstd0.5-inc1 (RandAugment) or augmix-m5-w4-d2"
        ) from None
