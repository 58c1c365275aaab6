"""Functions of few numbers, joined by torch.compile to few launches on GPUs.

A fit has about 20 operations on small tensors. Each is a launch on a GPU, which takes longer than its numbers. On CPUs
a call costs little, and the functions run as they are.
"""

import functools
import logging
from collections.abc import Callable

import torch

from crt_exp.attention import engines
from crt_exp.samplers.noise import cacheable

COMPILED_DEVICES = ("cuda",)
NOT_COMPILED: set[Callable] = set()  # functions that the compiler refused


def compiled(function: Callable, device: torch.device) -> Callable:
    """Return a function that is compiled at its first call if its tensors are on a GPU.

    If it cannot be compiled, one warning says so, and it runs as it is. So does it with CRT_EXP_ENGINE=plain, and where
    something traces or transforms the call.
    """
    plain = device.type not in COMPILED_DEVICES or function in NOT_COMPILED or engines.PLAIN_CHOSEN
    if plain or torch.compiler.is_compiling() or not cacheable():
        return function

    def call(*args):
        try:
            return compile_once(function)(*args)
        except RuntimeError as error:
            result = function(*args)  # raises if the arguments are wrong
            NOT_COMPILED.add(function)
            lines = str(error).strip().splitlines() or [type(error).__name__]
            logging.getLogger(__name__).warning(
                "%s cannot be compiled for %s (%s): its operations run one by one, which takes longer",
                *(function.__name__, device, lines[0]),
            )
            return result

    return call


@functools.cache
def compile_once(function: Callable) -> Callable:
    return torch.compile(function)
