"""Performers Figures 2, 4 and 14: errors of kernel estimates, of attention, and through layers."""

import pandas as pd

from crt_exp.report import Claim, Page, Rows, geometric_mean_ci, line_plot, mean_table, sweep
from crt_exp.report.plots import panels

EXACT_ROWS = ["iid", "orthogonal", "simplex", "sobol", "halton"]
CONTINUOUS = ["trig", "gerf", "pos", "hyp", "smreg", "oprf", "sderf"]
DISCRETE = ["pois", "geom", "pois_coord", "pois_plus", "geom_plus"]
SAMPLERS = dict.fromkeys(CONTINUOUS, [*EXACT_ROWS, "hadamard", "givens"]) | dict.fromkeys(DISCRETE, EXACT_ROWS)
MAPS = {"trig": "trigonometric", "pos": "FAVOR+", "oprf": "OPRF"}


def both(name: str) -> list[str]:
    return [f"{name} sampler={sampler}" for sampler in EXACT_ROWS[:2]]


COMPARED = {method: f"{text}, {method.partition('=')[2]}" for name, text in MAPS.items() for method in both(name)}
OTHERS = [method for name, samplers in SAMPLERS.items() for sampler in samplers
          if (method := f"{name} sampler={sampler}") not in COMPARED]
WHOLE = {"nearfar preset=cheap exact_until=0": "near-far, cheap", "nearfar exact_until=0": "near-far",
         "nearfar preset=quality exact_until=0": "near-far, quality",
         "window block=32 first=16": "window and first tokens"}
HEADS = {"Gaussian": "task.length=4096", "matched": "task.length=256 task.turn=0.3"}
SUMS = [1, 2, 4, 8, 16, 24]
PARTS = {"15": "task.samples=15 task.ms=[8,16,32,64,128]", "150": "task.samples=150 task.ms=[256]"}
HYBRIDS = {"angular": 4, "gaussian": 3, "clustered": 64}  # projections for about 256 columns
THROUGH = [f"{name} m=256" for name in [*CONTINUOUS[:-1], *DISCRETE]]
SHOWN = {"trig m=256": "trigonometric", "pos m=256": "FAVOR+", "oprf m=256": "FAVOR++", "uniform": "uniform"}
MODELS = {"random weights, |x + y|^2 = 16": {"model": "random", "sum": 16},
          "random weights, |x + y|^2 = 4": {"model": "random", "sum": 4}, "trained encoder": {"model": "trained"}}
HEAD, LAYER, RANDOM = "task=head_errors task.samples=15", "task=error_by_layer", {"random": ""}
TRAINED = {"trained": "task.init={runs}/encoder/exact task.length=34"}
ENCODER = """task=mlm task.sizes.hidden_size=128 task.sizes.num_hidden_layers=3 task.sizes.num_attention_heads=8
    task.sizes.intermediate_size=512 +task.sizes.hidden_dropout_prob=0 +task.sizes.attention_probs_dropout_prob=0
    task.vocabulary=outputs/texts/characters-88 task.text=${oc.env:CRT_DATA}/wikitext2/wiki.train.tokens
    task.validation_text=outputs/texts/validation-48.tokens task.block=34 trainer.batch=96 trainer.steps=2000
    trainer.lr=2e-3 trainer.eval_every=1000000 trainer.save_every=500 trainer.log_every=100 trainer.select=last"""

small = {
    "performers-fig2": sweep("task=variance_by_angle task.degrees=5 task.m=64", features=["pos", "hyp", "oprf"],
                             **{"task.length": [n / 10 for n in range(1, 21)]}),
    "performers-fig4": [
        *sweep(HEAD, heads=HEADS, **{"task.sum": SUMS}, features=COMPARED, samples=PARTS),
        *sweep(HEAD, heads=HEADS, **{"task.sum": SUMS}, attention=WHOLE, samples=PARTS),
        *sweep(HEAD, heads=HEADS, **{"task.sum": [8]}, features=OTHERS),
        *(run for name, m in HYBRIDS.items() for run in sweep(f"{HEAD} task.ms=[{m}]", heads=HEADS, **{"task.sum": [8]},
                                                              features=both(name)))],
    "performers-fig14": [
        *sweep(LAYER, model=RANDOM, **{"task.sum": [16, 4]}, features=THROUGH, seed=range(8)),
        *sweep(LAYER, model=RANDOM, **{"task.sum": [16, 4]}, attention=["uniform"], seed=range(8)),
        *sweep(LAYER, model=RANDOM, **{"task.sum": [16]}, seed=range(8), features=[
            f"{name} {options}" for name in MAPS for options in ["m=64", "m=128", "m=256 sampler=iid"]]),
        *sweep(LAYER, model=TRAINED, features=THROUGH, seed=range(8)),
        *sweep(LAYER, model=TRAINED, attention=["uniform"], seed=range(8)),
        *sweep(LAYER, model=TRAINED, attention=["exact"])]}

