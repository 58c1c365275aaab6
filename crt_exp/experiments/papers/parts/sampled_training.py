"""HRF Tables 4 and 5: a language model trained with negatives from random features."""

from itertools import product

from crt_exp.experiments.report import HOME, Claim, Rows, filters_over, sweep

MAPS = {
    "favor": "trigonometric",
    "favorp": "FAVOR+",
    "hrf_angular": "angular hybrid",
    "hrf_gaussian": "Gaussian hybrid",
}
COMPARED = [*product(("hrf_angular", "hrf_gaussian"), ("favor", "favorp"))]
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
TRAINED = "task=ptb task.corpus=ptb task.dropout=0.2 trainer.log_every=1000 trainer.schedule=linear"
NEAR1 = "task.temperature=0.2 task.lengths.queries=1 task.lengths.keys=100"


def negatives(m: str, hybrid: str) -> dict[str, str]:
    """Options by method. m, hybrid: options of the features of maps and of hybrids."""
    methods = {}
    for method in NEGATIVES:
        name, *options = method.split()
        methods[method] = f"task.softmax={name}"
        if options:
            size = hybrid if name.startswith("hrf") else m
            methods[method] = f"task.softmax=features attention={name} {size}"
    return methods


CONTINUED = (
    f"{TRAINED} task.sampling.tree=false trainer.epochs=1 trainer.lr=1e-3 trainer.eval_every=443"
)
START = f"task.init={HOME}/hrf-lm-models"
# near 1, the kernel of the negatives is that of the softmax
STARTS = {"near 1": f"task.sampling.temperature=0.2 {NEAR1} {START}/near-1"}
SIZED = negatives("features.m=64", "features.m=8 features.n=8")
SAMPLED = [
    *sweep(CONTINUED, lengths={"free": f"{START}/free"}, method=SIZED, seed=range(3)),
    *sweep(CONTINUED, lengths=STARTS, method=SIZED, seed=range(4)),
]
FULL_SAMPLED = sweep(
    "experiment=hrf_ptb_softmax",
    lengths={"from scratch": ""},
    method=negatives("features.m=1024", "features.m=64 features.n=16"),
    seed=range(25),
)

Checks = dict[str, tuple[float, float]]  # text -> value and least value


def failed_checks(cases: dict, checks: Checks) -> dict[str, str]:
    """Return the failed checks as text, for all cases."""
    failed = []
    for name, (value, least) in checks.items():
        if value < least:
            failed.append(f"{name}: {value:.3g} (expected at least {least:g})")
    return dict.fromkeys(cases, "; ".join(failed)) if failed else {}


def sampling_checks(rows: Rows, where: dict[str, str]) -> Checks:
    """Sanity checks of models trained with sampled negatives."""
    loss = {name: rows.values("loss", name, **where).mean() for name in NEGATIVES}
    frequencies = rows.values("unigram_loss", "full", **where).mean()
    return {
        "gain of the full softmax over word frequencies": (frequencies - loss["full"], 0.5),
        "gain of exact over uniform negatives": (loss["uniform"] - loss["exact"], 0.02),
        "gain of FAVOR+ over word frequencies": (frequencies - loss["favorp m=64"], 0.0),
    }


def sampling_claim(rows: Rows) -> Claim:
    reductions, fails = {}, {}
    for lengths in {*rows.select("loss", "full")["lengths"]} - {"free"}:
        where = {"sweep": "hrf-sampled", "lengths": lengths}
        cases = {}
        for hybrid, other in COMPARED:
            case = f"lengths {lengths}: {MAPS[hybrid]}, {MAPS[other]}"
            cases[case] = rows.paired(f"{other} m=64", f"{hybrid} m=8", "loss", **where)
        reductions |= cases
        fails |= failed_checks(cases, sampling_checks(rows, where))
    paper = "the difference is not very significant"
    needs = "more seeds, or full size: experiment=hrf_ptb_softmax, 29 GPU hours"
    text = "training with negatives from a hybrid reduces the loss by less than 0.02 nats"
    return Claim(text, reductions, paper, needs, below=0.02, unit="nats", fails=fails)


def settings(rows: Rows) -> dict[str, dict]:
    """Filters of the lengths that were measured."""
    lengths = rows.select("loss", sweep="hrf-sampled")["lengths"].unique()
    return filters_over("lengths", lengths, "lengths {}", metric="loss", sweep="hrf-sampled")
