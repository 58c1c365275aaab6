"""One process at a time in a run directory: a lock that the kernel frees when its holder ends, however it ends.

It is a record lock (POSIX), which network file systems know too, and which forked workers of a killed run do not hold
on to. The file names the holder and goes away with the lock; one that a killed process left is no obstacle.
"""

import errno
import fcntl
import logging
import os
import platform
from datetime import datetime
from pathlib import Path

from crt_exp.config import ConfigError

LOCK = ".lock"  # within the run directory
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_held: set[tuple[int, int]] = set()  # files by device and inode: a record lock does not keep its own process out


class Lock:
    """Holds `directory`, which it makes, until `release`.
    Raises ConfigError, naming the holder, where another process does."""

    def __init__(self, directory: Path):
        self.path, self.handle = directory / LOCK, None
        while self.handle is None:
            directory.mkdir(parents=True, exist_ok=True)
            self.handle = self._taken()

    def _taken(self) -> int | None:
        """The locked file; None where another holder removed the file, or the directory, before it could be locked."""
        if self._identity() in _held:
            # opened a second time, and closed, it would be lost
            raise self._refused(f"this process ({os.getpid()}) itself")
        try:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:
            return None
        try:
            self._lock(handle)
            self._sign(handle)
        except BaseException:
            os.close(handle)
            raise
        if self._identity() == self._identity(handle):
            _held.add(self._identity(handle))
            return handle
        os.close(handle)
        return None

    def _lock(self, handle: int) -> None:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in NO_LOCKS:
                logging.getLogger(__name__).warning(
                    "the file system of %s has no locks: mind that no two runs use it at once", self.path.parent)
            elif error.errno in (errno.EAGAIN, errno.EACCES):
                raise self._refused(os.pread(handle, 1000, 0).decode(errors="replace")) from None
            else:
                raise

    def _refused(self, holder: str) -> ConfigError:
        return ConfigError(f"{self.path.parent} is in use by {holder.strip() or 'another process'}: wait until it "
                           "has ended, or choose another hydra.run.dir")

    def _sign(self, handle: int) -> None:
        os.ftruncate(handle, 0)
        signature = f"process {os.getpid()} on {platform.node()} since {datetime.now():%Y-%m-%d %H:%M:%S}\n"
        os.pwrite(handle, signature.encode(), 0)

    def _identity(self, handle: int | None = None) -> tuple[int, int] | None:
        """Device and inode of an open file, or of the one that has the name now."""
        try:
            found = os.stat(self.path if handle is None else handle)
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def release(self) -> None:
        """Takes the file away, and then lets go of it. Nothing where that was done before."""
        if self.handle is None:
            return
        identity = self._identity(self.handle)
        if self._identity() == identity:
            self.path.unlink(missing_ok=True)
        _held.discard(identity)
        os.close(self.handle)
        self.handle = None
