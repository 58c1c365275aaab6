"""make table2: Table 2 of Chefs' Random Tables, BERT with linear attention on GLUE.

Every run is the command line's: task=mlm pretrains an encoder with each attention (kept in outputs/table2/), task=glue
fine-tunes it. Beside the table: what more projections do to an exact encoder whose attention is swapped, before and
after fine-tuning.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from crt_exp.data.glue import TASKS
from crt_exp.report import palette, runs
from crt_exp.report.predicted import predicted_error
from crt_exp.report.writing import Cells, markdown, new_figure, write_report
from crt_exp.studies.uci import interval

SOURCES = ("tasks/glue.py", "tasks/mlm.py", "models/encoders.py", "data/glue.py")
HOME = runs.Home(Path("outputs/table2"), SOURCES)
SEEDS = (0, 1, 2)
LINES = 64                             # of text on which the error of the kernel is predicted
UPTRAINED = "uptrained FAVOR++"
ROWS = {**{palette.label(name): name for name in ("favorp", "elu", "relu", "favorpp")}, UPTRAINED: "favorpp",
        "exact": "exact"}
PAPER_TASKS = ("mnli", "qqp", "qnli", "sst2", "cola", "stsb", "mrpc", "rte")
PAPER = {  # CRT Table 2, dev sets, base-sized models
    "FAVOR+": (80.26, 89.53, 87.13, 90.58, 53.17, 85.07, 83.82, 67.59),
    "ELU": (80.72, 90.05, 89.09, 91.51, 48.43, 86.68, 85.05, 68.59),
    "ReLU": (81.39, 90.11, 88.85, 91.97, 52.08, 87.64, 84.56, 67.51),
    "FAVOR++": (81.25, 90.15, 89.58, 92.00, 54.95, 85.62, 85.78, 67.87),
    UPTRAINED: (82.29, 90.43, 89.73, 92.20, 58.85, 85.90, 88.73, 67.63)}


@dataclass(frozen=True)
class Setting:
    """What one SIZE stands for. mlm, glue: options of all runs of these tasks;
    examples: training examples of a GLUE task."""

    mlm: tuple[str, ...]
    glue: tuple[str, ...]
    m: int
    datasets: tuple[str, ...]
    examples: dict[str, int]
    ms: tuple[int, ...]                # of the figure
    figure_datasets: tuple[str, ...]
    workers: int | None = None         # runs at a time; None: one a core
    exact: str | None = None           # a pretrained exact encoder; None: one is made, like the others


def bert(hidden: int, layers: int, heads: int, *more: str) -> tuple[str, ...]:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
             "intermediate_size": 4 * hidden}
    return (*(f"task.sizes.{key}={value}" for key, value in sizes.items()), *more)


NO_DROPOUT = ("+task.sizes.hidden_dropout_prob=0", "+task.sizes.attention_probs_dropout_prob=0")
SETTINGS = {
    "small": Setting(
        mlm=bert(64, 2, 2, *NO_DROPOUT, "+task.sizes.initializer_range=0.08", "task.vocabulary_size=2048",
                 "task.block=64", "task.share=0.2", "trainer.batch=16", "trainer.steps=3000", "trainer.lr=3e-3",
                 "trainer.save_every=500", "trainer.eval_every=3000", "trainer.log_every=100"),
        glue=("task.max_length=64", "task.bucketed=true", "trainer.lr=1e-3", "trainer.epochs=2",
              "trainer.eval_every=1000000"),
        m=16, datasets=("sst2", "cola", "stsb", "mrpc", "rte"), examples={"sst2": 4000}, ms=(4, 16, 64),
        figure_datasets=("sst2", "stsb")),
    "gpu": Setting(
        mlm=bert(256, 4, 4, "task.vocabulary_size=8192", "task.block=128", "trainer.batch=64", "trainer.epochs=40",
                 "trainer.lr=1e-3", "trainer.precision=bf16", "trainer.save_every=1000"),
        glue=("task.max_length=128", "trainer.lr=1e-4", "trainer.epochs=4"),
        m=32, datasets=("sst2", "cola", "stsb", "mrpc", "rte"), examples={}, ms=(8, 16, 32, 64, 128), workers=4,
        figure_datasets=("sst2", "cola", "stsb", "mrpc", "rte")),
    "full": Setting(
        mlm=("task.model=google-bert/bert-base-uncased", "task.text=null", "task.hub.name=wikimedia/wikipedia",
             "task.hub.config=20231101.en", "task.validation_text=${oc.env:CRT_DATA}/wikitext2/wiki.valid.tokens",
             "task.block=128", "trainer.batch=256", "trainer.accumulate=4", "trainer.steps=1000000", "trainer.lr=1e-4",
             "trainer.warmup=10000", "trainer.precision=bf16", "trainer.save_every=5000"),
        glue=("trainer.lr=2e-5",), m=256, datasets=PAPER_TASKS, examples={}, ms=(16, 64, 256), workers=1,
        figure_datasets=("cola", "mrpc", "rte"), exact="google-bert/bert-base-uncased"),
}


def main(size: str) -> None:
    setting = SETTINGS[size]
    cells = Cells("table2", SOURCES)
    fill = partial(cells.fill, workers=setting.workers)
    pretrained = {name: pretraining(name, setting) for name in dict.fromkeys(ROWS.values())
                  if name != "exact" or not setting.exact}
    fill(list(pretrained.values()), pretrain, "pretraining")
    table = {(row, data, seed): fine_tuning(row, data, seed, setting, pretrained)
             for data in setting.datasets for row in ROWS for seed in SEEDS}
    fill(list(table.values()), fine_tune, "fine-tuning")
    by_m = {(name, m, data, seed): swapped(name, m, data, seed, setting, pretrained) for data in setting.figure_datasets
            for name in ("favorp", "favorpp") for m in setting.ms for seed in SEEDS}
    fill(list(by_m.values()), fine_tune, "fine-tuning with other m")
    drift = {(name, m, seed): swapped_alone(name, m, seed, setting, pretrained) for name in ("favorp", "favorpp")
             for m in setting.ms for seed in SEEDS}
    fill(list(drift.values()), pretrain, "perplexity after the swap")
    errors = {name: {"attention": name, "m": setting.m, "exact": setting.exact or pretrained["exact"]["overrides"]}
              for name in ("favorp", "favorpp")}
    fill(list(errors.values()), kernel_error, "error of the kernel")
    values = lambda keys: {key: cells[cell] for key, cell in keys.items()}
    write(size, setting, values(pretrained), values(table), values(by_m), values(drift), values(errors),
          cells.seconds())


# ---- runs: a key of a cell is all that a run depends on --------------------------------------------------------------


def pretraining(name: str, setting: Setting) -> dict[str, Any]:
    return {"overrides": ["task=mlm", *setting.mlm, *attention(name, setting.m)]}


def fine_tuning(row: str, data: str, seed: int, setting: Setting, pretrained: dict) -> dict[str, Any]:
    """Of the encoder that was pretrained with the same attention, or of the exact one with its attention swapped."""
    if row == UPTRAINED:
        return swapped("favorpp", setting.m, data, seed, setting, pretrained)
    name = ROWS[row]
    start = ["task.init=uptrain"] if name == "exact" and setting.exact else []
    return {"overrides": [*of_data(data, seed, setting), *attention(name, setting.m), *start],
            "option": "task.model" if start else "task.init",
            "start": setting.exact if start else pretrained[name]["overrides"]}


def swapped(name: str, m: int, data: str, seed: int, setting: Setting, pretrained: dict) -> dict[str, Any]:
    """Fine-tuning from the exact encoder."""
    return {"overrides": [*of_data(data, seed, setting), *attention(name, m), "task.init=uptrain"],
            "option": "task.model", "start": setting.exact or pretrained["exact"]["overrides"]}


def swapped_alone(name: str, m: int, seed: int, setting: Setting, pretrained: dict) -> dict[str, Any]:
    """The exact encoder with its attention swapped, as it is."""
    others = ("trainer.", "task.sizes", "+task.sizes", "task.vocabulary", "task.model")
    own = [o for o in setting.mlm if not o.startswith(others)]
    start = [f"seed={seed}", "trainer.steps=0", "task.init=uptrain"]
    return {"overrides": ["task=mlm", *own, *attention(name, m), *start],
            "option": "task.model", "start": setting.exact or pretrained["exact"]["overrides"]}


def attention(name: str, m: int) -> list[str]:
    return [f"attention={name}"] + [f"features.m={m}"] * (name != "exact")


def of_data(data: str, seed: int, setting: Setting) -> list[str]:
    examples = [f"task.examples={setting.examples[data]}"] if data in setting.examples else []
    return ["task=glue", f"task.dataset={data}", *setting.glue, *examples, f"seed={seed}"]


def pretrain(overrides: list[str], option: str | None = None, start: Any = None) -> dict[str, Any]:
    """The final record. A pretrained encoder is kept, and continued where it was interrupted."""
    if option:
        return HOME.passing([*overrides, f"{option}={place(start)}"])[-1]
    return HOME.kept(overrides)[-1]


def fine_tune(overrides: list[str], option: str, start: Any) -> dict[str, Any]:
    return HOME.passing([*overrides, f"{option}={place(start)}", "trainer.keep=1"])[-1]


def kernel_error(attention: str, m: int, exact: Any) -> dict[str, Any]:
    """What the closed forms predict for one entry of the kernel matrix of the exact encoder, a number a layer,
    and its mean |x + y|^2, on lines of WikiText-2's validation text."""
    from transformers import AutoModelForMaskedLM

    from crt_exp import calibrate_attention, swap_attention
    from crt_exp.data.text import lines_of, official_file
    from crt_exp.models.encoders import Origin, folder_of, load_tokenizer, quiet

    name = folder_of(str(place(exact)), "task.model")
    lines = [line for line in lines_of([official_file("wikitext2", "valid")]) if len(line) > 200][:LINES]
    batch = load_tokenizer(Origin(name, "task.model", True, False))(lines, truncation=True, max_length=64, padding=True,
                                                                     return_tensors="pt")
    with quiet():
        model = swap_attention(AutoModelForMaskedLM.from_pretrained(name), attention, m=m, saved=False)
        calibrate_attention(model, [batch])
    states = [part for part in model.modules() if getattr(part, "seen", None) is not None]
    return {"errors": [predicted_error(s.phi, s.seen, s.m) for s in states],
            "S": float(np.mean([s.seen.mean_sq_sum.mean() for s in states]))}


