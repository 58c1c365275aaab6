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
    drawn = axes.imshow(shares, vmin=0, vmax=1, cmap="viridis", interpolation="nearest")
    figure.colorbar(drawn, label="share of the true class")
    if len(classes) <= LABELLED:
        axes.set_xticks(range(len(classes)), classes, rotation=90, fontsize=7)
        axes.set_yticks(range(len(classes)), classes, fontsize=7)
    title = f"{counted.sum()} images, accuracy {np.trace(counted) / counted.sum():.3f}"
    axes.set(xlabel="predicted", ylabel="true", title=title)
    keep(figure, directory / "confusion.png")


def keep(figure, path: Path) -> None:
    with whole(path) as part:
        figure.savefig(part, format="png", dpi=120)


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1):
    """A figure without a window, and its axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=rows * columns == 1)


# ---- masked autoencoders

def spread(count: int, wanted: int) -> list[int]:
    """At most `wanted` of `count` places, evenly spread."""
    return [i * count // min(count, wanted) for i in range(min(count, wanted))]


def reconstructions(shown: Sequence[tuple[Tensor, Tensor, Tensor]], patch: int, normalised: bool, mean: Sequence[float],
                    std: Sequence[float], directory: Path) -> None:
    """reconstructions.png: a row for each image: what is seen, what the model makes of it, the image.

    shown: image (3, H, W), predicted patches (P, patch * patch * 3) and mask (P,), 1 where masked. What is seen is
    drawn over the prediction. normalised: predictions have mean 0 and variance 1 in each patch; they get its own.
    """
    rows = [panels(*entry, patch, normalised) for entry in shown]
    pictures = [[coloured(panel, mean, std) for panel in row] for row in rows]
    figure, axes = new_figure(6, 2 * len(pictures) + 0.4, len(pictures), 3)
    for line, row in zip(axes, pictures):
        for ax, picture in zip(line, row):
            ax.imshow(picture)
            ax.set_axis_off()
    rebuilt = "reconstructed\n(mean and spread of each\npatch are the image's)" if normalised else "reconstructed"
    for ax, title in zip(axes[0], ("seen", rebuilt, "image")):
        ax.set_title(title, fontsize=9)
    keep(figure, directory / "reconstructions.png")


def panels(image: Tensor, predicted: Tensor, mask: Tensor, patch: int, normalised: bool) -> list[Tensor]:
    """Seen, reconstructed and whole image, each (3, H, W)."""
    patches, masked = patchify(image, patch), mask[:, None].bool()
    if normalised:
        predicted = predicted * (patches.var(1, keepdim=True) + 1e-6).sqrt() + patches.mean(1, keepdim=True)
    seen = patches.masked_fill(masked, 0.0)                  # the mean colour of the data
    return [unpatchify(part, patch, image.shape[-1]) for part in (seen, patches.where(~masked, predicted), patches)]


def patchify(image: Tensor, patch: int) -> Tensor:
    """(3, H, W) -> (P, patch * patch * 3), as ViTMAE has them: rows of a patch, columns, colours."""
    colours, height, width = image.shape
    cut = image.reshape(colours, height // patch, patch, width // patch, patch)
    return cut.permute(1, 3, 2, 4, 0).reshape(-1, patch * patch * colours)


def unpatchify(patches: Tensor, patch: int, size: int) -> Tensor:
    grid = size // patch
    return patches.reshape(grid, grid, patch, patch, 3).permute(4, 0, 2, 1, 3).reshape(3, size, size)


def coloured(image: Tensor, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """(H, W, 3) in [0, 1]; a prediction may lie outside of what can be shown."""
    shown = image.permute(1, 2, 0) * image.new_tensor(std) + image.new_tensor(mean)
    return shown.clamp(0, 1).numpy()


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
