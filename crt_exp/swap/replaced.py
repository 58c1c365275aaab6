"""Whether a call of a swapped attention module still comes to its `swapped`.

Libraries have ways of their own to set how a module computes: `_attn_implementation` of transformers, another forward
pass in the place of a class's. After a swap each of them brings exact attention back,
while the configuration says that the model is swapped. Hooks of the attention module notice it at its next call: these
are called where hooks of the model would not be, by wrappers and pipelines that hold a part of it.
"""

import warnings

import torch
from torch import nn

from crt_exp.swap import families
from crt_exp.swap.timm_attention import SwappedTimmAttention

CLASSES = (families.SwappedMultiheadAttention, SwappedTimmAttention)
UNDO = "call unswap_attention(model) to have the model's own attention, or swap_attention again"
WORDS = ("word timestamps (return_token_timestamps=True) need the weights of the model's own attention, which swapped "
         "attention does not form: swap model.model.encoder alone. Later calls without them work as before")


def watch(module: nn.Module) -> None:
    """From now on a call of this swapped module raises ValueError where what the swap put there has been replaced, and
    warns where the call passed `swapped` by for another reason."""
    unwatch(module)
    module.__dict__["swap_watch"] = [module.register_forward_pre_hook(refuse_replaced, with_kwargs=True),
                                     module.register_forward_hook(tell_passed_by)]


def unwatch(module: nn.Module) -> None:
    for hook in module.__dict__.pop("swap_watch", ()):
        hook.remove()


def refuse_replaced(module: nn.Module, args: tuple, kwargs: dict) -> None:
    state, fix = module.swapped, UNDO
    if now := replaced(module):
        config = getattr(module, "config", None)
        if (kwargs.get("output_attentions") and getattr(config, "model_type", None) == "whisper"
                and config._attn_implementation == "eager"):   # set by Whisper's generate
            config._attn_implementation, fix = module.swap_interface.name, WORDS
        raise ValueError(f"{state.path}: {now}, which would compute its attention in the place of {state.mechanism}: "
                         f"{fix}")
    if not torch.compiler.is_compiling():
        state.__dict__["answered"] = False


def tell_passed_by(module: nn.Module, *_) -> None:
    """Where nothing is known to be replaced: another forward pass, or another function under the name of ours."""
    state = module.swapped
    if torch.compiler.is_compiling() or state.answered:
        return
    if getattr(state, "reached", None) is not False:  # once
        warnings.warn(f"{state.path} ({type(module).__name__}): this call did not come to the swapped attention "
                      f"{state.mechanism}: another function computes in its place; {UNDO}", stacklevel=3)
    state.__dict__["reached"] = False


def replaced(module: nn.Module) -> str | None:
    """What stands where the swap of this module put its own, as the beginning of a sentence; None where that stands."""
    if hasattr(module, "unswapped_class"):
        kind = type(module)
        return None if issubclass(kind, CLASSES) else f"its class is now {kind.__name__}"
    if not families.is_ours(module.config):
        return f"its config._attn_implementation is now {module.config._attn_implementation!r}"
    return None
