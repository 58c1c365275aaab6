"""Performers Figures 10 to 13: attention matrices of a protein model.

Also compares attention between amino acids with their similarity.
"""

import numpy as np
import pandas as pd

from crt_exp.experiments.papers.parts.protein_models import training_runs
from crt_exp.experiments.report import (
    HOME,
    Claim,
    Page,
    Rows,
    control_checks,
    filters_over,
    label,
    mean_ci,
    mean_table,
    panels,
    sweep,
)

START = f"{HOME}/maps-exact/proteomes_B_exact_"
SHOWN, METHODS = ["exact", "favorpp m=64"], ["favorpp m=64", "favorp m=64", "uniform"]
FIRST = {0: "seed=0 task.drawn=true"}  # whose matrices are shown
SIMILAR = {
    "attention": "attention",
    "random weights": "attention with random weights",
    "composition": "frequency per sequence",
    "frequency": "overall frequency",
}

MODEL = (
    "task=trembl task.dropout=0 +task.sizes.heads=4 +task.sizes.layers=4 +task.sizes.d_ff=512 +task.sizes.d=128 "
    "trainer.batch=64 trainer.warmup=200 trainer.steps=4000 trainer.lr=1e-3 trainer.eval_every=1000 "
    "trainer.log_every=500 trainer.eval_batch=128 trainer.select=last trainer.save_every=1000000"
)
PROTEOMES = {"proteomes": "task.dataset=uniprot task.max_length=128"}


PAIRS = ("DE", "FY")  # amino acids that are similar in the paper
NEEDS = "a model whose attention matters: experiment=performers_trembl, 91 GPU hours"


def finding(rows: Rows) -> str:
    excess = mean_ci(rows.paired("favorpp m=64", "uniform", "error"))
    return (
        "The attention matrices of FAVOR++ have a larger relative error than those of uniform attention by "
        f"{excess} (95% CI, n = {excess.n} seeds). The models depend too little on attention to decide either claim."
    )


def claims(rows: Rows) -> list[Claim]:
    fails = control_checks(rows, {"": {}})
    similar = rows.values("similarity", "exact", by="attention").rank(ascending=False)
    ranks = [f"({', '.join(pair)}) {similar[pair]:.0f}" for pair in PAIRS if pair in similar]
    return [
        Claim(
            "the matrices of FAVOR++ are closer to the exact ones than those of uniform attention",
            {"": rows.paired("uniform", "favorpp m=64", "error")},
            unit="relative error",
            fails=fails,
            paper="the matrices are alike (Figures 10 and 11)",
            needs=NEEDS,
        ),
        Claim(
            "the similarity of amino acids by attention correlates with BLOSUM62",
            {"": rows.values("r", "exact", by="attention")},
            fails=fails,
            paper="(D, E) and (F, Y) are highly similar",
            needs=NEEDS,
            reason=f"ranks of 190 pairs: {', '.join(ranks)}",
        ),
    ]


def tables(rows: Rows):
    similar = {}
    for by, name in SIMILAR.items():
        similar[name] = {}
        for metric, spec in (("r", ".3f"), ("p", ".2g")):
            values = rows.values(metric, "exact", by=by)
            similar[name][metric] = f"{mean_ci(values):{spec}}"
    return {
        "Relative error of the matrices, |A' - A| / |A| (lower is better)": mean_table(
            rows, filters_over("layer", range(4), "layer {}", metric="error"), METHODS
        ),
        "Similarity of amino acids: correlation with BLOSUM62 over 190 pairs": pd.DataFrame.from_dict(
            similar, orient="index"
        ).rename_axis("similarity by"),
    }


def figure(rows: Rows):
    from matplotlib.colors import PowerNorm

    fig, axes = panels(4, columns=2)
    for ax, method in zip(axes, SHOWN):
        matrix = rows.select("row", method, head=0.0).sort_values("query")["value"]
        if len(matrix):
            weights = np.array([line.split() for line in matrix], float)
            show_matrix(ax, weights, PowerNorm(0.5))
        ax.set(title=f"{label(method)}: layer 0, head 0", xlabel="key", ylabel="query")
    for ax, by in zip(axes[2:], ("BLOSUM62", "attention")):
        values = rows.values("similarity", "exact", by=by)
        if len(values):
            pairs = pd.concat([values, values.rename(lambda pair: pair[::-1])])
            first, second = pairs.index.str[0], pairs.index.str[1]
            square = pairs.groupby([first, second]).first().unstack()
            show_matrix(ax, square)
            places = range(len(square))
            ax.set_xticks(places, square.columns)
            ax.set_yticks(places, square.index)
        ax.set(title=f"similarity of amino acids: {by}")
    return fig


def show_matrix(ax, matrix, norm=None) -> None:
    image = ax.imshow(matrix, cmap="viridis", norm=norm)
    ax.figure.colorbar(image, ax=ax, shrink=0.7)
    ax.grid(False)


page = Page(
    "perf_maps",
    title="Performers Figures 10 to 13: attention of a protein model",
    finding=finding,
    small={
        "attention-maps": [
            *sweep(
                f"task=attention_maps task.start={START}0",
                attention=METHODS[:1],
                seed=FIRST | {seed: f"seed={seed}" for seed in range(1, 8)},
            ),
            *sweep(
                f"task=attention_maps task.start={START}0", attention=METHODS[1:], seed=range(8)
            ),
            *sweep(
                f"task=attention_maps task.start={START}0",
                attention=["exact"],
                seed=FIRST | {seed: f"seed={seed} task.start={START}{seed}" for seed in (1, 2)},
            ),
        ],
        "attention-maps/loss": sweep(
            "task=swap_loss task.splits=[test]",
            attention=["exact", "uniform"],
            seed={seed: f"seed={seed} task.start={START}{seed}" for seed in range(3)},
        ),
    },
    models={"maps-exact": training_runs(MODEL, PROTEOMES, "B", ["exact"], 3)},
    columns=["layer", "head", "query", "by", "method"],
    metrics=["row", "error", "r", "p", "similarity", "loss"],
    measured=[
        "Three models of masked letters, 4 layers, 4 heads, 4000 steps on proteomes, on a GPU. The paper's has 36 "
        "layers. After 200 steps of 2 layers, FAVOR++ had the smaller error.",
        "Matrices: one model reads thioredoxin of E. coli (P0AA25, 109 letters), m = 64, eight seeds. The paper's "
        "BPT1_BOVIN is not in these proteomes.",
        "Errors of earlier layers are contained in those of later layers.",
        "Similarity: correlation over heads of the attention that two amino acids receive (Vig et al., 2020), 800 "
        "sequences. A sample is a model. p: Mantel's test, one-sided.",
    ],
    tables=tables,
    claims=claims,
    figure=figure,
)
