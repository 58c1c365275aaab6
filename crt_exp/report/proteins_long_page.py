"""The page of `proteins_long`: verdicts first, then what they rest on, and its picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from crt_exp.report import palette
from crt_exp.report.evidence import Claim, detectable, independent, judged, of_processes, won_by
from crt_exp.report.palette import label
from crt_exp.report.protein_steps import FORMED, LAYER, MODEL, rows
from crt_exp.report.writing import label_ends, markdown, new_figure, plain_ticks, write_report

TITLE = "Performers Figure 7, right: chains of proteins"
LONG = 8192
FASTER, FLAT, STEADY = 4.0, 0.85, 1.1  # what is to be reached: see `claims`
COLOURS = {"uniform": palette.CONTROL, "exact": palette.EXACT, FORMED: "#0072B2", "relu": "#009E73", MODEL: "#D55E00",
           LAYER: "#0072B2"}


@dataclass
class Found:
    """All that was computed. trained: by name and seed. times: milliseconds of a step by part and L, then by name.
    flat: of the model with FAVOR++ by L. memory: MiB by name and L. drawn: milliseconds of a letter by name and
    position. processes: how many took each of the times, whose rounds stand one process after the other."""

    trained: dict[tuple[str, int], dict[str, Any]]
    times: dict[tuple[str, int], dict[str, list[float]]]
    flat: dict[int, list[float]]
    memory: dict[tuple[str, int], float]
    drawn: dict[tuple[str, int], list[float]]
    processes: int

    def ratios(self, first: Sequence[float], second: Sequence[float]) -> np.ndarray:
        """Of two times, one for each process: all take their turn in it, so that load from outside hits them alike."""
        return of_processes(first, self.processes) / of_processes(second, self.processes)


def write(size: str, found: Found, facts: str, seconds: float) -> None:
    verdicts = judged(claims(found))
    said = "\n".join([controls_that_win(found), "", *map(str, verdicts), "", learned(found), "", limits(found)])
    body = "\n".join([
        said, "", "## Training on the proteomes\n", training_table(found),
        "## Letters a second in training: median [quartiles]\n", speed_table(found),
        "## Peak memory of a training step of the model beyond weights, gradients and the optimiser's state, MiB\n",
        memory_table(found), "## Milliseconds of a drawn letter: median [quartiles]\n", drawing_table(found)])
    path = write_report("proteins-long", TITLE + ("" if size == "full" else " (small models)"), body,
                        [*csv_rows(found), *(verdict.row() for verdict in verdicts)], figure(found), facts, seconds)
    print(f"{said}\nwritten: {path}, {path.with_suffix('.csv')}, {path.with_suffix('.png')}")


# ---- text


def claims(found: Found) -> list[Claim]:
    made = [Claim(f"the {part} trains more than {FASTER:g} times as fast with FAVOR++ as with exact attention at "
                  f"{n} letters", independent(found.ratios(times["exact"], times["favorpp"]) - FASTER), "times")
            for (part, n), times in found.times.items() if n == LONG]
    short, longest = min(found.flat), max(found.flat)
    kept = found.ratios(found.flat[short], found.flat[longest])
    made.append(Claim(f"the model with FAVOR++ reads more than {FLAT:g} times as many letters a second at {longest} "
                      f"as at {short}", independent(kept - FLAT), "times"))
    positions = [n for name, n in found.drawn if name == "favorpp"]
    first, last = min(positions), max(positions)
    later = found.ratios(found.drawn["favorpp", last], found.drawn["favorpp", first])
    made.append(Claim(f"FAVOR++ draws a letter behind {last} in less than {STEADY:g} times the time of one behind "
                      f"{first}", independent(STEADY - later), "times"))
    return made


def controls_that_win(found: Found) -> str:
    """Which attention that is trained ends worse on test than uniform attention, and than the frequencies of
    letters."""
    if not (final(found, "exact") and final(found, "uniform")):
        return "No run of exact or none of uniform attention ended: nothing stands beside a control."
    mean = {name: np.mean(losses) for name, _ in found.trained if (losses := [*final(found, name).values()])}
    step = next(iter(final(found, "exact", "step").values()))
    controls = {"uniform attention": mean.pop("uniform"), "the law of letters, by frequency": letters(found)}
    where = f"proteomes, {step} steps"
    return "\n\n".join(won_by(control, {where: [label(name) for name in mean if mean[name] > loss]}, len(mean))
                       for control, loss in controls.items())


def letters(found: Found) -> float:
    """The loss on test of the training letters' frequencies."""
    return float(np.log(next(iter(final(found, "exact", "unigram_perplexity").values()))))


