"""make sampling: sampled softmax, its cost against the number of classes, its gradient beside the full softmax's."""

from typing import Any

from crt_exp.report import palette
from crt_exp.report.evidence import Claim, Gate, check_gates, independent, judged, paired, won_by
from crt_exp.report.writing import Cells, markdown, new_figure, write_report
from crt_exp.studies import sampling as study
from crt_exp.studies.memory import in_new_process

CLASSES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
LARGEST = {64: 10_000_000, 256: 1_000_000, 1024: 1_000_000}  # classes by m: the tables of 1024 take 5 GB
PEERS_UP_TO = 1_000_000  # methods that take all classes for each query
STEP_M = 64
SPREADS = (4.0, 8.0)     # |h| |e|: what the logits of nearer and farther classes differ by
GRADIENT = {"classes": 10_000, "ms": [64, 256, 1024], "queries": 64, "repeats": 200}
SEEDS = {"small": 8, "gpu": 8, "full": 24}
DRIFT = {"classes": 10_000, "m": 64, "steps": 200}
BARS = {10_000: 3.0, 1_000_000: 20.0}  # times that a draw should be faster than the dense one, m = 64
STEP_BAR_FROM = 100_000                # classes from which a step should be faster than with the full softmax
COLOURS = {"full softmax": palette.EXACT, "AdaptiveLogSoftmaxWithLoss": "#777777", "uniform": "#AAAAAA",
           "log-uniform": "#BBBB77", "dense features": "#D55E00", "tree features": "#0072B2"}
SOURCES = ("sampling", "features", "samplers", "studies/sampling.py", "studies/speed.py")


def main(size: str) -> None:
    seeds = range(SEEDS[size])
    gradient_keys = [{"seed": s, "spread": spread, **GRADIENT} for spread in SPREADS for s in seeds]
    errors = Cells("sampling-gradients", SOURCES).fill(gradient_keys, study.gradient_errors, "gradients", workers=1)
    gates = check_gates(gradient_gates(gradient_keys, errors))
    draw_keys = [{"classes": v, "m": m, "rounds": rounds(v), "signed": m == STEP_M and v <= PEERS_UP_TO}
                 for m, most in LARGEST.items() for v in CLASSES if v <= min(most, PEERS_UP_TO)]
    step_keys = [{"classes": v, "m": STEP_M, "rounds": rounds(v), "peers": v <= PEERS_UP_TO} for v in CLASSES]
    drift_keys = [{"optimiser": name, **DRIFT} for name in study.OPTIMISERS]
    draws = Cells("sampling-draws", SOURCES).fill(draw_keys, draw_cell, "draws", workers=1)
    steps = Cells("sampling-steps", SOURCES).fill(step_keys, step_cell, "steps", workers=1)
    drifts = Cells("sampling-drift", SOURCES).fill(drift_keys, study.drift, "drift", workers=1)
    verdicts = gradient_verdicts(gradient_keys, errors)
    control = beaten(gradient_keys, errors, step_keys, steps)
    answer = f"{control}\n\n{targets(draw_keys, draws, step_keys, steps)}"
    body = "\n".join([answer, "## Time of a draw, ms\n", draw_table(draw_keys, draws), "## Time of a step, ms\n",
                      step_table(step_keys, steps), "## Gradients\n", *map(str, gates), "", *map(str, verdicts), "",
                      gradient_table(gradient_keys, errors), "## Drift of the tables\n",
                      drift_table(drift_keys, drifts)])
    rows = [{**key, "method": name, **found} for keys, cells in ((draw_keys, draws), (gradient_keys, errors))
            for key in keys for name, found in cells[key].items()]
    rows += [{**key, "method": name, "step_ms": ms, "ratio": ratio} for key in step_keys
             for name, (ms, ratio) in steps[key].items()]
    rows += [{**key, **drifts[key]} for key in drift_keys] + [verdict.row() for verdict in verdicts]
    seconds = sum(cells.seconds() for cells in (draws, steps, errors, drifts))
    path = write_report("sampling", "Sampled softmax, sublinear in the classes", body, rows,
                        figure(draw_keys, draws, step_keys, steps), FACTS, seconds)
    print(f"{answer}\nwritten: {path}, {path.with_suffix('.csv')}, {path.with_suffix('.png')}")


