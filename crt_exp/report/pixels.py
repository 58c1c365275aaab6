"""make pixels: Figure 7, left, of Performers, images value by value with every attention, in bits per dimension."""

from crt_exp.report.long_page import Page
from crt_exp.report.long_runs import LAST, Setting, attention, filled, model


def arms(m: int, length: int, chunk: int, hashes: int) -> dict[str, tuple[str, ...]]:
    return {"exact": attention("exact"), "favorp": attention("favorp", m), "favorpp": attention("favorpp", m),
            "relu": attention("relu", m), "smreg": attention("smreg", m),
            "reformer": attention("reformer", None, f"attention.chunk={chunk}", f"attention.hashes={hashes}",
                                  f"attention.buckets={2 * length // chunk}"),
            "uniform": attention("uniform"), "identity": attention("identity"), "window": attention("window")}


CIFAR = ("task=pixels", "task.dataset=cifar10", *LAST)
SMALL = (*CIFAR, "task.evaluated=16", "trainer.eval_batch=2", "trainer.warmup=20", *model(4, 2, 128, 64))
SETTINGS = {
    "small": Setting(
        sets={"16 x 16": (*SMALL, "task.size=16", "trainer.batch=4", "trainer.steps=200", "trainer.eval_every=50"),
              "32 x 32": (*SMALL, "task.size=32", "trainer.batch=1", "trainer.steps=150", "trainer.eval_every=75")},
        arms=arms(32, 3072, 64, 2), moved={}),
    "gpu": Setting(
        sets={"32 x 32": (*CIFAR, "task.evaluated=200", "task.preset=performer6", "trainer.lr=1e-3", "trainer.batch=16",
                          "trainer.precision=bf16", "trainer.steps=3000", "trainer.eval_every=500")},
        arms=arms(128, 3072, 64, 4), moved={}, workers=1),
    "full": Setting(  # ImageNet64, 12288 values: 6 layers of the Performer beside 12 of the Reformer
        sets={"ImageNet64": ("task=pixels", "task.dataset=imagenet", "task.size=64", "task.preset=performer6",
                             "task.checkpointing=true", "trainer.lr=1e-3", "trainer.batch=32", "trainer.processes=8",
                             "trainer.precision=bf16", "trainer.steps=100000", "trainer.eval_every=5000", *LAST)},
        arms=arms(256, 12288, 64, 4) | {"reformer": attention("reformer", None, "+task.sizes.layers=12")}, moved={},
        workers=1),
}
PAGE = Page(
    "pixels", "Performers Figure 7, left: images value by value", "bits_per_dim", "bits per dimension", -1,
    ("unigram_bits_per_dim", "unigram"), least=0.05, claims=(
        ("exact attention ends below uniform attention", "exact", "uniform"),
        ("ReLU ends below FAVOR+", "relu", "favorp"),
        ("SMREG ends below FAVOR+", "smreg", "favorp"),
        ("FAVOR++ ends below FAVOR+", "favorpp", "favorp"),
        ("FAVOR+ ends below Reformer of as many layers", "favorp", "reformer"),
        ("FAVOR++ ends below the window with first tokens", "favorpp", "window")))


def main(size: str) -> None:
    setting = SETTINGS[size]
    found, costs, seconds = filled("pixels", setting)
    PAGE.write(size, setting, found, costs, seconds)
