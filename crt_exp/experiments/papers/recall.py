"""Single far keys: synthetic heads, and a model that copies."""

import pandas as pd

from crt_exp.experiments.papers.parts.small_models import WIKITEXT2, stage
from crt_exp.experiments.report import (
    Page,
    Rows,
    Tables,
    filters_over,
    line_plot,
    mean_ci,
    mean_table,
    panels,
    quoted_override,
    share,
    staged_sweep,
    sweep,
)

WINDOW = "window block=64 first=16"
NEARFAR = "nearfar exact_until=64 open={}"
HEADS = {"uniform": "uniform", "window": "window"}
for n in (32, 128):
    HEADS[f"nearfar block=32 heavy=16 open={n} exact_until=128"] = f"near-far, {n} keys"
    HEADS[f"pages keys={n}"] = f"pages, {n} keys"
    HEADS[f"largest keys={n}"] = f"{n} largest weights"
FEW = [method for method, name in HEADS.items() if "32 " in name]
MODELS = {
    "exact": "exact",
    "uniform": "uniform",
    WINDOW: "window",
    "favorpp m=256": "FAVOR++, m = 256",
    **{NEARFAR.format(n): f"near-far, {n} keys" for n in (8, 16, 32, 64)},
}
DENSE = {
    "pages keys=64": "pages, 64 keys",
    "largest keys=64": "64 largest weights",
}
KEYS = {"iid": "", "in 32 clusters": "task.clusters=32"}
LENGTHS = [512, 2048, 8192, 16384]

COPY = (
    "task=mlm attention=exact task.causal=true task.repeat=1.0 trainer.betas=[0.9,0.98] "
    "trainer.eval_every=1000000 trainer.save_every=500 trainer.log_every=50 trainer.select=last "
    "task.validation_text=outputs/texts/validation-8.tokens"
)
DRAWN = f"task.text=[{WIKITEXT2},outputs/texts/drawn-14000.tokens]"

COPY_STAGES = {
    128: f"{DRAWN} task.model=outputs/texts/llama-2048 {stage(32, 1500, '2e-3')}",
    256: f"{DRAWN} {stage(16, 900, '1.5e-3')}",
    512: f"task.text={WIKITEXT2} {stage(8, 1200, '1e-3')}",
    2048: f"task.text={WIKITEXT2} {stage(2, 400, '5e-4')}",
}
SWAP = "task=swap_copying task.start={runs}/copying-model/2048_0"
DENSE_OPTIONS = {}
for name in DENSE:
    baseline = quoted_override("task.baseline", f"{name} first=16")
    DENSE_OPTIONS[name] = f"attention=exact {baseline}"


def copying_table(rows: Rows) -> pd.DataFrame:
    names = MODELS | DENSE
    columns = {
        "loss increase over exact, new text (nats)": {"metric": "new", "sweep": "copying"},
        "the same, copied text": {"metric": "copied", "sweep": "copying"},
    }
    table = mean_table(rows, columns, names, spec=".3f", less="exact")
    exact = rows.values("gain", "exact", sweep="copying")
    remaining = {}
    for method, name in names.items():
        gain = share(rows.values("gain", method, sweep="copying"), exact)
        if len(gain):
            remaining[name] = f"{100 * gain.mean():.1f}"
    table["remaining gain from copying, %"] = table.index.map(remaining)
    return table


def finding(rows: Rows) -> str:
    increases = {}
    for method in MODELS | DENSE:
        increase = rows.paired(method, "exact", "copied", sweep="copying")
        increases[method] = mean_ci(increase)
    near = increases[NEARFAR.format(64)]
    others = [increases[name].mean for name in (WINDOW, "pages keys=64", "favorpp m=256")]
    return (
        f"A Llama with near-far attention (64 keys) copies from 1024 tokens back: loss increase {near} nats (95% CI, "
        f"n = {near.n} seeds). A window, pages of keys and FAVOR++ cannot copy ({min(others):.1f} nats or more)."
    )


def tables(rows: Rows) -> Tables:
    tables = {"A model that copies, without training (2048 tokens)": copying_table(rows)}
    for keys in KEYS:
        columns = filters_over("length", LENGTHS, "L = {}", metric="error", keys=keys)
        title = f"Heads, keys {keys}: relative error of the output (lower is better)"
        tables[title] = mean_table(rows, columns, HEADS, spec=".3f")
    return tables


def figure(rows: Rows):
    fig, axes = panels(2)
    for ax, keys in zip(axes, KEYS):
        line_plot(
            ax, rows, "length", "error", HEADS, log="xy", dotted=FEW, sweep="recall", keys=keys
        )
        ax.set(
            title=f"Causal heads, keys {keys}",
            xlabel="tokens L",
            ylabel="relative error (lower is better)",
        )
    return fig


page = Page(
    "recall",
    title="Recall of distant tokens",
    finding=finding,
    small={
        "recall": sweep(
            f"task=far_key {quoted_override('task.methods', [*HEADS])}",
            keys=KEYS,
            **{"task.length": LENGTHS},
            seed=range(10),
        ),
        "copying": [
            *sweep(SWAP, **{"task.length": [2048]}, attention=[*MODELS], seed=range(5)),
            *sweep(SWAP, **{"task.length": [2048]}, method=DENSE_OPTIONS, seed=range(5)),
        ],
    },
    models={"copying-model": staged_sweep("copying-model", COPY, COPY_STAGES)},
    columns=["keys", "length", "method"],
    metrics=["error", "new", "copied", "gain"],
    measured=[
        "Limit: these rows have larger errors of near-far attention than the present code.",
        "Heads: 4 causal heads, d = 32, 10 seeds. Each of the last 256 queries gives 0.9 of its weight to one key at "
        "least 96 tokens back. Pages have 16 keys; pages and largest weights are computed densely.",
        "Copying: one Llama of 4 layers, trained with exact attention; 5 seeds of 4 test rows of 2048 tokens whose "
        "second half repeats the first.",
    ],
    tables=tables,
    figure=figure,
)
