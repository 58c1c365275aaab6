"""Sampled softmax on synthetic classes: what a draw and a step cost, how far the gradient is from the full softmax's.

Legend: V classes, d dimension, B queries, k negatives, m projections. Targets follow Zipf's law, for classes numbered
from the most frequent on.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp.config import construct
from crt_exp.features import OPRF, TrigRF
from crt_exp.mechanism import Mechanism
from crt_exp.sampled_softmax import (
    ClassSampler,
    DenseFeatures,
    ExactSoftmax,
    LogUniform,
    Quadratic,
    SampledSoftmax,
    TreeFeatures,
    Uniform,
    Unigram,
)
from crt_exp.times import LONG, again, in_turns, milliseconds

D, BATCH, NEGATIVES = 64, 700, 40
FULL_PAIRS = 2**28  # pairs of a query and a class that the full softmax and its gradient take at once: 3 GiB
RATE = 1e-3         # of the optimisers of timed steps: it moves the classes, and nothing is learnt
GROUPS = 32         # of classes: a query's likely classes are mostly those of one
WITHIN = 0.3        # share of a class vector's square that is its own
NOISE = 1.0         # length of what is added to the unit vector of a query's target: their cosine is about 0.7
WARMED = partial(again, below=LONG)  # where the tables are read all the time, as in a step
REPEATED = 2**23    # numbers of the class vectors that repeated draws gather at once


def head_of(classes: int, d: int = D, seed: int = 0) -> nn.Linear:
    """Class vectors of lengths around 1, each near the centre of its group, and Zipf's law as the bias."""
    torch.manual_seed(seed)
    head = nn.Linear(1, 1)  # what follows replaces its parameters: nn.Linear's own start takes long for many classes
    vectors = torch.randn(classes, d).mul_((WITHIN / d) ** 0.5)
    centres = torch.randn(GROUPS, d).mul_(((1 - WITHIN) / d) ** 0.5)
    for group, centre in enumerate(centres):
        vectors[group::GROUPS] += centre
    head.weight, head.bias = nn.Parameter(vectors), nn.Parameter(zipf(classes).log())
    head.in_features, head.out_features = d, classes
    return head


def zipf(classes: int) -> Tensor:
    """The log-uniform law, (V,)."""
    return LogUniform(classes).log_probability(torch.arange(classes)).exp().float()


def batch_of(head: nn.Linear, spread: float, count: int) -> tuple[Tensor, Tensor]:
    """Queries of length `spread`, each near its target's class vector, and the targets."""
    targets = LogUniform(head.out_features).draw(torch.empty(1), None, count).ids[0]
    noise = F.normalize(torch.randn(count, head.in_features), dim=-1) * NOISE
    vectors = F.normalize(head.weight.detach()[targets], dim=-1)
    return spread * F.normalize(vectors + noise, dim=-1), targets


# ---- cost


