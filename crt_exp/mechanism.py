"""`Mechanism`: an attention method with its feature map, sampler and options.

A name such as "favorpp" stands for a file of conf/attention, or of conf/features for a feature map alone. The library
and the command line share these names. Tasks, measurements, estimators, reports and swaps all take a `Mechanism`.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from inspect import isroutine
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import torch
from pydantic import Field
from torch import nn

from crt_exp.attention import Exact
from crt_exp.features.base import FeatureMap
from crt_exp.registry import (
    ATTENTION,
    CONF,
    FEATURES,
    SAMPLER,
    ConfigError,
    canonical,
    check_node,
    choices,
    construct,
    file_of,
    import_object,
    import_path,
    own_options,
    read_yaml,
    uses,
)
from crt_exp.samplers import Noise
from crt_exp.validation import (
    check,
    check_options,
    format_value,
    join_words,
    plain,
    split_words,
    unknown,
    whole_number,
)

Layers = Iterable[int] | int | Literal["supported"] | None
PARTS = {"features": FEATURES, "sampler": SAMPLER}
BASE = "base/random_features"  # file of conf/attention: the layer around a feature map that is named without attention


@dataclass(frozen=True)
class Component:
    """The features or the sampler of a mechanism: its name, and its yaml node or object.

    >>> Component("pos", {"_target_": "crt_exp.features.PosRF"}).value.kernel
    'softmax'
    """

    name: str
    content: Any

    @property
    def value(self) -> Any:
        """The feature map, or the function that samples."""
        if not isinstance(self.content, dict):
            return self.content
        target = import_object(self.content["_target_"])
        options = own_options(self.content)
        return target(**options) if isinstance(target, type) else partial(target, **options)

    @property
    def text(self) -> str:
        """The name, or the import path of an object's class."""
        if isinstance(self.content, dict):
            return self.name
        return import_path(definition_of(self.content))


