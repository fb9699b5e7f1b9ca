"""The posteriors that fits are compared with: against integrals that know none of their formulas, and one another."""

from __future__ import annotations

import json
import math

import pyro.distributions as dist
import pytest
import torch
from scipy import integrate
from torch.distributions import MultivariateNormal

from tests.posterior_references import FILE, problem, reference
from tests.reference_posteriors import GaussianPosterior, all_gates
from tests.sampled_posteriors import importance_sampled_posterior
from tests.spike_slab_designs import Design, gaussian_design, generalised_linear_designs, heavy_tailed_designs

SIGMA, TAU, RATE = 0.8, 0.6, 0.3


def small_regression(n=7, p=3):
    """Correlated features and observations of one strong effect."""
    torch.manual_seed(0)
    x = torch.randn(n, p, dtype=torch.float64)
    x[:, -1] += x[:, 0]
    return x, 0.7 * x[:, -1] + 0.5 * torch.randn(n, dtype=torch.float64)


def log_slab(w, tau):
    """Log density of slabs of shape ``(..., p)``, in float64."""
    return dist.Normal(torch.zeros_like(w), torch.full_like(w, tau)).log_prob(w).sum(-1)


def log_gates(z, rate):
    return dist.Bernoulli(torch.full_like(z, rate)).log_prob(z).sum(-1)


def evidence(x, y, z, sigma=SIGMA, tau=TAU):
    """log p(y | z) from the covariance of the observations."""
    open_x = x * z
    covariance = sigma**2 * torch.eye(len(y), dtype=torch.float64) + tau**2 * open_x @ open_x.T
    return float(MultivariateNormal(torch.zeros_like(y), covariance).log_prob(y))


def test_moments_are_those_of_a_grid_over_the_slabs():
    """Two features, every gate vector, and the slabs by brute force."""
    x, y = small_regression(p=2)
    w = torch.cartesian_prod(*[torch.linspace(-4.0, 4.0, 321, dtype=torch.float64)] * 2)
    logs, betas, gates = [], [], []
    for z in all_gates(2):
        log_likelihood = dist.Normal((z * w) @ x.T, SIGMA).log_prob(y).sum(1)
        logs.append(log_likelihood + log_slab(w, TAU) + log_gates(z, RATE))
        betas.append(z * w)
        gates.append(z.expand_as(w))
    weights = torch.cat(logs).softmax(0)
    mean = weights @ torch.cat(betas)
    found = GaussianPosterior(x, y, SIGMA, TAU, RATE).summary()
    cell = 2 * math.log(8.0 / 320)
    assert found.log_evidence == pytest.approx(float(torch.cat(logs).logsumexp(0)) + cell, abs=1e-8)
    torch.testing.assert_close(found.inclusion, weights @ torch.cat(gates), rtol=0, atol=1e-8)
    torch.testing.assert_close(found.mean, mean, rtol=0, atol=1e-8)
    torch.testing.assert_close(found.sd, (weights @ torch.cat(betas) ** 2 - mean**2).sqrt(), rtol=0, atol=1e-8)


def test_unknown_slab_scale_and_rate_are_integrated_as_scipy_does():
    """One integral over tau and one over the rate for every gate vector."""
    x, y = small_regression(p=2)
    tau_prior = dist.HalfNormal(torch.tensor(1.0, dtype=torch.float64))
    # Integrals of rate^k (1 - rate)^(2 - k) over Beta(1, 4) for k = 0, 1, 2 open gates.
    gates = [4 * integrate.quad(lambda r, k=k: r**k * (1 - r) ** (5 - k), 0, 1)[0] for k in range(3)]

    def density(tau, z):
        log_prior = float(tau_prior.log_prob(torch.tensor(tau, dtype=torch.float64)))
        return math.exp(evidence(x, y, z, tau=tau) + log_prior + 10.0)

    masses, taus = [], []
    for z in all_gates(2):
        share = gates[int(z.sum())]
        masses.append(share * integrate.quad(density, 0, 8, args=(z,))[0])
        taus.append(share * integrate.quad(lambda t, z=z: t * density(t, z), 0, 8)[0])
    total = sum(masses)
    found = GaussianPosterior(x, y, SIGMA, tau_prior.log_prob, (1.0, 4.0), size=60).summary()
    inclusion = torch.tensor(masses, dtype=torch.float64) @ all_gates(2) / total
    assert found.log_evidence == pytest.approx(math.log(total) - 10.0, abs=1e-5)
    torch.testing.assert_close(found.inclusion, inclusion, rtol=0, atol=1e-5)
    assert found.hyper["tau"] == pytest.approx(sum(taus) / total, abs=2e-5)
    rate = sum(m * (1 + float(z.sum())) / (5 + 2) for m, z in zip(masses, all_gates(2), strict=True)) / total
    assert found.hyper["rate"] == pytest.approx(rate, abs=2e-5)


def test_references_for_any_likelihood_agree_with_the_gaussian_one():
    """Where the answer is known: five features, three of them nearly the same."""
    design = gaussian_design("near-duplicates")
    x = design.x[:, :5]
    known = GaussianPosterior(x, design.y, design.sigma, design.tau, design.rate).summary()
    of_five = problem(Design("five", x, design.y, sigma=design.sigma, tau=design.tau, rate=design.rate))
    found = importance_sampled_posterior(of_five, 2000, seed=0)
    assert found.log_evidence == pytest.approx(known.log_evidence, abs=0.01)
    assert found.effective > 0.9
    for name in ("inclusion", "mean", "sd"):
        torch.testing.assert_close(getattr(found, name), getattr(known, name), rtol=0, atol=0.005)


def test_kept_references_belong_to_the_designs_and_agree_with_one_another():
    """Each of both kinds has its entry; two ways to the same posterior differ by what their draws allow."""
    entries = json.loads(FILE.read_text())
    designs = generalised_linear_designs() + heavy_tailed_designs()
    assert list(entries) == [design.name for design in designs]
    for design in designs:
        known, entry = reference(design), entries[design.name]
        assert entry["enumeration"]["effective_share"] > 0.8
        assert entry["enumeration"]["two_runs_differ"] < 0.005
        assert known.inclusion.shape == (10,)
        if design.family in ("student_t", "negative_binomial"):
            chain = torch.tensor(entry["chain"]["inclusion"])
            away = (chain - torch.tensor(entry["enumeration"]["inclusion"])).abs().max()
            assert float(away) < 5 * entry["chain"]["standard_error"] < 0.05
