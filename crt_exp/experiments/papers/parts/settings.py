"""The settings in which results.md compares attention methods, and their costs."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from crt_exp.experiments.intervals import Mean
from crt_exp.experiments.report import Rows, mean_ci

FAMILIES = {
    "near-far": "nearfar",
    "mixture": "favormix",
    "FAVOR#": "favorsharp",
    "FAVOR++": "favorpp",
    "FAVOR+": "favorp",
    "Hedgehog": "hedgehog",
    "ReLU": "relu",
    "window": "window",
}
HIGHER = ("accuracy", "spearman", "cosine")  # metrics of which more is better


class Setting(NamedTuple):
    """The rows of a page that compare attention methods in one model.

    metric: "above" is a loss increase over exact attention; of other metrics, exact attention is subtracted. m: number
    of projections, where a family has several.
    """

    name: str
    page: str
    metric: str
    where: Mapping[str, Any]
    m: int = 256

    def increase(self, rows: Rows, method: str) -> pd.Series:
        """By how much a method is worse than exact attention, sample by sample."""
        if self.metric == "above":
            return rows.values(self.metric, method, **self.where)
        increase = rows.paired(method, "exact", self.metric, **self.where)
        return -increase if self.metric in HIGHER else increase

    def method(self, rows: Rows, name: str) -> str:
        """The method with this name, such as "favorpp m=256"; of several, that with m and the fewest options."""
        methods = rows.methods(self.metric, **self.where)
        methods = [method for method in methods if method.split()[0] == name]
        if len(methods) > 1:
            methods = [method for method in methods if f"m={self.m}" in method.split()]
        return min(methods, key=len, default="")

    def mean(self, pages: Mapping[str, Rows], family: str) -> Mean:
        """Return the mean loss increase of a family."""
        rows = pages[self.page]
        return mean_ci(self.increase(rows, self.method(rows, FAMILIES[family])))

    def costs(self, pages: Mapping[str, Rows]) -> pd.Series:
        """Return the loss increase of each family, relative to that of uniform attention."""
        rows = pages[self.page]
        means = {}
        for family, name in FAMILIES.items():
            means[family] = self.increase(rows, self.method(rows, name)).mean()
        title = f"[{self.name}]({self.page}.md)"
        return pd.Series(means, name=title) / self.increase(rows, "uniform").mean()


def costs_of(settings: Sequence[Setting], pages: Mapping[str, Rows]) -> pd.DataFrame:
    """Return the loss increases of all families (columns) in all settings (rows)."""
    return pd.DataFrame([setting.costs(pages) for setting in settings])


GLUE = {"sweep": "table2", "split": "parts"}
MIXED = {"sweep": "mixture", "columns": [0, 256]}
SMOLLM2 = "SmolLM2, 512 tokens, nats"
LONG = "SmolLM2, 2048 tokens, nats"


def encoder_settings(step: int) -> list[Setting]:
    """Small encoders of two kinds after some steps of fine-tuning."""
    settings = []
    for model in ("characters d=8", "word pieces d=8"):
        name = f"encoder, {model.replace('d=', 'd = ')}"
        where = {"sweep": "encoders", "model": model, "step": step}
        settings.append(Setting(name, "crt_glue", "loss", where))
    return settings


def vision_and_speech(setting: str, m: int, step: int, steps: int) -> list[Setting]:
    """Vision transformers after some steps of fine-tuning, and spoken digits."""
    small = {"sweep": "fig4-left", "setting": setting, "step": step}
    large = {"sweep": "fig4-left-vit", "setting": setting, "step": steps}
    digits = {"sweep": "fig3", "setting": setting}
    return [
        Setting(f"small ViT, m = {m}", "crt_vit", "loss", small, m),
        Setting("ViT-S, Imagenette", "crt_vit", "loss", large),
        Setting("digits, m = 16, nats an utterance", "crt_speech", "loss", digits, 16),
    ]


MIXTURE = Setting("SmolLM2, 512 tokens", "mixture", "above", {**MIXED, "model": SMOLLM2})
NEW = {"sweep": "pretrained", "text": "new text"}
TWICE = {"sweep": "pretrained", "text": "repeated"}
REPEATED = Setting("SmolLM2, 4096 tokens, repeated", "swap", "above", TWICE)
ADAPTED = []
for text in ("new", "repeated"):
    where = {"sweep": "adapt-smollm2", "text": text, "step": 140}
    ADAPTED.append(Setting(f"SmolLM2, {text} text", "adapt", "above", where))
SWAPPED = [
    Setting("BERT", "swap", "above", {"sweep": "fidelity", "model": "BERT"}),
    Setting("causal model", "swap", "above", {"sweep": "fidelity", "model": "causal"}),
    *encoder_settings(step=0),
    Setting("proteins", "perf_redraw", "loss", {"sweep": "redraw/swap", "split": "test"}),
    MIXTURE,
    Setting("SmolLM2, 2048 tokens", "mixture", "above", {**MIXED, "model": LONG}),
    Setting("MiniLM, cosine", "mixture", "cosine", {**MIXED, "model": "MiniLM, cosine"}),
    Setting("ViT-S, cosine", "mixture", "cosine", {**MIXED, "model": "ViT-S, cosine"}),
    Setting("SmolLM2, 4096 tokens, new text", "swap", "above", NEW),
    REPEATED,
    *vision_and_speech("without training", 256, 0, 0),
    Setting(
        "Whisper", "crt_speech", "above", {"sweep": "fig3-whisper", "setting": "without training"}
    ),
]
PROTEINS = {"sweep": "redraw", "split": "validation", "step": 200}
QNLI = Setting("QNLI", "crt_glue", "accuracy", {**GLUE, "dataset": "qnli"})
STSB = Setting("STS-B", "crt_glue", "spearman", {**GLUE, "dataset": "stsb"})
TUNED = [
    *encoder_settings(step=300),
    *ADAPTED,
    Setting("SST-2", "crt_glue", "accuracy", {**GLUE, "dataset": "sst2"}),
    QNLI,
    STSB,
    *vision_and_speech("fine-tuned after the swap", 64, 300, 47),
    Setting("proteins", "perf_redraw", "loss", PROTEINS),
]
