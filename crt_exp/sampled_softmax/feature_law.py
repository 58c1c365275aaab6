"""`FeatureLaw`: what the laws in proportion to a random-feature estimate of the softmax share."""

import math
from abc import abstractmethod

import torch
from torch import Tensor

from crt_exp.features.base import FeatureMap
from crt_exp.mechanism import Mechanism
from crt_exp.sampled_softmax.base import (ClassSampler, Drawn, check_classes, check_finite, check_queries,
                                          check_rows)
from crt_exp.sampled_softmax.class_features import ClassFeatures

UPDATED = 2**12   # classes of an update at once: what lies between then stays in the cache
DEFENSIVE = 0.05  # share of the uniform law mixed with a signed estimate, whose positive part is zero for some classes


class FeatureLaw(ClassSampler):
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

    # ---- what the laws do in their own ways

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
        """Classes of the uniform law without the targets for a share `defensive` of the draws, -1 for the others."""
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
