"""Expansions of generalised linear regressions against derivatives by autograd of the same with their intercepts."""

import pytest
import torch
import torch.nn.functional as F

from pyro_l0.selection.families import Bernoulli, Poisson
from pyro_l0.selection.methods.sampling import null_predictor
from pyro_l0.selection.problem import Prior
from tests.maths.spike_and_slab import seeded
from tests.selection.families import named_problem

OUTPUTS = {"bernoulli": 1, "poisson": 1, "categorical": 3}


def problem(family, intercept=True, n=30, p=4):
    generator = seeded(3)
    x = torch.randn(n, p, generator=generator, dtype=torch.float64)
    y = torch.randint(0, {"bernoulli": 2, "poisson": 4, "categorical": 3}[family], (n,), generator=generator).double()
    return named_problem(family, x, y, Prior(0.2, 1.0, intercept_scale=1.5), intercept)


def log_likelihood(problem, eta):
    if isinstance(problem.family, Bernoulli):
        return -F.binary_cross_entropy_with_logits(eta[:, 0], problem.y, reduction="sum")
    if isinstance(problem.family, Poisson):
        return (problem.y * eta[:, 0] - eta[:, 0].exp()).sum()
    return -F.cross_entropy(eta, problem.y.long(), reduction="sum")


@pytest.mark.parametrize("family", OUTPUTS)
@pytest.mark.parametrize("intercept", [True, False])
def test_intercepts_integrated_out(family, intercept):
    """Matrix and linear term are Schur complements of the joint ones; intercepts have their mean."""
    given = problem(family, intercept)
    k, p = given.outputs, given.x.shape[1]
    eta = 0.5 * torch.randn(len(given.y), k, generator=seeded(4), dtype=torch.float64)

    def joint(both):
        c, beta = both[:k], both[k:].view(p, k)
        moved = c + given.x @ beta
        slope = torch.autograd.functional.jacobian(lambda e: log_likelihood(given, e), eta)
        hessian = torch.autograd.functional.hessian(lambda e: log_likelihood(given, e), eta)
        step = moved - eta
        quadratic = torch.einsum("ni,nimj,mj->", step, hessian, step)
        return (slope * step).sum() + 0.5 * quadratic - 0.5 * c.square().sum() / given.prior.intercept_scale**2

    zero = torch.zeros(k + p * k, dtype=torch.float64)
    slope = torch.autograd.functional.jacobian(joint, zero)
    precision = -torch.autograd.functional.hessian(joint, zero)
    first, rest = slice(0, k), slice(k, None)
    inverse = torch.linalg.inv(precision[first, first]) if intercept else torch.zeros(k, k).double()
    gain = precision[rest, first] @ inverse
    features = given.gated, given.ungated, given.ungated_precision
    quadratic, intercept_of = given.likelihood.expanded(*features, eta)
    index = torch.arange(p * k)
    torch.testing.assert_close(quadratic.linear, slope[rest] - gain @ slope[first])
    torch.testing.assert_close(quadratic.rows(index[None])[0], precision[rest, rest] - gain @ precision[first, rest])
    beta = torch.randn(p * k, generator=seeded(5), dtype=torch.float64)
    mean = inverse @ (slope[first] - precision[first, rest] @ beta)
    torch.testing.assert_close(intercept_of(beta[None])[0].sum(0), mean)


@pytest.mark.parametrize("family", OUTPUTS)
def test_null_predictor(family):
    """The slopes of the model without features are small in sum: no more than the half observation added."""
    given = problem(family)
    eta = null_predictor(given).requires_grad_()
    log_likelihood(given, eta).backward()
    assert eta.grad.sum(0).abs().max() < 1
    assert not null_predictor(problem(family, intercept=False)).any()
