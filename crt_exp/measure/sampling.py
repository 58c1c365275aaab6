"""Sampled softmax on synthetic classes: what a draw and a step cost, how far the gradient is from the full softmax's.

Legend: V classes, d dimension, B queries, k negatives, m projections. Targets follow Zipf's law, for classes numbered
from the most frequent on.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp import mechanism_text
from crt_exp.config import unknown
from crt_exp.features import OPRF, TrigRF
from crt_exp.hints import Count, Positive, Several, at_least
from crt_exp.measure.base import Measurement
from crt_exp.mechanism import Mechanism
from crt_exp.sampled_softmax import (ClassSampler, DenseFeatures, ExactSoftmax, LogUniform, Quadratic, SampledSoftmax,
                                     TreeFeatures, Uniform, Unigram)
from crt_exp.schema import checked
from crt_exp.times import LONG, again, in_turns

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
    """Log-uniform probabilities, (V,)."""
    return LogUniform(classes).log_probability(torch.arange(classes)).exp().float()


def batch_of(head: nn.Linear, spread: float, count: int) -> tuple[Tensor, Tensor]:
    """Queries of length `spread`, each near its target's class vector, and the targets."""
    targets = LogUniform(head.out_features).draw(torch.empty(1), None, count).ids[0]
    noise = F.normalize(torch.randn(count, head.in_features), dim=-1) * NOISE
    vectors = F.normalize(head.weight.detach()[targets], dim=-1)
    return spread * F.normalize(vectors + noise, dim=-1), targets


KNOWN: dict[str, Callable[[nn.Linear], ClassSampler]] = {
    "uniform": lambda head: Uniform(head.out_features), "log_uniform": lambda head: LogUniform(head.out_features),
    "unigram": lambda head: Unigram(zipf(head.out_features) ** 0.75), "exact": ExactSoftmax, "quadratic": Quadratic}


# ---- cost


