"""Names of `options` and `config` for modules that are not moved yet."""

from crt_exp.config import ATTENTION, FEATURES, HYDRA_KEYS, SAMPLER, Group, check_node, names_code  # noqa: F401
from crt_exp.options import check, check_options, checked  # noqa: F401


def check_keys(prefix, given, wanted):
    check_options(prefix.removesuffix("."), wanted, given)
