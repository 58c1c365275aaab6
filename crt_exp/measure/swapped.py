"""A trained model with other attention and without training: its losses, and how far its layers are from exact
attention; on texts, and on heads that are drawn from its moments; and what answers without a model.

Models are kept runs with exact attention; their weights are put into the other as task.init does it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from crt_exp.attention import exact_attention
from crt_exp.attention.linear import LinearAttention
from crt_exp.data import glue, images
from crt_exp.data.text import official_file
from crt_exp.features import SDERF
from crt_exp.hints import Count, NotNegative, Several, Whole
from crt_exp.mechanism import Mechanism
from crt_exp.metrics import METRICS
from crt_exp.measure import fidelity
from crt_exp.advice.bench import looked_at
from crt_exp.measure.base import Measurement, check_estimates
from crt_exp.measure.captured import relative_error
from crt_exp.measure.subject import Subject
from crt_exp.measure.texts import prepare
from crt_exp.measure.variance import predicted_errors
from crt_exp.runner.configuration import kept_task
from crt_exp.schema import checked
from crt_exp.tasks.base import Batch, Plan, Reader, Task
from crt_exp.times import Watch, added

Row = dict[str, Any]


@lru_cache(maxsize=8)
def task_of(start: str, size: int | None = None) -> Task:
    """The task of a run, which starts from it; size: of its images, where it is another."""
    return kept_task(start, init=start, **({"size": size} if size else {}))


@checked("task")
class SwapLoss(Measurement):
    """task=swap_loss: metrics of a kept run with other attention and without training, one row a split."""

    metric = "loss"

    def __init__(self, start: str, splits: Several[str], offset: Whole = 0, fit: Whole = 0):
        self.start, self.splits, self.offset, self.fit = start, splits, offset, fit

    @torch.no_grad()
    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[Row]:
        task = task_of(self.start)
        model = task.build(replace(mechanism, seed=self.offset + seed)).eval()
        if self.fit:
            looked_at(model, [given(task, batch) for batch in islice(task.batches("train", Plan(1)), self.fit)])
        read = getattr(task, "metrics", task.evaluate)  # without what only a run's end asks for
        for split in self.splits:
            found = read(model, split, Reader(task))
            yield {"split": split, "step": 0} | {metric: value for metric, value in found.items()
                                                 if isinstance(value, (int, float))}


def given(task: Task, batch: Batch) -> Any:
    """What the model is called with."""
    if hasattr(task, "arguments"):
        return task.arguments(batch)
    return {key: value for key, value in batch.items() if key != "labels"}


@checked("task")
class SwapLayers(Measurement):
    """task=swap_layers: of each layer of a kept run with other attention, on validation batches: the relative error of
    its `output`, that of `uniform` attention, and of its heads S, the mean |x + y|^2, whether S is `inside` the window,
    and the predicted error of an entry of the kernel matrix (`entries`; `entry`: the root of their mean square), where
    the closed forms know it. Last, the mean `error` of the outputs and the `share` of heads inside."""

    metric = "error"

    def __init__(self, start: str, rows: Count, batches: Count = 1, spread: bool = False, noise: Whole | None = None,
                 window: Sequence[NotNegative] = (4, 24)):
        self.start, self.count, self.batches, self.spread = start, rows, batches, spread
        self.noise, self.window = noise, window

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[Row]:
        check_estimates(mechanism)
        task, errors, inside = task_of(self.start), [], []
        model = task.build(replace(mechanism, seed=seed if self.noise is None else self.noise)).eval()
        for layer, state in enumerate(looked_at(model, self.pieces(task))):
            S = state.seen.mean_sq_sum.double().flatten().tolist()
            errors.append(state.measured.relative_error)
            inside.append([int(self.window[0] <= each <= self.window[1]) for each in S])
            yield {"layer": layer, "output": errors[-1], "uniform": state.measured.relative_uniform, "S": S,
                   "S_mean": float(np.mean(S)), "inside": inside[-1], **of_entries(state)}
        yield {"error": float(np.mean(errors)), "share": float(np.mean(inside))}

    def pieces(self, task: Task) -> list[Any]:
        """Batches of the validation split; of images one of all."""
        if hasattr(task, "images"):
            return [pictures(task, self.count * self.batches)[0]]
        every = task.batches("validation", Plan(self.count))
        if not self.spread:
            return [given(task, batch) for batch in islice(every, self.batches)]
        every = list(every)
        return [given(task, batch) for batch in every[::max(1, len(every) // self.batches)]]


def of_entries(state: LinearAttention) -> Row:
    if state.phi.on_vectors or isinstance(state.phi, SDERF):  # they depend on more than a typical pair
        return {}
    try:
        entries = predicted_errors(state.phi, state.seen, state.m)
    except NotImplementedError:                               # parts that share their projections
        return {}
    return {"entry": float(entries.square().mean().sqrt()), "entries": entries.tolist()}


def pictures(task: Task, count: int) -> tuple[Tensor, Tensor]:
    """(n, 3, H, W) and labels (n,): at most that many of the held-out images, of all classes alike, for files are
    listed class by class."""
    held_out, transform = images.load(task.dataset, task.data_dir)["val"], task.description.transform()
    rows = np.unique(np.linspace(0, len(held_out) - 1, min(count, len(held_out))).astype(int))
    return (torch.stack([transform(held_out.read(held_out.sources[row])) for row in rows]),
            torch.from_numpy(held_out.labels[rows]))


@checked("task")
class SwapImages(Measurement):
    """task=swap_images: accuracy, loss, milliseconds an image and peak memory of a kept run of task=imagenet with other
    attention, on images of another size; positions are interpolated. For a process of its own."""

    metric, lower_is_better = "accuracy", False

    def __init__(self, start: str, pixels: Count, count: Count, batch: Count):
        self.start, self.pixels, self.count, self.batch = start, pixels, count, batch

    @torch.no_grad()
    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[Row]:
        task = task_of(self.start, self.pixels)
        model = task.build(replace(mechanism, seed=seed)).eval()
        shown, labels = pictures(task, self.count)
        logits, times = [], []

        def read() -> None:
            for part in shown.tensor_split(max(1, len(shown) // self.batch)):
                with Watch() as watch:
                    logits.append(model(part).float())
                times.append(watch.ms / len(part))

        mib, scores = added(read), torch.cat(logits)
        yield {"accuracy": (scores.argmax(-1) == labels).double().mean().item(),
               "loss": F.cross_entropy(scores, labels).item(), "ms_image": float(np.median(times[1:] or times)),
               "mib": mib}


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


# ---- answers to the tasks of GLUE without a model


CUTS = 101         # quantiles of the overlap among which a class task chooses its cut


def scores(arm: str, data: str, seed: int, data_dir: str | None = None) -> Iterator[dict[str, Any]]:
    """Of each way to answer (`arm`), the task's metric, as a fraction, under its name. data_dir: as in task=glue."""
    prepare([f"task.data_dir={data_dir}"])
    metric = glue.TASKS[data].metrics[0]
    for name, (answers, labels) in answers_of(data, data_dir).items():
        yield {"arm": name, metric: float(METRICS[metric](answers, labels))}


