"""python -m crt_exp.attention.engines.native: compiles the attention kernels for this CPU ahead of use.

For nodes that have no compiler or may not write to the folder where libraries are kept: build on a node with the same
processor, and give all the same XDG_CACHE_HOME. Prints where the library lies and how long it took; exits with 1 where
there is none.
"""

import sys

from crt_exp.attention.engines.native_library import build


def main() -> None:
    try:
        file, seconds = build()
    except ValueError as error:
        sys.exit(str(error))
    print(f"{file} was there already" if seconds is None else f"{file} compiled in {seconds:.1f} s")


if __name__ == "__main__":
    main()
