"""Likelihoods with parameters of their own, against scipy, autograd and posteriors by importance sampling."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from pyro_l0.selection.methods import exact_chains
from pyro_l0.selection.methods.exact_chains import AugmentedChains, JumpingChains
from pyro_l0.selection.problem import Prior
from tests.maths.spike_and_slab import seeded
from tests.selection.families import named_problem
from tests.selection.methods.by_importance import references
from tests.selection.methods.closed_start import closed


def negative_binomial(y, eta, theta):
    """By scipy, shape (S, n)."""
    size = np.exp(-theta)
    return stats.nbinom.logpmf(y, size, size / (size + np.exp(eta[..., 0])))


def half_normal_root(theta):
    """Log density of theta = log alpha whose root is half-normal."""
    root = np.exp(theta[:, 0] / 2)
    return stats.halfnorm.logpdf(root) + np.log(root / 2)


def cuts_of(theta):
    return np.concatenate([theta[:, :1], np.exp(theta[:, 1:])], 1).cumsum(1)


def ordinal(y, eta, theta):
    """Differences of distribution functions."""
    below = stats.logistic.cdf(cuts_of(theta)[:, None] - eta)
    probs = np.diff(below, axis=2, prepend=0.0, append=1.0)
    return np.log(np.maximum(probs[:, np.arange(len(y)), y.astype(int)], 1e-300))


def flat_classes(theta):
    """Log density by theta = first cut and log gaps, where class probabilities at zero have a flat density."""
    return stats.logistic.logpdf(cuts_of(theta)).sum(1) + theta[:, 1:].sum(1) + np.log(2)  # of three classes


def student(y, eta, theta):
    scale, degrees = np.exp(theta[:, :1]), np.exp(theta[:, 1:])
    return stats.t.logpdf(y, degrees, eta[..., 0], scale)


def half_cauchy_and_gamma(theta):
    scale, degrees = np.exp(theta).T
    return stats.halfcauchy.logpdf(scale) + stats.gamma.logpdf(degrees, 2, scale=10) + theta.sum(1)


# Of each family the log likelihood and the log prior, and which parameters theta stands for.
FAMILIES = {
    "negative_binomial": (negative_binomial, half_normal_root, lambda theta: {"dispersion": np.exp(theta[:, 0])}),
    "ordinal": (ordinal, flat_classes, lambda theta: {"thresholds": cuts_of(theta)}),
    "student": (
        student,
        half_cauchy_and_gamma,
        lambda theta: {"noise_scale": np.exp(theta[:, 0]), "degrees_of_freedom": np.exp(theta[:, 1])},
    ),
}
AUGMENTED = ["ordinal", "student"]


def problem(family, n=40, p=3, seed=0, weight=None):
    """With one feature that matters, and one that resembles it."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, p))
    x[:, 1] += x[:, 0]
    x = (x - x.mean(0)) / x.std(0)
    if family == "ordinal":
        y = np.digitize(0.5 * x[:, 0] + rng.logistic(size=n), [-1, 1.5]).astype(float)
    elif family == "student":
        y = 1 + 0.4 * x[:, 0] + rng.standard_t(2.5, size=n)
    else:
        y = rng.poisson(np.exp(1 + 0.3 * x[:, 0]) * rng.gamma(2.0, 0.5, size=n)).astype(float)
    both = torch.from_numpy(x), torch.from_numpy(y)
    return named_problem(family, *both, Prior((1.0, p**0.5)), family != "ordinal", weight=weight)


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_derivatives(family):
    """Of rows with weights, values by scipy and derivatives by autograd; a prior has the mass 1."""
    given = problem(family, weight=torch.rand(40, generator=seeded(1), dtype=torch.float64))
    by_scipy, prior, _ = FAMILIES[family]
    likelihood = given.likelihood
    theta = torch.randn(3, likelihood.theta.shape[1], generator=seeded(2), dtype=torch.float64)
    likelihood = likelihood.at(theta)
    eta = torch.randn(3, 40, given.outputs, generator=seeded(3), dtype=torch.float64).requires_grad_()
    value = likelihood.value(eta)
    expected = by_scipy(given.y.numpy(), eta.detach().numpy(), theta.numpy()) @ given.weight.numpy()
    np.testing.assert_allclose(value.detach(), expected, rtol=1e-10)
    torch.testing.assert_close(likelihood.value(eta.expand(2, -1, -1, -1)), value.expand(2, -1))
    np.testing.assert_allclose(likelihood.log_prior(), prior(theta.numpy()), rtol=1e-10)
    slope, curvature = likelihood.derivatives(eta)
    assert torch.equal(slope, likelihood.slope(eta))
    (by_autograd,) = torch.autograd.grad(value.sum(), eta, create_graph=True)
    torch.testing.assert_close(slope, by_autograd)
    if family == "student":
        return  # its curvature is an expectation, see below
    for k in range(given.outputs):
        (row,) = torch.autograd.grad(by_autograd[..., k].sum(), eta, retain_graph=True)
        torch.testing.assert_close(curvature[..., k, :], -row)


