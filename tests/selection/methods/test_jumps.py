"""Chains that jump between gate vectors, against importance sampling of each, and where nothing else is sure."""

import numpy as np
import pytest
import torch
from scipy import special, stats

from pyro_l0.selection import SpikeSlabPoissonRegressor
from pyro_l0.selection.methods import exact_chains
from pyro_l0.selection.methods import sampling as expanded_sampling
from pyro_l0.selection.methods.exact_chains import JumpingChains
from tests.selection.families import design_of
from tests.selection.methods.by_importance import references
from tests.selection.methods.closed_start import closed


def counts(n, p, seed, most=10**9):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, p))
    beta = np.zeros(p)
    beta[rng.choice(p, min(8, p // 2), replace=False)] = 0.4 * rng.normal(size=min(8, p // 2))
    return x, np.minimum(rng.poisson(np.exp(0.5 + x @ beta)), most).astype(float), beta


def log_density(family, y, eta):
    if family == "poisson":
        return stats.poisson.logpmf(y, np.exp(eta[..., 0])).sum(1)
    return special.log_softmax(eta, axis=2)[:, np.arange(len(y)), y.astype(int)].sum(1)


def labels_of_three(seed):
    """Nearly separated by the first of three features, which the second one resembles."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(15, 3))
    x[:, 1] += x[:, 0]
    return x, np.digitize(x[:, 0] + 0.1 * rng.normal(size=15), [-0.5, 0.5]).astype(float)


@pytest.mark.parametrize(
    ("family", "groups"), [("categorical", None), ("poisson", None), ("poisson", [0, 1, 1]), ("categorical", [0, 1, 1])]
)
@torch.no_grad()
def test_importance_sampling(family, groups, monkeypatch):
    """From closed gates; five standard errors, and that of importance sampling."""
    monkeypatch.setattr(exact_chains, "_ROUNDS", 4)
    if family == "categorical":
        (x, y), slab = labels_of_three(2), 3.0
        x = x[:, : 2 if groups is None else 3]
    else:
        (x, y, _), slab = counts(12, 3, seed=6), 0.7
    gate_of = None if groups is None else np.array(groups)
    problem = design_of(x, y, family, gate_of=gate_of, slab_scale=slab, rate=0.5).problem
    options = {"gate_of": groups, "rate": 0.5, "slab": slab, "size": 4096}
    exact, *_ = references(problem.x.numpy(), lambda eta, _: log_density(family, y, eta), 0, problem.outputs, **options)
    found = closed(JumpingChains, problem).posterior(0.0, 2000, 0.0)
    assert ((exact > 0.05) & (exact < 0.95)).any()
    assert found.error.max() < 0.02
    assert (np.abs(found.active_probs - exact) < 5 * found.error + 2e-3).all()


@pytest.mark.slow
def test_an_unsure_run_goes_on(monkeypatch):
    """Where re-weighting is too uncertain: here any error is too much, and the slab scale is learned, too."""
    monkeypatch.setattr(expanded_sampling, "MOST_ERROR", 1e-9)
    monkeypatch.setattr(exact_chains, "_ROUNDS", 8)
    x, y, _ = counts(60, 6, seed=3)
    exact, sampled = (SpikeSlabPoissonRegressor(method=m, random_state=0).fit(x, y) for m in ("enumerate", "tempered"))
    np.testing.assert_allclose(sampled.pip_, exact.pip_, atol=0.05)
    np.testing.assert_allclose(sampled.coef_, exact.coef_, atol=0.2 * exact.coef_sd_.max())
    assert sampled.slab_scale_ == pytest.approx(exact.slab_scale_, rel=0.15)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The standard error of an inclusion probability")
def test_counts_that_are_cut_off():
    """At fifty, so that no expansion is close: at most one of eleven is false, and none is unsure."""
    x, y, beta = counts(400, 100, seed=1, most=50)
    model = SpikeSlabPoissonRegressor(random_state=0).fit(x, y)
    chosen = model.select()
    assert model.error_[chosen].max() <= 0.05
    assert model.error_.max() < 0.1
    assert (beta[chosen] == 0).sum() <= 1
    assert (beta[chosen] != 0).sum() >= 7
