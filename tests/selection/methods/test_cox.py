"""Cox's partial likelihood against sums over who is at risk, one event after the other, and its posteriors."""

import itertools
import math

import numpy as np
import pytest
import torch

from pyro_l0.selection.families.cox import CoxLikelihood
from pyro_l0.selection.methods import find_posterior
from tests.maths.spike_and_slab import seeded
from tests.selection.families import design_of

TIES = ["breslow", "efron"]


def one_by_one(eta, time, event, ties):
    """The log partial likelihood of linear predictors, shape ``(..., n)``."""
    total = 0.0
    for at in sorted(set(time[event].tolist())):
        tied = [i for i in range(len(time)) if event[i] and time[i] == at]
        at_risk = [i for i in range(len(time)) if time[i] >= at]
        for rank, i in enumerate(tied):
            share = rank / len(tied) if ties == "efron" else 0.0
            weights = torch.tensor([1 - share * (j in tied) for j in at_risk], dtype=eta.dtype)
            total = total + eta[..., i] - (weights * eta[..., at_risk].exp()).sum(-1).log()
    return total


def tied_times(n=12, seed=0):
    """Some of them censored, and some of these where others have their event."""
    generator = seeded(seed)
    time = torch.randint(1, 6, (n,), generator=generator).double()
    return time, torch.rand(n, generator=generator) < 0.7


@pytest.mark.parametrize("ties", TIES)
def test_value_and_derivatives(ties):
    """By autograd through the plain sums; the weights are above the second derivatives."""
    time, event = tied_times()
    likelihood = CoxLikelihood(time, event, ties == "efron")
    eta = torch.randn(12, generator=seeded(1), dtype=torch.float64)
    columns = torch.randn(1, 3, 12, generator=seeded(2), dtype=torch.float64)
    root = torch.randn(3, 3, generator=seeded(3), dtype=torch.float64)
    covariance = root @ root.T

    def value(eta):
        return one_by_one(eta, time, event, ties)

    def curvature(eta):
        return -columns[0] @ torch.autograd.functional.hessian(value, eta, create_graph=True) @ columns[0].T

    given = eta[None, :, None]
    torch.testing.assert_close(likelihood.value(given)[0], value(eta))
    slope, weights = likelihood.derivatives(given)
    torch.testing.assert_close(slope.flatten(), torch.autograd.functional.jacobian(value, eta))
    difference = torch.diag(weights.flatten()) + torch.autograd.functional.hessian(value, eta)
    assert torch.linalg.eigvalsh(difference).min() > -1e-12
    also, found = likelihood.second_order(columns, given)
    assert (also == slope).all()
    torch.testing.assert_close(found[0, :, 0, :, 0], curvature(eta))
    trace = torch.autograd.functional.jacobian(lambda eta: (curvature(eta) * covariance).sum(), eta)
    found = likelihood.trace_slope(columns, given, covariance[None, :, None, :, None])
    torch.testing.assert_close(found.flatten(), trace)


@pytest.mark.parametrize(("ties", "best"), [("breslow", math.log((3 + math.sqrt(33)) / 2)), ("efron", 1.676857)])
def test_published_example(ties, best):
    """Six subjects of Therneau and Grambsch (2000), Modeling Survival Data, appendix E.1: formulas and maxima."""
    time, event = torch.tensor([1.0, 1, 6, 6, 8, 9]), torch.tensor([1, 0, 1, 1, 0, 1]) > 0
    x = torch.tensor([1.0, 1, 1, 0, 0, 0], dtype=torch.float64)[:, None]
    likelihood = CoxLikelihood(time, event, ties == "efron")
    beta = torch.tensor([0.0, 0.7, best], dtype=torch.float64)
    r = beta.exp()
    second = r + 3 if ties == "breslow" else (r + 5) / 2
    expected = 2 * beta - (3 * r + 3).log() - (r + 3).log() - second.log()
    torch.testing.assert_close(likelihood.value(beta[:, None, None] * x), expected)
    assert abs(likelihood.derivatives(best * x[None])[0][0, :, 0] @ x[:, 0]) < 1e-6


