"""The page of `attention_maps`: verdicts first, then what they rest on, and its picture."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from crt_exp.data.protein import STANDARD
from crt_exp.report import palette
from crt_exp.report.amino_acids import (
    NAMED,
    PAIRS,
    Correlation,
    alike,
    alike_by_frequency,
    blosum62,
    correlation,
    rank,
)
from crt_exp.report.evidence import Claim, Gate, Unjudged, Verdict, independent, judged, paired
from crt_exp.report.palette import label
from crt_exp.report.writing import markdown, new_figure, write_report

TITLE = "Performers Figures 10 to 13: attention of a protein model"
LAYERS, HEADS = 4, 8  # that are drawn at most, as many as the paper's
ALIKE = 3.4            # inches, the height of the part below the matrices


@dataclass
class Drawn:
    """Matrices (heads, L, L) of each layer for one entry: of exact attention, and of `name`; its letters, and how many
    of them are drawn. errors: of each attention, draw and layer."""

    name: str
    entry: str
    letters: str
    shown: int
    exact: list[Tensor]
    other: list[Tensor]
    errors: dict[str, list[list[float]]]


@dataclass
class Alike:
    """Shares of attention (heads, 20) of each run, trained and with random weights; frequencies (sequences, 20)."""

    trained: list[np.ndarray]
    random: list[np.ndarray]
    frequencies: np.ndarray


@dataclass
class Found:
    """gate: whether attention matters to the models, of which nothing is judged where it does not; None: not asked, of
    a run of the user's."""

    drawn: Drawn
    alike: Alike
    gate: Gate | None = None


def write(found: Found, facts: str, seconds: float) -> None:
    rows = correlations(found.alike)
    verdicts = verdicts_of(found, rows)
    said = "\n".join([told(found, rows), *([""] * bool(verdicts)), *map(str, verdicts)])
    body = "\n".join([
        said, "", *([f"{found.gate}\n"] if found.gate else []),
        "## Error of attention matrices of one entry, |A' - A| / |A|\n", error_table(found.drawn), ERRORS,
        "\n## Which amino acids are alike: correlation with BLOSUM62 over 190 pairs\n", alike_table(rows), CONTROLS])
    csv_rows = [{"what": "error", "attention": name, "draw": i, "layer": j, "error": e}
                for name, draws in found.drawn.errors.items() for i, draw in enumerate(draws)
                for j, e in enumerate(draw)]
    csv_rows += [{"what": what, "draw": i, "r": c.r, "p_mantel": c.p} for what, draws in rows.items()
                 for i, c in enumerate(draws)]
    path = write_report("attention-maps", TITLE, body, [*csv_rows, *(v.row() for v in verdicts)], figure(found), facts,
                        seconds)
    print(f"{said}\nwritten: {path}, {path.with_suffix('.csv')}, {path.with_suffix('.png')}")


# ---- text

ERRORS = ("Each model reads its own hidden states, so the errors of earlier layers are in those of later ones. Uniform "
          "attention, whose matrix is the same for every entry, is what an approximation must be nearer than.\n")
TRAINED, RANDOM = "attention, trained", "attention, random weights"
COMPOSITION, FREQUENT = "composition of the sequences (uniform attention)", "equally frequent letters"
CONTROLS = ("Two amino acids are alike as far as the shares of attention that they get go together over heads (Vig et "
            "al., 2020). Controls: the same model with random weights; how letters go together over sequences, which "
            "is all that uniform attention sees (over heads it gives no similarity: each letter gets its frequency "
            "from all); and letters that are about as frequent. p: Mantel's test, the amino acids of one matrix "
            "permuted, one-sided. Intervals are over trained models.\n")


def correlations(found: Alike) -> dict[str, list[Correlation]]:
    """With BLOSUM62, of each kind of similarity; one for each model."""
    matrix = blosum62()
    beside = lambda values: [correlation(alike(shares), matrix) for shares in values]
    made = {TRAINED: beside(found.trained), RANDOM: beside(found.random)}
    made[COMPOSITION] = [correlation(alike(found.frequencies), matrix)]
    made[FREQUENT] = [correlation(alike_by_frequency(found.frequencies.mean(0)), matrix)]
    return made


def verdicts_of(found: Found, rows: dict[str, list[Correlation]]) -> list[Verdict | Unjudged]:
    claims = [*error_claims(found.drawn), *alike_claims(rows)]
    if found.gate is None or found.gate.passed:
        return list(judged(claims))
    return [Unjudged(claim, found.gate) for claim in claims]


def error_claims(drawn: Drawn) -> list[Claim]:
    """Of the mean over layers, over draws of the noise; of one entry and one model."""
    mean = {name: np.mean(draws, 1) for name, draws in drawn.errors.items()}
    first, made = mean[drawn.name], []
    if len(first) > 1:
        text = f"{drawn.entry}: the matrices of {label(drawn.name)} are nearer to the exact ones than"
        unit = "of their norm"
        made.append(Claim(f"{text} uniform attention's", independent(mean["uniform"][0] - first), unit))
        made += [Claim(f"{text} those of {label(name)}", paired(other, first), unit) for name, other in mean.items()
                 if name not in (drawn.name, "uniform")]
    return made


