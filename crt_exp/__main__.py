"""`python -m crt_exp` and the console script: what must be there before the libraries, whose imports take seconds."""

import os
import sys

RUNNER = ("hydra", "omegaconf", "yaml")  # of the extra `run`


def main() -> None:
    if os.getcwd() not in map(os.path.realpath, sys.path):  # of the script, which Python looks beside
        sys.path.append(os.getcwd())                          # what names of one's own stand for, as with -m
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
        sys.stderr.write(f"crt_exp: error: the command line needs {error.name}: pip install 'crt_exp[run]'\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    main()


if __name__ == "__main__":
    main()
