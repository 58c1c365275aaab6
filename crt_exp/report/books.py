"""make books: Figure 5 of Performers, exact weights of a language model moved into random features, redrawn or not.

Arms that are moved start from the exact run of their seed and train for a tenth of its steps; a text is then read on
beyond the training rows with what attention remembers.
"""

from dataclasses import replace

import numpy as np

from crt_exp.attention.nearfar import PRESETS
from crt_exp.report.long_page import Found, Page, label
from crt_exp.report.long_runs import FEW, LAST, Setting, attention, filled, model, window
from crt_exp.report.writing import markdown

CHOSEN = {"small": "300 byte pairs and 800 steps: chosen, with exact and uniform attention alone, because attention "
                   "matters early among such short tokens. "}
TIMES = 8                                                    # lengths of a row that are read on
CHEAP = ("attention.preset=cheap",)
REDRAW = 20                                                  # steps


def arms(m: int, near: tuple[str, ...], block: int, heavy: int) -> dict[str, tuple[str, ...]]:
    """near: sizes of near-far attention, with that block and so many heavy keys."""
    plain = {name: attention(name) for name in ("exact", "uniform", "identity")}
    return plain | {"window": window(block, heavy), "favorpp": attention("favorpp", m),
                    "nearfar": attention("nearfar", None, *near)}


def moved(m: int, steps: int, near: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Trigonometric features, positive ones with and without redraws, regularised ones, and those of FAVOR#, whose
    pairs make two columns of a projection; near-far attention; exact weights go on too."""
    again = f"attention.redraw_every={REDRAW}"
    short = (f"trainer.steps={steps}", f"trainer.eval_every={steps // 2}")
    return {"exact, moved": (*attention("exact"), *short), "uniform, moved": (*attention("uniform"), *short),
            "favor, moved": (*attention("favor", m), *short),
            "favorp, moved": (*attention("favorp", m), *short),
            "favorp, redrawn": (*attention("favorp", m, again), *short),
            "smreg, redrawn": (*attention("smreg", m, again), *short),
            "favorpp, redrawn": (*attention("favorpp", m, again), *short),
            "favorsharp, redrawn": (*attention("favorsharp", m // 2, again), *short),
            "nearfar, moved": (*attention("nearfar", None, *near), *short)}


ROWS = ("task=books", "task.vocabulary_size=300", "task.evaluated=1000", "task.max_length=64", "task.dropout=0",
        "task.carried.pieces=8",
        "trainer.batch=32", "trainer.eval_batch=64", "trainer.warmup=20", *model(4, 2, 128, 64), *LAST)
SETTINGS = {
    "small": Setting(
        sets={"WikiText-2": (*ROWS, "trainer.steps=800", "trainer.eval_every=200")},
        arms=arms(32, FEW, 8, 8), moved=moved(32, 80, FEW), seeds=5),
    "gpu": Setting(
        sets={"WikiText-2": ("task=books", "task.max_length=512", "task.preset=small", "trainer.batch=64",
                             "trainer.steps=5000", "trainer.eval_every=500", *LAST)},
        arms=arms(128, CHEAP, *PRESETS["cheap"][:2]), moved=moved(128, 500, CHEAP), workers=1),
    "full": Setting(  # PG-19 in 8192 tokens
        sets={"PG-19": ("task=books", "task.hub.name=deepmind/pg19", "task.tokenizer=openai-community/gpt2",
                        "task.max_length=8192", "task.preset=performer6", "task.checkpointing=true",
                        "trainer.processes=8", "trainer.batch=64", "trainer.lr=1e-3", "trainer.steps=100000",
                        "trainer.eval_every=5000", *LAST)},
        arms=arms(256, (), *PRESETS["default"][:2]), moved=moved(256, 10000, ()), workers=1),
}


def against_position(found: Found) -> str:
    """The loss of each length of a training row, read on: attention that keeps keys keeps those of one length."""
    arms = dict.fromkeys((which, arm) for which, arm, _ in found)
    rows = [[which, label(arm), *(f"{np.mean(values):.3f}" for values in losses)]
            for which, arm in arms if (losses := positions(found, which, arm))]
    head = ["set", "attention", *(f"row {i}" for i in range(1, TIMES + 1))]
    return f"## Read on\n\nLoss in nats of the tokens of each row of a text, mean over seeds.\n\n{markdown(head, rows)}"


def positions(found: Found, which: str, arm: str) -> list[list[float]]:
    ended = [run["last"] for (w, a, _), run in found.items() if (w, a) == (which, arm) and "last" in run]
    return [[last[f"loss_at_{i}"] for last in ended] for i in range(1, TIMES + 1)] if ended else []


PAGE = Page(
    "books", "Performers Figure 5: exact weights in random features, on texts", "loss", "nats", -1,
    ("unigram_loss", "unigram"), least=0.5, claims=(
        ("positive features end below trigonometric ones", "favorp, moved", "favor, moved"),
        ("positive features end lower with redraws than without", "favorp, redrawn", "favorp, moved"),
        ("SMREG ends below FAVOR+, both redrawn", "smreg, redrawn", "favorp, redrawn"),
        ("FAVOR++ ends below FAVOR+, both redrawn", "favorpp, redrawn", "favorp, redrawn"),
        ("FAVOR# ends below FAVOR++, both redrawn", "favorsharp, redrawn", "favorpp, redrawn"),
        ("near-far attention ends below FAVOR++", "nearfar, moved", "favorpp, redrawn"),
        ("the exact model continued ends below FAVOR+", "exact, moved", "favorp, redrawn")),
    more=against_position)


def main(size: str) -> None:
    setting = SETTINGS[size]
    found, costs, cells = filled("books", setting, PAGE.gates)
    replace(PAGE, chosen=CHOSEN.get(size, "")).write(size, setting, found, costs, cells.seconds())
