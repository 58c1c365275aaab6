"""make fig4-right: Figure 4, right, of Chefs' Random Tables: steps per second and memory of training a ViT."""

import math
from collections.abc import Sequence

import numpy as np

from crt_exp.report import palette
from crt_exp.report.evidence import Claim, in_a_row, independent, judged, of_processes
from crt_exp.report.writing import Cells, label_ends, markdown, new_figure, plain_ticks, write_report
from crt_exp.studies import vit_steps
from crt_exp.studies.memory import in_new_process
from crt_exp.studies.vit_steps import FORMED

TOKENS = (64, 196, 784, 1024, 3136, 4096, 12544, 16384)
MEMORY_TOKENS = (784, 1024, 3136, 4096, 16384)
BARS = {3136: 2.0, 12544: 5.0}  # how many times as fast as exact attention FAVOR++ is to be
PROCESSES = 5                   # that take all methods in turn, for each number of tokens
SAME = 1.1                      # FAVOR++ over FAVOR+: the paper's "very similar", in figures
LINEAR = 1.1                    # the largest exponent of memory that counts as linear
SOURCES = ("attention", "features", "swap", "studies/vit_steps.py")
COLOURS = {"uniform": palette.CONTROL, "exact": palette.EXACT, FORMED: "#0072B2"}


def main(size: str) -> None:
    keys = {(n, i): {"tokens": n, "rounds": rounds(n), "process": i} for i in range(PROCESSES) for n in TOKENS}
    steps = Cells("fig4-right", SOURCES).fill(list(keys.values()), times, "training steps", workers=1)
    peaks = {(n, name): {"tokens": n, "name": name} for n in MEMORY_TOKENS for name in vit_steps.methods(n)}
    memory = Cells("fig4-right-memory", SOURCES).fill(list(peaks.values()), memory_of, "memory", workers=1)
    write({n: in_a_row([steps[keys[n, i]] for i in range(PROCESSES)]) for n in TOKENS},
          {key: memory[cell] for key, cell in peaks.items()}, steps.seconds() + memory.seconds())


def rounds(tokens: int) -> int:
    """Of each process: more of the short ones, whose times vary more."""
    return math.ceil(6 * min(1, 512 / tokens))


def times(tokens: int, rounds: int, process: int) -> dict[str, list[float]]:
    """process: its number; it has nothing else of its own."""
    return in_new_process(vit_steps.times, tokens=tokens, rounds=rounds)


def memory_of(tokens: int, name: str) -> float:
    return in_new_process(vit_steps.memory, tokens=tokens, name=name)


# ---- what it says


def write(found: dict[int, dict[str, list[float]]], memory: dict[tuple[int, str], float], seconds: float) -> None:
    verdicts = judged(claims(found))
    said = "\n".join([controls(found), "", *map(str, verdicts), "", memory_text(memory)])
    body = "\n".join([said, "",
                      "## Milliseconds of a training step: median [quartiles]\n", table(found),
                      "## Steps per second of FAVOR++ over those of the others (ratio of the medians)\n", ratios(found),
                      "## Peak memory of a training step beyond weights, gradients and the optimiser's state, MiB\n",
                      memory_table(memory)])
    rows = [{"tokens": n, "attention": name, **summary(values), "peak_mib": memory.get((n, name), "")}
            for n, methods in found.items() for name, values in methods.items()]
    rows += [verdict.row() for verdict in verdicts]
    path = write_report("fig4-right", "CRT Figure 4, right: training steps per second of a ViT", body, rows,
                        figure(found, memory), facts(found), seconds)
    print(f"{said}\nwritten: {path}, {path.with_suffix('.csv')}, {path.with_suffix('.png')}")


def claims(found: dict[int, dict[str, list[float]]]) -> list[Claim]:
    """Of each process its own ratio: all methods take their turn in it, so that load from outside hits them alike."""
    over = lambda n, a, b: of_processes(found[n][a], PROCESSES) / of_processes(found[n][b], PROCESSES)
    made = [Claim(f"FAVOR++ makes more than {bar:g} times the steps of exact attention at {n} tokens",
                  independent(over(n, "exact", "favorpp") - bar), "times") for n, bar in BARS.items() if n in found]
    longest = max(found)
    made.append(Claim(f"a step with FAVOR++ takes less than {SAME:g} times that of FAVOR+ at {longest} tokens",
                      independent(SAME - over(longest, "favorpp", "favorp")), "times"))
    return made


def memory_text(memory: dict[tuple[int, str], float]) -> str:
    fitted = {name: f"L^{exponent(memory, name):.2f}" for name in vit_steps.METHODS}
    told = ", ".join(f"{label(name)} {power}" for name, power in fitted.items() if name != FORMED)
    linear = exponent(memory, "favorpp") <= LINEAR
    return (f"Memory, fitted over {MEMORY_TOKENS[0]} to {MEMORY_TOKENS[-1]} tokens: {told}; {FORMED}: "
            f"{fitted[FORMED]} up to {vit_steps.LONGEST_MATRIX}. FAVOR++ is {'' if linear else '**not** '}linear (an "
            f"exponent of at most {LINEAR:g}). Torch's fused kernel forms no matrix, so exact attention needs memory "
            "in proportion to the tokens too; the paper's ran out of it above 1000, as one does that forms the matrix.")


