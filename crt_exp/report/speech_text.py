"""What reports on speech recognition say and draw of their cells: verdicts, gates, tables, word error rate by steps.

Legend: a draw is a seed (data order, masks, noise; from scratch the weights too); WER in percent; nats of loss are of
an utterance.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from crt_exp.report import palette
from crt_exp.report.evidence import Claim, Gate, Unjudged, Verdict, detectable, independent, judged, paired, won_by
from crt_exp.report.speech_runs import BEAM, MAIN, Arm, Setting, compared
from crt_exp.report.writing import label_ends, markdown, new_figure
from crt_exp.studies.encoder_steps import METHODS

RANGE = (4.0, 24.0)  # of |x + y|^2: below it all maps are good, above it none is
COSTS = 0.5          # nats an utterance, that uniform attention must cost
CONTROLS = ("uniform", "identity")  # they look at no query and no key
NAMES = {"favor": "FAVOR trig", "hyp": "FAVOR+ hyp", "exact": "exact", "uniform": "uniform", "identity": "identity"}
TICKS = (1, 2, 5, 10, 15, 20, 30, 50, 100, 200)  # of word error rates, %
PHASES = {"swap": "directly after the swap", "uptrained": "after the swap and training",
          "scratch": "trained from scratch", "speaker": "after the swap and training, a speaker never heard"}


@dataclass(frozen=True)
class Found:
    """The values of all cells. after: (arm, seed) -> split -> metrics; trained: (phase, arm, seed) -> record;
    other_after, other_looked: after and looked of the further exact models, by what differs; exact: all of them."""

    setting: Setting
    exact: Mapping[str, dict[str, Any]]
    looked: Mapping[Arm, dict[str, list]]
    after: Mapping[tuple[Arm, int], dict[str, dict[str, float]]]
    other_looked: Mapping[tuple[str, Arm], dict[str, list]]
    other_after: Mapping[tuple[str, Arm, int], dict[str, dict[str, float]]]
    trained: Mapping[tuple[str, Arm, int], dict[str, Any]]
    pace: Mapping[Arm, dict[str, float]]
    sample: Mapping[Arm, dict[str, Any]]
    times: Mapping[int, dict[str, list[float]]]
    memory: Mapping[tuple[int, str], float]

    def draws(self, phase: str, arm: Arm, metric: str) -> list[float]:
        """On the test split, a number a seed; WER in percent. Empty where the phase has no such arm."""
        scale = 100 if metric in ("wer", "cer") else 1
        if phase == "swap":
            records = [each["test"] for (other, _), each in self.after.items() if other == arm]
        else:
            records = [each for (where, other, _), each in self.trained.items() if (where, other) == (phase, arm)]
        return [scale * each[metric] for each in records]


def label(arm: Arm) -> str:
    return NAMES.get(arm.attention, palette.label(arm.attention))


def named(arm: Arm) -> str:
    return label(arm) + (f", m = {arm.m}" if arm.m else "")


# ---- gates and verdicts ----------------------------------------------------------------------------------------------


def gates(setting: Setting, looked: Mapping[Arm, dict[str, list]],
          after: Mapping[tuple[Arm, int], dict[str, dict[str, float]]]) -> list[Gate]:
    """On validation utterances of the exact model, before an arm is trained."""
    loss = lambda name: after[Arm(name), 0]["validation"]["loss"]
    better, worse = (looked[Arm(name, setting.ms[0])] for name in setting.pairs[0])
    S = np.concatenate(worse["S"])
    cost, inside = loss("uniform") - loss("exact"), float(np.mean(np.clip(S, *RANGE) == S))
    made = [Gate("uniform attention in place of exact attention costs nats an utterance", cost, COSTS),
            Gate(f"share of heads whose mean |x + y|^2 lies in {RANGE[0]:g} to {RANGE[1]:g}", inside, least=0.5)]
    if None not in (*better["predicted"], *worse["predicted"]):
        names = [label(Arm(name)) for name in setting.pairs[0]]
        made.append(Gate(f"predicted error of a kernel entry, {names[1]} over {names[0]}, median over heads",
                         ratio(better, worse), least=1.2))
    return made


def ratio(better: dict[str, list], worse: dict[str, list]) -> float:
    return float(np.median(np.concatenate(worse["predicted"]) / np.concatenate(better["predicted"])))


def claims(found: Found) -> dict[str, list[Claim]]:
    """By where they were measured. Each says that the better arm of a pair is better; of as many draws as both have,
    paired by seed."""
    made: dict[str, list[Claim]] = {}
    for better, worse in found.setting.pairs:
        for m in found.setting.ms:
            said = f"{label(Arm(better))} beats {label(Arm(worse))} at m = {m}"
            for phase, where in PHASES.items():
                metric, unit = ("loss", "nats an utterance") if phase == "swap" else ("wer", "points of WER")
                first, second = (found.draws(phase, Arm(name, m), metric) for name in (worse, better))
                if first and second:
                    made.setdefault(where, []).append(Claim(f"{said} {where}", paired(first, second), unit))
            for name, _ in found.setting.others:
                losses = (other_losses(found, name, Arm(each, m)) for each in (worse, better))
                made.setdefault(in_other(name), []).append(
                    Claim(f"{said} {in_other(name)}", paired(*losses), "nats an utterance"))
    return made


def in_other(name: str) -> str:
    """One of the further exact models, by what differs in it."""
    return f"{PHASES['swap']}, {name}"


def cost_gates(found: Found) -> dict[str, Gate]:
    """What uniform attention costs, wherever something is claimed: nothing is judged where that is too little."""
    claimed = claims(found)
    losses = {where: [found.draws(phase, Arm(each), "loss") for each in ("uniform", "exact")]
              for phase, where in PHASES.items()}
    losses |= {in_other(name): [other_losses(found, name, Arm(each)) for each in ("uniform", "exact")]
               for name, _ in found.setting.others}
    return {where: Gate(f"uniform attention costs nats an utterance {where}",
                        float(np.mean(uniform) - np.mean(exact)) if uniform and exact else np.nan, COSTS)
            for where, (uniform, exact) in losses.items() if where in claimed}


def other_losses(found: Found, name: str, arm: Arm) -> list[float]:
    return [each["test"]["loss"] for (where, other, _), each in found.other_after.items()
            if (where, other) == (name, arm)]


def verdicts(found: Found) -> list[Verdict | Unjudged]:
    gates, made = cost_gates(found), claims(found)
    told = judged([claim for where, each in made.items() for claim in each if gates[where].passed])
    return [*told, *(Unjudged(claim, gates[where]) for where, each in made.items() for claim in each
                     if not gates[where].passed)]


def control_text(found: Found) -> str:
    """The first line of the report: where attention that looks at nothing has the lower word error rate."""
    of, beaten = 0, {}
    for phase in PHASES:
        wer = {arm: np.mean(values) for arm in found.setting.all_arms() if (values := found.draws(phase, arm, "wer"))}
        for name in CONTROLS:
            arms = [arm for arm in wer if arm.attention not in (*CONTROLS, "exact")] if Arm(name) in wer else []
            beaten[f"{name} attention {PHASES[phase]}"] = [named(arm) for arm in arms if wer[Arm(name)] < wer[arm]]
            of += len(arms)
    return won_by("attention to no query and no key", beaten, of)


def reach(found: Found) -> str:
    """Word error rates of the exact models, and whether one of them is below 5% soon enough."""
    told = [f"{name}: WER {each['wer']:.2%}, CER {each['cer']:.2%}, {each['loss']:.2f} nats an utterance after "
            f"{each['steps']} steps in {each['seconds'] / 60:.1f} minutes" for name, each in found.exact.items()]
    reached = [name for name, each in found.exact.items() if each["wer"] < 0.05 and each["seconds"] < 1200]
    fewer = ("not reached: these models and their data (no change of speed, no masks) are those in which attention "
             "matters, not those that recognise best; the task's defaults are")
    return (f"Exact attention on recordings that it was not trained on. {'; '.join(told)}. Below 5% within 20 minutes: "
            f"{'reached by ' + ', '.join(reached) if reached else fewer}.")


def resolution(found: Found) -> str:
    """What difference the seeds could show."""
    told = []
    for phase, metric, unit in (("swap", "loss", "nats"), ("uptrained", "wer", "points"), ("scratch", "wer", "points")):
        better, worse = found.setting.pairs[0]
        each = []
        for m in found.setting.ms:
            pair = [found.draws(phase, Arm(name, m), metric) for name in (worse, better)]
            each += [f"{detectable(np.subtract(*pair)):.2g} at m = {m}"] if all(pair) else []
        told += [f"{PHASES[phase]} {' and '.join(each)} {unit}"] if each else []
    return f"Differences that these draws show with a probability of 80%, each alone: {'; '.join(told)}."


def reason(found: Found) -> str:
    """What decides how much the choice of the map can matter: the sizes of queries and keys, and the errors there."""
    better, worse = found.setting.pairs[0]
    m = found.setting.ms[0]
    low, high = (found.looked[Arm(name, m)] for name in (better, worse))
    S = np.concatenate(high["S"])
    told = [f"In the exact encoder the mean |x + y|^2 of a head is {np.median(S):.1f} in the median ({S.min():.1f} to "
            f"{S.max():.1f})."]
    if None not in (*low["predicted"], *high["predicted"]):
        told.append("There the closed forms predict an error of one entry of the kernel matrix that is "
                    f"{ratio(low, high):.2g} times as large with {label(Arm(worse))} as with {label(Arm(better))} "
                    "(median over heads, iid projections).")
    for m in found.setting.ms:
        errors = [np.mean(found.looked[Arm(name, m)]["measured"]) for name in (worse, better)]
        uniform = np.mean(found.looked[Arm(worse, m)]["uniform"])
        told.append(f"At m = {m} the measured error of a layer's output, relative to exact attention's, is "
                    f"{errors[0]:.2f} with {label(Arm(worse))} and {errors[1]:.2f} with {label(Arm(better))}, mean "
                    f"over layers; uniform attention's is {uniform:.2f}.")
    return " ".join(told)


# ---- tables ----------------------------------------------------------------------------------------------------------


def shown(values: Sequence[float], digits: int = 1) -> str:
    if not values:
        return ""
    return f"{independent(values):.{digits}f}" if len(values) > 1 else f"{values[0]:.{digits}f}"


COLUMNS = (("swap", "loss", 2), ("swap", "wer", 1), ("uptrained", "loss", 2), ("uptrained", "wer", 1),
           ("scratch", "loss", 2), ("scratch", "wer", 1), ("speaker", "wer", 1))  # phase, metric, digits


def results(found: Found) -> str:
    arms = found.setting.all_arms()
    columns = [column for column in COLUMNS if any(found.draws(column[0], arm, column[1]) for arm in arms)]
    heads = [f"{PHASES[phase]}: {'WER, %' if metric == 'wer' else 'nats'}" for phase, metric, _ in columns]
    rows = [[named(arm), *(shown(found.draws(phase, arm, metric), digits) for phase, metric, digits in columns)]
            for arm in arms]
    return markdown(["attention", *heads], rows)


def layers(found: Found) -> str:
    """Of each layer: |x + y|^2, errors of a kernel entry as predicted, of the output as measured."""
    first, *_ = found.looked.values()
    rows = [["squared norm of x + y, by head", *(" ".join(f"{s:.1f}" for s in S) for S in first["S"])],
            ["uniform: output", *(f"{error:.2f}" for error in first["uniform"])]]
    for arm, each in found.looked.items():
        entries = ["" if entry is None else f"{np.median(entry):.2g}, " for entry in each["predicted"]]
        rows.append([f"{named(arm)}: kernel entry, output",
                     *(f"{entry}{output:.2g}" for entry, output in zip(entries, each["measured"]))])
    return markdown(["", *(f"layer {i + 1}" for i in range(len(first["S"])))], rows)


def temperatures(found: Found) -> str:
    """The exact models: how large queries and keys are, and what the arms of the pairs lose."""
    arms = compared(found.setting)
    heads = ["exact model", "squared norm of x + y: median (least to most)", "exact: nats",
             "uniform: nats, output error", *(f"{named(arm)}: nats, output error" for arm in arms)]
    rows = [temperature(MAIN, lambda arm: found.draws("swap", arm, "loss"), found.looked.__getitem__, arms)]
    for name, _ in found.setting.others:
        rows.append(temperature(name, lambda arm, name=name: other_losses(found, name, arm),
                                lambda arm, name=name: found.other_looked[name, arm], arms))
    return markdown(heads, rows)


def temperature(name: str, losses: Callable[[Arm], list[float]], looked: Callable[[Arm], dict[str, list]],
                arms: Sequence[Arm]) -> list[str]:
    S = np.concatenate(looked(arms[0])["S"])
    cells = [f"{shown(losses(arm), 2)}, {np.mean(looked(arm)['measured']):.2f}" for arm in arms]
    return [name, f"{np.median(S):.1f} ({S.min():.1f} to {S.max():.1f})", shown(losses(Arm("exact")), 2),
            f"{shown(losses(Arm('uniform')), 2)}, {np.mean(looked(arms[0])['uniform']):.2f}", *cells]


def encoder(found: Found) -> str:
    """Milliseconds and memory against seconds of audio."""
    def cell(seconds: int, method: str) -> str:
        low, middle, high = np.percentile(found.times[seconds][method], (25, 50, 75)) / 1e3
        return f"{middle:.3g} [{low:.3g}, {high:.3g}]; {found.memory[seconds, method]:.0f}"

    rows = [[seconds, *(cell(seconds, method) for method in METHODS)] for seconds in found.times]
    return markdown(["seconds of audio", *METHODS], rows)


def faster(found: Found) -> str:
    exact, linear, *_ = METHODS
    medians = {n: {method: float(np.median(values)) for method, values in each.items()}
               for n, each in found.times.items()}
    ahead = [n for n, each in medians.items() if each[linear] < each[exact]]
    longest = max(medians)
    first = (f"faster than exact attention from {min(ahead)} s on" if ahead else
             "at no length faster than exact attention")
    over = lambda method: medians[longest][method] / medians[longest][linear]
    return (f"{linear} is {first}; at {longest} s the encoder takes {over(exact):.1f} times as long with exact "
            f"attention, and with uniform attention {over('uniform'):.0%} of the time of {linear}. The peak of memory "
            "is the front end's, whose convolutions see 100 frames a second: torch's fused attention forms no matrix.")


def paces(found: Found) -> str:
    heads = list(dict.fromkeys(what for each in found.pace.values() for what in each))
    title = {"greedy": "greedy", "beam": f"beam of {BEAM}", "training": "training"}
    return markdown(["attention", *(title.get(what, what) for what in heads)],
                    [[named(arm), *(f"{each[what]:.3g}" for what in heads)] for arm, each in found.pace.items()])


def sample_text(found: Found) -> str:
    told = [f"{named(arm)}: training loss {r['losses'][0][1]:.0f} in the first {r['losses'][0][0]} steps, "
            f"{r['losses'][-1][1]:.0f} in the last ones of {r['steps']}; test loss {r['loss']:.0f} nats an utterance"
            for arm, r in found.sample.items()]
    tested = round(next(iter(found.sample.values()))["utterances"])
    return (f"The part of LibriSpeech used here (some minutes of train-clean-100, {tested} test utterances) went "
            f"through the same code. {'; '.join(told)}. It is far too small to learn recognition from: these figures "
            "say that the code reads and trains on real LibriSpeech, and nothing of the attention.")


def rows(found: Found, judgements: Sequence[Verdict | Unjudged]) -> list[dict[str, Any]]:
    """For the csv."""
    made = [verdict.row() for verdict in judgements]
    for phase, metric, _ in (*COLUMNS, ("speaker", "loss", 2)):
        for arm in found.setting.all_arms():
            values = found.draws(phase, arm, metric)
            if values:
                half = independent(values).half if len(values) > 1 else ""
                made.append({"phase": phase, "attention": arm.attention, "m": arm.m or "", "metric": metric,
                             "mean": float(np.mean(values)), "ci95": half, "n": len(values)})
    made += [{"phase": "encoder", "attention": method, "seconds_of_audio": n, "metric": "ms",
              "mean": float(np.median(values)), "n": len(values), "peak_mib": found.memory[n, method]}
             for n, each in found.times.items() for method, values in each.items()]
    return made


# ---- picture ---------------------------------------------------------------------------------------------------------


def figure(found: Found):
    """WER on validation utterances against steps: a row for each m, a column for each way to train."""
    phases, ms = ("scratch", "uptrained"), found.setting.ms
    fig, axes = new_figure(len(ms), len(phases), figsize=(10, 3.4 * len(ms)), squeeze=False)
    panels = [(ax, phase, m) for row, m in zip(axes, ms) for ax, phase in zip(row, phases)]
    lines = {(phase, m): curves(found, phase, m) for _, phase, m in panels}
    for ax, phase, m in panels:
        draw(ax, lines[phase, m])
        ax.set(title=f"{PHASES[phase]}, m = {m}", xlabel="training steps", ylabel="WER on validation strings, %")
    fig.tight_layout(w_pad=7)  # names stand beside the last points
    for ax, phase, m in panels:
        label_ends(ax, [(label(arm), steps[-1], middle[-1], colour(arm))
                        for arm, (steps, middle, _) in lines[phase, m].items()], 7)
    return fig


Line = tuple[list[int], list[float], list[float]]


def curves(found: Found, phase: str, m: int) -> dict[Arm, Line]:
    drawn = {arm for where, arm, _ in found.trained if where == phase}
    return {arm: curve(found, phase, arm) for arm in found.setting.all_arms() if arm in drawn and arm.m in (None, m)}


def curve(found: Found, phase: str, arm: Arm) -> Line:
    """Steps, mean WER over seeds in percent, and the half-width of its interval."""
    each = [r["curve"] for (where, other, _), r in found.trained.items() if (where, other) == (phase, arm)]
    points = {step: [100 * wer for line in each for other, wer, _ in line if other == step] for step, *_ in each[0]}
    if phase == "uptrained":
        points = {0: [100 * v["validation"]["wer"] for (other, _), v in found.after.items() if other == arm]} | points
    halves = [independent(values).half if len(values) > 1 else 0.0 for values in points.values()]
    return list(points), [float(np.mean(values)) for values in points.values()], halves


def draw(ax, lines: Mapping[Arm, Line]) -> None:
    for arm, (steps, middle, half) in lines.items():
        style = {"uniform": "--", "identity": ":"}.get(arm.attention, "-")
        ax.plot(steps, middle, style, color=colour(arm), marker="o", ms=3, lw=1.3)
        if arm.attention not in CONTROLS:
            ax.fill_between(steps, np.subtract(middle, half), np.add(middle, half), color=colour(arm), alpha=0.12, lw=0)
    from matplotlib.ticker import FixedLocator, NullLocator

    ax.set_yscale("log")  # from trigonometric features, above 100%, to exact attention
    ax.yaxis.set_major_locator(FixedLocator(TICKS))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_locator(NullLocator())


def colour(arm: Arm) -> str:
    return palette.colour(arm.attention)

