"""python -m crt_exp infer: what it prints is what the model of the run gives, and mistakes are one line."""

import dataclasses
import io
import json
import re
import shutil

import numpy as np
import pandas as pd
import pytest
import soundfile
import torch
import transformers
from helpers import hostile
from helpers.refusals import check_error
from helpers.small_bert import sentence, write_model, write_text
from helpers.small_speech import tone, write_digits
from helpers.task_options import composed_task

from crt_exp import Mechanism, from_pretrained
from crt_exp.experiments import infer
from crt_exp.experiments.data import images
from crt_exp.experiments.data.plan import Plan
from crt_exp.experiments.models import vision
from crt_exp.experiments.models.conformer_transducer import greedy
from crt_exp.experiments.tasks.trembl import VOCABULARY
from crt_exp.registry import own_names

PROTEINS = """task=trembl task.max_length=16 task.validation_share=0.1 task.test_share=0.1 task.cache_dir=null
    task.generated.sequences=150 task.generated.shortest=8 task.generated.longest=16 task.generated.nearest=2
    task.generated.farthest=4 +task.sizes.heads=2 +task.sizes.layers=1 +task.sizes.d_ff=32 +task.sizes.d=16"""
IMAGES = "task=imagenet task.sizes.depth=2 task.sizes.width=32"
SPEECH = """task=librispeech task.corpus=fsdd task.strings.train=24 task.strings.validation=6 task.strings.test=9
    task.batch_seconds=12 +task.sizes.layers=2 +task.sizes.dim=16 +task.sizes.ffn=32 +task.sizes.heads=2
    +task.sizes.kernel=5 +task.sizes.predictor=16 +task.sizes.joiner=16"""


@pytest.fixture(autouse=True)
def quiet(one_thread, monkeypatch):
    monkeypatch.delenv("CRT_DATA", raising=False)


@pytest.fixture
def called(capsys):
    def call(*arguments):
        code = infer.main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return call