def exponent(memory: dict[tuple[int, str], float], name: str) -> float:
    """The slope of log(memory) against log(tokens), least squares."""
    points = [(math.log(n), math.log(mib)) for (n, other), mib in memory.items() if other == name]
    return float(np.polyfit(*zip(*points), 1)[0])


def controls(found: dict[int, dict[str, list[float]]]) -> str:
    """Uniform attention is the floor: what the rest of the model takes."""
    longest = max(found)
    share = np.median(found[longest]["uniform"]) / np.median(found[longest]["favorpp"])
    slower = [n for n in found if np.median(found[n]["favorpp"]) > np.median(found[n]["exact"])]
    ahead = f"Up to {max(slower)} tokens exact attention is the faster one. " if slower else ""
    return (f"{ahead}With uniform attention, which looks at no query and no key, a step at {longest} tokens takes "
            f"{share:.0%} of that with FAVOR++: the rest of the model leaves no more to gain.")


def summary(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = np.percentile(values, (25, 50, 75))
    return {"ms": middle, "ms_quartile_1": low, "ms_quartile_3": high, "steps_per_second": 1e3 / middle,
            "rounds": len(values)}


def table(found: dict[int, dict[str, list[float]]]) -> str:
    def cell(values: Sequence[float] | None) -> str:
        return "" if values is None else "{ms:.0f} [{ms_quartile_1:.0f}, {ms_quartile_3:.0f}]".format(**summary(values))

    rows = [[n, *(cell(methods.get(name)) for name in vit_steps.METHODS)] for n, methods in found.items()]
    return markdown(["tokens", *map(label, vit_steps.METHODS)], rows)


def ratios(found: dict[int, dict[str, list[float]]]) -> str:
    others = [name for name in vit_steps.METHODS if name != "favorpp"]

    def over(methods: dict[str, list[float]], name: str) -> str:
        return f"{np.median(methods[name]) / np.median(methods['favorpp']):.2f}" if name in methods else ""

    return markdown(["tokens", *map(label, others)],
                    [[n, *(over(methods, name) for name in others)] for n, methods in found.items()])


def memory_table(memory: dict[tuple[int, str], float]) -> str:
    cell = lambda n, name: f"{memory[n, name]:.0f}" if (n, name) in memory else ""
    lengths = dict.fromkeys(n for n, _ in memory)
    return markdown(["tokens", *map(label, vit_steps.METHODS)],
                    [[n, *(cell(n, name) for name in vit_steps.METHODS)] for n in lengths])


def label(name: str) -> str:
    return palette.label(name)


def colour(name: str) -> str:
    return COLOURS.get(name) or palette.colour(name)


def facts(found: dict[int, dict[str, list[float]]]) -> str:
    counts = ", ".join(f"{len(methods['exact']) // PROCESSES} at {n}" for n, methods in found.items())
    return (f"timm's {vit_steps.MODEL} (12 layers, 3 heads, d = 64), batch 1, float32, random pixels; a step is "
            f"forward, backward and AdamW's update; m = {vit_steps.M}, orthogonal. The tokens are patches of "
            f"{vit_steps.PATCH} pixels, beside the class token. All methods take their turn in every round, after "
            f"one to warm up; {PROCESSES} processes for each number of tokens, rounds of each: {counts}; tables show "
            "all rounds, verdicts are over processes, with 95% Student intervals; p with Holm's correction. Every peak "
            f"of resident memory has a process of its own. Left out: {FORMED}, above {vit_steps.LONGEST_MATRIX} "
            "tokens.")


def figure(found: dict[int, dict[str, list[float]]], memory: dict[tuple[int, str], float]):
    fig, axes = new_figure(1, 2, figsize=(11, 4))
    ends = ([], [])
    for name in vit_steps.METHODS:
        points = [(n, summary(methods[name])) for n, methods in found.items() if name in methods]
        tokens, middle = [n for n, _ in points], [s["steps_per_second"] for _, s in points]
        spread = [[s["steps_per_second"] - 1e3 / s["ms_quartile_3"] for _, s in points],
                  [1e3 / s["ms_quartile_1"] - s["steps_per_second"] for _, s in points]]
        axes[0].errorbar(tokens, middle, yerr=spread, color=colour(name), marker="o", ms=3, lw=1.4, capsize=2)
        peaks = [(n, mib) for (n, other), mib in memory.items() if other == name]
        axes[1].plot(*zip(*peaks), color=colour(name), marker="o", ms=3, lw=1.4)
        for here, end in zip(ends, ((tokens[-1], middle[-1]), peaks[-1])):
            here.append((label(name), *end, colour(name)))
    for ax, title, here in zip(axes, ("training steps per second", "peak memory of a step, MiB"), ends):
        ax.set(xscale="log", yscale="log", title=title, xlabel="tokens")
        ax.set_xticks(list(found), [f"{n // 1024}k" if n % 1024 == 0 else n for n in found], fontsize=7, rotation=45)
        ax.minorticks_off()
        plain_ticks(ax.yaxis)
        label_ends(ax, [end for end in here if end[0] != FORMED])
        for name, *end, shade in here:
            if name == FORMED:  # it ends amid the others
                ax.annotate(name, end, color=shade, textcoords="offset points", xytext=(-6, 0), ha="right", va="center",
                            fontsize=8)
    fig.tight_layout()
    return fig
