"""Performers: images as sequences of pixel values, and the Long Range Arena.

Reproduces Figures 7 (left) and 19.
"""

import pandas as pd

from crt_exp.experiments.report import (
    Claim,
    Page,
    Rows,
    Tables,
    added,
    control_checks,
    dot_plot,
    filters_over,
    label,
    mean_ci,
    mean_table,
    panels,
    sweep,
)

SIZES = (
    "+task.sizes.heads=4 +task.sizes.layers=2 +task.sizes.d_ff=128 +task.sizes.d=64 task.positions=rotary "
    "trainer.select=last trainer.save_every=1000000"
)
PIXELS = f"task=pixels task.dataset=cifar10 task.evaluated=16 trainer.eval_batch=2 trainer.warmup=20 {SIZES}"
IMAGES = {
    "16 x 16": "task.size=16 trainer.batch=4 trainer.steps=200 trainer.eval_every=50",
    "32 x 32": "task.size=32 trainer.batch=1 trainer.steps=150 trainer.eval_every=75",
}
REFORMER = "reformer chunk=64 hashes=2 buckets=96"
IMAGE_METHODS = [
    "exact",
    "favorp m=32",
    "favorpp m=32",
    "relu m=32",
    "smreg m=32",
    REFORMER,
    "uniform",
    "identity",
    "window block=16 first=16",
]
LISTOPS = {
    "ListOps": f"task=lra task.dropout=0 {SIZES} +task.rules.train=20000 +task.rules.test=2000 "
    "+task.rules.arguments=3 +task.rules.shortest=14 +task.rules.longest=40 trainer.batch=128 "
    "trainer.eval_batch=256 trainer.steps=500 trainer.eval_every=100 trainer.lr=4e-3"
}
LISTOPS_METHODS = [
    "exact",
    "favorp m=16",
    "favorpp m=16",
    "relu m=16",
    "elu",
    "linformer length=1024 rank=16",
    "reformer chunk=4 hashes=2 buckets=8",
    "uniform",
    "identity",
    "window block=4 first=4",
]
EXTENDED_LISTOPS = [
    "favorp m=16",
    "elu",
    "linformer length=1024 rank=16",
]  # undecided after five seeds
IMAGENET, ARENA = "experiment=performers_imagenet64", "experiment=performers_lra, 13 GPU hours"


SCALES = {"bits_per_dim": 1, "accuracy": 100}
UNITS = {"bits_per_dim": "bits per dimension", "accuracy": "accuracy, %"}
SPECS = {"bits_per_dim": ".3f", "accuracy": ".1f"}
FULL_SETS = {
    "ListOps": "",  # the others: sizes, steps and rates of the Arena's base configurations
    "text": "task.dataset=text task.data_dir=aclImdb task.max_length=4000 +task.sizes.layers=4 +task.sizes.heads=4 "
    "+task.sizes.d=256 +task.sizes.d_ff=1024 trainer.steps=20000 trainer.warmup=8000 trainer.lr=5.59e-4",
    "retrieval": "task.dataset=retrieval task.data_dir=aan task.max_length=4000 +task.sizes.layers=4 "
    "+task.sizes.heads=4 +task.sizes.d=128 +task.sizes.d_ff=512 trainer.warmup=8000 trainer.lr=5.59e-4",
    "image": "task.dataset=image task.max_length=1024 +task.sizes.layers=1 +task.sizes.heads=8 +task.sizes.d=128 "
    "+task.sizes.d_ff=128 task.dropout=0.3 trainer.batch=256 trainer.steps=35000 trainer.warmup=175 "
    "trainer.lr=5e-4 trainer.weight_decay=0 trainer.schedule=cosine",
    "Pathfinder": "task.dataset=pathfinder task.max_length=1024 +task.sizes.layers=4 +task.sizes.heads=8 "
    "+task.sizes.d=32 +task.sizes.d_ff=32 task.dropout=0.2 trainer.batch=512 trainer.steps=62400 "
    "trainer.warmup=312 trainer.lr=1e-3 trainer.weight_decay=0 trainer.schedule=cosine",
}


