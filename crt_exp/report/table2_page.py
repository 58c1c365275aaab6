"""The page of `table2`: verdicts first, then what they rest on, and its picture."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from crt_exp.data.glue import TASKS
from crt_exp.report import palette, table2_glue
from crt_exp.report.evidence import Gate, independent
from crt_exp.report.fig4_page import show
from crt_exp.report.table2_glue import MAJORITY, OVERLAP
from crt_exp.report.table2_runs import EXACT, JUDGED, Kind, scratch_arm
from crt_exp.report.table2_verdicts import (
    Found,
    above,
    answers,
    beaten,
    beaten_on_glue,
    difference,
    glue_claims,
    label,
    power,
    scores,
    steps_of,
    verdicts,
)
from crt_exp.report.writing import label_ends, markdown, new_figure, write_report
from crt_exp.studies.fidelity import Arm

TITLE = "CRT Table 2: linear attention in encoders of text"
PAPER_TASKS = ("mnli", "qqp", "qnli", "sst2", "cola", "stsb", "mrpc", "rte")
PAPER = {  # CRT Table 2, dev sets, base-sized models
    "FAVOR+": (80.26, 89.53, 87.13, 90.58, 53.17, 85.07, 83.82, 67.59),
    "ELU": (80.72, 90.05, 89.09, 91.51, 48.43, 86.68, 85.05, 68.59),
    "ReLU": (81.39, 90.11, 88.85, 91.97, 52.08, 87.64, 84.56, 67.51),
    "FAVOR++": (81.25, 90.15, 89.58, 92.00, 54.95, 85.62, 85.78, 67.87),
    "uptrained FAVOR++": (82.29, 90.43, 89.73, 92.20, 58.85, 85.90, 88.73, 67.63)}
NO_KIND = ("**No encoder can tell FAVOR+ and FAVOR++ apart: each kind failed a gate, and no other attention was put in "
           "their place.**")
COLOURS = {"relu": "#332288", "elu": "#009E73"}


def write(size: str, found: Found, asked: dict[str, Sequence[Gate]], seconds: float) -> None:
    of_glue = glue_claims(found)
    told = verdicts(found, asked, of_glue)
    said = "\n".join([beaten(found) if found.kinds else NO_KIND, "", beaten_on_glue(found), "", *map(str, told), "",
                      *(f"- power: {line}." for line in power(found))])
    parts = [said, "", "Small encoders, not the paper's BERT-base: compare rows within a table.\n",
             "## Gates\n", *(str(gate) for gates in asked.values() for gate in gates),
             *(str(gate) for _, gate in of_glue), "", stopped(found),
             *(line for kind in found.setting.kinds for line in section(found, kind)),
             "## GLUE\n", glue_text(found), glue_table(found), "The paper's values (BERT-base):\n", paper_table(found)]
    rows = [*csv_rows(found), *(verdict.row() for verdict in told)]
    path = write_report("table2", TITLE + ("" if size == "full" else " (small models)"), "\n".join(parts), rows,
                        figure(found), facts(size, found), seconds)
    print(f"{said}\nwritten: {path}, {path.with_suffix('.csv')}, {path.with_suffix('.png')}")


def stopped(found: Found) -> str:
    left = [kind.title for kind in found.setting.kinds if kind not in found.kinds]
    return (f"The encoders of {' and '.join(left)} cannot tell mechanisms apart: nothing more was computed of them.\n"
            if left else "")


def section(found: Found, kind: Kind) -> list[str]:
    trained = [record for (title, _), record in found.trained.items() if title == kind.title]
    known = "; ".join(f"{record['loss']:.3f} nats, {record['accuracy']:.0%} of the masked tokens right"
                      for record in trained)
    return [f"## Encoders of {kind.title}\n",
            f"Exact, on held-out text: {known}. By the frequency of tokens alone: {found.unigrams[kind.title]:.3f} "
            "nats.\n", *(["Loss above exact attention trained on as long, nats:\n", loss_table(found, kind)]
                          if kind in found.kinds else []),
            "Layers (relative errors of their outputs on captured queries, keys and values, "
            f"m = {found.setting.m}):\n", layer_table(found, kind)]


# ---- tables


def loss_table(found: Found, kind: Kind) -> str:
    rows = []
    for arm in kind.swapped(found.setting.ms):
        shown = []
        for step in (0, *found.setting.steps):
            values = above(found, kind, arm, step)
            shown += [show(values, "+.3f") if len(values) else "", len(values) or ""]
        rows.append([label(arm), *shown])
    steps = [word for step in (0, *found.setting.steps) for word in (f"step {step}", "pairs")]
    return markdown(["attention", *steps], rows)


def layer_table(found: Found, kind: Kind) -> str:
    looks, rows = found.looks_of(kind), []
    for i in range(len(looks[0]["S"])):
        S = [s for look in looks for s in look["S"][i]]
        errors = [float(np.mean([look["errors"][name][i] for look in looks])) for name in (*JUDGED, "uniform")]
        rows.append([i, f"{np.mean(S):.1f} ({min(S):.1f} to {max(S):.1f})", *(f"{error:.3f}" for error in errors)])
    return markdown(["layer", "mean \\|x + y\\|^2 (heads)", *(palette.label(name) for name in (*JUDGED, "uniform"))],
                    rows)


def glue_text(found: Found) -> str:
    told, glue, kind = [], found.setting.glue, found.fine_tuned
    for data in found.controls:
        exact = scores(found.tuned, EXACT, data)
        if kind and exact:
            best = table2_glue.best_control(data, found.controls[data])
            word = "above" if np.mean(exact) > best else "no better than"
            left = "" if data in found.datasets else ", so no other arm was trained"
            told.append(f"{TASKS[data].folder}: exact encoders of {kind.title} reach {np.mean(exact):.1f}, {word} "
                        f"the best control's {best:.1f}{left}.")
    known = {name: np.log(record["perplexity"]) for name, record in found.pretrained.items()}
    least = min(known.values(), default=float("nan"))
    shows = "little more than the words themselves" if least > found.scratch_unigram - 1 else "words in their context"
    told.append("Rows from scratch are smaller encoders, each pretrained with its attention from new weights (m = "
                f"{glue.scratch_m}); their loss is {least:.2f} nats at best where the frequency of tokens alone gives "
                f"{found.scratch_unigram:.2f}: they show what fine-tuning makes of {shows}.")
    told += [f"Left out, for their loss was not finite: {'; '.join(found.diverged)}."] if found.diverged else []
    return " ".join(told) + "\n"


def glue_rows(found: Found) -> list[tuple[str, dict[str, list[float]], str]]:
    """(name, task -> scores of its runs, perplexity of pretraining)."""
    rows = [(f"{name} (control)", {data: [table2_glue.score(data, found.controls[data][name],
                                                            found.controls[data]["labels"])]
                                   for data in found.controls if found.controls[data][name] is not None}, "")
            for name in (MAJORITY, OVERLAP)]
    for arm in dict.fromkeys(arm for arm, _, _ in found.tuned):
        rows.append((f"exact encoder, {label(arm)}" if arm != EXACT else "exact encoder",
                     {data: scores(found.tuned, arm, data) for data in found.controls}, ""))
    for name, record in found.pretrained.items():
        rows.append((f"from scratch: {scratch_label(found, name)}",
                     {data: scores(found.scratch, name, data) for data in found.controls},
                     f"{record['perplexity']:.1f}"))
    return rows


def scratch_label(found: Found, name: str) -> str:
    return label(scratch_arm(name, found.setting.glue.scratch_m))


def glue_table(found: Found) -> str:
    names = [f"{TASKS[data].folder} ({TASKS[data].metrics[0]})" for data in found.controls]
    rows = [[name, *(show(by_task.get(data, []), ".1f") if by_task.get(data) else "" for data in found.controls),
             perplexity] for name, by_task, perplexity in glue_rows(found)]
    return markdown(["attention", *names, "perplexity of pretraining"], rows)


def paper_table(found: Found) -> str:
    shown = [data for data in PAPER_TASKS if data in found.controls]
    rows = [[row, *(values[PAPER_TASKS.index(data)] for data in shown)] for row, values in PAPER.items()]
    return markdown(["attention", *(TASKS[data].folder for data in shown)], rows)


def csv_rows(found: Found) -> list[dict[str, Any]]:
    rows = [of_pair(*key) | {"what": "held-out loss", "step": 0, "value": loss} for key, loss in found.swaps.items()]
    for key, run in found.uptrained.items():
        rows += [of_pair(*key) | {"what": "held-out loss", "step": step, "value": loss} for step, loss in run.items()
                 if step.isdecimal()]
        rows += [of_pair(*key) | {"what": "diverged", "value": run["diverged"]}] if "diverged" in run else []
    for what, runs in (("swapped, fine-tuned", found.tuned), ("from scratch, fine-tuned", found.scratch)):
        for (arm, data, seed), run in runs.items():
            each = scratch_arm(arm, found.setting.glue.scratch_m) if isinstance(arm, str) else arm
            rows.append({"what": what, "attention": each.text, "m": each.m or "", "pair": seed, "dataset": data,
                         "value": 100 * run["score"]})
    return rows


def of_pair(title: str, arm: Arm, pair: int) -> dict[str, Any]:
    return {"kind": title, "attention": arm.text, "m": arm.m or "", "pair": pair}


# ---- text


def facts(size: str, found: Found) -> str:
    setting = found.setting
    told = "; ".join(f"{kind.title}: `{' '.join(kind.options)}`, stages " + ", ".join(
        f"`{' '.join(stage)}`" for stage in kind.stages) + f", uptrained in batches of {kind.batch}, held out: every "
        f"{kind.every}th line of the validation text, near-far: `{kind.near_far}`" for kind in setting.kinds)
    runs = {data: run for (_, data, _), run in [*found.scratch.items(), *found.tuned.items()]}
    examples = ", ".join(f"{TASKS[data].folder} {run['examples']:.0f} of {run['available']:.0f}"
                         for data, run in runs.items())
    return (f"SIZE={size}. WikiText-2 by `task=mlm`, {setting.encoders} exact encoders of each kind. {told}. "
            f"Uptraining: `{' '.join(setting.uptraining)}`, {setting.steps[-1]} steps, new optimiser. A pair is an "
            "encoder and a "
            "seed: held-out text, masks, order and Gaussian rows are the same in all its arms and at all steps; "
            f"encoders go round with the pairs, so intervals are mostly over noise. {setting.pairs} pairs directly "
            f"after the swap and of what is judged, {setting.other_pairs} of the other arms that train. Nothing was "
            "chosen on the held-out text; heads of 8 joined because those of 16 had failed their gates. GLUE by "
            f"`task=glue {' '.join(setting.glue.options)}`, dev sets, last weights, {setting.glue.seeds} seeds, m = "
            f"{setting.glue.m}; training examples: {examples}; differences: paired by seed, the variance over seeds "
            f"and that over examples (a bootstrap) added; a kind has {setting.encoders} encoders, and from scratch "
            f"there is one pretraining an attention. From scratch: `{' '.join(setting.glue.scratch)}`. Orthogonal "
            "projections, never redrawn. Intervals of tables: "
            "95%, Student; p-values with Holm's correction.")


# ---- picture


def colour(arm: Arm) -> str:
    return COLOURS.get(arm.name) or palette.colour(arm.name)


def figure(found: Found):
    """Loss above exact against the steps of uptraining, a panel for each kind; differences in points on GLUE."""
    fig, axes = new_figure(1, len(found.kinds) + 1, figsize=(6.2 * (len(found.kinds) + 1), 4.6), squeeze=False)
    for ax, kind in zip(axes[0], found.kinds):
        draw_losses(ax, found, kind)
    draw_glue(axes[0][-1], found)
    fig.tight_layout(w_pad=9)
    return fig


def draw_losses(ax, found: Found, kind: Kind) -> None:
    ends = []
    for arm in kind.swapped(found.setting.ms):
        steps = steps_of(found, kind, arm)
        if arm == EXACT or len(steps) < 2:
            continue
        of_steps = [above(found, kind, arm, step) for step in steps]
        mean = np.array([each.mean() for each in of_steps])
        half = np.array([independent(each).half if len(each) > 1 else 0.0 for each in of_steps])
        dashed = arm.m not in (None, found.setting.m)
        ax.plot(steps, mean, color=colour(arm), lw=1.4, marker="o", ms=3, ls="--" if dashed else "-")
        ax.fill_between(steps, mean - half, mean + half, color=colour(arm), alpha=0.12, lw=0)
        ends.append((label(arm), steps[-1], mean[-1], colour(arm)))
    ax.axhline(0, color=palette.EXACT, lw=1)
    ax.set(xlabel="step of uptraining", title=f"{kind.title}: loss above exact attention, nats")
    label_ends(ax, ends)


def draw_glue(ax, found: Found) -> None:
    """Points above exact attention, of each row and task, with bootstrap intervals over examples."""
    rows = []
    for data in found.datasets:
        swapped, scratch = answers(found.tuned, data), answers(found.scratch, data)
        for base, runs, name in ((EXACT, swapped, label), ("exact", scratch, lambda n: f"scratch, {n}")):
            rows += [(f"{TASKS[data].folder}: {name(arm)}", difference(found, data, own, runs[base]))
                     for arm, own in runs.items() if arm != base and base in runs]
    for place, (_, each) in enumerate(rows):
        ax.errorbar(each.mean, place, xerr=each.half, color="#444444", marker="o", ms=4, lw=1.2, capsize=2)
    ax.axvline(0, color=palette.EXACT, lw=1)
    ax.set_yticks(range(len(rows)), [name for name, _ in rows])
    ax.invert_yaxis()
    ax.set(xlabel="points above exact attention", title="GLUE, fine-tuned")