def draw_times(arms: Sequence[str], classes: int, m: int, rounds: int, seed: int) -> Iterator[dict[str, Any]]:
    """Rows with arm, m, classes, and in each round ms of a draw for the batch and update_ms of the classes drawn.

    "dense" and "tree" hold the same table; "signed tree" that of a trigonometric map with as many features. Every call
    is warm, as in a step, where the tables are read all the time.
    """
    head = head_of(classes)
    hidden, targets = batch_of(head, 1.0, BATCH)
    tree, dense = (kind(OPRF(), classes, D, m=m) for kind in (TreeFeatures, DenseFeatures))
    tree.rebuild(head.weight, head.bias, hidden)
    dense.load_state_dict({name: value for name, value in tree.state_dict().items() if not name.startswith("tree.")}
                          | {"leaves": tree.tree.leaves}, assign=True)
    kinds = {"dense": dense, "tree": tree}
    if "signed tree" in arms:
        kinds["signed tree"] = TreeFeatures(TrigRF(), classes, D, m=m // 2)
        kinds["signed tree"].rebuild(head.weight, head.bias, hidden)
    draws = in_turns({n: partial(kinds[n].draw, hidden, targets, NEGATIVES) for n in arms}, rounds, WARMED)
    rows = tree.draw(hidden, targets, NEGATIVES).ids
    updates = in_turns({n: partial(kinds[n].update, rows, head.weight, head.bias) for n in arms}, rounds, WARMED)
    for n in arms:
        yield {"arm": n, "m": m, "classes": classes, "ms": draws[n], "update_ms": updates[n]}


def step_times(arms: Sequence[str], classes: int, m: int, rounds: int, seed: int) -> Iterator[dict[str, Any]]:
    """Rows with arm, classes, and ms of a step in each round: forward, backward, the optimiser's step and what the
    tables take to follow. Every call is warm."""
    head = head_of(classes)
    hidden, targets = batch_of(head, 1.0, BATCH)
    whole = {"full softmax": lambda: partial(full_step, head, hidden, targets),
             "AdaptiveLogSoftmaxWithLoss": lambda: adaptive_step(classes, hidden, targets)}
    laws = {"tree features": partial(TreeFeatures, OPRF(), classes, D, m=m),
            "dense features": partial(DenseFeatures, OPRF(), classes, D, m=m),
            "uniform": partial(Uniform, classes), "log-uniform": partial(LogUniform, classes)}

    def step(name: str) -> Callable[[], None]:
        if name in whole:
            return whole[name]()
        softmax = SampledSoftmax(laws[name](), head, NEGATIVES, sparse=True, rebuild_every=0)
        return partial(sampled_step, softmax, torch.optim.SGD(head.parameters(), RATE), hidden, targets)

    for name, ms in in_turns({name: step(name) for name in arms}, rounds, WARMED).items():
        yield {"arm": name, "classes": classes, "ms": ms}


def sampled_step(softmax: SampledSoftmax, optimiser: torch.optim.Optimizer, hidden: Tensor, targets: Tensor) -> None:
    optimiser.zero_grad(set_to_none=True)
    softmax(hidden.detach().requires_grad_(), targets).backward()
    optimiser.step()
    softmax.update()


def full_step(head: nn.Linear, hidden: Tensor, targets: Tensor) -> None:
    """The queries in as many parts as the memory asks for."""
    head.zero_grad(set_to_none=True)
    step = max(1, FULL_PAIRS // head.out_features)
    for h, t in zip(hidden.split(step), targets.split(step)):
        (F.cross_entropy(head(h.detach().requires_grad_()), t, reduction="sum") / len(hidden)).backward()
    torch.optim.SGD(head.parameters(), RATE).step()
    head.zero_grad(set_to_none=True)  # so that the methods in turn do not find its gradient


def adaptive_step(classes: int, hidden: Tensor, targets: Tensor) -> Callable[[], None]:
    """torch's adaptive softmax with clusters of a fiftieth, a fifth and the rest of the classes."""
    model = nn.AdaptiveLogSoftmaxWithLoss(D, classes, [classes // 50, classes // 5])
    optimiser = torch.optim.SGD(model.parameters(), RATE)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        model(hidden.detach().requires_grad_(), targets).loss.backward()
        optimiser.step()
    return step


# ---- gradients


Law = Mapping[str, Any] | str
NAMED: dict[str, Callable[[nn.Linear], ClassSampler]] = {
    "uniform": lambda head: Uniform(head.out_features), "log-uniform": lambda head: LogUniform(head.out_features),
    "unigram": lambda head: Unigram(zipf(head.out_features) ** 0.75), "exact softmax": ExactSoftmax,
    "quadratic kernel": Quadratic}


def law(given: Law, head: nn.Linear, spread: float, seed: int) -> ClassSampler:
    """A name of NAMED, or {features, m, flatter}: the kernel's temperature makes it the softmax of vectors of the mean
    lengths, or of `flatter` times that temperature."""
    if isinstance(given, str):
        return NAMED[given](head)
    phi = Mechanism.of(features=given["features"]).map()
    return TreeFeatures(phi, *head.weight.shape, m=given["m"], temperature=given.get("flatter", 1) / spread, seed=seed)


def gradient_errors(arms: Mapping[str, Law], classes: int, spread: float, queries: int, repeats: int,
                    seed: int) -> Iterator[dict[str, Any]]:
    """Of the gradient by the queries, of each law: squared bias and variance, over the squared length of the full
    softmax's gradient. One head, one batch and one noise; the bias from two halves of the repeats, so that their noise
    cancels.
    """
    head = head_of(classes, seed=seed)
    hidden, targets = batch_of(head, spread, queries)
    exact = gradient(lambda h: F.cross_entropy(head(h), targets, reduction="sum"), hidden)
    for name, proposal in {name: law(given, head, spread, seed) for name, given in arms.items()}.items():
        drawn = repeated(SampledSoftmax(proposal, head, NEGATIVES), hidden, targets, repeats)
        first, second = (half.mean(0) - exact for half in drawn.chunk(2))
        yield {"arm": name, "seed": seed, "bias_sq": float((first * second).sum() / exact.square().sum()),
               "variance": float(drawn.var(0).sum() / exact.square().sum())}


def repeated(softmax: SampledSoftmax, hidden: Tensor, targets: Tensor, repeats: int) -> Tensor:
    """The gradient by the queries for `repeats` draws of negatives, (repeats, B, d)."""
    part = max(1, REPEATED // (hidden.numel() * NEGATIVES))
    sizes = [min(part, repeats - start) for start in range(0, repeats, part)]
    return torch.cat([gradient(lambda h, n=n: softmax.losses(h, targets.expand(n, -1)).sum(),
                               hidden.expand(n, *hidden.shape)) for n in sizes])


def gradient(loss: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    hidden = hidden.clone().requires_grad_()
    return torch.autograd.grad(loss(hidden), hidden)[0]


# ---- drift


def drift(arm: Mapping[str, Any], classes: int, m: int, steps: int, seed: int) -> dict[str, float]:
    """How far the tables are behind after steps of a batch each with the optimiser `arm`, `_target_` and arguments:
    `vectors` and `sums` as of `TreeFeatures.drift`, `vectors_unfollowed` where they are not updated, `rebuild_ms` and
    `update_ms` what following takes."""
    head = head_of(classes)
    softmax = SampledSoftmax(OPRF(), head, NEGATIVES, m=m, rebuild_every=0)
    stepper, updates = construct(arm, params=head.parameters()), []
    for step in range(steps):
        hidden, targets = batch_of(head, 4.0, BATCH)
        stepper.zero_grad()
        softmax(hidden, targets).backward()
        stepper.step()
        if step == 0:
            start = softmax.sampler.table().clone()
        updates.append(milliseconds(softmax.update))
    behind, now = softmax.drift(), softmax.sampler.table()
    rebuild = milliseconds(softmax.rebuild)  # `now` too, in place: what was not followed is compared with it
    return {**behind, "seed": seed, "vectors_unfollowed": float((start - now).norm() / now.norm()),
            "rebuild_ms": rebuild, "update_ms": statistics.median(updates)}
