"""Small random encoders, their vocabulary, text and GLUE files, written to a folder."""

from pathlib import Path

import numpy as np

from crt_exp.experiments.data.glue import TASKS

WORDS = [
    "the",
    "one",
    "cat",
    "dog",
    "bird",
    "fish",
    "sat",
    "ran",
    "flew",
    "swam",
    "on",
    "under",
    "over",
    "by",
    "mat",
    "tree",
    "pond",
    "sky",
    "red",
    "green",
    "old",
    "young",
    "and",
    "but",
    "it",
    "was",
    "not",
]
VOCABULARY = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *WORDS,
    *"abcdefghijklmnopqrstuvwxyz.",
    "##s",
    "##ing",
]


def sentence(i: int, length: int = 7) -> str:
    words = []
    for j in range(3 + i % length):
        number = i * 7 + j * j * (i % 5 + 1) + j
        word = WORDS[number % len(WORDS)]
        if j == i % 7:
            word += "s"
        words.append(word)
    return " ".join(words) + " ."


def write_text(path: Path, lines: int = 120) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(sentence(i) + "\n" for i in range(lines)))
    return path


def write_words(path: Path) -> Path:
    """Lines of four words, each of which follows from the one before, or is any of eleven in one case of four."""
    rng = np.random.default_rng(0)
    words = (rng.integers(0, 3, 900) > 0).cumsum() * 5 % 11
    is_any = rng.random(900) < 0.25
    words = np.where(is_any, rng.integers(0, 11, 900), words)
    lines = []
    for line in words.reshape(-1, 4):
        lines.append(" ".join(f"w{word}" for word in line) + "\n")
    path.write_text("".join(lines))
    return path


def write_model(
    folder: Path, kind: str = "BertForMaskedLM", vocabulary=VOCABULARY, **changes
) -> Path:
    """config.json, model.safetensors and vocab.txt of a random BERT."""
    import torch
    import transformers

    torch.manual_seed(1)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "vocab_size": len(VOCABULARY),
        "max_position_embeddings": 40,
    } | changes
    folder.mkdir(parents=True, exist_ok=True)
    getattr(transformers, kind)(transformers.BertConfig(**sizes)).save_pretrained(folder)
    (folder / "vocab.txt").write_text("".join(word + "\n" for word in vocabulary))
    return folder


def write_glue(folder: Path, name: str, train: int = 48, dev: int = 12) -> Path:
    """Files in the official layout, whose label can be learned: it goes with the first word."""
    task = TASKS[name]
    folder.mkdir(parents=True, exist_ok=True)
    for split, file in task.splits.items():
        if not split.startswith("test"):
            lines = [] if task.headless else ["\t".join([*task.columns, task.label])]
            count = dev
            if split == "train":
                count = train
            lines += [row(task, i) for i in range(count)]
            (folder / f"{file}.tsv").write_text("\n".join(lines) + "\n")
    return folder


def row(task, i: int) -> str:
    kind = i % max(2, len(task.names))
    label = task.spelled[kind] if task.spelled else f"{kind * 4.5:.1f}"
    texts = [f"{WORDS[kind]} {sentence(i)}", sentence(i + 3)][: len(task.columns)]
    if task.headless:
        return "\t".join(["x", label, "*", *texts])
    return "\t".join([*texts, label])
