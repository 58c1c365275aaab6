"""Length scales of a kernel, one for each column, by the marginal likelihood of a Gaussian process in random features.

Legend: B rows of a mini-batch, d columns, M features Z, T targets y; y ~ N(0, signal Z Z^T + noise 1). Gradients go
through the map to the lengths. Features are drawn anew at each step, so that no draw is fitted to; there are more of
them than rows, for lengths come out too short where Z Z^T is far from the kernel.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.sparse import issparse
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_X_y
from torch import Tensor

from crt_exp.estimators import RandomFeatures
from crt_exp.features import Statistics
from crt_exp.hints import whole_number
from crt_exp.samplers.blocks import one_thread

ROWS, BATCH, COLUMNS, STEPS = 8192, 128, 512, 200  # looked at, of a step, of its features
LEARNING_RATE, AVERAGED = 0.1, 0.5  # of Adam, which falls as a cosine; of the steps, the last that count


def fit_length_scales(X: Any, y: Any, mechanism: Any = None, sampler: Any = "orthogonal", kernel: str = "gaussian", *,
                      ard: bool = True, steps: int = STEPS, random_state: Any = None) -> np.ndarray:
    """Lengths (d,) under which y (n,) or (n, T) of rows X (n, d) are most likely, in the units of X; where `ard` is
    false all in the proportion of the columns' standard deviations. They serve as length_scale of RandomFeatures and
    of the ridge estimators, whose length_scale="fit" is this. mechanism, sampler, kernel: as of RandomFeatureRidge.

    By Adam over mini-batches of rows, from the square root of d standard deviations. A column that tells nothing gets a
    long length.
    """
    X, y = check_X_y(X, y, dtype=np.float64, multi_output=True, y_numeric=True)
    mechanism = "trig" if mechanism is None and kernel == "gaussian" else mechanism
    features = RandomFeatures(mechanism, sampler, COLUMNS, kernel, random_state=random_state)
    return fitted(X, y.reshape(len(y), -1), np.ones(len(y)), features, ard, whole_number(steps, "steps"))


def fitted(X: Any, y: np.ndarray, weight: np.ndarray, features: RandomFeatures, ard: bool = True,
           steps: int = STEPS) -> np.ndarray:
    """The same of at most ROWS rows that are checked, which count as often as weight (n,) says; y (n, T)."""
    random, counted = check_random_state(features.random_state), np.flatnonzero(weight)
    chosen = np.sort(random.choice(counted, min(ROWS, len(counted)), replace=False))
    X = (X[chosen].toarray() if issparse(X) else X[chosen]).astype(np.float64)
    width = np.where(X.std(0) > 0, X.std(0), 1.0)
    y, share = y[chosen], weight[chosen] / weight[chosen].sum()
    x, y = (torch.from_numpy(part) for part in ((X - X.mean(0)) / width,
                                                (y - y.mean(0)) / np.maximum(y.std(0), 1e-300)))
    found = climbed(x, y, share, features, ard, steps, random)
    return width * found.exp().numpy()


def climbed(x: Tensor, y: Tensor, share: np.ndarray, features: RandomFeatures, ard: bool, steps: int,
            random: np.random.RandomState) -> Tensor:
    """Logarithms (d,) or (1,) of lengths, over the last steps. share (n,): of a row in mini-batches."""
    lengths = torch.full((x.shape[1] if ard else 1,), math.log(x.shape[1]) / 2, dtype=torch.float64).requires_grad_()
    scales = torch.tensor([0.0, math.log(0.1)], dtype=torch.float64).requires_grad_()  # signal and noise
    adam, found = torch.optim.Adam([lengths, scales], lr=LEARNING_RATE), []
    slower = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    with one_thread(), torch.enable_grad():
        for step in range(steps):
            rows = random.choice(len(x), min(BATCH, len(x)), p=share)
            Z = drawn_map(features, x.shape[1], random)(x[rows] / lengths.exp())
            adam.zero_grad()
            negative_evidence(Z, y[rows], *scales.exp()).backward()
            adam.step()
            slower.step()
            if step >= steps * AVERAGED:
                found.append(lengths.detach().clone())
    return torch.stack(found).mean(0)


def drawn_map(features: RandomFeatures, d: int, random: np.random.RandomState) -> Callable:
    """x (B, d) -> Z (B, M), differentiable, with a noise of its own."""
    generator = torch.Generator().manual_seed(int(random.randint(2**31 - 1)))
    phi, sampler = features._map(), features._sampler()
    noise = phi.noise(max(1, COLUMNS // phi.width(1)),
                      lambda part: sampler(part.m, d, generator, dtype=torch.float64))

    def mapped(x: Tensor) -> Tensor:
        params = phi.fit(Statistics.of(x.detach(), x.detach()) if phi.fitted else None)
        return phi.phi_q(x, noise, params).dense().exp()
    return mapped


def negative_evidence(Z: Tensor, y: Tensor, signal: Tensor, noise: Tensor) -> Tensor:
    """Of a row and a target, up to a constant; of fewer rows than features."""
    covariance = signal * (Z @ Z.mT) + noise * torch.eye(len(Z), dtype=Z.dtype)
    factor = torch.linalg.cholesky(covariance)
    within = torch.linalg.solve_triangular(factor, y, upper=False)
    return (within.square().sum() / (2 * y.shape[1]) + factor.diagonal().log().sum()) / len(Z)