def test_predictors_far_apart():
    """Nothing under- or overflows, and derivatives stay finite."""
    time, event = torch.arange(1.0, 5.0), torch.ones(4, dtype=torch.bool)
    likelihood = CoxLikelihood(time, event, True)
    eta = torch.tensor([[0.0], [-2e3], [1e3], [-3e3]], dtype=torch.float64)[None]
    torch.testing.assert_close(likelihood.value(eta)[0], torch.tensor(-1e3 - 3e3).double())
    assert all(part.isfinite().all() for part in likelihood.derivatives(eta))


def survival(n=40, seed=3):
    """Three features, of which the last has no effect, and times on a grid, with a minus sign where censored."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 3))
    time = rng.exponential(np.exp(-0.8 * x[:, 0] + 0.3 * x[:, 1]))
    censored = rng.exponential(2.0, size=n)
    return x, np.copysign(np.ceil(4 * np.minimum(time, censored)), (time <= censored) - 0.5)


def by_quadrature(x, y, ties, rate, slab, offset=0.0):
    """P(z = 1) and log p(y): each gate vector's integral by a grid of 31 nodes for each open coefficient."""
    x = torch.from_numpy((x - x.mean(0)) / x.std(0))
    time, event = torch.from_numpy(np.abs(y)), torch.from_numpy(~np.signbit(y))
    nodes = torch.linspace(-2.5, 2.5, 31, dtype=torch.float64)
    log_joint, gates = [], list(itertools.product([0, 1], repeat=3))
    for z in gates:
        beta = torch.stack(torch.meshgrid(*[nodes if on else nodes[:1] * 0 for on in z], indexing="ij"), -1).view(-1, 3)
        prior = torch.distributions.Normal(0.0, slab).log_prob(beta) + math.log(5 / 30)
        total = one_by_one(beta @ x.T + offset, time, event, ties) + (prior * torch.tensor(z)).sum(1)
        log_joint.append(float(total.logsumexp(0)) + sum(math.log(rate if on else 1 - rate) for on in z))
    log_joint = torch.tensor(log_joint, dtype=torch.float64)
    return log_joint.softmax(0) @ torch.tensor(gates, dtype=torch.float64), float(log_joint.logsumexp(0))


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("method", ["enumerate", pytest.param("tempered", marks=pytest.mark.slow)])
def test_posterior(ties, method):
    """Of Laplace's approximation within .01; most probabilities are far from zero and one."""
    x, y = survival()
    probs, log_evidence = by_quadrature(x, y, ties, 0.4, 1.0)
    problem = design_of(x, y, ties, rate=0.4, slab_scale=1.0).problem
    found, _ = find_posterior(problem, method, draws=500, seed=0)
    np.testing.assert_allclose(found.active_probs, probs, atol=0.01)
    assert ((probs > 0.1) & (probs < 0.9)).sum() >= 2
    assert found.log_evidence == pytest.approx(log_evidence, abs=0.03)


def test_offset():
    """A known part of the predictors; a constant in it says nothing."""
    x, y = survival()
    offset = 0.7 * np.random.default_rng(1).normal(size=(len(y), 1)) + 5
    probs, log_evidence = by_quadrature(x, y, "efron", 0.4, 1.0, torch.from_numpy(offset[:, 0]))
    problem = design_of(x, y, "efron", rate=0.4, slab_scale=1.0, offset=offset).problem
    found, _ = find_posterior(problem, "enumerate", draws=500, seed=0)
    np.testing.assert_allclose(found.active_probs, probs, atol=0.01)
    assert found.log_evidence == pytest.approx(log_evidence, abs=0.03)
    assert (probs - by_quadrature(x, y, "efron", 0.4, 1.0)[0]).abs().max() > 0.05
