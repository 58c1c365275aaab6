"""HRF Table 2: speech recognition with hybrid random features, of spoken digits."""

import pandas as pd

from crt_exp.experiments.papers.parts.speech_models import (
    FINE_TUNING,
    MODELS,
    SCRATCH,
    SWAP,
    TUNED,
    UNTRAINED,
)
from crt_exp.experiments.report import (
    Claim,
    Page,
    Rows,
    Tables,
    control_checks,
    dot_plot,
    filters_over,
    mean_ci,
    mean_table,
    panels,
    sweep,
)

CLUSTERS = {
    "hrf_cluster m=48 features.queries=3 features.keys=3": "HRF-C(3,3), m = 48",
    "hrf_cluster m=72 features.queries=2 features.keys=3": "HRF-C(2,3), m = 72",
    "hrf_cluster m=72 features.queries=3 features.keys=2": "HRF-C(3,2), m = 72",
    "hrf_cluster m=64 features.queries=2 features.keys=2": "HRF-C(2,2), m = 64",
    "hrf_cluster m=32 features.queries=2 features.keys=2 features.field=complex": "HRF-C(2,2), complex, m = 32",
}
OTHERS = {
    "hrf_angular m=16 features.n=8 features.base=pos": "HRF-A(16,8)",
    "hrf_angular m=8 features.n=8 features.base=pos": "HRF-A(8,8)",
    "favorp m=432": "FAVOR+ 432",
    "favorp m=256": "FAVOR+ 256",
    "favor m=216": "Trig 432",
    "favor m=128": "Trig 256",
    "favorpp m=256": "FAVOR++ 256",
}
CONTROLS = {"exact": "exact", "uniform": "uniform"}
NAMES = CONTROLS | CLUSTERS | OTHERS
REAL = "hrf_cluster m=64 features.queries=2 features.keys=2"
COMPLEX = "hrf_cluster m=32 features.queries=2 features.keys=2 features.field=complex"
ANGULAR = "hrf_angular m=8 features.n=8 features.base=pos"
FAVOR = "favorp m=256"
TRIG = "favor m=128"


EVERY = CONTROLS | OTHERS
SWAPPED = f"{SWAP} trainer.steps=0"
FITTED = "task=swap_loss task.start={runs}/models/exact task.fit=4"
FULL_SIZE = "experiment=hrf_conformer_960h"
TUNED_METHODS = [*CONTROLS, REAL, COMPLEX, ANGULAR, FAVOR, TRIG]
SMALL = [
    *sweep(SWAPPED, setting=UNTRAINED, attention=CONTROLS, seed=range(1)),
    *sweep(SWAPPED, setting=UNTRAINED, attention=OTHERS, seed=range(8)),
    *sweep(FITTED, setting=UNTRAINED, attention=CLUSTERS, seed=range(8)),
    *sweep(f"{SWAP} {FINE_TUNING}", setting=TUNED, attention=TUNED_METHODS, seed=range(3)),
]
FULL = [
    *sweep(f"{FULL_SIZE} attention.fit_steps=1000", setting=SCRATCH, attention=CLUSTERS),
    *sweep(FULL_SIZE, setting=SCRATCH, attention=EVERY),
]


def finding(rows: Rows) -> str:
    gain = mean_ci(rows.paired(ANGULAR, REAL, "loss", setting=UNTRAINED))
    return (
        f"On spoken digits without training, HRF-C(2,2) has a lower loss than HRF-A(8,8) by {gain} nats an "
        f"utterance (95% CI, n = {gain.n} random projections). FAVOR+ with 256 columns has a lower loss than "
        "every hybrid."
    )


UNIT = "nats an utterance"
NEEDS = "LibriSpeech-960: experiment=hrf_conformer_960h"
COMPARISONS = [  # first method, others, the paper's result
    (COMPLEX, [FAVOR, TRIG, REAL], "clustered hybrids with complex M have the lowest WER"),
    (REAL, [FAVOR, TRIG], "hybrids have a lower WER"),
    (ANGULAR, [FAVOR, TRIG], "hybrids have a lower WER"),
    (REAL, [ANGULAR], "clustered hybrids are better than angular ones"),
]


def claims(rows: Rows) -> list[Claim]:
    """The paper trains with each method; without training, the comparisons are our own."""
    starts = {"without training": UNTRAINED, "trained from scratch": SCRATCH}
    claims = []
    for first, others, paper in COMPARISONS:
        labels = {other: NAMES[other] for other in others}
        for words, setting in starts.items():
            where = {"setting": setting}
            gains = rows.paired_by_case(first, labels, "loss", {"": where}, -1)
            fails = control_checks(rows, dict.fromkeys(gains, where), unit=UNIT)
            options = {}
            if setting == SCRATCH:
                options = {"paper": paper, "needs": NEEDS}
                if not any(len(gain) for gain in gains.values()):
                    options["not_measured"] = "no model was trained from scratch"
            text = f"{words}, {NAMES[first]} has a lower loss than {', '.join(labels.values())}"
            claims.append(Claim(text, gains, unit=UNIT, fails=fails, **options))
    return claims


def tables(rows: Rows) -> Tables:
    measured = {*rows.frame["setting"]}
    settings = [setting for setting in (UNTRAINED, TUNED, SCRATCH) if setting in measured]
    losses = filters_over("setting", settings, "loss, {}", metric="loss")
    errors = filters_over("setting", settings, "WER %, {}", metric="wer")
    table = [
        mean_table(rows, losses, NAMES, spec=".2f"),
        mean_table(rows, errors, NAMES, 100, ".1f"),
    ]
    title = "Loss (nats an utterance) and word error rate, lower is better"
    return {title: pd.concat(table, axis=1)}


def figure(rows: Rows):
    fig, (left, right) = panels(2)
    losses = rows.by_method("loss", NAMES, setting=UNTRAINED)
    dot_plot(left, losses, log=True, labels=NAMES)
    left.set(title=UNTRAINED, xlabel="loss, nats an utterance")
    left.set_xticks([2, 5, 10, 20], ["2", "5", "10", "20"])
    dot_plot(right, rows.by_method("wer", NAMES, 100, setting=TUNED), log=True, labels=NAMES)
    right.set(title=TUNED, xlabel="word error rate, %")
    return fig


page = Page(
    "hrf_speech",
    title="HRF Table 2: speech recognition with hybrids",
    finding=finding,
    small={"hrf-speech": SMALL},
    full={"hrf-speech": FULL},
    models=MODELS,
    columns=["setting", "method"],
    metrics=["loss", "wer"],
    measured=[
        "Data and exact model are those of [crt_speech](crt_speech.md). Without training, n = 8 random projections of "
        "one exact model: intervals leave out other models.",
        "The number behind FAVOR+, FAVOR++ and Trig counts columns. HRF-C(I,J) has I J m columns (twice as many with "
        "complex M), HRF-A(m,n) has 3 m (n + 1).",
        "Clusters are fitted to 4 training batches, or in the first 10 of 150 steps of fine-tuning.",
        "Only means over 3 to 8 seeds are left of fine-tuning, which judge no claim.",
        "The paper trains from scratch on LibriSpeech. The numbers of its table are not available. At full size the "
        "Conformer encodes no positions.",
    ],
    tables=tables,
    claims=claims,
    figure=figure,
)
