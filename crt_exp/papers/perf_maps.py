"""Performers Figures 10 to 13: attention matrices of a protein model, and amino acids that are alike."""

import numpy as np
import pandas as pd

from crt_exp.drawing import EXACT, new_figure
from crt_exp.papers.perf_proteins import MODEL, PROTEOMES, trained
from crt_exp.report import Claim, Page, Rows, label, mean_table, sweep
from crt_exp.report.sweeps import HOME

TASK, START = "task=attention_maps", f"{HOME}/maps-exact/proteomes_B_exact_"
METHODS = ["favorpp m=64", "favorp m=64", "uniform"]
LEAST = 0.5  # nats that uniform attention costs; exact attention gains 0.66 in the paper's Table 2
ALIKE = {"attention": "attention, trained", "random weights": "attention, random weights",
         "composition": "composition of the sequences", "frequency": "equally frequent letters"}
NAMED = ("DE", "FY")  # pairs that the paper calls highly similar
LAYERS, HEADS = 4, 8  # that are drawn at most, as many as the paper's

page = Page(
    "perf_maps",
    title="Performers Figures 10 to 13: attention of a protein model",
    finding="FAVOR++'s matrices are nearer to the exact ones than uniform attention's. But these models hardly depend "
            "on attention, so neither claim is decided.",
    small={"attention-maps": [
               *sweep(f"{TASK} task.start={START}0", attention=METHODS, seed={
                   seed: f"seed={seed} task.drawn={str(not seed).lower()}" for seed in range(8)}),
               *sweep(TASK, attention=["exact"], seed={seed: f"seed={seed} task.start={START}{seed} "
                                                       f"task.drawn={str(not seed).lower()}" for seed in range(3)})],
           "attention-maps/loss": sweep("task=swap_loss task.splits=[test]", attention=["exact", "uniform"], seed={
               seed: f"seed={seed} task.start={START}{seed}" for seed in range(3)})},
    models={"maps-exact": trained(MODEL, PROTEOMES, "B", ["exact"], 3)},
    data="proteomes",
    columns=["layer", "head", "query", "by", "method"],
    metrics=["letters", "row", "error", "r", "p", "similarity", "loss"],
    measured=[
        "Three exact models of masked letters, 2 layers, 4 heads, 200 steps on proteomes; the paper's has 36 layers.",
        "Matrices: one model, thioredoxin of E. coli (P0AA25, 109 letters; the paper's BPT1_BOVIN is in no proteome "
        "here), m = 64, eight sets of random projections. Each model reads its own hidden states, so errors of "
        "earlier layers are in those of later ones.",
        "Amino acids: 800 sequences, unmasked. Two are alike as far as the shares of attention that they get go "
        "together over heads (Vig et al., 2020); a sample is a model. p: Mantel's test, one-sided.",
        "Compared with: the model with random weights; how letters go together over sequences, which is all that "
        "uniform attention sees; and how equally frequent two letters are."])


def claims(rows: Rows) -> list[Claim]:
    cost = rows.paired("uniform", "exact", "loss").mean()
    failed = {"": f"what uniform attention costs: {cost:.3g} nats (at least {LEAST} needed)"} if cost < LEAST else {}
    return [
        Claim("the matrices of FAVOR++ are nearer to the exact ones than uniform attention's",
              {"": rows.paired("uniform", "favorpp m=64", "error")}, unit="of their norm", fails=failed,
              paper="the matrices are alike (Figures 10 and 11)"),
        Claim("the similarity of amino acids by attention correlates with BLOSUM62",
              {"": rows.values("r", "exact", by="attention")}, fails=failed,
              paper="highly similar are (D, E) and (F, Y)")]


