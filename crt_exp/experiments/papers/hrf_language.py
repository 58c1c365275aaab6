"""HRF: random features for the softmax of a language model.

Reproduces Figures 3, 8 and 10, and Tables 4 and 5.
"""

from itertools import product

from crt_exp.experiments.report import (
    Claim,
    Page,
    PlannedRun,
    Rows,
    Tables,
    dot_plot,
    filters_over,
    line_plot,
    mean_ci,
    mean_table,
    panels,
    sweep,
)

MAPS = {
    "favor": "trigonometric",
    "favorp": "FAVOR+",
    "hrf_angular": "angular hybrid",
    "hrf_gaussian": "Gaussian hybrid",
}
SHOWN = {**MAPS, "uniform": "uniform", "unigram": "unigram"}
NEGATIVES = {
    "favor m=64": "trigonometric",
    "favorp m=64": "FAVOR+",
    "hrf_angular m=8": "angular hybrid",
    "hrf_gaussian m=8": "Gaussian hybrid",
    "log_uniform": "log-uniform",
    "uniform": "uniform",
    "exact": "exact softmax",
    "full": "full softmax",
}
COMPARED = [*product(("hrf_angular", "hrf_gaussian"), ("favor", "favorp"))]
DISTANCES = {"ks": "KS", "w1": "W1"}
MS = [64, 128, 256, 512]
TRAINED = "task=ptb task.corpus=ptb task.dropout=0.2 trainer.log_every=1000 trainer.schedule=linear"
NEAR1 = "task.temperature=0.2 task.lengths.queries=1 task.lengths.keys=100"
SMALL = {"free": "trainer.epochs=7", "near 1": f"{NEAR1} trainer.epochs=4"}
CONTINUED = (
    f"{TRAINED} task.sampling.tree=false trainer.epochs=1 trainer.lr=1e-3 trainer.eval_every=443"
)
# near 1, the kernel of the negatives is that of the softmax
KERNELS = {"free": "", "near 1": f"task.sampling.temperature=0.2 {NEAR1}"}
FULL = {"free": "experiment=hrf_ptb_softmax", "near 1": "experiment=hrf_wikitext2_softmax"}


def estimate_runs(models: str, every: int) -> list[PlannedRun]:
    common = f"task=class_distributions task.every={every}"
    lengths = {}
    for name in SMALL:
        lengths[name] = f"task.start={{runs}}/{models}/{name.replace(' ', '-')}"
    return [
        *sweep(common, attention=["exact"], lengths=lengths),
        *sweep(common, attention=MAPS, lengths=lengths, seed=range(10)),
    ]


def sampling_runs(
    common: str, m: str, hybrid: str, seeds: int, lengths: dict[str, str]
) -> list[PlannedRun]:
    """m, hybrid: options of the features of methods and of hybrids."""
    methods = {}
    for method in NEGATIVES:
        name, *options = method.split()
        methods[method] = f"task.softmax={name}"
        if options:
            size = hybrid if name.startswith("hrf") else m
            methods[method] = f"task.softmax=features attention={name} {size}"
    return sweep(common, lengths=lengths, method=methods, seed=range(seeds))


def continued_runs(name: str, seeds: int) -> list[PlannedRun]:
    """Sampled training that continues the model of some lengths."""
    start = f"{KERNELS[name]} task.init={{runs}}/hrf-lm-models/{name.replace(' ', '-')}"
    return sampling_runs(
        CONTINUED, "features.m=64", "features.m=8 features.n=8", seeds, {name: start}
    )


def finding(rows: Rows) -> str:
    ks = {}
    for method in MAPS:
        ks[method] = mean_ci(rows.values("ks", method, lengths="near 1", m=512))
    unigram = rows.values("ks", "unigram", lengths="near 1").mean()
    return (
        f"On Penn Treebank (m = 512), the KS distance to the softmax is {ks['hrf_angular']} for the angular hybrid, "
        f"{ks['favor']} for trigonometric features and {ks['favorp']} for FAVOR+ (95% CI, n = {ks['favor'].n} seeds), "
        f"and {unigram:.2f} for word frequencies alone. "
        "Trained with negatives from features, the model has a higher loss than with log-uniform ones."
    )


def claims(rows: Rows) -> list[Claim]:
    near = {"lengths": "near 1", "sweep": "hrf-lm"}
    claims = [distance_claim(rows, metric, **near) for metric in DISTANCES]
    text = "the angular hybrid has fewer negative estimates than trigonometric features"
    fewer = {"lengths near 1": 100 * rows.paired("favor", "hrf_angular", "negative", **near)}
    claims.append(Claim(text, fewer, unit="points"))
    trained, fails = {}, {}
    for lengths in {*rows.select("loss", "full")["lengths"]} - {"free"}:
        where = {"sweep": "hrf-sampled", "lengths": lengths}
        cases = {}
        for hybrid, other in COMPARED:
            case = f"lengths {lengths}: {MAPS[hybrid]}, {MAPS[other]}"
            cases[case] = rows.paired(f"{other} m=64", f"{hybrid} m=8", "loss", **where)
        trained |= cases
        fails |= failed_checks(cases, sampling_checks(rows, where))
    text = "training with negatives from a hybrid reduces the loss by less than 0.02 nats"
    paper = "the difference is not very significant"
    needs = "more seeds, or full size: experiment=hrf_ptb_softmax, 29 GPU hours"
    claims.append(Claim(text, trained, paper, needs, below=0.02, unit="nats", fails=fails))
    return claims


Checks = dict[str, tuple[float, float]]  # text -> value and least value


