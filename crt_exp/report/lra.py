"""make lra: Figure 19 of Performers, the Long Range Arena with every attention: accuracy beside steps/s and memory."""

from dataclasses import replace

from crt_exp.attention.nearfar import PRESETS
from crt_exp.report.long_page import Page
from crt_exp.report.long_runs import LAST, Setting, attention, filled, model, window


def arms(m: int, length: int, rank: int, chunk: int, hashes: int, buckets: int, near: tuple[str, ...], block: int,
         heavy: int) -> dict[str, tuple[str, ...]]:
    """length: of the longest row of all sets; chunk, hashes, buckets: of Reformer; near: sizes of near-far attention,
    with that block and so many heavy keys."""
    return {"exact": attention("exact"), "favorp": attention("favorp", m), "favorpp": attention("favorpp", m),
            "nearfar": attention("nearfar", None, *near), "relu": attention("relu", m), "elu": attention("elu"),
            "linformer": attention("linformer", None, f"attention.length={length}", f"attention.rank={rank}"),
            "reformer": attention("reformer", None, f"attention.chunk={chunk}", f"attention.hashes={hashes}",
                                  f"attention.buckets={buckets}"),
            "uniform": attention("uniform"), "identity": attention("identity"),
            "window": window(block, heavy)}


SMALL = ("task.positions=rotary", *model(4, 2, 128, 64), *LAST)
FEWER = ("task.dropout=0", "task.evaluated=300", "trainer.eval_batch=50", "trainer.lr=2e-3", *SMALL)
# Of lists of 15 to 39 symbols.
FEW = ("attention.block=4", "attention.heavy=4", "attention.cells=4", "attention.exact_until=0")
CHOSEN = {"small": "ListOps (lists of at most 3 entries, 15 to 39 symbols) and rotary positions are chosen, with exact "
                   "and uniform attention alone, because attention matters there after few steps: with positions that "
                   "are added to the embeddings a mean over tokens knows their places, and exact attention ended 2.8 ± "
                   "3.2 points above uniform attention; with up to 5 entries some 2 points. On the other sets such "
                   "short training is not expected to tell attention apart: what a step costs there is their part. "}
LARGE = ("task.scale=full", "task.preset=performer6", "trainer.batch=32", "trainer.lr=5e-4", "trainer.precision=bf16",
         *LAST)
SETTINGS = {
    "small": Setting(
        sets={"ListOps": ("task=lra", "+task.rules.train=20000", "+task.rules.test=2000", "+task.rules.arguments=3",
                          "+task.rules.shortest=14", "+task.rules.longest=40", "task.dropout=0", "trainer.batch=128",
                          "trainer.eval_batch=256", "trainer.steps=500", "trainer.eval_every=100", "trainer.lr=4e-3",
                          *SMALL),
              "Pathfinder": ("task=lra", "task.dataset=pathfinder", "trainer.batch=32", "trainer.steps=100",
                             "trainer.eval_every=50", *FEWER),
              "text": ("task=lra", "task.dataset=text", "task.max_length=128", "task.held_out=0.01",
                       "trainer.batch=32", "trainer.steps=250", "trainer.eval_every=125", *FEWER),
              "retrieval": ("task=lra", "task.dataset=retrieval", "task.max_length=128", "trainer.batch=16",
                            "trainer.steps=250", "trainer.eval_every=125", *FEWER),
              "image": ("task=lra", "task.dataset=image", "trainer.batch=4", "trainer.steps=50",
                        "trainer.eval_every=50", *FEWER)},
        arms=arms(16, 1024, 16, 4, 2, 8, FEW, 4, 4), moved={}, seeds=5),
    "gpu": Setting(
        sets={"ListOps": ("task=lra", "trainer.steps=3000", "trainer.eval_every=500", *LARGE),
              "image": ("task=lra", "task.dataset=image", "trainer.steps=3000", "trainer.eval_every=500", *LARGE[1:])},
        arms=arms(256, 2048, 256, 64, 4, 64, ("attention.preset=cheap",), *PRESETS["cheap"][:2]), moved={}, workers=1),
    "full": Setting(  # retrieval needs AAN's files in task.data_dir, and is run by hand
        sets={which: ("task=lra", f"task.dataset={which}", "trainer.steps=20000", "trainer.eval_every=1000", *options)
              for which, options in (("listops", LARGE), ("image", LARGE[1:]), ("pathfinder", LARGE),
                                     ("text", LARGE[1:]))},
        arms=arms(256, 4096, 256, 64, 4, 128, ("attention.preset=default",), *PRESETS["default"][:2]),
        moved={}, workers=1),
}
PAGE = Page(
    "lra", "Performers Figure 19: the Long Range Arena", "accuracy", "%", 1,
    ("majority_accuracy", "most frequent class"), least=3.0, scale=100.0, spec=".1f", claims=(
        ("FAVOR+ is more accurate than Linformer", "favorp", "linformer"),
        ("FAVOR+ is more accurate than Reformer", "favorp", "reformer"),
        ("ELU is more accurate than FAVOR+", "elu", "favorp"),
        ("exact attention is more accurate than FAVOR+", "exact", "favorp"),
        ("FAVOR++ is more accurate than FAVOR+", "favorpp", "favorp"),
        ("FAVOR++ is more accurate than the window with first tokens", "favorpp", "window"),
        ("near-far attention is more accurate than FAVOR++", "nearfar", "favorpp"),
        ("near-far attention is more accurate than the window with first tokens", "nearfar", "window")))


def main(size: str) -> None:
    setting = SETTINGS[size]
    found, costs, cells = filled("lra", setting, PAGE.gates)
    replace(PAGE, chosen=CHOSEN.get(size, "")).write(size, setting, found, costs, cells.seconds())
