"""tests/tools/fetch_wheel_models.py: made-up wheels, an index that is a folder, and formats that are written here."""

import hashlib
import json
import os
import re
import struct
import zipfile
from pathlib import Path

import fetch_wheel_models as tool
import numpy as np
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch.testing import assert_close
from transformers import (AutoModel, AutoModelForMaskedLM, AutoTokenizer, BertConfig, BertForMaskedLM, BertModel,
                          Dinov2Config, Dinov2Model, WhisperConfig, WhisperForConditionalGeneration)
from wheel_models import convert, ctranslate2, onnx

from crt_exp.data import DataError
from crt_exp.data.sources import SOURCES, Source, select

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "C", "Cl", "c", "1", "(", ")", "=", "O", ">>", ".", "[O-]", "Br")
BERT = {"vocab_size": len(WORDS), "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 8, "max_position_embeddings": 40}
PACKAGE, VERSION = "tiny-model", "1.0"
WEIGHTS = "tiny_model/model/model.safetensors"


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


def listed(monkeypatch, kind: str, contents: dict[str, bytes], architecture: str = "") -> None:
    """The tables hold one model, models/tiny, whose wheel holds these files."""
    members = tuple(tool.Member(name, name.rsplit("/", 1)[-1], len(content), hashlib.sha256(content).hexdigest())
                    for name, content in contents.items())
    wheel = tool.Wheel("models/tiny", PACKAGE, VERSION, kind, architecture, members)
    monkeypatch.setattr(tool, "read_table", lambda: {"models/tiny": wheel})
    monkeypatch.setitem(SOURCES, "models/tiny", Source("models/tiny", "", ""))


def held(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def called(tmp_path, capsys):
    """called(): the command for models/tiny; its error, after which everything is as it was."""
    def call() -> str:
        before = held(tmp_path / "data")
        if tool.main(["models/tiny", "--dir", str(tmp_path / "data")]) == 0:
            return ""
        error = capsys.readouterr().err
        assert held(tmp_path / "data") == before and not [*(tmp_path / "data/models").glob(".*")]
        assert len(error.splitlines()) == 1 and error.startswith("models/tiny")
        return error
    return call


@pytest.fixture
def served(tmp_path, monkeypatch):
    """served(contents): the wheel that pip downloads, without the time that it takes."""
    def serve(contents: dict[str, bytes]) -> None:
        path = make_wheel(tmp_path / "wheels", contents)

        def download(_, folder: Path) -> Path:
            (folder / path.name).write_bytes(path.read_bytes())
            return folder / path.name

        monkeypatch.setattr(tool, "download", download)
    return serve


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What a model of transformers and its tokenizer write."""
    path = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    BertModel(BertConfig(**BERT)).save_pretrained(path)
    (path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    convert.tokenizer_of(path / "vocab.txt", 40).save_pretrained(path)
    return path


@pytest.fixture
def contents(folder):
    names = ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json")
    return {f"tiny_model/model/{name}": (folder / name).read_bytes() for name in names}


# ---- wheels ----------------------------------------------------------------------------------------------------------


def test_the_table():
    table = tool.read_table()
    assert [*table] == [source.name for source in select("models")]
    assert {each.kind for each in table.values()} == {*convert.CONVERTERS}
    for model in table.values():
        assert all(len(each.sha256) == 64 and each.bytes > 0 and "/" not in each.file for each in model.members)


def test_a_model_of_a_wheel(contents, folder, tmp_path, monkeypatch, called, capsys):
    """By pip itself, from a folder that is all that it looks at."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    (tmp_path / "wheels").mkdir()
    listed(monkeypatch, "folder", contents)
    error = called()
    assert f"no {PACKAGE}=={VERSION}" in error and "PIP_FIND_LINKS" in error
    make_wheel(tmp_path / "wheels", contents)
    assert called() == ""
    made = tmp_path / "data/models/tiny"
    names = {name.rsplit("/", 1)[-1] for name in contents}
    assert held(tmp_path / "data") == {f"models/tiny/{name}" for name in names | {"digests.json"}}
    weights, own = (AutoModel.from_pretrained(each).state_dict() for each in (made, folder))
    assert all(torch.equal(weights[name], own[name]) for name in own)
    assert called() == "" and f"{made}: already present" in capsys.readouterr().out


BAD = {
    "other content": lambda files: files | {WEIGHTS: files[WEIGHTS][:-1] + b"?"},
    "other size": lambda files: files | {WEIGHTS: files[WEIGHTS] + b"?"},
    "elsewhere": lambda files: {f"../{name}": content for name, content in files.items()},
}


@pytest.mark.parametrize("fault", BAD)
def test_a_wheel_with_another_file_inside(fault, contents, served, called, monkeypatch):
    listed(monkeypatch, "folder", contents)
    served(BAD[fault](contents))
    error = called()
    assert "published" in error and "tiny_model-1.0" in error


# ---- converters ------------------------------------------------------------------------------------------------------


class Trap:
    def __reduce__(self):
        return os.mkdir, ("trapped",)


@pytest.mark.parametrize("fault, said", [(None, ""), ("a pickle that acts", "no file of tensors"),
                                         ("a weight less", "its weights lack"), ("no tensors", "its weights lack")])
def test_weights_of_torch_and_symbols(fault, said, served, called, tmp_path, monkeypatch):
    """As packages of reactions hold them."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(1)
    model = BertForMaskedLM(BertConfig(**BERT)).eval()
    state = model.state_dict()
    less = {name: value for name, value in state.items() if "query.weight" not in name}
    faults = {"a pickle that acts": {"x": Trap()}, "no tensors": {}, "a weight less": less}
    torch.save(faults.get(fault, state), "weights")
    config = json.dumps({key: value for key, value in model.config.to_dict().items() if key != "architectures"})
    files = {"m/pytorch_model.bin": Path("weights").read_bytes(), "m/config.json": config.encode(),
             "m/vocab.txt": "\n".join(WORDS).encode() + b"\n", "x/LICENSE": b"MIT"}
    listed(monkeypatch, "smiles", files, "BertForMaskedLM")
    served(files)
    error = called()
    assert said in error and not Path("trapped").exists()
    if fault is None:
        made = tmp_path / "data/models/tiny"
        again, tokenizer = AutoModelForMaskedLM.from_pretrained(made).eval(), AutoTokenizer.from_pretrained(made)
        ids = tokenizer("Cc1(Cl)[O-].Br>>C=O", return_tensors="pt")["input_ids"]
        names = ["[CLS]", "C", "c", "1", "(", "Cl", ")", "[O-]", ".", "Br", ">>", "C", "=", "O", "[SEP]"]
        assert tokenizer.convert_ids_to_tokens(ids[0]) == names and tokenizer.model_max_length == 40
        assert torch.equal(again(ids).logits, model(ids).logits)
        assert held(made) == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "LICENSE",
                              "digests.json"}


# ---- Whisper in the format of CTranslate2 ----------------------------------------------------------------------------

WHISPER = {"d_model": 16, "num_mel_bins": 8, "vocab_size": 30, "max_source_positions": 12, "max_target_positions": 10,
           "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 4,
           "encoder_ffn_dim": 24, "decoder_ffn_dim": 20}
IDS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"), 1)
KINDS = {"<f4": 0, "|i1": 1, "<i2": 2, "<i4": 3, "<f2": 4}


def string(text: str) -> bytes:
    return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"


def ct2(variables, kind="WhisperSpec", version=6) -> bytes:
    parts = [struct.pack("<I", version), string(kind), struct.pack("<II", 3, len(variables))]
    for name, value in variables.items():
        value = np.asarray(value)
        parts += [string(name), struct.pack(f"<B{value.ndim}I", value.ndim, *value.shape),
                  struct.pack("<BI", KINDS[value.dtype.str], value.nbytes), value.tobytes()]
    tied = string("decoder/projection/weight") + string("decoder/embeddings/weight")
    return b"".join([*parts, struct.pack("<I", 1), tied])


def variables_of(model) -> dict[str, np.ndarray]:
    """The weights under CTranslate2's names."""
    parts = {name: part for name, part in model.model.named_modules()}
    found = {f"{side}/num_heads": np.int16(WHISPER[f"{side}_attention_heads"]) for side in ("encoder", "decoder")}
    found["decoder/alignment_heads"] = np.array([[0, 1]], np.int16)

    def put(name, *modules):
        found[f"{name}/weight"] = torch.cat([each.weight for each in modules]).detach().numpy()
        biases = [torch.zeros(len(each.weight)) if each.bias is None else each.bias for each in modules]
        found[f"{name}/bias"] = torch.cat(biases).detach().numpy()

    def norm(name, module):
        found[f"{name}/gamma"], found[f"{name}/beta"] = (t.detach().numpy() for t in (module.weight, module.bias))

    for side in ("encoder", "decoder"):
        found[f"{side}/position_encodings/encodings"] = parts[side].embed_positions.weight.detach().numpy()
        norm(f"{side}/layer_norm", parts[side].layer_norm)
        for i, layer in enumerate(parts[side].layers):
            own, here = layer.self_attn, f"{side}/layer_{i}"
            norm(f"{here}/self_attention/layer_norm", layer.self_attn_layer_norm)
            put(f"{here}/self_attention/linear_0", own.q_proj, own.k_proj, own.v_proj)
            put(f"{here}/self_attention/linear_1", own.out_proj)
            norm(f"{here}/ffn/layer_norm", layer.final_layer_norm)
            put(f"{here}/ffn/linear_0", layer.fc1)
            put(f"{here}/ffn/linear_1", layer.fc2)
            if side == "decoder":
                cross = layer.encoder_attn
                norm(f"{here}/attention/layer_norm", layer.encoder_attn_layer_norm)
                put(f"{here}/attention/linear_0", cross.q_proj)
                put(f"{here}/attention/linear_1", cross.k_proj, cross.v_proj)
                put(f"{here}/attention/linear_2", cross.out_proj)
    for i in (1, 2):
        put(f"encoder/conv{i}", parts[f"encoder.conv{i}"])
    found["decoder/embeddings/weight"] = parts["decoder"].embed_tokens.weight.detach().numpy()
    return found


@pytest.fixture(scope="module")
def whisper():
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(WhisperConfig(**WHISPER, **IDS)).eval()
    with torch.no_grad():  # a bias of zero would not show where it goes
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 10)
    return model


@pytest.mark.parametrize(("stored", "error"), [(np.float32, 0), (np.float16, 2e-2)])
def test_the_same_model(whisper, tmp_path, stored, error):
    variables = {name: value.astype(stored) if value.dtype == np.float32 else value
                 for name, value in variables_of(whisper).items()}
    (tmp_path / "model.bin").write_bytes(ct2(variables))
    sizes, state = ctranslate2.whisper(*ctranslate2.read(tmp_path / "model.bin"))
    assert sizes == WHISPER
    again = WhisperForConditionalGeneration(WhisperConfig(**sizes, **IDS)).eval()
    again.load_state_dict(state)
    heard, asked = torch.randn(1, 8, 24), torch.tensor([[1, 7, 4]])
    with torch.no_grad():
        expected, found = (each(input_features=heard, decoder_input_ids=asked).logits for each in (whisper, again))
    assert float((found - expected).abs().max()) <= error


# ---- DINOv2 in ONNX, as an exporter names it -------------------------------------------------------------------------

WIDTH, DEPTH, HEADS, PATCH, SIDE = 16, 2, 2, 4, 3
EARLIER = {"q_proj": "attention.query", "k_proj": "attention.key", "v_proj": "attention.value",
           "o_proj": "output.dense"}                     # of transformers, when the file was exported
BEFORE = re.compile("|".join(EARLIER))
MODEL = tool.Wheel("models/tiny", "tiny", "1.0", "onnx", "vit_small_patch14_dinov2", (
    tool.Member("m.onnx", "model.onnx", 0, ""),))


def varint(value):
    more = bytearray()
    while value > 127:
        more.append(value & 127 | 128)
        value >>= 7
    return bytes([*more, value])


def field(number, value):
    """A number, or what is as long as it says."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def onnx_tensor(name, value, packed=False, kind=1):
    dims = [field(1, b"".join(map(varint, value.shape)))] if packed else [field(1, size) for size in value.shape]
    return field(5, b"".join([*dims, field(2, kind), field(8, name.encode()),
                              field(9, np.ascontiguousarray(value, "<f4").tobytes())]))


def node(name, *given):
    return field(1, b"".join([*(field(1, each.encode()) for each in given), field(2, b"out"), field(3, name.encode())]))


def exported(model):
    """The bytes of a file: matrices transposed and numbered, places apart, numbers of another type among them."""
    state = {BEFORE.sub(lambda found: EARLIER[found[0]], name): value.detach().numpy()
             for name, value in model.named_parameters() if "mask_token" not in name}
    places = state.pop("embeddings.position_embeddings")
    parts = [node("/backbone/embeddings/Concat", "onnx::Concat_1"), onnx_tensor("onnx::Concat_1", places[:, :1]),
             onnx_tensor("onnx::Reshape_2", places[:, 1:], packed=True), onnx_tensor("steps", np.ones(2), kind=7)]
    for i, (name, value) in enumerate(state.items()):
        if name.endswith(".weight") and value.ndim == 2:
            number, layer = f"onnx::MatMul_{i + 10}", re.sub(r"\.(?!\d)", "/", name.removesuffix(".weight"))
            parts += [onnx_tensor(number, value.T), node(f"/backbone/{layer}/MatMul", "states", number)]
        else:
            parts.append(onnx_tensor(f"backbone.{name}", value))
    return field(1, 7) + field(2, b"pytorch") + field(7, b"".join(parts))


@pytest.fixture
def vit(monkeypatch):
    for name, value in {"WIDTH": WIDTH, "DEPTH": DEPTH, "PATCH": PATCH, "SIDE": SIDE}.items():
        monkeypatch.setattr(onnx, name, value)
    torch.manual_seed(0)
    model = Dinov2Model(Dinov2Config(hidden_size=WIDTH, num_hidden_layers=DEPTH, num_attention_heads=HEADS,
                                     patch_size=PATCH, image_size=PATCH * SIDE)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


@torch.no_grad()
def test_timm_computes_what_transformers_does(vit, tmp_path):
    (tmp_path / "model.onnx").write_bytes(exported(vit))
    config, state = onnx.dinov2(onnx.read(tmp_path / "model.onnx"), "vit_small_patch14_dinov2")
    timms = VisionTransformer(img_size=PATCH * SIDE, patch_size=PATCH, embed_dim=WIDTH, depth=DEPTH, num_heads=HEADS,
                            init_values=1.0, num_classes=0, global_pool="").eval()
    timms.load_state_dict(state)
    images = torch.randn(2, 3, PATCH * SIDE, PATCH * SIDE)
    assert_close(timms(images), vit(images).last_hidden_state, rtol=1e-4, atol=1e-4)
    assert config["pretrained_cfg"]["input_size"] == [3, 12, 12]


def test_another_file_is_refused(vit, tmp_path):
    path, whole = tmp_path / "model.onnx", exported(vit)
    path.write_bytes(whole.replace(b"layer_scale2", b"layer_scale9"))
    with pytest.raises(DataError, match="it lacks 'backbone.encoder.layer.0.layer_scale2.lambda1': no small DINOv2"):
        convert.convert(MODEL, tmp_path, tmp_path)
