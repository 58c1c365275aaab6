"""The multi-index of classes and the quadratic kernel: their laws by definition, tables that follow, bad input."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from crt_exp.sampled_softmax import ExactSoftmax, MultiIndex, Quadratic, SampledSoftmax

V, D, B = 120, 5, 4


@pytest.fixture
def head():
    return nn.Linear(D, V)


@pytest.fixture
def queries():
    return 2 * torch.randn(B, D)


def built(head, codewords=6):
    sampler = MultiIndex(*head.weight.shape, codewords=codewords)
    sampler.rebuild(head.weight, head.bias)
    return sampler


def law(sampler, queries):
    return sampler.log_q(queries, torch.arange(sampler.classes).expand(len(queries), -1)).double()


def sums_to_one(found):
    return torch.allclose(found.exp().sum(-1), torch.ones(len(found), dtype=torch.float64), rtol=1e-4)


@torch.no_grad()
def divergence(sampler, head, queries):
    """Nats from the softmax."""
    exact = head(queries).double().log_softmax(-1)
    return float((exact.exp() * (exact - law(sampler, queries))).sum(-1).mean())


def test_the_law_is_the_softmax_of_quantised_classes(head, queries):
    sampler = built(head)
    first, second = sampler.cell // 6, sampler.cell % 6
    words = torch.cat([sampler.books[0][first], sampler.books[1][second]], 1)       # (V, 6): 5 numbers and the bias
    logits = queries @ words[:, :D].mT + words[:, D]
    assert_close(law(sampler, queries), logits.double().log_softmax(-1), rtol=1e-4, atol=1e-5)
    nearest = torch.cdist(head.weight[:, :3], sampler.books[0]).argmin(-1)
    assert torch.equal(nearest, first)


def test_more_codewords_are_nearer_to_the_softmax(head, queries):
    apart = [divergence(built(head, K), head, queries) for K in (1, 4, 16, V)]
    assert apart == sorted(apart, reverse=True) and apart[0] > 0.05 and apart[-1] < 1e-5
    assert divergence(built(head, 2 * V), head, queries) < 1e-5                     # more codewords than classes


def test_the_quadratic_kernel(head, queries):
    expected = 100 * head(queries).double().square() + 1
    assert_close(law(Quadratic(head), queries), (expected / expected.sum(-1, keepdim=True)).log(), rtol=1e-4, atol=1e-5)
    for alpha in (1e-30, 1e20, 1e38, 1e300):
        found = law(Quadratic(head, alpha), queries)
        assert bool(found.isfinite().all()) and sums_to_one(found)
    assert_close(law(Quadratic(head, 0), queries).exp(), torch.full((B, V), 1 / V, dtype=torch.float64))


@pytest.mark.parametrize("of_classes, of_queries", [(1e10, 1e10), (1e20, 1.0), (1.0, 1e20), (1e19, 1e19), (1e30, 1e30),
                                                    (1e-20, 1e20), (1e-30, 1e-30), (1e-30, 1.0), (1.0, 1.0)])
def test_the_law_of_the_index_sums_to_one_at_any_size(of_classes, of_queries, head, queries):
    """Beside logits of 1e20 the log of a cell's size was lost, and squares overflowed."""
    weight = of_classes * head.weight.detach()
    sampler, targets = MultiIndex(V, D, codewords=3), torch.arange(B)
    sampler.rebuild(weight)
    assert len(sampler.cell.unique()) > 3                           # not all in one cell
    found = law(sampler, of_queries * queries)
    assert sums_to_one(found)
    drawn = sampler.draw(of_queries * queries, targets, 50)
    assert not bool(drawn.log_q.isnan().any()) and bool((drawn.log_q <= 0).all())
    assert_close(drawn.target_log_q.double(), found.gather(1, targets[:, None])[:, 0])


