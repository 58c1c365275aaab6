"""Rows of a page, the verdicts on its claims, and the sweeps that make its rows."""

import csv
import errno
import gzip
import math
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from crt_exp.experiments.report import pages, sweeps
from crt_exp.experiments.report.pages import Page, check
from crt_exp.experiments.report.rows import (
    CONFLICT,
    UNDECIDED,
    Claim,
    geometric_mean_ci,
    holm,
    judge,
    mean_ci,
    read_rows,
    rows_path,
    share,
    write_rows,
)
from crt_exp.experiments.report.sweeps import (
    RunsFailed,
    is_finished,
    rows_of_runs,
    run_missing,
    sweep,
)
from crt_exp.registry import ConfigError

# ---- rows


ORIGIN = {
    "seconds": "",
    "commit": "0123456789ab",
    "date": "2026-01-01",
    "versions": "torch 1, numpy 2",
}
COLUMNS = ("method", "m", "sample", "metric", "value")
ROWS = pd.DataFrame(
    [
        dict(zip(COLUMNS, row)) | ORIGIN
        for row in [
            ("exact", "", "", "loss", 1.0),
            ("pos", 8, "0", "loss", 2.0),
            ("pos", 8, "1", "loss", 4.0),
            ("pos", 16, "1", "loss", 6.0),
            ("oprf", 8, "1", "loss", 3.0),
            ("oprf", 8, "2", "loss", 9.0),
        ]
    ]
)


def test_values_are_means_of_a_sample_and_pairs_share_samples(tmp_path):
    written = write_rows("page", ROWS, tmp_path).read_bytes()
    rows = read_rows("page", tmp_path)
    actual = rows.values("loss", "pos").to_dict()
    assert actual == {"0": 2.0, "1": 5.0}
    actual = rows.values("loss", "pos", m=8).to_dict()
    assert actual == {"0": 2.0, "1": 4.0}
    actual = rows.paired("pos", "oprf", "loss", m=8).to_dict()
    assert actual == {"1": 1.0}
    assert rows.paired("pos", "exact", "loss").to_dict() == {
        "0": 1.0,
        "1": 4.0,
    }  # exact has no sample
    assert rows.methods("loss") == ["exact", "pos", "oprf"]
    assert rows.methods("loss", m="") == ["exact"]
    actual = len(rows.select("loss", "pos", m=[8, 16]))
    assert actual == 3
    again = pd.read_csv(tmp_path / "page.csv", keep_default_na=False)
    assert write_rows("page", again, tmp_path).read_bytes() == written
    write_rows("page", pd.concat([ROWS] * 5000), tmp_path)  # large tables are compressed
    assert rows_path("page", tmp_path).suffix == ".gz"
    assert not (tmp_path / "page.csv").exists()
    actual = len(read_rows("page", tmp_path).frame)
    expected = 5000 * len(ROWS)
    assert actual == expected


LOOKS = [
    *("012345678901", "5285e1900000", "12e456789012", "123456789012", "48f8ed069106+"),
    *("1e5", "01", "1.0", "1.50", "+1", "1_000", " 1", "0x10", "nan", "NA", "None", "null", "inf"),
    *("-inf", "true", "False", "2026-11-28", "12345678901234567890123", ""),
]


@pytest.mark.parametrize("column", ["sweep", "method", "sample", "metric", "dataset", "commit"])
@pytest.mark.parametrize("text", LOOKS)
def test_text_that_looks_like_a_number_stays_as_it_is(column, text, tmp_path):
    for others in (text, "other"):
        frame = ROWS.assign(sweep="a", dataset="wine")
        frame[column] = [text, *[others] * (len(frame) - 1)]
        write_rows("page", frame, tmp_path)
        once = read_rows("page", tmp_path).frame
        assert column == "dataset" or [*once[column]] == [*frame[column]]
        write_rows("page", once, tmp_path)
        lines = csv.DictReader((tmp_path / "page.csv").open())
        assert [line[column] for line in lines] == [*frame[column]]


