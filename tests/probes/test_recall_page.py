"""Heads in which one far key matters, and the peers that read them: their laws."""

from functools import partial

import pytest
import torch
from torch.testing import assert_close

from crt_exp.attention import exact_attention
from crt_exp.config import ConfigError
from crt_exp.probes import dense_peers, recall
from crt_exp.probes.recall import Law

SIZES = {"heads": 4, "d": 32, "far": 96, "weight": 0.9}
BEHIND, AROUND = partial(Law, **SIZES, queries=256), partial(Law, **SIZES, both=True)
PEERS = {"pages": partial(dense_peers.pages, both=True), "clusters of queries": dense_peers.query_clusters,
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


@pytest.mark.parametrize("peer", PEERS)
def test_peers_weigh_to_one(peer):
    q, k, v = AROUND(256, clusters=32).draw(0)
    assert_close(PEERS[peer](q, k, torch.ones_like(v), 128), torch.ones_like(v))


@pytest.mark.parametrize("peer", ["pages", "clusters of queries"])
def test_peers_are_exact_where_they_read_all(peer):
    heads = AROUND(256).draw(0)
    assert_close(PEERS[peer](*heads, 256), exact_attention(*heads), rtol=1e-4, atol=1e-5)


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
    found = {row["arm"]: row["error"] for row in recall.errors(arms, 0, **SIZES, length=256, both=True)}
    assert found["near"] < 0.2 < found["uniform attention"]
    with pytest.raises(ConfigError, match="did you mean window"):
        recall.errors({"near": "windw"}, 0, **SIZES, length=256, both=True)
