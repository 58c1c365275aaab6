"""The model of `make copying`: a Llama that is trained here to copy, in stages of task=mlm with task.repeat=1.

Its rows say a passage, and then say it again from a random place on. Words drawn at random, beside WikiText-2, teach
the copying itself first, for nothing else tells what they are.
"""

import hashlib
import random
from pathlib import Path
from typing import Any

from crt_exp.data.byte_pairs import byte_pairs
from crt_exp.data.text import official_file
from crt_exp.report import runs
from crt_exp.report.fidelity_runs import MODEL_SOURCES

PLACE = Path("outputs/copying")
# what decides an exact model: no other attention
SOURCES = (*MODEL_SOURCES, "data/text.py", "runner", "attention/baselines.py", "report/copying_runs.py")
VOCABULARY, DRAWN, WORDS, EVERY = 2048, 14_000, 40, 8     # lines of drawn words, words of a line; validation lines
SIZES = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
         "intermediate_size": 384, "max_position_embeddings": 16384, "tie_word_embeddings": True}
OPTIONS = ("task=mlm", "attention=exact", "task.causal=true", "task.repeat=1.0", "trainer.betas=[0.9,0.98]",
           "trainer.eval_every=1000000", "trainer.save_every=500", "trainer.log_every=50", "trainer.select=last")


def stage(block: int, rows: int, steps: int, lr: str, drawn: bool = False) -> tuple[str, ...]:
    text = "${oc.env:CRT_DATA}/wikitext2/wiki.train.tokens"
    text = f"[{text},{PLACE}/drawn.tokens]" if drawn else text
    return (f"task.text={text}", f"task.block={block}", f"trainer.batch={rows}", f"trainer.steps={steps}",
            f"trainer.lr={lr}")


def stages(size: str) -> list[list[str]]:
    """The command line of each, but for where it starts."""
    times = {"small": 1, "gpu": 4, "full": 8}[size]
    made = (stage(128, 32, 1500 * times, "2e-3", True), stage(256, 16, 900 * times, "1.5e-3", True),
            stage(512, 8, 1200 * times, "1e-3"), stage(2048, 2, 400 * times, "5e-4"))
    return [[*OPTIONS, f"task.validation_text={PLACE}/validation.tokens", *each] for each in made]


def prepare() -> None:
    """The folder of sizes and tokenizer that the first stage starts from, and the texts."""
    from transformers import LlamaConfig

    train, valid = (official_file("wikitext2", split) for split in ("train", "valid"))
    start = PLACE / "start"
    if (start / "config.json").exists():
        return
    PLACE.mkdir(parents=True, exist_ok=True)
    text = train.read_text(encoding="utf-8").lower()
    words, draw = sorted(set(text.split())), random.Random(0)
    lines = (" ".join(draw.choices(words, k=WORDS)) for _ in range(DRAWN))
    (PLACE / "drawn.tokens").write_text("\n".join(lines), encoding="utf-8")
    kept = valid.read_text(encoding="utf-8").splitlines(keepends=True)[::EVERY]
    (PLACE / "validation.tokens").write_text("".join(kept), encoding="utf-8")
    tokenizer = byte_pairs(train, VOCABULARY, True, PLACE / "tokens")
    tokenizer.save_pretrained(start)
    LlamaConfig(vocab_size=len(tokenizer), architectures=["LlamaForCausalLM"], bos_token_id=None, eos_token_id=None,
                **SIZES).save_pretrained(start)


def place(done: list[list[str]]) -> Path:
    """The run of the last of these stages: its name depends on all of them."""
    decided = " ".join([*(option for each in done for option in each), runs.code(SOURCES)])
    return PLACE / f"exact-{hashlib.sha256(decided.encode()).hexdigest()[:10]}"


def train(size: str) -> list[dict[str, Any]]:
    """The final record of each stage; those that are done are not done again. The model stays in `place`."""
    prepare()
    found, all_of_them = [], stages(size)
    for count in range(1, len(all_of_them) + 1):
        done = all_of_them[:count]
        start = [f"task.init={place(done[:-1])}"] if done[1:] else ["task.init=scratch", f"task.model={PLACE}/start"]
        found.append(runs.run([*done[-1], *start, "resume=auto", "trainer.keep=1"], place(done))[-1])
    return found