@dataclass(frozen=True)
class Mechanism:
    """An attention method: its options, feature map, sampler and projections.

    Build one with `Mechanism.of`, `Mechanism.parse`, or, for the configuration of a run, `Mechanism.from_config`.
    Baselines have neither features nor sampler nor m.

    Attributes:
        name: the name in tables.
        options: the content of the attention's yaml file.
        parts: the feature map ("features") and the sampler of the random projections ("sampler"); empty for a baseline.
        m: number of projections; None if the method samples none.

    >>> mechanism = Mechanism.of("favorpp", m=16)
    >>> layer = mechanism.layer(heads=2, d=8, causal=True)
    >>> tuple(layer(*torch.randn(3, 1, 2, 10, 8)).shape)
    (1, 2, 10, 8)
    """

    name: str
    options: dict[str, Any] = field(hash=False)
    parts: dict[str, Component] = field(default_factory=dict, hash=False)
    m: int | None = None
    seed: int = 0

    @classmethod
    def parse(cls, text: str | type | FeatureMap, **arguments: Any) -> "Mechanism":
        """Parse a string such as "favorpp m=64 sampler=givens".

        The first word is a name, the others are options of `Mechanism.of`. `arguments` holds further options, such as
        seed=3. Raises ConfigError, naming the wrong word and the known ones.

        >>> Mechanism.parse("favorpp m=64 sampler=givens").m
        64
        """
        name = text
        options = {}
        if not isinstance(text, type | FeatureMap):
            name, options = split_words(text)
        arguments = {key: value for key, value in arguments.items() if value is not None}
        try:
            if twice := options.keys() & arguments.keys():
                raise ConfigError(
                    f"{min(twice)}: given twice, in the string and as an argument; remove one"
                )
            return cls.of(name, **options, **arguments)
        except ConfigError as error:
            prefix = f"attention {text!r}: " if options else ""
            raise ConfigError(f"{prefix}{error}") from None

    @classmethod
    def of(
        cls,
        name: str | type | FeatureMap | None = None,
        /,
        *,
        m: int | None = None,
        sampler: str | Callable | None = None,
        features: str | type | FeatureMap | None = None,
        seed: int = 0,
        **options: Any,
    ) -> "Mechanism":
        """Build the mechanism of conf/attention/<name>.yaml, with optional changes.

        Import paths are imported. Use this method only for names from the user, and `from_saved` for names from files.

        Args:
            name: a name of conf/attention, or of conf/features for a feature map alone. performer, favor+, favor++ and
                favor# are aliases of favorp, favorpp and favorsharp. A custom attention or feature-map class, or its
                import path such as "mine.ShiftedRF", takes the options of its constructor. None: use `features` alone.
            m: number of projections. Default: features.m of conf/config.yaml.
            sampler: a name of conf/sampler, a function, or its import path.
            features: a name of conf/features, an object, a class, or its import path.
            seed: the seed of the random projections.
            options: keys of the yaml file, such as redraw_every, and keys of its parts, as `**{"features.n": 16}`.

        Raises:
            ConfigError: a name, an option or a value is unknown, or the attention does not use an option.

        >>> str(Mechanism.of("favorpp", m=64, sampler="givens"))
        'favorpp m=64 sampler=givens'
        """
        name = from_import_path("attention", canonical("attention", name))
        if name not in choices("attention"):
            if FEATURES.is_one(name) or isinstance(name, FeatureMap) or name in choices("features"):
                if features is not None:
                    raise ConfigError(
                        f"features={format_value(features)}: not allowed with a feature map; remove it"
                    )
                features = name
                name = None
            elif isinstance(name, str) or (name is None and features is None):
                known = dict.fromkeys([*choices("attention"), *choices("features")])
                raise unknown("attention", str(name), known)
        preset = BASE if name is None else name
        node, named = read_preset(preset)
        what = import_path(preset)
        asked = {"features": features, "sampler": sampler, "m": m}
        absent = asked.keys() - uses(node)
        unused = []
        for key, value in (asked | options).items():
            if value is not None and key.partition(".")[0] in absent:
                unused.append(f"{key}={format_value(value)}")
        if unused:
            raise ConfigError(f"attention={what}: does not use {' '.join(unused)}; remove it")
        changes: dict[str, dict[str, Any]] = {"features": {}, "sampler": {}, "phi": {}, "": {}}
        for key, value in plain(options).items():
            part, _, option = key.rpartition(".")
            if part in changes:
                changes[part][option] = value
            else:
                changes[""][key] = value
        node = apply_changes(f"attention {what}", node, changes[""])
        if changes["phi"]:
            node["phi"] = apply_changes("phi", node.get("phi", {}), changes["phi"])
        node = resolve_references(node)
        check_node("attention", node, ATTENTION)
        parts = {}
        for group in [group for group in PARTS if group not in absent]:
            choice = asked[group] or named.get(group) or default_choice(group)
            parts[group] = find_component(group, choice, changes[group])
        if m is None:
            m = default_choice("m")
        m = None if "m" in absent else whole_number(m, "m")
        seed = whole_number(seed, "seed", None)
        return cls(parts["features"].name if name is None else what, node, parts, m, seed)

    @classmethod
    def from_config(
        cls, config: dict[str, Any], choice: Callable[[str], str | None]
    ) -> "Mechanism":
        """Build the mechanism of the checked configuration of a run, as plain values.

        `choice` maps a group to the name chosen for it. Without a choice of attention the mechanism is the feature map
        with its sampler.
        """
        node = config.get("attention")
        if node is None:
            node, _ = read_preset(BASE)
        used = uses(node)
        parts = {}
        for group in [group for group in PARTS if group in used]:
            content = {key: value for key, value in config[group].items() if key != "m"}
            parts[group] = Component(choice(group), content)
        m = config["features"]["m"] if "m" in used else None
        name = choice("attention") or choice("features")
        return cls(name, node, parts, m, config["seed"])

    # ---- parts

    @property
    def estimates(self) -> bool:
        """Whether the feature map estimates a kernel; baselines have none."""
        return "features" in self.parts and self.parts["features"].value.estimates

    @property
    def columns(self) -> int | None:
        """Columns of the feature map (M); None if the mechanism samples no projections.

        >>> Mechanism.of("favor", m=16).columns
        32
        """
        return None if self.m is None else self.map(own_kernel=True).width(self.m)

    @property
    def is_exact(self) -> bool:
        """Whether the mechanism is exact softmax attention."""
        return import_object(self.options["_target_"]) is Exact

    def with_projections(self, m: int) -> "Mechanism":
        """Return the mechanism with m projections; unchanged if it samples none."""
        return self if self.m is None else replace(self, m=whole_number(m, "m"))

    def map(self, kernel: str = "softmax", *, own_kernel: bool = False) -> FeatureMap:
        """Return the feature map of a kernel, "softmax" or "gaussian".

        own_kernel: whether a feature map with its own kernel, such as Matern, may take the place. Such a map serves
        kernel regression, and no attention. Raises ConfigError if the mechanism has no feature map, or one with its own
        kernel that may not.
        """
        if "phi" in self.options:
            return construct(self.options["phi"])
        if "features" not in self.parts:
            raise ConfigError(
                f"attention {self.name}: no feature map; use one with a feature map, such as favorpp"
            )
        phi = self.parts["features"].value
        if phi.own_kernel and not own_kernel:
            raise ConfigError(
                f"features={self.parts['features'].name}: has its own kernel; expected a softmax feature map"
            )
        if not phi.own_kernel and phi.kernel != kernel:
            phi = replace(phi, kernel=kernel)
        return phi.of_size(self.m) if phi.on_sequences else phi

    @property
    def sampler(self) -> Callable[..., Noise] | None:
        """The function that samples the random projections; None for a baseline."""
        return self.parts["sampler"].value if "sampler" in self.parts else None

    def noise(self, d: int, generator: torch.Generator, batch: tuple[int, ...] = ()) -> Noise:
        """Sample m projections of dimension d; a tuple for a map with several parts."""
        return self.map(own_kernel=True).noise(
            self.m, lambda part: self.sampler(part.m, d, generator, batch=batch)
        )

    # ---- layers, swaps and records

    def layer(self, heads: int, d: int, *, layer: int = 0, **sizes: Any) -> nn.Module:
        """Build one attention layer, a module called as (q, k, v, key_mask).

        Args:
            layer: index of the layer. The layer and the mechanism's seed determine the random projections.
            sizes: kv_heads, causal, cross and scaling.

        Raises:
            ConfigError: a custom class ignores a size. Such a layer could see future tokens or scale its logits
                wrongly.
        """
        node = dict(self.options)
        if "phi" in node or self.m is not None:
            sizes |= {"phi": self.map(), "sampler": self.sampler, "m": self.m or 1}
        if node.pop("phi", None):
            node.pop("kernel", None)  # an option of the map
        module = construct(node, heads=heads, d=d, seed=self.seed, layer=layer, **sizes)
        for key in ("kv_heads", "causal", "scaling"):
            size = sizes.get(key)
            if size is not None and getattr(module, key, size) != size:
                raise ConfigError(
                    f"{type(module).__name__}: ignores {key}={format_value(size)}; pass "
                    "**options on in __init__: super().__init__(heads, d, **options)"
                )
        module.mechanism = self.name
        return module

    def swap(
        self,
        model: nn.Module,
        layers: Layers = None,
        *,
        causal: bool | None = None,
        saved: bool = True,
    ) -> nn.Module:
        """Replace the attention of a model in place: see `swap_attention`."""
        from crt_exp.swap.swap import swap_layers

        return swap_layers(
            model, self.layer, self.name, layers, causal=causal, saved=saved, record=self.to_saved()
        )

    def describe(self) -> dict[str, Any]:
        """Return everything but the seed that decides the values, as plain values."""
        values = {"attention": own_options(self.options) or self.name, "m": self.m}
        values |= dict.fromkeys(PARTS)
        for group, part in self.parts.items():
            is_node = isinstance(part.content, dict)
            values[group] = part.content if is_node else repr(part.content)
        return values

    def to_saved(self) -> dict[str, Any]:
        """Return the JSON record that `Mechanism.from_saved` reads.

        "described" holds the values behind the names, so that a change of the configuration files is detected.
        """
        options = own_options(self.options)
        options.pop("phi", None)
        parts = self.parts.values()
        named = "." not in self.name and all(isinstance(part.content, dict) for part in parts)
        if named:
            options |= self._changes()
        return {
            "name": self.name if self.name in choices("attention") else None,
            "m": self.m,
            "seed": self.seed,
            **dict.fromkeys(PARTS),
            **{group: part.name for group, part in self.parts.items()},
            "rebuilds": named,
            "options": options,
            "described": json.loads(json.dumps(self.describe(), default=str)),
        }

    def _changes(self) -> dict[str, Any]:
        """Options of the parts that differ from their files, with keys as in `of`."""
        pairs = {}  # the options of each part, and those of its file or the defaults of its class
        for group, part in self.parts.items():
            options = {}
            defaults = {}
            if isinstance(part.content, dict):
                options = own_options(part.content)
                if part.name in choices(group):
                    defaults = read_yaml(file_of(group, part.name))
            elif is_dataclass(part.content):
                for entry in fields(part.content):
                    options[entry.name] = getattr(part.content, entry.name)
                    defaults[entry.name] = entry.default
            pairs[group] = (options, defaults)
        if "phi" in self.options and self.name in choices("attention"):
            preset, _ = read_preset(self.name)
            phi = resolve_references(self.options | {"phi": preset["phi"]})["phi"]
            pairs["phi"] = (self.options["phi"], phi)
        changes = {}
        for group, (options, defaults) in pairs.items():
            for key, value in options.items():
                if defaults.get(key) != value:
                    changes[f"{group}.{key}"] = value
        return changes

    @classmethod
    def from_saved(cls, saved: dict[str, Any], source: str) -> "Mechanism":
        """Rebuild a mechanism from its `to_saved` record, which may be untrusted.

        Only names of conf/ and plain values are built. "described" is compared and never built. `source` names the file
        in errors.

        Raises:
            ConfigError: the record holds anything else, sizes exceed the limits, or conf/ gives the names another
                meaning.
        """
        try:
            check_saved(saved)
            names = {"attention": saved["name"]} | {group: saved[group] for group in PARTS}
            for group, name in names.items():
                if name is not None and name not in choices(group):
                    raise ConfigError(
                        f"unknown {group} {name!r}; for a custom name pass names=FOLDER (Python: "
                        "own_names), the --config-dir of the run"
                    )
            name = names.pop("attention")
            mechanism = cls.of(name, m=saved["m"], seed=saved["seed"], **names, **saved["options"])
        except (ConfigError, TypeError, RecursionError) as error:
            raise ConfigError(f"{source}: attention cannot be restored: {error}") from None
        if mechanism.to_saved()["described"] != saved["described"]:
            raise ConfigError(
                f"{source}: attention {saved['name']} has other options in conf/ than in the saved run; "
                "restore that file or pass --config-dir"
            )
        return mechanism

    def __str__(self) -> str:
        """Return the string that `parse` turns into an equal mechanism.

        The string holds the name, m, and the options that differ from the yaml file. An object is written as its class
        with plain options. `parse` refuses objects that cannot be written so.
        """
        name = self.name
        preset = import_object(self.options["_target_"]) if "." in name else name
        parts = dict(self.parts)
        is_map = "features" in parts and name == parts["features"].name
        if is_map and name not in choices("attention"):
            preset = BASE  # a feature map alone
            name = parts.pop("features").text
        node, named = read_preset(preset)
        words = {} if self.m is None else {"m": self.m}
        for group, part in parts.items():
            if part.text != (named.get(group) or default_choice(group)):
                words[group] = part.text
        for key, value in own_options(self.options).items():
            if key != "phi" and node.get(key) != value:
                words[key] = value
        words |= self._changes()
        if self.seed:
            words["seed"] = self.seed
        return join_words(name, words)


