"""Estimates of kernels by the features of a map."""


def estimate_kernel(phi, x, y, noise, params):
    """The estimates (..., L, S) of all pairs of x (..., L, d) and y (..., S, d)."""
    queries = phi.phi_q(x, noise, params).exp()
    keys = phi.phi_k(y, noise, params).exp()
    return queries @ keys.mT


def estimate_pairs(phi, x, y, noise, params):
    """The estimates (..., L) of the pairs of equal position of x and y (..., L, d)."""
    queries = phi.phi_q(x, noise, params).exp()
    keys = phi.phi_k(y, noise, params).exp()
    return (queries * keys).sum(-1)