def export(line, mechanism, folder, change=lambda model: None):
    """The task and the model of an untrained run."""
    torch.manual_seed(0)
    task = composed_task(line.split())
    model = task.build(Mechanism.parse(mechanism)).eval()
    change(model)
    task.export(model, model.state_dict(), folder)
    return task, model


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The runs `favorpp` (images) and `proteins`; `digits` with three images, and `a.wav`."""
    root = tmp_path_factory.mktemp("infer")
    export(IMAGES, "favorpp m=16", root / "favorpp")
    export(PROTEINS, "favorp m=8", root / "proteins")
    (root / "digits").mkdir()
    actual = images.load()["val"]
    for i in range(3):
        actual.read(actual.sources[i]).save(root / f"digits/{i}.png")
    soundfile.write(root / "a.wav", tone(600, 0.5), 8000)
    return root


@pytest.fixture(scope="module")
def speech(root):
    """The task and the model of the run `spoken`."""

    def speak(model):
        with torch.no_grad():
            model.joiner.out.bias[-1] += 1.5
            model.joiner.out.weight.mul_(6)

    digits = write_digits(root / "recordings")
    return export(f"{SPEECH} task.data_dir={digits}", "favorpp m=8", root / "spoken", speak)


# ---- images and audio


def test_table_holds_the_probabilities_of_the_model(root, called):
    code, out, _ = called(f"run={root / 'favorpp'}", f"input={root / 'digits'}")
    rows = pd.read_csv(io.StringIO(out), dtype=str).values.tolist()
    model = vision.load(root / "favorpp")
    assert code == 0
    assert len(rows) == 3
    for i, (first, *cells) in enumerate(rows):
        image = images.read_image(root / f"digits/{i}.png")
        expected = model.model(model.transform(image)[None])[0].softmax(-1).topk(5)
        assert first == str(root / f"digits/{i}.png")
        assert cells[::2] == [model.classes[j] for j in expected.indices]
        assert [float(share) for share in cells[1::2]] == pytest.approx(
            expected.values.tolist(), abs=6e-4
        )


def lines(out):
    """(file, seconds, text, [(time, symbol)]) of each file."""
    pairs = zip(*[iter(out.splitlines())] * 2)
    heads = [(re.fullmatch(r"(.*) \(([\d.]+) s\): ?(.*)", head), times) for head, times in pairs]
    entries = []
    for head, times in heads:
        entries.append(
            (
                head[1],
                float(head[2]),
                head[3],
                [(float(t), s) for t, s in re.findall(r"([\d.]+) (\S+)", times)],
            )
        )
    return entries


def test_transcript_is_that_of_the_model(root, speech, called, tmp_path):
    task, model = speech
    batch = next(iter(task.batches("test", Plan(batch=4))))
    audio = batch["audio"][0, : batch["samples"][0]].numpy()
    soundfile.write(tmp_path / "a.wav", audio, 8000)
    code, out, err = called(f"run={root / 'spoken'}", f"input={tmp_path / 'a.wav'}")
    assert code == 0, err
    assert err == "", err
    ((file, seconds, text, times),) = lines(out)
    _, (found,) = model(batch["audio"][:1, : len(audio)], batch["samples"][:1], search=greedy)
    assert text == task.vocabulary.decode(found.symbols)
    assert text
    assert file == str(tmp_path / "a.wav")
    assert [symbol for _, symbol in times] == text.split()
    actual = [at for at, _ in times]
    expected = sorted(at for at, _ in times)
    assert actual == expected
    assert times[-1][0] <= seconds
    expected = len(audio) / 8000
    assert seconds == pytest.approx(expected, abs=0.06)


def test_folders_other_rates_and_segments(root, speech, called, tmp_path):
    words = [tone(300 + 300 * (i % 9), 0.4, 16000, seed=i) * (i % 5 > 0) for i in range(15)]
    (tmp_path / "in").mkdir()
    soundfile.write(tmp_path / "long.flac", np.concatenate(words), 16000)
    soundfile.write(tmp_path / "in" / "short.WAV", tone(900, 0.5, 44100), 44100, format="WAV")
    (tmp_path / "notes.txt").write_text("no audio")
    code, out, err = called(f"run={root / 'spoken'}", f"input={tmp_path}", "segment=2.5")
    assert code == 0, err
    found = lines(out)
    actual = [file for file, *_ in found]
    expected = [
        str(tmp_path / "in" / "short.WAV"),
        str(tmp_path / "long.flac"),
    ]
    assert actual == expected
    assert [seconds for _, seconds, *_ in found] == [0.5, 6.0]
    times = [at for at, _ in found[1][3]]
    assert times == sorted(times)
    assert times[0] < 2.5
    assert 3.5 < times[-1] <= 6


def test_segments_are_cut_in_silence_and_cover_everything():
    audio = np.concatenate(
        [tone(500, 2.5) if i % 2 == 0 else np.zeros(4000, np.float32) for i in range(12)]
    )
    actual = list(infer.segments((audio * 2**14).astype(np.int16), 8000, 5.0))
    assert actual[0][0] == 0
    assert actual[-1][1] == len(audio)
    for a, b in zip(actual, actual[1:]):
        assert a[1] == b[0]
    for start, end in actual:
        assert 0 < end - start <= 40000
    for _, end in actual[:-1]:
        assert (audio[end - 400 : end + 400] == 0).all()


def test_unreadable_files_are_named_and_counted_and_the_others_are_read(
    root, speech, called, tmp_path
):
    for name in ("a", "b", "c"):
        soundfile.write(tmp_path / f"{name}.wav", tone(600, 0.5), 8000)
    (tmp_path / "a.wav").write_bytes((tmp_path / "a.wav").read_bytes()[:4000])
    soundfile.write(tmp_path / "b.wav", tone(600, 0.02), 8000)
    (tmp_path / "d.mp3").touch()
    soundfile.write(tmp_path / "e.flac", tone(600, 0.5), 8000)
    content = (tmp_path / "e.flac").read_bytes()
    unknown_length = content[:21] + bytes([content[21] & 0xF0]) + bytes(4) + content[26:]
    (tmp_path / "e.flac").write_bytes(unknown_length)
    soundfile.write(tmp_path / "f.flac", tone(600, 0.5), 8000)
    (tmp_path / "f.flac").write_bytes(content[:-50])
    code, out, err = called(f"run={root / 'spoken'}", f"input={tmp_path}")
    assert "f.flac: not readable" in err
    assert code == 2
    assert ": 5 of 6 files are unreadable" in err
    assert "a.wav: truncated" in err
    assert "b.wav: 0.020 s, expected at least" in err
    assert "d.mp3: not readable" in err
    actual = [(file, seconds) for file, seconds, *_ in lines(out)]
    assert actual == [(str(tmp_path / "c.wav"), 0.5)]
    shutil.copy(root / "digits/0.png", tmp_path)
    (tmp_path / "1.png").write_text("no image")
    code, out, err = called(f"run={root / 'favorpp'}", f"input={tmp_path}")
    assert code == 2
    assert out.count(".png") == 1
    assert f"input={tmp_path}: 1 of 2 files are unreadable" in err


# ---- text

GLUE = "task=glue task.max_length=40 task.init=uptrain"
COLORS = ["red", "green", "old"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A table of texts, and the runs `own` (classes) and `exact` (scores of pairs) and `masked`."""
    root = tmp_path_factory.mktemp("texts")
    bert = write_model(root / "bert")
    table = pd.DataFrame({"text": [sentence(i) for i in range(30)], "label": COLORS * 10})
    table.to_csv(root / "own.csv", index=False)
    pairs = {"text_a": table.text, "text_b": table.text + " red", "label": [0.5, 1.5, 2.5] * 10}
    pd.DataFrame(pairs).to_csv(root / "pairs.csv", index=False)
    write_text(root / "own.txt")
    options = f"{GLUE} task.model={bert}"
    export(f"{options} task.csv={root}/own.csv", "favorpp m=8", root / "own")
    export(f"{options} task.csv={root}/pairs.csv", "exact", root / "exact")
    line = f"task=mlm task.init=uptrain task.model={bert} task.block=24 task.text={root}/own.txt"
    export(line, "favorpp m=8", root / "masked")
    return root


