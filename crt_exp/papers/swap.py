"""Pretrained models with another attention, without training; two small ones also fine-tuned after the swap."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import pandas as pd

from crt_exp.report import Claim, Page, Rows, dot_plot, mean_ci, mean_table, sweep
from crt_exp.report.plots import panels

WINDOW, NEARFAR = "window block=32 first=16", "nearfar exact_until=0"
METHODS = ["exact", "uniform", "identity", WINDOW, *(f"{name} m={m}" for name in ("relu", "favorp", "favorpp",
           "favorsharp") for m in (64, 256))]
NEAR = ["nearfar preset=cheap exact_until=0", NEARFAR, "nearfar preset=quality exact_until=0"]
FAR = "window block=64 first=16"
RANDOM = ["favorp m=256", "favorpp m=256", "favorsharp m=256", "relu m=256"]
PAPER = ('"backward-compatibility with the exact softmax kernel"; better than FAVOR+ on all eight tasks of GLUE, such '
         "as 92.00 against 90.58 on SST-2")

# ---- models of WikiText-2 that are trained here

SIZES = ("task=mlm attention=exact task.sizes.hidden_size=128 task.sizes.num_hidden_layers=4 "
         "task.sizes.num_attention_heads=4 task.sizes.intermediate_size=512 task.vocabulary_size=4096 "
         "trainer.eval_every=1000000 trainer.save_every=500 trainer.log_every=100 trainer.select=last")
BERT = f"{SIZES} +task.sizes.hidden_dropout_prob=0 +task.sizes.attention_probs_dropout_prob=0"
CAUSAL = f"{SIZES} task.causal=true +task.sizes.resid_pdrop=0 +task.sizes.embd_pdrop=0 +task.sizes.attn_pdrop=0"


def stages(options: str, given: list[tuple[int, int, int, str]]) -> list:
    """Runs (tokens, batch, steps, learning rate), each from the one before."""
    return [run for i, (block, batch, steps, lr) in enumerate(given) for run in sweep(
        f"{options} trainer.batch={batch} trainer.steps={steps} trainer.lr={lr}"
        + (f" task.init={{runs}}/{'causal' if 'causal' in options else 'BERT'}/{given[i - 1][0]}_0" if i else ""),
        **{"task.block": [block]}, seed=[0])]


models = {
    "BERT": stages(BERT, [(18, 128, 5000, "2e-3"), *((block, 2304 // block, 250, "1e-3") for block in (
        24, 32, 48, 64, 96, 128, 192, 256, 384)), (512, 4, 600, "5e-4")]),
    "causal": stages(CAUSAL, [(64, 32, 3000, "2e-3"), (256, 8, 800, "1e-3"), (512, 4, 500, "5e-4")]),
}
ERROR = "task=swap_error task.length=512 task.start={runs}"
TUNE = ("task=mlm task.causal=true task.vocabulary_size=4096 task.block=512 trainer.batch=4 task.init=uptrain "
        "task.model={runs}/causal/512_0 trainer.schedule=constant trainer.warmup=0 trainer.lr=5e-4 "
        "trainer.save_every=100000 trainer.select=last task.text=${oc.env:CRT_DATA}/wikitext2/wiki.train.tokens "
        "task.validation_text=outputs/texts/validation-8.tokens")


def fixed_and_random(options: str, methods: list[str], **axes) -> list:
    """Three seeds of methods with random projections, one of others."""
    return [run for each in methods for run in sweep(options, attention=[each], seed=range(3 if " m=" in each else 1),
                                                     **axes)]


# ---- models as they are published

TEXT, KINDS = "task=swap_text task.model=models/smollm2-135m", {"new text": "task.kind=new",
                                                                "repeated": "task.kind=repeated"}
SMOL = {"model": {"SmolLM2-135M": ""}}
MINI = {"model": {"MiniLM": "task=swap_embeddings task.model=models/minilm"}}
HEAR = {"model": {"Whisper tiny.en": "task=swap_speech task.model=models/whisper-tiny.en"}}
DENSE = {name: f"attention=exact 'task.baseline=\"{name} first=16\"'" for name in (
    "pages keys=64", "clusters keys=64", "largest keys=64")}
BFLOAT = {"exact in bfloat16": "attention=exact task.dtype=bfloat16"}
AROUND = {name: f"attention=exact 'task.baseline=\"{name}{both}\"'" for name, both in {
    "pages keys=64": " both=true", "largest keys=64": " both=true", "query_clusters keys=64": "",
    "monarch turns=3": ""}.items()}


def read(kinds: dict, length: int, seeds: int, methods: Sequence[str] = (),
         dense: Mapping[str, str] = MappingProxyType({})) -> list:
    axes = {**SMOL, "text": kinds, "task.length": [length]}
    return [*sweep(TEXT, **axes, attention=methods, seed=range(seeds)),
            *sweep(TEXT, **axes, method=dense, seed=range(seeds))]


SPLIT = "nearfar exact_until=256"
KEY, KEYS = {"pass key": "task.kind=pass_key"}, {"8 pass keys": "task.kind=pass_keys"}
small = {
    "fidelity": [*fixed_and_random(ERROR + "/BERT/512_0", [*METHODS, *NEAR], model={"BERT": ""}, **{
                    "task.length": [512]}),
                 *fixed_and_random(ERROR + "/causal/512_0", METHODS, model={"causal": ""}, **{"task.length": [512]})],
    "fidelity/shorter": fixed_and_random(ERROR + "/causal/512_0", ["uniform", WINDOW, "favorp m=256", "favorpp m=256"],
                                model={"causal": ""}, **{"task.length": [128, 256]}),
    "fidelity/heads": [*sweep("task=matched_heads task.start={runs}/BERT/512_0", model={"BERT": ""}, length={
                  n: f"task.tokens={n}" for n in (128, 256, 512, 1024, 2048)},
                  attention=["uniform", WINDOW, "favorp m=256", "favorpp m=256"], seed=range(3)),
              *(run for n, cells in {128: 32, 256: 48, 512: 64, 1024: 88, 2048: 128}.items() for run in sweep(
                  "task=matched_heads task.start={runs}/BERT/512_0", model={"BERT": ""},
                  length={n: f"task.tokens={n}"}, method={f"{NEARFAR}, cells grow": "attention=nearfar "
                          f"attention.exact_until=0 attention.cells={cells}"}, seed=range(3)))],
    "fidelity/fine-tuned": sweep(TUNE, model={"causal": ""}, length={512: "trainer.steps=0", "512, trained": "trainer.steps=430 "
                        "trainer.eval_every=43"}, attention=["exact", "favorpp m=256", "favorp m=256"], seed=range(4)),
    "pretrained/sts-b": sweep("task.kind=pairs", **MINI, attention=["exact", "uniform", "window block=8 first=4", NEARFAR,
                   f"{NEARFAR} block=8 heavy=4 cells=8", *RANDOM], seed=[0]),
    "pretrained/embeddings": [run for axis in ({"attention": ["uniform", FAR, *NEAR, *RANDOM]}, {"method": AROUND})
                   for run in sweep("task.kind=texts", **MINI, text={"new text": ""}, **{
                       "task.length": [128, 256, 512]}, **axis, seed=[0])],
    "pretrained/neighbours": [run for axis in ({"attention": ["uniform", FAR, *NEAR, *RANDOM]}, {"method": AROUND})
                   for run in sweep("task.kind=paragraphs task.texts=80", **MINI, text={"paragraphs": ""}, **{
                       "task.length": [256]}, **axis, seed=[0])],
    "pretrained": [*read(KINDS, 1024, 3, ["exact", "uniform", SPLIT, FAR], BFLOAT),
                   *read(KINDS, 1024, 1, ["nearfar preset=quality exact_until=256", *RANDOM], DENSE),
                   *read(KINDS, 2048, 2, ["exact", "uniform", SPLIT, FAR]),
                   *read(KINDS, 4096, 5, ["exact", "nearfar"]),
                   *read(KINDS, 4096, 3, [FAR, SPLIT, "favorpp m=256", "uniform", f"{SPLIT} open=48"], BFLOAT),
                   *read(KINDS, 8192, 5, ["exact", "nearfar"]), *read(KINDS, 8192, 1, [FAR]),
                   *read(KEY | KEYS, 1024, 2, ["exact", "uniform", SPLIT, FAR, "favorpp m=256"],
                         {"largest keys=64": DENSE["largest keys=64"]}),
                   *read(KEY, 2048, 2, ["exact", SPLIT, FAR]),
                   *read({"distances": "task.kind=distances"}, 2048, 1, ["uniform", SPLIT, FAR]),
                   *read({"answer": "task.kind=answer"}, 1024, 4, [SPLIT, FAR], BFLOAT)],
    "pretrained/speech": [*(run for seeds, methods in {8: ["exact", "nearfar"], 3: ["uniform", FAR, "favorpp m=256", NEAR[2]],
                                            2: ["favorp m=256", "favorsharp m=256", "relu m=256"]}.items()
                 for run in sweep("", **HEAR, text={"utterances": ""}, attention=methods, seed=range(seeds))),
               *sweep("", **HEAR, text={"utterances": ""}, method=BFLOAT, seed=range(8)),
               *(run for axis in ({"attention": ["exact", "uniform", "nearfar", FAR, "favorpp m=256"]},
                                  {"method": BFLOAT})
                 for run in sweep("task.count=2 task.seconds=28", **HEAR, text={"clips of 28 s": ""}, **axis,
                                  seed=range(2)))],
    "pretrained/encoder-times": sweep("task=swap_times task.model=models/whisper-tiny.en task.subset=train-clean-100 "
                           "task.rounds=5 'task.methods=[" + ",".join(f'"{each}"' for each in [
                               "exact", "uniform", FAR, "nearfar", NEAR[2], *RANDOM]) + "]'", alone=True,
                           model={"Whisper tiny.en": ""}, length={1500: ""}),
    "pretrained/times": sweep("task=swap_times", alone=True, **SMOL, **{"task.length": [2048, 4096, 8192]}),
}

page = Page(
    "swap",
    title="Pretrained models with another attention, without training",
    finding="Near-far attention costs hundredths of a nat or less; a window forgets repeated passages and FAVOR++ "
            "loses the model. FAVOR++ is nearer than FAVOR+ in the causal model, farther in BERT.",
    small=small, models=models,
    data="models/minilm, models/smollm2-135m, models/whisper-tiny.en, WikiText-2, STS-B and LibriSpeech",
    columns=["model", "text", "length", "method", "layer", "distance", "step", "split"],
    metrics=["above", "hidden_error", "attention_error", "cosine", "loss", "S", "S_least", "S_largest", "nats",
             "agrees", "right", "kept", "spearman", "all_pairs", "nearest", "wer", "ms", "mib"],
    measured=["BERT and causal: models of WikiText-2 of width 128, 4 layers and 4 heads, trained here with exact "
              "attention on rows that grow to 512 tokens. 24 test texts of 512 tokens; attention with statistics is "
              "fitted to 4 training texts; 3 seeds of orthogonal projections. Samples are texts, of one model each.",
              "Fine-tuned after the swap: 430 steps, 4 seeds of projections and order, the same for all methods; loss "
              "on every 8th line of the validation split.",
              "SmolLM2-135M, MiniLM and Whisper tiny.en as they are published (SmolLM2 with weights of 4 bits), each "
              "one model. Samples are rows of the validation text (SmolLM2), tenths of STS-B's dev pairs, texts or "
              "paragraphs (MiniLM), groups of 4 LibriSpeech utterances or 2 clips (Whisper).",
              "Repeated: the second half of a row is the first, judged but for 16 tokens. Costly methods have one row; "
              "a mean without interval is one value.",
              "Near-far is exact up to place 1536 in causal models and up to 512 keys in both directions, unless "
              "exact_until says otherwise. It was tuned on other parts of the same text; row 0 was among them.",
              "Pages, clusters and the largest weights read 64 keys beyond the nearest 64 and the first 16; clusters "
              "see the future. They are dense: what they cost in time is not known.",
              "Of the loss of exact attention, the errors by layer and the texts of 128 and 256 tokens only means are "
              "kept."])


def cost(rows: Rows, method: str, **where):
    return rows.values("above", method, sweep="fidelity", length=512, layer="", **where)


def claims(rows: Rows) -> list[Claim]:
    uniform = {model: mean_ci(cost(rows, "uniform", model=model)).mean for model in ("BERT", "causal")}
    fails = {model: f"what uniform attention costs: {value:.3g} nats (at least 0.5 needed)"
             for model, value in uniform.items() if value < 0.5}
    return [*(Claim(f"without training FAVOR++ is nearer to exact attention than FAVOR+, m = {m}", {
                        model: cost(rows, f"favorp m={m}", model=model) - cost(rows, f"favorpp m={m}", model=model)
                        for model in uniform}, paper=PAPER, unit="nats", fails=fails,
                    reason="uniform attention is nearer than both in BERT; in the causal model the difference is a "
                           "twenty-fifth of what either costs" if m == 256 else "") for m in (256, 64)),
            Claim("fine-tuned after the swap for 430 steps FAVOR++ ends below FAVOR+, m = 256", {
                "causal": rows.paired("favorp m=256", "favorpp m=256", "loss", sweep="fidelity/fine-tuned", step=430,
                                      split="validation")},
                paper="uptrained 92.20, from scratch 92.00 (SST-2)", unit="nats", fails=fails)]


BOTH = {kind: [1024, 2048, 4096, 8192] for kind in ("new text", "repeated")}
SHOWN = {"uniform": "uniform", "window": FAR, "near-far": SPLIT, "ReLU, m = 256": "relu m=256",
         "FAVOR+, m = 256": "favorp m=256", "FAVOR++, m = 256": "favorpp m=256", "FAVOR#, m = 256": "favorsharp m=256"}
HERE = {"window": WINDOW, "near-far": NEARFAR}  # of BERT and the causal model


def texts(metric: str, kinds: dict, sweep: str = "pretrained") -> dict:
    return {f"{kind}, {n} tokens": {"metric": metric, "sweep": sweep, "text": kind, "length": n}
            for kind, lengths in kinds.items() for n in lengths}


def tables(rows: Rows):
    def shown(metric: str, spec: str, own: dict, scale: float = 1.0, **where):
        found = {name: scale * rows.values(metric, own.get(name, method), **where) for name, method in SHOWN.items()}
        return {name: f"{mean_ci(values):{spec}}" if len(values) else "" for name, values in found.items()}

    main = pd.DataFrame({
        **{f"{model}, nats": shown("above", ".3f", HERE, model=model, sweep="fidelity", length=512, layer="")
           for model in ("BERT", "causal")},
        **{f"SmolLM2, {kind}, nats": shown("above", ".3f", {}, sweep="pretrained", text=kind, length=1024)
           for kind in BOTH},
        "Whisper, word errors, %": shown("wer", ".0f", {"near-far": "nearfar"}, 100, text="utterances")})
    main.index.name = "method"
    made = {"Loss increase over exact attention without training: 512 tokens (BERT, causal), 1024 (SmolLM2); word "
            "errors (exact: 4%)": main}
    for model in ("BERT", "causal"):
        made[f"{model}: without training, 512 tokens"] = mean_table(rows, {name: {
            "metric": metric, "sweep": "fidelity", "model": model, "layer": ""} for name, metric in {
            "loss increase, nats": "above", "error of the last hidden states": "hidden_error",
            "error of attention": "attention_error", "cosine of the mean state": "cosine"}.items()}, spec=".4f")
        for title, metrics in {"error of attention": ["attention_error"], "error of the hidden states":
                               ["hidden_error"], "|x + y|^2, mean over heads": ["S"]}.items():
            made[f"{model}: {title}, by layer"] = mean_table(rows, {f"layer {i + 1}": {
                "metric": metrics[0], "sweep": "fidelity", "model": model, "layer": i} for i in range(4)})
    made |= {
        "Causal model, fine-tuned after the swap: loss, nats": mean_table(rows, {f"step {step}": {
            "metric": "loss", "sweep": "fidelity/fine-tuned", "step": step, "split": "validation"}
            for step in (0, 43, 129, 430)}, spec=".4f"),
        "Causal model, shorter texts: error of the last hidden states": mean_table(rows, {f"{n} tokens": {
            "metric": "hidden_error", "sweep": "fidelity/shorter", "length": n} for n in (128, 256)}),
        "Heads with the moments of BERT's: error of attention, by tokens": mean_table(rows, {str(n): {
            "metric": "attention_error", "sweep": "fidelity/heads", "length": n} for n in (128, 256, 512, 1024, 2048)}),
        "SmolLM2: loss increase over exact attention, nats": mean_table(rows, texts("above", BOTH), spec=".4f"),
        "SmolLM2: loss increase on repeated passages, by distance in tokens, nats": mean_table(rows, {f"up to {n}": {
            "metric": "above", "text": "distances", "distance": n} for n in (64, 256, 512, 1024, 2048)}, spec=".3f"),
        "SmolLM2: loss of exact attention, nats": mean_table(rows, texts("nats", BOTH), ["exact"]),
        "SmolLM2: same next token as exact attention, %": mean_table(rows, texts("agrees", BOTH), scale=100,
                                                                     spec=".1f"),
        "SmolLM2: pass keys that are right, %": mean_table(rows, texts("right", {
            "pass key": [1024, 2048], "8 pass keys": [1024]}), scale=100, spec=".0f"),
        "SmolLM2: tokens of a greedy answer before the first that differs, of 64": mean_table(rows, texts(
            "kept", {"answer": [1024]}), spec=".0f"),
        "MiniLM: Spearman's correlation on STS-B, dev": mean_table(rows, {
            "all pairs": {"metric": "all_pairs"}, "mean over tenths": {"metric": "spearman"}}),
        "MiniLM: cosine of the mean state to exact attention's": mean_table(rows, texts("cosine", {
            "new text": [128, 256, 512]}, "pretrained/embeddings"), spec=".4f"),
        "MiniLM: exact attention's nearest ten paragraphs kept, %": mean_table(rows, texts("nearest", {
            "paragraphs": [256]}, "pretrained/neighbours"), scale=100, spec=".1f"),
        "Whisper tiny.en, another attention in its encoder: word error rate, %": mean_table(rows, {kind: {
            "metric": "wer", "text": kind} for kind in ("utterances", "clips of 28 s")}, scale=100, spec=".1f"),
        "Time, ms, and memory, MiB, of a pass on two CPU cores": mean_table(rows, {
            f"{model}, {n} tokens, {unit}": {"metric": metric, "model": full, "length": n}
            for model, full, n in [*(("SmolLM2", "SmolLM2-135M", n) for n in (2048, 4096, 8192)),
                                   ("Whisper's encoder", "Whisper tiny.en", 1500)]
            for metric, unit in (("ms", "ms"), ("mib", "MiB"))}, [
                "exact", "uniform", FAR, "nearfar", "favorpp m=256"], spec=".0f")}
    return made


def figure(rows: Rows):
    fig, axes = panels(4, columns=2)
    for ax, model in zip(axes, ("BERT", "causal")):
        dot_plot(ax, {method: cost(rows, method, model=model) for method in [*METHODS, *NEAR]}, zero=True,
                 labels={WINDOW: "window", NEARFAR: "near-far", NEAR[0]: "near-far, cheap",
                         NEAR[2]: "near-far, quality"})
        ax.set(title=f"{model}, 512 tokens", xlabel="loss increase over exact attention, nats")
    for ax, kind in zip(axes[2:], BOTH):
        dot_plot(ax, {method: rows.values("above", method, sweep="pretrained", text=kind, length=1024) for method in
                      ["exact in bfloat16", *SHOWN.values(), *DENSE]}, zero=True, labels={
                          FAR: "window", SPLIT: "near-far, exact to 256", "pages keys=64": "pages, 64 keys",
                          "clusters keys=64": "clusters, 64 keys", "largest keys=64": "64 largest weights"})
        ax.set(title=f"SmolLM2-135M, {kind}, 1024 tokens", xlabel="loss increase over exact attention, nats")
    fig.tight_layout()
    return fig
