"""Slabs given their gates against torch's multivariate normal and direct formulas; the expansion they start from."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import MultivariateNormal

from pyro_l0 import BernoulliGate
from pyro_l0.maths.collapsed import slab_given_gates
from tests.infer.regressions import correlated_guide

P = 4
GATES = torch.tensor([[1.0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0]], dtype=torch.float64)
SCALE = torch.tensor([0.5, 1.0, 2.0, 0.7], dtype=torch.float64)
LOC = torch.tensor([0.3, -1.0, 0.0, 2.0], dtype=torch.float64)
_ROOT = torch.randn(P, P, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
CURVATURE = _ROOT @ _ROOT.mT + 0.5 * torch.eye(P, dtype=torch.float64)
LINEAR = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)


def direct(gates, loc):
    """The posterior of slabs by Bayes' rule, without a factor."""
    precision = gates.diag() @ CURVATURE @ gates.diag() + torch.diag(SCALE**-2)
    mean = torch.linalg.solve(precision, gates * LINEAR + loc / SCALE**2)
    return MultivariateNormal(mean, precision_matrix=precision)


@pytest.mark.parametrize("loc", [None, LOC])
def test_mean_draw_and_density(loc):
    """The mean, which is the prior's of closed gates, and the product of the conditionals."""
    given = slab_given_gates(CURVATURE, LINEAR, GATES, SCALE, loc)
    noise = torch.randn(len(GATES), P, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    slabs = given.draw(noise)
    means, deviations = given.conditionals(slabs, noise)
    densities = dist.Normal(means, deviations).log_prob(slabs).sum(-1)
    for i, gates in enumerate(GATES):
        exact = direct(gates, torch.zeros(P, dtype=torch.float64) if loc is None else loc)
        torch.testing.assert_close(given.mean[i], exact.mean)
        torch.testing.assert_close(densities[i], exact.log_prob(slabs[i]))


def test_covariance_of_draws():
    """The linear map from noise to draws has the posterior's covariance as its square, with the variances."""
    for gates in GATES:
        rows = gates.expand(P, P)
        given = slab_given_gates(CURVATURE, LINEAR, rows, SCALE)
        root = given.draw(torch.eye(P, dtype=torch.float64)) - given.mean
        exact = direct(gates, torch.zeros(P).double())
        torch.testing.assert_close(root.mT @ root, exact.covariance_matrix)
        torch.testing.assert_close(given.variances()[0], exact.variance)
        log_det = exact.precision_matrix.logdet() + 2 * SCALE.log().sum()
        torch.testing.assert_close(given.half_log_det()[0], 0.5 * log_det)


def test_float32_and_huge_curvature():
    """Means to five digits in float32, with curvatures of 1e8 as of a large data set."""
    curvature, linear = 1e8 * CURVATURE, 1e8 * LINEAR
    exact = slab_given_gates(curvature, linear, GATES, SCALE)
    given = slab_given_gates(curvature.float(), linear.float(), GATES.float(), SCALE.float())
    assert given.mean.dtype == given.root.dtype == torch.float32
    torch.testing.assert_close(given.mean.double(), exact.mean, rtol=3e-4, atol=1e-5)


# ------------------------------------------------------------ the expansion

X = torch.randn(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
Y = X @ torch.tensor([1.0, 0.0, -0.5], dtype=torch.float64)
Y = Y + 0.8 * torch.randn(40, dtype=torch.float64, generator=torch.Generator().manual_seed(6))


def structured(model, *hyper):
    guide = correlated_guide(model, hyper=hyper)
    guide()
    return guide


def coefficients(scale=1.0, loc=0.0, p=3):
    with pyro.plate("features", p):
        z = pyro.sample("z", BernoulliGate(probs=X.new_tensor(0.2)))
        return z * pyro.sample("w", dist.Normal(X.new_tensor(loc), scale))


def observe(fn, y=Y):
    with pyro.plate("data", len(y)):
        pyro.sample("y", fn, obs=y)


def regression(sigma=None, tau=None, loc=0.0):
    """Linear regression whose noise and slab scale are numbers, or sites with priors."""

    def model():
        noise = pyro.sample("sigma", dist.HalfCauchy(X.new_ones(()))) if sigma is None else sigma
        scale = pyro.sample("tau", dist.HalfNormal(X.new_ones(()))) if tau is None else tau
        observe(dist.Normal(coefficients(scale, loc) @ X.T, noise))

    return model


@pytest.mark.parametrize("loc", [0.0, 0.7])
def test_expansion_of_a_gaussian_likelihood_is_exact(loc):
    """Slabs given gates are the posterior of ridge regression for every set of gates, whatever the prior's mean."""
    guide = structured(regression(0.8, 0.5, loc))
    slabs = guide.joint.slab_posterior
    curvature, linear = (x.detach() for x in slabs.quadratic())
    torch.testing.assert_close(curvature, X.mT @ X / 0.64, rtol=1e-3, atol=1e-2)  # of which a ridge is 1e-3 / 0.25
    torch.testing.assert_close(linear, X.mT @ Y / 0.64, rtol=1e-3, atol=1e-2)
    for gates in torch.tensor([[1.0, 1, 1], [0, 1, 0], [1, 0, 1]], dtype=torch.float64):
        given = slabs.given(gates[None], X.new_zeros(1, 0))
        gated = X * gates
        precision = gated.mT @ gated / 0.64 + torch.eye(3, dtype=torch.float64) / 0.25
        exact = torch.linalg.solve(precision, gated.mT @ Y / 0.64 + loc / 0.25)
        torch.testing.assert_close(given.mean[0].detach(), exact, rtol=1e-3, atol=1e-3)


def test_mode_and_curvature_of_a_logistic_likelihood():
    """The gradient of the log joint is 0 at the mode, the curvature is X^T diag(p (1 - p)) X there."""
    y = (Y > 0).double()

    slabs = structured(lambda: observe(dist.Bernoulli(logits=coefficients() @ X.T), y)).joint.slab_posterior
    mode = slabs.given(torch.ones(1, 3, dtype=torch.float64), X.new_zeros(1, 0)).mean[0].detach()
    probs = torch.sigmoid(X @ mode)
    torch.testing.assert_close(X.mT @ (y - probs) - mode, torch.zeros(3).double(), rtol=0, atol=5e-3)
    curvature = X.mT @ (X * (probs * (1 - probs)).unsqueeze(-1))
    torch.testing.assert_close(slabs.quadratic()[0].detach(), curvature, rtol=1e-2, atol=1e-2)


def test_exponents_of_noise_and_slab_scale():
    """With log sigma the curvature goes as sigma^-2 and the prior stays; with log tau the other way round."""
    slabs = structured(regression(), "sigma", "tau").joint.slab_posterior
    torch.testing.assert_close(slabs.exponents.detach(), X.new_tensor([-2.0, 0.0]), rtol=0, atol=5e-3)
    torch.testing.assert_close(slabs.scale_exponents, X.new_tensor([[0.0, 1.0]] * 3))
    moved = X.new_tensor([[math.log(2.0), math.log(3.0)]])
    torch.testing.assert_close(slabs.likelihood_factor(moved).detach(), X.new_tensor([[0.25]]), rtol=1e-2, atol=0)
    torch.testing.assert_close(slabs.prior_scale(moved), 3 * slabs.scale.expand(1, 3))


def test_shifts_of_an_intercept():
    """The linear term moves with an intercept b as -X^T 1 b / sigma^2."""

    def model():
        intercept = pyro.sample("b", dist.Normal(X.new_zeros(()), X.new_tensor(3.0)))
        observe(dist.Normal(intercept + coefficients() @ X.T, 0.8))

    slabs = structured(model, "b").joint.slab_posterior
    torch.testing.assert_close(slabs.shifts[:, 0], -X.sum(0) / 0.64, rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(slabs.exponents.detach(), X.new_zeros(1), rtol=0, atol=1e-6)


def test_curvature_of_a_likelihood_that_is_not_concave_is_positive():
    """Student-t noise: where the Hessian is indefinite its eigenvalues are raised, so that it has a factor."""
    y = torch.tensor([8.0, -8.0, 8.0, -8.0], dtype=torch.float64)

    def model():
        observe(dist.StudentT(2.0, coefficients(0.1, p=2) @ X[:4, :2].T, 1.0), y)

    curvature = structured(model).joint.slab_posterior.quadratic()[0].detach()
    assert bool((torch.linalg.eigvalsh(curvature) > 0).all())


def test_slabs_by_themselves_start_at_mode_and_curvature():
    """slabs="independent": with an open gate the mode with open gates, else the prior."""
    guide = correlated_guide(regression(0.8, 0.5, 0.7), slabs="independent")
    guide()
    slabs = guide.joint.slab_posterior
    precision = X.mT @ X / 0.64 + torch.eye(3, dtype=torch.float64) / 0.25
    mode = torch.linalg.solve(precision, X.mT @ Y / 0.64 + 0.7 / 0.25)
    opened, closed = (slabs.given(x.expand(1, 3), X.new_zeros(1, 0)) for x in (X.new_ones(()), X.new_zeros(())))
    torch.testing.assert_close(opened.mean[0].detach(), mode, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(opened.deviation[0].detach(), precision.diagonal().rsqrt(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(closed.mean[0].detach(), X.new_full((3,), 0.7))
    torch.testing.assert_close(closed.deviation[0].detach(), X.new_full((3,), 0.5))
