"""Outputs and gradients of every attention x direction x mask x length x engine.

float32 goes through the engines in C where there are some, float64 through PyTorch.
"""

import warnings
from itertools import product

import torch
from values import attempt, numbers

from crt_exp.mechanism import Mechanism
from crt_exp.registry import choices

B = 2
H = 4
KV = 2
D = 16
SMALL = "nearfar block=16 heavy=8 cells=16"
OPTIONS = {
    "linformer": " length=1024 rank=16",
    "reformer": " chunk=16 buckets=8 hashes=2",
    "window": " block=32 first=2",
}
NEAR_FAR = [
    f"{SMALL} exact_until=64",
    f"{SMALL} exact_until=0 first_order=true",
    "nearfar preset=cheap exact_until=128",
    "nearfar preset=quality exact_until=128",
]
RETRIEVED = [
    f"{SMALL} open=16 exact_until=64",
    f"{SMALL} open=48 exact_until=0 first_order=true",
]  # causal alone
DIRECTIONS = {
    "both": {},
    "causal": {"causal": True},
    "cross": {"cross": True},
}
LENGTHS = {50: 41, 700: 520}  # queries: keys of cross-attention
DTYPES = {"C": torch.float32, "PyTorch": torch.float64}
MASKS = ("none", "right", "left")


def groups() -> list[str]:
    """The attentions, as `Mechanism.parse` reads them, but favormix, whose fit differs between processors."""
    named = []
    for name in choices("attention"):
        if name != "favormix":
            named.append(name + OPTIONS.get(name, ""))
    return [
        *named,
        *NEAR_FAR,
        *RETRIEVED,
        "favorpp learn=parameters",
        "favorpp learn=projections",
        "favorpp sampler=hadamard",
        "favorp normalize_qk=true",
        "favorpp features=geom",
    ]


def cases(name: str) -> dict:
    actual = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for direction, length, engine in product(DIRECTIONS, LENGTHS, DTYPES):
            if name in RETRIEVED and direction != "causal":
                continue
            S = length
            if direction == "cross":
                S = LENGTHS[length]
            dtype = DTYPES[engine]
            layer = attempt(_layer, name, DIRECTIONS[direction], length, S, dtype)
            if isinstance(layer, str):
                actual[f"{direction} {length} {engine}"] = layer
                continue
            for mask in MASKS:
                actual[f"{direction} {length} {engine} {mask}"] = attempt(
                    _outputs, layer, length, S, dtype, _mask(mask, S)
                )
    return actual


def _layer(name: str, sizes: dict, length: int, S: int, dtype):
    """After two training passes, by which what is learned of the data is there."""
    torch.manual_seed(0)
    mechanism = Mechanism.parse(name)
    if mechanism.m is not None:
        mechanism = mechanism.with_projections(32)
    layer = mechanism.layer(H, D, kv_heads=KV, layer=1, **sizes)
    layer = layer.to(dtype)
    for seed in (1, 2):
        layer(*_qkv(length, S, dtype, seed))
    return layer.eval()


def _qkv(length: int, S: int, dtype, seed: int) -> list:
    g = torch.Generator().manual_seed(seed)
    draw = lambda heads, n: torch.randn(B, heads, n, D, generator=g, dtype=torch.float64).to(dtype)
    return [1.5 * draw(H, length), 1.5 * draw(KV, S) + 0.2, draw(KV, S)]


def _mask(kind: str, S: int):
    if kind == "none":
        return None
    mask = torch.ones(B, S, dtype=torch.bool)
    cut = int(0.7 * S)
    if kind == "right":
        mask[0, cut:] = False
    else:
        mask[0, : S - cut] = False
    return mask


def _outputs(layer, length: int, S: int, dtype, mask) -> dict:
    q, k, v = (t.requires_grad_() for t in _qkv(length, S, dtype, 3))
    torch.manual_seed(3)
    out = layer(q, k, v, mask)
    weight = torch.randn(
        out.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64
    ).to(dtype)
    learned = [p for p in layer.parameters() if p.requires_grad]
    grads = torch.autograd.grad((out * weight).sum(), [q, k, v, *learned], allow_unused=True)
    names = ["dq", "dk", "dv", *(f"d{i}" for i in range(len(learned)))]
    return {"out": numbers(out)} | {
        name: None if g is None else numbers(g) for name, g in zip(names, grads)
    }
