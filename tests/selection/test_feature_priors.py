"""Rates of one's own and features that are always in, against sums over all gates that share no code with ours."""

import numpy as np
import pandas as pd
import pytest
from scipy import special, stats
from scipy.sparse import csr_array

from pyro_l0.selection import SpikeSlabClassifier, SpikeSlabRegressor
from tests.selection.fitted import assert_equal_fits
from tests.selection.references import by_densities, unknown_scales

NOISE, SLAB = 0.8, 0.6
KNOWN = {"noise_scale": NOISE, "slab_scale": SLAB, "standardize": False, "random_state": 0}
RATES = [0.3, 1.0, 0.7, 0.1, 1.0]


def numbers(n=24, seed=0):
    """Five correlated features of which the second and the last are confounders."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 5)) + 0.6 * rng.normal(size=(n, 1)) + [3, -2, 0, 1, 5]
    return x, 2 + 0.4 * x[:, 0] + 1.5 * x[:, 1] - 0.4 * x[:, 2] + x[:, 4] + NOISE * rng.normal(size=n)


def reference(x, y, rates, scale, gate_of=None):
    return by_densities(x, y, np.eye(len(y)), rates, scale, noise=NOISE, slab=SLAB, gate_of=gate_of)


@pytest.mark.parametrize("method", ["enumerate", pytest.param("tempered", marks=pytest.mark.slow)])
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("groups", [None, [0, 1, 2, 2, 1]])
def test_normal_observations(method, scale, groups):
    """Rates of each feature or group, and two features that are always in; the evidence, too."""
    x, y = numbers()
    rates = RATES if groups is None else [0.3, 1.0, 0.6]
    expected = reference(x, y, rates, scale, groups)
    mean, sd = expected.mean, expected.sd
    model = SpikeSlabRegressor(rate=rates, method=method, groups=groups, always_in_scale=scale, **KNOWN).fit(x, y)
    assert (model.method_, model.noise_scale_, model.slab_scale_) == (method, NOISE, SLAB)
    atol = 1e-9 if method == "enumerate" else 0.02
    assert ((expected.pips > 0.05) & (expected.pips < 0.95)).any()
    np.testing.assert_allclose(model.pip_, expected.pips, atol=atol)
    np.testing.assert_allclose(model.coef_, mean, atol=atol)
    np.testing.assert_allclose(model.coef_sd_, sd, rtol=0.04)
    assert model.log_evidence_ == pytest.approx(expected.log_evidence, abs=1e-8 if method == "enumerate" else 0.05)
    drawn = model.sample(2000)
    assert (np.abs(drawn["coef"].mean(0) - mean) < 5 * sd / np.sqrt(2000)).all()
    np.testing.assert_allclose(drawn["coef"].std(0), sd, rtol=0.15)
    residual = y - drawn["coef"] @ x.T
    error = drawn["intercept"] - residual.mean(1)
    assert error.std() == pytest.approx(NOISE / np.sqrt(len(y)), rel=0.1)
    assert model.intercept_ == pytest.approx((y - x @ mean).mean(), abs=max(atol, 1e-4))


def test_unknown_scales():
    """Of noise and slabs, whose units are of what a flat confounder leaves of y."""
    x, y = numbers(16)
    x, y = x[:, :3], y - x[:, 4]
    taken = np.stack([np.ones(16), x[:, 1]], 1)
    unit = np.sqrt(((y - taken @ np.linalg.lstsq(taken, y, rcond=None)[0]) ** 2).mean())
    width = np.sqrt(x[:, [0, 2]].var(0).mean())
    gates, log = unknown_scales(x, y, np.eye(16), [0.2, 1.0, 0.4], unit, unit / width)
    model = SpikeSlabRegressor(rate={0: 0.2, 1: 1, 2: 0.4}, standardize=False, random_state=0).fit(x, y)
    np.testing.assert_allclose(model.pip_, special.softmax(log) @ gates, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"fit_intercept": False}, {"groups": [0, 1, 2, 2, 1]}], ids=str)
@pytest.mark.parametrize("scale", [None, 0.7])
def test_sparse_features_and_weights(scale, options):
    """The posterior is that of dense features, and of repeated rows."""
    x, y = numbers()
    x = x * (np.random.default_rng(1).random(x.shape) < 0.6)
    rate = RATES[:3] if "groups" in options else RATES
    options = {**options, "rate": rate, "always_in_scale": scale, "random_state": 0}
    weight = np.arange(24) % 3
    dense, sparse = (SpikeSlabRegressor(**options).fit(a, y, weight) for a in (x, csr_array(x)))
    repeated = SpikeSlabRegressor(**options).fit(x.repeat(weight, 0), y.repeat(weight))
    for other in (sparse, repeated):
        assert_equal_fits(dense, other, "pip_ coef_ intercept_ log_evidence_ noise_scale_", rtol=1e-7, atol=1e-8)
        np.testing.assert_allclose(other.coef_sd_, dense.coef_sd_, rtol=0.05)
    np.testing.assert_allclose(sparse.predict(csr_array(x)), dense.predict(x), rtol=1e-7)


def test_a_category_that_is_always_in():
    """Its effects sum to zero, as they are the smallest; differences are those of least squares on dummies."""
    rng = np.random.default_rng(2)
    frame = pd.DataFrame({"a": rng.normal(size=60), "city": pd.Categorical(rng.choice(list("xyz"), 60))})
    y = frame["a"] + frame["city"].map({"x": 0.0, "y": 3.0, "z": -1.0}).astype(float) + rng.normal(size=60)
    model, wide = (
        SpikeSlabRegressor(rate={"city": 1.0}, always_in_scale=s, noise_scale=1.0, random_state=0).fit(frame, y)
        for s in (None, 1e3)
    )
    assert model.pip_[1] == 1.0
    assert model.coef_[1:].sum() == pytest.approx(0.0, abs=1e-9)
    assert_equal_fits(model, wide, "pip_ coef_", atol=1e-4)
    assert model.summary().index.tolist() == ["a", "city[x]", "city[y]", "city[z]"]
    dummies = np.column_stack([frame["a"], *(frame["city"] == c for c in "xyz")])
    expected = np.linalg.lstsq(dummies, y, rcond=None)[0]
    assert model.coef_[2] - model.coef_[1] == pytest.approx(expected[2] - expected[1], abs=0.05)


@pytest.mark.parametrize("method", ["enumerate", pytest.param("tempered", marks=pytest.mark.slow)])
def test_three_classes(method, monkeypatch):
    """Whose feature that is always in has a coefficient for each: a very wide slab of a rate near 1 is the same."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(80, 2))
    y = np.digitize(x[:, 1] + 0.4 * x[:, 0] + rng.logistic(size=80), [-1, 1])
    options = {"slab_scale": 1.5, "random_state": 0, "method": method}
    model = SpikeSlabClassifier(rate=[0.2, 1.0], always_in_scale=1.5, **options).fit(x, y)
    near = SpikeSlabClassifier(rate=[0.2, 1 - 1e-9], **options).fit(x, y)
    np.testing.assert_allclose(model.pip_, near.pip_, atol=1e-6 if method == "enumerate" else 0.02)
    np.testing.assert_allclose(model.coef_, near.coef_, atol=1e-6 if method == "enumerate" else 0.05)
    assert model.pip_[1] == 1.0
    np.testing.assert_allclose(model.predict_proba(x), near.predict_proba(x), atol=0.03)


