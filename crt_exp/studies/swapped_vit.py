"""What `make fig4-left` measures: a ViT that is trained with exact attention, swapped, uptrained, and from scratch.

Grids of task=imagenet; of the exact checkpoint also its layers, and images longer than it was trained on.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from crt_exp.data import images as data
from crt_exp.mechanism import Mechanism
from crt_exp.models import vision
from crt_exp.studies import runs, training
from crt_exp.studies.bench import looked_at
from crt_exp.studies.cells import Cells, Draw, Key
from crt_exp.studies.predicted import predicted_error
from crt_exp.times import Watch, added
from crt_exp.studies.training import Grid

LOW, HIGH = 4, 24  # mean |x + y|^2 at which the closed forms of FAVOR+ and FAVOR++ differ
COMPARED = ("favorp", "favorpp")
CAPTURED = 64  # held-out images on which queries and keys are captured
LONG_BATCH = 8


def measure(name: str, sources: Sequence[str], size: Mapping[str, Any], keep: bool = False) -> Iterator[Draw]:
    """The draws of grids, of which the first starts from the exact checkpoint without a step; before it, in the table
    "layers" (x: layer, units: draws of the noise): S, predicted and measured errors, their ratios and the share of
    heads in the window. The others are trained where the checkpoint can tell: uniform attention costs at least
    `costs`, and the share and the predicted ratio are at least `heads` and `error`. Long images: setting `long`."""
    home, cells = runs.Home(training.HOME, tuple(sources)), Cells(name, sources, keep)
    first, *grids = [Grid(**each) for each in size["grids"]]
    training.train_before(first, home, cells, [("exact", 0)], name)
    run = str(home.place(first.stages("exact", 0, home)[-1]))
    keys = {(arm, seed): {"run": run, "dataset": size["dataset"], "name": arm, "m": size["m"], "seed": seed}
            for arm in COMPARED for seed in range(size["captures"])}
    cells.fill([*keys.values()], layers, f"{name}: errors of layers")
    setting = next(iter(first.settings))
    measured = list(of_layers(cells, keys, setting, size["m"]))
    yield from measured
    made = list(training.measured(first, home, cells, name))
    yield from made
    if not can_tell(measured, made, size):
        return
    for grid in grids:
        yield from training.measured(grid, home, cells, name)
    yield from of_long(cells, run, size, name)


def can_tell(layers: Sequence[Draw], made: Sequence[Draw], size: Mapping[str, Any]) -> bool:
    loss = {draw.arm: draw.value for draw in made if draw.metric == "loss" and draw.unit == 0}
    value = {draw.metric: draw.value for draw in layers}
    return (loss["uniform"] - loss["exact"] >= size["costs"] and value["share"] >= size["heads"]
            and value["predicted_ratio"] >= size["error"])


def of_layers(cells: Cells, keys: Mapping[tuple[str, int], Key], setting: str, m: int) -> Iterator[Draw]:
    logs: dict[str, list[float]] = {"predicted": [], "measured": []}
    for (arm, seed), key in keys.items():
        for i, layer in enumerate(cells[key]):
            for metric in ("predicted", "measured"):
                yield cells.draw(key, setting, f"{arm} m={m}", metric, layer[metric], seed, i, "layers")
                logs[metric].append((1 if arm == COMPARED[0] else -1) * np.log(layer[metric]))
            if arm == COMPARED[0]:
                yield cells.draw(key, setting, "uniform", "measured", layer["uniform"], seed, i, "layers")
    first = keys[COMPARED[0], 0]
    S = [layer["S"] for layer in cells[first]]
    for i, each in enumerate(S):
        for metric, value in (("S", np.mean(each)), ("S_least", min(each)), ("S_largest", max(each))):
            yield cells.draw(first, setting, "exact", metric, float(value), x=i, table="layers")
    inside = float(np.mean([LOW <= s <= HIGH for each in S for s in each]))
    yield cells.draw(first, setting, "exact", "share", inside, table="layers")
    for metric, values in logs.items():  # geometric means over layers and draws
        yield cells.draw(first, setting, f"{COMPARED[0]} m={m}", f"{metric}_ratio", float(np.exp(2 * np.mean(values))),
                         table="layers")


def of_long(cells: Cells, run: str, size: Mapping[str, Any], name: str) -> Iterator[Draw]:
    given = size["long"]
    keys = {arm: {"run": run, "dataset": size["dataset"], "size": given["pixels"], "count": given["images"],
                  "arm": arm, "options": options} for arm, options in given["arms"].items()}
    cells.fill([*keys.values()], long, f"{name}: long images", apart=True)
    for arm, key in keys.items():
        for metric, value in cells[key].items():
            yield cells.draw(key, given["setting"], arm, metric, value)



def shown(kept: vision.KeptClassifier, images: data.Images, rows: Sequence[int]) -> Tensor:
    """(len(rows), 3, H, W), as the model takes them."""
    return torch.stack([kept.transform(images.read(images.sources[row])) for row in rows])


def spread(images: data.Images, count: int) -> np.ndarray:
    """Rows of at most that many images, of all classes alike: files are listed class by class."""
    return np.unique(np.linspace(0, len(images) - 1, min(count, len(images))).astype(int))


def layers(run: str, dataset: str, name: str, m: int, seed: int) -> list[dict[str, Any]]:
    """Of each layer: mean |x + y|^2 of its heads, and the errors: predicted of one entry of the kernel matrix, measured
    of the layer's output, and uniform attention's."""
    kept, held_out = vision.load(run), data.load(dataset)["val"]
    model = Mechanism.of(name, m=m, seed=seed).swap(kept.model)
    states = looked_at(model, [shown(kept, held_out, spread(held_out, CAPTURED))])
    return [{"S": s.seen.mean_sq_sum.double().tolist(), "predicted": predicted_error(s.phi, s.seen, m),
             "measured": s.measured.relative_error, "uniform": s.measured.relative_uniform} for s in states]


def long(run: str, dataset: str, size: int, count: int, arm: str, options: dict[str, Any]) -> dict[str, float]:
    """Accuracy, loss, milliseconds an image, peak memory on images of `size` pixels a side, positions interpolated.
    For a process of its own."""
    kept, held_out = vision.load(run, size), data.load(dataset)["val"]
    name = arm.split()[0]
    model = kept.model if name == "exact" else Mechanism.of(name, **options).swap(kept.model)
    rows = spread(held_out, count)
    batches = [shown(kept, held_out, part) for part in np.array_split(rows, max(1, len(rows) // LONG_BATCH))]
    logits, times = [], []

    def read() -> None:
        for batch in batches:
            with Watch() as watch:
                logits.append(model(batch).float())
            times.append(watch.ms / len(batch))

    with torch.no_grad():
        mib = added(read)
    scores, labels = torch.cat(logits), torch.from_numpy(held_out.labels[rows])
    return {"accuracy": (scores.argmax(-1) == labels).double().mean().item(),
            "loss": nn.functional.cross_entropy(scores, labels).item(), "images": len(rows),
            "ms_image": float(np.median(times[1:] or times)), "mib": mib,
            "tokens": model.patch_embed.num_patches}
