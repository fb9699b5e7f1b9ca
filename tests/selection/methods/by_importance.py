"""P(z = 1), and means of coefficients and parameters, by a sum over gate vectors, in numpy and scipy alone.

Everything else is integrated by importance sampling for each gate vector at each slab scale: around the mode, and then
around the moments that this found.
"""

import itertools

import numpy as np
from scipy import optimize, special, stats


def references(
    x,
    log_density,
    parameters,
    outputs=1,
    *,
    intercept=True,
    shown=np.exp,
    gate_of=None,
    rate=(1.0, None),
    slab=None,
    slab_unit=1.0,
    size=1024,
    nodes=16,
    seed=0,
):
    """Of standardised features, with an intercept that is normal with deviation 10, or without one.

    The rate is a number, or has a Beta prior; a slab scale that is not known is half-normal.

    ``log_density`` is that of observations and d = ``parameters`` numbers theta, of linear predictors of shape
    ``(S, n, K)`` and theta ``(S, d)``. Returns P(z = 1), the means of coefficients ``(p, K)`` and of ``shown(theta)``.
    """
    n, p = x.shape
    gate_of = np.arange(p) if gate_of is None else np.array(gate_of)
    gates = np.array(list(itertools.product([False, True], repeat=gate_of.max() + 1)))
    log_slabs = np.linspace(np.log(slab_unit) - 6.5, np.log(slab_unit) + 1.5, nodes)
    of_slab = stats.halfnorm(scale=slab_unit).logpdf(np.exp(log_slabs)) + log_slabs
    if slab is not None:
        log_slabs, of_slab = np.log([slab]), np.zeros(1)
    weights, coefs, learned = [], [], []
    for of_gate in gates:
        z, of_gates = of_gate[gate_of], _log_prior(of_gate, rate)
        count = z.sum()
        columns = np.hstack([x[:, z], np.ones((n, int(intercept)))])
        width = columns.shape[1] * outputs
        start = np.zeros(width + parameters)
        white, log_density_of_white = _heavy_tailed(len(start), size, seed)
        for log_slab, log_prior in zip(log_slabs, of_slab, strict=True):
            scale = np.repeat([np.exp(log_slab)] * count + [10.0] * intercept, outputs)

            def joint(point, columns=columns, width=width, scale=scale):
                beta, theta = point[:, :width], point[:, width:]
                eta = columns @ beta.reshape(len(point), -1, outputs)
                return log_density(eta, theta) + stats.norm.logpdf(beta, scale=scale).sum(1)

            def cost(point, joint=joint):
                return -joint(point[None])[0]

            mode = optimize.minimize(cost, start, jac=lambda point, joint=joint: -_gradient(joint, point)).x
            start = mode
            centre, spread = mode, np.linalg.inv(-_hessian(joint, mode))
            for _ in range(2):  # where the density is skew, its own moments are better than those at the mode
                root = np.linalg.cholesky(spread)
                points = centre + white @ root.T
                log_weight = joint(points) - log_density_of_white + np.log(np.diag(root)).sum()
                share = special.softmax(log_weight)
                centre = share @ points
                spread = np.atleast_2d(np.cov(points.T, aweights=share, ddof=0))
            evidence = special.logsumexp(log_weight) - np.log(len(points))
            mean = np.zeros((p, outputs))
            mean[z] = (share @ points[:, :width]).reshape(-1, outputs)[:count]
            weights.append(evidence + log_prior + of_gates)
            coefs.append(mean)
            learned.append(share @ shown(points[:, width:]))
    share = special.softmax(np.array(weights)).reshape(len(gates), -1)
    pips = share.sum(1) @ gates
    return pips, *(np.tensordot(share.ravel(), np.array(part), 1) for part in (coefs, learned))


def _log_prior(z, rate):
    closed = len(z) - z.sum()
    if not isinstance(rate, tuple):
        return z.sum() * np.log(rate) + closed * np.log(1 - rate)
    alpha, beta = rate[0], np.sqrt(len(z)) if rate[1] is None else rate[1]
    return special.betaln(alpha + z.sum(), beta + closed) - special.betaln(alpha, beta)


def _heavy_tailed(d, size, seed, df=6):
    """Points that are spread evenly as a multivariate t, and the logarithm of its density."""
    uniform = stats.qmc.Sobol(d + 1, seed=seed).random(size)
    white = stats.norm.ppf(uniform[:, 1:]) / np.sqrt(stats.chi2(df).ppf(uniform[:, :1]) / df)
    return white, stats.multivariate_t(shape=np.eye(d), df=df).logpdf(white)


def _gradient(function, at, step=1e-5):
    """By central differences of a function of shape (S, d) to (S,)."""
    moves = step * np.eye(len(at))
    return (function(at + moves) - function(at - moves)) / (2 * step)


def _hessian(function, at, step=1e-3):
    """Likewise."""
    d = len(at)
    unit = step * np.eye(d)
    pairs = unit[:, None] + unit[None]
    apart = unit[:, None] - unit[None]
    moves = np.concatenate([part.reshape(-1, d) for part in (pairs, -pairs, apart, -apart)])
    values = function(at + moves).reshape(4, d, d)
    return (values[0] + values[1] - values[2] - values[3]) / (4 * step**2)
