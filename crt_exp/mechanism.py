"""`Mechanism`: "favorpp, m = 256" as one object, between names and feature maps, samplers,
attention layers and swapped models.

A name is a file of conf/attention (or of conf/features, for a map alone), for the library as for the command line.
Nothing else builds these from configuration: tasks, studies, estimators, reports and swaps take a Mechanism.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from crt_exp.config import (CONF, ConfigError, canonical, construct, file_of, known, located, plain_number, read_conf,
                            unknown)
from crt_exp.features.base import FeatureMap
from crt_exp.samplers import Noise
from crt_exp.schema import ATTENTION, FEATURES, SAMPLER, check_node, is_map, shown, whole_number
from crt_exp.stored import check_saved

OF_MAP = "features."            # before an option of the map
Layers = Iterable[int] | int | Literal["supported"] | None
BASE = "base/random_features"  # within conf/attention: what a map alone gets around it where a layer is asked for

class Part(NamedTuple):
    """A choice of a group: its name, and its contents (with `_target_`) or the object itself."""

    name: str
    content: Any

    def described(self) -> Any:
        """Plain numbers and strings; of an object what it says of itself."""
        return self.content if isinstance(self.content, dict) else repr(self.content)


@dataclass(frozen=True)
class Mechanism:
    """Attention, the feature map in it, the sampler of its noise, and m projections;
    without map, sampler and m a baseline.

    Make one by `Mechanism.of` or, of a run's configuration, `Mechanism.composed`. name: what tables call it. options:
    contents of the attention's file. Two are equal where all that decides their values is.
    """

    name: str
    options: dict[str, Any]
    features: Part | None = None
    sampler_part: Part | None = None
    m: int | None = None
    seed: int = 0

    @classmethod
    def of(cls, name: str | None = None, *, m: int | None = None, sampler: str | Callable | None = None,
           features: str | FeatureMap | None = None, seed: int = 0, **options: Any) -> "Mechanism":
        """What `conf/attention/<name>.yaml` describes, with other choices for its parts.

        name: performer, favor+, favor++ and favor# are favorp, favorpp and favorsharp; None takes `features` alone.
        m: projections (default: features.m of conf/config.yaml). sampler, features: names of those groups or objects.
        options: keys of the file, such as redraw_every, and of that of its map, as `**{"features.n": 16}`. Raises
        ConfigError for unknown names, options and values, and for those that the attention does not use.
        """
        name = name and canonical("attention", name)
        if name is not None and name not in known("attention"):
            raise unknown("attention", name, known("attention"))
        node, named = read_preset(BASE if name is None else name)
        of_map = {key.removeprefix(OF_MAP): options.pop(key) for key in list(options) if key.startswith(OF_MAP)}
        _check_options(f"attention {name}", options, node)
        node = _resolved(node | {key: plain_number(value) for key, value in options.items()})
        check_node("attention", node, ATTENTION)
        if name is None and features is None:
            raise ConfigError("a mechanism needs a name of conf/attention, or features=...")
        chosen = {"features": features or of_map or None, "sampler": sampler, "m": m}
        _refuse_unused(name, uses(node), {key for key, value in chosen.items() if value is not None})
        parts = {group: _part(group, given or named.get(group) or default_choice(group), changes)
                 for group, given, changes in (("features", features, of_map), ("sampler", sampler, {}))}
        return cls._made(name, node, parts["features"], parts["sampler"], default_m() if m is None else m, seed)

    @classmethod
    def composed(cls, cfg: Any, chosen: Callable[[str], str | None]) -> "Mechanism":
        """Of the composed groups of a run, a DictConfig; `chosen` gives the name of a group's choice. Without a choice
        of attention the features and the sampler say it all."""
        from omegaconf import OmegaConf

        name = chosen("attention")
        node = read_preset(BASE)[0] if cfg.get("attention") is None else OmegaConf.to_container(cfg.attention)
        features = OmegaConf.to_container(cfg.features, resolve=True)
        m = features.pop("m")
        sampler_part = OmegaConf.to_container(cfg.sampler, resolve=True)
        features, sampler_part = Part(chosen("features"), features), Part(chosen("sampler"), sampler_part)
        return cls._made(name, _resolved(node), features, sampler_part, m, cfg.seed)

    @classmethod
    def _made(cls, name: str | None, options: dict[str, Any], features: Part | None, sampler_part: Part | None,
              m: Any, seed: Any) -> "Mechanism":
        """Without the parts that the attention does not use."""
        used = uses(options)
        features = features if "features" in used else None
        sampler_part, m = (sampler_part, _whole(m, "m", 1)) if "m" in used else (None, None)
        return cls(name or features.name, options, features, sampler_part, m, _whole(seed, "seed", None))

    # ---- what it is made of

    @property
    def kind(self) -> type:
        """The class of its layers."""
        return located("attention", self.options["_target_"])

    @property
    def estimates(self) -> bool:
        """Whether it has a feature map that estimates a kernel; baselines and generalised kernels do not."""
        if self.features is None:
            return False
        content = self.features.content      # a map as it is, of whatever kernel, or how to make one
        return (self.map() if isinstance(content, dict) else content).estimates

    def map(self, kernel: str = "softmax") -> FeatureMap:
        """The feature map of a kernel ("softmax" or "gaussian"). Raises ConfigError where there is none."""
        if "phi" in self.options:
            return construct(self.options["phi"])
        if self.features is None:
            raise ConfigError(f"attention {self.name} has no feature map: choose features=..., or a preset such as "
                              "favorpp")
        content = self.features.content
        if not isinstance(content, dict):
            return content if content.kernel == kernel else replace(content, kernel=kernel)
        return construct(content, kernel=kernel)

    @cached_property
    def sampler(self) -> Callable[..., Noise] | None:
        """The function that draws its noise; None where it has none."""
        if self.sampler_part is None:
            return None
        content = self.sampler_part.content
        return content if callable(content) else construct(content)

    def noise(self, d: int, generator: torch.Generator, batch: tuple[int, ...] = ()) -> Noise:
        """m rows for vectors of dimension d; for a map with parts a tuple, as the map takes it."""
        if self.sampler is None:
            raise ConfigError(f"attention {self.name} draws no noise")
        return self.map().noise(self.m, lambda part: self.sampler(part.m, d, generator, batch=batch))

    # ---- what it makes

    def layer(self, heads: int, d: int, *, layer: int = 0, **sizes: Any) -> nn.Module:
        """The attention of one layer, a module of (q, k, v, key_mask); sizes: kv_heads, causal, cross, scaling.

        layer: its number, from which and the seed its noise is drawn.
        """
        options = {key: value for key, value in self.options.items() if key not in ("phi", "kernel")}
        make = construct(options)
        if self.m is None and "phi" not in self.options:
            return make(heads, d, seed=self.seed, layer=layer, **sizes)
        m = 1 if self.m is None else self.m  # a map of its own that takes no projections
        return make(phi=self.map("softmax"), sampler=self.sampler, m=m, heads=heads, d=d, seed=self.seed, layer=layer,
                    **sizes)

    def swap(self, model: nn.Module, layers: Layers = None, *, causal: bool | None = None,
             saved: bool = True) -> nn.Module:
        """Puts it in place of a model's attention: see `swap_attention`."""
        from crt_exp.swap.swap import swap_layers

        return swap_layers(model, self.layer, self.name, layers, causal=causal, saved=saved, record=self.saved())

    def describe(self) -> dict[str, Any]:
        """Everything that decides its values but the seed, in plain numbers and strings:
        to compare with a saved model."""
        options = {key: value for key, value in self.options.items() if key not in ("_target_", "_partial_")}
        parts = {"features": self.features, "sampler": self.sampler_part}
        return {"attention": options or self.name, "m": self.m} | {
            group: None if part is None else part.described() for group, part in parts.items()}

    def saved(self) -> dict[str, Any]:
        """As JSON: the names that `Mechanism.of_saved` takes, and what they stand for."""
        options = {key: value for key, value in self.options.items() if key not in ("_target_", "_partial_", "phi")}
        options |= self._changes()
        objects = [part for part in (self.features, self.sampler_part) if part and not isinstance(part.content, dict)]
        return {"name": self.name if self.name in known("attention") else None, "m": self.m, "seed": self.seed,
                "features": self.features and self.features.name,
                "sampler": self.sampler_part and self.sampler_part.name,
                "rebuilds": not objects,
                "options": options, "described": json.loads(json.dumps(self.describe()))}

    def _changes(self) -> dict[str, Any]:
        """Options of the map that are not those of its file, as `of` takes them."""
        part = self.features
        if part is None or not isinstance(part.content, dict) or part.name not in known("features"):
            return {}
        written = _content("features", part.name)
        return {OF_MAP + key: value for key, value in part.content.items() if written.get(key) != value}

    @classmethod
    def of_saved(cls, saved: dict[str, Any], source: str) -> "Mechanism":
        """The reverse, for what lies in a file: its names, numbers and words are given to `of`, which takes those of
        conf/, and what they stood for is compared and never built. `source` says whose it is, for the error.

        Every saved attention is read here. Raises ConfigError for anything but names and plain values of known options,
        for sizes that there is no memory for, and where the names of conf/ stand for something else now.
        """
        try:
            check_saved(saved)
            mechanism = cls.of(saved["name"], **{key: saved[key] for key in ("m", "seed", "features", "sampler")},
                               **saved["options"])
        except (ConfigError, TypeError) as error:
            name = shown(saved.get("name") if isinstance(saved, dict) else saved)
            hint = "; a name of your own: names=FOLDER (in Python own_names), the --config-dir of that run" * any(
                isinstance(word, str) and word not in known(group) for group, word in _words(saved))
            raise ConfigError(f"{source}: its attention {name} is not one of this installation: {error}"
                              f"{hint}") from None
        if json.loads(json.dumps(mechanism.describe())) != saved["described"]:
            raise ConfigError(f"{source}: attention {saved['name']} is not what it was when that run was made")
        return mechanism

    def __str__(self) -> str:
        parts = (self.features or Part(self.name, None), self.sampler_part)
        names = " x ".join(part.name for part in parts if part is not None)
        return f"{names}, m = {self.m}" if self.m else f"{self.name} kernel"

    def __hash__(self) -> int:
        return hash((self.name, self.m, self.seed, str(self.describe())))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "sampler"}


