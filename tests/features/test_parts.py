"""Sums and products of maps: their parts, projections and parameters."""

import pytest
import torch
from helpers.seeds import seeded

from crt_exp import samplers
from crt_exp.features import (
    GERF,
    PosRF,
    Product,
    Statistics,
    Sum,
    TrigRF,
)
from crt_exp.samplers.noise import leaves


def named():
    """A draw for `FeatureMap.noise` and the names that it was called with."""
    g = seeded()
    names = []

    def draw(p):
        names.append(p.name)
        return samplers.iid(p.m, 4, g)

    return draw, names


def test_every_part_has_a_noise_of_its_own():
    draw, names = named()
    noise = Sum(TrigRF(), Product(TrigRF("gaussian"), PosRF())).noise(6, draw)
    assert names == ["0", "1_0", "1_1"]
    actual = len({id(n) for n in leaves(noise)})
    assert actual == 3


def test_the_width_is_the_number_of_columns():
    phi = Sum(Product(TrigRF("gaussian"), PosRF()), GERF())
    x = torch.randn(2, 4)
    params = phi.fit(Statistics.of(x, x))
    actual = phi.phi_q(x, phi.noise(3, named()[0]), params).exp().shape
    assert actual == (2, phi.width(3)) == (2, 6 * 3 + 6)


def test_a_product_refuses_shared_noise():
    x = torch.ones(3, 4)
    n = samplers.iid(2, 4)
    other = samplers.iid(2, 4)
    nested = Product(Sum(PosRF(), TrigRF()), PosRF())
    cases = [(Product(PosRF(), PosRF()), (n, n)), (nested, ((other, n), n))]
    for phi, noise in cases:
        with pytest.raises(ValueError, match="independent projections"):
            phi.phi_q(x, noise, phi.fit(None))


def test_every_part_needs_its_parameters():
    cases = [Sum(TrigRF(), PosRF(), PosRF()), Product(TrigRF(), PosRF())]
    for phi in cases:
        with pytest.raises(ValueError, match=r"params: 1 entries, expected \d"):
            phi.phi_q(torch.ones(3, 4), phi.noise(2, lambda _: samplers.iid(2, 4)), ((),))
