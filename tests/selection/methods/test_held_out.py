"""Log scores of held-out observations, with gates and without: of twenty features, three have an effect."""

import numpy as np
import pytest
import torch
from scipy.special import logsumexp

from pyro_l0.selection import (
    SpikeSlabCox,
    SpikeSlabMultiTaskRegressor,
    SpikeSlabNegativeBinomial,
    SpikeSlabOrdinal,
    SpikeSlabRobust,
)
from pyro_l0.selection.families.cox import CoxLikelihood
from pyro_l0.selection.predictive import linear_predictors, log_likelihood


def cox_data(eta, rng):
    time, last_seen = rng.exponential(np.exp(-eta)), rng.exponential(3.0, size=len(eta))
    return np.rec.fromarrays([time <= last_seen, np.minimum(time, last_seen)], names="event,time")


def cox_score(model, x, y):
    """Of an event, by the partial likelihood."""
    likelihood = CoxLikelihood(torch.tensor(y["time"].tolist()).double(), torch.tensor(y["event"].tolist()), True)
    return float(likelihood.value(torch.from_numpy(model.predict(x))[None, :, None])) / y["event"].sum()


def ordinal_score(model, x, y):
    return np.log(model.predict_proba(x)[np.arange(len(y)), y]).mean()


def score(model, x, y):
    each = log_likelihood(model._family, linear_predictors(model.draws_, x), y, model.draws_)
    each = each.reshape(len(each), len(y), -1).sum(2)
    return (logsumexp(each, axis=0) - np.log(len(each))).mean()


KINDS = {
    SpikeSlabCox: (cox_data, cox_score),
    SpikeSlabOrdinal: (lambda eta, rng: np.digitize(2 * eta + rng.logistic(size=len(eta)), [-1, 1.5]), ordinal_score),
    SpikeSlabRobust: (lambda eta, rng: eta + rng.standard_t(2.0, size=len(eta)), score),
    SpikeSlabNegativeBinomial: (
        lambda eta, rng: rng.poisson(np.exp(1 + eta) * rng.gamma(2.0, 0.5, size=len(eta))).astype(float),
        score,
    ),
    SpikeSlabMultiTaskRegressor: (lambda eta, rng: eta[:, None] * [1, -0.5] + rng.normal(size=(len(eta), 2)), score),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_gates_predict_better_than_all_features(kind):
    """By .02 nat an observation, where the full model has the same slabs and learns their scale, too."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1100, 20))
    observed, score_of = KINDS[kind]
    y = observed(x[:, :3] @ [0.8, -0.6, 0.5], rng)
    with_gates, full = (kind(random_state=0, **known).fit(x[:100], y[:100]) for known in ({}, {"rate": 1 - 1e-9}))
    assert full.pip_.min() > 0.99
    gain = score_of(with_gates, x[100:], y[100:]) - score_of(full, x[100:], y[100:])
    assert gain > 0.02
