"""`python -m crt_exp.infer`: the command `python -m crt_exp infer`."""

import sys

from crt_exp.__main__ import run_command

if __name__ == "__main__":
    run_command("infer", sys.argv[1:])
