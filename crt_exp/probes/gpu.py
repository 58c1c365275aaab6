"""What `make gpu` measures: attention, a decoded token and training steps on one GPU, in bfloat16, compared with the
fused exact kernel.

A cell is one process of its own, in which all arms take turns; memory is the peak beyond the inputs. With
`device="cpu"` the same code runs at small sizes, as tests do.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp.mechanism import Mechanism
from crt_exp.times import added, in_turns, milliseconds

HEADS, D = 16, 64
FLEX, LINEAR = "flex", "fla linear"     # peers
PASSES = ("forward", "forward and backward")
WARM, TURNS = 3, 10
RATE = 16000                            # samples a second


class NoGPU(ValueError):
    """No CUDA device is visible."""


def begin(device: str, seed: int) -> None:
    """Raises NoGPU."""
    if device == "cuda" and not torch.cuda.is_available():
        raise NoGPU("this report is measured on a GPU, and torch sees none here (torch.cuda.is_available() is False)")
    torch.manual_seed(seed)


# ---- attention alone


def attention(arms: Mapping[str, str], length: int, causal: bool, seed: int, device: str = "cuda"
              ) -> Iterator[dict[str, Any]]:
    """Rows with way (the direction and one of PASSES), arm, ms and mib."""
    begin(device, seed)
    way = "causal" if causal else "both directions"
    q, k, v, grad = (torch.randn(1, HEADS, length, D, device=device, dtype=torch.bfloat16) for _ in range(4))
    given = tuple(t.requires_grad_() for t in (q, k, v))
    made = methods(arms, causal, device)

    def train(arm: str) -> None:
        made[arm](*given).backward(grad)
        for t in given:
            t.grad = None

    @torch.no_grad()
    def infer(arm: str) -> None:
        made[arm](*given)

    for name, run in zip(PASSES, (infer, train)):
        for row in costs(run, made, device):
            yield {"way": f"{way}, {name}", **row}


def methods(arms: Mapping[str, str], causal: bool, device: str) -> dict[str, Callable[..., Tensor]]:
    """Attention of (1, HEADS, L, D) by each arm; peers that are not installed, or need a GPU, are left out."""
    peers = {FLEX: flex} | ({LINEAR: linear} if find_spec("fla") else {}) if device == "cuda" else {}
    return {name: peers[name](causal) if name in peers else layer(arm, causal, device)
            for name, arm in arms.items() if name in peers or name not in (FLEX, LINEAR)}


def layer(arm: str, causal: bool, device: str) -> nn.Module:
    made = Mechanism.parse(arm).layer(HEADS, D, causal=causal).to(device)
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
def tokens(arms: Mapping[str, str], length: int, seed: int, device: str = "cuda") -> Iterator[dict[str, Any]]:
    """Rows with arm and ms of a token behind so many: the state of linear attention, all keys of exact attention."""
    begin(device, seed)
    draw = partial(torch.randn, device=device, dtype=torch.bfloat16)
    pasts = {}
    for name, arm in arms.items():
        pasts[name] = layer(arm, True, device).past()
        pasts[name].step(*draw(3, 1, HEADS, length, D))
    yield from costs(lambda arm: pasts[arm].step(*draw(3, 1, HEADS, 1, D)), pasts, device)


def steps(arms: Mapping[str, str], kind: str, size: int, seed: int, device: str = "cuda") -> Iterator[dict[str, Any]]:
    """Rows with arm, ms and mib of a training step of a whole model, batch 1, under autocast."""
    begin(device, seed)
    models = {name: model(kind, size, arm, device) for name, arm in arms.items()}
    inputs = {name: given(kind, size, device) for name in arms}

    def run(arm: str) -> None:
        with torch.autocast(device, torch.bfloat16):
            out = models[arm](*inputs[arm])
        (out if isinstance(out, Tensor) else out[0]).float().square().mean().backward()
        models[arm].zero_grad(set_to_none=True)

    yield from costs(run, models, device)


def model(kind: str, size: int, arm: str, device: str) -> nn.Module:
    if kind == "vit":
        import timm

        made = timm.create_model("vit_base_patch16_224", img_size=size)
    elif kind == "conformer":
        from crt_exp.models.conformer_transducer import PRESETS, ConformerTransducer

        made = ConformerTransducer(32, RATE, PRESETS["paper"])
    else:
        made = language_model(kind, size)
    made = (made if arm == "exact" else Mechanism.parse(arm).swap(made)).to(device).train()
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


def costs(run: Callable[[str], None], arms: Iterable[str], device: str) -> Iterator[dict[str, Any]]:
    """arm, ms, the median of run(arm) over rounds, and mib, the peak of a second call beyond what was there. An arm for
    which the memory ends is left out."""
    calls, peaks = {arm: partial(run, arm) for arm in arms}, {}
    for arm, call in calls.items():
        try:
            call()
            peaks[arm] = added(call, torch.device(device))
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
    times = in_turns({arm: calls[arm] for arm in peaks}, TURNS, partial(milliseconds, device=device), warm=WARM)
    for arm, each in times.items():
        yield {"arm": arm, "ms": statistics.median(each), "mib": peaks[arm]}
