"""The loops in C that draw classes down a tree: the same as PyTorch's, wherever memory, types and devices are."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from crt_exp.attention.engines import native_library
from crt_exp.features import OPRF
from crt_exp.sampled_softmax import SampledSoftmax, TreeFeatures, native_draws
from crt_exp.sampled_softmax.tree import SumTree

V, D = 300, 4
BOTH = (native_draws.applies, lambda *levels: False)


@pytest.fixture
def case():
    """A head of V classes, queries, and their targets."""
    torch.manual_seed(0)
    return nn.Linear(D, V), torch.randn(3, D), torch.tensor([0, 17, V - 1])


def sampler_of(head, queries):
    sampler = TreeFeatures(OPRF(), *head.weight.shape, m=8, seed=1)
    sampler.rebuild(head.weight, head.bias, queries)
    return sampler


@pytest.mark.skipif(native_library.library() is None, reason="no C compiler here, or CRT_EXP_NATIVE=0")
@pytest.mark.parametrize("count, width", [(2, 1), (17, 5), (300, 33), (5 * 2**12, 4), (17 * 2**12 + 3, 7)])
@pytest.mark.parametrize("left_out", [False, True])
def test_the_loops_in_c_draw_what_pytorch_draws(count, width, left_out, monkeypatch):
    """By the same uniform numbers; columns of unequal mass, rows without any, a row that is nearly all of a column."""
    torch.manual_seed(0)
    tree, weight = SumTree(count, width), torch.randn(6, width)
    table = torch.rand(count, width) ** 8
    table[::3] = 0
    table[-1, 0] = 1e6
    tree.leaves.copy_(table)
    tree.resum()
    mass, without = torch.rand(6, width).double() ** 4, torch.tensor([0, 1, count - 1, 1, 0, count // 2])
    draws = []
    for served in BOTH:
        monkeypatch.setattr(native_draws, "applies", served)
        torch.manual_seed(3)
        draws.append(tree.draw(mass, 500, without if left_out else None))
    assert torch.equal(*draws)
    assert not left_out or count < 10 or not bool((draws[0] == without[:, None]).any())
    torch.testing.assert_close(native_draws.products(weight, tree.level0, draws[0]),
                               torch.einsum("bm,bkm->bk", weight, tree.level0[draws[0]]), rtol=1e-4, atol=1e-4)


def test_without_the_library_pytorch_draws(case, monkeypatch):
    head, queries, targets = case
    drawn = []
    for library in (native_library.library, lambda: None):
        monkeypatch.setattr(native_library, "library", library)
        torch.manual_seed(3)
        drawn.append(sampler_of(head, queries).draw(queries, targets, 50))
    assert torch.equal(drawn[0].ids, drawn[1].ids)
    torch.testing.assert_close(drawn[0].log_q, drawn[1].log_q)


def test_sums_of_another_precision_are_read_as_what_they_are(monkeypatch):
    """As after `.float()`, which the loops in C are not for: of more levels than are inverted at once."""
    torch.manual_seed(0)
    tree = SumTree(17 * 2**12, 3)
    tree.leaves.copy_(torch.rand(17 * 2**12, 3))
    tree.resum()
    tree.float()
    draws = []
    for served in BOTH:
        monkeypatch.setattr(native_draws, "applies", served)
        torch.manual_seed(3)
        draws.append(tree.draw(torch.rand(6, 3), 500))
    assert tree.start == 2 and torch.equal(*draws)


@pytest.mark.parametrize("count", [5000, 70_000])
@pytest.mark.parametrize("bias", [30.0, 40.0, 60.0])
def test_a_target_that_holds_all_of_a_column_leads_to_no_row_behind_the_last(count, bias, monkeypatch):
    """Where nothing but rounding is left, the way down ends in a row that there is."""
    torch.manual_seed(0)
    weight, of_classes = torch.randn(count, 8), torch.zeros(count)
    of_classes[5] = bias
    sampler = TreeFeatures(OPRF(), count, 8, m=16)
    sampler.rebuild(weight, of_classes)
    draws = []
    for served in BOTH:
        monkeypatch.setattr(native_draws, "applies", served)
        torch.manual_seed(3)
        draws.append(sampler.draw(torch.randn(64, 8), torch.full((64,), 5), 40).ids)
        assert 0 <= int(draws[-1].min()) <= int(draws[-1].max()) < count
    assert torch.equal(*draws)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_type_decides_nothing(dtype, case):
    head, queries, targets = case
    sampler = sampler_of(head, queries)
    torch.manual_seed(3)
    expected = sampler.draw(queries, targets, 7)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        torch.manual_seed(3)
        found = sampler.draw(queries, targets, 7)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(found.ids, expected.ids) and torch.equal(found.log_q, expected.log_q)


def test_the_default_device_decides_nothing(case):
    head, queries, targets = case
    sampler = sampler_of(head, queries)
    with torch.device("meta"):
        assert sampler.draw(queries, targets, 7).ids.device.type == "cpu"


def test_transforms_of_functions_go_through_pytorch(case):
    head, queries, targets = case
    softmax = SampledSoftmax(sampler_of(head, queries), head, 5)
    loss = lambda h: softmax(h, targets)
    torch.manual_seed(3)
    found = torch.func.grad(loss)(queries)
    torch.manual_seed(3)
    expected, = torch.autograd.grad(loss(queries.requires_grad_()), queries)
    torch.testing.assert_close(found, expected)
    of_weights = torch.func.grad(lambda p: functional_call(softmax, p, (queries, targets)))
    assert all(t.isfinite().all() for t in of_weights(dict(softmax.named_parameters())).values())
