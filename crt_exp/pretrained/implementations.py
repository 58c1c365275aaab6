"""Names of conf/attention as `attn_implementation` of transformers, and a word where a saved swap would be lost.

A name by itself is no attention: a layer needs its noise, sizes and statistics. So `from_pretrained`, `from_config` and
`set_attn_implementation` make the model with its own attention and then call `swap_attention`: the layers are there
before an optimiser or DDP sees the model. A model that is built in another way with such a name refuses its first call.
"""

from functools import wraps
from types import ModuleType
from typing import Any

from torch import nn

from crt_exp.config import CONF
from crt_exp.swap import record
from crt_exp.swap.weights import note_choice

NAMES = frozenset(path.stem for path in (CONF / "attention").glob("*.yaml"))


def install(models: ModuleType) -> None:
    """Registers the names and wraps four methods of transformers' PreTrainedModel; once."""
    kind = models.PreTrainedModel
    if "crt_exp_installed" in vars(kind):
        return
    kind.crt_exp_installed = True
    register(models)
    kind.from_pretrained = classmethod(_loading(kind.from_pretrained.__func__))
    kind._from_config = classmethod(_building(kind._from_config.__func__))
    kind.set_attn_implementation = _setting(kind.set_attn_implementation)
    kind.save_pretrained = _saving(kind.save_pretrained)


def register(models: ModuleType) -> None:
    from transformers.masking_utils import AttentionMaskInterface

    from crt_exp.swap import families

    families.register()             # what swapped models call: one that is unpickled was swapped elsewhere
    for name in NAMES:
        models.AttentionInterface.register(name, _unmade)
        AttentionMaskInterface.register(name, families.interface_mask)


def _unmade(module: nn.Module, *args, **kwargs):
    """Stands in transformers' table for a name, which a swapped layer never calls."""
    name = module.config._attn_implementation
    raise ValueError(f"attn_implementation={name!r}: this {type(module).__name__} has no layer of that attention, "
                     "which holds noise and sizes: load the model by from_pretrained(..., "
                     f"attn_implementation={name!r}), or call crt_exp.swap_attention(model, {name!r})")


def _loading(function):
    @wraps(function)
    def from_pretrained(cls, source, *args, **options):
        if record.is_by_hand():
            with record.ignoring_buffers(cls):
                loaded = function(cls, source, *args, **options)
            note_choice(loaded[0] if isinstance(loaded, tuple) else loaded, options)
            return loaded
        asked = options.get("attn_implementation")
        _refuse_parts(asked)
        named = asked in NAMES
        with record.by_hand(), record.ignoring_buffers(cls, named):
            loaded = function(cls, source, *args, **options)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        note_choice(model, options)
        if not _applied(model, source, options):
            record.warn_of_loss(model, source)
        return loaded
    return from_pretrained


def _building(function):
    @wraps(function)
    def _from_config(cls, config, **options):
        if record.is_by_hand():
            return function(cls, config, **options)
        with record.by_hand():
            model = function(cls, config, **options)
        _applied(model, None, options)
        return model
    return _from_config


def _setting(function):
    @wraps(function)
    def set_attn_implementation(self, attn_implementation, *args, **options):
        _refuse_parts(attn_implementation)
        if attn_implementation in NAMES:
            _swap(self, attn_implementation)
        elif any("swapped" in part._modules for part in self.modules()):
            raise ValueError("set_attn_implementation would undo swap_attention: call unswap_attention(model) first")
        else:
            function(self, attn_implementation, *args, **options)
    return set_attn_implementation


def _saving(function):
    """Where a part alone was swapped, as model.bert, the configuration of the whole does not know it until now."""
    @wraps(function)
    def save_pretrained(self, *args, **options):
        own = record.get_record(self)
        ours = isinstance(own, dict) and "layers" in own  # as a swap writes it, which may be undone since
        if ours or any("swapped" in part._modules for part in self.modules()):
            record.write(self)
        return function(self, *args, **options)
    return save_pretrained


def _refuse_parts(name) -> None:
    if isinstance(name, dict):
        ours = sorted(NAMES.intersection(value for value in name.values() if isinstance(value, str)))
        if ours:
            raise ValueError(f"attn_implementation = {name}: {ours[0]} takes the whole model; to swap a part of it "
                             f"call crt_exp.swap_attention(model.<part>, {ours[0]!r})")


def _applied(model: nn.Module, source: str | None, options: dict[str, Any]) -> bool:
    """Whether the model's configuration names one of ours; then it has that attention now."""
    configs = [part.config for part in model.modules() if hasattr(getattr(part, "config", None), "sub_configs")]
    named = {config._attn_implementation for config in configs} & NAMES
    if not named:
        return False
    if len(named) > 1:
        _refuse_parts({str(number): name for number, name in enumerate(sorted(named))})
    default = model.get_correct_attn_implementation(None)
    for config in configs:
        config._attn_implementation_internal = default
    name, saved = named.pop(), record.taken(model)
    if source is not None and saved is not None and record.names(record.checked(saved, source)) == [name]:
        from crt_exp.pretrained.saved import bring_back, fetching_of

        bring_back(model, saved, source, **fetching_of(options))
    else:
        _swap(model, name)
    return True


def _swap(model: nn.Module, name: str) -> None:
    from crt_exp.mechanism import swap_attention

    swap_attention(model, name)
