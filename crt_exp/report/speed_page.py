"""The page of `speed`: the bars first, then where exact attention is overtaken, the times, the memory, and the picture.

A process gives one number for a comparison: the mean, over its rounds, of the logarithm of the ratio within the round.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from crt_exp.report import palette
from crt_exp.report.evidence import Claim, Interval, Verdict, independent, judged
from crt_exp.report.writing import markdown, new_figure, write_report
from crt_exp.studies import speed as study
from crt_exp.studies.peers import CHUNK
from crt_exp.studies.speed import ALONE, CAUSAL, HYBRIDS, MODELS, TWINS, TWINS_AT, VIT, Times

LATER = "later"      # attention alone in a process that has run shorter sequences before
EXACT, PLAIN = "exact", "floor"
CONTROLS = ("identity", "uniform")
PEERS = (PLAIN, "chunked", "performer-pytorch")
# What a table shows -> the passes that it adds up.
TRAINING, BACKWARD, INFERENCE = "training step (forward and backward)", "backward pass alone", "pass without gradients"
SHOWN = {TRAINING: ("forward", "backward"), BACKWARD: ("backward",), INFERENCE: ("inference",)}
OF_FLOOR = {1024: 0.70, 4096: 0.53, 16384: 0.53}
OF_FAVORP = 1.05     # FAVOR++
OF_BOTH_WAYS = 1.5   # causal
OF_TWIN = 1.3        # hybrids, of trigonometric features of the same number
OF_PEER = {1024: 1 / 30}
LONG = (4096, 16384)
FASTER_FROM, TIMES_EXACT, OF_FAVORPP, MOST_MIB = 1024, {4096: 3.0, 16384: 10.0}, {16384: 2.0}, {65536: 400}  # near-far
WORDS = {"holds": "met", "fails": "not met", "cannot tell here": "open"}
UNIT = "in the logarithm"
NAMES = {EXACT: "exact (SDPA)", PLAIN: "plain product (floor)", "chunked": "chunked PyTorch",
         "hrf_angular": "angular hybrid", "hrf_gaussian": "Gaussian hybrid", "hrf_cluster": "clustered hybrid"}
COLOURS = {PLAIN: "#444444", "chunked": "#8C6D31", "performer-pytorch": "#CC79A7", "uniform": "#BBBBBB"}
STYLES = {PLAIN: ":", "chunked": ":", "performer-pytorch": ":", "identity": "--", "uniform": "--"}
TITLE = "Speed and memory of attention"


@dataclass
class Found:
    """times: of each part of the page and length, from each process. memory: MiB of a method at a length, likewise."""

    threads: int
    processors: list[str]
    times: dict[tuple[str, int], list[Times]] = field(default_factory=dict)
    memory: dict[tuple[str, int], list[float]] = field(default_factory=dict)

    def add(self, part: str, length: int, spent: Times) -> None:
        self.times.setdefault((part, length), []).append(spent)

    def lengths(self, part: str) -> list[int]:
        return [n for other, n in self.times if other == part]

    def names(self, part: str, length: int | None = None) -> list[str]:
        return list(dict.fromkeys(name for (other, n), processes in self.times.items() for name in processes[0]
                                  if other == part and length in (None, n)))

    def has(self, part: str, length: int, *names: str) -> bool:
        return (part, length) in self.times and all(name in self.times[part, length][0] for name in names)

    def ms(self, part: str, length: int, name: str, what: str = TRAINING) -> list[np.ndarray]:
        """Milliseconds of each round, by process."""
        return [np.sum([process[name][each] for each in SHOWN[what]], 0) for process in self.times[part, length]]

    def ratio(self, part: str, length: int, first: str, second: str, what: str = TRAINING) -> list[float]:
        """Logarithm of the time of the first over that of the second, of each process."""
        return [float(np.mean(np.log(a / b))) for a, b in zip(self.ms(part, length, first, what),
                                                              self.ms(part, length, second, what))]


def write(size: str, found: Found, seconds: float) -> None:
    asked = list(bars(found))
    verdicts = judged([bar.claim for bar in asked])
    said = "\n".join([control(found), "", *(line(bar, verdict) for bar, verdict in zip(asked, verdicts)), "",
                      overtaken(found)])
    rows = [*csv_rows(found), *(verdict.row() for verdict in verdicts)]
    path = write_report("speed", TITLE, "\n".join([said, *tables(found)]), rows, figure(found), facts(size, found),
                        seconds)
    print(f"{said}\nwritten: {path}, {path.with_suffix('.csv')}, {path.with_suffix('.png')}")


# ---- bars


class Bar(NamedTuple):
    """What a text says holds where `margin`, of each process, is above 0. shown: what was measured, in its own unit."""

    text: str
    margin: list[float]
    shown: str

    @property
    def claim(self) -> Claim:
        return Claim(self.text, independent(self.margin), UNIT if self.shown.endswith("times") else "MiB")


def line(bar: Bar, verdict: Verdict) -> str:
    return (f"- **{WORDS[verdict.word]}**: {bar.text}: {bar.shown} (n = {len(bar.margin)} processes, "
            f"p = {verdict.p:.2g})")


def times(logs: Sequence[float]) -> str:
    """A ratio: geometric mean over processes, with its interval."""
    found = independent(logs)
    return f"{math.exp(found.mean):.3g} ({math.exp(found.low):.3g} to {math.exp(found.high):.3g})"


def at_most(text: str, logs: Sequence[float], most: float) -> Bar:
    return Bar(text, [math.log(most) - value for value in logs], f"{times(logs)} times")


def at_least(text: str, logs: Sequence[float], least: float) -> Bar:
    return Bar(text, [value - math.log(least) for value in logs], f"{times(logs)} times")


def bars(found: Found) -> Iterator[Bar]:
    """The project's own, of training; those whose lengths were measured."""
    yield from engine_bars(found, ALONE, "")
    yield from engine_bars(found, LATER, ", in a process that has run shorter ones")
    yield from peer_bars(found)
    for n in found.lengths(ALONE):
        yield from near_far_bars(found, n)
    for (name, n), mib in found.memory.items():
        if name.startswith("nearfar") and n in MOST_MIB and len(mib) > 1:
            yield Bar(f"{label(name)}{sides(name)} holds at most {MOST_MIB[n]} MiB at L = {n}",
                      [MOST_MIB[n] - value for value in mib], f"{independent(mib):.0f} MiB")


