"""`python -m crt_exp.report`: the command `python -m crt_exp report`."""

import sys

from crt_exp.__main__ import run_command

if __name__ == "__main__":
    run_command("report", sys.argv[1:])
