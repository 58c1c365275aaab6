"""Cells: a repeated measurement computes what is missing, or what code that decides it has changed."""

import pytest

from crt_exp.measure import cells


def square(x):
    with open("calls", "a") as file:
        file.write(f"{x}\n")
    return x * x


def test_cells_resume(tmp_path, monkeypatch):
    """What is known is not computed again, also after a crash that cut the last line off."""
    monkeypatch.chdir(tmp_path)
    keys = [{"x": x} for x in range(3)]
    made = cells.Cells("mine", ["kernels.py"]).fill(keys, square, "test", workers=1)
    assert [made[key] for key in keys] == [0, 1, 4]
    file = tmp_path / "outputs/mine/cells.jsonl"
    file.write_text(file.read_text()[:-10])
    again = cells.Cells("mine", ["kernels.py"]).fill(keys, square, "test", workers=1)
    assert [again[key] for key in keys] == [0, 1, 4] and len((tmp_path / "calls").read_text().split()) == 4


@pytest.mark.parametrize("keep", [False, True])
def test_other_code_is_computed_again_unless_cells_are_kept(keep, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells.Cells("mine", ["kernels.py"]).fill([{"x": 2}], square, "test", workers=1)
    monkeypatch.setattr(cells, "fingerprint", lambda sources: "other")
    cells.Cells("mine", ["kernels.py"], keep).fill([{"x": 2}], square, "test", workers=1)
    assert len((tmp_path / "calls").read_text().split()) == 1 + (not keep)
