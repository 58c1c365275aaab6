"""GPyTorch's sparse variational Gaussian process: the peer whose inducing points stand where features have columns.

Legend: n rows, d columns of data, p inducing points. GPyTorch is a dev dependency.
"""

from collections.abc import Callable

import gpytorch
import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean
from gpytorch.mlls import VariationalELBO
from gpytorch.models import ApproximateGP
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy

from crt_exp.estimators import blocks

BATCH, STEPS, LEARNING_RATE = 1024, 500, 0.02  # of Adam; its manual has 1024, four passes over the rows, and 0.01
Predict = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


class Process(ApproximateGP):
    """Gaussian kernel with a length for each column; all is trained, the points (p, d) among it."""

    def __init__(self, points: torch.Tensor):
        super().__init__(VariationalStrategy(self, points, CholeskyVariationalDistribution(len(points))))
        self.mean = ConstantMean()
        self.kernel = ScaleKernel(RBFKernel(ard_num_dims=points.shape[1]))
        self.kernel.base_kernel.lengthscale = points.shape[1] ** 0.5  # of standardised columns, where ours begins

    def forward(self, x: torch.Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean(x), self.kernel(x))


def fitted_process(X: np.ndarray, y: np.ndarray, points: int, seed: int) -> Predict:
    """Of X (n, d) float32 to means and deviations (n,) of new targets, noise included."""
    random, middle, width = np.random.default_rng(seed), y.mean(), y.std()
    x, target = torch.from_numpy(X), torch.from_numpy(((y - middle) / width).astype(np.float32))
    model, noise = Process(x[random.choice(len(x), points, replace=False)]), GaussianLikelihood()
    bound = VariationalELBO(noise, model, num_data=len(x))
    adam = torch.optim.Adam([*model.parameters(), *noise.parameters()], lr=LEARNING_RATE)
    slower = torch.optim.lr_scheduler.CosineAnnealingLR(adam, STEPS)
    for _ in range(STEPS):
        rows = random.choice(len(x), min(BATCH, len(x)), replace=False)
        adam.zero_grad()
        (-bound(model(x[rows]), target[rows])).backward()
        adam.step()
        slower.step()
    model.eval()
    noise.eval()

    @torch.no_grad()
    def predict(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with gpytorch.settings.fast_pred_var():
            found = [noise(model(torch.from_numpy(rows[part]))) for part in blocks(len(rows), BATCH)]
        return (middle + width * np.concatenate([each.mean.numpy() for each in found]),
                width * np.concatenate([each.stddev.numpy() for each in found]))
    return predict
