"""Exact laws of one projection's estimate: OPRF and SMREG."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import ncx2
from torch import Tensor

from crt_exp.features.exponential import check_a
from crt_exp.kernels import Kernel, check_kernel, log_0f1

NORMAL_FROM = 1e8  # noncentrality from which log Z is normal up to an Edgeworth correction, to 1e-7 even at -6 sigma


@dataclass(frozen=True)
class OPRFLaw:
    """The law of Z = f(omega, x) f(omega, y) for one OPRF projection with real A < 1/8 (own; exact).

    log Z = d/2 log(1 - 4A) + 2A |omega|^2 + sqrt(1 - 4A) omega.(x + y) + offset, so that Z = Z_ref e^(2AQ) with Q
    noncentral chi-square of d degrees of freedom and noncentrality (1 - 4A) S / (16 A^2); Z_ref is the maximum for
    A < 0, the minimum for A > 0. Near A = 0, where that is singular, log Z is normal up to a small correction; at
    A = 0 exactly log-normal. Fields broadcast; float64.
    """

    A: Tensor
    s_plus: Tensor
    offset: Tensor  # -N for the Gaussian kernel, -N/2 for softmax
    d: int

    @classmethod
    def of(cls, x: Tensor, y: Tensor, A: Tensor | float, kernel: Kernel = "softmax") -> "OPRFLaw":
        """x, y (..., d)."""
        check_kernel(kernel)
        check_a(A)
        x, y = x.double(), y.double()
        norms = x.square().sum(-1) + y.square().sum(-1)
        A = torch.as_tensor(A, dtype=torch.float64)
        return cls(A, (x + y).square().sum(-1), -norms * (0.5 if kernel == "softmax" else 1.0), x.shape[-1])

    @property
    def log_reference(self) -> Tensor:
        """log Z_ref; infinite at A = 0 unless x = -y."""
        log_d = self.d / 2 * torch.log1p(-4 * self.A) + self.offset
        slope = torch.where(self.s_plus > 0, (1 - 4 * self.A) * self.s_plus / (8 * self.A), 0.0)
        return log_d - slope

    @property
    def log_max(self) -> Tensor:
        """log of the supremum of Z: finite for A < 0, where the features are bounded, and for x = -y at A = 0."""
        bounded = (self.A < 0) | ((self.A == 0) & (self.s_plus == 0))
        return torch.where(bounded, self.log_reference, torch.inf)

    def log_moment(self, k: Tensor | float) -> Tensor:
        """log E Z^k for any real k with 1 - 4kA > 0; +inf elsewhere. log_moment(1) is the log kernel."""
        k = torch.as_tensor(k, dtype=torch.float64)
        w = 1 - 4 * k * self.A
        inside = torch.where(w > 0, w, 1.0)
        moment = (self.d / 2 * (k * torch.log1p(-4 * self.A) - inside.log())
                  + k * k * (1 - 4 * self.A) * self.s_plus / (2 * inside) + k * self.offset)
        return torch.where(w > 0, moment, torch.inf)

    def cdf(self, z: Tensor | float) -> Tensor:
        """P(Z <= z)."""
        log_z = torch.as_tensor(z, dtype=torch.float64).clamp(min=0).log()
        log_z, A, ref, noncentrality = torch.broadcast_tensors(log_z, self.A, self.log_reference, self._noncentrality)
        q = ((log_z - ref) / (2 * A)).clamp(min=0).nan_to_num(0).numpy()
        nc = torch.where(noncentrality < NORMAL_FROM, noncentrality, 0.0).numpy()
        chi = np.where(A.numpy() < 0, ncx2.sf(q, self.d, nc), ncx2.cdf(q, self.d, nc))
        return torch.where(noncentrality < NORMAL_FROM, torch.from_numpy(chi), self._normal_cdf(log_z))

    def quantile(self, p: Tensor | float) -> Tensor:
        """The z with P(Z <= z) = p, 0 <= p <= 1."""
        p = torch.as_tensor(p, dtype=torch.float64)
        p, A, ref, noncentrality = torch.broadcast_tensors(p, self.A, self.log_reference, self._noncentrality)
        nc = torch.where(noncentrality < NORMAL_FROM, noncentrality, 0.0).numpy()
        q = np.where(A.numpy() < 0, ncx2.isf(p.numpy(), self.d, nc), ncx2.ppf(p.numpy(), self.d, nc))
        chi = ref + 2 * A * torch.from_numpy(q)
        return torch.where(noncentrality < NORMAL_FROM, chi, self._normal_log_quantile(p)).exp()

    @property
    def _noncentrality(self) -> Tensor:
        """inf at A = 0, also where x = -y: the normal branch serves there, with variance 0."""
        ratio = (1 - 4 * self.A) * self.s_plus / (16 * self.A.square())
        return torch.where(self.A == 0, torch.inf, ratio)

    def _cumulants(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Mean, standard deviation, skewness and excess kurtosis of log Z, a quadratic form in Gaussians."""
        A, slope = self.A, (1 - 4 * self.A) * self.s_plus
        mean = self.d / 2 * torch.log1p(-4 * A) + 2 * A * self.d + self.offset
        sd = (8 * A * A * self.d + slope).sqrt()
        safe = torch.where(sd > 0, sd, 1.0)
        skewness = (64 * A**3 * self.d + 12 * A * slope) / safe**3
        kurtosis = (768 * A**4 * self.d + 192 * A * A * slope) / safe**4
        return mean, sd, skewness, kurtosis

    def _normal_cdf(self, log_z: Tensor) -> Tensor:
        """Edgeworth; a step where log Z is constant."""
        mean, sd, g, h = self._cumulants()
        t = (log_z - mean) / torch.where(sd > 0, sd, 1.0)
        correction = g / 6 * (t**2 - 1) + h / 24 * (t**3 - 3 * t) + g**2 / 72 * (t**5 - 10 * t**3 + 15 * t)
        density = torch.exp(-t * t / 2) / math.sqrt(2 * math.pi)
        smooth = torch.special.ndtr(t) - torch.where(density > 0, density * correction, 0.0)
        return torch.where(sd > 0, smooth, (log_z >= mean).double())

    def _normal_log_quantile(self, p: Tensor) -> Tensor:
        """Cornish-Fisher."""
        mean, sd, g, h = self._cumulants()
        t = torch.special.ndtri(p)
        turned = t + g / 6 * (t**2 - 1) + h / 24 * (t**3 - 3 * t) - g**2 / 36 * (2 * t**3 - 5 * t)
        return mean + sd * torch.where(t.isinf(), t, turned)


