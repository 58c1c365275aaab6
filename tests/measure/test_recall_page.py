"""Recall: heads in which one far key matters, and a copying model; the peers that read them."""

from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM

from crt_exp.attention import exact_attention
from crt_exp.config import ConfigError
from crt_exp.measure import dense_peers, recall, texts
from crt_exp.measure.recall import Law

SIZES = {"heads": 4, "d": 32, "far": 96, "weight": 0.9}
BEHIND, AROUND = partial(Law, **SIZES, queries=256), partial(Law, **SIZES, both=True)
BOTH_WAYS = {"pages": partial(dense_peers.pages, both=True), "clusters of queries": dense_peers.query_clusters,
             "monarch": lambda q, k, v, keys: dense_peers.monarch(q, k, v, turns=3)}


def test_a_query_gives_its_far_key_the_weight_that_is_said():
    q, k, _ = BEHIND(512).draw(0)
    places = torch.arange(512 - 256, 512)
    weights = (q @ k.mT).masked_fill(torch.arange(512) > places.unsqueeze(1), -torch.inf).softmax(-1)
    most, at = weights.max(-1)
    assert_close(most, torch.full_like(most, 0.9), rtol=1e-3, atol=0)
    assert (places - at >= 96).all()
    q, k, _ = AROUND(512).draw(0)
    most, at = (q @ k.mT).softmax(-1).max(-1)
    assert_close(most, torch.full_like(most, 0.9), rtol=1e-3, atol=0)
    assert ((torch.arange(512) - at).abs() >= 96).all()


@pytest.mark.parametrize("peer", BOTH_WAYS)
def test_peers_weigh_to_one(peer):
    q, k, v = AROUND(256, clusters=32).draw(0)
    assert_close(BOTH_WAYS[peer](q, k, torch.ones_like(v), 128), torch.ones_like(v))


@pytest.mark.parametrize("peer", ["pages", "clusters of queries"])
def test_peers_are_exact_where_they_read_all(peer):
    heads = AROUND(256).draw(0)
    assert_close(BOTH_WAYS[peer](*heads, 256), exact_attention(*heads), rtol=1e-4, atol=1e-5)


def test_monarch_is_exact_for_weights_of_its_form():
    """Logits q_lj . k_mi = a_j[l, m] + b_j[i] have weights that are such a product."""
    g, b = torch.Generator().manual_seed(0), 4
    rows, columns = torch.randn(b, b, b, generator=g), torch.randn(b, b, generator=g)   # (j, l, m), (j, i)
    q = torch.cat([rows.transpose(0, 1), columns.expand(b, b, b)], -1).flatten(0, 1)    # of (l, j): [a_j[l, :], b_j]
    eye = torch.eye(b)
    k = torch.cat([eye.repeat_interleave(b, 0), eye.repeat(b, 1)], -1)                  # of (m, i): [e_m, e_i]
    heads = tuple(t[None, None] for t in (q, k, torch.randn(b * b, 3, generator=g)))
    assert_close(dense_peers.monarch(*heads, turns=3), exact_attention(*heads))


def test_errors_of_all_arms():
    arms = {"near": "near_far block=32 heavy=16 open=128", "uniform attention": "uniform"}
    found = {row["arm"]: row["error"] for row in recall.errors(arms, 0, **SIZES, length=512, queries=128)}
    assert found["near"] < 0.2 < found["uniform attention"]
    with pytest.raises(ConfigError, match="did you mean window"):
        recall.errors({"near": "windw"}, 0, **SIZES, length=256, both=True)


# ---- a model that copies


CAUSAL_PEERS = {name: partial(dense_peers.PEERS[name], first=16) for name in ("largest", "pages", "clusters")}


@pytest.fixture
def heads():
    g = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, 2, 160, 8, generator=g, dtype=torch.float64) for _ in range(3))


@pytest.mark.parametrize("peer", CAUSAL_PEERS)
def test_peers_are_exact_where_they_see_all_keys(heads, peer):
    assert_close(CAUSAL_PEERS[peer](*heads, 160), exact_attention(*heads, causal=True))


