"""Whole pretrained models for task=speed and task=memory, with exact or other attention.

A decoder reads a row of WikiText-2 and computes its loss, output head included. A text encoder and a speech encoder
compute their last states. The batch has one row.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from crt_exp.experiments.measure import seeded
from crt_exp.experiments.measure.bench import swap_and_fit
from crt_exp.experiments.measure.pretrained import folder_of, passage
from crt_exp.mechanism import Mechanism

FITTED = 256  # tokens of the calibration row; times do not depend on the fit
Loss = Callable[[Any], Tensor]


class WholeModel(NamedTuple):
    """A model with its inputs, and the loss of its output."""

    model: nn.Module
    inputs: dict[str, Tensor]
    loss: Loss

    def forward(self) -> Tensor:
        return self.loss(self.model(**self.inputs))

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        self.model.zero_grad(set_to_none=True)


def whole_model(name: str, method: Mechanism, length: int) -> WholeModel:
    """Return a model of models/<name> or a folder, with `length` tokens of input.

    The input of a speech encoder has two frames for each of its `length` positions. Raises ValueError for more
    positions than the model has.
    """
    config = AutoConfig.from_pretrained(folder_of(name))
    if hasattr(config, "num_mel_bins"):
        if length != config.max_source_positions:
            raise ValueError(
                f"task.lengths={length}: expected {config.max_source_positions}, the positions of {name}"
            )
        frames = torch.randn(1, config.num_mel_bins, 2 * length, generator=seeded(0))
        return WholeModel(speech_encoder(name, method), {"input_features": frames}, mean_square)
    if length > config.max_position_embeddings:
        raise ValueError(
            f"task.lengths={length}: expected at most {config.max_position_embeddings}, the positions of {name}"
        )
    ids = passage(name, "valid", 0, length)[None]
    if config.architectures[0].endswith("ForCausalLM"):
        inputs = {"input_ids": ids, "labels": ids}
        model = text_model(name, method, AutoModelForCausalLM)
        return WholeModel(model, inputs, lambda output: output.loss)
    # dropout of weights, which only exact attention has, would slow it down in training
    encoder = text_model(name, method, AutoModel, attention_probs_dropout_prob=0.0)
    return WholeModel(encoder, {"input_ids": ids}, mean_square)


@lru_cache(maxsize=8)
def text_model(name: str, method: Mechanism, kind: type, **options: Any) -> nn.Module:
    """Return a model fitted to the calibration row: the start of WikiText-2's training split."""
    model = kind.from_pretrained(folder_of(name), dtype=torch.float32, **options)
    model.config.use_cache = False
    return swap_and_fit(model, method, [{"input_ids": passage(name, "train", 0, FITTED)[None]}])


@lru_cache(maxsize=8)
def speech_encoder(name: str, method: Mechanism) -> nn.Module:
    model = AutoModel.from_pretrained(folder_of(name), dtype=torch.float32).get_encoder()
    positions = 2 * model.config.max_source_positions
    sample = torch.randn(1, model.config.num_mel_bins, positions, generator=seeded(1))
    return swap_and_fit(model, method, [{"input_features": sample}])


def mean_square(output: Any) -> Tensor:
    return output.last_hidden_state.square().mean()