def test_expected_curvature_of_student():
    """The mean over quantiles of the noise of minus the second derivative, which is negative at some of them."""
    y = torch.from_numpy(0.7 * stats.t(2.5).ppf((np.arange(20_000) + 0.5) / 20_000))
    given = replace(problem("student"), y=y)
    likelihood = given.likelihood.at(torch.tensor([[0.7, 2.5]], dtype=torch.float64).log())
    eta = torch.zeros(1, 20_000, 1, dtype=torch.float64, requires_grad=True)
    slope, curvature = likelihood.derivatives(eta)
    (row,) = torch.autograd.grad(slope.sum(), eta)
    assert (row > 0).any()
    torch.testing.assert_close(curvature.mean(), -row.mean(), rtol=1e-3, atol=0)


def test_prior_of_the_dispersion():
    mass, _ = integrate.quad(lambda theta: np.exp(half_normal_root(np.array([[theta]]))[0]), -60, 6, limit=200)
    assert mass == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("size", [1e-18, 1e-15, 1e-9, 1.0, 1e9])
def test_dispersions_of_all_sizes(size):
    """The log likelihood stays that of scipy where counts are Poisson, and where nearly all are zero."""
    given = problem("negative_binomial")
    eta = torch.ones(1, 40, 1, dtype=torch.float64)
    theta = torch.tensor([[size]], dtype=torch.float64).log()
    found = given.likelihood.at(theta).value(eta)
    expected = negative_binomial(given.y.numpy(), eta.numpy(), theta.numpy())
    if size < 1:
        expected = stats.poisson.logpmf(given.y, np.e)
    expected = expected.sum()
    assert float(found) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_mode_of_the_parameters(family):
    """Of each set of predictors, whatever was near before; the spread is that of the curvature there."""
    given = problem(family)
    eta = torch.randn(3, 40, given.outputs, generator=seeded(3), dtype=torch.float64)
    found = given.likelihood.fitted(eta)
    theta = found.theta.requires_grad_()

    def density(at):
        there = found.at(at)
        return there.value(eta) + there.log_prior()

    (slope,) = torch.autograd.grad(density(theta).sum(), theta)
    assert slope.abs().max() < 0.05
    rows = torch.autograd.functional.hessian(lambda at: density(at).sum(), theta)
    curvature = -torch.stack([rows[i, :, i] for i in range(3)]).mean(0)
    spread = found.spread(eta)
    torch.testing.assert_close(spread.T @ spread, torch.linalg.inv(curvature))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_moves_of_the_parameters(family):
    """Of 4,000 chains with the same predictors, they end with the distribution that a grid finds."""
    given = problem(family, n=8)
    by_scipy, prior, _ = FAMILIES[family]
    each = closed(JumpingChains, given, 4000)
    each._sweep()
    eta = 0.3 * torch.randn(8, given.outputs, generator=seeded(3), dtype=torch.float64)
    each._eta = eta.expand(4000, -1, -1)
    each._value = each._likelihood.value(each._eta)
    for _ in range(60):
        each._move_parameters()
    torch.testing.assert_close(each._value, each._likelihood.value(each._eta))
    d = each._likelihood.theta.shape[1]
    grid = np.linspace(-25, 6, 3000) if d == 1 else np.linspace(-9, 7, 400)
    theta = np.stack(np.meshgrid(*[grid] * d, indexing="ij"), -1).reshape(-1, d)
    log_density = by_scipy(given.y.numpy(), np.broadcast_to(eta, (len(theta), *eta.shape)), theta).sum(1) + prior(theta)
    density = np.exp(log_density - log_density.max()).reshape([len(grid)] * d)
    for k, drawn in enumerate(each._likelihood.theta.T):
        own = density.sum(tuple({0, 1}.intersection(range(d)) - {k}))
        below = own.cumsum() - 0.5 * own
        assert stats.kstest(np.interp(drawn, grid, below / below[-1]), "uniform").pvalue > 1e-3


