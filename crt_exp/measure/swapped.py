"""A trained model with other attention and without training: its losses, and how far its layers are from exact
attention; on texts, and on heads that are drawn from its moments.

Models are kept runs with exact attention; their weights are put into the other as task.init does it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crt_exp.attention import exact_attention
from crt_exp.attention.linear import LinearAttention
from crt_exp.data import images
from crt_exp.data.text import official_file
from crt_exp.features import SDERF
from crt_exp.mechanism import Mechanism
from crt_exp.measure import fidelity
from crt_exp.advice.bench import looked_at
from crt_exp.measure.captured import relative_error
from crt_exp.measure.subject import Subject
from crt_exp.measure.variance import predicted_errors
from crt_exp.runner.configuration import kept_task
from crt_exp.tasks.base import Batch, Plan, Reader, Task
from crt_exp.times import Watch, added

Row = dict[str, Any]


@lru_cache(maxsize=8)
def task_of(start: str, size: int | None = None) -> Task:
    """The task of a run, which starts from it; size: of its images, where it is another."""
    return kept_task(start, init=start, **({"size": size} if size else {}))


def model_of(start: str, arm: str, noise: int) -> nn.Module:
    return task_of(start).build(Mechanism.parse(arm, seed=noise)).eval()


# ---- losses


@torch.no_grad()
def losses(arm: str, start: str, splits: Sequence[str], seed: int, offset: int = 0, fit: int = 0) -> Row:
    """<split>_<metric> of the task, at `step` 0. The seed of the noise is `offset` more than that of the cell; fit:
    batches of training, one utterance or row each, to which attention is fitted that has something to fit."""
    task, model = task_of(start), model_of(start, arm, offset + seed)
    if fit:
        looked_at(model, [given(task, batch) for batch in islice(task.batches("train", Plan(1)), fit)])
    read = getattr(task, "metrics", task.evaluate)  # without what only a run's end asks for
    return {"step": 0} | {f"{split}_{metric}": value for split in splits
                          for metric, value in read(model, split, Reader(task)).items()
                          if isinstance(value, (int, float))}


def given(task: Task, batch: Batch) -> Any:
    """What the model is called with."""
    if hasattr(task, "arguments"):
        return task.arguments(batch)
    return {key: value for key, value in batch.items() if key != "labels"}


# ---- layers


def layers(arm: str | Mapping[str, str], start: str, seed: int, rows: int, batches: int = 1, spread: bool = False,
           noise: int | None = None, window: Sequence[float] = (0, math.inf)) -> Iterator[Row]:
    """Of each layer (`layer`, from 0 on, and `number`, from 1 on) on validation batches of so many rows: the relative
    error of its `output` and, as the closed forms say, of an `entry` of its kernel matrix, of each head in `entries`,
    None where they say nothing. S: mean |x + y|^2 of its heads, `inside`: whether it lies in the window; `uniform`:
    the relative error of uniform attention's output.

    spread: batches from all over the split, else its first ones. noise: the seed of the noise, else that of the cell.
    Of several arms in one cell the entries are those at the S of the first, which is that of exact attention too where
    layers keep running statistics; what is not the arm's own stands in its rows alone, and last, of all layers, the
    `share` of heads inside.
    """
    arms, first = arm if isinstance(arm, Mapping) else {arm: arm}, []
    read = pieces(task_of(start), rows, batches, spread)
    for name, text in arms.items():
        states = looked_at(model_of(start, text, seed if noise is None else noise), read)
        first = first or [state.seen for state in states]
        for i, (state, seen) in enumerate(zip(states, first)):
            shared = {} if name != next(iter(arms)) else of_inputs(state, seen, window)
            yield {"arm": name, "layer": i, "number": i + 1, "output": state.measured.relative_error,
                   **of_entries(state, seen), **shared}
    S = torch.cat([seen.mean_sq_sum.double().flatten() for seen in first])
    yield {"share": float(((window[0] <= S) & (window[1] >= S)).double().mean())}


def of_inputs(state: LinearAttention, seen: Any, window: Sequence[float]) -> Row:
    S = seen.mean_sq_sum.double().flatten().tolist()
    inside = [int(window[0] <= each <= window[1]) for each in S]
    return {"S": S, "S_mean": float(np.mean(S)), "S_least": min(S), "S_largest": max(S), "inside": inside,
            "uniform": state.measured.relative_uniform}


def of_entries(state: LinearAttention, seen: Any) -> Row:
    if state.phi.on_vectors or isinstance(state.phi, SDERF):  # they depend on more than a typical pair
        return {}
    try:
        entries = predicted_errors(state.phi, seen, state.m)
    except NotImplementedError:                               # parts that share their projections
        return {}
    return {"entry": float(entries.square().mean().sqrt()), "entries": entries.tolist()}


def pieces(task: Task, rows: int, batches: int, spread: bool) -> list[Any]:
    """Batches of the validation split; of images one of all."""
    if hasattr(task, "images"):
        return [pictures(task, rows * batches)[0]]
    every = task.batches("validation", Plan(rows))
    chosen = (read := list(every))[::max(1, len(read) // batches)] if spread else islice(every, batches)
    return [given(task, batch) for batch in chosen]


# ---- images


def pictures(task: Task, count: int) -> tuple[Tensor, Tensor]:
    """(n, 3, H, W) and labels (n,): at most that many of the held-out images, of all classes alike, for files are
    listed class by class."""
    held_out, transform = images.load(task.dataset, task.data_dir)["val"], task.description.transform()
    rows = np.unique(np.linspace(0, len(held_out) - 1, min(count, len(held_out))).astype(int))
    return (torch.stack([transform(held_out.read(held_out.sources[row])) for row in rows]),
            torch.from_numpy(held_out.labels[rows]))


@torch.no_grad()
def classified(arm: str, start: str, pixels: int, count: int, batch: int, seed: int) -> Row:
    """Accuracy, loss, milliseconds an image and peak memory on images of `pixels` a side, positions interpolated. For a
    process of its own."""
    task = task_of(start, pixels)
    model = task.build(Mechanism.parse(arm, seed=seed)).eval()
    shown, labels = pictures(task, count)
    logits, times = [], []

    def read() -> None:
        for part in shown.tensor_split(max(1, len(shown) // batch)):
            with Watch() as watch:
                logits.append(model(part).float())
            times.append(watch.ms / len(part))

    mib, scores = added(read), torch.cat(logits)
    return {"accuracy": (scores.argmax(-1) == labels).double().mean().item(), "images": len(labels),
            "loss": F.cross_entropy(scores, labels).item(), "ms_image": float(np.median(times[1:] or times)),
            "mib": mib, "tokens": model.patch_embed.num_patches}


# ---- models of texts: every attention reads the same texts with the same masks


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
