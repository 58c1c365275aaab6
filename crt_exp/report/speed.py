"""make speed: time and memory of attention against length, alone and in whole models, beside the peers.

The unit is a process: it runs every method in turn and gives one ratio of two of them. All processes of a turn come
before those of the next, so that what changes on the machine meanwhile changes for all.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from crt_exp.report import speed_page
from crt_exp.report.speed_page import EXACT, LATER, PLAIN, Found
from crt_exp.report.writing import Cells
from crt_exp.studies import speed as study
from crt_exp.studies.memory import in_new_process
from crt_exp.studies.speed import ALONE, CAUSAL, PEER_CAUSAL, VIT

OURS = ("favorp", "favorpp", f"favorp{CAUSAL}", f"favorpp{CAUSAL}")
WITHOUT_MEMORY = ("identity", "uniform", f"uniform{CAUSAL}")  # it is that of their values
QUADRATIC, BESIDE_EXACT = (EXACT, f"{EXACT}{CAUSAL}"), ("favorpp", f"favorpp{CAUSAL}")
SOURCES = ("attention", "features", "samplers", "models/transformer.py", "swap")


@dataclass(frozen=True)
class Setting:
    """What one SIZE stands for. alone: lengths of attention alone, by the process that takes them one after the other.
    models: lengths of each. later: those of the process in which the engines are timed after shorter ones. turns:
    processes of each kind. memory: lengths at which peaks are taken; near_far_turns: processes for those of near-far
    attention, which a bar is about. exact_memory: the length for exact attention, whose time is quadratic."""

    alone: tuple[tuple[int, ...], ...] = ((256, 512, 1024, 2048), (4096,), (16384,))
    models: dict[str, tuple[int, ...]] = field(default_factory=lambda: {
        "large": (256, 1024, 2048), "small": (256, 1024, 4096), VIT: (196, 784, 3136)})
    later: tuple[int, ...] = (256, 1024, 4096, 16384)
    turns: int = 5
    memory: tuple[int, ...] = (65536,)
    near_far_turns: int = 5
    exact_memory: int = 4096

    def shares(self) -> Iterator[tuple[str | None, dict[str, Any]]]:
        """What each process of a turn takes, and the part of the page it belongs to where that is not what it is."""
        for lengths in self.alone:
            yield None, {"cases": [case(ALONE, n) for n in lengths]}
        yield LATER, {"cases": [case(ALONE, n) for n in self.later], "chosen": [PLAIN, *OURS]}
        yield None, {"cases": [case(what, n) for what, lengths in self.models.items() for n in lengths]}

    def peaks(self) -> list[tuple[str, int, int]]:
        """(method, length, number of the process)."""
        cases = [(name, n) for n in self.memory for name in study.makers(n)
                 if name not in (*WITHOUT_MEMORY, *QUADRATIC) and not name.startswith("trig")]
        cases += [(name, self.exact_memory) for name in (*BESIDE_EXACT, *QUADRATIC)]
        cases += [(name, PEER_CAUSAL) for name in (f"favorp{CAUSAL}", f"chunked{CAUSAL}", *study.peers(PEER_CAUSAL))
                  if name.endswith(CAUSAL)]
        return [(name, n, turn) for turn in range(self.near_far_turns) for name, n in dict.fromkeys(cases)
                if not turn or name.startswith("nearfar")]


def case(what: str, length: int) -> list[Any]:
    """With more rounds of the short ones, whose times vary more."""
    return [what, length, 4 if length <= 512 else 2 if length <= 2048 else 1]


SETTINGS = {"small": Setting(), "gpu": Setting(), "full": Setting(
    alone=((256, 512, 1024, 2048), *((2**i,) for i in range(12, 18))), turns=10, memory=(4096, 16384, 65536, 131072),
    models={"large": (256, 1024, 4096), "small": (256, 1024, 4096, 16384), VIT: (196, 784, 3136)})}


def main(size: str) -> None:
    setting, threads = SETTINGS[size], torch.get_num_threads()
    times, memory = Cells("speed", SOURCES), Cells("speed-memory", SOURCES)
    keys = [(part, {**share, "turn": turn, "threads": threads})
            for turn in range(setting.turns) for part, share in setting.shares()]
    times.fill([key for _, key in keys], measure, "time", workers=1)
    peaks = [{"name": name, "length": n, "turn": turn, "threads": threads} for name, n, turn in setting.peaks()]
    memory.fill(peaks, peak, "memory", workers=1)
    found = Found(threads=threads, processors=sorted({times[key]["processor"] for _, key in keys}))
    for part, key in keys:
        for (what, length, _), spent in zip(key["cases"], times[key]["ms"]):
            found.add(part or what, length, spent)
    for key in peaks:
        found.memory.setdefault((key["name"], key["length"]), []).append(memory[key])
    speed_page.write(size, found, times.seconds() + memory.seconds())


def measure(**key: Any) -> dict[str, Any]:
    return in_new_process(study.sample, **key)


def peak(name: str, length: int, turn: int, threads: int) -> float:
    """MiB. turn: the number of the process, which has nothing else of its own."""
    return in_new_process(study.held_by, name=name, length=length, threads=threads)
