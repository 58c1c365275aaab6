"""Single far keys: drawn heads, a model of pairs, and a model that copies."""

import pandas as pd

from crt_exp.report import Page, Rows, line_plot, mean_table, share, sweep
from crt_exp.report.plots import panels
from crt_exp.report.statistics import mean_ci

WINDOW, NEARFAR = "window block=64 first=16", "nearfar exact_until=64 open=64"
AROUND = ["uniform", "nearfar block=32 heavy=16", "pages keys=128 both=true", "query_clusters keys=128",
          "monarch turns=3", "largest keys=128 both=true"]
BEHIND = ["uniform", "window", *(f"{method} keys={keys}" if method != "nearfar" else
          f"nearfar block=32 heavy=16 open={keys} exact_until=128" for keys in (32, 128)
          for method in ("nearfar", "pages", "largest"))]
LABELS = {"uniform": "uniform", "window": "window", WINDOW: "window", NEARFAR: "near-far, 64 keys",
          "nearfar block=32 heavy=16 open=32 exact_until=128": "near-far, 32 keys",
          "nearfar block=32 heavy=16 open=128 exact_until=128": "near-far, 128 keys",
          "nearfar block=32 heavy=16": "near-far, no key read", "nearfar exact_until=1024": "near-far, exact to 1024",
          "exact": "exact", "favorpp m=256": "FAVOR++, m = 256",
          **{f"nearfar exact_until=64 open={keys}": f"near-far, {keys} keys" for keys in (8, 16, 32)},
          **{f"{name} keys={keys}{both}": f"{what}, {keys} keys" for name, what in {
              "pages": "pages", "largest": "largest weights", "clusters": "clusters", "query_clusters":
              "clusters of queries"}.items() for keys in (0, 32, 64, 128) for both in ("", " both=true")},
          "clusters keys=0": "centroids and window", "monarch turns=3": "MonarchAttention"}
COPYING = ["exact", "uniform", WINDOW, "favorpp m=256", *(f"nearfar exact_until=64 open={n}" for n in (8, 16, 32, 64)),
           "nearfar exact_until=1024"]
DENSE = ["pages keys=64", "clusters keys=64", "clusters keys=0", "largest keys=64"]


def written(methods: list[str]) -> str:
    return "'task.methods=[" + ",".join(f'"{each}"' for each in methods) + "]'"


def stages(name: str, options: str, given: list[tuple[int, str]]) -> list:
    """Runs (tokens, options), each from the one before."""
    return [run for i, (block, more) in enumerate(given) for run in sweep(
        f"{options} {more}" + (f" task.init={{runs}}/{name}/{given[i - 1][0]}_0" if i else ""),
        **{"task.block": [block]}, seed=[0])]


PAIRS = ("task=recall attention=exact task.symbols=256 task.rows=512000 task.evaluated=16 trainer.eval_every=1000000 "
         "trainer.select=last")
COPY = ("task=mlm attention=exact task.causal=true task.repeat=1.0 trainer.betas=[0.9,0.98] "
        "trainer.eval_every=1000000 trainer.save_every=500 trainer.log_every=50 trainer.select=last "
        "task.validation_text=outputs/texts/validation-8.tokens")
TRAIN = "${oc.env:CRT_DATA}/wikitext2/wiki.train.tokens"
DRAWN = f"task.text=[{TRAIN},outputs/texts/drawn-14000.tokens]"
models = {
    "pairs": stages("pairs", PAIRS, [(block, f"task.pairs={pairs} task.queries={queries} trainer.batch={batch} "
                                      f"trainer.steps={steps} trainer.lr={lr}")
                    for block, pairs, queries, batch, steps, lr in [
                        (16, 2, 6, 256, 400, 2e-3), (32, 4, 12, 128, 400, 2e-3), (64, 8, 24, 64, 500, 2e-3),
                        (128, 16, 48, 32, 500, 2e-3), (256, 32, 64, 16, 500, 2e-3), (512, 64, 128, 8, 500, 2e-3),
                        (2048, 64, 128, 4, 300, 5e-4), (8192, 64, 256, 2, 150, 5e-4)]]),
    "copying-model": stages("copying-model", COPY, [
        (128, f"{DRAWN} task.model=outputs/texts/llama-2048 trainer.batch=32 trainer.steps=1500 trainer.lr=2e-3"),
        (256, f"{DRAWN} trainer.batch=16 trainer.steps=900 trainer.lr=1.5e-3"),
        (512, f"task.text={TRAIN} trainer.batch=8 trainer.steps=1200 trainer.lr=1e-3"),
        (2048, f"task.text={TRAIN} trainer.batch=2 trainer.steps=400 trainer.lr=5e-4")])}
