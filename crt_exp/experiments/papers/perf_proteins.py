"""Performers Figures 6 and 7 (right), Table 2: language models of proteins."""

import pandas as pd

from crt_exp.experiments.report import Claim, Page, Rows, dot_plot, label, mean_table, share, sweep
from crt_exp.experiments.report.plots import panels

DIRECTIONS = {"U": "task.direction=unidirectional", "B": "task.direction=bidirectional"}
MODEL = (
    "task=trembl task.dropout=0 +task.sizes.heads=4 +task.sizes.layers=2 +task.sizes.d_ff=128 +task.sizes.d=64 "
    "trainer.batch=32 trainer.warmup=20 trainer.eval_batch=128 trainer.select=last trainer.save_every=1000000"
)
FAMILIES = {
    "generated families": "task.dataset=generated task.max_length=64 task.generated.shortest=32 "
    "task.generated.longest=64 trainer.eval_every=100 trainer.log_every=100 trainer.steps=1000"
}
PROTEOMES = {
    "proteomes": "task.dataset=uniprot task.max_length=128 trainer.eval_every=40 trainer.log_every=40 "
    "trainer.steps=200"
}
CHAINS = (
    "task=trembl task.dataset=uniprot task.chains=true task.max_length=8192 task.held_out_files=[] "
    "task.validation_share=0.01 task.test_share=0.01 task.dropout=0 task.preset=tiny trainer.batch=1 "
    "trainer.warmup=4 trainer.select=last trainer.eval_every=1000000 trainer.save_every=1000000 trainer.steps=32"
)
METHODS = ["exact", "favorp m=32", "favorpp m=32", "relu m=32", "uniform"]
LINFORMER, REFORMER = "linformer length=128 rank=32", "reformer chunk=16 buckets=16 hashes=2"
TREMBL, SET = "experiment=performers_trembl", {"TrEMBL": ""}
FULL = ["relu", "exact", "elu", "uniform", "favorp redraw_every=1000", "favorpp redraw_every=1000"]
PAPER_ROWS = ["letter frequencies", "exact", "ReLU", "FAVOR+"]
PAPER = {
    "accuracy": {"U": "9.92 30.80 31.58", "B": "9.92 33.32 36.09 33.00"},  # Table 2
    "accuracy_ood": {"U": "9.07 19.70 18.44", "B": "9.07 25.07 24.10 23.48"},
    "perplexity": {"U": "17.80 9.37 9.17", "B": "17.80 9.22 8.36 9.24"},
    "perplexity_ood": {"U": "17.93 13.20 13.63", "B": "17.93 12.09 12.26 12.41"},
}


def training_runs(
    options: str, data: dict[str, str], direction: str, methods: list[str], seeds: int
):
    return sweep(
        options,
        dataset=data,
        mode={direction: DIRECTIONS[direction]},
        attention=methods,
        seed=range(seeds),
    )


page = Page(
    "perf_proteins",
    title="Performers Figures 6 and 7 (right), Table 2: language models of proteins",
    finding="On generated families, ReLU is less accurate than exact attention by 4.2 ± 1.5 points for next letters "
    "and by 17 ± 4 for masked letters (95% CI, n = 8 seeds). FAVOR+ is less accurate by 5.5 ± 1.6 points for "
    "next letters.",
    small={
        "proteins": [
            *training_runs(MODEL, FAMILIES, "U", METHODS, 8),
            *training_runs(MODEL, FAMILIES, "U", [REFORMER], 3),
            *training_runs(MODEL, FAMILIES, "B", [*METHODS, LINFORMER, REFORMER], 8),
            *training_runs(MODEL, PROTEOMES, "U", [*METHODS, REFORMER], 3),
            *training_runs(MODEL, PROTEOMES, "B", [*METHODS, LINFORMER, REFORMER], 3),
        ],
        "proteins-long": training_runs(
            CHAINS, {"chains of proteomes": ""}, "U", ["exact", "uniform", "favorpp m=32"], 3
        ),
    },
    full={
        "proteins": [
            *training_runs(TREMBL, SET, "U", FULL, 1),
            *training_runs(TREMBL, SET, "B", FULL, 1),
            *training_runs(
                f"{TREMBL} trainer.clip=null",
                SET,
                "U",
                ["reformer hashes=2 chunk=128 buckets=16"],
                1,
            ),
            *training_runs(
                TREMBL, SET, "B", ["linformer length=1024 rank=600 redraw_every=1000"], 1
            ),
        ],
        "proteins-long": training_runs(
            "experiment=performers_trembl_concat", {"chains of TrEMBL": ""}, "U", FULL, 1
        ),
    },
    data="proteomes",
    stand_in="generated families",
    columns=["dataset", "mode", "split", "method"],
    metrics=["loss", "loss_ood", *PAPER, *(f"unigram_{metric}" for metric in PAPER)],
    measured=[
        "Models: 2 layers, 4 heads, d = 64, 1000 steps of 32 sequences (generated families) or 200 (proteomes). The "
        "paper trains 36 layers on TrEMBL.",
        "U: next letters. B: masked letters. Held out: families, or one proteome, that are not in the training set.",
        "m = 32 orthogonal projections without redraws. A sample is a seed: three, or eight in most rows of generated "
        "families. Five of the eight were added after the first results.",
        "Rows of proteomes and chains were measured on splits by accession: 18 of 20,343 sequences were in more than "
        "one split. Splits are by the letters of a sequence.",
        "Uniform attention loses almost nothing on proteomes and chains, so they decide no claim.",
    ],
)


