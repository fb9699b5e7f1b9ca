"""The methods behind the estimators: which one is chosen, what they agree on, and what they leave as it was."""

import re
import warnings
from dataclasses import replace

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning

from pyro_l0.selection import SpikeSlabClassifier, SpikeSlabRegressor
from pyro_l0.selection.design.design import Design
from pyro_l0.selection.methods import METHODS, grid
from pyro_l0.selection.methods.enumeration import exact_posterior


def data(p=4, n=100):
    """Features 0 and 1 are nearly the same, and either explains y."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, p))
    x[:, 1] = x[:, 0] + 0.2 * rng.normal(size=n)
    return x, 0.4 * x[:, 0] + rng.normal(size=n)


@pytest.mark.parametrize(
    ("kind", "p", "method"),
    [
        (SpikeSlabRegressor, 15, "enumerate"),
        (SpikeSlabRegressor, 16, "tempered"),
        (SpikeSlabClassifier, 9, "enumerate"),
        (SpikeSlabClassifier, 10, "tempered"),
    ],
)
def test_few_features_are_enumerated(kind, p, method, monkeypatch):
    """And more of them sampled; what is called is replaced, since only the choice matters."""

    class CalledError(Exception):
        pass

    def call(problem, *, draws, seed):
        raise CalledError

    x, y = data(p)
    monkeypatch.setitem(METHODS, method, call)
    with pytest.raises(CalledError):
        kind().fit(x, y > 0)


def of_chains(monkeypatch, *errors):
    """A fit whose chains have these standard errors, and its warnings."""

    def sampled(problem, *, draws, seed):
        return replace(METHODS["enumerate"](problem, draws=draws, seed=seed), error=np.array(errors))

    monkeypatch.setitem(METHODS, "tempered", sampled)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        return SpikeSlabRegressor(method="tempered", random_state=0).fit(*data()), [str(w.message) for w in caught]


@pytest.mark.parametrize("error", [0.04, 0.06])
def test_chains_that_disagree_are_reported(error, monkeypatch):
    """With the feature and the size, where a standard error is more than .05, and in no other case."""
    model, messages = of_chains(monkeypatch, 0.0, error, 0.01, 0.0)
    assert model.error_.tolist() == [0.0, error, 0.01, 0.0]
    assert model.ok_ == (error < 0.05)
    assert model.problems_ == tuple(messages)
    assert len(messages) == (error > 0.05)
    assert all(re.search(r"is 0.06, .* the sampler's chains disagree on 'x1'\. ", message) for message in messages)


def test_what_chains_that_disagree_would_need(monkeypatch):
    """The factor of draws is the square of that of the error, and the least certain features are named first."""
    _, (message,) = of_chains(monkeypatch, 0.11, 0.06, 0.0, 0.2)
    assert re.search(r"is 0.20, .* on 'x3', 'x0', 'x1'\. Average 16 fits .* nearly equal ones", message)


def test_chains_that_follow_an_enumeration_may_disagree(monkeypatch):
    """Of which ``exact_posterior`` warns, too."""
    x, y = data()
    right = exact_posterior(x, y, seed=0)
    assert right.ok
    assert not right.error.any()
    by_chains = replace(right, error=np.array([0.0, 0.07, 0.0, 0.0]), problems=("The chains disagree.",))
    monkeypatch.setattr(Design, "posterior", lambda *_: by_chains)
    with pytest.warns(ConvergenceWarning, match=r"chains disagree\. .* is 0.07, .* average those of several seeds"):
        assert not exact_posterior(x, y, seed=0).ok


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize(("kind", "method"), [(SpikeSlabRegressor, "tempered"), (SpikeSlabClassifier, "enumerate")])
def test_progress(kind, method, verbose, capsys, monkeypatch):
    """Every bar ends at its total, also those of steps that seldom take long."""
    monkeypatch.setattr(grid, "_LONG", 0.0)
    x, y = data()
    kind(method=method, random_state=0, verbose=verbose).fit(x, y > 0)
    lines = capsys.readouterr().err.split("\n")[:-1]
    assert any("gate vectors" in line for line in lines) == verbose
    assert any("flips" in line for line in lines) == (verbose and method == "tempered")
    assert all("100%" in line for line in lines)


def test_methods_find_the_same_posterior():
    x, y = data()
    scales = {"rate": 0.2, "slab_scale": 0.5, "noise_scale": 1.0}
    exact, sampled = (SpikeSlabRegressor(method=m, random_state=1, **scales).fit(x, y) for m in sorted(METHODS))
    assert (exact.method_, sampled.method_) == ("enumerate", "tempered")
    np.testing.assert_allclose(sampled.pip_, exact.pip_, atol=0.03)
    np.testing.assert_allclose(sampled.coef_, exact.coef_, atol=0.02)
    assert sampled.log_evidence_ == pytest.approx(exact.log_evidence_, abs=0.05)
