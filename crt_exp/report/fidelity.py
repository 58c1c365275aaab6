"""make fidelity: pretrained language models whose attention is swapped without training, and after a little of it.

A masked and a causal model are trained with exact attention on WikiText-2 (task=mlm, in stages of longer blocks) and
kept. A gate asks whether attention matters to them; only then are other attentions put in its place.
"""

from functools import partial
from typing import Any

from crt_exp.models.folder import MODEL
from crt_exp.report import fidelity_page, fidelity_runs
from crt_exp.report.evidence import check_gates
from crt_exp.report.fidelity_runs import BERT, CAUSAL, MODEL_SOURCES, SOURCES, Found, Model, Setting
from crt_exp.report.fidelity_verdicts import gates
from crt_exp.report.writing import Cells
from crt_exp.studies.fidelity import Arm

CONTROL = Arm("uniform", None)
ENCODER = ("+task.sizes.hidden_dropout_prob=0", "+task.sizes.attention_probs_dropout_prob=0")
DECODER = ("task.causal=true", "+task.sizes.resid_pdrop=0", "+task.sizes.embd_pdrop=0", "+task.sizes.attn_pdrop=0")
ONCE = ("trainer.eval_every=1000000", "trainer.save_every=500", "trainer.log_every=100", "trainer.select=last")


def stage(block: int, batch: int, steps: int, lr: str, *more: str) -> tuple[str, ...]:
    return (f"task.block={block}", f"trainer.batch={batch}", f"trainer.steps={steps}", f"trainer.lr={lr}", *more)


