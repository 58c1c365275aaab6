"""The page of `fig4_left`: verdicts first, then what they rest on, and its picture."""

from collections.abc import Sequence

import numpy as np

from crt_exp.data import images
from crt_exp.report import palette
from crt_exp.report.evidence import Gate, detectable, independent
from crt_exp.report.fig4_runs import LINEAR, NAMES, NEAR_FAR, Found, Setting, ms_of
from crt_exp.report.fig4_verdicts import after, difference, error_ratio, scratch_gate, swap_loss, verdicts
from crt_exp.report.writing import label_ends, markdown, new_figure, write_report

TITLE = "CRT Figure 4, left: a ViT with linear attention, uptrained and from scratch"


def write(size: str, setting: Setting, found: Found, passed: Sequence[Gate], seconds: float) -> None:
    told = verdicts(setting, found)
    said = "\n".join([*controls_that_win(found), *map(str, told), "", power(found)])
    body = "\n".join([
        said, "", "Before any arm was trained, the exact checkpoint had to pass:", "", *map(str, passed), "",
        f"The measured error of FAVOR+ is {error_ratio(found, 'measured'):.3g} times that of FAVOR++ (m = {setting.m}, "
        "geometric mean over layers and draws), which is no gate: it would choose settings in which FAVOR++ wins.", "",
        "## Directly after the swap\n", swap_table(setting, found),
        f"## Uptrained from the exact checkpoint, m = {setting.m}\n", curve_table(found.uptrained, setting.steps),
        f"## From scratch, m = {setting.m}\n", f"{scratch_gate(setting, found)}\n", curve_table(found.scratch, ()),
        f"## Why: the layers of the exact checkpoint, m = {setting.m}\n", layer_table(found), LAYERS,
        f"\n## Images of {setting.long} pixels a side, by the same weights\n", long_table(found), long_text(setting)])
    rows = [*csv_rows(found), *(verdict.row() for verdict in told)]
    title = TITLE + ("" if size == "full" else " (small models)")
    path = write_report("fig4-left", title, body, rows, figure(setting, found), facts(size, setting, found), seconds)
    print(f"{said}\nwritten: {path}, {path.with_suffix('.csv')}, {path.with_suffix('.png')}")


# ---- text


def controls_that_win(found: Found) -> list[str]:
    """Where the mean over seeds of uniform attention's accuracy is no lower than that of a linear one."""
    told = []
    for title, curves in (("uptrained", found.uptrained), ("from scratch", found.scratch)):
        mean = {name: np.mean([*after(curves, name, "accuracy").values()] or [np.nan]) for name in NAMES}
        beaten = [palette.label(name) for name in (NEAR_FAR, *LINEAR) if mean["uniform"] >= mean[name]]
        if beaten:
            told.append("**Uniform attention, which looks at no query and no key, ends at least as accurate as "
                        f"{' and '.join(beaten)}, {title}.**\n")
    return told


def power(found: Found) -> str:
    """The differences that so many seeds would show."""
    told = []
    for title, curves in (("uptrained", found.uptrained), ("from scratch", found.scratch)):
        differences = difference(curves, "favorpp", "favorp", "accuracy")
        if len(differences) > 1:
            told.append(f"{100 * detectable(differences):.2g} points of accuracy {title} ({len(differences)} pairs)")
    shown = f"A difference would be shown with a probability of 80% from {' and '.join(told)} on. " if told else ""
    return (f"{shown}All arms of uptraining start from one checkpoint, so the intervals are over noise and order of "
            "the data, not over checkpoints.")


LAYERS = ("Errors are relative. Predicted: of one entry of the kernel matrix at a typical pair, iid projections, by "
          "the closed forms (root mean square over heads); measured: of the layer's output, which averages over keys "
          "and is bounded by the values, mean over draws of the noise. An attention whose error is no smaller than "
          "that of the uniform one tells nothing of queries and keys.\n")


def long_text(setting: Setting) -> str:
    return ("The weights were trained at the smaller size and are not trained further; position embeddings are "
            f"interpolated, and the images are enlarged to {setting.long} pixels, which changes how large things are "
            "beside a patch: compare attention within the table. Time and memory of a forward pass.\n")


