"""Sampled softmax on synthetic classes: what a draw and a step cost, how far the gradient is from the full softmax's.

Legend: V classes, d dimension, B queries, k negatives, m projections. Targets follow Zipf's law, for classes numbered
from the most frequent on.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp.features import OPRF, FeatureMap, TrigRF
from crt_exp.sampled_softmax import (
    ClassSampler,
    DenseFeatures,
    ExactSoftmax,
    LogUniform,
    MultiIndex,
    Quadratic,
    SampledSoftmax,
    TreeFeatures,
    Uniform,
    Unigram,
)
from crt_exp.studies.cells import Cells, Draw, Key
from crt_exp.times import LONG, again, in_turns, milliseconds

D, BATCH, NEGATIVES = 64, 700, 40
FULL_PAIRS = 2**28  # pairs of a query and a class that the full softmax and its gradient take at once: 3 GiB
RATE = 1e-3         # of the optimisers of timed steps: it moves the classes, and nothing is learnt
GROUPS = 32         # of classes: a query's likely classes are mostly those of one
WITHIN = 0.3        # share of a class vector's square that is its own
NOISE = 1.0         # length of what is added to the unit vector of a query's target: their cosine is about 0.7
DRAWN, STEP, DRIFT, GRADIENT = "a draw", "a step", "drift of the tables", "gradient, |h| |e| = {:g}"
CODEWORDS = (32, 64)  # of each codebook of the multi-index
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


# ---- the draws of a page


def measure(name: str, sources: Sequence[str], size: Mapping[str, Any], keep: bool = False) -> Iterator[Draw]:
    """Settings: DRAWN and STEP (x: classes, units: rounds, ms and update_ms), GRADIENT of each spread (units: seeds,
    bias_sq and variance), DRIFT (arms: optimisers)."""
    cells, drawn, step = Cells(name, sources, keep), size["draws"], size["steps"]
    keys = [{"timed": DRAWN, "classes": v, "m": m, "rounds": rounds(v), "signed": m == step["m"]}
            for m, v in product(drawn["ms"], drawn["classes"])]
    keys += [{"timed": STEP, "classes": v, "m": step["m"], "rounds": rounds(v), "peers": v <= step["peers_up_to"]}
             for v in step["classes"]]
    cells.fill(keys, timed, f"{name}: draws and steps", apart=True)
    for key in keys:
        for arm, measured in cells[key].items():
            named = f"{arm} m={key['m']}" if key["timed"] == DRAWN else arm
            for metric, times in measured.items():
                for turn, ms in enumerate(times):
                    yield cells.draw(key, key["timed"], named, metric, ms, turn, key["classes"])
    yield from gradients(cells, name, size["gradients"], size["seeds"])
    drifts = {optimiser: {"optimiser": optimiser, **size["drift"]} for optimiser in OPTIMISERS}
    cells.fill([*drifts.values()], drift, f"{name}: drift", 1)
    for optimiser, key in drifts.items():
        for metric, value in cells[key].items():
            yield cells.draw(key, DRIFT, optimiser, metric, value, 0)


def gradients(cells: Cells, name: str, options: Mapping[str, Any], seeds: int) -> Iterator[Draw]:
    rest = {key: value for key, value in options.items() if key != "spreads"}
    keys: list[Key] = [{"seed": seed, "spread": spread, **rest, **more} for more in ({}, {"peers": True})
                       for spread, seed in product(options["spreads"], range(seeds))]
    cells.fill(keys, gradient_errors, f"{name}: gradients", 1)
    for key in keys:
        for arm, errors in cells[key].items():
            for metric, value in errors.items():
                yield cells.draw(key, GRADIENT.format(key["spread"]), arm, metric, value, key["seed"])


def rounds(classes: int) -> int:
    return {1_000: 25, 10_000: 15, 100_000: 7}.get(classes, 3)


def timed(timed: str, **key: Any) -> dict[str, dict[str, list[float]]]:
    """arm -> metric -> milliseconds of each round."""
    return (draw_times if timed == DRAWN else step_times)(**key)


# ---- cost


def draw_times(classes: int, m: int, rounds: int, signed: bool) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of a draw for the batch and of an update of the classes drawn, by sampler, of each round.

    Both hold the same table. signed: also the tree of a trigonometric map with as many features. Every call is warm, as
    in a step, where the tables are read all the time.
    """
    head = head_of(classes)
    hidden, targets = batch_of(head, 1.0, BATCH)
    tree, dense = (kind(OPRF(), classes, D, m=m) for kind in (TreeFeatures, DenseFeatures))
    tree.rebuild(head.weight, head.bias, hidden)
    dense.load_state_dict({name: value for name, value in tree.state_dict().items() if not name.startswith("tree.")}
                          | {"leaves": tree.tree.leaves}, assign=True)
    kinds = {"dense": dense, "tree": tree}
    if signed:
        kinds["signed tree"] = TreeFeatures(TrigRF(), classes, D, m=m // 2)
        kinds["signed tree"].rebuild(head.weight, head.bias, hidden)
    draws = in_turns({n: partial(s.draw, hidden, targets, NEGATIVES) for n, s in kinds.items()}, rounds, WARMED)
    rows = tree.draw(hidden, targets, NEGATIVES).ids
    updates = in_turns({n: partial(s.update, rows, head.weight, head.bias) for n, s in kinds.items()}, rounds, WARMED)
    return {n: {"ms": draws[n], "update_ms": updates[n]} for n in kinds}


def step_times(classes: int, m: int, rounds: int, peers: bool) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of a step by method, of each round: forward, backward, the optimiser's step and what the tables take
    to follow. peers: those that take all classes for each query, first. Every call is warm."""
    head = head_of(classes)
    hidden, targets = batch_of(head, 1.0, BATCH)
    steps = {}
    if peers:
        steps["full softmax"] = partial(full_step, head, hidden, targets)
        steps["AdaptiveLogSoftmaxWithLoss"] = adaptive_step(classes, hidden, targets)
    proposals = {"tree features": TreeFeatures(OPRF(), classes, D, m=m), "uniform": Uniform(classes),
                 "log-uniform": LogUniform(classes)}
    if peers:
        proposals["dense features"] = DenseFeatures(OPRF(), classes, D, m=m)
    for name, proposal in proposals.items():
        softmax = SampledSoftmax(proposal, head, NEGATIVES, sparse=True, rebuild_every=0)
        steps[name] = partial(sampled_step, softmax, torch.optim.SGD(head.parameters(), RATE), hidden, targets)
    return {name: {"ms": times} for name, times in in_turns(steps, rounds, WARMED).items()}


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


def proposals(head: nn.Linear, spread: float, ms: tuple[int, ...], seed: int) -> dict[str, ClassSampler]:
    """Each law by name. The kernel's temperature makes it the softmax of vectors of the mean lengths, or twice that."""
    classes, d = head.weight.shape

    def law(phi: FeatureMap, m: int, flatter: int = 1) -> TreeFeatures:
        return TreeFeatures(phi, classes, d, m=m, temperature=flatter / spread, seed=seed)

    made = {"uniform": Uniform(classes), "log-uniform": LogUniform(classes), "unigram": Unigram(zipf(classes) ** 0.75),
            "exact softmax": ExactSoftmax(head)}
    made |= {f"FAVOR++, m = {m}": law(OPRF(), m) for m in ms}
    made |= {f"FAVOR++, flatter, m = {m}": law(OPRF(), m, 2) for m in ms}
    return made | {f"trigonometric, m = {m // 2}": law(TrigRF(), m // 2) for m in ms}


def peer_laws(head: nn.Linear, seed: int) -> dict[str, ClassSampler]:
    """Those of other papers."""
    indices = {f"MIDX, {K} codewords": MultiIndex(*head.weight.shape, codewords=K, seed=seed) for K in CODEWORDS}
    return {"quadratic kernel": Quadratic(head), **indices}


def gradient_errors(seed: int, spread: float, classes: int, ms: list[int], queries: int, repeats: int,
                    peers: bool = False) -> dict[str, dict[str, float]]:
    """Of the gradient by the queries, per law: squared bias and variance, over the squared length of the full softmax's
    gradient. One head, one batch and one noise; the bias from two halves of the repeats, so that their noise cancels.
    peers: of the laws of other papers alone.
    """
    head = head_of(classes, seed=seed)
    hidden, targets = batch_of(head, spread, queries)
    exact = gradient(lambda h: F.cross_entropy(head(h), targets, reduction="sum"), hidden)
    errors = {}
    laws = peer_laws(head, seed) if peers else proposals(head, spread, tuple(ms), seed)
    for name, proposal in laws.items():
        softmax = SampledSoftmax(proposal, head, NEGATIVES)
        drawn = repeated(softmax, hidden, targets, repeats)
        first, second = (half.mean(0) - exact for half in drawn.chunk(2))
        errors[name] = {"bias_sq": float((first * second).sum() / exact.square().sum()),
                       "variance": float(drawn.var(0).sum() / exact.square().sum())}
    return errors


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

OPTIMISERS = {"SGD": (torch.optim.SGD, {"lr": 1.0}), "Adam": (torch.optim.Adam, {"lr": 1e-3}),
              "SGD, momentum 0.9": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})}


def drift(optimiser: str, classes: int, m: int, steps: int) -> dict[str, float]:
    """How far the tables are behind after steps of a batch each: `vectors` and `sums` as of `TreeFeatures.drift`,
    `vectors_unfollowed` where they are not updated, `rebuild_ms` and `update_ms` what following takes."""
    head = head_of(classes)
    softmax = SampledSoftmax(OPRF(), head, NEGATIVES, m=m, rebuild_every=0)
    kind, options = OPTIMISERS[optimiser]
    stepper, updates = kind(head.parameters(), **options), []
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
    return {**behind, "vectors_unfollowed": float((start - now).norm() / now.norm()),
            "rebuild_ms": rebuild, "update_ms": statistics.median(updates)}
