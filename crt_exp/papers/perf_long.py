"""Performers Figures 7 (left) and 19: images value by value, and the Long Range Arena."""

import pandas as pd

from crt_exp.report import Claim, Page, Rows, dot_plot, label, mean_table, sweep
from crt_exp.report.plots import panels

SIZES = "+task.sizes.heads=4 +task.sizes.layers=2 +task.sizes.d_ff=128 +task.sizes.d=64 task.positions=rotary " \
        "trainer.select=last trainer.save_every=1000000"
PIXELS = f"task=pixels task.dataset=cifar10 task.evaluated=16 trainer.eval_batch=2 trainer.warmup=20 {SIZES}"
IMAGES = {"16 x 16": "task.size=16 trainer.batch=4 trainer.steps=200 trainer.eval_every=50",
          "32 x 32": "task.size=32 trainer.batch=1 trainer.steps=150 trainer.eval_every=75"}
OF_IMAGES = ["exact", "favorp m=32", "favorpp m=32", "nearfar preset=cheap exact_until=0", "relu m=32", "smreg m=32",
             "reformer chunk=64 hashes=2 buckets=96", "uniform", "identity", "window block=16 first=16"]
ARENA = f"task=lra task.dropout=0 {SIZES}"
LISTOPS = {"ListOps": "+task.rules.train=20000 +task.rules.test=2000 +task.rules.arguments=3 +task.rules.shortest=14 "
           "+task.rules.longest=40 trainer.batch=128 trainer.eval_batch=256 trainer.steps=500 trainer.eval_every=100 "
           "trainer.lr=4e-3"}
SHORT = "task.evaluated=300 trainer.eval_batch=50 trainer.lr=2e-3"
OTHER_SETS = {
    "Pathfinder": f"task.dataset=pathfinder trainer.batch=32 trainer.steps=100 trainer.eval_every=50 {SHORT}",
    "text": "task.dataset=text task.max_length=128 task.held_out=0.01 trainer.batch=32 trainer.steps=250 "
            f"trainer.eval_every=125 {SHORT}",
    "retrieval": "task.dataset=retrieval task.max_length=128 trainer.batch=16 trainer.steps=250 "
                 f"trainer.eval_every=125 {SHORT}",
    "image": f"task.dataset=image trainer.batch=4 trainer.steps=50 trainer.eval_every=50 {SHORT}"}
OF_ARENA = ["exact", "favorp m=16", "favorpp m=16", "nearfar block=4 heavy=4 cells=4 exact_until=0", "relu m=16", "elu",
            "linformer length=1024 rank=16", "reformer chunk=4 hashes=2 buckets=8", "uniform", "identity",
            "window block=4 first=4"]
TIMED = "trainer.steps=10 trainer.log_every=1"
IMAGENET = "experiment=performers_imagenet64"
REFORMER = "attention=reformer attention.hashes=2 attention.chunk=128 attention.buckets=192 trainer.clip=null"
FULL_SETS = {  # sizes, steps and rates of the Arena's base configurations
    "ListOps": "",
    "text": "task.dataset=text task.data_dir=aclImdb task.max_length=4000 +task.sizes.layers=4 +task.sizes.heads=4 "
            "+task.sizes.d=256 +task.sizes.d_ff=1024 trainer.steps=20000 trainer.warmup=8000 trainer.lr=5.59e-4",
    "retrieval": "task.dataset=retrieval task.data_dir=aan task.max_length=4000 +task.sizes.layers=4 "
                 "+task.sizes.heads=4 +task.sizes.d=128 +task.sizes.d_ff=512 trainer.warmup=8000 trainer.lr=5.59e-4",
    "image": "task.dataset=image task.max_length=1024 +task.sizes.layers=1 +task.sizes.heads=8 +task.sizes.d=128 "
             "+task.sizes.d_ff=128 task.dropout=0.3 trainer.batch=256 trainer.steps=35000 trainer.warmup=175 "
             "trainer.lr=5e-4 trainer.weight_decay=0 trainer.schedule=cosine",
    "Pathfinder": "task.dataset=pathfinder task.max_length=1024 +task.sizes.layers=4 +task.sizes.heads=8 "
                  "+task.sizes.d=32 +task.sizes.d_ff=32 task.dropout=0.2 trainer.batch=512 trainer.steps=62400 "
                  "trainer.warmup=312 trainer.lr=1e-3 trainer.weight_decay=0 trainer.schedule=cosine"}