def place(start: Any) -> Path | str:
    """The run directory of a pretraining; names of the hub stay."""
    return start if isinstance(start, str) else HOME.place(start)


# ---- the report ------------------------------------------------------------------------------------------------------


def score(data: str, record: dict) -> float:
    """The paper's metric, in percent."""
    return 100 * record[TASKS[data].metrics[0]]


def show(found: dict, digits: int = 1) -> str:
    return f"{found['v']:.{digits}f} ± {found['v_ci95']:.{digits}f}"


def write(size: str, setting: Setting, pretrained: dict, table: dict, by_m: dict, drift: dict, errors: dict,
          seconds: float) -> None:
    scores = {(row, data): [score(data, table[row, data, seed]) for seed in SEEDS]
              for row in ROWS for data in setting.datasets}
    said = f"{verdict(setting, scores, by_m)} {reason(setting, pretrained, errors)}"
    body = "\n".join([
        f"**A result of small models ({sizes(setting)}), not of the paper's BERT-base**: compare rows within it, not "
        "with the paper." if size != "full" else "", "", said, "", results(setting, scores, pretrained), "",
        "The paper's values (BERT-base):", "", paper_table(setting)])
    rows = [{"row": row, "dataset": data, "metric": TASKS[data].metrics[0], "m": setting.m if row != "exact" else "",
             **interval(values, "percent"), "paper": paper(row, data)} for (row, data), values in scores.items()]
    rows += [{"row": f"exact encoder swapped to {name}", "dataset": data, "metric": TASKS[data].metrics[0], "m": m,
              **interval([score(data, by_m[name, m, data, s]) for s in SEEDS], "percent")}
             for name in ("favorp", "favorpp") for m in setting.ms for data in setting.figure_datasets]
    rows += [{"row": f"exact encoder swapped to {name}, not trained", "dataset": "wikitext2 test",
              "metric": "perplexity", "m": m, **interval([drift[name, m, s]["perplexity"] for s in SEEDS], "value")}
             for name in ("favorp", "favorpp") for m in setting.ms]
    rows += [{"row": name, "dataset": "wikitext2 test", "metric": "perplexity",
              "m": setting.m if name != "exact" else "", "value": record["perplexity"]}
             for name, record in pretrained.items()]
    title = "CRT Table 2: linear-attention BERT on GLUE" + (" (small models)" if size != "full" else "")
    path = write_report("table2", title, body, rows, figure(setting, scores, pretrained, by_m, drift),
                        facts(setting, table), seconds)
    print(said)
    print(f"written: {path}, {path.with_suffix('.csv')}, {path.with_suffix('.png')}")