def engine_bars(found: Found, part: str, where: str) -> Iterator[Bar]:
    for n, most in OF_FLOOR.items():
        if found.has(part, n, "favorp", PLAIN):
            yield at_most(f"FAVOR+ takes at most {most:g} of the time of the plain product, L = {n}{where}",
                          found.ratio(part, n, "favorp", PLAIN), most)
    for n in LONG:
        if found.has(part, n, "favorp", f"favorp{CAUSAL}"):
            yield at_most(f"FAVOR++ takes at most {OF_FAVORP:g} of the time of FAVOR+, L = {n}{where}",
                          found.ratio(part, n, "favorpp", "favorp"), OF_FAVORP)
            yield at_most(f"causal FAVOR+ takes at most {OF_BOTH_WAYS:g} of the time of both directions, "
                          f"L = {n}{where}", found.ratio(part, n, f"favorp{CAUSAL}", "favorp"), OF_BOTH_WAYS)


def peer_bars(found: Found) -> Iterator[Bar]:
    ours, peer, twin = (f"{name}{CAUSAL}" for name in ("favorp", "performer-pytorch", "chunked"))
    for n, most in OF_PEER.items():
        if found.has(ALONE, n, ours, peer):
            yield at_most(f"causal FAVOR+ takes at most 1/{1 / most:.0f} of the time of performer-pytorch's, L = {n}",
                          found.ratio(ALONE, n, ours, peer), most)
    for n in OF_FLOOR:
        if found.has(ALONE, n, ours, twin):
            yield at_most(f"causal FAVOR+ takes less time than its chunked twin in PyTorch, L = {n}",
                          found.ratio(ALONE, n, ours, twin), 1)
    for name, m in TWINS.items():
        if name != "hrf_gaussian" and found.has(ALONE, TWINS_AT, name, f"trig m={m}"):
            yield at_most(f"the {label(name)} takes at most {OF_TWIN:g} of the time of trigonometric features of the "
                          f"same number, {2 * m}, L = {TWINS_AT}",
                          found.ratio(ALONE, TWINS_AT, name, f"trig m={m}"), OF_TWIN)


