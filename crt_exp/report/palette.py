"""The names of crt_exp.drawing."""

from crt_exp.drawing import *  # noqa: F403
