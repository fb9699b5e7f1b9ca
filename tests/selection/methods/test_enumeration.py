"""Gaussian enumeration against an independent one, in closed form, and its draws against its own moments."""

import math

import numpy as np
import pytest
import torch
from pyro import distributions as dist
from scipy import stats

from pyro_l0.selection.methods.enumeration import enumerate_posterior, exact_posterior
from pyro_l0.selection.methods.gaussian_evidence import GaussianEvidence
from pyro_l0.selection.problem import Prior
from tests.reference_posteriors import GaussianPosterior, all_gates
from tests.selection.families import named_problem
from tests.spike_slab_designs import gaussian_designs, wide_designs

NOISE_UNIT, SLAB_UNIT, RATE = 1.3, 0.7, (1.0, 4.0)
ONE = torch.ones((), dtype=torch.float64)


def problem_of(x, y, **known):
    return named_problem(
        "gaussian", x, y, Prior(**({"rate": RATE, "slab_unit": SLAB_UNIT, "noise_unit": NOISE_UNIT} | known))
    )


def regression(n, p, seed):
    generator = torch.Generator().manual_seed(seed)
    x, noise = (torch.randn(n, k, generator=generator, dtype=torch.float64) for k in (p, 1))
    return x, 0.5 * x[:, 0] + noise[:, 0]


@pytest.mark.parametrize("design", gaussian_designs() + wide_designs(0)[:1], ids=lambda d: d.name)
def test_known_hyperparameters(design):
    """The model as it is stated: what differs is rounding."""
    known = {"rate": design.rate, "slab_scale": design.tau, "noise_scale": design.sigma}
    found = exact_posterior(
        design.x.numpy(), design.y.numpy(), standardize=False, fit_intercept=False, draws=10, seed=0, **known
    )
    expected = GaussianPosterior(design.x, design.y, design.sigma, design.tau, design.rate).summary()
    assert found.log_evidence == pytest.approx(expected.log_evidence, abs=1e-8)
    np.testing.assert_allclose(found.active_probs, expected.inclusion, atol=1e-9)
    np.testing.assert_allclose(found.mean[:, 0], expected.mean, atol=1e-8)
    np.testing.assert_allclose(found.sd[:, 0], expected.sd, atol=1e-8)


@pytest.mark.parametrize(("number", "unknown"), [(0, "noise"), (1, "slab"), (4, "both")])
def test_unknown_hyperparameters(number, unknown):
    """To 1e-4: a grid of fixed size leaves out e^-9 of each state's integral."""
    design = gaussian_designs()[number]
    noise_known, slab_known = unknown == "slab", unknown == "noise"
    problem = problem_of(
        design.x,
        design.y,
        noise_scale=design.sigma if noise_known else None,
        slab_scale=design.tau if slab_known else None,
    )
    found = enumerate_posterior(problem, draws=4000, seed=1)
    reference = GaussianPosterior(
        design.x,
        design.y,
        design.sigma if noise_known else dist.HalfCauchy(NOISE_UNIT * ONE).log_prob,
        design.tau if slab_known else dist.HalfNormal(SLAB_UNIT * ONE).log_prob,
        RATE,
        size=70 if unknown == "both" else 200,
    )
    expected = reference.summary()
    assert found.log_evidence == pytest.approx(expected.log_evidence, abs=1e-4)
    np.testing.assert_allclose(found.active_probs, expected.inclusion, atol=1e-4)
    np.testing.assert_allclose(found.mean[:, 0], expected.mean, atol=1e-4)
    np.testing.assert_allclose(found.sd[:, 0], expected.sd, atol=1e-4)
    # Five standard errors of the draws' means.
    scales = {"log sigma": np.log(found.draws.noise_scale), "log tau": np.log(found.draws.slab_scale)}
    for name, drawn in (scales | {"rate": found.draws.rate}).items():
        if name in expected.hyper:
            assert drawn.mean() == pytest.approx(expected.hyper[name], abs=5 * drawn.std() / math.sqrt(4000))
        else:
            assert np.ptp(drawn) < 1e-12


def test_each_state_is_integrated():
    """log p(y, z) of a state alone, and of a few together, is what it is among all of them: each has its own grid."""
    x, y = regression(40, 5, 1)
    states, z = GaussianEvidence(problem_of(x, y)), all_gates(5).bool()
    everything = states.log_marginal(z)
    heavy = everything.argsort(descending=True)[:6]
    torch.testing.assert_close(states.log_marginal(z[heavy]), everything[heavy], rtol=0, atol=1e-10)
    for row in heavy:
        torch.testing.assert_close(states.log_marginal(z[row, None])[0], everything[row], rtol=0, atol=1e-10)


