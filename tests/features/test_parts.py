"""Sums and products of maps: their parts, projections and parameters."""

import pytest
import torch
from helpers.seeds import seeded

from crt_exp import samplers
from crt_exp.features import (
    GERF,
    OPRF,
    PosRF,
    Product,
    Statistics,
    Sum,
    TrigRF,
)
from crt_exp.samplers.noise import leaves

X = torch.ones(1, 2, 3)


def test_a_sum_of_shared_projections_has_no_closed_form_variance():
    with pytest.raises(NotImplementedError, match="shared=False"):
        Sum(OPRF(), PosRF(), shared=True).log_variance(X, X, ((), ()))


def named():
    """A draw for `FeatureMap.noise` and the names that it was called with."""
    g = seeded()
    names = []

    def draw(p):
        names.append(p.name)
        return samplers.iid(p.m, 4, g)

    return draw, names


def test_every_part_has_a_noise_of_its_own_or_all_share_one():
    draw, names = named()
    noise = Sum(TrigRF(), Product(TrigRF("gaussian"), PosRF())).noise(6, draw)
    assert names == ["0", "1_0", "1_1"]
    actual = len({id(n) for n in leaves(noise)})
    assert actual == 3
    draw, names = named()
    (a, b), (c, d) = Sum(Product(TrigRF(), PosRF()), Product(PosRF(), TrigRF()), shared=True).noise(
        6, draw
    )
    assert names == ["0", "1"]
    assert a is c
    assert b is d
    assert a is not b


def test_parts_may_take_other_numbers_of_projections():
    phi = Sum(Product(TrigRF("gaussian"), PosRF()), GERF())
    (a, b), c = phi.noise(((3, 5), 7), named()[0])
    assert a.m == 3
    assert b.m == 5
    assert c.m == 7
    x = torch.randn(2, 4)
    params = phi.fit(Statistics.of(x, x))
    actual = phi.phi_q(x, ((a, b), c), params).exp().shape
    expected = (2, phi.width(((3, 5), 7)))
    assert actual == expected
    with pytest.raises(ValueError, match="shared projections: .* 3 and 7"):
        Sum(TrigRF(), PosRF(), shared=True).noise((3, 7), named()[0])


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