def swap_attention(model: nn.Module, name: str | Mechanism, m: int | None = None,
                   layers: Layers = None, sampler=None, redraw_every: int = 0,
                   normalize_qk: bool = False, seed: int | None = None, *, causal: bool | None = None,
                   saved: bool = True, **options) -> nn.Module:
    """Puts attention `name` (a file of conf/attention) in place of the model's own, in place, and returns the model.

    m: projections (default: features.m of conf/config.yaml; baselines have none). layers: which attention modules,
    counted from 0 (negative: from the end) in the order of `describe_attention`; "supported": all that can be; default
    all, but for those that see a window only, in time linear in the length already, which stay as they are. sampler:
    another one, by name or itself. redraw_every, normalize_qk: see `RandomFeatureAttention`. seed: of the noise; None
    is 0, so that the same call gives the same noise. causal: whether layers begin as causal ones, by default what their
    class says; each call's mask decides. saved: a Hugging Face model loaded by from_pretrained from a folder that a
    swapped model was saved to gets its noise and statistics from there, whatever the seed. options: further keys of the
    file.

    Layers that are swapped already get the new attention; others stay as they are. Attention dropout, in training,
    loses keys: each with its probability for all queries of a head at once, since the matrix is never formed.
    `output_attentions=True` (and need_weights=True of torch) forms it. Causal layers whose features are fitted need
    `calibrate_attention` or training; cross-attention, which is fitted to its keys alone until then, gains by it: no
    query's features depend on another query.

    Raises ValueError where the model has no attention that can be swapped, for layers out of range, for attention that
    linear attention cannot represent (position biases, softcaps, sinks, windows that cut), for saved noise of another
    m; when called, for masks that are neither key padding nor causal. Each names the layer. Warns of attention of other
    kinds besides the layers that are swapped, unless `layers` chose: it stays as it is.
    """
    if isinstance(name, Mechanism):
        return name.swap(model, layers, causal=causal, saved=saved)
    options |= {key: value for key, value in (("redraw_every", redraw_every), ("normalize_qk", normalize_qk)) if value}
    mechanism = Mechanism.of(name, m=m, sampler=sampler, seed=0 if seed is None else seed, **options)
    return mechanism.swap(model, layers, causal=causal, saved=saved)


