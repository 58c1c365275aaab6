"""make recall: near-far attention that reads the keys it asks for, on heads in which a single far key matters, and on a
model that was trained to recall pairs.

Beside it, on heads, uniform attention, a window, the bounded near-far attention, pages of keys and the largest weights,
at equal numbers of keys a query; on the model, whose attention is swapped without training, other mechanisms.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from crt_exp.report import recall_runs
from crt_exp.report.evidence import Claim, Gate, Verdict, check_gates, independent, judged, paired, won_by
from crt_exp.report.writing import Cells, markdown, new_figure, write_report
from crt_exp.studies import associative, far_key

LENGTHS = {"small": (512, 2048, 8192, 16384), "gpu": (512, 2048, 8192, 16384), "full": (512, 2048, 8192, 16384, 65536)}
KINDS = {"iid keys": False, "keys in 32 clusters": True}
OPENED, SEEDS, MOST = (32, 128), 10, 0.15
CONTROL, OURS, PAGES = "uniform attention", "near-far, 128 keys", "pages, 128 keys"
Found = dict[tuple[str, int], list[dict[str, float]]]      # kind, length -> an error of each arm, for each seed
TRIALS = {"64 pairs in 2048 tokens": (2048, 64, 4), "64 pairs in 8192 tokens": (8192, 64, 2),
          "a needle in 2048 tokens": (2048, 1, 16), "a needle in 8192 tokens": (8192, 1, 8)}     # rows of a seed
MODEL_SEEDS, LEAST, POINTS, M = 8, 0.9, 0.01, 256
EARLY = "nearfar exact_until=64 open=64"                   # exact for 64 tokens alone: what is read does it all
ATTENTIONS = {"exact": "exact", "uniform": "uniform attention", "window block=64 first=16": "window and first tokens",
              "favorpp": f"FAVOR++, m = {M}", "nearfar preset=bounded": "near-far, bounded",
              EARLY: "near-far, 64 keys", "nearfar": "near-far, default"}
Recalled = dict[tuple[str, str], list[dict[str, float]]]   # trial, attention -> accuracy and ms, for each seed


def main(size: str) -> None:
    start, trained = recall_runs.train()
    recalled = of_model(str(start))
    passed = check_gates(gates(recalled))
    keys = {(kind, length, seed): {"length": length, "clustered": clustered, "seed": seed, "opened": list(OPENED)}
            for kind, clustered in KINDS.items() for length in LENGTHS[size] for seed in range(SEEDS)}
    cells = Cells("recall").fill(list(keys.values()), far_key.errors, "heads")
    found: Found = {}
    for (kind, length, _), key in keys.items():
        found.setdefault((kind, length), []).append(cells[key])
    verdicts = judged([*claims(found), *bars(recalled)])
    body = "\n".join([first_line(found), "", *map(str, passed), *map(str, verdicts), "", *tables(found),
                      "## A model of pairs\n", table(recalled)])
    path = write_report("recall", "One far key that matters", body, rows(found, recalled, verdicts), figure(found),
                        facts(size), cells.seconds() + trained)
    print(f"written: {path}, {path.with_suffix('.csv')}, {path.with_suffix('.png')}")


def first_line(found: Found) -> str:
    arms = [name for name in next(iter(found.values()))[0] if name != CONTROL]
    beaten = {f"{kind}, {length}": [arm for arm in arms if mean(each, CONTROL) < mean(each, arm)]
              for (kind, length), each in found.items()}
    return won_by(CONTROL, beaten, len(arms) * len(found))


def mean(each: Sequence[Mapping[str, float]], arm: str) -> float:
    return float(np.mean([seed[arm] for seed in each]))


def claims(found: Found) -> list[Claim]:
    """The bar that was set, and the peer at as many keys."""
    made = []
    for (kind, length), each in found.items():
        ours, pages = ([seed[arm] for seed in each] for arm in (OURS, PAGES))
        made.append(Claim(f"{kind}, L = {length}: the error with 128 keys is at most {MOST}",
                          independent([MOST - error for error in ours])))
        made.append(Claim(f"{kind}, L = {length}: less error than pages of as many keys",
                          paired(np.log(pages), np.log(ours)), "in the logarithm"))
    return made


def tables(found: Found) -> list[str]:
    parts = []
    for kind in KINDS:
        lengths = [length for other, length in found if other == kind]
        arms = list(found[kind, lengths[0]][0])
        lines = [[arm, *(cell([seed[arm] for seed in found[kind, length]]) for length in lengths)] for arm in arms]
        parts += [f"## {kind}\n", markdown(["relative error", *(f"L = {n}" for n in lengths)], lines)]
    return parts


def cell(values: Sequence[float]) -> str:
    found = independent(values)
    return f"{found.mean:.3f} ± {found.half:.2g}"


# ---- the model


def of_model(start: str) -> Recalled:
    keys = {(trial, name, seed): {"start": start, "length": length, "pairs": pairs, "rows": count, "seed": seed,
                                  "attention": name, "m": M if name.startswith("favor") else None}
            for trial, (length, pairs, count) in TRIALS.items() for name in ATTENTIONS for seed in range(MODEL_SEEDS)}
    cells, found = Cells("recall-model").fill(list(keys.values()), associative.accuracy, "rows"), {}
    for (trial, name, _), key in keys.items():
        found.setdefault((trial, name), []).append(cells[key])
    return found


def gates(recalled: Recalled) -> list[Gate]:
    return [Gate(f"accuracy of exact attention, {trial}", mean(recalled[trial, "exact"], "accuracy"), least=LEAST)
            for trial in TRIALS]


def bars(recalled: Recalled) -> list[Claim]:
    of = lambda trial, name: np.array([seed["accuracy"] for seed in recalled[trial, name]])
    return [Claim(f"{trial}: {ATTENTIONS[name]} is within {POINTS:.0%} of exact attention's accuracy",
                  independent(POINTS - (of(trial, "exact") - of(trial, name))), "of the values")
            for trial in TRIALS for name in ("nearfar", EARLY)]


def table(recalled: Recalled) -> str:
    lines = [[label, *(cell([100 * seed["accuracy"] for seed in recalled[trial, name]]) for trial in TRIALS)]
             for name, label in ATTENTIONS.items()]
    return markdown(["right, %", *TRIALS], lines)


def rows(found: Found, recalled: Recalled, verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    each = [{"keys": kind, "length": length, "seed": seed, "attention": arm, "error": error}
            for (kind, length), seeds in found.items() for seed, arms in enumerate(seeds)
            for arm, error in arms.items()]
    each += [{"trial": trial, "seed": seed, "attention": name, **values} for (trial, name), seeds in recalled.items()
             for seed, values in enumerate(seeds)]
    return [*each, *(verdict.row() for verdict in verdicts)]


def figure(found: Found):
    fig, axes = new_figure(1, len(KINDS), figsize=(11, 4.2), sharey=True)
    shown = (CONTROL, "near-far, bounded", "pages, 128 keys", "near-far, 32 keys", OURS, "largest weights, 128 keys")
    for ax, kind in zip(axes, KINDS):
        lengths = [length for other, length in found if other == kind]
        for i, arm in enumerate(shown):
            ax.plot(lengths, [mean(found[kind, n], arm) for n in lengths], marker="o", ms=3, color=f"C{i}", label=arm)
        ax.axhline(MOST, color="black", lw=0.8, ls=":")
        ax.set(xscale="log", xlabel="tokens", title=kind)
        ax.set_xticks(lengths, [str(n) for n in lengths])
        ax.minorticks_off()
    axes[0].set_ylabel("relative error of the output")
    axes[-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return fig


def facts(size: str) -> str:
    lengths = ", ".join(str(stage[0]) for stage in recall_runs.STAGES)
    counts = ", ".join(f"{count} rows for {trial}" for trial, (_, _, count) in TRIALS.items())
    return (f"SIZE={size}. {far_key.HEADS} causal heads of d = {far_key.D} for each of {SEEDS} seeds, the last "
            f"{far_key.QUERIES} queries; each gives {far_key.WEIGHT} of its weight to one key at least "
            f"{far_key.FAR} tokens back. Near-far: blocks of {far_key.BLOCK}, {far_key.HEAVY} heavy keys, "
            f"{far_key.CELLS} cells at {far_key.AT} tokens and as the root of the length beyond; bounded: a codebook "
            f"of other heads of the same law. Pages of {far_key.PAGE} keys and the largest weights read, beside the "
            f"far keys, the last {far_key.NEAR}. The model: two layers of width 128 with rotary positions, trained "
            f"here on task=recall with exact attention (rows of {lengths} tokens), its attention swapped without "
            f"training; {MODEL_SEEDS} seeds of {counts}. Errors: mean and 95% Student interval over seeds; p by Holm "
            "over all claims.")
