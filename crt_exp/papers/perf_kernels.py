"""Performers Figures 16 to 18: kernels of generalised attention on proteins."""

import pandas as pd

from crt_exp.papers.perf_proteins import FAMILIES, MODEL, PROTEOMES, fails, trained
from crt_exp.report import Claim, Page, Rows, dot_plot, mean_table
from crt_exp.report.plots import panels

KERNELS = ["relu", "elu+1", "exp", "sigmoid", "abs", "gelu", "cos", "tanh", "identity"]
LINEAR = "attention.phi.projection=false attention.phi.kernel_epsilon=0"  # of the Linear Transformer
NAMED = {"exact": "exact", "uniform": "uniform"}


def method(kernel: str, normalize: bool, m: str = " m=32") -> str:
    given = f"kernel=elu+1 normalize={str(normalize).lower()} {LINEAR}" if kernel == "Linear Transformer" else \
        f"kernel={kernel} normalize={str(normalize).lower()}{m}"
    return f"generalized {given}"


def of(m: str) -> list[str]:
    """All methods with random projections, with and without denominators."""
    return [method(kernel, normalize, m) for normalize in (True, False) for kernel in (*KERNELS, "Linear Transformer")]


JUDGED = ["exact", "uniform", method("relu", True), method("gelu", True), method("Linear Transformer", True),
          method("relu", False)]
BOTH = ["exact", "uniform", method("Linear Transformer", True)]
GENERATED = {name: options.replace("steps=1000", "steps=800") for name, options in FAMILIES.items()}
LETTERS = {name: options.replace("steps=200", "steps=80") for name, options in PROTEOMES.items()}

page = Page(
    "perf_kernels",
    title="Performers Figures 16 to 18: kernels of generalised attention on proteins",
    finding="ReLU is not the best kernel here: exact attention and GELU end more accurate on generated families. "
            "Proteomes tell nothing after so few steps.",
    small={"kernels": [*trained(MODEL, GENERATED, "U", JUDGED, 8),
                       *trained(MODEL, GENERATED, "U", [each for each in of(" m=32") if each not in JUDGED], 3),
                       *trained(MODEL, LETTERS, "U", ["exact", "uniform", *of(" m=32")], 3),
                       *trained(MODEL, {**GENERATED, **LETTERS}, "B", BOTH, 3)]},
    full={"kernels": [*trained("experiment=performers_kernels", {"TrEMBL": ""}, "U", ["exact", "uniform", *of("")], 1),
                      *trained("experiment=performers_kernels", {"TrEMBL": ""}, "B",
                            [*BOTH, method("Linear Transformer", False)], 1)]},
    data="proteomes",
    columns=["dataset", "mode", "split", "step", "method"],
    metrics=["loss", "accuracy", "perplexity", "diverged", *(
        f"unigram_{metric}{split}" for metric in ("loss", "accuracy", "perplexity") for split in ("", "_ood"))],
    measured=[
        "Data and models of [perf_proteins](perf_proteins.md), trained for 800 steps (generated families) or 80 "
        "(proteomes); the paper's have 36 layers and train on TrEMBL. Next letters (U); exact, uniform and the Linear "
        "Transformer also masked ones (B).",
        "phi(u) = f(W u) with m = 32 orthogonal rows, never redrawn; the Linear Transformer is f = elu + 1 without W. "
        "Denominators of the positive kernels relu, elu+1, exp, sigmoid and abs cannot vanish.",
        "A sample is a seed of weights, order and projections, the same in all methods: three, on generated families "
        "(U) eight of the methods that are compared, five of them added after the first results.",
        "GELU is compared because it was the best of the other kernels on validation. The last weights are tested.",
        "Diverged: stopped by a number that is not finite; no run here did."])


def cases(rows: Rows) -> dict[str, dict]:
    found = rows.select("loss", "exact", split="test", mode="U")["dataset"].unique()
    return {f"{name}, U": {"dataset": name, "mode": "U", "split": "test"} for name in found}


