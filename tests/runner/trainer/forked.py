"""`python forked.py N words...`: `crt_exp words...` on N processes, as torchrun starts them, but forked after the
imports, which take most of a start: those of eight processes would take a minute of two cores."""

import os
import socket
import sys
import traceback

from crt_exp.runner import adapters, checkpoint, sharding, trainer  # imported here, before the processes part
from crt_exp.tasks import trembl
from crt_exp.train import main

SHARED = (adapters, checkpoint, sharding, trainer, trembl)


def start(rank: int, world: int, port: int) -> int:
    """The process that has this rank."""
    process = os.fork()
    if process:
        return process
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        main()
        os._exit(0)
    except SystemExit as stop:
        os._exit(int(stop.code or 0))
    except BaseException:
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    world = int(sys.argv.pop(1))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [start(rank, world, port) for rank in range(world)]
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes))
