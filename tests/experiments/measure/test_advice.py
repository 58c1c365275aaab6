"""crt_exp.advise and task=advise, and the bench below them: losses are those of their definition, whatever happens
within a swap the model is itself again, the sentence follows the numbers, and bad inputs are refused."""

import csv
import json
import math
import shutil

import pytest
import soundfile
import torch
import transformers
from helpers.refusals import check_refused
from helpers.small_bert import VOCABULARY, write_text
from helpers.small_images import write_images
from helpers.small_speech import WORDS, tone
from torch.nn.functional import cross_entropy, kl_div

import crt_exp
from crt_exp import swap_attention
from crt_exp.experiments.data.text import bert_tokenizer
from crt_exp.experiments.data.vocabularies import Symbols
from crt_exp.experiments.measure import bench
from crt_exp.experiments.measure.advise import mechanisms
from crt_exp.experiments.measure.bench import IGNORED, BatchBench, Bench, Split, TextBench
from crt_exp.experiments.measure.model_files import label_of
from crt_exp.experiments.measure.recall import DenseBaseline
from crt_exp.experiments.measure.recommendation import Advice, Row, pays_from
from crt_exp.experiments.models import vision
from crt_exp.experiments.models.conformer_transducer import PRESETS, Recogniser, save_model
from crt_exp.experiments.models.language import Transformer
from crt_exp.features.base import NotFinite
from crt_exp.mechanism import Mechanism
from crt_exp.registry import ConfigError

pytestmark = pytest.mark.usefixtures("one_thread")
HEADS = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
SIZES = HEADS | {"hidden_size": 16, "vocab_size": len(VOCABULARY), "max_position_embeddings": 256}
CLASSES = ("class0", "class1", "class2")
DESCRIPTION = vision.VisionDescription(
    vision.SIZED, 12, vision.NEW | {"patch_size": 3, "embed_dim": 32, "depth": 2}, CLASSES
)


def peaked(model):
    """Attention that is not flat."""
    torch.manual_seed(0)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3) if p.ndim > 1 else None
    return model.eval()


def llama():
    return peaked(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)))


def bert():
    return peaked(transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)))


def vit():
    return peaked(DESCRIPTION.make())


def ids(count=1200):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(5, len(VOCABULARY), (count,), generator=generator)


def images(count=7):
    return torch.randn(count, 3, 12, 12, generator=torch.Generator().manual_seed(0))


def bench_of(model, length=64):
    rows = ids()[: len(ids()) // length * length].view(-1, length)
    judged, training = Split(3, 2, 0).indices(len(rows), "texts", "texts")
    return TextBench(model, rows[judged], rows[training], mask=4, special=range(5))


# ---- losses


@torch.no_grad()
def test_losses_of_text_are_those_of_their_definition():
    model = llama()
    own = bench_of(model)
    found = own.losses(Mechanism.of("window", block=16, first=4))
    swap_attention(model, "window", block=16, first=4)
    row = own.rows[1:2]
    actual = found["loss"][1]
    expected = float(model(row, labels=row).loss)
    assert actual == pytest.approx(expected, abs=1e-5)
    twice = row[:, :32].repeat(1, 2)
    logits = model(twice).logits[0, 32 + 15 : -1]
    actual = found["repeated"][1]
    expected = float(cross_entropy(logits, twice[0, 32 + 16 :]))
    assert actual == pytest.approx(expected, abs=1e-5)


def test_losses_of_dictionaries_are_those_that_the_model_returns():
    model = llama()
    pieces = [{"input_ids": row, "labels": row} for row in ids(256).view(4, 1, 64)]
    found = BatchBench(model, pieces[:3], pieces[3:]).losses(None)["loss"]
    actual = found[1]
    expected = model(**pieces[1]).loss.item()
    assert actual == pytest.approx(expected, abs=1e-5)


@torch.no_grad()
def test_masked_models_hide_the_same_words_from_all():
    model = bert()
    bench = bench_of(model)
    first = bench.losses(Mechanism.of("uniform"))
    assert first == bench.losses(Mechanism.of("uniform"))
    assert not first["repeated"]
    hidden = bench.masked_positions(0)
    assert 1 <= hidden.sum() <= 20
    assert not torch.isin(bench.rows[0][hidden], torch.arange(5)).any()
    masked = torch.where(hidden, 4, bench.rows[0])
    logits = model(masked[None]).logits[0]
    own = bench.losses(None)["loss"][0]
    expected = float(cross_entropy(logits[hidden], bench.rows[0][hidden]))
    assert own == pytest.approx(expected, abs=1e-5)


@torch.no_grad()
def test_losses_of_images_are_those_of_their_definition():
    model = vit()
    x = images()
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 0])
    pieces = x.split(1)
    labelled = BatchBench(model, pieces[:5], pieces[5:], labels=labels.split(1))
    bare = BatchBench(model, pieces[:5], pieces[5:])
    assert list(bare.timed) == [17]  # 16 patches and a token
    own = model(x[3:4])
    window = Mechanism.of("window", block=4, first=1)
    found = labelled.losses(window)["loss"][3]
    divergence = bare.losses(window)["loss"][3] - bare.losses(None)["loss"][3]
    swapped = swap_attention(model, "window", block=4, first=1)(x[3:4])
    assert found == pytest.approx(float(cross_entropy(swapped, labels[3:4])), abs=1e-5)
    expected = kl_div(
        swapped.log_softmax(-1), own.log_softmax(-1), log_target=True, reduction="sum"
    )
    assert divergence == pytest.approx(float(expected), abs=1e-4)
    assert divergence > 1e-3


