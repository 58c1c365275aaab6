"""Entry point of `python -m crt_exp` and of the console script.

Answers --version and reports missing packages before the imports of the libraries, which take seconds.
"""

import os
import sys

RUNNER = ("hydra", "omegaconf", "yaml")  # packages of the extra `run`


def main() -> None:
    # Class paths may name modules in the working directory, which a console script does not have on its path.
    if os.getcwd() not in map(os.path.realpath, sys.path):
        sys.path.append(os.getcwd())
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


if __name__ == "__main__":
    main()
