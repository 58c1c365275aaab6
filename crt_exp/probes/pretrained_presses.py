"""What presses of kvpress leave of a pretrained language model: keys that are dropped once the context was read.

The context of a row is read with exact attention, then each layer and head of keys keeps so many of its keys, chosen
before anything is asked; the rest of the row is read with these. kvpress asks for transformers of before 5.3 and runs
its hooks with no later one, so it is installed without what it needs, and `compress` of its presses is called here.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from crt_exp import mechanism_text
from crt_exp.probes import pretrained
from crt_exp.probes.pretrained import Reading, Row, compared, exact_of, judged
from crt_exp.swap.cache import NAMES

INSTALL = "pip install --no-deps kvpress 'cachetools<6' fire termcolor"


@cache
def package() -> ModuleType:
    """kvpress, whose import wraps all attention of transformers for presses that are not used here: it is put back."""
    before = dict(ALL_ATTENTION_FUNCTIONS.items())
    found = import_module("kvpress")
    ALL_ATTENTION_FUNCTIONS.update(before)
    return found


@torch.no_grad()
def pressed(arm: str, model: str, row: str, length: int, seed: int) -> Iterator[dict[str, Any]]:
    """What `compared` says of "SnapKVPress keys=144"; nothing, and why, where kvpress is not installed. Raises
    ValueError for a row without a context."""
    if find_spec("kvpress") is None:
        logging.getLogger(__name__).warning("%s is not measured, since kvpress is not installed: %s", arm, INSTALL)
        return
    made, exact = exact_of(model, row, length, seed)
    if not made.context:
        raise ValueError(f"row {row} has no context that is read before it is known what is asked: presses take others")
    name, options = mechanism_text.read(arm)
    yield from compared(made, read(pretrained.opened(model).model, made, name, **options), exact)


def read(model: nn.Module, row: Row, name: str, keys: int) -> Reading:
    """With so many keys of the context left, or all where it has no more."""
    kept = DynamicCache(config=model.config)
    context, rest = row.ids.tensor_split([row.context], 1)
    dropped = max(0.0, 1 - (keys + 0.5) / row.context)       # a press rounds what is left down
    press = getattr(package(), name)(compression_ratio=dropped)
    with squeezed(model, press):
        run(model, context, kept)
    places = torch.arange(row.context, row.ids.shape[1]).unsqueeze(0)
    states = run(model, rest, kept, position_ids=places)
    return judged(model, row, states[0, row.places - 1 - row.context])


def run(model: nn.Module, ids: Tensor, kept: DynamicCache, **more: Any) -> Tensor:
    """States (1, L, h)."""
    base = model.base_model
    name = next(name for name in NAMES if name in signature(type(base).forward).parameters)
    return base(input_ids=ids, use_cache=True, **{name: kept}, **more).last_hidden_state


@contextmanager
def squeezed(model: nn.Module, press: Any) -> Iterator[None]:
    hooks = [layer.self_attn.register_forward_hook(partial(squeeze, press), with_kwargs=True)
             for layer in model.base_model.layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def squeeze(press: Any, layer: nn.Module, args: tuple, given: Mapping[str, Any], output: Any) -> None:
    """A forward hook of an attention layer."""
    kept = next(given[name] for name in NAMES if name in given).layers[layer.layer_idx]
    kept.keys, kept.values = press.compress(layer, given["hidden_states"], kept.keys, kept.values, None, given)
