"""Which files of a folder a reader takes, by how their names end, and one line about the others."""

import os
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from crt_exp.data.cache import warn

SHOWN = 6                                                    # endings that the line names
SYSTEM = ("__MACOSX", "@eaDir", "@Recycle", "#recycle", "$RECYCLE.BIN", "System Volume Information", "lost+found")
PACKERS = (".gz", ".bz2", ".xz", ".zst", ".zip")
AUDIO = (".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".aiff", ".aif", ".aifc", ".au", ".snd", ".w64", ".caf",
         ".rf64")
IMAGES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".gif", ".bmp", ".dib", ".ppm", ".pgm", ".pbm", ".pnm",
          ".tif", ".tiff", ".webp", ".avif", ".jp2", ".heic", ".heif", ".jxl", ".tga", ".pcx", ".ico", ".qoi")


@cache
def images() -> tuple[str, ...]:
    """Those of IMAGES that this installation of Pillow opens: some need a plugin of their own."""
    from PIL import Image

    Image.init()
    known = Image.registered_extensions()
    return tuple(ending for ending in IMAGES if known.get(ending) in Image.OPEN)


def ending(name: str) -> str:
    """In lower case, with what packed it: of Proteins.FASTA.gz it is .fasta.gz; empty where there is none."""
    stem, last = os.path.splitext(name.lower())
    return os.path.splitext(stem)[1] + last if last in PACKERS else last


def hidden(path: str | Path) -> bool:
    """Whether a file or folder, or one that it lies in, is kept by a system or program beside the data."""
    return any(name.startswith(".") or name in SYSTEM for name in Path(path).parts)


class Sieve:
    """Takes names by their ending, whatever its case, and counts the endings of the others, but of hidden files."""

    def __init__(self, taken: Iterable[str]):
        self.taken, self.left = tuple(taken), Counter[str]()

    def takes(self, name: str) -> bool:
        if hidden(name):
            return False
        own = ending(name)
        self.left.update([own] if own not in self.taken else [])
        return own in self.taken

    def only(self, folder: Path, paths: Iterable[Path]) -> list[Path]:
        """Those that are taken, in no hidden folder, sorted; says in a line what else lies in the folder."""
        files = sorted(path for path in paths if not hidden(path.relative_to(folder)) and path.is_file()
                       and self.takes(path.name))
        self.tell(folder)
        return files

    def tell(self, folder: str | Path) -> None:
        """One line, where anything was left out."""
        if self.left:
            warn("%s: left out by their endings: %s (taken are %s)", folder, self.described(), " ".join(self.taken))

    def described(self) -> str:
        """How many of each ending, the most frequent first."""
        listed = sorted(self.left.items(), key=lambda item: (-item[1], item[0]))
        named = ", ".join(f"{count} {own or 'without one'}" for own, count in listed[:SHOWN])
        rest = sum(count for _, count in listed[SHOWN:])
        return f"{named}, {rest} others" if rest else named
