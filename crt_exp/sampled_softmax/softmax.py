"""Sampled softmax cross-entropy as a module around a classifier head."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp.features.base import FeatureMap
from crt_exp.mechanism import Mechanism
from crt_exp.sampled_softmax.base import ClassSampler, check_queries, head_tensors
from crt_exp.sampled_softmax.tree_features import TreeFeatures
from crt_exp.samplers import at_least_float32
from crt_exp.validation import whole_number

MAX_RECORDED = 2**20  # recorded classes before duplicates are removed, or 2 V if that is larger
LARGEST_BLOCK = 2**24  # entries of a block of the (queries, classes) matrix of exact losses


class SampledSoftmax(nn.Module):
    """Cross-entropy of a head with V classes: sampled in training, exact in eval mode.

        loss = softmax(hidden, targets)      # hidden (..., d), targets (...): mean over all queries, in nats
        loss.backward(); optimiser.step()
        softmax.update()                     # classes used since the last update; update(rows) adds other classes

    The loss is -o_t + log Z^ with Z^ = e^{o_t} + 1/k sum_s e^{o_{c_s}} / q_{c_s}. Negatives c_s exclude the target. Z^
    is an unbiased estimate of the normaliser; its log is biased low (HRF appendix I). The first training pass builds
    the tables.

    Args:
        proposal: a `ClassSampler`; or a feature map, a Mechanism or its name ("favorpp"), which become `TreeFeatures`
            with m, temperature and seed.
        head: module with `weight` (V, d) and optional `bias` (V,), such as nn.Linear or nn.Embedding. Weights may be
            tied.
        negatives: sampled classes per query.
        sparse: gradients of the head are sparse tensors, for torch.optim.SGD, SparseAdam or Adagrad. Dense gradients
            write V d numbers per backward pass.
        rebuild_every: number of updates between rebuilds of all tables; 0: never.

    Raises:
        ValueError: there are fewer than two classes, or `negatives` exceeds V - 1; a target is no class, or hidden
            vectors have another dimension or are not finite; or loaded tables have another m or V.

    >>> softmax = SampledSoftmax("favorpp", nn.Linear(8, 100), negatives=10, m=16)
    >>> loss = softmax(torch.randn(4, 8), torch.tensor([1, 5, 7, 99]))
    >>> loss.backward()
    >>> softmax.update()
    """

    updates: Tensor

    def __init__(
        self,
        proposal: ClassSampler | FeatureMap | Mechanism | str,
        head: nn.Module,
        negatives: int = 40,
        *,
        m: int | None = None,
        temperature: float = 1.0,
        seed: int = 0,
        sparse: bool = False,
        rebuild_every: int = 1000,
    ):
        super().__init__()
        self.head = head
        classes, d = self._weight.shape
        self.negatives = whole_number(negatives, "negatives", 1)
        if self.negatives > classes - 1:
            raise ValueError(
                f"negatives={negatives}: expected at most {classes - 1}, the classes besides the target"
            )
        self.sampler = (
            proposal
            if isinstance(proposal, ClassSampler)
            else TreeFeatures(proposal, classes, d, m=m, temperature=temperature, seed=seed)
        )
        if self.sampler.classes != classes:
            raise ValueError(
                f"sampler: {self.sampler.classes} classes, expected {classes} as in the head"
            )
        self.sparse = sparse
        self.rebuild_every = whole_number(rebuild_every, "rebuild_every", 0)
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))
        self._touched: list[Tensor] = []  # classes used since the last update

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss in nats of hidden (..., d) and targets (...)."""
        return self.losses(hidden, targets).mean()

    def losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each query, (...)."""
        h, t = self._checked(hidden, targets)
        if not self.training:
            return self._exact(h, t).view(targets.shape)
        log_z, o_t = self._sampled(h, t)
        return (log_z - o_t).view(targets.shape)

    @torch.no_grad()
    def update(self, rows: Tensor | None = None) -> None:
        """Update the tables after an optimiser step.

        The update covers the classes of all passes since the last update, and `rows`. Every `rebuild_every` calls it
        rebuilds all tables.

        Args:
            rows: other classes changed by the step, such as input words of tied embeddings.

        Raises:
            ValueError: a class vector is not finite; the tables are unchanged.
        """
        if not self.sampler.looks_at_classes or not self.sampler.built:
            self._touched = []
            return
        touched = list(self._touched)
        if rows is not None:
            touched.append(rows.reshape(-1).to(self._weight.device))
        if self.rebuild_every and int(self.updates + 1) % self.rebuild_every == 0:
            self.rebuild()
        elif touched:
            self.sampler.update(torch.cat(touched), self._weight, self._bias)
        self.updates += 1
        self._touched = []

    @torch.no_grad()
    def rebuild(self) -> None:
        """Rebuild all tables, fitted to the queries of the last training pass."""
        self.sampler.rebuild(self._weight, self._bias)

    def extra_repr(self) -> str:
        return (
            f"negatives={self.negatives}, sparse={self.sparse}, rebuild_every={self.rebuild_every}"
        )

    @property
    def _weight(self) -> Tensor:
        return head_tensors(self.head)[0]

    @property
    def _bias(self) -> Tensor | None:
        return head_tensors(self.head)[1]

    def _sampled(self, h: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return log Z^ and the target logit, (B,) each."""
        queries = h.detach().float()
        check_queries(queries)
        if not self.sampler.built:
            self.sampler.rebuild(self._weight.detach(), self._bias, queries)
        drawn = self.sampler.draw(queries, t, self.negatives)
        ids = torch.cat([t[:, None], drawn.ids], 1)
        logits = self._logits(h, ids)
        if self.training and self.sampler.looks_at_classes and self.rebuild_every != 1:
            self._record(ids)
        corrected = logits[:, 1:] - drawn.log_q - math.log(self.negatives)
        return torch.cat([logits[:, :1], corrected], 1).logsumexp(-1), logits[:, 0]

    def _record(self, ids: Tensor) -> None:
        """Record classes for the next update; remove duplicates if there are many."""
        self._touched.append(ids.reshape(-1))
        if sum(map(len, self._touched)) > max(MAX_RECORDED, 2 * self.sampler.classes):
            self._touched = [torch.cat(self._touched).unique()]

    def _logits(self, h: Tensor, ids: Tensor) -> Tensor:
        """Return logits of classes ids (B, n), in float32 or float64."""
        vectors = F.embedding(ids, self._weight, sparse=self.sparse)
        logits = (vectors @ h.to(vectors.dtype)[..., None]).squeeze(-1)
        if self._bias is not None:
            biases = self._bias.gather(0, ids.flatten(), sparse_grad=self.sparse)
            logits = logits + biases.view_as(ids)
        return at_least_float32(logits)

    def _exact(self, h: Tensor, t: Tensor) -> Tensor:
        step = max(1, LARGEST_BLOCK // self.sampler.classes)
        losses = []
        for rows, targets in zip(h.split(step), t.split(step)):
            logits = F.linear(rows, self._weight, self._bias).float()
            losses.append(F.cross_entropy(logits, targets, reduction="none"))
        return torch.cat(losses)

    def _checked(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return validated queries (B, d) and targets (B,)."""
        classes, d = self._weight.shape
        if hidden.shape[:-1] != targets.shape or hidden.shape[-1] != d or not targets.numel():
            raise ValueError(
                f"hidden {tuple(hidden.shape)}, targets {tuple(targets.shape)}: expected (..., {d}) and "
                "(...), with at least one target"
            )
        outside = (targets < 0) | (targets >= classes)
        if targets.is_floating_point() or targets.dtype == torch.bool or bool(outside.any()):
            raise ValueError(
                f"targets: {targets.dtype} from {targets.min()} to {targets.max()}, expected integers from 0 to "
                f"{classes - 1}"
            )
        return hidden.reshape(-1, d), targets.reshape(-1).long()
