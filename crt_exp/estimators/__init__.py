"""scikit-learn estimators on random features: features, kernel regression, and ridge regression from sums over rows."""

from crt_exp.estimators.ridge import RandomFeatureClassifier, RandomFeatureRidge

__all__ = ["RandomFeatureClassifier", "RandomFeatureRidge"]
