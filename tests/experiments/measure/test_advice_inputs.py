"""What crt_exp.advise and task=advise refuse, and the command line of task=advise."""

import json
import shutil

import pytest
import soundfile
import torch
import transformers
from helpers.advised_models import CLASSES, DESCRIPTION, HEADS, bert, ids, images, llama, vit
from helpers.covering import slow
from helpers.refusals import check_refused
from helpers.small_bert import VOCABULARY, write_text
from helpers.small_images import write_images
from helpers.small_speech import WORDS, tone

import crt_exp
from crt_exp import swap_attention
from crt_exp.experiments.data.text import bert_tokenizer
from crt_exp.experiments.data.vocabularies import Symbols
from crt_exp.experiments.measure.advise import mechanisms
from crt_exp.experiments.measure.model_files import label_of
from crt_exp.experiments.models import vision
from crt_exp.experiments.models.conformer_transducer import PRESETS, Recogniser, save_model
from crt_exp.mechanism import Mechanism
from crt_exp.registry import ConfigError

pytestmark = pytest.mark.usefixtures("one_thread")


def test_candidates_and_bad_inputs():
    actual = list(mechanisms(None))
    assert actual == ["exact", "nearfar", "window", "favorpp", "uniform"]
    for model, given, message in (
        (llama(), {"texts": "one text"}, "tokenizer=None"),
        (llama(), {"length": 1000}, "expected 32 to 256"),
        (llama(), {"samples": 50}, "at least 2 and 1, of 18 texts"),
        (llama(), {"samples": 1}, "at least 2"),
        (llama(), {"attentions": ["favour"]}, "unknown attention 'favour'"),
        (bert(), {}, "with a mask token"),
        (torch.nn.Linear(2, 2), {}, "predicts no tokens"),
        (transformers.LlamaModel(llama().config), {}, "predicts no tokens"),
        (swap_attention(llama(), "uniform"), {}, "already swapped"),
    ):
        with pytest.raises((ValueError, ConfigError), match=message):
            crt_exp.advise(model, **({"texts": ids(), "length": 64} | given))
    bare = transformers.ViTModel(
        transformers.ViTConfig(image_size=12, patch_size=3, hidden_size=24, **HEADS)
    )
    for model, given, message in (
        (vit(), {"samples": 50}, "of 7 images"),
        (vit(), {"labels": torch.zeros(3)}, r"labels: expected a tensor \(7,\)"),
        (bare, {}, "no loss and no class scores"),
        (torch.nn.Conv2d(3, 2, 12), {}, "no supported attention"),
    ):
        with pytest.raises(ValueError, match=message):
            crt_exp.advise(model, images(), **({"samples": 3} | given))


TEXTS = {
    "a list without entries": ([], "texts: empty, expected strings"),
    "a tuple without entries": ((), "texts: empty"),
    "None": (None, "texts: NoneType"),
    "one dictionary": ({"input_ids": ids(64)[None]}, "texts: dict"),
    "a generator": ((text for text in "ab"), "texts: generator"),
    "an array": (ids().numpy(), "texts: ndarray"),
    "numbers": (ids().tolist(), r"texts\[0\]: int"),
    "tensors": ([ids(), ids()], r"texts\[0\]: Tensor, expected strings, one tensor"),
    "strings and another": (["one", None], r"texts\[1\]: NoneType"),
    "an id beyond the vocabulary": (ids() + 10, "token ids .*the vocabulary"),
    "a negative id": (ids() - 6, "token ids .*the vocabulary"),
    "ids of another type": (ids().float(), "torch.float32; expected token ids"),
    "ids that are a mask": (ids() > 9, "torch.bool; expected token ids"),
}


def empty_tokenizer(text, **options):
    return {"input_ids": []}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_of_another_form_are_refused(name):
    texts, message = TEXTS[name]
    with pytest.raises((ValueError, TypeError), match=f"^texts.*{message.removeprefix('texts')}"):
        crt_exp.advise(llama(), texts, length=64, tokenizer=empty_tokenizer)


CLASSIFIED = torch.tensor([0, 1, 2, 0, 1, 2, 0])
IMAGES = {
    "whole numbers": ({"texts": images().byte()}, "uint8; expected .* image processor"),
    "one image": ({"texts": images()[0]}, r"\(3, 12, 12\).*expected .*images \(n, C, H, W\)"),
    "dictionaries of whole numbers": (
        {"texts": [{"x": image[None].byte()} for image in images()]},
        r"texts\[0\]: images of uint8",
    ),
    "a class too many": ({"labels": CLASSIFIED + 1}, "labels: expected classes 0 to 2"),
    "a negative class": ({"labels": CLASSIFIED - 1}, "labels: expected classes 0 to 2"),
    "probabilities": ({"labels": CLASSIFIED / 2}, r"labels: expected .* of torch.long"),
    "a column": ({"labels": CLASSIFIED[:, None]}, r"labels: expected .* of torch.long"),
    "a list": ({"labels": CLASSIFIED.tolist()}, "labels: expected a tensor"),
    "no samples": ({"samples": 0}, "samples=0"),
}


