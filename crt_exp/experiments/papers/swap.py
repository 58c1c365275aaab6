"""Swaps of pretrained models without training.

A small causal model is also fine-tuned after the swap.
"""

from collections.abc import Sequence

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

WINDOW, FAR = (
    "window block=32 first=16",
    "window block=64 first=16",
)  # of models trained here, of published ones
NEARFAR, SPLIT = "nearfar exact_until=0", "nearfar exact_until=256"
RANDOM = ["relu m=256", "favorp m=256", "favorpp m=256", "favorsharp m=256"]
METHODS = [
    "exact",
    "uniform",
    "identity",
    WINDOW,
    *(method.replace("256", m) for method in RANDOM for m in ("64", "256")),
]
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


def stage_runs(model: str, options: str, settings: list[tuple[int, int, int, str]]) -> list:
    """Runs (tokens, batch, steps, learning rate), each from the one before."""
    return [
        run
        for i, (block, batch, steps, lr) in enumerate(settings)
        for run in sweep(
            f"{options} trainer.batch={batch} trainer.steps={steps} trainer.lr={lr}"
            + (f" task.init={{runs}}/{model}/{settings[i - 1][0]}_0" if i else ""),
            **{"task.block": [block]},
            seed=[0],
        )
    ]


def fidelity_runs(model: str, methods: Sequence[str]) -> list:
    """Three seeds of methods with random projections, one of others."""
    return [
        run
        for method in methods
        for run in sweep(
            f"task=fidelity task.model={{runs}}/{model}/512_0 task.text=test task.calibration=train task.texts=24",
            model={model: ""},
            attention=[method],
            seed=range(3 if " m=" in method else 1),
            **{"task.length": [512]},
        )
    ]


def smollm2(length: int, seeds: int, **methods) -> list:
    return sweep(
        "task=swap_text task.model=models/smollm2-135m",
        model={"SmolLM2-135M": ""},
        text=KINDS,
        **{"task.length": [length]},
        **methods,
        seed=range(seeds),
    )


def whisper(seeds: int, methods: Sequence[str]) -> list:
    return sweep(
        "task=swap_speech task.model=models/whisper-tiny.en",
        model={"Whisper tiny.en": ""},
        text={"utterances": ""},
        attention=methods,
        seed=range(seeds),
    )