def swap_attention(
    model: nn.Module,
    name: str | type | Mechanism,
    m: int | None = None,
    layers: Layers = None,
    sampler=None,
    redraw_every: int = 0,
    normalize_qk: bool = False,
    seed: int | None = None,
    *,
    causal: bool | None = None,
    saved: bool = True,
    **options,
) -> nn.Module:
    """Replace the attention of a pretrained model in place and return the model.

    The mask of each call decides whether the call is causal. Layers that are already swapped get the new attention;
    layers outside `layers` stay as they are. Attention dropout in training drops each key with its probability, for all
    queries of a head at once, because the attention matrix is not formed. `output_attentions=True` (in torch
    need_weights=True) forms the matrix. Causal layers with fitted features need `calibrate_attention` or training.
    Cross-attention gains from `calibrate_attention`, because its features are otherwise fitted to the keys alone.

    Args:
        name: a name of conf/attention, a string for `Mechanism.parse` such as "window block=32 first=16", a custom
            class, or a `Mechanism`.
        m: number of projections. Default: features.m of conf/config.yaml. Baselines have none.
        layers: indices of attention modules in the order of `describe_attention`; negative ones count from the end.
            "supported": all modules that can be swapped. Default: all modules except those with window attention.
        sampler: name of a sampler, or a function.
        redraw_every, normalize_qk: see `RandomFeatureAttention`.
        seed: seed of the random projections. Default: 0.
        causal: whether the layers start as causal. Default: as the model's class states.
        saved: load projections and statistics from the model's folder, if from_pretrained of transformers loaded the
            model from the folder of a saved swapped model. These projections take precedence over `seed`.
        options: further keys of the yaml file.

    Raises:
        ValueError: the model has no attention that can be swapped; a layer index is out of range; a layer has attention
            that linear attention cannot represent (position bias, softcap, sinks, window); or the saved projections
            have another m. A later call with a mask that is neither key padding nor causal raises ValueError too. The
            errors name the layer.

    Warns:
        UserWarning: without `layers`, attention of unknown kinds or with a window stays as it is.

    >>> from transformers import BertConfig, BertModel
    >>> sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> model = BertModel(BertConfig(vocab_size=50, **sizes))
    >>> type(swap_attention(model, "favorpp", m=8).encoder.layer[0].attention.self.swapped).__name__
    'RandomFeatureAttention'
    """
    if redraw_every:
        options["redraw_every"] = redraw_every
    if normalize_qk:
        options["normalize_qk"] = normalize_qk
    mechanism = name
    if not isinstance(name, Mechanism):
        mechanism = Mechanism.parse(name, m=m, sampler=sampler, seed=seed, **options)
    return mechanism.swap(model, layers, causal=causal, saved=saved)


