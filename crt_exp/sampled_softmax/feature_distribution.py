"""What the distributions in proportion to a random-feature estimate of the softmax share.

The kernel is exp(h.e / (|h| |e| T)) e^b, with T the temperature and b the bias of the class. Vectors of length zero
stay zero: their kernel is e^b with every query.
"""

import math
from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp.features.base import ONE, FeatureMap, Params, Projections, distinct
from crt_exp.features.exponential import PositiveExponential
from crt_exp.features.other_kernels import Product, Sum
from crt_exp.features.statistics import Statistics
from crt_exp.mechanism import Mechanism
from crt_exp.sampled_softmax.base import ClassSampler, Drawn, check_classes, check_finite, check_queries, check_rows
from crt_exp.samplers import DenseNoise
from crt_exp.samplers.noise import Nested, mapped

UPDATED = 2**12    # classes of an update at once: what lies between then stays in the cache
DEFENSIVE = 0.05   # share of the uniform distribution, mixed with a signed estimate that may not be positive
FITTED_TO = 2**11  # queries and classes at most, evenly spaced: more would hardly change the parameters
BLOCK = 2**22      # features of a block of classes, where all are made
HIGHEST = 20.0     # log of a feature over its constant: beyond, the sums above would lose the others to rounding
LEAST = 1e-30      # of a positive feature: what would underflow keeps a probability


