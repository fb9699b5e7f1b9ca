"""Gradients are measured whatever the gates' sites are called."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_l0 import HardConcrete, HardKumaraswamy
from pyro_l0.diagnostics.gradients import exact_gradient, measure_gradient
from pyro_l0.infer import L0_ELBO, AutoGate

NAMES = ["a/b", "keys", "values", "items", "weight.x", "training", "a//b.c", "0"]


@pytest.mark.parametrize("family", [HardConcrete, HardKumaraswamy])
def test_measure_gradient_of_any_site_name(family):
    """With slashes and dots, and the names that a dictionary uses itself; each gate has its own entry, in order."""

    def model():
        z = [pyro.sample(name, family.from_active_prob(torch.tensor([0.4])).to_event(1)) for name in NAMES]
        pyro.sample("y", dist.Normal(torch.cat(z).sum(), 1.0), obs=torch.tensor(1.5))

    rates = {name: 0.1 * (i + 1) for i, name in enumerate(NAMES)}
    guide = AutoGate(model, family=family, init_active_prob=rates, init_jitter=0.0)
    guide()
    report = measure_gradient(L0_ELBO("l0"), model, guide, draws=3)
    location = next(iter(family.learned))
    for gate, slope in zip(guide.posterior().values(), report.slope, strict=True):
        leaf = getattr(gate, location).detach().requires_grad_()
        others = {name: getattr(gate, name).detach() for name in family.learned if name != location}
        (expected,) = torch.autograd.grad(gate.with_learned(**{location: leaf}, **others).mean.sum(), leaf)
        # A location that a guide keeps by its logarithm has that chain's factor.
        factor = leaf.detach() if location != "log_alpha" else torch.ones(1)
        torch.testing.assert_close(slope, (expected * factor)[0])
    assert report.mean.shape == (len(NAMES),)


@pytest.mark.parametrize("name", ["a/b", "keys"])
def test_exact_gradient_of_any_site_name(name):
    """Two prices, without data: the derivative of the price of an open gate."""

    def model():
        pyro.sample(name, HardConcrete(torch.zeros(1)).to_event(1))

    guide = AutoGate(model, init_active_prob=0.5, init_jitter=0.0)
    guide()
    torch.testing.assert_close(exact_gradient(L0_ELBO("l0", lam=2.0), model, guide), torch.tensor([0.5]))
