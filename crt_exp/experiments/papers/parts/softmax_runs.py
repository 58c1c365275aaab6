"""Runs of hybrids in the softmax of a language model: estimates, and sampled training."""

from crt_exp.experiments.report import PlannedRun, sweep

MAPS = {
    "favor": "trigonometric",
    "favorp": "FAVOR+",
    "hrf_angular": "angular hybrid",
    "hrf_gaussian": "Gaussian hybrid",
}
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
LENGTHS = {"free": "trainer.epochs=7", "near 1": f"{NEAR1} trainer.epochs=4"}
CONTINUED = (
    f"{TRAINED} task.sampling.tree=false trainer.epochs=1 trainer.lr=1e-3 trainer.eval_every=443"
)
# near 1, the kernel of the negatives is that of the softmax
KERNELS = {"free": "", "near 1": f"task.sampling.temperature=0.2 {NEAR1}"}
FULL_LENGTHS = {"free": "experiment=hrf_ptb_softmax", "near 1": "experiment=hrf_wikitext2_softmax"}


def estimate_runs(models: str, every: int) -> list[PlannedRun]:
    common = f"task=class_distributions task.every={every}"
    lengths = {}
    for name in LENGTHS:
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


SMALL = {
    "hrf-lm": estimate_runs("hrf-lm-models", 32),
    "hrf-sampled": [*continued_runs("free", 3), *continued_runs("near 1", 4)],
}
SCRATCH = sampling_runs(
    "experiment=hrf_ptb_softmax",
    "features.m=1024",
    "features.m=64 features.n=16",
    25,
    {"from scratch": ""},
)
FULL = {"hrf-lm": estimate_runs("hrf-lm-models-full", 1), "hrf-sampled": SCRATCH}
MODELS = {
    "hrf-lm-models": sweep(f"{TRAINED} trainer.lr=3e-3 trainer.warmup=200", lengths=LENGTHS),
    "hrf-lm-models-full": sweep("task.softmax=full", lengths=FULL_LENGTHS),
}
