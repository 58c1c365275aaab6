"""The class that models of timm take as `attn_layer`, so that a model has other attention from its first layer on."""

from itertools import count

from crt_exp.mechanism import Mechanism
from crt_exp.swap.swap import swap_module


def attn_layer(name: str | Mechanism, m: int | None = None, **options) -> type:
    """A subclass of timm.layers.Attention with attention `name`, as `swap_attention` takes it: for
    `timm.create_model("vit_small_patch16_224", attn_layer=attn_layer("favorpp", m=64))` and every model that takes one.

    m, options: as `swap_attention` takes them. Parameters have timm's names, so that its weights load, and
    `unswap_attention` gives the model timm's own attention. Layers are numbered in the order in which they are built;
    their noise is drawn from number and seed, so ask for one class a model. Raises ConfigError for unknown names and
    options, ValueError for attention that a bidirectional layer cannot be.
    """
    from timm.layers import Attention

    mechanism = name if isinstance(name, Mechanism) else Mechanism.parse(name, m=m, **options)
    numbers = count()

    class LinearAttention(Attention):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            swap_module(self, mechanism.layer, mechanism.name, next(numbers), mechanism.saved())

    return LinearAttention
