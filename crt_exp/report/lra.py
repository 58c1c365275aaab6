"""make lra: Figure 19 of Performers, the Long Range Arena with every attention: accuracy beside steps/s and memory."""

from crt_exp.report.long_page import Page
from crt_exp.report.long_runs import FEW, LAST, Setting, attention, filled, model


def arms(m: int, length: int, rank: int, block: int, hashes: int, near: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """length: of the longest row of all sets; near: sizes of near-far attention."""
    return {"exact": attention("exact"), "favorp": attention("favorp", m), "favorpp": attention("favorpp", m),
            "nearfar": attention("nearfar", None, *near), "relu": attention("relu", m), "elu": attention("elu"),
            "linformer": attention("linformer", None, f"attention.length={length}", f"attention.rank={rank}"),
            "reformer": attention("reformer", None, f"attention.chunk={block}", f"attention.hashes={hashes}",
                                  f"attention.buckets={2 * length // block}"),
            "uniform": attention("uniform"), "identity": attention("identity"),
            "window": attention("window", None, f"attention.block={block}")}


SMALL = ("task.dropout=0", "trainer.batch=32", "trainer.eval_batch=128", "trainer.lr=2e-3", *model(4, 2, 128, 64),
         *LAST)
LARGE = ("task.scale=full", "task.preset=performer6", "trainer.batch=32", "trainer.lr=5e-4", "trainer.precision=bf16",
         *LAST)
SETTINGS = {
    "small": Setting(
        sets={"ListOps": ("task=lra", "trainer.steps=1000", "trainer.eval_every=250", *SMALL),
              "Pathfinder": ("task=lra", "task.dataset=pathfinder", "trainer.steps=300", "trainer.eval_every=100",
                             *SMALL),
              "text": ("task=lra", "task.dataset=text", "task.max_length=128", "task.held_out=0.01",
                       "trainer.steps=500", "trainer.eval_every=250", *SMALL)},
        arms=arms(32, 256, 32, 16, 2, FEW), moved={}),
    "gpu": Setting(
        sets={"ListOps": ("task=lra", "trainer.steps=3000", "trainer.eval_every=500", *LARGE),
              "image": ("task=lra", "task.dataset=image", "trainer.steps=3000", "trainer.eval_every=500", *LARGE[1:])},
        arms=arms(256, 2048, 256, 64, 4, ("attention.preset=cheap",)), moved={}, workers=1),
    "full": Setting(  # retrieval needs task.data_dir, and is run by hand
        sets={which: ("task=lra", f"task.dataset={which}", "trainer.steps=20000", "trainer.eval_every=1000", *options)
              for which, options in (("listops", LARGE), ("image", LARGE[1:]), ("pathfinder", LARGE),
                                     ("text", LARGE[1:]))},
        arms=arms(256, 4096, 256, 64, 4, ("attention.preset=default",)), moved={}, workers=1),
}
PAGE = Page(
    "lra", "Performers Figure 19: the Long Range Arena", "accuracy", "%", 1,
    ("majority_accuracy", "most frequent class"), least=3.0, scale=100.0, spec=".1f", claims=(
        ("exact attention is more accurate than uniform attention", "exact", "uniform"),
        ("FAVOR+ is more accurate than Linformer", "favorp", "linformer"),
        ("FAVOR+ is more accurate than Reformer", "favorp", "reformer"),
        ("ELU is more accurate than FAVOR+", "elu", "favorp"),
        ("exact attention is more accurate than FAVOR+", "exact", "favorp"),
        ("FAVOR++ is more accurate than FAVOR+", "favorpp", "favorp"),
        ("FAVOR++ is more accurate than the window with first tokens", "favorpp", "window")))


def main(size: str) -> None:
    setting = SETTINGS[size]
    found, costs, cells = filled("lra", setting, PAGE.gates)
    PAGE.write(size, setting, found, costs, cells.seconds())