def test_measured_values_are_numbers_in_any_notation(tmp_path):
    write_rows("page", ROWS, tmp_path)
    text = (tmp_path / "page.csv").read_text().replace(",1.0,", ",1e0,").replace(",2.0,", ",inf,")
    (tmp_path / "page.csv").write_text(text)
    values = read_rows("page", tmp_path).frame["value"]
    assert values.dtype == float
    assert values[0] == 1
    assert values[1] == math.inf


@pytest.mark.parametrize("packed, part", [(False, 0.3), (False, 0.97), (True, 0.6), (True, 0.999)])
def test_a_file_that_is_cut_off_is_refused(packed, part, tmp_path):
    text = ROWS.to_csv(index=False, lineterminator="\n").encode()
    content = gzip.compress(text) if packed else text
    (tmp_path / ("page.csv.gz" if packed else "page.csv")).write_bytes(
        content[: int(part * len(content))]
    )
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
            pages.has_rows("page", tmp_path)


def test_missing_rows_name_the_command(tmp_path):
    with pytest.raises(FileNotFoundError, match="python -m crt_exp report page --run"):
        read_rows("page", tmp_path)
    write_rows("page", ROWS.drop(columns="sample"), tmp_path)
    with pytest.raises(ValueError, match="missing .*sample"):
        read_rows("page", tmp_path)


# ---- intervals and verdicts: they cover what they state, and leave open what they cannot decide


def verdicts(claims, **options):
    return [each.verdict for each in judge(claims, **options)]


def test_mean_ci_equals_scipy():
    values = np.random.default_rng(0).normal(1, 2, 9)
    found = mean_ci(values, against=0.5)
    test = stats.ttest_1samp(values, 0.5)
    low, high = test.confidence_interval(0.95)
    actual = [found.mean - found.half, found.mean + found.half, found.p]
    assert np.allclose(actual, [low, high, test.pvalue])
    assert mean_ci([0.0, 0.0]).p == 1
    assert mean_ci([1.0, 1.0]).p == 0
    with pytest.raises(ValueError, match="sample 1: expected a finite value"):
        mean_ci([1.0, math.nan, 2.0])


def test_overlapping_splits_get_wider_intervals_that_cover():
    """Means of random halves of one sample: Student's interval is far too narrow, Nadeau and Bengio's is not."""
    rng = np.random.default_rng(1)
    covered = {0.0: 0, 1.0: 0}
    for _ in range(400):
        sample = rng.normal(size=40)
        values = [rng.permutation(sample)[:20].mean() for _ in range(15)]
        for overlap in covered:
            found = mean_ci(values, overlap=overlap)
            covered[overlap] += abs(found.mean) <= found.half
    assert covered[0.0] < 0.7 * 400
    assert covered[1.0] > 0.93 * 400