def near_far_bars(found: Found, n: int) -> Iterator[Bar]:
    if n >= FASTER_FROM and found.has(ALONE, n, EXACT):
        over = found.ratio(ALONE, n, EXACT, "nearfar")
        yield at_least(f"near-far attention is faster than exact attention at L = {n}", over, 1)
        if n in TIMES_EXACT:
            yield at_least(f"near-far attention is at least {TIMES_EXACT[n]:g} times as fast as exact attention at "
                           f"L = {n}", over, TIMES_EXACT[n])
    if n in OF_FAVORPP:
        yield at_most(f"near-far attention takes at most {OF_FAVORPP[n]:g} times the time of FAVOR++, m = {study.M}, "
                      f"at L = {n}", found.ratio(ALONE, n, "nearfar", "favorpp"), OF_FAVORPP[n])


# ---- text


def control(found: Found) -> str:
    """The trivial answer: how much faster it is to look at no query and no key."""
    pairs = [(n, name) for n in found.lengths(ALONE) for name in found.names(ALONE, n)
             if kind(name) not in CONTROLS and not name.startswith("trig")]
    beaten = sum(independent(found.ratio(ALONE, n, f"uniform{CAUSAL if name.endswith(CAUSAL) else ''}", name)).high < 0
                 for n, name in pairs)
    longest = max(n for n in found.lengths(ALONE) if found.has(ALONE, n, EXACT))
    took = ", ".join(f"{label(name)} {median(found, ALONE, longest, name)} ms" for name in (
        "uniform", "favorpp", "nearfar", EXACT))
    return (f"**Uniform attention, a control, is faster than {beaten} of {len(pairs)} arms**: it looks at no query and "
            f"no key. A training step at L = {longest}: {took}. Time says nothing of what attention finds: "
            "`performers-fig4` and `fidelity` do. In a model the rest bounds what any attention can gain: "
            f"{'; '.join(bounds(found))}.")


def bounds(found: Found) -> Iterator[str]:
    for part in parts(found):
        n = max((n for n in found.lengths(part) if found.has(part, n, EXACT)), default=None)
        if n is not None:
            gains = (faster(found, part, n, EXACT, name) for name in ("identity", "favorpp", "nearfar"))
            yield (f"{part}, L = {n}: without any attention {next(gains)} times as fast as with exact attention, with "
                   f"FAVOR++ {next(gains)}, near-far {next(gains)}")


def overtaken(found: Found) -> str:
    rows = []
    for name in found.names(ALONE):
        if kind(name) in (EXACT, *CONTROLS) or name.startswith("trig"):
            continue
        rows.append([label(name) + sides(name), *(crossover(found, name, what) for what in (TRAINING, INFERENCE))])
    return ("From which length on a method is faster than exact attention, which is causal for causal ones: the least "
            "measured L from which on every 95% interval is below exact attention's time, and the last L at which it "
            "is above.\n\n" + markdown(["method", *(f"{what}: faster from, slower up to" for what in (
                TRAINING, INFERENCE))], rows))


def crossover(found: Found, name: str, what: str) -> str:
    base = EXACT + (CAUSAL if name.endswith(CAUSAL) else "")
    over = {n: independent(found.ratio(ALONE, n, name, base, what)) for n in found.lengths(ALONE)
            if found.has(ALONE, n, name, base)}
    return f"{faster_from(over) or 'none'}, {max((n for n, each in over.items() if each.low > 0), default='none')}"


