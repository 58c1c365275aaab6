"""Reports: cells resume, files are complete, and the probes under them hold their numbers."""

import gzip
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from crt_exp import config
from crt_exp.config import ConfigError, choices
from crt_exp.data import DataError, mnist
from crt_exp.features import GERF, OPRF, PosRF, TrigRF
from crt_exp.mechanism import Mechanism
from crt_exp.report import __main__ as command_line
from crt_exp.report import page
from crt_exp import drawing as palette
from crt_exp.runner.run import commit
from crt_exp.probes.attention_errors import ProjectionErrors
from crt_exp.times import in_turns
from crt_exp.metrics import interval
from crt_exp.probes.uci import UCI
from crt_exp.probes.variance import REGIMES, Variance, log_variances

OPRF_64, EXACT = Mechanism.of(features="oprf", m=64), Mechanism.of("exact")


def test_names_of_lines_stand_apart_and_within_the_axes():
    assert palette.apart([0, 1, 50], 10, -9, 100) == [-4.5, 5.5, 50]
    assert palette.apart([0, 1, 50], 10, 0, 55) == [0, 10, 50] and palette.apart([0, 1, 2], 10, 0, 15) == [-5, 5, 15]
    assert palette.apart([0, 0, 12, 40], 10, -9, 100) == [-6, 4, 14, 40] and palette.apart([], 10, 0, 9) == []
    assert palette.apart([80, 81, 82], 10, 0, 90) == [70, 80, 90]


@pytest.mark.skipif(not (config.CONF.parent / ".git").exists(), reason="not a checkout")
def test_commit_is_that_of_the_checkout():
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=config.CONF)
    assert commit().removesuffix("+changes") == found.stdout.strip()


# ---- what reports list


@pytest.fixture
def newcomers(tmp_path, monkeypatch):
    """A conf of its own with a new positive map and a new sampler."""
    conf = tmp_path / "conf"
    shutil.copytree(config.CONF, conf)
    shutil.copy(conf / "features/pos.yaml", conf / "features/aaa.yaml")
    shutil.copy(conf / "sampler/hadamard.yaml", conf / "sampler/bbb.yaml")
    monkeypatch.setattr(config, "CONF", conf)
    monkeypatch.setattr("crt_exp.presets.CONF", conf)


def test_new_map_and_sampler_appear_by_themselves(newcomers):
    """Behind those of its kind, the others unmoved, in a colour of its own that depends on its name alone."""
    assert palette.maps() == (*palette.MAPS, "aaa") and palette.samplers() == (*palette.SAMPLERS, "bbb")
    assert palette.maps({"aaa": "so"}) == tuple(palette.MAPS)
    assert palette.colour("aaa") == "#A63285" and palette.colour("aaa") not in palette.MAPS.values()
    assert palette.colour("bbb") not in palette.SAMPLERS.values()
    assert palette.go_together("aaa", "bbb") and not palette.go_together("pois", "bbb")


def test_order_and_colours_are_of_files_that_exist():
    assert palette.maps() == tuple(palette.MAPS) and palette.samplers() == tuple(palette.SAMPLERS)
    shades = [*palette.MAPS.values(), *palette.SAMPLERS.values(), *palette.PEERS.values(), palette.EXACT,
              palette.CONTROL, palette.NEAR_FAR]
    assert len({*shades}) == len(shades)
    assert set(palette.LABELS) <= set(choices("attention"))
    assert palette.colour("favorpp") == palette.colour("oprf") and palette.colour("uniform") == palette.CONTROL
    with pytest.raises(ConfigError, match="did you mean oprf"):
        palette.maps({"oprff": "misspelt"})


def test_an_arm_has_one_colour_whatever_its_options():
    """In reports, the page that decides and the gallery."""
    for arms in (("nearfar", "nearfar preset=cheap", "near-far, 128 keys"), ("favorpp", "favorpp m=256", "oprf"),
                 ("window block=32 first=16", "window block=64 first=16"), ("uniform",), ("exact",)):
        assert len({palette.colour(arm) for arm in arms}) == 1
    for path in (config.CONF.parent / "docs/gallery").glob("*.md"):
        assert "tab:" not in path.read_text()


# ---- python -m crt_exp.report


def test_only_reports_are_offered(capsys, monkeypatch):
    """With a line on each."""
    monkeypatch.setattr(sys, "argv", ["report", "--help"])
    with pytest.raises(SystemExit):
        command_line.main()
    shown = capsys.readouterr().out
    assert all(re.search(rf"  {name} .*\w", shown) for name in page.names()) and "bench_nearfar" not in shown


@pytest.mark.parametrize("name, near", [("fig22", "fig2"), ("tabel1", "table1")])
def test_misspelt_report_names_the_nearest(name, near, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["report", name])
    with pytest.raises(SystemExit) as error:
        command_line.main()
    said = capsys.readouterr().err
    assert error.value.code == 2 and f"did you mean {near}?" in said and "Traceback" not in said


@pytest.mark.parametrize("words", [[], ["lra", "--all"]])
def test_without_a_page_nothing_is_rendered(words, capsys, monkeypatch):
    """All pages take minutes: the pages are listed, and --all renders them."""
    monkeypatch.setattr(command_line, "make", None)
    monkeypatch.setattr(sys, "argv", ["report", *words])
    with pytest.raises(SystemExit) as stop:
        command_line.main()
    said = capsys.readouterr().err
    assert stop.value.code == 2 and "which page? NAME, one of these, or --all" in said
    assert all(f"\n  {name} " in said for name in page.names())


