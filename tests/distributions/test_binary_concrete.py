"""The limit without a stretch: against integrals and a hard concrete of a very narrow stretch, and its refusals."""

import itertools
import math

import pyro
import pytest
import torch
from scipy import integrate, stats
from torch import nn
from torch.distributions import kl_divergence

from pyro_l0.compaction import Shrinker
from pyro_l0.distributions import BernoulliGate, HardConcrete
from pyro_l0.distributions.binary_concrete import BinaryConcrete
from pyro_l0.infer import L0_ELBO, AutoGate
from pyro_l0.nn import Gate
from tests.cases import double

CASES = [(0.0, 2 / 3), (-2.0, 2 / 3), (3.0, 0.1), (0.7, 1.6), (-8.0, 0.3), (12.0, 2.0)]


@pytest.mark.parametrize(("log_alpha", "temperature"), CASES)
def test_moments_and_entropy(log_alpha, temperature):
    gate = BinaryConcrete(double(log_alpha), temperature)

    def mean_of(function):
        def integrand(e):
            return stats.logistic.pdf(e) * function((log_alpha + e) / temperature)

        turns = [-log_alpha + k * temperature for k in (-8, -3, 0, 3, 8)]
        places = sorted({-30.0, -8.0, 0.0, 8.0, 30.0, *[x for x in turns if abs(x) < 60]})
        ends = [-60.0, *places, 60.0]
        return sum(integrate.quad(integrand, a, b, epsabs=1e-14)[0] for a, b in itertools.pairwise(ends))

    mean = mean_of(lambda y: 1 / (1 + math.exp(-y)))
    square = mean_of(lambda y: (1 / (1 + math.exp(-y)) - mean) ** 2)
    slope = mean_of(lambda y: -abs(y) - 2 * math.log1p(math.exp(-abs(y))))
    assert gate.mean.item() == pytest.approx(mean, rel=1e-10)
    assert gate.variance.item() == pytest.approx(square, rel=1e-9)
    assert gate.entropy().item() == pytest.approx(2 - math.log(temperature) + slope, rel=1e-10, abs=1e-10)


def test_limit_of_the_hard_concrete():
    q, p = torch.linspace(-2, 2, 5).double(), torch.linspace(1, -1, 5).double()
    for temperature in (0.5, 1.2):
        limit = [BinaryConcrete(x, temperature) for x in (q, p)]
        hard = [HardConcrete(x, temperature, -1e-13, 1 + 1e-13) for x in (q, p)]
        z = torch.tensor([[0.1], [0.5], [0.99]], dtype=torch.float64)
        torch.testing.assert_close(limit[0].log_prob(z), hard[0].log_prob(z), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(limit[0].cdf(z), hard[0].cdf(z), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(kl_divergence(*limit), kl_divergence(*hard), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("log_alpha", "temperature"), CASES)
def test_kl(log_alpha, temperature):
    """Against the mean log ratio of draws, with the sign of both arguments, and zero with itself."""
    location = double(log_alpha).requires_grad_()
    q = BinaryConcrete(location, temperature)
    p = BinaryConcrete(double(0.4), 0.9)
    for one, other in ((q, p), (p, q)):
        torch.manual_seed(121)
        logit = one.base_distribution().sample((200_000,))
        ratio = one.base_distribution().log_prob(logit) - other.base_distribution().log_prob(logit)
        ratio = ratio.detach()
        error = ratio.std() / math.sqrt(len(ratio))
        assert (ratio.mean() - kl_divergence(one, other)).abs() < 5 * error
    assert abs(kl_divergence(q, BinaryConcrete(double(log_alpha), temperature)).item()) < 1e-13
    kl_divergence(q, p).backward()
    h = 1e-5
    up, down = (kl_divergence(BinaryConcrete(double(log_alpha + s), temperature), p).item() for s in (h, -h))
    assert location.grad.item() == pytest.approx((up - down) / (2 * h), rel=1e-6, abs=1e-8)


def test_draws_and_shapes():
    """The integral transform is uniform; no draw is at an end, even saturated in float32."""
    gate = BinaryConcrete(torch.tensor([-1.0, 2.0]), 0.5)
    torch.manual_seed(122)
    draws = gate.rsample((5000,))
    assert draws.shape == (5000, 2)
    for column in gate.cdf(draws).T.double().numpy():
        assert stats.kstest(column, "uniform").pvalue > 1e-6
    saturated = BinaryConcrete(torch.tensor([-80.0, 80.0]), 0.1).rsample((100,))
    assert ((saturated > 0) & (saturated < 1)).all()
    assert gate.expand((3, 2)).mean.shape == (3, 2)
    assert gate.to_event(1).log_prob(draws).shape == (5000,)
    u = torch.tensor([[0.2], [0.5]])
    torch.testing.assert_close(gate.cdf(gate.icdf(u)), u.expand(2, 2))
    assert (gate.active_prob == 1).all()
    assert (gate.log_prob(torch.zeros(())) == -math.inf).all()


def test_drop_in():
    """In a model and a guide, with its own KL; not against gates that have atoms."""

    def model():
        pyro.sample("z", BinaryConcrete(torch.zeros(3)).to_event(1))

    guide = AutoGate(model, BinaryConcrete, init_active_prob=0.7, init_jitter=0.0)
    guide()
    torch.testing.assert_close(guide.posterior()["z"].log_alpha, torch.logit(torch.tensor([0.7] * 3)))
    loss = L0_ELBO("free_energy").differentiable_loss(model, guide)
    loss.backward()
    assert (guide.sites["z"]["log_alpha"].grad > 0).all()
    for other in (HardConcrete(0.0), BernoulliGate(logits=0.0)):
        for pair in ((BinaryConcrete(0.0), other), (other, BinaryConcrete(0.0))):
            with pytest.raises(TypeError, match=r"same atoms|infinite"):
                kl_divergence(*pair)
    with pytest.raises(ValueError, match="active_prob strictly between 0 and 1"):
        BinaryConcrete.from_active_prob(1.0)
    with pytest.raises(NotImplementedError, match="never exactly zero"):
        guide.close("z", torch.tensor([0]))


def test_nothing_leaves_a_network_without_zeros():
    """No gate counts as closed, however near to zero its draws are."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), Gate(3), nn.Linear(3, 1)))
    guide = AutoGate(model, BinaryConcrete, init_active_prob=0.001)
    guide(torch.ones(1, 2))
    optimiser = torch.optim.Adam([*model.parameters(), *guide.parameters()])
    shrinker = Shrinker(model[0], guide, torch.ones(1, 2), optimiser, patience=1)
    assert not shrinker.step()