def cases(rows: Rows, split: str = "") -> dict[str, dict]:
    """Data set and direction -> what selects the test rows."""
    found = rows.select(f"loss{split}", split="test")[["dataset", "mode"]].drop_duplicates()
    return {
        f"{name}, {direction}": {"dataset": name, "mode": direction, "split": "test"}
        for name, direction in found.itertuples(index=False)
        if not name.startswith("chains")
    }


def failed_checks(rows: Rows, where: dict[str, dict], metric: str, least: float) -> dict[str, str]:
    """Cases in which uniform attention loses too little to compare methods."""
    fails = {}
    for case, test in where.items():
        cost = rows.paired("uniform", "exact", metric, **test).mean()
        if cost < least:
            fails[case] = (
                f"loss increase of uniform attention: {cost:.3g} nats (at least {least:g} needed)"
            )
    return fails


def claims(rows: Rows) -> list[Claim]:
    named = {name.split(" ")[0]: name for name in rows.methods("loss", split="test")}
    seen, unseen = cases(rows), cases(rows, "_ood")
    chains = {
        name: {"dataset": name, "split": "test"}
        for name in rows.frame["dataset"].unique()
        if "chains" in name
    }

    def points(first: str, second: str, where: dict[str, dict], metric: str = "accuracy"):
        return {
            case: 100
            * rows.paired(named.get(first, first), named.get(second, second), metric, **each)
            for case, each in where.items()
        }

    def paper(metric: str, text: str) -> dict[str, str]:
        return {
            case: text.format(*PAPER[metric][each["mode"]].split()) for case, each in seen.items()
        }

    shared = {
        "unit": "points",
        "fails": failed_checks(rows, seen, "loss", 0.5),
        "needs": "longer training on TrEMBL: experiment=performers_trembl, 91 GPU hours a method",
    }
    return [
        Claim(
            "ReLU is more accurate than exact attention",
            points("relu", "exact", seen),
            **shared,
            paper=paper("accuracy", "{2}% against {1}%"),
        ),
        Claim(
            "FAVOR+ keeps 90% of the loss reduction of exact attention over uniform attention",
            {
                case: share(
                    rows.paired("uniform", named["favorp"], "loss", **each),
                    rows.paired("uniform", "exact", "loss", **each),
                )
                for case, each in seen.items()
            },
            above=0.9,
            paper="the same accuracy",
            **shared | {"unit": "of the reduction"},
        ),
        *(
            Claim(
                f"exact attention is more accurate than {label(other)}",
                points("exact", other, seen),
                **shared,
                paper="Reformer and Linformer significantly drop in accuracy",
            )
            for other in ("reformer", "linformer")
        ),
        Claim(
            "on held-out sequences exact attention is more accurate than ReLU",
            points("exact", "relu", unseen, "accuracy_ood"),
            unit="points",
            fails=failed_checks(rows, unseen, "loss_ood", 0.3),
            paper=paper("accuracy_ood", "{1}% against {2}%"),
            needs=shared["needs"],
        ),
        Claim(
            "FAVOR++ is more accurate than exact attention",
            points("favorpp", "exact", chains),
            unit="points",
            paper="the small Transformer stops at 19%, the larger Performer reaches 24%",
            fails=failed_checks(rows, chains, "loss", 0.3),
            needs="experiment=performers_trembl_concat, 21 GPU hours",
        ),
        Claim(
            "a regular Transformer runs out of memory at 8192 letters",
            paper="even at a batch of 1 a chip",
            not_measured="neither the paper's model nor its chips of 16 GB were available",
            needs="a GPU of 16 GB",
        ),
    ]


def names(rows: Rows) -> dict[str, str]:
    return {method: label(method.split(" ")[0]) for method in rows.methods("loss", split="test")}


def table(rows: Rows, metric: str, data: str, scale: float = 1) -> pd.DataFrame:
    """Tabulate methods and letter frequencies beside the paper's values.

    Columns: test sequences and held-out sequences.
    """
    columns = {}
    for split, words in (("", ""), ("_ood", ", held out")):
        for where in cases(rows, split).values():
            if where["dataset"] != data:
                continue
            title = f"{where['mode']}{words}"
            frequencies = {"": {"metric": f"unigram_{metric}{split}", **where}}
            measured = {"": {"metric": f"{metric}{split}", **where}}
            first = mean_table(rows, frequencies, {"exact": PAPER_ROWS[0]}, scale, ".2f")
            others = mean_table(rows, measured, names(rows), scale, ".2f")
            columns[title] = pd.concat([first, others])[""]
            if data != "proteomes":
                values = PAPER[f"{metric}{split}"][where["mode"]].split()
                columns[f"{title}, paper"] = pd.Series(dict(zip(PAPER_ROWS, values)))
    return (
        pd.DataFrame(columns)
        .reindex([PAPER_ROWS[0], *names(rows).values()])
        .fillna("")
        .rename_axis("attention")
    )


def tables(rows: Rows):
    tables = {}
    for dataset in dict.fromkeys(where["dataset"] for where in cases(rows).values()):
        first = not tables
        tables[f"Accuracy, %, {dataset}"] = table(rows, "accuracy", dataset, 100)
        if first:
            tables[f"Perplexity, {dataset}"] = table(rows, "perplexity", dataset)
    return tables


def figure(rows: Rows):
    fig, axes = panels(2)
    for ax, (case, where) in zip(axes, cases(rows).items()):
        dot_plot(
            ax,
            {
                method: 100 * rows.paired(method, "exact", "accuracy", **where)
                for method in names(rows)
                if method != "exact"
            },
            zero=True,
            labels=names(rows),
        )
        ax.set(title=f"{case}: test", xlabel="accuracy minus that of exact attention, points")
    fig.tight_layout()
    return fig
