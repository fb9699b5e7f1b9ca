"""Tempered chains with unknown scales against sums over all gates and a grid of scales."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributions as dist

from pyro_l0.maths import second_order
from pyro_l0.maths.tempered_gibbs import GibbsRun
from pyro_l0.selection.methods import sampling
from pyro_l0.selection.methods.enumeration import enumerate_posterior
from pyro_l0.selection.methods.gaussian_evidence import GaussianEvidence
from pyro_l0.selection.methods.sampling import _moments, exchanged, sampled_walk, tempered_posterior
from pyro_l0.selection.problem import Prior
from tests.cases import first_by_default
from tests.reference_posteriors import GaussianPosterior
from tests.selection.families import named_problem
from tests.spike_slab_designs import exact_pair, generalised_linear_designs, unknown_hyperparameters

DESIGNS = {design.name.removesuffix(", unknown"): design for design in [*unknown_hyperparameters(), exact_pair()]}
ONE = torch.ones((), dtype=torch.float64)


def reference(design, prior):
    sigma = dist.HalfCauchy(prior.noise_unit * ONE).log_prob if prior.noise_scale is None else prior.noise_scale
    tau = dist.HalfNormal(prior.slab_unit * ONE).log_prob if prior.slab_scale is None else prior.slab_scale
    return GaussianPosterior(design.x, design.y, sigma, tau, prior.rate, size=20).summary()


def assert_near(found, inclusion, mean, sd, log_evidence):
    """Probabilities, means in standard deviations, and the evidence."""
    assert np.abs(found.active_probs - np.asarray(inclusion)).max() < 0.03
    assert (np.abs(found.mean - np.asarray(mean).reshape(found.mean.shape)) / sd).max() < 0.06
    assert found.log_evidence == pytest.approx(log_evidence, abs=0.1)


@pytest.fixture
def sampled(monkeypatch):
    """What ``tempered_posterior`` sampled, by chains of full length: walks with their runs."""
    monkeypatch.setattr(sampling, "_SURE", 0.0)
    kept = []

    def sample(walk, *rest):
        kept.append((walk, sampled_walk(walk, *rest)))
        return kept[-1][1]

    monkeypatch.setattr(sampling, "sampled_walk", sample)
    return kept


def error_of_log_sd(walk, run):
    """Standard errors of the logarithms of the deviations: from those that eighths of the chains find alone."""
    share = torch.bincount(run.chain, run.weights)
    found = []
    for part in range(8):
        active = share[part::8] @ run.chain_active_probs[part::8] / share[part::8].sum()
        alone = replace(run, weights=run.weights * (run.chain % 8 == part), active_probs=active)
        first, second = _moments(walk, alone, torch.Generator().manual_seed(part))
        found.append((second - first.square()).squeeze(1).log() / 2)
    return torch.stack(found).std(0).numpy() / math.sqrt(8)


def assert_close(found, expected, walk_and_run):
    """Deviations of the coefficients within five Monte Carlo standard errors, which are a few hundredths at most."""
    assert_near(found, expected.inclusion, expected.mean, expected.sd.numpy()[:, None], expected.log_evidence)
    error = error_of_log_sd(*walk_and_run)
    apart = np.abs(np.log(found.sd[:, 0] / expected.sd.numpy()))
    assert error.max() < 0.02
    assert (apart < 5 * error + 0.005).all()


@pytest.mark.parametrize("name", first_by_default(["exact pair", "near-duplicates", "diabetes"]))
def test_everything_unknown(name, sampled):
    """Probabilities, moments, evidence, and draws of all unknowns."""
    prior = Prior((1.0, 4.0), slab_unit=0.7, noise_unit=2.0)
    expected = reference(DESIGNS[name], prior)
    found = tempered_posterior(named_problem("gaussian", DESIGNS[name].x, DESIGNS[name].y, prior), seed=1)
    assert_close(found, expected, *sampled)
    draws = found.draws
    beta = draws.coefficients.toarray()
    assert beta.shape == (4000, DESIGNS[name].x.shape[1])
    assert np.abs((beta != 0).mean(0) - expected.inclusion.numpy()).max() < 0.05
    assert (np.abs(beta.mean(0) - expected.mean.numpy()) / expected.sd.numpy()).max() < 0.1
    assert np.log(draws.noise_scale).mean() == pytest.approx(expected.hyper["log sigma"], abs=0.01)
    assert np.log(draws.slab_scale).mean() == pytest.approx(expected.hyper["log tau"], abs=0.05)
    assert draws.rate.mean() == pytest.approx(expected.hyper["rate"], abs=0.01)


@pytest.mark.parametrize(
    "prior",
    [Prior(0.2, 0.5, 1.0), Prior(0.2, 0.5, noise_unit=2.0), Prior((1.0, 4.0), None, 1.0)],
    ids=["all known", "noise unknown", "slab unknown"],
)
def test_some_known(prior, sampled):
    design = DESIGNS["near-duplicates"]
    expected = reference(design, prior)
    found = tempered_posterior(named_problem("gaussian", design.x, design.y, prior), seed=2)
    assert_close(found, expected, *sampled)


@pytest.mark.parametrize("seed", range(3))
def test_chains_end_where_probabilities_are_sure(seed, monkeypatch):
    """They are as close to the exact ones as their errors say, and the chains shorter than with a lower bound."""
    design = DESIGNS["near-duplicates"]
    prior = Prior((1.0, 4.0), slab_unit=0.7, noise_unit=2.0)
    problem = named_problem("gaussian", design.x, design.y, prior)
    exact = reference(design, prior).inclusion.numpy()
    flips = []
    for bound in (0.0, 0.02):
        monkeypatch.setattr(sampling, "_SURE", bound)
        monkeypatch.setattr(sampling, "sampled_walk", lambda *rest: flips.append(sampled_walk(*rest)) or flips[-1])
        found = tempered_posterior(problem, seed=seed)
        # The error of a gate that seldom moves is itself uncertain, hence the .002.
        assert (np.abs(found.active_probs - exact) < 5 * found.error + 0.002).all()
    whole, ended = (len(run.gates) for run in flips)
    assert ended < whole
    assert flips[1].standard_error().max() <= 0.02


@torch.no_grad()
def test_exchanged_gates():
    """Of one open gate, whichever it was: the others' probabilities and draws are what the evidence of each says."""
    design = DESIGNS["near-duplicates"]
    problem = named_problem("gaussian", design.x, design.y, Prior(0.2, 0.5, 1.0))
    each = torch.eye(problem.gates, dtype=torch.bool)
    exact = torch.softmax(GaussianEvidence(problem).log_marginal(each), 0)
    walk = sampling._walk(problem, GaussianEvidence(problem), sampling.Effort(2, 0))
    chain = torch.arange(2).repeat(100)
    run = GibbsRun(
        each[0].double(), each[:2].double(), each[chain], torch.full((200,), 1 / 200), chain, walk.hyper[chain]
    )
    found = exchanged(walk, run, torch.Generator().manual_seed(1))
    assert ((exact > 0.02) & (exact < 0.98)).sum() > 1
    torch.testing.assert_close(found.chain_active_probs, exact.expand(2, -1), atol=1e-9, rtol=0)
    share = found.gates.double().mean(0)
    assert (found.gates.sum(1) == 1).all()
    assert ((share - exact).abs() < 5 * (exact * (1 - exact) / 2000).sqrt() + 1e-9).all()


