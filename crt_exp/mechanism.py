"""`Mechanism`: "favorpp m=256" as one object, between names and maps, samplers, attention layers and swapped models.

A name is a file of conf/attention (or of conf/features, for a map alone), for the library as for the command line.
Nothing else builds these from configuration: tasks, measurements, estimators, reports and swaps take a Mechanism.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, TypedDict

import torch
from pydantic import Field
from torch import nn

from crt_exp.attention import Exact
from crt_exp.config import (ATTENTION, CONF, FEATURES, SAMPLER, ConfigError, canonical, check_node, construct, file_of,
                            imported, is_known, is_map, known, own_options, place, read_yaml, uses)
from crt_exp.features.base import FeatureMap
from crt_exp.options import (check, check_options, format_value, join_words, plain, split_words, unknown,
                             whole_number)
from crt_exp.samplers import Noise

Layers = Iterable[int] | int | Literal["supported"] | None
PARTS = {"features": FEATURES, "sampler": SAMPLER}
BASE = "base/random_features"  # within conf/attention: the layer around a map that is given alone


class Choice(NamedTuple):
    """A choice of features or sampler: its name, and the content of its file (a node) or the object itself."""

    name: str
    content: Any

    def changes(self, group: str) -> dict[str, Any]:
        """Options that are not those of its file; of an object, fields of a dataclass that are not their defaults."""
        if isinstance(self.content, dict):
            written = read_yaml(file_of(group, self.name)) if is_known(group, self.name) else {}
            return {key: value for key, value in own_options(self.content).items() if written.get(key) != value}
        made_with = fields(self.content) if is_dataclass(self.content) else ()
        return {each.name: value for each in made_with if (value := getattr(self.content, each.name)) != each.default}

    def word(self) -> str:
        """The name, or the place of an object's class."""
        made_by = self.content if hasattr(self.content, "__qualname__") else type(self.content)
        return self.name if isinstance(self.content, dict) else place(made_by)


