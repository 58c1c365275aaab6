"""crt_exp.advise and task=advise: losses are those of their definition, exact costs nothing, the sentence follows the
numbers, and bad inputs are refused."""

import csv
import json
import math
import shutil

import pytest
import torch
import transformers
from refusals import check_refused
from small_bert import VOCABULARY, write_text
from torch.nn.functional import cross_entropy

import crt_exp
from crt_exp import swap_attention
from crt_exp.config import ConfigError
from crt_exp.data.text import bert_tokenizer
from crt_exp.mechanism import Mechanism
from crt_exp.features.base import NotFinite
from crt_exp.swap.advise import Advice, Row, mechanisms, pays_from, spread
from crt_exp.swap.bench import TextBench

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
         "vocab_size": len(VOCABULARY), "max_position_embeddings": 256}


def llama():
    return of_random_weights(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)))


def bert():
    return of_random_weights(transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)))


def of_random_weights(model):
    torch.manual_seed(0)
    for p in model.parameters():  # attention that is not flat
        torch.nn.init.normal_(p, std=0.3) if p.ndim > 1 else None
    return model.eval()


def ids(count=1200):
    return torch.randint(5, len(VOCABULARY), (count,), generator=torch.Generator().manual_seed(0))


def bench_of(model, length=64, **options):
    rows = ids()[:len(ids()) // length * length].view(-1, length)
    judged, training = spread(len(rows), 3, 2, "texts")
    return TextBench(model, rows[judged], rows[training], mask=4, special=range(5), **options)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_model_whose_loss_is_not_finite_is_refused(value):
    model = llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = value
    with pytest.raises(NotFinite, match="LlamaForCausalLM: loss .* not finite"):
        crt_exp.advise(model, ids(), length=64, samples=3, calibration=2, attentions=["window"], rounds=1)


def test_the_control_alone_is_no_advice():
    found = Advice([Row("exact", 0.0, 0.0), Row("uniform", 0.5, 0.1)], 64, 3, 2.0, None, 0.02)
    assert found.chosen is None and "only exact and uniform attention were measured" in found.sentence


def test_attention_whose_loss_is_not_finite_is_never_the_closest():
    rows = [Row(name, above, 0.1, ms={64: 1.0})
            for name, above in (("exact", 0.0), ("favorpp", math.nan), ("window", 0.5))]
    found = Advice(rows, 64, 3, 2.0, None, 0.02)
    assert "the closest, window, costs 0.5000" in found.sentence
    assert "not finite" in str(found) and "nan" not in str(found)


@torch.no_grad()
def test_losses_are_those_of_their_definition():
    model = llama()
    bench = bench_of(model)
    found = bench.losses(Mechanism.of("window", block=16, first=4))
    swap_attention(model, "window", block=16, first=4)
    row = bench.rows[1:2]
    assert found["loss"][1] == pytest.approx(float(model(row, labels=row).loss), abs=1e-5)
    twice = torch.cat([row[:, :32], row[:, :32]], 1)
    logits = model(twice).logits[0, 32 + 15:-1]
    assert found["repeated"][1] == pytest.approx(float(cross_entropy(logits, twice[0, 32 + 16:])), abs=1e-5)


@torch.no_grad()
def test_masked_models_hide_the_same_words_from_all():
    model = bert()
    bench = bench_of(model)
    first, again = (bench.losses(Mechanism.of("uniform")) for _ in range(2))
    assert first == again and not first["repeated"]
    hidden = bench._places(0)
    assert 1 <= hidden.sum() <= 20 and not torch.isin(bench.rows[0][hidden], torch.arange(5)).any()
    logits = model(torch.where(hidden, 4, bench.rows[0])[None]).logits[0]
    own = bench.losses(None)["loss"][0]
    assert own == pytest.approx(float(cross_entropy(logits[hidden], bench.rows[0][hidden])), abs=1e-5)


def test_advise_leaves_the_model_as_it_was_and_says_everything(tmp_path, capsys):
    model = llama()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    model.model.embed_tokens.weight.requires_grad_(False)
    advice = crt_exp.advise(model, ids(), length=64, samples=3, calibration=2, rounds=1,
                            attentions=["favorpp", "nearfar preset=cheap", "exact", "uniform"])
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], t) for name, t in before.items())
    assert bool((model.lm_head.weight.grad == 1).all()) and not model.model.embed_tokens.weight.requires_grad
    assert not hasattr(model.config, "crt_exp")
    assert [row.attention for row in advice.rows] == ["exact", "favorpp", "nearfar preset=cheap", "uniform"]
    assert advice.rows[0].above == 0 and advice.rows[0].speedup == 1
    assert [row.fitted for row in advice.rows] == [False, True, False, False]
    assert all(row.mib is not None and row.repeated is not None for row in advice.rows)
    assert advice.sentence in str(advice) and "repeated passage" in str(advice)
    assert capsys.readouterr().err.count("advise: ") == 5
    advice.save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"advise.csv", "advise.md", "advise.png"}
    assert len(list(csv.DictReader((tmp_path / "advise.csv").open()))) == 4


