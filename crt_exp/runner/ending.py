"""How a run ends early: what is said, by which of its processes, and the exit code.

Codes: 2 for what the user can set right, 3 for a run that diverged, 128 + the signal where one was asked to stop and
left a checkpoint. In a sweep only a signal ends the other runs too.
"""

import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException

from crt_exp.config import ConfigError
from crt_exp.data.ranks import rank
from crt_exp.runner.configuration import in_sweep, output_directory, override, place
from crt_exp.runner.processes import Preempted, clear_when_early, lost_process, take_away
from crt_exp.atomic_write import FULL, reason

ERROR_CODE, DIVERGED_CODE = 2, 3
NO_MEMORY = ("allocate memory", "out of memory", "not enough memory", "Storage size calculation",
             "numel: integer")  # by torch
PATIENCE = 10.0  # seconds: torchrun ends the other processes as soon as one has failed


class Stopped(Exception):
    """A run that ended early with an exit code of its own:
    on all its processes, so that only the first one says it."""

    def __init__(self, message: str, code: int, said: bool = False):
        super().__init__(message)
        self.code, self.said = code, said or rank() > 0


class RunFailed(CompactHydraException):
    """One run of a sweep failed, with this exit code; Hydra says it in the end, without a traceback."""

    code = ERROR_CODE


# ---- from an error to its message ------------------------------------------------------------------------------------


@contextmanager
def mistakes_said() -> Iterator[None]:
    """Ends the run with one message and no traceback where the body stops it or a user's mistake does."""
    from crt_exp.data import DataError

    clear_when_early(output_directory())
    try:
        yield
    except (Preempted, KeyboardInterrupt) as error:
        take_away([output_directory()])
        stopped = interrupted(error)
        end_run(stopped, stopped.code)
    except Stopped as stopped:
        end_run(stopped, stopped.code)
    except (ValueError, OSError, DataError, RuntimeError, MemoryError) as error:
        shown = out_of_memory(error) if isinstance(error, (RuntimeError, MemoryError)) else placed(error)
        if shown is None or os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        take_away([output_directory()])
        if isinstance(error, (OSError, DataError, ConfigError)) and HydraConfig.get().job.chdir:
            shown = ConfigError(f"{shown} (hydra.job.chdir=true: relative paths start from {output_directory()})")
        end_run(shown, ERROR_CODE)


@contextmanager
def ending_together(world) -> Iterator[None]:
    """Makes the body's Preempted and Diverged a Stopped that all processes of `world` raise,
    and closes it at the end."""
    from crt_exp.features.nonfinite import Diverged

    whole = False
    try:
        yield
        whole = True
    except (Preempted, Diverged) as error:
        stopped = interrupted(error) if isinstance(error, Preempted) else Stopped(str(error), DIVERGED_CODE)
        if getattr(error, "alone", False):
            tell_alone(stopped)
        else:
            tell(stopped)
            world.barrier()  # torchrun ends all processes when one has ended: the first must have spoken
        raise stopped from None
    except RuntimeError as error:
        if world.size > 1 and lost_process(error):
            reason = str(error).splitlines()[0]
            raise Stopped(f"process {rank()} cannot go on, for another is gone: {reason}", 1) from None
        raise
    finally:
        if world.size == 1 or whole:
            world.close()


def refuse_together(problem: str, world) -> None:
    """Ends all processes with what the first one could not do."""
    refused = Stopped(f"error: {problem}", ERROR_CODE)
    tell(refused)
    take_away([output_directory()])
    world.barrier()
    raise refused


def out_of_memory(error: Exception) -> Exception | None:
    """The message for tensors that this machine cannot hold; None for an error of another kind."""
    if not isinstance(error, MemoryError) and not any(sign in str(error) for sign in NO_MEMORY):
        return None
    asked = re.search(r"allocate (\d+) bytes", str(error))
    first = (str(error).splitlines() or ["MemoryError"])[0][:200]
    size = f"{int(asked[1]) / 2**30:.1f} GiB were asked for" if asked else first
    return ConfigError(f"out of memory: {size}; choose a smaller features.m, trainer.batch (larger "
                       "trainer.accumulate) or task")


def placed(error: Exception) -> Exception:
    """Of a full disk with the run directory, where the error names no file: it is what a run writes to."""
    if isinstance(error, OSError) and error.errno in FULL and error.filename is None:
        return OSError(f"{output_directory()} cannot be written: {reason(error)}")
    return error


def interrupted(error: Preempted | KeyboardInterrupt) -> Stopped:
    """What ends a run that was asked to stop, with the words that continue it, as a shell takes them."""
    name, code = (str(error), error.code) if isinstance(error, Preempted) else ("SIGINT", 128 + signal.SIGINT)
    return Stopped(f"stopped by {name}; continue with resume=auto {shlex.quote(override(*place()))}", code)


# ---- from a message to the end ---------------------------------------------------------------------------------------


_said: set[str] = set()  # the errors of a sweep's runs


def end_run(error: Exception, code: int) -> None:
    """Says an error and exits; in a sweep only a signal ends the other runs too."""
    if not in_sweep() or code >= 128:
        fail(error, code)
    if "SUBMITIT_EXECUTOR" in os.environ:  # what a job prints goes to a file of its own
        raise failed(story(error), code) from None
    if not getattr(error, "said", False):
        say(f"crt_exp: the run in {output_directory()} failed: {'as one before it' if str(error) in _said else error}")
    _said.add(str(error))
    raise failed("a run of this sweep failed; its error stands above", code) from None


def failed(message: str, code: int) -> RunFailed:
    error = RunFailed(message)
    error.code = code
    return error


def fail(error: Exception, code: int = ERROR_CODE) -> None:
    """Says an error and exits."""
    tell(error)
    sys.exit(code)


def tell(error: Exception) -> None:
    """One message. Most errors occur on every process: the others give the first one time to say it."""
    if isinstance(error, Stopped):
        if not error.said:
            say(f"crt_exp: {story(error)}")
        error.said = True
        return
    if rank() > 0:
        time.sleep(PATIENCE)
    say(f"crt_exp: error{f' on process {rank()}' if rank() else ''}: {story(error)}")


def tell_alone(stopped: Stopped) -> None:
    """What other processes may not know of, or find for themselves: the first one's word comes first."""
    if rank() > 0:
        time.sleep(PATIENCE)
        stopped.said = False
    tell(stopped)


def story(error: Exception) -> str:
    """The message; of a sweep's run that failed, with its directory."""
    told_to_stop = isinstance(error, Stopped) and error.code >= 128
    return f"the run in {output_directory()} failed: {error}" if in_sweep() and not told_to_stop else str(error)


def say(text: str) -> None:
    with suppress(OSError):  # the terminal may be gone (SIGHUP)
        print(text, file=sys.stderr, flush=True)