def facts(size: str, setting: Setting, found: Found) -> str:
    near = ", ".join(f"{key} {size}" for key, size in setting.near)
    made = "" if setting.mae is None else f"pretrained by `task=mae {' '.join((*setting.model, *setting.mae))}`, "
    counted = ", ".join(f"{len(of):,} in {split}/" for split, of in images.load(setting.dataset).items())
    return (f"Images: {setting.dataset} ({counted}; `{' '.join(setting.images)}`), all results on its val/, "
            "on which the setting passed its gates and nothing else was chosen. The exact checkpoint: "
            f"{made}fine-tuned by `task=imagenet {' '.join(setting.fine_tuning)}`, accuracy "
            f"{found.exact['accuracy']:.3f}. Uptraining: `{' '.join(setting.uptraining)}`, {setting.steps[-1]} "
            f"steps, {setting.seeds} seeds of noise and order; from scratch: `{' '.join(setting.scratch)}`, "
            f"{setting.scratch_seeds} seeds of weights, noise and order; {setting.swaps} seeds of the noise directly "
            f"after the swap. Near-far attention, which draws none, has {near}. A seed means the same order, "
            "augmentation and Gaussian rows in all arms. Orthogonal projections, never redrawn. Intervals: 95%, "
            f"Student; p-values with Holm's correction. SIZE={size}.")


# ---- tables


def show(numbers: Sequence[float], spec: str = ".3f") -> str:
    if not len(numbers):
        return "diverged"
    return format(independent(numbers) if len(numbers) > 1 else numbers[0], spec)


def swap_table(setting: Setting, found: Found) -> str:
    """Loss and accuracy, and where the loss lies between that of exact and of uniform attention."""
    base, worst, rows = swap_loss(found, "exact"), swap_loss(found, "uniform"), []
    for name in NAMES:
        for m in ms_of(name, setting):
            of = [r for (other, here, _), r in found.swaps.items() if (other, here) == (name, m)]
            loss = np.array([r["loss"] for r in of])
            accuracy = 100 * np.array([r["accuracy"] for r in of])
            rows.append([palette.label(name), m or "", show(loss), show(accuracy, ".1f"),
                         show((loss - base) / (worst - base), ".2f")])
    return markdown(["attention", "m", "loss, nats", "accuracy, %", "of what uniform costs"], rows)


def curve_table(curves: dict, steps: Sequence[int]) -> str:
    """Losses, accuracy, and whether training is stable: how far final losses lie apart, how many runs diverged."""
    rows = []
    for name in NAMES:
        losses = [show([*after(curves, name, "loss", step).values()]) for step in (*steps[:-1], None)]
        accuracy = [100 * value for value in after(curves, name, "accuracy").values()]
        final = after(curves, name, "loss").values()
        runs = [run for (other, _), run in curves.items() if other == name]
        rows.append([palette.label(name), *losses, f"{min(final):.3f} to {max(final):.3f}" if final else "",
                     show(accuracy, ".1f"), f"{sum('diverged' in run for run in runs)} of {len(runs)}"])
    return markdown(["attention", *(f"loss after {step} steps" for step in steps[:-1]), "final loss, nats",
                     "of all seeds", "final accuracy, %", "diverged"], rows)


def layer_table(found: Found) -> str:
    seeds = [seed for name, seed in found.layers if name == LINEAR[0]]
    rows = []
    for i, layer in enumerate(found.layers[LINEAR[0], seeds[0]]):
        mean = lambda name, which, i=i: np.mean([found.layers[name, seed][i][which] for seed in seeds])
        rows.append([i, f"{np.mean(layer['S']):.1f} ({min(layer['S']):.1f} to {max(layer['S']):.1f})",
                     *(f"{mean(name, which):.3g}" for which in ("predicted", "measured") for name in LINEAR),
                     f"{mean(LINEAR[0], 'uniform'):.3g}"])
    names = [f"{which} error of {palette.label(name)}" for which in ("predicted", "measured") for name in LINEAR]
    return markdown(["layer", "mean \\|x + y\\|^2 (heads)", *names, "uniform's error"], rows)


