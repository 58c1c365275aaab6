"""Rows of a page: files, filters, and pairs of methods."""

import csv
import errno
import gzip
import math
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from crt_exp.experiments.intervals import mean_ci
from crt_exp.experiments.report import pages
from crt_exp.experiments.report.rendering import measured_tables
from crt_exp.experiments.report.rows import (
    Rows,
    added,
    has_rows,
    read_rows,
    rows_path,
    share,
    write_rows,
)
from crt_exp.registry import ConfigError

ORIGIN = {
    "seconds": "",
    "commit": "0123456789ab",
    "date": "2026-01-01",
    "versions": "torch 1, numpy 2",
}
ROWS = pd.DataFrame(
    {
        "method": ["exact", "pos", "pos", "pos", "oprf", "oprf"],
        "m": ["", 8, 8, 16, 8, 8],
        "sample": ["", "0", "1", "1", "1", "2"],
        "metric": "loss",
        "value": [1.0, 2.0, 4.0, 6.0, 3.0, 9.0],
        **ORIGIN,
    }
)


def test_samples_after_the_last_look_decide_alone():
    samples = pd.Series([9.0, 9.0, 1.0, 2.0], ["0", "1", "2", "10"])
    assert added(samples, 2).tolist() == [1, 2]
    assert added(samples, 2, 3).tolist() == [2]
    assert added(samples, 2, 11).tolist() == [1, 2]
    assert added(samples, 11).tolist() == [9, 9, 1, 2]


def test_renamed_methods_share_a_name():
    renamed = Rows(ROWS).renamed({"oprf": "pos"})
    assert renamed.methods("loss") == ["exact", "pos"]
    assert renamed.values("loss", "pos", m=8).to_dict() == {"0": 2, "1": 3.5, "2": 9}


def test_methods_without_options_keep_labels():
    names = {"exact": "exact", "pos": "reformer, 12 layers", "oprf": "favorpp m=8 redraw_every=20"}
    rows = Rows(ROWS).renamed(names).without_options()
    assert rows.methods("loss") == ["exact", "reformer, 12 layers", "favorpp"]


@pytest.fixture
def rows(tmp_path):
    write_rows("page", ROWS, tmp_path)
    return read_rows("page", tmp_path)


def test_values_are_means_of_a_sample_and_pairs_share_samples(rows):
    values = rows.values("loss", "pos")
    few = rows.values("loss", "pos", m=8)
    gain = rows.paired("pos", "oprf", "loss", m=8)
    assert values.to_dict() == {"0": 2.0, "1": 5.0}
    assert few.to_dict() == {"0": 2.0, "1": 4.0}
    assert gain.to_dict() == {"1": 1.0}
    from_exact = rows.paired("pos", "exact", "loss")  # exact has no sample
    assert from_exact.to_dict() == {"0": 1.0, "1": 4.0}


def test_methods_keep_their_order_and_filters_take_lists(rows):
    assert rows.methods("loss") == ["exact", "pos", "oprf"]
    assert rows.methods("loss", m="") == ["exact"]
    assert len(rows.select("loss", "pos", m=[8, 16])) == 3


def test_values_by_method_and_by_case_are_those_of_single_calls(rows):
    above = rows.by_method("loss", ["exact", "pos"], factor=100, less="exact")
    assert [*above] == ["pos"]
    assert above["pos"].to_dict() == {"0": 100.0, "1": 400.0}
    cases = {"few": {"m": 8}, "many": {"m": 16}}
    gains = rows.paired_by_case("pos", "oprf", "loss", cases)
    assert gains["few"].to_dict() == {"1": 1.0}
    assert gains["many"].empty
    gains = rows.paired_by_case("pos", "exact", "loss", {"all": {}}, looks=[1])
    assert gains["all"].to_dict() == {"1": 4.0}


def test_rows_are_written_as_they_were_read(tmp_path):
    written = write_rows("page", ROWS, tmp_path).read_bytes()
    again = pd.read_csv(tmp_path / "page.csv", keep_default_na=False)
    assert write_rows("page", again, tmp_path).read_bytes() == written


def test_large_tables_are_compressed(tmp_path):
    write_rows("page", ROWS, tmp_path)
    write_rows("page", pd.concat([ROWS] * 5000), tmp_path)
    assert rows_path("page", tmp_path).suffix == ".gz"
    assert not (tmp_path / "page.csv").exists()
    assert len(read_rows("page", tmp_path).frame) == 5000 * len(ROWS)


