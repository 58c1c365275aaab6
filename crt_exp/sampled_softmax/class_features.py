"""`ClassFeatures`: the features of normalised queries and class vectors, ready to be multiplied and summed.

The kernel is exp(h.e / (|h| |e| T)) e^b, with T the temperature and b the bias of the class. Vectors of length zero
stay zero: their kernel is e^b with every query.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp.features.other_kernels import Product, Sum
from crt_exp.features.base import ONE, FeatureMap, Params, Projections, distinct
from crt_exp.features.exponential import PositiveExponential
from crt_exp.features.statistics import Statistics
from crt_exp.mechanism import Mechanism
from crt_exp.samplers.noise import Nested, mapped
from crt_exp.samplers import DenseNoise

FITTED_TO = 2**11  # queries and classes at most, evenly spaced: more would hardly change the parameters
BLOCK = 2**22      # features of a block of classes, where all are made
HIGHEST = 20.0     # log of a feature over its constant: beyond, the sums above would lose the others to rounding
LEAST = 1e-30      # of a positive feature: what would underflow keeps a probability


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