def test_classes_of_texts_are_those_of_the_loaded_model(texts, called, tmp_path):
    """crt_exp.from_pretrained reads the run; each text is labelled as if it were alone."""
    code, out, err = called(f"run={texts / 'own'}", f"input={texts / 'own.csv'}")
    assert (code, err) == (0, "")
    actual = pd.read_csv(io.StringIO(out))
    model = from_pretrained(transformers.AutoModelForSequenceClassification, texts / "own").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(texts / "own/model")
    names = ["green", "old", "red"]
    assert list(actual) == [
        "text",
        "label",
        "predicted",
        *(f"probability_{name}" for name in names),
    ]
    for row in actual.head(4).itertuples(index=False):
        with torch.no_grad():
            shares = model(**tokenizer(row.text, return_tensors="pt")).logits[0].softmax(-1)
        assert row[3:] == pytest.approx(shares.tolist(), abs=1e-4)
        assert row.predicted == names[shares.argmax()]
    lines = "\n".join(actual.text)
    (tmp_path / "lines.txt").write_text(lines)
    again = called(
        f"run={texts / 'own'}", f"input={tmp_path}/lines.txt", f"output={tmp_path}/p.csv"
    )
    assert again[:2] == (0, "")
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "p.csv"), actual.drop(columns="label"))


def test_pairs_of_texts_get_a_score(texts, called):
    """The run has exact attention, which from_pretrained keeps."""
    code, out, _ = called(f"run={texts / 'exact'}", f"input={texts / 'pairs.csv'}")
    assert code == 0
    assert list(pd.read_csv(io.StringIO(out))) == ["text_a", "text_b", "label", "predicted"]
    model = from_pretrained(transformers.AutoModelForSequenceClassification, texts / "exact")
    assert not hasattr(model.config, "crt_exp")


