"""Performers Figures 6 and 7 (right), Tables 1 and 2: language models of proteins."""

import pandas as pd

from crt_exp.report import Claim, Page, Rows, dot_plot, label, line_plot, mean_table, share, sweep
from crt_exp.report.plots import panels

DIRECTIONS = {"U": "task.direction=unidirectional", "B": "task.direction=bidirectional"}
MODEL = ("task=trembl task.dropout=0 +task.sizes.heads=4 +task.sizes.layers=2 +task.sizes.d_ff=128 +task.sizes.d=64 "
         "trainer.batch=32 trainer.warmup=20 trainer.eval_batch=128 trainer.select=last trainer.save_every=1000000")
FAMILIES = {"generated families": "task.dataset=generated task.max_length=64 task.generated.shortest=32 "
            "task.generated.longest=64 trainer.eval_every=100 trainer.log_every=100 trainer.steps=1000"}
PROTEOMES = {"proteomes": "task.dataset=uniprot task.max_length=128 trainer.eval_every=40 trainer.log_every=40 "
             "trainer.steps=200"}
COMPARED = ["exact", "uniform", "favorp m=32", "favorpp m=32", "relu m=32"]
OTHERS = ["smreg m=32", "nearfar block=8 heavy=8 cells=8 exact_until=0", "elu", "identity", "window block=8"]
LINFORMER, REFORMER = "linformer length=128 rank=32", "reformer chunk=16 buckets=16 hashes=2"
CHAINS = ("task=trembl task.dataset=uniprot task.chains=true task.max_length=8192 task.held_out_files=[] "
          "task.validation_share=0.01 task.test_share=0.01 task.dropout=0 task.preset=tiny trainer.batch=1 "
          "trainer.warmup=4 trainer.select=last trainer.eval_every=1000000 trainer.save_every=1000000 trainer.steps=32")
SPLITS = {"train": "training", "validation": "validation", "test": "test", "ood": "held out"}
LENGTHS = ("length_min", "length_max", "length_mean", "length_std", "length_median")
REDRAWN = ["favorp redraw_every=1000", "favorpp redraw_every=1000", "smreg redraw_every=1000"]
PAPER = {"accuracy": {"U": {"letter frequencies": "9.92", "exact": "30.80", "ReLU": "31.58"},
                      "B": {"letter frequencies": "9.92", "exact": "33.32", "ReLU": "36.09", "FAVOR+": "33.00"},
                      "U, held out": {"letter frequencies": "9.07", "exact": "19.70", "ReLU": "18.44"},
                      "B, held out": {"letter frequencies": "9.07", "exact": "25.07", "ReLU": "24.10",
                                      "FAVOR+": "23.48"}},
         "perplexity": {"U": {"letter frequencies": "17.80", "exact": "9.37", "ReLU": "9.17"},
                        "B": {"letter frequencies": "17.80", "exact": "9.22", "ReLU": "8.36", "FAVOR+": "9.24"},
                        "U, held out": {"letter frequencies": "17.93", "exact": "13.20", "ReLU": "13.63"},
                        "B, held out": {"letter frequencies": "17.93", "exact": "12.09", "ReLU": "12.26",
                                        "FAVOR+": "12.41"}}}


def trained(options: str, data: dict[str, str], direction: str, methods: list[str], seeds: int):
    return sweep(options, dataset=data, mode={direction: DIRECTIONS[direction]}, attention=methods,
                 seed=range(seeds))


def full(direction: str, peer: str, options: str = ""):
    return [*trained("experiment=performers_trembl", {"TrEMBL": ""}, direction,
                     ["relu", "exact", "elu", "uniform", "nearfar exact_until=0", "identity", "window", *REDRAWN], 1),
            *trained(f"experiment=performers_trembl {options}", {"TrEMBL": ""}, direction, [peer], 1)]


