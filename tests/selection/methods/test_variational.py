"""Autoregressive gates against sums over all gates, and what a fit leaves alone."""

import random

import numpy as np
import pyro
import pytest
import torch

from pyro_l0.selection.methods.enumeration import enumerate_posterior
from pyro_l0.selection.methods.variational import autoregressive_posterior
from pyro_l0.selection.problem import Prior, Problem
from tests.maths.spike_and_slab import seeded


def problem(p=4):
    generator = seeded(1)
    x = torch.randn(60, p, generator=generator, dtype=torch.float64)
    y = 0.8 * x[:, 0] + torch.randn(60, generator=generator, dtype=torch.float64)
    return Problem("gaussian", x, y, Prior((1.0, 2.0)))


@pytest.mark.slow
def test_everything_unknown_and_nothing_touched():
    """Probabilities, evidence and draws; parameters and random states of others stay."""
    expected = enumerate_posterior(problem())
    pyro.clear_param_store()
    pyro.param("own", torch.ones(2))
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    found = autoregressive_posterior(problem(), draws=500, seed=1, steps=400)
    assert list(pyro.get_param_store().keys()) == ["own"]
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])  # noqa: NPY002
    pyro.clear_param_store()
    assert np.abs(found.inclusion - expected.inclusion).max() < 0.06
    assert (np.abs(found.mean - expected.mean) / expected.sd).max() < 0.1
    assert found.log_evidence == pytest.approx(expected.log_evidence, abs=0.15)
    draws = found.draws
    assert draws.coefficients.shape == (500, 4)
    assert draws.intercept.shape == (500, 1)
    assert draws.noise_scale.mean() == pytest.approx(expected.draws.noise_scale.mean(), rel=0.05)


def test_too_many_features():
    with pytest.raises(ValueError, match=r"at most 40 features .* but got 41; use method 'tempered'"):
        autoregressive_posterior(problem(41))
