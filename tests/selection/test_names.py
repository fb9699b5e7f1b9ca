"""Rates, groups, offsets and predictions by the names of columns, whatever kind these are; arguments by keyword."""

import inspect
import re

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone

from pyro_l0.selection import (
    NeuralFeatureSelector,
    SpikeSlabClassifier,
    SpikeSlabCox,
    SpikeSlabMultiTaskRegressor,
    SpikeSlabPoissonRegressor,
    SpikeSlabRegressor,
)
from tests.selection.fitted import EVERY, assert_equal_fits, data, three_classes

KNOWN = {"noise_scale": 1.0, "slab_scale": 0.6, "random_state": 0}
RATES = np.array([0.9, 0.1, 0.2, 0.3])
NAMES = [
    [3, 1, 2, 0],
    [10, 30, 20, 40],
    [1.5, 0.5, 2.5, 3.5],
    ["d", "a", "c", "b"],
    [("y", 1), ("x", 0), ("y", 0), ("x", 1)],
    [pd.Timestamp(2020, month, 1) for month in (3, 1, 2, 4)],
]


def numbers(names, n=40):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(n, 4)), columns=pd.Index(names, tupleize_cols=False))
    return frame, 0.5 * frame.iloc[:, 0] + 0.3 * frame.iloc[:, 2] + rng.normal(size=n)


@pytest.mark.parametrize("names", NAMES, ids=str)
def test_rates_by_name(names):
    """The posterior is that of an array whose columns have these rates in their order."""
    frame, y = numbers(names)
    right = SpikeSlabRegressor(rate=RATES, **KNOWN).fit(frame.to_numpy(), y)
    by_name = pd.Series(RATES, index=pd.Index(names, tupleize_cols=False))
    forms = [by_name, by_name.iloc[::-1], dict(zip(names, RATES, strict=True)), RATES, RATES.tolist()]
    by_position = [dict(enumerate(RATES)), pd.Series(RATES)] if isinstance(names[0], str) else []
    for rate in forms + by_position:
        model = SpikeSlabRegressor(rate=rate, **KNOWN).fit(frame, y)
        np.testing.assert_array_equal(model.rate_, RATES)
        np.testing.assert_allclose(model.pip_, right.pip_, atol=1e-12)
    assert list(model.summary().index) == names
    assert list(model.get_feature_names_out()) == [names[j] for j in model.select()]
    always = SpikeSlabRegressor(rate={names[1]: 1}, **KNOWN).fit(frame, y)
    assert always.pip_[1] == 1.0
    assert (np.delete(always.pip_, 1) < 1).all()


@pytest.mark.parametrize("names", NAMES, ids=str)
@pytest.mark.parametrize("way", [dict, pd.Series])
def test_groups_by_name(names, way):
    """In any order; also where groups only permute the features."""
    frame, y = numbers(names)
    for groups in ([1, 0, 1, 2], [2, 0, 1, 3]):
        rate = [0.3, 0.6, 0.5, 0.2][: max(groups) + 1]
        right = SpikeSlabRegressor(rate=rate, groups=groups, **KNOWN).fit(frame.to_numpy(), y)
        by_name = dict(zip(names[::-1], groups[::-1], strict=True))
        if way is pd.Series:
            by_name = pd.Series(list(by_name.values()), index=pd.Index(list(by_name), tupleize_cols=False))
        model = SpikeSlabRegressor(rate=rate, groups=by_name, **KNOWN).fit(frame, y)
        assert_equal_fits(right, model, "pip_ coef_", atol=1e-12)


def test_groups_that_permute_features():
    """Each group is one feature: the posterior is that without groups, in their order."""
    frame, y = numbers(list("abcd"))
    plain = SpikeSlabRegressor(rate=RATES, **KNOWN).fit(frame, y)
    single = SpikeSlabRegressor(rate=RATES, groups=np.arange(4), **KNOWN).fit(frame, y)
    assert_equal_fits(plain, single)
    np.testing.assert_array_equal(plain.sample(10)["coef"], single.sample(10)["coef"])
    for groups in ([1, 0, 3, 2], [3, 2, 1, 0], [1, 2, 3, 0]):
        rate = np.empty(4)
        rate[groups] = RATES
        model = SpikeSlabRegressor(rate=rate, groups=groups, **KNOWN).fit(frame, y)
        np.testing.assert_allclose(model.pip_[groups], plain.pip_, atol=1e-12)
        np.testing.assert_allclose(model.coef_, plain.coef_, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "names", "method"),
    [
        *(
            (SpikeSlabRegressor, names, method)
            for names in NAMES[:3] + NAMES[4:]
            for method in ("predict", "transform", "sample_y", "predict_quantiles")
        ),
        *((NeuralFeatureSelector, NAMES[0], method) for method in ("predict", "transform", "score")),
    ],
    ids=str,
)
def test_other_columns_are_refused(kind, names, method):
    """By every method that takes features; what the message says works."""
    frame, y = numbers(names)
    network = {"n_features": 2, "max_steps": 5, "random_state": 0}
    model = kind(**(network if kind is NeuralFeatureSelector else {"rate": {names[0]: 1}, **KNOWN})).fit(frame, y)
    moved, more = frame[frame.columns[::-1]], (y,) if method == "score" else ()
    right = getattr(model, method)(frame, *more)
    with pytest.raises(ValueError, match=re.escape(f"Expected the columns {names}, in this order, but got")):
        getattr(model, method)(moved, *more)
    np.testing.assert_array_equal(getattr(model, method)(moved[frame.columns], *more), right)