page = Page(
    "perf_proteins",
    title="Performers Figures 6 and 7 (right), Tables 1 and 2: language models of proteins",
    finding="On generated families ReLU ends less accurate than exact attention, and FAVOR+ too for next letters, "
            "against the paper. At 8192 letters a FAVOR++ layer trains 14 times as fast.",
    small={"proteins": [*trained(MODEL, FAMILIES, "U", COMPARED, 8),
                        *trained(MODEL, FAMILIES, "U", [*OTHERS, REFORMER], 3),
                        *trained(MODEL, FAMILIES, "B", [*COMPARED, LINFORMER, REFORMER], 8),
                        *trained(MODEL, FAMILIES, "B", OTHERS, 3),
                        *trained(MODEL, PROTEOMES, "U", [*COMPARED, *OTHERS, REFORMER], 3),
                        *trained(MODEL, PROTEOMES, "B", [*COMPARED, *OTHERS, LINFORMER, REFORMER], 3)],
           "proteins-long": trained(CHAINS, {"chains of proteomes": ""}, "U", COMPARED, 3),
           "proteins-long/speed": [*sweep("task=speed", alone=True, seed=range(5), part={
               "attention layer": "task.what=protein_layer 'task.methods=[exact,\"favorpp m=128\",uniform]'",
               "model": "task.what=protein_model 'task.methods=[exact,\"favorpp m=64\",uniform]'"}, rows={
               1024: "task.lengths=[1024] task.rounds=2", 8192: "task.lengths=[8192] task.rounds=1",
               32768: "task.lengths=[32768] task.rounds=1"}), *sweep("task=speed", alone=True, seed=range(5), part={
                   "wide model": "task.what=protein_wide task.lengths=[8192] task.rounds=1 "
                                 "'task.methods=[exact,\"favorpp m=128\",uniform]'",
                   "model, all lengths in turn": "task.what=protein_model task.lengths=[1024,8192,32768] "
                                                 "task.rounds=2 'task.methods=[\"favorpp m=64\"]'",
                   "drawing letters": "task.what=protein_letter task.lengths=[100,1000,4000,8000] task.rounds=10 "
                                      "'task.methods=[exact,\"favorpp m=128\"]'"})],
           "proteins-long/memory": [*sweep("task=memory task.what=protein_model", alone=True, part={"model": ""},
                                           attention=["exact", "favorpp m=64", "uniform"],
                                           **{"task.length": [1024, 8192, 32768]}),
                                    *sweep("task=memory task.what=protein_model", alone=True, part={"model": ""},
                                           method={"exact, matrix formed": "'task.method=\"exact, matrix formed\"'"},
                                           **{"task.length": [1024, 8192]})]},
    full={"proteins": [*full("U", "reformer hashes=2 chunk=128 buckets=16", "trainer.clip=null"),
                       *full("B", "linformer length=1024 rank=600 redraw_every=1000")],
          "proteins-long": [*trained("experiment=performers_trembl_concat", {"chains of TrEMBL": ""}, "U",
                                     ["relu", "exact", "uniform", *REDRAWN[:2]], 1),
                            *sweep("experiment=performers_trembl_concat attention=exact +task.sizes.d=256 "
                                   "+task.sizes.d_ff=256", dataset={"chains of TrEMBL": ""}, mode={"U": ""},
                                   method={f"exact, {n} layers": f"+task.sizes.layers={n}" for n in (1, 2, 3)},
                                   seed=range(1))]},
    data="proteomes",
    columns=["dataset", "mode", "split", "step", "part", "length", "method"],
    metrics=[*(f"{given}{metric}{split}" for given in ("", "unigram_") for metric in ("loss", "accuracy", "perplexity")
               for split in ("", "_ood")), "floor_loss", "floor_loss_ood", "floor_perplexity", "floor_perplexity_ood",
             *(f"{split}_{key}" for split in SPLITS for key in ("sequences", *LENGTHS)), "letters_per_s", "ms", "mib"],
    measured=[
        "Models of 2 layers, 4 heads, d = 64, 1000 steps of 32 rows of 32 to 64 letters (generated families) or 200 "
        "steps of up to 128 (proteomes); the paper's have 36 layers and 500,000 steps on TrEMBL. Next letters (U) or "
        "masked ones (B).",
        "m = 32 orthogonal projections, never redrawn. A sample is a seed of weights, order, masks and projections, "
        "the same in all methods. Three seeds; eight of the compared methods on generated families, five of them added "
        "after the first results. The last weights are tested.",
        "Held out: generated families that were not trained on; the last proteome. Letter frequencies are those of the "
        "training split. Of masked letters a tenth stays, which identity attention sees.",
        "On proteomes uniform attention costs next to nothing after so few steps, so they decide no claim; nor do "
        "chains of 8192 letters, where letter frequencies predict better than all methods.",
        "Near-far rows are of an older version of its code.",
        "Times: float32, causal, random letters, medians over five processes in which methods take turns; of single "
        "processes no times are left. Layer: 2 heads, d = 64. Model: 8 heads, 1 layer, d = 256; wide: d = 512, "
        "d_ff = 2048, one row a step, all others 32768 letters a step. Letters are drawn from 6 layers, d = 512.",
        "Memory: peak of a training step of one row, beyond weights, gradients and optimiser. Exact attention is a "
        "fused kernel; `matrix formed` stores the matrix, 34 GB at 32768 letters, not run."])


