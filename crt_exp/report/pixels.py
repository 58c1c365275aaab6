"""make pixels: Figure 7, left, of Performers, images value by value with every attention, in bits per dimension."""

from dataclasses import replace

from crt_exp.attention.nearfar import PRESETS
from crt_exp.report import pixels_drawn
from crt_exp.report.long_page import Page, label
from crt_exp.report.long_runs import LAST, Setting, attention, filled, model, training, window


def arms(m: int, length: int, chunk: int, hashes: int, preset: str) -> dict[str, tuple[str, ...]]:
    return {"exact": attention("exact"), "favorp": attention("favorp", m), "favorpp": attention("favorpp", m),
            "nearfar": attention("nearfar", None, f"attention.preset={preset}", "attention.exact_until=0"),
            "relu": attention("relu", m), "smreg": attention("smreg", m),
            "reformer": attention("reformer", None, f"attention.chunk={chunk}", f"attention.hashes={hashes}",
                                  f"attention.buckets={2 * length // chunk}"),
            "uniform": attention("uniform"), "identity": attention("identity"), "window": window(*PRESETS[preset][:2])}


def drawn(which: str) -> tuple[tuple[str, str], ...]:
    return tuple((which, arm) for arm in ("exact", "nearfar", "favorpp", "favorp", "uniform"))


CIFAR = ("task=pixels", "task.dataset=cifar10", *LAST)
CHOSEN = {"small": "Positions are rotary: chosen, with exact and uniform attention alone, because with them exact "
                   "attention is below uniform attention after less than 100 steps. "}
SMALL = (*CIFAR, "task.positions=rotary", "task.evaluated=16", "trainer.eval_batch=2", "trainer.warmup=20",
         *model(4, 2, 128, 64))
SETTINGS = {
    "small": Setting(
        sets={"16 x 16": (*SMALL, "task.size=16", "trainer.batch=4", "trainer.steps=200", "trainer.eval_every=50"),
              "32 x 32": (*SMALL, "task.size=32", "trainer.batch=1", "trainer.steps=150", "trainer.eval_every=75")},
        arms=arms(32, 3072, 64, 2, "cheap"), moved={}, drawn=drawn("16 x 16"), seeds=5),
    "gpu": Setting(
        sets={"32 x 32": (*CIFAR, "task.evaluated=200", "task.preset=performer6", "trainer.lr=1e-3", "trainer.batch=16",
                          "trainer.precision=bf16", "trainer.steps=3000", "trainer.eval_every=500")},
        arms=arms(128, 3072, 64, 4, "default"), moved={}, drawn=drawn("32 x 32"), workers=1),
    "full": Setting(  # ImageNet64, 12288 values: 6 layers of the Performer beside 12 of the Reformer
        sets={"ImageNet64": ("task=pixels", "task.dataset=imagenet", "task.size=64", "task.preset=performer6",
                             "task.checkpointing=true", "trainer.lr=1e-3", "trainer.batch=32", "trainer.processes=8",
                             "trainer.precision=bf16", "trainer.steps=100000", "trainer.eval_every=5000", *LAST)},
        arms=arms(256, 12288, 64, 4, "default") | {"reformer": attention("reformer", None, "+task.sizes.layers=12")},
        moved={}, drawn=drawn("ImageNet64"), workers=1),
}
PAGE = Page(
    "pixels", "Performers Figure 7, left: images value by value", "bits_per_dim", "bits per dimension", -1,
    ("unigram_bits_per_dim", "unigram"), least=0.5, claims=(
        ("ReLU ends below FAVOR+", "relu", "favorp"),
        ("SMREG ends below FAVOR+", "smreg", "favorp"),
        ("FAVOR++ ends below FAVOR+", "favorpp", "favorp"),
        ("FAVOR+ ends below Reformer of as many layers", "favorp", "reformer"),
        ("FAVOR++ ends below the window with first tokens", "favorpp", "window"),
        ("near-far attention ends below FAVOR++", "nearfar", "favorpp"),
        ("near-far attention ends below the window with first tokens", "nearfar", "window")))


def main(size: str) -> None:
    setting = SETTINGS[size]
    found, costs, cells = filled("pixels", setting, PAGE.gates)
    keys = {label(arm): {"overrides": training(setting, which, arm, 0)["overrides"], "dataset": dataset_of(setting)}
            for which, arm in setting.drawn if "last" in found.get((which, arm, 0), {})}
    cells.fill([*keys.values()], pixels_drawn.drawings, "pixels: drawn", setting.workers)
    told = pixels_drawn.write("pixels-drawn", {arm: cells[key] for arm, key in keys.items()})
    page = replace(PAGE, more=lambda found: told, chosen=CHOSEN.get(size, ""))
    page.write(size, setting, found, costs, cells.seconds())


def dataset_of(setting: Setting) -> str:
    """The folder of images, the same in all sets."""
    options = next(iter(setting.sets.values()))
    return next(option.partition("=")[2] for option in options if option.startswith("task.dataset="))
