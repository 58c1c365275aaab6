"""Performers Figures 5 and 15: exact weights in random features, their recovery, and redrawn projections."""

import pandas as pd

from crt_exp.papers.perf_proteins import DIRECTIONS, FAMILIES, MODEL, PROTEOMES, trained
from crt_exp.report import Claim, Page, Rows, dot_plot, label, line_plot, mean_ci, mean_table, share, sweep
from crt_exp.report.plots import panels
from crt_exp.report.sweeps import HOME, Run

COMMON = MODEL.partition("+task.sizes")[0] + "trainer.batch=32 trainer.eval_batch=128 trainer.select=last " \
    "trainer.save_every=1000000"
STARTS = [("generated families", "U", 8), ("proteomes", "U", 3), ("proteomes", "B", 3)]  # exact models: how many
TUNED = {"generated families": f"{FAMILIES['generated families']} trainer.warmup=5 trainer.steps=200 "
         "trainer.eval_every=25",
         "proteomes": f"{PROTEOMES['proteomes']} trainer.warmup=5 trainer.steps=40 trainer.eval_every=5"}
BRIEF = ["exact", "uniform", "favorp m=256", "favorpp m=256"]  # of proteomes
DRAWN = ["favor m=256", "favorp m=32", "favorp m=256", "favorpp m=32", "favorpp m=256", "smreg m=256", "relu m=256"]
FIXED = ["exact", "uniform", "identity", "elu", "reformer chunk=16 buckets=16 hashes=2"]  # no random projections
EVERY, STEP = ("{} m=256 redraw_every=100".format, "{} m=256 redraw_every=1".format)
LONG = ["exact", "favorp m=256", EVERY("favorp"), STEP("favorp"), "favorpp m=256", STEP("smreg")]  # 8 models
FEW = ["uniform", "favor m=256", "relu m=256", "smreg m=256", EVERY("favorpp"), STEP("favorpp")]   # 3 models
SCRATCH = ["exact", "uniform", "favorp m=64", "favorp m=64 redraw_every=100", "favorp m=64 redraw_every=1",
           "favorpp m=64", "favorpp m=64 redraw_every=100"]
WORDS = ("task=books task.vocabulary_size=300 task.evaluated=1000 task.max_length=64 task.dropout=0 "
         "task.carried.pieces=8 trainer.batch=32 trainer.eval_batch=64 trainer.warmup=20 trainer.select=last "
         "trainer.save_every=1000000")
TRAINED = f"{WORDS} +task.sizes.heads=4 +task.sizes.layers=2 +task.sizes.d_ff=128 +task.sizes.d=64 trainer.steps=800 " \
          "trainer.eval_every=200"
NEAR_FAR, TEXT = "nearfar block=8 heavy=8 cells=8 exact_until=0", {"WikiText-2": ""}
OF_TEXT = ["exact", "uniform", "identity", "window block=8 first=8", "favorpp m=32", NEAR_FAR]
MOVED = ["exact", "uniform", "favor m=32", "favorp m=32", "favorp m=32 redraw_every=20", "smreg m=32 redraw_every=20",
         "favorpp m=32 redraw_every=20", "favorsharp m=16 redraw_every=20", NEAR_FAR]


