"""The page of `fidelity`: verdicts first, then what they rest on, and its picture."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from crt_exp.report import palette
from crt_exp.report.evidence import Gate, detectable, independent, judged
from crt_exp.report.fidelity_runs import BERT, DEFAULT, EVERY, WINDOW, Found
from crt_exp.report.fidelity_verdicts import M, beaten_by_control, claims, differs, gap, label
from crt_exp.report.writing import label_ends, markdown, new_figure, write_report
from crt_exp.studies.fidelity import Arm

TITLE = "Attention swapped without training: how true language models stay"


def write(size: str, found: Found, passed: Sequence[Gate], seconds: float) -> None:
    verdicts = judged(claims(found))
    said = "\n".join([*beaten_by_control(found), *map(str, verdicts), "", *map(str, passed), "", power(found)])
    parts = [said, "", *(line for title in found.trained for line in section(found, title)),
             "## After some training\n", *(differs(found, title) + "\n" for title in found.setting.uptrained),
             uptrained_table(found), "## Against the length\n", length_table(found), cost_table(found)]
    rows = [*csv_rows(found), *(verdict.row() for verdict in verdicts)]
    title = TITLE + ("" if size == "full" else " (small models)")
    path = write_report("fidelity", title, "\n".join(parts), rows, figure(found), facts(size, found), seconds)
    print(f"{said}\nwritten: {path}, {path.with_suffix('.csv')}, {path.with_suffix('.png')}")


def section(found: Found, title: str) -> list[str]:
    losses = found.looks[title]["losses"]
    return [f"## {title} model, directly after the swap\n",
            f"Exact attention: {independent(losses):.3f} nats on {len(losses)} texts of {found.setting.length} tokens "
            f"(perplexity {np.exp(np.mean(losses)):.1f}).\n", swap_table(found, title),
            "Its layers:\n", layer_table(found, title)]


# ---- text


def power(found: Found) -> str:
    """What the texts could show of FAVOR++ beside uniform attention, and of near-far attention beside exact."""
    told = []
    for title in found.trained:
        for arm in (Arm(DEFAULT, None), Arm("favorpp", M)):
            values = found.above(title, *arm)
            if values is not None:
                told.append(f"{title}, {label(arm)} {detectable(values):.2g}")
    return (f"Differences from exact attention in nats that {found.setting.texts} texts would show, each as the only "
            f"claim, with a probability of 80%: {'; '.join(told)}. Intervals are over texts, each text's mean over "
            f"{found.setting.draws} draws where noise is drawn: they hold for one trained model of each kind.")


def facts(size: str, found: Found) -> str:
    setting = found.setting
    told = "; ".join(f"{model.title}: `{' '.join(model.options)}`, stages " + ", ".join(
        f"`{' '.join(stage)}`" for stage in model.stages) for model in setting.models)
    missing = [text for text in setting.attentions if text not in {arm.text for arm in setting.arms}]
    left = f" Not in this installation: {', '.join(missing)}." if missing else ""
    return (f"SIZE={size}. WikiText-2. {told}. Texts: {setting.texts} pieces of {setting.length} tokens of the test "
            f"split, spread over it; attention that keeps statistics is fitted to {setting.calibration_texts} pieces "
            f"of the training split. m = {', '.join(map(str, setting.ms))}. Uptraining: "
            f"`{' '.join(setting.uptraining)}`, m = {setting.m}, {setting.seeds} seeds of noise, order and "
            f"masks, the same for all attentions; loss on every {EVERY}th line of the validation split. Matched heads: "
            "q, k and v drawn from normal laws with the moments of the BERT model's. Time: attention of 8 heads of 64, "
            f"forward, median of {setting.rounds} rounds in turn; memory: a process for each. Intervals: 95%, Student; "
            f"p-values with Holm's correction.{left}")


# ---- tables


def swap_table(found: Found, title: str) -> str:
    rows = [[label(arm), found.draws(arm), of_texts(found, title, arm, "above", "+.4f"),
             of_texts(found, title, arm, "hidden_error", ".3f"), of_texts(found, title, arm, "attention_error", ".3f"),
             of_texts(found, title, arm, "cosine", ".4f")] for arm in found.setting.arms]
    return markdown(["attention", "draws", "loss above exact, nats", "error of the last hidden states",
                     "error of attention, mean over layers", "cosine of the pooled states"], rows)


def of_texts(found: Found, title: str, arm: Arm, key: str, spec: str) -> str:
    return format(independent(found.of_texts(title, arm, key)), spec)


def layer_table(found: Found, title: str) -> str:
    """|x + y|^2 of each layer, and its errors for the attentions of the claims."""
    shown = [arm for arm in (Arm("uniform", None), Arm(WINDOW, None), Arm("favorpp", M), Arm(DEFAULT, None))
             if (title, arm, 0) in found.swaps]
    rows = []
    for layer in found.looks[title]["layers"]:
        i, S = layer["layer"], layer["mean_sq_sum"]
        errors = [of_layer(found, title, arm, key, i) for key in ("attention", "hidden") for arm in shown]
        rows.append([i, f"{np.mean(S):.1f} ({min(S):.1f} to {max(S):.1f})", *(f"{error:.3f}" for error in errors)])
    columns = [f"{label(arm)}: {what}" for what in ("attention", "hidden states") for arm in shown]
    return markdown(["layer", "mean \\|x + y\\|^2 (heads)", *columns], rows)


def of_layer(found: Found, title: str, arm: Arm, key: str, i: int) -> float:
    return float(np.mean([found.swaps[title, arm, draw][f"{key}_error_layers"][i] for draw in range(found.draws(arm))]))


def uptrained_table(found: Found) -> str:
    setting, rows = found.setting, []
    for title in setting.uptrained:
        steps = setting.steps(setting.model(title))
        for arm in setting.uptrained_arms():
            losses = [f"{independent(of_step(found, title, arm, step)):.4f}" for step in (0, *steps)]
            gaps = "" if arm.text == "exact" else f"{independent(gap(found, title, arm, steps[-1])):+.4f}"
            rows.append([f"{title}: {label(arm)}", *losses, gaps])
    shares = [f"loss after {share:.0%} of the steps" for share in setting.shares]
    return markdown(["attention", "loss directly after the swap", *shares, "above exact, in the end"], rows)


def of_step(found: Found, title: str, arm: Arm, step: int) -> list[float]:
    return [found.uptrained[title, arm, seed][str(step)] for seed in range(found.setting.seeds)]


def length_table(found: Found) -> str:
    """Errors with cells as the root of the length; other attention as it is everywhere."""
    rows = []
    for length in found.setting.lengths:
        for arm in found.setting.arms_at(length):
            inside = length <= found.setting.length
            rows.append([length, label(arm), f"{np.mean(matched_errors(found, length, arm)):.3f}",
                         f"{np.mean(hidden_errors(found, length, arm)):.3f}" if inside else ""])
    return ("Relative error of attention for heads matched to those of the BERT model, and of the last hidden states "
            f"of the causal model, which has positions for {found.setting.length} tokens:\n\n"
            + markdown(["tokens", "attention", "matched heads", "causal model"], rows))


def matched_errors(found: Found, length: int, arm: Arm) -> list[float]:
    return [float(np.mean(found.matched[length, arm, draw])) for draw in range(found.setting.draws)]


def hidden_errors(found: Found, length: int, arm: Arm) -> list[float]:
    draws = range(found.draws(arm))
    return [float(np.mean(found.by_length[length, arm, draw]["hidden_error_texts"])) for draw in draws]


def cost_table(found: Found) -> str:
    rows = []
    for length, cost in found.costs.items():
        for name, times in cost["ms"].items():
            spread = f"{np.median(times):.1f} ({min(times):.1f} to {max(times):.1f})"
            rows.append([length, name, spread, f"{cost['mib'][name]:.0f}"])
    return "\n" + markdown(["tokens", "attention", "ms, median (range)", "MiB at the peak"], rows)


def csv_rows(found: Found) -> list[dict[str, Any]]:
    rows = []
    for (title, arm, draw), run in found.swaps.items():
        head = {"what": "swap", "model": title, "attention": arm.text, "m": arm.m or "", "draw": draw}
        rows += [head | {"text": i, **{key: run[f"{key}_texts"][i] for key in
                 ("above", "hidden_error", "attention_error", "cosine")}} for i in range(len(run["above_texts"]))]
    for (title, arm, seed), losses in found.uptrained.items():
        rows += [{"what": "uptrained", "model": title, "attention": arm.text, "m": arm.m or "", "draw": seed,
                  "step": step, "loss": loss} for step, loss in losses.items()]
    for (length, arm, draw), errors in found.matched.items():
        rows += [{"what": "matched heads", "model": BERT, "attention": arm.text, "m": arm.m or "", "draw": draw,
                  "length": length, "layer": i, "attention_error": error} for i, error in enumerate(errors)]
    for length, cost in found.costs.items():
        rows += [{"what": "cost", "attention": name, "length": length, "ms": float(np.median(times)),
                  "mib": cost["mib"][name]} for name, times in cost["ms"].items()]
    return rows


# ---- picture


def colour(arm: Arm) -> str:
    return palette.colour(arm.name)


def figure(found: Found):
    """Loss above exact of every attention; uptraining; error, time and memory against the length."""
    titles = list(found.trained)
    fig, axes = new_figure(2, 3, figsize=(17, 9))
    for ax, title in zip(axes[0], titles):
        draw_swaps(ax, found, title)
    draw_uptraining(axes[0][2], found, found.setting.uptrained[0])
    draw_lengths(axes[1][0], found)
    draw_costs(axes[1][1], found, "ms", "attention, forward: milliseconds")
    draw_costs(axes[1][2], found, "mib", "attention, forward: MiB at the peak")
    fig.tight_layout()
    return fig


def draw_swaps(ax, found: Found, title: str) -> None:
    arms = [arm for arm in found.setting.arms if arm.text != "exact"]
    for row, arm in enumerate(arms):
        above = independent(found.above(title, *arm))
        ax.errorbar(above.mean, row, xerr=above.half, color=colour(arm), marker="o", ms=5, lw=1.2, capsize=2)
    ax.axvline(0, color=palette.EXACT, lw=1)
    ax.set_yticks(range(len(arms)), [label(arm) for arm in arms])
    ax.invert_yaxis()
    ax.set_xscale("symlog", linthresh=0.01)
    ax.set_title(f"{title}: loss above exact directly after the swap, nats")


def draw_uptraining(ax, found: Found, title: str) -> None:
    """Means over seeds, with intervals."""
    setting, ends = found.setting, []
    steps = [0, *setting.steps(setting.model(title))]
    for arm in setting.uptrained_arms():
        losses = [independent(of_step(found, title, arm, step)) for step in steps]
        mean, half = (np.array([getattr(each, part) for each in losses]) for part in ("mean", "half"))
        ax.plot(steps, mean, color=colour(arm), lw=1.4, marker="o", ms=3)
        ax.fill_between(steps, mean - half, mean + half, color=colour(arm), alpha=0.12, lw=0)
        ends.append((label(arm), steps[-1], mean[-1], colour(arm)))
    ax.set(xlabel="step", title=f"{title}: loss on validation text, trained on, nats")
    label_ends(ax, ends)


def draw_lengths(ax, found: Found) -> None:
    setting, ends = found.setting, []
    for arms in zip(*(setting.arms_at(length) for length in setting.lengths)):
        errors = [np.mean(matched_errors(found, length, arm)) for length, arm in zip(setting.lengths, arms)]
        ax.plot(setting.lengths, errors, color=colour(arms[0]), marker="o", ms=3)
        ends.append((arms[0].name, setting.lengths[-1], errors[-1], colour(arms[0])))
    ax.set(xscale="log", yscale="log", xlabel="tokens", title="relative error of attention, matched heads")
    at_lengths(ax, setting.lengths)
    label_ends(ax, ends)


def draw_costs(ax, found: Found, key: str, title: str) -> None:
    lengths, ends = list(found.costs), []
    first = list(found.costs[lengths[0]][key])
    for place, name in enumerate(first):  # cells go with the length, and so do names
        values = [float(np.median(list(found.costs[length][key].values())[place])) for length in lengths]
        arm = Arm(name.partition(",")[0], None)
        ax.plot(lengths, values, color=colour(arm), marker="o", ms=3)
        ends.append((arm.name, lengths[-1], values[-1], colour(arm)))
    ax.set(xscale="log", yscale="log" if key == "ms" else "linear", xlabel="tokens", title=title)
    at_lengths(ax, lengths)
    label_ends(ax, ends)


def at_lengths(ax, lengths: Sequence[int]) -> None:
    ax.set_xticks(lengths, [str(length) for length in lengths])
    ax.set_xticks([], minor=True)
