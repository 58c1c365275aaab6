"""What a swap loses and light training brings back: rows, methods that are exact where nothing is lost, and seeds."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from crt_exp.data.text import IGNORED
from crt_exp.mechanism import Mechanism
from crt_exp.measure import adapt, pretrained
from crt_exp.measure.adapt import Adapt, AdaptPretrained, training_rows


@pytest.fixture
def at_home(tmp_path, monkeypatch):
    """A folder of its own, models of few numbers, and characters that need no file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(adapt, "WIDTH", 16)
    monkeypatch.setattr(adapt, "LAYERS", 2)
    for name, setting in adapt.SETTINGS.items():
        monkeypatch.setitem(adapt.SETTINGS, name, replace(setting, tested=4))
    monkeypatch.setattr(adapt, "characters", lambda split: torch.arange(500) % 40)
    noise = torch.Generator().manual_seed(0)
    drawn = {split: torch.randn(40, 1, 28, 28, generator=noise) for split in ("train", "test")}
    monkeypatch.setattr(adapt, "digits", lambda split: (drawn[split], torch.arange(40) % 10))
    adapt.exact.cache_clear()
    yield
    adapt.exact.cache_clear()


@pytest.mark.parametrize("setting", adapt.SETTINGS)
def test_rows_of_the_test_are_no_rows_of_training(setting, at_home):
    rows = adapt.SETTINGS[setting].rows
    (ids, labels), (again, _) = rows("train", 3, 4), rows("train", 3, 4)
    assert torch.equal(ids, again) and (labels != IGNORED).any()
    assert labels.shape == (ids.shape[:1] if setting == "vision" else ids.shape)
    if setting == "causal":
        return
    assert not torch.equal(ids, rows("test", 3, 4)[0])


SIZES = {"steps": 2, "exact_lr": 3e-3, "transfer_lr": 2e-2, "lora_lr": 5e-3, "rank": 4}
STAGES = ["swapped", "transferred", "transfer, LoRA", "LoRA"]


def losses(setting, method, **steps):
    return {row["stage"]: row["loss"] for row in Adapt(setting, **SIZES, **steps).rows(Mechanism.parse(method), 0)}


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["copying", "vision"])
def test_a_method_at_each_stage(setting, at_home):
    """Exact attention loses nothing by a swap; methods without parameters are not transferred."""
    model = adapt.SETTINGS[setting].model()
    model.load_state_dict(adapt.exact(setting, 0, 2, 3e-3), strict=False)
    loss = adapt.test_loss(model, setting, 0)
    exact = losses(setting, "exact", transfer=1, lora=1)
    assert [*exact] == STAGES and exact["swapped"] == exact["transferred"] == pytest.approx(loss)
    window = losses(setting, "window block=4 first=2", transfer=1, lora=1)
    assert window["transferred"] == window["swapped"]
    hedgehog = losses(setting, "hedgehog m=32", transfer=2, lora=1)
    assert hedgehog["transferred"] != hedgehog["swapped"]
    near = losses(setting, "nearfar block=4 heavy=2 cells=4 open=8 exact_until=8", transfer=1, lora=1)
    assert abs(near["transferred"] - loss) < 0.5


def test_a_measurement_is_the_same_whatever_was_drawn_before(at_home):
    """Adapters too, which the library draws from the global generator; and the control is not adapted."""
    first = losses("copying", "window block=4 first=2", transfer=1, lora=2)
    torch.randn(7)
    assert losses("copying", "window block=4 first=2", transfer=1, lora=2) == first
    assert first["LoRA"] != first["swapped"]
    assert [*losses("copying", "uniform", transfer=1, lora=1)] == STAGES[:2]


# ---- a pretrained language model


LANGUAGE = {"model": "", "texts": ["new", "repeated"], "length": 64, "tested": 2, "captured": 2,
         "transfer": 3, "steps": [0, 3, 4, 5], "transfer_lr": 1e-2, "lora_lr": 1e-2, "rank": 2, "bf16": False}
