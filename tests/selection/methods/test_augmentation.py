"""Augmented chains of logistic regressions against the sum over all gates, and against quadrature."""

import numpy as np
import pytest
import torch
from scipy.special import log_expit

from pyro_l0.maths.tempered_gibbs import progress
from pyro_l0.selection.methods import exact_chains
from pyro_l0.selection.methods.enumeration import enumerate_posterior
from pyro_l0.selection.methods.exact_chains import AugmentedChains, is_augmented
from tests.selection.families import design_of
from tests.selection.methods.closed_start import closed
from tests.selection.references import by_quadrature


def labels(n, p, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 1)) + rng.normal(size=(n, p))  # correlations of one half
    return x, (1.5 * x[:, 0] - x[:, 1] + rng.logistic(size=n) > 0).astype(float)


def sampled(problem, size=32, error=0.0):
    return closed(AugmentedChains, problem, size).posterior(0.0, 2000, error)


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(exact_chains, "_ROUNDS", 2)


@pytest.mark.parametrize("groups", [None, np.array([0, 1, 1, 2])])
@pytest.mark.parametrize("intercept", [True, False])
@torch.no_grad()
def test_sum_over_all_gates(groups, intercept, short):
    """With many observations Laplace's sum is right to .002; five standard errors and that."""
    x, y = labels(300, 4, seed=0)
    x[:, 2:] *= 0.3
    known = {"slab_scale": 0.5, "rate": 0.5, "standardize": False}
    problem = design_of(x, y, "bernoulli", gate_of=groups, fit_intercept=intercept, **known).problem
    exact, found = enumerate_posterior(problem, seed=0), sampled(problem)
    assert ((exact.active_probs > 0.05) & (exact.active_probs < 0.95)).any()
    assert found.error.max() < 0.05
    assert (np.abs(found.active_probs - exact.active_probs) < 5 * found.error + 2e-3).all()
    np.testing.assert_allclose(found.mean, exact.mean, atol=0.1 * exact.sd.max())
    np.testing.assert_allclose(found.sd, exact.sd, rtol=0.15)
    drawn = found.draws.coefficients.toarray()
    np.testing.assert_allclose(drawn.mean(0), exact.mean[:, 0], atol=0.15 * exact.sd.max())
    assert (found.draws.intercept != 0).all() == intercept


@pytest.mark.parametrize("error", [0.0, 1.0])
@torch.no_grad()
def test_one_bar_for_a_whole_run(error, capsys, monkeypatch):
    """Its total follows the error that is left, and is in the end the sweeps that were made."""
    monkeypatch.setattr(exact_chains, "_ROUNDS", 6)
    monkeypatch.setattr(AugmentedChains, "sweeps", 3)
    problem = design_of(*labels(20, 2, seed=2), "bernoulli", slab_scale=1.0, rate=0.5).problem
    with progress(True):
        sampled(problem, size=4, error=error)
    shown = capsys.readouterr().err
    number = 12 if error else 18
    assert shown.count("\n") == 1  # however often the bar was drawn
    last = shown.rpartition("\r")[2]
    assert last.startswith("sweeps of exact chains: 100%")
    assert f"| {number}/{number} " in last


@torch.no_grad()
def test_separated_labels_by_quadrature(short):
    """One separating feature under a wide slab, where Laplace's approximation is too large by a tenth."""
    x = np.linspace(-1, 1, 8)[:, None]
    y = (x[:, 0] > 0).astype(float)
    problem = design_of(x, y, "bernoulli", slab_scale=10.0, rate=0.5, fit_intercept=False).problem
    grid = {"intercept": 0.0, "most": 80.0, "nodes": 20_001}
    pips, means, _ = by_quadrature(
        lambda eta: log_expit((2 * y - 1) * eta).sum(1), problem.x.numpy(), [0.5], [10.0], **grid
    )
    found = sampled(problem, size=100)
    assert abs(found.active_probs[0] - pips[0]) < 5 * found.error[0] + 1e-3
    assert found.mean[0, 0] == pytest.approx(means[0], rel=0.05)


@torch.no_grad()
def test_an_unknown_slab_scale_and_weights(short):
    """Rows of weight two are two rows: against the sum over all gates of the repeated ones."""
    x, y = labels(150, 4, seed=3)
    weight = np.where(np.arange(150) % 2, 1.0, 2.0)
    weighted = design_of(x, y, "bernoulli", weight=weight).problem
    exact = enumerate_posterior(design_of(*(v.repeat(weight.astype(int), 0) for v in (x, y)), "bernoulli").problem)
    found = sampled(weighted)
    assert (np.abs(found.active_probs - exact.active_probs) < 5 * found.error + 0.01).all()
    assert np.log(found.draws.slab_scale).mean() == pytest.approx(np.log(exact.draws.slab_scale).mean(), abs=0.1)


def test_where_it_applies():
    x, y = labels(20, 3, seed=4)
    assert is_augmented(design_of(x, y, "bernoulli").problem)
    assert is_augmented(design_of(x, y, "ordinal").problem)
    assert not is_augmented(design_of(x, y, "poisson").problem)
    assert not is_augmented(design_of(x, y, "categorical").problem)
    assert not is_augmented(design_of(x, y, "bernoulli", weight=np.full(20, 0.5)).problem)
    wide = np.random.default_rng(0).normal(size=(20, 500))  # a sweep of 64 chains took 40 s
    assert not is_augmented(design_of(wide, y, "bernoulli").problem)
