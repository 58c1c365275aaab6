"""`crt_exp` on two processes, as torchrun starts them."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
ENVIRONMENT = {"PYTHONPATH": f"{TESTS.parent}:{TESTS}", "OMP_NUM_THREADS": "1"}
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


def torchrun(*args, door=("-m", "crt_exp"), **options):
    return subprocess.run(
        [*TORCHRUN, *door, *args],
        capture_output=True,
        text=True,
        env=os.environ | ENVIRONMENT,
        timeout=280,
        **options,
    )
