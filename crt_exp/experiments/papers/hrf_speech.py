"""HRF Table 2: speech recognition with hybrid random features, of spoken digits."""

import pandas as pd

from crt_exp.experiments.papers.crt_speech import FINE_TUNING, SCRATCH, SWAP, TUNED, UNTRAINED
from crt_exp.experiments.papers.crt_speech import page as digits
from crt_exp.experiments.report import Claim, Page, Rows, dot_plot, mean_table, sweep
from crt_exp.experiments.report.plots import panels

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
page = Page(
    "hrf_speech",
    title="HRF Table 2: speech recognition with hybrids",
    finding="On spoken digits without training, HRF-C(2,2) has a lower loss than HRF-A(8,8) by 18.0 ± 1.5 nats an "
    "utterance (corrected 95% CI, n = 8 random projections). FAVOR+ with 256 columns has a lower loss than "
    "every hybrid.",
    small={
        "hrf-speech": [
            *sweep(
                f"{SWAP} trainer.steps=0",
                setting={UNTRAINED: ""},
                attention=CONTROLS,
                seed=range(1),
            ),
            *sweep(
                f"{SWAP} trainer.steps=0", setting={UNTRAINED: ""}, attention=OTHERS, seed=range(8)
            ),
            *sweep(
                "task=swap_loss task.start={runs}/models/exact task.fit=4",
                setting={UNTRAINED: ""},
                attention=CLUSTERS,
                seed=range(8),
            ),
            *sweep(
                f"{SWAP} {FINE_TUNING}",
                setting={TUNED: ""},
                attention=[*CONTROLS, REAL, COMPLEX, ANGULAR, FAVOR, TRIG],
                seed=range(3),
            ),
        ]
    },
    full={
        "hrf-speech": [
            *sweep(
                "experiment=hrf_conformer_960h attention.fit_steps=1000",
                setting={SCRATCH: ""},
                attention=CLUSTERS,
            ),
            *sweep(
                "experiment=hrf_conformer_960h", setting={SCRATCH: ""}, attention=CONTROLS | OTHERS
            ),
        ]
    },
    models=digits.models,
    columns=["setting", "method"],
    metrics=["loss", "wer"],
    data="spoken digits",
    measured=[
        "Data and exact model are those of [crt_speech](crt_speech.md). Without training, n = 8 random projections.",
        "The number behind FAVOR+, FAVOR++ and Trig counts columns. HRF-C(I,J) has I J m columns (twice as many with "
        "complex M), HRF-A(m,n) has 3 m (n + 1).",
        "Clusters are fitted to 4 training batches, or in the first 10 of 150 steps of fine-tuning.",
        "Only means over 3 to 8 seeds are left of fine-tuning and of the earlier model, which judge no claim.",
        "The paper trains from scratch on LibriSpeech. The numbers of its table are not available. At full size the "
        "Conformer encodes no positions.",
    ],
)


def claims(rows: Rows) -> list[Claim]:
    costs = {}
    for setting in (UNTRAINED, SCRATCH):
        costs[setting] = rows.paired("uniform", "exact", "loss", setting=setting).mean()
    claims = []
    for first, seconds, paper in [
        (COMPLEX, [FAVOR, TRIG, REAL], "clustered hybrids with complex M have the lowest WER"),
        (REAL, [FAVOR, TRIG], "hybrids have a lower WER"),
        (ANGULAR, [FAVOR, TRIG], "hybrids have a lower WER"),
        (REAL, [ANGULAR], "clustered hybrids are better than angular ones"),
    ]:
        gains, fails = {}, {}
        for second in seconds:
            for setting, cost in costs.items():
                case = f"{NAMES[second]}, {setting}"
                gains[case] = rows.paired(second, first, "loss", setting=setting)
                if cost < 0.5:
                    fails[case] = f"uniform attention costs {cost:.3f} nats (at least 0.5 needed)"
        others = ", ".join(NAMES[second] for second in seconds)
        claims.append(
            Claim(
                f"{NAMES[first]} has a lower loss than {others}",
                gains,
                paper=paper,
                unit="nats an utterance",
                reason="swapped without training; the paper trains with each method",
                fails=fails,
            )
        )
    return claims


def settings_table(rows: Rows, settings: list[str]) -> pd.DataFrame:
    losses = {f"loss, {setting}": {"metric": "loss", "setting": setting} for setting in settings}
    errors = {f"WER %, {setting}": {"metric": "wer", "setting": setting} for setting in settings}
    return pd.concat(
        [
            mean_table(rows, losses, NAMES, spec=".2f"),
            mean_table(rows, errors, NAMES, 100, ".1f"),
        ],
        axis=1,
    )


def tables(rows: Rows) -> dict[str, pd.DataFrame]:
    settings = []
    for setting in (UNTRAINED, TUNED, SCRATCH):
        if len(rows.select("loss", setting=setting)):
            settings.append(setting)
    return {
        "Loss (nats an utterance) and word error rate, lower is better": settings_table(
            rows, settings
        ),
        "An earlier exact model": settings_table(rows, [f"{UNTRAINED}, an earlier model"]),
    }


def figure(rows: Rows):
    fig, axes = panels(2)
    for ax, metric, setting, scale, xlabel in (
        (axes[0], "loss", UNTRAINED, 1, "loss, nats an utterance"),
        (axes[1], "wer", TUNED, 100, "word error rate, %"),
    ):
        values = {}
        for method in NAMES:
            values[method] = scale * rows.values(metric, method, setting=setting)
        dot_plot(ax, values, log=True, labels=NAMES)
        ax.set(title=setting, xlabel=xlabel)
    axes[0].set_xticks([2, 5, 10, 20], ["2", "5", "10", "20"])
    fig.tight_layout()
    return fig