@pytest.mark.parametrize("peer", CAUSAL_PEERS)
@pytest.mark.parametrize("count", [0, 16])
def test_peers_weigh_to_one_and_see_no_later_token(heads, peer, count):
    q, k, v = heads
    ones = torch.ones_like(v)
    assert_close(CAUSAL_PEERS[peer](q, k, ones, count), ones)
    if peer != "clusters":                                   # whose centroids are of the whole sequence
        early = CAUSAL_PEERS[peer](*(t[:, :, :96] for t in heads), count)
        assert_close(CAUSAL_PEERS[peer](q, k, v, count)[:, :, :96], early)


def test_clusters_are_their_means(heads):
    """Where no keys are read each cluster counts as often as it has keys, at its centroid, with their mean value."""
    q, k, v = heads
    centres, cell = dense_peers.kmeans(k, dense_peers.cells_at(160))
    i, h = 159, 0
    past = torch.arange(160)
    near = (past > i - dense_peers.NEAR) | (past < 16)
    logits, values = [q[0, h, i] @ k[0, h, near].T], [v[0, h, near]]
    for c in range(centres.shape[2]):
        mine = (cell[0, h] == c) & ~near
        if mine.any():
            logits.append((q[0, h, i] @ centres[0, h, c] + mine.sum().log())[None])
            values.append(v[0, h, mine].mean(0)[None])
    expected = torch.cat(logits).softmax(-1) @ torch.cat(values)
    assert_close(CAUSAL_PEERS["clusters"](q, k, v, 0)[0, h, i], expected)


def test_a_model_is_read_with_each_attention_and_is_itself_again(monkeypatch):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                         intermediate_size=16)).eval()
    monkeypatch.setattr(recall, "model_of", lambda start: (model, None))
    text = torch.randint(50, (8, 160), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(recall, "blocks", lambda start, split, length: text)
    rows = recall.passages("", "test", 160, 3)
    assert torch.equal(rows, recall.passages("", "test", 160, 3)) and rows.shape == (recall.ROWS, 160)
    exact = recall.losses("exact", "", 160, 0)
    for attention in ("largest keys=160", "clusters keys=160 first=16", "nearfar", "pages keys=160"):
        found = recall.losses(attention, "", 160, 0)
        assert all(np.allclose(found[kind], exact[kind], atol=1e-5) for kind in exact)
    assert recall.losses("uniform", "", 160, 0)["new"] != exact["new"]
    assert recall.losses("exact", "", 160, 0) == exact
    spent = recall.times({"exact": "exact", "cheap": "nearfar preset=cheap"}, "", 160, 2, 0)
    assert [row["arm"] for row in spent] == ["exact", "cheap"]
    assert all(len(row["ms"]) == 2 and min(row["ms"]) > 0 for row in spent)


def test_gain_is_what_copied_text_is_cheaper(monkeypatch):
    monkeypatch.setattr(recall, "bench_of", lambda *_: Told())
    assert recall.losses("exact", "", 64, 0) == {"new": 3.5, "copied": 1.0, "gain": 2.5}


class Told:
    """A bench of rows whose losses are known: 3 and 4 nats for new text, 1 for copied."""

    rows = torch.tensor([[3] * 64, [4] * 64])
    swapped = staticmethod(lambda attention: nullcontext())

    def nats(self, inputs, labels):
        return torch.cat([inputs[0, :32].double(), torch.ones(31).double()])


def test_what_stages_name_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.txt").write_text("one two Three four\n" * 300)
    monkeypatch.setattr(texts, "official_file", lambda name, split: tmp_path / "train.txt")
    texts.prepare(["task.text=[/data/train.tokens,outputs/texts/drawn-5.tokens]", "task.model=outputs/texts/llama-270"])
    lines = (texts.FOLDER / "drawn-5.tokens").read_text().splitlines()
    assert len(lines) == 5 and all(len(line.split()) == texts.WORDS for line in lines)
    assert {*" ".join(lines).split()} == {"one", "two", "three", "four"}
    config = LlamaConfig.from_pretrained(texts.FOLDER / "llama-270")
    assert config.hidden_size == 128 and (texts.FOLDER / "llama-270/tokenizer.json").exists()