def test_rates_of_their_own_in_chains():
    """Many more features than can be enumerated: those of a tiny rate stay out, whatever the data say of the others."""
    rng = np.random.default_rng(4)
    x = rng.normal(size=(60, 30))
    y = x[:, 0] + x[:, 2] + rng.normal(size=60)
    rate = np.where(np.arange(30) % 2, 1e-6, 0.3)
    model = SpikeSlabRegressor(rate=rate, method="tempered", random_state=0).fit(x, y)
    assert model.pip_[1::2].max() < 0.01
    assert model.pip_[[0, 2]].min() > 0.5


# What the estimators make of it


def test_all_features_always_in():
    """A plain Bayesian regression: that of least squares and its covariance, where noise is known."""
    x, y = numbers(40)
    model = SpikeSlabRegressor(rate=1.0, noise_scale=NOISE, random_state=0).fit(x, y)
    centred = x - x.mean(0)
    np.testing.assert_allclose(model.coef_, np.linalg.lstsq(centred, y - y.mean(), rcond=None)[0], rtol=1e-8)
    expected = NOISE * np.sqrt(np.linalg.inv(centred.T @ centred).diagonal())
    np.testing.assert_allclose(model.coef_sd_, expected, rtol=1e-8)
    assert (model.pip_ == 1).all()
    assert model.rate_ == 1
    assert "rate" not in model.sample(3)
    assert model.credible_sets_ == []


