"""HRF Figures 3, 8 and 10, Tables 4 and 5: random features for the softmax of a language model."""

import pandas as pd

from crt_exp.report import Claim, Page, Rows, dot_plot, line_plot, mean_table, sweep
from crt_exp.report.plots import panels

MAPS = {"favor": "trigonometric", "favorp": "FAVOR+", "favorpp": "FAVOR++", "hrf_angular": "angular hybrid",
        "hrf_gaussian": "Gaussian hybrid"}
KNOWN = {"uniform": "uniform", "unigram": "unigram"}  # distributions that know no query
DRAWN = {"favor m=64": "trigonometric", "favorp m=64": "FAVOR+", "favorpp m=64": "FAVOR++",
         "hrf_angular m=8": "angular hybrid", "hrf_gaussian m=8": "Gaussian hybrid", "quadratic": "quadratic kernel",
         "log_uniform": "log-uniform", "unigram": "unigram", "uniform": "uniform", "exact": "the exact softmax",
         "full": "no negatives, full softmax"}
LENGTHS, MS = ["near 1", "held back", "free"], [64, 128, 256, 512]
TRAINED = "task=ptb task.corpus=ptb trainer.log_every=1000 trainer.schedule=linear"
SAMPLED = (f"{TRAINED} task.sampling.tree=false task.width=64 task.dropout=0.2 trainer.epochs=1 trainer.lr=5e-3 "
           "trainer.eval_every=443")
FULL = {"free": "experiment=hrf_ptb_softmax", "near 1": "experiment=hrf_wikitext2_softmax"}


def estimates(models: str, lengths: list[str], every: int):
    common = f"task=class_distributions task.every={every}"
    of = {"lengths": {name: f"task.start={{runs}}/{models}/{name.replace(' ', '-')}" for name in lengths}}
    return [*sweep(common, attention=["exact"], **of), *sweep(common, attention=MAPS, **of, seed=range(10))]


def negatives(common: str, m: int, n: int, k: int, seeds: int):
    """m features, hybrids of n projections of the coefficient and k of each base."""
    made = {}
    for name in DRAWN:
        of, _, size = name.partition(" ")
        sizes = f"features.m={k} features.n={n}" if "hrf" in of else f"features.m={m}"
        made[name] = f"task.softmax=features attention={of} {sizes}" if size else f"task.softmax={of}"
    return sweep(common, method=made, seed=range(seeds))


page = Page(
    "hrf_language",
    title="HRF Figures 3, 8 and 10, Tables 4 and 5: random features for the softmax of a language model",
    finding="Hybrids are nearer to a language model's softmax than trigonometric features and farther than FAVOR+. "
            "Models trained with negatives by features learn less than word frequencies.",
    small={"hrf-lm": estimates("hrf-lm-models", ["free", "held back", "near 1"], 32),
           "hrf-sampled": negatives(SAMPLED, 64, 8, 8, 3)},
    full={"hrf-lm": estimates("hrf-lm-models-full", ["free", "near 1"], 1),
          "hrf-sampled": negatives("experiment=hrf_ptb_softmax", 1024, 16, 64, 25)},
    models={"hrf-lm-models": sweep(f"{TRAINED} trainer.lr=3e-3 trainer.warmup=200", lengths={
        "free": "task.dropout=0.2 trainer.epochs=7",
        "held back": "task.temperature=0.1 task.lengths.queries=0.1 task.lengths.keys=0.1 trainer.epochs=6",
        "near 1": "task.temperature=0.2 task.lengths.queries=1 task.lengths.keys=100 task.dropout=0.2 "
                  "trainer.epochs=4"}),
        "hrf-lm-models-full": sweep("task.softmax=full", lengths=FULL)},
    data="Penn Treebank",
    columns=["lengths", "split", "step", "m", "method"],
    metrics=["ks", "w1", "negative", "validation_perplexity", "loss", "unigram_loss", "query_length", "key_length",
             "squared_norm", "time_s"],
    measured=[
        "Estimates: one LSTM on the Penn Treebank a setting, which intervals leave out. Queries: its outputs at every "
        "32nd word of the test split; keys: embeddings of all words; both over the square root of the temperature. 10 "
        "seeds of orthogonal projections, the same rows for all methods without parts.",
        "Lengths held back: temperature 0.1 and a cost of 0.1 on lengths; near 1: temperature 0.2 and costs of 1 and "
        "100 (HRF (105); the paper's are not known). Claims are judged with lengths near 1, which was chosen after all "
        "three settings had been seen: without costs trigonometric features and hybrids have KS 1.000, and their order "
        "says nothing.",
        "KS and W1 are over class numbers, from the most frequent word down; mean of logarithms over m. Hybrids: 8 "
        "features of the coefficient, m / 8 projections of each base. Negative estimates are set to 0. The models' own "
        "numbers are kept as printed. WikiText-2 (Table 5) is of --size full.",
        "Training: one epoch of width 64, 3 seeds, 40 negatives of each word, m = 64 (hybrids 8 x 8) of normalised "
        "vectors, tables made anew every 20 steps. Their kernel, exp(cos), lies between 1/e and e for all words and "
        "knows nothing of frequency, which log-uniform and unigram negatives know; the paper compares features with "
        "uniform and exact negatives alone. Losses are by the full softmax, weights by the validation split.",
        "The quadratic kernel, of another paper, was added after the other results, with alpha = 100 set once; its "
        "seconds were taken on a busy machine and compare with none of the others."])


