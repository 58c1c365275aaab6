"""Noise and statistics that were saved with a swapped model, and how they come back to its layers."""

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn


def place_of(module: nn.Module) -> torch.device | None:
    """Where an attention module computes, None where nothing says it: its parameters' device, and where these come from
    a disk or from the CPU for each call, as accelerate has it, the one that they come to. Of a module without memory,
    whose weights are still to be loaded, the CPU: noise is drawn and not loaded."""
    devices = [p.device for p in module.parameters()]
    if not devices or any(device.type != "meta" for device in devices):
        return next((device for device in devices if device.type != "meta"), None)
    if torch.get_default_device().type == "meta":
        return devices[0]
    hooks = [getattr(part, "_hf_hook", None) for part in module.modules()]
    hooks = [inner for hook in hooks for inner in (getattr(hook, "hooks", None) or [hook])]
    comes_to = next((hook.execution_device for hook in hooks if getattr(hook, "execution_device", None) is not None),
                    "cpu")
    return torch.empty(0, device=comes_to).device


def moved(state: nn.Module, device: torch.device | None) -> nn.Module:
    """On that device; parameters without memory, which are still to be loaded, stay so."""
    if device is None or device.type == "meta":
        return state.to(device)
    return state._apply(lambda t: t if t.is_meta else t.to(device))


def restore(model: nn.Module, states: list[nn.Module], files: list[Path], folder: str | Path,
            strict: bool = False) -> None:
    """from_pretrained leaves the buffers of `swapped` aside, which its class does not know: takes them from the same
    files, for each layer that they hold; in their number format where that is the model's, as after model.bfloat16().
    strict: raises ValueError where a layer's buffers are not there."""
    dtype = next((p.dtype for p in model.parameters()), None)
    saved = _saved_buffers(files)
    own_paths = {state.path: _same_path(state.path, saved) for state in states}
    left = {path: buffers for path, buffers in saved.items() if path not in own_paths.values()}
    for state in states:
        own = saved[own_paths[state.path]] if own_paths[state.path] else _same_numbers(state.path, left)
        fits = own is not None and own.keys() == state.state_dict().keys()
        if strict and not fits and state.state_dict():
            raise ValueError(f"{state.path}: its noise and statistics are not in the weights of {folder}: load the "
                             "others by from_pretrained of its class, and call swap_attention for new noise")
        if fits:
            _load(state, own, folder, dtype)


def _load(state: nn.Module, own: dict[str, Tensor], folder: str | Path, dtype: torch.dtype | None) -> None:
    if any(t.dtype == dtype for t in own.values()):
        state.to(dtype)
    try:
        state.load_state_dict(own)
    except ValueError as error:
        raise ValueError(f"{state.path} in {folder}: {error}; saved=False makes new noise") from None


def _saved_buffers(files: list[Path]) -> dict[str, dict[str, Tensor]]:
    """Path of the layer -> buffers of its `swapped`, without reading other tensors."""
    from safetensors import safe_open

    saved: dict[str, dict[str, Tensor]] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 (not a dictionary)
                path, _, buffer = key.partition(".swapped.")
                if buffer:
                    saved.setdefault(path, {})[buffer] = tensors.get_tensor(key)
    return saved


def largest_dimension(files: list[Path]) -> int:
    """Of all tensors of `swapped` in them, whose headers alone are read; 0 where there are none."""
    from safetensors import safe_open

    largest = 0
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for key in filter(lambda key: ".swapped." in key, tensors.keys()):
                largest = max(largest, *tensors.get_slice(key).get_shape(), 0)
    return largest


def _same_path(path: str, saved: Iterable[str]) -> str | None:
    """The saved path of this layer. Those in a bare model and in one with a head differ by a prefix."""
    return next((other for other in saved
                 if path == other or path.endswith("." + other) or other.endswith("." + path)), None)


def _same_numbers(path: str, saved: dict[str, dict[str, Tensor]]) -> dict[str, Tensor] | None:
    """The buffers of this layer where save_pretrained gave the model the names of an older version: of the layers that
    no path given, the one with the same numbers in its path; of several the one whose path begins alike, as those of an
    encoder and a decoder do not. None where no saved layer has these numbers. ValueError: several may be its own."""
    alike = [other for other in saved if _numbers(other) == _numbers(path)]
    shared = [len(os.path.commonprefix([path.split("."), other.split(".")])) for other in alike]
    best = [other for other, count in zip(alike, shared) if count == max(shared)]
    if len(best) > 1:
        raise ValueError(f"{path}: the noise that was saved with {' and with '.join(best)} may each be its own; "
                         "saved=False makes new noise")
    return saved[best[0]] if best else None


def _numbers(path: str) -> list[str]:
    return [part for part in path.split(".") if part.isdigit()]
