"""Verdicts on model types that build small, with their attention swapped: exact, refused at the swap with the reason,
or wrong.

A model is judged in float64 by laws that hold whatever its attention: `exact` in place of its own changes nothing, with
and without padding, and unswapping gives every bit back; random features change it, let no token see the future where
the model's own attention does not, and keep padding out.
"""

import copy
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from crt_exp.mechanism import swap_attention
from crt_exp.swap.families import family
from crt_exp.swap.swap import unswap_attention
from tests import tiny_models
from tests.tiny_models import BATCH, NotBuilt, outputs

LIBRARIES = {"transformers": (tiny_models.model_types, tiny_models.of_transformers),
             "timm": (tiny_models.timm_names, tiny_models.of_timm),
             "torch": (lambda: list(tiny_models.TORCH), tiny_models.of_torch),
             "torchaudio": (lambda: list(tiny_models.TORCHAUDIO), tiny_models.of_torchaudio)}
EXACT = 1e-6       # relative difference in float64 that counts as none: some models go through float32 in places
LEAK = 1e-12       # of the future, in float64: rounding, since sums are scaled by what a chunk holds
AS_EAGER = "equals its eager attention; its fused one drops the causal order where there is no padding"
FEATURES = {"m": 16}


class Verdict(NamedTuple):
    """outcome: exact, refused, wrong, no attention or not tried; why: in words; worst: the largest relative difference
    that was seen."""

    outcome: str
    why: str = ""
    worst: float = 0.0


class Wrong(Exception):
    """A law that does not hold."""


def judge(library: str, name: str) -> Verdict:
    """The verdict on one model of a library."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model, batch = LIBRARIES[library][1](name)
        except NotBuilt as error:
            return Verdict("not tried", str(error))
        return judge_model(model, batch)


def judge_model(model: nn.Module, batch: dict[str, Any]) -> Verdict:
    """The laws on one model in eval mode and a batch that it takes."""
    cases = {"plain": batch} | padded(model, batch)
    before = {name: outputs(model, case) for name, case in cases.items()}
    if any(distance(outputs(model, case), before[name]) for name, case in cases.items()):
        return Verdict("not tried", "its own output is not the same twice")
    causal = future_leak(model, batch) < LEAK
    try:
        swap_attention(model, "exact")
        stay = any(family(part) and "swapped" not in part._modules for part in model.modules())
    except ValueError as error:
        why = " ".join(str(error).split())
        none = "no supported attention" in why and "unsupported: none" in why
        return Verdict("no attention" if none else "refused", why)
    try:
        worst, note = _exact(model, cases, before)
        unswap_attention(model)
        if any(not equal(outputs(model, case), before[name]) for name, case in cases.items()):
            raise Wrong("not restored bit for bit by unswapping")
        swap_attention(model, "favorpp", **FEATURES)
        outputs(model, batch)
        if not any(part.swapped.reached for part in model.modules() if "swapped" in part._modules):
            return Verdict("not tried", "the batch reaches none of the layers that were swapped")
        _features(model, batch, cases, before, causal)
    except Wrong as error:
        return Verdict("wrong", str(error))
    except Exception as error:
        return Verdict("wrong", f"{type(error).__name__} after the swap: {' '.join(str(error).split())}")
    windows = "layers that see a window stay as they are" if stay else ""
    return Verdict("exact", "; ".join(filter(None, ("causal" if causal else "", windows, note))), worst)


def _exact(model: nn.Module, cases: dict[str, Any], before: dict[str, list[Tensor]]) -> tuple[float, str]:
    """The largest difference over the cases, and what is to be said of it. Raises Wrong."""
    worst, note = 0.0, ""
    for name, case in cases.items():
        off = distance(outputs(model, case), before[name], case.get("attention_mask"))
        if not off < EXACT and hasattr(model, "set_attn_implementation"):
            off, note = distance(outputs(model, case), _eager(model, case), case.get("attention_mask")), AS_EAGER
        if not off < EXACT:
            raise Wrong(f"{name}: exact attention is {off:.2g} off")
        worst = max(worst, off)
    return worst, note


def _eager(model: nn.Module, batch: dict[str, Any]) -> list[Tensor]:
    """What the unswapped model gives with transformers' plain attention, which forms every mask that
    the model asks for."""
    twin = unswap_attention(copy.deepcopy(model))
    twin.set_attn_implementation("eager")
    return outputs(twin, batch)


def _features(model: nn.Module, batch: dict[str, Any], cases: dict[str, Any], before: dict[str, list[Tensor]],
              causal: bool) -> None:
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
    """The batch with its last or first tokens masked in one row, where the model takes such a mask
    and honours it itself."""
    if "input_ids" not in batch:
        return {}
    cases = {}
    for name, tokens in (("padding on the right", slice(-3, None)), ("padding on the left", slice(0, 3))):
        mask = torch.ones_like(batch["input_ids"])
        mask[1, tokens] = 0
        case = batch | {"attention_mask": mask}
        try:
            if all(t.isfinite().all() for t in outputs(model, case)) and not padding_leak(model, case):
                cases[name] = case
        except Exception:
            continue
    return cases


@torch.no_grad()
def padding_leak(model: nn.Module, batch: dict[str, Any]) -> float:
    """How much other tokens at the masked places change what stands at the kept ones."""
    mask, other = batch["attention_mask"], batch["input_ids"].clone()
    other[mask == 0] = _others(other[mask == 0])
    return distance(outputs(model, batch | {"input_ids": other}), outputs(model, batch), mask)


@torch.no_grad()
def future_leak(model: nn.Module, batch: dict[str, Any]) -> float:
    """How much the later half of the (decoder's) tokens changes the output at the earlier half;
    inf where it has none."""
    key = next((key for key in ("decoder_input_ids", "input_ids", "tgt", "future_values") if key in batch), None)
    if key is None:
        return float("inf")
    changed, half = batch[key].clone(), batch[key].shape[1] // 2
    changed[:, half:] = _others(changed[:, half:])
    one, two = (_sequences(outputs(model, batch | {key: each}), changed.shape[1]) for each in (batch[key], changed))
    return distance([one[0][:, :half]], [two[0][:, :half]]) if one else float("inf")


def _others(tokens: Tensor) -> Tensor:
    """Other tokens, or other vectors, than these."""
    return -tokens if tokens.is_floating_point() else 5 + (tokens + 1) % 40


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
