"""Offsets, exposure and trials against differences, quadrature and repeated rows."""

import numpy as np
import pytest
from scipy import special, stats
from sklearn import config_context
from sklearn.metrics import accuracy_score, r2_score
from sklearn.model_selection import KFold, cross_val_score

from pyro_l0.selection import (
    SpikeSlabBinomialRegressor,
    SpikeSlabClassifier,
    SpikeSlabPoissonRegressor,
    SpikeSlabRegressor,
    SpikeSlabRobust,
)
from pyro_l0.selection.methods import exact_chains
from tests.selection.fitted import assert_equal_fits, data, log_density, three_classes

KNOWN = {"slab_scale": 0.7, "rate": 0.4, "standardize": False}


def offset_data(kind, n=40, strength=0.35, seed=2):
    """A feature of a weak effect, a large offset that it resembles, and observations of both."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=n)
    offset = 1.2 * x + rng.normal(size=n) + 2.0
    eta = offset - 2.0 + strength * x
    if kind is SpikeSlabRegressor:
        return x[:, None], eta + rng.normal(size=n), offset
    if kind is SpikeSlabPoissonRegressor:
        return x[:, None], rng.poisson(np.exp(eta)).astype(float), offset
    return x[:, None], rng.binomial(1, special.expit(eta)).astype(float), offset


NOT_NORMAL = [SpikeSlabPoissonRegressor, SpikeSlabClassifier, SpikeSlabBinomialRegressor]


@pytest.mark.parametrize("kind", [SpikeSlabRegressor, SpikeSlabRobust])
def test_numbers_less_the_offset(kind, monkeypatch):
    """Also in the units of the priors, which a large offset would widen."""
    monkeypatch.setattr(exact_chains, "_ROUNDS", 2)  # where more would find the same
    x, y = data(kind)
    offset = 50.0 * np.random.default_rng(0).normal(size=len(y))
    first, second = kind(random_state=0), kind(random_state=0)
    assert_equal_fits(first.fit(x, y + offset, offset=offset), second.fit(x, (y + offset) - offset))
    np.testing.assert_allclose(first.predict(x, offset=offset), second.predict(x) + offset)
    np.testing.assert_array_equal(first.predict(x), second.predict(x))
    if kind is SpikeSlabRegressor:
        _, sd = first.predict(x, return_std=True, offset=offset)
        np.testing.assert_array_equal(sd, second.predict(x, return_std=True)[1])


@pytest.mark.parametrize("method", ["enumerate", pytest.param("tempered", marks=pytest.mark.slow)])
def test_twice_the_exposure(method):
    """Shifts the intercept by log 2 and leaves all else alone, whatever the prior of the intercept."""
    x, y, offset = offset_data(SpikeSlabPoissonRegressor)
    exposure = np.exp(offset)
    one, two = (
        SpikeSlabPoissonRegressor(method=method, random_state=0).fit(x, y, offset=np.log(k * exposure)) for k in (1, 2)
    )
    assert one.intercept_ - two.intercept_ == pytest.approx(np.log(2), abs=1e-9)
    np.testing.assert_allclose(one.pip_, two.pip_, atol=1e-9)
    np.testing.assert_allclose(one.predict(x, offset=offset), two.predict(x, offset=offset + np.log(2)), rtol=1e-8)
    np.testing.assert_allclose(2 * two.predict(x), one.predict(x), rtol=1e-8)


def test_offsets_of_several_classes():
    """A constant one of each class is in its intercept, and one of all classes has no effect."""
    x, y = three_classes(60)
    rng = np.random.default_rng(0)
    offset = rng.normal(size=(60, 3))
    options = {"slab_scale": 1.0, "random_state": 0}
    one, other = (
        SpikeSlabClassifier(**options).fit(x, y, offset=o)
        for o in (offset, offset + np.array([0.5, -1.0, 2.0]) + rng.normal(size=(60, 1)))
    )
    plain = SpikeSlabClassifier(**options).fit(x, y)
    np.testing.assert_allclose(one.pip_, other.pip_, atol=1e-7)
    assert np.abs(one.coef_ - plain.coef_).max() > 0.05
    shifted = one.intercept_ - other.intercept_
    np.testing.assert_allclose(shifted - shifted.mean(), np.array([0.5, -1.0, 2.0]) - 0.5, atol=1e-7)
    probs = one.predict_proba(x, offset=offset)
    draws = one.sample(2000)
    eta = np.einsum("nkp,mp->nmk", draws["coef"], x) + draws["intercept"][:, None] + offset
    np.testing.assert_allclose(probs, special.softmax(eta, axis=-1).mean(0), rtol=1e-9)
    assert (one.predict(x, offset=offset) == probs.argmax(1)).all()


@pytest.mark.parametrize("kind", [SpikeSlabRegressor, *NOT_NORMAL])
def test_weights_repeat_offsets(kind):
    """In fits, and in what arviz gets."""
    x, y, offset = offset_data(kind)
    weight = np.arange(40) % 3
    x2, y2, offset2 = (part.repeat(weight, 0) for part in (x, y, offset))
    weighted = kind(random_state=0, **KNOWN).fit(x, y, weight, offset=offset)
    repeated = kind(random_state=0, **KNOWN).fit(x2, y2, offset=offset2)
    assert_equal_fits(weighted, repeated, "pip_ intercept_", atol=1e-9)
    found, wanted = (model.to_arviz() for model in (weighted, repeated))
    np.testing.assert_allclose(found["log_likelihood"]["y"], wanted["log_likelihood"]["y"], atol=1e-7)
    draws = weighted.sample(1000)
    eta = draws["coef"].reshape(1000, 1) * x2[:, 0] + draws["intercept"].reshape(1000, 1) + offset2
    expected = log_density(kind, y2, eta, draws)
    np.testing.assert_allclose(found["log_likelihood"]["y"].values[0], expected, atol=1e-7)
    mean = found["posterior_predictive"]["y"].values.mean()
    assert mean == pytest.approx(y2.mean(), abs=0.35)


# Trials


def trial_data(n=30, seed=1):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 3))
    trials = rng.integers(0, 6, n)
    return x, rng.binomial(trials, special.expit(0.5 + 0.8 * x[:, 1])), trials


@pytest.mark.parametrize("method", ["enumerate", pytest.param("tempered", marks=pytest.mark.slow)])
def test_trials_are_rows(method):
    """The logistic regression of every trial; the evidence has the binomial coefficients."""
    x, successes, trials = trial_data()
    weight = np.arange(30) % 2 + 1
    model = SpikeSlabBinomialRegressor(method=method, random_state=0, **KNOWN)
    model.fit(x, successes, trials=trials, sample_weight=weight)
    rows = np.concatenate([x, x]).repeat(np.concatenate([successes * weight, (trials - successes) * weight]), 0)
    labels = np.repeat([1, 0], [(successes * weight).sum(), ((trials - successes) * weight).sum()])
    single = SpikeSlabClassifier(method=method, random_state=0, **KNOWN).fit(rows, labels)
    atol = 1e-8 if method == "enumerate" else 0.03
    np.testing.assert_allclose(model.pip_, single.pip_, atol=atol)
    np.testing.assert_allclose(model.coef_, single.coef_[0], atol=atol)
    choices = (weight * np.log(special.comb(trials, successes))).sum()
    assert model.log_evidence_ == pytest.approx(single.log_evidence_ + choices, abs=5 * atol)
    np.testing.assert_allclose(model.predict(x), single.predict_proba(x)[:, 1], atol=0.02)


def test_what_arviz_gets_of_trials():
    """Log probabilities of successes, and replicated ones; rows without trials are left out."""
    x, successes, trials = trial_data()
    model = SpikeSlabBinomialRegressor(random_state=0, **KNOWN).fit(x, successes, trials=trials)
    found, draws, used = model.to_arviz(), model.sample(1000), trials > 0
    eta = draws["coef"] @ x[used].T + draws["intercept"][:, None]
    wanted = stats.binom.logpmf(successes[used], trials[used], special.expit(eta))
    np.testing.assert_allclose(found["log_likelihood"]["y"].values[0], wanted, atol=1e-9)
    new = found["posterior_predictive"]["y"].values[0]
    assert (new <= trials[used]).all()
    np.testing.assert_allclose(new.mean(0), trials[used] * model.predict(x[used]), atol=0.25)


def test_trials_in_scores():
    """Shares weighted by trials; a common number may be one number, and missing trials are said."""
    x, successes, trials = trial_data(seed=4)
    model = SpikeSlabBinomialRegressor(random_state=0, **KNOWN).fit(x, successes, trials=trials)
    share, weight = successes[trials > 0] / trials[trials > 0], trials[trials > 0]
    residual = share - model.predict(x[trials > 0])
    expected = 1 - (weight * residual**2).sum() / (weight * (share - np.average(share, weights=weight)) ** 2).sum()
    assert model.score(x, successes, trials=trials) == pytest.approx(expected)
    with pytest.warns(UserWarning, match=r"Expected trials, .* each y is taken to be out of 4, the largest"):
        missing = SpikeSlabBinomialRegressor(random_state=0, **KNOWN).fit(x, successes)
    given = SpikeSlabBinomialRegressor(random_state=0, **KNOWN).fit(x, successes, trials=4)
    np.testing.assert_array_equal(missing.pip_, given.pip_)


@pytest.mark.parametrize(
    ("kind", "metric"),
    [(SpikeSlabRegressor, r2_score), (SpikeSlabPoissonRegressor, r2_score), (SpikeSlabClassifier, accuracy_score)],
)
def test_cross_validation_scores_with_the_offset(kind, metric):
    """As by hand, fold by fold; without its offset a fold has another score."""
    x, y, offset = offset_data(kind, n=60)
    model, folds, expected, without = kind(random_state=0, **KNOWN), KFold(3), [], []
    for train, test in folds.split(x):
        model.fit(x[train], y[train], offset=offset[train])
        expected.append(metric(y[test], model.predict(x[test], offset=offset[test])))
        without.append(model.score(x[test], y[test]))
    with config_context(enable_metadata_routing=True):
        model = kind(random_state=0, **KNOWN).set_fit_request(offset=True).set_score_request(offset=True)
        found = cross_val_score(model, x, y, cv=folds, params={"offset": offset})
    assert found == pytest.approx(expected)
    assert found != pytest.approx(without)
