"""The processes of a run, one or many: who takes part, what they agree on, and how they are asked to stop.

Imports here are quick: __main__ uses this module before the libraries, whose imports take seconds.
"""

import atexit
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from crt_exp.data.ranks import inside_torchrun, rank, world_size

STEP_LIMIT = 120.0  # seconds that a step of one of several processes may take to end after a signal
STARTED = "CRT_EXP_STARTED"  # the time in the name of the run directory, agreed on by all processes
SWEEP = "CRT_EXP_SWEEP"  # the sweep that a run belongs to: the name of its directory, and one of its own


def agree_on_start() -> None:
    """Gives all processes the clock of the first one, so that a time-stamped run directory has one name."""
    if world_size() == 1:
        return
    from torch.distributed import rendezvous

    store, own, _ = next(iter(rendezvous("env://")))
    if own == 0:
        store.set(STARTED, datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f"))
    os.environ[STARTED] = store.get(STARTED).decode()


def sweep_name() -> str | None:
    """The name of the directory of the sweep that this run belongs to."""
    return os.environ.get(SWEEP, "").rpartition("/")[0] or None


def leave() -> None:
    """Ends one of several processes that has done all it had to do, without taking Python and the libraries down.

    The threads of a process group outlive it where a DDP or FSDP model used it (torch 2.12). Seen once: a process
    aborted while Python ended, and torchrun counted a run that was whole as failed.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


class World:
    """The processes of a run, set up by accelerate from the environment that torchrun made; close it at the end.

    precision: no, bf16 or fp16; cpu: use no accelerator even where there is one; unused: DDP's find_unused_parameters.
    """

    def __init__(self, precision: str = "no", cpu: bool = False, unused: bool = False):
        import torch
        from accelerate import Accelerator, DistributedDataParallelKwargs

        cpu = cpu or not torch.accelerator.is_available()
        self.accelerator = Accelerator(cpu=cpu, mixed_precision=precision,
                                       kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=unused)])
        self.rank, self.size = self.accelerator.process_index, self.accelerator.num_processes
        self.device = self.accelerator.device
        self.main = self.rank == 0

    def broadcast(self, value: Any) -> Any:
        """What the first process passed, on all of them."""
        if self.size == 1:
            return value
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, device=self.device)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """What each process passed, in the order of ranks, on all of them."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def sum(self, tensor):
        """Summed over all processes, in place."""
        if self.size > 1:
            import torch.distributed as dist

            dist.all_reduce(tensor)
        return tensor

    def barrier(self) -> None:
        self.accelerator.wait_for_everyone()

    def close(self) -> None:
        """Leaves the group and forgets accelerate's state, so that another run of a sweep may set up its own."""
        from accelerate.state import AcceleratorState, GradientState

        self.accelerator.free_memory()  # the model, which the accelerator would keep
        self.accelerator.end_training()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def lost_process(error: RuntimeError) -> bool:
    """Whether gloo or NCCL says that another process ended in the middle of an exchange."""
    return any(words in str(error) for words in ("closed by peer", "Connection reset", "remote process exited"))


class Preempted(Exception):
    """The run was asked to stop, and left a checkpoint. `code` is 128 + the signal: 143 for SIGTERM, 130 for SIGINT."""

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.code = 128 + signum


def stop_signals() -> list[int]:
    """What asks a run to stop; what it was started to ignore (nohup, a shell's &) stays ignored.

    A submitit job gets SIGUSR2, and its SIGTERM is only a companion of that. SIGHUP: the terminal is gone.
    """
    asking = signal.SIGUSR2 if "SUBMITIT_EXECUTOR" in os.environ else signal.SIGTERM
    return [s for s in (asking, signal.SIGINT, signal.SIGHUP) if signal.getsignal(s) is not signal.SIG_IGN]


class StopSignals:
    """SIGTERM, SIGHUP and SIGINT, remembered until the step is done.
    Within `interruptible` they raise Preempted at once.

    on_stop is called with the first signal. Torchrun repeats a signal that its children already got, so only a SIGINT
    more than a second after another one stops at once without a checkpoint. When a run ends by Preempted, submitit's
    own handler is called in the end: it queues the run again.
    """

    def __init__(self, on_stop: Callable[[], Any] = lambda: None):
        self.signum: int | None = None
        self.interruptible = False
        self.first, self.on_stop = 0.0, on_stop
        self.limit = threading.Timer(STEP_LIMIT, os._exit, [128 + signal.SIGTERM])
        self.limit.daemon = True
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self.previous = {s: signal.signal(s, self.handle) for s in stop_signals()}
        return self

    def handle(self, signum: int, frame: Any) -> None:
        if self.signum is None:
            self.signum, self.first = signum, time.monotonic()
            self.on_stop()
            if inside_torchrun():
                self.limit.start()
        elif signum == signal.SIGINT and time.monotonic() > self.first + 1:
            raise KeyboardInterrupt
        if self.interruptible:
            self.interruptible = False
            raise Preempted(signum)

    def step_ended(self) -> None:
        """Takes away the time limit that a signal puts on the step under way:
        it cannot end where another process is gone."""
        self.limit.cancel()

    def __exit__(self, kind, error, trace) -> None:
        self.step_ended()
        ending = kind is not None and issubclass(kind, Preempted)
        for signum, handler in self.previous.items():  # torchrun's copy of the signal must not cut the last lines
            signal.signal(signum, signal.SIG_IGN if ending and inside_torchrun() else handler)
        if ending and self.signum == signal.SIGUSR2 and callable(self.previous.get(self.signum)):
            self.previous[self.signum](self.signum, None)


# ---- ^C before there is anything to save -----------------------------------------------------------------------------

_made: list[Path] = []  # directories that an early end takes away where they are empty


def catch_interrupts() -> None:
    """Makes ^C end this process at once with one line, until `raise_interrupts`:
    a library's import may do anything with it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored
        signal.signal(signal.SIGINT, end_early)


def raise_interrupts() -> None:
    """Makes ^C a KeyboardInterrupt again: from here on there is something to put in order."""
    if signal.getsignal(signal.SIGINT) is end_early:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def clear_when_early(directory: Path) -> None:
    """An early end leaves no such directory behind where it is empty."""
    _made.append(directory)


def take_away(directories: Iterable[Path]) -> None:
    """Removes those that are empty; the first process alone does."""
    for directory in directories if rank() == 0 else ():
        with suppress(OSError):  # not empty, or not there
            directory.rmdir()


def end_early(*unused: Any) -> None:
    take_away(_made)
    if rank() == 0:
        os.write(2, b"crt_exp: stopped by SIGINT before the run began\n")
    os._exit(128 + signal.SIGINT)


# ---- a torchrun of its own -------------------------------------------------------------------------------------------


def torchrun(count: int, overrides: list[str]) -> None:
    """Runs `crt_exp <overrides>` on `count` processes of this machine: torchrun --nproc_per_node=<count> -m crt_exp ...

    In a sweep each run is a torchrun of its own. A signal to stop is passed on once, and the run's Preempted raised
    when it has checkpointed. Raises ProcessesFailed where a process failed; what went wrong stands above, on standard
    error.
    """
    command = [sys.executable, "-m", "crt_exp.runner.processes", "--standalone", f"--nproc_per_node={count}",
               "-m", "crt_exp", *overrides]
    env = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600", **os.environ}  # seconds that a checkpoint may take
    env.pop("SUBMITIT_EXECUTOR", None)  # the processes get a SIGTERM
    child = subprocess.Popen(command, env=env, start_new_session=True)  # the terminal's ^C reaches it once, through us
    try:
        with StopSignals(child.terminate) as signals:
            code = child.wait()
            if code and signals.signum:
                raise Preempted(signals.signum)
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait()
    if code:
        raise ProcessesFailed(count, code)


class ProcessesFailed(RuntimeError):
    """A run that was started by torchrun ended with an error;
    `code` is the exit code of the process that failed first."""

    def __init__(self, count: int, code: int):
        super().__init__(f"the run on {count} processes failed; its first error stands above")
        self.code = max(code, 1)


def agent(args: list[str]) -> int:
    """torchrun itself, on a process of its own; returns the exit code of the first process that failed."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    for name in ("agent.server.api", "multiprocessing.api"):  # their warnings tell how a signal is passed on
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.ERROR)
        logging.getLogger(f"torch.distributed.elastic.{name}").addFilter(says_more)
    try:
        main(args)
    except ChildFailedError as error:  # its account of the exit codes says nothing that the processes did not say
        return max(error.get_first_failure()[1].exitcode, 1)
    except SignalException as error:
        return 128 + error.sigval
    return 0


def says_more(record: logging.LogRecord) -> bool:
    """Whether torchrun's word on a process says more than the process did: one that was killed could say nothing."""
    known = str(record.msg).startswith("failed (exitcode") and isinstance(record.args[0], int) and record.args[0] > 0
    return not known


if __name__ == "__main__":
    sys.exit(agent(sys.argv[1:]))
