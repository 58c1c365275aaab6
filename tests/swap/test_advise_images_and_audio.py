"""crt_exp.advise and task=advise for models of images and audio: losses are those of their definition, labels come from
folders and tables, without labels nothing but the model's own outputs counts, and bad inputs are refused."""

import json

import pytest
import soundfile
import torch
import transformers
from refusals import check_refused
from small_images import write_images
from small_speech import WORDS, tone
from torch.nn.functional import cross_entropy, kl_div

import crt_exp
from crt_exp import swap_attention
from crt_exp.data.vocabularies import Symbols
from crt_exp.mechanism import Mechanism
from crt_exp.models import vision
from crt_exp.models.conformer_transducer import PRESETS, Recogniser, save_model
from crt_exp.measure.advise import label_of
from crt_exp.swap.bench import BatchBench

pytestmark = pytest.mark.usefixtures("one_thread")
CLASSES = ("class0", "class1", "class2")
DESCRIPTION = vision.VisionDescription(vision.SIZED, 12, vision.NEW | {"patch_size": 3, "embed_dim": 32, "depth": 2},
                                       CLASSES)
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
ARMS = "task.attentions=[nearfar,uniform]"


def peaked(model, factor=3.0):
    """Attention that is not flat."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor) if parameter.ndim > 1 else None
    return model.eval()


def vit():
    torch.manual_seed(0)
    return peaked(DESCRIPTION.make())


def images(count=7):
    return torch.randn(count, 3, 12, 12, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_losses_are_those_of_their_definition():
    model, x, labels = vit(), images(), torch.tensor([0, 1, 2, 0, 1, 2, 0])
    pieces = x.split(1)
    labelled = BatchBench(model, pieces[:5], pieces[5:], labels=labels.split(1))
    bare = BatchBench(model, pieces[:5], pieces[5:])
    assert list(bare.timed) == [17]                                    # 16 patches and a token
    own, arm = model(x[3:4]), Mechanism.of("window", block=4, first=1)
    found, divergence = (bench.losses(arm)["loss"][3] for bench in (labelled, bare))
    divergence -= bare.losses(None)["loss"][3]
    swap_attention(model, "window", block=4, first=1)
    swapped = model(x[3:4])
    assert found == pytest.approx(float(cross_entropy(swapped, labels[3:4])), abs=1e-5)
    expected = kl_div(swapped.log_softmax(-1), own.log_softmax(-1), log_target=True, reduction="sum")
    assert divergence == pytest.approx(float(expected), abs=1e-4) and divergence > 1e-3


def test_images_in_memory_leave_the_model_as_it_was():
    model = vit()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    advice = crt_exp.advise(model, images(), labels=torch.zeros(7, dtype=torch.long), samples=5, calibration=2,
                            rounds=1, attentions=["nearfar", "uniform"])
    assert all(torch.equal(model.state_dict()[name], t) for name, t in before.items())
    assert (advice.noun, advice.samples, advice.length) == ("images", 5, 17)
    assert not any("Without labels" in note for note in advice.notes)
    assert advice.rows[1].above == pytest.approx(0, abs=1e-5)  # exact below 512


def test_dictionaries_are_what_the_model_takes():
    torch.manual_seed(0)
    config = transformers.Wav2Vec2Config(conv_dim=(16,) * 7, num_conv_pos_embeddings=8, vocab_size=12,
                                         num_conv_pos_embedding_groups=2, **SIZES)
    model = transformers.Wav2Vec2ForCTC(config).eval()
    waves = [{"input_values": torch.randn(1, 4000 + 800 * i), "labels": torch.tensor([[3, 4]])} for i in range(4)]
    bench = BatchBench(model, waves[:3], waves[3:])
    assert bench.length == 17
    with torch.no_grad():
        expected = float(model(**waves[1]).loss)
    assert bench.labelled and bench.losses(None)["loss"][1] == pytest.approx(expected, abs=1e-5)
    advice = crt_exp.advise(model, [{"input_values": each["input_values"]} for each in waves], samples=3, calibration=1,
                            rounds=1, attentions=["uniform"])
    assert any("Without labels" in note for note in advice.notes) and advice.noun == "pieces"


def test_bad_pieces_are_refused():
    for given, message in (
            ({"samples": 50}, "of 7 images"), ({"labels": torch.zeros(3)}, "labels: 3, expected 7"),
            ({"texts": torch.arange(5000)}, "predicts no tokens")):
        with pytest.raises(ValueError, match=message):
            crt_exp.advise(vit(), **({"texts": images(), "samples": 3} | given))
    with pytest.raises(ValueError, match="no loss and no class scores"):
        bare = transformers.ViTModel(transformers.ViTConfig(image_size=12, patch_size=3, **SIZES))
        crt_exp.advise(bare, images(), samples=3)
    with pytest.raises(ValueError, match="no supported attention"):
        crt_exp.advise(torch.nn.Conv2d(3, 2, 12), images(), samples=3)


def test_labels_come_from_folders():
    assert label_of("val/class1/a/3.png", CLASSES) == 1 and label_of("mine/3.png", CLASSES) is None
    assert label_of("class0/class2/3.png", CLASSES) == 2 and label_of("class1.png", CLASSES) is None


# ---- the command line


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Models of this package and of transformers, images, and a table of audio."""
    root = tmp_path_factory.mktemp("advise")
    vision.save_model(DESCRIPTION, Mechanism.of("exact"), vit().state_dict(), root / "timm")
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(transformers.ViTConfig(image_size=12, patch_size=3, **SIZES))
    model.save_pretrained(root / "vit")
    transformers.ViTImageProcessor(size={"height": 12, "width": 12}).save_pretrained(root / "vit")
    write_images(root / "images", val=2)
    sizes = PRESETS["small"] | {"layers": 1, "dim": 16, "ffn": 32, "heads": 2, "predictor": 16, "joiner": 16}
    heard = Recogniser(Symbols.of("words", WORDS, 0), 8000, sizes, Mechanism.of("exact"))
    save_model(heard, heard.build().state_dict(), root / "speech")
    (root / "audio").mkdir()
    for number, word in enumerate(WORDS):
        soundfile.write(root / "audio" / f"{word}.wav", tone(300 + 50 * number, 0.5), 8000)
    (root / "table.csv").write_text("audio,text\n" + "".join(f"audio/{word}.wav,{word}\n" for word in WORDS))
    return root


