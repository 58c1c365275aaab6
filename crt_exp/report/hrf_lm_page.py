"""The page of `hrf_lm`: verdicts first, then the distances of every arm, and its picture."""

import math
from collections.abc import Sequence

import numpy as np

from crt_exp.report import palette
from crt_exp.report.evidence import Gate, Interval, detectable, independent, judged
from crt_exp.report.hrf_lm_runs import COEFFICIENTS, CONTROLS, HYBRIDS, Found
from crt_exp.report.hrf_lm_verdicts import METRICS, best, claims, label, logs, pairs
from crt_exp.report.writing import label_ends, markdown, new_figure, write_report

TITLE = "HRF Figures 3 and 8, Tables 4 and 5: a language model's softmax by random features"
SECONDS, MIB = 60, 1024  # a draw on all words is to take at most these
PANELS = ("w1_index", "ks_index", "ks_values", "negative")


def write(size: str, found: Found, passed: Sequence[Gate], seconds: float) -> None:
    verdicts = judged(claims(found))
    said = "\n".join([*controls_that_win(found), *map(str, verdicts), *reached(found), "", power(found), "",
                      missing(found)]).rstrip()
    parts = [said, "", "Before arms were drawn, the models had to pass:", "", *map(str, passed), "",
             "## The language models\n", model_table(found)]
    for model in found.setting.models:
        parts += [f"## {model.title}\n", distance_table(found, model.title), DISTANCES]
    parts += ["## All words of the test split\n", whole_table(found)]
    rows = [*csv_rows(found), *(verdict.row() for verdict in verdicts)]
    path = write_report("hrf-lm", TITLE, "\n".join(parts), rows, figure(found), facts(size, found), seconds)
    print(f"{said}\nwritten: {path}, {path.with_suffix('.csv')}, {path.with_suffix('.png')}")


# ---- text

DISTANCES = ("Means over queries, with 95% intervals over draws of the noise. W1 over classes: sum over classes of the "
             "difference of the two distribution functions over class numbers, from the most frequent word down; over "
             "values: of the two samples of V probabilities. Negative: share of estimates below 0, which were set to 0 "
             "and the rest divided by its sum. No law: share of the queries with no estimate above 0.\n")


def controls_that_win(found: Found) -> list[str]:
    """Where a law that knows no query is at least as near in KS over classes as an arm with the most projections."""
    m, told = max(found.setting.ms), []
    for title in titles(found):
        of = {name: interval(found, title, name, m, "ks_index").mean for name in found.setting.arms}
        for law in CONTROLS:
            beaten = [label(name) for name, value in of.items()
                      if value >= found.controls[title, law].ks_index]
            if beaten:
                told.append(f"**{title}: the {label(law)}, which knows no query, is at least as near to the exact one "
                            f"as {', '.join(beaten)} with m = {m} (KS over classes).**\n")
    return told


def reached(found: Found) -> list[str]:
    """Perplexities that were asked for."""
    return [f"- **{'met' if best(found.models[model.title]) <= model.most else 'not met'}**: {model.title}: perplexity "
            f"on the validation split at most {model.most:g}: {best(found.models[model.title]):.1f}, in "
            f"{found.models[model.title]['seconds'] / 60:.0f} minutes"
            for model in found.setting.models if model.most < math.inf]


def power(found: Found) -> str:
    told = []
    for better, worse in pairs(found.setting.arms)[:1]:
        for title in titles(found):
            apart = logs(found, title, worse, "ks_index") - logs(found, title, better, "ks_index")
            told.append(f"{detectable(apart):.2g} ({title})")
    return ("A difference of the logarithms of KS over classes would be shown with a probability of 80% from "
            f"{', '.join(told)} on, with {found.setting.draws} draws. All draws are of one language model each: the "
            "intervals are over the noise, not over models.") if told else ""


def missing(found: Found) -> str:
    gone = [name for name in HYBRIDS if name not in found.setting.arms]
    return f"Not compared, for conf/attention has no such file: {', '.join(gone)}." if gone else ""


def facts(size: str, found: Found) -> str:
    models = "; ".join(f"{model.title}: `{' '.join(model.overrides)}`, every {model.every}. word of the test split"
                       if model.every > 1 else f"{model.title}: `{' '.join(model.overrides)}`, all test words"
                       for model in found.setting.models)
    return (f"SIZE={size}. {models}. Otherwise conf/task/ptb.yaml: the paper's setting. Queries: outputs of the model; "
            "keys: embeddings of all words; both over the square root of the temperature. Orthogonal projections, "
            f"{found.setting.draws} draws; a seed's Gaussian rows are the same for all arms without parts. Hybrids: "
            f"{COEFFICIENTS} features of the coefficient, m / {COEFFICIENTS} projections of each base. Verdicts: "
            "logarithms of the distances, mean over m, paired by seed; p by Holm over all. The paper's own numbers are "
            "not compared here; it finds hybrids best.")