page = Page(
    "perf_error",
    title="Performers Figures 2, 4 and 14: error of estimates, of attention, and through layers",
    finding="Positive features beat trigonometric ones where kernel values are small, and in attention where the mean "
            "|x + y|^2 is above about 3. Orthogonal projections help most where it is small.",
    small=small, full=small, reduced=False, data="WikiText-2 for the trained encoder",
    models={"encoder": sweep(ENCODER, attention=["exact"])},
    columns=["length", "angle", "heads", "model", "sum", "m", "kind", "layer", "method"],
    metrics=["log_ratio", "zero", "mse", "error", "growth", "mean_sq_sum"],
    measured=[
        "Figure 2: closed forms for the softmax kernel at equal numbers of projections; x and y of one length at an "
        "angle; OPRF fitted to each pair. No value where an estimate has no variance: trigonometric at x = y, positive "
        "at x = -y. `trig` and `hyp` make two columns of a projection: at equal columns FAVOR+ and OPRF gain 0.7 nats "
        "more.",
        "Figure 4: one head, d = 16, v ~ N(0, 1), k ~ N(0, s^2), scaled dot products; s sets the mean |x + y|^2 of "
        "queries and keys. Gaussian heads (L = 4096): q ~ N(0, s^2). Matched heads (L = 256): a query is the key at "
        "its position turned by 0.3 radians. The paper gives L = 4096, d = 16 and 15 samples, not the scale.",
        "Figure 4: 15 samples of data and projections, 150 at m = 256, the same data for all methods (seed 0); "
        "parameters fitted to each sample; claims take the geometric mean over m and samples. The last 135 "
        "samples were added after claims had been judged with 15.",
        "Near-far attention and the window have no projections, so their errors do not depend on m; of 256 matched "
        "keys they read most exactly. Discrete maps need exactly Gaussian rows.",
        "Figure 14: relative error (Frobenius) of the hidden states after each layer, geometric means over 8 samples "
        "of weights, tokens and projections; branch: of what attention adds in a layer, with all layers approximated "
        "or the first alone. Growth: last layer over the first with an error. Orthogonal rows unless iid is named.",
        "Random weights: 12 pre-norm layers, 8 heads of d = 64, 512 tokens ~ N(0, 1); queries and keys scaled to the "
        "mean |x + y|^2 of the first layer (16 or 4). Trained encoder: a BERT of characters, 3 layers, 8 heads of "
        "d = 16, trained with exact attention on WikiText-2, read on 8 passages of 34 tokens.",
        "Trigonometric features at |x + y|^2 = 16: denominators near 0 decide single errors. The same code on another "
        "processor moved the output error of a sample by up to 5% after the first layer and up to 9 times after later "
        "ones; every verdict stayed. FAVOR++ moved by less than 1e-5."])


def claims(rows: Rows) -> list[Claim]:
    def below(text: str, first: str, second: str, paper: str, reason: str = "") -> Claim:
        return Claim(f"MSE of attention, {text}", {
            f"{heads}, |x + y|^2 = {each}": rows.ratio(first, second, "mse", heads=heads, sum=each)
            for heads in HEADS for each in SUMS}, below=1, log=True, unit="times", paper=paper, reason=reason)

    def growth(of: str, than: str = "") -> Claim:
        text = f"{SHOWN[of]}: the output error grows through layers"
        return Claim(text + ", more than with uniform attention" * bool(than), {
            name: rows.ratio(of, than, "growth", kind="output", **where) if than else
            rows.values("growth", of, log=True, kind="output", **where) for name, where in MODELS.items()},
                     above=1, log=True, unit="times", paper="errors propagate, no number")

    sign = "positive features win where |x + y|^2 is above about 3"
    return [
        Claim("positive features have less error than trigonometric ones at 120 degrees", {
            f"length {length}": rows.values("log_ratio", "pos", length=length, angle=120).item()
            for length in [0.5, 1, 2]}, above=0, power=True, paper="where kernel values are small",
            reason="its error is proportional to a power of the kernel itself"),
        below("FAVOR+: orthogonal below iid", "pos sampler=orthogonal", "pos sampler=iid", "below"),
        below("trigonometric: orthogonal below iid", "trig sampler=orthogonal", "trig sampler=iid", "below"),
        below("iid: FAVOR+ below trigonometric", "pos sampler=iid", "trig sampler=iid", "below", sign),
        below("orthogonal: FAVOR+ below trigonometric", "pos sampler=orthogonal", "trig sampler=orthogonal", "below",
              sign),
        below("OPRF: orthogonal below iid", "oprf sampler=orthogonal", "oprf sampler=iid", "CRT, Theorem 4.1",
              "the theorem is on entries of the kernel, and the gain fades where these are far apart"),
        growth("pos m=256"), growth("trig m=256"), growth("pos m=256", "uniform"), growth("trig m=256", "uniform")]


def mean(values: pd.Series) -> str:
    return f"{float(f'{geometric_mean_ci(values)[0]:.2g}'):,.9g}"


