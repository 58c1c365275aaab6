"""The exact variance of estimates with coupled rows, and the number of projections that an accuracy takes.

Legend: Z one projection's estimate, hat K the mean of m of them, K the kernel (softmax or Gaussian, as the map says),
d dimension, S_s = |x + s y|^2, N = |x|^2 + |y|^2, Z_1 and Z_2 the estimates of two rows of one block. Vectors x, y
(..., d) broadcast pair by pair; results are float64 on the CPU and, where they could overflow, logs in nats.

Sources: CRT = Chefs' Random Tables (2022), Performers (2021). What is in neither paper is marked own.
"""

from crt_exp.bounds.coupling import ensemble_log_variance, relative_covariance
from crt_exp.bounds.needed import required_m

__all__ = ["ensemble_log_variance", "relative_covariance", "required_m"]