def sizes(setting: Setting) -> str:
    found = dict(o.split("=") for o in setting.mlm)
    if "task.sizes.hidden_size" not in found:
        return "BERT-base"
    return (f"{found['task.sizes.num_hidden_layers']} layers, width {found['task.sizes.hidden_size']}, "
            f"{found['task.sizes.num_attention_heads']} heads")


def paper(row: str, data: str) -> float | None:
    return PAPER[row][PAPER_TASKS.index(data)] if row in PAPER else None


def results(setting: Setting, scores: dict, pretrained: dict) -> str:
    rows = []
    for row, name in ROWS.items():
        cells = [show(interval(scores[row, data], "v")) for data in setting.datasets]
        mean = interval(np.mean([scores[row, data] for data in setting.datasets], 0), "v")
        own = pretrained.get("exact" if row == UPTRAINED else name)
        rows.append([row, *cells, show(mean), f"{own['perplexity']:.1f}" if own else "", m_of(row, setting)])
    names = [f"{TASKS[data].folder} ({TASKS[data].metrics[0]})" for data in setting.datasets]
    return markdown(["attention", *names, "mean", "perplexity in pretraining", "m"], rows)


def m_of(row: str, setting: Setting) -> str:
    return {"exact": "", "ELU": "d"}.get(row, str(setting.m))