STEPS = [(setting, steps) for steps in (0, 3, 4, 5) for setting in ("new", "repeated")]


@pytest.fixture
def reader(monkeypatch):
    """A Llama of two query heads that share one of keys, and a text without words."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=16, pad_token_id=0, bos_token_id=None, eos_token_id=None, initializer_range=0.5)).eval()
    monkeypatch.setattr(pretrained, "load_model_and_tokenizer", lambda name: pretrained.Opened(model, None))
    texts = {split: torch.randint(1, 40, (9_000,), generator=torch.Generator().manual_seed(len(split)))
             for split in ("train", "valid")}
    monkeypatch.setattr(pretrained, "tokens", lambda name, split: texts[split])
    for cached in (pretrained.exact_reading, adapt.exact_readings):
        cached.cache_clear()
    yield model
    for cached in (pretrained.exact_reading, adapt.exact_readings):
        cached.cache_clear()


def above(method, seed=0):
    found = [row for row in AdaptPretrained(**LANGUAGE).rows(Mechanism.parse(method), seed) if "text" in row]
    assert all(len(row["above"]) == 2 for row in found)
    return {(row["text"], row["step"]): row["above"] for row in found}


def test_a_language_model_at_each_step(reader):
    """Exact attention loses nothing before it is trained, and what has nothing to learn stays as it is till then; the
    model that all methods start from stays as well."""
    before = {name: p.clone() for name, p in reader.named_parameters()}
    exact, window, hedgehog = map(above, ("exact", "window block=8 first=2", "hedgehog m=4"))
    assert [*exact] == [*window] == [*hedgehog] == STEPS
    assert exact["new", 0] == exact["repeated", 3] == [0, 0] and exact["new", 5] != exact["new", 4] != [0, 0]
    assert window["new", 3] == window["new", 0] != window["new", 5]
    assert hedgehog["new", 3] != hedgehog["new", 0]
    assert all(torch.equal(p, before[name]) and p.requires_grad for name, p in reader.named_parameters())


def test_rows_are_of_the_seed_and_a_repetition_is_the_same(reader):
    rows, others = training_rows("", 64, 0, 20), training_rows("", 64, 1, 20)
    assert len({*map(tuple, rows.tolist())}) == 20 and not torch.equal(rows, others)
    torch.randn(3)
    assert above("hedgehog m=4") == above("hedgehog m=4") != above("hedgehog m=4", 1)
    with pytest.raises(ValueError, match="141 rows of 64 tokens: the training text of WikiText-2 has only 140"):
        training_rows("", 64, 0, 141)


@pytest.mark.parametrize("method", ["exact", "hedgehog m=4"])
def test_minutes_are_of_the_training_so_far(method, monkeypatch, reader):
    """Reading takes long here, and counts nothing."""
    monkeypatch.setattr(AdaptPretrained, "readings", lambda *_: {"new": [sum(range(2_000_000))]})
    found = [row for row in AdaptPretrained(**LANGUAGE).rows(Mechanism.parse(method), 0) if "minutes" in row]
    assert [row["step"] for row in found] == LANGUAGE["steps"]
    start, transfer, first, last = (row["minutes"] for row in found)
    assert start == 0 and (transfer > 0) == (method != "exact") and start <= transfer < first < last < 1


def test_adapters_learn_in_bfloat16_where_it_is_asked_for(reader):
    hedgehog = Mechanism.parse("hedgehog m=4")
    plain, lower = ([row["above"] for row in AdaptPretrained(**LANGUAGE | {"bf16": bf16}).rows(hedgehog, 0)
                     if "text" in row] for bf16 in (False, True))
    assert lower[:4] == plain[:4] and lower[4:] != plain[4:]
    torch.testing.assert_close(torch.tensor(lower), torch.tensor(plain), atol=0.1, rtol=0)