@dataclass(frozen=True)
class Mechanism:
    """Attention, its feature map, the sampler of its noise and m projections; without these three a baseline.

    Make one by `Mechanism.of`, `Mechanism.parse` or, of a run's configuration, `Mechanism.composed`. name: what tables
    call it. options: the content of the attention's file. Two are equal where all that decides their values is.
    """

    name: str
    options: dict[str, Any] = field(hash=False)
    features: Choice | None = field(default=None, hash=False)
    sampler_part: Choice | None = field(default=None, hash=False)
    m: int | None = None
    seed: int = 0

    @classmethod
    def parse(cls, text: str | type | FeatureMap, **given: Any) -> "Mechanism":
        """The mechanism of a line such as "favorpp m=64 sampler=givens": a name, then options as `of` takes them.

        given: options beside the text, such as seed=3. Raises ConfigError, naming the word that is wrong and what is
        known.
        """
        given = {key: value for key, value in given.items() if value is not None}
        name, options = (text, {}) if isinstance(text, type | FeatureMap) else split_words(text)
        try:
            if twice := options.keys() & given.keys():
                raise ConfigError(f"{min(twice)} is given beside it: leave one out")
            return cls.of(name, **options, **given)
        except ConfigError as error:
            raise ConfigError(f"attention {text!r}: {error}" if options else str(error)) from None

    @classmethod
    def of(cls, name: str | type | FeatureMap | None = None, /, *, m: int | None = None,
           sampler: str | Callable | None = None, features: str | type | FeatureMap | None = None, seed: int = 0,
           **options: Any) -> "Mechanism":
        """What `conf/attention/<name>.yaml` describes, with other choices for its parts.

        name: performer, favor+, favor++ and favor# are favorp, favorpp and favorsharp; a name of conf/features is the
        map alone; a class of one's own layers or maps, or its place, such as "mine.ShiftedRF", stands for a file with
        the options of its constructor; None takes `features` alone. m: projections (default: features.m of
        conf/config.yaml). sampler, features: names of those groups, objects, classes or places. options: keys of the
        file, such as redraw_every, and of those of its parts, as `**{"features.n": 16}`. Raises ConfigError for unknown
        names, options and values, and for those that the attention does not use.

        Places are imported: give names that a user typed, and those in files of other people to `of_saved`.
        """
        name = by_place("attention", canonical("attention", name))
        of_map = is_map(name) or isinstance(name, FeatureMap) or is_known("features", name)
        if of_map and not is_known("attention", name):
            if features is not None:
                raise ConfigError(f"features={format_value(features)}: expected none beside a feature map")
            name, features = None, name
        elif (name is None and features is None) or (isinstance(name, str) and not is_known("attention", name)):
            raise unknown("attention", str(name), dict.fromkeys([*known("attention"), *known("features")]))
        node, named = read_preset(BASE if name is None else name)
        what = BASE if name is None else place(name)
        changes: dict[str, dict[str, Any]] = {"features": {}, "sampler": {}, "phi": {}, "": {}}
        for key, value in plain(options).items():
            part, _, option = key.rpartition(".")
            changes.get(part, changes[""])[option if part in changes else key] = value
        given = {"features": features or changes["features"], "sampler": sampler or changes["sampler"], "m": m}
        if unused := [key for key, value in given.items() if value not in (None, {}) and key not in uses(node)]:
            raise ConfigError(f"attention {what} does not use {' and '.join(unused)}: leave it out")
        node = with_changes(f"attention {what}", node, changes[""])
        if changes["phi"]:
            node["phi"] = with_changes("phi", node.get("phi", {}), changes["phi"])
        check_node("attention", node := resolved(node), ATTENTION)
        parts = {group: chosen(group, choice or named.get(group) or default_choice(group), changes[group])
                 for group, choice in (("features", features), ("sampler", sampler)) if group in uses(node)}
        return cls._made(name and what, node, parts, default_choice("m") if m is None else m, seed)

    @classmethod
    def composed(cls, cfg: Any, choice: Callable[[str], str | None]) -> "Mechanism":
        """Of the composed groups of a run, a DictConfig; `choice` gives the name of a group's choice. Without a choice
        of attention the features and the sampler are all."""
        from omegaconf import OmegaConf

        node = read_preset(BASE)[0] if cfg.get("attention") is None else OmegaConf.to_container(cfg.attention)
        parts = {group: Choice(choice(group), OmegaConf.to_container(cfg[group], resolve=True)) for group in PARTS}
        parts["features"].content.pop("m")  # the mechanism's own
        return cls._made(choice("attention"), resolved(node), parts, cfg.features.m, cfg.seed)

    @classmethod
    def _made(cls, name: str | None, node: dict[str, Any], parts: dict[str, Choice], m: Any, seed: Any) -> "Mechanism":
        used = uses(node)
        features, sampler = (parts[group] if group in used else None for group in PARTS)
        m = whole_number(m, "m") if "m" in used else None
        return cls(name or features.name, node, features, sampler, m, whole_number(seed, "seed", None))

    # ---- what it is made of

    @property
    def kind(self) -> type:
        """The class of its layers."""
        return imported(self.options["_target_"])

    @property
    def estimates(self) -> bool:
        """Whether it has a feature map that estimates a kernel; baselines and generalised kernels do not."""
        content = self.features and self.features.content
        return content is not None and (self._map("softmax") if isinstance(content, dict) else content).estimates

    @property
    def own_kernel(self) -> bool:
        """Whether its map has a kernel of its own, such as Matern's: one of rows of tables, and none of attention."""
        content = self.features and self.features.content
        made_by = imported(content["_target_"]) if isinstance(content, dict) else content
        return getattr(made_by, "own_kernel", False)

    @property
    def draws(self) -> bool:
        """Whether it draws noise, m projections."""
        return self.m is not None

    @property
    def is_exact(self) -> bool:
        """Whether it is softmax attention itself, for which a model's own may stay."""
        return self.kind is Exact

    def projecting(self, m: int) -> "Mechanism":
        """The same with m projections, where it draws any."""
        return replace(self, m=whole_number(m, "m")) if self.draws else self

    def map(self, kernel: str = "softmax") -> FeatureMap:
        """The feature map of a kernel ("softmax" or "gaussian"). Raises ConfigError where there is none."""
        if self.own_kernel:
            raise ConfigError(f"features={self.features.name}: its own kernel serves task=uci, and no attention")
        return self._map(kernel)

    def kernel_map(self) -> FeatureMap:
        """The map of a kernel of rows: its own kernel, where it has one, and else the Gaussian one."""
        return self._map("gaussian")

    def _map(self, kernel: str) -> FeatureMap:
        if "phi" in self.options:
            return construct(self.options["phi"])
        if self.features is None:
            raise ConfigError(f"attention {self.name} has no feature map: choose one that has, such as favorpp")
        content = self.features.content
        if isinstance(content, dict):
            content = construct(content) if self.own_kernel else construct(content, kernel=kernel)
        elif not self.own_kernel and content.kernel != kernel:
            content = replace(content, kernel=kernel)
        return content.of_size(self.m) if content.on_sequences and self.m else content

    @property
    def sampler(self) -> Callable[..., Noise] | None:
        """The function that draws its noise; None where it has none."""
        content = self.sampler_part and self.sampler_part.content
        return partial(imported(content["_target_"]), **own_options(content)) if isinstance(content, dict) else content

    def noise(self, d: int, generator: torch.Generator, batch: tuple[int, ...] = ()) -> Noise:
        """m rows for vectors of dimension d; for a map with parts a tuple, as the map takes it."""
        return self._map("softmax").noise(self.m, lambda part: self.sampler(part.m, d, generator, batch=batch))

    # ---- what it makes

    def layer(self, heads: int, d: int, *, layer: int = 0, **sizes: Any) -> nn.Module:
        """The attention of one layer, a module of (q, k, v, key_mask); sizes: kv_heads, causal, cross, scaling.

        layer: its number, from which and the seed its noise is drawn. Raises ConfigError for a class whose constructor
        keeps a size to itself: the layer would see the future, or scale otherwise, without an error.
        """
        own_map = "phi" in self.options  # which may take no projections
        node = {key: value for key, value in self.options.items() if not (own_map and key in ("phi", "kernel"))}
        of_map = {"phi": self.map(), "sampler": self.sampler, "m": self.m or 1} if own_map or self.draws else {}
        made = construct(node, heads=heads, d=d, seed=self.seed, layer=layer, **of_map, **sizes)
        asked = {key: size for key in ("kv_heads", "causal", "scaling") if (size := sizes.get(key)) is not None}
        if other := [key for key, size in asked.items() if getattr(made, key, size) != size]:
            raise ConfigError(f"{type(made).__name__} was asked for {other[0]}={format_value(asked[other[0]])}: its "
                              "__init__ must hand **options on, super().__init__(heads, d, **options)")
        return made

    def swap(self, model: nn.Module, layers: Layers = None, *, causal: bool | None = None,
             saved: bool = True) -> nn.Module:
        """Puts it in place of a model's attention: see `swap_attention`."""
        from crt_exp.swap.swap import swap_layers

        return swap_layers(model, self.layer, self.name, layers, causal=causal, saved=saved, record=self.saved())

    def describe(self) -> dict[str, Any]:
        """All that decides its values but the seed, in plain numbers and strings, to compare with a saved model."""
        parts = {group: part and (part.content if isinstance(part.content, dict) else repr(part.content))
                 for group, part in (("features", self.features), ("sampler", self.sampler_part))}
        return {"attention": own_options(self.options) or self.name, "m": self.m} | parts

    def saved(self) -> dict[str, Any]:
        """As JSON: the names that `Mechanism.of_saved` takes, and what they stand for."""
        parts = [part for part in (self.features, self.sampler_part) if part]
        named = all(isinstance(part.content, dict) for part in parts) and "." not in self.name
        options = {key: value for key, value in own_options(self.options).items() if key != "phi"}
        return {"name": self.name if is_known("attention", self.name) else None, "m": self.m, "seed": self.seed,
                "features": self.features and self.features.name,
                "sampler": self.sampler_part and self.sampler_part.name, "rebuilds": named,
                "options": options | (self._changes() if named else {}),
                "described": json.loads(json.dumps(self.describe(), default=str))}

    def _changes(self) -> dict[str, Any]:
        """Options of its parts that are not those of their files, as `of` takes them."""
        parts = {"features": self.features, "sampler": self.sampler_part}
        changes = {group: part.changes(group) for group, part in parts.items() if part}
        if is_known("attention", self.name) and "phi" in self.options:
            phi = resolved(self.options | {"phi": read_preset(self.name)[0]["phi"]})["phi"]
            changes["phi"] = {key: value for key, value in self.options["phi"].items() if phi.get(key) != value}
        return {f"{group}.{key}": value for group, values in changes.items() for key, value in values.items()}

    @classmethod
    def of_saved(cls, saved: dict[str, Any], source: str) -> "Mechanism":
        """The reverse, for what lies in a file: names and plain values are given to `of`, which takes those of conf/,
        and what they stood for is compared and never built. `source` names the file, for the error.

        Every saved attention is read here. Raises ConfigError for anything but names and plain values of known options,
        for sizes that there is no memory for, and where the names of conf/ stand for something else now.
        """
        try:
            check_saved(saved)
            for group, key in (("attention", "name"), ("features", "features"), ("sampler", "sampler")):
                if saved[key] is not None and not is_known(group, saved[key]):
                    raise ConfigError(f"unknown {group} {saved[key]!r}; a name of your own: names=FOLDER (in Python "
                                      "own_names), the --config-dir of that run")
            mechanism = cls.of(saved["name"], **{key: saved[key] for key in ("m", "seed", "features", "sampler")},
                               **saved["options"])
        except (ConfigError, TypeError, RecursionError) as error:
            raise ConfigError(f"{source}: its attention is not one of this installation: {error}") from None
        if mechanism.saved()["described"] != saved["described"]:
            raise ConfigError(f"{source}: attention {saved['name']} is not what it was when that run was made")
        return mechanism

    def __str__(self) -> str:
        """The text that `parse` reads to an equal one: the name, m, and what else differs from the name's file. An
        object is written as its class with plain options; what cannot be written so, `parse` refuses."""
        alone = self.features is not None and self.name == self.features.name and not is_known("attention", self.name)
        node, named = read_preset(BASE if alone else self.kind if "." in self.name else self.name)
        words = {"m": self.m} if self.draws else {}
        for group, part in (("features", None if alone else self.features), ("sampler", self.sampler_part)):
            if part and part.word() != (named.get(group) or default_choice(group)):
                words[group] = part.word()
        words |= {key: value for key, value in own_options(self.options).items()
                  if key != "phi" and node.get(key, ...) != value}
        words |= self._changes() | ({"seed": self.seed} if self.seed else {})
        return join_words(self.features.word() if alone else self.name, words)


