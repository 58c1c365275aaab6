"""The board, rendered and checked.

    python -m crt_exp.probes.board_check             renders outputs/board/board.md of the rows beside it
    python -m crt_exp.probes.board_check --check     measures again each row whose model is the same file here
"""

import argparse
import sys
from pathlib import Path

from crt_exp.data import DataError
from crt_exp.probes.board import digest_of, measured
from crt_exp.probes.board_rows import FOLDER, BoardRow, render, rows

ROUNDING = 1e-3          # nats by which processors and libraries differ


def differs(row: BoardRow, again: BoardRow) -> list[str]:
    """What another measurement of the same file of the model does not reproduce to within the row's interval."""
    said = []
    for name in ("new", "repeated"):
        off = abs(again[name]["mean"] - row[name]["mean"])
        if not off <= max(row[name]["ci95"], ROUNDING):
            said.append(f"{row['method']}: {name} text has {again[name]['mean']:.4f} nats, and the row says "
                        f"{row[name]['mean']:.4f} ± {row[name]['ci95']:.4f}")
    return said


def check(folder: Path = FOLDER) -> list[str]:
    """Measures the rows of a folder again, without times; says which cannot be, and returns what differs."""
    said = []
    for path, row in rows(folder).items():
        try:
            if digest_of(row["model"]) != row["sha256"]:
                raise DataError(f"{row['model']} is another file here")
            again = measured(row["method"], row["model"], row["length"], len(row["new"]["above"]))
        except DataError as error:
            print(f"{path.name}: not measured: {str(error).splitlines()[0]}")
            continue
        different = differs(row, again)
        print(f"{path.name}: {'; '.join(different) or 'reproduced'}", flush=True)
        said += different
    return said


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m crt_exp.probes.board_check", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="measure again, and fail where a row is not reproduced")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the rows, default %(default)s")
    args = parser.parse_args()
    try:
        failed = check(args.folder) if args.check else print(f"written: {render(args.folder)}")
    except (ValueError, OSError) as error:
        print(f"crt_exp.probes.board_check: error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
