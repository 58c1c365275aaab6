"""Accuracy and perplexity of language models of proteins beside Performers Table 2."""

import pandas as pd

from crt_exp.experiments.report import Rows, label, mean_table

PAPER_ROWS = ["letter frequencies", "exact", "ReLU", "FAVOR+"]
PAPER = {  # Table 2
    "accuracy": {"U": "9.92 30.80 31.58", "B": "9.92 33.32 36.09 33.00"},
    "accuracy_ood": {"U": "9.07 19.70 18.44", "B": "9.07 25.07 24.10 23.48"},
    "perplexity": {"U": "17.80 9.37 9.17", "B": "17.80 9.22 8.36 9.24"},
    "perplexity_ood": {"U": "17.93 13.20 13.63", "B": "17.93 12.09 12.26 12.41"},
}


def paper_values(metric: str, mode: str) -> dict[str, str]:
    return dict(zip(PAPER_ROWS, PAPER[metric][mode].split()))


def cases(rows: Rows, split: str = "") -> dict[str, dict[str, str]]:
    """Data set and direction -> filter of its test rows."""
    return rows.cases(f"loss{split}", "dataset", "mode", sweep="proteins", split="test")


def score_table(rows: Rows, metric: str, data: str, scale: float = 1) -> pd.DataFrame:
    """Letter frequencies and methods on test and held-out sequences, beside the paper's values."""
    compared = rows.methods("loss", split="test")
    columns = {}
    for split, words in {"": "", "_ood": ", held out"}.items():
        for where in cases(rows, split).values():
            if where["dataset"] != data:
                continue
            title = f"{where['mode']}{words}"
            parts = []
            for prefix, methods in {"unigram_": {"exact": PAPER_ROWS[0]}, "": compared}.items():
                measured = {title: {"metric": f"{prefix}{metric}{split}", **where}}
                parts.append(mean_table(rows, measured, methods, scale, ".2f")[title])
            columns[title] = pd.concat(parts)
            if data != "proteomes":
                values = paper_values(f"{metric}{split}", where["mode"])
                columns[f"{title}, paper"] = pd.Series(values)
    table = pd.DataFrame(columns).reindex([PAPER_ROWS[0], *map(label, compared)])
    return table.fillna("").rename_axis("attention")
