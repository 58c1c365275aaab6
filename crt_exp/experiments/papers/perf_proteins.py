"""Performers Figures 6 and 7 (right), Table 2: language models of proteins."""

from collections.abc import Mapping

import pandas as pd

from crt_exp.experiments.papers.parts.protein_models import FIRST_LOOK, FULL, SMALL
from crt_exp.experiments.papers.parts.protein_scores import PAPER, cases, paper_values, score_table
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
    panels,
    share,
    training_check,
)

NEEDS = "longer training on TrEMBL: experiment=performers_trembl, 91 GPU hours a method"
SMALLER = "2 layers, 32 features and 1000 steps on generated families; the paper has 36 layers, 256 features and TrEMBL"


def finding(rows: Rows) -> str:
    named = rows.without_options()
    generated = filters_over("mode", ["U", "B"], dataset="generated families", split="test")
    relu = points(named, "exact", "relu", generated)
    favorp = points(named, "exact", "favorp", generated)["U"]
    return (
        "On generated families, for next letters, ReLU is less accurate than exact attention by "
        f"{mean_ci(relu['U'])} points, and FAVOR+ by {mean_ci(favorp)} (95% CI, n = {len(favorp)} seeds). For masked "
        f"letters ReLU loses {mean_ci(relu['B'])} points, because most of its seeds are not trained yet."
    )


def points(rows: Rows, first: str, second: str, cases: Mapping, metric: str = "accuracy"):
    """Case -> accuracy of the first method minus that of the second, by seed."""
    return rows.paired_by_case(first, second, metric, cases, 100, looks=[FIRST_LOOK])


def failed_checks(rows: Rows, name: str, cases: Mapping) -> dict[str, str]:
    """Cases in which attention matters too little, or most seeds are not trained yet."""
    fails = {}
    for case, where in cases.items():
        median = rows.paired("uniform", name, "loss", **where).median()
        whole = rows.paired("uniform", "exact", "loss", **where).mean()
        if reason := training_check(f"the median seed of {label(name)}", median / whole):
            fails[case] = reason
    return fails | control_checks(rows, cases)


def paper_pairs(cases: Mapping, metric: str, first: str, second: str) -> dict[str, str]:
    """Case -> the paper's values of two methods, for the cases in which it has both."""
    papers = {}
    for case, where in cases.items():
        values = paper_values(metric, where["mode"])
        if first in values and second in values:
            papers[case] = f"{values[first]}% against {values[second]}%"
    return papers


def claims(rows: Rows) -> list[Claim]:
    named = rows.without_options()
    tested = cases(named)
    unseen = cases(named, "_ood")
    chains = named.cases("loss", "dataset", sweep="proteins-long", split="test")
    small = {"needs": NEEDS, "reason": SMALLER}
    claims = [
        Claim(
            "ReLU is more accurate than exact attention",
            points(named, "relu", "exact", tested),
            paper_pairs(tested, "accuracy", "ReLU", "exact"),
            unit="points",
            fails=failed_checks(named, "relu", tested),
            **small,
        ),
        Claim(
            "FAVOR+ keeps 90% of the loss reduction of exact attention over uniform attention",
            {case: kept_reduction(named, where) for case, where in tested.items()},
            "the same accuracy",
            above=0.9,
            unit="of the reduction",
            fails=failed_checks(named, "favorp", tested),
            **small,
        ),
    ]
    for other in ("reformer", "linformer"):
        claims.append(
            Claim(
                f"exact attention is more accurate than {label(other)}",
                points(named, "exact", other, tested),
                "Reformer and Linformer significantly drop in accuracy",
                unit="points",
                fails=failed_checks(named, other, tested),
                **small,
            )
        )
    for other in ("relu", "favorp"):
        papers = paper_pairs(unseen, "accuracy_ood", "exact", label(other))
        judged = {case: unseen[case] for case in papers}
        claims.append(
            Claim(
                f"on held-out sequences exact attention is more accurate than {label(other)}",
                points(named, "exact", other, judged, "accuracy_ood"),
                papers,
                NEEDS,
                unit="points",
                fails=control_checks(named, unseen, "loss_ood", least=0.3),
            )
        )
    return [
        *claims,
        Claim(
            "FAVOR++ is more accurate than exact attention",
            points(named, "favorpp", "exact", chains),
            "the small Transformer stops at 19%, the larger Performer reaches 24%",
            "experiment=performers_trembl_concat, 21 GPU hours",
            unit="points",
            fails=control_checks(named, chains, least=0.3),
        ),
        Claim(
            "a regular Transformer runs out of memory at 8192 letters",
            paper="even at a batch of 1 a chip",
            not_measured="neither the paper's model nor its chips of 16 GB were available",
            needs="a GPU of 16 GB",
        ),
    ]


def kept_reduction(rows: Rows, where: Mapping) -> pd.Series:
    """The loss reduction of FAVOR+ over uniform attention, as a share of that of exact attention."""
    gains = []
    for method in ("favorp", "exact"):
        gains.append(added(rows.paired("uniform", method, "loss", **where), FIRST_LOOK))
    return share(*gains)


def tables(rows: Rows) -> Tables:
    named = rows.without_options()
    tables = {}
    for dataset in dict.fromkeys(where["dataset"] for where in cases(named).values()):
        is_first = not tables
        tables[f"Accuracy, %, {dataset}"] = score_table(named, "accuracy", dataset, 100)
        if is_first:
            tables[f"Perplexity, {dataset}"] = score_table(named, "perplexity", dataset)
    return tables


def figure(rows: Rows):
    named = rows.without_options()
    fig, axes = panels(2)
    for ax, (case, where) in zip(axes, cases(named).items()):
        methods = named.methods("loss", split="test")
        gains = named.by_method("accuracy", methods, 100, less="exact", **where)
        dot_plot(ax, gains, zero=True)
        ax.set(title=f"{case}: test", xlabel="accuracy minus that of exact attention, points")
    return fig


page = Page(
    "perf_proteins",
    title="Performers Figures 6 and 7 (right), Table 2: language models of proteins",
    finding=finding,
    small=SMALL,
    full=FULL,
    stand_in="generated families",
    columns=["dataset", "mode", "split", "method"],
    metrics=["loss", "loss_ood", *PAPER, *(f"unigram_{metric}" for metric in PAPER)],
    measured=[
        "Models: 2 layers, 4 heads, d = 64, 1000 steps of 32 sequences (generated families) or 200 (proteomes).",
        "U: next letters. B: masked letters. Held out: families, or one proteome, that are not in the training set.",
        "m = 32 orthogonal projections without redraws. A sample is a seed: three, or eight in most rows of generated "
        "families. Five of the eight were added after the first results and decide the claims alone.",
        "Splits of proteomes and chains were by accession: 18 of 20,343 sequences were in more than one of them.",
        "Uniform attention loses almost nothing on proteomes and chains, so they decide no claim.",
    ],
    tables=tables,
    claims=claims,
    figure=figure,
)
