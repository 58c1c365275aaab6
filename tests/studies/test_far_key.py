"""Heads in which one far key matters, and the peers that read them: their laws."""

import pytest
import torch
from torch.testing import assert_close

from crt_exp.attention import exact_attention
from crt_exp.studies import far_key, far_key_both

PEERS = {"pages": lambda q, k, v: far_key_both.chosen(far_key.Heads(q, k, v), far_key.of_pages(q, k)),
         "clusters of queries": far_key_both.improved_clustered, "monarch": far_key_both.monarch}


def test_a_query_gives_its_far_key_the_weight_that_is_said():
    q, k, _ = far_key.drawn(512, False, 0)
    places = torch.arange(512 - far_key.QUERIES, 512)
    weights = (q @ k.mT).masked_fill(torch.arange(512) > places.unsqueeze(1), -torch.inf).softmax(-1)
    most, at = weights.max(-1)
    assert_close(most, torch.full_like(most, far_key.WEIGHT), rtol=1e-3, atol=0)
    assert (places - at >= far_key.FAR).all()
    q, k, _ = far_key_both.drawn(512, False, 0)
    most, at = (q @ k.mT).softmax(-1).max(-1)
    assert_close(most, torch.full_like(most, far_key.WEIGHT), rtol=1e-3, atol=0)
    assert ((torch.arange(512) - at).abs() >= far_key.FAR).all()


@pytest.mark.parametrize("peer", PEERS)
def test_peers_weigh_to_one(peer):
    q, k, v = far_key_both.drawn(256, True, 0)
    assert_close(PEERS[peer](q, k, torch.ones_like(v)), torch.ones_like(v))


@pytest.mark.parametrize("peer", ["pages", "clusters of queries"])
def test_peers_are_exact_where_they_read_all(peer, monkeypatch):
    monkeypatch.setattr(far_key_both, "READ", 256)
    heads = far_key_both.drawn(256, False, 0)
    assert_close(PEERS[peer](*heads), exact_attention(*heads), rtol=1e-4, atol=1e-5)


def test_monarch_is_exact_for_weights_of_its_form():
    """Logits q_lj . k_mi = a_j[l, m] + b_j[i] have weights that are such a product."""
    g, b = torch.Generator().manual_seed(0), 4
    rows, columns = torch.randn(b, b, b, generator=g), torch.randn(b, b, generator=g)   # (j, l, m), (j, i)
    q = torch.cat([rows.transpose(0, 1), columns.expand(b, b, b)], -1).flatten(0, 1)    # of (l, j): [a_j[l, :], b_j]
    eye = torch.eye(b)
    k = torch.cat([eye.repeat_interleave(b, 0), eye.repeat(b, 1)], -1)                  # of (m, i): [e_m, e_i]
    heads = tuple(t[None, None] for t in (q, k, torch.randn(b * b, 3, generator=g)))
    assert_close(far_key_both.monarch(*heads), exact_attention(*heads))


def test_errors_of_all_arms():
    found = far_key_both.errors(256, False, 0)
    assert found["near-far, 128 keys"] < 0.2 < found["uniform attention"]