# ---- files and what they use

def read_preset(name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The contents of conf/attention/<name>.yaml on those that it builds on, and the choices of other
    groups that it makes."""
    node, named, below = read_conf(file_of("attention", name)), {}, {}
    for entry in node.pop("defaults", []):
        if isinstance(entry, str):
            below = below | read_preset(entry.split("@")[0])[0]
        else:
            named |= {key.removeprefix("override /").split("@")[0]: value for key, value in entry.items()}
    return below | node, named


def default_choice(group: str) -> str:
    """The choice of a group where none is made: that of the command line."""
    return next(entry[group] for entry in read_conf(CONF / "config.yaml")["defaults"]
                if isinstance(entry, dict) and group in entry)


def default_m() -> int:
    """The number of projections where none is given: that of the command line."""
    return read_conf(CONF / "config.yaml")["features"]["m"]


def uses(options: Any) -> frozenset[str]:
    """Which of features, sampler and m the attention of a file makes use of."""
    from crt_exp.attention.baselines import Baseline

    kind = located("attention", options["_target_"])
    if isinstance(kind, type) and issubclass(kind, Baseline) or options.get("far") == "cells":
        return frozenset()
    if "phi" not in options:
        return frozenset({"features", "sampler", "m"})
    return frozenset({"sampler", "m"} if options["phi"].get("projection", True) else ())


def _refuse_unused(name: str | None, used: frozenset[str], given: set[str]) -> None:
    if given - used:
        raise ConfigError(f"attention {name} does not use {' and '.join(sorted(given - used))}: leave "
                          f"{'it' if len(given - used) == 1 else 'them'} out")


def _part(group: str, choice: Any, changes: dict[str, Any]) -> Part | None:
    """A choice by its name, with other values for some of its keys, or an object."""
    if choice is None:
        return None
    if not isinstance(choice, str):
        if changes:
            raise ConfigError(f"{group}.{next(iter(changes))} is an option of a file of conf/{group}: build the object "
                              "with it")
        if not (is_map(type(choice)) if group == "features" else callable(choice)):
            raise ConfigError(f"{group} = {shown(choice)}: it takes a name of conf/{group} or the object itself")
        return Part(getattr(choice, "__name__", type(choice).__name__), choice)
    if choice not in known(group):
        raise unknown(group, choice, known(group))
    content = _content(group, choice)
    _check_options(f"{group} {choice}", changes, content)
    content |= {key: plain_number(value) for key, value in changes.items()}
    check_node(group, content, FEATURES if group == "features" else SAMPLER)
    return Part(choice, content)


def _words(saved: Any) -> list[tuple[str, Any]]:
    """What a saved attention names of each group."""
    keys = {"attention": "name", "features": "features", "sampler": "sampler"}
    return [(group, saved.get(key)) for group, key in keys.items()] if isinstance(saved, dict) else []


def _check_options(what: str, given: Iterable[str], content: Iterable[str]) -> None:
    """Raises ConfigError for a key that a file does not have, or that says which class it stands for."""
    known = [str(key) for key in content if not str(key).startswith("_")]
    for key in given:
        if key not in known:
            raise unknown(f"option of {what}", key, known)


def _content(group: str, name: str) -> dict[str, Any]:
    return read_conf(file_of(group, name))


def _resolved(node: dict[str, Any], above: dict[str, Any] | None = None) -> dict[str, Any]:
    """With the values that `${..key}` names, of the mapping above."""
    def value_of(value: Any) -> Any:
        if isinstance(value, dict):
            return _resolved(value, node)
        named = above is not None and isinstance(value, str) and value.startswith("${..") and value.endswith("}")
        return above[value[4:-1]] if named else value

    return {key: value_of(value) for key, value in node.items()}


def _whole(value: Any, name: str, least: int | None) -> int:
    try:
        return whole_number(value, name, least)
    except ValueError as error:
        raise ConfigError(str(error)) from None
