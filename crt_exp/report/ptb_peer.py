"""make ptb-peer: the language model of hrf-lm beside the same run in plain PyTorch, on the Penn Treebank.

Ours is the kept run of `make hrf-lm`, trained where it is not there yet; the other one is crt_exp/report/plain_lstm.py
with the same sizes, batches, rates and number of epochs. Seeds and the order of weights differ.
"""

from pathlib import Path
from typing import Any

from crt_exp.config import read_yaml
from crt_exp.data.text import official_file
from crt_exp.report import hrf_lm_runs, plain_lstm
from crt_exp.report.hrf_lm import SETTINGS
from crt_exp.report.plain_lstm import Options
from crt_exp.report.writing import Cells, markdown, new_figure, write_report

HOME = Path("outputs/ptb-peer")
SOURCES = ("report/plain_lstm.py",)
CLOSE = 1.03     # ours over theirs, at most
SPLITS = {"train": "train", "validation": "valid"}


def main(size: str) -> None:
    model = SETTINGS[size].models[0]
    trained, cells = Cells("hrf-lm-models", hrf_lm_runs.MODEL_SOURCES), Cells("ptb-peer", SOURCES)
    ours, theirs = {"overrides": model.overrides}, {"overrides": model.overrides, "peer": "plain PyTorch"}
    trained.fill([ours], hrf_lm_runs.train, "ours", workers=1)
    cells.fill([theirs], plain, "plain PyTorch", workers=1)
    write(size, model, trained[ours], cells[theirs], trained.seconds() + cells.seconds())


def plain(overrides: list[str], peer: str) -> list[list[float]]:
    """[epoch, perplexity on the validation text] of the same run."""
    cfg = read_yaml(hrf_lm_runs.place(tuple(overrides)) / "config.yaml")
    files = {split: official_file("ptb", name, cfg.task.data_dir) for split, name in SPLITS.items()}
    return [[epoch, value] for epoch, value in enumerate(plain_lstm.run(files, options_of(cfg), HOME), 1)]


def options_of(cfg: Any) -> Options:
    task, trainer = cfg.task, cfg.trainer
    return Options(task.width, task.layers, task.dropout, task.bptt, trainer.batch, int(trainer.epochs), trainer.lr,
                   tuple(trainer.betas), trainer.clip, int(trainer.warmup), trainer.schedule == "linear", cfg.seed)


def write(size: str, model: hrf_lm_runs.Model, ours: dict[str, Any], theirs: list[list[float]], seconds: float) -> None:
    curves = {"crt_exp, task=ptb": ours["curve"], "plain PyTorch": theirs}
    best = {name: min(value for _, value in curve) for name, curve in curves.items()}
    ratio = best["crt_exp, task=ptb"] / best["plain PyTorch"]
    said = "\n".join([
        f"- **{'met' if ratio <= CLOSE else 'not met'}**: at most {CLOSE:g} times the perplexity of plain PyTorch: "
        f"{ratio:.3f}",
        f"- **{'met' if best['crt_exp, task=ptb'] <= model.most else 'not met'}**: perplexity at most {model.most:g}: "
        f"{best['crt_exp, task=ptb']:.1f}, in {ours['seconds'] / 60:.0f} minutes"])
    table = markdown(["", "best perplexity on the validation text", "at the end"],
                     [[name, f"{best[name]:.2f}", f"{curve[-1][1]:.2f}"] for name, curve in curves.items()])
    control = ("The control, the unigram law of the training text, which knows no word before, has perplexity "
               f"{ours['unigram']:.0f} on the test text, ours {ours['test']:.1f}.")
    rows = [{"run": name, "epoch": epoch, "perplexity": value} for name, curve in curves.items()
            for epoch, value in curve]
    facts = (f"SIZE={size}. Penn Treebank, `{' '.join(model.overrides)}`, otherwise conf/task/ptb.yaml; one run each. "
             "The plain one leaves out the first word of each of 10 columns and the words that fill no column, as the "
             "examples do; ours counts every word.")
    path = write_report("ptb-peer", "A language model of words beside plain PyTorch", f"{said}\n\n{control}\n\n{table}",
                        rows, figure(curves), facts, seconds)
    print(f"{said}\nwritten: {path}")


def figure(curves: dict[str, list[list[float]]]):
    fig, axes = new_figure(1, 1, figsize=(6, 3.5))
    for (name, curve), style in zip(curves.items(), ("-", "--")):
        axes.plot(*zip(*curve), style, marker="o", ms=3, label=name)
    axes.set(xlabel="epoch", ylabel="perplexity, validation")
    axes.legend()
    return fig
