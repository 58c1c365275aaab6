"""Restore saved swapped models: mechanisms, projections and statistics.

save_pretrained of transformers stores `config.crt_exp` and the buffers of `swapped`. `config.crt_exp` is a dictionary:
- `version`: the version of this package.
- `mechanisms`: a list of `Mechanism.saved` records, each with the `causal` argument of the swap.
- `layers`: path of each attention module -> index of its mechanism; null for a layer with its own attention.

The configurations of swapped models also hold `attn_implementation: crt_exp`, a name that transformers refuses to load.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from safetensors import safe_open
from torch import Tensor, nn

from crt_exp.attention.base import AttentionLayer
from crt_exp.registry import ConfigError, json_object
from crt_exp.validation import Whole, check

KEY = "crt_exp"
IMPLEMENTATION = "attn_implementation"  # key of config.json, which transformers reads at loading
NEW_NOISE = "use saved=False for new ones"


def check_record(record: Any, source: Any) -> dict[str, Any]:
    """Validate a record read from a file and return it.

    `Mechanism.from_saved` checks the mechanisms. Raises ConfigError, naming `source`.
    """
    try:
        check(KEY, record, dict)
        mechanisms = record.get("mechanisms")
        layers = record.get("layers")
        check("mechanisms", mechanisms, Sequence[dict])
        check("layers", layers, dict[str, Annotated[Whole, Field(lt=len(mechanisms))] | None])
        if all(number is None for number in layers.values()):
            raise ConfigError("no layer is swapped")
    except (ConfigError, RecursionError) as error:
        raise ConfigError(f"{source}: {KEY} in config.json is invalid: {error}") from None
    return record


# ---- projections and statistics


def weight_files(source: str | Path, **fetching: Any) -> list[Path]:
    """The safetensors files of a folder, or of the local copy of a hub repository.

    `fetching` holds arguments of cached_file of transformers.
    """
    from transformers.utils import cached_file

    def fetch(name: str) -> list[Path]:
        file = cached_file(
            str(source), name, _raise_exceptions_for_missing_entries=False, **fetching
        )
        return [Path(file)] if file else []

    files = fetch("model.safetensors")
    for index in fetch("model.safetensors.index.json"):
        for shard in sorted(set(json_object(index)["weight_map"].values())):
            files += fetch(Path(shard).name)
    return files


def restore_own(model: nn.Module, states: list[AttentionLayer]) -> None:
    """Call `restore` with the folder that the model was loaded from, if any."""
    source = getattr(getattr(model, "config", None), "_name_or_path", None)
    if isinstance(source, str) and source and Path(source).is_dir():
        restore(model, states, weight_files(source), source)


def restore(
    model: nn.Module,
    states: list[AttentionLayer],
    files: list[Path],
    folder: str | Path,
    strict: bool = False,
) -> None:
    """Load the buffers of `swapped`, which from_pretrained of transformers skips.

    The buffers take the dtype of the model if they were saved in it, as after model.bfloat16(). With strict=True,
    missing buffers of a layer raise ValueError. Buffers that do not fit raise ConfigError.
    """
    dtype = next((p.dtype for p in model.parameters()), None)
    saved = _saved_buffers(files)
    paths = {}
    for state in states:
        same = (path for path in saved if same_path(path, state.path))
        paths[state.path] = next(same, None)
    left = [path for path in saved if path not in paths.values()]
    for state in states:
        path = paths[state.path] or _same_numbers(state.path, left)
        own = {} if path is None else saved[path]
        if own.keys() != state.state_dict().keys():
            if strict:
                raise ValueError(
                    f"{folder}: random projections of {state.path}: missing; call swap_attention"
                )
            continue
        if any(t.dtype == dtype for t in own.values()):
            state.to(dtype)
        try:
            state.load_state_dict(own)
        except ValueError as error:
            raise ConfigError(
                f"{folder}: random projections of {state.path}: {error}; {NEW_NOISE}"
            ) from None


def _saved_buffers(files: list[Path]) -> dict[str, dict[str, Tensor]]:
    """Layer path -> buffers of its `swapped`; other tensors are not read."""
    saved: dict[str, dict[str, Tensor]] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 (not a dictionary)
                path, _, buffer = key.partition(".swapped.")
                if buffer:
                    saved.setdefault(path, {})[buffer] = tensors.get_tensor(key)
    return saved


def same_path(path: str, other: str) -> bool:
    """Whether two paths name one layer; a bare model lacks the prefix of a head model."""
    return path == other or path.endswith(f".{other}") or other.endswith(f".{path}")


def _same_numbers(path: str, saved: list[str]) -> str | None:
    """Find the saved layer with the same indices in its path.

    save_pretrained renames the modules of some models. Among several candidates the longest common prefix decides,
    which separates encoder from decoder. Raises ValueError if that is ambiguous.
    """
    numbers = re.compile(r"\.(\d+)\b")
    shared = {}
    for other in saved:
        if numbers.findall(other) == numbers.findall(path):
            shared[other] = len(os.path.commonprefix([path.split("."), other.split(".")]))
    best = [other for other, count in shared.items() if count == max(shared.values())]
    if len(best) > 1:
        raise ValueError(
            f"random projections of {path}: ambiguous, candidates {', '.join(best)}; {NEW_NOISE}"
        )
    return best[0] if best else None


@contextmanager
def ignoring_buffers() -> Iterator[None]:
    """Context manager: transformers does not report `swapped` buffers as unexpected."""
    from transformers import PreTrainedModel

    kind: Any = PreTrainedModel
    own = kind.post_init

    def post_init(model: PreTrainedModel) -> None:
        own(model)
        model._keys_to_ignore_on_load_unexpected = {
            *(model._keys_to_ignore_on_load_unexpected or ()),
            r"\.swapped\.",
        }

    kind.post_init = post_init
    try:
        yield
    finally:
        kind.post_init = own
