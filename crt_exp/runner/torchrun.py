"""A run that starts its own torchrun: `crt_exp trainer.processes=N ...` is
`torchrun --nproc_per_node=N -m crt_exp ...`.

It also works in sweeps, where each run then is a torchrun of its own, and returns exit codes that
schedulers understand.
"""

import logging
import os
import subprocess
import sys
from pathlib import Path

from crt_exp.runner.invocation import override
from crt_exp.runner.processes import Preempted, StopSignals, end_with_parent


def torchrun(count: int, overrides: list[str], directory: Path) -> None:
    """Runs `crt_exp <overrides>` on `count` processes of this machine, in `directory`.

    A signal to stop is passed on once, and the run's Preempted raised when it has checkpointed. Raises ProcessesFailed
    where a process failed; what went wrong stands above, on standard error. The processes end when this one is killed.
    """
    command = [sys.executable, "-m", "crt_exp.runner.torchrun", str(os.getpid()), "--standalone",
               f"--nproc_per_node={count}", "-m", "crt_exp", *overrides, override("hydra.run.dir", directory)]
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
        raise ProcessesFailed(count, code)


class ProcessesFailed(RuntimeError):
    """A run that was started by torchrun ended with an error;
    `code` is the exit code of the process that failed first."""

    def __init__(self, count: int, code: int):
        super().__init__(f"the run on {count} processes failed; its first error stands above")
        self.code = max(code, 1)


def agent(parent: int, args: list[str]) -> int:
    """torchrun itself, on a process of its own that ends with its parent;
    returns the exit code of the first that failed."""
    end_with_parent(parent)
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
    told = str(record.msg).startswith("failed (exitcode") and isinstance(record.args[0], int) and record.args[0] > 0
    return not told


if __name__ == "__main__":
    sys.exit(agent(int(sys.argv[1]), sys.argv[2:]))
