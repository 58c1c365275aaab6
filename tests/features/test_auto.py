"""The choice of a map for each head (`auto`)."""

import pytest
import torch
from helpers.seeds import seeded
from torch.testing import assert_close

from crt_exp import calibrate_attention, describe_attention, samplers, swap_attention
from crt_exp.attention import RandomFeatureAttention, attention
from crt_exp.features import AutoRF, PosRF, Statistics
from crt_exp.samplers import DenseNoise
from crt_exp.samplers.noise import map_leaves

B = 2
L = 40
D = 8


def three_kinds(seed=0):
    """Heads (B, 3, L, D) that vary alike in all directions, by coordinates, and in other directions."""
    g = seeded(seed)
    q, k, v = torch.randn(3, B, 3, L, D, generator=g)
    by_coordinates = torch.linspace(0.02, 2, D).diag()
    turn = torch.linalg.qr(torch.randn(D, D, generator=seeded(9)))[0]
    maps = torch.stack([0.7 * torch.eye(D), by_coordinates, by_coordinates @ turn])
    return q @ maps, k @ maps, v


KINDS = ["oprf", "diagonal sderf", "sderf"]


@pytest.mark.parametrize("causal", [False, True])
def test_each_head_of_auto_is_its_own_map(causal):
    q, k, v = three_kinds()
    phi = AutoRF()
    noise = samplers.orthogonal(8, D, seeded(), (3,))
    x = q.transpose(0, 1).flatten(1, 2)
    y = k.transpose(0, 1).flatten(1, 2)
    stats = Statistics.of(x, y)
    out = attention(q, k, v, phi, noise, phi.fit(stats), causal=causal)
    assert [*phi.candidates(D)] == KINDS
    for h, own in enumerate(phi.candidates(D).values()):
        head = slice(h, h + 1)
        own_params = map_leaves(lambda t, head=head: t[head], own.fit(stats))
        own_noise = DenseNoise(noise.rows()[head], True)
        expected = attention(
            q[:, head], k[:, head], v[:, head], own, own_noise, own_params, causal=causal
        )
        assert_close(out[:, head], expected, rtol=1e-3, atol=1e-4)


def test_a_layer_chooses_once_and_keeps_its_choice():
    options = {"causal": True, "fit_steps": 2, "scaling": 1.0}

    def make(phi):
        return RandomFeatureAttention(phi, samplers.orthogonal, 16, 3, D, **options)

    module = make(AutoRF())
    inputs = three_kinds()
    with pytest.warns(UserWarning, match="no statistics yet.*calibrate_attention"):
        first = module.eval()(*inputs)
    expected = make(PosRF(antithetic=True)).eval()(*inputs)
    assert_close(first, expected)
    module.train()
    for seed in range(3):
        module(*three_kinds(seed))
    assert module.phi.names(module.clusters.params()) == KINDS
    for seed in range(3, 6):
        module(*three_kinds(seed))
    assert int(module.clusters.fits) == 1
    other = make(AutoRF())
    other.load_state_dict(module.state_dict())
    actual = other.eval()(*inputs)
    expected = module.eval()(*inputs)
    assert_close(actual, expected, rtol=0, atol=0)


def test_auto_beyond_full_matrices_and_for_the_gaussian_kernel():
    wide = torch.randn(9, 300)
    actual = AutoRF().fit(Statistics.of(wide, wide)).root.shape
    assert actual == (1, 300)
    params = AutoRF("gaussian").fit(Statistics.of(wide[:, :4], wide[:, 4:8]))
    expected = torch.eye(4, dtype=torch.float64)
    assert_close(params.balance, expected)


def test_describe_attention_lists_the_map_of_each_layer():
    encoder = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2, enable_nested_tensor=False
    ).eval()
    swap_attention(encoder, "favorpp", features="auto", m=8)
    assert describe_attention(encoder)["chosen"].isna().all()
    calibrate_attention(encoder, [torch.randn(2, 30, 32, generator=seeded())])
    for chosen in describe_attention(encoder)["chosen"]:
        actual = sum(int(part.rsplit(" ", 1)[1]) for part in chosen.split(", "))
        assert actual == 4
