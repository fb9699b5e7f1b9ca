"""Coefficients whose distribution is far from normal: exact chains follow, against quadrature over two coefficients."""

import numpy as np
import pytest
import torch
from scipy import special, stats

from pyro_l0.selection import SpikeSlabBinomialRegressor, SpikeSlabClassifier, SpikeSlabCox, SpikeSlabPoissonRegressor
from pyro_l0.selection.methods import enumeration, sampling
from pyro_l0.selection.problem import Prior
from tests.selection.families import named_problem

# A mean has a standard error of up to .03 deviations by chains, or an error of up to .1 without; the end of a 90 %
# interval is off by up to .2 deviations, and by the noise of 2,000 draws in a long tail.
MEAN, END = 0.15, 0.4


def by_quadrature(log_likelihood, slab, rate=1.0, intercept=10.0, most=40.0):
    """P(z = 1), mean, deviation and 90 % interval of a slope whose feature has mean 0, and the log evidence."""
    a = np.linspace(-most, most, 801) if intercept else np.zeros(1)
    b = np.linspace(-6 * slab, 6 * slab, 2001)
    log = log_likelihood(a[None, :], b[:, None]) + stats.norm.logpdf(b, scale=slab)[:, None] + np.log(b[1] - b[0])
    log = log + (stats.norm.logpdf(a, scale=intercept) if intercept else 0.0)
    closed = special.logsumexp(log[1000]) - np.log(b[1] - b[0]) - stats.norm.logpdf(0.0, scale=slab)
    odds = special.logsumexp(log) + np.log(rate) - closed - np.log(max(1 - rate, 1e-300))
    pip = 1.0 if rate == 1 else special.expit(odds)
    density = pip * special.softmax(log).sum(1)
    density[1000] += 1 - pip
    mean = density @ b
    ends = b[np.searchsorted(density.cumsum(), [0.05, 0.95])]
    total = np.logaddexp(closed + np.log(max(1 - rate, 1e-300)), special.logsumexp(log) + np.log(rate))
    if intercept:
        total += np.log(a[1] - a[0])
    return pip, mean, np.sqrt(density @ (b - mean) ** 2), ends, total


def standardised(x, weight=None):
    return (x - np.average(x, weights=weight)) / deviation(x, weight)


def deviation(x, weight=None):
    return np.sqrt(np.average((x - np.average(x, weights=weight)) ** 2, weights=weight))


def check(kind, x, y, log_likelihood, rate, slab, *, method="auto", weight=None, extra=0.0, grid=None, **known):
    """A slab of 10 is the default of what is always in; the evidence has an extra term, and trials weigh rows, too."""
    scale = {"always_in_scale": None if slab == 10 else slab} if rate == 1 else {"slab_scale": slab}
    model = kind(rate=rate, method=method, random_state=0, **scale).fit(x[:, None], y, weight, **known)
    pip, mean, sd, ends, log_evidence = by_quadrature(log_likelihood, slab, rate, **(grid or {}))
    unit = deviation(x, known.get("trials", weight))
    # Weighted draws of Laplace's approximation hardly reach a long tail; NaN where they are too few.
    assert model.log_evidence_ == pytest.approx(log_evidence + extra, abs=0.2) or np.isnan(model.log_evidence_)
    coef, found = np.ravel(model.coef_)[0] * unit, np.ravel(model.interval(0.9)) * unit
    assert model.pip_[0] == pytest.approx(pip, abs=0.05)
    assert coef == pytest.approx(mean, abs=MEAN * sd)
    assert np.ravel(model.coef_sd_)[0] * unit == pytest.approx(sd, rel=0.2)
    np.testing.assert_allclose(found, ends, atol=END * sd)


def counts_of_two_arms(seed=3):
    """No event in the first arm."""
    rng = np.random.default_rng(seed)
    return np.repeat([0.0, 1.0], 30), np.r_[np.zeros(30), rng.poisson(3, 30)]


def log_poisson(x, y, weight, offset):
    cells = [(v, (weight * np.exp(offset))[x == v].sum(), (weight * y)[x == v].sum()) for v in np.unique(x)]
    extra = (weight * y) @ offset - weight @ special.gammaln(y + 1)
    s = dict(zip(np.unique(x), np.unique(standardised(x, weight)), strict=True))
    return lambda a, b: (
        extra + sum(total * (a + b * s[v]) - rate * np.exp(np.minimum(a + b * s[v], 300)) for v, rate, total in cells)
    )


def log_logistic(s, successes, trials, offset):
    def log_likelihood(a, b):
        parts = zip(s, successes, trials, offset, strict=True)
        return sum(k * (a + b * v + o) - n * np.logaddexp(0, a + b * v + o) for v, k, n, o in parts)

    return log_likelihood


@pytest.mark.parametrize("method", ["enumerate", "tempered"])
@pytest.mark.parametrize(("rate", "slab"), [(1.0, 10.0), (0.4, 6.0)])
def test_an_arm_without_events(rate, slab, method):
    """Counts: 19.0 would be the mean by Laplace's approximation for 15.0, and [10.7, 27.2] for [5.5, 30.3]."""
    x, y = counts_of_two_arms()
    likelihood = log_poisson(x, y, np.ones(60), np.zeros(60))
    check(SpikeSlabPoissonRegressor, x, y, likelihood, rate, slab, method=method, grid={"most": 60.0})


