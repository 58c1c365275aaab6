"""One run on one or many processes: who takes part, what they agree on, how they are told to stop, and how torchrun is started.

`torchrun --nproc_per_node=N -m crt_exp ...` and `python -m crt_exp trainer.processes=N ...` do the same; the second also works
in sweeps, where each run then is a torchrun of its own, and returns exit codes that schedulers understand.
"""

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

STEP_LIMIT = 120.0  # seconds that a step of one of several processes may take to end after a signal
STARTED = "CRT_EXP_STARTED"  # the time in the name of the run directory, agreed on by all processes


def rank() -> int:
    """This process's number under torchrun, known before torch is imported; 0 without."""
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def inside_torchrun() -> bool:
    return "LOCAL_RANK" in os.environ


def agree_on_start() -> None:
    """Gives all processes the clock of the first one, so that a time-stamped run directory has one name."""
    if world_size() == 1:
        return
    from torch.distributed import rendezvous

    store, own, _ = next(iter(rendezvous("env://")))
    if own == 0:
        store.set(STARTED, datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f"))
    os.environ[STARTED] = store.get(STARTED).decode()


def leave() -> None:
    """Ends one of several processes that has done all it had to do, without taking Python and the libraries down.

    The threads of a process group outlive it where a DDP or FSDP model used it (torch 2.12). Seen once: a process aborted while
    Python ended, and torchrun counted a run that was whole as failed.
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

        found = [None] * self.size
        dist.all_gather_object(found, value)
        return found

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
    """The run was told to stop, and left a checkpoint. `code` is 128 + the signal: 143 for SIGTERM, 130 for SIGINT."""

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.code = 128 + signum


def stop_signals() -> tuple[int, int]:
    """What tells a run to stop. A submitit job is told by SIGUSR2, and its SIGTERM is only a companion of that."""
    return (signal.SIGUSR2 if "SUBMITIT_EXECUTOR" in os.environ else signal.SIGTERM), signal.SIGINT


class StopSignals:
    """SIGTERM and SIGINT, remembered until the step is done. Within `interruptible` they raise Preempted at once.

    on_stop is called with the first signal. Torchrun repeats a signal that its children already got, so only a SIGINT more than a
    second after another one stops at once without a checkpoint. When a run ends by Preempted, submitit's own handler is called
    in the end: it queues the run again.
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
        """Takes away the time limit that a signal puts on the step under way: it cannot end where another process is gone."""
        self.limit.cancel()

    def __exit__(self, kind, error, trace) -> None:
        self.step_ended()
        ending = kind is not None and issubclass(kind, Preempted)
        for signum, handler in self.previous.items():  # torchrun's copy of the signal must not cut the last lines
            signal.signal(signum, signal.SIG_IGN if ending and inside_torchrun() else handler)
        if ending and self.signum == signal.SIGUSR2 and callable(self.previous.get(self.signum)):
            self.previous[self.signum](self.signum, None)


# ---- a run that starts its own torchrun -------------------------------------------------------------------------------


def torchrun(count: int, overrides: list[str], directory: Path) -> None:
    """Runs `crt_exp <overrides>` on `count` processes of this machine, in `directory`.

    A signal to stop is passed on once, and the run's Preempted raised when it has checkpointed. Raises ProcessesFailed where a
    process failed; what went wrong stands above, on standard error.
    """
    run_dir = str(directory).replace("\\", "\\\\").replace("'", "\\'")
    command = [sys.executable, "-m", "crt_exp.processes", "--standalone", f"--nproc_per_node={count}", "-m", "crt_exp",
               *overrides, f"hydra.run.dir='{run_dir}'"]
    env = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600", **os.environ}  # seconds that a checkpoint may take
    env.pop("SUBMITIT_EXECUTOR", None)  # the processes are told by SIGTERM
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
        raise ProcessesFailed(f"the run on {count} processes failed; its first error stands above", code if code > 0 else 1)


def launch() -> None:
    """torchrun itself, with the exit code of the process that failed first and without the traceback that tells of it."""
    from logging import CRITICAL, getLogger

    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    getLogger("torch.distributed.elastic").setLevel(CRITICAL)
    try:
        run.main(sys.argv[1:])
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        sys.exit(first.exitcode if first.exitcode > 0 else 1)


class ProcessesFailed(RuntimeError):
    """A run that was started by torchrun ended with an error; `code` is that of the process that failed first."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


if __name__ == "__main__":
    launch()
