"""Readers of data sets, data that comes along, and the command `python -m crt_exp.data` that lists, fetches, verifies.

Light on purpose: importing it pulls in no heavy library, so that an error about data costs no waiting.
"""

import os
import stat


class DataError(Exception):
    """A data set that cannot be used. The message is for the user, in one to three lines: what is wrong, where (file
    and line), and what to do (which file to get from where, where to put it, which option to set)."""


def check_regular(path) -> None:
    """Raises ValueError for what lies at a path and is no file: reading a pipe or a device may wait for ever."""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        raise ValueError("a folder" if stat.S_ISDIR(mode) else "a pipe, socket or device, not a file")