FACTS = (f"Synthetic classes: vectors of length about 1 in {study.GROUPS} groups, d = {study.D}, biases and targets by "
         f"Zipf's law, float32; a batch of {study.BATCH} queries, {study.NEGATIVES} negatives each. Medians over "
         "interleaved rounds, every number of classes in a process of its own. A step is forward, backward, the SGD "
         "step and the update of the tables; sampled ones have sparse gradients. Dense and tree samplers hold the same "
         "table of class features, so that neither makes features of classes in a draw. The full softmax and its "
         "gradient are formed for as many queries at once as have 2^28 pairs with the classes; above "
         f"{PEERS_UP_TO:,} classes methods that take all classes are left out. Gradients: by the queries, "
         f"{GRADIENT['classes']:,} classes, {GRADIENT['queries']} queries whose cosine with the target's vector is "
         f"about 0.7, two halves of {GRADIENT['repeats']} draws of negatives; each seed has its own head, batch and "
         "noise. The kernel of a feature law is the softmax of vectors of the mean lengths, exp(|h| |e| cos), or, "
         "flatter, exp(|h| |e| cos / 2).")


def rounds(classes: int) -> int:
    return {1_000: 25, 10_000: 15, 100_000: 7}.get(classes, 3)


def draw_cell(**key: Any) -> dict[str, dict[str, float]]:
    return in_new_process(study.draw_times, **key)


def step_cell(**key: Any) -> dict[str, tuple[float, float]]:
    return in_new_process(study.step_times, **key)


# ---- tables


def targets(draw_keys, draws, step_keys, steps) -> str:
    """The project's own bars, met or not."""
    rows = []
    for key in draw_keys:
        if key["m"] == STEP_M and key["classes"] in BARS:
            ratio, bar = 1 / draws[key]["tree"]["over_dense"], BARS[key["classes"]]
            rows.append([f"dense draw over tree draw, {key['classes']:,} classes, m = {STEP_M}", f"{bar:g}",
                         f"{ratio:.1f}", "met" if ratio >= bar else "not met"])
    for key in step_keys:
        if key["peers"] and key["classes"] >= STEP_BAR_FROM:
            ratio = 1 / steps[key]["tree features"][1]
            rows.append([f"step with the full softmax over a sampled one, {key['classes']:,} classes", "1",
                         f"{ratio:.1f}", "met" if ratio > 1 else "not met"])
    return "\n".join([markdown(["ratio", "at least", "here", ""], rows), *(crossover(m, draw_keys, draws)
                                                                          for m in LARGEST), ""])


def crossover(m: int, keys, cells) -> str:
    faster = [key["classes"] for key in keys if key["m"] == m and cells[key]["tree"]["over_dense"] < 1]
    where = f"from {min(faster):,} classes on" if faster else "at none of these numbers of classes"
    return f"- m = {m}: a draw down the tree is faster than a dense one {where}."


def draw_table(keys, cells) -> str:
    shown = lambda found, name: "" if name not in found else f"{found[name]['draw']:.1f} (+{found[name]['update']:.1f})"
    rows = [[key["m"], f"{key['classes']:,}", *(shown(cells[key], n) for n in ("dense", "tree", "signed tree")),
             f"{1 / cells[key]['tree']['over_dense']:.1f}"] for key in keys]
    return ("In brackets what an update of the classes drawn takes. The signed map is trigonometric, with as many "
            "features.\n\n" + markdown(["m", "classes", "dense", "tree", "signed tree", "dense / tree"], rows))


def step_table(keys, cells) -> str:
    names = list(dict.fromkeys(name for key in keys for name in cells[key]))
    rows = [[name, *("" if name not in cells[key] else f"{cells[key][name][0]:.1f}" for key in keys)] for name in names]
    return markdown(["method", *(f"{key['classes']:,}" for key in keys)], rows)


def of_seeds(keys, cells, spread: float, name: str, what: str) -> list[float]:
    return [cells[key][name][what] for key in keys if key["spread"] == spread]


def gradient_gates(keys, cells) -> list[Gate]:
    """Uniform negatives must cost something, and proposals from the softmax itself must show no bias."""
    found = []
    for spread in SPREADS:
        uniform = independent(of_seeds(keys, cells, spread, "uniform", "bias_sq")).low
        found.append(Gate(f"squared bias of uniform negatives, |h| |e| = {spread:g}, lower end", uniform, 1e-3))
        exact = abs(independent(of_seeds(keys, cells, spread, "exact softmax", "bias_sq")).mean)
        found.append(Gate(f"squared bias of the exact softmax's negatives, |h| |e| = {spread:g}", exact, most=1e-3))
    return found