@pytest.mark.parametrize(("n", "p"), [(1, 3), (3, 6), (40, 3), (200, 2)])
def test_evidence_by_quadrature(n, p):
    """One state with both scales unknown, against the normal density of y on a fine grid over all of the prior."""
    x, y = regression(n, p, 2)
    z = torch.ones(1, p, dtype=torch.bool)
    log_noise, log_slab = (torch.linspace(-low, 12.0, 500, dtype=torch.float64) for low in (11.0, 20.0))
    values, vectors = torch.linalg.eigh(x @ x.T)
    square = (vectors.T @ y).square()
    variance = (2 * log_noise).exp()[:, None, None] + (2 * log_slab).exp()[:, None] * values.clamp(min=0)
    log_joint = -0.5 * (square / variance + variance.log() + math.log(2 * math.pi)).sum(2)
    log_joint += (
        torch.from_numpy(stats.halfcauchy(scale=NOISE_UNIT).logpdf(log_noise.exp().numpy()))[:, None]
        + log_noise[:, None]
    )
    log_joint += torch.from_numpy(stats.halfnorm(scale=SLAB_UNIT).logpdf(log_slab.exp().numpy())) + log_slab
    cell = float((log_noise[1] - log_noise[0]) * (log_slab[1] - log_slab[0]))
    log_gates = stats.betabinom(p, *RATE).logpmf(p)  # all of p are open: one vector
    expected = float(log_joint.flatten().logsumexp(0)) + math.log(cell) + log_gates
    # As above; and where features explain y in full, 1e-5 is left out, as a noise of 1e-5 of y is the smallest.
    assert GaussianEvidence(problem_of(x, y)).log_marginal(z).item() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("n", [100, 3000, 300_000])
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_a_noise_scale_that_is_sure(n, size):
    """Known slabs: the density of the noise scale, of a width of 1 / sqrt(2 n), is found; 1e-4 as above."""
    x, _ = regression(n, 1, 3)
    y = size * x[:, 0] + regression(n, 1, 4)[0][:, 0]
    residual = float(y @ y - (x[:, 0] @ y) ** 2 / (x[:, 0] @ x[:, 0])) / n
    log_noise = 0.5 * math.log(residual) + torch.linspace(-8, 8, 400, dtype=torch.float64) / math.sqrt(2 * n)
    noise, square = (2 * log_noise).exp(), x[:, 0] @ x[:, 0]
    explained = (x[:, 0] @ y) ** 2 / (square + noise / size**2)
    log_joint = -0.5 * (n * (noise * 2 * math.pi).log() + (y @ y - explained) / noise)
    log_joint += log_noise - 0.5 * (1 + square * size**2 / noise).log()
    log_joint += torch.from_numpy(stats.halfcauchy(scale=NOISE_UNIT).logpdf(log_noise.exp().numpy()))
    expected = float(log_joint.logsumexp(0) + (log_noise[1] - log_noise[0]).log()) + math.log(0.2)
    found = GaussianEvidence(problem_of(x, y, slab_scale=size)).log_marginal(torch.ones(1, 1, dtype=torch.bool))
    assert found.item() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("known", [{}, {"noise_scale": 1.0, "slab_scale": 0.5}], ids=["unknown", "known"])
def test_draws_have_the_moments(known):
    x, y = regression(40, 4, 4)
    x[:, 2] = x[:, 0] + 0.3 * x[:, 2]
    found = enumerate_posterior(problem_of(x, y, **known), draws=20000, seed=5)
    beta = found.draws.coefficients.toarray()
    error = 5 / math.sqrt(len(beta))
    np.testing.assert_allclose(beta.mean(0), found.mean[:, 0], atol=error * found.sd.max())
    np.testing.assert_allclose(beta.std(0), found.sd[:, 0], rtol=error * 2)
    opened = np.bincount(found.draws.coefficients.indices, minlength=4) / len(beta)
    np.testing.assert_allclose(opened, found.active_probs, atol=error / 2)


def test_draws_given_the_scales():
    """One state: the distribution of residuals that conjugacy gives, standardised by each draw's own scales."""
    x, y = regression(15, 3, 6)
    z = torch.ones(8000, 3, dtype=torch.bool)
    draws = GaussianEvidence(problem_of(x, y)).draws(z, torch.Generator().manual_seed(7))
    noise, slab = (torch.from_numpy(s)[:, None, None] for s in (draws.noise_scale, draws.slab_scale))
    precision = x.T @ x / noise**2 + torch.eye(3, dtype=torch.float64) / slab**2
    root = torch.linalg.cholesky(precision)
    mean = torch.cholesky_solve((x.T @ y)[:, None] / noise**2, root)
    white = root.mT @ (torch.from_numpy(draws.coefficients.toarray())[:, :, None] - mean)
    assert stats.kstest(white.flatten().numpy(), "norm").pvalue > 1e-3


def test_difficult_data():
    """Copies share their evidence, a feature of zeros follows the prior, and noise that vanishes ends at its bound."""
    x, y = regression(50, 4, 10)
    x[:, 1], x[:, 2] = 0.0, x[:, 0]
    found = enumerate_posterior(problem_of(x, y), seed=0)
    assert found.active_probs[0] == pytest.approx(found.active_probs[2], abs=1e-9)
    assert found.mean[1] == pytest.approx(0.0, abs=1e-9)
    exact = enumerate_posterior(problem_of(x, x[:, 0]), seed=0)
    np.testing.assert_allclose(exact.mean[[0, 2]].sum(), 1.0, atol=1e-6)
    assert exact.draws.noise_scale.max() < 1e-4
    zero = enumerate_posterior(problem_of(x, torch.zeros_like(y), noise_scale=1.0), seed=0)
    np.testing.assert_allclose(zero.mean, 0.0, atol=1e-12)
    assert exact_posterior(x[:, :1], y, seed=0).active_probs.shape == (1,)
    assert np.isfinite(exact_posterior(x[:3, [0, 2, 3]], y[:3], seed=0).active_probs).all()
