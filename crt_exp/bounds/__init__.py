"""Exact laws and error bounds: variance of coupled rows, the law of OPRF, tail bounds, projections needed.

Legend: Z one projection's estimate, hat K the mean of m of them, K the kernel (softmax or Gaussian, as the map says),
d dimension, S_s = |x + s y|^2, N = |x|^2 + |y|^2, Z_1 and Z_2 the estimates of two rows of one block. Vectors x, y
(..., d) broadcast pair by pair; results are float64 on the CPU and, where they could overflow, logs in nats.

Sources: CRT = Chefs' Random Tables (2022), Performers (2021). Where a printed statement is wrong the docstring says
what was changed; what is in neither paper is marked own.
"""

from crt_exp.bounds.coupling import ensemble_log_variance, log_orthogonality_gap, relative_covariance
from crt_exp.bounds.laws import OPRFLaw, SMREGLaw, log_mgf, log_smreg_ratio, smreg_ratio_floor
from crt_exp.bounds.needed import required_m, trig_uniform_order, uniform_m
from crt_exp.bounds.tails import (log_chernoff_tail, log_hoeffding_tail, log_range, log_smreg_gap,
                                  log_smreg_orthogonal_tail)

__all__ = ["OPRFLaw", "SMREGLaw", "ensemble_log_variance", "log_chernoff_tail", "log_hoeffding_tail", "log_mgf",
           "log_orthogonality_gap", "log_range", "log_smreg_gap", "log_smreg_orthogonal_tail", "log_smreg_ratio",
           "relative_covariance", "required_m", "smreg_ratio_floor", "trig_uniform_order", "uniform_m"]
