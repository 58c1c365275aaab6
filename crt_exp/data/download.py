"""One file from a server: continued where it broke off, and not begun where there is no room for it.

The bytes that came lie in NAME.part; whether they are what was published is for others to say (`fetch`).
"""

import math
import re
import shutil
import urllib.error
import urllib.request
from http.client import HTTPException, HTTPResponse
from pathlib import Path

from crt_exp.data import DataError
from crt_exp.data.archives import CHUNK, remove
from crt_exp.data.sources import UNITS

PATIENCE = 30.0  # seconds without a byte
LISTED = 1 << 22  # bytes of a list of digests


def shown(size: float) -> str:
    """Bytes in words."""
    for unit, factor in sorted(UNITS.items(), key=lambda item: -item[1]):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} bytes"


def free(folder: Path) -> int:
    """Bytes where a folder is, or will be."""
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def opened(url: str, done: int = 0) -> HTTPResponse:
    headers = {"User-Agent": "crt_exp", "Accept-Encoding": "identity"} | ({"Range": f"bytes={done}-"} if done else {})
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=PATIENCE)


def download(url: str, part: Path, by_hand: str = "", unpacked: bool = False, most: float = math.inf) -> None:
    """Write `url` to `part`, continuing what lies there. Raises DataError; then `part` keeps what came.

    unpacked: as much room again is needed. most: bytes that are fetched unasked. Should the file have changed on the
    server meanwhile, the joined halves fail the check of the content, which every plain file in the table has, or the
    archive's own checksums.
    """
    done = part.stat().st_size if part.exists() else 0
    try:
        with opened(url, done) as reply:
            continued = reply.status == 206 and reply.headers.get("Content-Range", "").startswith(f"bytes {done}-")
            if reply.status == 200 or continued:
                begin = done if continued else 0
                check_size(url, reply.length, begin, part, unpacked, most)
                return save(reply, part, begin)
    except urllib.error.HTTPError as error:
        if error.code == 416 and done:                       # nothing after `done`: whole, or the check will tell
            return None
        raise DataError(f"The server refused {url}: {error.code} {error.reason}.\n{by_hand}") from None
    except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", None) or error
        raise DataError(f"No connection for {url}: {reason}.\n"
                        f"Check the network and run the command again. {by_hand}") from None
    remove(part)                                             # another part than was asked for
    return download(url, part, by_hand, unpacked, most)


def check_size(url: str, coming: int | None, begin: int, part: Path, unpacked: bool, most: float) -> None:
    """Raises DataError where a file is larger than was agreed to, or than the room for it. Nothing has been written."""
    if coming is None:
        return
    if coming > most:
        raise DataError(f"{url} has {shown(begin + coming)}: to fetch more than {shown(most)} add --yes.")
    needed, room = coming + (begin + coming if unpacked else 0), free(part.parent)
    if needed > room:
        why = ", with what it unpacks to," if unpacked else ""
        raise DataError(f"{url} needs {shown(needed)}{why} and {part.parent} has {shown(room)} free.\n"
                        "Free space, or give another folder with --dir DIR.")


def save(reply: HTTPResponse, part: Path, done: int) -> None:
    """Append the body of `reply` to the first `done` bytes of `part`, with a progress bar on a terminal."""
    from tqdm import tqdm

    total = None if reply.length is None else done + reply.length
    part.parent.mkdir(parents=True, exist_ok=True)
    with open(part, "ab" if done else "wb") as out, tqdm(
            total=total, initial=done, desc=part.stem, unit="B", unit_scale=True, leave=False, disable=None) as bar:
        while chunk := reply.read1(CHUNK):                   # what has come: a server that falls silent costs none
            out.write(chunk)
            bar.update(len(chunk))
    size = part.stat().st_size
    if total is not None and size < total:                   # a short body is no error to read1()
        raise ConnectionError(f"it broke off after {size} of {total} bytes, which are kept")


def published(listed: str, name: str) -> str:
    """The digest of a file, "md5:...", in a publisher's list: lines of md5sum, or a metalink. Raises DataError."""
    try:
        with opened(listed) as reply:
            text = reply.read(LISTED).decode(errors="replace")
    except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", None) or error
        raise DataError(f"No connection for {listed}, which lists the digest of {name}: {reason}.\n"
                        "Check the network and run the command again.") from None
    entry = re.search(rf'<file name="{re.escape(name)}">(.*?)</file>', text, re.DOTALL)
    found = re.search(r'<hash type="md5">\s*([0-9a-f]{32})', entry[1]) if entry else re.search(
        rf"^([0-9a-f]{{32}})\s+\*?(?:\./)?{re.escape(name)}\s*$", text, re.MULTILINE)
    if found is None:
        raise DataError(f"{listed} does not list the digest of {name}: nothing was fetched.")
    return f"md5:{found[1]}"
