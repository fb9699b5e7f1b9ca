"""Estimators of spike-and-slab regressions on awkward data, and what they refuse."""

import contextlib
from typing import get_type_hints

import numpy as np
import pandas as pd
import pytest
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline

from pyro_l0.selection import SpikeSlabClassifier, SpikeSlabCox, SpikeSlabOrdinal, SpikeSlabRegressor, SpikeSlabRobust
from pyro_l0.selection.families import Student
from tests.selection.families import design_of
from tests.selection.fitted import ESTIMATORS, EVERY, data, fitted


@pytest.mark.parametrize("standardize", [True, False])
@pytest.mark.parametrize("value", [4.0, 0.1])
def test_a_constant_feature_leaves_the_others_alone(value, standardize):
    """Its inclusion probability and coefficient are zero, a warning names it, and the rate does not count it.

    Rounding would leave .1, eighty times, with a deviation.
    """
    x, y = data(SpikeSlabRegressor)
    with pytest.warns(UserWarning, match="inclusion probability and the coefficient of 'x1' are 0"):
        model = SpikeSlabRegressor(standardize=standardize, random_state=0).fit(np.insert(x, 1, value, axis=1), y)
    alone = SpikeSlabRegressor(standardize=standardize, random_state=0).fit(x, y)
    np.testing.assert_array_equal(np.delete(model.pip_, 1), alone.pip_)
    assert model.pip_[1] == model.coef_[1] == model.coef_sd_[1] == 0.0
    assert not model.sample(100)["gates"][:, 1].any()
    assert model.log_evidence_ == alone.log_evidence_
    np.testing.assert_allclose(model.predict(np.insert(x, 1, -9.0, axis=1)), alone.predict(x), rtol=1e-6)


@pytest.mark.parametrize("kind", EVERY)
def test_constant_features_only(kind):
    """Nothing can be learned but the intercept."""
    _, y = data(kind)
    x = np.ones((len(y), 2))
    with pytest.warns(UserWarning, match="'x0', 'x1' are 0"):
        model = kind(method="tempered", random_state=0).fit(x, y)
    assert model.pip_.tolist() == [0.0, 0.0]
    assert not model.coef_.any()
    assert model.credible_sets_ == []
    assert model.predict(x).shape == y.shape


def test_a_feature_that_separates_the_classes_is_not_constant():
    """It is constant within each class; the largest effect that there can be, and finite by its slab."""
    x, y = data(SpikeSlabClassifier)
    x[:, 1] = y == "yes"
    model = SpikeSlabClassifier(random_state=0).fit(x, y)
    assert model.pip_[1] > 0.99
    assert 1 < model.coef_[0, 1] < 100


@pytest.mark.parametrize("kind", EVERY)
def test_one_feature(kind):
    x, y = data(kind)
    model = kind(random_state=0).fit(x[:, :1], y)
    assert model.pip_.shape == (1,)
    assert model.pip_[0] > 0.8
    assert model.predict(x[:, :1]).shape == y.shape


def test_more_features_than_observations():
    """The two of fifteen that matter, from ten observations with little noise."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(10, 15))
    y = 5 * x[:, 3] - 5 * x[:, 8] + 0.05 * rng.normal(size=10)
    model = SpikeSlabRegressor(expected_size=2, random_state=0).fit(x, y)
    assert model.pip_.argsort()[-2:].tolist() in ([3, 8], [8, 3])
    assert model.rate_ == 2 / 15


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_missing_values_are_named(kind):
    """In fits and predictions, by up to five names, and what to do."""
    x, y = data(kind)
    new = x[:3].copy()
    new[1, [0, 2]] = np.nan
    with pytest.raises(ValueError, match=r"there are NaN in 'x0', 'x2'\. Fill them in by a transformer of sklearn.imp"):
        fitted(kind).predict(new)
    wide = np.full((len(y), 7), np.nan)
    with pytest.raises(ValueError, match=r"there are NaN in 'x0', 'x1', 'x2', 'x3', 'x4' and 2 more\. Fill"):
        kind().fit(wide, y)
    piped = make_pipeline(SimpleImputer(), kind(random_state=0))
    x[3, 1] = np.nan
    assert piped.fit(x, y).predict(new).shape == (3,)


def test_a_constant_y_needs_a_noise_scale():
    """There is no scale to learn the noise from; if it is known, nothing has an effect."""
    x, _ = data(SpikeSlabRegressor)
    with pytest.raises(ValueError, match="set noise_scale"):
        SpikeSlabRegressor().fit(x, np.full(80, 2.0))
    model = SpikeSlabRegressor(noise_scale=1.0, slab_scale=1.0, random_state=0).fit(x, np.full(80, 2.0))
    np.testing.assert_allclose(model.predict(x), 2.0, atol=1e-6)


@pytest.mark.parametrize("kind", EVERY)
def test_types_of_parameters_are_found(kind):
    """By tools that read them, from the module of a subclass, too."""
    assert {"rate", "groups"} <= get_type_hints(kind.__init__).keys()


@pytest.mark.parametrize(
    ("value", "equal", "n", "degrees"),
    [(0.0, 20, 30, None), (7.0, 16, 30, None), (-1.5, 5, 9, None), (3.0, 25, 30, 4.0), (0.0, 12, 15, 3.0)],
)
def test_too_many_equal_values_under_heavy_tails(value, equal, n, degrees):
    """The integral over small noise scales is infinite; the remedy that is named works."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(n, 2)), np.r_[np.full(equal, value), rng.normal(size=n - equal)]
    model = SpikeSlabRobust(degrees_of_freedom=degrees, slab_scale=1.0, random_state=0)
    message = f"but {equal} of {n} are {value:g}: the posterior is improper, .* Fit whether y is that by SpikeSlabClass"
    with pytest.raises(ValueError, match=message):
        model.fit(x, y)
    assert np.isfinite(model.fit(x[y != value], y[y != value]).coef_).all()
    assert np.isfinite(SpikeSlabClassifier(slab_scale=1.0, random_state=0).fit(x, y == value).coef_).all()


