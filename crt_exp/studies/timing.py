"""Calls timed in turn, so that load from outside hits all of them alike."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

LONG = 1000.0  # ms of a call that no cache matters to

def milliseconds(call: Callable[..., Any], *given: Any) -> float:
    start = time.perf_counter()
    call(*given)
    return 1e3 * (time.perf_counter() - start)


def turns(calls: Mapping[str, Callable[[], Any]], rounds: int, warm: bool = False) -> dict[str, list[float]]:
    """Milliseconds of every round but a first one that warms up. warm: calls of less than LONG are made once more
    before they are timed, so that what the one before them left in the caches does not count."""
    first = {name: milliseconds(call) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            if warm and first[name] < LONG:
                call()
            times[name].append(milliseconds(call))
    return times


def timed(run: Callable[..., Any], named: Mapping[str, Any], given: Any, rounds: int) -> dict[str, list[float]]:
    """`turns` of run(each, given)."""
    return turns({name: partial(run, each, given) for name, each in named.items()}, rounds)
