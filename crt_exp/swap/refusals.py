"""What linear attention cannot stand for in a Hugging Face module, known before the first call:
by its attributes and its code.

A linear attention keeps or removes keys, and knows causal order. Terms that a module adds to its logits for each pair,
caps and sinks of the softmax, windows that cut, and keys chosen for each query are none of these. The forward pass of a
class says which it uses: what it hands to the attention function, and whether that is the mask that it was given.
"""

import ast
import inspect
import textwrap
from functools import cache
from typing import NamedTuple

from torch import nn

BIASES = ("relative_attention_bias", "has_relative_attention_bias", "relative_position_bias_table",
          "relative_position_bias", "alibi")
# held by the layer, or by the model
CONFIGURED_BIASES = ("use_relative_position_bias", "use_shared_relative_position_bias")
# kind of layer -> its size
WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
SEES = "sees a window"                    # how the reason of such a layer begins
ROTATIONS = (None, "rotary", "absolute")  # kinds of position embeddings that add nothing to the logits
# Masks that are made outside the class and never are padding or causal, by the class or by the holder's
# class and the attribute.
OTHER_MASKS = {
    "Sam3DetrDecoderLayer.vision_cross_attn": "adds a bias of boxes to its logits",
    "Sam3LiteTextDetrDecoderLayer.vision_cross_attn": "adds a bias of boxes to its logits",
    "T5Gemma2MergedAttention":
        "attends to its own tokens, in causal order, and to the encoder's, in none, in one softmax",
    "PixtralAttention": "keeps apart the images that are packed into one sequence",
}


class Passed(NamedTuple):
    """What a forward pass hands to the attention function:
    names of keywords, and whether it works on the mask before."""

    keywords: frozenset[str]
    parameters: frozenset[str]
    own_mask: bool


def refusal(module: nn.Module, place: str) -> str | None:
    """Why linear attention cannot stand for this module of the attention interface, as the end of a sentence;
    None where it can.

    place: the class of the module that holds it, and the attribute, "Holder.attribute".
    """
    passed = what_is_passed(type(module))
    known = OTHER_MASKS.get(type(module).__name__) or OTHER_MASKS.get(place)
    reason = known or _bias(module, passed) or _softmax(module, passed) or _window(module, passed)
    return reason or ("changes its mask for each pair of a query and a key" if passed.own_mask else None)


def _bias(module: nn.Module, passed: Passed) -> str | None:
    kind = getattr(module, "position_embeddings_type", "relative")
    handed = "position_bias" in passed.keywords and kind not in ROTATIONS
    alone = "position_bias" in passed.parameters and "position_bias" not in passed.keywords
    held = any(getattr(module, name, None) not in (None, False) for name in BIASES)
    held = held or any(getattr(module.config, name, False) for name in CONFIGURED_BIASES)
    return "adds a position bias to its logits" if handed or alone or held else None


def _softmax(module: nn.Module, passed: Passed) -> str | None:
    if "softcap" in passed.keywords and getattr(module, "attn_logit_softcapping", 1) is not None:
        return "caps its logits (softcap)"
    if "s_aux" in passed.keywords and getattr(module, "sinks", 1) is not None:
        return "has sinks in its softmax (s_aux)"
    return "chooses keys for each query (a sparse index)" if "indices" in passed.keywords else None


def _window(module: nn.Module, passed: Passed) -> str | None:
    config, kind, size = module.config, _layer_type(module), None
    if kind in WINDOWS:
        size = getattr(config, WINDOWS[kind], None)
    elif kind is None and "sliding_window" in passed.keywords and getattr(module, "is_sliding", True) is not False:
        size = getattr(module, "sliding_window", getattr(config, "sliding_window", None))
    longest = getattr(config, "max_position_embeddings", None) or float("inf")
    cuts = isinstance(size, int) and 0 < size < longest
    return f"{SEES} of {size} tokens only, in sequences of up to {longest} (max_position_embeddings)" if cuts else None


def _layer_type(module: nn.Module) -> str | None:
    own = next((kind for name in ("layer_type", "attention_type")
                if isinstance(kind := getattr(module, name, None), str)), None)
    types, index = getattr(module.config, "layer_types", None), getattr(module, "layer_idx", None)
    return types[index] if own is None and types and isinstance(index, int) and index < len(types) else own


@cache
def what_is_passed(kind: type) -> Passed:
    """Read from the source of the class's forward pass."""
    function = inspect.unwrap(kind.forward)
    parameters = frozenset(inspect.signature(function).parameters)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):  # a class without source
        return Passed(frozenset(), parameters, False)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _calls_interface(node)]
    keywords = frozenset(word.arg for call in calls for word in call.keywords
                         if word.arg and getattr(word.value, "value", word.value) is not None)
    masks = [call.args[4:5] or [word.value for word in call.keywords if word.arg == "attention_mask"] for call in calls]
    return Passed(keywords, parameters, any(_computed(mask, tree, parameters) for each in masks for mask in each))


def _calls_interface(call: ast.Call) -> bool:
    """attention_interface(self, query, key, value, mask, ...), whatever the variable is called."""
    takes_self = bool(call.args) and isinstance(call.args[0], ast.Name) and call.args[0].id == "self"
    named = {word.arg for word in call.keywords}
    return (isinstance(call.func, ast.Name) and takes_self
            and (len(call.args) >= 4 or {"query", "key", "value"} <= named))


def _computed(mask: ast.expr | None, tree: ast.AST, parameters: frozenset[str],
              seen: frozenset[str] = frozenset()) -> bool:
    """Whether an expression for a mask is more than a choice between, or a part of, masks that were given."""
    match mask:
        case None | ast.Constant() | ast.Call(func=ast.Attribute(attr="get")):  # out of a mapping that was given
            return False
        case ast.Name(id=name):
            if name in seen:
                return False
            values = [value for target, value in _assignments(tree) if target == name]
            return any(_computed(value, tree, parameters, seen | {name}) for value in values)
        case ast.IfExp(body=one, orelse=other):
            return any(_computed(value, tree, parameters, seen) for value in (one, other))
        case ast.Subscript(value=whole) | ast.Attribute(value=whole):
            return _computed(whole, tree, parameters, seen)
        case ast.Call(func=ast.Attribute(value=whole, attr="to")):
            return _computed(whole, tree, parameters, seen)
        case _:
            return True


def _assignments(tree: ast.AST):
    """(name, value) of every assignment to one name."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.AugAssign, ast.AnnAssign)) and isinstance(node.target, ast.Name):
            value = ast.BinOp(node.target, node.op, node.value) if isinstance(node, ast.AugAssign) else node.value
            yield node.target.id, value
        elif isinstance(node, ast.Assign):
            yield from ((target.id, node.value) for target in node.targets if isinstance(target, ast.Name))
