"""Cox's partial likelihood against sums over who is at risk, one event after the other, and its posteriors."""

import math

import pytest
import torch

from pyro_l0.selection.families.cox import CoxLikelihood
from tests.maths.spike_and_slab import seeded

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