# ---- the sentence


OWN = {128: 2.0, 256: 8.0, 512: 32.0}


def row(name, above, half=0.001, repeated=0.0, ms=(4.0, 8.0, 16.0), **options):
    times = dict(zip(OWN, ms))
    gains = {length: OWN[length] / times[length] for length in OWN}
    return Row(name, above, half, repeated, 0.001, times, 5.0, gains[512], pays_from(gains), **options)


def advice_of(*rows, repeated=0.5, uniform=2.0):
    exact = row("exact", 0.0, 0.0, ms=OWN.values())
    return Advice([exact, *rows, row("uniform", uniform, ms=(1, 2, 3))], 512, 8, 3.0, repeated, 0.02)


def test_the_sentence_follows_the_numbers():
    near = row("nearfar preset=cheap", 0.004)
    found = advice_of(row("favorpp", 0.4, ms=(1, 1, 1)), near, row("window", 0.001, repeated=0.5, ms=(1, 2, 3)))
    assert found.chosen is near
    assert found.sentence == ("Use nearfar preset=cheap: it costs 0.0040 ± 0.0010 nats and 0.0000 ± 0.0010 nats on "
                              "repeated passages at 512 tokens, and a pass is 2.00 times as fast; below 512 tokens "
                              "keep exact.")
    assert found.code == 'swap_attention(model, "nearfar preset=cheap")'
    slow = advice_of(row("nearfar", 0.004, ms=(9, 18, 40)))
    assert slow.chosen is None and "its speed is 0.80 times that of exact" in slow.sentence
    far = advice_of(row("favorpp", 0.4, repeated=3.0))
    assert far.sentence.startswith("Keep exact: the closest, favorpp, costs 0.4000 ± 0.0010 nats and 3.0000 ± 0.0010")
    assert far.code == "# keep the model as it is"
    none = advice_of(row("favorpp", 0.0), uniform=0.05)
    assert none.sentence.startswith("No recommendation: uniform attention costs only 0.0500 ± 0.0010 nats")
    assert advice_of(row("favorpp", 0.0, fitted=True)).code == (
        'calibrate_attention(swap_attention(model, "favorpp"), batches)')
    assert advice_of(row("window", 0.001, repeated=0.5), repeated=2.9).chosen is not None  # repetition does not help


def test_exact_attention_under_another_name_is_not_advised():
    """Causal near-far attention reads all keys up to 2048 tokens: it is not faster, but the same."""
    same, near = row("nearfar", 0.0, 0.0, ms=(1, 4, 16), exact_to=2048), row("favorpp", 0.001, ms=(1, 5, 20))
    found = advice_of(same)
    assert found.chosen is None and found.notes == ["nearfar computes exact attention at 512 tokens."]
    assert advice_of(same, near).chosen is near


def test_a_model_that_only_copies_is_judged_on_repeated_passages():
    forgets, keeps = row("window", -1.4, repeated=3.8, ms=(1, 2, 3)), row("nearfar", 0.0, ms=(1, 4, 16))
    exact, control = row("exact", 0.0, 0.0, ms=OWN.values()), row("uniform", -0.6, repeated=4.6, ms=(1, 2, 3))
    found = Advice([exact, forgets, keeps, control], 512, 8, 5.2, 0.1, 0.02)
    assert found.chosen is keeps and "on repeated passages" in found.sentence
    found = Advice([exact, forgets, control], 512, 8, 5.2, 0.1, 0.02)
    assert found.sentence.startswith("Keep exact: the closest, window, costs -1.4000") and "(0.1 on" in found.sentence


def test_it_pays_from_the_length_on_from_which_every_pass_is_faster():
    assert pays_from({128: 0.5, 256: 1.05, 512: 2.1}) == 256
    assert pays_from({128: 2.0, 256: 2.1, 512: 2.1}) == 128
    assert pays_from({128: 2.0, 256: 2.1, 512: 0.9}) is None


