"""What a swap loses and light training brings back: rows, arms that are exact where nothing is lost, and seeds."""

from dataclasses import replace

import pytest
import torch

from crt_exp.data.text import IGNORED
from crt_exp.mechanism import Mechanism
from crt_exp.measure import adapt
from crt_exp.measure.adapt import Adapted


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
    adapt.exact.cache_clear()
    yield
    adapt.exact.cache_clear()


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


SIZES = {"steps": 2, "exact_lr": 3e-3, "transfer_lr": 2e-2, "lora_lr": 5e-3, "rank": 4}
PLACES = ["swapped", "transferred", "transfer, LoRA", "LoRA"]


def records(setting, arm, **steps):
    """Loss and seconds by place, and what a step costs."""
    found = [*Adapted(setting, **SIZES, **steps).records(Mechanism.parse(arm), 0)]
    return ({row["place"]: (row["loss"], row["seconds"]) for row in found if "loss" in row},
            [row for row in found if "loss" not in row])


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["copying", "masked", "vision"])
def test_an_arm_at_each_place(setting, at_home):
    """Exact attention loses nothing by a swap; what has nothing to learn costs nothing to teach."""
    model = adapt.SETTINGS[setting].model()
    model.load_state_dict(adapt.exact(setting, 0, 2, 3e-3), strict=False)
    loss = adapt.tested(model, setting, 0)
    exact, _ = records(setting, "exact", transfer=1, lora=1)
    assert [*exact] == PLACES and exact["swapped"] == exact["transferred"] == (pytest.approx(loss), 0.0)
    window, steps = records(setting, "window block=4 first=2", transfer=1, lora=1)
    assert window["transferred"][0] == window["swapped"][0] and not steps
    places, steps = records(setting, "hedgehog m=32", transfer=2, lora=1)
    assert places["transferred"][0] != places["swapped"][0] and places["transfer, LoRA"][1] > places["transferred"][1]
    assert [{*row} for row in steps] == [{"place", "time_ratio", "memory_ratio"}]
    near, _ = records(setting, "nearfar block=4 heavy=2 cells=4 open=8 exact_until=8", transfer=1, lora=1)
    assert abs(near["transferred"][0] - loss) < 0.5


def test_a_measurement_is_the_same_whatever_was_drawn_before(at_home):
    """Adapters too, which the library draws from the global generator; and the control is not adapted."""
    first, _ = records("copying", "window block=4 first=2", transfer=1, lora=2)
    torch.randn(7)
    again, _ = records("copying", "window block=4 first=2", transfer=1, lora=2)
    assert [loss for loss, _ in first.values()] == [loss for loss, _ in again.values()]
    assert first["LoRA"][0] != first["swapped"][0] and [*records("copying", "uniform", transfer=1, lora=1)[0]
                                                        ] == PLACES[:2]
