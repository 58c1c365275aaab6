"""Small models that pages pretrain on WikiText-2 with exact attention: encoders of characters and of word pieces."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from crt_exp.experiments.report.sweeps import (
    HOME,
    PlannedRun,
    quoted_override,
    staged_sweep,
    sweep,
)

WIKITEXT2 = "${oc.env:CRT_DATA}/wikitext2/wiki.train.tokens"
LETTERS = f"task.text={WIKITEXT2} task.validation_text=outputs/texts/validation-48.tokens"
PIECES = f"task.text={WIKITEXT2} task.validation_text=outputs/texts/validation-16.tokens"


def masked_model(layers: int, heads: int) -> str:
    """Options of a model of width 128 that task=mlm trains with exact attention."""
    return (
        f"task=mlm attention=exact task.sizes.hidden_size=128 task.sizes.num_hidden_layers={layers} "
        f"task.sizes.num_attention_heads={heads} task.sizes.intermediate_size=512 trainer.select=last "
        "trainer.eval_every=1000000 trainer.save_every=500 trainer.log_every=100"
    )


def dropout(probability: float) -> str:
    return (
        f"+task.sizes.hidden_dropout_prob={probability} "
        f"+task.sizes.attention_probs_dropout_prob={probability}"
    )


def stage(batch: int, steps: int, rate: str) -> str:
    """Options of a stage of training: rows per batch, steps, learning rate."""
    return f"trainer.batch={batch} trainer.steps={steps} trainer.lr={rate}"


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
