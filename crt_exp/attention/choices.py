"""From a name of `conf/attention` to the attention modules of a model's layers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf
from torch import nn

from crt_exp.config import CONF, ConfigError, choices, instantiate, unknown
from crt_exp.samplers.draws import whole

DEFAULT_M = 256
WITHOUT_FEATURES = ("exact", "identity", "linformer")
LayerMaker = Callable[..., nn.Module]  # (heads, d, *, kv_heads, causal, cross, scaling, layer) -> module of (q, k, v, key_mask)


@dataclass(frozen=True)
class Attention:
    """The attention of a run: call it with the sizes of a layer (see LayerMaker), or `swap` it into a model that has its own.

    features, sampler: contents of a file of these groups; options: keys of conf/attention/<name>.yaml.
    """

    name: str
    m: int | None = None
    features: dict[str, Any] | None = None
    sampler: dict[str, Any] | None = None
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, heads: int, d: int, **sizes: Any) -> nn.Module:
        return self.maker()(heads, d, **sizes)

    def maker(self) -> LayerMaker:
        return layer_maker(self.name, m=self.m, seed=self.seed, **self._parts())

    def swap(self, model: nn.Module, saved: bool = True) -> nn.Module:
        """In place; `exact` leaves the model as it is. saved: noise that lies beside the model's weights is taken over."""
        from crt_exp.swap.swap import swap_attention

        if self.name == "exact":
            return model
        return swap_attention(model, self.name, m=self.m, seed=self.seed, saved=saved, **self._parts())

    def _parts(self) -> dict[str, Any]:
        groups = {"features": self.features, "sampler": self.sampler}
        return {k: OmegaConf.create(v) for k, v in groups.items() if v is not None} | self.options

    def described(self) -> dict[str, Any]:
        """Everything that decides its values but the seed, in plain numbers and strings: to compare with a saved model."""
        return {"attention": self.options or self.name, "m": self.m, "features": self.features, "sampler": self.sampler}


def layer_maker(name: str, *, m: int | None = None, sampler: str | Callable | None = None, features: str | None = None,
                seed: int = 0, **options: Any) -> LayerMaker:
    """What `conf/attention/<name>.yaml` describes: call it with the sizes of a layer.

    m: projections (default 256); sampler, features: other choices of those groups; options: keys of the file, such as
    redraw_every. Raises ConfigError for an unknown name or option, and where m is given to an attention without features.
    """
    if name not in choices("attention"):
        raise unknown("attention", name, choices("attention"))
    node = OmegaConf.load(CONF / "attention" / f"{name}.yaml")
    named = _overrides(node)
    for key in options:
        if key not in node:
            raise unknown(f"option of attention {name}", key, [str(k) for k in node if not str(k).startswith("_")])
    node = OmegaConf.merge(node, {key: v.item() if isinstance(v, np.generic) else v for key, v in options.items()})
    groups = {"features": features or named.get("features"), "sampler": sampler or named.get("sampler")}
    return maker_of(name, node, _group("features", groups["features"]), _group("sampler", groups["sampler"]), m, seed)


def attention_of(name: str | None, node: DictConfig | None, features: DictConfig, sampler: DictConfig, seed: int) -> Attention:
    """From the composed groups of a run; without a choice of attention the features and the sampler say it all."""
    if name in WITHOUT_FEATURES:
        return Attention(name, seed=seed, options=_options(node))
    node = OmegaConf.load(CONF / "attention" / "favorpp.yaml") if name is None else node
    options, features = _options(node), OmegaConf.to_container(features, resolve=True)
    m = features.pop("m")
    if "phi" in options:  # takes the place of the features
        features = None
    return Attention(name or "favorpp", m, features, OmegaConf.to_container(sampler, resolve=True), seed, options)


def _options(node: DictConfig) -> dict[str, Any]:
    return {k: v for k, v in OmegaConf.to_container(_resolved(node)).items() if k not in ("defaults", "_target_", "_partial_")}


def maker_of(name: str, node: DictConfig, features: Any, sampler: Any, m: int | None, seed: int) -> LayerMaker:
    """The same from composed parts: `node` of the attention group, configurations of features and sampler (or a sampler)."""
    options = {k: v for k, v in OmegaConf.to_container(_resolved(node)).items() if k not in ("defaults", "kernel")}
    partial = instantiate(options)
    if name in WITHOUT_FEATURES:
        if m is not None:
            raise ConfigError(f"attention {name} has no random features: leave m out")
        return lambda heads, d, *, kv_heads=None, layer=0, cross=False, **sizes: partial(heads, d, **sizes)
    count, seed = _whole(DEFAULT_M if m is None else m, "m", 1), _whole(seed, "seed", None)
    phi = partial.keywords.pop("phi", None) or instantiate(_without_m(features), kernel="softmax")
    draw = sampler if callable(sampler) else instantiate(sampler)
    return lambda heads, d, **sizes: partial(phi, draw, count, heads, d, seed=seed, **sizes)


def _whole(value: Any, name: str, least: int | None) -> int:
    try:
        return whole(value, name, least)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _resolved(node: DictConfig) -> DictConfig:
    node = OmegaConf.create(OmegaConf.to_container(node))
    OmegaConf.resolve(node)
    return node


def _overrides(node: DictConfig) -> dict[str, str]:
    """The choices of other groups that the file's defaults list makes."""
    found = {}
    for entry in node.get("defaults", []):
        for key, value in entry.items():
            found[key.removeprefix("override /").split("@")[0]] = value
    return found


def _group(group: str, choice: Any) -> Any:
    if choice is None or not isinstance(choice, str):
        return choice
    if choice not in choices(group):
        raise unknown(group, choice, choices(group))
    return OmegaConf.load(CONF / group / f"{choice}.yaml")


def _without_m(features: Any) -> dict:
    return {k: v for k, v in OmegaConf.to_container(features).items() if k != "m"}
