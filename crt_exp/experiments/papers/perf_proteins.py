"""Performers Figures 6 and 7 (right), Table 2: language models of proteins."""

from collections.abc import Mapping

import pandas as pd

from crt_exp.experiments.papers.parts.protein_models import (
    FAMILIES,
    FIRST_LOOK,
    MODEL,
    PROTEOMES,
    training_runs,
)
from crt_exp.experiments.report import (
    Claim,
    Page,
    Rows,
    Tables,
    added,
    control_checks,
    dot_plot,
    label,
    mean_ci,
    mean_table,
    panels,
    share,
)

METHODS = ["exact", "favorp m=32", "favorpp m=32", "relu m=32", "uniform"]
REFORMER = "reformer chunk=16 buckets=16 hashes=2"
EVERY = [*METHODS, "linformer length=128 rank=32", REFORMER]
PROTEINS = [
    *training_runs(MODEL, FAMILIES, "U", METHODS, 8),
    *training_runs(MODEL, FAMILIES, "U", [REFORMER], 3),
    *training_runs(MODEL, FAMILIES, "B", EVERY, 8),
    *training_runs(MODEL, PROTEOMES, "U", [*METHODS, REFORMER], 3),
    *training_runs(MODEL, PROTEOMES, "B", EVERY, 3),
]
CHAINS = (
    "task=trembl task.dataset=uniprot task.chains=true task.max_length=8192 task.held_out_files=[] "
    "task.validation_share=0.01 task.test_share=0.01 task.dropout=0 task.preset=tiny trainer.batch=1 "
    "trainer.warmup=4 trainer.select=last trainer.eval_every=1000000 trainer.save_every=1000000 trainer.steps=32"
)
LONG_METHODS = ["exact", "uniform", "favorpp m=32"]
LONG = training_runs(CHAINS, {"chains of proteomes": ""}, "U", LONG_METHODS, 3)

TREMBL, SET = "experiment=performers_trembl", {"TrEMBL": ""}
FULL = ["relu", "exact", "elu", "uniform", "favorp redraw_every=1000", "favorpp redraw_every=1000"]
FULL_LINFORMER = "linformer length=1024 rank=600 redraw_every=1000"
FULL_REFORMER = "reformer hashes=2 chunk=128 buckets=16"
FULL_PROTEINS = [
    *training_runs(TREMBL, SET, "U", FULL, 1),
    *training_runs(TREMBL, SET, "B", [*FULL, FULL_LINFORMER], 1),
    *training_runs(f"{TREMBL} trainer.clip=null", SET, "U", [FULL_REFORMER], 1),
]
CONCATENATED = "experiment=performers_trembl_concat"
FULL_LONG = training_runs(CONCATENATED, {"chains of TrEMBL": ""}, "U", FULL, 1)

PAPER_ROWS = ["letter frequencies", "exact", "ReLU", "FAVOR+"]
PAPER = {
    "accuracy": {"U": "9.92 30.80 31.58", "B": "9.92 33.32 36.09 33.00"},  # Table 2
    "accuracy_ood": {"U": "9.07 19.70 18.44", "B": "9.07 25.07 24.10 23.48"},
    "perplexity": {"U": "17.80 9.37 9.17", "B": "17.80 9.22 8.36 9.24"},
    "perplexity_ood": {"U": "17.93 13.20 13.63", "B": "17.93 12.09 12.26 12.41"},
}
LEAST_SHARE = (
    0.25  # of the loss reduction of exact attention; with less, a method is not trained yet
)
NEEDS = "longer training on TrEMBL: experiment=performers_trembl, 91 GPU hours a method"
SMALLER = "2 layers, 32 features and 1000 steps on generated families; the paper has 36 layers, 256 features and TrEMBL"


def paper_values(metric: str, mode: str) -> dict[str, str]:
    return dict(zip(PAPER_ROWS, PAPER[metric][mode].split()))


