"""Files of a folder by their endings; one line names what else lies there."""

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from crt_exp.data.cache import warn

SYSTEM = ("__MACOSX", "@eaDir", "@Recycle", "#recycle", "$RECYCLE.BIN", "System Volume Information", "lost+found")
AUDIO = (".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".aiff", ".aif", ".aifc", ".au", ".snd", ".w64", ".caf",
         ".rf64")
IMAGES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".gif", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp")


def hidden(path: str | Path) -> bool:
    """Whether a relative path, or a folder of it, is kept by a system or program beside the data."""
    return any(part.startswith(".") or part in SYSTEM for part in str(path).split(os.sep))


def files_ending(folder: Path, endings: tuple[str, ...], paths: Iterable[str | Path] | None = None) -> list[str]:
    """The files with these endings (lower case), sorted, of `paths` or of the whole folder; hidden ones apart."""
    if paths is None:
        paths = (os.path.join(root, name) for root, _, names in os.walk(folder, followlinks=True) for name in names)
    start = len(str(folder)) + 1
    files = sorted(path for path in map(str, paths) if not hidden(path[start:]))
    taken = [path for path in files if path.lower().endswith(endings)]
    if len(taken) < len(files):
        others = sorted(os.path.splitext(path)[1].lower() or "without one" for path in set(files) - set(taken))
        counts = ", ".join(f"{count} {ending}" for ending, count in Counter(others).most_common(6))
        warn("%s: left out by their endings: %s (taken are %s)", folder, counts, " ".join(endings))
    return taken
