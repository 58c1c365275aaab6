"""What a copying model keeps: the dense peers, the pieces of the page, and a model that is read with each of them."""

import joblib
import numpy as np
import pytest
import torch
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM

from crt_exp.attention import exact_attention
from crt_exp.studies import copying, copying_model, runs


@pytest.fixture
def heads():
    g = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, 2, 160, 8, generator=g, dtype=torch.float64) for _ in range(3))


@pytest.mark.parametrize("peer", copying.PEERS)
def test_peers_are_exact_where_they_see_all_keys(heads, peer):
    assert_close(copying.PEERS[peer](*heads, 160), exact_attention(*heads, causal=True))


@pytest.mark.parametrize("peer", copying.PEERS)
@pytest.mark.parametrize("count", [0, 16])
def test_peers_weigh_to_one_and_see_no_later_token(heads, peer, count):
    q, k, v = heads
    ones = torch.ones_like(v)
    assert_close(copying.PEERS[peer](q, k, ones, count), ones)
    if peer != "clusters":                                   # whose centroids are of the whole sequence
        early = copying.PEERS[peer](*(t[:, :, :96] for t in heads), count)
        assert_close(copying.PEERS[peer](q, k, v, count)[:, :, :96], early)


def test_clusters_are_their_means(heads):
    """Where no keys are read each cluster counts as often as it has keys, at its centroid, with their mean value."""
    q, k, v = heads
    centres, cell = copying.kmeans(k, copying.cells_at(160))
    i, h = 159, 0
    past = torch.arange(160)
    near = (past > i - copying.NEAR) | (past < copying.FIRST)
    logits, values = [q[0, h, i] @ k[0, h, near].T], [v[0, h, near]]
    for c in range(centres.shape[2]):
        mine = (cell[0, h] == c) & ~near
        if mine.any():
            logits.append((q[0, h, i] @ centres[0, h, c] + mine.sum().log())[None])
            values.append(v[0, h, mine].mean(0)[None])
    expected = torch.cat(logits).softmax(-1) @ torch.cat(values)
    assert_close(copying.clusters(q, k, v, 0)[0, h, i], expected)


def test_a_model_is_read_with_each_attention_and_is_itself_again(monkeypatch):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                         intermediate_size=16)).eval()
    monkeypatch.setattr(copying, "model_of", lambda start: (model, None))
    text = torch.randint(50, (8, 160), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(copying, "blocks", lambda start, split, length: text)
    rows = copying.passages("", "test", 160, 3)
    assert torch.equal(rows, copying.passages("", "test", 160, 3)) and rows.shape == (copying.ROWS, 160)
    exact = copying.losses("", 160, 0, "exact")
    for attention in ("largest 160", "clusters 160", "nearfar", "pages 160"):
        found = copying.losses("", 160, 0, attention)
        assert all(np.allclose(found[kind], exact[kind], atol=1e-5) for kind in exact)
    assert copying.losses("", 160, 0, "uniform")["new"] != exact["new"]
    assert copying.losses("", 160, 0, "exact") == exact
    spent = copying.times("", 160, [("exact", None), ("nearfar preset=bounded", None)], 2)
    assert all(len(each) == 2 and min(each) > 0 for each in spent.values())


def test_draws_are_losses_of_seeds_and_times_of_turns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(copying_model, "train", lambda times: "start")
    monkeypatch.setattr(copying, "losses", losses)
    monkeypatch.setattr(copying, "times", times)
    monkeypatch.setattr(copying_model, "SEEDS", 2)
    monkeypatch.setattr(joblib, "cpu_count", lambda: 1)
    draws = [*copying_model.measure("copying", ["studies/copying.py"], {"stages": 1})]
    arms = (*copying_model.TIMED, *copying_model.PEERS)
    assert {draw.arm for draw in draws} == {*arms}
    gains = [draw.value for draw in draws if draw.metric == "gain"]
    assert len(gains) == 2 * len(arms) and gains[0] == pytest.approx(2.5)
    assert [draw.value for draw in draws if draw.table == "time" and draw.arm == "exact"] == [10.0, 11.0]


def losses(start, length, seed, attention, m):
    return {"new": [3.0, 4.0], "copied": [1.0, 1.0]}


def times(start, length, attentions, rounds):
    return {name: [10.0, 11.0] for name, _ in attentions}


def test_stages_go_on_from_each_other_and_name_where_they_are_kept(monkeypatch):
    """Each by all that are before it; more steps are another place."""
    made = []
    monkeypatch.setattr(copying_model, "prepare", lambda: None)
    monkeypatch.setattr(runs, "run", lambda overrides, place: made.append((overrides, place)))
    last = [copying_model.train(times) for times in (1, 4)]
    places = [place for _, place in made]
    assert len({*places}) == 8 and all(each.parent == copying_model.PLACE for each in places)
    assert last == [places[3], places[7]]
    assert {"task.init=scratch", f"task.model={copying_model.PLACE}/start"} <= {*made[0][0]}
    assert all(f"task.init={before}" in overrides for (overrides, _), before in zip(made[1:4], places))
    assert all({"resume=auto", "trainer.keep=1"} <= {*overrides} for overrides, _ in made)
