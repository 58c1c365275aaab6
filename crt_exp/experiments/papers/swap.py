"""Swaps of pretrained models without training.

A small causal model is also fine-tuned after the swap.
"""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from crt_exp.experiments.report import (
    Claim,
    Page,
    PlannedRun,
    Rows,
    Tables,
    control_checks,
    dot_plot,
    interval_or_range,
    mean_ci,
    mean_table,
    panels,
    staged_sweep,
    sweep,
)
from crt_exp.experiments.report.small_models import WIKITEXT2, dropout, masked_model, stage

WINDOW = "window block=32 first=16"  # of models trained here
FAR = "window block=64 first=16"  # of published models
NEARFAR = "nearfar exact_until=0"
SPLIT = "nearfar exact_until=256"
RANDOM = ["relu m=256", "favorp m=256", "favorpp m=256", "favorsharp m=256"]
METHODS = ["exact", "uniform", "identity", WINDOW]
for name in ["relu", "favorp", "favorpp", "favorsharp"]:
    METHODS += [f"{name} m=64", f"{name} m=256"]
SHOWN = ["uniform", "window", "nearfar", *RANDOM]
SST2 = {"ReLU, m = 256": "91.97", "FAVOR+, m = 256": "90.58", "FAVOR++, m = 256": "92.00"}