def answers_of(data: str, data_dir: str | None = None) -> dict[str, tuple[Sequence[float], Sequence[float]]]:
    """Control -> its answers on the dev split, and the right ones."""
    train, dev = (glue.load(data, split, data_dir) for split in ("train", "dev"))
    classes = bool(glue.TASKS[data].names)
    usual = int(np.bincount(train.labels).argmax()) if classes else float(np.mean(train.labels))
    made = {"majority class": ([usual] * len(dev), list(dev.labels))}
    if dev.sentence2 is not None:
        shared = overlaps(dev)
        answers = cut(data, overlaps(train), train.labels, shared) if classes else shared.tolist()
        made["word overlap"] = (answers, list(dev.labels))
    return made


def overlaps(examples: glue.Examples) -> np.ndarray:
    """Words of both sentences over words of either, (n,)."""
    words = [[set(text.lower().split()) for text in texts] for texts in (examples.sentence1, examples.sentence2)]
    return np.array([len(a & b) / max(1, len(a | b)) for a, b in zip(*words)])


def cut(data: str, shared: np.ndarray, labels: Sequence[int], dev: np.ndarray) -> list[int]:
    """Classes of the dev split by whether the overlap lies above the cut, and in the sense, that are best in training;
    of three classes the first two alone."""
    metric, cuts = METRICS[glue.TASKS[data].metrics[0]], np.quantile(shared, np.linspace(0, 1, CUTS))
    tried = [(metric((shared > at) == high, labels), at, high) for at in cuts for high in (True, False)]
    _, at, high = max(tried)
    return ((dev > at) == high).astype(int).tolist()