TIMED = {seed: f"seed={seed} trainer.steps=10 trainer.log_every=1" for seed in range(5)}
SMALL = {
    "pixels": sweep(PIXELS, dataset=IMAGES, attention=IMAGE_METHODS, seed=range(5)),
    "pixels/speed": sweep(
        PIXELS, alone=True, dataset=IMAGES, attention=["favorp m=32", REFORMER], seed=TIMED
    ),
    "lra": [
        *sweep(dataset=LISTOPS, attention=LISTOPS_METHODS, seed=range(5)),
        *sweep(dataset=LISTOPS, attention=EXTENDED_LISTOPS, seed=range(5, 20)),
    ],
}
DEEP = (
    f"{IMAGENET} trainer.clip=null attention=reformer attention.hashes=2 attention.chunk=128 "
    "attention.buckets=192 +task.sizes.layers=12"
)
FULL_IMAGE_METHODS = ["exact", "relu", "favorp redraw_every=1000", "smreg redraw_every=1000"]
FULL_METHODS = ["exact", "favorp", "relu", "elu", "linformer length=4000 rank=256"]
FULL_METHODS += ["reformer chunk=64 buckets=128", "uniform", "identity"]
SET = "ImageNet64"
FULL = {
    "pixels": [
        *sweep(IMAGENET, dataset=SET, seed=[0], attention=[*FULL_IMAGE_METHODS, "uniform"]),
        *sweep(DEEP, dataset=SET, seed=[0], method="reformer, 12 layers"),
    ],
    "lra": sweep(
        "experiment=performers_lra", dataset=FULL_SETS, seed=range(4), attention=FULL_METHODS
    ),
}


def cases(rows: Rows, metric: str) -> dict[str, dict]:
    """Data set -> filter of its test rows."""
    test = rows.select(metric, sweep=("pixels", "lra"), split="test")
    cases = {}
    for sweep_name, dataset in test.groupby(["sweep", "dataset"], sort=False).groups:
        cases[dataset] = {"sweep": sweep_name, "dataset": dataset, "split": "test"}
    return cases


def method_names(rows: Rows, metric: str, case: str) -> dict[str, str]:
    """Methods of a case -> name without options."""
    names = {}
    for method in rows.methods(metric, **cases(rows, metric)[case]):
        name = method.split(" ")[0] if "=" in method else method
        names[method] = label(name)
    return names


def differences(rows: Rows, metric: str, first: str, second: str) -> dict[str, pd.Series]:
    """By case, the first method minus the second, by their names without options."""
    differences = {}
    for case, where in cases(rows, metric).items():
        methods = {name: method for method, name in method_names(rows, metric, case).items()}
        pair = methods.get(first, first), methods.get(second, second)
        differences[case] = SCALES[metric] * rows.paired(*pair, metric, **where)
    return differences


LOOKS = (3, 5)  # seeds after which results were seen; then more were added


def finding(rows: Rows) -> str:
    gains = differences(rows, "accuracy", "FAVOR+", "ELU")
    gain = mean_ci(gains.get("ListOps", []))
    return (
        "On small images, a window has the lowest loss, and FAVOR+, ReLU and SMREG do not differ (n = 5 seeds). On "
        f"ListOps, FAVOR+ is more accurate than ELU by {gain} points (95% CI, n = {gain.n} seeds)."
    )


STEPS_100K = "3.67 against 3.69 after 100k steps"
LAYERS = "Performer/6-layers matches the Reformer/12-layers"
NEIGHBOURS = "Reformer attends to neighbouring pixels, and a window does best here"
LONGER = "experiment=performers_imagenet64, 160 GPU hours"
IMAGE_CLAIMS = {  # text -> methods, the paper's result, explanation
    "ReLU has a lower loss than FAVOR+": ("FAVOR+", "ReLU", STEPS_100K, ""),
    "SMREG has a lower loss than FAVOR+": ("FAVOR+", "SMREG", STEPS_100K, ""),
    "FAVOR+ has a lower loss than Reformer at equal depth": ("Reformer", "FAVOR+", "", NEIGHBOURS),
}


