"""Cox regression as an estimator: observations with events, risks, survival curves and concordance."""

import itertools

import numpy as np
import pandas as pd
import pytest

from pyro_l0.selection import SpikeSlabCox
from tests.selection.fitted import data, fitted

KNOWN = {"slab_scale": 1.0, "random_state": 0}


def test_forms_of_observations():
    """Fields of any name and order; times alone are those of events; repeated times are ties."""
    x, y = data(SpikeSlabCox)
    model = SpikeSlabCox(**KNOWN).fit(x, y)
    other = np.array(list(zip(y["time"], y["event"], strict=True)), dtype=[("days", "f4"), ("died", "?")])
    np.testing.assert_allclose(SpikeSlabCox(**KNOWN).fit(x, other).pip_, model.pip_, atol=1e-3)
    frame = pd.DataFrame(x, columns=list("abcd"))
    np.testing.assert_allclose(SpikeSlabCox(**KNOWN).fit(frame, y).pip_, model.pip_, atol=1e-8)
    everyone = np.rec.fromarrays([y["event"] | True, y["time"]], names="event,time")
    alone, all_events = (SpikeSlabCox(**KNOWN).fit(x, each) for each in (y["time"], everyone))
    np.testing.assert_allclose(alone.pip_, all_events.pip_, atol=1e-8)
    assert alone.log_evidence_ != SpikeSlabCox(**KNOWN, ties="breslow").fit(x, y["time"]).log_evidence_


def test_events_at_the_start():
    """Zero is a time like others: an event there is told from an observation censored there."""
    x, y = data(SpikeSlabCox)
    y = y.copy()
    y["time"] -= y["time"].min()
    first = y["time"].argmin()
    happened = SpikeSlabCox(**KNOWN).fit(x, y).log_evidence_
    y["event"][first] = False
    assert SpikeSlabCox(**KNOWN).fit(x, y).log_evidence_ > happened + 1


@pytest.mark.parametrize("ties", ["efron", "breslow"])
def test_survival_curves(ties):
    """Sums over events of the fit, draw by draw; times of events are included, and nothing happens after the last."""
    x, y = data(SpikeSlabCox)
    y = y.copy()
    y["time"] = np.ceil(4 * y["time"]) / 4
    known = np.linspace(-1.0, 1.0, 80)
    model = SpikeSlabCox(random_state=0, ties=ties).fit(x, y, offset=known)
    times = np.array([3.0, 0.1, 0.25, 0.6, 2.0])
    found = model.predict_survival(x[:3], times, offset=known[:3])
    draws = model.sample(2000)
    risk = np.exp(draws["coef"] @ x.T + draws["intercept"][:, None] + known)
    new = risk[:, :3]
    hazard = np.zeros((2000, len(times)))
    for at in np.unique(y["time"][y["event"]]):
        tied = np.flatnonzero(y["event"] & (y["time"] == at))
        for rank in range(len(tied)):
            left_out = rank / len(tied) * risk[:, tied].sum(1) if ties == "efron" else 0.0
            hazard += (times >= at) / (risk[:, y["time"] >= at].sum(1) - left_out)[:, None]
    np.testing.assert_allclose(found, np.exp(-new[:, :, None] * hazard[:, None]).mean(0), rtol=1e-9)
    assert (found[:, 1] == 1).all()
    assert (found[:, 0] == found[:, 4]).all()
    np.testing.assert_allclose(model.predict(x, offset=known), x @ model.coef_ + model.intercept_ + known)
    assert abs(model.predict(x).mean()) < 1e-12


def test_concordance():
    """Over all pairs, one after the other; equal risks are one half, and the censored outlive events of their time."""
    x, y = data(SpikeSlabCox)
    y = y.copy()
    y["time"] = np.ceil(4 * y["time"])
    x[5] = x[6]
    model = fitted(SpikeSlabCox)
    risk, right, pairs = model.predict(x), 0.0, 0
    for i, j in itertools.permutations(range(len(y)), 2):
        outlived = y["time"][i] < y["time"][j] or (y["time"][i] == y["time"][j] and not y["event"][j])
        if y["event"][i] and outlived:
            pairs += 1
            right += 1.0 if risk[i] > risk[j] else 0.5 * (risk[i] == risk[j])
    assert model.score(x, y) == pytest.approx(right / pairs)
    assert model.score(x, y) > 0.7


def test_arviz():
    """Draws and observations, and no log likelihoods, which a partial likelihood has not."""
    _, y = data(SpikeSlabCox)
    found = fitted(SpikeSlabCox).to_arviz()
    np.testing.assert_array_equal(found["observed_data"]["time"], y["time"])
    np.testing.assert_array_equal(found["observed_data"]["event"], y["event"])
    assert found["posterior"]["coef"].shape == (1, 1000, 4)
    for group in ("log_likelihood", "posterior_predictive"):
        assert not hasattr(found, group)
