"""The command line: compose a configuration, check it, run its task, write its results.

Everything that a user can get wrong in the configuration is refused before anything is written, in a few lines.
"""

import signal
import sys

from crt_exp.config import CONF, ConfigError, own_names
from crt_exp.ranks import world_size
from crt_exp.runner.command_line import check_command_line, with_file_names
from crt_exp.runner.configuration import folders, local
from crt_exp.runner.ending import Stopped, fail, mistakes_said
from crt_exp.runner.fit import build, fit, fit_on_processes, starts_processes
from crt_exp.runner.processes import agree_on_start, leave
from crt_exp.runner.sweep import show


def main() -> None:
    """The console script `crt_exp` and `python -m crt_exp`, alone or on every process of a torchrun."""
    import hydra

    agree_on_start()
    try:
        sys.argv[1:] = with_file_names(sys.argv[1:])
        check_command_line(sys.argv[1:])
    except ConfigError as error:
        fail(error)
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(run)()
    except KeyboardInterrupt:  # between the runs of a sweep
        fail(Stopped("stopped by SIGINT", 128 + signal.SIGINT), 128 + signal.SIGINT)
    finally:
        show_sweep()
    if world_size() > 1:
        leave()


def run(cfg) -> float | None:
    """One run of the composed configuration; returns the task's metric for sweeps (None on processes but the first)."""
    with mistakes_said(), own_names(local(folders())):
        task, mechanism = build(cfg)
        if starts_processes(cfg, task):
            del task, mechanism  # each process builds its own
            return fit_on_processes(cfg)
        return fit(cfg, task, mechanism)


def show_sweep() -> None:
    """Prints the table of a sweep that has ended."""
    try:
        show()
    except (ConfigError, OSError) as error:
        fail(error)