KEYS = {"iid": "", "in 32 clusters": "task.clusters=32"}
NAMES = {"iid": "iid keys", "in 32 clusters": "keys in 32 clusters"}
SWAP = "task=swap_copying task.start={runs}/copying-model/2048_0"
small = {
    "recall/around": sweep(f"task=far_key task.both=true {written(AROUND)}", keys=KEYS, **{"task.length": [512, 2048]},
                    seed=range(5)),
    "recall": sweep(f"task=far_key {written(BEHIND)}", keys=KEYS, **{"task.length": [512, 2048, 8192, 16384]},
                    seed=range(10)),
    "recall/pairs": [run for length, pairs, rows in [(2048, 64, 4), (8192, 64, 2), (2048, 1, 16), (8192, 1, 8)]
              for run in sweep(f"task=swap_recall task.start={{runs}}/pairs/8192_0 task.evaluated={rows}", attention=[
                  "exact", "uniform", WINDOW, "favorpp m=256", NEARFAR, "nearfar exact_until=1024"], seed=range(8),
                  **{"task.pairs": [pairs], "task.length": [length]})],
    "copying": [*sweep(SWAP, **{"task.length": [2048]}, attention=COPYING, seed=range(5)),
                *sweep(SWAP, **{"task.length": [2048]}, method={
                    name: f"attention=exact 'task.baseline=\"{name} first=16\"'" for name in DENSE}, seed=range(5))],
    "copying/times": sweep("task=swap_times task.model={runs}/copying-model/2048_0/model task.rounds=5 "
                           f"{written(COPYING)}", alone=True, **{"task.length": [2048]}),
}
page = Page(
    "recall",
    title="One far key that matters",
    finding="Near-far attention finds one far key among thousands and keeps what a model copies from 2048 tokens back. "
            "A window, pages and random features lose it.",
    small=small, models=models, data="WikiText-2, for the model that copies",
    columns=["keys", "pairs", "length", "method"], metrics=["error", "accuracy", "new", "copied", "gain", "ms"],
    measured=["Rows of near-far attention are of the date in the csv; today's code makes smaller errors.",
              "Heads: 4 causal heads of d = 32, the last 256 queries; each gives 0.9 of its weight to one key at least "
              "96 tokens back (5% less in clusters, where a longer key lies ahead). 10 seeds of heads. Near-far: "
              "blocks of 32, 16 heavy keys, cells as the root of the length. Pages of 16 keys and the largest weights "
              "read the nearest 64 keys too; they are dense, and their time is not known.",
              "Both directions: a query at every token, 5 seeds; near-far reads no key of a cell there.",
              "Pairs: two layers of width 128 trained here with exact attention on rows of up to 8192 tokens; another "
              "attention without training; 8 seeds of 2 to 16 rows, of one model.",
              "Copying: a Llama of 4 layers and width 128, trained here on rows that repeat themselves; 4 test rows of "
              "2048 tokens for each of 5 seeds, of one model. Copied: the second half but for its first 16 tokens. "
              "Near-far with 8 to 64 keys is exact for the first 64 tokens alone; clusters see the future.",
              "Time: the model's layers on one row, 5 rounds in turn, two CPU cores."])


def found(rows: Rows, sweep: str, keys: str) -> pd.DataFrame:
    return mean_table(rows, {f"{n} tokens": {"metric": "error", "sweep": sweep, "keys": keys, "length": n}
                             for n in ([512, 2048] if sweep == "recall/around" else [512, 2048, 8192, 16384])},
                      {each: LABELS[each] for each in (AROUND if sweep == "recall/around" else BEHIND)}, spec=".3f")


def copied(rows: Rows) -> pd.DataFrame:
    def increase(metric: str, method: str) -> str:
        values = rows.paired(method, "exact", metric, sweep="copying")
        return f"{mean_ci(values):.3f}" if method != "exact" else "0"

    def kept(method: str) -> str:
        gain, whole = (rows.values("gain", each, sweep="copying") for each in (method, "exact"))
        return f"{100 * mean_ci(share(gain, whole)).mean:.1f}"

    made = {LABELS[method]: {
        "loss increase over exact, new text": increase("new", method), "loss increase, copied text":
        increase("copied", method), "of the copying kept, %": kept(method),
        "time, ms": f"{mean_ci(times):.0f}" if len(times := rows.values("ms", method, sweep="copying/times")) else ""}
        for method in [*COPYING, *DENSE]}
    table = pd.DataFrame.from_dict(made, orient="index")
    table.index.name = "method"
    return table


def tables(rows: Rows):
    return {"A model that copies, without training: nats, and ms of a pass of 2048 tokens": copied(rows),
            **{f"Causal heads, {NAMES[keys]}: relative error": found(rows, "recall", keys) for keys in KEYS},
            **{f"Heads in both directions, {NAMES[keys]}: relative error": found(rows, "recall/around", keys)
               for keys in KEYS},
            "A model of pairs, without training: values that are right, %": mean_table(rows, {
                f"{'a needle' if pairs == 1 else '64 pairs'}, {n} tokens": {
                    "metric": "accuracy", "sweep": "recall/pairs", "pairs": pairs, "length": n}
                for pairs in (64, 1) for n in (2048, 8192)}, LABELS, 100, ".1f"),
            "A model of pairs: ms of a row": mean_table(rows, {f"{n} tokens": {
                "metric": "ms", "sweep": "recall/pairs", "pairs": 1, "length": n} for n in (2048, 8192)}, LABELS, spec=".0f")}


def figure(rows: Rows):
    fig, axes = panels(2)
    methods = [method for method in BEHIND if method not in ("window", "pages keys=32", "largest keys=32")]
    for ax, keys in zip(axes, KEYS):
        line_plot(ax, rows, "length", "error", {each: LABELS[each] for each in methods}, log="xy", sweep="recall",
                  keys=keys)
        ax.set(title=f"Causal heads, {NAMES[keys]}", xlabel="tokens", ylabel="relative error of the output")
    fig.tight_layout()
    return fig
