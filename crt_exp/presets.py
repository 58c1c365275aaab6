"""Names of `mechanism` for modules that are not moved yet."""

from crt_exp.mechanism import uses  # noqa: F401
