"""curves.png of a training run: loss and metric of its evaluations against the step, from metrics.jsonl alone."""

from pathlib import Path
from typing import Any

CURVES = "curves.png"
LOSS, METRIC, TEST = "#0072B2", "#D55E00", "#000000"


def draw(records: list[dict[str, Any]], metric: str, directory: Path) -> None:
    """Nothing where there are no two records to draw a line through."""
    losses = points(records, "train", "loss")
    metrics = [point for record in records if record["split"] != "train" and not record.get("final")
               for point in points([record], record["split"], metric)]
    if len(losses) < 2 and len(metrics) < 2:
        return
    from crt_exp.drawing import save_figure

    save_figure(figure(losses, metrics, points(records[-1:], records[-1]["split"], metric), metric),
                directory / CURVES)


def points(records: list[dict[str, Any]], split: str, key: str) -> list[tuple[int, float]]:
    """Steps and values, where there is a number."""
    return [(record["step"], record[key]) for record in records
            if record["split"] == split and isinstance(record.get(key), (int, float))]


def figure(losses: list, metrics: list, last: list, metric: str):
    from matplotlib.figure import Figure

    drawn = Figure((8, 3.2), layout="constrained")
    left, right = drawn.subplots(1, 2)
    left.plot(*zip(*losses or [(0, float("nan"))]), color=LOSS, lw=1)
    left.set(title="training loss", xlabel="step")
    right.plot(*zip(*metrics or [(0, float("nan"))]), color=METRIC, marker="o", ms=3, lw=1, label="validation")
    if last:
        right.plot(*zip(*last), color=TEST, marker="*", ms=9, lw=0, label=f"final: {last[0][1]:.4g}")
    right.set(title=metric, xlabel="step")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return drawn
