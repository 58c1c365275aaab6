"""python -m crt_exp.oldreport NAME: makes a page, and measures what is missing first; --all renders all of them.

A page is declared by conf/report/NAME.yaml. Its draws are outputs/report/NAME.csv; from these and the file alone come
NAME.md and NAME.png.
"""

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from crt_exp.config import ConfigError, own_names
from crt_exp.data import DataError
from crt_exp.oldreport import decide, draws, index, page, render
from crt_exp.measure import chosen as choice
from crt_exp.measure import cells, grid, sources
from crt_exp.runner.sweep import aligned

FULL = "full"  # the papers' own setting
SIZES = ("small", "gpu", FULL)
GROUP = "WANDB_RUN_GROUP"


class PagesFailed(ValueError):
    """Some pages cannot be made; their errors are said."""


def measure(name: str, size: str, folder: Path, keep: bool, arms: str = "", seeds: int = 0) -> Path:
    """Writes the draws of a page, of cells that are kept in outputs/ and of those that are missing. arms, seeds: a part
    of it, see `chosen`.
    Raises ConfigError for a size that the page does not declare."""
    spec = page.load(name)
    if size not in spec.get("sizes", {}):
        raise ConfigError(f"SIZE={size}: the report {name} declares {', '.join(spec.get('sizes', {})) or 'no size'}")
    begin = sources.of_page(spec)
    name, chosen = Path(name).stem, spec["sizes"][size]
    chosen = chosen if size != FULL else grid.unconditional(chosen)
    if arms or seeds:
        chosen = choice.chosen(chosen, arms, seeds)
    with one_group(name):
        return draws.write(name, grid.measure(name, begin, chosen, keep), folder)


@contextmanager
def one_group(name: str) -> Iterator[None]:
    """Runs that `LOGGER=wandb` mirrors are a group of W&B by that name, if the user names none."""
    given = os.environ.get(GROUP)
    os.environ.setdefault(GROUP, name)
    try:
        yield
    finally:
        if given is None:
            del os.environ[GROUP]


def render_all(folder: Path) -> None:
    """Raises PagesFailed in the end where a page cannot be made of its draws; the others are."""
    failed = [name for name in page.names() if not rendered(name, folder)]
    if failed:
        raise PagesFailed(f"not made: {', '.join(failed)}; nor decide and the index, which rest on all pages")
    print(f"written: {decide.write(folder)}")
    index.main(folder)


def rendered(name: str, folder: Path) -> bool:
    """Whether a page has no draws yet, or is written; says what hinders it."""
    if not draws.there(name, folder):
        print(f"{name}: no draws yet; `make {name}` measures them")
        return True
    try:
        print(f"written: {render.write(page.Page(name, folder))}")
        return True
    except (ValueError, LookupError, TypeError, DataError) as error:  # of draws that a page cannot be made of
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        print(f"crt_exp.oldreport: {name}: {error}", file=sys.stderr)
        return False


def make(args: argparse.Namespace) -> None:
    if args.all:
        print(f"rendering {len(page.names())} pages, their pictures and the index from committed draws: some minutes")
        render_all(args.out or page.folder_of({}, args.size))
        return
    part = " ".join([f'ARMS="{args.arms}"'] * bool(args.arms) + [f"SEEDS={args.seeds}"] * bool(args.seeds))
    folder = page.folder_of(page.load(args.name), args.size, args.out, bool(part))
    written = measure(args.name, args.size, folder, args.keep, args.arms, args.seeds)
    print(f"written: {written}")
    shown = page.Page(args.name, folder, size=args.size, part=part)
    made = render.write(shown)
    print(f"written: {made}")
    if args.name == "demo":
        print(f"\n{first_table(shown)}\n\npicture: {made.with_suffix('.png')}")


def first_table(shown: page.Page) -> str:
    """Title and rows, in aligned columns."""
    table = render.sections_of(shown)[0]
    return "\n".join([table.title, *aligned([table.header, *table.rows])])


def listed() -> str:
    return "\n".join(f"  {name:<18}{page.load(name)['title']}" for name in page.names())


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m crt_exp.oldreport", description=__doc__, epilog=f"names:\n{listed()}",
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("name", metavar="NAME", nargs="?", help="one of those below")
    made.add_argument("--all", action="store_true", help="render every page, and the index, from the committed draws")
    made.add_argument("--size", choices=SIZES, default=os.environ.get("SIZE", "small"), help="default %(default)s")
    made.add_argument("--out", type=lambda text: Path(text).expanduser(),
                      help=f"folder to write to (default {draws.FOLDER}, and in it full/ and gpu/)")
    made.add_argument("--keep", action="store_true", help="use kept cells although the code has changed")
    made.add_argument("--config-dir", metavar="DIR", help="a folder of your own names, as that of python -m crt_exp")
    made.add_argument("--arms", default="", help="these of its arms alone: \"exact favorp\", \"favorp m=64; elu\"; the "
                      f"page goes to {draws.FOLDER / page.PART}")
    made.add_argument("--seeds", type=int, default=0, help="so many of its seeds, the first ones")
    return made


def main() -> None:
    args = parser().parse_args()
    if args.all == bool(args.name):
        parser().exit(2, f"crt_exp.oldreport: error: which page? NAME, one of these, or --all\n{listed()}\n")
    try:
        with own_names([args.config_dir] if args.config_dir else []):
            make(args)
    except (ValueError, OSError, DataError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        where = "; ".join(getattr(error, "__notes__", []))  # of the arm that was being timed
        print(f"crt_exp.oldreport: error: {error}{f' ({where})' if where else ''}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        cells.end_workers()
        print("crt_exp.oldreport: stopped by SIGINT; cells that are computed are kept, and the same command goes on",
              file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
