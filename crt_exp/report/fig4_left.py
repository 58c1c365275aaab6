"""make fig4-left: Figure 4, left, of Chefs' Random Tables: linear attention in a ViT, uptrained and from scratch.

Every run is the command line's. task=mae pretrains a ViT on the images, task=imagenet fine-tunes it with exact
attention: both are kept in outputs/fig4-left/. Gates ask whether that checkpoint can tell mechanisms apart; only then
are arms trained.
"""

from functools import partial
from typing import Any

from crt_exp.report import fig4_checkpoint, fig4_page
from crt_exp.report.evidence import check_gates
from crt_exp.report.fig4_runs import (
    HOME,
    RUN_SOURCES,
    LINEAR,
    NAMES,
    Found,
    Setting,
    checkpoint,
    from_scratch,
    keep,
    last,
    m_of,
    ms_of,
    options_of,
    swapped,
    train,
    uptraining,
)
from crt_exp.report.fig4_verdicts import gates
from crt_exp.report.writing import Cells

SOURCES = (*RUN_SOURCES, "report/fig4_checkpoint.py")
CAPTURES = 3  # draws of the noise over which the error of each layer is measured
VIT = ("task.sizes.patch=4", "task.sizes.width=96", "task.sizes.depth=3", "task.sizes.heads=6")  # d = 16
VIT_GPU = ("task.sizes.patch=8", "task.sizes.width=256", "task.sizes.depth=6", "task.sizes.heads=16")
SEEN = ("task.augment.flip=0.5", "task.augment.scale=[0.4,1.0]")  # of small images, and few of them
NEAR = (("block", 8), ("heavy", 8), ("cells", 8)), (("block", 16), ("heavy", 16), ("cells", 16))  # of 64 tokens, 256
ONCE = ("trainer.eval_every=1000000", "trainer.log_every=100")    # evaluated at the end alone
SETTINGS = {
    "small": Setting(
        dataset="cifar10", classes=10, images=("task.dataset=cifar10", "task.size=32", "task.workers=0"), model=VIT,
        mae=("task.sizes.decoder_width=48", "task.sizes.decoder_depth=1", "task.sizes.decoder_heads=3",
             "task.augment.flip=0.5", "trainer.batch=50", "trainer.steps=600", "trainer.lr=3e-3", *ONCE),
        fine_tuning=(*SEEN, "trainer.batch=50", "trainer.steps=1500", "trainer.lr=1e-3",
                     "trainer.weight_decay=0.5", *ONCE),  # keeps |x + y|^2 of most heads between 4 and 24
        uptraining=(*SEEN, "trainer.batch=32", "trainer.lr=3e-4", "trainer.eval_every=50", "trainer.log_every=100"),
        scratch=(*SEEN, "trainer.batch=32", "trainer.steps=600", "trainer.lr=2e-3", "trainer.eval_every=100",
                 "trainer.log_every=100"),
        m=64, ms=(16, 64, 256), steps=(50, 100, 300), long=128, long_images=200, near=NEAR[0]),
    "gpu": Setting(
        dataset="imagenette2-320", classes=10, images=("task.dataset=imagenette2-320", "task.size=128"), model=VIT_GPU,
        mae=("task.sizes.decoder_width=128", "task.sizes.decoder_depth=2", "task.sizes.decoder_heads=4",
             "task.augment.flip=0.5", "trainer.batch=100", "trainer.steps=6000", "trainer.precision=bf16", *ONCE),
        fine_tuning=(*SEEN, "trainer.steps=3000", "trainer.precision=bf16", *ONCE),
        uptraining=(*SEEN, "trainer.lr=3e-4", "trainer.precision=bf16", "trainer.eval_every=50"),
        scratch=(*SEEN, "trainer.steps=1500", "trainer.precision=bf16", "trainer.eval_every=250"),
        m=64, ms=(16, 64, 256), steps=(50, 100, 500), long=512, long_images=500, near=NEAR[1], seeds=10, workers=2),
    "full": Setting(  # on one machine with 8 GPUs; the published MAE checkpoint and the recipes of conf/experiment
        dataset="imagenet", classes=1000,
        images=("task.dataset=imagenet", "task.crop=0.875", "trainer.processes=8", "trainer.precision=bf16"),
        model=(), mae=None,
        fine_tuning=("experiment=mae_finetune", "trainer.accumulate=4", "trainer.save_every=2500"),
        uptraining=("experiment=mae_finetune", "task.model=null", "trainer.accumulate=4", "trainer.lr=2e-4",
                    "trainer.eval_every=1250"),
        scratch=("experiment=deit", "trainer.accumulate=4", "trainer.eval_every=12500"),
        m=256, ms=(64, 256), steps=(1250, 12500), long=1024, long_images=2000, near=NEAR[1], seeds=3,
        scratch_seeds=1, workers=1),
}


def main(size: str) -> None:
    setting, cells = SETTINGS[size], Cells("fig4-left", SOURCES)
    fill = partial(cells.fill, workers=setting.workers)
    start = checkpoint(setting)
    for key in start:  # one run after the other, each with all cores
        cells.fill([key], keep, "the exact checkpoint", workers=1)
    run = str(HOME.place(start[-1]["overrides"]))
    swaps = {(name, m, seed): swapped(name, m, seed, setting, run) for name in NAMES for m in ms_of(name, setting)
             for seed in (range(setting.swaps) if name in LINEAR else (0,))}
    fill(list(swaps.values()), last, "loss after the swap")
    layers = {(name, seed): {"run": run, "dataset": setting.dataset, "name": name, "m": setting.m, "seed": seed}
              for name in LINEAR for seed in range(CAPTURES)}
    fill(list(layers.values()), fig4_checkpoint.layers, "error of each layer")
    found = Found(cells[start[-1]], values(cells, swaps), values(cells, layers))
    passed = check_gates(gates(setting, found))
    arms = lambda seeds: [(name, seed) for seed in range(seeds) for name in NAMES]
    uptrained = {arm: uptraining(*arm, setting, run) for arm in arms(setting.seeds)}
    fill(list(uptrained.values()), train, "uptraining")
    scratch = {arm: from_scratch(*arm, setting) for arm in arms(setting.scratch_seeds)}
    fill(list(scratch.values()), train, "training from scratch")
    long = {name: {"run": run, "dataset": setting.dataset, "size": setting.long, "count": setting.long_images,
                   "name": name, "m": m_of(name, setting), "options": options_of(name, setting)} for name in NAMES}
    cells.fill(list(long.values()), fig4_checkpoint.long, "long images", workers=1)  # timed, so one at a time
    found.uptrained, found.scratch, found.long = (values(cells, keys) for keys in (uptrained, scratch, long))
    fig4_page.write(size, setting, found, passed, cells.seconds())


def values(cells: Cells, keys: dict[Any, dict[str, Any]]) -> dict[Any, Any]:
    return {name: cells[key] for name, key in keys.items()}
