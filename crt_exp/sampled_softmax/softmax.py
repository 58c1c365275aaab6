"""`SampledSoftmax`: the loss of a classifier with many classes from a few of them, as a module around any head."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crt_exp.features.base import FeatureMap
from crt_exp.options import whole_number
from crt_exp.mechanism import Mechanism
from crt_exp.sampled_softmax.base import ClassSampler, check_queries
from crt_exp.sampled_softmax.tree_features import TreeFeatures

NOTED = 2**20          # classes that are noted at once, or twice as many as there are
LARGEST_BLOCK = 2**24  # numbers of the (queries, classes) matrix of exact losses that are formed at once


class SampledSoftmax(nn.Module):
    """Cross-entropy of a head of V classes from `negatives` sampled ones a query, in training; exact in eval mode.

    proposal: a `ClassSampler`; or a feature map, a Mechanism or the name of one ("favorpp"), which become
    `TreeFeatures`, with m, temperature and seed. head: what has `weight` (V, d) and, or not, `bias` (V,): nn.Linear, or
    nn.Embedding; it stays the owner of its parameters, tied or not. sparse: gradients of `head.weight` (and bias) are
    sparse tensors of the classes that took part, for torch.optim.SGD, SparseAdam or Adagrad: without it a backward pass
    writes V d numbers. rebuild_every: updates after which all tables are built again, 0 = never.

        loss = softmax(hidden, targets)      # hidden (..., d), targets (...): the mean over all queries, in nats
        loss.backward(); optimiser.step()
        softmax.update()                     # the classes that took part since the last update; or update(more_rows)

    The loss is -o_t + log Z^, Z^ = e^{o_t} + 1/k sum_s e^{o_{c_s}} / q_{c_s}: unbiased for the normaliser Z, negatives
    being drawn from the distribution without the target, so that none is an accidental hit; its logarithm is biased low
    (HRF appendix I). Tables are made in the first training pass, from the weights that the head has then.

    Raises ValueError for one class, for more negatives than there are classes besides the target, for targets that are
    no class, for hidden vectors of another dimension or not finite, and on loading tables of another m or V.
    """

    def __init__(self, proposal: ClassSampler | FeatureMap | Mechanism | str, head: nn.Module, negatives: int = 40, *,
                 m: int | None = None, temperature: float = 1.0, seed: int = 0, sparse: bool = False,
                 rebuild_every: int = 1000):
        super().__init__()
        self.head = head
        classes, d = head.weight.shape
        self.negatives = whole_number(negatives, "negatives", 1)
        if self.negatives > classes - 1:
            raise ValueError(f"negatives = {negatives}: there are {classes - 1} classes besides the target; take "
                             "fewer, or the full softmax")
        self.sampler = proposal if isinstance(proposal, ClassSampler) else TreeFeatures(
            proposal, classes, d, m=m, temperature=temperature, seed=seed)
        if self.sampler.classes != classes:
            raise ValueError(f"the sampler has {self.sampler.classes} classes and the head {classes}")
        self.sparse, self.rebuild_every = sparse, whole_number(rebuild_every, "rebuild_every", 0)
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))
        self._touched: list[Tensor] = []  # of the passes since the last update

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """The mean loss in nats of hidden (..., d) and targets (...): sampled in training, exact in eval mode."""
        return self.losses(hidden, targets).mean()

    def losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """That of every query, (...)."""
        h, t = self._checked(hidden, targets)
        if not self.training:
            return self._exact(h, t).view(targets.shape)
        log_z, o_t = self._sampled(h, t)
        return (log_z - o_t).view(targets.shape)

    @torch.no_grad()
    def update(self, rows: Tensor | None = None) -> None:
        """After the optimiser's step: the tables follow the classes of the passes since the last update, and those of
        `rows` (other classes that the step moved, such as input words of tied embeddings). Every `rebuild_every` of
        these calls all tables are built again.

        Raises ValueError, with the tables as they were, where the vector of such a class is not finite.
        """
        touched = self._touched if rows is None else [*self._touched, rows.reshape(-1).to(self.head.weight.device)]
        if not self.sampler.looks_at_classes or not self.sampler.built:
            self._touched = []
            return
        if self.rebuild_every and int(self.updates + 1) % self.rebuild_every == 0:
            self.rebuild()
        elif touched:
            self.sampler.update(torch.cat(touched), self.head.weight, self._bias)
        self.updates += 1
        self._touched = []

    @torch.no_grad()
    def rebuild(self) -> None:
        """Builds all tables again, fitted to the queries of the last training pass."""
        self.sampler.rebuild(self.head.weight, self._bias)

    def extra_repr(self) -> str:
        return f"negatives={self.negatives}, sparse={self.sparse}, rebuild_every={self.rebuild_every}"

    @property
    def _bias(self) -> Tensor | None:
        return getattr(self.head, "bias", None)

    def _sampled(self, h: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """log Z^ and the target's logit, (B,) both."""
        queries = h.detach().float()
        check_queries(queries)
        if not self.sampler.built:
            self.sampler.rebuild(self.head.weight.detach(), self._bias, queries)
        drawn = self.sampler.draw(queries, t, self.negatives)
        ids = torch.cat([t[:, None], drawn.ids], 1)
        logits = self._logits(h, ids)
        if self.training and self.sampler.looks_at_classes and self.rebuild_every != 1:
            self._note(ids)
        corrected = logits[:, 1:] - drawn.log_q - math.log(self.negatives)
        return torch.cat([logits[:, :1], corrected], 1).logsumexp(-1), logits[:, 0]

    def _note(self, ids: Tensor) -> None:
        """Classes that an update has to follow; each once where they have become many, if updates are rare."""
        self._touched.append(ids.reshape(-1))
        if sum(map(len, self._touched)) > max(NOTED, 2 * self.sampler.classes):
            self._touched = [torch.cat(self._touched).unique()]

    def _logits(self, h: Tensor, ids: Tensor) -> Tensor:
        """Of the classes ids (B, n), in float32 at least."""
        vectors = F.embedding(ids, self.head.weight, sparse=self.sparse)
        logits = (vectors @ h.to(vectors.dtype)[..., None]).squeeze(-1)
        if self._bias is not None:
            logits = logits + self._bias.gather(0, ids.flatten(), sparse_grad=self.sparse).view_as(ids)
        return logits if logits.dtype == torch.float64 else logits.float()

    def _exact(self, h: Tensor, t: Tensor) -> Tensor:
        step = max(1, LARGEST_BLOCK // self.sampler.classes)
        losses = [F.cross_entropy(F.linear(rows, self.head.weight, self._bias).float(), targets, reduction="none")
                 for rows, targets in zip(h.split(step), t.split(step))]
        return torch.cat(losses)

    def _checked(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Queries (B, d) and targets (B,)."""
        classes, d = self.head.weight.shape
        if hidden.shape[:-1] != targets.shape or hidden.shape[-1] != d or not targets.numel():
            raise ValueError(f"hidden vectors {tuple(hidden.shape)} and targets {tuple(targets.shape)}: expected (..., "
                             f"{d}) and (...), and at least one of them")
        if targets.is_floating_point() or targets.dtype == torch.bool:
            raise ValueError(f"the targets hold {targets.dtype}: they are numbers of classes, whole ones")
        outside = (targets < 0) | (targets >= classes)
        if bool(outside.any()):
            raise ValueError(f"target {int(targets[outside][0])} is none of the {classes} classes (0 to {classes - 1})")
        return hidden.reshape(-1, d), targets.reshape(-1).long()
