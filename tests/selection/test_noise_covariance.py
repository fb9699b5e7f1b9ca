"""Noise of a known covariance, against sums over all gates by densities that share no code with ours."""

import re

import numpy as np
import pandas as pd
import pytest
from scipy import linalg, special
from scipy.sparse import csr_array
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from pyro_l0.selection import SpikeSlabRegressor
from tests.selection.fitted import assert_equal_fits
from tests.selection.references import by_densities, unknown_scales

N, NOISE, SLAB = 24, 0.7, 0.6
RATES = [0.3, 0.4, 0.2, 0.5]
KNOWN = {"noise_scale": NOISE, "slab_scale": SLAB, "standardize": False, "random_state": 0}
LAG = np.abs(np.subtract.outer(range(N), range(N)))
UNEQUAL = np.exp(np.random.default_rng(1).normal(size=N))
COVARIANCES = {
    "AR(1)": 0.8**LAG,
    "equicorrelated": 0.6 + 0.4 * np.eye(N),
    "random walk": 0.5 + np.minimum.outer(range(N), range(N)),
    "unequal": 0.5**LAG * np.sqrt(np.outer(UNEQUAL, UNEQUAL)),
}
AR = COVARIANCES["AR(1)"]


def data(covariance, seed=0, p=4):
    """Correlated features, far from zero, of which the first two have an effect."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(len(covariance), p)).cumsum(0) + np.arange(p) - 3
    noise = NOISE * np.linalg.cholesky(covariance) @ rng.normal(size=len(x))
    return x, 2 + 0.4 * x[:, 0] + x[:, 1] + noise


def reference(x, y, covariance, rates=RATES, always=None, **options):
    return by_densities(x, y, covariance, rates, always, noise=NOISE, slab=SLAB, **options)


def assert_exact(model, expected):
    np.testing.assert_allclose(model.pip_, expected.pips, atol=1e-9)
    np.testing.assert_allclose(model.coef_, expected.mean, atol=1e-9)
    assert model.intercept_ == pytest.approx(expected.intercept, abs=1e-8)
    assert model.log_evidence_ == pytest.approx(expected.log_evidence, abs=1e-8)


@pytest.mark.parametrize("name", COVARIANCES)
@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("always", ["none", None, 0.7], ids=["none in", "flat", "normal"])
def test_known_scales(name, intercept, always):
    """The matrix and its factor alike; features that are always in have a flat or a normal prior."""
    covariance = COVARIANCES[name]
    x, y = data(covariance)
    rates = RATES if always == "none" else [0.3, 1.0, 0.2, 0.5]
    scale = None if always == "none" else always
    expected = reference(x, y, covariance, rates, scale, intercept=intercept)
    assert ((expected.pips > 0.02) & (expected.pips < 0.98)).any()
    options = KNOWN | {"rate": rates, "always_in_scale": scale, "fit_intercept": intercept}
    for given in (covariance, np.linalg.cholesky(covariance)):
        model = SpikeSlabRegressor(**options).fit(x, y, noise_covariance=given)
        assert_exact(model, expected)
        # Of 2,000 draws: five standard errors.
        assert model.draws_.intercept.std() == pytest.approx(expected.intercept_sd, rel=5 / np.sqrt(4000))


@pytest.mark.slow
def test_sampled_gates():
    x, y = data(AR)
    model = SpikeSlabRegressor(rate=RATES, method="tempered", **KNOWN).fit(x, y, noise_covariance=AR)
    expected = reference(x, y, AR)
    np.testing.assert_allclose(model.pip_, expected.pips, atol=0.02)
    np.testing.assert_allclose(model.coef_, expected.mean, atol=0.02)


def test_unknown_scales():
    """An unknown noise scale is in the unit of the covariance, a slab in that of y."""
    covariance = 4.0 * AR[:12, :12]
    x, y = data(covariance, seed=3, p=2)
    x = (x - x.mean(0)) / x.std(0)
    one, precision = np.ones(12), np.linalg.inv(covariance)
    left = y - (one @ precision @ y) / (one @ precision @ one)
    gates, log = unknown_scales(x, y, covariance, [0.3, 0.6], np.sqrt(left @ precision @ left / 12), y.std())
    model = SpikeSlabRegressor(rate=[0.3, 0.6], random_state=0).fit(x, y, noise_covariance=covariance)
    # Our own grid has an error of 1e-4.
    np.testing.assert_allclose(model.pip_, special.softmax(log) @ gates, atol=1e-3)
    assert model.log_evidence_ == pytest.approx(special.logsumexp(log), abs=5e-3)


@pytest.mark.parametrize("options", [{}, {"rate": {1: 1}}, {"fit_intercept": False}, {"standardize": False}], ids=str)
def test_independent_noise_is_none(options):
    x, y = data(AR)
    model = SpikeSlabRegressor(random_state=0, **options).fit(x, y)
    white = SpikeSlabRegressor(random_state=0, **options).fit(x, y, noise_covariance=np.eye(N))
    assert_equal_fits(model, white, atol=1e-12)
    assert model.noise_scale_ == pytest.approx(white.noise_scale_, rel=1e-12)


@pytest.mark.parametrize("options", [{}, {"rate": {1: 1}}, {"rate": RATES, "background": True}], ids=str)
def test_order_and_unit_change_nothing(options):
    """The rows in another order, and a covariance in another unit, which is that of the noise scale."""
    x, y = data(AR)
    order = np.random.default_rng(0).permutation(N)
    model, other, larger = (SpikeSlabRegressor(random_state=0, **options) for _ in range(3))
    model.fit(x, y, noise_covariance=AR)
    other.fit(x[order], y[order], noise_covariance=AR[order][:, order])
    larger.fit(x, y, noise_covariance=100 * AR)
    for found in (other, larger):  # a deviation is partly that of draws, of which one may move to another node
        assert_equal_fits(model, found, "pip_ coef_ log_evidence_", atol=1e-9)
        np.testing.assert_allclose([*found.background_.values()], [*model.background_.values()], atol=1e-6)
    assert larger.noise_scale_ == pytest.approx(model.noise_scale_ / 10, rel=1e-9)


def test_the_unit_of_a_flat_feature_changes_nothing():
    x, y = data(AR)
    options = KNOWN | {"rate": {1: 1}}
    model = SpikeSlabRegressor(**options).fit(x, y, noise_covariance=AR)
    tiny = SpikeSlabRegressor(**options).fit(x * [1, 1e-16, 1, 1], y, noise_covariance=AR)
    assert tiny.log_evidence_ == pytest.approx(model.log_evidence_, abs=1e-8)


def test_forms_of_features():
    """Sparse ones, dummies of a factor, an offset, and the last step of a pipeline."""
    x, y = data(AR)
    city = pd.Categorical(["a", "b", "c"] * (N // 3))
    frame = pd.DataFrame({"x": x[:, 1], "city": city})
    dummies = np.column_stack([x[:, 1], *(city == level for level in "abc")])
    options = {"random_state": 0, "slab_scale": SLAB, "standardize": False}
    model = SpikeSlabRegressor(**options).fit(frame, y + 1, noise_covariance=AR, offset=np.ones(N))
    grouped = SpikeSlabRegressor(groups=[0, 1, 1, 1], **options).fit(csr_array(dummies), y, noise_covariance=AR)
    assert_equal_fits(model, grouped, atol=1e-9)
    np.testing.assert_allclose(model.predict(frame), dummies @ model.coef_ + model.intercept_, atol=1e-12)
    assert model.score(frame, y) == pytest.approx(grouped.score(dummies, y))
    pipeline = make_pipeline(StandardScaler(), SpikeSlabRegressor(random_state=0))
    pipeline.fit(x, y, spikeslabregressor__noise_covariance=AR)
    scaled = StandardScaler().fit_transform(x)
    assert_equal_fits(pipeline[-1], SpikeSlabRegressor(random_state=0).fit(scaled, y, noise_covariance=AR), atol=1e-9)


def test_constant_features():
    """They are constant as without a covariance, though whitened they are not."""
    x, y = data(AR)
    x[:, 2] = 0.1
    with pytest.warns(UserWarning, match="coefficient of 'x2' are 0"):
        model = SpikeSlabRegressor(random_state=0).fit(x, y, noise_covariance=AR)
    other = SpikeSlabRegressor(random_state=0).fit(np.delete(x, 2, 1), y, noise_covariance=AR)
    assert np.delete(model.pip_, 2) == pytest.approx(other.pip_, abs=1e-12)


SINGULAR = np.ones((N, N))
ALMOST = np.linalg.cholesky(AR)
ALMOST[5, 5] = 1e-12
MESSAGES = [
    (AR[:5, :5], r"of shape \(24, 24\), .* or variances of shape \(24,\), but got \(5, 5\); pass those of the rows"),
    (AR[0, :5], r"but got \(5,\)"),
    (AR[:5], r"but got \(5, 24\)"),
    (np.where(LAG == 3, np.nan, AR), "noise_covariance contains NaN"),
    (np.diag(UNEQUAL), r"a diagonal matrix may be either; pass the variances alone, of shape \(24,\)"),
    (np.linalg.cholesky(AR).T, r"its lower Cholesky factor, but it is neither; pass an upper factor R as R\.T"),
    (AR + np.tri(N, k=-1) / 100, "to be symmetric"),
    (SINGULAR, "positive definite, .* or add the variance of independent noise to the diagonal"),
    (AR - np.eye(N), "beyond rounding, positive definite"),
    (ALMOST, "beyond rounding, positive definite"),
    (-np.linalg.cholesky(AR), "beyond rounding, positive definite"),
    (UNEQUAL * (LAG[0] > 0), "beyond rounding, positive definite"),
    (-UNEQUAL, "beyond rounding, positive definite"),
    (1e-150 * AR, "absolute value of feature 'x0' that was whitened by noise_covariance to lie between"),
]


@pytest.mark.parametrize(("covariance", "message"), MESSAGES)
def test_refusals(covariance, message):
    x, y = data(AR)
    with pytest.raises(ValueError, match=message):
        SpikeSlabRegressor().fit(x, y, noise_covariance=covariance)


def test_what_the_messages_say_works():
    """An upper factor, variances alone, a singular one, and weights."""
    x, y = data(AR)
    precise = AR / np.sqrt(np.outer(UNEQUAL, UNEQUAL))
    for given, covariance in (
        (linalg.cholesky(AR).T, AR),
        (UNEQUAL, np.diag(UNEQUAL)),
        (SINGULAR + 0.1 * np.eye(N), SINGULAR + 0.1 * np.eye(N)),
        (precise, precise),
    ):
        model = SpikeSlabRegressor(rate=RATES, **KNOWN).fit(x, y, noise_covariance=given)
        assert_exact(model, reference(x, y, covariance))
    with pytest.raises(ValueError, match=re.escape("divide the covariance by np.sqrt(np.outer(w, w)) instead")):
        model.fit(x, y, UNEQUAL, noise_covariance=AR)


def test_new_observations():
    """Means are known; their noise is refused, and can be added by hand; a fit without a covariance has it again."""
    x, y = data(AR)
    model = SpikeSlabRegressor(random_state=0).fit(x, y, noise_covariance=AR)
    np.testing.assert_allclose(model.predict(x), x @ model.coef_ + model.intercept_, rtol=1e-12)
    for call in (model.sample_y, model.predict_quantiles, lambda x: model.predict(x, return_std=True)):
        with pytest.raises(ValueError, match=r"noise of new observations, .* or add noise of your own"):
            call(x)
    drawn = model.sample(2000)
    means = drawn["coef"] @ x.T + drawn["intercept"][:, None]
    error = means.std(0) / np.sqrt(2000)
    assert (np.abs(means.mean(0) - model.predict(x)) < 5 * error).all()
    found = model.to_arviz()
    assert not {"log_likelihood", "posterior_predictive"} & {*found.groups()}
    assert found.posterior["coef"].shape == (1, 1000, 4)
    assert model.fit(x, y).predict_quantiles(x).shape == (N, 3)