@checked("task")
class SamplingTimes(Measurement):
    """task=sampling_times: what sampled softmax costs with `classes` classes, milliseconds of each of `rounds` rounds
    in which all methods take turns. Every call is warm, as in training, where the tables are read all the time.

    draw: negatives for a batch by dense or tree, which hold the same table, or signed_tree, that of a trigonometric map
    with as many features; update_ms: of the classes drawn. step: forward, backward, the optimiser's step and the update
    of the tables, by full, adaptive (torch's), tree, dense, or the methods of task=sampled_gradients
    without features.
    """

    metric = "ms"

    def __init__(self, what: Literal["draw", "step"], methods: Several[str], classes: Count, m: Count, rounds: Count):
        self.what, self.methods, self.classes, self.m, self.rounds = what, list(methods), classes, m, rounds

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        head = head_of(self.classes)
        hidden, targets = batch_of(head, 1.0, BATCH)
        found = (self.draws if self.what == "draw" else self.steps)(head, hidden, targets)
        for name in self.methods:
            yield {"method": f"{name} m={self.m}" if name in ("dense", "tree", "signed_tree") else name,
                   **{metric: values[name] for metric, values in found.items()}}

    def draws(self, head: nn.Linear, hidden: Tensor, targets: Tensor) -> dict[str, dict[str, list[float]]]:
        tree, dense = (kind(OPRF(), self.classes, D, m=self.m) for kind in (TreeFeatures, DenseFeatures))
        tree.rebuild(head.weight, head.bias, hidden)
        dense.load_state_dict({name: value for name, value in tree.state_dict().items() if not name.startswith("tree.")}
                              | {"leaves": tree.tree.leaves}, assign=True)
        kinds = {"dense": dense, "tree": tree}
        if "signed_tree" in self.methods:
            kinds["signed_tree"] = TreeFeatures(TrigRF(), self.classes, D, m=self.m // 2)
            kinds["signed_tree"].rebuild(head.weight, head.bias, hidden)
        ids = tree.draw(hidden, targets, NEGATIVES).ids
        return {metric: in_turns({name: call(one_of(kinds, name)) for name in self.methods}, self.rounds, WARMED)
                for metric, call in [("ms", lambda kind: partial(kind.draw, hidden, targets, NEGATIVES)),
                                     ("update_ms", lambda kind: partial(kind.update, ids, head.weight, head.bias))]}

    def steps(self, head: nn.Linear, hidden: Tensor, targets: Tensor) -> dict[str, dict[str, list[float]]]:
        whole = {"full": lambda: partial(full_step, head, hidden, targets),
                 "adaptive": lambda: adaptive_step(self.classes, hidden, targets)}
        kinds = {"tree": lambda head: TreeFeatures(OPRF(), self.classes, D, m=self.m),
                 "dense": lambda head: DenseFeatures(OPRF(), self.classes, D, m=self.m), **KNOWN}

        def step(name: str) -> Callable[[], None]:
            made = one_of({**whole, **kinds}, name)
            if name in whole:
                return made()
            softmax = SampledSoftmax(made(head), head, NEGATIVES, sparse=True, rebuild_every=0)
            return partial(sampled_step, softmax, torch.optim.SGD(head.parameters(), RATE), hidden, targets)
        return {"ms": in_turns({name: step(name) for name in self.methods}, self.rounds, WARMED)}


def one_of(kinds: dict[str, Any], name: str) -> Any:
    if name not in kinds:
        raise unknown("method", name, [*kinds])
    return kinds[name]


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


@checked("task")
class SampledGradients(Measurement):
    """task=sampled_gradients: squared bias and variance of the gradient by the queries, over the squared length of the
    full softmax's gradient, for each of `methods` that draw negatives: uniform, log_uniform, unigram, exact, quadratic,
    or features, "favorpp m=64".

    length: of queries. The kernel of features is the softmax of vectors of the mean lengths; "favorpp m=64 flatter=2"
    has twice its temperature. One head, one batch and one noise a seed; the bias is from two halves of the repeats, so
    that their noise cancels.
    """

    metric = "variance"

    def __init__(self, methods: Several[str], classes: Count, length: Positive, queries: Count,
                 repeats: Annotated[int, at_least(4)]):
        self.methods, self.classes, self.length = list(methods), classes, length
        self.queries, self.repeats = queries, repeats

    def rows(self, mechanism: Mechanism, seed: int) -> Iterator[dict[str, Any]]:
        head = head_of(self.classes, seed=seed)
        hidden, targets = batch_of(head, self.length, self.queries)
        exact = gradient(lambda h: F.cross_entropy(head(h), targets, reduction="sum"), hidden)
        for name, proposal in {name: self.proposal(name, head, seed) for name in self.methods}.items():
            drawn = repeated(SampledSoftmax(proposal, head, NEGATIVES), hidden, targets, self.repeats)
            first, second = (half.mean(0) - exact for half in drawn.chunk(2))
            yield {"method": name, "bias_sq": float((first * second).sum() / exact.square().sum()),
                   "variance": float(drawn.var(0).sum() / exact.square().sum())}

    def proposal(self, text: str, head: nn.Linear, seed: int) -> ClassSampler:
        if text in KNOWN:
            return KNOWN[text](head)
        name, options = mechanism_text.read(text)
        flatter = options.pop("flatter", 1)
        made = Mechanism.parse(mechanism_text.write(name, options))
        return TreeFeatures(made.map(), *head.weight.shape, m=made.m, temperature=flatter / self.length, seed=seed)


def repeated(softmax: SampledSoftmax, hidden: Tensor, targets: Tensor, repeats: int) -> Tensor:
    """The gradient by the queries for `repeats` draws of negatives, (repeats, B, d)."""
    part = max(1, REPEATED // (hidden.numel() * NEGATIVES))
    sizes = [min(part, repeats - start) for start in range(0, repeats, part)]
    return torch.cat([gradient(lambda h, n=n: softmax.losses(h, targets.expand(n, -1)).sum(),
                               hidden.expand(n, *hidden.shape)) for n in sizes])


def gradient(loss: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    hidden = hidden.clone().requires_grad_()
    return torch.autograd.grad(loss(hidden), hidden)[0]