def distance_claim(rows: Rows, metric: str, **where) -> Claim:
    """The claim on a distance, with checks of the model and of the features."""
    distances = {}
    for hybrid, other in COMPARED:
        distances[f"{MAPS[hybrid]}, {MAPS[other]}"] = rows.ratio(hybrid, other, metric, **where)
    frequencies = rows.values("unigram_loss", "exact", **where).mean()
    gain = frequencies - rows.values("loss", "exact", **where).mean()
    unigram = rows.values(metric, "unigram", **where).mean()
    best = min(rows.values(metric, method, **where).mean() for method in MAPS)
    name = DISTANCES[metric]
    checks = {
        "gain of the model over word frequencies": (gain, 0.5),
        f"{name} of word frequencies over that of the best features": (unigram / best, 1.0),
    }
    fails = failed_checks(distances, checks)
    text = f"hybrids have a smaller {name} distance to the softmax (lengths near 1)"
    paper = "HRFs lead to the most accurate estimates"
    needs = (
        "features that are closer to the softmax than word frequencies; the paper's length costs"
    )
    return Claim(text, distances, paper, needs, below=1, log=True, fails=fails)


def sampling_checks(rows: Rows, where: dict[str, str]) -> Checks:
    """Sanity checks of models trained with sampled negatives."""
    loss = {name: rows.values("loss", name, **where).mean() for name in NEGATIVES}
    frequencies = rows.values("unigram_loss", "full", **where).mean()
    return {
        "gain of the full softmax over word frequencies": (frequencies - loss["full"], 0.5),
        "gain of exact over uniform negatives": (loss["uniform"] - loss["exact"], 0.02),
        "gain of FAVOR+ over word frequencies": (frequencies - loss["favorp m=64"], 0.0),
    }


def failed_checks(cases: dict, checks: Checks) -> dict[str, str]:
    """Return the failed checks as text, for all cases."""
    failed = []
    for name, (value, least) in checks.items():
        if value < least:
            failed.append(f"{name}: {value:.3g} (expected at least {least:g})")
    return dict.fromkeys(cases, "; ".join(failed)) if failed else {}


def tables(rows: Rows) -> Tables:
    where = {"metric": "ks", "lengths": "near 1"}
    distances = filters_over("m", MS, "lengths near 1, m = {}", **where)
    trained = rows.select("loss", sweep="hrf-sampled")["lengths"].unique()
    losses = filters_over("lengths", trained, "lengths {}", metric="loss", sweep="hrf-sampled")
    title = "KS distance to the exact softmax (lower is better)"
    tables = {title: mean_table(rows, distances, SHOWN, spec=".2f")}
    title = "Sampled training, by the negatives: test loss, nats"
    tables[title] = mean_table(rows, losses, NEGATIVES, spec=".2f")
    return tables


def figure(rows: Rows):
    fig, (left, right) = panels(2)
    line_plot(left, rows, "m", "ks", SHOWN, log="x", lengths="near 1")
    left.set(title="Distance to the exact softmax, lengths near 1", xlabel="m")
    left.set_ylabel("KS (lower is better)")
    left.set_xticks(MS, MS)
    for lengths in rows.select("loss", sweep="hrf-sampled")["lengths"].unique()[-1:]:
        losses = rows.by_method("loss", NEGATIVES, sweep="hrf-sampled", lengths=lengths)
        dot_plot(right, losses, labels=NEGATIVES)
        right.set(title=f"Sampled training, lengths {lengths}")
        right.set_xlabel("test loss, nats (lower is better)")
    return fig


page = Page(
    "hrf_language",
    title="HRF Figures 3, 8 and 10, Tables 4 and 5: random features for the softmax of a language model",
    finding=finding,
    small={
        "hrf-lm": estimate_runs("hrf-lm-models", 32),
        "hrf-sampled": [*continued_runs("free", 3), *continued_runs("near 1", 4)],
    },
    full={
        "hrf-lm": estimate_runs("hrf-lm-models-full", 1),
        "hrf-sampled": sampling_runs(
            "experiment=hrf_ptb_softmax",
            "features.m=1024",
            "features.m=64 features.n=16",
            25,
            {"from scratch": ""},
        ),
    },
    models={
        "hrf-lm-models": sweep(f"{TRAINED} trainer.lr=3e-3 trainer.warmup=200", lengths=SMALL),
        "hrf-lm-models-full": sweep("task.softmax=full", lengths=FULL),
    },
    columns=["lengths", "m", "method"],
    metrics=["ks", "w1", "negative", "loss", "unigram_loss"],
    measured=[
        "Estimates: one LSTM per setting, every 32nd word of the test split, 10 seeds; hybrids have m / 8 per base. "
        "Intervals leave out the variation between models.",
        "The paper's length costs and the numbers of Tables 4 and 5 are not known. Only full size has WikiText-2.",
        "Lengths near 1 (temperature 0.2, costs 1 and 100) were selected after trials. Distances use word ranks.",
        "Negative estimates are set to 0. Word frequencies alone (unigram) are closer to the softmax than all "
        "features, which voids comparisons of features. The paper compares no shares of negative estimates in words.",
        "Sampled training continues these models for one epoch: 40 negatives, m = 64, 3 (free) or 4 seeds. Negatives "
        "have the kernel exp(cos / t), t = 1 (free) or 0.2 (near 1: the softmax of the model). Free lengths are not "
        "judged: features end worse than word frequencies. Log-uniform and full are not in the paper.",
    ],
    tables=tables,
    claims=claims,
    figure=figure,
)
