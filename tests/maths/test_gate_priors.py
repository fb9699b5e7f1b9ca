"""Priors of gates: a sampler's odds follow from the log probability, which has total mass one."""

import math

import pytest
import torch

from pyro_l0.maths.tempered_gibbs import BetaBinomialGates, IndependentGates
from tests.maths.spike_and_slab import vectors, with_each

PRIORS = {
    "independent": IndependentGates(torch.tensor([-3.0, 0.0, 0.5, 2.0, -1.0], dtype=torch.float64)),
    "one rate": IndependentGates(torch.tensor(-1.0, dtype=torch.float64)),
    "beta-binomial": BetaBinomialGates(0.7, 3.0),
    "uniform rate": BetaBinomialGates(1.0, 1.0),
}


@pytest.mark.parametrize("name", PRIORS)
def test_odds_and_mass(name):
    """Against all vectors of five gates."""
    prior, z = PRIORS[name], vectors(5)
    log_prob = prior.log_prob(z)
    assert log_prob.logsumexp(0).item() == pytest.approx(0, abs=1e-12)
    odds = prior.log_prob(with_each(z, 1.0)) - prior.log_prob(with_each(z, 0.0))
    torch.testing.assert_close(prior.logits(z).expand(z.shape).flatten(), odds, rtol=1e-10, atol=1e-10)
    assert torch.equal(prior.log_prob(z.bool()), log_prob)
    assert torch.equal(prior.logits(z.bool()), prior.logits(z))
    torch.testing.assert_close(log_prob.exp() @ z, prior.active_prob.expand(5), rtol=1e-10, atol=1e-10)


def test_beta_binomial_is_a_rate_summed_out():
    """Two of five gates open under Beta(2, 3), by the integral on a grid."""
    rate = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    density = torch.distributions.Beta(2.0, 3.0).log_prob(rate).exp()
    expected = (density * rate**2 * (1 - rate) ** 3).mean().log().item()
    z = torch.tensor([[1.0, 0.0, 0.0, 1.0, 0.0]], dtype=torch.float64)
    # Beta's own parameters are float32 here.
    assert BetaBinomialGates(2.0, 3.0).log_prob(z).item() == pytest.approx(expected, abs=1e-5)


def test_gates_that_are_certain():
    """Infinite odds leave the other gates their probability."""
    prior = IndependentGates(torch.tensor([math.inf, 0.0, -math.inf]))
    z = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert prior.log_prob(z).tolist() == pytest.approx([-math.log(2), -math.inf])


@pytest.mark.parametrize(("alpha", "beta"), [(0.0, 1.0), (1.0, -1.0), (math.inf, 1.0), (1.0, math.nan)])
def test_refused_parameters(alpha, beta):
    with pytest.raises(ValueError, match=f"alpha and beta to be positive and finite, but got {alpha} and {beta}"):
        BetaBinomialGates(alpha, beta)