BFLOAT = {"exact in bfloat16": "attention=exact task.dtype=bfloat16"}
page = Page(
    "swap",
    title="Attention swaps of pretrained models without training",
    finding="On repeated passages of 4096 tokens, near-far attention increases the loss of SmolLM2-135M by 0.006 ± "
    "0.003 nats, a window by 3.0 ± 0.5 and FAVOR++ by 8.2 ± 1.7 (95% CI, n = 3 rows). No method was trained "
    "after the swap.",
    models={
        "BERT": stage_runs(
            "BERT",
            BERT,
            [
                (18, 128, 5000, "2e-3"),
                *(
                    (block, 2304 // block, 250, "1e-3")
                    for block in (24, 32, 48, 64, 96, 128, 192, 256, 384)
                ),
                (512, 4, 600, "5e-4"),
            ],
        ),
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


def cost(rows: Rows, method: str, **where):
    return rows.values("above", method, sweep="fidelity", **where)


def claims(rows: Rows) -> list[Claim]:
    uniform = {
        model: mean_ci(cost(rows, "uniform", model=model)).mean for model in ("BERT", "causal")
    }
    fails = {
        model: f"uniform attention increases the loss by {value:.3g} nats (at least 0.5 needed)"
        for model, value in uniform.items()
        if value < 0.5
    }
    return [
        *(
            Claim(
                f"without training, FAVOR++ is closer to exact attention than FAVOR+, m = {m}",
                {
                    model: cost(rows, f"favorp m={m}", model=model)
                    - cost(rows, f"favorpp m={m}", model=model)
                    for model in uniform
                },
                unit="nats",
                fails=fails,
                reason="uniform attention is closer than both in BERT; in the causal model the difference is 4% of "
                "the loss increase of either"
                if m == 256
                else "",
            )
            for m in (256, 64)
        ),
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
        ),
    ]


def common_names(rows: Rows) -> Rows:
    """With one name for the windows and one for near-far attention."""
    names = {WINDOW: "window", FAR: "window", NEARFAR: "nearfar"}
    return Rows(rows.frame.assign(method=rows.frame["method"].replace(names)))


def tables(rows: Rows):
    same, models = common_names(rows), ("BERT", "causal")
    methods = [*BFLOAT, "uniform", "window", "nearfar", SPLIT, f"{SPLIT} open=48", *RANDOM]
    texts = {
        f"{kind}, {n} tokens": {"sweep": "pretrained", "text": kind, "length": n}
        | (COMMON if n == 4096 else {})
        for kind in KINDS
        for n in (1024, 4096, 8192)
    }
    main = pd.concat(
        [
            mean_table(
                same,
                {
                    **{
                        f"{model}, nats": {"metric": "above", "sweep": "fidelity", "model": model}
                        for model in models
                    },
                    **{
                        f"SmolLM2, {kind}, nats": {
                            "metric": "above",
                            **texts[f"{kind}, 4096 tokens"],
                        }
                        for kind in KINDS
                    },
                    "MiniLM, cosine": {"metric": "cosine", "model": "MiniLM"},
                },
                SHOWN,
                spec=".3f",
            ),
            mean_table(
                same,
                {"Whisper, word errors, %": {"metric": "wer"}},
                SHOWN,
                100,
                format=interval_or_range,
            ),
        ],
        axis=1,
    )
    main["CRT Table 2, SST-2, %"] = main.index.map(SST2)
    title = (
        "Loss increase over exact attention without training, cosine to exact attention, "
        "and word errors (exact: 4%)"
    )
    return {
        title: main,
        "BERT and causal model without training: relative errors": mean_table(
            same,
            {
                f"{model}, {name}": {
                    "metric": metric,
                    "sweep": "fidelity",
                    "model": model,
                    "layer": "",
                }
                for model in models
                for name, metric in {
                    "attention": "attention_error",
                    "last hidden states": "hidden_error",
                }.items()
            },
            spec=".3f",
        ),
        "Causal model fine-tuned after the swap: loss, nats": mean_table(
            rows,
            {
                f"step {step}": {"metric": "loss", "sweep": "fidelity/fine-tuned", "step": step}
                for step in (0, 43, 129, 430)
            },
            spec=".4f",
        ),
        "SmolLM2 without training: loss increase, nats; same next token as exact attention, %": pd.concat(
            [
                mean_table(
                    same,
                    {name: {"metric": "above", **each} for name, each in texts.items()},
                    methods,
                    spec=".4f",
                ),
                mean_table(
                    same,
                    {
                        f"{name}, %": {"metric": "agrees", **each}
                        for name, each in texts.items()
                        if "4096" in name
                    },
                    methods,
                    100,
                    ".1f",
                ),
            ],
            axis=1,
        ),
    }


def figure(rows: Rows):
    fig, axes = panels(4, columns=2)
    same = common_names(rows)
    for ax, (title, methods, where) in zip(
        axes,
        [
            *(
                (
                    f"{model}, 512 tokens",
                    ["exact", "uniform", "identity", *SHOWN[1:]],
                    {"sweep": "fidelity", "model": model},
                )
                for model in ("BERT", "causal")
            ),
            *(
                (
                    f"SmolLM2-135M, {kind}, 4096 tokens",
                    [*BFLOAT, *SHOWN],
                    {"sweep": "pretrained", "text": kind, "length": 4096},
                )
                for kind in KINDS
            ),
        ],
    ):
        dot_plot(
            ax, {method: same.values("above", method, **where) for method in methods}, zero=True
        )
        ax.set(title=title, xlabel="loss increase over exact attention, nats (lower is better)")
    fig.tight_layout()
    return fig
