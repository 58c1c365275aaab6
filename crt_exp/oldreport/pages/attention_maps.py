"""What the file of attention-maps cannot say: its matrices, and the amino acids that are alike."""

import numpy as np

from crt_exp.drawing import EXACT, markdown, new_figure
from crt_exp.oldreport import tables
from crt_exp.oldreport.page import Page

LAYERS, HEADS = 4, 8      # that are drawn at most, as many as the paper's
ALIKE, ROW = 3.4, 1.75    # inches: the height of the part below the matrices, and of a row of these
NAMED = ("DE", "FY")      # pairs that Performers C.4 names as highly similar
LETTERED = 30             # letters that can be read on an axis


def sections(page: Page) -> list[str]:
    errors = page.draws[page.draws["metric"] == "error"]
    means = errors.assign(value=errors["value"].astype(float)).groupby(["arm", "x"], sort=False)["value"].mean()
    arms, layers = [*dict.fromkeys(errors["arm"])], [*dict.fromkeys(errors["x"])]
    rows = [[f"{layer:g}", *(f"{means[arm, layer]:.3f}" for arm in arms)] for layer in layers]
    table = markdown(["layer", *map(page.label, arms)], rows)
    noises = errors[errors["arm"] == arms[0]]["unit"].nunique()
    intro = (f"{page.settings[0]} of {said(page, 'file')}, its first {len(said(page, 'letters'))} letters; "
             f"{noises} draws of the noise. |A' - A| / |A|, means over these: each model reads its own hidden states, "
             "so the errors of earlier layers are in those of later ones.")
    return [f"## Error of attention matrices of one entry\n\n{intro}\n\n{table}", *tables.sections(page), named(page)]


def said(page: Page, metric: str) -> str:
    return str(page.select(metric)["value"].iloc[0])


def named(page: Page) -> str:
    values = page.values("similarity", arm="trained").sort_values(ascending=False)
    places = {pair: 1 + int((values > values[pair]).sum()) for pair in NAMED}
    return ("The pairs that the paper calls highly similar have these places among 190: "
            f"{', '.join(f'({a}, {b}) {place}' for (a, b), place in places.items())}. The most similar here: "
            f"{', '.join(f'({a}, {b})' for a, b in values.index[:5])}.")


def figure(page: Page):
    maps, (layers, heads) = matrices(page), shape(page)
    fig, ax = new_figure(figsize=(1.9 * heads + 1.4, ROW * 2 * layers + ALIKE))
    ax.remove()
    top, bottom = fig.subfigures(2, 1, height_ratios=(ROW * 2 * layers, ALIKE))
    arms, letters = [*maps], said(page, "letters")
    axes = top.subplots(2 * layers, heads, squeeze=False, sharex=True, sharey=True,
                        gridspec_kw={"bottom": 0.07, "top": 0.96, "hspace": 0.2, "right": 0.88})
    for layer in range(layers):
        here = [maps[arm][f"{layer}.{head}"] for arm in arms for head in range(heads)]
        for place, arm in enumerate(arms):
            draw_row(top, axes[2 * layer + place], [maps[arm][f"{layer}.{head}"] for head in range(heads)],
                     f"{page.label(arm)}, layer {layer}", max(A.max() for A in here), letters)
    top.supxlabel("key: place of the letter", fontsize=8)
    top.supylabel("query: place of the letter", fontsize=8)
    draw_alike(bottom, page)
    return fig


def matrices(page: Page) -> dict[str, dict[str, np.ndarray]]:
    """arm -> layer.head -> (queries, keys)."""
    rows = page.select("row").sort_values("x", kind="stable")
    made: dict[str, dict[str, np.ndarray]] = {}
    for (arm, unit), group in rows.groupby(["arm", "unit"], sort=False):
        made.setdefault(arm, {})[unit] = np.array([line.split() for line in group["value"]], float)
    return dict(sorted(made.items(), key=lambda item: item[0] != "exact"))


def shape(page: Page) -> tuple[int, int]:
    units = [tuple(map(int, unit.split("."))) for unit in dict.fromkeys(page.select("row")["unit"])]
    return min(LAYERS, 1 + max(i for i, _ in units)), min(HEADS, 1 + max(j for _, j in units))


def draw_row(figure, axes, row: list[np.ndarray], title: str, largest: float, letters: str) -> None:
    """The heads of a layer on the scale that both arms have there: square roots, so that small weights show."""
    from matplotlib.colors import PowerNorm

    for head, (ax, A) in enumerate(zip(axes, row)):
        image = ax.imshow(A, norm=PowerNorm(0.5, vmin=min(0.0, A.min()), vmax=largest), cmap="viridis",
                          interpolation="nearest")
        ax.set_title(f"{title}, head {head}", fontsize=6)
        ax.grid(False)
        ax.tick_params(labelsize=6)
        if len(A) <= LETTERED:
            ax.set_xticks(range(len(A)), letters[:len(A)], fontsize=5)
            ax.set_yticks(range(len(A)), letters[:len(A)], fontsize=5)
    bar = figure.colorbar(image, ax=list(axes), shrink=0.9, pad=0.01, aspect=12)
    bar.ax.tick_params(labelsize=6)
    bar.set_label("weight", fontsize=6)


def draw_alike(figure, page: Page) -> None:
    """BLOSUM62, the similarity by attention, and one against the other."""
    axes = figure.subplots(1, 3, gridspec_kw={"wspace": 0.45, "bottom": 0.14, "top": 0.92})
    score, shares = (page.values("similarity", arm=arm) for arm in ("BLOSUM62", "trained"))
    names = sorted({letter for pair in score.index for letter in pair})
    for ax, values, title in zip(axes, (score, shares), ("BLOSUM62", "similarity by attention")):
        square = np.full((len(names), len(names)), np.nan)
        for pair, value in values.items():
            a, b = map(names.index, pair)
            square[a, b] = square[b, a] = value
        image = ax.imshow(square, cmap="viridis")
        figure.colorbar(image, ax=ax, shrink=0.6).ax.tick_params(labelsize=6)
        ax.set_title(title, fontsize=8)
        ax.grid(False)
        ax.set_xticks(range(len(names)), names, fontsize=5)
        ax.set_yticks(range(len(names)), names, fontsize=5)
    axes[2].plot(score, shares[score.index], "o", ms=2.5, color=EXACT)
    for pair in NAMED:
        axes[2].annotate(pair, (score[pair], shares[pair]), color="#D55E00", fontsize=8)
    axes[2].set(xlabel="BLOSUM62", ylabel="similarity by attention", title="190 pairs", box_aspect=1)
    axes[2].title.set_fontsize(8)
