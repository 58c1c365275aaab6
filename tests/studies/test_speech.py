"""What fig3 and hrf-speech measure: runs of recognisers that are command lines, arms that differ in attention alone."""

from itertools import islice

import pytest

from crt_exp.report import page
from crt_exp.runner.command_line import check_command_line
from crt_exp.studies import encoder_steps, runs, speech, training
from crt_exp.studies.training import Grid

HOME = runs.Home(training.HOME, ("tasks/librispeech.py",))
NAMES = ("fig3", "hrf-speech")


def grids(name, size="small"):
    return [Grid(**grid) for grid in page.load(name)["sizes"][size]["grids"]]


@pytest.mark.slow
@pytest.mark.parametrize("size", ["small", "gpu", "full"])
@pytest.mark.parametrize("name", NAMES)
def test_every_run_is_a_command_line(name, size, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CRT_DATA", "/data")
    for grid in grids(name, size):
        lines = [grid.options(setting, arm, 0, HOME) for setting in grid.settings
                 for arm in islice((*grid.arms, *grid.moved), 1, None, 4)]
        for line in lines + ([grid.beginning(HOME)["overrides"]] if grid.begin else []):
            check_command_line([*line, "resume=auto", "logger=none", "hydra.run.dir=run"])


@pytest.mark.parametrize("name", NAMES)
def test_arms_of_a_seed_differ_in_attention_alone(name):
    for grid in grids(name):
        for setting in grid.settings:
            lines = {arm: grid.options(setting, arm, 1, HOME) for arm in (*grid.arms, *grid.moved)}
            shared = {tuple(o for o in line if not o.startswith(("attention", "features."))) for line in lines.values()}
            assert len(lines) >= 6 and len(shared) == 1 and "seed=1" in shared.pop()


def test_words_of_the_command_line_are_a_mechanism():
    made = speech.mechanism(["attention=hrf_cluster", "features.m=32", "features.queries=2", "features.field=complex",
                             "trainer.steps=0"], 3)
    assert (made.name, made.m, made.seed, made.map().field) == ("hrf_cluster", 32, 3, "complex")
    assert speech.mechanism(["attention=nearfar", "attention.block=8"], 0).options["block"] == 8


def test_every_method_of_the_encoder_hears(one_thread, monkeypatch):
    """Each has its own attention in every layer."""
    monkeypatch.setattr(encoder_steps, "SIZES", encoder_steps.SIZES | {"layers": 2, "channels": 8})
    for method, (name, _) in encoder_steps.METHODS.items():
        model = encoder_steps.encoder(method)
        assert sum(hasattr(layer.self_attn, "swapped") for layer in model.layers) == (0 if name == "exact" else 2)
        encoder_steps.hear(model, encoder_steps.audio(1))
    times = encoder_steps.times(1, 2)
    assert {len(each) for each in times.values()} == {2} and list(times) == list(encoder_steps.METHODS)


@pytest.mark.slow
def test_draws_at_a_tiny_size(monkeypatch, tmp_path):
    """The real thing, a few steps of each run: swapped as it is, fitted to clusters, trained on, errors by layer."""
    from tests.small_speech import write_digits

    write_digits(tmp_path / "speech/free-spoken-digit-dataset/recordings")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CRT_DATA", str(tmp_path))
    sizes = {"layers": 1, "dim": 8, "ffn": 8, "channels": 2, "predictor": 8, "joiner": 8, "kernel": 3}
    grid = {"metrics": ["loss"], "tested": ["loss", "wer"], "higher": False, "cost": False, "workers": 1, "arms": {},
            "common": ["task=librispeech", "task.corpus=fsdd", *(f"+task.sizes.{k}={v}" for k, v in sizes.items()),
                       "task.strings.train=12", "task.strings.validation=3", "task.strings.test=3",
                       "trainer.select=last"],
            "begin": {"the exact model": ["attention=exact", "trainer.steps=2"]}, "seeds": 2, "seeds_of": {"exact": 1},
            "settings": {"swapped": ["trainer.steps=0"]},
            "moved": {"exact": ["attention=exact"], "favorp": ["attention=favorp", "features.m=4"]}}
    size = {"grids": [grid, grid | {"settings": {"trained": ["trainer.steps=2", "trainer.eval_every=1"]}}],
            "fitted": {"swapped": {"clusters": ["attention=hrf_cluster", "features.m=4"]}},
            "looked": {"swapped": ["favorp", "clusters"]}, "encoder": []}
    draws = [*speech.measure("fig3", ["tasks/librispeech.py"], size)]
    units = {}
    for draw in draws:
        units.setdefault((draw.setting, draw.arm, draw.table, draw.metric), []).append(draw.unit)
    assert units["swapped", "exact", "test", "loss"] == [0] and units["swapped", "favorp", "test", "wer"] == [0, 1]
    assert units["swapped", "clusters", "test", "loss"] == [0, 1] == units["trained", "favorp", "test", "loss"]
    assert len(units["swapped", "favorp", "layers", "squared_norm"]) == 4
    assert {("swapped", "uniform", "layers", "output"), (training.BEGIN, "the exact model", "test", "wer")} <= {*units}
    kept = [path for path in training.HOME.iterdir() if path.is_dir()]
    assert len(kept) == 1 and kept[0].name.startswith("exact-")