@pytest.mark.slow
@pytest.mark.parametrize("exchanges", [False, True])
def test_subsets_of_features(exchanges, monkeypatch):
    """Parts of two features and two anchors: probabilities, moments and evidence are those of a sum over all."""
    monkeypatch.setattr(sampling, "_CLOSE", 1 if exchanges else 100)
    monkeypatch.setattr(sampling, "_SURE", 0.0)
    monkeypatch.setattr(sampling, "_EXCHANGED", 4000)
    monkeypatch.setattr(second_order, "_DENSE", 2)
    monkeypatch.setattr(second_order, "_PART", 2)
    design = DESIGNS["near-duplicates"]
    problem = named_problem("gaussian", design.x, design.y, Prior((1.0, 4.0), slab_unit=0.7, noise_unit=2.0))
    expected = enumerate_posterior(problem, draws=10)
    found = tempered_posterior(problem, seed=1)
    assert problem.quadratic.parts == 5
    assert_near(found, expected.active_probs, expected.mean, expected.sd, expected.log_evidence)
    assert np.abs(found.sd / expected.sd - 1).max() < 0.1


def regression(name, intercept, prior):
    """One of the designs that are not Gaussian, with a constant added where there is an intercept."""
    design = next(x for x in generalised_linear_designs() if x.name == name)
    family = "poisson" if design.family == "poisson" else "bernoulli"
    return named_problem(family, design.x, design.y, prior, intercept)


def classes():
    """Three classes; two features tell them apart, and one nearly copies the first of them."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(80, 4, generator=generator, dtype=torch.float64)
    x[:, 3] = x[:, 0] + 0.3 * x[:, 3]
    eta = torch.stack([x[:, 0], -x[:, 0], 0.8 * x[:, 2]], 1)
    y = torch.multinomial(eta.softmax(1), 1, generator=generator)[:, 0].double()
    return named_problem("categorical", x, y, Prior((1.0, 2.0), slab_unit=2.0), intercept=True)


OTHERS = {
    "logistic": lambda: regression("logistic, near-duplicates, n = 100", True, Prior((1.0, 4.0), slab_unit=2.0)),
    "poisson": lambda: regression("poisson, AR(1), n = 100", True, Prior((1.0, 4.0))),
    "known slabs": lambda: regression("logistic, independent, n = 100", False, Prior(0.2, 1.0)),
    "classes": classes,
}


@pytest.mark.parametrize("name", first_by_default(["known slabs", *(name for name in OTHERS if name != "known slabs")]))
def test_other_families(name):
    """Against a sum over all gates, with the same approximation of the coefficients' integral."""
    problem = OTHERS[name]()
    expected = enumerate_posterior(problem, draws=10)
    found = tempered_posterior(problem, seed=1)
    assert_near(found, expected.active_probs, expected.mean, expected.sd, expected.log_evidence)
    assert (np.abs(found.active_probs - expected.active_probs) < 5 * found.error + 0.002).all()
    assert np.abs(found.sd / expected.sd - 1).max() < 0.1
    beta = found.draws.coefficients.toarray().reshape(4000, *expected.mean.shape)
    assert np.abs((beta != 0).any(2).mean(0) - expected.active_probs).max() < 0.05
    assert (np.abs(beta.mean(0) - expected.mean) / expected.sd).max() < 0.1
