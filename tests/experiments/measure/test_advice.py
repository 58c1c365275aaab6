"""crt_exp.advise and task=advise, and the bench below them: losses are those of their definition, whatever happens
within a swap the model is itself again, the sentence follows the numbers, and bad inputs are refused."""

import csv
import math

import numpy as np
import pytest
import torch
from helpers.advised_models import bert, ids, images, llama, vit
from torch.nn.functional import cross_entropy, kl_div

import crt_exp
from crt_exp import swap_attention
from crt_exp.experiments.measure import bench
from crt_exp.experiments.measure.bench import IGNORED, BatchBench, Bench, Split, TextBench
from crt_exp.experiments.measure.recall import dense_baseline
from crt_exp.experiments.measure.recommendation import Advice, Row, is_decided, pays_from
from crt_exp.experiments.models.language import Transformer
from crt_exp.features.base import NotFinite
from crt_exp.mechanism import Mechanism

pytestmark = pytest.mark.usefixtures("one_thread")


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
    actual = labelled.losses(window)["loss"][3]
    divergence = bare.losses(window)["loss"][3] - bare.losses(None)["loss"][3]
    swapped = swap_attention(model, "window", block=4, first=1)(x[3:4])
    assert actual == pytest.approx(float(cross_entropy(swapped, labels[3:4])), abs=1e-5)
    expected = kl_div(
        swapped.log_softmax(-1), own.log_softmax(-1), log_target=True, reduction="sum"
    )
    assert divergence == pytest.approx(float(expected), abs=1e-4)
    assert divergence > 1e-3


def test_losses_leave_out_ignored_positions():
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
        dense_baseline("largest keys=8"),
    ):
        with bench.swapped(mechanism) as states:
            assert len(states) == (0 if mechanism is None else 2)
            learning = mechanism is not None and mechanism.name == "favorpp"
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
    for mechanism in (None, Mechanism.of("window")):
        assert bench.milliseconds(mechanism, 64) > 0
    with pytest.raises(ValueError, match="already swapped"):
        Bench(swap_attention(bench.model, "uniform"))


def test_models_built_with_attention_are_fitted():
    """What has nothing to fit reads nothing."""

    def build(mechanism):
        return Transformer(2, 2, 32, 16, mechanism.layer, causal=True)

    x = torch.randn(2, 24, 16)
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
    assert (model.lm_head.weight.grad == 1).all()
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


# ---- fewer repetitions


def losses_above(*above):
    own = np.arange(len(above)) % 3.0
    repeated = [0.0] * len(above)
    record = {"loss": own + np.array(above), "repeated": repeated}
    return record, {"loss": own, "repeated": repeated}


@pytest.mark.parametrize(
    "above, decided",
    [
        ([0.0, 0.0], True),  # exact
        ([5.9, 5.7, 5.8], True),  # far
        ([math.nan, math.nan], True),
        ([5.9, 2.0], False),  # far, with a wide interval
        ([0.05, 0.05, 0.05], False),  # neither within the tolerance nor above that of the control
        ([0.01, 0.03, 0.0], False),
    ],
)
def test_a_verdict_is_decided_by_the_doubled_interval(above, decided):
    assert is_decided(*losses_above(*above), 0.02) == decided


def test_recall_of_a_close_method_is_decided_too():
    record, own = losses_above(0.0, 0.0, 0.0)
    record["repeated"] = [0.0, 0.3, 0.1]
    assert not is_decided(record, own, 0.02)


def advice_with(**options):
    methods = ["favorpp m=8", "window block=16 first=4"]
    given = {
        "length": 64,
        "samples": 6,
        "calibration": 1,
        "rounds": 2,
        "attentions": methods,
    }
    return crt_exp.advise(llama(), ids(), **(given | options))


def test_the_table_lists_missing_measurements():
    early = advice_with(attentions=["nearfar", "window block=16 first=4"])
    assert [row.samples for row in early.rows] == [6, 2, 6]  # near-far is exact at this length
    assert "Fewer than 6 texts decided the verdict on nearfar." in str(early)
    late = advice_with(tolerance=1e-9, minutes=1e-9)
    assert [row.samples for row in late.rows] == [2, 2, 2]
    assert late.rows[0].ms
    assert late.rows[0].mib is None
    assert late.notes[-3:] == [
        "The time was over before all 6 texts were measured with favorpp m=8, window block=16 first=4.",
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
    actual = advice_of(far, near, window)
    assert actual.chosen is near
    assert actual.sentence == (
        "Use nearfar preset=cheap: it costs 0.0040 ± 0.0010 nats and 0.0000 ± 0.0010 nats on "
        "repeated passages at 512 tokens, and a pass is 2.00 times as fast; below 512 tokens "
        "keep exact."
    )
    assert actual.code == 'swap_attention(model, "nearfar preset=cheap")'
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


def test_a_control_on_too_few_samples_asks_for_more_time():
    control = Row("uniform", 4.0, 6.5, samples=2)
    actual = Advice([Row("exact", 0.0, 0.0), control], 64, 8, 2.0, None, 0.02)
    assert actual.chosen is None
    assert "the time allowed 2 of 8 texts" in actual.sentence
    assert "Increase minutes" in actual.sentence


def test_non_finite_and_exact_attention_are_never_recommended():
    """Attention whose loss is not finite, and exact attention under another name: it is not faster, but the same."""
    actual = advice_of(row("favorpp", math.nan), row("window", 0.5))
    assert "the closest, window, costs 0.5000" in actual.sentence
    assert "not finite" in str(actual)
    assert "nan" not in str(actual)
    same = row("nearfar", 0.0, 0.0, ms=(1, 4, 16), exact_to=2048)
    near = row("favorpp", 0.001, ms=(1, 5, 20))
    actual = advice_of(same)
    assert actual.chosen is None
    assert actual.notes == ["nearfar computes exact attention at 512 tokens."]
    assert advice_of(same, near).chosen is near


def test_a_copying_model_is_judged_on_repeated_passages():
    forgets = row("window", -1.4, repeated=3.8, ms=(1, 2, 3))
    keeps = row("nearfar", 0.0, ms=(1, 4, 16))
    copying = {
        "loss": 5.2,
        "repeated": 0.1,
        "uniform": (-0.6, 4.6),
    }
    actual = advice_of(forgets, keeps, **copying)
    assert actual.chosen is keeps
    assert "on repeated passages" in actual.sentence
    assert advice_of(forgets, **copying).chosen is None


def test_the_break_even_length_is_where_all_longer_passes_are_faster():
    actual = pays_from({128: 0.5, 256: 1.05, 512: 2.1})
    assert actual == 256
    actual = pays_from({128: 2.0, 256: 2.1, 512: 2.1})
    assert actual == 128
    assert pays_from({128: 2.0, 256: 2.1, 512: 0.9}) is None
