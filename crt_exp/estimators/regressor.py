"""Ridge regression in random features, with intervals."""

import math

import numpy as np
import torch
from sklearn.base import RegressorMixin

from crt_exp.estimators.base import RidgeOfFeatures
from crt_exp.estimators.batches import Batch


class RandomFeatureRidge(RegressorMixin, RidgeOfFeatures):
    """Ridge regression in random features: kernel ridge regression, or the mean of a Gaussian process, in time O(n M^2)
    and memory O(M^2), whatever n is.

    `fit(X, y)` takes arrays and sparse matrices; `partial_fit` goes on from what was fitted before.
    mechanism, sampler, n_components, kernel, gamma, length_scale: as of RandomFeatures, with trig in the place of oprf
    where mechanism is None and the kernel gaussian: it is bounded, so that no row weighs too much. alpha: the ridge, a
    number, or chosen by the evidence of the Bayesian model ('evidence') or by generalised cross-validation ('gcv',
    which overfits where rows are few), for each target by itself. sample_weight counts as repetitions of a row.

    Attributes: features_ (a RandomFeatures), coef_ (n_components,) or (targets, n_components), intercept_, alpha_,
    noise_variance_ of a row of weight 1, degrees_ of freedom, rows_ taken; all follow `partial_fit`, and a change of
    `alpha` after a fit.
    """

    def partial_fit(self, X, y, sample_weight=None):
        """Adds rows; coefficients are computed when next asked for."""
        self._take(X, y, sample_weight)
        return self

    def predict(self, X, return_std=False):
        """(n,) or (n, T) means; with return_std also standard deviations of new targets, their noise included."""
        solution = self._solve()
        if not return_std:
            return self._per_block(X, solution.predict).reshape(-1, *self._shape)
        both = self._per_block(X, lambda z: torch.stack([solution.predict(z), solution.variance(z).sqrt()], -1))
        return tuple(both[..., k].reshape(-1, *self._shape) for k in (0, 1))

    @property
    def coef_(self) -> np.ndarray:
        return self._solve().coefficients.T.numpy().reshape(*self._shape, -1)

    @property
    def intercept_(self):
        return self._of_targets(self._solve().intercept)

    @property
    def alpha_(self):
        return self._of_targets(self._solve().alpha)

    @property
    def noise_variance_(self):
        return self._of_targets(self._solve().noise_variance)

    @property
    def degrees_(self):
        return self._of_targets(self._solve().degrees)

    def _of_targets(self, values: torch.Tensor):
        return values.numpy() if self._shape else float(values)

    # ---- targets

    _target_checks = {"y_numeric": True, "multi_output": True}

    def _targets_of(self, y: np.ndarray, first: bool) -> np.ndarray:
        if first:
            self._shape = y.shape[1:]
        if y.shape[1:] != self._shape:
            raise ValueError(f"y has {math.prod(y.shape[1:])} targets, and that of the first batch was of shape "
                             f"{('n', *self._shape)}")
        return np.ascontiguousarray(y.reshape(len(y), -1), np.float64)

    def _origin(self, batch: Batch) -> torch.Tensor:
        return torch.from_numpy(batch.y[0].copy())

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
