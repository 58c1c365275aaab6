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
from crt_exp.experiments.report import pages, rendering
from crt_exp.experiments.report.rows import FOLDER, has_rows
from crt_exp.registry import ConfigError, own_names


def main(arguments: Sequence[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    try:
        with own_names([args.config_dir] if args.config_dir else []):
            make_pages(args)
    except (ValueError, OSError, DataError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        print(f"crt_exp report: error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        print("crt_exp report: stopped by SIGINT; repeat the command to continue", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def make_pages(args: argparse.Namespace) -> None:
    """Render the page that the arguments name, or all; with --run, make its rows first."""
    out = args.out and Path(args.out).expanduser()
    if args.page is None:
        render_all(out or pages.folder_of(args.size), args.size)
        return
    page = pages.load(args.page)
    page.check()
    part = part_options(args)
    folder = out or pages.folder_of(args.size, bool(part))
    if args.run or part:
        wanted = args.page if args.page in page.targets else ""
        methods = [name.strip() for name in args.methods.split(",") if name.strip()]
        page.run(args.size, wanted, methods, args.seeds, args.launcher, out)
    rendering.render(page, folder, args.size, part)
    print(f"{rendering.first_table(page, folder, part)}\n\nwritten: {folder / page.name}.md")


def part_options(args: argparse.Namespace) -> str:
    """The options that select a part of a page, as on the command line."""
    options = []
    if args.methods:
        options.append(f'--methods "{args.methods}"')
    if args.seeds:
        options.append(f"--seeds {args.seeds}")
    return " ".join(options)


def render_all(folder: Path, size: str) -> None:
    """Render all pages that have rows, then results.md and index.md.

    results.md and index.md need the rows of all pages; without them they are not written.
    """
    from crt_exp.experiments.papers import results

    verdicts = {}
    for name in pages.names():
        if has_rows(name, folder):
            verdicts[name] = rendering.render(pages.load(name), folder, size)
            print(f"written: {folder / name}.md", flush=True)
    if missing := [name for name in pages.names() if name not in verdicts]:
        print(f"results.md and index.md not written: no rows of {', '.join(missing)}")
        return
    results.write(folder, verdicts)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m crt_exp report",
        description=__doc__.splitlines()[0],
        epilog=f"pages: {', '.join(pages.names())}",
    )
    add = parser.add_argument
    add("page", metavar="PAGE", nargs="?", help="a page, one of its sweeps (table1), or a file")
    add("--run", action="store_true", help="make the rows that are missing")
    add(
        "--size",
        choices=pages.SIZES,
        default=os.environ.get("SIZE", "small"),
        help="small, or full: the papers' setting (default: %(default)s)",
    )
    add(
        "--methods",
        default="",
        help=f'only these, "exact, favorp m=64"; the page goes to {FOLDER}/part',
    )
    add("--seeds", type=int, default=0, help="only the first seeds")
    add("--launcher", default="basic", help="basic, joblib, submitit_local or submitit_slurm")
    add("--out", help=f"folder (default: {FOLDER})")
    add("--config-dir", help="a folder of your own configuration, as of python -m crt_exp")
    return parser


if __name__ == "__main__":
    main()