def swap_attention(model: nn.Module, name: str | type | Mechanism, m: int | None = None,
                   layers: Layers = None, sampler=None, redraw_every: int = 0,
                   normalize_qk: bool = False, seed: int | None = None, *, causal: bool | None = None,
                   saved: bool = True, **options) -> nn.Module:
    """Puts attention `name`, a file of conf/attention, what `Mechanism.parse` reads ("window block=32 first=16") or a
    class of one's own, in place of the model's own, in place, and returns the model.

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
    options |= {key: value for key, value in (("redraw_every", redraw_every), ("normalize_qk", normalize_qk)) if value}
    made = name if isinstance(name, Mechanism) else Mechanism.parse(name, m=m, sampler=sampler, seed=seed, **options)
    return made.swap(model, layers, causal=causal, saved=saved)


# ---- files and what they use


def read_preset(name: str | type) -> tuple[dict[str, Any], dict[str, str]]:
    """The content of conf/attention/<name>.yaml on that of the file it builds on, and its choices of other groups.

    A class has the options of its constructor with their defaults, and "???" for those without one.
    """
    if not isinstance(name, str):
        options = ATTENTION.options(name).items()
        return {"_target_": name} | {key: "???" if each.required else plain(each.default) for key, each in options}, {}
    node, named, below = read_yaml(file_of("attention", name)), {}, {}
    for entry in node.pop("defaults", []):
        if isinstance(entry, str):
            below |= read_preset(entry.split("@")[0])[0]
        else:
            named |= {key.removeprefix("override /").split("@")[0]: value for key, value in entry.items()}
    return below | node, named


def default_choice(group: str) -> Any:
    """The choice of features, sampler or m where none is made: that of the command line."""
    config = read_yaml(CONF / "config.yaml")
    entries = [entry for entry in config["defaults"] if isinstance(entry, dict)]
    return config["features"]["m"] if group == "m" else next(entry[group] for entry in entries if group in entry)


def by_place(group: str, choice: Any) -> Any:
    """The class or function at a place such as "mine.ShiftedRF"; other choices as they are."""
    return imported(choice) if isinstance(choice, str) and "." in choice and not is_known(group, choice) else choice


def chosen(group: str, choice: Any, changes: dict[str, Any]) -> Choice:
    """A choice by its name, with other values for some of its keys, by its place, or an object or class itself."""
    made = by_place(group, choice)
    if made is not choice and not PARTS[group].is_one(made):
        raise ConfigError(f"{group}={choice}: expected {PARTS[group].what}")
    if isinstance(made, str):
        if not is_known(group, choice):
            raise unknown(group, choice, known(group))
        node = with_changes(f"{group} {choice}", read_yaml(file_of(group, choice)), changes)
        check_node(group, node, PARTS[group])
        return Choice(choice, node)
    if is_map(made):
        check_options(group, made, changes)
        made, changes = made(**changes), {}
    if changes:
        raise ConfigError(f"{group}.{next(iter(changes))} is an option of a file: build the object with it")
    if not (isinstance(made, FeatureMap) if group == "features" else callable(made)):
        raise ConfigError(f"{group}={format_value(made)}: expected a name of conf/{group} or the object itself")
    return Choice(getattr(made, "__name__", type(made).__name__), made)


def with_changes(what: str, node: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """With other values for some of the keys of a file. Raises ConfigError for others."""
    for key in changes:
        if key not in own_options(node):
            raise unknown(f"option of {what}", key, own_options(node))
    return node | changes


def resolved(node: dict[str, Any]) -> dict[str, Any]:
    """With the values of the node that `${..key}` in its map means."""
    phi = {key: node[value[4:-1]] if str(value).startswith("${..") else value
           for key, value in node.get("phi", {}).items()}
    return node | {"phi": phi} if phi else node


# ---- a saved mechanism, whose file may come from anybody

SIZE = 2**16      # projections, cells, tokens of a block: sizes that memory is allocated for
TOGETHER = 2**26  # and the product of sizes that are multiplied
COUNTED = ("exact_until", "redraw_every", "fit_steps", "seed")  # integers that no memory is allocated for


Word = Annotated[str, Field(max_length=100)]
Integer = Annotated[int, Field(gt=-2**63, lt=2**63)]
Value = bool | Integer | float | Word | None
SavedValue = Value | Sequence[Value]


class SavedAttention(TypedDict):
    """What `Mechanism.saved` writes; `described` is compared and never built."""

    name: Word | None
    m: Annotated[int, Field(ge=1, le=SIZE)] | None
    seed: Integer
    features: Word | None
    sampler: Word | None
    options: dict[Word, SavedValue]
    described: dict
    rebuilds: NotRequired[bool]
    causal: NotRequired[bool | None]


def check_saved(saved: Any) -> None:
    """Raises ConfigError for what no `Mechanism.saved` gives, and for sizes that there is no memory for."""
    check("attention", saved, SavedAttention)
    sizes = {key: value for key, value in saved["options"].items() if type(value) is int and key not in COUNTED}
    of_map = [value for key, value in sizes.items() if key.startswith("features.")] + [saved["m"] or 1]
    largest = sorted(value for key, value in sizes.items() if not key.startswith("features."))[-2:]
    if max(sizes.values(), default=0) > SIZE or max(math.prod(of_map), math.prod(largest)) > TOGETHER:
        raise ConfigError(f"m={saved['m']}, {format_value([*sizes.items()])}: too large for a layer")
