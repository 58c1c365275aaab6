"""python -m crt_exp.probes.several_gpus: one run on one GPU, and by torchrun with NCCL on two, by DDP and by FSDP.

The three must have the same losses up to rounding, for the batch is that of all processes together. `make gpu` runs it.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from crt_exp.runner.run import read_records

PROCESSES, STEPS = 2, 30
RUN = ("task=recall", "attention=favorp", "features.m=64", "trainer.batch=32", f"trainer.steps={STEPS}",
       "trainer.log_every=1", "trainer.precision=no", "logger=none")
WAYS = {"one process": (1, ()), "DDP": (PROCESSES, ()), "FSDP": (PROCESSES, ("trainer=fsdp",))}
CLOSE = 1e-3                   # of the loss: sums of gradients are rounded in another order


class Differs(RuntimeError):
    """Several processes gave other losses than one, or did not end."""


def command(way: str, directory: Path) -> list[str]:
    processes, more = WAYS[way]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", "-m",
            "crt_exp", *more, *RUN, f"hydra.run.dir={directory}"]


def losses(way: str, directory: Path) -> tuple[list[float], float]:
    """Of each step, and steps a second of the last half. Raises Differs."""
    done = subprocess.run(command(way, directory), capture_output=True, text=True)
    if done.returncode:
        raise Differs(f"{way}: torchrun ended with code {done.returncode}\n{done.stderr.strip()}")
    steps = [record for record in read_records(directory / "metrics.jsonl") if record["split"] == "train"]
    half = steps[len(steps) // 2:]
    return [record["loss"] for record in steps], (len(half) - 1) / (half[-1]["time_s"] - half[0]["time_s"])


def compared(ways: Sequence[str] = tuple(WAYS)) -> None:
    """Prints the last loss and the speed of each way. Raises Differs."""
    first: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, way in enumerate(ways):
            each, speed = losses(way, Path(folder) / str(number))
            first = first or each
            print(f"several GPUs, {way}: loss {each[-1]:.6f} after {len(each)} steps, {speed:.1f} steps/s", flush=True)
            if len(each) != len(first) or max(abs(a / b - 1) for a, b in zip(each, first)) > CLOSE:
                raise Differs(f"{way}: the losses are not those of one process: {each[-1]} and {first[-1]} at the end")


def main() -> None:
    if (count := torch.cuda.device_count()) < PROCESSES:
        print(f"several GPUs: torchrun with NCCL was not run: it needs {PROCESSES} GPUs, and torch sees {count} here")
        return
    try:
        compared()
    except Differs as error:
        print(f"crt_exp.probes.several_gpus: error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
