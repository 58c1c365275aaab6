"""Swaps of pretrained models without training.

A small causal model is also fine-tuned after the swap.
"""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from crt_exp.experiments.report import (
    Claim,
    Page,
    Rows,
    dot_plot,
    interval_or_range,
    mean_ci,
    mean_table,
    sweep,
)
from crt_exp.experiments.report.plots import panels
from crt_exp.experiments.report.sweeps import Run

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

SIZES = (
    "task=mlm attention=exact task.sizes.hidden_size=128 task.sizes.num_hidden_layers=4 "
    "task.sizes.num_attention_heads=4 task.sizes.intermediate_size=512 task.vocabulary_size=4096 "
    "trainer.eval_every=1000000 trainer.save_every=500 trainer.log_every=100 trainer.select=last"
)
BERT = f"{SIZES} +task.sizes.hidden_dropout_prob=0 +task.sizes.attention_probs_dropout_prob=0"
CAUSAL = f"{SIZES} task.causal=true +task.sizes.resid_pdrop=0 +task.sizes.embd_pdrop=0 +task.sizes.attn_pdrop=0"
TUNE = (
    "task=mlm task.causal=true task.vocabulary_size=4096 task.block=512 trainer.batch=4 task.init=uptrain "
    "task.model={runs}/causal/512_0 trainer.schedule=constant trainer.warmup=0 trainer.lr=5e-4 "
    "trainer.save_every=100000 trainer.select=last task.text=${oc.env:CRT_DATA}/wikitext2/wiki.train.tokens "
    "task.validation_text=outputs/texts/validation-8.tokens"
)
KINDS = {"new text": "task.kind=new", "repeated": "task.kind=repeated"}
COMMON = {"sample": [*"012"]}  # the rows of 4096 tokens that all methods have


def stage_runs(model: str, options: str, stages: list[tuple[int, int, int, str]]) -> list[Run]:
    """Runs (tokens, batch, steps, learning rate), each from the one before."""
    runs = []
    start = ""
    for block, batch, steps, rate in stages:
        runs += sweep(
            f"{options} trainer.batch={batch} trainer.steps={steps} trainer.lr={rate}{start}",
            **{"task.block": [block]},
            seed=[0],
        )
        start = f" task.init={{runs}}/{model}/{block}_0"
    return runs


def fidelity_runs(model: str, methods: Sequence[str]) -> list[Run]:
    """Three seeds of methods with random projections, one of others."""
    runs = []
    for method in methods:
        seeds = 3 if " m=" in method else 1
        runs += sweep(
            f"task=fidelity task.model={{runs}}/{model}/512_0 task.text=test task.calibration=train task.texts=24",
            model={model: ""},
            attention=[method],
            seed=range(seeds),
            **{"task.length": [512]},
        )
    return runs


def smollm2(length: int, seeds: int, **methods) -> list[Run]:
    return sweep(
        "task=swap_text task.model=models/smollm2-135m",
        model={"SmolLM2-135M": ""},
        text=KINDS,
        **{"task.length": [length]},
        **methods,
        seed=range(seeds),
    )


def whisper(seeds: int, methods: Sequence[str]) -> list[Run]:
    return sweep(
        "task=swap_speech task.model=models/whisper-tiny.en",
        model={"Whisper tiny.en": ""},
        text={"utterances": ""},
        attention=methods,
        seed=range(seeds),
    )