def finding(rows: Rows) -> str:
    named = rows.without_options()
    generated = {}
    for mode in ("U", "B"):
        generated[mode] = {"dataset": "generated families", "mode": mode, "split": "test"}
    relu = points(named, "exact", "relu", generated)
    favorp = points(named, "exact", "favorp", generated)["U"]
    return (
        "On generated families, for next letters, ReLU is less accurate than exact attention by "
        f"{mean_ci(relu['U'])} points, and FAVOR+ by {mean_ci(favorp)} (95% CI, n = {len(favorp)} seeds). For masked "
        f"letters ReLU loses {mean_ci(relu['B'])} points, because most of its seeds are not trained yet."
    )


def cases(rows: Rows, split: str = "") -> dict[str, dict[str, str]]:
    """Data set and direction -> filter of its test rows."""
    cases = {}
    tested = rows.select(f"loss{split}", split="test")[["dataset", "mode"]].drop_duplicates()
    for dataset, mode in tested.itertuples(index=False):
        if not dataset.startswith("chains"):
            cases[f"{dataset}, {mode}"] = {"dataset": dataset, "mode": mode, "split": "test"}
    return cases


def points(rows: Rows, first: str, second: str, cases: Mapping, metric: str = "accuracy"):
    """Case -> accuracy of the first method minus that of the second, by seed."""
    points = rows.paired_by_case(first, second, metric, cases, 100)
    return {case: added(samples, FIRST_LOOK) for case, samples in points.items()}


def failed_checks(rows: Rows, name: str, cases: Mapping) -> dict[str, str]:
    """Cases in which attention matters too little, or most seeds of a method are not trained yet."""
    fails = {}
    for case, where in cases.items():
        reduction = rows.paired("uniform", name, "loss", **where)
        whole = rows.paired("uniform", "exact", "loss", **where).mean()
        share = reduction.median() / whole
        if share < LEAST_SHARE:
            fails[case] = (
                f"not trained yet: the median loss reduction of {label(name)} over uniform attention is {share:.0%} "
                f"of that of exact attention (at least {LEAST_SHARE:.0%} needed)"
            )
    return fails | control_checks(rows, cases)


def paper_pairs(cases: Mapping, metric: str, first: str, second: str) -> dict[str, str]:
    """Case -> the paper's values of two methods, for the cases in which it has both."""
    papers = {}
    for case, where in cases.items():
        values = paper_values(metric, where["mode"])
        if first in values and second in values:
            papers[case] = f"{values[first]}% against {values[second]}%"
    return papers


def accuracy_claim(rows: Rows, first: str, second: str, cases: Mapping, paper) -> Claim:
    exact = {"exact": "exact attention"}
    other = second if first == "exact" else first
    text = f"{label(first, exact)} is more accurate than {label(second, exact)}"
    gains = points(rows, first, second, cases)
    fails = failed_checks(rows, other, cases)
    return Claim(text, gains, paper, NEEDS, unit="points", fails=fails, reason=SMALLER)


def reduction_claim(rows: Rows, cases: Mapping) -> Claim:
    kept = {}
    for case, where in cases.items():
        gains = []
        for method in ("favorp", "exact"):
            gains.append(added(rows.paired("uniform", method, "loss", **where), FIRST_LOOK))
        kept[case] = share(*gains)
    return Claim(
        "FAVOR+ keeps 90% of the loss reduction of exact attention over uniform attention",
        kept,
        above=0.9,
        unit="of the reduction",
        paper="the same accuracy",
        fails=failed_checks(rows, "favorp", cases),
        needs=NEEDS,
        reason=SMALLER,
    )