class FeatureDistribution(ClassSampler):
    """q_c = (1 - defensive) q'_c + defensive / V, with q' made of phi_q(h / |h|) . phi_k(e_c / |e_c|) e^{b_c}.

    proposal: a feature map, a Mechanism or the name of one. m, sampler: of the mechanism (default: those of the command
    line). temperature T: the kernel is exp(cos(h, e_c) / T); at 1 / (|h| |e|) it is the softmax itself, and the larger
    T, the less the estimate varies. defensive: by default 0 for maps whose features are positive and 0.05 for others.
    """

    looks_at_classes = True

    def __init__(self, proposal: FeatureMap | Mechanism | str, classes: int, d: int, *, m: int | None = None,
                 sampler=None, temperature: float = 1.0, defensive: float | None = None, seed: int = 0):
        super().__init__(classes)
        self.d = d
        self.register_buffer("made", torch.zeros((), dtype=torch.bool))
        self.features = ClassFeatures(proposal, self.classes, d, m, sampler, temperature, seed)
        least = 0.0 if self.features.positive else DEFENSIVE
        self.defensive = least if defensive is None else float(defensive)
        if not 0 <= self.defensive < 1 or self.defensive == 0 < least:
            raise ValueError(f"defensive = {defensive}: a share of at least 0 and below 1, and above 0 for a map whose "
                             "features may be negative: classes of no probability would bias the normaliser")
        self._queries: Tensor | None = None  # of the last draw, to fit parameters to

    # ---- what the distributions do in their own ways

    @abstractmethod
    def _restored(self, features: Tensor, rows: slice) -> None:
        """Puts features (r, M) of the classes `rows` in place, while all are built again."""

    def _completed(self) -> None:
        """After the last of these."""

    @abstractmethod
    def _changed(self, rows: Tensor, features: Tensor) -> None:
        """Puts features (r, M) of sorted, distinct classes in place."""

    @abstractmethod
    def _draw(self, hidden: Tensor, targets: Tensor | None, uniform: Tensor) -> Drawn:
        """As `draw`, from q'. uniform (B, k) holds classes that stand for draws, and -1 where there is none."""

    @abstractmethod
    def _log_q(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Log probabilities of ids (B, k) in q' over all classes; -inf where the estimate is not positive."""

    # ---- what they share

    @torch.no_grad()
    def draw(self, hidden: Tensor, targets: Tensor | None, k: int) -> Drawn:
        self._check(hidden)
        self._queries = hidden.detach()
        ids, log_q, target_log_q = self._draw(hidden, targets, self._uniform(hidden, targets, k))
        if targets is None:
            return Drawn(ids, self._mixed(log_q, self.classes), None)
        return Drawn(ids, self._mixed(log_q, self.classes - 1), self._mixed(target_log_q, self.classes))

    @torch.no_grad()
    def log_q(self, hidden: Tensor, ids: Tensor) -> Tensor:
        self._check(hidden)
        return self._mixed(self._log_q(hidden, ids), self.classes)

    def _check(self, hidden: Tensor) -> None:
        if not self.built:
            raise ValueError("the tables of this sampler were never made: call rebuild(weight) before the first draw")
        if hidden.ndim != 2 or hidden.shape[1] != self.d:
            raise ValueError(f"queries of shape {tuple(hidden.shape)}: this sampler takes (B, {self.d})")
        check_queries(hidden)

    @property
    def built(self) -> bool:
        return bool(self.made)

    @torch.no_grad()
    def rebuild(self, weight: Tensor, bias: Tensor | None = None, hidden: Tensor | None = None) -> None:
        check_classes(weight, bias, self.classes, self.d)
        check_finite(weight, bias, None)
        self.features.fit(weight, bias, self._queries if hidden is None else hidden)
        if not self._all_restored(weight, bias):
            self.features.fit_constants(weight, bias)
            self._all_restored(weight, bias)
        self._completed()
        self.made.fill_(True)

    def _all_restored(self, weight: Tensor, bias: Tensor | None) -> bool:
        """Puts the features of all classes in place. False where one of them outgrew the constants."""
        for rows in self.features.blocks():
            features = self.features.of_classes(weight[rows], _part(bias, rows))
            if features is None:
                return False
            self._restored(features, rows)
        return True

    @torch.no_grad()
    def update(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        rows = check_rows(rows, self.classes)
        check_classes(weight, bias, self.classes, self.d)
        if not len(rows) or not self.built:
            return
        vectors, biases = weight.index_select(0, rows), None if bias is None else bias[rows]
        check_finite(vectors, biases, rows)
        if not self._update(rows, vectors, biases):
            self.rebuild(weight, bias)

    def _update(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Takes over the vectors (r, d) of sorted, distinct classes; False where one outgrew the constants."""
        for start in range(0, len(rows), UPDATED):
            some = slice(start, start + UPDATED)
            features = self.features.of_classes(weight[some], _part(bias, some))
            if features is None:
                return False
            self._changed(rows[some], features)
        return True

    def _uniform(self, hidden: Tensor, targets: Tensor | None, k: int) -> Tensor:
        """Uniform classes without the targets for a share `defensive` of the draws, -1 for the others."""
        shape, device = (len(hidden), k), hidden.device
        if not self.defensive:
            return torch.full((1, 1), -1, device=device).expand(shape)
        ids = torch.randint(self.classes - (targets is not None), shape, device=device)
        ids = ids if targets is None else ids + (ids >= targets[:, None])
        return torch.where(torch.rand(shape, device=device) < self.defensive, ids, -1)

    def _mixed(self, log_q: Tensor, classes: int) -> Tensor:
        if not self.defensive:
            return log_q
        flat = torch.full_like(log_q, math.log(self.defensive / classes))
        return torch.logaddexp(log_q + math.log1p(-self.defensive), flat)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        self.features.check_saved(state_dict.get(f"{prefix}features._extra_state"), prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        return f"{self.features.described}, defensive = {self.defensive:g}"


def _part(bias: Tensor | None, rows: slice) -> Tensor | None:
    return None if bias is None else bias[rows]


class ClassFeatures(nn.Module):
    """phi_q and phi_k of one map with its noise, its parameters and a constant for each feature, all saved.

    Features of classes are divided by the constants, about the largest ones when `fit` was called, and those of queries
    multiplied: nothing overflows, and the products stay what they are.
    """

    def __init__(self, proposal: FeatureMap | Mechanism | str, classes: int, d: int, m: int | None, sampler,
                 temperature: float, seed: int):
        super().__init__()
        mechanism = as_mechanism(proposal, m, sampler, seed)
        if not temperature > 0:
            raise ValueError(f"temperature = {temperature}: the kernel exp(cos / temperature) needs a positive number")
        self.phi = proposal if isinstance(proposal, FeatureMap) else mechanism.map("softmax")
        self.m, self.d, self.classes = mechanism.m, d, classes
        self.scale = float(temperature) ** -0.5
        names = f"{mechanism.features.name} x {mechanism.sampler_part.name}, m = {self.m}"
        self.described = f"{names}, map {self.phi!r}, d = {d}, V = {classes}, temperature = {temperature:g}"
        self.projections = self.phi.projections(self.m)
        generator = torch.Generator().manual_seed(seed)
        noises = {p: mechanism.sampler(p.m, d, generator) for p in distinct(self.projections)}
        self.gaussian = {_buffer_of(p): noise.gaussian for p, noise in noises.items()}
        for p, noise in noises.items():
            self.register_buffer(_buffer_of(p), noise.rows().float().contiguous())
        self.width = self.phi.width(mapped(lambda p: p.m, self.projections, empty=d))
        self.register_buffer("constants", torch.zeros(self.width, dtype=torch.float64))
        for side in "xy":  # what the parameters are fitted to, and how many vectors that is
            self.register_buffer(f"{side}_fitted_to", torch.zeros(FITTED_TO, d))
            self.register_buffer(f"{side}_count", torch.zeros((), dtype=torch.long))
        self.register_buffer("stamp", torch.zeros((), dtype=torch.float64))  # tells what `fit` was given
        self.positive = is_positive(self.phi)  # all features of the map, whatever the vectors
        self._kept: tuple = (None, None)

    def fit(self, weight: Tensor, bias: Tensor | None, hidden: Tensor | None) -> None:
        """Parameters for finite class vectors (V, d) and queries (B, d), and constants for some of the classes."""
        some = slice(None, None, spacing(len(weight), FITTED_TO))
        keys = self._unit(weight[some])
        queries = torch.cat([keys, -keys]) if hidden is None else self._unit(hidden)
        for side, vectors in (("x", queries), ("y", keys)):
            vectors = vectors[::spacing(len(vectors), FITTED_TO)]
            getattr(self, f"{side}_fitted_to")[:len(vectors)] = vectors
            getattr(self, f"{side}_count").fill_(len(vectors))
        self.stamp.copy_(sum((side + 1) * vectors.double().abs().sum() for side, vectors in enumerate((queries, keys))))
        self.constants.copy_(self._largest(weight[some], None if bias is None else bias[some]))

    def fit_constants(self, weight: Tensor, bias: Tensor | None) -> None:
        """Constants for all classes, where some outgrow those that `fit` took from others."""
        largest = [self._largest(weight[rows], None if bias is None else bias[rows]) for rows in self.blocks()]
        self.constants.copy_(torch.stack(largest).amax(0))

    def _largest(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._of_classes(weight, bias)[1].amax(0).double()

    def blocks(self) -> list[slice]:
        """All classes, in parts whose features are made at once."""
        step = max(1, BLOCK // self.width)
        return [slice(start, min(start + step, self.classes)) for start in range(0, self.classes, step)]

    def of_classes(self, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """phi_k over the constants, (r, M) float32, of classes with vectors (r, d) and biases (r,), all finite.

        None where one of them has outgrown the constants, which `fit` then has to set again.
        """
        value, log = self._of_classes(weight, bias)
        log = log - self.constants.to(log.dtype)
        if float(log.max()) > HIGHEST:
            return None
        return log.exp_().clamp_(min=LEAST) if self.positive else log.exp_().mul_(value)

    def of_queries(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Signs or values (B, M) and logarithms (B, M), float64, of phi_q times the constants."""
        value, log = self._full(self.phi.phi_q(self._unit(hidden), *self._noise_and_params()))
        return value, log.double() + self.constants

    def _noise_and_params(self) -> tuple[Nested, Params]:
        """What the map takes, computed when first asked for after its buffers changed.

        DistributedDataParallel writes to buffers without a new version: the stamp tells that.
        """
        state = (float(self.stamp), *((t.data_ptr(), t._version) for t in self.buffers()))
        if self._kept[0] != state:
            noises = {name: DenseNoise(getattr(self, name), gaussian) for name, gaussian in self.gaussian.items()}
            sets = [getattr(self, f"{side}_fitted_to")[:int(getattr(self, f"{side}_count"))] for side in "xy"]
            params = self.phi.fit(Statistics.of(*sets))
            self._kept = state, (mapped(lambda p: noises[_buffer_of(p)], self.projections), params)
        return self._kept[1]

    def _unit(self, vectors: Tensor) -> Tensor:
        return F.normalize(vectors.detach().float(), dim=-1) * self.scale

    def _of_classes(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        value, log = self._full(self.phi.phi_k(self._unit(weight), *self._noise_and_params()))
        return value, log if bias is None else log + bias.detach().float()[:, None]

    def _full(self, features) -> tuple[Tensor, Tensor]:
        shape = torch.broadcast_shapes(features.value.shape, features.log_scale.shape)
        value = features.value if features.value is ONE else features.value.expand(shape)
        return value.to(features.log_scale), features.log_scale.expand(shape)

    def get_extra_state(self) -> Tensor:
        """The description as bytes: files of weights hold tensors alone."""
        return torch.frombuffer(bytearray(self.described.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Nothing to do: `check_saved` compared it before anything was loaded."""

    def check_saved(self, saved: Tensor | None, prefix: str) -> None:
        """Raises ValueError where a saved state is one of another map, m, d, temperature or number of classes."""
        saved = None if saved is None else bytes(saved.tolist()).decode()
        if saved is not None and saved != self.described:
            raise ValueError(f"the saved tables of {prefix.rstrip('.') or 'this sampler'} are those of {saved}, and "
                             f"this sampler is {self.described}: make it as the saved one was, or leave the tables out "
                             "and call rebuild")


def as_mechanism(proposal: FeatureMap | Mechanism | str, m: int | None, sampler, seed: int) -> Mechanism:
    """The mechanism of a name, of a map with m projections, or itself. Raises ValueError for one without a map."""
    if isinstance(proposal, Mechanism):
        if m is not None or sampler is not None:
            raise ValueError("m and sampler are those of the mechanism: give them to Mechanism.of")
        mechanism = proposal
    elif isinstance(proposal, str):
        mechanism = Mechanism.parse(proposal, m=m, sampler=sampler, seed=seed)
    elif isinstance(proposal, FeatureMap):
        mechanism = Mechanism.of(features=proposal, m=m, sampler=sampler, seed=seed)
    else:
        raise ValueError(f"{type(proposal).__name__} is no sampler of classes, feature map, mechanism or name of one")
    if not mechanism.estimates:
        raise ValueError(f"{mechanism.name} has no features that estimate a kernel: take one such as favorpp")
    return mechanism


def is_positive(phi: FeatureMap) -> bool:
    """Whether all features of a map are positive for all vectors. Those of shifted discrete maps are not: beyond the
    shift, which was fitted to other vectors, they change sign."""
    if isinstance(phi, Sum | Product):
        return all(map(is_positive, phi.parts)) and min(getattr(phi, "weights", (1.0,))) > 0
    return isinstance(phi, PositiveExponential)


def spacing(count: int, most: int) -> int:
    """Every how manieth of `count` to take, so that they are no more than `most`."""
    return -(-count // most)


def _buffer_of(p: Projections) -> str:
    return f"omega_{p.name}" if p.name else "omega"