def test_all_pages_are_rendered_where_that_is_asked(capsys, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(command_line, "render_all", asked.append)
    monkeypatch.setattr(sys, "argv", ["report", "--all", "--out", str(tmp_path)])
    command_line.main()
    assert asked == [tmp_path] and f"rendering {len(page.names())} pages" in capsys.readouterr().out


def test_ctrl_c_is_told_in_a_line(capsys, monkeypatch):
    def stopped(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "make", stopped)
    monkeypatch.setattr(sys, "argv", ["report", "table1"])
    with pytest.raises(SystemExit) as stop:
        command_line.main()
    assert stop.value.code == 130 and "stopped by SIGINT; cells that are computed are kept" in capsys.readouterr().err


def test_an_error_names_the_arm_that_was_timed(capsys, monkeypatch):
    def fails():
        raise ValueError("length 7: got 7, expected a multiple of 4")

    monkeypatch.setattr(command_line, "make", lambda args: in_turns({"exact": dict, "nearfar m=8": fails}, 2))
    monkeypatch.setattr(sys, "argv", ["report", "table1"])
    with pytest.raises(SystemExit):
        command_line.main()
    assert capsys.readouterr().err == ("crt_exp.report: error: length 7: got 7, expected a multiple of 4 "
                                       "(in the turn of nearfar m=8, warm-up round 1 of 1)\n")


@pytest.mark.slow
@pytest.mark.parametrize("after", ["the start", "a cell"])
def test_ctrl_c_in_a_terminal_ends_all_processes_in_a_line(after, tmp_path):
    """It reaches the workers too, while they start and while they compute: their tracebacks covered the line."""
    command = [sys.executable, "-m", "crt_exp.report", "hrf-pointwise", "--out", str(tmp_path / "out")]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env,
                          start_new_session=True) as process:
        cells = tmp_path / "outputs/hrf-pointwise/cells.jsonl"
        while not (cells.exists() if after == "a cell" else cells.parent.exists()):
            time.sleep(0.05)
        time.sleep(0.5 if after == "the start" else 0)
        os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and len(said.splitlines()) == 1, said


def test_interval():
    found = interval([0.5, 0.7, 0.9], "a")
    assert found["a"] == pytest.approx(0.7)
    assert found["a_ci95"] == pytest.approx(4.302652 * 0.2 / math.sqrt(3), rel=1e-5)
    assert interval([1.0], "a")["a_ci95"] is None


def test_figure1_statement():
    x = torch.zeros(1, 64, dtype=torch.float64)
    x[0, 0] = 5
    assert (log_variances(PosRF(), x, x) - log_variances(OPRF(), x, x)).item() == pytest.approx(61.22, abs=0.01)


def test_figure2_statements():
    """CRT 5.1 at sigma = 1: normal e^80 (gerf) and e^75 (oprf), heterogen e^125 both."""
    for regime, least in (("normal", (80, 75)), ("heterogen", (125, 125))):
        x, y = REGIMES[regime](300, 64, torch.Generator().manual_seed(0))
        mean = [log_variances(phi, x, y).mean() for phi in (TrigRF(), GERF(), PosRF(), OPRF())]
        assert mean[0] - mean[1] > least[0] and mean[2] - mean[3] > least[1]


def test_variance_task_resumes():
    task = Variance("digits", 50, [0.1, 0.5, 1.0], "gaussian")
    whole = list(task.records(OPRF_64, 0))
    assert list(task.records(OPRF_64, 0, whole[:1])) == whole[1:] and whole[-1]["final"]
    with pytest.raises(ValueError, match="no error"):
        next(task.records(EXACT, 0))
    with pytest.raises(ValueError, match="task.regime"):
        Variance("gauss", 50, [1.0], "gaussian")


def test_projections_error_falls_with_m():
    records = list(ProjectionErrors(64, 8, [16, 256], 6, scale=0.5).records(OPRF_64, 0))
    assert records[1]["mse"] < records[0]["mse"] / 4 and records[1]["final"]


def test_splits_do_not_depend_on_the_mechanism():
    task = UCI("wine", "ordinal", "standard", (0.8, 0.1, 0.1), 2, [0.2])
    one, two = task.divide(3, 1), task.divide(3, 1)
    assert all((a == b).all() for a, b in zip(one.x + one.y, two.x + two.y))
    assert len(np.concatenate(one.x)) == 178


def test_mnist_reader(tmp_path):
    with pytest.raises(DataError, match="t10k-images-idx3-ubyte.gz"):
        mnist.images("test", tmp_path)
    header = (2051).to_bytes(4, "big") + (2).to_bytes(4, "big") + (28).to_bytes(4, "big") * 2
    (tmp_path / mnist.FILES["test"]).write_bytes(gzip.compress(header + bytes(2 * 784)))
    assert mnist.images("test", tmp_path).shape == (2, 28, 28)
    (tmp_path / mnist.FILES["test"]).write_bytes(gzip.compress(header + bytes(784)))
    with pytest.raises(DataError, match="truncated"):
        mnist.images("test", tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(header[:4]))
    with pytest.raises(DataError, match="not an idx file of labels"):
        mnist.labels("test", tmp_path)
    (tmp_path / mnist.FILES["test"]).write_bytes(b"not gzip")
    with pytest.raises(DataError, match="cannot be unpacked"):
        mnist.images("test", tmp_path)


@pytest.mark.skipif(not os.environ.get("CRT_DATA"), reason="CRT_DATA is not set: the official files are needed")
def test_mnist_official():
    assert mnist.images("test").shape == (10_000, 28, 28)
    assert mnist.labels("test").shape == (10_000,) and mnist.labels("test")[:4].tolist() == [7, 2, 1, 0]
