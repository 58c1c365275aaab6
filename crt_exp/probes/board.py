"""task=board: a row of the board, what a method makes of a pretrained model, by the probe of the page pretrained.

A method is an attention as `Mechanism.parse` reads it, a press of kvpress ("SnapKVPress keys=144"), or a function of
one's own (called.py). Legend: L tokens of a row of text.
"""

import hashlib
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from crt_exp import mechanism_text
from crt_exp.attention.layer import RandomFeatureAttention
from crt_exp.data import DataError
from crt_exp.data.text import content
from crt_exp.hints import Whole, at_least
from crt_exp.mechanism import Mechanism
from crt_exp.nearfar.layer import NearFar
from crt_exp.probes import pretrained, pretrained_presses
from crt_exp.probes.base import Probe, planned
from crt_exp.probes.board_rows import FOLDER, TEXT, BoardRow, text_of, write
from crt_exp.probes.cells import short_commit, versions
from crt_exp.probes.recall import attention_of
from crt_exp.schema import checked

TEXTS = {"new": "continued", "repeated": "repeated"}  # the rows of probes/pretrained.py that they are
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
QUERIES = 64                                          # of a layer, spread over the row, whose keys are counted


@checked("task")
class Board(Probe):
    """See `conf/task/board.yaml`. Raises ConfigError for a method that does not exist, DataError for a model that was
    not fetched."""

    metric, lower_is_better = "repeated_above", True
    uses = frozenset()

    def __init__(self, method: str, model: str, length: Annotated[int, at_least(64)],
                 rows: Annotated[int, at_least(2)], rounds: Whole, folder: str):
        self.method, self.model, self.length, self.rows, self.rounds = method, model, length, rows, rounds
        self.folder = Path(folder)
        if not is_press(method):
            attention_of(method)
        digest_of(model)

    def records(self, mechanism: Mechanism, seed: int, done: list[dict] = ()) -> Iterator[dict[str, Any]]:
        """A record of each text and row, then of the costs."""
        plan = [(text, reading, (self.method, self.model, text, self.length, row))
                for row in range(self.rows) for text in TEXTS]
        found = list(done)
        yield from planned([*plan, ("costs", self.costs, ())], found)
        row = row_of(self.method, self.model, self.length, found)
        yield {"step": len(found), "epoch": 0, "split": "test", "repeated_above": row["repeated"]["mean"],
               "new_above": row["new"]["mean"], "row": row, "final": True}

    def costs(self) -> dict[str, Any]:
        return costs(self.method, self.model, self.length, self.rounds)

    def keep(self, records: list[dict], directory: Path) -> None:
        for folder in (directory, self.folder):
            self.written = write(records[-1]["row"], folder)

    def summary(self, records: list[dict]) -> str:
        row = records[-1]["row"]
        texts = ", ".join(f"{name} text {row[name]['mean']:.4f} ± {row[name]['ci95']:.4f}" for name in TEXTS)
        return f"{self.method}: nats above exact attention: {texts}; `make board` renders {self.folder}/board.md"


def measured(method: str, model: str, length: int, rows: int) -> BoardRow:
    """A row without times."""
    task = Board(method, model, length, rows, 0, str(FOLDER))
    return list(task.records(Mechanism.of("exact"), 0))[-1]["row"]


def row_of(method: str, model: str, length: int, found: list[dict[str, Any]]) -> BoardRow:
    texts = {name: [record for record in found if record["split"] == name] for name in TEXTS}
    spent = next(record for record in found if record["split"] == "costs")
    return {"form": 1, "method": method, "model": model, "sha256": digest_of(model), "text": TEXT, "length": length,
            **{name: text_of([each["above"] for each in of], [each["exact"] for each in of])
               for name, of in texts.items()},
            **{key: spent[key] for key in ("keys", "ms", "exact_ms", "mib")}, "processor": processor(),
            "versions": versions(), "commit": short_commit(), "date": str(date.today())}


