"""Responses that a user writes have all that the library's own have, against scipy alone."""

import pickle
import re

import numpy as np
import pandas
import pytest
import torch
from scipy import stats
from sklearn.base import clone

from pyro_l0.selection import SpikeSlabGLM, SpikeSlabMultiTaskRegressor, SpikeSlabPoissonRegressor
from pyro_l0.selection.families import Family, Multivariate, Poisson
from pyro_l0.selection.responses import _RESULTS
from tests.selection.fitted import assert_equal_fits
from tests.selection.methods.by_importance import references
from tests.selection.strangers import Exponential, GammaResponse, Laplace, ZeroInflatedPoisson


def features(n=60, p=2, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, p))
    x[:, 1] += x[:, 0]
    return rng, (x - x.mean(0)) / x.std(0)


def sigmoid(theta):
    return 1 / (1 + np.exp(-theta))


def zero_inflated(y, mean, zero):
    return np.log(zero * (y == 0) + (1 - zero) * stats.poisson.pmf(y, mean))


# Of each response: draws given log means, its log density by scipy with a parameter on the whole line, the log density
# of that, and what it stands for.
STRANGERS = {
    "gamma": (
        GammaResponse(),
        lambda rng, mean: rng.gamma(3.0, mean / 3.0),
        lambda y, mean, theta: stats.gamma.logpdf(y, np.exp(theta), scale=mean / np.exp(theta)),
        lambda theta: stats.gamma.logpdf(np.exp(theta), 2, scale=2) + theta,
        ("shape_", np.exp),
    ),
    "zero-inflated": (
        ZeroInflatedPoisson(),
        lambda rng, mean: rng.poisson(mean) * (rng.random(len(mean)) > 0.3),
        lambda y, mean, theta: zero_inflated(y, mean, sigmoid(theta)),
        lambda theta: np.log(sigmoid(theta)) + np.log(sigmoid(-theta)),
        ("zero_", sigmoid),
    ),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_posteriors(name):
    """By importance sampling in scipy: gates to .03, five standard errors of the chains; means of what is learned."""
    family, draw, by_scipy, prior, (attribute, shown) = STRANGERS[name]
    rng, x = features(seed=3)
    y = draw(rng, np.exp(0.5 + 0.25 * x[:, 0])).astype(float)
    model = SpikeSlabGLM(family=family, random_state=0).fit(x, y)

    def log_density(eta, theta):
        return by_scipy(y, np.exp(eta[..., 0]), theta).sum(1) + prior(theta)[:, 0]

    pips, coefs, learned = references(x, log_density, 1, shown=shown)
    assert ((pips > 0.05) & (pips < 0.98)).any()
    assert np.abs(model.pip_ - pips).max() < 5 * model.error_.max() + 0.01
    np.testing.assert_allclose(model.coef_, coefs[:, 0], atol=0.03)
    np.testing.assert_allclose(getattr(model, attribute), learned[0], rtol=0.08)


SLOW = (pytest.param(family, marks=pytest.mark.slow) for family in (GammaResponse(), ZeroInflatedPoisson(), Laplace()))


@pytest.mark.parametrize("family", [Exponential(), *SLOW], ids=repr)
def test_everything_that_an_estimator_does(family):
    """Weights are repeated rows, an offset is part of the predictor, and predictions are those of the draws."""
    rng, x = features(40, 3, seed=1)
    eta = 0.4 + x[:, 2]
    first = SpikeSlabGLM(family=family, rate=0.4, slab_scale=1.0, random_state=0)
    parameters = {name: np.full((1, 1), 0.4) for name in family.priors(torch.ones(1), 1.0)}
    y = family.sample(eta[None], rng, **parameters)[0].astype(float)
    weight = rng.integers(1, 3, size=len(y))
    once = clone(first).fit(x, y, weight)
    twice = clone(first).fit(np.repeat(x, weight, 0), np.repeat(y, weight))
    np.testing.assert_allclose(once.pip_, twice.pip_, atol=0.05)
    # Each has an error of about .05 standard deviations.
    np.testing.assert_allclose(once.coef_, twice.coef_, atol=0.2 * once.coef_sd_.max())
    known = np.full(len(y), 0.7)
    moved = clone(first).fit(x, y, weight, offset=known)
    assert moved.intercept_ == pytest.approx(once.intercept_ - 0.7, abs=0.1)
    loaded = pickle.loads(pickle.dumps(once))
    np.testing.assert_array_equal(loaded.predict(x), once.predict(x))

    draws, arviz = once.sample(2000), once.to_arviz()
    own = {k: v[:, None] for k, v in draws.items() if k in parameters}
    predictors = draws["coef"] @ x.T + draws["intercept"][:, None]
    means = np.broadcast_to(family.mean(predictors, **own), predictors.shape)
    np.testing.assert_allclose(once.predict(x), means.mean(0), rtol=0.1, atol=0.05)
    mean, sd = once.predict(x, return_std=True)
    # Of the fit's own draws, each forty times; the fit has one observation of each. The relative error of a deviation
    # is that of 2,000 draws with the fourth moment that is found: tails may be far.
    replicated = np.concatenate([family.sample(predictors, rng, **own) for _ in range(40)])
    fourth = ((replicated - replicated.mean(0)) ** 4).mean(0) / replicated.var(0) ** 2
    error = np.sqrt((fourth - 1) / (4 * 2000))
    assert (np.abs(sd / replicated.std(0) - 1) < 5 * error).all()
    assert (np.abs(mean - replicated.mean(0)) < 6 * sd / np.sqrt(200)).all()
    lower, upper = once.predict_quantiles(x, [0.1, 0.9]).T
    inside = (replicated >= lower) & (replicated <= upper)
    assert 0.75 < inside.mean() < 1
    assert once.sample_y(x, 5).shape == (len(x), 5)
    rows = np.repeat(np.arange(len(y)), weight)
    tensors = {k: torch.from_numpy(v) for k, v in own.items()}
    by_hand = family.log_prob(torch.from_numpy(y[rows]), torch.from_numpy(predictors[:, rows]), **tensors)
    found = arviz.log_likelihood["y"][0]
    np.testing.assert_allclose(found, by_hand[: len(found)], rtol=1e-8)
    assert list(once.select()) == [2]
    assert once.score(x, y) > 0
    groups = clone(first).set_params(rate={0: 0.2, 1: 1.0}, groups=[0, 0, 1]).fit(x, y)
    assert groups.pip_[1] == 1


@pytest.mark.parametrize(
    ("family", "twin"), [(Poisson(), SpikeSlabPoissonRegressor), (Multivariate(2), SpikeSlabMultiTaskRegressor)]
)
def test_families_of_the_library(family, twin):
    rng, x = features(30)
    y = (
        rng.poisson(np.exp(x[:, 0]))
        if twin is SpikeSlabPoissonRegressor
        else x[:, [0]] * [1.0, -1.0] + rng.normal(size=(30, 2))
    )
    one, other = SpikeSlabGLM(family=family, random_state=0).fit(x, y), twin(random_state=0).fit(x, y)
    assert_equal_fits(one, other)
    assert one.predict(x).shape == y.shape
    assert one.summary().shape == other.summary().shape


class ByLogaddexp(ZeroInflatedPoisson):
    def log_density(self, y, eta, zero):
        counts = (-zero).log1p() + y * eta - eta.exp() - (y + 1).lgamma()
        return torch.where(y > 0, counts, torch.logaddexp(zero.log(), counts))


DERIVATIVES = {
    "gamma": (
        (GammaResponse(), "shape", 3.0, [0.5, 2.0], [0.1, 0.7]),
        lambda eta: stats.gamma.logpdf([0.5, 2.0], 3.0, scale=np.exp(eta) / 3.0),
    ),
    # Of torch.logaddexp they are NaN where one of both terms has vanished, here that of the counts.
    "zeros": (
        (ByLogaddexp(), "zero", 0.3, [0.0] * 3, [-1.0, 1.0, 10.0]),
        lambda eta: np.log(0.3 + 0.7 * np.exp(-np.exp(eta))),
    ),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_by_autograd(name):
    (family, parameter, value, y, eta), density = DERIVATIVES[name]
    y, eta, value = (torch.tensor(part, dtype=torch.float64) for part in (y, [eta], [[value]]))
    slope, curvature = family.derivatives(y, eta, **{parameter: value})
    e, h = eta.numpy(), 1e-4
    np.testing.assert_allclose(slope, (density(e + h) - density(e - h)) / (2 * h), rtol=1e-6, atol=1e-12)
    numeric = -(density(e + h) - 2 * density(e) + density(e - h)) / h**2
    np.testing.assert_allclose(curvature, numeric.clip(0), rtol=5e-6, atol=1e-7)
    assert family.curvature_slope(y, eta, torch.ones_like(eta), **{parameter: value}).isfinite().all()


def test_no_second_derivative_that_is_missed():
    """By parameters and by linear predictors; with torch.logsumexp there is one."""
    rng, x = features(10)
    y = rng.poisson(650, size=10) * np.array([0, 1] * 5)
    with pytest.raises(ValueError, match=r"Expected second derivatives .* use torch.logsumexp or softplus"):
        SpikeSlabGLM(family=ByLogaddexp()).fit(x, y)
    eta, zero = torch.full((1, 10), 1.5, dtype=torch.float64), torch.tensor([[0.3]], dtype=torch.float64)
    with pytest.raises(ValueError, match=r"Expected second derivatives .* NaN at linear predictors as 1.5"):
        ByLogaddexp().derivatives(torch.from_numpy(y).double(), eta, zero=zero)
    assert ZeroInflatedPoisson().derivatives(torch.from_numpy(y).double(), eta, zero=zero)[1].isfinite().all()


class OneForAll(Exponential):
    def log_density(self, y, eta):
        return super().log_density(y, eta).sum(-1)


class Column(Exponential):
    def log_density(self, y, eta):
        return super().log_density(y, eta)[..., None]


class WrongConstant(Exponential):
    def log_constant(self, y):
        return -(y + 1).lgamma().sum()


class OneDraw(Exponential):
    def sample(self, eta, random):
        return random.exponential(np.exp(eta[0]))


class OneMean(Exponential):
    def mean(self, eta):
        return np.exp(eta[0])


class Named(GammaResponse):
    def reported(self, parameters):
        return {"rate": parameters["shape"]}

    def sample(self, eta, random, rate):
        return super().sample(eta, random, rate)

    def mean(self, eta, rate):
        return super().mean(eta, rate)


def test_no_parameter_is_named_like_a_result():
    rng, x = features(20)
    model = SpikeSlabGLM(family=Poisson(), random_state=0).fit(
        pandas.DataFrame(x, columns=["a", "b"]), rng.poisson(1.0, 20)
    )
    attributes = {name[:-1] for name in dir(model) if name.endswith("_") and not name.startswith("_")}
    assert attributes | model.sample().keys() == _RESULTS


class Kinked(Laplace):
    derivatives = Family.derivatives


REFUSED = [
    *((family, "the log density of {} to have the shape") for family in (OneForAll(), Column(), WrongConstant())),
    (OneDraw(), "sample and mean of {} to have the shape (2, 10) ... got (10,) and (2, 10)"),
    (OneMean(), "sample and mean of {} ... got (2, 10) and (10,)"),
    (Named(), "parameters of {} with names of their own, but 'rate' is a result of every fit"),
    (Kinked(), "the log density of {} to curve down"),
]


@pytest.mark.parametrize(("family", "words"), REFUSED, ids=repr)
def test_what_would_go_wrong(family, words):
    """Before the fit, or after it."""
    _, x = features(10)
    expected = ("Expected " + words.format(f"{type(family).__name__}()")).split("...")
    with pytest.raises(ValueError, match=".*".join(map(re.escape, expected))):
        SpikeSlabGLM(family=family).fit(x, np.round(1 + x[:, 0] ** 2))
