"""The command line: compose a configuration, check it, run its task, write its results.

Everything that a user can get wrong in the configuration is refused before anything is written, in a few lines.
"""

import sys

if __name__ == "__main__":  # before the libraries' imports: __main__ has words for what they raise, and for ^C
    import os

    if not __package__:  # run as a file, whose folder Python puts on the path: config, data, kernels would hide others'
        folder = os.path.dirname(os.path.realpath(__file__))
        root = os.path.dirname(folder)
        sys.path[:] = [path for path in sys.path if os.path.realpath(path) != folder]
        if root not in map(os.path.realpath, sys.path):
            sys.path.insert(0, root)
            given = os.environ.get("PYTHONPATH")  # of the processes that a run starts
            os.environ["PYTHONPATH"] = os.pathsep.join([root, given] if given else [root])
    import runpy

    runpy.run_module("crt_exp", run_name="__main__", alter_sys=True)
    sys.exit()

import signal

from crt_exp.config import CONF, ConfigError, own_names
from crt_exp.data import world_size
from crt_exp.runner.command_line import check_command_line, with_file_names
from crt_exp.runner.configuration import folders
from crt_exp.runner.exit_handling import Stopped, errors_reported, fail, leave
from crt_exp.runner.fit import build, fit
from crt_exp.runner.run import agree_on_start
from crt_exp.runner.sweep import show


def main() -> None:
    """The console script `crt_exp`, `python -m crt_exp` and this file, alone or on every process of a torchrun."""
    import hydra

    agree_on_start()
    try:
        sys.argv[1:] = with_file_names(sys.argv[1:])
        if text := check_command_line(sys.argv[1:]):
            print(text, end="")
            return
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
    with errors_reported(), own_names(folders()):
        task, mechanism = build(cfg)
        return fit(cfg, task, mechanism)


def show_sweep() -> None:
    """Prints the table of a sweep that has ended."""
    try:
        show()
    except (ConfigError, OSError) as error:
        fail(error)
