"""The mean field against sums over all gates, where features are independent, and what it does elsewhere."""

import math

import numpy as np
import pytest
import torch

from pyro_l0.selection.design import make_design
from pyro_l0.selection.methods.enumeration import enumerate_posterior
from pyro_l0.selection.methods.mean_field import mean_field_posterior
from pyro_l0.selection.problem import Prior, Problem
from tests.maths.spike_and_slab import seeded


def problem(family="gaussian", p=6, n=200):
    """Independent features, of which the first two have effects."""
    generator = seeded(11)
    x = torch.randn(n, p, generator=generator, dtype=torch.float64)
    eta = 0.6 * x[:, 0] - 0.2 * x[:, 1]
    if family == "gaussian":
        return Problem(family, x, eta + torch.randn(n, generator=generator, dtype=torch.float64), Prior((1.0, 4.0)))
    if family == "categorical":
        y = torch.multinomial(torch.stack([eta, -eta, 0 * eta], 1).exp(), 1, generator=generator)[:, 0]
        return Problem(family, x, y.double(), Prior((1.0, 4.0)), True, 3)
    draw = torch.poisson if family == "poisson" else torch.bernoulli
    y = draw(eta.exp() if family == "poisson" else torch.sigmoid(2 * eta), generator=generator)
    return Problem(family, x, y, Prior((1.0, 4.0)), True)


def test_independent_features():
    """Probabilities, moments, draws and the bound, with everything unknown."""
    expected = enumerate_posterior(problem(), draws=4000)
    found = mean_field_posterior(problem(), seed=1)
    assert np.abs(found.inclusion - expected.inclusion).max() < 0.03
    assert (np.abs(found.mean - expected.mean) / expected.sd).max() < 0.1
    assert expected.log_evidence - 0.3 < found.log_evidence < expected.log_evidence + 0.02
    for name in ("noise_scale", "slab_scale", "rate"):
        ours, theirs = getattr(found.draws, name), getattr(expected.draws, name)
        assert ours.mean() == pytest.approx(theirs.mean(), abs=5 * theirs.std() / math.sqrt(2000)), name
    opened = (found.draws.coefficients.toarray() != 0).mean(0)
    assert np.abs(opened - found.inclusion).max() < 5 * 0.5 / math.sqrt(4000)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bernoulli", "poisson", "categorical"])
def test_other_families(family):
    """The likelihood is taken to second order, which costs some accuracy."""
    expected = enumerate_posterior(problem(family, p=4), draws=10)
    found = mean_field_posterior(problem(family, p=4), draws=500, seed=1)
    assert np.abs(found.inclusion - expected.inclusion).max() < 0.06
    assert found.log_evidence < expected.log_evidence + 0.05
    assert found.mean.shape == expected.mean.shape


def test_a_thousand_features():
    """The effects are found, and hardly anything else."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 1000))
    y = x[:, :4] @ np.array([1.0, -0.8, 0.6, -0.5]) + rng.normal(size=300)
    found = mean_field_posterior(make_design(x, y).problem, draws=500, seed=1)
    assert found.inclusion[:4].min() > 0.95
    assert found.inclusion[4:].max() < 0.7
    assert found.inclusion[4:].sum() < 3


def test_seed_decides():
    state = torch.get_rng_state()
    first, again, other = (mean_field_posterior(problem(), draws=20, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert np.array_equal(first.inclusion, again.inclusion)
    assert (first.draws.coefficients != again.draws.coefficients).nnz == 0
    assert first.log_evidence == again.log_evidence
    assert not np.array_equal(first.inclusion, other.inclusion)


def test_no_draws_are_refused():
    with pytest.raises(ValueError, match="at least one draw, but got 0"):
        mean_field_posterior(problem(), draws=0)
