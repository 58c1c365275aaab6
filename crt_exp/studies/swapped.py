"""What `make fidelity` measures: language models that are trained here with exact attention, then swapped.

Every attention reads the same texts with the same masks and starts from the same weights: a run of task=fidelity
directly after the swap, a grid of task=mlm for what training on does to it, and heads drawn from the model's moments
for texts of any length.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crt_exp.attention import exact_attention
from crt_exp.data.text import official_file
from crt_exp.mechanism import Mechanism
from crt_exp.studies import runs, training
from crt_exp.studies.captured import relative_error
from crt_exp.studies.cells import Cells, Draw, Key
from crt_exp.studies.subject import Subject
from crt_exp.studies.training import Grid

TEXTS = {"above_texts": "above", "hidden_error_texts": "hidden_error", "attention_error_texts": "attention_error",
         "cosine_texts": "cosine"}
LAYERS = {"attention_error_layers": "attention_error", "hidden_error_layers": "hidden_error"}
CELLS, AT = 64, 512  # of near-far attention at that length; they grow as its root


def measure(name: str, sources: Sequence[str], size: Mapping[str, Any], keep: bool = False) -> Iterator[Draw]:
    """Metrics of a text (units; several draws of the noise): above, hidden_error, attention_error, cosine; by layer (x,
    table "layers"): S, the least, mean and largest |x + y|^2 of its heads, and both errors. loss of seeds by step, of
    models trained on, where uniform attention costs at least `least` directly after the swap."""
    home, cells = runs.Home(training.HOME, tuple(sources)), Cells(name, sources, keep)
    passed = {}
    for model, given in size["models"].items():
        grid = Grid(settings={}, arms={"exact": []}, metrics=["loss"], before=given["before"],
                    workers=size.get("workers"))
        training.train_before(grid, home, cells, [("exact", 0)], name)
        start = str(home.place(grid.stages("exact", 0, home)[-1]))
        for setting, options in given["settings"].items():
            key = {"overrides": ["task=fidelity", f"task.model={start}", *size["common"], *options],
                   "sources": list(sources)}
            cells.fill([key], records, f"{name}: {setting}", workers=1)
            yield from of_records(cells, key, setting)
            passed.setdefault(model, cost_of_uniform(cells[key]) >= size["least"])
        if "matched" in given:
            yield from of_heads(cells, start, given["matched"], f"{name}: matched heads", size.get("workers"))
    for grid in size["grids"]:
        if passed[grid["model"]]:
            rest = {key: value for key, value in grid.items() if key != "model"}
            yield from training.measured(Grid(**rest), home, cells, name)


def records(overrides: list[str], sources: list[str]) -> list[dict[str, Any]]:
    """Of a run of task=fidelity, all but the last, which holds means."""
    return runs.Home(training.HOME, tuple(sources)).passing(overrides)[:-1]


def cost_of_uniform(swaps: list[dict[str, Any]]) -> float:
    return float(np.mean([each["above_texts"] for each in swaps if each.get("attention") == "uniform"]))


def of_records(cells: Cells, key: Key, setting: str) -> Iterator[Draw]:
    for record in cells[key]:
        if record["split"] == "heads":
            S = record["mean_sq_sum"]
            for metric, value in (("S", np.mean(S)), ("S_least", min(S)), ("S_largest", max(S))):
                yield cells.draw(key, setting, "exact", metric, float(value), x=record["layer"], table="layers")
            continue
        arm = record["attention"] + (f" m={record['m']}" if record["m"] else "")
        for field, metric in TEXTS.items():
            for text, value in enumerate(record[field]):
                yield cells.draw(key, setting, arm, metric, value, text)
        for field, metric in LAYERS.items():
            for layer, value in enumerate(record[field]):
                yield cells.draw(key, setting, arm, metric, value, record["draw"], layer, "layers")


# ---- heads drawn from normal laws with the moments of the model's own queries, keys and values


def of_heads(cells: Cells, start: str, given: Mapping[str, Any], label: str, workers: int | None) -> Iterator[Draw]:
    """Metric attention_error of `setting`, x: tokens, units: draws, a value a layer. "nearfar cells" in an arm: with
    cells as the root of the length."""
    reading = {"start": start, "texts": given["texts"], "at": given["at"]}
    keys = {place: reading | {"arm": place[0], "length": place[1], "draw": place[2]}
            for place in product(given["arms"], given["lengths"], range(given["draws"]))}
    cells.fill([*keys.values()], matched, label, workers)
    for (arm, length, draw), key in keys.items():
        for error in cells[key]:
            yield cells.draw(key, given["setting"], arm, "attention_error", error, draw, length)


def matched(start: str, texts: int, at: int, arm: str, length: int, draw: int) -> list[float]:
    """Relative error of the output, bidirectional, a number a layer. Tokens are independent: nothing is near."""
    if arm.endswith(" cells"):
        arm += f"={8 * round(CELLS * (length / AT) ** 0.5 / 8)}"
    errors = []
    for number, laws in enumerate(moments(start, texts, at)):
        generator = torch.Generator().manual_seed(10_000 * draw + number)
        q, k, v = (normal(mean, root, length, generator) for mean, root in laws)
        heads, d = q.shape[1], q.shape[3]
        with torch.no_grad():
            layer = Mechanism.parse(arm, seed=draw).layer(heads, d, layer=number).eval()
            exact = exact_attention(q / d**0.25, k / d**0.25, v)
            errors.append(float(relative_error(layer(q, k, v), exact)))
    return errors


@lru_cache(maxsize=2)
def moments(start: str, texts: int, length: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Of q, k and v of each layer: mean (1, H, 1, d) and root of the covariance (1, H, d, d), over texts and tokens."""
    subject = Subject(start, str(official_file("wikitext2", "test")), None, None, length, texts, 1, seed=0,
                      cache_dir="outputs/texts/tokens")
    return [[law(torch.cat([getattr(calls[i], name) for calls in subject.calls], 2)) for name in ("q", "k", "v")]
            for i in range(len(subject.calls[0]))]


def law(t: Tensor) -> tuple[Tensor, Tensor]:
    mean = t.double().mean(2, keepdim=True)
    centred = t.double() - mean
    values, vectors = torch.linalg.eigh(centred.mT @ centred / t.shape[2])
    return mean, vectors * values.clamp(min=0).sqrt().unsqueeze(-2)


def normal(mean: Tensor, root: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """(1, H, length, d) float32."""
    drawn = torch.randn(1, mean.shape[1], length, mean.shape[3], generator=generator, dtype=torch.float64)
    return (mean + drawn @ root.mT).float()
