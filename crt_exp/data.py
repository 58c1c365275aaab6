"""`python -m crt_exp.data`: the command `python -m crt_exp data`."""

import sys

from crt_exp.__main__ import run_command

if __name__ == "__main__":
    run_command("data", sys.argv[1:])
