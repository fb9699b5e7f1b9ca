"""Ordered classes and noise with heavy tails: labels in their order, predictions, and data that are far off."""

import contextlib

import numpy as np
import pandas as pd
import pytest
from scipy.special import expit

from pyro_l0.selection import SpikeSlabOrdinal, SpikeSlabRegressor, SpikeSlabRobust
from pyro_l0.selection.methods import exact_chains
from tests.selection.fitted import data, fitted

LEVELS = ["low", "middle", "high"]


@pytest.fixture
def short(monkeypatch):
    """Chains of few sweeps, where more would find the same."""
    monkeypatch.setattr(exact_chains, "_ROUNDS", 2)


def categories(numbers):
    return pd.Series(pd.Categorical.from_codes(numbers, LEVELS, ordered=True))


def test_the_order_of_labels():
    """By numbers and by ordered categories, of which some may have no row; text alone is warned of."""
    x, y = data(SpikeSlabOrdinal)
    assert fitted(SpikeSlabOrdinal).classes_.tolist() == [3, 4, 5]
    model, ends = SpikeSlabOrdinal(), y != 4
    text = categories(y - 3).to_numpy(dtype=object)
    for rows, labels, classes in (
        (x, categories(y - 3), LEVELS),
        (x[ends], categories(y - 3)[ends], ["low", "high"]),
        (x, text, sorted(LEVELS)),
    ):
        with pytest.warns(UserWarning, match="Pass a pandas Series") if labels is text else contextlib.nullcontext():
            _, numbers = model._validated(rows, labels)
        assert model.classes_.tolist() == classes
        assert (model.classes_[numbers.astype(int)] == np.array(labels)).all()


def test_probabilities_of_ordered_classes():
    """Averages over draws; an offset moves all odds by as much."""
    x, _ = data(SpikeSlabOrdinal)
    model = fitted(SpikeSlabOrdinal)
    draws = model.sample(2000)
    assert draws["thresholds"].shape == (2000, 2)
    np.testing.assert_allclose(model.thresholds_, draws["thresholds"].mean(0))
    eta = (draws["coef"] @ x.T + draws["intercept"][:, None])[..., None]
    below = expit(draws["thresholds"][:, None] - eta).mean(0)
    found = model.predict_proba(x)
    np.testing.assert_allclose(found.cumsum(1)[:, :2], below, rtol=1e-10)
    np.testing.assert_allclose(found.sum(1), 1)
    assert (model.predict(x) == model.classes_[found.argmax(1)]).all()
    moved = expit(draws["thresholds"][:, None] - eta - 1.0).mean(0)
    np.testing.assert_allclose(model.predict_proba(x, offset=np.ones(80)).cumsum(1)[:, :2], moved, rtol=1e-10)


@pytest.mark.slow
def test_reversed_labels():
    """The opposite effects, and the same probabilities: no end of the order is special."""
    x, y = data(SpikeSlabOrdinal)
    one, other = (SpikeSlabOrdinal(random_state=0).fit(x, labels) for labels in (y, -y))
    np.testing.assert_allclose(other.pip_, one.pip_, atol=0.03)
    np.testing.assert_allclose(other.coef_ / one.coef_sd_, -one.coef_ / one.coef_sd_, atol=0.1)
    np.testing.assert_allclose(other.thresholds_, -one.thresholds_[::-1], atol=0.1)


def test_middles_and_quantiles():
    """The mean of the middles; quantiles are those of draws with their noise."""
    x, _ = data(SpikeSlabRobust)
    model = fitted(SpikeSlabRobust)
    np.testing.assert_allclose(model.predict(x), x @ model.coef_ + model.intercept_)
    np.testing.assert_allclose(model.predict(x, offset=np.ones(80)), model.predict(x) + 1.0)
    draws = model.sample(2000)
    assert model.noise_scale_ == draws["noise_scale"].mean()
    assert model.degrees_of_freedom_ == draws["degrees_of_freedom"].mean()
    new = model.sample_y(x[:1], 40_000)[0]
    found = model.predict_quantiles(x[:1], [0.1, 0.5, 0.9])[0]
    share = np.array([(new <= at).mean() for at in found])
    np.testing.assert_allclose(share, [0.1, 0.5, 0.9], atol=5 * 0.5 / np.sqrt(2000))


def test_given_degrees_of_freedom(short):
    x, y = data(SpikeSlabRobust)
    model = SpikeSlabRobust(degrees_of_freedom=4, random_state=0).fit(x, y)
    assert (model.sample(5)["degrees_of_freedom"] == 4).all()
    assert model.degrees_of_freedom_ == 4
    with pytest.raises(ValueError, match="'degrees_of_freedom' parameter of SpikeSlabRobust must be a float in"):
        SpikeSlabRobust(degrees_of_freedom=0).fit(x, y)


@pytest.mark.slow
def test_units_of_robust_regressions(short):
    """Other units of X and y change nothing else, however far from 1."""
    x, y = data(SpikeSlabRobust)
    first = SpikeSlabRobust(random_state=0).fit(x, y)
    second = SpikeSlabRobust(random_state=0).fit(0.01 * x - 7, 1e6 * y + 3e6)
    np.testing.assert_allclose(second.pip_, first.pip_, atol=0.1)
    np.testing.assert_allclose(second.coef_[[0, 2]], 1e8 * first.coef_[[0, 2]], rtol=0.1)
    assert second.noise_scale_ == pytest.approx(1e6 * first.noise_scale_, rel=0.1)


@pytest.mark.filterwarnings("ignore:The standard error of an inclusion probability")
def test_wild_observations(short):
    """Three of a size of a million leave everything nearly as it was, where a normal regression finds nothing."""
    x, y = data(SpikeSlabRobust)
    wild = y.copy()
    wild[[3, 30, 60]] = [1e6, -1e6, 1e6]
    model = SpikeSlabRobust(random_state=0).fit(x, wild)
    assert model.select().tolist() == [0, 2]
    np.testing.assert_allclose(model.coef_[[0, 2]], fitted(SpikeSlabRobust).coef_[[0, 2]], rtol=0.3)
    assert SpikeSlabRegressor(method="enumerate").fit(x, wild).select().tolist() == []


@pytest.mark.slow
def test_weights_repeat_rows(short):
    """In the priors' units, too."""
    x, y = data(SpikeSlabRobust)
    weight = np.random.default_rng(0).integers(0, 3, 80)
    for kind, labels in ((SpikeSlabRobust, y), (SpikeSlabOrdinal, data(SpikeSlabOrdinal)[1])):
        one = kind(random_state=0).fit(x, labels, weight)
        other = kind(random_state=0).fit(x.repeat(weight, 0), labels.repeat(weight))
        np.testing.assert_allclose(one.pip_, other.pip_, atol=0.1)
        np.testing.assert_allclose(one.coef_[[0, 2]], other.coef_[[0, 2]], rtol=0.15)
