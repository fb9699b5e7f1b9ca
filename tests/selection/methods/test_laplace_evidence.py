"""Laplace's approximation of gate vectors against the general one, quadrature, differences and sampled evidences."""

import math

import numpy as np
import pytest
import torch
from pyro import distributions as dist
from scipy import stats

from pyro_l0.maths import second_order
from pyro_l0.selection.methods.enumeration import enumerate_posterior, exact_posterior
from pyro_l0.selection.methods.gaussian_evidence import GaussianEvidence
from pyro_l0.selection.methods.laplace_evidence import LaplaceEvidence
from pyro_l0.selection.problem import Prior
from tests.posterior_references import reference
from tests.reference_posteriors import all_gates
from tests.selection.families import named_problem
from tests.spike_slab_designs import generalised_linear_designs

ONE = torch.ones((), dtype=torch.float64)
FAMILIES = {"bernoulli": 1, "poisson": 1, "categorical": 3}
OBSERVED = {
    "bernoulli": lambda eta: dist.Bernoulli(logits=eta[..., 0]),
    "poisson": lambda eta: dist.Poisson(eta[..., 0].exp()),
    "categorical": lambda eta: dist.Categorical(logits=eta),
}


def problem_of(family, n=40, p=4, seed=0, intercept=True, **known):
    """Data of the family with two effects."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, p, generator=generator, dtype=torch.float64)
    eta = 0.3 + x[:, :1] * torch.tensor([0.8, -0.8, 0.0], dtype=torch.float64)[: FAMILIES[family]]
    torch.manual_seed(seed)
    y = OBSERVED[family](eta).sample().double()
    prior = Prior(**({"rate": 0.3, "slab_unit": 1.5, "intercept_scale": 3.0} | known))
    return named_problem(family, x, y, prior, intercept)


def general(problem, z, scale):
    """The same by the general approximation: an intercept is a feature that is always open."""
    x, outputs = problem.x, problem.outputs
    scales = torch.full((x.shape[1],), scale, dtype=torch.float64)
    if problem.intercept:
        x = torch.cat([x, torch.ones(len(x), 1).double()], 1)
        z = torch.cat([z, torch.ones(len(z), 1, dtype=torch.bool)], 1)
        scales = torch.cat([scales, ONE[None] * problem.prior.intercept_scale])

    def log_likelihood(beta):
        eta = x @ beta.reshape(len(beta), -1, outputs)
        return OBSERVED[type(problem.family).__name__.lower()](eta).log_prob(problem.y).sum(1)

    elements, scales = z.repeat_interleave(outputs, 1).double(), scales.repeat_interleave(outputs)
    return second_order.laplace(log_likelihood, elements, scales)


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_evidence_and_modes(family, intercept):
    """Newton's last step is worth less than 1e-5 nat."""
    problem = problem_of(family, intercept=intercept)
    z = all_gates(4).bool()
    evidence = LaplaceEvidence(problem)
    found = evidence.fit(z, torch.full((16,), 0.7).double())
    expected = general(problem, z, 0.7)
    torch.testing.assert_close(found.log_evidence, expected.log_evidence, rtol=0, atol=1e-3)
    for group in evidence._batches(z):
        (mode,) = evidence._modes_along(group, torch.tensor([[0.7]]).double().log())
        beta = expected.mode[group.rows].reshape(len(group.rows), -1, problem.outputs)
        place = group.open[:, :, None].expand(-1, -1, problem.outputs)
        torch.testing.assert_close(
            mode.normals.mean[:, : group.open.shape[1]], beta.gather(1, place), rtol=0, atol=1e-3
        )
        if intercept:
            torch.testing.assert_close(mode.normals.mean[:, -1], beta[:, -1], rtol=0, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_derivatives(family):
    problem = problem_of(family, n=7)
    likelihood = problem.likelihood
    eta = torch.randn(2, 7, problem.outputs, dtype=torch.float64, requires_grad=True)
    expected = OBSERVED[family](eta).log_prob(problem.y).sum(1)
    torch.testing.assert_close(likelihood.value(eta), expected)
    slope, weights = likelihood.derivatives(eta)
    assert torch.equal(slope, likelihood.slope(eta))
    (by_autograd,) = torch.autograd.grad(expected.sum(), eta, create_graph=True)
    torch.testing.assert_close(slope, by_autograd)
    for k in range(problem.outputs):
        (row,) = torch.autograd.grad(by_autograd[..., k].sum(), eta, retain_graph=True)
        torch.testing.assert_close(weights[..., k], -row)
    columns = torch.randn(2, 3, 7, dtype=torch.float64)
    slope, curvature = likelihood.second_order(columns, eta)
    torch.testing.assert_close(slope, likelihood.derivatives(eta)[0])
    torch.testing.assert_close(curvature, torch.einsum("sjn,snab,skn->sjakb", columns, weights, columns))
    root = torch.randn(2, *[3 * problem.outputs] * 2, dtype=torch.float64)
    covariance = (root @ root.mT).view_as(curvature)
    (by_autograd,) = torch.autograd.grad((curvature * covariance).sum(), eta)
    torch.testing.assert_close(likelihood.trace_slope(columns, eta, covariance), by_autograd)


@pytest.mark.parametrize("family", FAMILIES)
def test_means_to_the_next_order(family):
    """mode - H^-1 d(log det H) / 2, by autograd."""
    problem = problem_of(family)
    z = torch.tensor([[True, False, True, False]])
    evidence = LaplaceEvidence(problem)
    (mode,) = evidence._modes_along(next(evidence._batches(z)), 0 * ONE[None, None])
    x = torch.cat([problem.x[:, [0, 2]], torch.ones(40, 1).double()], 1)
    precision = torch.tensor([1.0, 1.0, 1 / 9]).double().repeat_interleave(problem.outputs)

    def hessian(beta):
        def log_joint(beta):
            eta = x @ beta.reshape(3, -1)
            return OBSERVED[family](eta).log_prob(problem.y).sum() - 0.5 * (precision * beta**2).sum()

        return -torch.autograd.functional.hessian(log_joint, beta, create_graph=True)

    beta = mode.normals.mean.flatten().clone().requires_grad_()
    matrix = hessian(beta)
    (slope,) = torch.autograd.grad(torch.logdet(matrix), beta)
    expected = beta - 0.5 * torch.linalg.solve(matrix, slope)
    torch.testing.assert_close(mode.means().flatten(), expected.detach(), rtol=0, atol=2e-4)
    torch.testing.assert_close(
        mode.normals.variances().flatten(), torch.linalg.inv(matrix).diagonal().detach(), rtol=2e-3, atol=0
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_slab_scales_from_one_mode(family):
    """Equal gate vectors with other slab scales, beside a mode search for each; from a start that is far away, too."""
    problem = problem_of(family)
    z = all_gates(4).bool()[[3, 3, 3, 3, 3, 7, 7]]
    scale = torch.tensor([0.3, 0.68, 0.7, 0.72, 4.0, 0.5, 1.0], dtype=torch.float64)

    def start(z, log_slab):
        return torch.ones(len(z), 4, problem.outputs).double(), -torch.ones(len(z), problem.outputs).double()

    evidence = LaplaceEvidence(problem)
    together = evidence.fit(z, scale, start)
    assert len(together.parts) < len(z)
    weights = torch.eye(7, dtype=torch.float64)
    for row in range(7):
        alone = evidence.fit(z[[row]], scale[[row]])
        torch.testing.assert_close(together.log_evidence[[row]], alone.log_evidence, rtol=0, atol=3e-3)
        moments = zip(together.moments(weights[row], 4), alone.moments(ONE[None], 4), strict=True)
        for found, expected in moments:
            torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("family", ["bernoulli", "poisson"])
def test_one_coefficient_by_quadrature(family):
    """Evidence, mean and deviation of a state whose slab scale is unknown; .01 is Laplace's error."""
    problem = problem_of(family, n=80, p=1, intercept=False)
    beta = torch.linspace(-4, 4, 2001, dtype=torch.float64)
    log_slab = torch.linspace(-12, 2, 600, dtype=torch.float64)
    scale = log_slab.exp()[:, None]
    log_joint = OBSERVED[family]((beta[:, None] * problem.x[:, 0])[..., None]).log_prob(problem.y).sum(1)
    # Narrow slabs are integrals of their own cells: their mass between the middles.
    edges = torch.cat([beta - 0.002, beta[-1:] + 0.002])
    mass = torch.distributions.Normal(0 * scale, scale).cdf(edges).diff(dim=1).clamp(min=1e-300).log()
    prior = torch.from_numpy(stats.halfnorm(scale=1.5).logpdf(log_slab.exp().numpy())) + log_slab
    log_joint = log_joint + mass + prior[:, None] + math.log(float(log_slab[1] - log_slab[0]))
    states, z = LaplaceEvidence(problem), torch.ones(1, 1, dtype=torch.bool)
    expected = float(log_joint.flatten().logsumexp(0)) + math.log(0.3)
    assert states.log_marginal(z).item() == pytest.approx(expected, abs=0.01)
    weights = log_joint.logsumexp(0).softmax(0)
    mean = float(weights @ beta)
    deviation = math.sqrt(float(weights @ (beta - mean) ** 2))
    first, second = states.moments(z, ONE[None])
    assert first.item() == pytest.approx(mean, abs=0.02 * deviation)
    assert math.sqrt(second.item() - first.item() ** 2) == pytest.approx(deviation, rel=0.03)


def test_draws_have_the_moments():
    for family in FAMILIES:
        problem = problem_of(family, p=3, n=60, rate=(1.0, 1.0))
        found = enumerate_posterior(problem, draws=3000, seed=1)
        outputs, error = problem.outputs, 5 / math.sqrt(3000)
        beta = found.draws.coefficients.toarray().reshape(3000, 3, outputs)
        np.testing.assert_allclose(beta.mean(0), found.mean, atol=error * found.sd.max())
        np.testing.assert_allclose(beta.std(0), found.sd, rtol=3 * error)
        gates = beta != 0
        assert (gates == gates[:, :, :1]).all()  # K coefficients of a feature share a gate
        np.testing.assert_allclose(gates[:, :, 0].mean(0), found.active_probs, atol=error / 2)
        assert np.isnan(found.draws.noise_scale).all()
        assert found.draws.intercept.shape == (3000, outputs)
        expected = (1 + gates[:, :, 0].sum(1)).mean() / 5
        assert found.draws.rate.mean() == pytest.approx(expected, abs=error * found.draws.rate.std())


@pytest.mark.parametrize("number", [0, 8])
def test_a_known_posterior(number):
    """By importance-sampled evidences: their own error is about .002."""
    design = generalised_linear_designs()[number]
    family = {"logistic": "bernoulli"}.get(design.family, design.family)
    known = {"rate": design.rate, "slab_scale": design.tau}
    found = exact_posterior(
        design.x, design.y, family=family, standardize=False, fit_intercept=False, draws=10, seed=0, **known
    )
    expected = reference(design)
    np.testing.assert_allclose(found.active_probs, expected.inclusion, atol=0.006)
    np.testing.assert_allclose(found.mean[:, 0], expected.mean, atol=0.03)
    np.testing.assert_allclose(found.sd[:, 0], expected.sd, atol=0.03)
    assert found.log_evidence == pytest.approx(expected.log_evidence, abs=0.06)


@pytest.mark.parametrize(("family", "of_states"), [("gaussian", GaussianEvidence), ("poisson", LaplaceEvidence)])
def test_a_wide_problem(family, of_states):
    """Closed columns are not read, and X'X is not formed: states of 2,000 features are as quick as of ten."""
    given = problem_of("poisson", p=2001)
    prior = Prior(rate=0.3, slab_scale=1.0, noise_scale=1.0 if family == "gaussian" else None)
    wide, narrow = (named_problem(family, x, given.y, prior, family == "poisson") for x in (given.x, given.x[:, :10]))
    z = torch.zeros(3, 2001, dtype=torch.bool)
    z[1, :2] = z[2, 5:9] = True
    difference = of_states(wide).log_marginal(z) - of_states(narrow).log_marginal(z[:, :10])
    torch.testing.assert_close(difference, torch.full_like(difference, 1991 * math.log(0.7)), rtol=0, atol=1e-9)


def test_difficult_data():
    """Separated classes, large counts and one class have modes, because the priors are proper."""
    x = torch.linspace(-1, 1, 20, dtype=torch.float64)[:, None]
    for family, y in (("bernoulli", x[:, 0] > 0), ("poisson", 1e6 * ONE.expand(20)), ("bernoulli", x[:, 0] > 2)):
        problem = named_problem(family, x, y.double(), Prior(rate=0.5, slab_unit=2.0), True)
        found = enumerate_posterior(problem, draws=20)
        assert np.isfinite(found.mean).all()
        assert math.isfinite(found.log_evidence)
        assert (found.sd > 0).all()