def claims(rows: Rows) -> list[Claim]:
    near = {"lengths": "near 1"}
    pairs = [(hybrid, other) for hybrid in ["hrf_angular", "hrf_gaussian"] for other in ["favor", "favorp"]]
    negative = 100 * rows.paired("favor", "hrf_angular", "negative", **near)
    model, alone = (rows.values(metric, "exact", **near).item() for metric in ["loss", "unigram_loss"])
    distance = rows.values("ks", "unigram", **near).mean()
    fails = (f"the model is {alone - model:.2g} nats better than word frequencies (at least 0.5 needed)"
             if alone - model < 0.5 else f"KS of word frequencies: {distance:.2g} (at least 0.1 needed)"
             if distance < 0.1 else "")
    ends = {f"{DRAWN[hybrid]}, {DRAWN[other]}": rows.paired(other, hybrid, "loss", split="test")
            for hybrid in ["hrf_angular m=8", "hrf_gaussian m=8"] for other in ["favor m=64", "favorp m=64"]}
    cases = {f"{MAPS[hybrid]}, {MAPS[other]}": rows.ratio(hybrid, other, "ks", **near) for hybrid, other in pairs}
    return [
        Claim("the estimated distribution is nearer to the exact one by a hybrid than by other features (KS, lengths "
              "near 1)", cases, below=1, log=True, unit="times", paper="HRFs lead to the most accurate estimates",
              fails=dict.fromkeys(cases, fails) if fails else {}),
        Claim("the angular hybrid has fewer negative estimates than trigonometric features",
              {"lengths near 1": negative}, unit="points", paper="fewer",
              fails={"lengths near 1": fails} if fails else {}),
        Claim("negatives by a hybrid end less than 0.02 nats better than those by other features", ends, below=0.02,
              unit="nats", paper="the difference is not very significant", fails=failed(rows, [*ends]))]


def failed(rows: Rows, cases: list[str]) -> dict[str, str]:
    """Sanity checks of the trained models."""
    alone = rows.values("unigram_loss", "full").item()
    loss = {name: rows.values("loss", name, split="test").mean() for name in DRAWN}
    checks = [("the full softmax's loss is below that of word frequencies", alone - loss["full"], 0.5),
              ("exact negatives' loss is below that of uniform ones", loss["uniform"] - loss["exact"], 0.02),
              ("FAVOR+'s loss is below that of word frequencies", alone - loss["favorp m=64"], 0.0)]
    found = [f"{text} by {value:.3g} nats (at least {least:g} needed)" for text, value, least in checks
             if value < least]
    return dict.fromkeys(cases, "; ".join(found)) if found else {}


def tables(rows: Rows):
    shown = {**MAPS, **KNOWN}
    main = mean_table(rows, {f"KS, {lengths}, m = {m}": {"metric": "ks", "lengths": lengths, "m": m}
                             for lengths, m in [("near 1", 64), ("near 1", 512), ("held back", 512), ("free", 512)]},
                      shown, spec=".2f")
    loss = {DRAWN[name]: f"{rows.values('loss', name, split='test').mean():.2f}" for name in DRAWN}
    main["loss with such negatives, nats"] = [loss.get(name, "") for name in main.index]
    alone = rows.values("unigram_loss", "full").item()
    made = {"Distance to the exact softmax": main, f"Sampled training; word frequencies alone: {alone:.3f} nats":
            mean_table(rows, {
                "test loss, nats": {"metric": "loss", "split": "test"},
                "validation loss at the end": {"metric": "loss", "split": "validation", "step": 1328},
                "seconds of a run": {"metric": "time_s", "split": "test"}}, DRAWN, spec=".4g")}
    for lengths in LENGTHS:
        made[f"Lengths {lengths}"] = mean_table(rows, {
            f"{name}, m = {m}": {"metric": metric, "lengths": lengths, "m": m}
            for name, metric in [("KS", "ks"), ("W1", "w1"), ("share negative", "negative")] for m in MS}, shown)
    made["The models"] = pd.DataFrame({name: {lengths: f"{rows.values(metric, 'exact', lengths=lengths).item():.4g}"
                                              for lengths in LENGTHS} for name, metric in [
        ("validation perplexity", "validation_perplexity"), ("test loss, nats", "loss"),
        ("root mean |x|^2", "query_length"), ("root mean |y|^2", "key_length"), ("mean |x + y|^2", "squared_norm")]})
    return made


def figure(rows: Rows):
    fig, (left, right) = panels(2)
    line_plot(left, rows, "m", "ks", {**MAPS, **KNOWN}, log="x", lengths="near 1")
    left.set(title="Distance to the exact softmax, lengths near 1", xlabel="m", ylabel="KS over words")
    left.set_xticks(MS, MS)
    left.minorticks_off()
    dot_plot(right, {name: rows.values("loss", name, split="test") for name in DRAWN}, labels=DRAWN)
    right.axvline(rows.values("unigram_loss", "full").item(), color="grey", lw=1, ls="--")
    right.set(title="Sampled training (dashed: word frequencies alone)", xlabel="test loss, nats")
    fig.tight_layout()
    return fig
