"""make hrf-sampled: Figure 10 of Hybrid Random Features: a language model trained by sampled softmax, by sampler.

Every run is the command line's: task=ptb with 40 negatives from each law, and with the full softmax. Gates ask
first, by the runs with the exact softmax as a sampler, with the uniform one and with the full softmax, whether samplers
can make a difference in this setting; only then are the others trained.
"""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from crt_exp.report import palette
from crt_exp.report.evidence import Claim, Gate, check_gates, detectable, independent, inside, judged, won_by
from crt_exp.report.hrf_sampled_runs import (
    FEATURES,
    FIXED,
    HYBRIDS,
    NAMES,
    REFERENCES,
    SOURCES,
    Found,
    Setting,
    label,
    overrides,
    train,
)
from crt_exp.report.writing import Cells, label_ends, markdown, new_figure, write_report

TITLE = "HRF Figure 10: a language model trained by sampled softmax"
LEARNED, TELLS = 0.5, 0.02  # nats: of the full softmax's model below the unigram law; of uniform negatives above exact
NEAR = 0.02                 # nats: samplers by features nearer than this are "not very different", as the paper says
PTB = ("task.corpus=ptb", "task.sampling.tree=false", "trainer.log_every=1000")
SETTINGS = {
    # In place of 80 epochs of 200: 64 wide, one epoch, a larger rate that falls to 0, less dropout for so little.
    "small": Setting((*PTB, "task.width=64", "task.dropout=0.2", "trainer.epochs=1", "trainer.lr=5e-3",
                      "trainer.schedule=linear", "trainer.eval_every=443"), m=64, n=8),
    "gpu": Setting((*PTB, "trainer.epochs=20"), m=1024, n=16, workers=3),
    "full": Setting(PTB, m=1024, n=16, seeds=25, workers=1),
}


def main(size: str) -> None:
    """Raises GateFailed, before other samplers are trained, where this setting cannot tell them apart."""
    setting, cells = SETTINGS[size], Cells("hrf-sampled", SOURCES)
    fill = partial(cells.fill, compute=train, workers=setting.workers)
    keys = {(name, seed): {"overrides": overrides(name, seed, setting)}
            for seed in range(setting.seeds) for name in NAMES}
    first = [name for name in keys if name[0] in (*REFERENCES, "uniform")]
    fill([keys[name] for name in first], label="references")
    passed = check_gates(gates(Found({name: cells[keys[name]] for name in first})))
    fill(list(keys.values()), label="samplers")
    write(size, setting, Found({name: cells[key] for name, key in keys.items()}), passed, cells.seconds())


# ---- what is asked


def gates(found: Found) -> list[Gate]:
    """By means over seeds."""
    loss = {name: float(np.mean([*found.final(name).values()] or [math.nan])) for name in (*REFERENCES, "uniform")}
    unigram = next(math.log(run["unigram"]) for run in found.runs.values() if "unigram" in run)
    return [Gate("nats of the full softmax's model below the unigram law, test split", unigram - loss["full"], LEARNED),
            Gate("nats of uniform negatives above those from the exact softmax, test split",
                 loss["uniform"] - loss["exact"], TELLS)]


def claims(found: Found) -> list[Claim]:
    """Losses on the test split, paired by seed: the same weights at the beginning, the same text in the same order."""
    made = []
    for name in FEATURES:
        for fixed in ("uniform", "log_uniform"):
            made += claim(f"negatives by {label(name)} end with no higher loss than {label(fixed)} ones",
                          difference(found, fixed, name), "nats")
    for hybrid in HYBRIDS:
        for plain in ("favor", "favorp"):
            made += claim(f"negatives by the {label(hybrid)} and by {label(plain)} features end less than {NEAR:g} "
                          "nats apart", inside(difference(found, hybrid, plain), NEAR), "nats")
    made += claim("negatives by FAVOR++ end with a lower loss than those by FAVOR+",
                  difference(found, "favorp", "favorpp"), "nats")
    return made


def difference(found: Found, first: str, second: str) -> np.ndarray:
    """first - second, of each seed with which both ended."""
    a, b = found.final(first), found.final(second)
    return np.array([a[seed] - b[seed] for seed in a if seed in b])


def claim(text: str, differences: np.ndarray, unit: str) -> list[Claim]:
    """None where fewer than two pairs of runs ended."""
    return [Claim(text, independent(differences), unit)] if len(differences) > 1 else []


# ---- the page


def write(size: str, setting: Setting, found: Found, passed: Sequence[Gate], seconds: float) -> None:
    verdicts = judged(claims(found))
    said = "\n".join([*controls_that_win(found), *map(str, verdicts), "", power(found), "", missing()]).rstrip()
    body = "\n".join([said, "", "Before the other samplers were trained, the setting had to pass:", "",
                      *map(str, passed), "", "## Perplexity\n", table(found)])
    rows = [*csv_rows(found), *(verdict.row() for verdict in verdicts)]
    title = TITLE + {"small": " (1 epoch of a small model)", "gpu": " (20 epochs)", "full": ""}[size]
    path = write_report("hrf-sampled", title, body, rows, figure(found), facts(size, setting), seconds)
    print(f"{said}\nwritten: {path}, {path.with_suffix('.csv')}, {path.with_suffix('.png')}")


