"""Plot style: colours, order and labels of methods, and helpers for axes.

Names are those of conf/features, conf/sampler and conf/attention. A name without an entry here gets a colour derived
from the name, and comes after the others.
"""

import colorsys
import math
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from crt_exp.atomic_write import atomic_path
from crt_exp.mechanism import Mechanism
from crt_exp.registry import choices

if TYPE_CHECKING:
    from pandas import DataFrame

DECADES = 1000  # an axis that spans at least this ratio has ticks at powers of ten only,
DIGITS = 10  # as does an axis with more than this product of digits and decades
LABEL_SIZE = 8  # points
EXACT = "#000000"
CONTROL = "#999999"
CONTROLS = (
    "uniform",
    "identity",
    "zero",
    "majority",
    "majority class",
    "word overlap",
    "no model",
    "average",
    "random",
)
COLOURS = {
    "exact": EXACT,
    "nearfar": "#0072B2",
    # feature maps: indefinite ones are cold, positive ones warm (Okabe-Ito, safe for colour blindness)
    "trig": "#56B4E9",
    "gerf": "#8C7AE6",
    "pois": "#009E73",
    "geom": "#117733",
    "pois_coord": "#44AA99",
    "angular": "#332288",
    "gaussian": "#999933",
    "clustered": "#AA4499",
    "pos": "#E69F00",
    "hyp": "#F0A860",
    "smreg": "#808000",
    "oprf": "#D55E00",
    "sderf": "#A30000",
    "mixture": "#6E0F8B",
    "auto": "#B35C5C",
    "pois_plus": "#CC79A7",
    "geom_plus": "#882255",
    # samplers
    "iid": "#6A51A3",
    "orthogonal": "#1B7F79",
    "simplex": "#C2185B",
    "sobol": "#3949AB",
    "halton": "#8C6D31",
    "hadamard": "#B5651D",
    "givens": "#546E7A",
    # other attention methods that the pages compare
    "window": "#8B4513",
    "hedgehog": "#C71585",
    # kernels of generalised attention; relu is a name of conf/attention
    "elu+1": "#56B4E9",
    "exp": "#D55E00",
    "sigmoid": "#0072B2",
    "abs": "#CC79A7",
    "gelu": "#009E73",
    "cos": "#E69F00",
    "tanh": "#808000",
}
# Attention methods and feature maps as the papers write them.
LABELS = {
    "favor": "trigonometric",
    "favorp": "FAVOR+",
    "favorpp": "FAVOR++",
    "favorsharp": "FAVOR#",
    "favormix": "mixture",
    "elu": "ELU",
    "relu": "ReLU",
    "nearfar": "near-far",
    "hedgehog": "Hedgehog",
    "smreg": "SMREG",
    "linformer": "Linformer",
    "reformer": "Reformer",
    "trig": "TrigRF",
    "pos": "PosRF",
    "gerf": "GERF",
    "hyp": "HypRF",
    "oprf": "OPRF",
    "pois": "PoisRF",
    "geom": "GeomRF",
    "pois_plus": "PoisRF+",
    "geom_plus": "GeomRF+",
}


def colour(name: str) -> str:
    """The colour of a feature map, sampler, kernel or attention method.

    Attention has the colour of its feature map, and controls are grey. Options in a name, as in "favorpp m=256", do not
    matter. Other names have a colour that is derived from the name, dark enough for lines on white.
    """
    first = re.split("[ ,]", name)[0]
    if name in CONTROLS or first in CONTROLS:
        return CONTROL
    name = first
    if name in COLOURS:
        return COLOURS[name]
    if name in choices("attention") and name not in choices("features"):
        parts = Mechanism.of(name).parts
        if "features" in parts:
            return colour(parts["features"].name)
    red_green_blue = colorsys.hsv_to_rgb(zlib.crc32(name.encode()) % 360 / 360, 0.7, 0.65)
    return "#" + "".join(f"{round(255 * part):02X}" for part in red_green_blue)


