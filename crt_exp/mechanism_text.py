"""Names of `options` for modules that are not moved yet."""

from crt_exp.options import join_words as write  # noqa: F401
from crt_exp.options import split_words as read  # noqa: F401
from crt_exp.options import written  # noqa: F401
