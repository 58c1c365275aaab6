"""Features at the queries and keys of a calibration, beside features that follow their moments alone."""

import pandas as pd

from crt_exp.report import Claim, Page, Rows, line_plot, mean_table, sweep
from crt_exp.report.plots import panels
from crt_exp.report.rows import mean_ci

COLUMNS = [16, 64, 256, 512]
FIXED = {"exact": "attention=exact", "uniform": "attention=uniform", "nearfar": "attention=nearfar attention.exact_until=0"}
FITTED, DRAWN = "favormix", "favormix unbiased"
FEATURES = {"favorp": "attention=favorp", "favorpp": "attention=favorpp", "favorsharp": "attention=favorsharp",
            FITTED: "attention=favormix", DRAWN: "attention=favormix features.weights=unbiased"}
LABELS = {"exact": "exact", "uniform": "uniform", "nearfar": "near-far", "favorp": "FAVOR+", "favorpp": "FAVOR++",
          "favorsharp": "FAVOR#", FITTED: "mixture", DRAWN: "mixture, unbiased"}
MINILM, SMOLLM2 = "MiniLM, cosine", "SmolLM2, 512 tokens, nats"
LONG, SPEECH, VISION = "SmolLM2, 2048 tokens, nats", "Whisper, word errors, %", "ViT-S, cosine"
TASKS = {
    MINILM: ("task=swap_embeddings task.model=models/minilm task.length=512 task.fit=8", "cosine", 1),
    SMOLLM2: ("task=swap_text task.model=models/smollm2-135m task.length=512 task.fit=8", "above", 4),
    LONG: ("task=swap_text task.model=models/smollm2-135m task.length=2048 task.fit=8", "above", 3),
    SPEECH: ("task=swap_speech task.fit=8", "wer", 3),
    VISION: ("task=swap_images task.dataset=imagenette2-224", "cosine", 1)}


def measured(name: str, methods, columns=COLUMNS, options: str = "", text: str = "") -> list:
    task, _, seeds = TASKS[name]
    return [run for method in methods for n in columns for run in sweep(
        f"{task} {options}", model={name: ""}, text={text: ""}, seed=range(seeds),
        method={method: (FIXED | FEATURES)[method] + (
            "" if method in FIXED else f" features.m={n // 2 if method == 'favorsharp' else n}")},
        columns={"" if method in FIXED else n: ""})]


def fine_tuned(methods) -> list:
    return [run for method in methods for run in sweep(
        "task=glue task.model=models/minilm task.bucketed=true task.parts=24 task.max_length=64 trainer.steps=400 "
        "task.held_out=500 trainer.eval_every=1000000 trainer.save_every=1000000 task.dataset=sst2",
        model={"MiniLM, SST-2": ""}, method={method: f"attention={method} features.m="
                                             f"{128 if method == 'favorsharp' else 256}"},
        columns={256: ""}, seed=[0], **{"trainer.lr": [1e-4, 2e-4]})]


page = Page(
    "mixture",
    title="Positive features that follow the queries and keys of a calibration",
    finding="",
    small={
        "mixture": [*measured(MINILM, FIXED, [0]), *measured(MINILM, FEATURES),
                    *measured(SMOLLM2, ["uniform"], [0]), *measured(SMOLLM2, FEATURES, [16, 64, 256]),
                    *measured(SMOLLM2, [FITTED], [512]),
                    *measured(LONG, ["uniform"], [0]), *measured(LONG, ["favorpp", "favorsharp", FITTED], [256]),
                    *measured(SPEECH, ["exact", "uniform"], [0]), *measured(SPEECH, FEATURES, [64, 256]),
                    *measured(VISION, FIXED, [0]), *measured(VISION, FEATURES)],
        "mixture/shift": [*measured(MINILM, [FITTED, DRAWN], [64, 256], "task.fit_text=code", "code"),
                          *measured(SMOLLM2, [FITTED, DRAWN], [64, 256], "task.fit_text=code", "code"),
                          *measured(SMOLLM2, ["favorpp", "favorsharp"], [256], "task.fit_text=code", "code")],
        "mixture/fine-tuned": fine_tuned(["favorpp", "favorsharp", FITTED])},
    data="models/minilm, models/smollm2-135m, models/whisper-tiny.en, models/vit-s-saliency, WikiText-2, LibriSpeech, "
         "Imagenette, GLUE",
    columns=["model", "text", "method", "columns", "lr", "split", "step"],
    metrics=["cosine", "above", "wer", "accuracy"],
    measured=[])


def tables(rows: Rows):
    return {}
