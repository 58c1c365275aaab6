"""python -m crt_exp.report NAME: writes outputs/report/NAME.md, .csv and .png."""

import argparse
import importlib
import os
import pkgutil
import sys
from pathlib import Path

import crt_exp.report
from crt_exp.data import DataError
from crt_exp.report import writing

SIZES = ("small", "gpu", "full")


def main() -> None:
    modules = {m.name for m in pkgutil.iter_modules(crt_exp.report.__path__)}
    names = sorted(modules - {"__main__", "tiny_models", "writing"})
    parser = argparse.ArgumentParser(prog="python -m crt_exp.report", description=__doc__)
    parser.add_argument("name", choices=names)
    parser.add_argument("--size", choices=SIZES, default=os.environ.get("SIZE", "small"))
    parser.add_argument("--out", type=Path, default=writing.REPORT, help="folder to write to (default %(default)s)")
    args = parser.parse_args()
    writing.REPORT = args.out
    try:
        importlib.import_module(f"crt_exp.report.{args.name}").main(args.size)
    except (ValueError, OSError, DataError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        sys.exit(f"crt_exp.report: error: {error}")


if __name__ == "__main__":
    main()
