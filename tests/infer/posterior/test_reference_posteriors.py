"""The posteriors that fits are compared with: against integrals that know none of their formulas, and one another."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from scipy import integrate
from torch.distributions import MultivariateNormal

from tests.bench.posteriors.posterior_references import FILE, problem, reference
from tests.reference_posteriors import GaussianPosterior, all_gates
from tests.sampled_posteriors import importance_sampled_posterior, long_chain_posterior
from tests.spike_slab_designs import (
    Design,
    gaussian_design,
    gaussian_designs,
    generalised_linear_designs,
    heavy_tailed_designs,
    unknown_hyperparameters,
    wide_designs,
)

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
    """Log mass of gate vectors."""
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


def test_evidence_is_that_of_the_pyro_model():
    """log p(y, w, z) of the model minus log p(w | z, y) is log p(y, z) at any w."""
    x, y = small_regression()
    design = Design("small", x, y, sigma=SIGMA, tau=TAU, rate=RATE)
    terms = []
    for z in all_gates(3):
        precision = (z[:, None] * (x.T @ x) * z) / SIGMA**2 + torch.eye(3, dtype=torch.float64) / TAU**2
        given_z = MultivariateNormal(
            torch.linalg.solve(precision, z * (x.T @ y)) / SIGMA**2, precision_matrix=precision
        )
        w = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
        conditioned = poutine.condition(design.model, data={"z": z, "w": w})
        joint = poutine.trace(conditioned).get_trace(x, y).log_prob_sum()
        terms.append(joint - given_z.log_prob(w))
    found = GaussianPosterior(x, y, SIGMA, TAU, RATE)
    assert found.log_evidence == pytest.approx(float(torch.stack(terms).logsumexp(0)), abs=1e-10)


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


def test_unknown_noise_is_integrated_as_on_a_fine_grid():
    """One feature, its slab scale unknown too, and the densities of the data that torch computes."""
    x, y = small_regression(p=1)
    prior = dist.LogNormal(torch.zeros((), dtype=torch.float64), torch.full((), 0.5, dtype=torch.float64))
    log_sigma, log_tau = torch.cartesian_prod(*[torch.linspace(-3.0, 3.0, 121, dtype=torch.float64)] * 2).T
    log_prior = prior.log_prob(log_sigma.exp()) + log_sigma + prior.log_prob(log_tau.exp()) + log_tau
    logs = []
    for z in all_gates(1):
        noise = log_sigma.exp()[:, None, None] ** 2 * torch.eye(len(y), dtype=torch.float64)
        signal = log_tau.exp()[:, None, None] ** 2 * (x * z) @ (x * z).T
        logs.append(
            MultivariateNormal(torch.zeros_like(y), noise + signal).log_prob(y) + log_prior + log_gates(z, RATE)
        )
    joint = torch.stack(logs)
    weights = joint.flatten().softmax(0).reshape_as(joint)
    found = GaussianPosterior(x, y, prior.log_prob, prior.log_prob, RATE, size=60).summary()
    assert found.log_evidence == pytest.approx(float(joint.flatten().logsumexp(0)) + 2 * math.log(6.0 / 120), abs=1e-5)
    assert float(found.inclusion) == pytest.approx(float(weights[1].sum()), abs=1e-5)
    assert found.hyper["sigma"] == pytest.approx(float(weights.sum(0) @ log_sigma.exp()), abs=1e-5)
    assert found.hyper["log tau"] == pytest.approx(float(weights.sum(0) @ log_tau), abs=1e-5)


def test_draws_have_the_moments_of_the_summary():
    """Five standard errors of 20,000 draws; every site of the model is drawn."""
    design = gaussian_design("near-duplicates")
    scale = dist.LogNormal(torch.zeros((), dtype=torch.float64), 1.0).log_prob
    posterior = GaussianPosterior(design.x[:, :5], design.y, scale, scale, (1.0, 4.0), size=20)
    summary, draws = posterior.summary(), posterior.draws(20_000)
    beta = draws["z"] * draws["w"]
    for drawn, known in ((draws["z"], summary.inclusion), (beta, summary.mean)):
        assert bool(((drawn.mean(0) - known).abs() < 5 * drawn.std(0) / math.sqrt(20_000) + 1e-9).all())
    torch.testing.assert_close(beta.std(0), summary.sd, rtol=0.05, atol=0.0)
    for name in ("sigma", "tau", "rate"):
        assert abs(float(draws[name].mean()) - summary.hyper[name]) < 5 * float(draws[name].std()) / math.sqrt(20_000)


@pytest.mark.parametrize("kind", ["enumeration", "chain"])
def test_references_for_any_likelihood_agree_with_the_gaussian_one(kind):
    """Where the answer is known: five features, three of them nearly the same."""
    design = gaussian_design("near-duplicates")
    x = design.x[:, :5]
    known = GaussianPosterior(x, design.y, design.sigma, design.tau, design.rate).summary()
    of_five = problem(Design("five", x, design.y, sigma=design.sigma, tau=design.tau, rate=design.rate))
    if kind == "enumeration":
        found = importance_sampled_posterior(of_five, 2000, seed=0)
        assert found.log_evidence == pytest.approx(known.log_evidence, abs=0.01)
        assert found.effective > 0.9
        tolerance = 0.005
    else:
        found = long_chain_posterior(of_five, 250, 128, seed=0)
        assert found.error < 0.03
        tolerance = 5 * found.error
    for name in ("inclusion", "mean", "sd"):
        torch.testing.assert_close(getattr(found, name), getattr(known, name), rtol=0, atol=tolerance)


@pytest.mark.parametrize("family", ["logistic", "poisson", "student_t", "negative_binomial"])
def test_sampled_evidences_are_those_of_a_grid(family):
    """Two features of each likelihood, and the slabs by brute force."""
    design = next(d for d in generalised_linear_designs() + heavy_tailed_designs() if d.family == family)
    two = Design("two", design.x[:40, [0, 4]], design.y[:40], family, tau=design.tau)
    w = torch.cartesian_prod(*[torch.linspace(-5.0, 5.0, 101, dtype=torch.float64)] * 2)
    logs = []
    for z in all_gates(2):
        log_likelihood = problem(two).log_likelihood((z * w) @ two.x.T).sum(1)
        logs.append((log_likelihood + log_slab(w, two.tau)).logsumexp(0) + log_gates(z, two.rate))
    joint = torch.stack(logs) + 2 * math.log(10.0 / 100)
    found = importance_sampled_posterior(problem(two), 4000, seed=0)
    assert found.log_evidence == pytest.approx(float(joint.logsumexp(0)), abs=0.01)
    torch.testing.assert_close(found.inclusion, joint.softmax(0) @ all_gates(2), rtol=0, atol=0.005)


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


def test_kept_references_of_other_data_are_refused():
    """The same name with one observation changed."""
    design = generalised_linear_designs()[0]
    other = replace(design, y=1 - design.y)
    with pytest.raises(
        ValueError, match=r"Expected the data of 'logistic, independent, n = 100' in posterior_ref.*json"
    ):
        reference(other)


def test_every_model_has_float64_sites_and_takes_particles():
    """Gates and slabs of each design, one by one and several at a time."""
    designs = [*gaussian_designs(), *wide_designs(0), *generalised_linear_designs(), *heavy_tailed_designs()]
    for design in itertools.chain(designs, unknown_hyperparameters()):
        trace = poutine.trace(design.model).get_trace(design.x, design.y)
        assert [name for name in ("sigma", "tau", "rate") if name in trace.nodes] == list(design.hyper)
        assert trace.nodes["w"]["value"].dtype == trace.nodes["z"]["value"].dtype == torch.float64
        assert torch.isfinite(trace.log_prob_sum())

        def particles(design=design):
            with pyro.plate("particles", 3, dim=-2):
                design.model(design.x, design.y)

        several = poutine.trace(particles).get_trace()
        several.compute_log_prob()
        assert several.nodes["y"]["log_prob"].shape == (3, len(design.y))
        assert several.nodes["w"]["log_prob"].shape == (3, design.x.shape[1])