def named(rows: Rows) -> dict[tuple[str, bool], str]:
    """(kernel, with denominators) -> method."""
    made = {}
    for text in rows.methods("loss", split="test"):
        options = dict(each.split("=") for each in text.split(" ")[1:])
        if options:
            kernel = "Linear Transformer" if "attention.phi.projection" in options else options["kernel"]
            made[kernel, options["normalize"] == "true"] = text
    return made


def claims(rows: Rows) -> list[Claim]:
    known, where = named(rows), cases(rows)
    shared = {"unit": "points", "fails": fails(rows, where, "loss", 0.5)}

    def points(second: str):
        return {case: 100 * rows.paired(known["relu", True], second, "accuracy", **each)
                for case, each in where.items()}

    return [
        Claim("ReLU ends more accurate than exact attention", points("exact"), paper="31.58% against 30.80% (Table 2)",
              **shared),
        Claim("ReLU ends more accurate than GELU, the best of the other kernels", points(known["gelu", True]),
              paper="ReLU is the best of eight kernels", **shared),
        Claim("the Linear Transformer's gradients explode in both directions",
              paper="3 of 3 seeds (U) early on; near step 125,000 (B)",
              not_measured="two layers and few steps here, 36 layers in the paper"),
        Claim("some kernels end in NaN", paper="Figures 16 and 17", not_measured="the paper trains for far longer")]


def table(rows: Rows, metric: str, scale: float, spec: str, data: str, direction: str) -> pd.DataFrame:
    """Kernels with and without denominators, in columns; exact and uniform attention and letter frequencies last."""
    where = {"metric": metric, "dataset": data, "mode": direction, "split": "test"}
    columns = {}
    for name, normalize in (("with denominators", True), ("without", False)):
        methods = {text: kernel for (kernel, given), text in named(rows).items() if given == normalize}
        columns[name] = mean_table(rows, {name: where}, methods, scale, spec)[name]
    plain = pd.concat([mean_table(rows, {"with denominators": where}, NAMED, scale, spec),
                       mean_table(rows, {"with denominators": where | {"metric": f"unigram_{metric}"}},
                                  {"exact": "letter frequencies"}, scale, spec)])
    made = pd.concat([pd.DataFrame(columns), plain])
    made.index.name = "kernel"
    return made


def useless(rows: Rows) -> pd.DataFrame:
    """Of each method the runs that diverged, and those that ended no better than the frequencies of letters."""
    made = {}
    for (kernel, normalize), text in named(rows).items():
        cells = []
        for where in cases(rows).values():
            losses, base = (rows.values(metric, method, **where) for metric, method in
                            (("loss", text), ("unigram_loss", "exact")))
            stopped = len(rows.values("diverged", text, **where))
            cells.append(f"{stopped} diverged, {int((losses >= base.mean()).sum())} useless of {len(losses) + stopped}")
        made[f"{kernel}, {'with' if normalize else 'without'} denominators"] = cells
    return pd.DataFrame.from_dict(made, orient="index", columns=[*cases(rows)])


def tables(rows: Rows):
    places = rows.select("loss", split="test")[["dataset", "mode"]].drop_duplicates().itertuples(index=False)
    (data, direction), *others = places
    return {f"Accuracy on test, %: {data}, {direction}": table(rows, "accuracy", 100, ".2f", data, direction),
            **{f"Accuracy on test, %: {name}, {way}": table(rows, "accuracy", 100, ".2f", name, way)
               for name, way in others},
            **{f"Loss on test, nats: {name}, {way}": table(rows, "loss", 1, ".3f", name, way)
               for name, way in [(data, direction), *others]},
            "Runs that diverged, or ended no better than the frequencies of letters (useless)": useless(rows)}


def figure(rows: Rows):
    where = next(iter(cases(rows).values()))
    fig, axes = panels(2)
    for ax, normalize in zip(axes, (True, False)):
        methods = {text: kernel for (kernel, given), text in named(rows).items() if given == normalize} | NAMED
        dot_plot(ax, {text: 100 * rows.values("accuracy", text, **where) for text in methods}, labels=methods)
        ax.set(title=f"{where['dataset']}, {'with' if normalize else 'without'} denominators", xlabel="accuracy, %",
               xlim=(0, None))
    fig.tight_layout()
    return fig
