"""What the package refuses at its doors: a call, and what its message says; three dots stand for the rest."""

import re

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.sparse import csr_array
from sklearn.exceptions import NotFittedError
from torch import nn

from pyro_l0.selection import (
    NeuralFeatureSelector,
    SpikeSlabBinomialRegressor,
    SpikeSlabClassifier,
    SpikeSlabCox,
    SpikeSlabGLM,
    SpikeSlabMultiTaskRegressor,
    SpikeSlabPoissonRegressor,
    SpikeSlabRegressor,
)
from pyro_l0.selection.credible_sets import credible_sets
from pyro_l0.selection.methods.enumeration import enumerate_posterior, exact_posterior
from pyro_l0.selection.methods.gaussian_evidence import GaussianEvidence
from pyro_l0.selection.methods.laplace_evidence import LaplaceEvidence
from pyro_l0.selection.problem import Prior
from tests.selection.families import design_of, named_problem
from tests.selection.fitted import ESTIMATORS, EVERY, SAMPLED, data, fitted
from tests.selection.strangers import GammaResponse
from tests.selection.test_summary_statistics import CROSSED, SQUARE, SQUARE_Y, N, R

X = np.random.default_rng(0).normal(size=(40, 5))
Y = X[:, 0] + X[:, 2]
RATES = [0.3, 1.0, 0.7, 0.1, 1.0]
GROUPS = [0, 1, 2, 2, 1]
OFFSET = [*ESTIMATORS, SpikeSlabBinomialRegressor]
COX = data(SpikeSlabCox)
HOLE = np.where(np.arange(5) == 3, np.nan, X)


def named(names, **options):
    """Four columns of some names; known scales."""
    frame = pd.DataFrame(X[:, :4], columns=pd.Index(names, tupleize_cols=False))
    return SpikeSlabRegressor(noise_scale=1.0, slab_scale=0.6, **options).fit(frame, Y)


def survival(event, time, **options):
    return SpikeSlabCox(**options).fit(np.eye(3), np.rec.fromarrays([event, time], names="event,time"))


def network(net=None, n_features=None, x=X, y=Y, **options):
    return NeuralFeatureSelector(net, n_features, **{"max_steps": 2, "cv": 2, "random_state": 0, **options}).fit(x, y)


def moments(xtx=SQUARE, xty=CROSSED, yty=SQUARE_Y, n=N, **options):
    return SpikeSlabRegressor.from_moments(xtx, xty, yty, n, **options)


def z_scores(z=CROSSED, r=R, n=N, **options):
    return SpikeSlabRegressor.from_z_scores(z, r, n, **options)


def trials(successes, of):
    return SpikeSlabBinomialRegressor().fit(np.eye(3), successes, trials=of)


def sets(**options):
    return credible_sets(
        **{"gates": np.ones((5, 7), bool), "active_probs": np.ones(7), "x": np.ones((4, 7)), **options}
    )


def regression(x=X, y=Y, weight=None, offset=None, **options):
    return SpikeSlabRegressor(**options).fit(x, y, weight, offset=offset)


def design(x=X, y=Y, **options):
    return design_of(x, y, **options)


def problem(family="gaussian", n=40):
    return named_problem(family, torch.from_numpy(X[:n]), torch.from_numpy(np.abs(Y[:n]).round()), Prior(0.2))


