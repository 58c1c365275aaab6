import gc
import os
import signal
import sys
from collections import Counter

if "PYTEST_XDIST_WORKER_COUNT" in os.environ:  # before torch starts its threads
    workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, os.cpu_count() // workers)))

import pytest
import torch
from helpers.torchrun import torchrun

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")


def pytest_collection_finish():
    """Exempt the collected tests from garbage collection, which each run triggers when it frees its memory."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter, config):
    """One line with what was skipped, and why."""
    skipped = terminalreporter.stats.get("skipped", ())
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
    parts = [f"{count} ({reason})" for reason, count in reasons.most_common()]
    if config.option.markexpr == "not slow":
        parts.append("slow tests (run by `make test-all`)")
    if parts:
        terminalreporter.write_line(f"skipped: {', '.join(parts)}")


@pytest.fixture(autouse=True)
def seeded():
    """Every test draws the same numbers, alone or among others."""
    torch.manual_seed(0)


@pytest.fixture
def one_thread(monkeypatch):
    """Threads only wait for each other on models of a few numbers, here and in new processes."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def interruptible():
    """Signals work, also where the tests were started with them ignored, as by nohup or a script's `make test &`."""
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {}
    for signum, handler in handlers.items():
        before[signum] = signal.signal(signum, handler)
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.fixture
def typed(monkeypatch, capsys, tmp_path):
    """Runs a command line in this process, or by torchrun, in an empty folder: (exit code, stdout, stderr). In this
    process its curves.png is empty, and where there is no GPU its end does not look through all objects for memory to
    give back: these cost more than all steps of a short run."""

    def run(*args, processes=1):
        if processes > 1:
            done = torchrun(*args, cwd=tmp_path)
            return done.returncode, done.stdout, done.stderr
        from accelerate.utils import memory

        from crt_exp import train

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["crt_exp", *args])
        monkeypatch.setattr(
            train,
            "draw_curves",
            lambda records, metric, directory: (directory / "curves.png").touch(),
        )
        if not torch.cuda.is_available():
            monkeypatch.setattr(memory, "clear_device_cache", lambda *_, **__: None)
        code = 0
        _ = capsys.readouterr()
        try:
            train.main()
        except SystemExit as stop:
            code = stop.code or 0
        return code, *capsys.readouterr()

    return run
