"""make hadamard: how structured projections compare, after the report of Adda and Allen (2021),
with its open question k = 3."""

import math
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from crt_exp import samplers
from crt_exp.features import PosRF
from crt_exp.mechanism import Mechanism
from crt_exp.report import palette
from crt_exp.report.writing import Cells, markdown, new_figure, write_report
from crt_exp.studies.projections import Projections

DISCRETE = ("pois", "geom", "pois_coord", "pois_plus", "geom_plus")
WITHOUT = {**dict.fromkeys(("gerf", "hyp", "smreg"), "trig, pos and oprf stand for the exponential maps"),
           **palette.APART,
           **dict.fromkeys(DISCRETE, "discrete maps need exactly Gaussian rows")}
WITHOUT_SAMPLERS = dict.fromkeys(("sobol", "halton", "stratified"), "they place points, the report compares matrices")
STYLES = {1: ":", 2: "--", 3: "-"}  # of lines, by the number of Hadamard blocks
MAPS, SAMPLERS = palette.maps(WITHOUT), palette.samplers(WITHOUT_SAMPLERS)
MS, L, D = (16, 32, 64, 128, 256, 512), 1024, 16
SAMPLES = {"small": 30, "gpu": 30, "full": 100}
LENGTHS, TIMED_M, ROUNDS = (256, 1024, 4096, 16384), 300, 7
BIAS_D = (16, 64)


def kinds(sampler: str) -> dict[str, Callable]:
    """What stands for a sampler: itself, or Hadamard matrices with 1, 2 and 3 blocks."""
    made = Mechanism.of(features="pos", sampler=sampler, m=1).sampler
    if sampler != "hadamard":
        return {sampler: made}
    return {f"hadamard k={k}": partial(made, blocks=k) for k in STYLES}


KINDS = {kind: made for sampler in SAMPLERS for kind, made in kinds(sampler).items()}


def main(size: str) -> None:
    samples = SAMPLES[size]
    sources = ("features", "samplers", "studies/projections.py", "attention/reference.py")
    keys = [{"features": f, "kind": k, "samples": samples} for f in MAPS for k in KINDS]
    cells = Cells("hadamard", sources).fill(keys, errors, "MSE")
    found = {(key["features"], key["kind"]): cells[key] for key in keys}
    time_key, bias_keys = {"times": TIMED_M}, [{"kind": k, "d": d} for k in KINDS for d in BIAS_D]
    biases = Cells("hadamard-bias", sources).fill(bias_keys, bias, "bias")
    times = Cells("hadamard-times", sources).fill([time_key], projection_times, "times", workers=1)[time_key]
    rows = [{"features": f, "sampler": k, "m": m, "mse": r["mse"], "log_mse_std": r["log_mse_std"]}
            for (f, k), records in found.items() for m, r in zip(MS, records)]
    body = "\n".join([answer(found, samples), mse_tables(found), bias_table(bias_keys, biases), time_table(times)])
    facts = (f"MSE of the attention output against exact softmax, q, k, v ~ N(0, 1), L = {L}, d = {D}, {samples} "
             "samples (the same for every sampler); tables and curves hold geometric means over samples, for the "
             f"errors of trig have heavy tails. Times: x W^T for m = {TIMED_M}, d = {D}, float32, median of {ROUNDS} "
             f"interleaved rounds, one draw each, the draw itself apart.{palette.left_out(WITHOUT | WITHOUT_SAMPLERS)}")
    path = write_report("hadamard", "Structured projections: MSE, bias and time", body, rows, figure(found, times),
                        facts, cells.seconds())
    print(f"{answer(found, samples)}\nwritten: {path}, {path.with_suffix('.csv')}, {path.with_suffix('.png')}")


def errors(features: str, kind: str, samples: int) -> list[dict]:
    mechanism = Mechanism.of(features=features, sampler=KINDS[kind], m=1)
    return list(Projections(L, D, MS, samples).records(mechanism, seed=0))


def bias(kind: str, d: int) -> list[float]:
    """Mean estimate over exact kernel and its standard error, PosRF, at x = y = e_1 and at a spread x = y
    of the same length."""
    x = torch.zeros(2, d, dtype=torch.float64)
    x[0, 0], x[1] = 1, d**-0.5
    found = samplers.measured_bias(PosRF(), KINDS[kind], x, x, draws=20_000, generator=torch.Generator().manual_seed(0))
    return [found.ratio[0].item(), found.error[0].item(), found.ratio[1].item(), found.error[1].item()]


