"""Performers: images as sequences of pixel values, and the Long Range Arena.

Reproduces Figures 7 (left) and 19.
"""

from typing import Any, NamedTuple

import pandas as pd

from crt_exp.experiments.papers.parts.long_runs import FULL, IMAGES, REFORMER, SMALL
from crt_exp.experiments.report import (
    Claim,
    Page,
    Rows,
    Tables,
    added,
    control_checks,
    dot_plot,
    filters_over,
    label,
    mean_ci,
    mean_table,
    panels,
)


class Score(NamedTuple):
    """A metric, and how it is shown."""

    metric: str
    unit: str
    scale: float
    spec: str

    def cases(self, rows: Rows) -> dict[str, dict[str, Any]]:
        """Data set -> filter of its test rows."""
        return rows.cases(self.metric, "dataset", sweep=("pixels", "lra"), split="test")

    def gains(self, rows: Rows, first: str, second: str) -> dict[str, pd.Series]:
        """Data set -> the first method minus the second, by the seeds that were added last."""
        gains = rows.paired_by_case(first, second, self.metric, self.cases(rows), self.scale)
        return {case: added(gain, *LOOKS) for case, gain in gains.items()}


LOOKS = (3, 5)  # seeds after which results were seen; then more were added
BITS = Score("bits_per_dim", "bits per dimension", 1, ".3f")
ACCURACY = Score("accuracy", "accuracy, %", 100, ".1f")
STEPS_100K = "3.67 against 3.69 after 100k steps"
NEIGHBOURS = "Reformer attends to neighbouring pixels, and a window does best here"
LONGER = "experiment=performers_imagenet64, 160 GPU hours"
IMAGE_CLAIMS = {  # text -> methods, the paper's result, explanation
    "ReLU has a lower loss than FAVOR+": ("favorp", "relu", STEPS_100K, ""),
    "SMREG has a lower loss than FAVOR+": ("favorp", "smreg", STEPS_100K, ""),
    "FAVOR+ has a lower loss than Reformer at equal depth": ("reformer", "favorp", "", NEIGHBOURS),
}


def finding(rows: Rows) -> str:
    named = rows.without_options()
    where = {"sweep": "lra", "dataset": "ListOps", "split": "test"}
    gain = mean_ci(100 * named.paired("favorp", "elu", "accuracy", **where))
    return (
        "On small images, a window has the lowest loss, and FAVOR+, ReLU and SMREG do not differ (n = 5 seeds). On "
        f"ListOps, FAVOR+ is more accurate than ELU by {gain} points (95% CI, n = {gain.n} seeds)."
    )


def claims(rows: Rows) -> list[Claim]:
    named = rows.without_options()
    images = BITS.cases(named)
    fails = {}
    for control in ("uniform", "identity"):
        fails |= control_checks(named, images, BITS.metric, unit=BITS.unit, control=control)
    claims = []
    for text, (worse, better, paper, reason) in IMAGE_CLAIMS.items():
        gains = BITS.gains(named, worse, better)
        claims.append(Claim(text, gains, paper, LONGER, unit=BITS.unit, fails=fails, reason=reason))
    text = "FAVOR+ takes at most half the time of Reformer per step"
    sizes = filters_over("dataset", IMAGES)
    speeds = rows.paired_by_case("favorp m=32", REFORMER, "steps_per_s", sizes, log=True)
    paper = "can be 2x faster than the Reformer"
    needs = "more processes on a quiet machine"
    claims.append(Claim(text, speeds, paper, needs, above=2, log=True))
    text = "six layers with FAVOR+ have a lower loss than twelve of Reformer"
    gains = BITS.gains(named, "reformer, 12 layers", "favorp")
    paper = "Performer/6-layers matches the Reformer/12-layers"
    shallow = "all models have two layers"
    has_deep = bool(rows.methods("bits_per_dim", dataset="ImageNet64"))
    reason = "" if has_deep else shallow
    claims.append(Claim(text, gains, paper, LONGER, not_measured=reason))
    text = "twelve layers with FAVOR+ have a lower loss than 24 of Reformer"
    paper = "the Performer/12-layers matches the Reformer/24-layers"
    needs = f"{LONGER}, +task.sizes.layers=12, and Reformer with 24"
    claims.append(Claim(text, paper=paper, not_measured=shallow, needs=needs))
    text = "FAVOR+ is more accurate than the other scalable methods"
    accuracies = {}
    for other in ("linformer", "reformer", "elu", "window"):
        for case, points in ACCURACY.gains(named, "favorp", other).items():
            accuracies[f"{label(other)}, {case}"] = points
    reason = "one of the paper's five tasks, with lists of at most 3 entries"
    claims.append(Claim(text, accuracies, unit="points", reason=reason))
    text = "Performers have the largest average over five tasks"
    paper = "the largest average of the methods above 100 examples/s"
    reason = "only ListOps is measured at this size"
    needs = "experiment=performers_lra, 13 GPU hours"
    claims.append(Claim(text, paper=paper, not_measured=reason, needs=needs))
    return claims


def tables(rows: Rows) -> Tables:
    named = rows.without_options()
    columns = {}
    for score in (BITS, ACCURACY):
        for case, where in score.cases(named).items():
            title = f"{case}, {score.unit}"
            column = {title: {"metric": score.metric, **where}}
            table = mean_table(named, column, scale=score.scale, spec=score.spec)
            columns[title] = table[title]
    columns["paper, ImageNet64"] = pd.Series({"FAVOR+": "3.69", "ReLU": "3.67", "SMREG": "3.67"})
    table = pd.concat(columns, axis=1).fillna("").rename_axis("attention")
    return {"On test (bits: lower is better)": table}


def figure(rows: Rows):
    named = rows.without_options()
    shown = []
    for score in (BITS, ACCURACY):
        shown += [(score, case, where) for case, where in score.cases(named).items()]
    if not shown:
        return None
    fig, axes = panels(len(shown))
    for ax, (score, case, where) in zip(axes, shown):
        methods = named.methods(score.metric, **where)
        gains = named.by_method(score.metric, methods, score.scale, less="exact", **where)
        dot_plot(ax, gains, zero=True)
        ax.set(title=f"{case}: difference from exact attention", xlabel=score.unit)
    return fig


page = Page(
    "perf_long",
    title="Performers Figures 7 (left) and 19: images as sequences of values, and the Long Range Arena",
    finding=finding,
    small=SMALL,
    full=FULL,
    columns=["dataset", "split", "method"],
    metrics=["bits_per_dim", "accuracy", "steps_per_s"],
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
