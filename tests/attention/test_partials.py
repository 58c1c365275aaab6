"""Partial sums of attention merge as online softmax does."""

import pytest
import torch
from helpers.seeds import seeded

from crt_exp.attention.partials import Partial, finish, merge


def test_merge_is_the_sum():
    g = seeded()
    b, c = (
        Partial(torch.randn(5, 4, generator=g), 500 * torch.randn(5, 1, generator=g))
        for _ in range(2)
    )
    a = Partial(torch.zeros(5, 4), torch.full((5, 1), -torch.inf))  # nothing gathered
    cases = [
        (merge(a, b), b),
        (merge(b, a), b),
        (merge(a, a), a),
        (merge(b, c), merge(c, b)),
        (merge(merge(a, b), c), merge(a, merge(b, c))),
        (merge(None, b), b),
    ]
    for left, right in cases:
        for p, q in zip(left[:2], right[:2]):
            torch.testing.assert_close(p, q)


@pytest.mark.parametrize("policy", ["none", "clamp", "abs"])
def test_the_output_is_the_ratio_at_any_scale(policy):
    sums = torch.tensor([[6.0, 2.0], [0.0, 0.0]])
    modulus = torch.tensor([[2.0], [0.0]])
    for log_scale in (-1e3, 0.0, 1e3):
        rows = Partial(sums, torch.full((2, 1), log_scale), modulus)
        assert finish(rows, policy).tolist() == [[3.0], [0.0]]
