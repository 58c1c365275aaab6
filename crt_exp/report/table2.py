"""make table2: Table 2 of Chefs' Random Tables, exact encoders of text whose attention is swapped and trained on.

Encoders of characters and of word pieces are pretrained with exact attention on WikiText-2 (task=mlm) and kept. Gates
ask of each kind whether it can tell mechanisms apart; only then is other attention put in its place, as it is and
trained on, all arms on the same text, masks and Gaussian rows. task=glue follows where there is signal; beside it stand
the paper's rows, smaller encoders that were pretrained with each attention.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from crt_exp.report import table2_encoders, table2_glue, table2_page, table2_runs
from crt_exp.report.evidence import Gate, check_gates
from crt_exp.report.fidelity import ENCODER, GROWING, ONCE, grown, sizes, stage
from crt_exp.report.table2_runs import (
    CHARACTERS,
    EXACT,
    NARROW,
    NARROW_PIECES,
    PIECES,
    SOURCES,
    Glue,
    Kind,
    Setting,
)
from crt_exp.report.table2_verdicts import Found, ended, gates, has_signal, power
from crt_exp.report.writing import Cells

KNOWN = 88                 # characters, each in two tokens: the others occur a few times in the training text
LETTERS = f"task.vocabulary={table2_runs.vocabulary_folder(KNOWN)}"
SCRATCH = ("task.block=64", "trainer.batch=32", "trainer.steps=1000", "trainer.lr=3e-3")
SHORT = ("task.max_length=64", "task.bucketed=true", "trainer.epochs=2", "trainer.eval_every=1000000",
         "trainer.select=last")
# Near-far attention without what would make it exact on texts as short as these.
SHORT, LONGER = (f"nearfar preset=bounded {sizes} exact_until=0"
                 for sizes in ("block=4 heavy=2 cells=4", "block=8 heavy=8 cells=16"))
WIDE = ("exact", "uniform", "relu", "elu", "favorp", "favorpp", "favorsharp", LONGER)


def narrow(kind: Kind, title: str) -> Kind:
    """The same with twice the heads, half as wide."""
    name = "task.sizes.num_attention_heads="
    heads = lambda option: f"{name}{2 * int(option.removeprefix(name))}" if option.startswith(name) else option
    return replace(kind, title=title, options=tuple(map(heads, kind.options)))


def with_narrow(characters: Kind, pieces: Kind) -> tuple[Kind, ...]:
    return characters, pieces, narrow(characters, NARROW), narrow(pieces, NARROW_PIECES)


WORDS = Kind(PIECES, (*sizes(128, 3, 8), *ENCODER, "task.vocabulary_size=4096", *ONCE),
             (stage(18, 128, 3500, "2e-3"), *grown(GROWING[:5], 2304, 200, "1e-3"), stage(128, 16, 400, "1e-3")),
             batch=4, near_far=LONGER, every=16, trained_ms=(256,), others=(),
             fine_tuned=True)
SETTINGS = {
    # heads of 16 and blocks that begin short: with heads of 32 neither FAVOR+ nor FAVOR++ is better than uniform
    # attention, and with blocks of 128 from the start a masked model does not leave its unigram law. Heads of 8 joined
    # when those of 16 had failed their gates (errors of FAVOR+ over FAVOR++ of 1.07 and 1.08): on synthetic heads of
    # the same |x + y|^2 that ratio is 1.2 to 1.6 with d = 8 and 1.0 to 1.3 with d = 16. They train longer, and with
    # dropout, for after 2000 steps without it 58% of their heads still had a mean |x + y|^2 outside 4 to 24
    "small": Setting(
        kinds=(
            Kind(CHARACTERS, (*sizes(128, 3, 8), *ENCODER, LETTERS, *ONCE), (stage(34, 96, 2000, "2e-3"),),
                 batch=16, near_far=SHORT, every=48, trained_ms=(256, 64)),
            WORDS,
            Kind(NARROW, (*sizes(128, 3, 16), LETTERS, *ONCE), (stage(34, 128, 2500, "2e-3"),),
                 batch=16, near_far=SHORT, every=48, trained_ms=(256, 64)),
            narrow(WORDS, NARROW_PIECES)),
        glue=Glue(options=(*SHORT, "trainer.lr=5e-4"), examples={"sst2": 4000},
                  arms=("exact", "uniform", "favorp", "favorpp"),
                  scratch=(*sizes(64, 2, 4), *ENCODER, "task.vocabulary_size=4096", *SCRATCH, *ONCE))),
    "gpu": Setting(
        kinds=with_narrow(
            Kind(CHARACTERS, (*sizes(256, 4, 16), *ENCODER, LETTERS, *ONCE), (stage(34, 256, 8000, "1e-3"),),
                 batch=32, near_far=SHORT, every=24, trained_ms=(256, 64)),
            Kind(PIECES, (*sizes(256, 4, 16), *ENCODER, "task.vocabulary_size=4096", *ONCE),
                 (stage(18, 256, 8000, "1e-3"), *grown(GROWING[:5], 4608, 400, "1e-3"), stage(128, 64, 3000, "5e-4")),
                 batch=16, near_far=LONGER, every=8, trained_ms=(256, 64),
                 fine_tuned=True)),
        glue=Glue(options=(*SHORT, "trainer.lr=2e-4"), arms=WIDE, examples={"sst2": 20000},
                  scratch=(*sizes(128, 4, 8), *ENCODER, "task.vocabulary_size=4096", "task.block=64",
                           "trainer.batch=128", "trainer.steps=5000", "trainer.lr=1e-3", *ONCE)),
        workers=4),
    "full": Setting(
        kinds=with_narrow(
            Kind(CHARACTERS, (*sizes(512, 8, 32), *ENCODER, LETTERS, "trainer.precision=bf16", *ONCE),
                 (stage(34, 256, 30000, "5e-4"),),
                 batch=64, near_far=SHORT, every=12, trained_ms=(256, 64)),
            Kind(PIECES, (*sizes(512, 8, 32), *ENCODER, "task.vocabulary_size=8192", "trainer.precision=bf16", *ONCE),
                 (stage(18, 512, 30000, "5e-4"), *grown(GROWING[:5], 9216, 2000, "5e-4"),
                  stage(128, 128, 10000, "2e-4")),
                 batch=32, near_far=LONGER, every=4, trained_ms=(256, 64),
                 fine_tuned=True)),
        glue=Glue(options=("task.max_length=128", "task.bucketed=true", "trainer.eval_every=1000000",
                           "trainer.select=last", "trainer.lr=1e-4"), arms=WIDE,
                  datasets=("sst2", "stsb", "cola", "mrpc", "rte", "qnli", "qqp", "mnli"), scratch_m=256,
                  scratch=(*sizes(512, 8, 32), *ENCODER, "task.vocabulary_size=8192", "task.block=128",
                           "trainer.batch=256", "trainer.steps=50000", "trainer.lr=5e-4", "trainer.precision=bf16",
                           *ONCE)),
        encoders=3, pairs=24, other_pairs=12, workers=1),
}


def main(size: str) -> None:
    """Raises GateFailed, with no arm swapped in and a page that says so, where no kind of encoder can tell them
    apart."""
    setting = SETTINGS[size]
    models, cells = Cells("table2-models", SOURCES), Cells("table2", SOURCES)
    encoders(setting, models)
    found, asked = looked(setting, models, cells)
    arms(found, cells)
    glue(found, models, cells)
    table2_page.write(size, found, asked, models.seconds() + cells.seconds())
    if not found.kinds:
        check_gates([gate for each in asked.values() for gate in each])


def encoders(setting: Setting, models: Cells) -> None:
    """Stage by stage: each starts from the one before."""
    keys = [[kind.key(seed, number) for kind in setting.kinds if number < len(kind.stages)
             for seed in range(setting.encoders)] for number in range(max(len(kind.stages) for kind in setting.kinds))]
    for number, of_stage in enumerate(keys):
        models.fill(of_stage, table2_encoders.train, f"exact encoders, stage {number + 1}", setting.workers)
    for key in [key for of_stage in keys for key in of_stage]:
        table2_encoders.there(key)


def looked(setting: Setting, models: Cells, cells: Cells) -> tuple[Found, dict[str, list[Gate]]]:
    """What the encoders are, and what their gates say; a kind that fails one goes no further."""
    trained = {(kind.title, seed): kind.key(seed) for kind in setting.kinds for seed in range(setting.encoders)}
    unigrams, looks = {kind.title: kind.key(0) for kind in setting.kinds}, table2_runs.looking(setting)
    cells.fill(list(unigrams.values()), table2_encoders.unigram, "frequencies of tokens", setting.workers)
    cells.fill(list(looks.values()), table2_encoders.look, "the exact encoders", setting.workers)
    found = Found(setting, values(models, trained), values(cells, unigrams), values(cells, looks))
    asked = {kind.title: gates(found, kind) for kind in setting.kinds}
    found.kinds = [kind for kind in setting.kinds if all(gate.passed for gate in asked[kind.title])]
    for gate in (gate for each in asked.values() for gate in each):
        print(gate)
    return found, asked


def arms(found: Found, cells: Cells) -> None:
    """Directly after the swap, then trained on; between them what the pairs can show."""
    setting = found.setting
    swaps = table2_runs.swapping(setting, found.kinds)
    cells.fill(list(swaps.values()), table2_encoders.after_swap, "after the swap", setting.workers)
    found.swaps = values(cells, swaps)
    print("\n".join(power(found)))
    keys = table2_runs.uptraining(setting, found.kinds)
    cells.fill(list(keys.values()), table2_encoders.uptrain, "uptraining", setting.workers)
    found.uptrained = values(cells, keys)


def glue(found: Found, models: Cells, cells: Cells) -> None:
    """Exact encoders on all tasks; the others where these beat both controls, and on the first task."""
    setting = found.setting
    fill, datasets = partial(cells.fill, workers=setting.workers), setting.glue.datasets
    asked = {data: {"data": data} for data in datasets}
    fill(list(asked.values()), table2_glue.controls, "controls of GLUE")
    found.controls, found.datasets = values(cells, asked), [datasets[0]]
    if kind := found.fine_tuned:
        tune(found, kind, cells, datasets, [EXACT])
        found.datasets += [data for data in datasets[1:] if has_signal(found, data)]
        tune(found, kind, cells, found.datasets, table2_runs.glue_arms(setting))
    made = table2_runs.from_scratch(setting)
    models.fill(list(made.values()), table2_encoders.train, "encoders from scratch", setting.workers)
    for key in made.values():
        table2_encoders.there(key)
    fill([made["exact"]], table2_encoders.unigram, "frequencies of tokens")
    found.pretrained, found.scratch_unigram = values(models, made), cells[made["exact"]]
    keys = table2_runs.scratch_tuning(setting, found.datasets)
    fill(list(keys.values()), table2_encoders.fine_tune, "fine-tuning of encoders from scratch")
    found.scratch = ended(found, values(cells, keys))


def tune(found: Found, kind: Kind, cells: Cells, datasets: Any, chosen: Any) -> None:
    keys = table2_runs.fine_tuning(found.setting, kind, datasets, chosen)
    cells.fill(list(keys.values()), table2_encoders.fine_tune, "fine-tuning", found.setting.workers)
    found.tuned |= ended(found, values(cells, keys))


def values(cells: Cells, keys: dict[Any, dict[str, Any]]) -> dict[Any, Any]:
    return {name: cells[key] for name, key in keys.items()}