# ---- tables


def titles(found: Found) -> list[str]:
    return [model.title for model in found.setting.models]


def interval(found: Found, title: str, name: str, m: int, metric: str) -> Interval:
    return independent([getattr(found.arms[title, name, m, seed], metric) for seed in range(found.setting.draws)])


def model_table(found: Found) -> str:
    rows = [[title, f"{best(said):.1f}", f"{said['test']:.1f}", f"{said['unigram']:.0f}", f"{look['x']**0.5:.2f}",
             f"{look['y']**0.5:.2f}", f"{look['S']:.2f}", f"{said['seconds'] / 60:.0f}"]
            for title in titles(found) for said, look in [(found.models[title], found.looks[title])]]
    return markdown(["model", "validation perplexity", "test", "unigram, test", "root mean \\|x\\|^2",
                     "root mean \\|y\\|^2", "mean \\|x + y\\|^2", "minutes of training"], rows)


def distance_table(found: Found, title: str) -> str:
    rows = []
    for law in CONTROLS:
        of = found.controls[title, law]
        rows.append([label(law), "", *(f"{getattr(of, metric):.3g}" for metric in METRICS), "0", "0", ""])
    for name in found.setting.arms:
        for m in found.setting.ms:
            shown = [f"{interval(found, title, name, m, metric):.3g}" for metric in METRICS]
            negative, undefined = (interval(found, title, name, m, key).mean for key in ("negative", "undefined"))
            relative = interval(found, title, name, m, "ks_index").mean / found.controls[title, "uniform"].ks_index
            rows.append([label(name), m, *shown, f"{negative:.3f}", f"{undefined:.2g}", f"{relative:.2f}"])
    return markdown(["", "m", *METRICS.values(), "negative", "no law", "KS over the uniform law's"], rows)


def whole_table(found: Found) -> str:
    rows = [[label(name), m, r["words"], f"{r['seconds']:.1f}", f"{r['mib']:.0f}",
             "met" if r["seconds"] <= SECONDS and r["mib"] <= MIB else "not met"]
            for (name, m), r in found.whole.items()]
    cores = next(iter(found.whole.values()))["cores"] if rows else 0
    return markdown([f"one draw on {cores} cores", "m", "words", "seconds", "MiB at the peak beyond the inputs",
                     f"at most {SECONDS} s and {MIB} MiB"], rows)


def csv_rows(found: Found) -> list[dict]:
    rows = [{"model": title, "arm": law, **of._asdict()} for (title, law), of in found.controls.items()]
    return rows + [{"model": title, "arm": name, "m": m, "seed": seed, **of._asdict()}
                   for (title, name, m, seed), of in found.arms.items()]


# ---- picture


def colour(name: str) -> str:
    return palette.CONTROL if name in CONTROLS else palette.colour(name)


def figure(found: Found):
    fig, axes = new_figure(len(titles(found)), len(PANELS), figsize=(15.5, 3.4 * len(titles(found))), squeeze=False)
    for line, title in zip(axes, titles(found)):
        for ax, metric in zip(line, PANELS):
            draw(ax, found, title, metric)
    fig.tight_layout()
    return fig


def draw(ax, found: Found, title: str, metric: str) -> None:
    ms, ends = found.setting.ms, []
    for name in found.setting.arms:
        of = [interval(found, title, name, m, metric) for m in ms]
        mean, half = (np.array([getattr(i, key) for i in of]) for key in ("mean", "half"))
        if metric == "negative" and not mean.any():
            continue
        ax.errorbar(ms, mean, yerr=half, color=colour(name), marker="o", ms=4, lw=1.4, capsize=2)
        ends.append((label(name), ms[-1], mean[-1], colour(name)))
    for law in CONTROLS if metric != "negative" else ():
        height = getattr(found.controls[title, law], metric)
        ax.plot((ms[0], ms[-1]), (height, height), color=colour(law), lw=1.2, ls=":")
        ends.append((label(law), ms[-1], height, colour(law)))
    ax.set(title=f"{title}\n{METRICS.get(metric, 'share of negative estimates')}", xlabel="projections m", xscale="log")
    ax.set_xticks(ms, ms)
    ax.minorticks_off()
    label_ends(ax, ends)