def from_exact(key: str, options: str, name: str, mode: str, methods: list[str], seeds: int, models: int = 8,
               **axes) -> list[Run]:
    """Runs that start from the exact models of a data set, in turn; their sample is the model."""
    return [run for draw in range(-(-seeds // models)) for run in sweep(
        options, dataset={name: ""}, mode={mode: ""}, attention=methods, draw={draw: ""}, seed={
            model: f"seed={1000 * (key == 'task.init') + models * draw + model} "
                   f"{key}={HOME}/redraw-exact/{name.replace(' ', '-')}_{mode}_exact_{model}"
            for model in range(min(models, seeds))}, **axes)]


SWAP = "task=swap_loss task.splits=[test] task.offset=1000"
STEP_0 = "task=swap_loss task.splits=[validation] task.offset=1000"
small = {
    "redraw": [run for name, mode, models in STARTS for methods, seeds in (
        [(LONG, 8), (FEW, 3)] if models == 8 else [(BRIEF, 3)])
               for run in from_exact("task.init", f"{COMMON} {DIRECTIONS[mode]} {TUNED[name]}", name, mode, methods,
                                     seeds)],
    "redraw/swap": [run for name, mode, models in STARTS for run in [
        *from_exact("task.start", SWAP, name, mode, DRAWN, 24 if models == 8 else 3),
        *from_exact("task.start", SWAP, name, mode, FIXED, models),
        *from_exact("task.start", STEP_0, name, mode, [*LONG, *FEW] if models == 8 else BRIEF, models,
                    split={"validation": ""})]],
    "redraw/layers": [run for name, mode, models in STARTS if (name, mode) != ("proteomes", "U") for run in from_exact(
        "task.start", "task=swap_layers task.rows=8 task.batches=4 task.noise=0", name, mode,
        ["favorp m=256", "favorpp m=256"], models)],
    "redraw-scratch": trained(MODEL, {"generated families": FAMILIES["generated families"] + " trainer.eval_every=500"},
                              "U", SCRATCH, 3),
    "books": sweep(TRAINED, dataset=TEXT, mode={"U": ""}, attention=OF_TEXT, seed=range(5)),
    "books/speed": sweep(f"{TRAINED} trainer.steps=10 trainer.log_every=1", alone=True, dataset=TEXT, mode={"U": ""},
                         attention=OF_TEXT, seed=range(1)),
    "books/moved": sweep(f"{WORDS} trainer.steps=80 trainer.eval_every=40", dataset=TEXT, mode={"U": ""},
                         attention=MOVED, seed={seed: f"seed={seed} task.init={HOME}/books/WikiText-2_U_exact_{seed}"
                                                for seed in range(5)})}
PG19 = ["favorp redraw_every=1000", "favorp redraw_every=0", "favor redraw_every=1000", "favor redraw_every=0",
        "smreg redraw_every=1000", "exact", "favorpp redraw_every=1000", "favorsharp m=128 redraw_every=1000",
        "nearfar exact_until=0", "uniform", "identity", "window block=32 first=16"]
LM1B = "experiment=performers_lm1b"

page = Page(
    "perf_redraw",
    title="Performers Figures 5 and 15: exact weights in random features, and redrawn projections",
    finding="Fine-tuned from exact weights, FAVOR+ recovers most accuracy within a tenth of the training, and redraws "
            "do not help. From scratch, redraws every 100 steps help.",
    small=small,
    full={"books": [*sweep("experiment=performers_pg19", dataset={"PG-19": ""}, mode=DIRECTIONS, attention=PG19,
                           seed=range(1)),
                    *sweep("experiment=performers_pg19", dataset={"PG-19": ""}, mode={"B": DIRECTIONS["B"]},
                           attention=["linformer length=1024 rank=600 redraw_every=1000"], seed=range(1)),
                    *sweep(LM1B, dataset={"LM1B": ""}, mode={"U": ""}, attention=["uniform", "identity"],
                           seed=range(1))],
          "books/moved": sweep(f"{LM1B} trainer.steps=50000 task.init={HOME}/lm1b/LM1B_U_exact_0", dataset={"LM1B": ""},
                               mode={"U": ""}, attention=["favorp", "favor", "uniform"], seed=range(1))},
    models={"redraw-exact": [run for name, mode, models in STARTS for run in trained(
                MODEL, {name: {**FAMILIES, **PROTEOMES}[name]}, mode, ["exact"], models)],
            "books": sweep(TRAINED, dataset=TEXT, mode={"U": ""}, attention=["exact"], seed=range(5)),
            "lm1b": sweep(LM1B, dataset={"LM1B": ""}, mode={"U": ""}, attention=["exact"], seed=range(1))},
    data="proteomes, WikiText-2",
    columns=["dataset", "mode", "split", "step", "layer", "method"],
    metrics=["loss", "accuracy", "unigram_loss", *(f"loss_at_{row}" for row in range(1, 9)), "steps_per_s", "output",
             "uniform", "entry", "S_mean"],
    measured=[
        "Exact models of [perf_proteins](perf_proteins.md): 2 layers, d = 64. The paper's have 36 layers (proteins) or "
        "6 (PG-19, LM1B).",
        "Without training: their weights in another attention, test split; three or four sets of projections a model "
        "(proteomes: one), averaged within it. Fine-tuned, once or twice a model: a new optimiser, another order of "
        "rows, a fifth of the exact model's steps; losses on validation, which chooses nothing. m = 256 orthogonal "
        "projections, drawn once "
        "where nothing is said; 256 was chosen after 8 and 32 on one model.",
        "A sample is an exact model: eight on generated families (three for uniform, trigonometric, ReLU, SMREG drawn "
        "once and FAVOR++ redrawn), five of them added after the first results; three on proteomes, where uniform "
        "attention costs next to nothing (U: 0.003 nats, B: 0.19), so they decide no claim.",
        "From scratch: generated families, m = 64, 1000 steps, three seeds.",
        "WikiText-2: 300 byte pairs, rows of 64, d = 64, 800 steps; fine-tuned for 80 steps, m = 32 (FAVOR#: 16), "
        "redrawn every 20; five seeds. Vocabulary and steps were chosen so that attention matters early, after methods "
        "of all kinds had been seen. Read on: the text goes on beyond the row with what attention remembers.",
        "Near-far rows are of an older version of its code. Layers: 4 batches of 8 validation rows."])


def claims(rows: Rows) -> list[Claim]:
    proteins = {"dataset": "generated families", "mode": "U", "split": "validation"}
    words = {"dataset": "WikiText-2", "sweep": "books/moved", "split": "test"}
    scratch = {"dataset": "generated families", "sweep": "redraw-scratch", "split": "test"}

    def fine(better: str, worse: str, step: int):
        return rows.paired(worse, better, "loss", sweep="redraw", step=step, **proteins)

    def accuracy(method: str, step: int):
        return rows.values("accuracy", method, sweep=("redraw", "redraw/swap"), step=step, **proteins)

    lost, back = accuracy("exact", 0) - accuracy("favorp m=256", 0), accuracy("favorp m=256", 100) - accuracy(
        "favorp m=256", 0)
    after = "generated families, fine-tuned for {} steps".format
    moved = "WikiText-2, fine-tuned for 80 steps"
    texts = {f"PG-19, {mode}": {"dataset": "PG-19", "mode": mode, "split": "test"} for mode in DIRECTIONS}
    nats = {"unit": "nats"}
    return [
        Claim("FAVOR+ regains 90% of the accuracy it loses in a tenth of the exact model's steps",
              {"generated families": share(back, lost)}, above=0.9, unit="of it",
              paper="recovers in a small fraction of the original steps"),
        Claim("FAVOR+ without redraws ends above exact attention fine-tuned as long", {
            after(200): fine("exact", "favorp m=256", 200)}, paper="without redrawing, they plateau", **nats),
        Claim("FAVOR+ with redraws ends below FAVOR+ without",
              {after(200): fine(EVERY("favorp"), "favorp m=256", 200),
               "generated families, from scratch": rows.paired("favorp m=64", "favorp m=64 redraw_every=100", "loss",
                                                               **scratch),
               moved: rows.paired("favorp m=32", "favorp m=32 redraw_every=20", "loss", **words)}
              | {case: rows.paired("favorp redraw_every=0", "favorp redraw_every=1000", "loss", **where)
                 for case, where in texts.items()},
              paper="redrawing is necessary to match the Transformer", **nats),
        Claim("SMREG is below FAVOR+, both redrawn",
              {after(25): fine(STEP("smreg"), STEP("favorp"), 25),
               moved: rows.paired("favorp m=32 redraw_every=20", "smreg m=32 redraw_every=20", "loss", **words)}
              | {case: rows.paired("favorp redraw_every=1000", "smreg redraw_every=1000", "loss", **where)
                 for case, where in texts.items()},
              paper="SMREG allows faster convergence", **nats),
        Claim("FAVOR+ ends below trigonometric features",
              {after(200): fine("favorp m=256", "favor m=256", 200),
               moved: rows.paired("favor m=32", "favorp m=32", "loss", **words)}
              | {case: rows.paired("favor redraw_every=1000", "favorp redraw_every=1000", "loss", **where)
                 for case, where in texts.items()},
              paper="trigonometric features become highly unstable", **nats),
        Claim("Linformer plateaus as positive features without redraws do", paper="at the same perplexity",
              not_measured="Linformer mixes positions and cannot be causal, as these models are")]


def named(method: str) -> str:
    """FAVOR+, every 100 steps; where nothing is said projections are drawn once."""
    first, *options = method.split(" ")
    redrawn = [option.partition("=")[2] for option in options if option.startswith("redraw_every")]
    name = {"favor": "trigonometric"}.get(first, label(first))
    return name + "".join(", every step" if every == "1" else f", every {every} steps" for every in redrawn
                          if every != "0")


def increase(rows: Rows, steps: list[int], **where) -> pd.DataFrame:
    """Loss on validation above that of exact attention fine-tuned as long."""
    where |= {"split": "validation", "sweep": ("redraw", "redraw/swap")}
    made = {named(method): {f"{step} steps" if step else "without training": shown(rows.paired(
        method, "exact", "loss", step=step, **where)) for step in steps}
        for method in rows.methods("loss", **where) if method != "exact"}
    table = pd.DataFrame.from_dict(made, orient="index")
    table.index.name = "m = 256"
    return table


def shown(values: pd.Series) -> str:
    return f"{mean_ci(values):+.3f}" if len(values) else ""


def tables(rows: Rows):
    families = {"dataset": "generated families", "mode": "U"}
    swap, books = {"sweep": "redraw/swap", "split": "test"}, {"dataset": "WikiText-2", "split": "test"}
    short = {method: named(method) for method in rows.methods("loss")}
    swapped = {method: name + f", m = {method[-2:]}" * method.endswith("m=32") for method, name in short.items()}
    layers = rows.select("output")[["dataset", "mode", "layer"]].drop_duplicates().itertuples(index=False)
    words = pd.DataFrame({f"{case}: {metric}": mean_table(rows, {"": {"metric": metric, "sweep": of, **books}}, short,
                                                          spec=spec)[""]
                          for case, of in (("from scratch", "books"), ("fine-tuned", "books/moved"))
                          for metric, spec in [("loss", ".3f")]})
    return {
        "Loss increase over exact attention fine-tuned as long, nats: generated families": increase(
            rows, [0, 25, 100, 200], **families),
        **{f"The same: proteomes, {mode}": increase(rows, [0, 5, 20, 40], dataset="proteomes", mode=mode)
           for mode in DIRECTIONS},
        "Loss on test without training, nats": mean_table(rows, {
            f"{name}, {mode}": {"metric": "loss", "dataset": name, "mode": mode, **swap} for name, mode, _ in STARTS},
            swapped, spec=".4f"),
        "From scratch, generated families: test": mean_table(rows, {
            name: {"metric": name, "sweep": "redraw-scratch", "split": "test"} for name in ("loss", "accuracy")}, short,
            spec=".4f"),
        f"WikiText-2: loss on test, nats (token frequencies: {rows.values('unigram_loss', 'exact').mean():.3f})": words,
        "WikiText-2, steps a second": mean_table(rows, {"steps/s": {"metric": "steps_per_s", "sweep": "books/speed"}},
                                                 short, spec=".2f"),
        **{f"WikiText-2, read on, {case}: nats a token in each row of 64": mean_table(rows, {
            f"row {row}": {"metric": f"loss_at_{row}", "sweep": of} for row in range(1, 9)}, short, spec=".3f")
           for case, of in (("from scratch", "books"), ("fine-tuned", "books/moved"))},
        "Layers of the exact models: relative errors, and mean |x + y|^2": pd.DataFrame({
            f"{name}, {mode}, layer {layer:.0f}": {title + named(method) * (metric in ("output", "entry")): format(
                mean_ci(rows.values(metric, method, dataset=name, mode=mode, layer=layer)), ".3g")
                for metric, title in (("output", "output, "), ("entry", "predicted entry, "),
                                      ("uniform", "output, uniform"), ("S_mean", "mean |x + y|^2"))
                for method in rows.methods(metric)} for name, mode, layer in layers})}


def figure(rows: Rows):
    fig, (left, right) = panels(2)
    line_plot(left, rows, "step", "loss", {method: named(method) for method in LONG[1:]}, less="exact",
              dataset="generated families", split="validation", sweep=("redraw", "redraw/swap"),
              dotted=[EVERY("favorp")])
    left.set(title="Generated families, fine-tuned from exact weights", xlabel="steps",
             ylabel="loss above exact attention, nats")
    effects = {}
    for title, first, second, where in [
            *((f"{named(f(name))}: fine-tuned, 200 steps", f"{name} m=256", f(name), {"sweep": "redraw", "step": 200,
               "dataset": "generated families", "split": "validation"}) for name in ("favorp", "favorpp")
              for f in (EVERY, STEP)),
            *((f"{named(method)}: from scratch", method.rpartition(" ")[0], method,
               {"sweep": "redraw-scratch", "split": "test"}) for method in SCRATCH if "redraw" in method),
            ("FAVOR+, every 20 steps: WikiText-2, fine-tuned", "favorp m=32", "favorp m=32 redraw_every=20",
             {"sweep": "books/moved", "split": "test"})]:
        effects[title] = rows.paired(second, first, "loss", **where)
    dot_plot(right, effects, zero=True)
    right.set(title="What redraws cost", xlabel="loss with redraws less loss without, nats")
    fig.tight_layout()
    return fig
