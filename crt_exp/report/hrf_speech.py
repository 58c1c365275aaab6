"""make hrf-speech: Table 2 of Hybrid Random Features, word error rates of a transducer with hybrids.

The exact models, arms and cells are those of fig3's runs: hybrids, FAVOR+ and trigonometric features with the paper's
numbers of columns are put into the exact model and tested as they are; a few are trained on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from crt_exp.mechanism import OF_MAP, Mechanism
from crt_exp.report import fig3, palette, speech_runs
from crt_exp.report.evidence import (
    Claim,
    Gate,
    Verdict,
    check_gates,
    detectable,
    independent,
    judged,
    paired,
    won_by,
)
from crt_exp.report.speech_runs import SOURCES, Arm, Setting
from crt_exp.report.speech_text import shown
from crt_exp.report.writing import Cells, markdown, new_figure, plain_ticks, write_report


def clusters(queries: int, keys: int, m: int) -> Arm:
    return Arm("hrf_cluster", m, ((OF_MAP + "queries", queries), (OF_MAP + "keys", keys)))


def angular(m: int) -> Arm:
    """With PosRF as the positive base, which makes 27 m columns: the paper's 432 are 16 of them."""
    return Arm("hrf_angular", m, ((OF_MAP + "base", "pos"), (OF_MAP + "n", 8)))


ARMS = {"HRF-C(3,3)": clusters(3, 3, 48), "HRF-C(2,3)": clusters(2, 3, 72), "HRF-C(3,2)": clusters(3, 2, 72),
        "HRF-C(2,2)": clusters(2, 2, 64), "HRF-A(16,8)": angular(16), "HRF-A(8,8)": angular(8),
        "FAVOR+ 432": Arm("favorp", 432), "FAVOR+ 256": Arm("favorp", 256), "Trig 432": Arm("favor", 216),
        "Trig 256": Arm("favor", 128), "FAVOR++ 256": Arm("favorpp", 256)}
CONTROLS = {name: Arm(name) for name in ("exact", "uniform")}
TRAINED = ("HRF-C(2,2)", "HRF-A(8,8)", "FAVOR+ 256", "Trig 256")   # also uptrained, with the controls
LARGE, SMALL = ("FAVOR+ 432", "Trig 432"), ("FAVOR+ 256", "Trig 256")
PAIRS = [*(("HRF-C(3,3)", other) for other in ("HRF-A(16,8)", *LARGE)),   # (better, worse), as the paper has them
         *(("HRF-C(2,2)", other) for other in ("HRF-A(8,8)", *SMALL)),
         *(("HRF-A(16,8)", other) for other in LARGE), *(("HRF-A(8,8)", other) for other in SMALL)]
SIZES = {size: replace(setting, arms=(), plain=(), ms=(), pairs=(), others=(), speaker=None, swaps=8, seeds=3)
         for size, setting in fig3.SETTINGS.items()}
PAPER = ("The paper (17 layers, LibriSpeech 960 h) has clustered hybrids best and all hybrids before FAVOR+ and "
         "trigonometric features; its numbers are not compared here.")
PHASES = {"swap": "directly after the swap", "uptrained": "after the swap and training"}


@dataclass(frozen=True)
class Found:
    """The values of the cells: exact: the exact model's record; looked: arm -> errors of its attention; after:
    (arm, seed) -> split -> metrics; trained: (arm, seed) -> record."""

    setting: Setting
    exact: dict[str, Any]
    looked: Mapping[str, dict[str, list]]
    after: Mapping[tuple[str, int], dict[str, dict[str, float]]]
    trained: Mapping[tuple[str, int], dict[str, Any]]

    def draws(self, phase: str, name: str, metric: str) -> list[float]:
        """On the test split, a number a seed; WER in percent."""
        scale = 100 if metric == "wer" else 1
        if phase == "swap":
            return [scale * each["test"][metric] for (other, _), each in self.after.items() if other == name]
        return [scale * each[metric] for (other, _), each in self.trained.items() if other == name]


def main(size: str) -> None:
    report(SIZES[size], size)


