"""Pictures that a run of images or words leaves in its directory, with the numbers they are drawn from."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from crt_exp.atomic_write import whole, write_rows

LABELLED = 40                                                # classes whose names are legible next to a matrix


def counts(labels: np.ndarray, predictions: np.ndarray, classes: int) -> np.ndarray:
    """(classes, classes): how many images of a class (row) were taken for each class (column)."""
    return np.bincount(labels * classes + predictions, minlength=classes**2).reshape(classes, classes)


def confusion(counted: np.ndarray, classes: Sequence[str], directory: Path) -> None:
    """confusion.csv with the counts, confusion.png with the share of each true class."""
    write_rows(directory / "confusion.csv", [["true \\ predicted", *classes],
                                             *([name, *row] for name, row in zip(classes, counted.tolist()))])
    figure, axes = new_figure(6, 5.5)
    shares = counted / np.maximum(counted.sum(1, keepdims=True), 1)
    figure.colorbar(axes.imshow(shares, vmin=0, vmax=1, interpolation="nearest"), label="share of the true class")
    if len(classes) <= LABELLED:
        axes.set_xticks(range(len(classes)), classes, rotation=90, fontsize=7)
        axes.set_yticks(range(len(classes)), classes, fontsize=7)
    title = f"{counted.sum()} images, accuracy {np.trace(counted) / counted.sum():.3f}"
    axes.set(xlabel="predicted", ylabel="true", title=title)
    keep(figure, directory / "confusion.png")


def table(columns: Sequence[Tensor], titles: Sequence[str], path: Path) -> None:
    """A picture of images (n, H, W, 3) in columns, one row for each n."""
    figure, axes = new_figure(2 * len(columns), 2 * len(columns[0]) + 0.4, len(columns[0]), len(columns))
    for column, images, title in zip(axes.T, columns, titles):
        column[0].set_title(title, fontsize=9)
        for ax, image in zip(column, images):
            ax.imshow(image)
            ax.set_axis_off()
    keep(figure, path)


def keep(figure, path: Path) -> None:
    with whole(path) as part:
        figure.savefig(part, format="png", dpi=120)


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1):
    """A figure without a window, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure((width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=rows * columns == 1)


# ---- language models

def lengths(queries: np.ndarray, keys: np.ndarray, directory: Path) -> None:
    """lengths.csv and lengths.png: histograms of |h| of all words read and of |e| of all classes (HRF Figures 7, 9)."""
    edges = np.linspace(0.0, 1.001 * max(queries.max(), keys.max()), 61)
    counted = {"queries": np.histogram(queries, edges)[0], "keys": np.histogram(keys, edges)[0]}
    columns = edges[:-1].tolist(), edges[1:].tolist(), *(part.tolist() for part in counted.values())
    write_rows(directory / "lengths.csv", [["from", "to", *counted], *zip(*columns)])
    figure, axes = new_figure(7, 3, columns=2)
    for ax, (name, part) in zip(axes[0], counted.items()):
        ax.stairs(part, edges, fill=True)
        ax.set(title=f"lengths of {name}", xlabel="length", ylabel="how many")
    keep(figure, directory / "lengths.png")
