"""Frequency weights: a row that counts often is the same as that row repeated."""

import numpy as np
import pytest
from scipy import integrate, stats

from pyro_l0.selection import SpikeSlabClassifier, SpikeSlabPoissonRegressor, SpikeSlabRegressor
from tests.selection.fitted import ESTIMATORS, assert_equal_fits
from tests.selection.test_groups import grouped, observed


def both(kind, y, x, weight, **options):
    """Fits to rows with weights, and to repeated rows."""
    weighted = kind(random_state=0, **options).fit(x, y, sample_weight=weight)
    return weighted, kind(random_state=0, **options).fit(x.repeat(weight, 0), y.repeat(weight))


def assert_same(weighted, repeated):
    assert_equal_fits(weighted, repeated, "pip_ coef_ coef_sd_", atol=1e-8)
    assert weighted.log_evidence_ == pytest.approx(repeated.log_evidence_, abs=1e-6)
    for one, other in zip(weighted.credible_sets_, repeated.credible_sets_, strict=True):
        assert (one.features, one.probability) == (other.features, other.probability)
        assert one.purity == pytest.approx(other.purity)


def assert_same_predictions(weighted, repeated, x):
    np.testing.assert_allclose(weighted.intercept_, repeated.intercept_, atol=1e-8)
    np.testing.assert_allclose(weighted.predict(x), repeated.predict(x), atol=1e-8)


@pytest.mark.parametrize("options", [{}, {"standardize": False}, {"fit_intercept": False}], ids=str)
@pytest.mark.parametrize("kind", ESTIMATORS)
def test_rows_are_repeated(kind, options):
    """Weights of 0 to 3, with groups; nothing differs but by rounding."""
    of, x, eta, rng = grouped(3, 40, strength=0.8)
    options = options | ({} if kind is SpikeSlabRegressor else {"slab_scale": 0.7})
    weight = rng.integers(0, 4, 40)
    models = both(kind, observed(kind, eta, rng), x + 2, weight, groups=of, **options)
    assert_same(*models)
    assert_same_predictions(*models, x)


def test_classes_are_repeated():
    """Three of them; the draws of their intercepts come in another order."""
    of, x, eta, rng = grouped(3, 60, strength=0.8)
    y = np.digitize(eta + rng.normal(size=60), [-1, 1])
    assert_same(*both(SpikeSlabClassifier, y, x, rng.integers(0, 3, 60), groups=of, slab_scale=0.7))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [SpikeSlabRegressor, SpikeSlabPoissonRegressor])
def test_sampled_rows_are_repeated(kind):
    """The same chains, as their random numbers are the same."""
    of, x, eta, rng = grouped(5, 40, strength=0.8)
    y = observed(kind, eta, rng)
    weighted, repeated = both(kind, y, x, rng.integers(1, 4, 40), groups=of, method="tempered")
    np.testing.assert_allclose(weighted.pip_, repeated.pip_, atol=1e-6)


@pytest.mark.parametrize(("total", "noise"), [(1.5, None), (1.0, 0.5), (0.3, 0.5)])
def test_weights_of_a_small_sum(total, noise):
    """Of a known noise scale, or of more than the one observation that an intercept takes; against integrals."""
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=30), rng.random(30)
    y, weight = 2 * x + rng.normal(size=30) * 0.5, weight * (total / weight.sum())
    model = SpikeSlabRegressor(slab_scale=1.0, rate=0.3, noise_scale=noise, standardize=False)
    model.fit(x[:, None], y, sample_weight=weight)
    x, y = (part - np.average(part, weights=weight) for part in (x, y))
    unit = np.sqrt(np.average(y**2, weights=weight))

    def likelihood(scale, is_open):
        precision = is_open * (weight * x * x).sum() / scale**2 + 1
        fit = is_open * (weight * x * y).sum() / scale**2
        log = fit**2 / precision / 2 - (weight * y * y).sum() / 2 / scale**2
        return np.exp(log) * scale ** (1 - total) / np.sqrt(precision)

    def over_noise(is_open):
        def density(t):
            return likelihood(np.exp(t), is_open) * stats.halfcauchy.pdf(np.exp(t), scale=unit) * np.exp(t)

        return integrate.quad(density, -8, 25, limit=500)[0]

    closed, opened = (over_noise(z) if noise is None else likelihood(noise, z) for z in (0, 1))
    assert model.pip_[0] == pytest.approx(0.3 * opened / (0.3 * opened + 0.7 * closed), abs=1e-6)


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_class_of_weight_zero_keeps_its_coefficients(gone):
    """It has a row in them and a column in the probabilities, whichever it is."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3))
    y = np.digitize(2 * x[:, 0] + rng.normal(size=60), [-1, 1])
    model = SpikeSlabClassifier(random_state=0).fit(x, y, np.where(y == gone, 0.0, 1.0))
    assert model.coef_.shape == (3, 3)
    assert model.predict_proba(x[:2]).shape == (2, 3)
    assert len(model.summary()) == 9
