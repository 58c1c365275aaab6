"""models/<name> as the name of a model, wherever one is named, and fetched from the hub."""

import json
import multiprocessing
import shutil
from functools import partial

import huggingface_hub
import pytest
import torch
from small_bert import sentence, write_model, write_text
from transformers import AutoModelForMaskedLM
from wheel_models import onnx

import crt_exp
from crt_exp.data import DataError
from crt_exp.data.__main__ import main
from crt_exp.models import encoders, vision
from crt_exp.models.folder import verify
from crt_exp.pretrained.fetch import install
from crt_exp.pretrained.published import MODELS, fetched

NAME = "models/minilm"


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A data folder with a small model of that name, which is not the folder of the tests."""
    write_model(tmp_path / "data" / NAME)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("CRT_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def test_the_folder_of_a_fetched_model(data):
    assert encoders.folder_of(NAME, "task.model") == str(data / NAME)
    assert fetched("google-bert/bert-base-uncased") is None and fetched(data / NAME) is None


def test_a_folder_of_ones_own_comes_first(data, tmp_path):
    own = write_model(tmp_path / "here" / NAME)
    assert encoders.folder_of(NAME, "task.model") == NAME and fetched(NAME) is None
    assert own.is_dir()


def test_not_fetched(data, monkeypatch):
    with pytest.raises(DataError, match="task.model = models/rxnfp: it is not in CRT_DATA = .*fetch models/rxnfp`"):
        encoders.folder_of("models/rxnfp", "task.model")
    monkeypatch.delenv("CRT_DATA")
    for name in MODELS:
        with pytest.raises(DataError, match=f"{name}: CRT_DATA is not set.*fetch {name} --dir DIR"):
            fetched(name)


def test_a_vit_where_a_task_names_weights(data):
    with pytest.raises(DataError, match="task.init = models/vit-s-saliency: it is not in CRT_DATA"):
        vision.checkpoint_of("models/vit-s-saliency")
    made = data / "models/vit-s-saliency"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(onnx.written("vit_small_patch14_dinov2")))
    found = vision.checkpoint_of("models/vit-s-saliency")
    assert found.path == made and found.description.size == 518 and found.description.classes is None


def test_the_hub_out_of_reach_names_the_script():
    """For those that a wheel holds, and for no other."""
    for name, named in (("HuggingFaceTB/SmolLM2-135M-Instruct", "models.py models/smollm2-135m"), ("no/model", None)):
        with pytest.raises(DataError) as caught:
            encoders.load_config(encoders.Origin(name, "task.model", True, False))
        assert named in str(caught.value) if named else "fetch_wheel_models" not in str(caught.value)


def test_fetch_and_verify(data, tmp_path, monkeypatch, capsys):
    """A snapshot as the hub's cache holds it: weights are links. Then a hub without weights, and no hub."""
    snapshot, blob = tmp_path / "hub/snapshots/0123abc", tmp_path / "hub/blob"
    shutil.copytree(data / NAME, snapshot)
    (snapshot / "model.safetensors").rename(blob)
    (snapshot / "model.safetensors").symlink_to(blob)
    (snapshot / "pytorch_model.bin").write_bytes(b"not wanted")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: str(snapshot))
    where = ["--dir", str(tmp_path / "new")]
    made = tmp_path / "new" / NAME
    assert main(["fetch", NAME, *where]) == 0 and "all-MiniLM-L6-v2, revision 0123abc" in capsys.readouterr().out
    AutoModelForMaskedLM.from_pretrained(made)
    assert not (made / "model.safetensors").is_symlink() and not (made / "pytorch_model.bin").exists()
    assert main(["verify", NAME, *where]) == 0 and main(["fetch", NAME, *where]) == 0 and main(["list", *where]) == 0
    assert "already there" in capsys.readouterr().out
    (made / "model.safetensors").write_bytes(b"damaged")
    assert main(["verify", "models", *where]) == 1
    assert main(["fetch", NAME, *where]) == 0 and main(["verify", NAME, *where]) == 0
    shutil.rmtree(made)
    (snapshot / "model.safetensors").unlink()
    assert main(["fetch", NAME, *where]) == 1 and "without model.safetensors" in capsys.readouterr().err
    assert main(["fetch", "models/other", *where]) == 1 and "Known: models/smollm2-135m" in capsys.readouterr().err
    monkeypatch.undo()
    for name in (NAME, "models/rxnfp"):
        assert main(["fetch", name, *where]) == 1 and not made.exists()
        error = capsys.readouterr().err
        assert "the folder of a copy of your own" in error and f"fetch_wheel_models.py {name}" in error


def test_from_pretrained(data):
    model = crt_exp.from_pretrained(AutoModelForMaskedLM, NAME).eval()
    ids = torch.arange(5, 30)[None]
    exact = AutoModelForMaskedLM.from_pretrained(data / NAME).eval()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, exact(ids).logits)


def test_from_pretrained_refuses_weights_that_changed_since_they_were_fetched(data, tmp_path, monkeypatch):
    install(MODELS[NAME], tmp_path, partial(copied, data), say=str)
    monkeypatch.setenv("CRT_DATA", str(tmp_path))
    crt_exp.from_pretrained(AutoModelForMaskedLM, NAME)
    weights = tmp_path / NAME / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DataError, match=f"^{NAME}: .*model.safetensors is damaged"):
        crt_exp.from_pretrained(AutoModelForMaskedLM, NAME)


def copied(data, folder):
    shutil.copytree(data / NAME, folder, dirs_exist_ok=True)
    return "a copy"


def test_two_processes_that_fetch_one_model_leave_one_whole_folder(data, tmp_path):
    """The other one begins and ends while this one has written half."""
    other = multiprocessing.get_context("fork").Process(
        target=install, args=(MODELS[NAME], tmp_path, partial(copied, data), str))

    def bring(folder):
        (folder / "config.json").write_text("{")
        other.start()
        other.join()
        assert other.exitcode == 0 and (tmp_path / NAME / "model.safetensors").is_file()
        assert (folder / "config.json").read_text() == "{"
        return copied(data, folder)

    install(MODELS[NAME], tmp_path, bring, say=str)
    verify(tmp_path / NAME, NAME)
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["minilm"]
    assert {"config.json", "digests.json", "fetched.json", "model.safetensors"} <= {
        path.name for path in (tmp_path / NAME).iterdir()}


@pytest.mark.usefixtures("one_thread")
def test_advise_by_name(data):
    options = {"length": 32, "samples": 3, "calibration": 2, "rounds": 1, "attentions": ["uniform"],
               "progress": [].append}
    texts = [sentence(i) for i in range(40)]
    by_name = crt_exp.advise(NAME, texts, **options)
    origin = encoders.Origin(str(data / NAME), "model", True, False)
    in_memory = crt_exp.advise(AutoModelForMaskedLM.from_pretrained(data / NAME), texts,
                               tokenizer=encoders.load_tokenizer(origin), **options)
    assert [row.above for row in by_name.rows] == [row.above for row in in_memory.rows]
    write_model(data / "models/rxnfp", "BertModel")
    with pytest.raises(ValueError, match="predicts no tokens"):
        crt_exp.advise("models/rxnfp", texts, **options)


@pytest.mark.usefixtures("one_thread")
def test_task_model(data, typed, tmp_path):
    text = write_text(tmp_path / "text.txt")
    code, out, err = typed("task=fidelity", f"task.model={NAME}", f"task.text={text}", "task.length=32", "task.texts=2",
                           "attention=uniform", "task.cache_dir=null", "logger=none")
    assert code == 0 and "hidden_error" in out, err