page = Page(
    "perf_long",
    title="Performers Figures 7 (left) and 19: images value by value, and the Long Range Arena",
    finding="No ordering of FAVOR+, ReLU and SMREG shows on images at this size, where a window wins. On ListOps "
            "FAVOR+ is above Reformer.",
    small={"pixels": sweep(PIXELS, dataset=IMAGES, attention=OF_IMAGES, seed=range(5)),
           "pixels/speed": sweep(PIXELS, alone=True, dataset={
               name: f"{options} {TIMED}" for name, options in IMAGES.items()}, attention=OF_IMAGES, seed=range(1)),
           "lra": [*sweep(ARENA, dataset=LISTOPS, attention=OF_ARENA, seed=range(5)),
                   *sweep(ARENA, dataset=OTHER_SETS, attention=["exact", "uniform"], seed=range(5))],
           "lra/speed": sweep(ARENA, alone=True, dataset={
               name: f"{options} {TIMED}" for name, options in {**LISTOPS, **OTHER_SETS}.items()},
               attention=OF_ARENA, seed=range(1))},
    full={"pixels": [*sweep(IMAGENET, dataset={"ImageNet64": ""}, seed=range(1), attention=[
                         "relu", "favorp redraw_every=1000", "smreg redraw_every=1000", "exact", "uniform", "identity",
                         "favorpp redraw_every=1000", "nearfar exact_until=0", "window block=32 first=16"]),
                     *sweep(IMAGENET, dataset={"ImageNet64": ""}, seed=range(1), method={
                         "relu, 12 layers": "attention=relu +task.sizes.layers=12",
                         "reformer, 12 layers": f"{REFORMER} +task.sizes.layers=12",
                         "reformer, 24 layers": f"{REFORMER} +task.sizes.layers=24"})],
          "lra": sweep("experiment=performers_lra", dataset=FULL_SETS, seed=range(4), attention=[
              "favorp", "relu", "exact", "elu", "linformer length=4000 rank=256", "window", "favorpp", "nearfar",
              "reformer chunk=64 buckets=128", "uniform", "identity"])},
    data="CIFAR-10, SST-2, WikiText-2",
    columns=["dataset", "split", "step", "method"],
    metrics=["bits_per_dim", "unigram_bits_per_dim", "accuracy", "majority_accuracy", "loss", "steps_per_s"],
    measured=[
        "Models of 2 layers, 4 heads, d = 64. Images: CIFAR-10 reduced to 16 and 32 pixels a side, 200 steps of 4 and "
        "150 of 1; the paper has ImageNet64 and 6 to 24 layers. ListOps: lists of at most 3 entries, 15 to 39 symbols, "
        "500 steps of 128; the paper's have up to 2,000.",
        "Positions are rotary and ListOps is short because exact attention is then above uniform attention after few "
        "steps; both were chosen with these two alone. On the other sets of the Arena uniform attention costs nothing "
        "after 50 to 250 steps, so only steps a second are measured there for other methods.",
        "A sample is a seed of weights, order and projections, the same in all methods; five, of which two were added "
        "after the first results. The last weights are tested.",
        "Steps a second: the median of some steps, one process alone on the machine.",
        "Window: blocks of 16 values (ListOps: 4) and the first ones. Near-far rows are of an older version of its "
        "code."])


def places(rows: Rows, metric: str) -> dict[str, dict]:
    found = rows.select(metric, sweep=("pixels", "lra"), split="test")[["sweep", "dataset"]].drop_duplicates()
    return {name: {"sweep": of, "dataset": name, "split": "test"} for of, name in found.itertuples(index=False)}


def fails(rows: Rows, metric: str, scale: float, least: float, unit: str) -> dict[str, str]:
    costs = {case: min(scale * rows.paired("exact", other, metric, **each).mean() for other in ("uniform", "identity")
                       if len(rows.values(metric, other, **each))) for case, each in places(rows, metric).items()}
    return {case: f"what the better of uniform and identity attention costs: {cost:.3g} {unit} (at least {least:g} "
                  "needed)" for case, cost in costs.items() if cost < least}


