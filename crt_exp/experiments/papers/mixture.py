"""Mixture features, compared with features fitted to moments."""

from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd

from crt_exp.experiments.drawing import CONTROL
from crt_exp.experiments.report import (
    Claim,
    Page,
    PlannedRun,
    Rows,
    Tables,
    line_plot,
    mean_ci,
    mean_table,
    panels,
    sweep,
)

COLUMNS = [16, 64, 256, 512]
FIXED = {
    "exact": "attention=exact",
    "uniform": "attention=uniform",
    "nearfar": "attention=nearfar attention.exact_until=0",
}
FEATURES = ["favorp", "favorpp", "favorsharp", "favormix"]
METHODS = ["uniform", *FEATURES, "nearfar", "exact"]
MINILM = "MiniLM, cosine"
SMOLLM2 = "SmolLM2, 512 tokens, nats"
LONG = "SmolLM2, 2048 tokens, nats"
VISION = "ViT-S, cosine"
SPEECH = "Whisper, nats"


class Task(NamedTuple):
    """How a model is measured."""

    options: str
    metric: str
    seeds: int = 1


SWAP_TEXT = "task=swap_text task.model=models/smollm2-135m task.fit=8 task.length="
TASKS = {
    MINILM: Task(
        "task=swap_embeddings task.model=models/minilm task.length=512 task.fit=8", "cosine"
    ),
    SMOLLM2: Task(f"{SWAP_TEXT}512", "above", 4),
    LONG: Task(f"{SWAP_TEXT}2048", "above", 3),
    SPEECH: Task("task=dictation task.fit=8", "above", 3),
    VISION: Task("task=swap_images task.dataset=imagenette2-224", "cosine"),
}


def swap_runs(
    name: str, methods: Sequence[str], columns: Sequence[int] = (0,), fit_text: str = ""
) -> list[PlannedRun]:
    task = TASKS[name]
    options = f"{task.options} task.fit_text={fit_text}" if fit_text else task.options
    runs = []
    for method in methods:
        for n in columns:
            overrides = FIXED.get(method)
            if overrides is None:
                m = n // 2 if method == "favorsharp" else n
                overrides = f"attention={method} features.m={m}"
            runs += sweep(
                options,
                model=name,
                text=fit_text,
                seed=range(task.seeds),
                method={method: overrides},
                columns={n: ""},
            )
    return runs


MIXTURE = [
    *swap_runs(MINILM, [*FIXED]),
    *swap_runs(MINILM, FEATURES, COLUMNS),
    *swap_runs(SMOLLM2, ["uniform"]),
    *swap_runs(SMOLLM2, FEATURES, COLUMNS[:3]),
    *swap_runs(LONG, ["uniform"]),
    *swap_runs(LONG, FEATURES[1:], [256]),
    *swap_runs(SPEECH, FEATURES[1:], [256]),
    *swap_runs(VISION, [*FIXED]),
    *swap_runs(VISION, FEATURES, COLUMNS),
]
# The sums of M features have the bytes of M (d + 1) / 2d tokens, d = 64: 130 for 256.
WINDOW = sweep(
    TASKS[SMOLLM2].options,
    model=SMOLLM2,
    seed=range(4),
    method={"window": "attention=window attention.first=4 attention.block=63"},
    columns={256: ""},
)


def samples(rows: Rows, name: str, method: str, columns: int, **where) -> pd.Series:
    where = {"sweep": "mixture", "model": name, "columns": columns, **where}
    return rows.values(TASKS[name].metric, method, **where)


def finding(rows: Rows) -> str:
    mixture = mean_ci(samples(rows, SMOLLM2, "favormix", 256))
    favorsharp = mean_ci(samples(rows, SMOLLM2, "favorsharp", 256))
    shifted = mean_ci(samples(rows, SMOLLM2, "favormix", 256, sweep="mixture/shift"))
    window = mean_ci(samples(rows, SMOLLM2, "window", 256, sweep="mixture-state"))
    return (
        f"On SmolLM2-135M without training, 256 columns of the mixture increase the loss by {mixture} "
        f"nats, and 256 columns of FAVOR# by {favorsharp} nats (95% CI, n = {shifted.n} rows). Fitted to "
        f"code instead of prose, the mixture increases the loss by {shifted} nats. A window whose state has the bytes "
        f"of 256 columns increases it by {window} nats."
    )


def claims(rows: Rows) -> list[Claim]:
    claims = []
    for name in (MINILM, SMOLLM2, LONG, SPEECH, VISION):
        model, _, unit = name.rpartition(", ")
        sign = 1 if unit == "cosine" else -1
        gains = {}
        for n in COLUMNS:
            gain = samples(rows, name, "favormix", n) - samples(rows, name, "favorsharp", n)
            gains[f"{n} columns"] = sign * gain.dropna()
        text = f"{model}: the mixture is closer to exact attention than FAVOR#"
        claims.append(Claim(text, gains, unit=unit.replace("cosine", "")))
    return claims


def tables(rows: Rows) -> Tables:
    columns = {}
    for name, task in TASKS.items():
        where = {"sweep": "mixture", "model": name, "columns": [0, 256]}
        columns[name] = {"metric": task.metric, **where}
    title = "Without training, 256 columns: cosine of the states to those with exact attention, loss increase over it"
    return {title: mean_table(rows, columns, METHODS, spec=".3f")}


def figure(rows: Rows):
    fig, axes = panels(3)
    for ax, name in zip(axes, (MINILM, SMOLLM2, VISION)):
        metric = TASKS[name].metric
        line_plot(ax, rows, "columns", metric, FEATURES, log="x", sweep="mixture", model=name)
        uniform = float(samples(rows, name, "uniform", 0).mean())
        ax.axhline(uniform, color=CONTROL, lw=1, ls="--", label="uniform attention")
        ax.legend(fontsize=8, frameon=False)
        ax.set(title=name.rpartition(",")[0], xlabel="columns")
        ax.set_ylabel("cosine to exact attention (higher is better)")
        if metric == "above":
            ax.set_ylabel("loss increase over exact, nats (lower is better)")
    return fig


page = Page(
    "mixture",
    title="Mixture: positive features fitted to queries and keys",
    finding=finding,
    small={
        "mixture": MIXTURE,
        "mixture/shift": swap_runs(SMOLLM2, ["favormix"], [256], "code"),
        "mixture-state": WINDOW,
    },
    columns=["model", "text", "method", "columns"],
    metrics=["cosine", "above"],
    reduced=False,
    measured=[
        "Attention of all layers is replaced, of Whisper in the encoder, without training. FAVOR#, which makes two "
        "columns of a projection, has half as many projections.",
        "Mixtures and causal FAVOR++ and FAVOR# are fitted to 8 training rows, documents, utterances or images. "
        "Bidirectional FAVOR++ and FAVOR# are fitted to each input itself.",
        "Samples: 12 documents of 512 tokens (MiniLM), 4 or 3 rows (SmolLM2), 3 groups of 4 utterances (Whisper), 16 "
        "images of 224 pixels (ViT-S). One seed of projections in all; each row and each group has its own.",
        "ViT-S is DINOv2's checkpoint, fine-tuned for saliency.",
        "Equal bytes: a window stores its 4 first tokens and two blocks. After adapters, see [adapt](adapt.md).",
        "Code: the source of Python's standard library.",
    ],
    tables=tables,
    claims=claims,
    figure=figure,
)
