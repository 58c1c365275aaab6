"""Alias of `python -m crt_exp.infer`."""

from crt_exp.infer import main

if __name__ == "__main__":
    raise SystemExit(main())