def report(setting: Setting, size: str) -> None:
    """Raises GateFailed, before arms are tested, where the setting cannot tell them apart."""
    cells = Cells("fig3", SOURCES)   # of all reports on speech: what one has computed the others take
    keys = keys_of(setting)
    fill = lambda part, compute, label: cells.fill(list(keys[part].values()), compute, label, setting.workers)
    fill("exact", speech_runs.train, "exact model")
    fill("controls", speech_runs.after_swap, "controls after the swap")
    fill("looked", speech_runs.diagnosis, "errors by layer")
    of = {part: {name: cells[key] for name, key in each.items()} for part, each in keys.items() if part in
          ("exact", "controls", "looked")}
    passed = check_gates(gates(of["controls"], of["looked"]))
    fill("after", speech_runs.after_swap, "after the swap")
    fill("trained", speech_runs.train, "arms")
    values = {part: {name: cells[key] for name, key in each.items()} for part, each in keys.items()}
    found = Found(setting, values["exact"]["exact"], values["looked"], values["controls"] | values["after"],
                  values["trained"])
    write(size, found, passed, cells.seconds([key for each in keys.values() for key in each.values()]))


def keys_of(setting: Setting) -> dict[str, dict[Any, dict[str, Any]]]:
    """Of all cells, by what they hold; those of arms by (name, seed)."""
    swaps = lambda arms: {(name, seed): key for name, arm in arms.items()
                          for (_, seed), key in speech_runs.swapping(setting, [arm]).items()}
    named = {arm: name for name, arm in ARMS.items()}
    looked = {named[arm]: key for arm, key in speech_runs.looking(setting, ARMS.values()).items()}
    training = [*CONTROLS.items(), *((name, ARMS[name]) for name in TRAINED)]
    trained = {(name, seed): speech_runs.uptraining(setting, arm, seed)
               for seed in range(setting.seeds) for name, arm in training}
    return {"exact": {"exact": speech_runs.checkpoint(setting)}, "controls": swaps(CONTROLS), "looked": looked,
            "after": swaps(ARMS), "trained": trained}


# ---- gates and verdicts


def gates(controls: Mapping[tuple[str, int], dict], looked: Mapping[str, dict[str, list]]) -> list[Gate]:
    """On validation utterances of the exact model."""
    cost = controls["uniform", 0]["validation"]["loss"] - controls["exact", 0]["validation"]["loss"]
    errors = [np.mean(each["measured"]) for each in looked.values()]
    return [Gate("uniform attention in place of exact attention costs nats an utterance", cost, least=0.5),
            Gate("the largest error of an arm's attention over the smallest, mean over layers",
                 float(max(errors) / min(errors)), least=1.2)]


def claims(found: Found) -> list[Claim]:
    made = []
    for phase, what in PHASES.items():
        metric, unit = ("loss", "nats an utterance") if phase == "swap" else ("wer", "points of WER")
        for better, worse in PAIRS:
            first, second = (found.draws(phase, name, metric) for name in (worse, better))
            if first and second:
                made.append(Claim(f"{better} beats {worse} {what}", paired(first, second), unit))
    return made


def controls_that_win(found: Found) -> str:
    """Arms whose word error rate is above that of uniform attention."""
    beaten, of = {}, 0
    for phase, what in PHASES.items():
        mean = {name: np.mean(wer) for name in ("uniform", *ARMS) if (wer := found.draws(phase, name, "wer"))}
        control = mean.pop("uniform")
        beaten[what] = [name for name in mean if mean[name] > control]
        of += len(mean)
    return won_by("uniform attention, by the word error rate", beaten, of)


def resolution(found: Found) -> str:
    better, worse = PAIRS[-2]
    told = []
    for (phase, what), (metric, unit) in zip(PHASES.items(), (("loss", "nats"), ("wer", "points"))):
        pair = [found.draws(phase, name, metric) for name in (worse, better)]
        told += [f"{detectable(np.subtract(*pair)):.2g} {unit} {what}"] if all(pair) else []
    return (f"A difference of {better} and {worse} that these draws show with a probability of 80%, alone: "
            f"{'; '.join(told)}. All are of one exact model.")


# ---- the page


