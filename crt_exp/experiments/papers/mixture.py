"""Mixture features, compared with features fitted to moments."""

from typing import NamedTuple

import pandas as pd

from crt_exp.experiments.drawing import CONTROL
from crt_exp.experiments.report import (
    Claim,
    Page,
    PlannedRun,
    Rows,
    Tables,
    filters_over,
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
FITTED = "favormix"
DRAWN = "favormix unbiased"
FEATURES = {
    "favorp": "attention=favorp",
    "favorpp": "attention=favorpp",
    "favorsharp": "attention=favorsharp",
    FITTED: "attention=favormix",
    DRAWN: "attention=favormix features.weights=unbiased",
}
LABELS = {
    "uniform": "uniform",
    "favorp": "FAVOR+",
    "favorpp": "FAVOR++",
    "favorsharp": "FAVOR#",
    FITTED: "mixture",
    DRAWN: "mixture, unbiased",
    "nearfar": "near-far",
    "exact": "exact",
}
MINILM = "MiniLM, cosine"
SMOLLM2 = "SmolLM2, 512 tokens, nats"
LONG = "SmolLM2, 2048 tokens, nats"
VISION = "ViT-S, cosine"
SPEECH = "Whisper, word errors, %"
WRITTEN = "Whisper, nats"
HEADS = "MiniLM, relative error of attention"


class Task(NamedTuple):
    """How a model is measured."""

    options: str
    metric: str
    seeds: int


TASKS = {
    MINILM: Task(
        "task=swap_embeddings task.model=models/minilm task.length=512 task.fit=8", "cosine", 1
    ),
    SMOLLM2: Task(
        "task=swap_text task.model=models/smollm2-135m task.length=512 task.fit=8", "above", 4
    ),
    LONG: Task(
        "task=swap_text task.model=models/smollm2-135m task.length=2048 task.fit=8", "above", 3
    ),
    SPEECH: Task("task=swap_speech task.fit=8", "wer", 3),
    WRITTEN: Task("task=dictation task.fit=8", "above", 3),
    VISION: Task("task=swap_images task.dataset=imagenette2-224", "cosine", 1),
    HEADS: Task(
        "task=fidelity task.model=${oc.env:CRT_DATA}/models/minilm task.text=valid task.calibration=train "
        "task.length=512 task.calibration_texts=8",
        "attention_error",
        1,
    ),
}


def method_overrides(method: str, columns: int) -> str:
    if method in FIXED:
        return FIXED[method]
    projections = columns // 2 if method == "favorsharp" else columns
    return f"{FEATURES[method]} features.m={projections}"


def swap_runs(name: str, methods, columns=(0,), fit_text: str = "") -> list[PlannedRun]:
    options = TASKS[name].options
    if fit_text:
        options = f"{options} task.fit_text={fit_text}"
    runs = []
    for method in methods:
        for n in columns:
            runs += sweep(
                options,
                model=name,
                text=fit_text,
                seed=range(TASKS[name].seeds),
                method={method: method_overrides(method, n)},
                columns={n: ""},
            )
    return runs


def samples(rows: Rows, name: str, method: str, columns: int, **where) -> pd.Series:
    """Values of a method by sample; word errors in percent."""
    if method in FIXED:
        columns = 0
    where = {"sweep": "mixture", "model": name, "columns": columns, **where}
    values = rows.values(TASKS[name].metric, method, **where)
    return 100 * values if name == SPEECH else values


FINE_TUNED = sweep(
    "task=glue task.model=models/minilm task.bucketed=true task.parts=24 task.max_length=64 task.dataset=sst2 "
    "task.held_out=500 trainer.steps=400 trainer.eval_every=1000000 trainer.save_every=1000000",
    model="MiniLM, SST-2",
    seed=[0],
    columns={256: ""},
    method={method: method_overrides(method, 256) for method in ("favorsharp", FITTED)},
    **{"trainer.lr": [1e-4, 2e-4]},
)


ADAPTIVE = [method for method in FEATURES if method != "favorp"]
MIXTURE = [
    *swap_runs(MINILM, FIXED),
    *swap_runs(MINILM, FEATURES, COLUMNS),
    *swap_runs(SMOLLM2, ["uniform"]),
    *swap_runs(SMOLLM2, FEATURES, COLUMNS[:3]),
    *swap_runs(LONG, ["uniform"]),
    *swap_runs(LONG, ["favorpp", "favorsharp", FITTED], [256]),
    *swap_runs(SPEECH, ["exact", "uniform"]),
    *swap_runs(SPEECH, FEATURES, [64, 256]),
    *swap_runs(WRITTEN, ADAPTIVE, [256]),
    *swap_runs(VISION, FIXED),
    *swap_runs(VISION, FEATURES, COLUMNS),
    *swap_runs(HEADS, ["uniform", "nearfar"]),
    *swap_runs(HEADS, FEATURES, [64, 256]),
]
SHIFT = [
    *swap_runs(MINILM, [FITTED, DRAWN], [256], "code"),
    *swap_runs(SMOLLM2, ["favorsharp", FITTED, DRAWN], [256], "code"),
]

# The sums of M features have the bytes of M (d + 1) / 2d tokens, d = 64: 33 and 130.
WINDOWS = {64: "attention.block=14", 256: "attention.block=63"}


def state_runs() -> list[PlannedRun]:
    """Windows that store as many bytes as features do: two blocks and 4 first tokens."""
    runs = []
    for name, columns in ((SMOLLM2, 64), (SMOLLM2, 256), (LONG, 256)):
        runs += sweep(
            TASKS[name].options,
            model=name,
            seed=range(TASKS[name].seeds),
            method={"window": f"attention=window attention.first=4 {WINDOWS[columns]}"},
            columns={columns: ""},
        )
    return runs


def finding(rows: Rows) -> str:
    increases = {}
    for method in (FITTED, "favorsharp"):
        increases[method] = mean_ci(samples(rows, SMOLLM2, method, 256))
    shifted = mean_ci(samples(rows, SMOLLM2, FITTED, 256, sweep="mixture/shift", text="code"))
    window = mean_ci(samples(rows, SMOLLM2, "window", 256, sweep="mixture-state"))
    return (
        f"On SmolLM2-135M without training, 256 columns of the mixture increase the loss by {increases[FITTED]} "
        f"nats, and 256 columns of FAVOR# by {increases['favorsharp']} nats (95% CI, n = {shifted.n} rows). Fitted to "
        f"code instead of prose, the mixture increases the loss by {shifted} nats. A window whose state has the bytes "
        f"of 256 columns increases it by {window} nats."
    )


def claims(rows: Rows) -> list[Claim]:
    claims = []
    # Word errors are near 100%, where losses still differ, and losses count for more than heads.
    for name in (MINILM, SMOLLM2, LONG, WRITTEN, VISION):
        model, _, unit = name.rpartition(", ")
        sign = 1 if unit == "cosine" else -1
        gains = {}
        for n in COLUMNS:
            gain = samples(rows, name, FITTED, n) - samples(rows, name, "favorsharp", n)
            gains[f"{n} columns"] = sign * gain.dropna()
        text = f"{model}: the mixture is closer to exact attention than FAVOR#"
        claims.append(Claim(text, gains, unit=unit.replace("cosine", "")))
    return claims


STATE = "Equal bytes of state: loss increase of SmolLM2 without training, nats (lower is better)"


def state_table(rows: Rows) -> pd.DataFrame:
    """Tabulate windows and features that store the same number of bytes."""
    table = {}
    for name, columns, keys in ((SMOLLM2, 64, 33), (SMOLLM2, 256, 130), (LONG, 256, 130)):
        tokens = name.split(", ")[1]
        cells = table.setdefault(f"{tokens}, state of {keys} keys and values", {})
        window = samples(rows, name, "window", columns, sweep="mixture-state")
        cells["window"] = f"{mean_ci(window):.2f}"
        for method in (FITTED, "favorsharp", "favorpp"):
            values = samples(rows, name, method, columns)
            cells[LABELS[method]] = f"{mean_ci(values):.2f}"
    return pd.DataFrame(table).rename_axis("method")


class Column(NamedTuple):
    """A column of a table: what is measured, columns of the features, further filters."""

    name: str
    columns: int
    where: dict[str, str] = {}


def method_table(rows: Rows, columns: dict[str, Column], methods=LABELS) -> pd.DataFrame:
    table = {}
    for title, column in columns.items():
        table[title] = {}
        for method in methods:
            values = samples(rows, column.name, method, column.columns, **column.where)
            if len(values):
                text = f"{mean_ci(values):.3f}"
                if column.name == SPEECH:
                    text = f"{values.min():.0f} to {values.max():.0f}"
                table[title][LABELS[method]] = text
    frame = pd.DataFrame(table, index=[LABELS[method] for method in methods], dtype=object)
    return frame.dropna(how="all").fillna("").rename_axis("method")


def tables(rows: Rows) -> Tables:
    columns, shifted = {}, {}
    for name in (MINILM, SMOLLM2):
        for n in (64, 256):
            columns[f"{name}, {n} columns"] = Column(name, n)
        code = {"sweep": "mixture/shift", "text": "code"}
        shifted[f"{name}, WikiText-2"] = Column(name, 256)
        shifted[f"{name}, code"] = Column(name, 256, code)
    for name in (LONG, WRITTEN, SPEECH, VISION, HEADS):
        columns[f"{name}, 256 columns"] = Column(name, 256)
    title = (
        "Without training: cosine of the states to those with exact attention, "
        "loss increase over it, word errors"
    )
    tables = {title: method_table(rows, columns), STATE: state_table(rows)}
    for name in (MINILM, SMOLLM2, VISION):
        by_columns = {f"{n} columns": Column(name, n) for n in COLUMNS}
        tables[f"{name}, by columns"] = method_table(rows, by_columns, FEATURES)
    title = "Fitted to WikiText-2 or to code, 256 columns"
    tables[title] = method_table(rows, shifted, ["favorsharp", FITTED, DRAWN])
    where = {"metric": "accuracy", "sweep": "mixture/fine-tuned", "split": "parts"}
    rates = filters_over("lr", (1e-4, 2e-4), "accuracy, %, learning rate {}", **where)
    title = "Fine-tuned: MiniLM on SST-2, 256 columns"
    tables[title] = mean_table(rows, rates, LABELS, 100, ".1f")
    return tables


def figure(rows: Rows):
    fig, axes = panels(3)
    names = {method: LABELS[method] for method in FEATURES}
    loss = "loss increase over exact, nats (lower is better)"
    cosine = "cosine to exact attention (higher is better)"
    for ax, (name, ylabel) in zip(axes, {MINILM: cosine, SMOLLM2: loss, VISION: cosine}.items()):
        where = {"sweep": "mixture", "model": name}
        metric = TASKS[name].metric
        line_plot(ax, rows, "columns", metric, names, log="x", dotted=[DRAWN], **where)
        uniform = float(samples(rows, name, "uniform", 0).mean())
        ax.axhline(uniform, color=CONTROL, lw=1, ls="--", label="uniform attention")
        ax.legend(fontsize=8, frameon=False)
        ax.set(title=name.rpartition(",")[0], xlabel="columns", ylabel=ylabel)
    return fig


page = Page(
    "mixture",
    title="Mixture: positive features fitted to queries and keys",
    finding=finding,
    small={
        "mixture": MIXTURE,
        "mixture/shift": SHIFT,
        "mixture-state": state_runs(),
        "mixture/fine-tuned": FINE_TUNED,
    },
    columns=["model", "text", "method", "columns", "lr", "split"],
    metrics=["cosine", "above", "wer", "attention_error", "accuracy"],
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
        "SST-2: 400 steps, at most 64 tokens. Each sample is one of 24 parts of dev.",
    ],
    tables=tables,
    claims=claims,
    figure=figure,
)
