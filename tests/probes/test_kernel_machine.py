"""task=kernel: the same numbers from every format, number of processes and interruption; and what it refuses."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sklearn.linear_model import Ridge

from crt_exp import times
from crt_exp.data import row_files
from crt_exp.features import TrigRF
from crt_exp.mechanism import Mechanism
from crt_exp.predict import main
from crt_exp.probes import kernel_machine, kernel_predict
from crt_exp.probes.kernel_machine import KernelMachine
from crt_exp.ridge import RandomFeatureRidge

OPTIONS = {"kind": None, "columns": ["a", "b", "c"], "onehot": None, "weight": None, "held_out": 0.1, "tested": 2000,
           "lengths": "scale", "alpha": "gcv", "precision": "float64", "save_seconds": 1e6}
TRIG = Mechanism.of(features="trig", m=30)


def table(n=5000, seed=0):
    """Of known noise 0.3."""
    r = np.random.default_rng(seed)
    X = r.normal(size=(n, 3)) * [1, 10, 0.1] + [0, 5, 1]
    mean = np.sin(2 * X[:, 0]) + X[:, 1] / 10
    y = mean + 0.3 * r.normal(size=n)
    label = np.where(mean > 0.5, "high", "low")
    return pd.DataFrame(X, columns=["a", "b", "c"]).assign(y=y, label=label, w=r.integers(1, 4, n))


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    monkeypatch.setattr(kernel_machine, "ENTRIES", 3 * 700)


@pytest.fixture
def written(tmp_path):
    table().to_csv(tmp_path / "t.csv", index=False)
    table().to_parquet(tmp_path / "t.parquet", row_group_size=1800)
    (tmp_path / "t").mkdir()
    for name, column in table().items():
        np.save(tmp_path / "t" / f"{name}.npy", column.to_numpy().astype(str) if name == "label" else column)
    return tmp_path


def last(data, target="y", mechanism=TRIG, seed=0, directory=None, **options):
    task = KernelMachine(str(data), target, **{**OPTIONS, **options})
    task.directory = directory
    return [*task.records(mechanism, seed)][-1]


TIMES = ("seconds", "rows_per_s", "memory_gib", "anonymous_gib", "step")


def numbers(record):
    return {name: value for name, value in record.items() if name not in TIMES}


@pytest.mark.parametrize("target, weight", [("y", None), ("label", "w")])
def test_every_format_gives_the_same_numbers(written, target, weight):
    found = [last(written / name, target, weight=weight) for name in ("t.csv", "t")]
    assert numbers(found[0]) == numbers(found[1])
    groups = last(written / "t.parquet", target, weight=weight)  # whose chunks end where groups of rows do
    metric = "r2" if target == "y" else "accuracy"
    assert groups[metric] == pytest.approx(found[0][metric], abs=2 * found[0][f"{metric}_ci95"])
    assert groups["rows"] + groups["tested"] == found[0]["rows"] + found[0]["tested"] == 5000


def test_large_csv_files_are_looked_at_in_places(written, monkeypatch):
    whole = last(written / "t.csv")
    monkeypatch.setattr(row_files, "SMALL", 1000)
    monkeypatch.setattr(kernel_machine, "LOOKED_AT", 640)
    assert last(written / "t.csv")["r2"] == pytest.approx(whole["r2"], abs=0.02)
    kept = row_files.open_rows(written / "t.csv").spread(["a", "label"], ["label"], 640)
    assert len(kept["a"]) == len(kept["label"]) == 640 and np.isin(kept["a"], table()["a"]).all()


def test_numbers_are_those_of_the_estimator(written):
    """Error, coverage of intervals and trivial error, on rows of known noise."""
    record = last(written / "t.csv", mechanism=Mechanism.of(features="trig", m=100), held_out=0.3, tested=1000)
    assert record["rmse"] == pytest.approx(0.3, abs=0.05) and record["rmse_ci95"] < 0.03
    assert record["coverage"] == pytest.approx(0.95, abs=0.02) and record["constant_rmse"] > 1
    assert 500 < record["tested"] <= 1000 and 3300 < record["rows"] < 3700
    X = table()[["a", "b", "c"]].to_numpy()
    X = (X - X.mean(0)) / X.std(0)
    model = RandomFeatureRidge("trig", n_components=200, random_state=0).fit(X, table()["y"])
    assert record["rmse"] == pytest.approx(np.mean((model.predict(X) - table()["y"]) ** 2) ** 0.5, rel=0.15)


def test_error_is_that_of_one_product_over_all_rows(written):
    """Of float32 features chunk by chunk against Z^T Z of all of them in float64."""
    task = KernelMachine(str(written / "t"), "y", **OPTIONS | {"precision": "float32"})
    begun = task.begun(TRIG, 0)
    features, parts = begun.model.features_, {True: ([], []), False: ([], [])}
    for chunk in task.file.chunks(task.names, [], task.size, lambda number: True):
        held = np.random.default_rng([0, chunk.number]).random(len(chunk.columns["y"])) < task.held_out
        for mask, (Z, y) in parts.items():
            batch = task.batch(chunk.columns).cut(np.flatnonzero(held == mask))
            Z.append(features.transform(begun.scale(batch.X).astype(np.float64)))
            y.append(batch.y[:, 0])
    record = [*task.records(TRIG, 0)][-1]
    (Z, y), (new, target) = ([*map(np.concatenate, parts[mask])] for mask in (False, True))
    theirs = Ridge(alpha=record["alpha"], solver="cholesky").fit(Z, y)
    assert record["rows"] == len(y) and record["tested"] == len(target)
    assert record["rmse"] == pytest.approx(np.mean((theirs.predict(new) - target) ** 2) ** 0.5, rel=0.01)


def test_rows_that_were_read_are_not_kept_in_memory(tmp_path):
    """Of 32 MiB in a folder of arrays."""
    np.save(tmp_path / "X.npy", np.ones((2**19, 16), np.float32))
    file = row_files.open_rows(tmp_path)
    read = (lambda: [len(chunk.columns["X.3"]) for chunk in file.chunks(["X.3", "X.5"], [], 2**14, lambda _: True)])
    times.give_back()
    assert times.added(read) < 10


def test_memory_beyond_the_data_is_that_of_the_run(written, monkeypatch):
    """The solution is part of it; where the system does not tell data from memory the whole stands under its name."""
    from crt_exp.probes import held_out
    scores, kept = kernel_machine.scores, []

    def large(*given):
        kept.append(np.ones(2**24))  # 128 MiB, after the last row
        time.sleep(5 * times.Anonymous.LOOK)
        return scores(*given)
    before = times.in_status("RssAnon") / 2**30
    monkeypatch.setattr(kernel_machine, "scores", large)
    record = last(written / "t")
    assert before + 0.12 < record["anonymous_gib"] < record["memory_gib"]
    header, rows = held_out.compared(record)
    assert header[-1] == "memory beyond data, GiB" and rows[0][-1] == f"{record['anonymous_gib']:.2f}"
    monkeypatch.setattr(times, "in_status", lambda name: None)
    header, rows = held_out.compared(whole := last(written / "t"))
    assert header[-1] == "memory, GiB" and rows[0][-1] == f"{whole['memory_gib']:.2f}"


@pytest.mark.parametrize("target", ["y", "label"])
def test_a_run_goes_on_from_its_last_sums(written, tmp_path, target):
    """To the same bits, wherever it was ended."""
    data, whole = written / "t", last(written / "t", target)
    for after in (1, 4):
        folder = tmp_path / f"{target} {after}"
        folder.mkdir()
        task = KernelMachine(str(data), target, **OPTIONS | {"save_seconds": 1e-9})
        task.directory = folder
        records = task.records(TRIG, 0)
        told = [next(records) for _ in range(after)]
        assert told[-1]["rows"] == 700 * after and told[-1]["rows_per_s"] > 0
        again = KernelMachine(str(data), target, **OPTIONS)
        again.directory = folder
        assert numbers([*again.records(TRIG, 0, told)][-1]) == numbers(whole)
        again.keep([whole], folder)
        assert {path.name for path in folder.iterdir()} == {"kernel.csv", "kernel.md", "kernel.json",
                                                            "model.safetensors"}


KILLED = """
import os, signal, sys
from crt_exp.probes import kernel_machine
kernel_machine.ENTRIES = 3 * 700
take, calls = kernel_machine.Reading.take, []
def killed(*given):
    calls.append(1)
    if len(calls) == 5 and "resume=auto" not in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    take(*given)
