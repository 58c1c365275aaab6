"""What reports rest on: the commit, intervals, measurements of maps, and the files of MNIST."""

import gzip
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from crt_exp import config
from crt_exp.data import DataError, mnist
from crt_exp.features import GERF, OPRF, PosRF, TrigRF
from crt_exp.mechanism import Mechanism
from crt_exp.metrics import interval
from crt_exp.measure.attention_errors import ProjectionErrors
from crt_exp.tasks.uci import UCI
from crt_exp.measure.variance import REGIMES, Variance, log_variances
from crt_exp.oldreport import __main__ as command_line
from crt_exp.oldreport.draws import FOLDER
from crt_exp.oldreport.page import Page
from crt_exp.runner.run import commit

OPRF_64, EXACT = Mechanism.of(features="oprf", m=64), Mechanism.of("exact")


@pytest.mark.skipif(not (config.CONF.parent / ".git").exists(), reason="not a checkout")
def test_commit_is_that_of_the_checkout():
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=config.CONF)
    assert commit().removesuffix("+changes") == found.stdout.strip()


@pytest.mark.parametrize("name, near", [("fig22", "fig2"), ("tabel1", "table1")])
def test_misspelt_report_names_the_nearest(name, near, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["report", name])
    with pytest.raises(SystemExit) as error:
        command_line.main()
    said = capsys.readouterr().err
    assert error.value.code == 2 and f"did you mean {near}?" in said and "Traceback" not in said


def test_interval():
    found = interval([0.5, 0.7, 0.9], "a")
    assert found["a"] == pytest.approx(0.7)
    assert found["a_ci95"] == pytest.approx(4.302652 * 0.2 / math.sqrt(3), rel=1e-5)
    assert interval([1.0], "a")["a_ci95"] is None


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


def test_the_demo_ends_with_a_table_in_columns():
    """That of the committed page: every row of the first table, and its empty cells."""
    title, head, *rows = command_line.first_table(Page("demo", FOLDER)).splitlines()
    assert title.startswith("Test accuracy") and head.split() == ["map", "128", "columns", "128", "projections"]
    assert {row.split()[0] for row in rows} >= {"trig", "oprf", "exact", "majority"}
    assert all("±" in row for row in rows) and len({row.index("±") for row in rows}) == 1
