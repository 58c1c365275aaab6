"""How the package draws: colours, order and names of mechanisms and samplers, and small helpers for axes.

Names are the files of conf/features, conf/sampler and conf/attention. A new file appears in every report by itself,
behind the others of its kind and in a colour made of its name, until it gets a line here.
"""

import colorsys
import math
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

from crt_exp.atomic_write import whole
from crt_exp.config import choices
from crt_exp.mechanism import Mechanism

DECADES = 1000  # times the least number of an axis: from there on decades alone fit beside each other,
DIGITS = 10     # and from so many characters of the largest number times decades on
EXACT = "#000000"
CONTROL = "#999999"
NEAR_FAR = "#0072B2"
# In the order of the reports. Indefinite maps are cold and positive ones warm (Okabe-Ito, safe for colour blindness).
MAPS = {"trig": "#56B4E9", "gerf": "#8C7AE6", "pois": "#009E73", "geom": "#117733", "pois_coord": "#44AA99",
        "angular": "#332288", "gaussian": "#6699CC", "clustered": "#AA4499", "pos": "#E69F00", "hyp": "#F0A860",
        "smreg": "#808000", "oprf": "#D55E00", "sderf": "#A30000", "mixture": "#6E0F8B", "auto": "#B35C5C",
        "pois_plus": "#CC79A7", "geom_plus": "#882255"}
# Of samplers, none of them that of a map, of near-far or of exact attention.
SAMPLERS = {"iid": "#6A51A3", "orthogonal": "#1B7F79", "simplex": "#C2185B", "sobol": "#3949AB", "halton": "#8C6D31",
            "hadamard": "#B5651D", "givens": "#546E7A"}
PEERS = {"window": "#8B4513", "hedgehog": "#C71585"}  # other attention that pages compare with
CALLED = {"FAVOR+": "pos", "FAVOR++": "oprf", "OPRF": "oprf", "GERF": "gerf", "trigonometric": "trig",
          "HRF-ort": "angular", "HRF-iid": "angular", "ORF-reg": "trig", "ORF-Had": "trig", "Halton-R": "trig",
          "hybrid-cluster": "clustered", "near-far": "nearfar"}  # maps by the names that papers give them
KERNELS = {"elu+1": "#56B4E9", "exp": "#D55E00", "sigmoid": "#0072B2", "abs": "#CC79A7", "gelu": "#009E73",
           "cos": "#E69F00", "tanh": "#808000"}  # of generalised attention; relu is a choice of attention
LABELS = {"favorp": "FAVOR+", "favorpp": "FAVOR++", "favorsharp": "FAVOR#", "favormix": "mixture", "elu": "ELU",
          "relu": "ReLU", "nearfar": "near-far", "hedgehog": "Hedgehog", "smreg": "SMREG", "linformer": "Linformer",
          "reformer": "Reformer"}  # of attention, as papers call it


def colour(name: str) -> str:
    """Of a map, of a sampler, of the exact kernel, or of attention: that of its map; the options of an arm, "favorpp
    m=256", change nothing. The same in every picture."""
    first = re.split("[ ,]", name)[0]
    name = CALLED.get(name, CALLED.get(first, first))
    if name == "exact":
        return EXACT
    if name == "nearfar":
        return NEAR_FAR
    if name not in (*MAPS, *PEERS) and name in choices("attention") and name not in choices("features"):
        features = Mechanism.of(name).features
        return CONTROL if features is None else colour(features.name)
    return MAPS.get(name) or PEERS.get(name) or KERNELS.get(name) or SAMPLERS.get(name) or colour_by_rule(name)


def colour_by_rule(name: str) -> str:
    """A colour that depends on the name alone, and so stays when others come: a hue, dark enough for lines on white."""
    red_green_blue = colorsys.hsv_to_rgb(zlib.crc32(name.encode()) % 360 / 360, 0.7, 0.65)
    return "#" + "".join(f"{round(255 * part):02X}" for part in red_green_blue)


# ---- pictures


def save_figure(figure, path: Path) -> None:
    """Raises OSError, naming the file, where it cannot be written; then an older one stays."""
    with whole(path) as part:
        figure.savefig(part, format="png", dpi=130, bbox_inches="tight", metadata={"Software": None})


def new_figure(*args, **kwargs):
    """matplotlib subplots without a display, in the reports' style."""
    try:
        import matplotlib
    except ImportError:
        raise ImportError("pictures need matplotlib: pip install matplotlib, or crt_exp[run]") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
                         "grid.alpha": 0.25, "legend.frameon": False})
    return plt.subplots(*args, **kwargs)


def plain_ticks(axis) -> None:
    """Numbers as they are, and millions, on an axis of logarithms that may span less than a decade; of many, decades
    alone."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = sorted(axis.get_view_interval())
    first, last = axis.get_data_interval()
    few = (1, 2, 5) if high > 8 * low else (1, 1.5, 2, 3, 4, 5, 7)
    long = first > 0 and (last >= DECADES * first or len(f"{last:,.9g}") * math.log10(last / first) > DIGITS)
    axis.set_major_locator(LogLocator(subs=(1,) if long else few))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1e6:,.9g}M" if x >= 1e6 else f"{x:,.9g}"))
    axis.set_minor_formatter(NullFormatter())


def label_ends(ax, ends: Sequence[tuple[str, float, float, str]], size: float = 8) -> None:
    """Writes (name, x, y, colour) of each line next to its last point, no nearer to another name than it is high, and
    within the height of the axes where there is room. Lines that end far to the left of others do not concern them.

    The scales and limits of the axes must be set.
    """
    from matplotlib.transforms import offset_copy

    ax.figure.canvas.draw()  # fixes the scales
    height = 1.25 * size * ax.figure.dpi / 72
    places = [(*ax.transData.transform((x, y)), name, colour) for name, x, y, colour in ends]
    for column in columns(places, ax.bbox.width / 5):
        column.sort(key=lambda place: place[1])
        heights = apart([up for _, up, _, _ in column], height, ax.bbox.y0 + height / 2, ax.bbox.y1)
        for up, (right, _, name, colour) in zip(heights, column):
            ax.text(*ax.transData.inverted().transform((right, up)), name, color=colour, fontsize=size, va="center",
                    clip_on=False, transform=offset_copy(ax.transData, ax.figure, x=5, y=0, units="points"))


def columns(places: Sequence[tuple], least: float) -> list[list[tuple]]:
    """Places (x, ...) with those in one list that are less than `least` to the right of another."""
    result: list[list[tuple]] = []
    for place in sorted(places, key=lambda place: place[0]):
        if result and place[0] - result[-1][-1][0] < least:
            result[-1].append(place)
        else:
            result.append([place])
    return result


def apart(ascending: Sequence[float], least: float, bottom: float, top: float) -> list[float]:
    """The heights, moved up above the bottom so that they are `least` apart, then down below the top."""
    heights: list[float] = []
    for height in ascending:
        heights.append(max(height, bottom))
        bottom = heights[-1] + least
    for i in reversed(range(len(heights))):
        heights[i], top = min(heights[i], top), min(heights[i], top) - least
    return heights


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in Markdown, its first column to the left and the others to the right; bars in cells are escaped."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    cells = [[re.sub(r"(?<!\\)\|", r"\\|", str(cell)) for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n"
