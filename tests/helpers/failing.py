"""Calls of the system that fail."""

import os


def failing(code):
    """A function that raises the OSError of an error number, whatever its arguments."""

    def fail(*arguments, **options):
        raise OSError(code, os.strerror(code))

    return fail