def reading(method: str, model: str, text: str, length: int, row: int) -> dict[str, float]:
    """Nats a token above exact attention's, and these."""
    probe = pretrained_presses.pressed if is_press(method) else pretrained.readings
    found = list(probe(method, model, TEXTS[text], length, row))
    if not found:
        raise DataError(f"task.method = {method}: kvpress is not installed: {pretrained_presses.INSTALL}")
    return {"above": round(found[0]["above"], 6), "exact": round(found[0]["nats"] - found[0]["above"], 6)}


def is_press(method: str) -> bool:
    return mechanism_text.read(method)[0].endswith("Press")


def digest_of(model: str) -> str:
    """Of the files of its weights. Raises DataError where there are none."""
    folder = pretrained.folder_of(model)
    files = sorted(file for pattern in WEIGHTS for file in folder.glob(pattern))
    if not files:
        raise DataError(f"task.model = {model}: no weights in {folder}: it takes a model of "
                        "`python -m crt_exp.data fetch models/NAME`, or the folder of one")
    return hashlib.sha256("".join(map(content, files)).encode()).hexdigest()


def processor() -> str:
    info = Path("/proc/cpuinfo")
    names = (line.partition(":")[2].strip() for line in (info.read_text() if info.is_file() else "").splitlines()
             if line.startswith("model name"))
    return next(names, "unknown")


# ---- keys, time and memory


def costs(method: str, model: str, length: int, rounds: int) -> dict[str, Any]:
    """Keys that a query reads, on average; with rounds also times of the layers and memory, which presses, that leave
    the layers as they are, do not have."""
    spent = dict.fromkeys(("ms", "exact_ms", "mib"))
    if is_press(method):
        kept = mechanism_text.read(method)[1]["keys"]
        return {"keys": kept + (length - length // 2 + 1) / 2, **spent}
    if rounds:
        one, other = pretrained.times({"exact": "exact", "method": method}, model, length, rounds, 0)
        spent = {"ms": median(other["ms"]), "exact_ms": median(one["ms"]), "mib": other["mib"]}
    return {"keys": keys(method, model, length), **spent}


def keys(method: str, model: str, length: int) -> float:
    """The mean over layers of what `keys_of` counts in each."""
    row = pretrained.plain(model, length, 0)
    bench = pretrained.bench_of(model, row, length)
    counts: list[float] = []
    with bench.swapped(attention_of("identity" if method == "exact" else method)) as states:
        for state in states.values():
            counts.append(seen(length) if method == "exact" else keys_of(state, length))
    return round(sum(counts) / len(counts), 1)


def keys_of(state: nn.Module, length: int) -> float:
    """Keys whose values reach a query's output, counted by gradients on Gaussian vectors. Random features read M sums
    in the place of keys, near-far attention what its sizes say: near, heavy and opened keys, and a mean for each
    cell."""
    if isinstance(state, RandomFeatureAttention):
        return float(state.width)
    if isinstance(state, NearFar):
        sizes = state.sizes
        return min(seen(length), sizes.block * 3 + sizes.heavy + sizes.open + sizes.cells)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, length, state.d, generator=g)
               for heads in (state.heads, state.kv_heads, state.kv_heads))
    places = torch.linspace(0, length - 1, QUERIES).long()
    with torch.enable_grad():
        out = state(q, k, v.requires_grad_())
        return sum(read_by(out, v, int(place)) for place in places) / len(places)


def read_by(out: Tensor, v: Tensor, place: int) -> int:
    """How many keys the first head's query at a place reads."""
    gradient = torch.autograd.grad(out[0, 0, place].sum(), v, retain_graph=True, allow_unused=True)[0]
    return 0 if gradient is None else int((gradient[0, 0] != 0).any(-1).sum())


def seen(length: int) -> float:
    """By a causal query, on average."""
    return (length + 1) / 2