def cases(rows: Rows, split: str = "") -> dict[str, dict]:
    """Data set and direction -> what selects the test rows."""
    found = rows.select(f"loss{split}", "exact", split="test")[["dataset", "mode"]].drop_duplicates()
    return {f"{name}, {direction}": {"dataset": name, "mode": direction, "split": "test"}
            for name, direction in found.itertuples(index=False) if not name.startswith("chains")}


def fails(rows: Rows, where: dict[str, dict], metric: str, least: float) -> dict[str, str]:
    costs = {case: rows.paired("uniform", "exact", metric, **each).mean() for case, each in where.items()}
    return {case: f"what uniform attention costs: {cost:.3g} nats (at least {least:g} needed)"
            for case, cost in costs.items() if cost < least}


def claims(rows: Rows) -> list[Claim]:
    named = {name.split(" ")[0]: name for name in rows.methods("loss", split="test")}
    seen, unseen = cases(rows), cases(rows, "_ood")
    chains = {"chains of proteomes": {"dataset": "chains of proteomes", "split": "test"}}

    def points(first: str, second: str, where: dict[str, dict], metric: str = "accuracy"):
        return {case: 100 * rows.paired(named.get(first, first), named.get(second, second), metric, **each)
                for case, each in where.items()}

    def by_direction(one_way: str, both: str) -> dict[str, str]:
        return {case: both if case.endswith("B") else one_way for case in seen}

    shared = {"unit": "points", "fails": fails(rows, seen, "loss", 0.5)}
    peers = "Reformer and Linformer significantly drop in accuracy"
    long = "the small Transformer stops at 19%, the larger Performer reaches 24%"
    return [
        Claim("ReLU ends more accurate than exact attention", points("relu", "exact", seen), **shared,
              paper=by_direction("31.58% against 30.80%", "36.09% against 33.32%")),
        Claim("FAVOR+ keeps 90% of what exact attention gains over uniform attention in loss",
              {case: share(rows.paired("uniform", named["favorp"], "loss", **each),
                           rows.paired("uniform", "exact", "loss", **each)) for case, each in seen.items()},
              above=0.9, paper="the same accuracy", **shared | {"unit": "of the gain"}),
        *(Claim(f"exact attention ends more accurate than {label(peer)}", points("exact", peer, seen), paper=peers,
                **shared) for peer in ("reformer", "linformer")),
        Claim("on held-out sequences exact attention is more accurate than ReLU",
              points("exact", "relu", unseen, "accuracy_ood"), unit="points",
              fails=fails(rows, unseen, "loss_ood", 0.3),
              paper=by_direction("19.70% against 18.44%", "25.07% against 24.10%")),
        Claim("FAVOR++ ends more accurate than exact attention", points("favorpp", "exact", chains), unit="points",
              paper=long, fails=fails(rows, chains, "loss", 0.3)),
        Claim("ReLU ends more accurate than exact attention of 3 layers", {"chains of TrEMBL": 100 * rows.paired(
            "relu", "exact, 3 layers", "accuracy", dataset="chains of TrEMBL", split="test")}, long, unit="points"),
        Claim("a regular Transformer overloads memory at 8192 letters", paper="even at a batch of 1 a chip",
              not_measured="the paper's model and its chips of 16 GB are not here")]