def claims(rows: Rows) -> list[Claim]:
    named = rows.without_options()
    tested = cases(named)
    papers = paper_pairs(tested, "accuracy", "ReLU", "exact")
    claims = [
        accuracy_claim(named, "relu", "exact", tested, papers),
        reduction_claim(named, tested),
    ]
    for other in ("reformer", "linformer"):
        paper = "Reformer and Linformer significantly drop in accuracy"
        claims.append(accuracy_claim(named, "exact", other, tested, paper))
    unseen = cases(named, "_ood")
    fails = control_checks(named, unseen, "loss_ood", least=0.3)
    for other in ("relu", "favorp"):
        papers = paper_pairs(unseen, "accuracy_ood", "exact", label(other))
        judged = {case: unseen[case] for case in papers}
        gains = points(named, "exact", other, judged, "accuracy_ood")
        text = f"on held-out sequences exact attention is more accurate than {label(other)}"
        claims.append(Claim(text, gains, papers, NEEDS, unit="points", fails=fails))
    chains = {}
    for name in named.frame["dataset"].unique():
        if "chains" in name:
            chains[name] = {"dataset": name, "split": "test"}
    text = "FAVOR++ is more accurate than exact attention"
    gains = points(named, "favorpp", "exact", chains)
    paper = "the small Transformer stops at 19%, the larger Performer reaches 24%"
    needs = "experiment=performers_trembl_concat, 21 GPU hours"
    fails = control_checks(named, chains, least=0.3)
    claims.append(Claim(text, gains, paper, needs, unit="points", fails=fails))
    text = "a regular Transformer runs out of memory at 8192 letters"
    paper = "even at a batch of 1 a chip"
    reason = "neither the paper's model nor its chips of 16 GB were available"
    claims.append(Claim(text, paper=paper, not_measured=reason, needs="a GPU of 16 GB"))
    return claims


def score_table(rows: Rows, metric: str, data: str, scale: float = 1) -> pd.DataFrame:
    """Tabulate methods and letter frequencies beside the paper's values.

    Columns: test sequences and held-out sequences.
    """
    names = method_names(rows)
    columns = {}
    for split, words in {"": "", "_ood": ", held out"}.items():
        for where in cases(rows, split).values():
            if where["dataset"] != data:
                continue
            title = f"{where['mode']}{words}"
            parts = []
            for prefix, methods in {"unigram_": {"exact": PAPER_ROWS[0]}, "": names}.items():
                measured = {title: {"metric": f"{prefix}{metric}{split}", **where}}
                parts.append(mean_table(rows, measured, methods, scale, ".2f")[title])
            columns[title] = pd.concat(parts)
            if data != "proteomes":
                values = paper_values(f"{metric}{split}", where["mode"])
                columns[f"{title}, paper"] = pd.Series(values)
    table = pd.DataFrame(columns).reindex([PAPER_ROWS[0], *names.values()])
    return table.fillna("").rename_axis("attention")


def method_names(rows: Rows) -> dict[str, str]:
    return {method: label(method) for method in rows.methods("loss", split="test")}


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
        gains = named.by_method("accuracy", method_names(named), 100, less="exact", **where)
        dot_plot(ax, gains, zero=True)
        ax.set(title=f"{case}: test", xlabel="accuracy minus that of exact attention, points")
    return fig


page = Page(
    "perf_proteins",
    title="Performers Figures 6 and 7 (right), Table 2: language models of proteins",
    finding=finding,
    small={"proteins": PROTEINS, "proteins-long": LONG},
    full={"proteins": FULL_PROTEINS, "proteins-long": FULL_LONG},
    stand_in="generated families",
    columns=["dataset", "mode", "split", "method"],
    metrics=["loss", "loss_ood", *PAPER, *(f"unigram_{metric}" for metric in PAPER)],
    measured=[
        "Models: 2 layers, 4 heads, d = 64, 1000 steps of 32 sequences (generated families) or 200 (proteomes). The "
        "paper trains 36 layers on TrEMBL.",
        "U: next letters. B: masked letters. Held out: families, or one proteome, that are not in the training set.",
        "m = 32 orthogonal projections without redraws. A sample is a seed: three, or eight in most rows of generated "
        "families. Five of the eight were added after the first results and decide the claims alone.",
        "Rows of proteomes and chains were measured on splits by accession: 18 of 20,343 sequences were in more than "
        "one split. Splits are by the letters of a sequence.",
        "Uniform attention loses almost nothing on proteomes and chains, so they decide no claim.",
    ],
    tables=tables,
    claims=claims,
    figure=figure,
)