def alike_claims(rows: dict[str, list[Correlation]]) -> list[Claim]:
    """Over trained models."""
    trained, random = ([c.r for c in rows[what]] for what in (TRAINED, RANDOM))
    if len(trained) < 2:
        return []
    text, unit = "the similarity of amino acids by attention correlates with BLOSUM62", "in r"
    return [Claim(text, independent(trained), unit),
            Claim(f"{text} more than with random weights", paired(trained, random), unit),
            *(Claim(f"{text} more than by {what}", independent(np.subtract(trained, rows[what][0].r)), unit)
              for what in (COMPOSITION, FREQUENT))]


def told(found: Found, rows: dict[str, list[Correlation]]) -> str:
    """Controls that win, and the pairs that the paper names."""
    mean = {what: np.mean([c.r for c in draws]) for what, draws in rows.items()}
    ahead = [what for what in mean if what != TRAINED and mean[what] >= mean[TRAINED]]
    first = [f"**No less like BLOSUM62 than trained attention: {', '.join(ahead)}.**"] if ahead else []
    matrix = mean_alike(found.alike)
    places = " and ".join(f"({a}, {b}) {rank(matrix, (a, b))}" for a, b in NAMED)
    top = [(STANDARD[a], STANDARD[b]) for a, b in sorted(zip(*PAIRS), key=lambda pair: -matrix[pair])[:5]]
    return " ".join([*first, errors_told(found.drawn),
                     f"The pairs that the paper found highly similar have these places among 190: {places}. "
                     f"The most similar here: {', '.join(f'({a}, {b})' for a, b in top)}."])


def errors_told(drawn: Drawn) -> str:
    """Layer by layer, means over draws."""
    mean = {name: ", ".join(f"{e:.2f}" for e in np.mean(draws, 0)) for name, draws in drawn.errors.items()}
    return (f"Relative errors of the matrices of {label(drawn.name)}, layer by layer: {mean[drawn.name]} (uniform "
            f"attention: {mean['uniform']}).")


def mean_alike(found: Alike) -> np.ndarray:
    return np.mean([alike(shares) for shares in found.trained], 0)


# ---- tables


def show(values: np.ndarray, spec: str = ".3f") -> str:
    return format(independent(values), spec) if len(values) > 1 else format(values[0], spec)


def error_table(drawn: Drawn) -> str:
    made = [[i, *(show(np.array(draws)[:, i]) for draws in drawn.errors.values())] for i in range(len(drawn.exact))]
    return markdown(["layer", *map(label, drawn.errors)], made)


def alike_table(rows: dict[str, list[Correlation]]) -> str:
    made = [[what, show(np.array([c.r for c in draws])), ", ".join(f"{c.p:.2g}" for c in draws)]
            for what, draws in rows.items()]
    return markdown(["similarity by", "r", "p of each"], made)


# ---- picture


def figure(found: Found):
    layers, heads = min(LAYERS, len(found.drawn.exact)), min(HEADS, len(found.drawn.exact[0]))
    fig, ax = new_figure(figsize=(1.7 * heads + 1, 3.4 * layers + ALIKE))
    ax.remove()
    top, bottom = fig.subfigures(2, 1, height_ratios=(3.4 * layers, ALIKE))
    draw_maps(top.subplots(2 * layers, heads, squeeze=False, gridspec_kw={"bottom": 0.02, "top": 0.97}), found.drawn)
    draw_alike(bottom, found.alike)
    return fig


def draw_maps(axes, drawn: Drawn) -> None:
    """A layer's exact matrices above those of the other attention, on one scale for each head: its square root, so that
    small entries show."""
    from matplotlib.colors import PowerNorm

    n = drawn.shown
    for row in range(len(axes)):
        layer, title = row // 2, "exact" if row % 2 == 0 else label(drawn.name)
        for head, ax in enumerate(axes[row]):
            both = [found[layer][head, :n, :n].numpy() for found in (drawn.exact, drawn.other)]
            scale = PowerNorm(0.5, vmin=min(0.0, *(A.min() for A in both)), vmax=max(A.max() for A in both))
            ax.imshow(both[row % 2], norm=scale, cmap="viridis", interpolation="nearest")
            ax.set_title(f"{title}, layer {layer}, head {head}", fontsize=6)
            ax.grid(False)
            letters = list(drawn.letters[:n]) if n <= 30 else []
            ax.set_xticks(range(len(letters)), letters, fontsize=4)
            ax.set_yticks(range(len(letters)), letters, fontsize=4)


def draw_alike(figure, found: Alike) -> None:
    """BLOSUM62, the similarity by attention, and one against the other."""
    axes = figure.subplots(1, 3, gridspec_kw={"wspace": 0.3, "bottom": 0.12, "top": 0.92})
    matrix, score = mean_alike(found), blosum62()
    for ax, values, title in zip(axes, (score, matrix), ("BLOSUM62", "similarity by attention")):
        shown = np.where(np.eye(len(STANDARD), dtype=bool), np.nan, values)
        ax.imshow(shown, cmap="viridis")
        ax.set_title(title, fontsize=8)
        ax.grid(False)
        ax.set_xticks(range(len(STANDARD)), STANDARD, fontsize=5)
        ax.set_yticks(range(len(STANDARD)), STANDARD, fontsize=5)
    axes[2].plot(score[PAIRS], matrix[PAIRS], "o", ms=2.5, color=palette.EXACT)
    for a, b in NAMED:
        i, j = STANDARD.index(a), STANDARD.index(b)
        axes[2].annotate(f"{a}{b}", (score[i, j], matrix[i, j]), color="#D55E00", fontsize=8)
    axes[2].set(xlabel="BLOSUM62", title="190 pairs", box_aspect=1)
    axes[2].title.set_fontsize(8)
