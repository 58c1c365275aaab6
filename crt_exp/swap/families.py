"""Find attention modules, read their sizes, and detect unsupported attention.

torch's MultiheadAttention and timm's Attention change their class in place, so that parameters, hooks and references
stay valid. Hugging Face modules keep their class: see `interface`. Linear attention supports key padding and causality
only. The swap refuses attention with pairwise logit biases, softcaps, sinks, windows or per-query key selection. The
attributes and the source code of a module identify its attention.
"""

import ast
import inspect
import re
import textwrap
from functools import cache
from typing import Any, NamedTuple

from torch import nn

from crt_exp.swap.modules import SwappedMultiheadAttention, SwappedTimmAttention, SwappedTimmRotary

TIMM = {
    ("timm.layers.attention", "Attention"): SwappedTimmAttention,
    ("timm.layers.attention", "AttentionRope"): SwappedTimmRotary,
    ("timm.models.eva", "EvaAttention"): SwappedTimmRotary,
}
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
HEAD_DIMS = ("qk_head_dim", "head_dim", "attention_head_size")
# OTHER_SEQUENCE: forward arguments that hold another sequence, or its keys. CROSS: names of cross-attention modules.
OTHER_SEQUENCE = re.compile(r"^(?!past_|hidden_states$)(.*_)?(keys?|states|context)(_|$)|^k$")
CROSS = re.compile(r"cross|encoder_?attn|encoder_?attention|enc_?dec", re.IGNORECASE)
BIASES = (
    "relative_attention_bias",
    "has_relative_attention_bias",
    "relative_position_bias_table",
    "relative_position_bias",
    "alibi",
)
# attributes of the configuration; those of BIASES belong to the layer
CONFIGURED_BIASES = ("use_relative_position_bias", "use_shared_relative_position_bias")
# layer type -> configuration key of the window size
WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
WINDOW_REASON = "has a window"  # start of the reason for a layer with a window
FUSED = "scaled_dot_product_attention"  # torch's fused attention
ROTATIONS = (None, "rotary", "absolute")  # position embeddings that add nothing to the logits
# Classes, or parent class and attribute, whose masks are built elsewhere and are neither padding nor causal.
OTHER_MASKS = {
    "Sam3DetrDecoderLayer.vision_cross_attn": "adds a box bias to its logits",
    "Sam3LiteTextDetrDecoderLayer.vision_cross_attn": "adds a box bias to its logits",
    "T5Gemma2MergedAttention": "combines causal self-attention and cross-attention in one softmax",
    "PixtralAttention": "separates the images that are packed into one sequence",
}


class HeadSizes(NamedTuple):
    heads: int
    d: int
    kv_heads: int
    causal: bool
    scaling: float | None
    cross: bool = False


def remove_hook(part: nn.Module, name: str) -> None:
    """Remove the hook of a swap with this name, if the module has it."""
    hook = part.__dict__.pop(name, None)
    if hook is not None:
        hook.remove()


# ---- find modules


def attention_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The attention modules that `swap_attention` supports, with paths, in order."""
    modules = [(path, module) for path, module in model.named_modules() if family(module)]
    return [(path or type(module).__name__, module) for path, module in modules]


def swapped_class(module: Any) -> type | None:
    """The replacement class of a torch or timm module; None for other modules."""
    kind: Any = type(module)
    if kind is SwappedMultiheadAttention or kind.forward is nn.MultiheadAttention.forward:
        return SwappedMultiheadAttention
    if kind in TIMM.values():
        return kind
    for base in kind.__mro__:
        replacement = TIMM.get((base.__module__, base.__name__))
        if replacement is not None:
            return replacement if kind.forward is base.forward else None
    return None


def family(module: Any) -> str | None:
    """The family of an attention module: "torch", "timm", "hf", or None."""
    swapped = swapped_class(module)
    if swapped is not None:
        return "torch" if swapped is SwappedMultiheadAttention else "timm"
    kind: Any = type(module)
    calls_interface = "ALL_ATTENTION_FUNCTIONS" in names_in_forward(kind)
    return "hf" if calls_interface or "swapped" in module._modules else None


@cache
def names_in_forward(kind: Any) -> frozenset[str]:
    """The global names and attributes in the forward method of a class."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    if code is None:
        return frozenset()
    return frozenset(code.co_names)


