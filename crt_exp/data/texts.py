"""Texts, vocabularies and models without weights that options of pages name, made from WikiText-2 and GLUE's QNLI."""

import random
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from crt_exp.data.sources import missing, task_folder
from crt_exp.data.text import SPECIAL, bert_tokenizer, lines_of, official_file
from crt_exp.data.vocabularies import new_tokenizer

FOLDER = Path("outputs/texts")
LLAMA = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
         "intermediate_size": 384, "max_position_embeddings": 16384, "tie_word_embeddings": True}


def prepare(options: Sequence[str]) -> None:
    """Make what options name in FOLDER, alone or in a list, where it is not there: "validation-8.tokens",
    "drawn-14000.tokens", "characters-88", "llama-2048" and "qnli-2". Whole or not at all: other processes may read."""
    for place in (Path(name) for option in options for name in re.split(r"[\[\],]", option.partition("=")[2])):
        if place.parent == FOLDER and not place.exists():
            kind, _, number = place.stem.partition("-")
            FOLDER.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
                part = Path(folder) / place.name
                MAKE[kind](part, int(number))
                part.replace(place)


def held_out(file: Path, every: int) -> None:
    """Every `every`-th line of the validation text."""
    lines = official_file("wikitext2", "valid").read_text(encoding="utf-8").splitlines(keepends=True)
    file.write_text("".join([line for line in lines if line.strip()][::every]), encoding="utf-8")


def random_words(file: Path, lines: int) -> None:
    """Lines of 40 random words of the training text: only a repetition predicts them."""
    words = sorted({*official_file("wikitext2", "train").read_text(encoding="utf-8").lower().split()})
    draw = random.Random(0)
    file.write_text("\n".join(" ".join(draw.choices(words, k=40)) for _ in range(lines)), encoding="utf-8")


def llama(folder: Path, size: int) -> None:
    """Sizes and a tokenizer of `size` byte pairs of the training text, without weights."""
    from transformers import LlamaConfig

    tokenizer = new_tokenizer("byte_pairs", official_file("wikitext2", "train"), size, True, FOLDER / "tokens")
    tokenizer.save_pretrained(folder)
    LlamaConfig(vocab_size=len(tokenizer), architectures=["LlamaForCausalLM"], bos_token_id=None, eos_token_id=None,
                **LLAMA).save_pretrained(folder)


def characters(folder: Path, size: int) -> None:
    """vocab.txt of the most frequent characters of the training text, each to begin a word and to go on with it."""
    folder.mkdir()
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(SPECIAL) + "\n")
    normalizer = bert_tokenizer(vocabulary).backend_tokenizer.normalizer
    counts = Counter("".join(map(normalizer.normalize_str, lines_of(official_file("wikitext2", "train")))))
    known = sorted(sorted(filter(str.strip, counts), key=lambda c: (-counts[c], c))[:size])
    words = (*SPECIAL, *("##" + character for character in known), *known)
    vocabulary.write_text("".join(f"{word}\n" for word in words), encoding="utf-8")


def qnli(folder: Path, parts: int) -> None:
    """train.tsv and dev.tsv of the published dev.tsv: every `parts`-th question is of dev, the others are of train."""
    published = (task_folder("glue/QNLI") or Path()) / "dev.tsv"
    if not published.is_file():
        raise missing("glue/QNLI", published, 1)
    folder.mkdir()
    head, *lines = published.read_text(encoding="utf-8").splitlines(keepends=True)
    questions = {question: i for i, question in enumerate(dict.fromkeys(line.split("\t")[1] for line in lines))}
    for split, wanted in (("train", False), ("dev", True)):
        own = [line for line in lines if (questions[line.split("\t")[1]] % parts == 0) == wanted]
        (folder / f"{split}.tsv").write_text("".join([head, *own]), encoding="utf-8")


MAKE = {"validation": held_out, "drawn": random_words, "characters": characters, "llama": llama, "qnli": qnli}
