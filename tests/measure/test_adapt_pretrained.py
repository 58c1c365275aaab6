"""What of a swap comes back by training a pretrained model: places, what is trained, and what they cost."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from crt_exp.mechanism import Mechanism
from crt_exp.measure import adapt_pretrained, pretrained
from crt_exp.measure.adapt_pretrained import Trained, training_rows

SIZES = {"model": "", "settings": {"new": "plain", "again": "repeated"}, "length": 64, "tested": 2, "captured": 2,
         "transfer": 3, "steps": [0, 3, 4, 5], "transfer_lr": 1e-2, "lora_lr": 1e-2, "rank": 2}
PLACES = [(setting, steps) for steps in (0, 3, 4, 5) for setting in ("new", "again")]


@pytest.fixture(autouse=True)
def reader(monkeypatch):
    """A Llama of two query heads that share one of keys, and a text without words."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=16, pad_token_id=0, bos_token_id=None, eos_token_id=None, initializer_range=0.5)).eval()
    monkeypatch.setattr(pretrained, "opened", lambda name: pretrained.Opened(model, None))
    texts = {split: torch.randint(1, 40, (9_000,), generator=torch.Generator().manual_seed(len(split)))
             for split in ("train", "valid")}
    monkeypatch.setattr(pretrained, "tokens", lambda name, split: texts[split])
    for cached in (pretrained.exact_of, adapt_pretrained.exact_of):
        cached.cache_clear()
    yield model
    for cached in (pretrained.exact_of, adapt_pretrained.exact_of):
        cached.cache_clear()


def above(arm, seed=0):
    found = [row for row in Trained(**SIZES).records(Mechanism.parse(arm), seed) if "setting" in row]
    assert all(len(row["above"]) == len(row["nats"]) == 2 for row in found)
    return {(row["setting"], row["steps"]): row["above"] for row in found}


def test_an_arm_at_each_place(reader):
    """Exact attention loses nothing before it is trained, and what has nothing to learn stays as it is till then; the
    model that all arms start from stays as well."""
    before = {name: p.clone() for name, p in reader.named_parameters()}
    exact, window, hedgehog = map(above, ("exact", "window block=8 first=2", "hedgehog m=4"))
    assert [*exact] == [*window] == [*hedgehog] == PLACES
    assert exact["new", 0] == exact["again", 3] == [0, 0] and exact["new", 5] != exact["new", 4] != [0, 0]
    assert window["new", 3] == window["new", 0] != window["new", 5]
    assert hedgehog["new", 3] != hedgehog["new", 0]
    assert all(torch.equal(p, before[name]) and p.requires_grad for name, p in reader.named_parameters())


def test_rows_are_of_the_seed_and_a_repetition_is_the_same():
    rows, others = training_rows("", 64, 0, 20), training_rows("", 64, 1, 20)
    assert len({*map(tuple, rows.tolist())}) == 20 and not torch.equal(rows, others)
    torch.randn(3)
    assert above("hedgehog m=4") == above("hedgehog m=4") != above("hedgehog m=4", 1)
    with pytest.raises(ValueError, match="141 rows of 64 tokens: the training text of WikiText-2 has 140"):
        training_rows("", 64, 0, 141)


@pytest.mark.parametrize("arm", ["exact", "hedgehog m=4"])
def test_minutes_are_of_the_training_so_far(arm, monkeypatch):
    """Reading takes long here, and counts nothing."""
    monkeypatch.setattr(Trained, "reading", lambda *_: {"above": [sum(range(2_000_000))]})
    found = [row for row in Trained(**SIZES).records(Mechanism.parse(arm), 0) if "minutes" in row]
    assert [row["steps"] for row in found] == SIZES["steps"]
    start, transfer, first, last = (row["minutes"] for row in found)
    assert start == 0 and (transfer > 0) == (arm != "exact") and start <= transfer < first < last < 1


def test_adapters_learn_in_bfloat16_where_it_is_asked_for():
    plain, lower = ([row["nats"] for row in Trained(**SIZES, bf16=bf16).records(Mechanism.parse("hedgehog m=4"), 0)
                     if "setting" in row] for bf16 in (False, True))
    assert lower[:4] == plain[:4] and lower[4:] != plain[4:]
    torch.testing.assert_close(torch.tensor(lower), torch.tensor(plain), atol=0.1, rtol=0)