NUMBERS = [
    "012345678901",
    "5285e1900000",
    "48f8ed069106+",
    "1e5",
    "01",
    "1.50",
    "+1",
    "1_000",
    " 1",
    "0x10",
    "nan",
    "NA",
    "None",
    "null",
    "-inf",
    "true",
    "2026-11-28",
    "",
]


@pytest.mark.parametrize("column", ["sweep", "method", "sample", "metric", "commit"])
@pytest.mark.parametrize("text", NUMBERS)
def test_text_that_looks_like_a_number_is_read_as_text(column, text, tmp_path):
    frame = ROWS.assign(sweep="a")
    frame[column] = text
    write_rows("page", frame, tmp_path)
    once = read_rows("page", tmp_path).frame
    assert {*once[column]} == {text}
    write_rows("page", once, tmp_path)
    lines = csv.DictReader((tmp_path / "page.csv").open())
    assert {line[column] for line in lines} == {text}


def test_measured_values_are_numbers_in_any_notation(tmp_path):
    path = write_rows("page", ROWS, tmp_path)
    text = path.read_text()
    text = text.replace(",1.0,", ",1e0,")
    text = text.replace(",2.0,", ",inf,")
    path.write_text(text)
    values = read_rows("page", tmp_path).frame["value"]
    assert values.dtype == float
    assert values[0] == 1
    assert values[1] == math.inf


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz"])
@pytest.mark.parametrize("part", [0.3, 0.6, 0.97])
def test_a_file_that_is_cut_off_is_refused(suffix, part, tmp_path):
    content = ROWS.to_csv(index=False, lineterminator="\n").encode()
    if suffix == ".csv.gz":
        content = gzip.compress(content)
    size = int(part * len(content))
    (tmp_path / f"page{suffix}").write_bytes(content[:size])
    with pytest.raises(ValueError, match="page.csv.*truncated or damaged"):
        read_rows("page", tmp_path)


@pytest.mark.parametrize("owner, name", [(os, "listdir"), (Path, "read_bytes")])
def test_rows_that_cannot_be_read_are_neither_absent_nor_damaged(
    owner, name, tmp_path, monkeypatch
):
    def fail(*arguments):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    write_rows("page", ROWS, tmp_path)
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(OSError, match="Too many open files"):
        read_rows("page", tmp_path)
    if owner is os:  # rows of other sweeps would be left out of the new file
        with pytest.raises(OSError, match="Too many open files"):
            has_rows("page", tmp_path)


def test_missing_rows_name_the_command(tmp_path):
    with pytest.raises(FileNotFoundError, match="python -m crt_exp report page --run"):
        read_rows("page", tmp_path)
    write_rows("page", ROWS.drop(columns="sample"), tmp_path)
    with pytest.raises(ValueError, match="missing .*sample"):
        read_rows("page", tmp_path)


def test_a_share_has_the_mean_of_the_ratio_and_an_interval_that_covers():
    rng = np.random.default_rng(2)
    covered = 0
    for _ in range(400):
        whole = pd.Series(rng.normal(3, 0.5, 12))
        gain = 0.7 * whole + rng.normal(0, 0.2, 12)
        samples = share(gain, whole)
        mean = mean_ci(samples)
        covered += abs(mean.mean - 0.7) <= mean.half
    assert covered > 0.9 * 400
    assert samples.mean() == pytest.approx(0.7, abs=0.1)


def test_a_partial_page_has_the_rows_and_the_quotes_of_its_methods_alone():
    frame = pd.DataFrame({"method": ["trig m=8", "oprf", ""], "value": [1, 2, 3]})
    assert [*pages._rows_of_methods(frame, ["trig"])["method"]] == ["trig m=8", ""]
    with pytest.raises(ConfigError, match="unknown method 'pos'"):
        pages._rows_of_methods(frame[:2], ["pos"])
    table = pd.DataFrame({"wine": [1.0, 2.0, 3.0]}, index=["OPRF", "OPRF, paper", "PosRF, paper"])
    assert [*measured_tables({"": table}, "--methods oprf")[""].index] == ["OPRF", "OPRF, paper"]
    assert len(measured_tables({"": table}, "")[""]) == 3
