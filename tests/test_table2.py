"""make table2: every run that it starts is a command line that exists, and the report says what its records say."""

import numpy as np
import pytest

from crt_exp.data.glue import TASKS
from crt_exp.report import table2, writing
from crt_exp.runner.command_line import check_command_line


def keys_of(setting):
    """All cells of a size: pretraining, table, other m, swapped and not trained."""
    made = {n: table2.pretraining(n, setting) for n in dict.fromkeys(table2.ROWS.values())
            if n != "exact" or not setting.exact}
    seeds = table2.SEEDS
    table = {(r, d, s): table2.fine_tuning(r, d, s, setting, made) for r in table2.ROWS for d in setting.datasets
             for s in seeds}
    by_m = {(n, m, d, s): table2.swapped(n, m, d, s, setting, made) for n in ("favorp", "favorpp") for m in setting.ms
            for d in setting.figure_datasets for s in seeds}
    drift = {(n, m, s): table2.swapped_alone(n, m, s, setting, made) for n in ("favorp", "favorpp") for m in setting.ms
             for s in seeds}
    return made, table, by_m, drift


@pytest.mark.parametrize("size", ["small", *[pytest.param(size, marks=pytest.mark.slow) for size in ("gpu", "full")]])
def test_every_run_is_a_command_line(size, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CRT_DATA", "/data")
    seen = set()
    for keys in keys_of(table2.SETTINGS[size]):
        for key in keys.values():
            shape = tuple(o.split("=")[0] for o in key["overrides"]) + (key.get("option"),)
            if shape not in seen:
                seen.add(shape)
                start = [f"{key['option']}={table2.place(key['start'])}"] if "start" in key else []
                check_command_line([*key["overrides"], *start, "logger=none", "hydra.run.dir=run"])
    assert len(seen) > 3


def test_uptrained_rows_start_from_the_exact_encoder():
    made, table, by_m, _ = keys_of(table2.SETTINGS["small"])
    up, plain = table[table2.UPTRAINED, "rte", 0], table["FAVOR++", "rte", 0]
    assert up["start"] == made["exact"]["overrides"] and up["option"] == "task.model"
    assert "task.init=uptrain" in up["overrides"]
    assert plain["start"] == made["favorpp"]["overrides"] and plain["option"] == "task.init"
    assert by_m["favorpp", 16, "stsb", 0] == table[table2.UPTRAINED, "stsb", 0]  # computed once
    assert len({str(table2.place(key["overrides"])) for key in made.values()}) == 5


def results(distance):
    """Records of all cells in which uptrained FAVOR++ is nearer to exact attention than FAVOR+ by `distance` points."""
    made, table, by_m, drift = keys_of(table2.SETTINGS["small"])
    rng = np.random.default_rng(0)
    percent = {"FAVOR+": 70 - abs(distance) - distance, table2.UPTRAINED: 70 - abs(distance)}
    record = lambda data, value: {TASKS[data].metrics[0]: value / 100 + 1e-3 * rng.normal(), "train_examples": 40.0,
                                  "train_examples_available": 50.0 if data == "sst2" else 40.0}
    errors = {"favorp": {"errors": [0.5, 0.7], "S": 3.0}, "favorpp": {"errors": [0.25, 0.3], "S": 3.0}}
    records = {key: record(key[1], percent.get(key[0], 70.0)) for key in table}
    others = {key: record(key[2], 60.0) for key in by_m}
    perplexities = {key: {"perplexity": 200.0 + key[1] + rng.normal()} for key in drift}
    return dict.fromkeys(made, {"perplexity": 100.0, "accuracy": 0.2}), records, others, perplexities, errors


@pytest.mark.parametrize("distance, told", [(4.0, "uptrained FAVOR++ is nearer to exact"),
                                            (-4.0, "FAVOR+ is nearer to exact"), (0.0, "no difference is shown")])
def test_verdict_follows_the_records(distance, told):
    setting, (_, table, by_m, *_) = table2.SETTINGS["small"], results(distance)
    scores = {(r, d): [table2.score(d, table[r, d, s]) for s in table2.SEEDS]
              for r in table2.ROWS for d in setting.datasets}
    assert told in table2.verdict(setting, scores, by_m)


def test_report(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(writing, "REPORT", tmp_path)
    table2.write("small", table2.SETTINGS["small"], *results(4.0), seconds=3.0)
    text = (tmp_path / "table2.md").read_text()
    assert "At m = 16" in capsys.readouterr().out and "A result of small models (2 layers, width 64, 2 heads)" in text
    assert "SST-2 40 of 50 (drawn with seed 0)" in text and "90.58" in text
    assert (tmp_path / "table2.png").stat().st_size > 10_000
    assert len((tmp_path / "table2.csv").read_text().splitlines()) == 1 + 6 * 5 + 2 * 3 * 2 + 2 * 3 + 5
