"""HRF Figures 3, 8 and 10, Tables 4 and 5: random features for the softmax of a language model."""

from crt_exp.experiments.papers.parts.sampled_training import (
    COMPARED,
    FULL_SAMPLED,
    MAPS,
    NEAR1,
    NEGATIVES,
    SAMPLED,
    TRAINED,
    Checks,
    failed_checks,
    sampling_claim,
    settings,
)
from crt_exp.experiments.report import (
    HOME,
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

SHOWN = {**MAPS, "uniform": "uniform", "unigram": "unigram"}
MS = [64, 128, 256, 512]
LENGTHS = {"free": "trainer.epochs=7", "near 1": f"{NEAR1} trainer.epochs=4"}
FULL_SIZE = {"free": "experiment=hrf_ptb_softmax", "near 1": "experiment=hrf_wikitext2_softmax"}
MODELS = {
    "hrf-lm-models": sweep(f"{TRAINED} trainer.lr=3e-3 trainer.warmup=200", lengths=LENGTHS),
    "hrf-lm-models-full": sweep("task.softmax=full", lengths=FULL_SIZE),
}


def estimate_runs(models: str, every: int) -> list[PlannedRun]:
    common = f"task=class_distributions task.every={every}"
    lengths = {
        "free": f"task.start={HOME}/{models}/free",
        "near 1": f"task.start={HOME}/{models}/near-1",
    }
    return [
        *sweep(common, attention=["exact"], lengths=lengths),
        *sweep(common, attention=MAPS, lengths=lengths, seed=range(10)),
    ]


SMALL = {"hrf-lm": estimate_runs("hrf-lm-models", 32), "hrf-sampled": SAMPLED}
FULL = {"hrf-lm": estimate_runs("hrf-lm-models-full", 1), "hrf-sampled": FULL_SAMPLED}


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


ESTIMATED = {"lengths": "near 1", "sweep": "hrf-lm"}


def estimate_checks(rows: Rows, metric: str, name: str) -> Checks:
    """Sanity checks of the model and of the features."""
    frequencies = rows.values("unigram_loss", "exact", **ESTIMATED).mean()
    gain = frequencies - rows.values("loss", "exact", **ESTIMATED).mean()
    unigram = rows.values(metric, "unigram", **ESTIMATED).mean()
    best = min(rows.values(metric, method, **ESTIMATED).mean() for method in MAPS)
    return {
        "gain of the model over word frequencies": (gain, 0.5),
        f"{name} of word frequencies over that of the best features": (unigram / best, 1.0),
    }


def claims(rows: Rows) -> list[Claim]:
    claims = []
    for metric, name in {"ks": "KS", "w1": "W1"}.items():
        ratios = {}
        for hybrid, other in COMPARED:
            ratio = rows.ratio(hybrid, other, metric, **ESTIMATED)
            ratios[f"{MAPS[hybrid]}, {MAPS[other]}"] = ratio
        claims.append(
            Claim(
                f"hybrids have a smaller {name} distance to the softmax (lengths near 1)",
                ratios,
                "HRFs lead to the most accurate estimates",
                "features that are closer to the softmax than word frequencies; the paper's length costs",
                below=1,
                log=True,
                fails=failed_checks(ratios, estimate_checks(rows, metric, name)),
            )
        )
    text = "the angular hybrid has fewer negative estimates than trigonometric features"
    fewer = 100 * rows.paired("favor", "hrf_angular", "negative", **ESTIMATED)
    negative = Claim(text, {"lengths near 1": fewer}, unit="points")
    return [*claims, negative, sampling_claim(rows)]


def tables(rows: Rows) -> Tables:
    where = {"metric": "ks", "lengths": "near 1"}
    distances = filters_over("m", MS, "lengths near 1, m = {}", **where)
    losses = mean_table(rows, settings(rows), NEGATIVES, spec=".2f")
    return {
        "KS distance to the exact softmax (lower is better)": mean_table(
            rows, distances, SHOWN, spec=".2f"
        ),
        "Sampled training, by the negatives: test loss, nats": losses,
    }


def figure(rows: Rows):
    fig, (left, right) = panels(2)
    line_plot(left, rows, "m", "ks", SHOWN, log="x", lengths="near 1")
    left.set(title="Distance to the exact softmax, lengths near 1", xlabel="m")
    left.set_ylabel("KS (lower is better)")
    left.set_xticks(MS, MS)
    measured = settings(rows)
    if measured:
        name, where = measured.popitem()
        dot_plot(right, rows.by_method(methods=NEGATIVES, **where), labels=NEGATIVES)
        right.set(title=f"Sampled training, {name}", xlabel="test loss, nats (lower is better)")
    return fig


page = Page(
    "hrf_language",
    title="HRF Figures 3, 8 and 10, Tables 4 and 5: random features for the softmax of a language model",
    finding=finding,
    small=SMALL,
    full=FULL,
    models=MODELS,
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
