"""Sampled softmax: time, gradient bias and variance, class distributions.

Synthetic classes: targets follow Zipf's law, and class 0 is the most frequent.

Class distributions (HRF 4.2): queries x are the outputs of a run of task=ptb at the words of the test split, and keys y
are the embeddings of all words. Both are divided by the square root of the temperature, so that the kernel is exp(x.y).
Distances compare distributions over class numbers: W1 = sum_c |F_c - F^_c| and KS = max_c |F_c - F^_c|. The paper does
not define its one-dimensional distributions. Negative estimates are set to 0, then rows are normalised.

Notation: V classes, d dimension, B queries of a batch or block, k negatives, m projections, n queries x.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from crt_exp.experiments.data.text import IGNORED
from crt_exp.experiments.measure import Measurement, Records, TensorPair, seeded
from crt_exp.experiments.measure.times import Call, in_turns, time_after_warmup
from crt_exp.experiments.models import lstm
from crt_exp.experiments.runner.configuration import load_task
from crt_exp.experiments.runner.run import read_records
from crt_exp.experiments.tasks.base import Reader, task_class
from crt_exp.features import OPRF, FeatureMap, Statistics
from crt_exp.features.base import Params
from crt_exp.mechanism import Mechanism
from crt_exp.registry import unknown
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
from crt_exp.samplers.noise import Nested
from crt_exp.validation import Count, FileName, Positive, Several, join_words, split_words

D = 64
BATCH = 700
NEGATIVES = 40
FULL_PAIRS = 2**28  # maximum query-class pairs of the full softmax and its gradient at once: 3 GiB
RATE = 1e-3  # learning rate of timed training steps
GROUPS = 32  # groups of classes; the likely classes of a query are mostly in one group
WITHIN = 0.3  # share of the squared norm of a class vector within its group
REPEATED = 2**23  # maximum values of class vectors gathered at once
# parameters are fitted to every FITTED-th query
SPLIT = "test"
FITTED = 16
Estimate = Callable[[Tensor], Tensor]  # from queries (B, d) to values of the classes (B, V)
BLOCK = 64  # queries of a block, so that a block fits in the cache of a core


def head_of(classes: int, seed: int = 0) -> nn.Linear:
    """Create an output layer with grouped class vectors and a Zipf bias.

    Class vectors have norms around 1, near the centre of their group.
    """
    torch.manual_seed(seed)
    # parameters are replaced below; nn.Linear's initialisation is slow for many classes
    head = nn.Linear(1, 1)
    vectors = torch.randn(classes, D).mul_((WITHIN / D) ** 0.5)
    centres = torch.randn(GROUPS, D).mul_(((1 - WITHIN) / D) ** 0.5)
    for group, centre in enumerate(centres):
        vectors[group::GROUPS] += centre
    head.weight = nn.Parameter(vectors)
    head.bias = nn.Parameter(zipf(classes).log())
    head.in_features = D
    head.out_features = classes
    return head


def zipf(classes: int) -> Tensor:
    """Log-uniform probabilities (V,)."""
    log_probability = LogUniform(classes).log_probability(torch.arange(classes))
    return log_probability.exp().float()


def batch_of(head: nn.Linear, length: float, count: int) -> TensorPair:
    """Sample queries of norm `length` and their targets.

    The cosine between a query and its target's class vector is about 0.7.
    """
    targets = LogUniform(head.out_features).at(torch.rand(count, dtype=torch.float64))
    noise = F.normalize(torch.randn(count, head.in_features), dim=-1)
    classes = F.normalize(head.weight.detach()[targets], dim=-1)
    return length * F.normalize(classes + noise, dim=-1), targets


KNOWN: dict[str, Callable[[nn.Linear], ClassSampler]] = {
    "uniform": lambda head: Uniform(head.out_features),
    "log_uniform": lambda head: LogUniform(head.out_features),
    "unigram": lambda head: Unigram(zipf(head.out_features) ** 0.75),
    "exact": ExactSoftmax,
    "quadratic": Quadratic,
}
FEATURES = {"tree": TreeFeatures, "dense": DenseFeatures}


# ---- cost


@task_class
class SamplingTimes(Measurement):
    """task=sampling_times: time of sampled softmax, ms per round; methods take turns.

    Calls are timed after a warm-up, as in training.

    Args:
        what: "draw" (sample negatives for a batch) or "step" (forward, backward, optimiser and update of the tables).
        methods: "tree" or "dense" (FAVOR++ with m features), samplers of task=sampled_gradients without features, and,
            for steps, "full" and "adaptive" (torch's).
    """

    metric = "ms"

    what: Literal["draw", "step"]
    methods: Several[str]
    classes: Count
    m: Count
    rounds: Count

    def rows(self, mechanism: Mechanism, seed: int) -> Records:
        head = head_of(self.classes)
        hidden, targets = batch_of(head, 1.0, BATCH)
        calls = {name: self.call(name, head, hidden, targets) for name in self.methods}
        times = in_turns(calls, self.rounds, time_after_warmup, warm=1)
        for name in self.methods:
            label = f"{name} m={self.m}" if name in FEATURES else name
            yield {"method": label, "ms": times[name]}

    def call(self, name: str, head: nn.Linear, hidden: Tensor, targets: Tensor) -> Call:
        whole = {"full": full_step, "adaptive": adaptive_step} if self.what == "step" else {}
        if name in whole:
            return whole[name](head, hidden, targets)
        if name in FEATURES:
            sampler = FEATURES[name](OPRF(), self.classes, D, m=self.m)
        elif name in KNOWN:
            sampler = KNOWN[name](head)
        else:
            raise unknown("method", name, [*whole, *FEATURES, *KNOWN])
        if self.what == "draw":
            sampler.rebuild(head.weight, head.bias, hidden)
            return partial(sampler.draw, hidden, targets, NEGATIVES)
        softmax = SampledSoftmax(sampler, head, NEGATIVES, sparse=True, rebuild_every=0)

        def loss() -> Tensor:
            return softmax(hidden.detach().requires_grad_(), targets)

        return training_step(head, loss, softmax.update)


def training_step(model: nn.Module, loss: Callable[[], Tensor], update: Call = int) -> Call:
    optimiser = torch.optim.SGD(model.parameters(), RATE)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        loss().backward()
        optimiser.step()
        update()

    return step


def full_step(head: nn.Linear, hidden: Tensor, targets: Tensor) -> Call:
    optimiser = torch.optim.SGD(head.parameters(), RATE)
    size = max(1, FULL_PAIRS // head.out_features)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        for queries, labels in zip(hidden.split(size), targets.split(size)):
            logits = head(queries.detach().requires_grad_())
            loss = F.cross_entropy(logits, labels, reduction="sum") / len(hidden)
            loss.backward()
        optimiser.step()
        # the other methods share the head and need no gradients on it
        optimiser.zero_grad(set_to_none=True)

    return step


def adaptive_step(head: nn.Linear, hidden: Tensor, targets: Tensor) -> Call:
    """Training step of torch's adaptive softmax, with clusters of 2%, 18% and 80%."""
    classes = head.out_features
    model = nn.AdaptiveLogSoftmaxWithLoss(D, classes, [classes // 50, classes // 5])

    def loss() -> Tensor:
        return model(hidden.detach().requires_grad_(), targets).loss

    return training_step(model, loss)


# ---- gradients


@task_class
class SampledGradients(Measurement):
    """task=sampled_gradients: bias and variance of the gradient of sampled softmax.

    The gradient is that with respect to the queries. Squared bias and variance are relative to the squared norm of the
    full softmax's gradient. The bias multiplies two halves of the repeats, which removes the variance. A seed has one
    head and one batch.

    Args:
        methods: Samplers of negatives: uniform, log_uniform, unigram, exact, quadratic, or features ("favorpp m=64").
            The kernel of features is the softmax at the mean norms; "favorpp m=64 flatter=2" doubles the temperature.
        length: Norm of the queries.
        repeats: Sets of negatives.
    """

    metric = "variance"

    methods: Several[str]
    classes: Count
    length: Positive
    queries: Count
    repeats: Annotated[int, Field(ge=4)]

    def rows(self, mechanism: Mechanism, seed: int) -> Records:
        head = head_of(self.classes, seed=seed)
        hidden, targets = batch_of(head, self.length, self.queries)

        def full_loss(queries: Tensor) -> Tensor:
            return F.cross_entropy(head(queries), targets, reduction="sum")

        exact = gradient(full_loss, hidden)
        norm = exact.square().sum()
        samplers = {name: self.sampler(name, head, seed) for name in self.methods}
        for name, sampler in samplers.items():
            softmax = SampledSoftmax(sampler, head, NEGATIVES)
            gradients = sampled_gradients(softmax, hidden, targets, self.repeats)
            first, second = gradients.chunk(2)
            bias = first.mean(0) - exact
            bias_sq = (bias * (second.mean(0) - exact)).sum()
            yield {
                "method": name,
                "bias_sq": float(bias_sq / norm),
                "variance": float(gradients.var(0).sum() / norm),
            }

    def sampler(self, text: str, head: nn.Linear, seed: int) -> ClassSampler:
        if text in KNOWN:
            return KNOWN[text](head)
        name, options = split_words(text)
        temperature = options.pop("flatter", 1) / self.length
        mechanism = Mechanism.parse(join_words(name, options))
        phi = mechanism.map()
        options = {"m": mechanism.m, "temperature": temperature, "seed": seed}
        return TreeFeatures(phi, *head.weight.shape, **options)


def sampled_gradients(
    softmax: SampledSoftmax, hidden: Tensor, targets: Tensor, repeats: int
) -> Tensor:
    """Return gradients (repeats, B, d) with respect to the queries, one per sample."""
    part = max(1, REPEATED // (hidden.numel() * NEGATIVES))
    gradients = []
    for start in range(0, repeats, part):
        count = min(part, repeats - start)
        labels = targets.expand(count, -1)

        def loss(queries: Tensor, labels: Tensor = labels) -> Tensor:
            return softmax.losses(queries, labels).sum()

        gradients.append(gradient(loss, hidden.expand(count, *hidden.shape)))
    return torch.cat(gradients)


def gradient(loss: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    hidden = hidden.clone().requires_grad_()
    return torch.autograd.grad(loss(hidden), hidden)[0]


# ---- distributions over the words of a language model


@task_class
class ClassDistributions(Measurement):
    """task=class_distributions: distance between a softmax and its estimate.

    HRF Figures 3 and 8, Tables 4 and 5. One row per m. With attention=exact, rows have the loss of the model, and the
    distances of the uniform distribution and of word frequencies.

    Args:
        start: Folder of a run of task=ptb.
        every: Use every n-th word of the test split.
        ms: Numbers of projections; hybrids with n coefficient features use m / n per base.
    """

    metric = "ks"

    start: FileName
    every: Count
    ms: Several[Count]

    def rows(self, mechanism: Mechanism, seed: int) -> Records:
        task, x, y = vectors_of(self.start)
        queries = x[:: self.every].contiguous()
        stats = Statistics.of(x[::FITTED].contiguous(), y)
        if mechanism.estimates:
            phi = mechanism.map("softmax")
            coefficients = mechanism.parts["features"].content.get("n", 1)
            for m in self.ms:
                projected = mechanism.with_projections(m // coefficients)
                noise = projected.noise(y.shape[1], seeded(seed))
                estimate = estimator(phi, noise, phi.fit(stats), y)
                yield {"m": m, **distances(queries, y, estimate)}
            return
        last = read_records(Path(self.start).expanduser() / "metrics.jsonl")[-1]
        yield {"loss": last["loss"], "unigram_loss": last["unigram_loss"]}
        distributions = {
            "uniform": torch.ones(len(y)),
            "unigram": torch.from_numpy(task.unigram).float(),
        }
        for name, shares in distributions.items():
            record = distances(queries, y, lambda x, shares=shares: shares.expand(len(x), -1))
            for m in self.ms:
                yield {"method": name, "m": m, **record}


@lru_cache(maxsize=1)
def vectors_of(start: str) -> tuple[Any, Tensor, Tensor]:
    """Return the task of a run, x (n, d) at the words of the test split, and y (V, d)."""
    task = load_task(start)
    saved = lstm.load(start, "the model")
    scale = saved.temperature**0.5
    x = outputs(saved.body, task) / scale
    y = saved.body.embedding.weight.detach() / scale
    return task, x, y


@torch.no_grad()
def outputs(body: lstm.WordLSTM, task: Any) -> Tensor:
    """Return the outputs (n, d), float32, in the order of the text."""
    state = None
    parts = []
    labelled = []
    for batch in Reader(task).batches(SPLIT):
        if batch["first"]:
            state = None
        part, state = body(batch["tokens"], state)
        parts.append(part)
        labelled.append(batch["labels"] != IGNORED)
    return torch.cat(parts, 1)[torch.cat(labelled, 1)]


def estimator(phi: FeatureMap, noise: Nested, params: Params, keys: Tensor) -> Estimate:
    """Return a function queries (B, d) -> (B, V), proportional to phi_q(x).phi_k(y_c).

    To avoid overflow, key features are divided by the maximum of their column, and each row lacks a common factor.
    keys: (V, d).
    """
    bound = phi.bind(noise, params)
    values, logs = bound.phi_k(keys).dense()
    # finite for empty clusters
    lowest = torch.finfo(logs.dtype).min
    largest = logs.amax(-2, keepdim=True).clamp(min=lowest)
    table = (values * (logs - largest).exp()).mT

    def estimate(queries: Tensor) -> Tensor:
        values, logs = bound.phi_q(queries).dense()
        logs = logs + largest
        relative = logs - logs.amax(-1, keepdim=True)
        return (values * relative.exp()) @ table

    return estimate


def distances(
    queries: Tensor, keys: Tensor, estimate: Estimate, block: int = BLOCK
) -> dict[str, float]:
    """Return mean W1 and KS distances, and the share of negative estimates.

    Compares softmax(x . y_c) with estimate(queries (B, d)) (B, V). Raises ValueError if an estimate is not finite, or
    if a query has no positive estimate.
    """
    sums = torch.zeros(3, dtype=torch.float64)
    for part in queries.split(block):
        exact = torch.softmax(part @ keys.T, -1)
        estimated = estimate(part)
        positive = estimated.clamp(min=0)
        total = positive.sum(-1, keepdim=True)
        finite = bool(estimated.isfinite().all())
        if not (finite and bool((total > 0).all())):
            raise ValueError(
                "softmax estimates: expected finite values and at least one positive per query"
            )
        difference = (exact - positive / total).cumsum(-1)
        difference = difference[:, :-1].abs()
        sums[0] += difference.sum(dtype=torch.float64)
        sums[1] += difference.amax(-1).sum(dtype=torch.float64)
        sums[2] += (estimated < 0).sum() / len(keys)
    w1, ks, negative = (sums / len(queries)).tolist()
    return {"w1": w1, "ks": ks, "negative": negative}