@pytest.mark.slow
@pytest.mark.parametrize("order", [[2, 0, 1], [1, 0, 2]])
def test_offsets_by_the_names_of_classes_and_responses(order):
    x, y = three_classes(60)
    labels = np.array(["low", "mid", "up"])[y]
    offset = np.random.default_rng(0).normal(size=(60, 3))
    frame = pd.DataFrame(offset, columns=["low", "mid", "up"])[np.array(["low", "mid", "up"])[order]]
    options = {"slab_scale": 1.0, "random_state": 0}
    one, other = (SpikeSlabClassifier(**options).fit(x, labels, offset=known) for known in (offset, frame))
    np.testing.assert_allclose(one.pip_, other.pip_, atol=1e-9)
    np.testing.assert_array_equal(one.predict_proba(x, offset=frame), one.predict_proba(x, offset=offset))
    x, y = data(SpikeSlabMultiTaskRegressor, n=30)
    y, known = pd.DataFrame(y, columns=[1, 0]), np.random.default_rng(0).normal(size=(30, 2))
    by_name = pd.DataFrame(known, columns=[1, 0])[[0, 1]]
    one, other = (SpikeSlabMultiTaskRegressor(**options).fit(x, y, offset=offset) for offset in (known, by_name))
    np.testing.assert_allclose(one.pip_, other.pip_, atol=1e-9)


@pytest.mark.parametrize("kind", EVERY)
def test_arguments_by_keyword(kind):
    """After y and sample_weight; nothing that is known of each row may come by position."""
    for name in ("fit", "score", "predict", "predict_proba", "predict_quantiles", "predict_survival", "sample_y"):
        if hasattr(kind, name):
            parameters = inspect.signature(getattr(kind, name)).parameters
            own = {key for key, value in parameters.items() if value.kind is not inspect.Parameter.KEYWORD_ONLY}
            assert not own & {"offset", "trials", "return_std"}, name
    x, y = data(kind, n=20)
    with pytest.raises(TypeError, match="positional"):
        kind().fit(x, y, None, np.zeros(20))


@pytest.mark.parametrize("ties", ["efron", "breslow"])
@pytest.mark.parametrize("offset", [False, True])
def test_weights_of_survival_times_repeat_rows(ties, offset):
    """Zeros leave rows out."""
    x, y = data(SpikeSlabCox, n=50)
    y = y.copy()
    y["time"] = np.ceil(4 * y["time"])
    weight = np.random.default_rng(0).integers(0, 4, size=50)
    known = np.linspace(-1, 1, 50) if offset else np.zeros(50)
    model = SpikeSlabCox(ties=ties, random_state=0)
    one = clone(model).fit(x, y, weight.astype(float), offset=known)
    other = clone(model).fit(x.repeat(weight, 0), y.repeat(weight), offset=known.repeat(weight))
    assert_equal_fits(one, other)
    np.testing.assert_array_equal(one.predict_survival(x[:3], [1.0]), other.predict_survival(x[:3], [1.0]))


def test_features_of_dates_and_durations():
    """Refused by name, and taken as the message says."""
    frame, y = numbers(list("abcd"))
    for column in (
        pd.date_range("2020", periods=40),
        pd.date_range("2020", periods=40, tz="UTC"),
        [day.date() for day in pd.date_range("2020", periods=40)],
    ):
        frame["d"] = column
        with pytest.raises(ValueError, match=r"but \['d'\] hold times; pass numbers, such as days by X\['d'\]\.map"):
            SpikeSlabRegressor(**KNOWN).fit(frame, y)
        days = frame.assign(d=frame["d"].map(lambda day: day.toordinal()))
        assert np.isfinite(SpikeSlabRegressor(**KNOWN).fit(days, y).coef_).all()
    for column in (pd.to_timedelta(np.arange(40), unit="h"), pd.period_range("2020", periods=40)):
        frame["d"] = column
        with pytest.raises(ValueError, match=r"other units by \.astype\('int64'\)"):
            SpikeSlabPoissonRegressor().fit(frame, y)
        units = frame.assign(d=frame["d"].astype("int64"))
        assert np.isfinite(SpikeSlabRegressor(**KNOWN).fit(units, y).coef_).all()
