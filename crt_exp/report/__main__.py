"""python -m crt_exp.report NAME: writes outputs/report/NAME.md, .csv and .png; bench_* print their tables."""

import argparse
import ast
import importlib
import inspect
import os
import signal
import sys
from collections.abc import Callable, Sequence
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


def options_of(report: str, function: Callable[..., None], words: Sequence[str]) -> dict[str, str]:
    """KEY=VALUE for the keyword-only parameters of a report's `main`. Raises ConfigError for other words."""
    known = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    found = {}
    for word in words:
        key, _, value = word.partition("=")
        if not known:
            raise ConfigError(f"{word}: the report {report} takes no options")
        if key not in known:
            raise unknown(f"option of the report {report}", key, known)
        if not value or key in found:
            raise ConfigError(f"{word}: {f'{key} comes twice' if key in found else f'write {key}=VALUE'}")
        found[key] = value
    return found


def main() -> None:
    listed = "\n".join(f"  {name:<18}{line}" for name, line in targets().items())
    parser = argparse.ArgumentParser(prog="python -m crt_exp.report", description=__doc__, epilog=f"names:\n{listed}",
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", metavar="NAME", help="one of those below")
    parser.add_argument("options", metavar="KEY=VALUE", nargs="*", help="of reports that take some: attention-maps")
    parser.add_argument("--size", choices=SIZES, default=os.environ.get("SIZE", "small"), help="default %(default)s")
    parser.add_argument("--out", type=Path, default=writing.REPORT, help="folder to write to (default %(default)s)")
    args = parser.parse_args()
    writing.REPORT = args.out
    try:
        report = importlib.import_module(f"crt_exp.report.{target(args.name)}")
        report.main(args.size, **options_of(args.name, report.main, args.options))
    except (ValueError, OSError, DataError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        print(f"crt_exp.report: error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        writing.end_workers()
        print("crt_exp.report: stopped by SIGINT; cells that are computed are kept, and the same command goes on",
              file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
