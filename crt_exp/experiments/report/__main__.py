"""Render result pages from their committed rows; --run makes missing rows.

`python -m crt_exp report PAGE` renders a page of crt_exp/experiments/papers/ or a file such as mine/page.py. Without
PAGE it renders all pages, results.md and index.md.

The rows of a page are in outputs/report/<page>.csv; the page is <page>.md and <page>.png in the same folder. With
--run, finished runs are skipped and interrupted runs continue.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from crt_exp.experiments.data import DataError
from crt_exp.experiments.report import pages
from crt_exp.experiments.report.rows import FOLDER
from crt_exp.registry import ConfigError, own_names, written_folder


def main(arguments: Sequence[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    try:
        with own_names([args.config_dir] if args.config_dir else []):
            make(args)
    except (ValueError, OSError, DataError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        print(f"crt_exp report: error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        print("crt_exp report: stopped by SIGINT; repeat the command to continue", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def make(args: argparse.Namespace) -> None:
    args.out = args.out and written_folder(args.out, "--out")
    if args.page is None:
        render_all(args.out or pages.folder_of(args.size), args.size)
        return
    module = pages.load(args.page)
    page, folder = (
        module.page,
        args.out or pages.folder_of(args.size, bool(args.methods or args.seeds)),
    )
    pages.check(page)
    part = " ".join(
        [f'--methods "{args.methods}"'] * bool(args.methods)
        + [f"--seeds {args.seeds}"] * bool(args.seeds)
    )
    if args.run or part:
        wanted = args.page if args.page in page.targets else ""
        page.run(
            args.size,
            wanted,
            [each.strip() for each in args.methods.split(",") if each.strip()],
            args.seeds,
            args.launcher,
            args.out,
        )
    pages.render(module, folder, args.size, part)
    print(f"{pages.first_table(module, folder, part)}\n\nwritten: {folder / page.name}.md")


def render_all(folder: Path, size: str) -> None:
    """Render all pages that have rows, then results.md and index.md.

    results.md and index.md need the rows of all pages; without them they are not written.
    """
    from crt_exp.experiments.papers import results

    tested = {}
    for name in pages.names():
        if pages.has_rows(name, folder):
            tested[name] = pages.render(pages.load(name), folder, size)
            print(f"written: {folder / name}.md", flush=True)
    if missing := [name for name in pages.names() if name not in tested]:
        print(f"results.md and index.md not written: no rows of {', '.join(missing)}")
        return
    results.write(folder, tested)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m crt_exp report",
        description=__doc__.splitlines()[0],
        epilog=f"pages: {', '.join(pages.names())}",
    )
    made.add_argument(
        "page",
        metavar="PAGE",
        nargs="?",
        help="a page, one of its sweeps (table1, fig2), or a file",
    )
    made.add_argument("--run", action="store_true", help="make the rows that are missing")
    made.add_argument(
        "--size",
        choices=pages.SIZES,
        default=os.environ.get("SIZE", "small"),
        help="small, or full: the papers' setting (default: %(default)s)",
    )
    made.add_argument(
        "--methods",
        default="",
        help=f'only these, "exact, favorpp m=64"; the page goes to {FOLDER}/part',
    )
    made.add_argument("--seeds", type=int, default=0, help="only the first seeds")
    made.add_argument(
        "--launcher",
        default="basic",
        help="of Hydra: basic, joblib, submitit_local, submitit_slurm",
    )
    made.add_argument("--out", help=f"folder (default: {FOLDER})")
    made.add_argument(
        "--config-dir", help="a folder of your own configuration, as of python -m crt_exp"
    )
    return made


if __name__ == "__main__":
    main()
