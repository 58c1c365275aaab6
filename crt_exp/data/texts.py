"""Texts, vocabularies and models without weights that runs name, made from WikiText-2, and halves of GLUE's QNLI."""

import random
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from crt_exp.data import glue
from crt_exp.data.byte_pairs import byte_pairs
from crt_exp.data.sources import task_folder
from crt_exp.data.text import bert_tokenizer, lines_of, official_file
from crt_exp.data.vocabulary import SPECIAL

FOLDER = Path("outputs/texts")
WORDS = 40    # of a line of drawn words
LLAMA = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
         "intermediate_size": 384, "max_position_embeddings": 16384, "tie_word_embeddings": True}


def prepare(options: Sequence[str]) -> None:
    """Makes what options name in FOLDER, alone or in a list, where it is not there: "validation-8.tokens",
    "drawn-14000.tokens", "characters-88", "llama-2048" and "qnli-2". Whole or not at all: other processes may read."""
    for option in options:
        for place in map(Path, re.split(r"[\[\],]", option.partition("=")[2])):
            if place.parent != FOLDER or place.exists():
                continue
            kind, _, number = place.name.removesuffix(".tokens").partition("-")
            FOLDER.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=FOLDER) as passing:
                made = Path(passing) / place.name
                if not made.suffix:
                    made.mkdir()
                MADE[kind](made, int(number))
                made.replace(place)


def held_out(place: Path, every: int) -> None:
    """A part of the validation text: every so-many-th line."""
    lines = official_file("wikitext2", "valid").read_text(encoding="utf-8").splitlines(keepends=True)
    place.write_text("".join([line for line in lines if line.strip()][::every]), encoding="utf-8")


def drawn(place: Path, lines: int) -> None:
    """Words of the training text, drawn at random: nothing tells what they are but that they were said before."""
    words = sorted({*official_file("wikitext2", "train").read_text(encoding="utf-8").lower().split()})
    draw = random.Random(0)
    place.write_text("\n".join(" ".join(draw.choices(words, k=WORDS)) for _ in range(lines)), encoding="utf-8")


def llama(folder: Path, pieces: int) -> None:
    """Sizes and a tokenizer of so many byte pairs of the training text, without weights."""
    from transformers import LlamaConfig

    tokenizer = byte_pairs(official_file("wikitext2", "train"), pieces, True, FOLDER / "tokens")
    tokenizer.save_pretrained(folder)
    LlamaConfig(vocab_size=len(tokenizer), architectures=["LlamaForCausalLM"], bos_token_id=None, eos_token_id=None,
                **LLAMA).save_pretrained(folder)


def characters(folder: Path, size: int) -> None:
    """vocab.txt of the most frequent characters of the training text, each to begin a word and to go on with it."""
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(SPECIAL) + "\n")
    normalizer = bert_tokenizer(vocabulary).backend_tokenizer.normalizer
    counts = Counter("".join(map(normalizer.normalize_str, lines_of([official_file("wikitext2", "train")]))))
    known = sorted(sorted(filter(str.strip, counts), key=lambda c: (-counts[c], c))[:size])
    words = (*SPECIAL, *("##" + character for character in known), *known)
    vocabulary.write_text("".join(f"{word}\n" for word in words), encoding="utf-8")


def qnli(folder: Path, parts: int) -> None:
    """train.tsv and dev.tsv made of dev.tsv alone, for where the published train is not at hand: every so-many-th
    question is one of dev, the others are of train, so that no question is in both."""
    published = (task_folder(glue.TASKS["qnli"].source.name) or Path()) / "dev.tsv"
    if not published.is_file():
        glue.load("qnli", "dev", source="files")  # which says what to do
    head, *lines = published.read_text(encoding="utf-8").splitlines(keepends=True)
    questions = {question: i for i, question in enumerate(dict.fromkeys(line.split("\t")[1] for line in lines))}
    for split, wanted in (("train", False), ("dev", True)):
        own = [line for line in lines if (questions[line.split("\t")[1]] % parts == 0) == wanted]
        (folder / f"{split}.tsv").write_text("".join([head, *own]), encoding="utf-8")


MADE = {"validation": held_out, "drawn": drawn, "characters": characters, "llama": llama, "qnli": qnli}
