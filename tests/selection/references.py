"""Posteriors of a few features by sums over all gates, in numpy and scipy alone, which share no code with ours."""

import itertools
from typing import NamedTuple

import numpy as np
from scipy import linalg, special, stats


class Known(NamedTuple):
    """Inclusion probabilities, moments of the coefficients and of the intercept, and the log evidence."""

    pips: np.ndarray
    mean: np.ndarray
    sd: np.ndarray
    intercept: float
    intercept_sd: float
    log_evidence: float


def log_prior(z, rates):
    """That of gates; None where one that is always open is closed."""
    if any(rate == 1 and not k for k, rate in zip(z, rates, strict=True)):
        return None
    return sum(np.log(rate if k else 1 - rate) for k, rate in zip(z, rates, strict=True) if rate < 1)


def by_densities(x, y, covariance, rates, always=None, *, noise, slab, intercept=True, gate_of=None):
    """Normal observations of known scales, whose noise has a covariance up to its scale.

    The evidence of gates is the density of the part of y that is orthogonal to all columns with flat priors.
    """
    rates, constant = np.array(rates), np.ones((len(y), int(intercept)))
    gate_of = np.arange(x.shape[1]) if gate_of is None else np.array(gate_of)
    is_in = rates[gate_of] == 1
    flat = np.hstack([constant, x[:, is_in & (always is None)]])
    rest = linalg.null_space(flat.T) if flat.size else np.eye(len(y))
    variances = np.where(is_in, np.inf if always is None else (always * noise) ** 2, slab**2)
    rows = []
    for z in itertools.product([0, 1], repeat=len(rates)):
        if (of_gates := log_prior(z, rates)) is None:
            continue
        on = np.array(z, dtype=bool)[gate_of]
        seen = rest.T @ x[:, on & np.isfinite(variances)]
        spread = (seen * variances[on & np.isfinite(variances)]) @ seen.T
        log = stats.multivariate_normal.logpdf(rest.T @ y, cov=noise**2 * rest.T @ covariance @ rest + spread)
        columns, precision = np.hstack([constant, x[:, on]]), np.linalg.inv(covariance) / noise**2
        prior = np.r_[np.zeros(int(intercept)), 1 / variances[on]]
        spread = np.linalg.inv(columns.T @ precision @ columns + np.diag(prior))
        mean, square = np.zeros((2, x.shape[1] + 1))
        place = np.roll(np.r_[on, intercept].nonzero()[0], int(intercept))  # the columns begin with the intercept
        mean[place] = spread @ columns.T @ precision @ y
        square[place] = spread.diagonal() + mean[place] ** 2
        rows.append((log + of_gates, z, mean, square))
    log, z, mean, square = map(np.array, zip(*rows, strict=True))
    probs = special.softmax(log)
    mean, sd = probs @ mean, np.sqrt(probs @ square - (probs @ mean) ** 2)
    return Known(probs @ z, mean[:-1], sd[:-1], mean[-1], sd[-1], special.logsumexp(log))


def unknown_scales(x, y, covariance, rates, noise_unit, slab_unit):
    """All vectors of gates, and log p(y, z) of each: normal observations, by a grid of both scales."""
    rates, (noise, log_noise), (slab, log_slab) = np.array(rates), *map(log_grid, (-7, -9), (4, 2))
    rest = linalg.null_space(np.hstack([np.ones((len(y), 1)), x[:, rates == 1]]).T)
    root = linalg.cholesky(rest.T @ covariance @ rest, lower=True)
    columns, target = (linalg.solve_triangular(root, rest.T @ part, lower=True) for part in (x, y))
    of_scales = (stats.halfcauchy.logpdf(noise) + log_noise)[:, None] + stats.halfnorm.logpdf(slab) + log_slab
    gates = [z for z in itertools.product([0, 1], repeat=len(rates)) if log_prior(z, rates) is not None]
    logs = []
    for z in gates:
        values, vectors = np.linalg.eigh((columns * (z * (rates < 1))) @ columns.T)
        variance = (noise[:, None, None] * noise_unit) ** 2 + (slab[:, None] * slab_unit) ** 2 * values.clip(min=0)
        density = stats.norm.logpdf(vectors.T @ target, scale=np.sqrt(variance)).sum(2)
        logs.append(special.logsumexp(density + of_scales) + log_prior(z, rates) - np.log(root.diagonal()).sum())
    return np.array(gates), np.array(logs)


def log_grid(low, high, nodes=100):
    """Numbers, and their logarithms with that of a step."""
    logs = np.linspace(low, high, nodes)
    return np.exp(logs), logs + np.log(logs[1] - logs[0])


def by_quadrature(log_likelihood, x, rates, scales, *, offset=0.0, intercept=10.0, most=4.0, nodes=49):
    """P(z = 1), means of coefficients, and the log evidence, by a grid for each of them and the intercept.

    ``log_likelihood`` is that of linear predictors, shape ``(S, n)``. An odd number of nodes has one at zero.
    """
    columns = np.hstack([np.ones((len(x), int(intercept > 0))), x - x.mean(0)])
    deviations = [*[intercept] * (intercept > 0), *scales]
    grid = np.linspace(-most, most, nodes)
    logs, gates, means = [], [], []
    for z in itertools.product([0, 1], repeat=x.shape[1]):
        if (log := log_prior(z, rates)) is None:
            continue
        on = [*[1] * (intercept > 0), *z]
        beta = np.stack(np.meshgrid(*[grid if k else grid[:1] * 0 for k in on], indexing="ij"), -1)
        beta = beta.reshape(-1, len(on))
        prior = (stats.norm.logpdf(beta, scale=deviations) + np.log(grid[1] - grid[0])) @ on
        each = log_likelihood(beta @ columns.T + offset) + prior
        logs.append(special.logsumexp(each) + log)
        gates.append(z)
        means.append(special.softmax(each) @ beta[:, intercept > 0 :])
    probs = special.softmax(logs)
    return probs @ gates, probs @ means, special.logsumexp(logs)