def gradient_verdicts(keys, cells):
    """Each feature law against log-uniform negatives, at as many of them."""
    claims = []
    for spread in SPREADS:
        of = lambda name, what, spread=spread: of_seeds(keys, cells, spread, name, what)
        for name in laws(cells[keys[0]]):
            for what, word in (("bias_sq", "squared bias"), ("variance", "variance")):
                claims.append(Claim(f"{word} of the gradient below log-uniform's, {name}, |h| |e| = {spread:g}",
                                    paired(of("log-uniform", what), of(name, what)), "of the squared gradient"))
    return judged(claims)


def beaten(keys, cells, step_keys, steps) -> str:
    """Where log-uniform negatives, which look at no query, have no more bias or variance than a law of features, and
    the numbers of classes at which a step with them takes no longer."""
    mean = lambda name, what, spread: independent(of_seeds(keys, cells, spread, name, what)).mean
    names = laws(cells[keys[0]])
    places = {f"{word}, |h| |e| = {spread:g}": [name for name in names
                                                if mean("log-uniform", what, spread) <= mean(name, what, spread)]
              for spread in SPREADS for what, word in (("bias_sq", "squared bias"), ("variance", "variance"))}
    slower = lambda key: steps[key]["log-uniform"][0] <= steps[key]["tree features"][0]
    faster = [f"{key['classes']:,}" for key in step_keys if slower(key)]
    return (f"{won_by('the log-uniform law', places, len(names) * len(places))} A step with it takes less time than "
            f"with features down the tree at {' and '.join(faster) or 'no number of'} classes.")


def laws(found: dict[str, Any]) -> list[str]:
    """The laws that are made of features."""
    return [name for name in found if "m = " in name]


def gradient_table(keys, cells) -> str:
    header = ["negatives", *(f"{what}, {spread:g}" for spread in SPREADS for what in ("squared bias", "variance"))]
    rows = [[name, *(f"{independent(of_seeds(keys, cells, spread, name, what)):.4f}" for spread in SPREADS
                     for what in ("bias_sq", "variance"))] for name in cells[keys[0]]]
    return ("Over the squared length of the full softmax's gradient, with 95% intervals over "
            f"{len(keys) // len(SPREADS)} seeds; the number is |h| |e|.\n\n" + markdown(header, rows))


def drift_table(keys, cells) -> str:
    rows = [[key["optimiser"], f"{cells[key]['vectors']:.1e}", f"{cells[key]['vectors_unfollowed']:.1e}",
             f"{cells[key]['sums']:.1e}", f"{cells[key]['update_ms']:.1f}", f"{1e3 * cells[key]['rebuild_s']:.1f}"]
            for key in keys]
    header = ["optimiser", "features", "features, tables never updated", "sums", "update, ms", "rebuild, ms"]
    return (f"After {DRIFT['steps']} steps, {DRIFT['classes']:,} classes, m = {DRIFT['m']}, following the classes of "
            "each step alone: the root mean square by which the features are behind those of the vectors, over that of "
            "the features; the largest error of a sum of the tree, over the root mean square of its level. Optimisers "
            "that go on moving classes without a gradient leave the tables behind: that costs variance, no bias, and a "
            "rebuild ends it.\n\n" + markdown(header, rows))


# ---- picture


def figure(draw_keys, draws, step_keys, steps):
    fig, (left, right) = new_figure(1, 2, figsize=(11, 4))
    for m, width in zip(LARGEST, (1.0, 1.6, 2.4)):
        for name, style in (("dense", "--"), ("tree", "-")):
            points = [(key["classes"], draws[key][name]["draw"]) for key in draw_keys if key["m"] == m]
            left.plot(*zip(*points), style, color=COLOURS[f"{name} features"], lw=width, marker="o", ms=3,
                      label=f"{name}, m = {m}")
    for name in dict.fromkeys(n for key in step_keys for n in steps[key]):
        points = [(key["classes"], steps[key][name][0]) for key in step_keys if name in steps[key]]
        right.plot(*zip(*points), color=COLOURS[name], lw=1.4, marker="o", ms=3, label=name)
    left.set(xscale="log", yscale="log", xlabel="classes", title="a draw, ms")
    right.set(xscale="log", yscale="log", xlabel="classes", title="a step, ms")
    for ax in (left, right):
        ax.legend(fontsize=7)
    fig.tight_layout()
    return fig