# ---- what is refused


def test_candidates_and_bad_inputs():
    assert list(mechanisms(None)) == ["exact", "nearfar", "window", "favorpp", "uniform"]
    for given, message in (
            ({"texts": "one text"}, "tokenizer=None"), ({"length": 1000}, "expected 32 to 256 tokens"),
            ({"length": 8}, "expected 32 to 256"), ({"samples": 50}, "at least 2 and 1, of 18 texts"),
            ({"samples": 1}, "expected at least 2"), ({"attentions": ["favour"]}, "unknown attention 'favour'"),
            ({"attentions": ["nearfar blocks=3"]}, "blocks")):
        with pytest.raises((ValueError, ConfigError), match=message):
            crt_exp.advise(llama(), **({"texts": ids(), "length": 64} | given))
    with pytest.raises(ValueError, match="with a mask token"):
        crt_exp.advise(bert(), ids(), length=64)
    with pytest.raises(ValueError, match="predicts no tokens"):
        crt_exp.advise(transformers.LlamaModel(llama().config), ids(), length=64)
    with pytest.raises(ValueError, match="predicts no tokens"):
        crt_exp.advise(torch.nn.Linear(2, 2), ids(), length=64)
    with pytest.raises(ValueError, match="already swapped"):
        crt_exp.advise(swap_attention(llama(), "uniform"), ids(), length=64)


# ---- the command line


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("advise")
    write_text(root / "text.txt", 300)
    (root / "vocab.txt").write_text("".join(word + "\n" for word in VOCABULARY))
    for name, make in {"llama": llama, "bert": bert}.items():
        make().save_pretrained(root / name)
        bert_tokenizer(root / "vocab.txt").save_pretrained(root / name)
    return root


def command(folder, name, *words):
    return ["task=advise", f"task.model={folder / name}", f"task.text={folder / 'text.txt'}", "task.cache_dir=null",
            "logger=none", *words]


@pytest.mark.parametrize("name", ["llama", pytest.param("bert", marks=pytest.mark.slow)])
def test_the_task_prints_the_table_and_keeps_it(name, folder, typed, tmp_path):
    words = command(folder, name, "task.length=64", "task.samples=3", "task.calibration=1", "task.rounds=1",
                    'task.attentions=["nearfar preset=quality","favorpp m=8",uniform]',
                    f"hydra.run.dir={tmp_path / 'run'}")
    code, out, err = typed(*words)
    assert code == 0, err
    assert "loss increase" in out and "nearfar preset=quality" in out and "favorpp m=8" in out
    assert "timed 64 tokens" in err
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["final"] and records[-1]["advice"] in out
    assert (tmp_path / "run" / "advise.png").stat().st_size > 10_000


@pytest.mark.parametrize("length, judged", [(None, 40), (64, 64)])
def test_a_run_is_judged_on_its_own_blocks(length, judged, folder, typed, tmp_path):
    run = tmp_path / "mine"
    shutil.copytree(folder / "llama", run / "model")
    (run / "config.yaml").write_text("task:\n  _target_: crt_exp.tasks.mlm.MLM\n  block: 40\n")
    given = [] if length is None else [f"task.length={length}"]
    code, out, err = typed(*command(folder, "llama", *given, "task.samples=2", "task.calibration=1", "task.rounds=1",
                                    "task.attentions=[window]", f"hydra.run.dir={tmp_path / 'run'}"),
                           f"task.model={run}")
    assert code == 0, err
    assert f"timed {judged} tokens" in err and "window computes exact attention" in out


@pytest.mark.parametrize("words, message", [
    (["task.length=1000"], "expected 32 to 256 tokens"), (["task.text=null"], "one of task.text, task.images"),
    (["task.samples=1", "task.length=64"], "expected at least 2"), (["task.samples=900"], "of 9 texts of 256 tokens"),
    (["task.attentions=[favour]"], "unknown attention"),
    (["task.attentions=['window 8']"], "expected a name, then key=value"),
    (["task.tolerance=0"], "tolerance"),
    (["attention=favorpp"], "does not use")])
def test_bad_commands_are_refused(words, message, folder, typed, tmp_path):
    run = tmp_path / "run"
    check_refused(typed(*command(folder, "llama", *words), f"hydra.run.dir={run}"), [message], run)
