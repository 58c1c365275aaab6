"""Fitted models as one safetensors file: arrays are its tensors, all else is JSON in its metadata.

Nothing in a file is imported or called: the maps, parameters and samplers that it names are looked up among those of
the package, and everything else in it is numbers and words.
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from torch import Tensor, from_numpy

from crt_exp import samplers
from crt_exp.estimators import RandomFeatures
from crt_exp.features import FeatureMap
from crt_exp.samplers import DenseNoise, HadamardNoise
from crt_exp.whole_files import whole

KEY = "crt_exp.ridge"  # of the metadata
Arrays = dict[str, np.ndarray]
Made = TypeVar("Made")


def write(path: Path, kind: str, content: Mapping[str, Any]) -> None:
    """Raises ValueError for an object that is none of the package's, OSError where the file cannot be written."""
    from safetensors.numpy import save

    arrays: Arrays = {}
    described = {"kind": kind, "content": packed(dict(content), arrays)}
    with whole(path) as part:
        part.write_bytes(save(arrays, metadata={KEY: json.dumps(described)}))


def read(path: Path, kind: str, made: Callable[[dict[str, Any]], Made]) -> Made:
    """made(content) of what `write` left. Raises ValueError for a file of something else, OSError for none."""
    from safetensors import SafetensorError, safe_open

    try:
        with path.open("rb"), safe_open(path, framework="np") as file:
            described = json.loads((file.metadata() or {})[KEY])
            if described["kind"] != kind:
                raise ValueError(f"it is a {described['kind']}, not a {kind}")
            names = file.keys()
            return made(unpacked(described["content"], {name: file.get_tensor(name) for name in names}))
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        told = f"it lacks {error}" if isinstance(error, KeyError) else str(error).splitlines()[0]
        raise ValueError(f"{path} holds no fitted {kind}: {told}") from None


# ---- values


def packed(value: Any, arrays: Arrays) -> Any:
    """As JSON; arrays are put into `arrays`, and named."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(value, np.generic):
        return value.item()
    for tag, (kind, parts, _) in KINDS.items():
        if isinstance(value, kind):
            return {tag: {name: packed(part, arrays) for name, part in parts(value).items()}}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        name = str(len(arrays))
        arrays[name] = np.asarray(value, order="C")
        return {"array": name}
    if isinstance(value, np.ndarray):
        return {"words": packed({"of": value.tolist(), "objects": value.dtype == object}, arrays)["dict"]}
    raise ValueError(f"{value!r} cannot be written to a file: give mechanism and sampler by name, or use pickle")


def unpacked(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """The reverse."""
    if not isinstance(value, dict):
        return value
    (tag, content), = value.items()
    if tag == "array":
        return np.array(arrays[content])  # which may be written to
    return KINDS[tag][2]({name: unpacked(part, arrays) for name, part in content.items()})


def numbered(values: Any) -> dict[str, Any]:
    return {str(i): value for i, value in enumerate(values)}


def named_tuple(value: tuple) -> dict[str, Any]:
    return {"of": type(value).__name__} | value._asdict() if hasattr(value, "_fields") else numbered(value)


def tuple_of(parts: dict[str, Any]) -> tuple:
    return of_features(tuple)[parts.pop("of")](**parts) if "of" in parts else tuple(parts.values())


def sampler_parts(sampler: Callable) -> dict[str, Any]:
    function, options = (sampler.func, sampler.keywords) if isinstance(sampler, partial) else (sampler, {})
    if getattr(samplers, function.__name__, None) is not function:
        raise ValueError(f"the sampler {function.__name__} is none of the package's, and cannot be written to a file: "
                         "use pickle")
    return {"of": function.__name__, **options}


def sampler_of(parts: dict[str, Any]) -> Callable:
    name = parts.pop("of")
    if name not in samplers.__all__:
        raise ValueError(f"there is no sampler {name}")
    return partial(getattr(samplers, name), **parts)


def map_parts(phi: FeatureMap) -> dict[str, Any]:
    if of_features(FeatureMap).get(type(phi).__name__) is not type(phi):
        raise ValueError(f"{type(phi).__name__} is a map of your own, and cannot be written to a file: use pickle")
    return {"of": type(phi).__name__} | {each.name: getattr(phi, each.name) for each in fields(phi)}


def map_of(parts: dict[str, Any]) -> FeatureMap:
    return of_features(FeatureMap)[parts.pop("of")](**parts)


def of_features(kind: type) -> dict[str, type]:
    """Subclasses of it in the modules of crt_exp.features, by name."""
    found = [each for name, module in [*sys.modules.items()] if name.startswith("crt_exp.features")
             for each in vars(module).values() if isinstance(each, type) and issubclass(each, kind)]
    return {each.__name__: each for each in found if each.__module__.startswith("crt_exp.features")}


def features_of(parts: dict[str, Any]) -> RandomFeatures:
    made = RandomFeatures()
    vars(made).update(parts)
    return made


KINDS: dict[str, tuple[Any, Callable[[Any], dict[str, Any]], Callable[[dict[str, Any]], Any]]] = {
    "dict": (dict, dict, dict),
    "list": (list, numbered, lambda parts: [*parts.values()]),
    "tuple": (tuple, named_tuple, tuple_of),
    "tensor": (Tensor, lambda t: {"of": t.detach().numpy()}, lambda parts: from_numpy(parts["of"])),
    "dtype": (np.dtype, lambda dtype: {"of": dtype.str}, lambda parts: np.dtype(parts["of"])),
    "dense": (DenseNoise, lambda noise: {"weight": noise.weight, "gaussian": noise.gaussian},
              lambda parts: DenseNoise(**parts)),
    "hadamard": (HadamardNoise, lambda noise: {"signs": noise.signs, "lengths": noise.lengths, "d": noise.d},
                 lambda parts: HadamardNoise(**parts)),
    "map": (FeatureMap, map_parts, map_of),
    "features": (RandomFeatures, vars, features_of),
    "words": ((), dict, lambda parts: np.array(parts["of"], dtype=object if parts["objects"] else None)),
    "generator": (np.random.RandomState, lambda _: {}, lambda _: None),  # its state says nothing of a fit
    "sampler": (Callable, sampler_parts, sampler_of),
}