def test_more_confounders_than_observations():
    """Work with a prior, and are refused without."""
    x, y = numbers(4)
    options = {"rate": 1.0, "noise_scale": NOISE, "standardize": False, "random_state": 0}
    model = SpikeSlabRegressor(always_in_scale=0.7, **options).fit(x, y)
    expected = reference(x, y, np.ones(5), 0.7)
    np.testing.assert_allclose(model.coef_, expected.mean, atol=1e-8)
    np.testing.assert_allclose(model.coef_sd_, expected.sd, rtol=1e-6)
    assert model.log_evidence_ == pytest.approx(expected.log_evidence, abs=1e-4)  # the slab scale has a grid
    with pytest.raises(ValueError, match=r"take 4 of 4; set always_in_scale"):
        SpikeSlabRegressor(**options).fit(x, y)


def test_rates_that_are_missing():
    """Those of a dict are learned beside ones, or given by an expected size."""
    x, y = numbers()
    frame = pd.DataFrame(x, columns=list("abcde"))
    learned = SpikeSlabRegressor(rate={"b": 1, 4: 1}, **KNOWN).fit(frame, y)
    by_size = SpikeSlabRegressor(rate={"b": 1, "e": 1}, expected_size=1.2, **KNOWN).fit(frame, y)
    given = SpikeSlabRegressor(rate=[0.4, 1, 0.4, 0.4, 1], **KNOWN).fit(frame, y)
    np.testing.assert_allclose(by_size.pip_, given.pip_, atol=1e-12)
    assert by_size.rate_ == pytest.approx(0.4)
    assert 0 < learned.rate_ < 1
    # A Beta(1, sqrt 3) rate is an average over given ones.
    t = (np.arange(40) + 0.5) / 40
    parts = [SpikeSlabRegressor(rate=[r, 1, r, r, 1], **KNOWN).fit(frame, y) for r in t]
    weight = special.softmax([m.log_evidence_ for m in parts] + stats.beta.logpdf(t, 1, np.sqrt(3)))
    np.testing.assert_allclose(learned.pip_, weight @ [m.pip_ for m in parts], atol=2e-3)


def test_what_is_always_in_is_selected():
    """In summary, intervals and support, beside the others, and in no credible set."""
    x, y = numbers(60)
    y = y + 2 * x[:, 0]
    frame = pd.DataFrame(x, columns=list("abcde"))
    model = SpikeSlabRegressor(rate={"b": 1, "e": 1}, random_state=0).fit(frame, y)
    chosen = model.select()
    assert {0, 1, 4} <= set(chosen)
    assert model.get_feature_names_out().tolist() == list(frame.columns[chosen])
    assert model.summary()["PIP"].tolist() == model.pip_.tolist()
    assert model.pip_[[1, 4]].tolist() == [1.0, 1.0]
    assert not {1, 4} & {j for found in model.credible_sets_ for j in found.features}
    assert (model.interval(0.9)[[1, 4]] > 0).all()
    assert model.to_arviz().posterior["z"].values[..., [1, 4]].all()
    # Of the others the mean of 1 - PIP counts alone.
    model.pip_, model.credible_sets_ = np.array([0.8, 1.0, 0.0, 0.0, 1.0]), []
    assert model.select(0.1).tolist() == [1, 4]
    assert model.select(0.2).tolist() == [0, 1, 4]