kernel_machine.Reading.take = killed
from crt_exp.train import main
main()
print(len(calls))
"""


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on(written, tmp_path):
    told = ["task=kernel", f"task.data={written / 't.csv'}", "task.target=y", "task.columns=[a,b,c]", "features.m=30",
            "task.save_seconds=1e-9", "task.precision=float64", "task.tested=2000", "logger=none"]

    def run(*more):
        return subprocess.run([sys.executable, "-c", KILLED, *told, *more], capture_output=True, text=True)
    folder = tmp_path / "killed"
    assert run(f"hydra.run.dir={folder}").returncode == -signal.SIGKILL
    ended = run(f"hydra.run.dir={folder}", "resume=auto")
    assert ended.returncode == 0 and ended.stdout.split()[-1] == "4", ended.stderr  # of 8 chunks
    record = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    whole = last(written / "t.csv")
    assert record["rmse"] == whole["rmse"] and record["rows"] == whole["rows"]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["y", "label"])
def test_two_processes_give_the_numbers_of_one(written, tmp_path, target):
    told = ["task=kernel", f"task.data={written / 't.csv'}", f"task.target={target}", "task.columns=[a,b,c]",
            "features.m=30", "task.precision=float64", "task.tested=2000", "logger=none",
            f"hydra.run.dir={tmp_path / 'two'}"]
    start = "from crt_exp.probes import kernel_machine as k; k.ENTRIES = 2100; from crt_exp.train import main; main()"
    (tmp_path / "start.py").write_text(start)
    ended = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
                            str(tmp_path / "start.py"), *told], capture_output=True, text=True,
                           env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, ended.stderr
    record = json.loads((tmp_path / "two/metrics.jsonl").read_text().splitlines()[-1])
    whole = numbers(last(written / "t.csv", target))
    for name, value in whole.items():
        assert record[name] == (pytest.approx(value, rel=1e-7) if isinstance(value, float) else value), name


def test_the_command_and_a_sweep_of_kernels(written, typed):
    code, out, err = typed("-m", "task=kernel", f"task.data={written / 't.csv'}", "task.target=y",
                           "task.columns=[a,b,c]", "features=matern,arc_cosine", "features.m=40", "logger=none",
                           "hydra.sweep.dir=sweep")
    assert code == 0 and out.count("| kernel machine |") == 2 and "95% intervals cover" in out, err
    assert all((written / f"sweep/{i}/kernel.md").is_file() for i in range(2))


def changed(folder, at, column, value):
    lines = (folder / "t.csv").read_text().splitlines()
    cells = lines[at - 1].split(",")
    cells[["a", "b", "c", "y", "label", "w"].index(column)] = value
    lines[at - 1] = ",".join(cells)
    (folder / "t.csv").write_text("\n".join(lines))


def array(folder, name, change):
    values = np.load(folder / "t" / f"{name}.npy")
    np.save(folder / "t" / f"{name}.npy", change(values))


def with_nan(values):
    values[4321] = np.nan
    return values


def cities(n=3000, seed=0):
    """City decides the level; a rare one comes late."""
    r = np.random.default_rng(seed)
    city = np.array(["Ayr", "Bonn", "Cork"])[r.integers(0, 3, n)]
    level = pd.Series(city).map({"Ayr": 0.0, "Bonn": 2.0, "Cork": -2.0}).to_numpy()
    frame = pd.DataFrame({"city": city, "x": r.normal(size=n), "code": r.integers(1, 3, n)})
    frame["y"] = level + np.sin(2 * frame["x"]) + frame["code"] + 0.1 * r.normal(size=n)
    return frame


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_columns_of_words_become_indicators(ending, tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_machine, "LOOKED_AT", 500)
    frame = cities()
    frame.loc[2995:2997, "city"] = "Dublin"  # none of which is looked at
    write = getattr(frame, f"to_{ending}")
    write(tmp_path / f"t.{ending}", index=False)
    words = {"columns": None, "onehot": ["city", "code"]}
    record = last(tmp_path / f"t.{ending}", **words, held_out=0.3)
    assert record["rmse"] < 0.3 < 1.4 < record["constant_rmse"] and record["columns"] == 3
    task = KernelMachine(str(tmp_path / f"t.{ending}"), "y", **OPTIONS | words)
    task.begun(TRIG, 0)
    assert task.coded.names[:3] == ["city=Ayr", "city=Bonn", "city=Cork"] and "code=2" in task.coded.names
    late = task.coded({"city": np.array(["Dublin", "Cork"]), "code": np.array(["2.0", "1"]), "x": np.zeros(2)})
    assert late.tolist() == [[0, 0, 0, 0, 0, 1], [0, 0, 1, 0, 1, 0]]


@pytest.mark.parametrize("target", ["y", "label"])
def test_a_run_predicts_for_another_file(target, written, typed, capsys, monkeypatch):
    """As its model does, in whichever format, and nothing but the columns that it takes."""
    code, _, err = typed("task=kernel", f"task.data={written / 't.csv'}", f"task.target={target}", "features=matern",
                         "task.columns=[a,b,c,w]", "task.onehot=[w]", "features.m=30", "logger=none",
                         "hydra.run.dir=run")
    assert code == 0, err
    new = table(100, seed=1)
    new[["w", "c", "b", "a"]].to_csv("new.csv", index=False)
    new.to_parquet("new.parquet")
    assert main(["run=run", "input=new.csv", "output=out.csv"]) == 0
    capsys.readouterr()
    monkeypatch.setattr(kernel_predict, "ROWS", 30)
    assert main(["run=run", "input=new.parquet"]) == 0
    (written / "piped.csv").write_text(capsys.readouterr().out)
    found, piped = pd.read_csv("out.csv"), pd.read_csv(written / "piped.csv")
    pd.testing.assert_frame_equal(found, piped, rtol=1e-4)
    kept = kernel_predict.load(Path("run"))
    X = kept.scale(kept.coded({name: new[name].to_numpy(str if name == "w" else float) for name in "abcw"}))
    if target == "y":
        mean, std = kept.model.predict(X, return_std=True)
        np.testing.assert_allclose(found["y"], mean, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(found["high"] - found["low"], 2 * 1.959964 * std, rtol=1e-3)
        assert np.mean((found["low"] < new["y"]) & (new["y"] < found["high"])) > 0.88
    else:
        np.testing.assert_allclose(found[["high", "low"]], kept.model.predict_proba(X), rtol=1e-4)
        assert [*found.columns] == ["label", "high", "low"] and (found["label"] == new["label"]).mean() > 0.9


@dataclass(frozen=True)
class OwnMap(TrigRF):
    """Of a user."""


def test_a_model_with_a_map_of_ones_own_is_not_kept_and_costs_no_run(written, tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    task = KernelMachine(str(written / "t"), "y", **OPTIONS)
    records = [*task.records(TRIG, 0)]
    task.reading.model.features_.map_ = OwnMap("gaussian")
    with pytest.warns(UserWarning, match="the model is not kept: OwnMap is a map of your own"):
        task.keep(records, folder)
    assert {path.name for path in folder.iterdir()} == {"kernel.csv", "kernel.md"}


def kept_run(folder, change):
    task = KernelMachine(str(folder / "t"), "y", **OPTIONS)
    task.keep([*task.records(TRIG, 0)], folder / "t")
    (folder / "t/config.yaml").write_text("task: {_target_: crt_exp.probes.kernel_machine.KernelMachine}")
    described = json.loads((folder / "t/kernel.json").read_text())
    change(described)
    (folder / "t/kernel.json").write_text(json.dumps(described))


NO_PREDICTIONS = {
    "holds no kernel machine: it has not ended": lambda f: (f / "t/kernel.json").unlink(),
    "describes no kernel machine: 'columns'": lambda f: kept_run(f, lambda d: d.pop("columns")),
    "describes no kernel machine: its columns are not those of the model": lambda f: kept_run(
        f, lambda d: d.update(mean=[1.0], width=[2.0])),
    "describes no kernel machine: .* not understood": lambda f: kept_run(f, lambda d: d.update(precision="os.system")),
    "= z: .* has no such column": lambda f: kept_run(f, lambda d: d.update(columns=["a", "b", "z"])),
    "size=...: it is of a run of task=imagenet": lambda f: None,
}


@pytest.mark.parametrize("message", NO_PREDICTIONS)
def test_what_no_run_predicts(message, written, capsys):
    kept_run(written, lambda described: None)
    NO_PREDICTIONS[message](written)
    more = ["size=9"] if message.startswith("size") else []
    assert main([f"run={written / 't'}", f"input={written / 't.csv'}", *more]) == 2
    assert re.search(message, capsys.readouterr().err)


BAD = {
    "t.csv, line 4002, column label: it is empty": lambda f: (
        changed(f, 4002, "label", ""), "t.csv", {"columns": ["a", "label"], "onehot": ["label"]}),
    "column a: 5000 different words in 5000 rows .* at most 100": lambda f: (None, "t.csv", {"onehot": ["a"]}),
    "task.onehot: w is no column to predict from": lambda f: (None, "t", {"onehot": ["w"]}),
    "task.onehot = ww: .* has no such column": lambda f: (None, "t", {"onehot": ["ww"]}),
    "t.csv, line 4002, column b: 'high' is not a number: code it":
        lambda f: (changed(f, 4002, "b", "high"), "t.csv", {}),
    "t.csv, line 4002, column b: it is empty": lambda f: (changed(f, 4002, "b", ""), "t.csv", {}),
    "t.csv, line 4002, column b: it is nan": lambda f: (changed(f, 4002, "b", "nan"), "t.csv", {}),
    "t.csv, line 3000: 7 cells, 6 expected": lambda f: (changed(f, 3000, "w", "1,1"), "t.csv", {}),
    "t, row 4321, column c: it is nan": lambda f: (array(f, "c", with_nan), "t", {}),
    "t, row 4321, column y: it is nan": lambda f: (array(f, "y", with_nan), "t", {}),
    "column c: it is 7 in all of 5000 rows from all over": lambda f: (array(f, "c", lambda v: 0 * v + 7), "t", {}),
    "line 11, column w: it is -1: weights must not be negative":
        lambda f: (changed(f, 11, "w", "-1"), "t.csv", {"weight": "w"}),
    "hold one class only, low":
        lambda f: (array(f, "label", lambda v: np.full_like(v, "low")), "t", {"target": "label"}),
    "different numbers of rows: a.npy 5000": lambda f: (array(f, "c", lambda v: v[:9]), "t", {}),
    "features.m = 1000000: columns = 2000000: .* GiB of memory are free":
        lambda f: (None, "t", {"mechanism": Mechanism.of(features="trig", m=10**6)}),
    "task.target = z: .* has no such column": lambda f: (None, "t.csv", {"target": "z"}),
    "task.columns = aa: .* did you mean a": lambda f: (None, "t.csv", {"columns": ["aa"]}),
    "column label: it holds (large_)?string, not numbers": lambda f: (None, "t.parquet", {"columns": ["a", "label"]}),
    "label.npy holds texts, not numbers": lambda f: (None, "t", {"columns": ["a", "label"]}),
    "gone cannot be read": lambda f: (None, "gone", {}),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(message, written):
    _, name, options = BAD[message](written)
    options = {"target": "y"} | options
    with pytest.raises(Exception, match=message) as error:
        last(written / name, **options)
    assert type(error.value).__name__ in ("DataError", "ValueError", "ConfigError")


def test_sums_of_other_processes_are_not_gone_on_from(written, tmp_path):
    (tmp_path / "sums.0.of.2.npz").touch()
    with pytest.raises(ValueError, match="was begun on 2 processes"):
        last(written / "t.csv", directory=tmp_path)