@dataclass(frozen=True)
class SMREGLaw:
    """The law of one SMREG projection Z = exp(sqrt(d) u.(x + y) + offset), u uniform on the sphere; bounded."""

    s_plus: Tensor
    offset: Tensor
    d: int

    @classmethod
    def of(cls, x: Tensor, y: Tensor, kernel: Kernel = "softmax") -> "SMREGLaw":
        """x, y (..., d)."""
        law = OPRFLaw.of(x, y, 0.0, kernel)
        return cls(law.s_plus, law.offset, law.d)

    @property
    def log_max(self) -> Tensor:
        return self.offset + (self.d * self.s_plus).sqrt()

    def log_moment(self, k: Tensor | float) -> Tensor:
        """log E Z^k = k offset + log 0F1(; d/2; k^2 d S / 4); log_moment(1) is the log kernel SMREG."""
        k = torch.as_tensor(k, dtype=torch.float64)
        return k * self.offset + log_0f1(self.d / 2, k * k * self.d * self.s_plus / 4)


Law = OPRFLaw | SMREGLaw


def log_mgf(law: Law, tilt: float) -> float:
    """log E e^(theta Z) at theta = tilt / Z_max, by the series of moments. One pair, bounded Z; tilt up to some 1e5."""
    k = torch.arange(int(tilt + 12 * math.sqrt(tilt) + 50), dtype=torch.float64)
    terms = torch.xlogy(k, torch.tensor(tilt, dtype=torch.float64)) - torch.lgamma(k + 1)
    return float(torch.logsumexp(terms + law.log_moment(k) - k * law.log_max, -1))


def log_smreg_ratio(s_plus: Tensor, d: int) -> Tensor:
    """log SMREG / SM = -w + log 0F1(; d/2; d w / 2), w = |x + y|^2 / 2:
    at most 0 (Performers Theorem 1, exact form own)."""
    s_plus = s_plus.double()
    return (log_0f1(d / 2, d * s_plus / 4) - s_plus / 2).clamp(max=0)


def smreg_ratio_floor(d: int) -> float:
    """1 - 2 d^(-1/3), which the least ratio of attention weights exceeds up to o(d^(-1/3)) (Performers Theorem 1).

    For attention matrices of bounded entries; asymptotic, so no bound at any one d: `log_smreg_ratio` is exact.
    """
    return 1 - 2 * d ** (-1 / 3)