@torch.no_grad()
def test_moves_of_the_slab_scale():
    """Where features say nothing, chains from the prior, which is half-normal, keep it."""
    given = problem("negative_binomial")
    each = closed(JumpingChains, replace(given, x=torch.zeros_like(given.x)), 4000)
    each.z = torch.ones_like(each.z)
    each.log_slab = torch.randn(4000, generator=seeded(2), dtype=torch.float64).abs().log()
    each.beta[:, :3] = each.log_slab.exp()[:, None] * torch.randn(4000, 3, generator=seeded(3), dtype=torch.float64)
    each._value = each._likelihood.value(each._eta)
    for _ in range(30):
        each._move_slab()
    assert stats.kstest(each.log_slab.exp(), "halfnorm").pvalue > 1e-3
    assert stats.kstest((each.beta[:, :3] / each.log_slab.exp()[:, None]).flatten(), "norm").pvalue > 1e-3


@pytest.mark.parametrize("family", AUGMENTED)
@torch.no_grad()
def test_variables_that_make_it_quadratic(family):
    """Derivatives of scipy's log density are moments of the quadratic's (Louis 1982)."""
    given, offset = problem(family), torch.linspace(-1, 1, 40, dtype=torch.float64)
    likelihood = replace(given, offset=offset[:, None]).likelihood
    theta = likelihood.theta + torch.tensor([0.4, -0.3], dtype=torch.float64)
    eta = torch.randn(40, 1, generator=seeded(3), dtype=torch.float64)
    linear, weight = likelihood.at(theta.expand(20_000, -1)).augmented(eta.expand(20_000, -1, -1), seeded(4))
    slope = (linear - weight * eta[:, 0]).numpy()
    by_scipy, step = FAMILIES[family][0], 1e-3
    etas = (eta[:, 0] + offset).numpy() + step * np.array([[-1], [0], [1]])
    below, at, above = by_scipy(given.y.numpy(), etas[..., None], theta.expand(3, -1).numpy())
    errors = slope.std(0) / 20_000**0.5
    assert (np.abs(slope.mean(0) - (above - below) / (2 * step)) < 5 * errors + 1e-4).all()
    curvature = weight.numpy() - (slope - slope.mean(0)) ** 2
    errors = curvature.std(0) / 20_000**0.5
    assert (np.abs(curvature.mean(0) - (2 * at - below - above) / step**2) < 5 * errors + 1e-4).all()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("family", "kind"),
    [(family, JumpingChains) for family in FAMILIES] + [(family, AugmentedChains) for family in AUGMENTED],
)
@torch.no_grad()
def test_posteriors_by_importance(family, kind, seed, monkeypatch):
    """Everything is learned: inclusion probabilities to .02, means of coefficients and of the parameters."""
    monkeypatch.setattr(exact_chains, "_ROUNDS", 12)
    given = problem(family, n=60, seed=seed)
    by_scipy, prior, shown = FAMILIES[family]
    # Geometric means of positive parameters: a few large degrees of freedom make most of the other mean.
    scaled, unscaled = (np.log, np.exp) if family == "student" else (np.asarray, np.asarray)
    y, d = given.y.numpy(), given.likelihood.theta.shape[1]

    def log_density(eta, theta):
        return by_scipy(y, eta, theta).sum(1) + prior(theta)

    def learned(theta):
        return scaled(np.column_stack(list(shown(theta).values())))

    pips, coefs, expected = references(
        given.x.numpy(), log_density, d, given.outputs, intercept=given.intercept, shown=learned
    )
    found = closed(kind, given, 64, seed).posterior(0.0, 4000, 0.0)
    np.testing.assert_allclose(found.active_probs, pips, atol=0.02)
    np.testing.assert_allclose(found.mean, coefs, atol=0.02)
    drawn = {**found.draws.learned, "noise_scale": found.draws.noise_scale}
    means = scaled(np.column_stack([drawn[name] for name in shown(np.zeros((1, d)))])).mean(0)
    np.testing.assert_allclose(unscaled(means), unscaled(expected), rtol=0.06, atol=0.03)
