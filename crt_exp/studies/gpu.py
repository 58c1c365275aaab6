"""What `make gpu` measures: attention, a decoded token and training steps on one GPU, in bfloat16, compared with the
fused exact kernel.

A cell is one process of its own, in which all arms take turns; memory is the peak beyond the inputs. With
`device="cpu"` the same code runs at small sizes, as tests do.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp.mechanism import Mechanism
from crt_exp.studies.cells import Cells, Draw
from crt_exp.times import added, in_turns, milliseconds

HEADS, D = 16, 64
ARMS = {"exact": {}, "favorpp": {"m": 256}, "nearfar": {}, "nearfar preset=bounded": {}}
EXACT, FLEX, LINEAR = "exact", "flex", "fla linear"
PASSES = ("forward", "forward and backward")
WARM, TURNS = 3, 10
MODELS = {"BERT-base, 512 tokens": ("bert", 512), "BERT-base, 4096 tokens": ("bert", 4096),
          "125M causal, 16384 tokens": ("gpt", 16384), "ViT-B, 1024 px": ("vit", 1024),
          "Conformer, 120 s of audio": ("conformer", 120)}
RATE = 16000             # samples a second


class NoGPU(ValueError):
    """No CUDA device is visible."""


def measure(name: str, sources: Sequence[str], size: Mapping[str, Any], keep: bool = False) -> Iterator[Draw]:
    """Settings: PASSES of each direction, decoding (x: tokens) and MODELS; units are processes. Raises NoGPU."""
    device = size.get("device", "cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise NoGPU("this report is measured on a GPU, and torch sees none here (torch.cuda.is_available() is False)")
    cells = Cells(name, sources, keep)
    keys = [{"what": what, "length": length, "causal": causal, "process": process, "device": device}
            for process, causal, length in product(range(size["processes"]), (False, True), size["lengths"])
            for what in ("attention", "token")[:1 + causal]]
    keys += [{"what": model, "length": 0, "causal": False, "process": process, "device": device}
             for process in range(size["processes"]) for model in size["models"]]
    cells.fill(keys, of_cell, name, apart=True)
    for key in keys:
        for setting, arm, metric, value in cells[key]:
            yield cells.draw(key, setting, arm, metric, value, key["process"], key["length"] or "")


def of_cell(what: str, length: int, causal: bool, process: int, device: str) -> list[tuple[str, str, str, float]]:
    """(setting, arm, metric, value) of each."""
    torch.manual_seed(process)
    direction = "causal" if causal else "both directions"
    if what == "attention":
        values = attention(length, causal, device)
    elif what == "token":
        values, direction = tokens(length, device), "a decoded token"
    else:
        values, direction = steps(what, device), what
    return [(f"{direction}, {each}" if each else direction, arm, metric, value) for each, arm, metric, value in values]


# ---- attention alone


def attention(length: int, causal: bool, device: str) -> Iterator[tuple[str, str, str, float]]:
    q, k, v, grad = (torch.randn(1, HEADS, length, D, device=device, dtype=torch.bfloat16) for _ in range(4))
    given = tuple(t.requires_grad_() for t in (q, k, v))
    arms = methods(causal, device)

    def train(arm: str) -> None:
        arms[arm](*given).backward(grad)
        for t in given:
            t.grad = None

    @torch.no_grad()
    def infer(arm: str) -> None:
        arms[arm](*given)

    for name, run in zip(PASSES, (infer, train)):
        for arm, (ms, mib) in costs(run, arms, device).items():
            yield name, arm, "ms", ms
            yield name, arm, "mib", mib


def methods(causal: bool, device: str) -> dict[str, Callable[..., Tensor]]:
    """Attention of (1, HEADS, L, D) by each arm; peers that are not installed, or need a GPU, are left out."""
    result = {arm: layer(arm, causal, device) for arm in ARMS}
    if device == "cuda":
        result |= {FLEX: flex(causal)}
        result |= {LINEAR: linear(causal)} if find_spec("fla") else {}
    return result


def layer(arm: str, causal: bool, device: str) -> nn.Module:
    made = Mechanism.parse(arm, **ARMS[arm]).layer(HEADS, D, causal=causal).to(device)
    if getattr(made, "learns", False):
        with made.calibration(), torch.no_grad():
            made(*torch.randn(3, 1, HEADS, 2048, D, device=device))
    return made.eval()


def flex(causal: bool) -> Callable[..., Tensor]:
    """PyTorch's FlexAttention, compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, q.shape[2], k.shape[2]) if causal else None
        return compiled(q, k, v, block_mask=mask)
    return run


