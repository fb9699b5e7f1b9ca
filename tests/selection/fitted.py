"""Data that tell of two features, and estimators fitted to them."""

from contextlib import contextmanager
from functools import cache

import numpy as np
import pyro
import torch
from scipy import stats
from scipy.special import expit, softmax

from pyro_l0.selection import (
    SpikeSlabBinomialRegressor,
    SpikeSlabClassifier,
    SpikeSlabCox,
    SpikeSlabMultiTaskRegressor,
    SpikeSlabNegativeBinomial,
    SpikeSlabOrdinal,
    SpikeSlabPoissonRegressor,
    SpikeSlabRegressor,
    SpikeSlabRobust,
)

ESTIMATORS = [SpikeSlabRegressor, SpikeSlabClassifier, SpikeSlabPoissonRegressor]
# Those with parameters of their own.
SAMPLED = [SpikeSlabNegativeBinomial, SpikeSlabOrdinal, SpikeSlabRobust]
EVERY = [*ESTIMATORS, *SAMPLED, SpikeSlabMultiTaskRegressor, SpikeSlabBinomialRegressor, SpikeSlabCox]


def data(kind, n=80, p=4, seed=0):
    """Features of very different units, and observations of which features 0 and 2 tell."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, p)) * 10.0 ** np.arange(-1, p - 1) + 5.0
    eta = 10 * (x[:, 0] - 5.0) - 0.1 * (x[:, 2] - 5.0)
    if kind is SpikeSlabRegressor:
        return x, 3.0 + eta + rng.normal(size=n)
    if kind is SpikeSlabMultiTaskRegressor:
        return x, [3.0, 1e3] + np.stack([eta, 30 * eta], 1) + rng.normal(size=(n, 2)) * [1.0, 50.0]
    if kind is SpikeSlabClassifier:
        return x, np.where(rng.random(n) < expit(2 * eta), "yes", "no")
    if kind is SpikeSlabCox:
        time = rng.exponential(np.exp(-eta))
        return x, np.rec.fromarrays([time < 2, np.minimum(time, 2)], names="event,time")
    if kind is SpikeSlabOrdinal:
        return x, 3 + np.digitize(2 * eta + rng.logistic(size=n), [-2.0, 1.0])
    if kind is SpikeSlabRobust:
        return x, 3.0 + eta + 0.7 * rng.standard_t(2.0, size=n)
    if kind is SpikeSlabBinomialRegressor:
        return x, rng.binomial(1, expit(3 * eta)).astype(float)
    more = rng.gamma(8.0, 0.125, size=n) if kind is SpikeSlabNegativeBinomial else 1.0
    return x, rng.poisson(np.exp(0.5 + 0.5 * eta) * more).astype(float)


def three_classes(n=150):
    """Feature 1 of three tells the classes apart."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=(n, 3))
    odds = softmax(x[:, [1]] * np.array([2.0, 0.0, -2.0]), axis=1)
    return x, (rng.random((n, 1)) > odds.cumsum(1)).sum(1)


@cache
def fitted(kind):
    """An estimator with a seed on its data; the tests share it and leave it as it is."""
    return kind(random_state=0).fit(*data(kind))


def assert_equal_fits(one, other, names="pip_ coef_ coef_sd_ intercept_ slab_scale_ log_evidence_", **tolerance):
    """To the bit where no tolerance is given."""
    for name in names.split():
        found, wanted = getattr(other, name), getattr(one, name)
        np.testing.assert_allclose(found, wanted, err_msg=name, **(tolerance or {"rtol": 0}))


@contextmanager
def nothing_else_changes():
    """The global generators and Pyro's parameters stay as they were."""
    pyro.param("mine", torch.tensor(3.0))
    np.random.seed(5)  # noqa: NPY002 - the global state is what the tests are about
    torch.manual_seed(5)
    before = np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    yield
    assert (np.random.get_state()[1] == before[0]).all()  # noqa: NPY002
    assert (torch.get_rng_state() == before[1]).all()
    assert dict(pyro.get_param_store().items()) == {"mine": torch.tensor(3.0)}


def log_density(kind, y, eta, draws):
    """Of observations at linear predictors of shape ``(S, n)``, by scipy."""
    noise = draws.get("noise_scale", np.ones(1))[:, None]
    if kind in (SpikeSlabRegressor, SpikeSlabMultiTaskRegressor):
        return stats.norm.logpdf(y, eta, noise)
    if kind in (SpikeSlabClassifier, SpikeSlabBinomialRegressor):
        return stats.bernoulli.logpmf(y, expit(eta))
    if kind is SpikeSlabNegativeBinomial:
        size = 1 / draws["dispersion"][:, None]
        return stats.nbinom.logpmf(y, size, size / (size + np.exp(eta)))
    if kind is SpikeSlabOrdinal:
        below = expit(draws["thresholds"][:, None] - eta[:, :, None])
        return np.log(np.diff(below, axis=2, prepend=0.0, append=1.0)[:, np.arange(len(y)), y])
    if kind is SpikeSlabRobust:
        return stats.t.logpdf(y, draws["degrees_of_freedom"][:, None], eta, noise)
    return stats.poisson.logpmf(y, np.exp(eta))
