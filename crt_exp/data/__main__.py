"""python -m crt_exp.data [list | fetch NAME | verify [NAME]] [--dir DIR]: get data, pretrained models, and check."""

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from crt_exp.data import DataError, sources
from crt_exp.data.download import free, shown
from crt_exp.data.fetch import MISSING, OK, WRONG, Finding, fetch, inspect
from crt_exp.data.sources import File, Source, data_root
from crt_exp.pretrained import published
from crt_exp.pretrained.published import MODELS

UNASKED = 5e9  # bytes that are downloaded without a question

def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0; 1 after an error or where a file that is present is bad; 130 when interrupted."""
    options = parser().parse_args(arguments)
    try:
        return options.run(options)
    except DataError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted. What came is kept; the same command continues.", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="python -m crt_exp.data", description="The data sets of crt_exp.")
    root.set_defaults(run=run_list, dir=None)
    commands = root.add_subparsers(title="commands")
    add(commands, run_list, "list", "what each task needs, where it comes from, what is there (the default)")
    get = add(commands, run_fetch, "fetch", "download from the official server; continues, checks, replaces bad files",
              name="a folder such as uci, one set such as uci/abalone, or a pretrained model such as models/minilm")
    get.add_argument("--yes", action="store_true", help=f"download more than {shown(UNASKED)} without a question")
    add(commands, run_verify, "verify", "compare the files that are there with the published ones",
        name="a folder or one set; all, if left out", nargs="?")
    return root


def add(commands, run: Callable[[argparse.Namespace], int], title: str, text: str, name: str = "",
        nargs: str | None = None) -> argparse.ArgumentParser:
    command = commands.add_parser(title, help=text, description=text)
    command.set_defaults(run=run)
    command.add_argument("--dir", help="the folder that holds uci/, glue/ and so on (default: $CRT_DATA)")
    if name:
        command.add_argument("name", metavar="NAME", help=name, nargs=nargs)
    return command


def run_list(options: argparse.Namespace) -> int:
    root = data_root(options.dir)
    print(f"Data folder: {root}" if root else "Data folder: none. Set CRT_DATA=DIR or give --dir DIR.")
    rows = [(source.name, source.tasks, presence(source, root), size(source), files(source), source.page)
            for source in (*sources.TABLE, *own_images(root))]
    rows += [(model.name, model.tasks, "present" if root and (root / model.name).is_dir() else "missing",
              "", model.what, model.page) for model in MODELS.values()]
    print_table([("set", "tasks", "here", "size", "files below the data folder", "official source"), *rows])
    print("\nembedded: needs no file. by hand: `fetch` cannot get it. "
          "Other images: images/<name>/{train,val}/<class>.")
    return 0


def own_images(root: Path | None) -> list[Source]:
    """Folders of images that are there and in no table; `task.dataset=<name>` reads them."""
    if root is None or not (root / "images").is_dir():
        return []
    from crt_exp.data.images import folders_in

    names = folders_in(root / "images")
    own = [f"images/{name}" for name in names if f"images/{name}" not in sources.SOURCES]
    return [Source(name, "imagenet mae pixels lra", "your own", (File(name),)) for name in own]


def presence(source: Source, root: Path | None) -> str:
    """present, partly, embedded, missing, or "by hand": missing, and nothing that fetch could get."""
    there = sum(root is not None and (root / file.path).exists() for file in source.files)
    if source.embedded:
        return "embedded, present" if there else "embedded"
    if there:
        return "present" if there == len(source.files) else f"{there} of {len(source.files)}"
    return "missing" if fetched(source) else "by hand"


def fetched(source: Source) -> bool:
    """Whether `fetch` can get all of it."""
    return all(file.url or file.made for file in source.files)


def size(source: Source) -> str:
    return source.size or (f"{sum(file.rows for file in source.files)} rows" if source.files[0].rows else "")


def files(source: Source) -> str:
    """The paths, those of one folder folded as in ptb/ptb.{train,valid,test}.txt."""
    paths = [Path(file.path) for file in source.files]
    if len(paths) < 2:
        return str(paths[0]) if paths else "-"
    folder = Path(os.path.commonpath([path.parent for path in paths]))
    names = [str(path.relative_to(folder)) for path in paths]
    start, end = shared_start(names), shared_start([name[::-1] for name in names])[::-1]
    middles = ",".join(name[len(start):len(name) - len(end)] for name in names)
    return f"{folder}/{start}{{{middles}}}{end}"


def shared_start(names: Sequence[str]) -> str:
    """What all names begin with, up to and including a dot or a hyphen."""
    start = os.path.commonprefix(names)
    return start[:max(start.rfind("."), start.rfind("-")) + 1]


def print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def run_fetch(options: argparse.Namespace) -> int:
    root = data_root(options.dir)
    if root is None:
        raise DataError("Nobody said where the data go: give --dir DIR, or set CRT_DATA=DIR.")
    if published.is_model(options.name):
        return fetch_models(options, root)
    chosen = sorted(sources.select(options.name), key=lambda each: not fetched(each))  # by hand: stops the command
    agreed = agree([source for source in chosen if presence(source, root) not in ("present", "by hand")], root,
                   options.yes)
    for source in chosen:
        if not source.files:
            print(f"{source.name}: embedded, nothing to fetch")
        fetch(source, root, most=math.inf if agreed else UNASKED)
    return 0


def agree(chosen: Sequence[Source], root: Path, yes: bool) -> bool:
    """Whether the user wants downloads of any size. Prints that of several; asks above UNASKED.

    Raises DataError where that is not wanted or cannot be asked, and where there is too little room: for all of it, and
    for the largest once more, which is an archive while it is unpacked.
    """
    size, room = sum(source.bytes for source in chosen), free(root)
    needed = size + max((source.bytes for source in chosen if any(file.member for file in source.files)), default=0)
    if len(chosen) > 1 and size:
        print(f"{shown(size)} to download to {root}, which has {shown(room)} free")
    if needed > room:
        raise DataError(f"This needs {shown(needed)}, with what is unpacked, and {root} has {shown(room)} free.\n"
                        "Free space, or give another folder with --dir DIR.")
    if yes or size <= UNASKED:
        return yes
    if not sys.stdin.isatty():
        raise DataError(f"This downloads {shown(size)}: to fetch more than {shown(UNASKED)} add --yes.")
    if input(f"Download {shown(size)}? [y/N] ").strip().lower() not in ("y", "yes"):
        raise DataError("Nothing was fetched.")
    return True


def fetch_models(options: argparse.Namespace, root: Path) -> int:
    """One model, or all of the hub."""
    from crt_exp.pretrained.fetch import fetch as fetch_model

    for model in published.select(options.name):
        if model.hub or options.name.strip("/") != published.GROUP:
            fetch_model(model, root)
        else:
            print(f"{model.name}: not on the hub: {published.SCRIPT} {model.name}")
    return 0


def inspect_model(folder: Path) -> Finding:
    from crt_exp.models.folder import verify

    if not folder.is_dir():
        return Finding(MISSING, "not there")
    try:
        verify(folder, folder.name)
    except DataError as error:
        return Finding(WRONG, str(error))
    return Finding(OK, "weights as they were fetched")


def run_verify(options: argparse.Namespace) -> int:
    root = data_root(options.dir)
    if root is None:
        raise DataError("Nobody said where the data are: give --dir DIR, or set CRT_DATA=DIR.")
    if published.is_model(options.name or ""):
        return verified([(model.name, inspect_model(root / model.name)) for model in published.select(options.name)])
    own = own_images(root)
    mine = [source for source in own if source.name == (options.name or "").strip("/")]
    chosen = mine or (sources.select(options.name) if options.name else [*sources.TABLE, *own])
    findings = [(file.path, inspect(file, root / file.path)) for source in chosen for file in source.files]
    models = [] if options.name else MODELS
    return verified([*findings, *((name, inspect_model(root / name)) for name in models)])


def verified(findings: Sequence[tuple[str, Finding]]) -> int:
    print_table([(path, finding.state, finding.detail) for path, finding in findings])
    return int(any(finding.bad for _, finding in findings))


if __name__ == "__main__":
    sys.exit(main())