# ---- figures


def save_figure(figure, path: Path) -> None:
    """Save a figure as PNG, atomically. Raises OSError, naming the file."""
    with atomic_path(path) as part:
        figure.savefig(
            part, format="png", dpi=130, bbox_inches="tight", metadata={"Software": None}
        )


def new_figure(*args, **kwargs):
    """matplotlib subplots in the style of the reports, without a display."""
    try:
        import matplotlib
    except ImportError:
        raise ImportError(
            "matplotlib is missing; pip install matplotlib, or crt_exp[run]"
        ) from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.alpha": 0.25,
            "legend.frameon": False,
        }
    )
    return plt.subplots(*args, **kwargs)


def plain_ticks(axis) -> None:
    """Label a logarithmic axis with plain numbers, in millions from 1e6 on.

    A long axis gets ticks at powers of ten only, a short one gets more ticks.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = sorted(axis.get_view_interval())
    first, last = axis.get_data_interval()
    few = (1, 2, 5) if high > 8 * low else (1, 1.5, 2, 3, 4, 5, 7)
    long = first > 0 and (
        last >= DECADES * first or len(f"{last:,.9g}") * math.log10(last / first) > DIGITS
    )
    axis.set_major_locator(LogLocator(subs=(1,) if long else few))
    axis.set_major_formatter(
        FuncFormatter(lambda x, _: f"{x / 1e6:,.9g}M" if x >= 1e6 else f"{x:,.9g}")
    )
    axis.set_minor_formatter(NullFormatter())


def label_ends(ax, ends: Sequence[tuple[str, float, float, str]]) -> None:
    """Label each line (name, x, y, colour) at its last point, without overlaps.

    Labels stay within the height of the axes if they fit. Only lines that end at a similar x are moved apart. Set
    scales and limits of the axes before the call.
    """
    from matplotlib.transforms import offset_copy

    ax.figure.canvas.draw()  # fixes the scales
    height = 1.25 * LABEL_SIZE * ax.figure.dpi / 72
    places = [(*ax.transData.transform((x, y)), name, colour) for name, x, y, colour in ends]
    for column in columns(places, ax.bbox.width / 5):
        column.sort(key=lambda place: place[1])
        heights = spread_heights(
            [up for _, up, _, _ in column], height, ax.bbox.y0 + height / 2, ax.bbox.y1
        )
        for up, (right, _, name, colour) in zip(heights, column):
            ax.text(
                *ax.transData.inverted().transform((right, up)),
                name,
                color=colour,
                fontsize=LABEL_SIZE,
                va="center",
                clip_on=False,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
                transform=offset_copy(ax.transData, ax.figure, x=5, y=0, units="points"),
            )


def columns(places: Sequence[tuple], least: float) -> list[list[tuple]]:
    """Group points (x, ...) by x: neighbours closer than `least` share a group."""
    result: list[list[tuple]] = []
    for place in sorted(places, key=lambda place: place[0]):
        if result and place[0] - result[-1][-1][0] < least:
            result[-1].append(place)
        else:
            result.append([place])
    return result


def spread_heights(
    ascending: Sequence[float], least: float, bottom: float, top: float
) -> list[float]:
    """Move ascending heights at least `least` apart, between bottom and top."""
    heights: list[float] = []
    for height in ascending:
        heights.append(max(height, bottom))
        bottom = heights[-1] + least
    for i in reversed(range(len(heights))):
        heights[i], top = min(heights[i], top), min(heights[i], top) - least
    return heights


def markdown(table: "DataFrame") -> str:
    """Format a Markdown table: first column left-aligned, others right-aligned.

    The index is not shown. Vertical bars in cells are escaped.
    """
    header = [*table.columns]
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *table.to_numpy(object)]
    cells = [[re.sub(r"(?<!\\)\|", r"\\|", str(cell)) for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n"
