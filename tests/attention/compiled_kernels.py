"""Compiles the kernels of causal attention for an H100 (sm_90), without one: bytes of shared memory of each, a line of
JSON. For a new process, in which Triton does not interpret."""

import json

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from crt_exp.attention.engines import causal_kernels, fused_causal

NUMBERS = {"L", "n", "ahead", "P", "S", "M", "d", "dv", "rows", "columns", "row_first", "column_first", "length",
           "first"}
CONSTANTS = {"SEGMENT": fused_causal.SEGMENT, "PIECE": fused_causal.PIECE, "TOKENS": fused_causal.TOKENS,
             "FEATURES": fused_causal.FEATURES, "D": 64, "DV": 64, "PRECISION": "ieee"}
GIVEN = {"t", "x", "y", "values", "x_values", "out", "dx", "dx_values"}     # in the precision of the inputs


def kind(name: str, constants: dict, dtype: str) -> str:
    if name in constants:
        return "constexpr"
    if name in NUMBERS:
        return "i32"
    return "fp32" if name == "norm_weight" else f"*{dtype}" if name in GIVEN else "*fp32"


def shared(kernel, dtype: str, **more) -> int:
    constants = {name: value for name, value in (CONSTANTS | more).items() if name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature={name: kind(name, constants, dtype) for name in kernel.arg_names},
                       constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8, "num_stages": 1})
    return made.metadata.shared


if __name__ == "__main__":
    print(json.dumps({f"{kernel.__name__} {dtype} {more}": shared(kernel, dtype, **more)
                      for kernel, dtype, more in ((causal_kernels.summary, "bf16", {}),
                                                  (causal_kernels.entering, "fp32", {"REVERSE": True}),
                                                  (causal_kernels.forward, "bf16", {}),
                                                  (causal_kernels.backward, "fp32", {"REVERSE": False}),
                                                  (causal_kernels.backward, "bf16", {"REVERSE": True}))}))