def faster_from(over: dict[int, Interval]) -> int | None:
    """The least length from which on all intervals of the logarithm are below 0."""
    found = None
    for n in sorted(over, reverse=True):
        if over[n].high >= 0:
            break
        found = n
    return found


def facts(size: str, found: Found) -> str:
    counts = [f"{part} {n}: {len(processes)} x {len(next(iter(processes[0].values()))['forward'])}"
              for (part, n), processes in found.times.items()]
    sizes = "; ".join(f"{name} {value}" for name, value in MODELS.items())
    return (f"SIZE={size}. Batch 1, float32, {found.threads} threads of {' and '.join(found.processors)}. Attention "
            f"alone: {study.HEADS} heads, d = {study.D}, m = {study.M}, |x + y|^2 of about 10, fits to statistics "
            "included. FAVOR# has antithetic pairs, so 2m features; hybrids have "
            f"{', '.join(f'{m} ({label(name)})' for name, m in HYBRIDS.items())} projections of their bases, "
            f"{', '.join(str(2 * m) for m in TWINS.values())} features, and clusters fitted before; near-far attention "
            "has its preset `default`, and the codebook of the causal one is made before. The plain product is "
            "exp(Q W^T) (exp(K W^T)^T V), without norms and denominator; chunked PyTorch is causal FAVOR+ in "
            f"whole-tensor operations, chunks of {CHUNK}. Models: (heads, layers, ffn, dim) {sizes}; {VIT}: "
            f"timm's ViT-Ti/16. Every process takes all methods in turn, in an order that its number rotates, after "
            f"a round at L <= {study.WARMED} that does not count; attention alone has a process for each length beyond "
            f"2048, and `{LATER}` goes through {', '.join(map(str, found.lengths(LATER)))} in one process, whose "
            f"allocator may then find pages ready. Processes x rounds: {', '.join(counts)}. Medians and quartiles over "
            "all rounds; ratios are geometric means over rounds, with 95% Student intervals over processes; p with "
            "Holm's correction over all bars.")


# ---- tables


def kind(name: str) -> str:
    """A method's name without its direction and size."""
    return name.removesuffix(CAUSAL).partition(" m=")[0]


def sides(name: str) -> str:
    return ", causal" if name.endswith(CAUSAL) else ""


def label(name: str) -> str:
    """One for both directions."""
    _, _, m = name.removesuffix(CAUSAL).partition(" m=")
    return NAMES.get(kind(name), palette.label(kind(name))) + (f", m = {m}" if m else "")


def parts(found: Found) -> list[str]:
    """Kinds of models."""
    return [part for part in dict.fromkeys(part for part, _ in found.times) if part not in (ALONE, LATER)]


def number(ms: float) -> str:
    return f"{ms:.2f}" if ms < 1 else f"{ms:.1f}" if ms < 100 else f"{ms:.0f}"


def median(found: Found, part: str, n: int, name: str) -> str:
    return number(float(np.median(np.concatenate(found.ms(part, n, name)))))


def quartiles(found: Found, part: str, n: int, name: str, what: str) -> str:
    if not found.has(part, n, name):
        return ""
    low, middle, high = map(number, np.percentile(np.concatenate(found.ms(part, n, name, what)), (25, 50, 75)))
    return f"{middle} [{low}, {high}]"


def faster(found: Found, part: str, n: int, base: str, name: str) -> str:
    """How many times as fast as the base in training."""
    return times(found.ratio(part, n, base, name)) if found.has(part, n, name, base) else ""


def tables(found: Found) -> Iterator[str]:
    for causal, title in ((False, "both directions"), (True, "causal")):
        names = [name for name in found.names(ALONE) if name.endswith(CAUSAL) == causal]
        yield from section(found, ALONE, f"Attention alone, {title}", names, EXACT + CAUSAL * causal)
    for part in parts(found):
        yield from section(found, part, f"Model: {part}", found.names(part), EXACT)
    yield memory_table(found)