def tables(rows: Rows):
    errors = mean_table(rows, {f"layer {layer:.0f}": {"metric": "error", "layer": layer} for layer in sorted(
        rows.select("error")["layer"].unique())}, METHODS)
    similarity = rows.values("similarity", "exact", by="attention").sort_values(ascending=False)
    places = {f"({a}, {b})": 1 + int((similarity > similarity[a + b]).sum()) for a, b in NAMED}
    alike = pd.DataFrame.from_dict({name: {
        metric: mean_table(rows, {"": {"metric": metric, "by": by}}, ["exact"], spec=spec).iloc[0, 0]
        for metric, spec in (("r", ".3f"), ("p", ".2g"))} for by, name in ALIKE.items()}, orient="index")
    alike.index.name = "similarity by"
    return {"Relative error of the matrices, |A' - A| / |A|": errors,
            "Correlation with BLOSUM62 over 190 pairs of amino acids": alike,
            "Places of the paper's pairs among 190, and the five most similar": pd.DataFrame(
                {"pairs": [", ".join(f"{pair}: {place}" for pair, place in places.items()),
                           ", ".join(f"({a}, {b})" for a, b in similarity.index[:5])]},
                index=["the paper's", "most similar here"])}


def figure(rows: Rows):
    from matplotlib.colors import PowerNorm

    drawn = rows.select("row").sort_values("query", kind="stable")
    maps = {key: np.array([line.split() for line in group["value"]], float)
            for key, group in drawn.groupby(["method", "head"], sort=False)}
    methods = ["exact", *(method for method in METHODS if method in {name for name, _ in maps})]
    heads = sorted({head for _, head in maps})
    layers, across = min(LAYERS, 1 + int(heads[-1])), min(HEADS, 1 + max(round(10 * (head % 1)) for head in heads))
    count = len(methods) * layers
    fig, ax = new_figure(figsize=(2.1 * across + 1.6, 1.9 * count + 3.6))
    ax.remove()
    top, bottom = fig.subfigures(2, 1, height_ratios=(1.9 * count, 3.6))
    grid = top.subplots(count, across, squeeze=False, sharex=True, sharey=True,
                        gridspec_kw={"bottom": 0.08, "top": 0.95, "hspace": 0.25, "right": 0.88})
    for place, axes in enumerate(grid):
        layer, method = place // len(methods), methods[place % len(methods)]
        largest = max(maps[name, round(layer + head / 10, 1)].max() for name in methods for head in range(across))
        for head, ax in enumerate(axes):
            A = maps[method, round(layer + head / 10, 1)]
            image = ax.imshow(A, norm=PowerNorm(0.5, vmin=min(0.0, A.min()), vmax=largest), cmap="viridis",
                              interpolation="nearest")
            ax.set_title(f"{label(method.split(' ')[0])}, layer {layer}, head {head}", fontsize=8)
            ax.grid(False)
            ax.tick_params(labelsize=7)
        top.colorbar(image, ax=list(axes), shrink=0.9, pad=0.01, aspect=12, label="weight").ax.tick_params(labelsize=7)
    top.supxlabel("key: place of the letter", fontsize=9)
    top.supylabel("query: place of the letter", fontsize=9)
    draw_alike(bottom, rows)
    return fig


def draw_alike(fig, rows: Rows) -> None:
    """BLOSUM62, the similarity by attention, and one against the other."""
    axes = fig.subplots(1, 3, gridspec_kw={"wspace": 0.45, "bottom": 0.16, "top": 0.9})
    score, shares = (rows.values("similarity", "exact", by=by) for by in ("BLOSUM62", "attention"))
    names = sorted({letter for pair in score.index for letter in pair})
    for ax, values, title in zip(axes, (score, shares), ("BLOSUM62", "similarity by attention")):
        square = np.full((len(names), len(names)), np.nan)
        for pair, value in values.items():
            a, b = map(names.index, pair)
            square[a, b] = square[b, a] = value
        fig.colorbar(ax.imshow(square, cmap="viridis"), ax=ax, shrink=0.7).ax.tick_params(labelsize=7)
        ax.set_title(title, fontsize=9)
        ax.grid(False)
        ax.set_xticks(range(len(names)), names, fontsize=6)
        ax.set_yticks(range(len(names)), names, fontsize=6)
    axes[2].plot(score, shares[score.index], "o", ms=2.5, color=EXACT)
    for pair in NAMED:
        axes[2].annotate(pair, (score[pair], shares[pair]), color="#D55E00", fontsize=9)
    axes[2].set(xlabel="BLOSUM62", ylabel="similarity by attention", title="190 pairs", box_aspect=1)
    axes[2].title.set_fontsize(9)
