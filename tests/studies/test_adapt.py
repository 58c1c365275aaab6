"""What a swap loses and light training brings back: rows, arms that are exact where nothing is lost, and draws."""

from dataclasses import replace

import pytest
import torch

from crt_exp.data.text import IGNORED
from crt_exp.studies import adapt


@pytest.fixture
def at_home(tmp_path, monkeypatch):
    """A folder of its own, models of few numbers, and characters that need no file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(adapt, "WIDTH", 16)
    monkeypatch.setattr(adapt, "LAYERS", 2)
    for name, setting in adapt.SETTINGS.items():
        monkeypatch.setitem(adapt.SETTINGS, name, replace(setting, tested=4))
    monkeypatch.setattr(adapt, "characters", lambda split: torch.arange(500) % 40)
    noise = torch.Generator().manual_seed(0)
    drawn = {split: torch.randn(40, 1, 28, 28, generator=noise) for split in ("train", "test")}
    monkeypatch.setattr(adapt, "digits", lambda split: (drawn[split], torch.arange(40) % 10))


@pytest.mark.parametrize("setting", adapt.SETTINGS)
def test_rows_of_the_test_are_no_rows_of_training(setting, at_home):
    rows = adapt.SETTINGS[setting].rows
    (ids, labels), (again, _) = rows("train", 3, 4), rows("train", 3, 4)
    assert torch.equal(ids, again) and (labels != IGNORED).any()
    assert labels.shape == (ids.shape[:1] if setting == "vision" else ids.shape)
    if setting == "causal":
        return
    assert not torch.equal(ids, rows("test", 3, 4)[0])
    if setting != "vision":
        half = ids.shape[1] // 2
        same = ids[:, :half] == ids[:, half:]
        assert same.all() or (~same & (ids[:, :half] != adapt.HIDDEN) & (ids[:, half:] != adapt.HIDDEN)).sum() == 0


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["copying", "masked", "vision"])
def test_an_arm_at_each_place(setting, at_home):
    """Exact attention loses nothing by a swap; what has nothing to learn costs nothing to teach."""
    start = {"setting": setting, "seed": 0, "steps": 2}
    loss = adapt.exact(**start)["loss"]
    exact = adapt.adapted(**start, arm="exact", transfer=1, lora=1)["places"]
    assert [*exact] == [*adapt.PLACES] and exact["swapped"] == exact["transferred"] == (pytest.approx(loss), 0.0)
    window = adapt.adapted(**start, arm="window block=4 first=2", transfer=1, lora=1)
    assert window["places"]["transferred"][0] == window["places"]["swapped"][0] and not window["steps"]
    hedgehog = adapt.adapted(**start, arm="hedgehog", transfer=2, lora=1)
    places = hedgehog["places"]
    assert places["transferred"][0] != places["swapped"][0] and places["transfer, LoRA"][1] > places["transferred"][1]
    assert {*hedgehog["steps"]} == {"trained", "transferred"}
    near = adapt.adapted(**start, arm=adapt.ARMS[0], transfer=1, lora=1)["places"]
    assert abs(near["transferred"][0] - loss) < 0.5


def test_draws_of_every_arm(at_home, monkeypatch):
    monkeypatch.setattr(adapt, "ARMS", ("hedgehog",))
    monkeypatch.setattr(adapt, "SETTINGS", {"copying": adapt.SETTINGS["copying"]})
    draws = [*adapt.measure("adapt", ["studies/adapt.py"], {"seeds": 2, "steps": {"copying": 1}, "transfer": 1,
                                                            "lora": 1})]
    assert {(d.arm, d.metric) for d in draws} >= {("exact", "loss"), ("uniform", "loss"), ("hedgehog", "time_ratio")}
    assert {d.x for d in draws if d.arm == "hedgehog"} == {*adapt.PLACES} and {d.unit for d in draws} == {0, 1}
