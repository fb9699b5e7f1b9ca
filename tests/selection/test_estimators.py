"""Estimators of spike-and-slab regressions: right answers, scikit-learn's conventions, arviz."""

import importlib
import pickle
import sys

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from scipy.sparse import csc_matrix, csr_array
from scipy.special import expit, softmax
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from pyro_l0 import selection
from pyro_l0.maths import second_order
from pyro_l0.selection import SpikeSlabClassifier, SpikeSlabRegressor
from pyro_l0.selection.credible_sets import CredibleSet
from tests.selection.fitted import (
    ESTIMATORS,
    EVERY,
    SAMPLED,
    assert_equal_fits,
    data,
    fitted,
    log_density,
    nothing_else_changes,
    three_classes,
)


@pytest.mark.parametrize(
    ("units", "of_y"),
    [(np.array([3.0, 0.01, 20.0, 1e4]), 100.0), (1e-50, 1e50), (1e-8, 1e8), (1e8, 1e-8), (1e50, 1e-50)],
)
def test_units_do_not_matter(units, of_y):
    """Standardised features: other units of X and y change the coefficients by these, and nothing else."""
    x, y = data(SpikeSlabRegressor)
    moved = (x - 7.0) * units
    first = SpikeSlabRegressor(random_state=0).fit(x, y)
    second = SpikeSlabRegressor(random_state=0).fit(moved, of_y * (y + 3.0))
    np.testing.assert_allclose(second.pip_, first.pip_, atol=1e-8)
    np.testing.assert_allclose(second.coef_ * units / of_y, first.coef_, rtol=1e-6)
    np.testing.assert_allclose(second.coef_sd_ * units / of_y, first.coef_sd_, rtol=1e-6)
    assert second.noise_scale_ / of_y == pytest.approx(first.noise_scale_, rel=1e-6)
    np.testing.assert_allclose(second.predict(moved) / of_y, first.predict(x) + 3.0, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:Constant features")
@pytest.mark.parametrize(
    "options", [{}, {"groups": [0, 1, 1, 2, 3, 4]}, {"fit_intercept": False}, {"standardize": False}], ids=str
)
@pytest.mark.parametrize(("form", "is_wide"), [(csr_array, False), (csc_matrix, False), (csr_array, True)])
@pytest.mark.parametrize("weighted", [False, True])
def test_sparse_features(form, is_wide, options, weighted, monkeypatch):
    """The posterior is that of the dense matrix, in predictions and credible sets, too.

    Columns are centred and scaled by algebra; one is constant, and one has no zeros.
    """
    monkeypatch.setattr(second_order, "_DENSE", 2 if is_wide else 2000)
    rng = np.random.default_rng(0)
    x = (rng.random((80, 6)) < 0.2) * rng.normal(1, 1, size=(80, 6))
    x[:, 4], x[:, 5] = 3.0, 2 + x[:, 5]
    y = 2 * x[:, 0] - x[:, 3] + rng.normal(size=80)
    weight = rng.integers(0, 3, 80).astype(float) if weighted else None
    dense, sparse = (SpikeSlabRegressor(random_state=0, **options).fit(a, y, weight) for a in (x, form(x)))
    assert_equal_fits(dense, sparse, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(sparse.noise_scale_, dense.noise_scale_, rtol=1e-8)
    # Draws may have the other sign of an eigenvector, so that only those of one fit agree.
    one, other = (sparse.predict(some, return_std=True) for some in (form(x[:9]), x[:9]))
    np.testing.assert_allclose(one, other, rtol=1e-10)
    np.testing.assert_allclose(sparse.predict(form(x)), dense.predict(x), rtol=1e-8, atol=1e-8)
    assert [str(found) for found in sparse.credible_sets_] == [str(found) for found in dense.credible_sets_]
    log_likelihoods = sparse.to_arviz().log_likelihood["y"].values[0]
    rows = np.arange(80).repeat(1 if weight is None else weight.astype(int))
    draws = sparse.sample(1000)
    eta = draws["coef"] @ x[rows].T + draws["intercept"][:, None]
    np.testing.assert_allclose(log_likelihoods, log_density(SpikeSlabRegressor, y[rows], eta, draws), rtol=1e-8)


def test_sparse_features_of_large_means():
    """Products lose the digits that a mean takes once, as the numbers themselves do, not twice."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 4)) + np.array([1e7, 0, 1e8, 0])
    y = 0.5 * x[:, 1] + rng.normal(size=50)
    dense, sparse = (SpikeSlabRegressor(random_state=0).fit(a, y) for a in (x, csr_array(x)))
    np.testing.assert_allclose(sparse.pip_, dense.pip_, atol=1e-6)
    assert sparse.log_evidence_ == pytest.approx(dense.log_evidence_, abs=1e-5)


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_predictions_are_averages_over_draws(kind):
    """And not taken at the mean of the coefficients; the mean of numbers is that of the posterior."""
    model, (x, y) = fitted(kind), data(kind)
    draws = model.sample(2000)
    eta = draws["coef"].reshape(2000, 4) @ x.T + draws["intercept"].reshape(2000, 1)
    if kind is SpikeSlabClassifier:
        np.testing.assert_allclose(model.predict_proba(x)[:, 1], expit(eta).mean(0), rtol=1e-10)
        assert set(model.predict(x)) == {"yes", "no"}
        assert model.score(x, y) > 0.7
        return
    mean, sd = model.predict(x, return_std=True)
    if kind is SpikeSlabRegressor:
        assert (np.abs(eta.mean(0) - mean) < 5 * eta.std(0) / np.sqrt(2000)).all()
        variance = eta.var(0) + (draws["noise_scale"] ** 2).mean()
    else:
        np.testing.assert_allclose(mean, np.exp(eta).mean(0), rtol=1e-10)
        variance = np.exp(eta).mean(0) + np.exp(eta).var(0)
    np.testing.assert_allclose(sd, np.sqrt(variance), rtol=1e-10)


@pytest.mark.slow
def test_one_response_alone():
    """The posterior is that of a linear regression, within the errors of chains; y may be a vector or a data frame."""
    x, y = data(SpikeSlabRegressor)
    alone = SpikeSlabRegressor(random_state=0).fit(x, y)
    model = selection.SpikeSlabMultiTaskRegressor(random_state=0).fit(x, y)
    np.testing.assert_allclose(model.pip_, alone.pip_, atol=0.02)
    np.testing.assert_allclose(model.coef_[0], alone.coef_, atol=0.2 * alone.coef_sd_.max())
    assert model.noise_scale_[0] == pytest.approx(alone.noise_scale_, rel=0.02)
    named = selection.SpikeSlabMultiTaskRegressor(rate=0.5).fit(x[:, :1], pd.DataFrame({"u": y}))
    assert named.summary().index[0] == ("x0", "u")


def test_more_than_two_classes():
    """A gate for each feature, a coefficient for each feature and class; for arviz, classes are numbers."""
    x, y = three_classes()
    model = SpikeSlabClassifier(random_state=0).fit(x, np.array(["a", "b", "c"])[y])
    assert model.coef_.shape == model.coef_sd_.shape == (3, 3)
    assert model.intercept_.shape == (3,)
    assert model.select().tolist() == [1]
    assert model.coef_[0, 1] > 0 > model.coef_[2, 1]
    probs = model.predict_proba(x)
    np.testing.assert_allclose(probs.sum(1), 1.0)
    draws = model.sample(2000)
    predictors = np.einsum("nkp,mp->nmk", draws["coef"], x) + draws["intercept"][:, None]
    np.testing.assert_allclose(probs, softmax(predictors, axis=-1).mean(0), rtol=1e-9)
    assert model.summary().index.names == ["feature", "class"]
    assert model.summary().loc[("x1", "c"), "mean"] == pytest.approx(model.coef_[2, 1])
    assert (model.summary()["PIP"].groupby("feature").nunique() == 1).all()
    found = model.to_arviz()
    wanted = np.log(softmax(predictors[:1000], axis=-1))[:, np.arange(150), y]
    np.testing.assert_allclose(found["log_likelihood"]["y"][0].values, wanted, atol=1e-9)
    shares = np.bincount(found["posterior_predictive"]["y"].values.ravel().astype(int), minlength=3)
    np.testing.assert_allclose(shares / shares.sum(), np.bincount(y) / 150, atol=0.1)


@pytest.mark.parametrize("kind", EVERY)
def test_moments_agree_with_draws(kind):
    """Within five standard errors; the gate of a coefficient that is not zero is open."""
    model = fitted(kind)
    draws = model.sample(2000)
    coef = draws["coef"].reshape(2000, -1)
    error = np.maximum(coef.std(0), 1e-12) / np.sqrt(2000)
    assert (np.abs(coef.mean(0) - model.coef_.ravel()) < 5 * error + 1e-9).all()
    np.testing.assert_allclose(coef.std(0), model.coef_sd_.ravel(), rtol=0.3, atol=0.02 * model.coef_sd_.max())
    assert ((coef != 0) == np.tile(draws["gates"], coef.shape[1] // 4)).all()
    error = np.sqrt(model.pip_ * (1 - model.pip_) / 2000)
    assert (np.abs(draws["gates"].mean(0) - model.pip_) < 5 * error + 1e-9).all()
    assert draws["slab_scale"].mean() == pytest.approx(model.slab_scale_)


@pytest.mark.parametrize("kind", EVERY)
def test_what_has_an_effect_is_found(kind):
    """Features 0 and 2, by selection, summary, intervals and credible sets."""
    model = fitted(kind)
    assert model.select().tolist() == [0, 2]
    assert model.get_support().tolist() == [True, False, True, False]
    table = model.summary()
    assert table.columns.tolist() == ["PIP", "mean", "sd", "5 %", "95 %"]
    np.testing.assert_array_equal(table["PIP"], np.repeat(model.pip_, len(table) // 4))
    intervals = model.interval(0.9).reshape(-1, 4, 2)
    ends = np.quantile(model.sample(2000)["coef"].reshape(2000, -1, 4), (0.05, 0.95), axis=0)
    np.testing.assert_allclose(intervals, np.moveaxis(ends, 0, 2), atol=1e-12)
    ends = np.quantile(model.sample(2000)["coef"].reshape(2000, -1, 4), (0.1, 0.9), axis=0)
    np.testing.assert_allclose(model.interval(0.8).reshape(-1, 4, 2), np.moveaxis(ends, 0, 2), atol=1e-12)
    np.testing.assert_array_equal(table[["5 %", "95 %"]], intervals.swapaxes(0, 1).reshape(-1, 2))
    assert np.min(table.loc["x0", "5 %"]) > 0 > np.max(table.loc["x2", "95 %"])
    assert sorted(s.features for s in model.credible_sets_) == [(0,), (2,)]


# Selection


def with_pips(pips):
    """An estimator of which only the inclusion probabilities matter."""
    model = SpikeSlabRegressor()
    model.pip_, model.n_features_in_, model.credible_sets_ = np.array(pips), len(pips), []
    model._is_in, model.error_ = np.zeros(len(pips), dtype=bool), np.zeros(len(pips))
    return model


@pytest.mark.parametrize(
    ("pips", "fdr", "chosen"),
    [
        ([0.2, 0.99, 0.92, 0.97], 0.05, [1, 2, 3]),
        ([0.2, 0.99, 0.92, 0.97], 0.03, [1, 3]),
        ([0.2, 0.99, 0.92, 0.97], 1.0, [1, 2, 3]),
        ([0.5, 1.0, 1.0, 1.0, 1.0, 0.51], 0.2, [1, 2, 3, 4, 5]),
        ([0.2, 0.5], 0.05, []),
        ([1.0, 0.0, 1.0], 0.0, [0, 2]),
        ([0.875, 1.0, 0.875], 0.0625, [0, 1]),
    ],
)
def test_selection_keeps_the_mean_of_false_discoveries(pips, fdr, chosen):
    """The largest such set of probable features; of two equal ones that do not both fit, the first."""
    assert with_pips(pips).select(fdr).tolist() == chosen


def test_an_unsure_feature_is_not_selected():
    """Whatever its inclusion probability, if its standard error is above the limit."""
    model = with_pips([0.99, 0.95, 0.98])
    model.error_ = np.array([0.06, 0.05, 0.0])
    assert model.select(0.5).tolist() == [1, 2]


def test_a_set_whose_members_share_the_probability_is_named():
    """Where none of them is selected, whatever else is; not if fewer false discoveries than the set are asked for."""
    model = with_pips([0.49, 0.99, 0.49, 0.0])
    model.credible_sets_ = [CredibleSet((1,), 0.99, 1.0), CredibleSet((0, 2), 0.98, 0.99)]
    with pytest.warns(UserWarning, match=r"Of \{0, 2\} \(probability 0.980, purity 0.99\) some member has an effect"):
        assert model.select().tolist() == [1]
    assert model.select(0.015).tolist() == [1]
    model.pip_ = np.array([0.96, 0.99, 0.49, 0.0])
    assert model.select().tolist() == [0, 1]


def test_near_copies_leave_a_selection_empty_and_are_named():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(100, 1)) + 0.01 * rng.normal(size=(100, 3))
    model = SpikeSlabRegressor(random_state=0).fit(pd.DataFrame(x, columns=list("abc")), x[:, 0] + rng.normal(size=100))
    with pytest.warns(UserWarning, match=r"Of \{(., ){2}.\} \(probability .* Report the set, or leave out all"):
        assert model.select().tolist() == []
    with (
        pytest.warns(UserWarning, match="some member has an effect"),
        pytest.warns(UserWarning, match="No features were selected"),
    ):
        model.set_output(transform="pandas").transform(pd.DataFrame(x, columns=list("abc")))


# Awkward data


SEEDED = [
    *((kind, {}) for kind in ESTIMATORS),
    (SpikeSlabRegressor, {"method": "tempered", "rate": 0.2, "slab_scale": 0.5, "noise_scale": 1.0}),
    *(pytest.param(kind, {}, marks=pytest.mark.slow) for kind in EVERY if kind not in ESTIMATORS),
]


@pytest.mark.parametrize(("kind", "options"), SEEDED)
def test_a_seed_makes_fits_equal_and_nothing_else_changes(kind, options):
    """To the bit; nor do the data."""
    x, y = data(kind)
    kept = x.copy(), y.copy()
    with nothing_else_changes():
        first, second = (kind(random_state=3, **options).fit(x[:, :3], y) for _ in range(2))
        kind(**options).fit(x[:, :2], y)
    assert (x == kept[0]).all()
    assert (y == kept[1]).all()
    assert_equal_fits(first, second)
    assert_equal_fits(first, second, "rate_")
    assert (first.sample(5000)["coef"] == second.sample(5000)["coef"]).all()
    other = kind(random_state=4, **options).fit(x[:, :3], y)
    assert not (other.sample(9)["coef"] == first.sample(9)["coef"]).all()


def test_a_random_state_moves_on():
    """An instance gives another seed at each fit."""
    state = np.random.RandomState(0)
    first, second = (SpikeSlabRegressor(random_state=state).fit(*data(SpikeSlabRegressor)) for _ in range(2))
    assert not (first.sample(5)["coef"] == second.sample(5)["coef"]).all()


@pytest.mark.parametrize("kind", EVERY)
def test_pickles_and_clones(kind):
    """A pickle predicts the same; a clone has the parameters and no fit."""
    model = fitted(kind)
    x, _ = data(kind)
    again = pickle.loads(pickle.dumps(model))
    assert (again.predict(x) == model.predict(x)).all()
    assert (again.sample(3)["coef"] == model.sample(3)["coef"]).all()
    copy = clone(model)
    assert copy.get_params() == model.get_params()
    assert not hasattr(copy, "pip_")


def test_in_pipelines_and_searches():
    """A grid of rates, and a selection in front of another model."""
    x, y = data(SpikeSlabRegressor)
    model = make_pipeline(StandardScaler(), SpikeSlabRegressor(random_state=0))
    search = GridSearchCV(model, {"spikeslabregressor__rate": [0.01, 0.5]}, cv=3).fit(x, y)
    assert search.best_params_["spikeslabregressor__rate"] in (0.01, 0.5)
    selected = make_pipeline(SpikeSlabRegressor(random_state=0), SpikeSlabRegressor(random_state=0)).fit(x, y)
    assert selected[-1].n_features_in_ == 2


@pytest.mark.parametrize(
    ("kind", "scoring", "least"),
    [
        (SpikeSlabRegressor, None, 0.5),
        (SpikeSlabClassifier, "neg_log_loss", -0.69),
        (selection.SpikeSlabCox, None, 0.65),
        pytest.param(selection.SpikeSlabOrdinal, "neg_log_loss", -1.09, marks=pytest.mark.slow),
        pytest.param(selection.SpikeSlabRobust, "neg_median_absolute_error", "MAD", marks=pytest.mark.slow),
    ],
)
def test_cross_validation(kind, scoring, least):
    """Better than without features, of which the last score is the median absolute deviation."""
    x, y = data(kind)
    least = -stats.median_abs_deviation(y) if least == "MAD" else least
    assert cross_val_score(kind(slab_scale=1.0, random_state=0), x, y, cv=3, scoring=scoring).mean() > least


def test_without_scikit_learn_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match=r"pip install scikit-learn"):
        importlib.reload(selection)


# arviz


@pytest.mark.parametrize("kind", [*ESTIMATORS, *SAMPLED, selection.SpikeSlabMultiTaskRegressor])
def test_arviz_gets_what_it_asks_for(kind):
    """Draws by feature name, log likelihoods by scipy's densities, replicated observations like the observed ones."""
    model = fitted(kind)
    x, y = data(kind)
    found = model.to_arviz()
    posterior = found["posterior"]
    draws = model.sample(1000)
    assert posterior["z"].dims == ("chain", "draw", "feature")
    assert posterior["coef"].coords["feature"].values.tolist() == ["x0", "x1", "x2", "x3"]
    np.testing.assert_array_equal(posterior["coef"][0].values, draws["coef"])
    coef, intercept = draws["coef"].reshape(1000, -1, 4), draws["intercept"].reshape(1000, -1)
    eta = np.squeeze(x @ coef.swapaxes(1, 2) + intercept[:, None])
    numbers = np.unique(y, return_inverse=True)[1] if hasattr(model, "classes_") else y
    wanted = log_density(kind, numbers, eta, draws)
    np.testing.assert_allclose(found["log_likelihood"]["y"][0].values, wanted, atol=1e-8)
    observed = found["observed_data"]["y"].values
    again = found["posterior_predictive"]["y"][0].values
    assert (np.abs(again.mean((0, 1)) - observed.mean(0)) < 5 * observed.std(0) / np.sqrt(len(observed))).all()
    np.testing.assert_allclose(found["constant_data"]["P(z != 0)"].values, model.pip_)