def controls_that_win(found: Found) -> list[str]:
    """The first lines: for each law that knows no query, the features with which the mean loss is no lower."""
    told = []
    for law in FIXED:
        mean = {name: np.mean([*found.final(name).values()] or [np.nan]) for name in (law, *FEATURES)}
        beaten = [label(name) for name in FEATURES if mean[law] <= mean[name]]
        told.append(won_by(f"the {label(law)} law of negatives", {"test loss": beaten}, len(FEATURES)) + "\n")
    return told


def power(found: Found) -> str:
    apart = difference(found, "uniform", "favorp")
    shown = (f"A difference would be shown with a probability of 80% from {detectable(apart):.2g} nats on "
             f"({len(apart)} pairs). " if len(apart) > 1 else "")
    return f"{shown}The paper (25 runs, 80 epochs): little difference between the samplers by random features."


def missing() -> str:
    gone = [name for name in HYBRIDS if name not in FEATURES]
    return f"Not compared, for conf/attention has no such file: {', '.join(gone)}." if gone else ""


def table(found: Found) -> str:
    rows = []
    for name in NAMES:
        of = [run for (other, _), run in found.runs.items() if other == name]
        ended = [run for run in of if "loss" in run]
        last = [math.exp(run["curve"][-1][1]) for run in ended if run["curve"]]
        apart = difference(found, name, "full")
        rows.append([label(name), show(last, ".1f"), show([run["perplexity"] for run in ended], ".1f"),
                     show(apart, "+.3f"), show([run["seconds"] for run in ended], ".0f"), f"{len(of) - len(ended)} of "
                     f"{len(of)}"])
    return markdown(["negatives from", "validation perplexity at the end", "test perplexity",
                     "test loss above the full softmax's, nats", "seconds of a run", "diverged"], rows)


def show(numbers: Sequence[float], spec: str) -> str:
    if not len(numbers):
        return ""
    return format(independent(numbers) if len(numbers) > 1 else numbers[0], spec)


def csv_rows(found: Found) -> list[dict]:
    rows = []
    for (name, seed), run in found.runs.items():
        here = {"sampler": name, "seed": seed}
        rows += [here | {"epoch": epoch, "validation_loss": loss} for epoch, loss in run.get("curve", [])]
        rows.append(here | ({"test_loss": run["loss"], "seconds": run["seconds"]} if "loss" in run
                            else {"diverged": run["diverged"]}))
    return rows


def facts(size: str, setting: Setting) -> str:
    return (f"SIZE={size}. Every run: `task=ptb {' '.join(setting.options)}`, otherwise conf/task/ptb.yaml: the "
            "paper's setting, 40 negatives of each word with replacement, without the word itself, logits corrected by "
            f"log q; features of normalised vectors, m = {setting.m} orthogonal projections (hybrids: m / {setting.n} "
            f"of each base, {setting.n} of the coefficient), tables made anew every 20 steps. Their kernel, exp(cos), "
            "lies between 1/e and e for all words: such a law knows little of the query and nothing of how frequent a "
            "word is, which the log-uniform and unigram laws know without it (the paper compares features with uniform "
            f"and exact ones alone). {setting.seeds} seeds of weights, dropout and negatives: a seed means the same "
            "first weights in all arms. Perplexity is by the full softmax; on the test split by the weights that are "
            "best on the validation split. Intervals: 95%, Student; p-values with Holm's correction.")


# ---- picture


def colour(name: str) -> str:
    if name == "full":
        return palette.EXACT
    return palette.CONTROL if name in FIXED or name == "exact" else palette.colour(name)


def figure(found: Found):
    fig, axes = new_figure(1, 1, figsize=(7.5, 4.5))
    styles, ends = dict(zip((*FIXED, "exact"), (":", "--", "-.", "-"))), []
    for name in NAMES:
        curves = [run["curve"] for (other, _), run in found.runs.items() if other == name and run.get("curve")]
        if not curves:
            continue
        epochs = [epoch for epoch, _ in curves[0]]
        mean = np.exp(np.mean([[loss for _, loss in curve] for curve in curves], 0))
        axes.plot(epochs, mean, color=colour(name), ls=styles.get(name, "-"), lw=1.4, marker="o", ms=2.5)
        ends.append((label(name), epochs[-1], mean[-1], colour(name)))
    axes.set(xlabel="epoch", ylabel="perplexity on the validation split (mean over seeds)", yscale="log")
    label_ends(axes, ends)
    return fig