def final(found: Found, name: str, metric: str = "loss") -> dict[int, float]:
    """Of the test split after the last step, by seed; without runs that diverged."""
    return {seed: run["last"][metric] for (other, seed), run in found.trained.items()
            if other == name and "last" in run}


def difference(found: Found, name: str, other: str) -> list[float]:
    """Of final losses, pair by pair."""
    first, second = final(found, name), final(found, other)
    return [first[seed] - second[seed] for seed in first if seed in second]


def learned(found: Found) -> str:
    """What the curves can show, by what uniform attention loses."""
    lost = difference(found, "uniform", "exact")
    if len(lost) < 2:
        return "Training has fewer than two pairs of runs: it shows no difference."
    gap, (steps, *_) = independent(lost), final(found, "exact", "step").values()
    exact = np.mean(list(final(found, "exact").values()))
    start = f"After {steps} steps uniform attention ends {gap:+.4f} nats from exact attention"
    if gap.low <= 0:
        return (f"**The training curves tell no attention from another.** {start}, which has {exact:.3f} where the "
                f"unigrams of the training letters have {letters(found):.3f}: what queries and keys would find is not "
                "learned yet. They show that all arms train at this length, not which would be better after the "
                "paper's 100,000 steps: there its exact model stops at 19% of the letters, its larger Performer "
                "reaches 24%.")
    ends = independent(difference(found, "favorpp", "exact"))
    return (f"{start}, so that attention matters; FAVOR++ ends {ends:+.4f} nats from it. The paper's finding, 19% of "
            "the letters against 24%, is on a larger Performer than the exact model that fits, after 100,000 steps: "
            "this does not judge it.")


def limits(found: Found) -> str:
    """Uniform attention is the floor, what the rest of the model takes; and memory."""
    most = [f"{np.median(times['exact']) / np.median(times['uniform']):.1f} times as fast in the {part}"
            for (part, n), times in found.times.items() if n == LONG and part != LAYER]
    kept = np.median(found.flat[min(found.flat)]) / np.median(found.flat[max(found.flat)])
    held = ", ".join(f"{label(name)} {mib:.0f} MiB" for (name, n), mib in found.memory.items() if n == LONG)
    return (f"At {LONG} letters uniform attention, which looks at no query and no key, is {' and '.join(most)} as "
            "exact attention: the rest of a model leaves no more to gain. From "
            f"{min(found.flat)} to {max(found.flat)} letters a row, the letters a second of FAVOR++ change by a factor "
            f"of {kept:.2f}. Peak memory of a step on a row of {LONG} letters: {held}.")


# ---- tables


def rates(part: str, n: int, values: Sequence[float]) -> np.ndarray:
    """Letters a second in each round."""
    return 1e3 * rows(part, n) * n / np.asarray(values)


def quartiles(values: Sequence[float], spec: str) -> str:
    low, middle, high = np.percentile(values, (25, 50, 75))
    return f"{middle:{spec}} [{low:{spec}}, {high:{spec}}]"


def training_table(found: Found) -> str:
    made = []
    for name in dict.fromkeys(name for name, _ in found.trained):
        losses = list(final(found, name).values())
        apart = difference(found, name, "exact") if name != "exact" else []
        shown = lambda values, spec: format(independent(values), spec) if len(values) > 1 else ""
        failed = sum("diverged" in run for (other, _), run in found.trained.items() if other == name)
        made.append([label(name), shown(losses, ".4f"), shown(apart, "+.4f"),
                     f"{detectable(apart):.2g}" if len(apart) > 1 else "",
                     shown([100 * a for a in final(found, name, "accuracy").values()], ".2f"), failed])
    return markdown(["attention", "test loss, nats", "beyond exact, in pairs", "difference that would show",
                     "accuracy, %", "diverged"], made)


def speed_table(found: Found) -> str:
    names = list(next(iter(found.times.values())))
    made = [[f"{part}, {n}", *(quartiles(rates(part, n, times[name]), ".0f") for name in names),
             f"{np.median(np.divide(times['exact'], times['favorpp'])):.2f}"]
            for (part, n), times in found.times.items()]
    return markdown(["letters a row", *map(label, names), "FAVOR++ over exact"], made)


def memory_table(found: Found) -> str:
    names, lengths = (list(dict.fromkeys(part)) for part in zip(*found.memory))
    cell = lambda name, n: f"{found.memory[name, n]:.0f}" if (name, n) in found.memory else ""
    return markdown(["letters", *map(label, names)], [[n, *(cell(name, n) for name in names)] for n in lengths])


