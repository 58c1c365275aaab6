"""What `make speed` measures: processes that take all methods in turn, and peaks of memory.

The unit is a process: it runs every method in turn and gives one ratio of two of them. All processes of a turn come
before those of the next, so that what changes on the machine meanwhile changes for all.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from crt_exp.studies import speed
from crt_exp.studies.cells import Cells, Draw, Key
from crt_exp.studies.speed import ALONE, CAUSAL, PEER_CAUSAL

EXACT, PLAIN, LATER, MEMORY = "exact", "floor", "later", "memory"
OURS = ("favorp", "favorpp", f"favorp{CAUSAL}", f"favorpp{CAUSAL}")
WITHOUT_MEMORY = ("identity", "uniform", f"uniform{CAUSAL}")  # it is that of their values
QUADRATIC, COMPARED = (EXACT, f"{EXACT}{CAUSAL}"), ("favorpp", f"favorpp{CAUSAL}")


def measure(name: str, sources: Sequence[str], size: Mapping[str, Any], keep: bool = False) -> Iterator[Draw]:
    """size: alone: lengths of attention alone, by the process that takes them one after the other; models: lengths of
    each; later: those of the process in which the engines are timed after shorter ones; turns: processes of each kind;
    memory: lengths at which peaks are taken; near_far_turns: processes for those of near-far attention; exact_memory:
    the length for exact attention, whose time is quadratic.

    Settings: "attention", the models, LATER (x: length, units: processes, ms of each round) and MEMORY (mib).
    """
    cells, threads = Cells(name, sources, keep), torch.get_num_threads()
    keys = [(part, {**share, "turn": turn, "threads": threads})
            for turn in range(size["turns"]) for part, share in shares(size)]
    peaks: list[Key] = [{"name": method, "length": n, "turn": turn, "threads": threads}
                        for method, n, turn in places(size)]
    cells.fill([key for _, key in keys], speed.sample, f"{name}: time", apart=True)
    cells.fill(peaks, speed.held_by, f"{name}: memory", apart=True)
    for part, key in keys:
        for (what, length, _), spent in zip(key["cases"], cells[key]["ms"]):
            for method, passes in spent.items():
                training = [sum(each) for each in zip(passes["forward"], passes["backward"])]
                for metric, ms in (passes | {"training": training}).items():
                    for value in ms:
                        yield cells.draw(key, part or what, method, metric, value, key["turn"], length)
    for key in peaks:
        yield cells.draw(key, MEMORY, key["name"], "mib", cells[key], key["turn"], key["length"])


def shares(size: Mapping[str, Any]) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """What each process of a turn takes, and the setting it belongs to where that is not what it is."""
    for lengths in size["alone"]:
        yield None, {"cases": [case(ALONE, n) for n in lengths]}
    yield LATER, {"cases": [case(ALONE, n) for n in size["later"]], "chosen": [PLAIN, *OURS]}
    yield None, {"cases": [case(what, n) for what, lengths in size["models"].items() for n in lengths]}


def case(what: str, length: int) -> list[Any]:
    """With more rounds of the short ones, whose times vary more."""
    return [what, length, 4 if length <= 512 else 2 if length <= 2048 else 1]


def places(size: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """(method, length, number of the process)."""
    cases = [(name, n) for n in size["memory"] for name in speed.makers(n)
             if name not in (*WITHOUT_MEMORY, *QUADRATIC) and not name.startswith("trig")]
    cases += [(name, size["exact_memory"]) for name in (*COMPARED, *QUADRATIC)]
    cases += [(name, PEER_CAUSAL) for name in (f"favorp{CAUSAL}", f"chunked{CAUSAL}", *speed.peers(PEER_CAUSAL))
              if name.endswith(CAUSAL)]
    return [(name, n, turn) for turn in range(size["near_far_turns"]) for name, n in dict.fromkeys(cases)
            if not turn or name.startswith("nearfar")]
