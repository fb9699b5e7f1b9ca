"""Quantiles and draws of new observations: against mixtures written down here, and on held-out data."""

import itertools

import numpy as np
import pytest
from scipy import stats
from scipy.optimize import brentq

from pyro_l0.selection import (
    SpikeSlabMultiTaskRegressor,
    SpikeSlabNegativeBinomial,
    SpikeSlabPoissonRegressor,
    SpikeSlabRegressor,
)
from tests.selection.fitted import ESTIMATORS, SAMPLED, data, fitted

NOISE, SLAB, RATE = 0.8, 1.2, 0.4
LEVELS = [0.5, 0.8, 0.9, 0.95]


def mixture(x, y, new):
    """Weights, means and deviations of the normals, one for each subset, that predict an observation at ``new``."""
    logs, means, deviations = [], [], []
    for z in itertools.product([False, True], repeat=x.shape[1]):
        some = x[:, list(z)]
        covariance = NOISE**2 * np.eye(len(y)) + SLAB**2 * some @ some.T
        logs.append(stats.multivariate_normal(cov=covariance).logpdf(y) + np.log(np.where(z, RATE, 1 - RATE)).sum())
        across = SLAB**2 * some @ new[list(z)]
        means.append(across @ np.linalg.solve(covariance, y))
        known = across @ np.linalg.solve(covariance, across)
        deviations.append(np.sqrt(NOISE**2 + SLAB**2 * (new[list(z)] ** 2).sum() - known))
    return np.exp(logs - np.logaddexp.reduce(logs)), np.array(means), np.array(deviations)


@pytest.fixture(scope="module")
def known():
    """A fit with known scales, new features, and the cdf of an observation at these."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(25, 3))
    y = x @ [0.9, 0.3, 0.0] + NOISE * rng.normal(size=25)
    options = {"rate": RATE, "slab_scale": SLAB, "noise_scale": NOISE, "standardize": False, "fit_intercept": False}
    new = np.array([2.0, -3.0, 1.0])
    weights, means, deviations = mixture(x, y, new)
    model = SpikeSlabRegressor(random_state=0, **options).fit(x, y)
    return model, new, lambda t: weights @ stats.norm.cdf((np.asarray(t) - means[:, None]) / deviations[:, None])


def test_quantiles_are_those_of_the_mixture_over_subsets(known):
    """The share of the exact distribution below each quantile; of 2,000 draws, five standard errors."""
    model, new, cdf = known
    probs = [0.025, 0.25, 0.5, 0.75, 0.975]
    found = model.predict_quantiles(new[None], probs)
    assert found.shape == (1, 5)
    error = np.sqrt(np.array(probs) * (1 - np.array(probs)) / 2000)
    assert (np.abs(cdf(found[0]) - probs) < 5 * error).all()
    exact = [brentq(lambda t, prob=prob: cdf([t])[0] - prob, -50, 50) for prob in (0.05, 0.5, 0.95)]
    np.testing.assert_allclose(model.predict_quantiles(new[None])[0], exact, atol=0.15)
    np.testing.assert_array_equal(model.predict_quantiles(new[None], 0.25), found[:, 1])


def test_draws_have_the_distribution_of_the_mixture(known):
    """By Kolmogorov and Smirnov; another seed gives other draws, the same seed the same."""
    model, new, cdf = known
    found = model.sample_y(new[None], 2000, random_state=1)
    assert found.shape == (1, 2000)
    assert stats.kstest(found[0], cdf).pvalue > 1e-3
    np.testing.assert_array_equal(found, model.sample_y(new[None], 2000, random_state=1))
    assert (found != model.sample_y(new[None], 2000, random_state=2)).any()


def test_a_draw_is_joint_over_observations(known):
    """Two observations at the same features share the coefficients, not the noise."""
    model, new, _ = known
    one, other = model.sample_y(np.stack([new, new]), 5000)
    _, sd = model.predict(new[None], return_std=True)
    shared = 1 - (NOISE / sd[0]) ** 2
    assert np.corrcoef(one, other)[0, 1] == pytest.approx(shared, abs=5 / np.sqrt(5000))


@pytest.mark.parametrize("kind", [*ESTIMATORS, *SAMPLED[:2], SpikeSlabMultiTaskRegressor])
def test_draws_agree_with_predictions(kind):
    """Means and deviations of numbers, shares of labels; within five standard errors of these."""
    model = fitted(kind)
    x, y = (part[:6] for part in data(kind))
    found = model.sample_y(x, 20_000)
    assert model.sample_y(x).shape == (*y.shape, 1)
    if hasattr(model, "classes_"):
        assert set(np.unique(found)) <= set(model.classes_)
        shares, wanted = (found[:, :, None] == model.classes_).mean(1), model.predict_proba(x)
        assert (np.abs(shares - wanted) < 5 * np.sqrt(wanted * (1 - wanted) / 2e4) + 1e-3).all()
        assert not hasattr(model, "predict_quantiles")
    else:
        mean, sd = model.predict(x, return_std=True)
        # The predictions are those of 2,000 draws or, of a mean, of the posterior that these are from.
        assert (np.abs(found.mean(-1) - mean) < 5 * sd / np.sqrt(2000)).all()
        np.testing.assert_allclose(found.std(-1), sd, rtol=0.05)


def test_counts_far_from_the_data():
    """Their means are infinite in some draws, and their lower quantiles are not."""
    model = fitted(SpikeSlabPoissonRegressor)
    x = data(SpikeSlabPoissonRegressor)[0][:1] + 1e3
    assert model.predict_quantiles(x, [0.05, 0.95]).shape == (1, 2)
    assert (model.predict_quantiles(x) >= 0).all()


def coverage(kind, sets, n=60, p=4):
    """Of central intervals, the share of held-out observations inside; one on an end counts as half."""
    inside = []
    for seed in range(sets):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(n + 100, p))
        eta = x[:, :2] @ [0.5, -0.3]
        if kind is SpikeSlabRegressor:
            y = 3 * eta + rng.normal(size=len(eta))
        else:
            spread = 1 if kind is SpikeSlabPoissonRegressor else rng.gamma(3.0, 1 / 3, len(eta))
            y = rng.poisson(np.exp(2 + eta) * spread)
        model = kind(random_state=seed, slab_scale=1.0, rate=0.3).fit(x[:n], y[:n])
        probs = [end for level in LEVELS for end in ((1 - level) / 2, (1 + level) / 2)]
        lower, upper = model.predict_quantiles(x[n:], probs).T.reshape(len(LEVELS), 2, -1).swapaxes(0, 1)
        apart = (np.sign(y[n:] - lower) + np.sign(upper - y[n:])) / 2
        inside.append(apart.mean(1))
    return np.mean(inside, 0)


@pytest.mark.parametrize(
    ("kind", "sets", "atol"),
    [
        (SpikeSlabRegressor, 30, 0.03),
        pytest.param(SpikeSlabRegressor, 200, 0.02, marks=pytest.mark.slow),
        pytest.param(SpikeSlabPoissonRegressor, 200, 0.02, marks=pytest.mark.slow),
        pytest.param(SpikeSlabNegativeBinomial, 40, 0.02, marks=pytest.mark.slow),
    ],
)
def test_intervals_cover_held_out_observations(kind, sets, atol):
    """Thirty data sets have a standard error of .012 at a level of .9, 40 one of .01, and 200 one of .005."""
    np.testing.assert_allclose(coverage(kind, sets), LEVELS, atol=atol)
