"""Frequency weights: a row that counts often is the same as that row repeated."""

import numpy as np
import pytest

from pyro_l0.selection import SpikeSlabClassifier, SpikeSlabPoissonRegressor, SpikeSlabRegressor
from tests.selection.fitted import ESTIMATORS
from tests.selection.test_groups import grouped, observed


def both(kind, y, x, weight, **options):
    """Fits to rows with weights, and to repeated rows."""
    weighted = kind(random_state=0, **options).fit(x, y, sample_weight=weight)
    return weighted, kind(random_state=0, **options).fit(x.repeat(weight, 0), y.repeat(weight))


def assert_same(weighted, repeated):
    np.testing.assert_allclose(weighted.pip_, repeated.pip_, atol=1e-8)
    np.testing.assert_allclose(weighted.coef_, repeated.coef_, atol=1e-8)
    np.testing.assert_allclose(weighted.coef_sd_, repeated.coef_sd_, atol=1e-8)
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


def test_arviz_repeats_the_rows():
    """Of whole weights; fractions cannot be repeated."""
    _, x, eta, rng = grouped(3, 30)
    weight = rng.integers(0, 3, 30)
    weighted, repeated = both(SpikeSlabRegressor, eta + rng.normal(size=30), x, weight)
    found, wanted = (model.to_arviz()["log_likelihood"]["y"].values for model in (weighted, repeated))
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    with pytest.raises(ValueError, match="Expected whole weights"):
        SpikeSlabRegressor(random_state=0).fit(x, eta, sample_weight=weight + 0.5).to_arviz()


@pytest.mark.parametrize("weight", [-np.ones(30), np.ones(29), np.zeros(30), np.full(30, np.nan)])
def test_wrong_weights(weight):
    """Negative, too few, none at all, or NaN."""
    _, x, eta, _ = grouped(3, 30)
    with pytest.raises(ValueError, match=r"weight|empty"):
        SpikeSlabRegressor().fit(x, eta, sample_weight=weight)