def section(found: Found, part: str, title: str, names: Sequence[str], base: str) -> Iterator[str]:
    yield f"\n## {title}\n"
    lengths = found.lengths(part)
    header = ["method", *(f"L = {n}" for n in lengths)]
    for what in SHOWN:
        yield f"{what[0].upper()}{what[1:]}, ms: median [quartiles]\n\n" + markdown(header, [
            [label(name), *(quartiles(found, part, n, name, what) for n in lengths)] for name in names])
    yield "Times as fast as exact attention in training (95% interval)\n\n" + markdown(header, [
        [label(name), *(faster(found, part, n, base, name) for n in lengths)] for name in names if name != base])


def memory_table(found: Found) -> str:
    names, lengths = list(dict.fromkeys(name for name, _ in found.memory)), sorted({n for _, n in found.memory})
    shown = lambda mib: f"{np.median(mib):.0f}" if len(mib) == 1 else f"{independent(mib):.0f}"
    rows = [[label(name) + sides(name), *(shown(found.memory[name, n]) if (name, n) in found.memory else ""
                                          for n in lengths)] for name in names]
    return ("\n## Peak memory of a training step beyond inputs, output and gradients, MiB\n\n"
            + markdown(["method", *(f"L = {n}" for n in lengths)], rows))


def csv_rows(found: Found) -> list[dict[str, Any]]:
    rows = []
    for (part, n), processes in found.times.items():
        for name in processes[0]:
            for what in ("forward", "backward", "inference"):
                values = np.concatenate([process[name][what] for process in processes])
                low, middle, high = np.percentile(values, (25, 50, 75))
                rows.append({"what": part, "length": n, "method": name, "pass": what, "ms": middle, "quartile_1": low,
                             "quartile_3": high, "rounds": len(values), "processes": len(processes)})
    return rows + [{"what": "memory", "length": n, "method": name, "mib": float(np.median(mib)), "processes": len(mib)}
                   for (name, n), mib in found.memory.items()]


# ---- picture


def colour(name: str) -> str:
    return COLOURS.get(kind(name)) or palette.colour(kind(name))


def figure(found: Found):
    """Median milliseconds with quartiles: training both ways, causal, inference; and models. One entry a method."""
    fig, axes = new_figure(2, 3, figsize=(15, 8.4))
    both = [name for name in found.names(ALONE) if not name.endswith(CAUSAL) and " m=" not in name]
    causal = [name for name in found.names(ALONE) if name.endswith(CAUSAL)]
    draw(axes[0, 0], found, ALONE, both, TRAINING, "attention, training step")
    draw(axes[0, 1], found, ALONE, causal, TRAINING, "causal attention, training step")
    draw(axes[0, 2], found, ALONE, both, INFERENCE, "attention, pass without gradients")
    for ax, part in zip(axes[1], parts(found)):
        draw(ax, found, part, found.names(part), TRAINING, f"model {part}, training step")
    entries = {text: handle for ax in axes.flat for handle, text in zip(*ax.get_legend_handles_labels())}
    fig.tight_layout()
    fig.legend(entries.values(), entries, loc="upper center", bbox_to_anchor=(0.5, 0), ncol=7, fontsize=8.5)
    return fig


def draw(ax, found: Found, part: str, names: Sequence[str], what: str, title: str) -> None:
    for name in names:
        lengths = [n for n in found.lengths(part) if found.has(part, n, name)]
        low, middle, high = np.array([np.percentile(np.concatenate(found.ms(part, n, name, what)), (25, 50, 75))
                                      for n in lengths]).T
        ax.errorbar(lengths, middle, yerr=(middle - low, high - middle), color=colour(name), lw=1.3, marker="o", ms=2.5,
                    elinewidth=2.5, ls=STYLES.get(kind(name), "-"), label=label(name))
    ax.set(xscale="log", yscale="log", title=f"{title}, ms", xlabel="L")
    ticks = found.lengths(part)
    ax.set_xticks(ticks, [f"{n // 1024}k" if n % 1024 == 0 else n for n in ticks], fontsize=8)
    ax.minorticks_off()
