"""The binary gate, which keeps what the contract promises without a density or a pathwise draw."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import TraceEnum_ELBO
from torch.distributions import kl_divergence

from pyro_l0.distributions import BernoulliGate, HardConcrete, PowerLawGate, RectifiedNormal
from tests.reference import BernoulliReference, HardConcreteReference

LOGITS = torch.tensor([[-90.0, -3.0], [-0.5, 0.0], [2.0, 90.0]], dtype=torch.float64)


@pytest.fixture
def gate():
    return BernoulliGate(logits=LOGITS)


def test_mode():
    """As Pyro's Bernoulli distribution."""
    logits = torch.tensor([-1.0, 0.0, 2.0])
    torch.testing.assert_close(BernoulliGate(logits=logits).mode, dist.Bernoulli(logits=logits).mode, equal_nan=True)


def test_enumeration(gate):
    """Both values, and Pyro's enumeration sums them out exactly."""
    assert gate.enumerate_support().shape == (2, 3, 2)
    assert gate.enumerate_support(expand=False).shape == (2, 1, 1)

    def model():
        z = pyro.sample("z", BernoulliGate(logits=torch.tensor(0.0)))
        pyro.factor("data", 3.0 * z)

    def guide():
        logits = pyro.param("logits", torch.tensor(0.4))
        pyro.sample("z", BernoulliGate(logits=logits), infer={"enumerate": "parallel"})

    pyro.clear_param_store()
    loss = TraceEnum_ELBO(max_plate_nesting=0).loss_and_grads(model, guide)
    q = torch.sigmoid(torch.tensor(0.4))
    kl = kl_divergence(BernoulliGate(logits=torch.tensor(0.4)), BernoulliGate(logits=torch.tensor(0.0)))
    assert loss == pytest.approx((kl - 3 * q).item(), rel=1e-6)
    # The slope of kl - 3 q by the logits.
    assert pyro.param("logits").grad.item() == pytest.approx(float(q * (1 - q) * (0.4 - 3)), rel=1e-5)


def test_kl():
    """Closed with another Bernoulli gate and with a gate that has its atoms."""
    q, p = BernoulliGate(logits=torch.tensor(0.3).double()), BernoulliGate(logits=torch.tensor(-1.0).double())
    plain = (torch.distributions.Bernoulli(logits=gate.logits) for gate in (q, p))
    torch.testing.assert_close(kl_divergence(q, p), kl_divergence(*plain))
    near = BernoulliGate(logits=q.logits + 1e-6)
    slope_free = q.variance * 1e-12 / 2
    torch.testing.assert_close(kl_divergence(q, near), slope_free, rtol=1e-5, atol=0)
    twin, concrete = BernoulliReference(0.3), HardConcreteReference(0.5, 2 / 3)
    masses = (twin.below(0), concrete.p0), (twin.above(0), concrete.p1)
    by_hand = sum(float(mass) * math.log(mass / other) for mass, other in masses)
    value = kl_divergence(q, HardConcrete(torch.tensor(0.5).double(), 2 / 3))
    assert value.item() == pytest.approx(by_hand, rel=1e-6)
    for other in (HardConcrete(0.0), RectifiedNormal(0.5, 0.5), PowerLawGate(0.0, 2.0)):
        assert kl_divergence(q, other) > 0


@pytest.mark.parametrize("plain", [dist.Bernoulli, torch.distributions.Bernoulli])
def test_kl_to_and_from_a_plain_bernoulli(plain):
    """That of two plain ones with the same first argument; infinite where only the gate can be open."""
    gates, never = torch.tensor([0.2, 0.7], dtype=torch.float64), torch.tensor([0.5, 0.0], dtype=torch.float64)
    q, p = plain(gates), plain(never)
    assert kl_divergence(q, p)[1] == math.inf
    torch.testing.assert_close(kl_divergence(BernoulliGate(gates), p), kl_divergence(q, p))
    torch.testing.assert_close(kl_divergence(p, BernoulliGate(gates)), kl_divergence(p, q))
    torch.testing.assert_close(BernoulliGate(gates).active_prob, q.mean)


def test_no_pathwise_draw_and_no_half_open_gate(gate):
    assert not gate.has_rsample
    for call in (gate.rsample, gate.base_distribution):
        with pytest.raises(NotImplementedError):
            call()
    assert BernoulliGate(logits=0.0).log_prob(torch.tensor(0.5)) == -math.inf  # no density between the atoms