def names(rows: Rows) -> dict[str, str]:
    return {method: label(method.split(" ")[0]) for method in rows.methods("loss", split="test")}


def table(rows: Rows, metric: str, split: str = "", data: str = "", scale: float = 1) -> pd.DataFrame:
    """Rows for letter frequencies, the true chances of letters, and the methods; the paper's values last."""
    of = {case: each for case, each in cases(rows, split).items() if case.startswith(data)}
    kinds = {"unigram_": {"exact": "letter frequencies"}, "floor_": {"exact": "true chances"}, "": names(rows)}
    made = pd.concat([mean_table(rows, {case: {"metric": f"{given}{metric}{split}", **each}
                                        for case, each in of.items()}, methods, scale, ".2f")
                      for given, methods in kinds.items()])
    for direction, given in PAPER[metric].items():
        if ("held out" in direction) == bool(split) and not data.startswith("proteomes"):
            made[f"paper, {direction}"] = [given.get(name, "") for name in made.index]
    made.index.name = "attention"
    return made


def tables(rows: Rows):
    lengths = {f"{case[:-3]}, {name}": {
        key.replace("_", ", "): f"{rows.values(f'{split}_{key}', 'exact', **each).mean():,.5g}"
        for key in ("sequences", *LENGTHS)} for case, each in cases(rows).items() if case.endswith("U")
        for split, name in SPLITS.items()}
    chains = [name for name in rows.frame["dataset"].unique() if str(name).startswith("chains")]
    made = {"Accuracy on test, %": table(rows, "accuracy", data="generated families", scale=100),
            "Accuracy on test, %, proteomes": table(rows, "accuracy", data="proteomes", scale=100),
            "Accuracy on held-out sequences, %": table(rows, "accuracy", "_ood", scale=100),
            "Perplexity on test": table(rows, "perplexity"),
            "Perplexity on held-out sequences": table(rows, "perplexity", "_ood"),
            "The sequences (paper, training: 104,863,744 of mean length 353.09)": pd.DataFrame(lengths).T,
            "Chains, rows of 8192 letters": mean_table(rows, {
                f"{name}: {metric}": {"metric": metric, "dataset": name, "split": "test"}
                for name in chains for metric in ("loss", "accuracy")}, names(rows), spec=".4f")}
    timed = ["attention layer", "model", "wide model", "model, all lengths in turn"]
    for metric, title, parts, spec in (("letters_per_s", "Letters a second in training", timed, ",.0f"),
                                       ("ms", "Milliseconds of a drawn letter", ["drawing letters"], ".2f"),
                                       ("mib", "Memory of a training step of one row, MiB", ["model"], ",.0f")):
        places = rows.select(metric, part=parts)[["part", "length"]].drop_duplicates().itertuples(index=False)
        made[title] = mean_table(rows, {f"{part}, {length:,.0f} letters": {
            "metric": metric, "part": part, "length": length} for part, length in places},
            rows.methods(metric, part=parts), spec=spec)
    return made


def figure(rows: Rows):
    shown = [case for case in cases(rows) if not case.startswith("proteomes")]
    fig, axes = panels(len(shown) + 1)
    for ax, case in zip(axes, shown):
        where = cases(rows)[case]
        dot_plot(ax, {method: 100 * rows.paired(method, "exact", "accuracy", **where)
                      for method in names(rows) if method != "exact"}, zero=True, labels=names(rows))
        ax.set(title=f"{case}: test", xlabel="accuracy above exact attention, points")
    line_plot(axes[-1], rows, "length", "letters_per_s", log="xy", part="attention layer")
    axes[-1].set(title="Training an attention layer", xlabel="letters a row", ylabel="letters a second")
    fig.tight_layout()
    return fig