# ---- configuration files


def read_preset(name: str | type) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the content of conf/attention/<name>.yaml and its default choices.

    The content includes that of the file it builds on. For a class the content is the options of its constructor, with
    "???" for those without a default.
    """
    if not isinstance(name, str):
        node = {"_target_": name}
        for key, option in ATTENTION.options(name).items():
            node[key] = "???" if option.required else plain(option.default)
        return node, {}
    node = read_yaml(file_of("attention", name))
    named = {}
    base = {}
    for entry in node.pop("defaults", []):
        if isinstance(entry, str):
            base |= read_preset(entry.split("@")[0])[0]
            continue
        for key, value in entry.items():
            named[key.removeprefix("override /").split("@")[0]] = value
    return base | node, named


def default_choice(group: str) -> Any:
    """Return the default features, sampler or m of conf/config.yaml."""
    config = read_yaml(CONF / "config.yaml")
    if group == "m":
        return config["features"]["m"]
    entries = [entry for entry in config["defaults"] if isinstance(entry, dict)]
    return next(entry[group] for entry in entries if group in entry)


def from_import_path(group: str, choice: Any) -> Any:
    """Import an object from a path such as "mine.ShiftedRF"; return others as is."""
    is_path = isinstance(choice, str) and "." in choice and choice not in choices(group)
    return import_object(choice) if is_path else choice


def find_component(group: str, choice: Any, changes: dict[str, Any]) -> Component:
    """Return the component of a name, an import path, a class or an object."""
    target = from_import_path(group, choice)
    if target is not choice and not PARTS[group].is_one(target):
        raise ConfigError(f"{group}={choice}: expected {PARTS[group].what}")
    if isinstance(target, str):
        if choice not in choices(group):
            error = unknown(group, choice, choices(group))
            if group == "features":
                error = features_of_attention(group, choice) or error
            raise error
        node = apply_changes(f"{group} {choice}", read_yaml(file_of(group, choice)), changes)
        check_node(group, node, PARTS[group])
        return Component(choice, node)
    if FEATURES.is_one(target):
        check_options(group, target, changes)
        target = target(**changes)
    elif changes:
        raise ConfigError(
            f"{group}.{next(iter(changes))}: an object takes no options; pass it to the constructor"
        )
    kind = FeatureMap if group == "features" else Callable
    if not isinstance(target, kind):
        raise ConfigError(
            f"{group}={format_value(target)}: expected a name of conf/{group} or an object"
        )
    return Component(definition_of(target).__name__, target)


def definition_of(value: Any) -> Any:
    """Return the value if it is a class or a function, else its class."""
    return value if isinstance(value, type) or isroutine(value) else type(value)


def features_of_attention(key: str, name: str) -> ConfigError | None:
    """Return the error for an attention where a feature map is expected; None for others."""
    attention = canonical("attention", name.lower())
    if attention not in choices("attention"):
        return None
    features = read_preset(attention)[1].get("features")
    advice = (
        f'use "{features}", its feature map' if features else 'use a feature map, such as "oprf"'
    )
    return ConfigError(f"{key}={name}: {attention} is an attention; {advice}")


def apply_changes(what: str, node: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return the node with changed options. Raises ConfigError for unknown options."""
    for key in changes:
        if key not in own_options(node):
            raise unknown(f"option of {what}", key, own_options(node))
    return node | changes


