"""A model of texts with other attention and without training: on texts, and on heads that are drawn from its moments.

Every attention reads the same texts with the same masks.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crt_exp.attention import exact_attention
from crt_exp.data.text import official_file
from crt_exp.mechanism import Mechanism
from crt_exp.runner.configuration import kept_task
from crt_exp.probes import fidelity
from crt_exp.probes.captured import relative_error
from crt_exp.probes.subject import Subject

Row = dict[str, Any]


@lru_cache(maxsize=2)
def subject(start: str, split: str, calibration: str | None, length: int | None, texts: int,
            calibration_texts: int = 1) -> Subject:
    """The model of a run on texts of WikiText-2; length: by default that of its rows."""
    fitted = None if calibration is None else str(official_file("wikitext2", calibration))
    return Subject(start, str(official_file("wikitext2", split)), fitted, None, length or kept_task(start).block, texts,
                   calibration_texts, seed=0, cache_dir="outputs/texts/tokens")


def errors(arm: str, start: str, texts: Mapping[str, Any], seed: int, draws: int = 0, window: tuple = (0, np.inf)
           ) -> Row:
    """Of an attention: `above`, `hidden_error`, `attention_error` and `cosine`, of each text; the latter two errors of
    each layer under `_layers`; `cost`, the mean of `above`. Of the model itself: `S`, `S_least` and `S_largest`, mean
    |x + y|^2 over heads of each layer; `share`, of all heads whose |x + y|^2 lies in the window; `exact`, its loss.

    texts: arguments of `subject`. draws: of the noise, of which means are taken; 0: one, with the cell's seed. The x of
    what is given for each layer is `layers`, and `no_unit` is an empty unit.
    """
    read = subject(start, **texts)
    made = [fidelity.of_swap(read, fidelity.Candidate(arm, None), draw, 0)
            for draw in (range(draws) if draws else [seed])]
    means = {key: np.mean([each[key] for each in made], 0).tolist() for key in made[0]
             if key.endswith(("_texts", "_layers"))}
    S = [fidelity.of_heads(read, i)["mean_sq_sum"] for i in range(len(read.calls[0]))]
    inside = [window[0] <= each <= window[1] for layer in S for each in layer]
    return {**{key.removesuffix("_texts"): value for key, value in means.items()}, "layers": [*range(len(S))],
            "cost": float(np.mean(means.get("above_texts", np.nan))), "S": [float(np.mean(each)) for each in S],
            "S_least": [min(each) for each in S], "S_largest": [max(each) for each in S],
            "share": float(np.mean(inside)), "exact": float(np.mean([each.loss for each in read.exact])), "no_unit": ""}


def unigram(arm: str, start: str, seed: int) -> Row:
    """`loss` on the held-out text, nats, of predicting every token by its frequency in the training text."""
    task = kept_task(start)
    known, asked = (np.bincount(task.blocks[split].ravel(), minlength=len(task.tokenizer))
                    for split in ("train", "validation"))
    for counts in (known, asked):
        counts[task.tokenizer.all_special_ids] = 0  # which are never asked for
    logs = np.log((known + 1) / (known.sum() + len(known)))
    return {"loss": float(-(asked * logs).sum() / asked.sum())}


# ---- heads drawn from normal laws with the moments of the model's own queries, keys and values


def matched(arm: str, start: str, texts: Mapping[str, Any], length: int, seed: int, cells: int = 0) -> Row:
    """Relative error of the output, bidirectional, a number a layer. Tokens are independent: nothing is near. cells: of
    near-far attention at the length of the texts; they grow as the root of `length`."""
    if cells:
        arm += f" cells={8 * round(cells * (length / texts['length']) ** 0.5 / 8)}"
    errors = []
    for number, laws in enumerate(moments(start, **texts)):
        generator = torch.Generator().manual_seed(10_000 * seed + number)
        q, k, v = (normal(mean, root, length, generator) for mean, root in laws)
        heads, d = q.shape[1], q.shape[3]
        with torch.no_grad():
            layer = Mechanism.parse(arm, seed=seed).layer(heads, d, layer=number).eval()
            exact = exact_attention(q / d**0.25, k / d**0.25, v)
            errors.append(float(relative_error(layer(q, k, v), exact)))
    return {"attention_error": errors}


@lru_cache(maxsize=2)
def moments(start: str, **texts: Any) -> list[list[tuple[Tensor, Tensor]]]:
    """Of q, k and v of each layer: mean (1, H, 1, d) and root of the covariance (1, H, d, d), over texts and tokens."""
    calls = subject(start, **texts).calls
    return [[law(torch.cat([getattr(of_text[i], name) for of_text in calls], 2)) for name in ("q", "k", "v")]
            for i in range(len(calls[0]))]


def law(t: Tensor) -> tuple[Tensor, Tensor]:
    mean = t.double().mean(2, keepdim=True)
    centred = t.double() - mean
    values, vectors = torch.linalg.eigh(centred.mT @ centred / t.shape[2])
    return mean, vectors * values.clamp(min=0).sqrt().unsqueeze(-2)


def normal(mean: Tensor, root: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """(1, H, length, d) float32."""
    drawn = torch.randn(1, mean.shape[1], length, mean.shape[3], generator=generator, dtype=torch.float64)
    return (mean + drawn @ root.mT).float()