def unknown_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Attention modules of unknown families, with paths.

    A module counts if its class name contains "attention", or if it calls torch's fused attention. Parents and children
    of attention modules do not count.
    """
    known = []
    candidates = {}
    for path, part in model.named_modules():
        kind: Any = type(part)
        place = f"{path}." if path else ""  # the start of the places inside
        if family(part):
            known.append(place)
        elif "attention" in kind.__name__.lower() or FUSED in names_in_forward(kind):
            candidates[place] = part
    unknown = []
    for place, part in candidates.items():
        is_parent = any(
            other.startswith(place) and other != place for other in (*known, *candidates)
        )
        if not is_parent and not place.startswith(tuple(known)):
            unknown.append((place.removesuffix(".") or type(part).__name__, part))
    return unknown


def sizes(module: Any, path: str) -> HeadSizes:
    """Read the sizes of an attention module.

    Raises ValueError, naming the module, for options that linear attention does not support.
    """
    kind = family(module)
    if kind == "torch":
        if module.bias_k is not None or module.add_zero_attn:
            raise ValueError(f"{path}: add_bias_kv and add_zero_attn are not supported")
        return HeadSizes(module.num_heads, module.head_dim, module.num_heads, True, None)
    if kind == "timm":
        heads = module.num_heads
        kv_heads = getattr(module, "num_kv_heads", heads)
        d = getattr(module, "head_dim", None) or module.qkv.out_features // (3 * heads)
        return HeadSizes(heads, d, kv_heads, False, module.scale)
    config = module.config
    heads = _first(module, HEADS) or config.num_attention_heads
    d = _first(module, HEAD_DIMS) or getattr(config, "head_dim", None)
    if d is None:
        d = config.hidden_size // heads
    if hasattr(module, "q_pos_sine_proj"):  # Conditional DETR concatenates content and position
        d = 2 * d
    kv_heads = heads // (getattr(module, "num_key_value_groups", None) or 1)
    causal = bool(getattr(module, "is_causal", True))
    scaling = getattr(module, "scaling", None)
    scaling = float(scaling) if isinstance(scaling, (int, float)) else None
    return HeadSizes(heads, d, kv_heads, causal, scaling, may_be_cross(module, path))


def is_cross(module: Any, path: str, holder: nn.Module | None = None) -> bool:
    """Whether a module is cross-attention, by its parent, attribute or name."""
    if isinstance(holder, nn.TransformerDecoderLayer):
        return module is holder.multihead_attn
    known = getattr(module, "is_cross_attention", None)
    if known is not None:
        return bool(known)
    return bool(CROSS.search(".".join([*path.split(".")[-2:], type(module).__name__])))


def may_be_cross(module: Any, path: str) -> bool:
    """Whether a Hugging Face module can attend to another sequence.

    The attributes or the name decide, else the arguments of forward. A class that serves encoders and decoders counts
    in a decoder.
    """
    if getattr(module, "is_cross_attention", None) is not None or is_cross(module, path):
        return is_cross(module, path)
    if getattr(module, "is_decoder", False):
        return True
    if hasattr(module, "is_decoder") or "SelfAttention" in type(module).__name__:
        return False
    parameters = inspect.signature(inspect.unwrap(type(module).forward)).parameters
    return any(OTHER_SEQUENCE.search(name) for name in parameters)


def _first(module: Any, names: tuple[str, ...]) -> int | None:
    """The first integer among attributes of a module."""
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, int):
            return value
    return None


# ---- attention that linear attention cannot represent


class Passed(NamedTuple):
    """What a forward method passes to the attention function.

    The names of the keywords, the parameters of forward, and whether forward changes the mask.
    """

    keywords: frozenset[str]
    parameters: frozenset[str]
    own_mask: bool


def refusal(module: Any, holder: nn.Module | None, name: str) -> str | None:
    """Why linear attention cannot represent a module, or None.

    The reason is the end of a sentence. `holder` is the parent module, which holds the module under `name`.
    """
    if family(module) != "hf":
        return _read_by_hand(module, holder)
    for known in (type(module).__name__, f"{type(holder).__name__}.{name}"):
        if known in OTHER_MASKS:
            return OTHER_MASKS[known]
    kind: Any = type(module)
    passed = passed_arguments(kind)
    if _is_biased(module, passed):
        return "adds a position bias to its logits"
    if "softcap" in passed.keywords and getattr(module, "attn_logit_softcapping", 1) is not None:
        return "caps its logits (softcap)"
    if "s_aux" in passed.keywords and getattr(module, "sinks", 1) is not None:
        return "has sinks in its softmax (s_aux)"
    if "indices" in passed.keywords:
        return "selects keys for each query (sparse index)"
    if "cache_offset" in passed.parameters:
        return "runs several times in a forward pass, each time with other cached keys"
    sized = _first(module, (*HEADS, *HEAD_DIMS)) is not None
    if not sized and "attention_mask" not in passed.parameters:
        return "attends over another axis than tokens, such as layers or channels"
    window = _window(module, passed)
    if window is None and passed.own_mask:
        return "masks pairs of queries and keys"
    return window


def _read_by_hand(module: Any, holder: nn.Module | None) -> str | None:
    """Why a torch attention cannot be swapped: its parent reads the weights itself."""
    known = (type(None), nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    if family(module) != "torch" or isinstance(holder, known):
        return None
    parent: Any = type(holder)
    reads = not {"in_proj_weight", "q_proj_weight"}.isdisjoint(names_in_forward(parent))
    return f"is computed by {parent.__name__} itself" if reads else None


def _is_biased(module: Any, passed: Passed) -> bool:
    """Whether a module adds a position bias to its logits."""
    biased = any(getattr(module, name, None) not in (None, False) for name in BIASES)
    biased = biased or any(getattr(module.config, name, False) for name in CONFIGURED_BIASES)
    if "position_bias" in passed.keywords:
        kind = getattr(module, "position_embeddings_type", "relative")
        return biased or kind not in ROTATIONS
    return biased or "position_bias" in passed.parameters


def _window(module: Any, passed: Passed) -> str | None:
    """The reason of a module with a window that is shorter than its sequences, or None."""
    config = module.config
    kinds = [getattr(module, name, None) for name in ("layer_type", "attention_type")]
    index = getattr(module, "layer_idx", None)
    if isinstance(index, int):
        types = getattr(config, "layer_types", None) or ()
        kinds += types[index : index + 1]
    kind = next((kind for kind in kinds if isinstance(kind, str)), None)
    slides = getattr(module, "is_sliding", True) is not False
    size = None
    if kind in WINDOWS:
        size = getattr(config, WINDOWS[kind], None)
    elif kind is None and slides and "sliding_window" in passed.keywords:
        size = getattr(module, "sliding_window", getattr(config, "sliding_window", None))
    longest = getattr(config, "max_position_embeddings", None) or float("inf")
    if not isinstance(size, int) or not 0 < size < longest:
        return None
    return f"{WINDOW_REASON} of {size} tokens for sequences of up to {longest} tokens"


@cache
def passed_arguments(kind: Any) -> Passed:
    """Parse the source of a class's forward method."""
    function = inspect.unwrap(kind.forward)
    parameters = frozenset(inspect.signature(function).parameters)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):  # the class has no source
        return Passed(frozenset(), parameters, False)
    keywords = set()
    masks: list[ast.expr] = []
    values: dict[str, list[ast.expr | None]] = {}  # that are assigned to each single name
    value: ast.expr | None
    for node in ast.walk(tree):
        match node:
            # attention_interface(self, query, key, value, mask, ...)
            case ast.Call(func=ast.Name(), args=[ast.Name(id="self"), *others], keywords=words):
                named = {word.arg: word.value for word in words}
                if len(others) < 3 and not named.keys() >= {"query", "key", "value"}:
                    continue
                for key, value in named.items():
                    if key and getattr(value, "value", value) is not None:
                        keywords.add(key)
                if len(others) > 3:
                    masks.append(others[3])
                elif "attention_mask" in named:
                    masks.append(named["attention_mask"])
            case ast.AugAssign(target=ast.Name(id=name)):
                computed = ast.BinOp(node.target, node.op, node.value)
                values.setdefault(name, []).append(computed)
            case ast.AnnAssign(target=ast.Name(id=name), value=value):
                values.setdefault(name, []).append(value)
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    if isinstance(target, ast.Name):
                        values.setdefault(target.id, []).append(value)
    computes_mask = any(_computed(mask, values) for mask in masks)
    return Passed(frozenset(keywords), parameters, computes_mask)


def _computed(
    mask: ast.expr | None,
    values: dict[str, list[ast.expr | None]],
    seen: frozenset[str] = frozenset(),
) -> bool:
    """Whether an expression computes a mask, rather than selects from given masks.

    values: the expressions that are assigned to each name.
    """
    match mask:
        # `get` reads an entry of a given mapping
        case None | ast.Constant() | ast.Call(func=ast.Attribute(attr="get")):
            return False
        case ast.Name(id=name):
            if name in seen:
                return False
            parts = values.get(name, [])
            seen = seen | {name}
        case ast.IfExp(body=one, orelse=other):
            parts = [one, other]
        case (
            ast.Subscript(value=whole)
            | ast.Attribute(value=whole)
            | ast.Call(func=ast.Attribute(value=whole, attr="to"))
        ):
            parts = [whole]
        case _:
            return True
    return any(_computed(part, values, seen) for part in parts)
