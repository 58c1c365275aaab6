"""Recall: heads in which one far key matters, and a copying model; the dense baselines that read them."""

from functools import partial

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM

from crt_exp.attention import exact_attention
from crt_exp.config import ConfigError
from crt_exp.data import corpora
from crt_exp.measure import recall
from crt_exp.measure.recall import FarKey, SwapCopying
from crt_exp.mechanism import Mechanism

SIZES = {"heads": 4, "d": 32, "far": 96, "weight": 0.9, "clusters": 0, "queries": 256, "methods": ["uniform"]}


def test_a_query_gives_its_far_key_the_weight_that_is_said():
    q, k, _ = FarKey(512, **SIZES).draw(0)
    places = torch.arange(512 - 256, 512)
    weights = (q @ k.mT).masked_fill(torch.arange(512) > places.unsqueeze(1), -torch.inf).softmax(-1)
    most, at = weights.max(-1)
    assert_close(most, torch.full_like(most, 0.9), rtol=1e-3, atol=0)
    assert (places - at >= 96).all()


def test_errors_of_all_methods():
    near = "nearfar block=32 heavy=16 open=128"
    found = {row["method"]: row["error"] for row in FarKey(512, **SIZES | {"methods": [
        near, "uniform"]}).rows(None, 0)}
    assert found[near] < 0.2 < found["uniform"]
    with pytest.raises(ConfigError, match="did you mean window"):
        [*FarKey(512, **SIZES | {"methods": ["windw"]}).rows(None, 0)]


# ---- a model that copies


CAUSAL = {name: partial(recall.BASELINES[name], first=16) for name in ("largest", "pages", "clusters")}


@pytest.fixture
def heads():
    g = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, 2, 160, 8, generator=g, dtype=torch.float64) for _ in range(3))


@pytest.mark.parametrize("baseline", CAUSAL)
def test_baselines_are_exact_where_they_see_all_keys(heads, baseline):
    assert_close(CAUSAL[baseline](*heads, 160), exact_attention(*heads, causal=True))


@pytest.mark.parametrize("baseline", CAUSAL)
@pytest.mark.parametrize("count", [0, 16])
def test_baselines_weigh_to_one_and_see_no_later_token(heads, baseline, count):
    q, k, v = heads
    ones = torch.ones_like(v)
    assert_close(CAUSAL[baseline](q, k, ones, count), ones)
    if baseline != "clusters":                                   # whose centroids are of the whole sequence
        early = CAUSAL[baseline](*(t[:, :, :96] for t in heads), count)
        assert_close(CAUSAL[baseline](q, k, v, count)[:, :, :96], early)


def test_clusters_are_their_means(heads):
    """Where no keys are read each cluster counts as often as it has keys, at its centroid, with their mean value."""
    q, k, v = heads
    centres, cell = recall.kmeans(k, recall.clusters_at(160))
    i, h = 159, 0
    past = torch.arange(160)
    near = (past > i - recall.NEAR) | (past < 16)
    logits, values = [q[0, h, i] @ k[0, h, near].T], [v[0, h, near]]
    for c in range(centres.shape[2]):
        mine = (cell[0, h] == c) & ~near
        if mine.any():
            logits.append((q[0, h, i] @ centres[0, h, c] + mine.sum().log())[None])
            values.append(v[0, h, mine].mean(0)[None])
    expected = torch.cat(logits).softmax(-1) @ torch.cat(values)
    assert_close(CAUSAL["clusters"](q, k, v, 0)[0, h, i], expected)


def test_a_model_is_read_with_each_attention_and_is_itself_again(monkeypatch):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                         intermediate_size=16)).eval()
    monkeypatch.setattr(recall, "model_of", lambda start: (model, None))
    text = torch.randint(50, (8, 160), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(recall, "blocks", lambda start, split, length: text)
    rows = recall.passages("", "test", 160, 3)
    assert torch.equal(rows, recall.passages("", "test", 160, 3)) and rows.shape == (recall.ROWS, 160)
    half = (rows[:, 80:, None] == rows[:, None, :80]).any(-1)
    assert half.all()                                       # the second half repeats the first

    def losses(attention, baseline=None):
        [found] = SwapCopying("", 160, baseline).rows(Mechanism.parse(attention), 0)
        assert found["gain"] == found["new"] - found["copied"]
        return found
    exact = losses("exact")
    for found in (losses("nearfar"), *(losses("exact", each) for each in (
            "largest keys=160", "clusters keys=160 first=16", "pages keys=160"))):
        assert all(np.allclose(found[kind], exact[kind], atol=1e-5) for kind in exact)
    assert losses("uniform")["new"] != exact["new"] and losses("exact") == exact


def test_what_stages_name_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.txt").write_text("one two Three four\n" * 300)
    monkeypatch.setattr(corpora, "official_file", lambda name, split: tmp_path / "train.txt")
    corpora.prepare(["task.text=[/data/train.tokens,outputs/texts/drawn-5.tokens]",
                     "task.model=outputs/texts/llama-270"])
    lines = (corpora.FOLDER / "drawn-5.tokens").read_text().splitlines()
    assert len(lines) == 5 and all(len(line.split()) == 40 for line in lines)
    assert {*" ".join(lines).split()} == {"one", "two", "three", "four"}
    config = LlamaConfig.from_pretrained(corpora.FOLDER / "llama-270")
    assert config.hidden_size == 128 and (corpora.FOLDER / "llama-270/tokenizer.json").exists()
