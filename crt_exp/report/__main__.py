"""python -m crt_exp.report NAME: writes outputs/report/NAME.md, .csv and .png; bench_* print their tables."""

import argparse
import ast
import importlib
import os
import sys
from pathlib import Path

from crt_exp.config import ConfigError, unknown
from crt_exp.data import DataError
from crt_exp.report import writing

SIZES = ("small", "gpu", "full")


def targets() -> dict[str, str]:
    """The modules that define `main(size)`, with the first line of what each says of itself; none is imported."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        if any(takes_size(statement) for statement in module.body):
            found[path.stem] = (ast.get_docstring(module) or "").partition("\n")[0]
    return found


def takes_size(statement: ast.stmt) -> bool:
    """Whether it is `def main(size, ...)`."""
    if not isinstance(statement, ast.FunctionDef) or statement.name != "main":
        return False
    return [argument.arg for argument in statement.args.args][:1] == ["size"]


def target(name: str) -> str:
    """The module of a name, also of one with hyphens. Raises ConfigError for a name of none."""
    known, module = targets(), name.replace("-", "_")
    if module not in known:
        raise unknown("report", name, list(known))
    return module


def main() -> None:
    listed = "\n".join(f"  {name:<18}{line}" for name, line in targets().items())
    parser = argparse.ArgumentParser(prog="python -m crt_exp.report", description=__doc__, epilog=f"names:\n{listed}",
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", metavar="NAME", help="one of those below")
    parser.add_argument("--size", choices=SIZES, default=os.environ.get("SIZE", "small"), help="default %(default)s")
    parser.add_argument("--out", type=Path, default=writing.REPORT, help="folder to write to (default %(default)s)")
    args = parser.parse_args()
    writing.REPORT = args.out
    try:
        importlib.import_module(f"crt_exp.report.{target(args.name)}").main(args.size)
    except (ValueError, OSError, DataError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        print(f"crt_exp.report: error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


if __name__ == "__main__":
    main()
