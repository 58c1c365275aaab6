"""Base class of samplers from a random-feature estimate of the softmax.

The kernel is exp(h.e / (|h| |e| T)) e^b with temperature T and class bias b. Zero vectors stay zero: their kernel with
every query is e^b.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp.features.base import Composite, FeatureMap, Params, distinct
from crt_exp.features.exponential import PositiveExponential
from crt_exp.features.other_kernels import Sum
from crt_exp.features.statistics import Statistics
from crt_exp.mechanism import Mechanism
from crt_exp.sampled_softmax.base import (
    ClassSampler,
    Drawn,
    blocks,
    check_classes,
    check_finite,
    check_queries,
    check_rows,
)
from crt_exp.samplers import DenseNoise
from crt_exp.samplers.noise import Nested, leaves, map_leaves
from crt_exp.validation import Positive, check

DEFENSIVE = 0.05  # share of the uniform distribution if estimates may be negative
MAX_FIT_VECTORS = 2**11  # largest number of queries and of classes in the fit, evenly spaced
BLOCK = 2**22  # features per block of classes
HIGHEST = 20.0  # largest log of feature / constant; sums over classes lose precision above it
LEAST = 1e-30  # least positive feature, so that no class has probability 0 by underflow


class FeatureDistribution(ClassSampler):
    """Base class: q_c = (1 - defensive) q'_c + defensive / V.

    q' estimates the softmax by phi_q(h / |h|) . phi_k(e_c / |e_c|) e^{b_c}. `defensive` is 0 for positive features,
    else 0.05.

    Args:
        proposal: a feature map, a Mechanism or its name.
        m: number of projections; default as on the command line.
        temperature: T in the kernel exp(cos(h, e_c) / T). T = 1 / (|h| |e|) is the softmax. Larger T gives less
            variance of the estimate.
    """

    looks_at_classes = True
    made: Tensor

    def __init__(self, proposal: FeatureMap | Mechanism | str, classes: int, d: int, **options):
        super().__init__(classes)
        self.d = d
        self.register_buffer("made", torch.zeros((), dtype=torch.bool))
        self.features = ClassFeatures(proposal, self.classes, d, **options)
        self.defensive = 0.0 if self.features.positive else DEFENSIVE
        self._queries: Tensor | None = None  # of the last batch, for fitting

    # ---- implemented by subclasses

    @abstractmethod
    def _table(self) -> Tensor:
        """Return the features of all classes (V, M), in place."""

    def _finish_rebuild(self) -> None:
        """Compute what else depends on the table, after all its rows have changed."""

    def _update_rows(self, rows: Tensor, features: Tensor) -> None:
        """Replace sorted, distinct rows of the table, and what depends on them."""
        self._table()[rows] = features

    @abstractmethod
    def _draw(self, hidden: Tensor, targets: Tensor, uniform: Tensor) -> Drawn:
        """Sample from q' as `draw`; `uniform` (B, k) holds classes, or -1 for sampling."""

    # ---- shared methods

    @torch.no_grad()
    def draw(self, hidden: Tensor, targets: Tensor, k: int) -> Drawn:
        if not self.built:
            raise ValueError("tables are not built: call rebuild(weight) first")
        if hidden.ndim != 2 or hidden.shape[1] != self.d:
            raise ValueError(f"queries: shape {tuple(hidden.shape)}, expected (B, {self.d})")
        check_queries(hidden)
        self._queries = hidden.detach()
        ids, log_q = self._draw(hidden, targets, self._uniform(targets, k))
        if self.defensive:
            flat = torch.full_like(log_q, math.log(self.defensive / (self.classes - 1)))
            log_q = torch.logaddexp(log_q + math.log1p(-self.defensive), flat)
        return Drawn(ids, log_q)

    @property
    def built(self) -> bool:
        return bool(self.made)

    @torch.no_grad()
    def rebuild(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> None:
        check_classes(weight, bias, self.classes, self.d)
        check_finite(weight, bias)
        if hidden is None:
            hidden = self._queries
        self.features.fit(weight, bias, hidden)
        store = self._table().__setitem__
        if not self._store(weight, bias, store):
            self.features.fit_constants(weight, bias)
            self._store(weight, bias, store)
        self._finish_rebuild()
        self.made.fill_(True)

    def _store(
        self, weight: Tensor, bias: Tensor | None, store: Callable[[slice, Tensor], None]
    ) -> bool:
        """Store the features of blocks of classes; False if one exceeds the constants."""
        start = 0
        for vectors, biases in blocks(self.features.block, weight, bias):
            features = self.features.of_classes(vectors, biases)
            if features is None:
                return False
            store(slice(start, start + len(features)), features)
            start += len(features)
        return True

    @torch.no_grad()
    def update(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        rows = check_rows(rows, self.classes)
        check_classes(weight, bias, self.classes, self.d)
        if not len(rows) or not self.built:
            return
        vectors = weight.index_select(0, rows)
        biases = None if bias is None else bias[rows]
        check_finite(vectors, biases, rows)

        def store(some: slice, features: Tensor) -> None:
            self._update_rows(rows[some], features)

        if not self._store(vectors, biases, store):
            self.rebuild(weight, bias)

    def _uniform(self, targets: Tensor, k: int) -> Tensor:
        """Sample uniform classes for a share `defensive` of the entries, else -1."""
        shape = (len(targets), k)
        if not self.defensive:
            return targets.new_full((1, 1), -1).expand(shape)
        ids = uniform_others(targets[:, None], shape, self.classes)
        chosen = torch.rand(shape, device=targets.device) < self.defensive
        return torch.where(chosen, ids, -1)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        self.features.check_saved(state_dict.get(f"{prefix}features._extra_state"), prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        return f"{self.features.described}, defensive = {self.defensive:g}"


def _store_vectors(vectors: Tensor, table: Tensor, count: Tensor) -> None:
    """Store at most len(table) evenly spaced vectors, and their number."""
    vectors = vectors[:: spacing(len(vectors), len(table))]
    table[: len(vectors)] = vectors
    count.fill_(len(vectors))


class ClassFeatures(nn.Module):
    """Feature map with its projections, parameters and constants, saved as buffers.

    Class features are divided by one constant per feature, about the largest value at the last `fit`. Query features
    are multiplied by it. This avoids overflow and leaves products unchanged.
    """

    x_fitted_to: Tensor
    y_fitted_to: Tensor
    x_count: Tensor
    y_count: Tensor
    constants: Tensor
    stamp: Tensor

    def __init__(
        self,
        proposal: FeatureMap | Mechanism | str,
        classes: int,
        d: int,
        *,
        m: int | None = None,
        temperature: float = 1.0,
        seed: int = 0,
    ):
        super().__init__()
        mechanism = as_mechanism(proposal, m, seed)
        check("temperature", temperature, Positive)
        self.phi = proposal if isinstance(proposal, FeatureMap) else mechanism.map("softmax")
        self.scale = float(temperature) ** -0.5
        assert mechanism.sampler is not None and mechanism.m is not None
        features = mechanism.parts["features"].name
        names = f"{features} x {mechanism.parts['sampler'].name}, m = {mechanism.m}"
        self.described = (
            f"{names}, map {self.phi!r}, d = {d}, V = {classes}, temperature = {temperature:g}"
        )
        self.projections = self.phi.projections(mechanism.m)
        generator = torch.Generator().manual_seed(seed)
        self.gaussian: dict[str, bool] = {}  # of the projections in each buffer
        for request in distinct(self.projections):
            noise = mechanism.sampler(request.m, d, generator)
            self.gaussian[request.buffer] = noise.gaussian
            self.register_buffer(request.buffer, noise.rows().float().contiguous())
        self.width = self.phi.width(mechanism.m)
        self.block = max(1, BLOCK // self.width)  # classes per block of a rebuild
        self.register_buffer("constants", torch.zeros(self.width, dtype=torch.float64))
        # vectors for fitting the parameters, and their number
        for side in "xy":
            self.register_buffer(f"{side}_fitted_to", torch.zeros(MAX_FIT_VECTORS, d))
            self.register_buffer(f"{side}_count", torch.zeros((), dtype=torch.long))
        # checksum of the arguments of `fit`
        self.register_buffer("stamp", torch.zeros((), dtype=torch.float64))
        self.positive = is_positive(self.phi)  # for all vectors
        self._cached: tuple[tuple, Any] = ((), None)

    def fit(self, weight: Tensor, bias: Tensor | None, hidden: Tensor | None) -> None:
        """Fit parameters and constants to class vectors (V, d) and queries (B, d).

        All values must be finite. At most MAX_FIT_VECTORS vectors per side are used.
        """
        step = spacing(len(weight), MAX_FIT_VECTORS)
        weight = weight[::step]
        bias = None if bias is None else bias[::step]
        keys = self._unit(weight)
        queries = torch.cat([keys, -keys]) if hidden is None else self._unit(hidden)
        _store_vectors(queries, self.x_fitted_to, self.x_count)
        _store_vectors(keys, self.y_fitted_to, self.y_count)
        self.stamp.copy_(queries.double().abs().sum() + 2 * keys.double().abs().sum())
        self.constants.copy_(self._largest(weight, bias))

    def fit_constants(self, weight: Tensor, bias: Tensor | None) -> None:
        """Compute the constants from all classes, if some exceed those of `fit`."""
        largest = []
        for vectors, biases in blocks(self.block, weight, bias):
            largest.append(self._largest(vectors, biases))
        self.constants.copy_(torch.stack(largest).amax(0))

    def _largest(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._of_classes(weight, bias)[1].amax(0).double()

    def of_classes(self, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return phi_k / constants (r, M), float32, for vectors (r, d) and biases (r,).

        The vectors must be finite. The result is None if a feature exceeds its constant by a factor above e^HIGHEST;
        the caller then rebuilds the tables.
        """
        value, log = self._of_classes(weight, bias)
        log = log - self.constants.to(log.dtype)
        if float(log.max()) > HIGHEST:
            return None
        return log.exp_().clamp_(min=LEAST) if self.positive else log.exp_().mul_(value)

    def of_queries(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return signs or values (B, M), and log|phi_q| + log constants (B, M), float64."""
        features = self.phi.phi_q(self._unit(hidden), *self._noise_and_params())
        value, log = features.expanded()
        return value, log.double() + self.constants

    def of_signed_queries(self, hidden: Tensor) -> Tensor:
        """Return query features (B, M), float32, up to a positive factor per row."""
        value, log_a = self.of_queries(hidden)
        return (value * (log_a - log_a.amax(-1, keepdim=True)).exp()).float()

    def _noise_and_params(self) -> tuple[Nested, Params]:
        """Return projections and parameters, cached until a buffer changes.

        `stamp` detects changes by DistributedDataParallel, which do not increase tensor versions.
        """
        versions = [(t.data_ptr(), t._version) for t in self.buffers()]
        key = (float(self.stamp), *versions)
        if self._cached[0] != key:
            noises = {}
            for name, gaussian in self.gaussian.items():
                noises[name] = DenseNoise(self.get_buffer(name), gaussian)
            x = self.x_fitted_to[: int(self.x_count)]
            y = self.y_fitted_to[: int(self.y_count)]
            params = self.phi.fit(Statistics.of(x, y))
            noise = map_leaves(lambda request: noises[request.buffer], self.projections)
            self._cached = (key, (noise, params))
        return self._cached[1]

    def _unit(self, vectors: Tensor) -> Tensor:
        return F.normalize(vectors.detach().float(), dim=-1) * self.scale

    def _of_classes(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        features = self.phi.phi_k(self._unit(weight), *self._noise_and_params())
        value, log = features.expanded()
        if bias is not None:
            log = log + bias.detach().float()[:, None]
        return value, log

    def get_extra_state(self) -> Tensor:
        """Return the description as a byte tensor, since weight files hold only tensors."""
        return torch.frombuffer(bytearray(self.described.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Do nothing; `check_saved` compares the state before loading."""

    def check_saved(self, saved: Tensor | None, prefix: str) -> None:
        """Check the description of saved tables.

        Raises:
            ValueError: map, m, d, temperature or number of classes differ.
        """
        if saved is None:
            return
        description = bytes(saved.tolist()).decode()
        if description != self.described:
            raise ValueError(
                f"saved tables: {description}, expected {self.described}; use equal options, or call rebuild"
            )


def as_mechanism(proposal: FeatureMap | Mechanism | str, m: int | None, seed: int) -> Mechanism:
    """Return the mechanism of a name or feature map, or the mechanism itself.

    Raises:
        ValueError: the mechanism has no feature map that estimates a kernel.
    """
    if not isinstance(proposal, Mechanism):
        mechanism = Mechanism.parse(proposal, m=m, seed=seed)
    elif m is None:
        mechanism = proposal
    else:
        raise ValueError(f"m={m}: expected None beside a Mechanism; set it in Mechanism.of")
    if not mechanism.estimates:
        raise ValueError(
            f"proposal={mechanism.name}: has no random features; use one such as favorpp"
        )
    return mechanism


def is_positive(phi: FeatureMap) -> bool:
    """Whether all features are positive for all vectors.

    This is False for discrete maps with a shift, whose sign changes below the shift.
    """
    if isinstance(phi, Sum) and min(phi.weights) <= 0:
        return False
    if isinstance(phi, Composite):
        return all(map(is_positive, leaves(phi.parts)))
    return isinstance(phi, PositiveExponential)


def uniform_others(targets: Tensor, shape: Sequence[int], classes: int) -> Tensor:
    """Sample classes uniformly, without the targets (B, 1)."""
    others = torch.randint(classes - 1, shape, device=targets.device)
    return others + (others >= targets)


def spacing(count: int, most: int) -> int:
    """Return the stride that takes at most `most` of `count` items."""
    return -(-count // most)