BERT = f"{masked_model(4, heads=4)} {dropout(0)} task.vocabulary_size=4096"
CAUSAL = (
    f"{masked_model(4, heads=4)} task.vocabulary_size=4096 task.causal=true "
    "+task.sizes.resid_pdrop=0 +task.sizes.embd_pdrop=0 +task.sizes.attn_pdrop=0"
)
BERT_STAGES = {18: stage(128, 5000, "2e-3")}
for block in (24, 32, 48, 64, 96, 128, 192, 256, 384):
    BERT_STAGES[block] = stage(2304 // block, 250, "1e-3")
BERT_STAGES[512] = stage(4, 600, "5e-4")
CAUSAL_STAGES = {
    64: stage(32, 3000, "2e-3"),
    256: stage(8, 800, "1e-3"),
    512: stage(4, 500, "5e-4"),
}
TUNE = (
    "task=mlm task.causal=true task.vocabulary_size=4096 task.block=512 trainer.batch=4 task.init=uptrain "
    "task.model={runs}/causal/512_0 trainer.schedule=constant trainer.warmup=0 trainer.lr=5e-4 "
    f"trainer.save_every=100000 trainer.select=last task.text={WIKITEXT2} "
    "task.validation_text=outputs/texts/validation-8.tokens"
)
TUNED = {512: "trainer.steps=0", "512, trained": "trainer.steps=430 trainer.eval_every=43"}
KINDS = {"new text": "task.kind=new", "repeated": "task.kind=repeated"}
COMMON = {"sample": [*"012"]}  # the rows of 4096 tokens that all methods have


def fidelity_runs(model: str, methods: Sequence[str]) -> list[PlannedRun]:
    """Three seeds of methods with random projections, one of others."""
    runs = []
    for method in methods:
        seeds = 3 if " m=" in method else 1
        runs += sweep(
            f"task=fidelity task.model={{runs}}/{model}/512_0 task.text=test task.calibration=train task.texts=24",
            model=model,
            attention=[method],
            seed=range(seeds),
            **{"task.length": [512]},
        )
    return runs


def smollm2(length: int, seeds: int, **methods) -> list[PlannedRun]:
    return sweep(
        "task=swap_text task.model=models/smollm2-135m",
        model="SmolLM2-135M",
        text=KINDS,
        **{"task.length": [length]},
        **methods,
        seed=range(seeds),
    )


def whisper(seeds: int, methods: Sequence[str]) -> list[PlannedRun]:
    return sweep(
        "task=swap_speech task.model=models/whisper-tiny.en",
        model="Whisper tiny.en",
        text="utterances",
        attention=methods,
        seed=range(seeds),
    )


BFLOAT = {"exact in bfloat16": "attention=exact task.dtype=bfloat16"}
SMOLLM2 = [
    *smollm2(1024, 3, attention=["exact", "uniform", FAR, SPLIT]),
    *smollm2(1024, 1, attention=RANDOM),
    *smollm2(4096, 5, attention=["exact", "nearfar"]),
    *smollm2(8192, 5, attention=["exact", "nearfar"]),
    *smollm2(4096, 3, attention=["uniform", FAR, SPLIT, f"{SPLIT} open=48", "favorpp m=256"]),
    *smollm2(8192, 1, attention=[FAR]),
    *smollm2(1024, 3, method=BFLOAT),
    *smollm2(4096, 3, method=BFLOAT),
]
MINILM = sweep(
    "task=swap_embeddings task.model=models/minilm",
    model="MiniLM",
    text="new text",
    attention=["uniform", FAR, NEARFAR, *RANDOM],
    seed=[0],
    **{"task.length": [512]},
)
WHISPER = [
    *whisper(8, ["exact", "nearfar"]),
    *whisper(3, ["uniform", FAR, "favorpp m=256"]),
    *whisper(2, ["favorp m=256", "favorsharp m=256", "relu m=256"]),
]
TUNING = sweep(
    TUNE,
    model="causal",
    length=TUNED,
    attention=["exact", "favorpp m=256", "favorp m=256"],
    seed=range(4),
)


def finding(rows: Rows) -> str:
    increases = {}
    for method in ("nearfar", FAR, "favorpp m=256"):
        values = rows.values("above", method, **smollm2_filter("repeated", 4096))
        increases[method] = mean_ci(values)
    return (
        "On repeated passages of 4096 tokens, near-far attention increases the loss of SmolLM2-135M by "
        f"{increases['nearfar']} nats, a window by {increases[FAR]} and FAVOR++ by "
        f"{increases['favorpp m=256']} (95% CI, n = {len(values)} rows). No method was trained after the swap."
    )


MODELS = {}
for model in ("BERT", "causal"):
    MODELS[model] = {"sweep": "fidelity", "model": model}


def claims(rows: Rows) -> list[Claim]:
    fails = control_checks(rows, MODELS, "above")
    reasons = {
        256: "uniform attention is closer than both in BERT; in the causal model the difference is 4% of "
        "the loss increase of either",
        64: "",
    }
    claims = []
    for m, reason in reasons.items():
        gains = {}
        for model, where in MODELS.items():
            gains[model] = rows.paired(f"favorp m={m}", f"favorpp m={m}", "above", **where)
        text = f"without training, FAVOR++ is closer to exact attention than FAVOR+, m = {m}"
        claims.append(Claim(text, gains, unit="nats", fails=fails, reason=reason))
    where = {"sweep": "fidelity/fine-tuned", "step": 430}
    claims.append(
        Claim(
            "fine-tuned for 430 steps after the swap, FAVOR++ has a lower loss than FAVOR+, m = 256",
            {"causal": rows.paired("favorp m=256", "favorpp m=256", "loss", **where)},
            paper="FAVOR++ improves on FAVOR+, especially when uptrained (ViT)",
            unit="nats",
            fails=fails,
            needs="a model whose FAVOR+ and FAVOR++ differ after fine-tuning: 0.001 nats is below 1% of the cost "
            "of uniform attention",
        )
    )
    return claims


def common_names(rows: Rows) -> Rows:
    """With one name for the windows and one for near-far attention."""
    names = {WINDOW: "window", FAR: "window", NEARFAR: "nearfar"}
    return Rows(rows.frame.assign(method=rows.frame["method"].replace(names)))


def smollm2_filter(kind: str, length: int) -> dict[str, Any]:
    where = {"sweep": "pretrained", "text": kind, "length": length}
    if length == 4096:
        where |= COMMON
    return where


def main_table(rows: Rows) -> pd.DataFrame:
    columns = {}
    for model, where in MODELS.items():
        columns[f"{model}, nats"] = {"metric": "above", **where}
    for kind in KINDS:
        columns[f"SmolLM2, {kind}, nats"] = {"metric": "above", **smollm2_filter(kind, 4096)}
    columns["MiniLM, cosine"] = {"metric": "cosine", "model": "MiniLM"}
    losses = mean_table(rows, columns, SHOWN, spec=".3f")
    columns = {"Whisper, word errors, %": {"metric": "wer"}}
    word_errors = mean_table(rows, columns, SHOWN, 100, format=interval_or_range)
    table = pd.concat([losses, word_errors], axis=1)
    table["CRT Table 2, SST-2, %"] = table.index.map(SST2)
    return table


def smollm2_table(rows: Rows) -> pd.DataFrame:
    methods = [*BFLOAT, "uniform", "window", "nearfar", SPLIT, f"{SPLIT} open=48", *RANDOM]
    losses, tokens = {}, {}
    for kind in KINDS:
        for length in (1024, 4096, 8192):
            where = {"metric": "above", **smollm2_filter(kind, length)}
            losses[f"{kind}, {length} tokens"] = where
        tokens[f"{kind}, 4096 tokens, %"] = {"metric": "agrees", **smollm2_filter(kind, 4096)}
    loss_table = mean_table(rows, losses, methods, spec=".4f")
    return pd.concat([loss_table, mean_table(rows, tokens, methods, 100, ".1f")], axis=1)


def tables(rows: Rows) -> Tables:
    renamed = common_names(rows)
    errors, steps = {}, {}
    for model, where in MODELS.items():
        for name in ("attention", "hidden"):
            title = {"attention": "attention", "hidden": "last hidden states"}[name]
            errors[f"{model}, {title}"] = {"metric": f"{name}_error", "layer": "", **where}
    for step in (0, 43, 129, 430):
        steps[f"step {step}"] = {"metric": "loss", "sweep": "fidelity/fine-tuned", "step": step}
    title = (
        "Loss increase over exact attention without training, cosine to exact attention, "
        "and word errors (exact: 4%)"
    )
    tables = {title: main_table(renamed)}
    title = "BERT and causal model without training: relative errors"
    tables[title] = mean_table(renamed, errors, spec=".3f")
    title = "Causal model fine-tuned after the swap: loss, nats"
    tables[title] = mean_table(rows, steps, spec=".4f")
    title = "SmolLM2 without training: loss increase, nats; same next token as exact attention, %"
    tables[title] = smollm2_table(renamed)
    return tables


def figure(rows: Rows):
    plots = {}
    for model, where in MODELS.items():
        methods = ["exact", "uniform", "identity", *SHOWN[1:]]
        plots[f"{model}, 512 tokens"] = methods, where
    for kind in KINDS:
        where = {"sweep": "pretrained", "text": kind, "length": 4096}
        plots[f"SmolLM2-135M, {kind}, 4096 tokens"] = [*BFLOAT, *SHOWN], where
    fig, axes = panels(4, columns=2)
    renamed = common_names(rows)
    for ax, (title, (methods, where)) in zip(axes, plots.items()):
        dot_plot(ax, renamed.by_method("above", methods, **where), zero=True)
        ax.set(title=title, xlabel="loss increase over exact attention, nats (lower is better)")
    return fig


page = Page(
    "swap",
    title="Attention swaps of pretrained models without training",
    finding=finding,
    models={
        "BERT": staged_sweep("BERT", BERT, BERT_STAGES),
        "causal": staged_sweep("causal", CAUSAL, CAUSAL_STAGES),
    },
    small={
        "fidelity": fidelity_runs("BERT", [*METHODS, NEARFAR]) + fidelity_runs("causal", METHODS),
        "fidelity/fine-tuned": TUNING,
        "pretrained": SMOLLM2,
        "pretrained/embeddings": MINILM,
        "pretrained/speech": WHISPER,
    },
    columns=["model", "text", "length", "method", "layer", "step", "split"],
    metrics=["above", "hidden_error", "attention_error", "cosine", "loss", "agrees", "wer"],
    measured=[
        "BERT and the causal model (width 128, 4 layers, 4 heads) were trained here on WikiText-2 with exact "
        "attention. Samples are 24 test documents; projections have 3 seeds.",
        "SmolLM2-135M (4-bit weights), MiniLM and Whisper tiny.en are pretrained checkpoints. Samples are rows "
        "of WikiText-2 (three at 4096 tokens), documents, and groups of 4 LibriSpeech utterances. Values "
        "without interval have n = 1.",
        "A repeated passage is the second half of a row. Windows have blocks of 32 tokens (BERT, causal) or 64.",
        "Near-far attention was tuned on the same corpus, including row 0. It has exact_until=0 in BERT and "
        "MiniLM, and its default elsewhere: exact up to 1536 tokens in causal models, 512 in Whisper.",
    ],
    tables=tables,
    claims=claims,
    figure=figure,
)
