"""Texts, vocabularies and models without weights that runs of a measurement name, made from WikiText-2, and halves of
GLUE's QNLI, where they are not there."""

import random
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from crt_exp.data import glue
from crt_exp.data.byte_pairs import byte_pairs
from crt_exp.data.text import bert_tokenizer, lines_of, official_file
from crt_exp.data.sources import task_folder
from crt_exp.data.vocabulary import SPECIAL

FOLDER = Path("outputs/texts")
WORDS = 40    # of a line of drawn words
LLAMA = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
         "intermediate_size": 384, "max_position_embeddings": 16384, "tie_word_embeddings": True}


def prepare(options: Sequence[str]) -> None:
    """Makes what options name in FOLDER, alone or in a list: "validation-8.tokens", "drawn-14000.tokens",
    "characters-88", "llama-2048" and "qnli-2"."""
    for option in options:
        for place in map(Path, re.split(r"[\[\],]", option.partition("=")[2])):
            if place.parent == FOLDER:
                kind, _, number = place.name.removesuffix(".tokens").partition("-")
                MADE[kind](place, int(number))


def held_out(place: Path, every: int) -> None:
    """A part of the validation text: every so-many-th line."""
    lines = official_file("wikitext2", "valid").read_text(encoding="utf-8").splitlines(keepends=True)
    written(place, "".join([line for line in lines if line.strip()][::every]))


def drawn(place: Path, lines: int) -> None:
    """Words of the training text, drawn at random: nothing tells what they are but that they were said before."""
    if place.exists():
        return
    words = sorted({*official_file("wikitext2", "train").read_text(encoding="utf-8").lower().split()})
    draw = random.Random(0)
    written(place, "\n".join(" ".join(draw.choices(words, k=WORDS)) for _ in range(lines)))


def llama(folder: Path, pieces: int) -> None:
    """Sizes and a tokenizer of so many byte pairs of the training text, without weights."""
    from transformers import LlamaConfig

    if (folder / "config.json").exists():
        return
    tokenizer = byte_pairs(official_file("wikitext2", "train"), pieces, True, FOLDER / "tokens")
    tokenizer.save_pretrained(folder)
    LlamaConfig(vocab_size=len(tokenizer), architectures=["LlamaForCausalLM"], bos_token_id=None, eos_token_id=None,
                **LLAMA).save_pretrained(folder)


def characters(folder: Path, size: int) -> None:
    """vocab.txt of the most frequent characters of the training text, each to begin a word and to go on with it."""
    if (folder / "vocab.txt").exists():
        return
    counts: Counter = Counter()
    special = written(folder / "special.txt", "".join(f"{word}\n" for word in SPECIAL))
    normalizer = bert_tokenizer(special).backend_tokenizer.normalizer
    for line in lines_of([official_file("wikitext2", "train")]):
        counts.update(normalizer.normalize_str(line))
    known = sorted(sorted(filter(str.strip, counts), key=lambda c: (-counts[c], c))[:size])
    words = (*SPECIAL, *("##" + character for character in known), *known)
    written(folder / "vocab.txt", "".join(f"{word}\n" for word in words))


def qnli(folder: Path, parts: int) -> None:
    """train.tsv and dev.tsv made of dev.tsv alone, for where the published train is not at hand: every so-many-th
    question is one of dev, the others are of train, so that no question is in both."""
    published = (task_folder(glue.TASKS["qnli"].source.name) or Path()) / "dev.tsv"
    if not published.is_file():
        glue.load("qnli", "dev")  # which says what to do
    head, *lines = published.read_text(encoding="utf-8").splitlines(keepends=True)
    questions = {question: i for i, question in enumerate(dict.fromkeys(line.split("\t")[1] for line in lines))}
    for split, wanted in (("train", False), ("dev", True)):
        own = [line for line in lines if (questions[line.split("\t")[1]] % parts == 0) == wanted]
        written(folder / f"{split}.tsv", "".join([head, *own]))


def written(path: Path, text: str) -> Path:
    """Whole or not at all, and not again where it is the same: another process may be reading it."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8", delete=False) as file:
            file.write(text)
        Path(file.name).replace(path)
    return path


MADE = {"validation": held_out, "drawn": drawn, "characters": characters, "llama": llama, "qnli": qnli}