def test_when_equal_values_are_too_many():
    """By the degrees d: k of n equal ones times the noise's scale to the power of d (n - k) - k + 1, or - k at zero."""
    x = np.random.default_rng(0).normal(size=(12, 1))
    for equal, intercept, most in ((6, True, 4 / 6), (4, True, 2 / 8), (6, False, 5 / 6), (4, False, 3 / 8)):
        y = np.r_[np.zeros(equal), np.linspace(1, 2, 12 - equal)]
        for share, is_refused in ((0.99, True), (1.01, False)):
            known = {"slab_scale": 1.0, "fit_intercept": intercept}
            with pytest.raises(ValueError, match="improper") if is_refused else contextlib.nullcontext():
                design_of(x, y, Student(most * share), **known)
    weight = np.r_[5.0, np.ones(11)]
    with pytest.raises(ValueError, match="but 5 of 16 are 0"):
        design_of(x, np.arange(12.0), Student(3 / 11 - 0.01), weight=weight)
    design_of(x, np.arange(12.0), Student(3 / 11 + 0.01), weight=weight)


@pytest.mark.parametrize("form", [pd.DataFrame, lambda pairs: list(map(tuple, pairs)), np.array, list])
def test_survival_times_in_other_forms(form):
    """What the message says to do works."""
    rng = np.random.default_rng(0)
    x, time, event = rng.normal(size=(20, 2)), rng.exponential(size=20), rng.random(20) < 0.7
    y = form(np.column_stack([event, time]))
    for call in (SpikeSlabCox().fit, SpikeSlabCox(random_state=0).fit(x, time).score):
        with pytest.raises(ValueError, match=r"shape \(20, 2\); make it by np\.rec\.fromarrays\(\[event == 1, time\]"):
            call(x, y)
    event, time = np.asarray(y, dtype=float).T
    y = np.rec.fromarrays([event == 1, time], names="event,time")
    assert 0 <= SpikeSlabCox(random_state=0).fit(x, y).score(x, y) <= 1


@pytest.mark.parametrize("missing", [None, np.nan, pd.NA])
@pytest.mark.parametrize("form", [np.array, pd.Series, lambda y: pd.Series(y, dtype="category")])
def test_missing_labels(form, missing):
    x, y = np.random.default_rng(0).normal(size=(20, 2)), np.array(["a", "b"] * 10, dtype=object)
    y[[3, 7]] = missing
    for kind in (SpikeSlabClassifier, SpikeSlabOrdinal):
        with pytest.raises(ValueError, match="but 2 are None or NaN, first in row 3; leave these rows out"):
            kind().fit(x, form(y))
    keep = ~pd.isna(y)
    assert SpikeSlabClassifier(random_state=0).fit(x[keep], form(y[keep])).classes_.tolist() == ["a", "b"]


@pytest.mark.parametrize("values", [[0.5, 1.0, 1.5], [-0.25, 0.0], [1.0, 2.5]])
def test_labels_that_are_not_whole(values):
    x, y = np.random.default_rng(0).normal(size=(20, 2)), np.resize(values, 20)
    for kind in (SpikeSlabOrdinal, SpikeSlabClassifier):
        with pytest.raises(ValueError, match=r"not whole, such as .*; number them in their order by np\.unique\(y, "):
            kind().fit(x, y)
        model = kind(random_state=0, slab_scale=1.0).fit(x, np.unique(y, return_inverse=True)[1])
        assert model.classes_.tolist() == list(range(len(values)))


def test_duplicate_features_share_an_effect():
    """The same twice, either will do: they have the same probability, and one credible set."""
    x, y = data(SpikeSlabRegressor)
    model = SpikeSlabRegressor(random_state=0).fit(np.insert(x, 1, x[:, 0], axis=1), y)
    assert model.pip_[0] == pytest.approx(model.pip_[1], abs=1e-9)
    (pair,) = (s for s in model.credible_sets_ if 0 in s.features)
    assert set(pair.features) == {0, 1}
    assert pair.purity == pytest.approx(1.0)