def write(size: str, found: Found, passed: Sequence[Gate], seconds: float) -> None:
    verdicts = judged(claims(found))
    said = "\n".join([controls_that_win(found), "", *map(str, verdicts), "", resolution(found)])
    exact = (f"The exact model: WER {found.exact['wer']:.2%}, {found.exact['loss']:.2f} nats an utterance, after "
             f"{found.exact['steps']} steps.")
    parts = [said, "", PAPER, "", "## Word error rates\n", table(found), exact, "", "## Gates\n", *map(str, passed)]
    path = write_report("hrf-speech", "HRF Table 2: speech recognition with hybrids", "\n".join(parts),
                        rows(found, verdicts), figure(found), facts(size, found), seconds)
    print(f"{said}\nwritten: {path}, {path.with_suffix('.csv')}, {path.with_suffix('.png')}")


COLUMNS = (("swap", "loss", 2), ("swap", "wer", 1), ("uptrained", "loss", 2), ("uptrained", "wer", 1))


def table(found: Found) -> str:
    lines = []
    for name, arm in (CONTROLS | ARMS).items():
        error = found.looked.get(name)
        size = ["", "", ""] if error is None else [arm.m, columns(arm), f"{np.mean(error['measured']):.2f}"]
        values = [shown(found.draws(phase, name, metric), digits) for phase, metric, digits in COLUMNS]
        lines.append([name, *size, *values])
    heads = [f"{PHASES[phase]}: {'WER, %' if metric == 'wer' else 'nats'}" for phase, metric, _ in COLUMNS]
    return markdown(["attention", "m", "columns", "relative error of a layer's output", *heads], lines)


def columns(arm: Arm) -> int:
    return Mechanism.of(arm.attention, m=arm.m, **dict(arm.options)).map().rank(arm.m)


def rows(found: Found, verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    made = [{"phase": phase, "arm": name, "metric": metric, "mean": float(np.mean(values)), "n": len(values)}
            for phase, metric, _ in COLUMNS for name in CONTROLS | ARMS if (values := found.draws(phase, name, metric))]
    return [*made, *(verdict.row() for verdict in verdicts)]


def facts(size: str, found: Found) -> str:
    setting = found.setting
    return (f"SIZE={size}. WER and losses of the test split, mean and 95% Student interval over {setting.swaps} noises "
            f"after the swap and {setting.seeds} runs trained on (order of the data, masks, noise); the exact model is "
            "one, made as that of make fig3. Columns as in the paper, which does not say how it counts them: clustered "
            "hybrids have I J m, angular ones (m, n) = (16, 8) and (8, 8) 3 m (n + 1), whose positive base is PosRF; "
            f"trigonometric features two for a projection. Clusters: fitted to {speech_runs.CALIBRATED} batches of "
            "training where nothing is trained, else in the first 10 steps, then kept; M real. Verdicts: differences "
            f"paired by seed, p by Holm over all. `task=librispeech {' '.join(setting.data)}`; exact: "
            f"`{' '.join(setting.exact)}`; uptrained: `{' '.join(setting.uptrained)}`. Orthogonal projections, never "
            "redrawn.")


def figure(found: Found):
    """Losses after the swap and after training, a row for each arm; controls as lines."""
    fig, axes = new_figure(1, len(PHASES), figsize=(12, 4.2), sharey=True)
    for ax, (phase, what) in zip(axes, PHASES.items()):
        for place, (name, arm) in enumerate(ARMS.items()):
            if values := found.draws(phase, name, "loss"):
                half = independent(values).half if len(values) > 1 else 0
                ax.errorbar(np.mean(values), place, xerr=half, marker="o", ms=5, capsize=2,
                            color=palette.colour(arm.attention))
        for name in CONTROLS:
            at = np.mean(found.draws(phase, name, "loss"))
            ax.axvline(at, color=palette.EXACT if name == "exact" else palette.CONTROL, ls=":", lw=1.2)
            ax.text(at, -0.8, name, ha="center", va="bottom", fontsize=8,
                    color=palette.EXACT if name == "exact" else palette.CONTROL)
        ax.set(xscale="log", xlabel=f"nats an utterance, {what}")
        plain_ticks(ax.xaxis)
    axes[0].set_yticks(range(len(ARMS)), list(ARMS))
    axes[0].set_ylim(len(ARMS) - 0.5, -0.9)
    fig.tight_layout()
    return fig
