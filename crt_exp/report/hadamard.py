"""make hadamard: how structured projections compare, after the report of Adda and Allen (2021),
with its open question k = 3."""

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from crt_exp import samplers
from crt_exp.attention import DenominatorCount, attention, exact_attention
from crt_exp.features import PosRF, Statistics
from crt_exp.mechanism import Mechanism
from crt_exp.report import palette
from crt_exp.report.evidence import Claim, in_a_row, judged, of_processes, won_by
from crt_exp.report.kernel_arms import below, over, resolution
from crt_exp.report.writing import Cells, label_ends, markdown, new_figure, write_report
from crt_exp.studies.memory import in_new_process
from crt_exp.studies.projections import Projections

DISCRETE = ("pois", "geom", "pois_coord", "pois_plus", "geom_plus")
WITHOUT = {**dict.fromkeys(("gerf", "hyp", "smreg"), "trig, pos and oprf stand for the exponential maps"),
           **palette.APART,
           **dict.fromkeys(DISCRETE, "discrete maps need exactly Gaussian rows")}
WITHOUT_SAMPLERS = dict.fromkeys(("sobol", "halton", "stratified"), "they place points, the report compares matrices")
STYLES = {1: ":", 2: "--", 3: "-"}  # of lines, by the number of Hadamard blocks
MAPS, SAMPLERS = palette.maps(WITHOUT), palette.samplers(WITHOUT_SAMPLERS)
MS, L, D, SEED = (16, 32, 64, 128, 256, 512), 1024, 16, 0
SCALES = (0.25, 0.5, 0.75, 1.0)     # the source's is 1, where zeros are nearer to attention than its arms are
SAMPLES = {"small": 20, "gpu": 30, "full": 100}
LENGTHS, TIMED_M = (256, 1024, 4096, 16384), 300
PROCESSES, ROUNDS = 5, 3  # of attention that is timed; rounds of each process
EXACT_UP_TO = 4096                  # exact attention is timed on no more tokens
TIMED = ("trig", "pos")             # the source's Figures 3 and 4
BIAS_D = (16, 64)
CONTROLS = {"zero": "zeros", "uniform": "uniform attention, the mean of V"}
Found = dict[tuple[float, str, str], list[list[float]]]       # scale, map, kind -> MSE (m, samples)


def kinds(sampler: str) -> dict[str, Callable]:
    """What stands for a sampler: itself, or Hadamard matrices with 1, 2 and 3 blocks."""
    made = Mechanism.of(features="pos", sampler=sampler, m=1).sampler
    if sampler != "hadamard":
        return {sampler: made}
    return {f"hadamard k={k}": partial(made, blocks=k) for k in STYLES}


KINDS = {kind: made for sampler in SAMPLERS for kind, made in kinds(sampler).items()}


def main(size: str) -> None:
    samples = SAMPLES[size]
    keys = {(scale, f, k): {"scale": scale, "features": f, "kind": k, "samples": samples}
            for scale in SCALES for f in MAPS for k in KINDS}
    beside = {scale: {"scale": scale, "samples": samples} for scale in SCALES}
    biased = {(k, d): {"kind": k, "d": d} for k in KINDS for d in BIAS_D}
    timed = {(length, process): {"length": length, "rounds": ROUNDS, "process": process}
             for process in range(PROCESSES) for length in LENGTHS}
    cells = Cells("hadamard").fill(list(keys.values()), errors, "MSE")
    cells.fill(list(beside.values()), controls, "controls").fill(list(biased.values()), bias, "bias")
    cells.fill(list(timed.values()), times_of, "times", workers=1)
    found = {place: cells[key] for place, key in keys.items()}
    times = {n: in_a_row([cells[timed[n, i]] for i in range(PROCESSES)]) for n in LENGTHS}
    write(size, found, {scale: cells[key] for scale, key in beside.items()},
          {place: cells[key] for place, key in biased.items()}, times, cells.seconds())


def errors(scale: float, features: str, kind: str, samples: int) -> list[list[float]]:
    """MSE for each m and sample; the samples are the same for all maps, kinds and m."""
    task, phi = Projections(L, D, MS, samples, scale), Mechanism.of(features=features).map("softmax")
    return [task.errors(phi, KINDS[kind], m, SEED) for m in MS]