def interval(values: pd.Series) -> str:
    return "{:.3g} ({:.3g} to {:.3g})".format(*geometric_mean_ci(values))


def tables(rows: Rows):
    def heads(kind: str, sums: list[int], **where):
        return {f"{kind}, {each}": {"metric": "mse", "heads": kind, "sum": each, **where} for each in sums}

    made = {"Figure 4: MSE of attention over that of uniform attention (lower is better), m = 256, by |x + y|^2":
            mean_table(rows, heads("Gaussian", [2, 8, 24], m=256) | heads("matched", [2, 8, 24], m=256),
                       COMPARED | {"nearfar exact_until=0": "near-far"}, format=mean)}
    for kind in HEADS:
        made[f"Figure 4, {kind} heads: MSE over uniform attention's with 95% CI, m = 256"] = mean_table(
            rows, heads(kind, SUMS, m=256), COMPARED | WHOLE, format=interval)
        made[f"Figure 4, {kind} heads: the same at 256 columns of trigonometric features, m = 128"] = mean_table(
            rows, heads(kind, SUMS, m=128), {name: COMPARED[name] for name in both("trig")}, format=interval)
        made[f"Figure 4, {kind} heads, |x + y|^2 = 8: maps and samplers, m = 256 (hybrids: 256 columns)"] = by_sampler(
            rows, kind)
    made["Figure 2: log MSE(trigonometric) / MSE at length 1, by angle in degrees"] = mean_table(
        rows, {str(angle): {"metric": "log_ratio", "length": 1, "angle": angle} for angle in range(0, 181, 30)},
        {"pos": "FAVOR+", "hyp": "hyperbolic", "oprf": "OPRF"}, spec=".2f")
    kinds = {"output": "output", "accumulated": "branch, all approximated", "propagated": "branch, layer 1 alone"}
    for name, where in MODELS.items():
        made[f"Figure 14, {name}: growth of the error"] = mean_table(
            rows, {text: {"metric": "growth", "kind": kind, **where} for kind, text in kinds.items()}, format=interval)
        for kind, text in kinds.items():
            layers = sorted({*rows.select("error", "pos m=256", kind=kind, **where)["layer"].astype(int)})
            made[f"Figure 14, {name}: relative error by layer, {text}"] = mean_table(
                rows, {str(layer): {"metric": "error", "kind": kind, "layer": layer, **where} for layer in layers},
                format=mean)
    made["Figure 14, trained encoder: mean |x + y|^2 by layer"] = mean_table(
        rows, {str(layer): {"metric": "mean_sq_sum", "layer": layer} for layer in [1, 2, 3]})
    return made


def by_sampler(rows: Rows, kind: str) -> pd.DataFrame:
    return pd.DataFrame.from_dict({name: {
        sampler: mean(values) for sampler in SAMPLERS["trig"] if len(values := rows.values(
            "mse", f"{name} sampler={sampler}", heads=kind, sum=8, m=HYBRIDS.get(name, 256)))}
        for name in [*SAMPLERS, *HYBRIDS]}, orient="index").rename_axis("map")


def figure(rows: Rows):
    fig, axes = panels(6)
    grid = rows.select("log_ratio", "pos").pivot(index="length", columns="angle", values="value")
    grid = grid.astype(float).clip(-12, 12)
    image = axes[0].pcolormesh(grid.columns, grid.index, grid, cmap="RdBu_r", vmin=-12, vmax=12)
    fig.colorbar(image, ax=axes[0])
    axes[0].set(title="Figure 2: log MSE(trigonometric) / MSE(FAVOR+)", xlabel="angle of x and y, degrees",
                ylabel="length of x and y")
    positive = Rows(rows.frame[rows.frame["angle"].between(0, 150)])
    line_plot(axes[1], positive, "angle", "log_ratio", {"pos": "FAVOR+", "hyp": "hyperbolic", "oprf": "OPRF"}, length=1)
    axes[1].axhline(0, color="black", lw=1)
    axes[1].set(title="Figure 2: the same at length 1", xlabel="angle of x and y, degrees", ylabel="log ratio, nats")
    for ax, each in zip(axes[2:4], [2, 8]):
        ax.axhline(1, color="grey", lw=1, ls="--")
        line_plot(ax, rows, "m", "mse", COMPARED | {"nearfar exact_until=0": "near-far"}, log="xy", geometric=True,
                  dotted=[name for name in COMPARED if name.endswith("iid")], heads="Gaussian", sum=each)
        ax.set(title=f"Figure 4: Gaussian heads, |x + y|^2 = {each}", xlabel="projections m",
               ylabel="MSE over uniform attention's")
    for ax, (name, where) in zip(axes[4:], [*MODELS.items()][::2]):
        line_plot(ax, rows, "layer", "error", SHOWN, log="y", geometric=True, kind="output", **where)
        ax.set(title=f"Figure 14: {name}", xlabel="layers", ylabel="relative error of hidden states")
        ax.xaxis.get_major_locator().set_params(integer=True)
    fig.tight_layout()
    return fig