def grown(blocks: tuple[int, ...], tokens: int, steps: int, lr: str) -> tuple[tuple[str, ...], ...]:
    """A stage for each length of blocks, with as many rows as have about so many tokens."""
    return tuple(stage(block, tokens // block, steps, lr) for block in blocks)


def sizes(hidden: int, layers: int, heads: int) -> tuple[str, ...]:
    found = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
             "intermediate_size": 4 * hidden}
    return tuple(f"task.sizes.{key}={value}" for key, value in found.items())


SMALL = (*sizes(128, 4, 4), "task.vocabulary_size=4096", *ONCE)
LARGE = (*sizes(512, 8, 16), "task.vocabulary_size=8192", "trainer.precision=bf16", *ONCE)
GROWING = (24, 32, 48, 64, 96, 128, 192, 256, 384)
SETTINGS = {
    # A masked model leaves its unigram law after 1500 steps or so on blocks of 18 tokens, and stands at it after 3900
    # on blocks of 32. Blocks grow slowly, for positions that are new are learned from those before: from 18 to 128 at
    # once it fell back to that law (5.8 nats from 3.9) and was still there 1500 steps later.
    "small": Setting(models=(
        Model(BERT, (*SMALL, *ENCODER), (stage(18, 128, 5000, "2e-3"), *grown(GROWING, 2304, 250, "1e-3"),
                                         stage(512, 4, 600, "5e-4"))),
        Model(CAUSAL, (*SMALL, *DECODER), (stage(64, 32, 3000, "2e-3"), stage(256, 8, 800, "1e-3"),
                                           stage(512, 4, 500, "5e-4"))))),
    "gpu": Setting(workers=1, uptrained=(CAUSAL, BERT), texts=48, models=(
        Model(BERT, (*LARGE, *ENCODER), (stage(64, 256, 8000, "1e-3"), *grown(GROWING[4:], 16384, 500, "5e-4"),
                                         stage(512, 32, 2000, "5e-4"))),
        Model(CAUSAL, (*LARGE, *DECODER), (stage(128, 128, 4000, "1e-3"), stage(512, 32, 1500, "5e-4"))))),
    "full": Setting(workers=1, uptrained=(CAUSAL, BERT), texts=96, draws=5, seeds=5, models=(
        Model(BERT, (*LARGE, *ENCODER), (stage(128, 256, 60000, "5e-4"), *grown(GROWING[6:], 32768, 2000, "3e-4"),
                                         stage(512, 64, 20000, "2e-4"))),
        Model(CAUSAL, (*LARGE, *DECODER), (stage(512, 64, 20000, "5e-4"),)))),
}


def main(size: str) -> None:
    """Raises GateFailed, before other arms are swapped in, where attention matters too little to a model."""
    setting = SETTINGS[size]
    models, cells = Cells("fidelity-models", MODEL_SOURCES), Cells("fidelity", SOURCES)
    fill = partial(cells.fill, workers=setting.workers)
    train(setting, models)
    looks = {model.title: reading(model, setting) | {"look": True} for model in setting.models}
    fill(list(looks.values()), look, "the exact models")
    swaps = swapping(setting, [CONTROL])
    fill(list(swaps.values()), fidelity_runs.swap, "uniform attention")
    found = Found(setting, {model.title: models[model.key()] for model in setting.models}, values(cells, looks),
                  values(cells, swaps))
    passed = check_gates(gates(found))
    for name, (keys, compute) in arms(setting).items():
        fill(list(keys.values()), compute, name.replace("_", " "), **({"workers": 1} if name == "costs" else {}))
        getattr(found, name).update(values(cells, keys))
    fidelity_page.write(size, found, passed, models.seconds() + cells.seconds())


def train(setting: Setting, models: Cells) -> None:
    """Stage by stage: each starts from the one before."""
    for number in range(max(len(model.stages) for model in setting.models)):
        keys = [model.key(number) for model in setting.models if number < len(model.stages)]
        models.fill(keys, fidelity_runs.train, f"exact models, stage {number + 1}", setting.workers)
    for key in (model.key(number) for model in setting.models for number in range(len(model.stages))):
        if not (fidelity_runs.place(**key) / MODEL).is_dir():  # a cell may be known and its directory gone
            fidelity_runs.train(**key)


# ---- keys: all that decides a cell


def reading(model: Model, setting: Setting, length: int | None = None) -> dict[str, Any]:
    return {"start": model.directory, "texts": setting.texts, "calibration_texts": setting.calibration_texts,
            "length": length or setting.length}


def swapping(setting: Setting, chosen: list[Arm]) -> dict[tuple[str, Arm, int], dict[str, Any]]:
    return {(model.title, arm, draw): reading(model, setting) | {"text": arm.text, "m": arm.m, "draw": draw}
            for model in setting.models for arm in chosen for draw in range(draws(arm, setting))}


def draws(arm: Arm, setting: Setting) -> int:
    return setting.draws if arm.mechanism().rows is not None else 1


def arms(setting: Setting) -> dict[str, tuple[dict[Any, dict[str, Any]], Any]]:
    """Name of a part of Found -> its keys, and what computes them."""
    return {"swaps": (swapping(setting, setting.arms), fidelity_runs.swap),
            "matched": (matching(setting), fidelity_runs.matched),
            "by_length": (by_length(setting), fidelity_runs.swap),
            "costs": ({length: {"length": length, "arms": [list(arm) for arm in costing(setting, length)],
                                "rounds": setting.rounds} for length in setting.cost_lengths}, fidelity_runs.cost),
            "uptrained": (uptraining(setting), fidelity_runs.uptrain)}


def uptraining(setting: Setting) -> dict[tuple[str, Arm, int], dict[str, Any]]:
    keys = {}
    for model in map(setting.model, setting.uptrained):
        steps = setting.steps(model)
        keys |= {(model.title, arm, seed): {"overrides": fidelity_runs.uptraining(model, setting, arm, seed, steps[-1]),
                                            "start": model.directory, "evaluated": steps}
                 for seed in range(setting.seeds) for arm in setting.uptrained_arms()}
    return keys


def matching(setting: Setting) -> dict[tuple[int, Arm, int], dict[str, Any]]:
    """Heads like those of the encoder."""
    model = setting.model(BERT)
    read = reading(model, setting)
    read["at"] = read.pop("length")
    return {(length, arm, draw): read | {"length": length, "text": arm.text, "m": arm.m, "draw": draw}
            for length in setting.lengths for arm in setting.arms_at(length) for draw in range(setting.draws)}


def by_length(setting: Setting) -> dict[tuple[int, Arm, int], dict[str, Any]]:
    """The causal model on texts of each length that it has positions for."""
    model = setting.model(CAUSAL)
    return {(length, arm, draw): reading(model, setting, length) | {"text": arm.text, "m": arm.m, "draw": draw}
            for length in setting.lengths if length <= setting.length for arm in setting.arms_at(length)
            for draw in range(draws(arm, setting))}


def costing(setting: Setting, length: int) -> list[Arm]:
    return [Arm("exact", None), *setting.arms_at(length)]


def look(look: bool, **key: Any) -> dict[str, Any]:
    return fidelity_runs.look(**key)


def values(cells: Cells, keys: dict[Any, dict[str, Any]]) -> dict[Any, Any]:
    return {name: cells[key] for name, key in keys.items()}