def test_losses_by_position_are_those_of_the_places_asked_for():
    ids, labels = bench.next_token_labels(torch.randint(5, 40, (1, 64)))
    assert labels[0, -1] == IGNORED
    assert torch.equal(labels[0, :-1], ids[0, 1:])
    logits = torch.randn(2, 700, 9)
    ignored = torch.rand(2, 700) < 0.5
    labels = torch.randint(9, (2, 700)).masked_fill(ignored, IGNORED)
    losses = cross_entropy(logits.double().flatten(0, 1), labels.flatten(), reduction="none")
    expected = losses[~ignored.flatten()]
    assert torch.equal(bench.nats(logits, labels), expected)


def test_a_model_whose_loss_is_not_finite_is_refused():
    model = llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = torch.inf
    with pytest.raises(NotFinite, match="LlamaForCausalLM: loss .* not finite"):
        crt_exp.advise(
            model, ids(), length=64, samples=3, calibration=2, attentions=["window"], rounds=1
        )


# ---- the model within a bench


def stands(model):
    names = [name for name, _ in model.named_modules() if "swapped" in name]
    return (
        names,
        {key: value for key, value in model.config.to_dict().items()},
        model.config._attn_implementation,
    )


def test_the_model_is_itself_again_also_after_an_error():
    bench = bench_of(llama())
    before = stands(bench.model)
    own = bench.losses(None)
    for mechanism in (
        None,
        Mechanism.of("favorpp", m=8),
        DenseBaseline("largest", keys=8),
    ):
        with bench.swapped(mechanism) as states:
            assert len(states) == (0 if mechanism is None else 2)
            learning = isinstance(mechanism, Mechanism)
            for state in states.values():
                assert getattr(state, "learns", False) == learning
        with pytest.raises(ZeroDivisionError), bench.swapped(mechanism):
            raise ZeroDivisionError
        assert stands(bench.model) == before
        assert bench.losses(None) == own
    with (
        pytest.raises(ValueError, match="batches: empty"),
        Bench(bench.model).swapped(Mechanism.of("favorpp", m=8)),
    ):
        pass
    assert stands(bench.model) == before
    methods = {"exact": None, "window": Mechanism.of("window")}
    times = bench.times(methods, bench.rows[:1], 2)
    assert list(times) == ["exact", "window"]
    for each in times.values():
        assert len(each) == 2
        assert min(each) > 0
    with pytest.raises(ValueError, match="already swapped"):
        Bench(swap_attention(bench.model, "uniform"))


