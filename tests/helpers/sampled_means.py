"""Means of random samples, judged by their standard errors."""


def standard_error(samples):
    """The standard error of the mean over the first dimension of samples (draws, ...)."""
    return samples.std(0) / len(samples) ** 0.5


def check_mean(samples, expected, errors=5.0, rounding=1e-12):
    """The mean of samples (draws, ...) is the expected one within so many standard errors.

    Returns the standard errors, so that a test can check that it has power."""
    error = standard_error(samples)
    difference = (samples.mean(0) - expected).abs()
    assert (difference < errors * error + rounding).all()
    return error