BERT_STAGES = [(18, 128, 5000, "2e-3")]
for block in (24, 32, 48, 64, 96, 128, 192, 256, 384):
    BERT_STAGES.append((block, 2304 // block, 250, "1e-3"))
BERT_STAGES.append((512, 4, 600, "5e-4"))
BFLOAT = {"exact in bfloat16": "attention=exact task.dtype=bfloat16"}
page = Page(
    "swap",
    title="Attention swaps of pretrained models without training",
    finding="On repeated passages of 4096 tokens, near-far attention increases the loss of SmolLM2-135M by 0.006 ± "
    "0.003 nats, a window by 3.0 ± 0.5 and FAVOR++ by 8.2 ± 1.7 (95% CI, n = 3 rows). No method was trained "
    "after the swap.",
    models={
        "BERT": stage_runs("BERT", BERT, BERT_STAGES),
        "causal": stage_runs(
            "causal", CAUSAL, [(64, 32, 3000, "2e-3"), (256, 8, 800, "1e-3"), (512, 4, 500, "5e-4")]
        ),
    },
    small={
        "fidelity": [
            *fidelity_runs("BERT", [*METHODS, NEARFAR]),
            *fidelity_runs("causal", METHODS),
        ],
        "fidelity/fine-tuned": sweep(
            TUNE,
            model={"causal": ""},
            length={
                512: "trainer.steps=0",
                "512, trained": "trainer.steps=430 trainer.eval_every=43",
            },
            attention=["exact", "favorpp m=256", "favorp m=256"],
            seed=range(4),
        ),
        "pretrained": [
            *smollm2(1024, 3, attention=["exact", "uniform", FAR, SPLIT]),
            *smollm2(1024, 1, attention=RANDOM),
            *smollm2(4096, 5, attention=["exact", "nearfar"]),
            *smollm2(8192, 5, attention=["exact", "nearfar"]),
            *smollm2(
                4096, 3, attention=["uniform", FAR, SPLIT, f"{SPLIT} open=48", "favorpp m=256"]
            ),
            *smollm2(8192, 1, attention=[FAR]),
            *smollm2(1024, 3, method=BFLOAT),
            *smollm2(4096, 3, method=BFLOAT),
        ],
        "pretrained/embeddings": sweep(
            "task=swap_embeddings task.model=models/minilm",
            model={"MiniLM": ""},
            text={"new text": ""},
            attention=["uniform", FAR, NEARFAR, *RANDOM],
            seed=[0],
            **{"task.length": [512]},
        ),
        "pretrained/speech": [
            *whisper(8, ["exact", "nearfar"]),
            *whisper(3, ["uniform", FAR, "favorpp m=256"]),
            *whisper(2, ["favorp m=256", "favorsharp m=256", "relu m=256"]),
        ],
    },
    data="models/minilm, models/smollm2-135m, models/whisper-tiny.en, WikiText-2 and LibriSpeech",
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
)


def loss_increase(rows: Rows, method: str, model: str) -> pd.Series:
    return rows.values("above", method, sweep="fidelity", model=model)


def claims(rows: Rows) -> list[Claim]:
    models = ("BERT", "causal")
    fails = {}
    for model in models:
        control = mean_ci(loss_increase(rows, "uniform", model)).mean
        if control < 0.5:
            fails[model] = (
                f"uniform attention increases the loss by {control:.3g} nats (at least 0.5 needed)"
            )
    reasons = {
        256: "uniform attention is closer than both in BERT; in the causal model the difference is 4% of "
        "the loss increase of either",
        64: "",
    }
    claims = []
    for m, reason in reasons.items():
        gains = {}
        for model in models:
            favorp = loss_increase(rows, f"favorp m={m}", model)
            gains[model] = favorp - loss_increase(rows, f"favorpp m={m}", model)
        claims.append(
            Claim(
                f"without training, FAVOR++ is closer to exact attention than FAVOR+, m = {m}",
                gains,
                unit="nats",
                fails=fails,
                reason=reason,
            )
        )
    claims.append(
        Claim(
            "fine-tuned for 430 steps after the swap, FAVOR++ has a lower loss than FAVOR+, m = 256",
            {
                "causal": rows.paired(
                    "favorp m=256", "favorpp m=256", "loss", sweep="fidelity/fine-tuned", step=430
                )
            },
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


def tables(rows: Rows) -> dict[str, pd.DataFrame]:
    renamed = common_names(rows)
    errors = {}
    for model in ("BERT", "causal"):
        where = {"sweep": "fidelity", "model": model, "layer": ""}
        errors[f"{model}, attention"] = {"metric": "attention_error", **where}
        errors[f"{model}, last hidden states"] = {"metric": "hidden_error", **where}
    steps = {}
    for step in (0, 43, 129, 430):
        steps[f"step {step}"] = {"metric": "loss", "sweep": "fidelity/fine-tuned", "step": step}
    title = (
        "Loss increase over exact attention without training, cosine to exact attention, "
        "and word errors (exact: 4%)"
    )
    return {
        title: main_table(renamed),
        "BERT and causal model without training: relative errors": mean_table(
            renamed, errors, spec=".3f"
        ),
        "Causal model fine-tuned after the swap: loss, nats": mean_table(rows, steps, spec=".4f"),
        "SmolLM2 without training: loss increase, nats; same next token as exact attention, %": smollm2_table(
            renamed
        ),
    }


def smollm2_filter(kind: str, length: int) -> dict[str, Any]:
    where = {"sweep": "pretrained", "text": kind, "length": length}
    if length == 4096:
        where |= COMMON
    return where


def main_table(rows: Rows) -> pd.DataFrame:
    columns = {}
    for model in ("BERT", "causal"):
        columns[f"{model}, nats"] = {"metric": "above", "sweep": "fidelity", "model": model}
    for kind in KINDS:
        columns[f"SmolLM2, {kind}, nats"] = {"metric": "above", **smollm2_filter(kind, 4096)}
    columns["MiniLM, cosine"] = {"metric": "cosine", "model": "MiniLM"}
    losses = mean_table(rows, columns, SHOWN, spec=".3f")
    word_errors = {"Whisper, word errors, %": {"metric": "wer"}}
    percentages = mean_table(rows, word_errors, SHOWN, 100, format=interval_or_range)
    table = pd.concat([losses, percentages], axis=1)
    table["CRT Table 2, SST-2, %"] = table.index.map(SST2)
    return table


def smollm2_table(rows: Rows) -> pd.DataFrame:
    methods = [*BFLOAT, "uniform", "window", "nearfar", SPLIT, f"{SPLIT} open=48", *RANDOM]
    losses, tokens = {}, {}
    for kind in KINDS:
        for length in (1024, 4096, 8192):
            name = f"{kind}, {length} tokens"
            where = smollm2_filter(kind, length)
            losses[name] = {"metric": "above", **where}
            if length == 4096:
                tokens[f"{name}, %"] = {"metric": "agrees", **where}
    return pd.concat(
        [
            mean_table(rows, losses, methods, spec=".4f"),
            mean_table(rows, tokens, methods, 100, ".1f"),
        ],
        axis=1,
    )


def figure(rows: Rows):
    plots = []
    for model in ("BERT", "causal"):
        methods = ["exact", "uniform", "identity", *SHOWN[1:]]
        plots.append((f"{model}, 512 tokens", methods, {"sweep": "fidelity", "model": model}))
    for kind in KINDS:
        where = {"sweep": "pretrained", "text": kind, "length": 4096}
        plots.append((f"SmolLM2-135M, {kind}, 4096 tokens", [*BFLOAT, *SHOWN], where))
    fig, axes = panels(4, columns=2)
    renamed = common_names(rows)
    for ax, (title, methods, where) in zip(axes, plots):
        increases = {method: renamed.values("above", method, **where) for method in methods}
        dot_plot(ax, increases, zero=True)
        ax.set(title=title, xlabel="loss increase over exact attention, nats (lower is better)")
    fig.tight_layout()
    return fig
