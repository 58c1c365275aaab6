"""Performers Figures 7 (left) and 19: images as sequences of values, and the Long Range Arena."""

import pandas as pd

from crt_exp.experiments.papers.parts.long_runs import (
    ARENA,
    DEEP_REFORMER,
    FULL,
    IMAGENET,
    IMAGES,
    SMALL,
)
from crt_exp.experiments.report import (
    Claim,
    Page,
    Rows,
    Tables,
    control_checks,
    dot_plot,
    filters_over,
    label,
    mean_ci,
    mean_table,
    panels,
)

METRICS = {  # unit, factor, format
    "bits_per_dim": ("bits per dimension", 1, ".3f"),
    "accuracy": ("accuracy, %", 100, ".1f"),
}
PAPER = {"FAVOR+": "3.69", "ReLU": "3.67", "SMREG": "3.67"}  # ImageNet64
LOOKS = (3, 5)  # first seeds that were added after the results of earlier ones had been seen
TEST = {"sweep": ("pixels", "lra"), "split": "test"}


def finding(rows: Rows) -> str:
    gains = rows.paired("favorp m=16", "elu", "accuracy", dataset="ListOps", split="test")
    gain = mean_ci(100 * gains)
    return (
        "On small images, a window has the lowest loss, and FAVOR+, ReLU and SMREG do not differ (n = 5 seeds). On "
        f"ListOps, FAVOR+ is more accurate than ELU by {gain} points (95% CI, n = {gain.n} seeds)."
    )


AFTER = "3.67 against 3.69 after 100k steps"
NEIGHBOURS = "Reformer attends to neighbouring pixels, and a window does best here"
LONGER = f"{IMAGENET}, 160 GPU hours"
TWO_LAYERS = "all models have two layers"
IMAGE_CLAIMS = {  # text -> methods, the paper's result, explanation
    "ReLU has a lower loss than FAVOR+": ("favorp", "relu", AFTER, ""),
    "SMREG has a lower loss than FAVOR+": ("favorp", "smreg", AFTER, ""),
    "FAVOR+ has a lower loss than Reformer at equal depth": ("reformer", "favorp", "", NEIGHBOURS),
}


def claims(rows: Rows) -> list[Claim]:
    rows = rows.without_options()
    images = rows.cases("bits_per_dim", "dataset", **TEST)
    tested = rows.cases("accuracy", "dataset", **TEST)
    bits, _, _ = METRICS["bits_per_dim"]
    fails = {}
    for control in ("uniform", "identity"):
        fails |= control_checks(rows, images, "bits_per_dim", unit=bits, control=control)
    claims = []
    for text, (worse, better, paper, reason) in IMAGE_CLAIMS.items():
        gains = rows.paired_by_case(worse, better, "bits_per_dim", images, looks=LOOKS)
        claims.append(Claim(text, gains, paper, LONGER, unit=bits, fails=fails, reason=reason))
    others = {name: label(name) for name in ("linformer", "reformer", "elu", "window")}
    return [
        *claims,
        Claim(
            "FAVOR+ takes at most half the time of Reformer per step",
            rows.paired_by_case(
                "favorp", "reformer", "steps_per_s", filters_over("dataset", IMAGES), log=True
            ),
            "can be 2x faster than the Reformer",
            "more processes on a quiet machine",
            above=2,
            log=True,
        ),
        Claim(
            "six layers with FAVOR+ have a lower loss than twelve of Reformer",
            rows.paired_by_case(DEEP_REFORMER, "favorp", "bits_per_dim", images),
            "Performer/6-layers matches the Reformer/12-layers",
            LONGER,
            not_measured="" if "ImageNet64" in images else TWO_LAYERS,
        ),
        Claim(
            "twelve layers with FAVOR+ have a lower loss than 24 of Reformer",
            paper="the Performer/12-layers matches the Reformer/24-layers",
            needs=f"{LONGER}, +task.sizes.layers=12, and Reformer with 24",
            not_measured=TWO_LAYERS,
        ),
        Claim(
            "FAVOR+ is more accurate than the other scalable methods",
            rows.paired_by_case("favorp", others, "accuracy", tested, 100, looks=LOOKS),
            unit="points",
            reason="one of the paper's five tasks, with lists of at most 3 entries",
        ),
        Claim(
            "Performers have the largest average over five tasks",
            paper="the largest average of the methods above 100 examples/s",
            needs=f"{ARENA}, 13 GPU hours",
            not_measured="only ListOps is measured at this size",
        ),
    ]


def tables(rows: Rows) -> Tables:
    rows = rows.without_options()
    columns = []
    for metric, (unit, scale, spec) in METRICS.items():
        for case, where in rows.cases(metric, "dataset", **TEST).items():
            column = {f"{case}, {unit}": {"metric": metric, **where}}
            columns.append(mean_table(rows, column, scale=scale, spec=spec))
    columns.append(pd.DataFrame({"paper, ImageNet64": PAPER}))
    table = pd.concat(columns, axis=1).fillna("").rename_axis("attention")
    return {"On test (bits: lower is better)": table}


def figure(rows: Rows):
    rows = rows.without_options()
    gains = {}
    for metric, (unit, scale, _) in METRICS.items():
        for case, where in rows.cases(metric, "dataset", **TEST).items():
            methods = rows.methods(metric, **where)
            gains[case, unit] = rows.by_method(metric, methods, scale, less="exact", **where)
    if not gains:
        return None
    fig, axes = panels(len(gains))
    for ax, ((case, unit), gains_of_case) in zip(axes, gains.items()):
        dot_plot(ax, gains_of_case, zero=True)
        ax.set(title=f"{case}: difference from exact attention", xlabel=unit)
    return fig


page = Page(
    "perf_long",
    title="Performers Figures 7 (left) and 19: images as sequences of values, and the Long Range Arena",
    finding=finding,
    small=SMALL,
    full=FULL,
    columns=["dataset", "split", "method"],
    metrics=[*METRICS, "steps_per_s"],
    measured=[
        "Models: 2 layers, 4 heads, d = 64, rotary positions; five seeds, two of them added after the first results. "
        "On ListOps 15 more for FAVOR+, ELU and Linformer, on a GPU. Claims use the seeds added last.",
        "Times: a process a sample, 10 steps. Claims of the paper on Reformer's loss and on the Arena are on models of "
        "more layers and on averages of five tasks; those on equal depth and on ListOps alone are ours.",
        "Images: CIFAR-10 at 16 x 16 (200 steps of 4 images) and 32 x 32 (150 steps of one). The paper trains 6 to 24 "
        "layers on ImageNet64.",
        "ListOps: lists of at most 3 entries, 15 to 39 symbols, 500 steps of 128. The Arena has up to 2,000 symbols.",
        "At full size models train on 95% of ImageNet64's training images and are tested on its validation images. "
        "Sparse Transformer, Longformer, Sinkhorn, Synthesizer, BigBird and Path-X were not run.",
        "Positions and lengths were chosen with exact and uniform attention alone, so that attention matters early.",
    ],
    tables=tables,
    claims=claims,
    figure=figure,
)
