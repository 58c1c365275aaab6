"""The page of `proteins`: gates and verdicts first, then Tables 1 and 2, and the picture."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from crt_exp.report import palette
from crt_exp.report.evidence import Claim, Gate, Unjudged, Verdict, detectable, independent, judged
from crt_exp.report.fig4_page import show
from crt_exp.report.protein_runs import CONTROLS, DIRECTIONS, LINEAR, NAMES, PEERS, B, Setting, U, arms
from crt_exp.report.writing import label_ends, markdown, new_figure, write_report

TITLE = "Performers Figure 6, Tables 1 and 2: language models of proteins"
SHORT = {U: "U", B: "B"}
SETS = (("", "test"), ("_ood", "held-out proteome"))
COSTS = 0.5   # nats that uniform attention must cost, for models to be told apart by their attention
KEPT = 0.9    # of what exact attention gains over uniform attention: an approximation that keeps as much is tight
COLOURS = {"relu": "#009E73", "elu": "#56B4E9", "smreg": "#CC79A7", "linformer": "#0072B2", "reformer": "#882255",
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


def write(size: str, setting: Setting, found: Found, seconds: float) -> None:
    asked = gates(found)
    verdicts = verdicts_of(found, asked)
    said = "\n".join([*controls_that_win(found), *map(str, verdicts), "", power(found)])
    rows = [*csv_rows(found), *(verdict.row() for verdict in verdicts)]
    title = TITLE + ("" if size == "full" else " (small models)")
    path = write_report("proteins", title, body(found, asked, said), rows, figure(found), facts(size, setting), seconds)
    print(f"{said}\nwritten: {path}, {path.with_suffix('.csv')}, {path.with_suffix('.png')}")


def body(found: Found, asked: dict[str, Gate], said: str) -> str:
    return "\n".join([
        said, "", "What this setting can tell (trained models, mean over seeds):", "", *map(str, asked.values()), "",
        failed_text(asked), "", "## Table 1: the sequences\n", statistics_table(found),
        "## Table 2: accuracy and perplexity\n", results_table(found), RESULTS])


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


def verdicts_of(found: Found, asked: dict[str, Gate]) -> list[Verdict | Unjudged]:
    """Orderings are judged in any case; a share of what attention gains only where it gains enough."""
    orderings = [claim for way in DIRECTIONS for claim in claims(found, way)]
    shares = {way: share_claims(found, way) for way in DIRECTIONS}
    judging = orderings + [c for way, made in shares.items() if way in asked and asked[way].passed for c in made]
    return [*judged(judging), *(Unjudged(claim, asked[way]) for way, made in shares.items()
                                if way in asked and not asked[way].passed for claim in made)]


def claims(found: Found, way: str) -> list[Claim]:
    more = lambda first, second, tail="": 100 * difference(found, way, first, second, f"accuracy{tail}")
    told = [("exact attention ends below uniform attention",
             difference(found, way, "uniform", "exact", "loss"), "nats"),
            ("ReLU ends more accurate than exact attention", more("relu", "exact"), "points"),
            ("ReLU ends more accurate than FAVOR+", more("relu", "favorp"), "points"),
            ("FAVOR++ ends below FAVOR+", difference(found, way, "favorp", "favorpp", "loss"), "nats"),
            ("exact attention ends more accurate than Reformer", more("exact", "reformer"), "points"),
            ("exact attention ends more accurate than Linformer", more("exact", "linformer"), "points"),
            ("on the held-out proteome exact attention is more accurate than ReLU", more("exact", "relu", "_ood"),
             "points")]
    return [Claim(f"{SHORT[way]}: {text}", independent(differences), unit) for text, differences, unit in told
            if len(differences) > 1]


def share_claims(found: Found, way: str) -> list[Claim]:
    made = []
    for name in ("favorp", "favorpp"):
        none, whole, here = (last(found, way, each, "loss") for each in ("uniform", "exact", name))
        left = [none[s] - here[s] - KEPT * (none[s] - whole[s]) for s in here if s in none and s in whole]
        if len(left) > 1:
            text = f"{palette.label(name)} keeps {KEPT:.0%} of what exact attention gains over uniform attention"
            made.append(Claim(f"{SHORT[way]}: {text}", independent(left), "nats"))
    return made


# ---- text


def controls_that_win(found: Found) -> list[str]:
    """Where the mean over seeds of a control's test loss is no higher than that of an attention that is compared."""
    told = []
    for way in DIRECTIONS:
        loss = {name: np.mean([*last(found, way, name, "loss").values()] or [np.inf]) for name in arms(way)}
        for control in CONTROLS:
            beaten = [palette.label(name) for name in ("exact", *LINEAR, *PEERS)
                      if name in loss and loss[control] <= loss[name]]
            if beaten:
                told.append(f"**{SHORT[way]}: {control} attention, a control, ends no worse than {listed(beaten)}.**\n")
    return told


def listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def power(found: Found) -> str:
    """The differences in accuracy that so many seeds would show."""
    told = [f"{100 * detectable(d):.2g} points ({SHORT[way]}, {len(d)} pairs)" for way in DIRECTIONS
            if len(d := difference(found, way, "relu", "exact", "accuracy")) > 1]
    return (f"A difference between ReLU and exact attention would be shown, were it the only claim, with a probability "
            f"of 80% from {listed(told)} on." if told else "")


def failed_text(asked: dict[str, Gate]) -> str:
    if all(gate.passed for gate in asked.values()):
        return ""
    return ("Where a gate failed, models of this size and training hardly use attention. An ordering that is shown "
            "there is one of such models, one that is open says little, and shares of what attention gains are not "
            "judged.")