def test_each_mask_gets_the_most_probable_tokens(texts, called, tmp_path):
    (tmp_path / "in.txt").write_text("the [MASK] sat on the [MASK] .\n\n[MASK] ran .\n")
    code, out, err = called(f"run={texts / 'masked'}", f"input={tmp_path}/in.txt")
    assert (code, err) == (0, "")
    actual = pd.read_csv(io.StringIO(out))
    assert actual["mask"].tolist() == [1, 2, 1]
    model = from_pretrained(transformers.AutoModelForMaskedLM, texts / "masked").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(texts / "masked/model")
    with torch.no_grad():
        logits = model(**tokenizer("[MASK] ran .", return_tensors="pt")).logits[0, 1]
    likely = logits.softmax(-1).topk(5)
    last = actual.iloc[2].tolist()
    assert last[2::2] == tokenizer.convert_ids_to_tokens(likely.indices.tolist())
    assert last[3::2] == pytest.approx(likely.values.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    "run, name, content, words",
    [
        ("own", "a.csv", "body\nx\n", "no column text; its header has body"),
        ("own", "a.csv", "text,n\nx,1\n,2\n", "row 2, column text is empty"),
        ("own", "a.doc", "x", "expected a .csv, .tsv, .jsonl or .parquet file"),
        ("own", "a.txt", "\n", "no row; expected at least 1 text"),
        ("exact", "a.txt", "x\n", "no column text_a"),
        ("masked", "a.txt", "the cat\n", r"row 1 has no [MASK]"),
        ("masked", "a.txt", "[MASK] " + "cat " * 50, "row 1 has 53 tokens; expected at most 40"),
    ],
)
def test_texts_that_do_not_fit_the_run_are_one_line(
    run, name, content, words, texts, called, tmp_path
):
    (tmp_path / name).write_text(content)
    code, out, err = called(f"run={texts / run}", f"input={tmp_path / name}")
    assert (code, out) == (2, "")
    assert words in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"crt_exp": 5},
        {"crt_exp": {"mechanisms": [{"_target_": "os.system"}], "layers": {"a": 0}}},
        {"hidden_size": 10**9, "num_attention_heads": 10**6},
        {"text_columns": 5},
        {"text_columns": []},
        {"id2label": {"0": "a", "1": "b"}},
        {"auto_map": {"AutoModelForSequenceClassification": "evil.Model"}, "model_type": "evil"},
    ],
    ids=str,
)
def test_hostile_configurations_of_classifiers_are_one_line(change, texts, called, tmp_path):
    shutil.copytree(texts / "own", tmp_path / "run")
    file = tmp_path / "run/model/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    code, out, err = called(f"run={tmp_path / 'run'}", f"input={texts / 'own.csv'}")
    assert (code, out) == (2, ""), err
    hostile.check_one_line(err)


def test_truncated_rows_are_counted(texts, called, tmp_path):
    (tmp_path / "a.txt").write_text("cat\n" + "cat " * 50)
    code, _, err = called(f"run={texts / 'own'}", f"input={tmp_path}/a.txt")
    assert (code, err) == (0, "truncated 1 of 2 rows to 40 tokens\n")


# ---- sequences (books and pixels: tests/tasks)


def test_sequences_of_letters(root, called, tmp_path):
    run = f"run={root / 'proteins'}"
    code, out, err = called(run, "prompt=MK", "n=5", "seed=3", "top_k=5")
    found = out.splitlines()
    assert code == 0
    assert err == ""
    assert len(found) == 5
    assert len(set(found)) > 1
    for line in found:
        assert line.startswith("MK")
        assert len(line) <= 16
        assert set(line) <= set(VOCABULARY["letters"])
    actual = called(run, "prompt=MK", "seed=4", "top_k=5")[1].splitlines()
    assert actual == found[1:2]
    assert len(called(run, "length=9", "temperature=0")[1].strip()) <= 9
    actual = called(run, "n=2", f"output={tmp_path / 'a.fasta'}")[:2]
    assert actual == (0, "")
    assert (tmp_path / "a.fasta").read_text().count(">sample-") == 2


