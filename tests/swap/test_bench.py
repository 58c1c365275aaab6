"""The bench: whatever happens within a swap, the model is itself again; its losses are those of their definition."""

import pytest
import torch
import transformers
from small_bert import VOCABULARY
from torch.nn.functional import cross_entropy

from crt_exp import swap_attention
from crt_exp.attention import exact_attention
from crt_exp.mechanism import Mechanism
from crt_exp.models.language import Transformer
from crt_exp.measure.recall import Layers
from crt_exp.measure.fidelity import LayerCall
from crt_exp.swap.bench import IGNORED, Bench, TextBench, calibrated_layers, fit_attention, nats, next_token_labels

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
         "vocab_size": len(VOCABULARY), "max_position_embeddings": 64}
ATTENTION = {"exact": None, "map": Mechanism.of("favorpp", m=8), "heavy": Mechanism.of("nearfar", block=8),
             "maker": Layers(Mechanism.of("window", block=8).layer, "studied")}


@pytest.fixture
def bench():
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    rows = torch.randint(5, len(VOCABULARY), (5, 64))
    return TextBench(model, rows[:3], rows[3:])


def stands(model):
    names = [name for name, _ in model.named_modules() if "swapped" in name]
    return names, {key: value for key, value in model.config.to_dict().items()}, model.config._attn_implementation


@pytest.mark.parametrize("name", ATTENTION)
def test_the_model_is_itself_again_also_after_an_error(bench, name):
    before, own = stands(bench.model), bench.losses(None)
    with bench.swapped(ATTENTION[name]) as states:
        assert len(states) == (0 if name == "exact" else 2)
        assert all(getattr(state, "learns", False) == (name == "map") for state in states.values())
    with pytest.raises(ZeroDivisionError), bench.swapped(ATTENTION[name]):
        raise ZeroDivisionError
    assert stands(bench.model) == before and bench.losses(None) == own


def test_a_model_is_itself_again_where_nothing_can_be_fitted(bench):
    before = stands(bench.model)
    with pytest.raises(ValueError, match="batches: empty"), Bench(bench.model).swapped(ATTENTION["map"]):
        pass
    assert stands(bench.model) == before
    with pytest.raises(ValueError, match="already swapped"):
        Bench(swap_attention(bench.model, "uniform"))


@torch.no_grad()
def test_watched_calls_are_those_of_exact_attention(bench):
    calls, out = bench.record_calls(bench.rows[:1], LayerCall.of)
    assert len(calls) == 2 and torch.allclose(out.logits, bench.run(bench.rows[:1]).logits, atol=1e-5)
    for each in calls:
        root = each.scaling**0.5
        torch.testing.assert_close(exact_attention(root * each.q, root * each.k, each.v, causal=each.causal),
                                   each.output)
    assert len(bench.record_calls(bench.rows[:1], LayerCall.of, layers=[1])[0]) == 1


def test_losses_by_position_are_those_of_the_places_asked_for(bench):
    ids, labels = next_token_labels(bench.rows[:1])
    assert labels[0, -1] == IGNORED and torch.equal(labels[0, :-1], ids[0, 1:])
    logits = torch.randn(2, 700, 9)
    labels = torch.randint(9, (2, 700)).masked_fill(torch.rand(2, 700) < 0.5, IGNORED)
    expected = cross_entropy(logits.double().flatten(0, 1), labels.flatten(), reduction="none")
    assert torch.equal(nats(logits, labels), expected[labels.flatten() != IGNORED])


def test_models_that_were_built_with_attention_are_fitted_and_looked_at():
    """Each layer as it is calibrated; what has nothing to fit reads nothing."""
    x = torch.randn(2, 24, 16)
    model = Transformer(2, 2, 32, 16, Mechanism.of("favorpp", m=8).layer, causal=True)
    layers = calibrated_layers(model, [x])
    assert [part.attention for part in model.blocks] == layers and all(each.measured.error > 0 for each in layers)
    fresh = fit_attention(Transformer(2, 2, 32, 16, Mechanism.of("favorpp", m=8).layer, causal=True), [x])
    assert all(float(block.attention.running_weight) for block in fresh.blocks)

    def unread():
        raise AssertionError("read")
        yield

    fit_attention(Transformer(2, 2, 32, 16, Mechanism.of("window").layer, causal=True), unread())


def test_times_take_turns(bench):
    times = bench.times(ATTENTION, bench.rows[:1], 2)
    assert list(times) == list(ATTENTION) and all(len(each) == 2 and min(each) > 0 for each in times.values())