RESULTS = ("Mean over seeds with its interval. The empirical baseline predicts by the frequencies of letters in the "
           "training split. Above exact: loss on test, in nats, paired by seed. Paper: accuracy and perplexity on "
           "test, then on its held-out families.\n")


def facts(size: str, setting: Setting) -> str:
    return (f"SIZE={size}. `{' '.join(setting.real)} trainer.steps={list(setting.steps.values())[0]}`, {setting.seeds} "
            "seeds of weights, order, masks and noise, the same in all arms (Linformer's weights are drawn otherwise, "
            f"for its projections are among them); m = {setting.m}, orthogonal, never redrawn. "
            f"{'; '.join(' '.join((name, *options)) for name, options in setting.options.items())}. Otherwise "
            "conf/task/trembl.yaml; the last weights are tested, and validation chooses nothing. Held out: the last "
            "file of the folder. Intervals: 95%, Student; p-values with Holm's correction.")


# ---- tables


def statistics_table(found: Found) -> str:
    """Of whole sequences; the splits are those of every run."""
    record = next(run["last"] for run in found.values() if "last" in run)
    rows = [[split, *(f"{record[f'{split}_{key}']:,.6g}" for key in STATISTICS), f"{paper[0]:,}", paper[1]]
            for split, paper in PAPER_1.items() if f"{split}_sequences" in record]
    return markdown(["split", *(key.replace("length_", "length, ") for key in STATISTICS), "paper's sequences",
                     "paper's mean"], rows)


def results_table(found: Found) -> str:
    rows = []
    for way in DIRECTIONS:
        rows.append([SHORT[way], "empirical baseline", *baseline(found, way), "", "", paper(way, "empirical")])
        for name in arms(way):
            shown = [show(scale * np.array([*last(found, way, name, metric + tail).values()]), ".2f")
                     for tail, _ in SETS for metric, scale in (("accuracy", 100), ("perplexity", 1))]
            above = difference(found, way, name, "exact", "loss")
            runs = [run for (d, other, _), run in found.items() if (d, other) == (way, name)]
            rows.append([SHORT[way], palette.label(name), *shown,
                         show(above, "+.4f") if name != "exact" and len(above) else "",
                         f"{sum('diverged' in run for run in runs)} of {len(runs)}", paper(way, name)])
    columns = [f"{what}, {where}" for _, where in SETS for what in ("accuracy %", "perplexity")]
    return markdown(["", "attention", *columns, "above exact, nats", "diverged", "paper"], rows)


def baseline(found: Found, way: str) -> list[str]:
    record = next((run["last"] for (d, _, _), run in found.items() if d == way and "last" in run), None)
    if record is None:
        return 4 * [""]
    return [text for tail, _ in SETS for text in (f"{100 * record['unigram_accuracy' + tail]:.2f}",
                                                  f"{record['unigram_perplexity' + tail]:.2f}")]


def paper(way: str, name: str) -> str:
    return "{:.2f}, {:.2f}; {:.2f}, {:.2f}".format(*PAPER_2[way, name]) if (way, name) in PAPER_2 else ""


def csv_rows(found: Found) -> list[dict[str, Any]]:
    rows = []
    for (way, name, seed), run in found.items():
        head = {"direction": way, "attention": name, "seed": seed}
        rows += [head | {"what": "validation", **point} for point in run.get("curve", [])]
        if "diverged" in run:
            rows.append(head | {"what": "diverged", "said": run["diverged"]})
        else:
            rows += [head | {"what": where} | {key: run["last"][key + tail] for key in
                     ("loss", "accuracy", "perplexity", "letters", "unigram_accuracy", "unigram_perplexity")}
                     for tail, where in SETS]
    return rows


# ---- picture


def colour(name: str) -> str:
    return palette.CONTROL if name in CONTROLS else COLOURS.get(name) or palette.colour(name)


def figure(found: Found):
    """Curves on validation, and how far each ends above exact attention."""
    fig, axes = new_figure(2, 2, figsize=(12, 8.5), width_ratios=(1.3, 1))
    for (left, right), way in zip(axes, DIRECTIONS):
        draw_curves(left, found, way)
        draw_differences(right, found, way)
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
    ax.set(title=f"{SHORT[way]}: loss on validation, nats", xlabel="step")
    label_ends(ax, ends)


def on_validation(found: Found, way: str, name: str) -> dict[int, list[float]]:
    """step -> the losses of all seeds."""
    points: dict[int, list[float]] = {}
    for (direction, other, _), run in found.items():
        for point in run.get("curve", []) if (direction, other) == (way, name) else []:
            points.setdefault(point["step"], []).append(point["loss"])
    return points


def draw_differences(ax, found: Found, way: str) -> None:
    names = [name for name in NAMES if name in arms(way) and name != "exact"]
    for row, name in enumerate(names):
        for (tail, _), offset, filled in zip(SETS, (-0.15, 0.15), (True, False)):
            above = difference(found, way, name, "exact", f"loss{tail}")
            if not len(above):
                continue
            half, inner = independent(above).half if len(above) > 1 else None, colour(name) if filled else "white"
            ax.errorbar(np.mean(above), row + offset, xerr=half, color=colour(name), mfc=inner, marker="o", ms=5,
                        lw=1.2, capsize=2)
    ax.axvline(0, color=palette.EXACT, lw=1)
    ax.set_yticks(range(len(names)), [palette.label(name) for name in names])
    ax.invert_yaxis()
    ax.set_title(f"{SHORT[way]}: loss above exact attention, nats\n(filled: test; open: held-out proteome)")
