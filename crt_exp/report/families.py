"""make families: every model type that builds small, with its attention swapped: exact, refused at the swap with the reason, or wrong.

A model is judged in float64 by laws that hold whatever its attention: `exact` in place of its own changes nothing, with and without
padding, and unswapping gives every bit back; random features change it, let no token see the future where the model's own attention
does not, and keep padding out.
"""

import copy
import signal
import warnings
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from crt_exp.attention.swap import swap_attention, unswap_attention
from crt_exp.report.tiny_models import BATCH, NotBuilt, accepted_batch, outputs, tiny_model

EXACT = 1e-6       # relative difference in float64 that counts as none: some models go through float32 in places
LEAK = 1e-12       # of the future, in float64: rounding, since sums are scaled by what a chunk holds
AS_EAGER = "equals its eager attention; its fused one drops the causal order where there is no padding"
FEATURES = {"m": 16}
SECONDS = 60       # for one model


class Verdict(NamedTuple):
    """outcome: exact, refused, wrong, or not tried; why: in words; worst: the largest relative difference that was seen."""

    outcome: str
    why: str = ""
    worst: float = 0.0


class Wrong(Exception):
    """A law that does not hold."""


def judge(kind: str) -> Verdict:
    """The verdict on one model type of transformers."""
    try:
        model = tiny_model(kind)
        batch = accepted_batch(model)
    except NotBuilt as error:
        return Verdict("not tried", str(error))
    return judge_model(model, batch)


def judge_model(model: nn.Module, batch: dict[str, Any]) -> Verdict:
    """The laws on one model in eval mode and a batch that it takes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _judge(model, batch)


def _judge(model: nn.Module, batch: dict[str, Any]) -> Verdict:
    cases = {"plain": batch} | padded(model, batch)
    before = {name: outputs(model, case) for name, case in cases.items()}
    if any(distance(outputs(model, case), before[name]) for name, case in cases.items()):
        return Verdict("not tried", "its own output is not the same twice")
    causal = future_leak(model, batch) < LEAK
    try:
        swap_attention(model, "exact")
    except ValueError as error:
        return Verdict("refused", " ".join(str(error).split()))
    try:
        worst, note = 0.0, ""
        for name, case in cases.items():
            try:
                worst = max(worst, _same(model, case, before[name], name))
            except Wrong:
                worst, note = max(worst, _same(model, case, _eager(model, case), name)), AS_EAGER
        unswap_attention(model)
        if any(not equal(outputs(model, case), before[name]) for name, case in cases.items()):
            raise Wrong("not restored bit for bit by unswapping")
        swap_attention(model, "favorpp", **FEATURES)
        _features(model, batch, cases, before, causal)
    except Wrong as error:
        return Verdict("wrong", str(error))
    except Exception as error:
        return Verdict("wrong", f"{type(error).__name__} after the swap: {' '.join(str(error).split())}")
    return Verdict("exact", ", ".join(filter(None, ("causal" if causal else "", note))), worst)


def _eager(model: nn.Module, batch: dict[str, Any]) -> list[Tensor]:
    """What the unswapped model gives with transformers' plain attention, which forms every mask that the model asks for."""
    twin = unswap_attention(copy.deepcopy(model))
    twin.set_attn_implementation("eager")
    return outputs(twin, batch)


def _same(model: nn.Module, batch: dict[str, Any], before: list[Tensor], name: str) -> float:
    found = distance(outputs(model, batch), before, batch.get("attention_mask"))
    if not found < EXACT:
        raise Wrong(f"{name}: exact attention is {found:.2g} off")
    return found


def _features(model: nn.Module, batch: dict[str, Any], cases: dict[str, Any], before: dict[str, list[Tensor]], causal: bool) -> None:
    after = outputs(model, batch)
    if not all(t.isfinite().all() for t in after):
        raise Wrong("favorpp: not finite")
    if distance(after, before["plain"]) < EXACT:
        raise Wrong("favorpp changes nothing")
    if causal and not (leak := future_leak(model, batch)) < LEAK:
        raise Wrong(f"favorpp: the future leaks, {leak:.2g}")
    for name, case in cases.items():
        if name != "plain" and not (seen := padding_leak(model, case)) < LEAK:
            raise Wrong(f"favorpp: {name} changes the output, {seen:.2g}")


def padded(model: nn.Module, batch: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The batch with its last or first tokens masked in one row, where the model takes such a mask and honours it itself."""
    if "input_ids" not in batch:
        return {}
    found = {}
    for name, tokens in (("padding on the right", slice(-3, None)), ("padding on the left", slice(0, 3))):
        mask = torch.ones_like(batch["input_ids"])
        mask[1, tokens] = 0
        case = batch | {"attention_mask": mask}
        try:
            if all(t.isfinite().all() for t in outputs(model, case)) and not padding_leak(model, case):
                found[name] = case
        except Exception:
            continue
    return found


@torch.no_grad()
def padding_leak(model: nn.Module, batch: dict[str, Any]) -> float:
    """How much other tokens at the masked places change what stands at the kept ones."""
    mask, other = batch["attention_mask"], batch["input_ids"].clone()
    other[mask == 0] = 5 + (other[mask == 0] + 1) % 40
    return distance(outputs(model, batch | {"input_ids": other}), outputs(model, batch), mask)


@torch.no_grad()
def future_leak(model: nn.Module, batch: dict[str, Any]) -> float:
    """How much the later half of the (decoder's) tokens changes the output at the earlier half; inf where it has none."""
    key = "decoder_input_ids" if "decoder_input_ids" in batch else "input_ids"
    if key not in batch:
        return float("inf")
    ids = batch[key].clone()
    half = ids.shape[1] // 2
    ids[:, half:] = 5 + (ids[:, half:] + 1) % 40
    one, two = (_sequences(outputs(model, batch | {key: each}), ids.shape[1]) for each in (batch[key], ids))
    if not one:
        return float("inf")
    return distance([one[0][:, :half]], [two[0][:, :half]])


def _sequences(tensors: list[Tensor], length: int) -> list[Tensor]:
    return [t for t in tensors if t.ndim == 3 and t.shape[:2] == (BATCH, length)]


def distance(one: list[Tensor], two: list[Tensor], mask: Tensor | None = None) -> float:
    """The largest |a - b| / max |b| of a pair; with a mask, at its kept places, and only of tensors that have them."""
    if [t.shape for t in one] != [t.shape for t in two]:
        return float("inf")
    worst = 0.0
    for a, b in zip(one, two):
        if mask is not None:
            if a.shape[:2] != mask.shape:
                continue
            a, b = a[mask.bool()], b[mask.bool()]
        difference = (a - b).abs().max() / b.abs().max().clamp(min=1e-300) if a.numel() else torch.zeros(())
        worst = max(worst, float(torch.nan_to_num(difference, nan=torch.inf)))
    return worst


def equal(one: list[Tensor], two: list[Tensor]) -> bool:
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two))
