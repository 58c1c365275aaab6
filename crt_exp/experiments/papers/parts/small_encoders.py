"""Small encoders of characters and of word pieces: other attention in them, without training and fine-tuned."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from crt_exp.experiments.papers.parts.small_models import (
    LETTERS,
    PIECES,
    dropout,
    masked_model,
    stage,
)
from crt_exp.experiments.report import (
    HOME,
    Claim,
    PlannedRun,
    Rows,
    line_plot,
    quoted_override,
    staged_sweep,
    sweep,
)


class Encoder(NamedTuple):
    """A kind of encoder with 3 layers: its text, its vocabulary and sizes, options of stages by tokens of a row."""

    text: str
    options: str
    stages: Mapping[int, str]

    def pretraining(self, name: str) -> list[PlannedRun]:
        """Return the runs of two encoders of this kind; `name` is that of the sweep."""
        return staged_sweep(name, f"{self.text} {self.options}", self.stages, seeds=2)

    def override(self, key: str, name: str, seed: int) -> str:
        """Return key=<the encoder after its last stage> for one of the two."""
        return quoted_override(key, f"{HOME}/{name}/{[*self.stages][-1]}_{seed % 2}")


GROWING = {18: stage(128, 3500, "2e-3")}
for block in (24, 32, 48, 64, 96):
    GROWING[block] = stage(2304 // block, 200, "1e-3")
GROWING[128] = stage(16, 400, "1e-3")
CHARACTERS = "task.vocabulary=outputs/texts/characters-88"
ENCODERS = {
    "characters-8": Encoder(
        LETTERS,
        f"{masked_model(3, heads=16)} {dropout(0.1)} {CHARACTERS}",
        {34: stage(128, 2500, "2e-3")},
    ),
    "pieces-8": Encoder(
        PIECES, f"{masked_model(3, heads=16)} {dropout(0)} task.vocabulary_size=4096", GROWING
    ),
    "characters-16": Encoder(
        LETTERS,
        f"{masked_model(3, heads=8)} {dropout(0)} {CHARACTERS}",
        {34: stage(96, 2000, "2e-3")},
    ),
    "pieces-16": Encoder(
        PIECES, f"{masked_model(3, heads=8)} {dropout(0)} task.vocabulary_size=4096", GROWING
    ),
}


def swapped_encoder_runs(
    name: str, model: str, methods: Sequence[str], seeds: int, steps: int
) -> list[PlannedRun]:
    """Other attention in pretrained encoders, without training (0 steps) or fine-tuned.

    name: the kind of encoder. model: its name in the rows.
    """
    encoder = ENCODERS[name]
    batch = 16 if encoder.text == LETTERS else 4
    starts = {}
    for seed in range(seeds):
        starts[seed] = f"seed={seed} {encoder.override('task.model', name, seed)}"
    return sweep(
        f"task=mlm task.init=uptrain {encoder.text} task.block={[*encoder.stages][-1]} "
        f"trainer.batch={batch} trainer.eval_batch=64 trainer.lr=3e-4 trainer.schedule=constant "
        "trainer.warmup=0 trainer.select=last trainer.eval_every=100 trainer.save_every=1000000",
        attention=methods,
        model=model,
        **{"trainer.steps": [steps]},
        seed=starts,
    )


SMALL = {"characters d=8": "characters-8", "word pieces d=8": "pieces-8"}  # model in the rows
WIDER = {"characters d=16": "characters-16", "word pieces d=16": "pieces-16"}
FAVORP = "favorp m=256"
FAVORPP = "favorpp m=256"
RELU = "relu m=256"
SHARP = "favorsharp m=256"
NEAR4 = "nearfar block=4 heavy=2 cells=4 exact_until=0"
NEAR16 = "nearfar block=8 heavy=8 cells=16 exact_until=0"
MAPS = ["exact", "uniform", RELU, FAVORP, FAVORPP, SHARP]
FEW = {"characters d=8": ["uniform", NEAR4, RELU, SHARP], "word pieces d=8": ["uniform", NEAR16]}
SWAPS, LAYERS = [], []
for model, name in SMALL.items():
    SWAPS += swapped_encoder_runs(name, model, [*MAPS, FEW[model][1]], 12, steps=0)
    SWAPS += swapped_encoder_runs(name, model, ["exact", FAVORP, FAVORPP], 12, steps=300)
    SWAPS += swapped_encoder_runs(name, model, FEW[model], 4, steps=300)
for model, name in WIDER.items():
    LAYERS += sweep(
        "task=fidelity task.text=valid task.texts=32 task.draws=3",
        model=model,
        attention=[FAVORP, FAVORPP],
        encoder={seed: ENCODERS[name].override("task.model", name, seed) for seed in (0, 1)},
    )
SWEEPS = {"encoders/layers": LAYERS, "encoders": SWAPS}
MODELS = {name: encoder.pretraining(name) for name, encoder in ENCODERS.items()}

# ---- claims and figure


def claims(rows: Rows) -> list[Claim]:
    return [
        Claim(
            "in small encoders (d = 8) FAVOR++ has a lower loss than FAVOR+ without training",
            {"": gain_in_encoders(rows, 0)},
            unit="nats",
        ),
        Claim(
            "in small encoders (d = 8) FAVOR++ has a lower loss than FAVOR+ when fine-tuned after the swap",
            {"": gain_in_encoders(rows, 300)},
            unit="nats",
        ),
        Claim(
            "the attention error of FAVOR+ is larger than that of FAVOR++ in small encoders (d = 16)",
            {"": error_ratios(rows)},
            log=True,
            above=1,
        ),
    ]


def gain_in_encoders(rows: Rows, step: int) -> pd.Series:
    """encoder -> loss of FAVOR+ minus loss of FAVOR++, the mean over its seeds."""
    gains = []
    for model in SMALL:
        gain = rows.paired(FAVORP, FAVORPP, "loss", sweep="encoders", model=model, step=step)
        gains.append(gain.groupby(gain.index.astype(int) % 2).mean())
    return pd.concat(gains)


def error_ratios(rows: Rows) -> pd.Series:
    """log(error of FAVOR+ / error of FAVOR++), one value an encoder of d = 16."""
    ratios = []
    for model in WIDER:
        ratios.append(rows.values("error_ratio", FAVORP, log=True, model=model))
        for number in (0, 1):
            where = {"model": model, "encoder": number}
            layers = rows.ratio(FAVORP, FAVORPP, "attention_error", **where)
            ratios.append(layers.groupby(lambda _: "").mean())
    return pd.concat(ratios)


def plot_losses(ax, rows: Rows, model: str, labels: Mapping[str, str]) -> None:
    line_plot(ax, rows, "step", "loss", labels, less="exact", model=model, sweep="encoders")
    ax.set_title(f"encoders of {model.replace(' d=', ', d = ')}")
    ax.set_xlabel("steps of fine-tuning after the swap")
    ax.set_ylabel("loss increase over exact attention, nats")
