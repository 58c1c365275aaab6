"""Sampled softmax: properties of the samplers, unbiased normalisers, tables that follow updates, bad input."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from helpers.class_probabilities import class_probabilities
from helpers.sampled_means import check_mean
from scipy.stats import chisquare
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from crt_exp import Mechanism
from crt_exp.experiments.measure.sampling import SampledGradients, SamplingTimes
from crt_exp.features import OPRF, PoisRF, PosRF, Product, Sum, TrigRF
from crt_exp.sampled_softmax import (
    DenseFeatures,
    ExactSoftmax,
    LogUniform,
    Quadratic,
    SampledSoftmax,
    TreeFeatures,
    Uniform,
    Unigram,
)
from crt_exp.sampled_softmax.tree_features import FAN, SumTree

V = 300
D = 4
B = 3
POSITIVE = [
    OPRF(),
    PosRF(antithetic=True),
    Sum(OPRF(), PosRF(), weights=(0.5, 0.5)),
]
SIGNED = [
    PoisRF(),
    Sum(TrigRF(), PosRF()),
    Product(TrigRF("gaussian"), OPRF()),
]
DRAWS = 40_000


@pytest.fixture
def head():
    return nn.Linear(D, V)


@pytest.fixture
def queries():
    return torch.randn(B, D)


@pytest.fixture
def targets():
    return torch.tensor([0, 17, V - 1])


def built(kind, phi, head, queries, m=8, **options):
    sampler = kind(phi, *head.weight.shape, m=m, seed=1, **options)
    sampler.rebuild(head.weight, head.bias, queries)
    return sampler


def samplers(head, queries):
    return [
        Uniform(V),
        LogUniform(V),
        Unigram(torch.arange(V) % 7),
        ExactSoftmax(head),
        Quadratic(head),
        *(
            built(kind, phi, head, queries)
            for phi in (OPRF(), TrigRF())
            for kind in (TreeFeatures, DenseFeatures)
        ),
    ]


def follows(ids, q):
    """Whether draws (n,) have the law q (V,), by a chi-square test of the classes expected 5 times at least."""
    expected = q.double() / q.double().sum() * len(ids)
    seen = torch.bincount(ids, minlength=len(q)).double()
    often = expected >= 5
    seen = torch.cat([seen[often], seen[~often].sum()[None]])
    expected = torch.cat([expected[often], expected[~often].sum().clamp(min=1e-9)[None]])
    return chisquare(seen, expected * seen.sum() / expected.sum()).pvalue > 1e-4


# ---- properties


@pytest.mark.parametrize("phi", POSITIVE, ids=repr)
def test_a_positive_map_down_the_tree_has_the_dense_law(phi, head, queries, targets):
    tree = built(TreeFeatures, phi, head, queries)
    q = class_probabilities(built(DenseFeatures, phi, head, queries), queries, targets)
    drawn = tree.draw(queries, targets, DRAWS)
    assert torch.allclose(drawn.log_q.exp(), q.gather(1, drawn.ids).float(), rtol=1e-4)
    for sample in zip(drawn.ids, q):
        assert follows(*sample)


@pytest.mark.parametrize("number", range(9))
def test_draws_have_the_probabilities_that_come_with_them(number, head, queries, targets):
    sampler = samplers(head, queries)[number]
    q = class_probabilities(sampler, queries, targets)
    assert ((q > 0).sum(1) == V - 1).all()
    drawn = sampler.draw(queries, targets, DRAWS)
    assert not (drawn.ids == targets[:, None]).any()
    assert torch.allclose(drawn.log_q.exp(), q.gather(1, drawn.ids).float(), rtol=1e-3)
    for sample in zip(drawn.ids, q):
        assert follows(*sample)


@pytest.mark.parametrize("phi", SIGNED, ids=repr)
def test_signed_maps_give_every_class_a_probability(phi, head, queries, targets):
    """Also below nodes where no estimate is positive."""
    sampler = built(TreeFeatures, phi, head, queries, m=2, temperature=0.2)
    walked = sampler._walk(queries, targets, torch.arange(V).expand(B, V)).log_q.exp()
    actual = walked.scatter(1, targets[:, None], 0.0).sum(1)
    expected = torch.ones(B)
    assert torch.allclose(actual, expected, atol=1e-5)
    q = class_probabilities(sampler, queries, targets).scatter(1, targets[:, None], 1.0)
    assert float(q.min()) >= 0.99 * 0.05 / V
    drawn = sampler.draw(queries, targets, 2000)
    assert drawn.log_q.isfinite().all()
    assert not (drawn.ids == targets[:, None]).any()


@pytest.mark.parametrize("number", range(9))
def test_the_normaliser_is_unbiased(number, head, queries, targets):
    sampler = samplers(head, queries)[number]
    softmax = SampledSoftmax(sampler, head, negatives=20)
    logits = head(queries)
    exact = logits.logsumexp(-1).exp()
    with torch.no_grad():  # every repetition draws its own negatives
        losses = softmax.losses(queries.expand(2000, B, D), targets.expand(2000, B))
        z = (losses + logits.gather(1, targets[:, None]).squeeze(1)).exp()
    error = check_mean(z, exact, rounding=1e-5 * exact)
    assert (error < 0.02 * exact).all()  # the test has power


def test_all_levels_of_a_deep_tree_follow_the_law(head):
    """Of more nodes than are inverted at once, the target left out on the way down."""
    count = 5 * 2**12
    head = nn.Linear(2, count)
    query = torch.randn(1, 2)
    sampler = built(TreeFeatures, OPRF(), head, query, m=4)
    target = (sampler.features.of_signed_queries(query) @ sampler.tree.leaves.mT).argmax(1)
    ids = sampler.draw(query, target, 400_000).ids[0]
    without_target = class_probabilities(sampler, query, target)[0]
    assert follows(ids, without_target)
    by_node = F.pad(without_target, (0, -count % FAN)).view(-1, FAN).sum(1)
    assert follows(ids // FAN, by_node)


def test_the_batch_by_classes_matrix_is_never_formed():
    count = 20_000
    batch = 64
    actual = largest_tensor(TreeFeatures, OPRF(), count, batch)
    assert actual < batch * count / 4
    actual = largest_tensor(TreeFeatures, TrigRF(), count, batch)
    assert actual < batch * count / 2
    assert (
        largest_tensor(DenseFeatures, OPRF(), count, 50) == count * 50
    )  # the measure sees it where it is formed


def largest_tensor(kind, phi, count, batch):
    """Entries of the largest tensor that a draw makes: views of tables are not made."""
    weight = torch.randn(count, 4)
    query = torch.randn(batch, 4)
    sampler = kind(phi, count, 4, m=8)
    sampler.rebuild(weight, None, query)
    with Largest() as largest:
        sampler.draw(query, torch.zeros(batch, dtype=torch.long), 5)
    return largest.entries


class Largest(TorchDispatchMode):
    entries = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        before = {
            t.untyped_storage().data_ptr()
            for t in tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
        made = []
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in before:
                made.append(t.numel())
        self.entries = max([self.entries, *made])
        return out


# ---- tables that follow updates


def behind(sampler, head):
    """Relative difference of the tables from the features of the vectors that the head has now."""
    now = sampler.features.of_classes(head.weight.detach(), head.bias)
    return float((now - sampler.tree.leaves[: len(now)]).norm() / now.norm())


def sum_error(tree):
    """The largest difference of a sum from that of its rows, relative to the root mean square of its level."""
    levels = []
    for number in range(1, tree.depth):
        levels.append(tree.level(number).double())
    return max(
        float((level - tree.child_sums(i).double()).abs().max() / level.square().mean().sqrt())
        for i, level in enumerate(levels, 1)
    )


@pytest.mark.parametrize("phi", [OPRF(), TrigRF()], ids=repr)
def test_an_update_gives_the_law_of_the_new_vectors(phi, head, queries):
    sampler = built(TreeFeatures, phi, head, queries)
    rows = torch.tensor([5, 17, 17, 250, 5])
    before = []
    for number in range(sampler.tree.depth):
        before.append(sampler.tree.level(number).clone())
    with torch.no_grad():
        head.weight[rows] += 0.5
        head.bias[rows] -= 0.3
    assert behind(sampler, head) > 0.01
    sampler.update(rows, head.weight, head.bias)
    assert behind(sampler, head) < 1e-6
    assert sum_error(sampler.tree) < (1e-12 if phi == OPRF() else 1e-5)
    for number, old in enumerate(before):  # what does not lie above the changed rows is not touched
        changed = (sampler.tree.level(number) != old).any(1).nonzero().flatten()
        actual = changed.tolist()
        expected = (rows // FAN**number).unique().tolist()
        assert actual == expected


def test_rounding_of_the_sums_is_bounded_and_a_rebuild_removes_it():
    tree = SumTree(1000, 3)
    tree.set(torch.arange(1000), torch.rand(1000, 3))
    for _ in range(300):
        rows = torch.randint(1000, (50,)).unique()
        tree.set(rows, torch.rand(len(rows), 3) * 10 ** (6 * torch.rand(1)))
    assert 0 < sum_error(tree) < 1e-9
    tree.resum()
    assert sum_error(tree) == 0
    expected = tree.leaves.double().sum(0)
    assert torch.allclose(tree.total, expected, rtol=1e-12)


def test_a_class_that_outgrows_the_constants_makes_the_tables_anew(head, queries):
    sampler = built(TreeFeatures, OPRF(), head, queries)
    with torch.no_grad():
        head.bias[3] = 60.0
    sampler.update(torch.tensor([3]), head.weight, head.bias)
    actual = sampler.draw(queries, torch.zeros(B, dtype=torch.long), 5)
    assert (actual.ids == 3).all()
    assert torch.allclose(actual.log_q, torch.zeros(B, 5), atol=1e-5)
    assert sum_error(sampler.tree) == 0
    drawn = sampler.draw(
        queries, torch.full((B,), 3), 20_000
    )  # the rest is below rounding: uniform, with a warning
    assert drawn.log_q.isfinite().all()
    assert not (drawn.ids == 3).any()
    found = torch.zeros(B, V).scatter_(1, drawn.ids, drawn.log_q.exp())
    for sample in zip(drawn.ids, found + (found == 0) * 1e-9):
        assert follows(*sample)


def test_constants_hold_for_classes_that_nothing_was_fitted_to(head, queries, monkeypatch):
    monkeypatch.setattr("crt_exp.sampled_softmax.feature_distribution.MAX_FIT_VECTORS", 3)
    with torch.no_grad():
        head.bias[1] = 60.0  # every hundredth class is looked at
    sampler = built(TreeFeatures, OPRF(), head, queries)
    actual = sampler.draw(queries, torch.zeros(B, dtype=torch.long), 5)
    assert (actual.ids == 1).all()
    assert torch.allclose(actual.log_q, torch.zeros(B, 5), atol=1e-5)


def test_the_record_of_changed_rows_is_bounded_and_takes_more_rows(
    head, queries, targets, monkeypatch
):
    monkeypatch.setattr("crt_exp.sampled_softmax.softmax.MAX_RECORDED", 100)
    softmax = SampledSoftmax(OPRF(), head, m=4)
    for _ in range(20):
        softmax(queries, targets)
    assert sum(map(len, softmax._touched)) <= 2 * V
    softmax.update()
    assert softmax._touched == []
    with torch.no_grad():
        head.weight[[100, 200]] += 1
    softmax.update(torch.tensor([100, 200]))
    assert behind(softmax.sampler, head) < 1e-6


@pytest.mark.parametrize("kind, phi", [(TreeFeatures, TrigRF()), (DenseFeatures, OPRF())], ids=str)
def test_nan_in_an_update_is_refused_and_nothing_changes(kind, phi, head, queries):
    sampler = built(kind, phi, head, queries)
    before = copy.deepcopy(sampler.state_dict())
    with torch.no_grad():
        head.weight[7] += 1
        head.weight[9, 2] = torch.nan
    with pytest.raises(ValueError, match="class 9: .* not finite"):
        sampler.update(torch.tensor([7, 9]), head.weight, head.bias)
    with pytest.raises(ValueError, match="class 9: .* not finite"):
        sampler.rebuild(head.weight, head.bias)
    for name, value in sampler.state_dict().items():
        if isinstance(value, torch.Tensor):
            actual = torch.as_tensor(value)
            assert torch.equal(actual, before[name])


# ---- the loss


def test_exact_proposals_give_the_full_loss(head, queries, targets):
    """Every term of Z^ is then what is sought of Z, so that the estimate does not vary."""
    softmax = SampledSoftmax(ExactSoftmax(head), head, negatives=3)
    actual = softmax.losses(queries, targets)
    expected = F.cross_entropy(head(queries), targets, reduction="none")
    assert torch.allclose(
        actual,
        expected,
        atol=1e-5,
    )


def test_eval_mode_is_the_full_softmax(head, targets):
    queries = torch.randn(2, B, D)
    targets = torch.stack([targets, targets + 0])
    for one in (head, nn.Embedding(V, D)):
        softmax = SampledSoftmax(OPRF(), one, m=4).eval()
        logits = F.linear(queries, one.weight, getattr(one, "bias", None))
        actual = softmax(queries, targets)
        expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        assert torch.allclose(actual, expected)
        assert softmax.losses(queries, targets).shape == targets.shape


def test_sparse_gradients_are_the_dense_ones(head, queries, targets):
    grads = []
    for sparse in (False, True):
        torch.manual_seed(1)
        one = copy.deepcopy(head)
        SampledSoftmax(OPRF(), one, m=4, sparse=sparse)(queries, targets).backward()
        assert one.weight.grad.is_sparse == one.bias.grad.is_sparse
        assert sparse == one.bias.grad.is_sparse
        grads.append([p.grad.to_dense() if sparse else p.grad for p in one.parameters()])
    for a, b in zip(*grads):
        assert torch.allclose(a, b, atol=1e-7)


@pytest.mark.parametrize("proposal", ["favorpp", Mechanism.of(features="trig", m=16)], ids=str)
def test_training_lowers_the_exact_loss_and_the_tables_follow(proposal, head):
    options = {} if isinstance(proposal, Mechanism) else {"m": 16}
    softmax = SampledSoftmax(proposal, head, negatives=20, sparse=True, rebuild_every=30, **options)
    optimiser = torch.optim.SGD(softmax.parameters(), 0.5)
    queries = torch.randn(64, D)
    targets = torch.randint(V, (64,))
    begin = softmax.eval()(queries, targets).item()
    softmax.train()
    for _ in range(40):
        optimiser.zero_grad()
        softmax(queries, targets).backward()
        optimiser.step()
        softmax.update()
    assert behind(softmax.sampler, head) < 1e-5
    assert int(softmax.updates) == 40
    actual = softmax.eval()(queries, targets).item()
    assert actual < begin - 0.3


def test_a_restored_module_goes_on_bit_for_bit(head, queries, targets):
    def trained(softmax, steps):
        losses = []
        optimiser = torch.optim.SGD(softmax.parameters(), 0.5)
        for _ in range(steps):
            loss = softmax(queries, targets)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            softmax.update()
            losses.append(loss.item())
        return losses

    def make():
        return SampledSoftmax(OPRF(), nn.Linear(D, V), m=8, rebuild_every=5)

    first = make()
    trained(first, 3)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = make()
    second.load_state_dict(torch.load(file, weights_only=True))
    expected = (torch.manual_seed(3), trained(first, 6))[1]
    actual = (torch.manual_seed(3), trained(second, 6))[1]
    assert actual == expected


# ---- bad input


def test_tables_of_another_m_are_refused(head, queries):
    saved = built(TreeFeatures, OPRF(), head, queries, m=8).state_dict()
    cases = [{"m": 4}, {"m": 8, "temperature": 0.5}]
    for other in cases:
        sampler = TreeFeatures(OPRF(), V, D, seed=1, **other)
        with pytest.raises(ValueError, match="saved tables.*m = 8"):
            sampler.load_state_dict(saved)
        assert not sampler.built


def test_bad_input_is_refused(head, queries, targets):
    softmax = SampledSoftmax(OPRF(), head, m=4)
    tree = built(TreeFeatures, OPRF(), head, queries)
    refused = [
        (lambda: SampledSoftmax(OPRF(), head, negatives=V), "negatives=300: expected at most 299"),
        (lambda: SampledSoftmax(Uniform(V + 1), head), "301 classes, expected 300"),
        (lambda: SampledSoftmax("exact", head), "no random features"),
        (
            lambda: SampledSoftmax(Mechanism.of("favorpp", m=4), head, m=8),
            "m=8: expected None",
        ),
        (lambda: Unigram([1.0, -1.0]), "count of class 1"),
        (lambda: TreeFeatures(OPRF(), V, D).draw(queries, targets, 3), "call rebuild"),
        (lambda: softmax(queries, torch.tensor([0, 1, V])), "targets: .* to 300"),
        (
            lambda: softmax(queries[:0], targets[:0]),
            r"targets \(0,\): expected .* at least one target",
        ),
        (lambda: softmax(queries / 0, targets), "query 0 is not finite"),
        (lambda: softmax(queries, targets.float()), "targets: torch.float32"),
        (
            lambda: tree.update(torch.tensor([V]), head.weight),
            r"rows tensor.*300.*: expected integers from 0 to 299",
        ),
        (lambda: tree.rebuild(head.weight[1:]), "class vectors: shape .299, "),
        (lambda: tree.rebuild(head.weight, torch.zeros(V - 1)), "biases: shape .299,"),
    ]
    for call, words in refused:
        with pytest.raises(ValueError, match=words):
            call()


def test_no_queries_get_no_draws(head, queries):
    for sampler in samplers(head, queries):
        actual = sampler.draw(queries[:0], torch.zeros(0, dtype=torch.long), 4).ids.shape
        assert actual == (0, 4)


@pytest.mark.parametrize("proposal", [OPRF(), "exact"], ids=str)
def test_a_head_in_half_precision_keeps_its_tables(proposal, head, queries, targets):
    """The tables and their sums are float32 or float64 in any model: half() moves the head alone."""
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        own = copy.deepcopy(head)
        softmax = SampledSoftmax(
            ExactSoftmax(own) if proposal == "exact" else proposal, own, 40
        ).to(dtype)
        losses.append(softmax(queries.to(dtype), targets).item())
        assert own.weight.dtype == dtype
        for b in softmax.buffers():
            assert b.dtype != torch.bfloat16
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_the_quadratic_kernel(head, queries):
    def law(sampler):
        weights = sampler.weights(queries).double()
        return weights / weights.sum(-1, keepdim=True)

    expected = 100 * head(queries).double().square() + 1
    assert_close(
        law(Quadratic(head)).log(),
        (expected / expected.sum(-1, keepdim=True)).log(),
        rtol=1e-4,
        atol=1e-5,
    )
    for alpha in (1e-30, 1e38, 1e300):
        assert law(Quadratic(head, alpha)).isfinite().all()
    actual = law(Quadratic(head, 0))
    expected = torch.full((B, V), 1 / V, dtype=torch.float64)
    assert_close(actual, expected)


@pytest.mark.parametrize("count, bias", [(5000, 30.0), (70_000, 60.0), (5000, 40.0)])
def test_a_target_that_holds_all_of_a_column_leads_to_no_row_behind_the_last(count, bias):
    """Where nothing but rounding is left, the way down ends in a row that there is."""
    torch.manual_seed(0)
    weight = torch.randn(count, 8)
    of_classes = torch.zeros(count)
    of_classes[5] = bias
    sampler = TreeFeatures(OPRF(), count, 8, m=16)
    sampler.rebuild(weight, of_classes)
    ids = sampler.draw(torch.randn(64, 8), torch.full((64,), 5), 40).ids
    assert 0 <= int(ids.min()) <= int(ids.max()) < count


@pytest.mark.parametrize("phi", [OPRF(), TrigRF()], ids=repr)
def test_transforms_of_functions_give_the_gradients_of_autograd(phi, head, queries, targets):
    softmax = SampledSoftmax(built(TreeFeatures, phi, head, queries), head, 5)

    def loss(h):
        return (torch.manual_seed(3), softmax(h, targets))[1]

    actual = torch.func.grad(loss)(queries)
    assert_close(actual, *torch.autograd.grad(loss(queries.requires_grad_()), queries))


# ---- measuring tasks


def test_gradients_of_exact_proposals_are_unbiased_and_those_of_uniform_ones_are_not():
    methods = ["uniform", "exact", "favorpp m=16", "favorpp m=16 flatter=2", "quadratic"]
    task = SampledGradients(methods, 500, 4.0, 16, 100)
    actual = {}
    for row in task.rows(None, 0):
        actual[row["method"]] = row
    assert abs(actual["exact"]["bias_sq"]) < 1e-3 < actual["uniform"]["bias_sq"]
    assert (
        actual["exact"]["variance"]
        < actual["favorpp m=16"]["variance"]
        < actual["uniform"]["variance"]
    )


@pytest.mark.parametrize(
    "what, methods", [("draw", ["dense", "tree"]), ("step", ["full", "adaptive", "tree"])]
)
def test_times_have_a_value_for_each_round(what, methods):
    rows = [*SamplingTimes(what, methods, 1000, 16, 2).rows(None, 0)]
    actual = [row["method"].removesuffix(" m=16") for row in rows]
    assert actual == methods
    for row in rows:
        assert len(row["ms"]) == 2
        assert min(row["ms"]) > 0
    with pytest.raises(ValueError, match="method"):
        [*SamplingTimes(what, ["trees"], 1000, 16, 2).rows(None, 0)]
