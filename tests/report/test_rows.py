"""Rows of a page: selected, paired by sample, and refused where the file is not whole."""

import gzip

import pandas as pd
import pytest

from crt_exp.report.rows import Rows, read_rows, rows_path, write_rows

ORIGIN = {"seconds": "", "commit": "0123456789ab", "date": "2026-01-01", "versions": "torch 1, numpy 2"}


COLUMNS = ("method", "m", "sample", "metric", "value")


def frame_of(*rows):
    return pd.DataFrame([dict(zip(COLUMNS, row)) | ORIGIN for row in rows])


ROWS = frame_of(("exact", "", "", "loss", 1.0), ("pos", 8, "0", "loss", 2.0), ("pos", 8, "1", "loss", 4.0),
                ("pos", 16, "1", "loss", 6.0), ("oprf", 8, "1", "loss", 3.0), ("oprf", 8, "2", "loss", 9.0))


def test_values_are_means_of_a_sample_and_pairs_share_samples(tmp_path):
    write_rows("page", ROWS, tmp_path)
    rows = read_rows("page", tmp_path)
    assert rows.values("loss", "pos").to_dict() == {"0": 2.0, "1": 5.0}
    assert rows.values("loss", "pos", m=8).to_dict() == {"0": 2.0, "1": 4.0}
    assert rows.paired("pos", "oprf", "loss", m=8).to_dict() == {"1": 1.0}
    assert rows.paired("pos", "exact", "loss").to_dict() == {"0": 1.0, "1": 4.0}  # exact has no sample
    assert rows.methods("loss") == ["exact", "pos", "oprf"] and rows.methods("loss", m="") == ["exact"]
    assert len(rows.select("loss", "pos", m=[8, 16])) == 3


def test_rows_are_read_as_they_were_written(tmp_path):
    write_rows("page", ROWS, tmp_path)
    first = rows_path("page", tmp_path).read_bytes()
    assert write_rows("page", pd.read_csv(tmp_path / "page.csv", keep_default_na=False), tmp_path).read_bytes() == first


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.97, 0.999])
def test_a_file_that_is_cut_off_is_refused(packed, share, tmp_path):
    text = ROWS.to_csv(index=False, lineterminator="\n").encode()
    content = gzip.compress(text) if packed else text
    (tmp_path / ("page.csv.gz" if packed else "page.csv")).write_bytes(content[:int(share * len(content))])
    with pytest.raises(ValueError, match="page.csv.*truncated or damaged"):
        read_rows("page", tmp_path)


def test_missing_rows_name_the_command(tmp_path):
    with pytest.raises(FileNotFoundError, match="python -m crt_exp.report page --run"):
        read_rows("page", tmp_path)
    write_rows("page", ROWS.drop(columns="sample"), tmp_path)
    with pytest.raises(ValueError, match="missing .*sample"):
        read_rows("page", tmp_path)


def test_large_tables_are_compressed(tmp_path):
    write_rows("page", ROWS, tmp_path)
    write_rows("page", pd.concat([ROWS] * 5000), tmp_path)
    assert rows_path("page", tmp_path).suffix == ".gz" and not (tmp_path / "page.csv").exists()
    assert isinstance(read_rows("page", tmp_path), Rows)