def projection_times(times: int) -> dict[str, list[float]]:
    """Seconds of x W^T for each sampler and length, medians of interleaved rounds; the first entry is the draw."""
    g = torch.Generator().manual_seed(0)
    seconds = {k: [[] for _ in range(len(LENGTHS) + 1)] for k in KINDS}
    inputs = [torch.randn(length, D, generator=g) for length in LENGTHS]
    for _ in range(ROUNDS):
        for kind, sampler in KINDS.items():
            noise = timed(lambda s=sampler: s(times, D, g), seconds[kind][0])
            noise.project(inputs[0])  # what is made once per noise is not counted
            for x, into in zip(inputs, seconds[kind][1:]):
                timed(lambda n=noise, x=x: n.project(x), into)
    return {k: [statistics.median(s) for s in lists] for k, lists in seconds.items()}


def timed(call, into: list[float]):
    start = time.perf_counter()
    result = call()
    into.append(time.perf_counter() - start)
    return result


def answer(found, samples: int) -> str:
    """The report's open question: does k = 3 gain over k = 1? Ratios of geometric means of the MSE over m."""
    return ("Three blocks against one (geometric mean over m, 95% interval over samples; the report's open "
            "question):\n\n" + "".join(
        f"- {f}: k = 3 has {ratio(found, f, 'hadamard k=3', 'hadamard k=1', samples)} of the MSE of k = 1, and "
        f"{ratio(found, f, 'hadamard k=3', 'orthogonal', samples)} of that of orthogonal Gaussian rows (iid: "
        f"{ratio(found, f, 'iid', 'orthogonal', samples)})\n" for f in MAPS))


def ratio(found, features: str, above: str, below: str, samples: int) -> str:
    """Both samplers taken as independent, which makes the interval no narrower: they share their samples."""
    a, b = found[features, above], found[features, below]
    log = sum(x["log_mse_mean"] - y["log_mse_mean"] for x, y in zip(a, b)) / len(a)
    half = 1.96 * math.sqrt(sum(x["log_mse_std"] ** 2 + y["log_mse_std"] ** 2 for x, y in zip(a, b)) / samples) / len(a)
    return f"{math.exp(log):.2f} ({math.exp(log - half):.2f} to {math.exp(log + half):.2f})"


def mse_tables(found) -> str:
    columns = ["sampler", *(f"m = {m}" for m in MS)]
    row = lambda f, k: [k, *(f"{math.exp(r['log_mse_mean']):.2e}" for r in found[f, k])]
    return "\n".join(f"## MSE, {f}\n\n" + markdown(columns, [row(f, k) for k in KINDS]) for f in MAPS)


def bias_table(keys, cells) -> str:
    rows = []
    for kind in KINDS:
        values = [cells[k] for k in keys if k["kind"] == kind]
        rows.append([kind, *(f"{v[i]:.3f} ± {v[i + 1]:.3f}" for v in values for i in (0, 2))])
    header = ["sampler", *(f"d = {d}, x = y = {x}" for d in BIAS_D for x in ("e_1", "(1, ..., 1)/sqrt(d)"))]
    return "## Mean estimate over exact kernel, pos (1 is no bias)\n\n" + markdown(header, rows)


def time_table(times) -> str:
    return "## Time, ms\n\n" + markdown(["sampler", "draw", *(f"L = {length}" for length in LENGTHS)],
                                        [[k, *(f"{1000 * t:.2f}" for t in times[k])] for k in KINDS])


def style(kind: str) -> dict[str, str]:
    """Colour and dashes of a line: the sampler's, and by the number of blocks."""
    sampler, _, blocks = kind.partition(" k=")
    return {"color": palette.sampler_colour(sampler), "ls": STYLES[int(blocks)] if blocks else "-"}


def figure(found, times):
    fig, axes = new_figure(1, 4, figsize=(14, 3.6))
    for ax, f in zip(axes, MAPS):
        for kind in KINDS:
            log = torch.tensor([r["log_mse_mean"] for r in found[f, kind]])
            ax.plot(MS, log.exp(), label=kind, lw=1.5, **style(kind))
        ax.set(xscale="log", yscale="log", title=f"{f}: MSE of attention", xlabel="m")
        ax.set_xticks(MS, MS)
        ax.xaxis.minorticks_off()
        low, high = ax.get_ylim()
        ax.set_ylim(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high)))
    for kind in KINDS:
        axes[3].plot(LENGTHS, [1000 * t for t in times[kind][1:]], lw=1.5, label=kind, **style(kind))
    axes[3].set(xscale="log", yscale="log", title=f"time of {TIMED_M} projections, ms", xlabel="L")
    axes[3].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    fig.tight_layout()
    return fig
