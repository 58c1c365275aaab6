"""Runs of kernel regression on UCI data sets, and on those that scikit-learn includes (demo)."""

from crt_exp.experiments.report import PlannedRun, quoted_override, sweep

SETS = {
    "table1": ["abalone", "banknote", "car", "yeast", "cmc", "nursery", "wifi", "chess"],
    "demo": ["wine", "breast_cancer", "digits", "iris"],
}
OVERLAP = {"table1": 0.05 / 0.9, "demo": 0.25 / 0.6}  # test rows over training rows
MAPS = ["trig", "pos", "gerf", "pois", "geom", "oprf", "pois_plus", "geom_plus"]
DOUBLE = {"trig": "trig m=64", "gerf": "gerf m=64", "hyp": "hyp m=64"}  # two columns a projection
BASELINES = {
    name: quoted_override("task.baseline", name)
    for name in ("Nystroem m=128", "RBFSampler m=128", "majority")
}
METHODS = {
    "exact": "exact",
    "Nystroem m=128": "Nystroem",
    "geom": "GeomRF",
    "oprf": "OPRF",
    "trig": "TrigRF",
    "pois": "PoisRF",
    "RBFSampler m=128": "RBFSampler",
    "gerf": "GERF",
    "hyp": "HypRF",
    "geom_plus": "GeomRF+",
    "pos": "PosRF",
    "pois_plus": "PoisRF+",
    "majority": "majority class",
}
AT_128_COLUMNS = {DOUBLE.get(method, method): name for method, name in METHODS.items()}


def method_runs(options: str, sets: dict[str, str], sampler: str) -> list[PlannedRun]:
    maps = f"task=uci {options} sampler={sampler} features.m=128"
    return [
        *sweep(f"task=uci {options}", attention=["exact"], dataset=sets),
        *sweep(maps, dataset=sets, features=[*MAPS, *DOUBLE.values()]),
        *sweep(f"task=uci {options} attention=exact", method=BASELINES, dataset=sets),
    ]


def table1(repeats: int, draws: int) -> dict[str, list[PlannedRun]]:
    """Seed 1: no split was looked at before the number of splits was fixed."""
    sets = {name: f"task.dataset={name}" for name in SETS["table1"]}
    options = f"seed=1 task.draws={draws} task.repeats={repeats}"
    return {"table1": method_runs(options, sets, "iid")}


def demo() -> dict[str, list[PlannedRun]]:
    sets = {name: f"task.dataset={name}" for name in SETS["demo"]}
    options = (
        "task.split=[0.6,0.15,0.25] task.repeats=5 "
        "task.sigmas=[0.05,0.1,0.15,0.2,0.3,0.4,0.55,0.75,1.0]"
    )
    return {"demo": method_runs(options, sets, "orthogonal")}
