"""Bayesian ridge regression and classification in random features: rows in any number, columns of features in memory.

What is kept of rows are sums in float64 (`sums.py`), so that they come at once or in batches (`batches.py`); what is
made of the sums are coefficients, their ridge and their uncertainty (`solve.py`).
"""

from crt_exp.estimators.classifier import RandomFeatureClassifier
from crt_exp.estimators.regressor import RandomFeatureRidge

__all__ = ["RandomFeatureClassifier", "RandomFeatureRidge"]