def test_models_that_were_built_with_attention_are_fitted_and_looked_at():
    """Each layer as it is calibrated; what has nothing to fit reads nothing."""

    def build(mechanism):
        return Transformer(2, 2, 32, 16, mechanism.layer, causal=True)

    x = torch.randn(2, 24, 16)
    model = build(Mechanism.of("favorpp", m=8))
    layers = bench.calibrated_layers(model, [x])
    assert [part.attention for part in model.blocks] == layers
    for each in layers:
        assert each.measured.error > 0
    fresh = bench.fit_attention(build(Mechanism.of("favorpp", m=8)), [x])
    for block in fresh.blocks:
        assert float(block.attention.running_weight)
    unread = (pytest.fail("read") for _ in range(1))
    bench.fit_attention(build(Mechanism.of("window")), unread)


def test_advise_leaves_the_model_as_it_was_and_states_everything(tmp_path, capsys):
    model = llama()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    model.model.embed_tokens.weight.requires_grad_(False)
    advice = crt_exp.advise(
        model,
        ids(),
        length=64,
        samples=3,
        calibration=2,
        rounds=1,
        attentions=["favorpp", "nearfar preset=cheap", "exact", "uniform"],
    )
    after = model.state_dict()
    assert after.keys() == before.keys()
    for name, t in before.items():
        assert torch.equal(after[name], t)
    assert bool((model.lm_head.weight.grad == 1).all())
    assert not model.model.embed_tokens.weight.requires_grad
    assert not hasattr(model.config, "crt_exp")
    assert [row.attention for row in advice.rows] == [
        "exact",
        "favorpp",
        "nearfar preset=cheap",
        "uniform",
    ]
    assert advice.rows[0].above == 0
    assert advice.rows[0].speedup == 1
    assert [row.fitted for row in advice.rows] == [False, True, False, False]
    for row in advice.rows:
        assert row.mib is not None
        assert row.repeated is not None
    assert advice.sentence in str(advice)
    lines = capsys.readouterr().err.splitlines()
    assert lines[1].startswith("advise: exact: loss ")
    assert "texts: 2 of 3; favorpp " in "".join(lines)
    assert lines[-1].startswith("advise: timed 64 tokens, round 1 of 1: exact ")
    assert lines[-1].endswith("at most 0 s left")
    advice.save(tmp_path)
    actual = {path.name for path in tmp_path.iterdir()}
    assert actual == {"advise.csv", "advise.md", "advise.png"}
    actual = len(list(csv.DictReader((tmp_path / "advise.csv").open())))
    assert actual == 4
    advice = crt_exp.advise(
        vit(), images(), samples=5, calibration=2, rounds=1, attentions=["nearfar", "uniform"]
    )
    assert (advice.noun, advice.samples, advice.length) == ("images", 5, 17)
    assert any("Without labels" in note for note in advice.notes)
    assert advice.rows[1].above == pytest.approx(0, abs=1e-5)  # exact below 512


# ---- a limit of time


def advice_with(**options):
    methods = ["favorpp m=8", "window block=16 first=4"]
    given = {"length": 64, "samples": 6, "calibration": 1, "rounds": 2, "attentions": methods}
    return crt_exp.advise(llama(), ids(), **(given | options))


def test_the_table_states_what_was_not_measured():
    late = advice_with(minutes=1e-9)
    assert late.samples == 2
    assert late.rows[0].ms
    assert late.rows[0].mib is None
    assert late.notes[-3:] == [
        "The time was over after 2 of 6 texts.",
        "Memory was not measured: exact, favorpp m=8, window block=16 first=4.",
        "The time was over after 1 of 2 rounds of timing at 64 tokens.",
    ]
    assert late.notes[-1] in str(late)


# ---- the sentence

OWN = {128: 2.0, 256: 8.0, 512: 32.0}


def row(name, above, half=0.001, repeated=0.0, ms=(4.0, 8.0, 16.0), **options):
    times = dict(zip(OWN, ms))
    gains = {length: OWN[length] / times[length] for length in OWN}
    return Row(
        name, above, half, repeated, 0.001, times, 5.0, gains[512], pays_from(gains), **options
    )