def drawing_table(found: Found) -> str:
    names, positions = (list(dict.fromkeys(part)) for part in zip(*found.drawn))
    made = [[n, *(quartiles(found.drawn[name, n], ".2f") for name in names)] for n in positions]
    return markdown(["behind so many letters", *(f"{label(name)}, {STATE[name]}" for name in names)], made)


STATE = {"exact": "keys and values kept", "favorpp": "recurrent state"}


def csv_rows(found: Found) -> list[dict[str, Any]]:
    made = [{"what": "training", "attention": name, "seed": seed, "step": step, "loss": loss}
            for (name, seed), run in found.trained.items() for step, loss in run.get("curve", [])]
    made += [{"what": "test", "attention": name, "seed": seed, **{key: run["last"][key] for key in (
              "step", "loss", "accuracy", "unigram_perplexity")}} if "last" in run else
             {"what": "diverged", "attention": name, "seed": seed} for (name, seed), run in found.trained.items()]
    timed = {(part, n, name): (rates(part, n, values), "letters_per_second") for (part, n), times in found.times.items()
             for name, values in times.items()}
    timed |= {("model, all lengths in turn", n, "favorpp"): (rates(MODEL, n, values), "letters_per_second")
              for n, values in found.flat.items()}
    timed |= {("drawing", n, name): (np.asarray(values), "ms") for (name, n), values in found.drawn.items()}
    for (what, n, name), (values, unit) in timed.items():
        low, middle, high = np.percentile(values, (25, 50, 75))
        made.append({"what": what, "attention": name, "letters": n, unit: middle, "quartile_1": low,
                     "quartile_3": high, "rounds": len(values)})
    return made + [{"what": "memory", "attention": name, "letters": n, "peak_mib": mib}
                   for (name, n), mib in found.memory.items()]


# ---- picture


def colour(name: str) -> str:
    return COLOURS.get(name) or palette.colour(name)


def figure(found: Found):
    fig, axes = new_figure(2, 3, figsize=(15, 8))
    draw_curves(axes[0, 0], found)
    names = list(next(iter(found.times.values())))
    of_part = {part: {n: times for (other, n), times in found.times.items() if other == part}
               for part in (MODEL, LAYER)}
    for ax, (part, times) in zip(axes[0, 1:], of_part.items()):
        speeds = {name: {n: rates(part, n, t[name]) for n, t in times.items()} for name in names}
        against(ax, speeds, f"letters a second in training, {part}")
    gains = {part: {n: np.divide(t["exact"], t["favorpp"]) for n, t in times.items()}
             for part, times in of_part.items()}
    against(axes[1, 0], gains, "letters a second, FAVOR++ over exact")
    against(axes[1, 1], by_name(found.memory), "peak memory of a step on one row, model, MiB")
    against(axes[1, 2], by_name(found.drawn), "milliseconds of a drawn letter", "letters before it")
    fig.tight_layout()
    return fig


def by_name(found: dict[tuple[str, int], Any]) -> dict[str, dict[int, Any]]:
    return {name: {n: values for (other, n), values in found.items() if other == name}
            for name in dict.fromkeys(name for name, _ in found)}


def draw_curves(ax, found: Found) -> None:
    """The mean over seeds, of the rows that all arms read."""
    ends = []
    for name in dict.fromkeys(name for name, _ in found.trained):
        curves = [run["curve"] for (other, _), run in found.trained.items() if other == name and run.get("curve")]
        if curves:
            steps, losses = np.mean(curves, 0).T
            ax.plot(steps, losses, color=colour(name), lw=1.2)
            ends.append((label(name), steps[-1], losses[-1], colour(name)))
    ax.set(title="training loss, nats, mean over seeds", xlabel="step")
    label_ends(ax, ends)


def against(ax, lines: dict[str, dict[int, Any]], title: str, what: str = "letters a row") -> None:
    """Medians against letters, both on logarithmic scales; bars are quartiles, where there is more than one value."""
    ends = []
    for name, points in lines.items():
        low, middle, high = np.transpose([np.percentile(values, (25, 50, 75)) for values in points.values()])
        ax.errorbar(list(points), middle, yerr=(middle - low, high - middle), color=colour(name), marker="o", ms=3,
                    lw=1.4, elinewidth=0.8)
        ends.append((label(name), list(points)[-1], middle[-1], colour(name)))
    ticks = list(max(lines.values(), key=len))
    ax.set(xscale="log", yscale="log", title=title, xlabel=what)
    ax.set_xticks(ticks, ticks, fontsize=7)
    ax.minorticks_off()
    plain_ticks(ax.yaxis)
    label_ends(ax, ends)
