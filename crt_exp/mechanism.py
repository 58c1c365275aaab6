"""`Mechanism`: "favorpp m=256" as one object, between names and feature maps, samplers, attention layers and swapped
models.

A name is a file of conf/attention (or of conf/features, for a map alone), for the library as for the command line.
Nothing else builds these from configuration: tasks, probes, estimators, reports and swaps take a Mechanism.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn

from crt_exp import mechanism_text
from crt_exp.config import (ConfigError, canonical, construct, imported, is_known, known, located, place,
                            plain_number, unknown)
from crt_exp.features.base import FeatureMap
from crt_exp.hints import shown, whole_number
from crt_exp.presets import (BASE, GROUPS, GroupChoice, apart, by_place, check_given, check_options, default_choice,
                             default_m, node_of, part_of, read_preset, resolved, still_known, uses, with_phi)
from crt_exp.removed import removed
from crt_exp.samplers import Noise
from crt_exp.schema import ATTENTION, check_kind, check_node, is_map
from crt_exp.stored import check_saved

Layers = Iterable[int] | int | Literal["supported"] | None

@dataclass(frozen=True)
class Mechanism:
    """Attention, the feature map in it, the sampler of its noise, and m projections;
    without map, sampler and m a baseline.

    Make one by `Mechanism.of` or, of a run's configuration, `Mechanism.composed`. name: what tables call it. options:
    contents of the attention's file. Two are equal where all that decides their values is.
    """

    name: str
    options: dict[str, Any]
    features: GroupChoice | None = None
    sampler_part: GroupChoice | None = None
    m: int | None = None
    seed: int = 0

    @classmethod
    def parse(cls, text: str | type | FeatureMap, **given: Any) -> "Mechanism":
        """What a line such as "favorpp m=64 sampler=givens" says: a name, then options as `of` takes them.

        The name is a file of conf/attention, one of conf/features (the map alone), or a class by its place, such as
        "mine.ShiftedRF"; features= and sampler= take such places too, which are imported, so read what a user typed
        and never a file of somebody's: see `of_saved`. Values are read as YAML reads scalars and lists in brackets.
        given: options beside the text, such as seed=3. A class stands for its place. Raises ConfigError, naming the
        word that is wrong and what is known.
        """
        given = {key: value for key, value in given.items() if value is not None}
        if is_object(text):
            return cls._read(text, given)
        name, options = mechanism_text.read(text)
        if twice := sorted(options.keys() & given.keys()):
            raise ConfigError(f"attention {text!r}: {twice[0]} = {shown(given[twice[0]])} is given beside it: "
                              "leave one out")
        try:
            return cls._read(name, options | given)
        except ConfigError as error:
            raise ConfigError(f"attention {text!r}: {error}" if options else str(error)) from None

    @classmethod
    def _read(cls, name: str | type | FeatureMap, options: dict[str, Any]) -> "Mechanism":
        options = dict(options)
        choices = {"seed": options.pop("seed", 0), "m": options.pop("m", None)}
        choices |= {group: by_place(group, options.pop(group, None), options) for group in GROUPS}
        name = name if is_object(name) else canonical("attention", name)
        if isinstance(name, str) and is_known("attention", name):
            return cls._chosen(name, *read_preset(name), options, **choices)
        kind = imported(name) if isinstance(name, str) and "." in name else name
        if not isinstance(kind, str) and not is_map(kind) and not is_map(type(kind)):
            check_kind("attention", kind, name, ATTENTION)
            node = node_of(kind if isinstance(kind, type) else name, ATTENTION)
            return cls._chosen(place(name), node, {}, options, **choices)
        return cls._alone(name, options, choices)

    @classmethod
    def _alone(cls, name: str | type | FeatureMap, options: dict[str, Any], choices: dict[str, Any]) -> "Mechanism":
        """Of a feature map."""
        alone = by_place("features", name, options)
        if isinstance(alone, str) and not is_known("features", alone):
            raise unknown("attention", name, list(dict.fromkeys([*known("attention"), *known("features")])))
        if choices["features"] is not None:
            raise ConfigError(f"{shown(name)} is a feature map itself: leave features= out")
        return cls._chosen(None, *read_preset(BASE), options, **choices | {"features": alone})

    @classmethod
    def of(cls, name: str | type | FeatureMap | None = None, *, m: int | None = None,
           sampler: str | Callable | None = None, features: str | type | FeatureMap | None = None, seed: int = 0,
           **options: Any) -> "Mechanism":
        """What `conf/attention/<name>.yaml` describes, with other choices for its parts.

        name: performer, favor+, favor++ and favor# are favorp, favorpp and favorsharp; a class of one's own layers or
        maps stands for a file with the options of its constructor; None takes `features` alone. m: projections
        (default: features.m of conf/config.yaml). sampler, features: names of those groups, objects or classes.
        options: keys of the file, such as redraw_every, and of those of its parts, as `**{"features.n": 16}`. Raises
        ConfigError for unknown names, options and values, and for those that the attention does not use.
        """
        if is_object(name):
            return cls._read(name, options | {"m": m, "sampler": sampler, "features": features, "seed": seed})
        name = name and canonical("attention", name)
        if name is not None and not is_known("attention", name):
            raise unknown("attention", name, known("attention"))
        features = by_place("features", features, options) if is_object(features) else features
        return cls._chosen(name, *read_preset(BASE if name is None else name), options, m=m, sampler=sampler,
                           features=features, seed=seed)

    @classmethod
    def _chosen(cls, name: str | None, node: dict[str, Any], named: dict[str, str], options: dict[str, Any], *,
                m: int | None, sampler: Any, features: Any, seed: int) -> "Mechanism":
        """Of the contents of a file and the choices that it names, with these options and choices in place of them."""
        changes, options = apart({key: plain_number(value) for key, value in options.items()})
        try:
            node = _with_options(name, node, options, changes["phi"])
        except ConfigError as error:
            of_near_far = options.items() if name == "nearfar" else ()
            raise removed(f"attention.{key}={value}" for key, value in of_near_far) or error from None
        if name is None and features is None:
            raise ConfigError("a mechanism needs a name of conf/attention, or features=...")
        given = {"features": features or changes["features"] or None, "sampler": sampler or changes["sampler"] or None,
                 "m": m}
        _refuse_unused(name, uses(node), {key for key, value in given.items() if value is not None})
        parts = {group: part_of(group, choice or named.get(group) or default_choice(group), changes[group])
                 for group, choice in (("features", features), ("sampler", sampler))}
        return cls._made(name, node, parts["features"], parts["sampler"], default_m() if m is None else m, seed)

    @classmethod
    def composed(cls, cfg: Any, chosen: Callable[[str], str | None]) -> "Mechanism":
        """Of the composed groups of a run, a DictConfig; `chosen` gives the name of a group's choice. Without a choice
        of attention the features and the sampler say it all."""
        from omegaconf import OmegaConf

        name = chosen("attention")
        node = read_preset(BASE)[0] if cfg.get("attention") is None else OmegaConf.to_container(cfg.attention)
        parts = {group: GroupChoice(chosen(group), {key: value for key, value in OmegaConf.to_container(
            cfg[group], resolve=True).items() if key != "m"}) for group in GROUPS}  # m is the mechanism's own
        return cls._made(name, resolved(node), parts["features"], parts["sampler"], cfg.features.m, cfg.seed)

    @classmethod
    def _made(cls, name: str | None, options: dict[str, Any], features: GroupChoice | None,
              sampler_part: GroupChoice | None, m: Any, seed: Any) -> "Mechanism":
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
        return (self._map("softmax") if isinstance(content, dict) else content).estimates

    @property
    def own_kernel(self) -> bool:
        """Whether its map has a kernel of its own, such as Matern's: one of rows of tables, and none of attention."""
        content = self.features and self.features.content
        made_by = located("features", content["_target_"]) if isinstance(content, dict) else content
        return getattr(made_by, "own_kernel", False)

    @property
    def draws(self) -> bool:
        """Whether it draws noise, m projections."""
        return self.m is not None

    @property
    def is_exact(self) -> bool:
        """Whether it is softmax attention itself, for which a model's own may stay."""
        from crt_exp.attention import Exact

        return self.kind is Exact

    def projecting(self, m: int) -> "Mechanism":
        """The same with m projections, where it draws any."""
        return replace(self, m=_whole(m, "m", 1)) if self.draws else self

    def map(self, kernel: str = "softmax") -> FeatureMap:
        """The feature map of a kernel ("softmax" or "gaussian"). Raises ConfigError where there is none."""
        if self.own_kernel:
            raise ConfigError(f"features={self.features.name} has a kernel of its own, which is not {kernel}: it "
                              "serves kernel machines (task=uci), and no attention")
        return self._map(kernel)

    def kernel_map(self) -> FeatureMap:
        """That of a kernel of rows: of its own, where it has one, and else of the Gaussian kernel."""
        return self._map("gaussian")

    def _map(self, kernel: str) -> FeatureMap:
        if "phi" in self.options:
            return construct(self.options["phi"])
        if self.features is None:
            raise ConfigError(f"attention {self.name} has no feature map: choose features=..., or a preset such as "
                              "favorpp")
        content = self.features.content
        if not isinstance(content, dict):
            return content if self.own_kernel or content.kernel == kernel else replace(content, kernel=kernel)
        return construct(content) if self.own_kernel else construct(content, kernel=kernel)

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
        return self._map("softmax").noise(self.m, lambda part: self.sampler(part.m, d, generator, batch=batch))

    # ---- what it makes

    def layer(self, heads: int, d: int, *, layer: int = 0, **sizes: Any) -> nn.Module:
        """The attention of one layer, a module of (q, k, v, key_mask); sizes: kv_heads, causal, cross, scaling.

        layer: its number, from which and the seed its noise is drawn.
        """
        of_phi = ("phi", "kernel") if "phi" in self.options else ()
        options = {key: value for key, value in self.options.items() if key not in of_phi}
        make = construct(options)
        if self.m is None and "phi" not in self.options:
            return _as_asked(make(heads, d, seed=self.seed, layer=layer, **sizes), sizes)
        m = 1 if self.m is None else self.m  # a map of its own that takes no projections
        return _as_asked(make(phi=self.map("softmax"), sampler=self.sampler, m=m, heads=heads, d=d, seed=self.seed,
                              layer=layer, **sizes), sizes)

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
        parts = [part for part in (self.features, self.sampler_part) if part]
        named = all(isinstance(part.content, dict) for part in parts) and "." not in self.name
        options |= self._changes() if named else {}
        return {"name": self.name if is_known("attention", self.name) else None, "m": self.m, "seed": self.seed,
                "features": self.features and self.features.name,
                "sampler": self.sampler_part and self.sampler_part.name,
                "rebuilds": named, "options": options, "described": json.loads(json.dumps(self.describe()))}

    def _changes(self) -> dict[str, Any]:
        """Options of its parts that are not those of their files, as `of` takes them."""
        changes = {"features": self.features.changes("features") if self.features else {},
                   "sampler": self.sampler_part.changes("sampler") if self.sampler_part else {}}
        if is_known("attention", self.name) and "phi" in self.options:
            node = read_preset(self.name)[0]
            phi = resolved(node | {key: self.options[key] for key in node if key != "phi"})["phi"]
            changes["phi"] = {key: value for key, value in self.options["phi"].items() if phi.get(key) != value}
        return {f"{group}.{key}": value for group, values in changes.items() for key, value in values.items()}

    @classmethod
    def of_saved(cls, saved: dict[str, Any], source: str) -> "Mechanism":
        """The reverse, for what lies in a file: its names, numbers and words are given to `of`, which takes those of
        conf/, and what they stood for is compared and never built. `source` says whose it is, for the error.

        Every saved attention is read here. Raises ConfigError for anything but names and plain values of known options,
        for sizes that there is no memory for, and where the names of conf/ stand for something else now.
        """
        try:
            check_saved(saved)
            saved = still_known(saved)
            mechanism = cls.of(saved["name"], **{key: saved[key] for key in ("m", "seed", "features", "sampler")},
                               **saved["options"])
        except (ConfigError, TypeError) as error:
            name = shown(saved.get("name") if isinstance(saved, dict) else saved)
            hint = "; a name of your own: names=FOLDER (in Python own_names), the --config-dir of that run" * any(
                isinstance(word, str) and not is_known(group, word) for group, word in _words(saved))
            raise ConfigError(f"{source}: its attention {name} is not one of this installation: {error}"
                              f"{hint}") from None
        if json.loads(json.dumps(mechanism.describe())) != saved["described"]:
            raise ConfigError(f"{source}: attention {saved['name']} is not what it was when that run was made")
        return mechanism

    def __str__(self) -> str:
        """The text that `parse` reads to an equal one: the name, m, and what else differs from the name's file. An
        object is written as its class with plain options; what cannot be written so, `parse` refuses."""
        listed = is_known("attention", self.name)
        alone = self.features is not None and self.name == self.features.name and not listed
        file = BASE if alone else self.name if listed else None
        by_place = {} if listed or "." not in self.name else node_of(self.kind, ATTENTION)
        node, named = read_preset(file) if file else (by_place, {})
        words = {"m": self.m, "features": None if alone else self._named(self.features, "features", named),
                 "sampler": self._named(self.sampler_part, "sampler", named)}
        words |= {key: value for key, value in self.options.items()
                  if key not in ("_target_", "_partial_", "phi") and node.get(key, ...) != value}
        words |= self._changes() | {"seed": self.seed or None}
        return mechanism_text.write(self.features.word() if alone else self.name,
                                    {key: value for key, value in words.items() if value is not None or key in node})

    @staticmethod
    def _named(part: GroupChoice | None, group: str, named: dict[str, str]) -> str | None:
        """A choice where it is not the one that the attention makes, whose choices are `named`."""
        word = part and part.word()
        return None if word == (named.get(group) or default_choice(group)) else word

    def __hash__(self) -> int:
        return hash((self.name, self.m, self.seed, str(self.describe())))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "sampler"}


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
    if isinstance(name, Mechanism):
        return name.swap(model, layers, causal=causal, saved=saved)
    options |= {key: value for key, value in (("redraw_every", redraw_every), ("normalize_qk", normalize_qk)) if value}
    mechanism = Mechanism.parse(name, m=m, sampler=sampler, seed=seed, **options)
    return mechanism.swap(model, layers, causal=causal, saved=saved)