def advice_of(*rows, repeated=0.5, loss=3.0, uniform=(2.0, 0.0)):
    control = row("uniform", uniform[0], repeated=uniform[1], ms=(1, 2, 3))
    exact = row("exact", 0.0, 0.0, ms=OWN.values())
    return Advice([exact, *rows, control], 512, 8, loss, repeated, 0.02)


def test_the_sentence_follows_the_numbers():
    near = row("nearfar preset=cheap", 0.004)
    far = row("favorpp", 0.4, ms=(1, 1, 1))
    window = row("window", 0.001, repeated=0.5, ms=(1, 2, 3))
    found = advice_of(far, near, window)
    assert found.chosen is near
    assert found.sentence == (
        "Use nearfar preset=cheap: it costs 0.0040 ± 0.0010 nats and 0.0000 ± 0.0010 nats on "
        "repeated passages at 512 tokens, and a pass is 2.00 times as fast; below 512 tokens "
        "keep exact."
    )
    assert found.code == 'swap_attention(model, "nearfar preset=cheap")'
    slow = advice_of(row("nearfar", 0.004, ms=(9, 18, 40)))
    assert slow.chosen is None
    assert "its speed is 0.80 times that of exact" in slow.sentence
    far = advice_of(row("favorpp", 0.4, repeated=3.0))
    assert far.sentence.startswith(
        "Keep exact: the closest, favorpp, costs 0.4000 ± 0.0010 nats and 3.0000 ± 0.0010"
    )
    none = advice_of(row("favorpp", 0.0), uniform=(0.05, 0.0))
    assert none.sentence.startswith(
        "No recommendation: uniform attention costs only 0.0500 ± 0.0010 nats"
    )
    assert (
        advice_of(row("window", 0.001, repeated=0.5), repeated=2.9).chosen is not None
    )  # repetition does not help
    controls = [Row("exact", 0.0, 0.0), Row("uniform", 0.5, 0.1)]
    alone = Advice(controls, 64, 3, 2.0, None, 0.02)
    assert alone.chosen is None
    assert "only exact and uniform attention were measured" in alone.sentence


def test_what_is_never_advised():
    """Attention whose loss is not finite, and exact attention under another name: it is not faster, but the same."""
    found = advice_of(row("favorpp", math.nan), row("window", 0.5))
    assert "the closest, window, costs 0.5000" in found.sentence
    assert "not finite" in str(found)
    assert "nan" not in str(found)
    same = row("nearfar", 0.0, 0.0, ms=(1, 4, 16), exact_to=2048)
    near = row("favorpp", 0.001, ms=(1, 5, 20))
    found = advice_of(same)
    assert found.chosen is None
    assert found.notes == ["nearfar computes exact attention at 512 tokens."]
    assert advice_of(same, near).chosen is near


def test_a_model_that_only_copies_is_judged_on_repeated_passages():
    forgets = row("window", -1.4, repeated=3.8, ms=(1, 2, 3))
    keeps = row("nearfar", 0.0, ms=(1, 4, 16))
    copying = {"loss": 5.2, "repeated": 0.1, "uniform": (-0.6, 4.6)}
    found = advice_of(forgets, keeps, **copying)
    assert found.chosen is keeps
    assert "on repeated passages" in found.sentence
    assert advice_of(forgets, **copying).chosen is None


def test_it_pays_from_the_length_on_from_which_every_pass_is_faster():
    actual = pays_from({128: 0.5, 256: 1.05, 512: 2.1})
    assert actual == 256
    actual = pays_from({128: 2.0, 256: 2.1, 512: 2.1})
    assert actual == 128
    assert pays_from({128: 2.0, 256: 2.1, 512: 0.9}) is None


# ---- what is refused


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
    "an id beyond the vocabulary": (ids() + 10, "token id .*, expected 0 to"),
    "a negative id": (ids() - 6, "token id -1, expected 0 to"),
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
        pytest.param(
            "speech",
            ["task.audio={place}/table.csv", *PIECES],
            "6 utterances of",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "timm", ["task.images={place}/images", *PIECES], "6 images of", marks=pytest.mark.slow
        ),
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