def claims(rows: Rows) -> list[Claim]:
    def of(name: str, metric: str) -> str:
        methods = rows.methods(metric, sweep=("pixels", "lra"), split="test")
        return next((method for method in methods if method.split(" ")[0] == name), name)

    def lower(first: str, second: str):
        return {case: rows.paired(of(second, "bits_per_dim"), of(first, "bits_per_dim"), "bits_per_dim", **each)
                for case, each in places(rows, "bits_per_dim").items()}

    def each_of(names: list[str], values) -> dict:
        return {f"{label(name)}, {case}": value for name in names for case, value in values(name).items()}

    def higher(peer: str):
        return {case: 100 * rows.paired(of("favorp", "accuracy"), of(peer, "accuracy"), "accuracy", **each)
                for case, each in places(rows, "accuracy").items()}

    failed = fails(rows, "bits_per_dim", -1, 0.5, "bits per dimension")
    bits = {"unit": "bits per dimension", "fails": failed}
    speed = {case: rows.ratio(of("favorp", "bits_per_dim"), of("reformer", "bits_per_dim"), "steps_per_s",
                              sweep="pixels/speed", dataset=case) for case in places(rows, "bits_per_dim")}
    peers = ["linformer", "reformer", "elu"]
    return [
        Claim("ReLU and SMREG end below FAVOR+", each_of(["relu", "smreg"], lambda name: lower(name, "favorp")),
              paper="3.67 against 3.69 after 100k steps", unit="bits per dimension",
              fails=each_of(["relu", "smreg"], lambda name: failed)),
        Claim("FAVOR+ ends below Reformer of as many layers", lower("favorp", "reformer"), **bits,
              paper="Performer/6-layers matches the Reformer/12-layers",
              reason="Reformer's chunks of neighbouring pixels suit images so short that a window wins"),
        Claim("a step of FAVOR+ takes at most half the time of Reformer's", speed, above=2, log=True, unit="times",
              fails=failed, paper="can be 2x faster than the Reformer", reason="one process was timed"),
        Claim("six layers with FAVOR+ end below twelve of Reformer", lower("favorp", "reformer, 12 layers"),
              paper="Performer/6-layers matches the Reformer/12-layers",
              not_measured="" if len(rows.select("bits_per_dim", "reformer, 12 layers")) else
              "models of two layers are trained, and exact attention costs little at 768 values"),
        Claim("FAVOR+ is more accurate than Linformer, Reformer and the Linear Transformer (ELU)",
              each_of(peers, higher), unit="points", paper="the largest score of all methods above 100 examples/s",
              fails=each_of(peers, lambda name: fails(rows, "accuracy", 100, 3.0, "points"))),
        Claim("Performers have the largest average over the five tasks", paper="the largest of scalable Transformers",
              not_measured="only on ListOps does attention matter at this size")]


def table(rows: Rows, metrics: dict[str, tuple[str, float, str]], **where) -> pd.DataFrame:
    """Methods by name. metrics: metric -> its baseline, scale and format."""
    parts = []
    for metric, (baseline, scale, spec) in metrics.items():
        for case, each in places(rows, metric).items():
            names = {method: label(method.split(" ")[0]) for method in rows.methods(metric, **each)}
            unit = "%" if metric == "accuracy" else "bits per dimension"
            column = f"{case}, {unit}"
            base = {"majority_accuracy": "most frequent class"}.get(baseline, "frequencies of values")
            parts.append(pd.concat([mean_table(rows, {column: {"metric": metric, **each}}, names, scale, spec),
                                    mean_table(rows, {column: {"metric": baseline, **each}}, {"exact": base}, scale,
                                               spec)]))
    made = pd.concat(parts, axis=1).fillna("")
    made.index.name = "attention"
    return made


def tables(rows: Rows):
    of_bits = {"bits_per_dim": ("unigram_bits_per_dim", 1, ".3f")}
    of_right = {"accuracy": ("majority_accuracy", 100, ".1f")}
    shown = table(rows, {**of_bits, **of_right})
    others = [column for column in shown if any(name in column for name in OTHER_SETS)]
    timed = {"metric": "steps_per_s", "sweep": ("pixels/speed", "lra/speed")}
    speeds = [mean_table(rows, {case: {"dataset": case, **timed}},
                         {method: label(method.split(" ")[0]) for method in rows.methods(dataset=case, **timed)},
                         spec=".2f") for case in rows.select(**timed)["dataset"].unique()]
    return {"On test": shown.drop(columns=others if len(others) < len(shown.columns) - 1 else []),
            "Other sets of the Arena, accuracy on test": shown.loc[(shown[others] != "").any(axis=1), others],
            "Steps a second in training": pd.concat(speeds, axis=1).fillna("") if speeds else pd.DataFrame()}


def figure(rows: Rows):
    wanted = [(metric, case, where) for metric in ("bits_per_dim", "accuracy") for case, where in
              places(rows, metric).items() if len(rows.methods(metric, **where)) > 2]
    fig, axes = panels(len(wanted))
    for ax, (metric, case, where) in zip(axes, wanted):
        scale, unit = (100, "points of accuracy") if metric == "accuracy" else (1, "bits per dimension")
        methods = {method: label(method.split(" ")[0]) for method in rows.methods(metric, **where) if method != "exact"}
        dot_plot(ax, {method: scale * rows.paired(method, "exact", metric, **where) for method in methods}, zero=True,
                 labels=methods)
        better = "higher" if metric == "accuracy" else "lower"
        ax.set(title=f"{case}: test", xlabel=f"{unit} above exact attention ({better} is better)")
    fig.tight_layout()
    return fig
