"""What `fidelity` asks of its models before it swaps more than the control, and what it concludes."""

from collections.abc import Sequence

import numpy as np

from crt_exp.report.evidence import Claim, Gate, independent
from crt_exp.report.fidelity_runs import BERT, CAUSAL, CHEAP, DEFAULT, QUALITY, WINDOW, Found
from crt_exp.studies.fidelity import Arm

M = 256                    # projections of FAVOR++ in its claim
COSINE = 0.99
UPTRAINED_WITHIN = 0.01    # nats above exact attention that was trained on as long
AT_MOST = {CAUSAL: {CHEAP: 0.02, DEFAULT: 0.01, QUALITY: 0.002}, BERT: {DEFAULT: 0.02}}          # nats above exact
AT_LEAST = {CAUSAL: {("favorpp", M): 0.2, (WINDOW, None): 0.05}}
NAMES = {DEFAULT: "near-far, default", CHEAP: "near-far, cheap", QUALITY: "near-far, quality",
         "favorp": "FAVOR+", "favorpp": "FAVOR++", WINDOW: "window and first tokens", "favorsharp": "FAVOR#",
         "relu": "ReLU"}


def label(arm: Arm) -> str:
    """As the page calls it; near-far attention with other cells by its own words."""
    return NAMES.get(arm.text, arm.text) + (f", m = {arm.m}" if arm.m else "")


def gates(found: Found) -> list[Gate]:
    """Of each model that was trained: whether attention matters to it."""
    return [Gate(f"{title}: what uniform attention costs directly after the swap, in nats",
                 float(np.mean(found.above(title, "uniform"))), found.setting.least) for title in found.trained]


# ---- claims, each a difference that is above 0 where it holds, paired over texts or seeds


def claims(found: Found) -> list[Claim]:
    made = []
    for title in found.trained:
        made += losses(found, title)
        made += cosines(found, title)
    for title in found.setting.uptrained:
        made += uptraining(found, title)
    return made


def losses(found: Found, title: str) -> list[Claim]:
    made = []
    for text, most in AT_MOST.get(title, {}).items():
        made += claim(f"{title}: {NAMES[text]} costs at most {most:g} nats directly after the swap",
                      found.above(title, text), most, -1, "nats to spare")
    for (text, m), least in AT_LEAST.get(title, {}).items():
        made += claim(f"{title}: {label(Arm(text, m))} costs at least {least:g} nats directly after the swap",
                      found.above(title, text, m), least, 1, "nats beyond")
    return made


def cosines(found: Found, title: str) -> list[Claim]:
    """Of encoders, whose last states are embeddings."""
    if title != BERT or found.above(title, DEFAULT) is None:
        return []
    values = found.of_texts(title, Arm(DEFAULT, None), "cosine")
    return claim(f"{title}: with {NAMES[DEFAULT]} the cosine of the pooled states with the exact ones is at least "
                 f"{COSINE:g}", values, COSINE, 1, "beyond")


def uptraining(found: Found, title: str) -> list[Claim]:
    """Near-far attention after the second of the shares."""
    arm, setting = Arm(DEFAULT, None), found.setting
    if (title, arm, 0) not in found.uptrained:
        return []
    step, share = setting.steps(setting.model(title))[1], setting.shares[1]
    return claim(f"{title}: after {share:.0%} of the training steps {NAMES[DEFAULT]} lies at most "
                 f"{UPTRAINED_WITHIN:g} nats above exact attention trained on as long", gap(found, title, arm, step),
                 UPTRAINED_WITHIN, -1, "nats to spare")


def gap(found: Found, title: str, arm: Arm, step: int) -> np.ndarray:
    """Loss of an arm above that of exact attention trained on as long, of each seed."""
    losses = [[found.uptrained[title, each, seed][str(step)] for seed in range(found.setting.seeds)]
              for each in (arm, Arm("exact", None))]
    return np.subtract(*losses)


def differs(found: Found, title: str) -> str:
    """Whether the intervals of the uptrained arms hold 0, in a sentence each."""
    setting, told = found.setting, []
    step = setting.steps(setting.model(title))[1]
    for arm in setting.uptrained_arms():
        if arm.text != "exact":
            between = independent(gap(found, title, arm, step))
            word = "no difference is shown" if between.low <= 0 <= between.high else "the difference is shown"
            told.append(f"{label(arm)} {between:+.4f} ({word})")
    return (f"{title}, after {setting.shares[1]:.0%} of the steps ({step}), nats above exact attention trained on as "
            f"long: {'; '.join(told)}.")


def claim(text: str, values: Sequence[float] | None, bound: float, sign: int, unit: str) -> list[Claim]:
    """That the mean lies above the bound (sign = 1) or below it (-1); none where there are no values."""
    return [] if values is None else [Claim(text, independent(sign * (np.asarray(values) - bound)), unit)]


def beaten_by_control(found: Found) -> list[str]:
    """Where a control, uniform attention or the window with first tokens, loses no more than another attention."""
    told = []
    for title in found.trained:
        for name, text in (("uniform attention", "uniform"), ("the window with first tokens", WINDOW)):
            limit = np.mean(found.above(title, text))
            others = [arm for arm in found.setting.arms if arm.text not in ("exact", "uniform", "identity", WINDOW)]
            worse = [label(arm) for arm in others if np.mean(found.above(title, *arm)) >= limit]
            if worse:
                told.append(f"**{title}: {name}, a control, loses no more than {', '.join(worse)}.**\n")
    return told