def resolve_references(node: dict[str, Any]) -> dict[str, Any]:
    """Return the node with each `${..key}` of its map replaced by its value."""
    if "phi" not in node:
        return node
    phi = dict(node["phi"])
    for key, value in phi.items():
        if str(value).startswith("${.."):
            phi[key] = node[value[4:-1]]
    return node | {"phi": phi}


# ---- a saved mechanism, possibly from an untrusted file

# limit of a size that memory is allocated for: projections, clusters, tokens of a block
MAX_SIZE = 2**16
MAX_PRODUCT = 2**26  # limit of the product of sizes that are multiplied
NOT_SIZES = ("exact_until", "redraw_every", "fit_steps", "seed")  # integers that allocate no memory


Word = Annotated[str, Field(max_length=100)]
Integer = Annotated[int, Field(gt=-(2**63), lt=2**63)]
Value = bool | Integer | float | Word | None
SavedValue = Value | Sequence[Value]


class SavedAttention(TypedDict):
    """The record of `Mechanism.to_saved`; "described" is compared and never built."""

    name: Word | None
    m: Annotated[int, Field(ge=1, le=MAX_SIZE)] | None
    seed: Integer
    features: Word | None
    sampler: Word | None
    options: dict[Word, SavedValue]
    described: dict
    rebuilds: NotRequired[bool]
    causal: NotRequired[bool | None]


def check_saved(saved: Any) -> None:
    """Raise ConfigError for a malformed record, or sizes too large for memory."""
    check("attention", saved, SavedAttention)
    of_map = [saved["m"] or 1]
    others = [1, 1]
    for key, value in saved["options"].items():
        if type(value) is int and key not in NOT_SIZES:
            factors = of_map if key.startswith("features.") else others
            factors.append(value)
    products = (math.prod(of_map), math.prod(sorted(others)[-2:]))
    if max(*of_map, *others) > MAX_SIZE or max(products) > MAX_PRODUCT:
        raise ConfigError(
            f"m={saved['m']}, options={format_value(str(saved['options']))}: too large; expected at "
            f"most {MAX_SIZE} each"
        )
