"""The page of `proteins`: verdicts first, then gates and Tables 1 and 2 of each source, and the picture."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from crt_exp.report import palette
from crt_exp.report.evidence import Claim, Gate, Unjudged, Verdict, detectable, independent, judged
from crt_exp.report.fig4_page import show
from crt_exp.report.protein_runs import (
    CONTROLS,
    DATASETS,
    DIRECTIONS,
    GENERATED,
    LINEAR,
    NAMES,
    PEERS,
    REAL,
    SOURCE,
    B,
    Dataset,
    Setting,
    U,
    arms,
)
from crt_exp.report.writing import label_ends, markdown, new_figure, write_report

TITLE = "Performers Figure 6, Tables 1 and 2: language models of proteins"
SHORT = {U: "U", B: "B"}
HELD_OUT = {GENERATED: "held-out families", REAL: "held-out proteome"}
TAILS = ("", "_ood")  # of the metrics on test and on what was held out
COSTS = 0.5   # nats that uniform attention must cost, for models to be told apart by their attention
KEPT = 0.9    # of what exact attention gains over uniform attention: an approximation that keeps as much is tight
COLOURS = {"relu": "#009E73", "elu": "#56B4E9", "smreg": "#CC79A7", "linformer": "#44AA99", "reformer": "#882255",
           "favor": "#56B4E9"}
LINES = {"uniform": ":", "identity": "--", "window": "-."}
STATISTICS = ("sequences", "length_min", "length_max", "length_mean", "length_std", "length_median")
PAPER_1 = {  # Performers Table 1
    "train": (104_863_744, 353.09), "validation": (102_400, 353.62), "test": (1_033_216, 353.96),
    "ood": (29_696, 330.96)}
PAPER_2 = {  # Performers Table 2: accuracy in % and perplexity, test and OOD
    (U, "empirical"): (9.92, 17.80, 9.07, 17.93), (B, "empirical"): (9.92, 17.80, 9.07, 17.93),
    (U, "exact"): (30.80, 9.37, 19.70, 13.20), (U, "relu"): (31.58, 9.17, 18.44, 13.63),
    (B, "exact"): (33.32, 9.22, 25.07, 12.09), (B, "relu"): (36.09, 8.36, 24.10, 12.26),
    (B, "favorp"): (33.00, 9.24, 23.48, 12.41)}
Found = dict[tuple[str, str, int], dict[str, Any]]  # (direction, attention, seed) -> what `train` gave


def write(size: str, setting: Setting, found: dict[Dataset, Found], seconds: float) -> None:
    asked = {dataset: gates(each) for dataset, each in found.items()}
    verdicts = verdicts_of(found, asked)
    said = "\n".join([*controls_that_win(found), *map(str, verdicts), "", power(found)])
    rows = [*csv_rows(found), *(verdict.row() for verdict in verdicts)]
    title = TITLE + ("" if size == "full" else " (small models)")
    path = write_report("proteins", title, body(found, asked, said), rows, figure(found), facts(size, setting), seconds)
    print(f"{said}\nwritten: {path}, {path.with_suffix('.csv')}, {path.with_suffix('.png')}")


def body(found: dict[Dataset, Found], asked: dict[Dataset, dict[str, Gate]], said: str) -> str:
    return "\n".join([said, "", *(section(dataset, found[dataset], asked[dataset]) for dataset in found), RESULTS])


def section(dataset: Dataset, found: Found, asked: dict[str, Gate]) -> str:
    return "\n".join([
        f"## {SOURCE[dataset].capitalize()}\n", "What they can tell (trained models, mean over seeds):", "",
        *map(str, asked.values()), "", failed_text(asked), "", "Table 1, the sequences:\n", statistics_table(found),
        "Table 2, accuracy and perplexity:\n", results_table(dataset, found)])


# ---- what was found


def last(found: Found, direction: str, name: str, metric: str) -> dict[int, float]:
    """seed -> the metric of the final record, of the runs that did not diverge and whose metric is a number."""
    return {seed: run["last"][metric] for (way, other, seed), run in found.items()
            if (way, other) == (direction, name) and "last" in run and run["last"][metric] is not None}


def difference(found: Found, direction: str, first: str, second: str, metric: str) -> np.ndarray:
    """first - second, of each seed with which both ended."""
    a, b = (last(found, direction, name, metric) for name in (first, second))
    return np.array([a[seed] - b[seed] for seed in a if seed in b])


def gates(found: Found) -> dict[str, Gate]:
    costs = {way: difference(found, way, "uniform", "exact", "loss") for way in DIRECTIONS}
    return {way: Gate(f"what uniform attention costs ({SHORT[way]}), in nats", float(np.mean(each)), COSTS)
            for way, each in costs.items() if len(each)}


# ---- the orderings, each as a difference that is above 0 where it holds, paired by seed


def verdicts_of(found: dict[Dataset, Found], asked: dict[Dataset, dict[str, Gate]]) -> list[Verdict | Unjudged]:
    """Of all sources and directions together; none is judged where attention gains too little."""
    judging, left = [], []
    for dataset, passed in asked.items():
        for way, gate in passed.items():
            made = [(claim, gate) for make in (claims, share_claims) for claim in make(dataset, found[dataset], way)]
            beyond = gate if not gate.passed else held_out_gate(dataset, found[dataset], way)
            made += [(claim, beyond) for claim in held_out_claims(dataset, found[dataset], way)]
            judging += [claim for claim, asked_of_it in made if asked_of_it.passed]
            left += [Unjudged(claim, asked_of_it) for claim, asked_of_it in made if not asked_of_it.passed]
    return [*judged(judging), *left]


def claims(dataset: Dataset, found: Found, way: str) -> list[Claim]:
    more = lambda first, second: 100 * difference(found, way, first, second, "accuracy")
    told = [("ReLU ends more accurate than exact attention", more("relu", "exact"), "points"),
            ("ReLU ends more accurate than FAVOR+", more("relu", "favorp"), "points"),
            ("FAVOR++ ends below FAVOR+", difference(found, way, "favorp", "favorpp", "loss"), "nats"),
            ("exact attention ends more accurate than Reformer", more("exact", "reformer"), "points"),
            ("exact attention ends more accurate than Linformer", more("exact", "linformer"), "points")]
    return [Claim(f"{here(dataset, way)}: {text}", independent(differences), unit) for text, differences, unit in told
            if len(differences) > 1]


def held_out_claims(dataset: Dataset, found: Found, way: str) -> list[Claim]:
    gain = 100 * difference(found, way, "exact", "relu", "accuracy_ood")
    text = f"{here(dataset, way)}: on the {HELD_OUT[dataset]} exact attention is more accurate than ReLU"
    return [Claim(text, independent(gain), "points")] if len(gain) > 1 else []


def held_out_gate(dataset: Dataset, found: Found, way: str) -> Gate:
    """Of what training never saw attention may tell nothing though it does of the test split."""
    uniform, exact = (last(found, way, name, "perplexity_ood") for name in ("uniform", "exact"))
    costs = [np.log(uniform[seed] / exact[seed]) for seed in uniform if seed in exact]
    return Gate(f"what uniform attention costs on the {HELD_OUT[dataset]} ({SHORT[way]}), in nats",
                float(np.mean(costs)) if costs else np.nan, COSTS)


def here(dataset: Dataset, way: str) -> str:
    return f"{SOURCE[dataset]}, {SHORT[way]}"


def share_claims(dataset: Dataset, found: Found, way: str) -> list[Claim]:
    made = []
    for name in ("favorp", "favorpp"):
        none, whole, ours = (last(found, way, each, "loss") for each in ("uniform", "exact", name))
        left = [none[s] - ours[s] - KEPT * (none[s] - whole[s]) for s in ours if s in none and s in whole]
        if len(left) > 1:
            text = f"{palette.label(name)} keeps {KEPT:.0%} of what exact attention gains over uniform attention"
            made.append(Claim(f"{here(dataset, way)}: {text}", independent(left), "nats"))
    return made


# ---- text


def controls_that_win(found: dict[Dataset, Found]) -> list[str]:
    """Where the mean over seeds of a control's perplexity is no higher than that of an attention that is compared, on
    the test split or on what was held out."""
    told = []
    for dataset, way, tail in product(found, DIRECTIONS, TAILS):
        mean = {name: np.mean([*last(found[dataset], way, name, f"perplexity{tail}").values()] or [np.inf])
                for name in arms(way)}
        for control in CONTROLS:
            beaten = [palette.label(name) for name in ("exact", *LINEAR, *PEERS)
                      if name in mean and mean[control] <= mean[name] < np.inf]
            if beaten:
                where = f", {HELD_OUT[dataset]}" if tail else ""
                told.append(f"**{here(dataset, way)}{where}: {control} attention, a control, ends no worse than "
                            f"{listed(beaten)}.**\n")
    return told


def listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def power(found: dict[Dataset, Found]) -> str:
    """The differences in accuracy that so many seeds would show."""
    told = [f"{100 * detectable(d):.2g} points ({here(dataset, way)}, {len(d)} pairs)"
            for dataset, way in product(found, DIRECTIONS)
            if len(d := difference(found[dataset], way, "relu", "exact", "accuracy")) > 1]
    return (f"A difference between ReLU and exact attention would be shown, were it the only claim, with a probability "
            f"of 80% from {listed(told)} on." if told else "")


def failed_text(asked: dict[str, Gate]) -> str:
    if all(gate.passed for gate in asked.values()):
        return ""
    return ("Where a gate failed, models of this size and training hardly use attention: their figures stand here to "
            "be seen, and no ordering is judged by them.")


RESULTS = ("Mean over seeds with its interval. The empirical baseline predicts by the frequencies of letters in the "
           "training split; the floor is the perplexity of the generated families' true chances. Of masked letters (B) "
           "a tenth stays as it was, so identity attention, which sees the letter of its own place alone, is the "
           "baseline there. Above exact: loss on test, in nats, paired by seed. Paper: accuracy and perplexity on "
           "TrEMBL's test split, then on its held-out families.\n")


def facts(size: str, setting: Setting) -> str:
    made = "; ".join(f"{SOURCE[dataset]}: `{' '.join(setting.data(dataset))} trainer.steps={setting.steps[dataset]}`"
                     for dataset in DATASETS)
    return (f"SIZE={size}. {made}; {setting.seeds} seeds of weights, order, masks and noise, the same in all arms "
            "(Linformer's weights are drawn otherwise, for its projections are among them); m = "
            f"{setting.m}, orthogonal, never redrawn. "
            f"{'; '.join(' '.join((name, *options)) for name, options in setting.options.items())}. Otherwise "
            "conf/task/trembl.yaml; the last weights are tested, and validation chooses nothing. Held out: families "
            "that were not trained on, and the last file of the folder of proteomes. Intervals: 95%, Student; p-values "
            "with Holm's correction.")


# ---- tables


def statistics_table(found: Found) -> str:
    """Of whole sequences; the splits are those of every run."""
    record = next(run["last"] for run in found.values() if "last" in run)
    rows = [[split, *(f"{record[f'{split}_{key}']:,.6g}" for key in STATISTICS), f"{paper[0]:,}", paper[1]]
            for split, paper in PAPER_1.items() if f"{split}_sequences" in record]
    return markdown(["split", *(key.replace("length_", "length, ") for key in STATISTICS), "paper's sequences",
                     "paper's mean"], rows)


def results_table(dataset: Dataset, found: Found) -> str:
    rows = []
    for way in DIRECTIONS:
        rows.append([SHORT[way], "empirical baseline", *baseline(found, way), "", "", paper(way, "empirical")])
        if floor := floors(found, way):
            rows.append([SHORT[way], "floor", *floor, "", "", ""])
        for name in arms(way):
            shown = [show(scale * np.array([*last(found, way, name, metric + tail).values()]), ".2f")
                     for tail in TAILS for metric, scale in (("accuracy", 100), ("perplexity", 1))]
            above = difference(found, way, name, "exact", "loss")
            runs = [run for (d, other, _), run in found.items() if (d, other) == (way, name)]
            rows.append([SHORT[way], palette.label(name), *shown,
                         show(above, "+.4f") if name != "exact" and len(above) else "",
                         f"{sum('diverged' in run for run in runs)} of {len(runs)}", paper(way, name)])
    columns = [f"{what}, {where}" for where in ("test", HELD_OUT[dataset]) for what in ("accuracy %", "perplexity")]
    return markdown(["", "attention", *columns, "above exact, nats", "diverged", "paper"], rows)


def baseline(found: Found, way: str) -> list[str]:
    record = any_record(found, way)
    return 4 * [""] if record is None else [
        text for tail in TAILS for text in (f"{100 * record['unigram_accuracy' + tail]:.2f}",
                                            f"{record['unigram_perplexity' + tail]:.2f}")]


def floors(found: Found, way: str) -> list[str]:
    record = any_record(found, way) or {}
    return [text for tail in TAILS for text in ("", f"{record['floor_perplexity' + tail]:.2f}")
            ] if "floor_perplexity" in record else []


def any_record(found: Found, way: str) -> dict[str, Any] | None:
    return next((run["last"] for (d, _, _), run in found.items() if d == way and "last" in run), None)


def paper(way: str, name: str) -> str:
    return "{:.2f}, {:.2f}; {:.2f}, {:.2f}".format(*PAPER_2[way, name]) if (way, name) in PAPER_2 else ""


def csv_rows(found: dict[Dataset, Found]) -> list[dict[str, Any]]:
    rows = []
    for dataset, (way, name, seed), run in ((d, arm, run) for d, runs in found.items() for arm, run in runs.items()):
        head = {"dataset": dataset, "direction": way, "attention": name, "seed": seed}
        rows += [head | {"what": "validation", **point} for point in run.get("curve", [])]
        if "diverged" in run:
            rows.append(head | {"what": "diverged", "said": run["diverged"]})
        else:
            rows += [head | {"what": where} | {key: run["last"][key + tail] for key in
                     ("loss", "accuracy", "perplexity", "letters", "unigram_accuracy", "unigram_perplexity")}
                     for tail, where in zip(TAILS, ("test", HELD_OUT[dataset]))]
    return rows


# ---- picture


def colour(name: str) -> str:
    return palette.CONTROL if name in CONTROLS else COLOURS.get(name) or palette.colour(name)


def figure(found: dict[Dataset, Found]):
    """Curves on validation, and how far each ends above exact attention."""
    fig, axes = new_figure(2 * len(found), 2, figsize=(12, 8.5 * len(found)), width_ratios=(1.3, 1))
    for (left, right), (dataset, way) in zip(axes, product(found, DIRECTIONS)):
        draw_curves(left, found[dataset], way)
        draw_differences(right, dataset, found[dataset], way)
        left.set(title=f"{here(dataset, way)}: loss on validation, nats")
    fig.tight_layout()
    return fig


def draw_curves(ax, found: Found, way: str) -> None:
    """Means over the seeds that did not diverge."""
    ends = []
    for name in arms(way):
        points = on_validation(found, way, name)
        if points:
            steps, mean = [*points], [np.mean(losses) for losses in points.values()]
            ax.plot(steps, mean, color=colour(name), ls=LINES.get(name, "-"), lw=1.4, marker="o", ms=2.5)
            ends.append((palette.label(name), steps[-1], mean[-1], colour(name)))
    ax.set(xlabel="step")
    label_ends(ax, ends)


def on_validation(found: Found, way: str, name: str) -> dict[int, list[float]]:
    """step -> the losses of all seeds."""
    points: dict[int, list[float]] = {}
    for (direction, other, _), run in found.items():
        for point in run.get("curve", []) if (direction, other) == (way, name) else []:
            points.setdefault(point["step"], []).append(point["loss"])
    return points


def draw_differences(ax, dataset: Dataset, found: Found, way: str) -> None:
    names = [name for name in NAMES if name in arms(way) and name != "exact"]
    for row, name in enumerate(names):
        for tail, offset, filled in zip(TAILS, (-0.15, 0.15), (True, False)):
            above = difference(found, way, name, "exact", f"loss{tail}")
            if not len(above):
                continue
            half, inner = independent(above).half if len(above) > 1 else None, colour(name) if filled else "white"
            ax.errorbar(np.mean(above), row + offset, xerr=half, color=colour(name), mfc=inner, marker="o", ms=5,
                        lw=1.2, capsize=2)
    ax.axvline(0, color=palette.EXACT, lw=1)
    ax.set_yticks(range(len(names)), [palette.label(name) for name in names])
    ax.invert_yaxis()
    ax.set_title(f"{here(dataset, way)}: loss above exact attention, nats\n"
                 f"(filled: test; open: {HELD_OUT[dataset]})")
