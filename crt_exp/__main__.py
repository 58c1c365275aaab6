"""Entry point of `python -m crt_exp` and of the console script.

The first argument may be a command (`COMMANDS`); all other arguments describe a run. --version and missing packages are
answered before the imports of the libraries, which take seconds.
"""

import os
import sys
from importlib import import_module
from typing import NoReturn

COMMANDS = {
    "data": "crt_exp.experiments.data.__main__",
    "report": "crt_exp.experiments.report.__main__",
    "infer": "crt_exp.experiments.infer",
    "compare": "crt_exp.experiments.compare",
}
RUNNER = ("hydra", "omegaconf", "yaml")  # packages of the extra `run`


def main() -> None:
    # Class paths may name modules in the working directory, which a console script does not have on its path.
    if os.getcwd() not in map(os.path.realpath, sys.path):
        sys.path.append(os.getcwd())
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command and "=" not in command and command[0] not in "-+~":
        run_command(command, sys.argv[2:])
    if "--version" in sys.argv[1:]:
        from importlib import metadata

        from crt_exp import __version__

        print(f"crt_exp {__version__}, torch {metadata.version('torch')}")
        return
    try:
        from crt_exp.train import main
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in RUNNER:
            raise
        sys.stderr.write(
            f"crt_exp: error: the command line needs {error.name}: pip install 'crt_exp[run]'\n"
        )
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    main()


def run_command(command: str, arguments: list[str]) -> NoReturn:
    """Run a command and exit with its code."""
    if command not in COMMANDS:
        known = ", ".join(COMMANDS)
        sys.stderr.write(
            f"crt_exp: error: unknown command {command!r}; expected key=value, or one of {known}\n"
        )
        sys.exit(2)
    sys.exit(import_module(COMMANDS[command]).main(arguments))


if __name__ == "__main__":
    main()
