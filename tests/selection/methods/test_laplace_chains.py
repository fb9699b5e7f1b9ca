"""Chains on the Laplace evidence: right whatever expansion informs their proposals, and used where it fails."""

import numpy as np
import pytest
import torch

from pyro_l0.selection import SpikeSlabPoissonRegressor
from pyro_l0.selection.design import make_design
from pyro_l0.selection.methods import sampling as expanded_sampling
from pyro_l0.selection.methods.enumeration import enumerate_posterior
from pyro_l0.selection.methods.laplace_evidence import LaplaceEvidence
from pyro_l0.selection.methods.sampling import Effort, _Walk, laplace_chains, null_predictor


def counts(n, p, seed, most=10**9):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, p))
    beta = np.zeros(p)
    beta[rng.choice(p, min(8, p // 2), replace=False)] = 0.4 * rng.normal(size=min(8, p // 2))
    return x, np.minimum(rng.poisson(np.exp(0.5 + x @ beta)), most).astype(float), beta


@pytest.mark.parametrize("groups", [None, np.array([0, 1, 2, 2, 3])])
@torch.no_grad()
def test_a_poor_expansion_is_put_right(groups):
    """Around the model without features, from closed gates, against the sum over all gates; five standard errors."""
    x, y, _ = counts(25, 5, seed=6)
    problem = make_design(x, y, "poisson", slab_scale=0.5, rate=0.5, gate_of=groups).problem
    exact = enumerate_posterior(problem, seed=0).active_probs
    generator = torch.Generator().manual_seed(1)
    walk = _Walk(problem, null_predictor(problem), Effort(4, 20, 2))
    start = torch.zeros(100, problem.gates, dtype=torch.bool)
    chains = laplace_chains(
        LaplaceEvidence(problem), walk, start, torch.full((100,), 0.5).double().log(), 40, generator
    )
    chains = chains._replace(gates=chains.gates[15:])
    error = chains.standard_error().numpy()
    assert error.max() < 0.05
    assert ((exact > 0.05) & (exact < 0.95)).any()
    assert (np.abs(chains.gates.double().mean((0, 1)).numpy() - exact) < 5 * error + 1e-3).all()


@pytest.mark.slow
def test_an_unsure_run_goes_on(monkeypatch):
    """Where re-weighting is too uncertain: here any error is too much, and the slab scale is learned, too."""
    monkeypatch.setattr(expanded_sampling, "MOST_ERROR", 1e-9)
    monkeypatch.setattr(expanded_sampling, "_ROUNDS", 20)
    x, y, _ = counts(60, 6, seed=3)
    exact, sampled = (SpikeSlabPoissonRegressor(method=m, random_state=0).fit(x, y) for m in ("enumerate", "tempered"))
    np.testing.assert_allclose(sampled.pip_, exact.pip_, atol=0.05)
    np.testing.assert_allclose(sampled.coef_, exact.coef_, atol=0.2 * exact.coef_sd_.max())
    assert sampled.slab_scale_ == pytest.approx(exact.slab_scale_, rel=0.15)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The sampler's chains disagree")
def test_counts_that_are_cut_off():
    """At fifty, so that no expansion is close: at most one of eleven is false, and none is unsure."""
    x, y, beta = counts(400, 100, seed=1, most=50)
    model = SpikeSlabPoissonRegressor(random_state=0).fit(x, y)
    chosen = model.select()
    assert model._standard_error[chosen].max() <= 0.05
    assert model._standard_error.max() < 0.1
    assert (beta[chosen] == 0).sum() <= 1
    assert (beta[chosen] != 0).sum() >= 7