def linear(causal: bool) -> Callable[..., Tensor]:
    """flash-linear-attention's chunked kernel, with elu + 1 as the map; causal alone."""
    from fla.ops.linear_attn import chunk_linear_attn

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = [t.transpose(1, 2) for t in (F.elu(q) + 1, F.elu(k) + 1, v)]
        return chunk_linear_attn(*rows)[0].transpose(1, 2)
    return run


# ---- tokens and models


@torch.no_grad()
def tokens(length: int, device: str) -> Iterator[tuple[str, str, str, float]]:
    """A token behind so many: the state of linear attention, all keys of exact attention."""
    draw = partial(torch.randn, device=device, dtype=torch.bfloat16)
    pasts = {}
    for arm in ARMS:
        pasts[arm] = layer(arm, True, device).past()
        pasts[arm].step(*draw(3, 1, HEADS, length, D))
    for arm, (ms, _) in costs(lambda arm: pasts[arm].step(*draw(3, 1, HEADS, 1, D)), pasts, device).items():
        yield "", arm, "ms", ms


def steps(what: str, device: str) -> Iterator[tuple[str, str, str, float]]:
    """A training step of a whole model, batch 1, under autocast."""
    kind, size = MODELS[what]
    models = {arm: model(kind, size, arm, device) for arm in ARMS}
    inputs = {arm: given(kind, size, device) for arm in ARMS}

    def run(arm: str) -> None:
        with torch.autocast(device, torch.bfloat16):
            out = models[arm](*inputs[arm])
        (out if isinstance(out, Tensor) else out[0]).float().square().mean().backward()
        models[arm].zero_grad(set_to_none=True)

    for arm, (ms, mib) in costs(run, models, device).items():
        yield "", arm, "ms", ms
        yield "", arm, "mib", mib


def model(kind: str, size: int, arm: str, device: str) -> nn.Module:
    mechanism = Mechanism.parse(arm, **ARMS[arm])
    if kind == "vit":
        import timm

        made = timm.create_model("vit_base_patch16_224", img_size=size)
    elif kind == "conformer":
        from crt_exp.models.conformer_transducer import PRESETS, ConformerTransducer

        made = ConformerTransducer(32, RATE, PRESETS["paper"])
    else:
        made = language_model(kind, size)
    made = (made if arm == EXACT else mechanism.swap(made)).to(device).train()
    return made.encoder if kind == "conformer" else made


def language_model(kind: str, length: int) -> nn.Module:
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

    if kind == "bert":
        return BertModel(BertConfig(max_position_embeddings=max(512, length)))
    return LlamaModel(LlamaConfig(hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
                                  num_key_value_heads=12, max_position_embeddings=length, use_cache=False))


def given(kind: str, size: int, device: str) -> tuple[Tensor, ...]:
    if kind == "vit":
        return (torch.randn(1, 3, size, size, device=device),)
    if kind == "conformer":
        samples = size * RATE
        return torch.randint(-9000, 9000, (1, samples), dtype=torch.int16, device=device), torch.tensor(
            [samples], device=device)
    return (torch.randint(1000, (1, size), device=device),)


# ---- time and memory


def costs(run: Callable[[str], None], arms: Mapping[str, Any], device: str) -> dict[str, tuple[float, float]]:
    """Median milliseconds of run(arm) over rounds, and the peak MiB of a second call beyond what was there. An arm for
    which the memory ends is left out."""
    calls, peaks = {arm: partial(run, arm) for arm in arms}, {}
    for arm, call in calls.items():
        try:
            call()
            peaks[arm] = added(call, torch.device(device))
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
    times = in_turns({arm: calls[arm] for arm in peaks}, TURNS, partial(milliseconds, device=device), warm=WARM)
    return {arm: (statistics.median(each), peaks[arm]) for arm, each in times.items()}
