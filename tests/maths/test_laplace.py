"""Laplace evidence of gate vectors, and gates of likelihoods that are not quadratic."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.functional import hessian, jacobian

from pyro_l0.maths.collapsed import CollapsedQuadratic
from pyro_l0.maths.second_order import laplace, quadratic_at
from pyro_l0.maths.tempered_gibbs import gibbs_by_expansion
from tests.maths.spike_and_slab import Regression, active_probs, prior, seeded, vectors

SCALES = torch.tensor([0.5, 2.0, 0.1, 1.0], dtype=torch.float64)
GAUSSIAN = Regression.drawn(30, 4, 1, rho=0.8)
X = Regression.drawn(60, 6, 2, rho=0.7).x
NOISE = torch.rand(60, generator=seeded(3), dtype=torch.float64)
EFFECTS = torch.tensor([1.5, 0.0, -1.0, 0.0, 0.0, 0.5], dtype=torch.float64)
BINARY = (torch.sigmoid(X @ EFFECTS) > NOISE).double()
COUNTS = torch.poisson((X @ (0.5 * EFFECTS)).exp(), generator=seeded(4))
HEAVY = X @ EFFECTS + torch.tan(math.pi * (NOISE - 0.5))


def logistic(beta):
    eta = beta @ X.T
    return (BINARY * eta - F.softplus(eta)).sum(-1)


def poisson(beta):
    eta = beta @ X.T
    return (COUNTS * eta - eta.exp()).sum(-1)


def student(beta):
    """Three degrees of freedom: neither concave nor convex."""
    return -2 * torch.log1p((HEAVY - beta @ X.T).square() / 3).sum(-1)


LIKELIHOODS = {"logistic": logistic, "poisson": poisson, "student": student}


def test_exact_for_a_quadratic():
    """The collapsed evidence, beside the likelihood without any coefficient; the mode is the mean."""
    z = vectors(4)
    collapsed = CollapsedQuadratic(GAUSSIAN.dense(), SCALES)
    none = GAUSSIAN.log_likelihood(torch.zeros(1, 4, dtype=torch.float64))
    for start in (None, torch.full((4,), 3.0, dtype=torch.float64)):
        result = laplace(GAUSSIAN.log_likelihood, z, SCALES, start)
        torch.testing.assert_close(result.log_evidence, none + collapsed.log_evidence(z), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(result.mode, collapsed.mean(z) * z, rtol=1e-6, atol=1e-8)


def test_expansion_of_a_quadratic_is_itself():
    """At any point."""
    at = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    quadratic = quadratic_at(lambda beta: GAUSSIAN.log_likelihood(beta[None])[0], at)
    torch.testing.assert_close(quadratic.matrix, GAUSSIAN.dense().matrix, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(quadratic.linear, GAUSSIAN.linear, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_at_the_mode(name):
    """Where the gradient vanishes, nothing nearby is higher; with the curvature by a formula of the whole matrix."""
    log_likelihood, z = LIKELIHOODS[name], vectors(6)
    far = torch.tensor([2.0, -1.0, 1.0, 0.0, -2.0, 1.0], dtype=torch.float64)
    scale = 0.8
    here, there = laplace(log_likelihood, z, scale), laplace(log_likelihood, z, scale, 0.5 * far)
    assert (here.mode[z == 0] == 0).all()
    torch.testing.assert_close(here.log_evidence, there.log_evidence, rtol=1e-7, atol=1e-7)

    def log_joint(w, on):
        return log_likelihood((on * w)[None])[0] - 0.5 * w.square().sum() / scale**2

    for i in (0, 5, 21, 42, 63):
        slope = jacobian(lambda w, on=z[i]: log_joint(w, on), here.mode[i])
        assert slope.abs().max() < 1e-5
        precision = -hessian(lambda w, on=z[i]: log_joint(w, on), here.mode[i])
        expected = log_joint(here.mode[i], z[i]) - 0.5 * torch.logdet(precision * scale**2)
        assert here.log_evidence[i].item() == pytest.approx(expected.item(), abs=1e-6)


def reference(log_likelihood, gates, gate_of=None):
    z = vectors(gates)
    elements = z if gate_of is None else z[:, gate_of]
    log_weights = laplace(log_likelihood, elements, 1.0).log_evidence + prior(0.2).log_prob(z)
    return active_probs(log_weights, z), z, log_weights


@pytest.mark.parametrize(("name", "gate_of"), [*itertools.product(LIKELIHOODS, [None]), ("logistic", "groups")])
def test_gates_by_expansion(name, gate_of):
    """Against the sum over all vectors; the expansion alone, without new weights, is further away."""
    gate_of = None if gate_of is None else torch.tensor([0, 0, 1, 2, 2, 3])
    gates = 6 if gate_of is None else 4
    expected, z, _ = reference(LIKELIHOODS[name], gates, gate_of)
    start = torch.zeros(6, dtype=torch.float64)
    run, collapsed = gibbs_by_expansion(
        LIKELIHOODS[name], 1.0, prior(0.2), start=start, gate_of=gate_of, flips=300, generator=seeded(1)
    )
    error = (run.active_probs - expected).abs().max()
    alone = active_probs(collapsed.log_evidence(z) + prior(0.2).log_prob(z), z)
    assert error < 0.02
    assert error < (alone - expected).abs().max()
    assert collapsed.draw_slabs(run.draws(10, seeded(2)), seeded(3)).shape == (10, 6)


def test_refusals():
    """A start where the likelihood is not finite, and a likelihood that adds up the batch."""
    z = torch.ones(2, 6, dtype=torch.float64)
    with pytest.raises(ValueError, match="finite where the search for the mode starts; set start"):
        laplace(lambda beta: beta.sum(1).log(), z, 1.0, -torch.ones(6, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"log likelihood of shape \(2,\) .* \(2, 6\), but got \(\)"):
        laplace(lambda beta: beta.square().sum(), z, 1.0)


def test_a_likelihood_without_bound():
    with pytest.warns(UserWarning, match="not found the mode of 2 of 2 gate vectors in 100 steps"):
        laplace(lambda beta: beta.pow(4).sum(1), torch.ones(2, 3).double(), 1.0, torch.ones(3).double())