def paper_table(setting: Setting) -> str:
    rows = [[row, *(paper(row, data) for data in setting.datasets),
             f"{np.mean([paper(row, data) for data in setting.datasets]):.1f}"] for row in PAPER]
    return markdown(["attention", *(TASKS[data].folder for data in setting.datasets), "mean"], rows)


def gaps(setting: Setting, scores: dict, row: str) -> np.ndarray:
    """Points below exact attention, mean over tasks, for each seed."""
    return np.mean([np.subtract(scores["exact", data], scores[row, data]) for data in setting.datasets], 0)


def verdict(setting: Setting, scores: dict, by_m: dict) -> str:
    """How far FAVOR+ and uptrained FAVOR++ are from exact attention, and the difference of the two, paired by seed."""
    plain, up = (gaps(setting, scores, row) for row in ("FAVOR+", UPTRAINED))
    nearer = interval(np.abs(plain) - np.abs(up), "v")
    sure = abs(nearer["v"]) > nearer["v_ci95"]
    told = "the interval holds 0: no difference is shown" if not sure else (
        "uptrained FAVOR++ is nearer to exact attention than FAVOR+" if nearer["v"] > 0 else
        "FAVOR+ is nearer to exact attention than uptrained FAVOR++")
    lines = [f"At m = {setting.m}, points below exact attention (mean over {len(setting.datasets)} tasks, 95% interval "
             f"over {len(SEEDS)} seeds of fine-tuning): FAVOR+ {show(interval(plain, 'v'), 2)}, uptrained FAVOR++ "
             f"{show(interval(up, 'v'), 2)}; the distance of FAVOR+ is larger by {show(nearer, 2)}: {told}."]
    if setting.m in setting.ms:
        pairs = [np.mean([[score(data, by_m[name, setting.m, data, s]) for s in SEEDS]
                          for data in setting.figure_datasets], 0) for name in ("favorpp", "favorp")]
        tasks = ", ".join(TASKS[d].folder for d in setting.figure_datasets)
        lines.append(f"Both from the same exact encoder (mean of {tasks}): "
                     f"FAVOR++ above FAVOR+ by {show(interval(np.subtract(*pairs), 'v'), 2)} points.")
    return " ".join(lines)


def reason(setting: Setting, pretrained: dict, errors: dict) -> str:
    """What decides how much the choice of features can matter:
    their error at the lengths of this encoder's queries and keys."""
    by_layer = {name: " and ".join(f"{e:.2g}" for e in errors[name]["errors"]) for name in ("favorp", "favorpp")}
    told = (f"In the exact encoder the mean |x + y|^2 is {errors['favorp']['S']:.1f}; the closed forms predict there, "
            f"layer by layer, a relative error of one entry of the kernel matrix (iid projections, m = {setting.m}) of "
            f"{by_layer['favorp']} for FAVOR+, {by_layer['favorpp']} for FAVOR++.")
    if "exact" in pretrained:
        told += (f" It predicts {pretrained['exact']['accuracy']:.1%} of the masked tokens, so what its attention adds "
                 "to the words themselves is limited, and with it what any estimate of it can lose.")
    return told


