"""Early ends of a run: signals, error messages and exit codes.

Exit codes: 2 for errors that the user can correct; 3 for a run that diverged; 128 + signal for a run that was stopped
and left a checkpoint. In a sweep only signals end the other runs too.
"""

import atexit
import os
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from hydra.errors import CompactHydraException

from crt_exp.experiments.data import DataError, inside_torchrun, rank
from crt_exp.experiments.runner.configuration import (
    directory_override,
    is_sweep,
    output_directory,
    override,
)
from crt_exp.registry import ConfigError, user_message

FAILED_RUN_CODE = 1  # of a sweep
ERROR_CODE = 2
DIVERGED_CODE = 3
NO_MEMORY = (
    "allocate memory",
    "out of memory",
    "not enough memory",
    "Storage size calculation",
    "numel: integer",
)


class Stopped(Exception):
    """A run ended early, with its own exit code."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


# ---- signals


def stop_error(signum: int) -> Stopped:
    """Return the error of a run stopped by a signal, with the command to continue."""
    words = shlex.quote(override(*directory_override()))
    return Stopped(
        f"stopped by {signal.Signals(signum).name}; continue with resume=auto {words}", 128 + signum
    )


@dataclass
class StopSignals:
    """Remember a stop signal until the step is done.

    torchrun repeats signals that its children have already received. Therefore only a SIGINT more than one second after
    another signal stops without a checkpoint. Signals that the parent ignores stay ignored (nohup, a shell's &). Slurm
    scripts announce the time limit by SIGUSR1. A submitit job stops on SIGUSR2, not on the SIGTERM that accompanies it;
    submitit's handler queues the run again at the end.
    """

    signum: int | None = None
    first: float = 0.0  # time of the first signal
    previous: dict[int, Any] = field(default_factory=dict)  # handlers

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            asking = signal.SIGUSR2 if "SUBMITIT_EXECUTOR" in os.environ else signal.SIGTERM
            for signum in (asking, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    self.previous[signum] = signal.signal(signum, self.handle)
        return self

    def handle(self, signum: int, frame: Any) -> None:
        if self.signum is None:
            self.signum = signum
            self.first = time.monotonic()
        elif signum == signal.SIGINT and time.monotonic() > self.first + 1:
            raise KeyboardInterrupt

    def __exit__(self, kind, error, trace) -> None:
        ending = isinstance(error, Stopped) and error.code > 128
        for signum, handler in self.previous.items():
            if ending and inside_torchrun():
                handler = signal.SIG_IGN  # torchrun's copy of the signal must not cut the output
            signal.signal(signum, handler)
        if ending and self.signum in (signal.SIGUSR1, signal.SIGUSR2):
            queue_again = self.previous[self.signum]
            if callable(queue_again):
                queue_again(self.signum, None)


# ---- error messages and exit


@contextmanager
def report_errors() -> Iterator[None]:
    """End the run with one message, without traceback, for user errors and signals."""
    try:
        yield
    except KeyboardInterrupt:
        end_run(stop_error(signal.SIGINT), 128 + signal.SIGINT)
    except Stopped as stopped:
        end_run(stopped, stopped.code)
    except (ValueError, OSError, DataError, RuntimeError, MemoryError, ImportError) as error:
        message = user_message(error)
        if isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY):
            reason = " ".join(str(error).split())[:200]
            message = f"out of memory: {reason}; choose a smaller features.m, trainer.batch or task"
        if message is None or os.environ.get("HYDRA_FULL_ERROR") == "1":
            wait_for_first_error()
            if is_sweep():  # its end lists only the last line
                traceback.print_exc()
            raise
        end_run(ConfigError(message), ERROR_CODE)


def end_run(error: Exception, code: int) -> None:
    """Print an error and exit; in a sweep only a signal ends the other runs."""
    if rank() == 0:
        with suppress(OSError):  # not empty, or missing
            output_directory().rmdir()
    if not is_sweep() or code > 128:
        fail(error, code)
    message = f"the run in {output_directory()} failed: {error}"
    print(f"crt_exp: {message}", file=sys.stderr, flush=True)
    failed = CompactHydraException(message)
    failed.code = code
    raise failed from None


def fail(error: Exception, code: int = ERROR_CODE) -> None:
    """Print an error and exit."""
    if code <= 128:
        wait_for_first_error()
    kind = "error: "
    if isinstance(error, Stopped):
        kind = ""
    elif rank():
        kind = f"error on process {rank()}: "
    with suppress(OSError):  # the terminal may be closed (SIGHUP)
        if rank() == 0 or code <= 128:
            print(f"crt_exp: {kind}{error}", file=sys.stderr, flush=True)
    sys.exit(code)


def wait_for_first_error() -> None:
    """Wait, so that the first process prints its error before torchrun ends all.

    Most errors occur on every process.
    """
    if rank():
        time.sleep(10)


def exit_process() -> None:
    """Exit a process of several without Python's cleanup.

    Threads of a process group can abort Python's own exit (torch 2.12).
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
