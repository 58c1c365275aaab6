"""What `hrf_lm` asks of its language models before arms are drawn, and what it concludes from the arms."""

import math

import numpy as np
import torch

from crt_exp.features.base import log_expm1
from crt_exp.report import palette
from crt_exp.report.evidence import Claim, Gate, paired
from crt_exp.report.hrf_lm_runs import HYBRIDS, Found

METRICS = {"w1_index": "W1 over classes", "ks_index": "KS over classes", "w1_values": "W1 over values",
           "ks_values": "KS over values"}
APART = 0.5          # nats by which the model must be better than the unigram law
DEPENDS = 0.1        # KS distance of the model's law from the unigram's: with less, queries hardly count
ERROR = 1.2          # predicted error of FAVOR+ over that of FAVOR++


def gates(found: Found) -> list[Gate]:
    made = []
    for model in found.setting.models:
        said, look = found.models[model.title], found.looks[model.title]
        made += [Gate(f"{model.title}: nats by which the model is better than the unigram law",
                      math.log(said["unigram"] / said["test"]), APART),
                 Gate(f"{model.title}: KS distance over classes of the model's law from the unigram's",
                      found.controls[model.title, "unigram"].ks_index, DEPENDS),
                 Gate(f"{model.title}: predicted error of FAVOR+ over that of FAVOR++ at a typical query and key",
                      error_ratio(look["moments"]), ERROR)]
    return made


def best(said: dict) -> float:
    return min(perplexity for _, perplexity in said["curve"])


def error_ratio(moments: dict[str, float]) -> float:
    """Of one projection, by the closed forms; in logarithms, for either may overflow."""
    plain, better = (log_expm1(torch.tensor(moments[name], dtype=torch.float64)) for name in ("favorp", "favorpp"))
    return math.exp(min(float(plain - better) / 2, 700.0))


def claims(found: Found) -> list[Claim]:
    """The paper's orderings: hybrids nearest to the exact law, in each distance, over all m; and that of FAVOR++."""
    setting, made = found.setting, []
    for title in (model.title for model in setting.models):
        for better, worse in pairs(setting.arms):
            for metric, name in METRICS.items():
                made.append(Claim(f"{title}: {label(better)} is nearer to the exact law than {label(worse)}, {name}",
                                  paired(logs(found, title, worse, metric), logs(found, title, better, metric)),
                                  "in the logarithm"))
        for hybrid in present(setting.arms):
            if "favor" in setting.arms:
                fewer = paired(*(share_below(found, title, name) for name in ("favor", hybrid)))
                made.append(Claim(f"{title}: {label(hybrid)} has fewer negative estimates than {label('favor')}",
                                  fewer, "of all estimates"))
    return made


def pairs(arms: tuple[str, ...]) -> list[tuple[str, str]]:
    found = [(hybrid, other) for hybrid in present(arms) for other in ("favorp", "favor")]
    found += [("favorpp", "favorp"), ("favorpp", "favor")]
    return [(one, other) for one, other in found if one in arms and other in arms]


def present(arms: tuple[str, ...]) -> list[str]:
    return [name for name in HYBRIDS if name in arms]


def logs(found: Found, title: str, name: str, metric: str) -> np.ndarray:
    """Of each draw, the mean over m of the log of a distance."""
    setting = found.setting
    return np.array([np.mean([math.log(getattr(found.arms[title, name, m, seed], metric)) for m in setting.ms])
                     for seed in range(setting.draws)])


def share_below(found: Found, title: str, name: str) -> np.ndarray:
    setting = found.setting
    return np.array([np.mean([found.arms[title, name, m, seed].negative for m in setting.ms])
                     for seed in range(setting.draws)])


def label(name: str) -> str:
    return {"favor": "trigonometric", "hrf_angular": "the angular hybrid", "hrf_gaussian": "the Gaussian hybrid",
            "uniform": "uniform law", "unigram": "unigram law"}.get(name) or palette.label(name)