REFUSED = [
    # Features and observations.
    (lambda: regression(csr_array(HOLE)), "there are NaN in 'x3'"),
    (lambda: regression(pd.Series(Y)), "Expected a 2-dimensional container"),
    (lambda: regression([["a"], ["b"]], [1.0, 2.0]), "could not convert string to float"),
    (lambda: SpikeSlabClassifier().fit(np.eye(3), list("bbb")), "contains only one class: 'b'"),
    (lambda: SpikeSlabPoissonRegressor().fit(np.eye(3), [1, 2, -1]), "that are not negative, but got -1"),
    (lambda: SpikeSlabMultiTaskRegressor().fit(np.eye(3), [[2, 1], [0, 1], [1, 1]]), "each response to vary"),
    (
        lambda: SpikeSlabGLM(family=GammaResponse()).fit(X, -abs(Y)),
        "GammaResponse() to hold positive numbers, but got",
    ),
    (lambda: SpikeSlabGLM(family="poisson").fit(X, Y), "family"),
    *(
        (lambda kind=kind: kind().fit(X, np.where(np.arange(40) == 3, np.nan, Y).astype(object)), "NaN")
        for kind in (SpikeSlabRegressor, SpikeSlabPoissonRegressor)
    ),
    (lambda: design(y=Y[1:]), "(40, 5) and (39,)"),
    (lambda: design(y=Y * np.nan), "to hold finite numbers, but got nan"),
    (lambda: design(y=Y * 0 + 2, family="bernoulli"), "to hold 0 and 1, or shares between them, but got 2"),
    (lambda: design(y=Y * 0 + 0.5, family="categorical"), "to hold whole numbers from 0, but got 0.5"),
    # The ends of the number line, where squares and products of determinants would be infinite or zero.
    (lambda: design(1e200 * X), "largest absolute value of feature 'x0' to lie between 1e-60 and 1e+60"),
    (lambda: design(y=1e155 * Y), "largest absolute value of y to lie between"),
    (lambda: design(slab_scale=0.0), "slab_scale to lie between"),
    (lambda: design(slab_scale=1e300), "Expected slab_scale to lie between ... but got 1e+300"),
    (lambda: design(y=Y * 0 + 1, family="poisson", slab_scale=1e300), "slab_scale to lie between ... but got 1e+300"),
    (lambda: design(noise_scale=np.inf), "noise_scale to lie between"),
    (lambda: design(noise_scale=1e300), "Expected noise_scale to lie between ... but got 1e+300"),
    (lambda: design(y=Y * 0 + 1, family="poisson", noise_scale=1.0), "no noise_scale"),
    # Methods, rates and groups.
    (lambda: regression(np.eye(30, 21), np.arange(30), method="enumerate"), "at most 20 features or"),
    (lambda: exact_posterior(np.eye(5, 21) + np.arange(5)[:, None], np.arange(5)), "at most 20 features"),
    (lambda: exact_posterior(X, np.full(40, 3.0)), "y to vary"),
    *(
        (lambda kind=kind: kind(method="enumerate").fit(*data(kind)), "method='auto' or 'tempered' for the family")
        for kind in SAMPLED
    ),
    (lambda: enumerate_posterior(problem(n=0)), "at least one observation"),
    (lambda: GaussianEvidence(problem()).log_marginal(torch.ones(2, 3) > 0), "shape (S, 5)"),
    (lambda: LaplaceEvidence(problem("poisson")).log_marginal(torch.ones(2, 3) > 0), "shape (S, 5)"),
    (lambda: design(rate=1.5), "a rate between 0 and 1, ... but got 1.5"),
    (lambda: regression(expected_size=5), "between 0 and the number of features, 5, but got 5"),
    (lambda: regression(rate=RATES, expected_size=2), "Expected a rate or an expected_size, but got both"),
    (lambda: regression(rate=[0.1, 0.2]), "rates above 0 and up to 1 of 5 features, but got [0.1, 0.2]"),
    (lambda: regression(rate=[0.1, 0.2, 0, 0.1, 0.1]), "1 is for features that are always in"),
    (lambda: regression(rate=[0.1, 0.2, 1.1, 0.1, 0.1]), "1 is for features that are always in"),
    (lambda: regression(rate=[0.1, 0.2, np.nan, 0.1, 0.1]), "1 is for features that are always in"),
    (lambda: regression(rate={"age": 1}), "names or positions of features, but got 'age'; there are 5."),
    (lambda: regression(rate={5: 1}, groups=GROUPS), "positions of groups, but got 5; there are 3."),
    (lambda: regression(rate=RATES, groups=GROUPS), "Expected rates above 0 and up to 1 of 3 groups"),
    (lambda: regression(rate={0: 0.5, 1: 1}), "Expected a rate for each feature, or none but rates of 1"),
    (lambda: regression(rate=0.5, always_in_scale=1.0), "Expected no always_in_scale, as no"),
    (lambda: named([3, 1, 2, 4], rate={0: 0.5}), "rates by names of features, but got 0; there are 4."),
    (lambda: named(list("aabc"), rate={"a": 1}), "Expected unique column names"),
    (lambda: named(list("abcd"), rate={"a": 1, 0: 1}), "but 0 is there twice; leave one out."),
    (lambda: named(list("abcd"), groups={"a": 0, "b": 1, "c": 1, "e": 2}), "Expected groups by names or positions of"),
    (lambda: named(list("abcd"), groups={"a": 0, "b": 1, "c": 1}), "to be whole numbers from 0"),
    *(
        (lambda groups=groups: regression(X[:, :3], groups=groups), "one for each of 3 features")
        for groups in ([0, 1], [0, 1, 3], [0, -1, 1], [0.0, 1.0, 2.0], "abc", [[0, 1, 2]])
    ),
    # Weights, offsets and trials.
    (lambda: regression(weight=-np.ones(40)), "weight"),
    (lambda: regression(weight=np.ones(39)), "weight"),
    (lambda: regression(weight=np.zeros(40)), "at least one non-zero"),
    (lambda: regression(weight=np.full(40, 1 / 40)), "weights that sum to more than 1"),
    (lambda: SpikeSlabCox().fit(*COX, np.full(80, 0.5)), "whole weights to repeat rows by, but some are fractions"),
    (lambda: regression(weight=np.full(40, 1.5)).to_arviz(), "Expected whole weights"),
    (lambda: regression(offset=np.ones(39)), "an offset of shape (40,), one for each linear predictor"),
    *((lambda kind=kind: kind().fit(*data(kind), offset=np.ones(79)), "(80,), ... but got (79,)") for kind in OFFSET),
    *((lambda kind=kind: fitted(kind).predict(np.ones((3, 4)), offset=np.ones(2)), "got (2,)") for kind in OFFSET),
    (lambda: regression(offset=1.0), "but got (); a constant is in the intercept"),
    (lambda: regression(offset=np.full(40, np.nan)), "Input offset contains NaN"),
    (lambda: trials([0, 1, 3], [2, 2, 2]), "but row 2 has 3 of 2; y are successes, not failures or"),
    (lambda: trials([0, -1, 1], [2, 2, 2]), "but row 1 has -1 of 2"),
    (lambda: trials([0, 0, 1], [2, 2]), "Expected trials to be a number or of shape (3,), one for each row"),
    (lambda: trials([0, 0, 1], [2, np.nan, 2]), "Input trials contains NaN"),
    # Survival times.
    (lambda: survival([False] * 3, [1.0, 2, 3]), "at least one event, but got a smallest time of 1 and 0 events"),
    (lambda: survival([True] * 3, [1.0, -2, 3]), "but got a smallest time of -2"),
    (lambda: survival([True] * 3, [1.0, np.nan, 3]), "contains NaN"),
    (lambda: survival([1, 0, 1], [1.0, 2, 3]), "a field of type bool, "),
    (lambda: survival([True] * 3, [1.0, 2, 3], ties="exact"), "'ties' parameter of SpikeSlabCox must be a str among"),
    (lambda: fitted(SpikeSlabCox).predict_survival(COX[0], 1.0), "Expected times of shape (T,) without NaN"),
    (lambda: fitted(SpikeSlabCox).score(*(part[:1] for part in COX)), "there is none; pass more rows"),
    # Questions after a fit.
    (lambda: fitted(SpikeSlabRegressor).sample(0), "but got 0"),
    (lambda: fitted(SpikeSlabRegressor).interval(-0.5), "but got -0.5"),
    (lambda: fitted(SpikeSlabRegressor).select(2), "but got 2"),
    (lambda: fitted(SpikeSlabRegressor).predict_quantiles(X[:, :4], [1.5]), "must be in the range [0, 1]"),
    (lambda: fitted(SpikeSlabRegressor).sample_y(X[:, :4], 0), "n_samples of at least 1, but got 0."),
    (lambda: sets(level=1.5), "Expected level to be between 0 and 1, but got 1.5."),
    (lambda: sets(min_correlation=-0.1), "min_correlation to be between 0 and 1, but got -0.1."),
    (lambda: sets(active_probs=np.ones(3)), "as many gates as inclusion probabilities and features"),
    # Summary statistics.
    (lambda: moments(SQUARE[:3]), "XtX of shape (p, p) and Xty of shape (p,), but got (3, 4)"),
    (lambda: moments(np.triu(SQUARE)), "Expected XtX to be symmetric, but it is not"),
    (lambda: moments(-SQUARE), "sums of squares that are not negative in XtX and a positive"),
    (lambda: moments(yty=0.0), "a positive yty, but got"),
    (lambda: moments(SQUARE * (2 * np.eye(4) - 1)), "no data have these: XtX has a negative"),
    (lambda: moments(xty=9 * CROSSED), "y @ y would be"),
    (lambda: moments(np.ones((4, 4)), [1.0, 1.0, 1.0, 0.5], 4.0), "times yty, or more, to go with Xty"),
    (lambda: moments(n=2), "Expected n, the number of observations, to be above 2, but got 2."),
    (lambda: moments(X_mean=np.zeros(4)), "Expected X_mean and y_mean both or neither"),
    (lambda: moments(X_mean=0.5, y_mean=0.0), "X_mean of shape (4,), one for each feature, but got ()."),
    (
        lambda: moments(pd.DataFrame(SQUARE, columns=list("abcd")), X_mean=pd.Series(0.0, list("bacd")), y_mean=0.0),
        "its names are in another; reorder it by X_mean[XtX.columns].",
    ),
    (lambda: moments(X_mean=np.zeros(4), y_mean=0.0, fit_intercept=False), "and neither without an intercept"),
    (lambda: z_scores(r=SQUARE), "R to be a correlation matrix, with ones on its diagonal, but got"),
    (lambda: z_scores(np.ones(3)), "R of shape (p, p) and z of shape (p,), but got (4, 4) and (3,)"),
    (lambda: z_scores(np.full(4, np.nan)), "Input z contains NaN"),
    (lambda: z_scores(r=np.tril(R)), "Expected R to be symmetric, but it is not; fill in both triangles."),
    (lambda: z_scores(panel_size=2), "panel_size, the rows of the panel that R is of, to be above 2, but got 2"),
    (lambda: z_scores(panel_size=np.nan), "to be above 2, but got nan"),
    (lambda: z_scores(r=X[:2, :4]), "to be above 2, but got 2"),
    (
        lambda: z_scores(r=X[:, :4] * [1, 1, 0, 1]),
        "Expected each feature to vary in the panel R, but 2 does not; leave it out.",
    ),
    # The network's selector.
    (lambda: network(n_features=0), "'n_features' parameter"),
    (lambda: network(n_features=9), "at most 5, the features of X, but got 9"),
    (lambda: network(3), "'net' parameter"),
    (lambda: network(task="ranking"), "'task' parameter"),
    (lambda: network(nn.Linear(5, 3), y=Y > 0, task="classification"), "returns 2 logits for each row"),
    (lambda: network(y=np.ones(40, dtype=int)), "one class"),
    (lambda: network(task="classification"), "continuous"),
    *(
        (lambda most=most: network(nn.Sequential(nn.Linear(5, 1), nn.Softplus(np.nan)), most), "stay finite")
        for most in (2, None)
    ),
]
OTHERWISE = [
    (lambda: SpikeSlabClassifier().fit(csr_array(np.eye(4)), [0, 1, 0, 1]), "Sparse data was passed", TypeError),
    (lambda: moments(n="40"), "Expected n to be a number, but got a value of type", TypeError),
    (lambda: z_scores(n=None), "Expected n to be a number, but got a value of type", TypeError),
    (lambda: z_scores(panel_size="9"), "Expected panel_size to be a number, but got a value of type", TypeError),
    (lambda: fitted(SpikeSlabCox).sample_y(COX[0]), "use predict_survival", NotImplementedError),
]
TABLE = [*((*row, ValueError) for row in REFUSED), *OTHERWISE]


@pytest.mark.parametrize(("call", "words", "error"), TABLE, ids=[row[1] for row in TABLE])
def test_refused(call, words, error):
    with pytest.raises(error, match=".*".join(map(re.escape, words.split("...")))):
        call()


@pytest.mark.parametrize("kind", EVERY)
def test_before_a_fit(kind):
    """Said by every method, not by an attribute that is missing."""
    for name in ("select", "sample", "interval", "summary", "get_support", "to_arviz"):
        with pytest.raises(NotFittedError):
            getattr(kind(), name)()
    for name in ("predict", "predict_proba", "predict_quantiles", "transform"):
        if hasattr(kind, name):
            with pytest.raises(NotFittedError):
                getattr(kind(), name)(np.ones((3, 2)))