def test_a_run_with_a_custom_sampler_is_read_with_its_names(tmp_path, called):
    (tmp_path / "conf/sampler").mkdir(parents=True)
    (tmp_path / "conf/sampler/mine.yaml").write_text(
        "_target_: crt_exp.samplers.iid\n_partial_: true\n"
    )
    with own_names([tmp_path / "conf"]):
        export(PROTEINS, "favorp sampler=mine m=8", tmp_path / "run")
    check_error(called(f"run={tmp_path / 'run'}"), "unknown sampler 'mine'", "names=FOLDER")
    code, out, err = called(f"run={tmp_path / 'run'}", f"names={tmp_path / 'conf'}")
    assert (code, err) == (0, "")
    assert out


# ---- runs of others

INPUT = {
    "favorpp": ["input={root}/digits"],
    "spoken": ["input={root}/a.wav"],
    "proteins": [],
}
ATTENTION = {"favorpp": "crt_exp", "spoken": "attention", "proteins": "attention"}
SIZES = [
    ("favorpp", None, {"crt_exp": 5}),
    ("favorpp", None, {"architecture": {"_target_": "os.system"}}),
    ("spoken", "symbols", {"entries": [5]}),
    ("proteins", "sizes", {"d": 10**9}),
]


def test_a_hostile_run_runs_nothing_and_takes_no_memory(
    root, speech, tmp_path, called, monkeypatch
):
    sprung = hostile.set_trap(tmp_path, monkeypatch)
    imported = dict(hostile.changes(tmp_path))["imported"]
    changes = [
        (name, lambda config, key=key: imported(config[key])) for name, key in ATTENTION.items()
    ]
    changes += [
        (
            name,
            lambda config, key=key, value=value: (config if key is None else config[key]).update(
                value
            ),
        )
        for name, key, value in SIZES
    ]
    for i, (name, change) in enumerate(changes):
        shutil.copytree(root / name, tmp_path / f"run{i}")
        file = tmp_path / f"run{i}/model/config.json"
        config = json.loads(file.read_text())
        change(config)
        file.write_text(json.dumps(config))
        code, out, err = called(
            f"run={tmp_path / f'run{i}'}", *[word.format(root=root) for word in INPUT[name]]
        )
        assert code == 2, (i, err)
        assert out == "", (i, err)
        assert err.startswith("crt_exp infer: error: "), (i, err)
        hostile.check_one_line(err)
        assert not sprung.exists(), i


def test_a_masked_model_cannot_generate(tmp_path, called):
    export(f"{PROTEINS} task.direction=bidirectional", "exact", tmp_path / "run")
    assert "a masked model cannot generate" in called(f"run={tmp_path / 'run'}")[2]
    (tmp_path / "run/model/config.json").write_text('{"model_type": "bert"}')
    assert "expected a run of" in called(f"run={tmp_path / 'run'}")[2]


# ---- the command


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("run=nowhere input=x.png", "run=nowhere: no such directory"),
        ("input=x.png", "run: missing"),
        ("run={spoken} input=/nowhere.wav", "input=/nowhere.wav: expected an audio file"),
        ("run={proteins} prompt=MKJ", "unknown letter 'J'"),
        ("run={proteins} prompt=AAAAAAAAAAAAAAAA", "has 16 symbols, expected fewer than length=16"),
        (
            "run={proteins} length=40 temperature=0 prompt=MKMKMKMKMKMKMKMKMKMK",
            "expected at most 16, the learned",
        ),
    ],
    ids=ascii,
)
def test_mistakes_are_one_line(arguments, words, root, speech, tmp_path, called, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = {name: root / name for name in INPUT}
    code, out, err = called(*[word.format(**runs) for word in arguments.split()])
    assert code == 2, err
    assert out == "", err
    assert err.startswith("crt_exp infer: error: "), err
    assert words in err, err
    assert len(err.splitlines()) <= 2


def test_help_names_every_key(called):
    code, out, _ = called("--help")
    keys = {
        field.name for options, _ in infer.KINDS.values() for field in dataclasses.fields(options)
    }
    assert code == 0
    for key in keys:
        assert key in out
    assert called()[0] == 2
