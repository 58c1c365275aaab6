"""Names of `options` for modules that are not moved yet."""

from pydantic import Field

from crt_exp.options import (Complex, Count, NotNegative, Parameter, Positive, Several, Whole, check, checked,  # noqa: F401
                             describe, fits, parameters, whole_number)
from crt_exp.options import format_value as shown  # noqa: F401


def at_least(low):
    return Field(ge=low)


def at_most(high):
    return Field(le=high)


def above(low):
    return Field(gt=low)


def below(high):
    return Field(lt=high)