@pytest.mark.parametrize("model, key, source, noun, labelled", [
    ("timm", "images", "images", "images", True), ("vit", "images", "images", "images", False),
    ("speech", "audio", "table.csv", "utterances", True)])
def test_the_task_reads_files(model, key, source, noun, labelled, place, typed, tmp_path):
    code, out, err = typed("task=advise", f"task.model={place / model}", f"task.{key}={place / source}", ARMS,
                           "task.samples=6", "task.rounds=1", "logger=none", f"hydra.run.dir={tmp_path / 'run'}")
    assert code == 0, err
    assert "loss increase" in out and ("Without labels" in out) != labelled
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["final"] and len(records[0]["loss"]) == 6
    assert f"6 {noun} of" in (tmp_path / "run" / "advise.md").read_text()


@pytest.mark.parametrize("model, words, message", [
    ("timm", ["task.images=nowhere"], "task.images=nowhere: no such folder"),
    ("timm", ["task.text=a"], "one of task.text"), ("timm", ["task.length=64"], "task.length: only for task.text"),
    ("timm", ["task.samples=500"], "samples=500"),
    ("speech", ["task.images=null", "task.audio={place}/audio"], "no transcript"),
    ("vit", ["task.images=null", "task.audio={place}/table.csv"], "expected a transformers model ForCTC")])
def test_bad_commands_are_refused(model, words, message, place, typed, tmp_path):
    run, words = tmp_path / "run", [word.format(place=place) for word in words]
    base = ["task=advise", f"task.model={place / model}", f"task.images={place / 'images'}", ARMS, "logger=none",
            "task.samples=6"]
    given = [each for each in base if not any(each.split("=")[0] == word.split("=")[0] for word in words)]
    check_refused(typed(*given, *words, f"hydra.run.dir={run}"), [message], run)