def claims(rows: Rows) -> list[Claim]:
    images = cases(rows, "bits_per_dim")
    bits = "bits per dimension"
    fails = {}
    for control in ("uniform", "identity"):
        fails |= control_checks(rows, images, "bits_per_dim", unit=bits, control=control)
    claims = []
    for text, (worse, better, paper, reason) in IMAGE_CLAIMS.items():
        gains = {}
        for case, gain in differences(rows, "bits_per_dim", worse, better).items():
            gains[case] = added(gain, *LOOKS)
        claims.append(Claim(text, gains, paper, LONGER, unit=bits, fails=fails, reason=reason))
    claims.append(
        Claim(
            "FAVOR+ takes at most half the time of Reformer per step",
            rows.paired_by_case(
                "favorp m=32", REFORMER, "steps_per_s", filters_over("dataset", IMAGES), log=True
            ),
            above=2,
            log=True,
            unit="times",
            paper="can be 2x faster than the Reformer",
            needs="more processes on a quiet machine",
        )
    )
    deep = rows.methods("bits_per_dim", dataset="ImageNet64")
    claims.append(
        Claim(
            "six layers with FAVOR+ have a lower loss than twelve of Reformer",
            differences(rows, "bits_per_dim", "reformer, 12 layers", "FAVOR+"),
            paper=LAYERS,
            not_measured="" if deep else "all models have two layers",
            needs=LONGER,
        )
    )
    claims.append(
        Claim(
            "twelve layers with FAVOR+ have a lower loss than 24 of Reformer",
            paper="the Performer/12-layers matches the Reformer/24-layers",
            not_measured="all models have two layers",
            needs=f"{LONGER}, +task.sizes.layers=12, and Reformer with 24",
        )
    )
    accuracies = {}
    for name in ("Linformer", "Reformer", "ELU", "window"):
        for case, points in differences(rows, "accuracy", "FAVOR+", name).items():
            accuracies[f"{name}, {case}"] = added(points, *LOOKS)
    claims.append(
        Claim(
            "FAVOR+ is more accurate than the other scalable methods",
            accuracies,
            unit="points",
            reason="one of the paper's five tasks, with lists of at most 3 entries",
        )
    )
    claims.append(
        Claim(
            "Performers have the largest average over five tasks",
            paper="the largest average of the methods above 100 examples/s",
            not_measured="only ListOps is measured at this size",
            needs=ARENA,
        )
    )
    return claims


def tables(rows: Rows) -> Tables:
    columns = {}
    for metric, unit in UNITS.items():
        for case, where in cases(rows, metric).items():
            title = f"{case}, {unit}"
            column = {title: {"metric": metric, **where}}
            names = method_names(rows, metric, case)
            table = mean_table(rows, column, names, SCALES[metric], SPECS[metric])
            columns[title] = table[title]
    columns["paper, ImageNet64"] = pd.Series({"FAVOR+": "3.69", "ReLU": "3.67", "SMREG": "3.67"})
    table = pd.concat(columns, axis=1).fillna("").rename_axis("attention")
    return {"On test (bits: lower is better)": table}


def figure(rows: Rows):
    shown = []
    for metric in UNITS:
        shown += [(metric, case) for case in cases(rows, metric)]
    if not shown:
        return None
    fig, axes = panels(len(shown))
    for ax, (metric, case) in zip(axes, shown):
        names = method_names(rows, metric, case)
        where = cases(rows, metric)[case]
        gains = rows.by_method(metric, names, SCALES[metric], less="exact", **where)
        dot_plot(ax, gains, zero=True, labels=names)
        ax.set(title=f"{case}: difference from exact attention", xlabel=UNITS[metric])
    return fig


page = Page(
    "perf_long",
    title="Performers Figures 7 (left) and 19: images as sequences of values, and the Long Range Arena",
    finding=finding,
    small=SMALL,
    full=FULL,
    columns=["dataset", "split", "method"],
    metrics=[*UNITS, "steps_per_s"],
    measured=[
        "Models: 2 layers, 4 heads, d = 64, rotary positions; five seeds, two of them added after the first results. "
        "On ListOps 15 more for FAVOR+, ELU and Linformer, on a GPU. Claims use the seeds added last.",
        "Times: a process a sample, 10 steps. Claims of the paper on Reformer's loss and on the Arena are on models of "
        "more layers and on averages of five tasks; those on equal depth and on ListOps alone are ours.",
        "Images: CIFAR-10 at 16 x 16 (200 steps of 4 images) and 32 x 32 (150 steps of one). The paper trains 6 to 24 "
        "layers on ImageNet64.",
        "ListOps: lists of at most 3 entries, 15 to 39 symbols, 500 steps of 128. The Arena has up to 2,000 symbols.",
        "At full size models train on 95% of ImageNet64's training images and are tested on its validation images. "
        "Sparse Transformer, Longformer, Sinkhorn, Synthesizer, BigBird and Path-X were not run.",
        "Positions and lengths were chosen with exact and uniform attention alone, so that attention matters early.",
    ],
    tables=tables,
    claims=claims,
    figure=figure,
)
