"""Alias of `python -m crt_exp.infer`."""

import sys

from crt_exp.infer import main

if __name__ == "__main__":
    sys.exit(main())
