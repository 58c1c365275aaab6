"""Masked-autoencoder (MAE) pretraining of a ViT on unlabelled images.

The model is transformers' ViTMAEForPreTraining. Source: He et al., 2022, Masked Autoencoders Are Scalable Vision
Learners.
Notation: B rows of a batch, P patches.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypedDict

import numpy as np
import torch
from torch import Tensor, nn

from crt_exp.experiments.data.loading import Generator
from crt_exp.experiments.models import encoders
from crt_exp.experiments.models.vision import MEAN, STD, VisionDescription, check_patch
from crt_exp.experiments.tasks.base import Batch, Metrics, Plan, Reader, Tensors, task_class
from crt_exp.experiments.tasks.imagenet import ImageTask, Part, training_transform
from crt_exp.features.base import NotFinite
from crt_exp.mechanism import Mechanism
from crt_exp.registry import ConfigError
from crt_exp.validation import Count, FileName, Files, Share


class MAESizes(TypedDict):
    """Sizes of a new model."""

    patch: Count | None
    width: Count
    depth: Count
    heads: Count
    decoder_width: Count
    decoder_depth: Count
    decoder_heads: Count


class MAEAugment(TypedDict):
    """Random augmentation of a training image, in addition to its mask."""

    scale: tuple[Part, Part]
    flip: Share


@task_class
class MAE(ImageTask):
    """MAE pretraining; see `conf/task/mae.yaml` for the options.

    Raises:
        DataError: images or weights are unavailable.
        ConfigError: options contradict each other.
    """

    model: FileName | None
    init: Annotated[str, Files(("scratch", "uptrain"))]
    sizes: MAESizes
    augment: MAEAugment

    metric = "loss"
    lower_is_better = True

    def __post_init__(self):
        super().__post_init__()
        self.origin = encoders.origin_of(self.model, self.init)
        new = self.origin is encoders.NEW
        self.config = self.new_config() if new else self.saved_config()
        self.config.mask_ratio = 0.75  # the paper's
        self.config.norm_pix_loss = True  # targets have mean 0 and variance 1 in each patch
        self.patches = (self.config.image_size // self.config.patch_size) ** 2

    # ---- the model

    def new_config(self):
        """Configuration of a new model; raises ConfigError for sizes that do not fit.

        Position embeddings are sines and cosines of two coordinates, so widths are multiples of 4.
        """
        from transformers import ViTMAEConfig

        sizes = self.sizes
        size = self.size or (8 if self.embedded else 224)
        patch = sizes["patch"] or (2 if self.embedded else 16)
        for kind in ("", "decoder_"):
            width = sizes[f"{kind}width"]
            heads = sizes[f"{kind}heads"]
            if width % heads or width % 4:
                raise ConfigError(
                    f"task.sizes.{kind}width={width}: expected a multiple of 4 and {kind}heads={heads}"
                )
        check_patch(size, patch)
        return ViTMAEConfig(
            image_size=size,
            patch_size=patch,
            layer_norm_eps=1e-6,  # timm's value, because timm fine-tunes the model
            hidden_size=sizes["width"],
            num_hidden_layers=sizes["depth"],
            num_attention_heads=sizes["heads"],
            intermediate_size=4 * sizes["width"],
            decoder_hidden_size=sizes["decoder_width"],
            decoder_num_hidden_layers=sizes["decoder_depth"],
            decoder_num_attention_heads=sizes["decoder_heads"],
            decoder_intermediate_size=4 * sizes["decoder_width"],
        )

    def saved_config(self):
        config = encoders.load_config(self.origin)
        if config.model_type != "vit_mae":
            raise ConfigError(
                f"{self.origin.option}={self.origin.name}: model type {config.model_type}, expected "
                "vit_mae, such as facebook/vit-mae-base"
            )
        if self.size not in (None, config.image_size):
            raise ConfigError(
                f"task.size={self.size}: expected {config.image_size}, as in {self.origin.name}; remove "
                "it"
            )
        return config

    def build(self, mechanism: Mechanism) -> nn.Module:
        kind = "AutoModelForPreTraining"
        model = encoders.load_model(kind, self.config, self.origin, mechanism)
        if not self.origin.weights:  # transformers leaves fixed position embeddings at zero
            model.vit.embeddings.patch_embeddings.projection._is_hf_initialized = (
                False  # else skipped
            )
            model.vit.embeddings.initialize_weights()
            model.decoder.initialize_weights(self.patches)
        return model

    # ---- batches

    def batches(self, split: str, plan: Plan) -> Iterator[Batch]:
        description = VisionDescription("", self.config.image_size)
        transform = description.transform()
        if split == "train":
            augment = self.augment | {"policy": None, "erase": 0.0}
            transform = training_transform(augment, description)
        return self.read(split, plan, transform, self.masked)

    def masked(self, images: Tensor, labels: Tensor, draws: list[Generator]) -> Batch:
        """Batch with images and uniform noise (B, P) in [0, 1).

        Patches with the smallest noise are visible, the others masked.
        """
        noise = np.stack([draw.random(self.patches, np.float32) for draw in draws])
        return {"pixel_values": images, "noise": torch.from_numpy(noise)}

    # ---- training and results

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(**batch).loss.float()

    def evaluate(self, model: nn.Module, split: str, reader: Reader) -> Metrics:
        """Mean squared error of masked pixels.

        Predicting the mean colour of each patch has error 1.
        """

        def measure(batch: Batch) -> dict[str, Any]:
            count = len(batch["noise"])
            return {"loss": model(**batch).loss.double() * count, "count": count}

        loss = reader.means(split, measure)["loss"]
        if not np.isfinite(loss):
            raise NotFinite("predicted pixels are not finite; try a lower trainer.lr")
        return {"loss": loss}

    def export(self, model: nn.Module, tensors: Tensors, directory: Path) -> None:
        """Save `<run>/model` for from_pretrained and for task.init of task=imagenet."""
        from transformers import ViTImageProcessorPil

        size = {"height": self.config.image_size, "width": self.config.image_size}
        processor = ViTImageProcessorPil(size=size, image_mean=list(MEAN), image_std=list(STD))
        encoders.save_model(model, tensors, processor, directory)
