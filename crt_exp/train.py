"""The command line: compose and check a configuration, then run its task.

Errors in the configuration are reported before anything is written.
"""

import sys

# before the imports below: __main__ reports import errors and ^C in one line
if __name__ == "__main__":
    import os
    import runpy

    if not __package__:  # run as a file: its folder on sys.path would hide other modules
        sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
        paths = [sys.path[0], os.environ.get("PYTHONPATH")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # for subprocesses

    runpy.run_module("crt_exp", run_name="__main__", alter_sys=True)
    sys.exit()

import signal

from crt_exp.experiments.data import world_size
from crt_exp.experiments.runner.command_line import check_command_line, with_file_names
from crt_exp.experiments.runner.configuration import folders
from crt_exp.experiments.runner.exit_handling import (
    FAILED_RUN_CODE,
    Stopped,
    exit_process,
    fail,
    report_errors,
)
from crt_exp.experiments.runner.fit import execute
from crt_exp.experiments.runner.run import agree_on_start
from crt_exp.experiments.runner.sweep import BASIC, PLUGINS, UsedOptionsSweeper, show
from crt_exp.optional import HideBeforeTransformers
from crt_exp.registry import CONF, ConfigError, own_names


def main() -> None:
    """Run the command line, in one process or in every process of torchrun."""
    import hydra

    sys.meta_path.insert(0, HideBeforeTransformers)
    if world_size() > 1:
        agree_on_start()
    try:
        sys.argv[1:] = with_file_names(sys.argv[1:])
        if text := check_command_line(sys.argv[1:]):
            print(text, end="")
            return
    except ConfigError as error:
        fail(error)
    PLUGINS[BASIC] = UsedOptionsSweeper  # Hydra's basic sweeper
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(run)()
    except KeyboardInterrupt:  # between two runs of a sweep
        fail(Stopped("stopped by SIGINT", 128 + signal.SIGINT), 128 + signal.SIGINT)
    finally:
        has_failed = show_sweep()
    if has_failed:
        sys.exit(FAILED_RUN_CODE)
    if world_size() > 1:
        exit_process()


def run(cfg) -> float | None:
    """Run one composed configuration; return the task's metric for Hydra sweeps.

    Only the first process returns a metric; the others return None.
    """
    with report_errors(), own_names(folders()):
        return execute(cfg)


def show_sweep() -> bool:
    """Print the table of a finished sweep; return whether a run failed."""
    try:
        return show()
    except (ConfigError, OSError) as error:
        fail(error)