def test_holm_by_hand():
    actual = holm([0.01, 0.04, 0.03])
    assert np.allclose(actual, [0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_all_verdicts():
    cases = {
        "up": [1.0, 1.1, 0.9, 1.0],
        "down": [-1.0, -1.1, -0.9, -1.0],
        "none": [1.0, -1.0, 0.5, -0.4],
    }
    actual = verdicts([Claim("above", cases)])
    assert actual == ["supported", "contradicted", UNDECIDED]
    actual = verdicts([Claim("below", cases, below=0)])
    assert actual == ["contradicted", "supported", UNDECIDED]
    actual = verdicts([Claim("above", cases)], reduced=True)[0]
    assert actual == "supported (reduced scale)"
    actual = verdicts([Claim("above", cases, theory={"up": -1.0, "down": -1.0})])[:2]
    assert actual == [
        CONFLICT,
        "contradicted",
    ]
    actual = verdicts([Claim("above", cases, fails={"up": "uniform attention costs 0"})])[0]
    assert actual == UNDECIDED
    actual = verdicts(
        [Claim("closed", {"": -61.2}, below=-60), Claim("closed", {"": -61.2}, above=-60)]
    )
    assert actual == ["supported", "contradicted"]
    actual = verdicts(
        [
            Claim("one sample", {"": [3.0]}),
            Claim("none", {"": []}),
            Claim("no sample", not_measured="too large"),
        ]
    )
    assert actual == [UNDECIDED, "not measured"]


def test_sign_test_equals_scipy_where_one_sample_decides_the_mean():
    values = [-60.0, *np.linspace(0.5, 1.5, 11)]
    by_signs, by_mean = judge(
        [Claim("above", {"": values}, sign_test=True), Claim("above", {"": values})]
    )
    assert np.isclose(by_signs.estimate.p, stats.binomtest(11, 12).pvalue)
    assert (by_signs.verdict, by_mean.verdict) == ("supported", UNDECIDED)
    assert by_signs.to_text() == "+0.95 (median; 11 of 12 samples above the threshold)"


def test_ratios_are_tested_as_logarithms():
    values = np.log([0.5, 0.6, 0.55, 0.45])
    (found,) = judge([Claim("half", {"": values}, below=0.8, log=True, unit="times")])
    assert found.verdict == "supported"
    assert found.to_text().startswith(f"{np.exp(values.mean()):.3g} [")
    expected = geometric_mean_ci(np.exp(values))[0]
    assert found.number == pytest.approx(expected)


def test_an_interval_excludes_the_threshold_exactly_where_the_verdict_is_decided():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        cases = {
            str(i): rng.normal(mean, size=rng.integers(3, 12))
            for i, mean in enumerate(rng.uniform(0, 2, size=rng.integers(2, 9)))
        }
        for each in judge(
            [
                Claim("above", cases),
                Claim("overlap", cases, overlap=0.05),
                Claim("ratio", cases, below=1.5, log=True),
            ]
        ):
            threshold = 1.5 if each.claim.log else 0.0
            low, high = each.ends
            assert (low > threshold or high < threshold) == (each.verdict != UNDECIDED), (
                seed,
                each.claim,
            )


def test_a_share_has_the_mean_of_the_ratio_and_an_interval_that_covers():
    rng = np.random.default_rng(2)
    covered = 0
    for _ in range(400):
        whole = rng.normal(3, 0.5, 12)
        samples = share(pd.Series(0.7 * whole + rng.normal(0, 0.2, 12)), pd.Series(whole))
        found = mean_ci(samples)
        covered += abs(found.mean - 0.7) <= found.half
    assert covered > 0.9 * 400
    assert samples.mean() == pytest.approx(0.7, abs=0.1)


# ---- sweeps: override lists, runs that fail or diverge, and rows of their records


FAST = "task=variance_by_length task.most=3"
RUNS = sweep(FAST, features=["pos", "oprf sampler=iid"], **{"task.d": [4]})
TRAINED = "task=recall trainer.steps=4 task.evaluated=8"


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def page_of(**small):
    return Page(
        "mine", "", "", small=small, columns=["method", "d", "sum"], metrics=["gain"], measured=[]
    )


def test_a_sweep_is_the_product_of_its_axes():
    runs = sweep(FAST, features=["pos", "oprf sampler=iid"], **{"task.d": [4, 8]})
    assert [run.name for run in runs] == [
        "pos_4",
        "pos_8",
        "oprf-sampler=iid_4",
        "oprf-sampler=iid_8",
    ]
    assert runs[2].overrides == (
        "task=variance_by_length",
        "task.most=3",
        "features=oprf",
        "sampler=iid",
        "task.d=4",
    )
    (run,) = sweep(
        "task=glue trainer.lr=1",
        attention=["favorpp m=64 redraw_every=10"],
        seed=[3],
        data={"SST-2": "task.dataset=sst2 trainer.lr=2"},
    )
    assert run.overrides == (
        "task=glue",
        "trainer.lr=2",
        "attention=favorpp",
        "features.m=64",
        "attention.redraw_every=10",
        "seed=3",
        "task.dataset=sst2",
    )
    assert run.columns == {"method": "favorpp m=64 redraw_every=10", "seed": 3, "data": "SST-2"}
    with pytest.raises(ConfigError, match="two different runs have the name x"):
        check(
            page_of(
                a=sweep("seed=0", task={"x": "task=uci"}) + sweep("seed=1", task={"x": "task=uci"})
            )
        )


def test_missing_runs_are_made_and_finished_ones_stay(tmp_path):
    run_missing(RUNS[:1], tmp_path / "runs", tmp_path)
    kept = (tmp_path / "runs/pos_4/metrics.jsonl").stat().st_mtime_ns
    run_missing(RUNS, tmp_path / "runs", tmp_path)
    assert (tmp_path / "runs/pos_4/metrics.jsonl").stat().st_mtime_ns == kept
    frame = rows_of_runs(RUNS, tmp_path / "runs", "fig1", ["method", "d", "sum"], ["gain"])
    assert [*frame.columns[:7]] == ["sweep", "method", "d", "sum", "sample", "metric", "value"]
    assert len(frame) == 2 * 3
    assert {*frame["d"]} == {4}
    gain = frame[(frame.method == "pos") & (frame.metric == "gain")]
    assert (gain.value.abs() < 1e-9).all()
    assert [*gain["sum"]] == [1, 2, 3]
    assert (frame["seconds"] != "").sum() == 2
    assert frame["versions"].str.startswith("torch ").all()


def test_a_run_that_fails_is_named_and_the_others_are_made(tmp_path, capsys):
    runs = sweep(FAST, **{"task.d": [0, 4]}, features=["pos"])
    with pytest.raises(RunsFailed, match="1 of 2 runs failed.*0_pos"):
        run_missing(runs, tmp_path / "runs", tmp_path)
    assert is_finished(tmp_path / "runs/4_pos")
    assert "task.d" in capsys.readouterr().err


def test_a_run_that_diverged_is_a_result(tmp_path):
    """It is not started again, and its row states it."""
    runs = sweep(
        f"{TRAINED} trainer.lr=1e30 trainer.warmup=0 trainer.clip=null trainer.schedule=constant",
        attention=["exact"],
        seed=[0],
    )
    run_missing(runs, tmp_path / "runs", tmp_path)
    assert (tmp_path / "runs/exact_0" / sweeps.DIVERGED).is_file()
    assert is_finished(tmp_path / "runs/exact_0")
    (row,) = rows_of_runs(runs, tmp_path / "runs", "a", ["method"], ["diverged", "loss"]).to_dict(
        "records"
    )
    assert (row["metric"], row["value"], row["method"], row["sample"]) == (
        "diverged",
        1,
        "exact",
        0,
    )


def test_training_runs_give_curves_and_speed(tmp_path):
    runs = sweep(
        f"{TRAINED} trainer.eval_every=2 trainer.log_every=1", attention=["exact"], seed=[0]
    )
    run_missing(runs, tmp_path / "runs", tmp_path)
    with_steps = rows_of_runs(
        runs, tmp_path / "runs", "a", ["method", "step"], ["loss", "steps_per_s"]
    )
    end = rows_of_runs(runs, tmp_path / "runs", "a", ["method"], ["loss", "steps_per_s"])
    assert [*end.metric] == ["loss", "steps_per_s"]
    assert (end.value > 0).all()
    assert len(with_steps[with_steps.metric == "loss"]) > 1


def test_part_of_a_page():
    """METHODS and SEEDS choose runs; their rows go to a folder of their own, and rows of other sweeps stay."""
    page = page_of(
        **{"a": RUNS, "b/c": sweep(FAST, features=["hyp"])}, b=sweep(FAST, features=["trig"])
    )
    assert page.targets == ["a", "b"]
    actual = [*page.sweeps("small", "b")]
    assert actual == ["b/c", "b"]
    for refused, message in [
        (lambda: page.sweeps("small", "c"), "unknown sweep of the page mine 'c'"),
        (lambda: page.sweeps("full"), "SIZE=full: page mine has only small"),
        (lambda: page.run(methods=["nope"]), "unknown method 'nope'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            refused()
    actual = page.run(wanted="a", methods=["pos"])
    assert actual == Path("outputs/report/part")
    assert not pages.has_rows("mine")
    assert pages.has_rows("mine", Path("outputs/report/part"))
    page.run(wanted="a")
    page.run(wanted="b")
    actual = [*read_rows("mine").frame["sweep"].unique()]
    assert actual == ["a", "b/c", "b"]
