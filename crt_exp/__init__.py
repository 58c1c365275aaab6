"""Random features for softmax and Gaussian kernels, and linear-time attention."""

__version__ = "0.1.0"