def long_table(found: Found) -> str:
    rows = [[palette.label(name), f"{100 * r['accuracy']:.1f}", f"{r['loss']:.3f}", f"{r['ms_image']:.1f}",
             f"{r['mib']:.0f}"] for name, r in found.long.items()]
    tokens = next(iter(found.long.values()))["tokens"]
    return markdown([f"attention, {tokens} tokens", "accuracy, %", "loss, nats", "ms an image", "peak memory, MiB"],
                    rows)


def csv_rows(found: Found) -> list[dict]:
    rows = [{"what": "swap", "attention": name, "m": m or "", "seed": seed, "step": 0, "accuracy": r["accuracy"],
             "loss": r["loss"]}
            for (name, m, seed), r in found.swaps.items()]
    for what, curves in (("uptrained", found.uptrained), ("scratch", found.scratch)):
        for (name, seed), run in curves.items():
            rows += [{"what": what, "attention": name, "seed": seed, **point} for point in run.get("curve", [])]
            rows += [{"what": f"{what}, diverged", "attention": name, "seed": seed}] if "diverged" in run else []
    return rows + [{"what": "long images", "attention": name, **r} for name, r in found.long.items()]


# ---- picture


def colour(name: str) -> str:
    return palette.CONTROL if name == "uniform" else palette.colour(name)


def figure(setting: Setting, found: Found):
    fig, axes = new_figure(1, 4, figsize=(15.5, 3.7))
    draw_swap(axes[0], setting, found)
    for ax, metric in zip(axes[1:], ("loss", "accuracy")):
        start = {name: [r[metric] for r in swapped(found, name, setting.m)] for name in NAMES}
        draw_curves(ax, found.uptrained, metric, start)
    draw_curves(axes[3], found.scratch, "accuracy", {})
    axes[1].set(title=f"uptrained, m = {setting.m}: loss, nats")
    axes[2].set(title=f"uptrained, m = {setting.m}: accuracy, %")
    axes[3].set(title=f"from scratch, m = {setting.m}: accuracy, %")
    fig.tight_layout()
    return fig


def swapped(found: Found, name: str, m: int) -> list[dict]:
    return [r for (other, here, _), r in found.swaps.items() if other == name and here in (None, m)]


def draw_swap(ax, setting: Setting, found: Found) -> None:
    """Loss against m, directly after the swap; the controls know no m."""
    ends = []
    for name in NAMES:
        if name in LINEAR:
            intervals = [independent([r["loss"] for r in swapped(found, name, m)]) for m in setting.ms]
            ax.errorbar(setting.ms, [i.mean for i in intervals], yerr=[i.half for i in intervals], color=colour(name),
                        marker="o", ms=4, lw=1.4, capsize=2)
            height = intervals[-1].mean
        else:
            height = swap_loss(found, name)
            ax.plot((setting.ms[0], setting.ms[-1]), (height, height), color=colour(name), lw=1.2, ls=":")
        ends.append((palette.label(name), setting.ms[-1], height, colour(name)))
    ax.set(title="directly after the swap: loss, nats", xlabel="projections m", xscale="log")
    ax.set_xticks(setting.ms, setting.ms)
    ax.minorticks_off()
    label_ends(ax, ends)


def draw_curves(ax, curves: dict, metric: str, start: dict[str, list[float]]) -> None:
    """Mean over seeds and its interval against the step; `start`: values before the first step."""
    ends, scale = [], 100 if metric == "accuracy" else 1
    for name in NAMES:
        steps = sorted({r["step"] for (other, _), run in curves.items() if other == name for r in run.get("curve", [])})
        points = [(step, [*after(curves, name, metric, step).values()]) for step in steps]
        points = [(0, start[name]), *points] if name in start else points
        if not points:
            continue
        mean = np.array([scale * np.mean(v) for _, v in points])
        half = np.array([scale * independent(v).half if len(v) > 1 else 0.0 for _, v in points])
        at = [step for step, _ in points]
        ax.plot(at, mean, color=colour(name), lw=1.5, marker="o", ms=2.5)
        ax.fill_between(at, mean - half, mean + half, color=colour(name), alpha=0.15, lw=0)
        ends.append((palette.label(name), at[-1], mean[-1], colour(name)))
    ax.set(xlabel="step")
    label_ends(ax, ends)