def test_an_arm_without_events_with_exposures_and_weights():
    x, y = counts_of_two_arms(5)
    weight, exposure = np.tile([1.0, 3.0, 2.0], 20), np.tile([1.0, 2.0, 5.0, 1.0], 15)
    offset = np.log(exposure)
    likelihood = log_poisson(x, y, weight, offset - np.average(offset, weights=weight))
    known = {"weight": weight, "offset": offset, "grid": {"most": 60.0}}
    check(SpikeSlabPoissonRegressor, x, y, likelihood, 1.0, 10.0, **known)


@pytest.mark.parametrize("method", ["enumerate", "tempered"])
@pytest.mark.parametrize(("rate", "slab"), [(1.0, 10.0), (0.3, 20.0)])
def test_separated_labels(rate, slab, method):
    """Only the prior bounds the coefficient."""
    rng = np.random.default_rng(0)
    y = (rng.random(40) < 0.5).astype(float)
    x = y + 0.05 * rng.normal(size=40)
    likelihood = log_logistic(standardised(x), y, np.ones(40), np.zeros(40))
    check(SpikeSlabClassifier, x, y, likelihood, rate, slab, method=method)


def test_separated_successes_with_an_offset():
    """Rows of all successes and of none."""
    rng = np.random.default_rng(1)
    x, trials, offset = np.repeat([-1.0, 1.0], 6), rng.integers(1, 4, size=12), rng.normal(size=12)
    y = np.where(x > 0, trials, 0)
    likelihood = log_logistic(standardised(x, trials), y, trials, offset - np.average(offset, weights=trials))
    known = {"trials": trials, "offset": offset, "extra": np.log(special.comb(trials, y)).sum()}
    check(SpikeSlabBinomialRegressor, x, y, likelihood, 1.0, 10.0, **known)


@pytest.mark.parametrize(("n", "slab", "rate"), [(10, 10.0, 1.0), (10, 30.0, 0.5), (6, 10.0, 0.4)])
def test_a_feature_that_orders_the_events(n, slab, rate):
    rng = np.random.default_rng(n)
    x = rng.normal(size=n)
    time = np.exp(-3 * x)
    order = np.argsort(-time)
    s = standardised(x)[order]

    def log_partial(a, b):
        eta = b * s + 0 * a
        return (eta - np.logaddexp.accumulate(eta, axis=1)).sum(1)[:, None]

    check(SpikeSlabCox, x, time, log_partial, rate, slab, grid={"intercept": 0.0})


@pytest.mark.parametrize("method", ["enumerate", "tempered"])
@pytest.mark.parametrize("kind", [SpikeSlabClassifier, SpikeSlabPoissonRegressor, SpikeSlabCox])
def test_ordinary_data_need_no_chains(kind, method, monkeypatch):
    """Laplace's approximation is near enough where there is much to learn from."""

    def refuse(*_):
        raise AssertionError("chains")

    monkeypatch.setattr(enumeration, "continued", refuse)
    monkeypatch.setattr(sampling, "continued", refuse)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 4))
    eta = x[:, 0] - 0.5 * x[:, 1]
    y = {
        SpikeSlabClassifier: rng.random(200) < special.expit(eta),
        SpikeSlabPoissonRegressor: rng.poisson(np.exp(0.5 * eta)),
        SpikeSlabCox: rng.exponential(np.exp(-eta)),
    }
    assert kind(method=method, slab_scale=1.0, random_state=0).fit(x, y[kind]).pip_[0] > 0.9


def test_chains_that_disagree_are_warned_of(monkeypatch):
    """One round of sweeps is not enough under a very wide slab; the remedy that is named works."""
    monkeypatch.setattr("pyro_l0.selection.methods.exact_chains._ROUNDS", 1)
    monkeypatch.setattr("pyro_l0.selection.methods.exact_chains._UNSURE", 0.0)
    x, y = counts_of_two_arms()
    with pytest.warns(UserWarning, match=r"chains disagree: the mean of a coefficient .* Set a smaller slab_scale or"):
        SpikeSlabPoissonRegressor(rate=1, random_state=0).fit(x[:, None], y)
    SpikeSlabPoissonRegressor(rate=1, always_in_scale=0.1, random_state=0).fit(x[:, None], y)


def test_second_derivatives_of_a_partial_likelihood():
    """On average over predictors, by differences; an offset moves these."""
    rng = np.random.default_rng(0)
    x, y = torch.from_numpy(rng.normal(size=(12, 3))), torch.from_numpy(rng.exponential(size=12))
    beta, offset = torch.from_numpy(rng.normal(size=(8, 3))), torch.from_numpy(rng.normal(size=(12, 1)))
    for known in (None, offset):
        likelihood = named_problem("efron", x, y, Prior(0.5), offset=known).likelihood

        def value(b, likelihood=likelihood):
            return likelihood.value((x @ b)[None, :, None])[0]

        expected = torch.stack([-torch.autograd.functional.hessian(value, b) for b in beta]).mean(0)
        found = likelihood.quadratic(x, (beta @ x.T)[:, :, None]).rows(torch.arange(3)[None])[0]
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