@pytest.mark.parametrize("name", IMAGES)
def test_images_and_labels_of_another_form_are_refused(name):
    given, message = IMAGES[name]
    with pytest.raises((ValueError, TypeError), match=message):
        crt_exp.advise(vit(), **({"texts": images(), "samples": 3} | given))


def test_labels_of_text_and_labels_in_dictionaries_are_refused():
    with pytest.raises(ValueError, match="labels: not used for token ids"):
        crt_exp.advise(llama(), ids(), length=64, labels=CLASSIFIED)
    pieces = []
    for row in ids(448).view(7, 1, 64):
        pieces.append({"input_ids": row, "labels": row + 99})
    with pytest.raises(ValueError, match="LlamaForCausalLM: Target .* out of bounds"):
        crt_exp.advise(llama(), pieces, samples=3)


def test_labels_come_from_folders():
    assert label_of("val/class1/a/3.png", CLASSES) == 1
    assert label_of("mine/3.png", CLASSES) is None
    assert label_of("class0/class2/3.png", CLASSES) == 2
    assert label_of("class1.png", CLASSES) is None


# ---- the command line


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Models of this package and of transformers, a text, images, and a table of audio."""
    root = tmp_path_factory.mktemp("advise")
    write_text(root / "text.txt", 300)
    (root / "vocab.txt").write_text("".join(word + "\n" for word in VOCABULARY))
    llama().save_pretrained(root / "llama")
    bert_tokenizer(root / "vocab.txt").save_pretrained(root / "llama")
    vision.save_model(DESCRIPTION, Mechanism.of("exact"), vit().state_dict(), root / "timm")
    write_images(root / "images", val=2)
    sizes = PRESETS["small"] | {
        "layers": 1,
        "dim": 16,
        "ffn": 32,
        "heads": 2,
        "predictor": 16,
        "joiner": 16,
    }
    heard = Recogniser(Symbols.from_texts("words", WORDS, 0), 8000, sizes, Mechanism.of("exact"))
    save_model(heard, heard.build().state_dict(), root / "speech")
    (root / "audio").mkdir()
    for number, word in enumerate(WORDS):
        soundfile.write(root / "audio" / f"{word}.wav", tone(300 + 50 * number, 0.5), 8000)
    (root / "table.csv").write_text(
        "audio,text\n" + "".join(f"audio/{word}.wav,{word}\n" for word in WORDS)
    )
    return root


def command(place, model, *words):
    return [
        "task=advise",
        f"task.model={place / model}",
        "task.cache_dir=null",
        "task.rounds=1",
        "logger=none",
        *(word.format(place=place) for word in words),
    ]


TEXT = [
    "task.text={place}/text.txt",
    "task.length=64",
    "task.samples=3",
    "task.calibration=1",
    'task.attentions=["nearfar preset=quality","favorpp m=8",uniform]',
]
PIECES = ["task.samples=6", "task.attentions=[nearfar,uniform]"]


@pytest.mark.parametrize(
    "model, words, noun",
    [
        ("llama", TEXT, "timed 64 tokens"),
        slow("speech", ["task.audio={place}/table.csv", *PIECES], "6 utterances of"),
        slow("timm", ["task.images={place}/images", *PIECES], "6 images of"),
    ],
)
def test_the_task_reads_files_and_writes_the_table(model, words, noun, place, typed, tmp_path):
    code, out, err = typed(*command(place, model, *words), f"hydra.run.dir={tmp_path / 'run'}")
    assert code == 0, err
    assert "loss increase" in out
    assert noun in err + (tmp_path / "run" / "advise.md").read_text()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert records[-1]["final"]
    assert records[-1]["advice"] in out
    actual = len(records[0]["loss"])
    assert actual == (3 if model == "llama" else 6)
    assert (tmp_path / "run" / "advise.png").stat().st_size > 10_000


def test_a_run_is_judged_on_its_own_blocks(place, typed, tmp_path):
    run = tmp_path / "mine"
    shutil.copytree(place / "llama", run / "model")
    (run / "config.yaml").write_text(
        "task:\n  _target_: crt_exp.experiments.tasks.mlm.MLM\n  block: 40\n"
    )
    words = command(
        place, "llama", TEXT[0], "task.samples=2", "task.calibration=1", "task.attentions=[window]"
    )
    code, out, err = typed(*words, f"task.model={run}", f"hydra.run.dir={tmp_path / 'run'}")
    assert code == 0, err
    assert "timed 40 tokens" in err
    assert "window computes exact attention" in out


@pytest.mark.parametrize(
    "model, words, message",
    [
        ("llama", [], "one of task.text, task.images"),
        ("timm", ["task.images={place}/nowhere"], "no such folder"),
        ("speech", ["task.audio={place}/audio", PIECES[0]], "no transcript"),
    ],
)
def test_bad_commands_are_refused(model, words, message, place, typed, tmp_path):
    run = tmp_path / "run"
    check_refused(typed(*command(place, model, *words), f"hydra.run.dir={run}"), [message], run)