def controls(scale: float, samples: int) -> dict[str, list[float]]:
    return Projections(L, D, MS, samples, scale).controls(SEED)


def bias(kind: str, d: int) -> list[float]:
    """Mean estimate over exact kernel and its standard error, PosRF, at x = y = e_1 and at a spread x = y
    of the same length."""
    x = torch.zeros(2, d, dtype=torch.float64)
    x[0, 0], x[1] = 1, d**-0.5
    found = samplers.measured_bias(PosRF(), KINDS[kind], x, x, draws=20_000, generator=torch.Generator().manual_seed(0))
    return [found.ratio[0].item(), found.error[0].item(), found.ratio[1].item(), found.error[1].item()]


def times_of(length: int, rounds: int, process: int) -> dict[str, list[float]]:
    """process: its number; it has nothing else of its own."""
    return in_new_process(attention_times, length=length, rounds=rounds)


def attention_times(length: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of attention, forward, of each map and kind, "trig, orthogonal", and "exact", in interleaved rounds.

    A new draw in each round, itself not counted. Denominators of trig that are not positive are no matter of time.
    """
    x, y, v = Projections(length, D, [TIMED_M], 1).tensors(SEED, 0)
    g = torch.Generator().manual_seed(SEED)
    arms = {f"{f}, {kind}": (Mechanism.of(features=f).map(), sampler) for f in TIMED for kind, sampler in KINDS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in arms} | ({"exact": []} if length <= EXACT_UP_TO else {})
    for turn in range(rounds + 1):
        for name, (phi, sampler) in arms.items():
            noise, params = sampler(TIMED_M, D, g), phi.fit(Statistics.of(x[0, 0], y[0, 0]))
            took = elapsed(partial(attention, x, y, v, phi, noise, params, counter=DenominatorCount()))
            seconds[name] += [took] if turn else []  # the first round warms up
        if "exact" in seconds:
            took = elapsed(partial(exact_attention, x, y, v))
            seconds["exact"] += [took] if turn else []
    return seconds


def elapsed(call: Callable) -> float:
    start = time.perf_counter()
    with torch.no_grad():
        call()
    return time.perf_counter() - start


# ---- what it concludes


def over_ms(values: Sequence[Sequence[float]]) -> list[float]:
    """Of each sample, the geometric mean over m."""
    return np.exp(np.mean(np.log(values), 0)).tolist()


def middle(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


def claims(found: Found, times: dict[int, dict[str, list[float]]]) -> list[Claim]:
    """The source's, and what it leaves open: whether k = 3 gains over k = 1."""
    made = []
    for f in TIMED:
        for scale in SCALES:
            of = {kind: over_ms(found[scale, f, kind]) for kind in KINDS}
            made += [below(f"{f}, scale {scale:g}: {kind} has less than half the MSE of iid rows",
                           np.multiply(2, of[kind]), of["iid"]) for kind in ("orthogonal", "hadamard k=1")]
            made.append(below(f"{f}, scale {scale:g}: orthogonal Gaussian rows have less MSE than Hadamard rows, k=1",
                              of["orthogonal"], of["hadamard k=1"]))
    made += [below(f"{f}, scale {scale:g}: Hadamard rows with k=3 have less MSE than with k=1",
                   over_ms(found[scale, f, "hadamard k=3"]), over_ms(found[scale, f, "hadamard k=1"]))
             for f in MAPS for scale in SCALES]
    return made + [faster(times, f) for f in TIMED]


def faster(times: dict[int, dict[str, list[float]]], features: str) -> Claim:
    """Of the source's Figures 3 and 4, by the means of processes, which are paired."""
    orthogonal, hadamard = (of_processes(times[LENGTHS[-1]][f"{features}, {kind}"], PROCESSES)
                            for kind in ("orthogonal", "hadamard k=1"))
    return below(f"{features}, L = {LENGTHS[-1]}: attention with orthogonal Gaussian rows takes less time than with "
                 "Hadamard rows, k=1", orthogonal, hadamard)


def controls_that_win(found: Found, beside: dict[float, dict[str, list[float]]]) -> str:
    """Which arms, a map and a kind of rows with the largest m, are further from exact attention than a control is."""
    lines = []
    for control, name in CONTROLS.items():
        beaten: dict[str, list[str]] = {}
        for (scale, f, kind), values in found.items():
            if middle(values[-1]) > middle(beside[scale][control]):
                beaten.setdefault(f"scale {scale:g}, m = {MS[-1]}", []).append(f"{f} x {kind}")
        lines.append(won_by(name, beaten, len(found)))
    return "\n\n".join(lines)


# ---- the page


def write(size: str, found: Found, beside: dict[float, dict[str, list[float]]],
          biases: dict[tuple[str, int], list[float]], times: dict[int, dict[str, list[float]]], seconds: float) -> None:
    verdicts = judged(claims(found, times))
    said = "\n".join([controls_that_win(found, beside), "", *map(str, verdicts), "", power(found)])
    parts = [said, "", *(ratio_table(found, f) for f in MAPS),
             *(mse_table(found, beside, f, scale) for f in MAPS for scale in SCALES), bias_table(biases),
             time_table(times)]
    rows = [{"scale": scale, "features": f, "sampler": k, "m": m, "mse": middle(values),
             "log_mse_std": float(np.std(np.log(values), ddof=1))}
            for (scale, f, k), of in found.items() for m, values in zip(MS, of)]
    path = write_report("hadamard", "Structured projections: MSE, bias and time", "\n".join(parts),
                        [*rows, *(v.row() for v in verdicts)], figure(found, beside, times), facts(size), seconds)
    print(f"{said}\nwritten: {path}, {path.with_suffix('.csv')}, {path.with_suffix('.png')}")


def power(found: Found) -> str:
    pair = (over_ms(found[1.0, "pos", kind]) for kind in ("orthogonal", "iid"))
    return resolution("the MSE of orthogonal and iid rows (pos, scale 1)", *pair)


def facts(size: str) -> str:
    return (f"SIZE={size}. MSE of the attention output against exact softmax, q, k ~ N(0, scale^2), v ~ N(0, 1), L = "
            f"{L}, d = {D} (seed {SEED}); {SAMPLES[size]} samples of these and of the noise, the same for all kinds of "
            "rows, which are paired by sample; geometric means over samples, for the errors of trig have heavy tails. "
            "Verdicts: logarithm of the MSE, mean over m, Student intervals over samples; p by Holm over all. The "
            f"source's scale is 1. Times: attention, forward, m = {TIMED_M}, d = {D}, float32, {PROCESSES} processes "
            f"of each length with {ROUNDS} interleaved rounds, the draw of the noise apart; fitting is no part; the "
            "verdicts on times are over processes."
            f"{palette.left_out(WITHOUT | WITHOUT_SAMPLERS)}")


def ratio_table(found: Found, f: str) -> str:
    """MSE over that of orthogonal rows, mean over m, paired by sample."""
    rows = [[kind, *(over(over_ms(found[scale, f, kind]), over_ms(found[scale, f, "orthogonal"])) for scale in SCALES)]
            for kind in KINDS if kind != "orthogonal"]
    return (f"## {f}: MSE over that of orthogonal Gaussian rows, geometric mean over m, 95% interval\n\n"
            + markdown(["rows", *(f"scale {scale:g}" for scale in SCALES)], rows))


def mse_table(found: Found, beside: dict[float, dict[str, list[float]]], f: str, scale: float) -> str:
    rows = [[kind, *(f"{middle(values):.2e}" for values in found[scale, f, kind])] for kind in KINDS]
    rows += [[f"{control} (control)", *(f"{middle(beside[scale][control]):.2e}" for _ in MS)] for control in CONTROLS]
    return f"## MSE, {f}, scale {scale:g}\n\n" + markdown(["rows", *(f"m = {m}" for m in MS)], rows)


def bias_table(biases: dict[tuple[str, int], list[float]]) -> str:
    rows = []
    for kind in KINDS:
        values = [biases[kind, d] for d in BIAS_D]
        rows.append([kind, *(f"{v[i]:.3f} ± {v[i + 1]:.3f}" for v in values for i in (0, 2))])
    header = ["rows", *(f"d = {d}, x = y = {x}" for d in BIAS_D for x in ("e_1", "(1, ..., 1)/sqrt(d)"))]
    return ("## Mean estimate over exact kernel, pos (1 is no bias), with its standard error\n\n"
            + markdown(header, rows))


def time_table(times: dict[int, dict[str, list[float]]]) -> str:
    rows = [[name, *(quartiles(times[length].get(name, [])) for length in LENGTHS)] for name in times[LENGTHS[0]]]
    return ("## Time of attention, ms: median (quartiles)\n\n"
            + markdown(["map, rows", *(f"L = {length}" for length in LENGTHS)], rows))


def quartiles(seconds: Sequence[float]) -> str:
    if not seconds:
        return ""
    low, mid, high = np.quantile(1000 * np.array(seconds), (0.25, 0.5, 0.75))
    return f"{mid:.2f} ({low:.2f} to {high:.2f})"


def style(kind: str) -> dict[str, str]:
    """Colour and dashes of a line: the sampler's, and by the number of blocks."""
    sampler, _, blocks = kind.partition(" k=")
    return {"color": palette.sampler_colour(sampler), "ls": STYLES[int(blocks)] if blocks else "-"}


def figure(found: Found, beside: dict[float, dict[str, list[float]]], times: dict[int, dict[str, list[float]]]):
    """Rows: MSE by scale of the first, of the last; then times."""
    fig, axes = new_figure(3, len(MAPS), figsize=(14, 11))
    for line, scale in zip(axes, (SCALES[1], SCALES[-1])):
        for ax, f in zip(line, MAPS):
            draw_errors(ax, found, beside, f, scale)
    for ax, f in zip(axes[2], TIMED):
        draw_times(ax, times, f)
    axes[2, -1].axis("off")
    handles = [axes[2, -1].plot([], [], lw=1.6, label=kind, **style(kind))[0] for kind in KINDS]
    axes[2, -1].legend(handles=handles, loc="center left", title="rows")
    fig.tight_layout(w_pad=4)
    return fig


def draw_errors(ax, found: Found, beside: dict[float, dict[str, list[float]]], f: str, scale: float) -> None:
    for kind in KINDS:
        ax.plot(MS, [middle(values) for values in found[scale, f, kind]], lw=1.5, **style(kind))
    ends = []
    for control in CONTROLS:
        ax.axhline(middle(beside[scale][control]), color=palette.CONTROL, lw=1.5, ls="--" if control == "zero" else "-")
        ends.append((control, MS[-1], middle(beside[scale][control]), palette.CONTROL))
    ax.set(xscale="log", yscale="log", xlim=(MS[0], MS[-1]), xlabel="m",
           title=f"{f}, scale {scale:g}: MSE of attention")
    ax.set_xticks(MS, MS)
    ax.xaxis.minorticks_off()
    label_ends(ax, ends)


def draw_times(ax, times: dict[int, dict[str, list[float]]], f: str) -> None:
    """Medians; bars are quartiles."""
    for kind in KINDS:
        low, mid, high = np.quantile([1000 * np.array(times[n][f"{f}, {kind}"]) for n in LENGTHS], (0.25, 0.5, 0.75), 1)
        ax.errorbar(LENGTHS, mid, yerr=(mid - low, high - mid), lw=1.5, elinewidth=0.8, **style(kind))
    measured = [n for n in LENGTHS if "exact" in times[n]]
    exact = [1000 * float(np.median(times[n]["exact"])) for n in measured]
    ax.plot(measured, exact, color=palette.EXACT, lw=1.5, marker="o", ms=3)
    ax.set(xscale="log", yscale="log", title=f"{f}: time of attention, m = {TIMED_M}, ms", xlabel="L")
    ax.set_xticks(LENGTHS, LENGTHS)
    ax.xaxis.minorticks_off()
    label_ends(ax, [("exact", measured[-1], exact[-1], palette.EXACT)])