def facts(setting: Setting, table: dict) -> str:
    counts = {data: table["exact", data, SEEDS[0]] for data in setting.datasets}
    drawn = lambda r: (f" of {r['train_examples_available']:.0f} (drawn with seed 0)"
                       if r["train_examples"] != r["train_examples_available"] else "")
    examples = ", ".join(f"{TASKS[d].folder} {r['train_examples']:.0f}{drawn(r)}" for d, r in counts.items())
    return (f"Dev sets, in percent, mean and 95% Student interval over {len(SEEDS)} seeds of fine-tuning (new head, "
            "order of the data, and for uptrained rows the projections); each encoder was pretrained once, seed 0, so "
            "the intervals leave that out. Orthogonal projections, never redrawn. Training examples: "
            f"{examples}. Pretraining on WikiText-2 (`task=mlm {' '.join(setting.mlm)}`); fine-tuning: "
            f"`task=glue {' '.join(setting.glue)}`, the last weights counted; "
            "otherwise conf/task/mlm.yaml and conf/task/glue.yaml. Tasks whose training data are larger are left out.")


def figure(setting: Setting, scores: dict, pretrained: dict, by_m: dict, drift: dict):
    panels = 1 + len(setting.figure_datasets)
    fig, axes = new_figure(1, 1 + panels, figsize=(4.4 + 3.2 * panels, 3.6), width_ratios=[1.35] + [1] * panels)
    draw_table(axes[0], setting, scores)
    marks = {"favorp": "s", "favorpp": "o"}
    lines = {name: (palette.label(name), palette.colour(name), mark) for name, mark in marks.items()}
    for name, (label, colour, mark) in lines.items():
        found = [interval([drift[name, m, s]["perplexity"] for s in SEEDS], "v") for m in setting.ms]
        plot(axes[1], setting.ms, found, label, colour, mark)
        for ax, data in zip(axes[2:], setting.figure_datasets):
            found = [interval([score(data, by_m[name, m, data, s]) for s in SEEDS], "v") for m in setting.ms]
            plot(ax, setting.ms, found, label, colour, mark)
    if "exact" in pretrained:
        axes[1].axhline(pretrained["exact"]["perplexity"], color=palette.EXACT, ls=":", label="exact")
    for ax, data in zip(axes[2:], setting.figure_datasets):
        found = interval(scores["exact", data], "v")
        ax.axhline(found["v"], color=palette.EXACT, ls=":", label="exact")
        ax.axhspan(found["v"] - found["v_ci95"], found["v"] + found["v_ci95"], color=palette.EXACT, alpha=0.07, lw=0)
        ax.set(title=f"swapped, fine-tuned: {TASKS[data].folder}", ylabel=f"dev {TASKS[data].metrics[0]}, %")
    axes[1].set(title="swapped, not trained", ylabel="WikiText-2 test perplexity")
    for ax in axes[1:]:
        ax.set(xscale="log", xlabel="projections m", xticks=setting.ms)
        ax.set_xticklabels(setting.ms)
        ax.minorticks_off()
    fig.legend(*axes[1].get_legend_handles_labels(), loc="lower right", ncol=3, bbox_to_anchor=(0.85, -0.06))
    fig.tight_layout()
    return fig


def plot(ax, ms, found: list[dict], label: str, colour: str, mark: str) -> None:
    ax.errorbar(ms, [f["v"] for f in found], yerr=[f["v_ci95"] for f in found], color=colour, marker=mark, ms=5, lw=1.2,
                capsize=2, label=label)


def draw_table(ax, setting: Setting, scores: dict) -> None:
    """Points below exact attention, paired by seed, of each row: every task and their mean."""
    rows = [row for row in ROWS if row != "exact"]
    marks = dict(zip(setting.datasets, "ovs^DPX*"))
    for i, row in enumerate(rows):
        for j, data in enumerate(setting.datasets):
            gap = interval(np.subtract(scores[row, data], scores["exact", data]), "v")
            ax.errorbar(gap["v"], i + 0.11 * (j - len(setting.datasets) / 2), xerr=gap["v_ci95"], fmt=marks[data], ms=4,
                        lw=0.7, color="#888888", label=TASKS[data].folder if not i else None)
        mean = interval(-gaps(setting, scores, row), "v")
        ax.errorbar(mean["v"], i + 0.38, xerr=mean["v_ci95"], fmt="D", ms=6, lw=1.6, color="#D55E00",
                    label="mean" if not i else None)
    ax.axvline(0, color="black", lw=0.8, ls=":")
    ax.set(title=f"against exact attention, m = {setting.m}", xlabel="points", yticks=range(len(rows)))
    ax.set_yticklabels(rows)
    ax.invert_yaxis()
    ax.legend(fontsize=8, ncol=6, loc="upper center", bbox_to_anchor=(0.45, -0.17), columnspacing=0.8,
              handletextpad=0.2)
