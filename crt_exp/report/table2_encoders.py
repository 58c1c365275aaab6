"""What cells of `table2` hold: exact encoders, what they are, their attention swapped, trained on, fine-tuned."""

import tempfile
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from crt_exp.config import instantiate, read_yaml
from crt_exp.data.text import bert_tokenizer, lines_of, official_file
from crt_exp.data.vocabulary import SPECIAL
from crt_exp.mechanism import Mechanism
from crt_exp.models.folder import MODEL
from crt_exp.report import runs
from crt_exp.report.fidelity_runs import attention
from crt_exp.report.table2_runs import HOME, JUDGED, READ, UNIFORM, held_out_file, place, vocabulary_folder
from crt_exp.studies import fidelity as study
from crt_exp.studies.fidelity import Arm
from crt_exp.studies.subject import Subject
from crt_exp.tasks.base import Reader, Task


# ---- texts and vocabularies that the report makes


def held_out(every: int) -> Path:
    """A part of the validation text: every so-many-th line."""
    lines = official_file("wikitext2", "valid").read_text(encoding="utf-8").splitlines(keepends=True)
    return written(held_out_file(every), "".join([line for line in lines if line.strip()][::every]))


def characters(size: int) -> Path:
    """vocab.txt of the most frequent characters of the training text, each to begin a word and to go on with it."""
    folder, counts = vocabulary_folder(size), Counter()
    special = written(folder / "special.txt", "".join(f"{word}\n" for word in SPECIAL))
    normalizer = bert_tokenizer(special).backend_tokenizer.normalizer
    for line in lines_of([official_file("wikitext2", "train")]):
        counts.update(normalizer.normalize_str(line))
    known = sorted(sorted(filter(str.strip, counts), key=lambda c: (-counts[c], c))[:size])
    words = (*SPECIAL, *("##" + character for character in known), *known)
    return written(folder / "vocab.txt", "".join(f"{word}\n" for word in words))


def written(path: Path, text: str) -> Path:
    """Whole or not at all, and not again where it is the same: another process may be reading it."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8", delete=False) as file:
            file.write(text)
        Path(file.name).replace(path)
    return path


# ---- exact encoders


def train(stages: list[list[str]], every: int) -> dict[str, Any]:
    """The final record of the last stage, its earlier ones there already; the model stays in `place(stages)`."""
    held_out(every)
    for option in stages[-1]:
        if option.startswith(f"task.vocabulary={HOME.path}"):
            characters(int(option.rpartition("-")[2]))
    start = [f"task.init={place(stages[:-1])}"] if stages[1:] else []
    records = runs.run([*stages[-1], *start, "resume=auto", "trainer.keep=1"], place(stages))
    return {key: records[-1][key] for key in ("loss", "perplexity", "accuracy", "step", "time_s")}


def there(key: dict[str, Any]) -> None:
    """A cell may be known and its directory gone."""
    if not (place(key["stages"]) / MODEL).is_dir():
        train(**key)


def unigram(stages: list[list[str]], every: int) -> float:
    """Loss on the held-out text, nats, of predicting every token by its frequency in the training text."""
    task = instantiate(read_yaml(place(stages) / "config.yaml").task)
    size = len(task.tokenizer)
    known, asked = (np.bincount(task.blocks[split].ravel(), minlength=size) for split in ("train", "validation"))
    for counts in (known, asked):
        counts[task.tokenizer.all_special_ids] = 0  # which are never asked for
    logs = np.log((known + 1) / (known.sum() + size))
    return float(-(asked * logs).sum() / asked.sum())


def look(start: str, length: int, texts: int, m: int, draws: int) -> dict[str, Any]:
    """On captured queries, keys and values of the exact encoder: losses, one a text; mean |x + y|^2 of each head of
    each layer; what uniform attention costs, one a text; relative errors of outputs, one a layer."""
    subject = Subject(start, str(official_file("wikitext2", "valid")), None, None, length, texts, 1, seed=0,
                      cache_dir=HOME.path / "tokens")
    errors = {name: np.mean([study.of_swap(subject, Arm(name, m), draw, 0)["attention_error_layers"]
                             for draw in range(draws)], 0).tolist() for name in JUDGED}
    control = study.of_swap(subject, UNIFORM, 0, 0)
    return {"losses": [each.loss for each in subject.exact], "uniform": control["above_texts"],
            "S": [study.of_heads(subject, i)["mean_sq_sum"] for i in range(len(subject.calls[0]))],
            "errors": errors | {"uniform": control["attention_error_layers"]}}


# ---- other attention in their place


@torch.no_grad()
def after_swap(start: str, every: int, text: str, m: int | None, seed: int) -> float:
    """Held-out loss, nats, of the exact encoder with this attention as it is: step 0 of its uptraining."""
    task = task_of(start, every)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    model = task.build(Arm(text, m).mechanism(seed)).eval().to(device)
    return task.evaluate(model, "validation", Reader(task, READ, seed, device))["loss"]


@lru_cache(maxsize=4)
def task_of(start: str, every: int) -> Task:
    """The task of an encoder, which starts from it and reads the held-out text alone."""
    text = str(held_out(every))
    return instantiate(read_yaml(f"{start}/config.yaml").task, text=text, validation_text=text, model=start,
                       vocabulary=None, init="uptrain")


def uptrain(overrides: list[str], start: str, every: int) -> dict[str, Any]:
    """step -> held-out loss, nats; or {"diverged": what the run said} of one whose loss was not finite."""
    held_out(every)
    try:
        records = HOME.passing([*overrides, f"task.model={start}"])
    except runs.Diverged as failure:
        return {"diverged": failure.reason}
    return {str(r["step"]): r["loss"] for r in records if r["split"] == "validation" and "final" not in r}


def fine_tune(overrides: list[str], text: str, m: int | None, option: str, start: str) -> dict[str, Any]:
    """Answers on the dev split in the order of its file, the paper's metric of them, and the training examples; or
    {"diverged": what the run said} of one whose loss was not finite."""
    HOME.path.mkdir(parents=True, exist_ok=True)
    arm = Arm(text, m)
    with tempfile.TemporaryDirectory(dir=HOME.path, prefix="run-") as folder:
        run = Path(folder) / "run"
        try:
            last = runs.run([*overrides, *attention(arm), f"{option}={start}", "trainer.keep=1"], run)[-1]
        except runs.Diverged as failure:
            return {"diverged": failure.reason}
        return {"answers": answers(run, arm.mechanism()), "score": last[last["metric"]],
                "examples": last["train_examples"], "available": last["train_examples_available"]}


@torch.no_grad()
def answers(run: Path, mechanism: Mechanism) -> list[float]:
    """Of the model that a run of task=glue has kept, with its own noise."""
    task = instantiate(read_yaml(run / "config.yaml").task, init=str(run), examples=None)
    return task.answers(task.build(mechanism).eval(), "dev")
