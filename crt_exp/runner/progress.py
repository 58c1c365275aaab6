"""What a run shows while it trains or measures: progress lines."""

import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Any

import torch
from tqdm import tqdm

EVERY = 10.0             # seconds between plain lines
READER_PATIENCE = 5.0  # seconds that reading one item ahead may take when nobody wants it any more


class ProgressLine:
    """Loss, metric, samples/s, time left and memory on one line; where standard error is no terminal, and in the run's
    log, a plain line every EVERY seconds."""

    def __init__(self, total: int, start: int, batch: float, device: torch.device, shown: bool,
                 note: Callable[[str], None]):
        self.batch, self.device, self.values, self.shown, self.note = batch, device, {}, shown, note
        self.total, self.first, self.at = total, start, start
        self.named: set[str] = set()  # values that are metrics
        self.began = self.said = time.monotonic()
        self.bar = tqdm(total=total, initial=start, unit="step", dynamic_ncols=True, disable=None if shown else True,
                        leave=False)

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *error) -> None:
        self.bar.close()

    def step(self, loss: float) -> None:
        self.at += 1
        now = time.monotonic()
        if self.shown and now - self.said >= EVERY:
            self.said = now
            self._say(loss, (now - self.began) / (self.at - self.first))
        if self.bar.disable:
            return
        self.bar.set_description(refresh=False)
        self.values["loss"] = f"{loss:.4g}"
        self.values["samples/s"] = f"{(self.bar.format_dict['rate'] or 0) * self.batch:.0f}"
        self.values["memory"] = f"{peak_memory(self.device) / 2**30:.1f} GiB"
        self.bar.set_postfix(self.values, refresh=False)
        self.bar.update()

    def _say(self, loss: float, seconds: float) -> None:
        """seconds: of a step, evaluations and checkpoints among them."""
        left = time.strftime("%H:%M:%S", time.gmtime(seconds * (self.total - self.at)))
        metrics = "".join(f", {name} {value}" for name, value in self.values.items() if name in self.named)
        self._line(f"step {self.at} of {self.total}, loss {loss:.4g}{metrics}, {self.batch / seconds:.3g} samples/s, "
                   f"{left} left")

    def _line(self, line: str) -> None:
        self.note(line)
        if self.bar.disable:
            print(line, file=sys.stderr, flush=True)

    def evaluating(self, split: str, read: int, whole: int | None) -> None:
        """Of so many micro-batches of this process, None: of unknown number."""
        now, where = time.monotonic(), f"{read} of {whole} batches" if whole else f"{read} batches"
        if self.shown and now - self.said >= EVERY:
            self.said = now
            self._line(f"step {self.at} of {self.total}, evaluating {split}: {where}")
        if not self.bar.disable:
            self.bar.set_description(f"{split} {where}")

    def metric(self, name: str, value: float | None) -> None:
        self.named.add(name)
        self.values[name] = "nan" if value is None else f"{value:.4f}"


@contextmanager
def measuring(records: list[dict], note: Callable[[str], None]) -> Iterator[None]:
    """A line after EVERY seconds, then at longer intervals up to a minute, on standard error and in the run's log."""
    ended, began = Event(), time.monotonic()

    def lines() -> None:
        pause = EVERY
        while not ended.wait(pause):
            pause = min(2 * pause, 60)
            line = f"measuring for {time.monotonic() - began:.0f} s, {len(records)} records"
            note(line)
            print(line, file=sys.stderr, flush=True)

    thread = Thread(target=lines, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def peak_memory(device: torch.device) -> int:
    """Bytes: the most allocated on the GPU, or the most resident in memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def read_ahead(items: Iterable[Any], depth: int) -> Iterator[Any]:
    """The same items, up to `depth` of them made early by a thread; its exceptions are raised here.
    depth 0: no thread."""
    if depth == 0:
        yield from items
        return
    queue: Queue = Queue(depth)
    ended, closed = object(), Event()
    thread = Thread(target=_produce, args=(items, queue, ended, closed), daemon=True)
    thread.start()
    try:
        while True:
            item, error = _take(queue, thread)
            if error is not None:
                raise error
            if item is ended:
                return
            yield item
    finally:
        closed.set()
        thread.join(READER_PATIENCE)  # a thread that still works when Python ends can abort the process


def _take(queue: Queue, thread: Thread) -> tuple[Any, BaseException | None]:
    while True:
        try:
            return queue.get(timeout=1.0)
        except Empty:
            if not thread.is_alive() and queue.empty():
                return None, RuntimeError("the thread that reads data ended without a word")


def _produce(items: Iterable[Any], queue: Queue, ended: object, closed: Event) -> None:
    def put(entry: tuple[Any, BaseException | None]) -> bool:
        while not closed.is_set():
            try:
                queue.put(entry, timeout=0.1)
                return True
            except Full:
                continue
        return False

    try:
        for item in items:
            if not put((item, None)):
                return
        put((ended, None))
    except BaseException as error:
        put((None, error))