def test_a_cell_of_the_target_alone_is_never_drawn(queries):
    """And of a target among others, the others of its cell are all drawn."""
    weight = torch.zeros(6, D)
    weight[0], weight[1:3] = 8.0, -8.0
    sampler = built_of(weight, 3)
    targets = torch.tensor([0, 1, 4, 5])
    drawn = sampler.draw(0.05 * queries, targets, 4000)
    assert not bool((drawn.ids == targets[:, None]).any()) and bool(drawn.log_q.isfinite().all())
    assert {*drawn.ids[2].tolist()} >= {3, 5}


def built_of(weight, codewords):
    sampler = MultiIndex(*weight.shape, codewords=codewords)
    sampler.rebuild(weight)
    return sampler


def test_an_update_moves_classes_and_drift_says_how_many_have_moved(head, queries):
    sampler = built(head)
    rows = torch.tensor([3, 7, 7])
    with torch.no_grad():
        head.weight[rows] = -2 * head.weight[rows]
        head.weight[3] = 9.0
    assert 0 < sampler.drift(head.weight, head.bias)["cells"] <= 2 / V
    sampler.update(rows, head.weight, head.bias)
    assert sampler.drift(head.weight, head.bias)["cells"] == 0
    assert torch.equal(sampler.order[sampler.place], torch.arange(V)) and int(sampler.starts[-1]) == V
    assert_close(law(sampler, queries).exp().sum(-1), torch.ones(B, dtype=torch.float64), rtol=1e-5, atol=0)


def test_nan_is_refused_and_nothing_changes(head):
    sampler = built(head)
    before = copy.deepcopy(sampler.state_dict())
    with torch.no_grad():
        head.weight[9, 2] = torch.nan
    for call in (lambda: sampler.update(torch.tensor([7, 9]), head.weight, head.bias),
                 lambda: sampler.rebuild(head.weight, head.bias)):
        with pytest.raises(ValueError, match="class 9 is not finite"):
            call()
    assert all(torch.equal(value, before[name]) for name, value in sampler.state_dict().items())


def test_training_lowers_the_exact_loss_and_a_restored_module_goes_on(head):
    softmax = SampledSoftmax(MultiIndex(V, D, codewords=8), head, 10, rebuild_every=4)
    hidden, targets = torch.randn(256, D), torch.randint(V, (256,))
    optimizer, losses = torch.optim.SGD(head.parameters(), 1.0), []
    for _ in range(30):
        losses.append(softmax.eval()(hidden, targets).item())
        softmax.train()(hidden, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        softmax.update()
    assert losses[-1] < losses[0] - 0.05
    other = SampledSoftmax(MultiIndex(V, D, codewords=8), copy.deepcopy(head), 10)
    other.load_state_dict(softmax.state_dict())
    drawn = []
    for each in (softmax, other):
        torch.manual_seed(1)
        drawn.append(each.sampler.draw(hidden, targets, 10))
    assert all(torch.equal(*pair) for pair in zip(*drawn))


def test_tables_stay_precise_in_a_model_of_half_precision(head, queries):
    softmax = SampledSoftmax(built(head), head, 10).to(torch.bfloat16)
    assert softmax.sampler.books.dtype == torch.float32 and head.weight.dtype == torch.bfloat16
    softmax.sampler.rebuild(head.weight, head.bias)
    assert bool(softmax(queries.bfloat16(), torch.arange(B)).isfinite())


def test_bad_input(head, queries):
    for call, words in [(lambda: MultiIndex(V, D, codewords=0), "codewords = 0"),
                        (lambda: MultiIndex(V, D).draw(queries, None, 3), "call rebuild"),
                        (lambda: built(head).draw(queries[:, 1:], None, 3), "this sampler takes"),
                        (lambda: built(head).rebuild(head.weight[1:]), "class vectors of shape"),
                        (lambda: built(head).update(torch.tensor([V]), head.weight), f"class {V}"),
                        (lambda: Quadratic(head, -1.0), "alpha = -1.0"),
                        (lambda: Quadratic(50), "takes the head itself")]:
        with pytest.raises(ValueError, match=words):
            call()
    assert built(head).draw(queries[:0], None, 4).ids.shape == (0, 4)
    assert divergence(ExactSoftmax(head), head, queries) < 1e-6
