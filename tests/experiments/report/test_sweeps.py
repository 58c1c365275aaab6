"""Sweeps: override lists, runs that fail or diverge, and rows of their records."""

from pathlib import Path

import pytest

from crt_exp.experiments.report import sweeps
from crt_exp.experiments.report.pages import Page
from crt_exp.experiments.report.rows import has_rows, read_rows
from crt_exp.experiments.report.sweeps import (
    RunsFailed,
    is_finished,
    rows_of_runs,
    run_missing,
    staged_sweep,
    sweep,
)
from crt_exp.registry import ConfigError

FAST = "task=variance_by_length task.most=3"
RUNS = sweep(FAST, features=["pos", "oprf sampler=iid"], **{"task.d": [4]})
TRAINED = "task=recall trainer.steps=4 task.evaluated=8"
PART = Path("outputs/report/part")


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def page_of(small):
    return Page(
        "mine",
        title="",
        finding="",
        small=small,
        columns=["method", "d", "sum"],
        metrics=["gain"],
        measured=[],
        tables=lambda rows: {},
    )


def test_a_sweep_is_the_product_of_its_axes():
    runs = sweep(FAST, features=["pos", "oprf sampler=iid"], **{"task.d": [4, 8]})
    names = [run.name for run in runs]
    assert names == ["pos_4", "pos_8", "oprf-sampler=iid_4", "oprf-sampler=iid_8"]
    expected = f"{FAST} features=oprf sampler=iid task.d=4"
    assert runs[2].overrides == tuple(expected.split())


def test_methods_and_columns_become_overrides():
    (run,) = sweep(
        "task=glue trainer.lr=1",
        attention=["favorpp m=64 redraw_every=10"],
        seed=[3],
        data={"SST-2": "task.dataset=sst2 trainer.lr=2"},
        setting="swapped",
    )
    expected = (
        "task=glue trainer.lr=2 attention=favorpp features.m=64 attention.redraw_every=10 seed=3 "
        "task.dataset=sst2"
    )
    assert run.overrides == tuple(expected.split())
    assert run.columns == {
        "method": "favorpp m=64 redraw_every=10",
        "seed": 3,
        "data": "SST-2",
        "setting": "swapped",
    }


def test_stages_start_from_the_one_before():
    runs = staged_sweep("model", "task=mlm", {16: "trainer.lr=2", 32: "trainer.lr=1"}, seeds=2)
    assert [run.name for run in runs] == ["16_0", "16_1", "32_0", "32_1"]
    assert "task.init={runs}/model/16_1" in runs[3].overrides
    assert not any("init" in override for override in runs[1].overrides)


def test_different_runs_of_one_name_are_refused():
    first = sweep("seed=0", task={"x": "task=uci"})
    second = sweep("seed=1", task={"x": "task=uci"})
    with pytest.raises(ConfigError, match="two different runs have the name x"):
        page_of({"a": first + second}).check()


def test_missing_runs_are_run_and_rows_have_columns_of_runs_and_records(tmp_path):
    """Finished runs stay."""
    folder = tmp_path / "runs"
    records = folder / "pos_4/metrics.jsonl"
    run_missing(RUNS[:1], folder, tmp_path)
    written = records.stat().st_mtime_ns
    run_missing(RUNS, folder, tmp_path)
    assert records.stat().st_mtime_ns == written
    frame = rows_of_runs(RUNS, folder, "fig1", ["method", "d", "sum"], ["gain"])
    assert [*frame.columns[:7]] == ["sweep", "method", "d", "sum", "sample", "metric", "value"]
    assert len(frame) == 2 * 3
    assert {*frame["d"]} == {4}
    gain = frame[(frame.method == "pos") & (frame.metric == "gain")]
    assert (gain.value.abs() < 1e-9).all()
    assert [*gain["sum"]] == [1, 2, 3]
    assert (frame["seconds"] != "").sum() == 2
    assert frame["versions"].str.startswith("torch ").all()


def test_a_failed_run_is_named_and_the_others_are_run(tmp_path, capsys):
    runs = sweep(FAST, **{"task.d": [0, 4]}, features=["pos"])
    with pytest.raises(RunsFailed, match="1 of 2 runs failed.*0_pos"):
        run_missing(runs, tmp_path / "runs", tmp_path)
    assert is_finished(tmp_path / "runs/4_pos")
    assert "task.d" in capsys.readouterr().err


def test_training_runs_give_curves_and_speed_or_diverge(tmp_path):
    """A run that diverged is a result: it is not started again, and its row states it."""
    steep = "trainer.lr=1e30 trainer.warmup=0 trainer.clip=null trainer.schedule=constant"
    diverging = sweep(f"{TRAINED} {steep}", attention=["exact"], seed=[0])
    options = f"{TRAINED} trainer.eval_every=2 trainer.log_every=1"
    trained = sweep(options, attention=["exact"], seed=[1])
    folder = tmp_path / "runs"
    run_missing(diverging + trained, folder, tmp_path)
    assert (folder / "exact_0" / sweeps.DIVERGED).is_file()
    assert is_finished(folder / "exact_0")
    frame = rows_of_runs(diverging, folder, "a", ["method"], ["diverged", "loss"])
    (row,) = frame.to_dict("records")
    assert row["metric"] == "diverged"
    assert row["value"] == 1
    assert row["method"] == "exact"
    assert row["sample"] == 0
    metrics = ["loss", "steps_per_s"]
    curve = rows_of_runs(trained, folder, "a", ["method", "step"], metrics)
    end = rows_of_runs(trained, folder, "a", ["method"], metrics)
    assert [*end.metric] == metrics
    assert (end.value > 0).all()
    assert len(curve[curve.metric == "loss"]) > 1


def test_unknown_parts_of_a_page_are_refused():
    page = page_of({"a": RUNS, "b/c": sweep(FAST, features=["hyp"])})
    assert page.targets == ["a", "b"]
    assert [*page.sweeps("small", "b")] == ["b/c"]
    with pytest.raises(ConfigError, match="unknown sweep of the page mine 'c'"):
        page.sweeps("small", "c")
    with pytest.raises(ConfigError, match="SIZE=full: page mine has only small"):
        page.sweeps("full")
    with pytest.raises(ConfigError, match="unknown method 'nope'"):
        page.run(methods=["nope"])


def test_rows_of_some_methods_have_a_folder_and_rows_of_other_sweeps_stay():
    trig = sweep(FAST, features=["trig"])
    page = page_of(
        {
            "a": RUNS,
            "b/c": sweep(FAST, features=["hyp"]),
            "b": trig,
        }
    )
    assert page.run(wanted="a", methods=["pos"]) == PART
    assert not has_rows("mine")
    assert has_rows("mine", PART)
    page.run(wanted="a")
    page.run(wanted="b")
    assert [*read_rows("mine").frame["sweep"].unique()] == ["a", "b/c", "b"]