# ---- files and what they use

def _refuse_unused(name: str | None, used: frozenset[str], given: set[str]) -> None:
    if given - used:
        raise ConfigError(f"attention {name} does not use {' and '.join(sorted(given - used))}: leave "
                          f"{'it' if len(given - used) == 1 else 'them'} out")


def is_object(name: Any) -> bool:
    """Whether it is a class or a map, and no name."""
    return isinstance(name, type) or is_map(type(name))


def _as_asked(made: nn.Module, sizes: dict[str, Any]) -> nn.Module:
    """Raises ConfigError for a layer whose constructor kept to itself what it was given: it would see the future, or
    scale otherwise, and nothing would say so."""
    for key in ("kv_heads", "causal", "scaling"):
        asked = sizes.get(key)
        if asked is not None and getattr(made, key, asked) != asked:
            raise ConfigError(f"{type(made).__name__} was asked for {key} = {shown(asked)} and has "
                              f"{shown(getattr(made, key))}: its __init__ must hand **options on, "
                              "super().__init__(heads, d, **options)")
    return made


def _with_options(name: str | None, node: dict[str, Any], options: dict[str, Any],
                  of_phi: dict[str, Any]) -> dict[str, Any]:
    """The contents of an attention's file with these options in place of its own. Raises ConfigError."""
    check_options(f"attention {name or BASE}", options, [*node, *sorted(uses(node))])
    node = with_phi(resolved(node | options), of_phi)
    check_given("attention", node)
    check_node("attention", node, ATTENTION)
    return node


def _words(saved: Any) -> list[tuple[str, Any]]:
    """What a saved attention names of each group."""
    keys = {"attention": "name", "features": "features", "sampler": "sampler"}
    return [(group, saved.get(key)) for group, key in keys.items()] if isinstance(saved, dict) else []


def _whole(value: Any, name: str, least: int | None) -> int:
    try:
        return whole_number(value, name, least)
    except ValueError as error:
        raise ConfigError(str(error)) from None
