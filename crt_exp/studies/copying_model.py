"""What `make copying` measures: a Llama that is trained here to copy, and what it keeps when its attention is swapped.

It is trained in stages of task=mlm with task.repeat=1, and swapped without training.

Its rows say a passage, and then say it again from a random place on. Words drawn at random, with WikiText-2, teach
the copying itself first, for nothing else tells what they are.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from crt_exp.data.byte_pairs import byte_pairs
from crt_exp.data.text import official_file
from crt_exp.mechanism import Mechanism
from crt_exp.studies import copying, runs
from crt_exp.studies.cells import Cells, Draw

PLACE = Path("outputs/copying")
SOURCES = ("conf/task/mlm.yaml", "data/byte_pairs.py", *runs.EXACT)
VOCABULARY, DRAWN, WORDS, EVERY = 2048, 14_000, 40, 8     # lines of drawn words, words of a line; validation lines
SIZES = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
         "intermediate_size": 384, "max_position_embeddings": 16384, "tie_word_embeddings": True}
OPTIONS = ("task=mlm", "attention=exact", "task.causal=true", "task.repeat=1.0", "trainer.betas=[0.9,0.98]",
           "trainer.eval_every=1000000", "trainer.save_every=500", "trainer.log_every=50", "trainer.select=last")


LENGTH, SEEDS, ROUNDS, M = 2048, 5, 5, 256     # the model's last stage has rows of that length
EARLY = "nearfar exact_until=64 open"          # exact for 64 tokens alone: the keys that are read do it all
TIMED = ("exact", "uniform", "window block=64 first=16", "favorpp", "nearfar preset=bounded", f"{EARLY}=8",
         f"{EARLY}=16", f"{EARLY}=32", f"{EARLY}=64", "nearfar exact_until=1024")
PEERS = ("pages 64", "clusters 64", "clusters 0", "largest 64")


def measure(name: str, sources: Sequence[str], size: Mapping[str, Any], keep: bool = False) -> Iterator[Draw]:
    """Metrics: new, copied and gain = new - copied, nats (units: seeds); ms of the layers (table time, of turns)."""
    start, cells = str(train(size["stages"])), Cells(name, sources, keep)
    keys = {(arm, seed): {"start": start, "length": LENGTH, "seed": seed, "attention": arm, "m": projections(arm)}
            for arm, seed in product((*TIMED, *PEERS), range(SEEDS))}
    cells.fill([*keys.values()], copying.losses, f"{name}: losses")
    for (arm, seed), key in keys.items():
        losses = {kind: sum(rows) / len(rows) for kind, rows in cells[key].items()}
        for metric, value in (losses | {"gain": losses["new"] - losses["copied"]}).items():
            yield cells.draw(key, f"{LENGTH} tokens", arm, metric, value, seed)
    key = {"start": start, "length": LENGTH, "attentions": [[arm, projections(arm)] for arm in TIMED],
           "rounds": ROUNDS}
    cells.fill([key], copying.times, f"{name}: times", workers=1)
    for arm, times in cells[key].items():
        for turn, ms in enumerate(times):
            yield cells.draw(key, f"{LENGTH} tokens", arm, "ms", ms, turn, table="time")


def projections(arm: str) -> int | None:
    return M if arm not in PEERS and Mechanism.parse(arm).draws else None


def stage(block: int, rows: int, steps: int, lr: str, drawn: bool = False) -> tuple[str, ...]:
    text = "${oc.env:CRT_DATA}/wikitext2/wiki.train.tokens"
    text = f"[{text},{PLACE}/drawn.tokens]" if drawn else text
    return (f"task.text={text}", f"task.block={block}", f"trainer.batch={rows}", f"trainer.steps={steps}",
            f"trainer.lr={lr}")


def stages(times: int) -> list[list[str]]:
    """The command line of each, but for where it starts; times: how often the steps of the small size."""
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


def train(times: int) -> Path:
    """The run of the last stage; those that are done are not done again."""
    prepare()
    return runs.staged(PLACE, SOURCES, stages(times), ["task.init=scratch", f"task.model={PLACE}/start"])
