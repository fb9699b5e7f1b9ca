"""Bias and noise of gradients, and the exact one against moments."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_l0 import BernoulliGate, HardConcrete, HardKumaraswamy
from pyro_l0.diagnostics.gradients import measure_gradient
from pyro_l0.infer import L0_ELBO, AutoGate, AutoSpikeSlab


def two_gates(family):
    """A model of two gates and a batch, and a guide of a family."""

    def model(x):
        z = pyro.sample("z", HardConcrete(torch.zeros(2, dtype=torch.float64)).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ z, 1.0), obs=x @ torch.tensor([1.0, 0.2], dtype=torch.float64))

    torch.manual_seed(92)
    x = torch.randn(6, 2, dtype=torch.float64)
    guide = AutoGate(model, family, init_active_prob=0.7)
    guide(x)
    return model, guide, x


def test_bias_is_seen():
    """Straight-through draws of a model that is not linear in its gates."""
    model, guide, x = two_gates(BernoulliGate)
    pyro.set_rng_seed(94)
    report = measure_gradient(L0_ELBO("l0", estimator="straight_through"), model, guide, x, draws=600, exact=True)
    assert (report.bias.abs() > 8 * report.standard_error).all()


def test_exact_gradient_against_moments():
    """E[0.5 r^2] is a quadratic in the gates' first two moments."""
    model, guide, x = two_gates(BernoulliGate)
    elbo = L0_ELBO("l0", lam=0.4, estimator="arm")
    gradient = measure_gradient(elbo, model, guide, x, draws=2, exact=True).exact
    gate = guide.posterior()["z"]
    residual = x @ (gate.mean - torch.tensor([1.0, 0.2], dtype=torch.float64))
    nll = 0.5 * (residual**2).sum() + 0.5 * ((x**2) @ gate.variance).sum()
    (expected,) = torch.autograd.grad(nll + 0.4 * gate.active_prob.sum(), guide.locations())
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


def test_refusals():
    model, guide, x = two_gates(HardConcrete)
    elbo = L0_ELBO("l0")
    with pytest.raises(ValueError, match="at most 15 BernoulliGates and no other site for exact, but got z: "):
        measure_gradient(elbo, model, guide, x, exact=True)
    with pytest.raises(ValueError, match="draws of at least 2, but got 1"):
        measure_gradient(elbo, model, guide, x, draws=1)

    def slabs():
        with pyro.plate("weights", 2):
            z = pyro.sample("z", BernoulliGate(logits=0.0))
            return z * pyro.sample("w", dist.Normal(0.0, 1.0))

    both = AutoSpikeSlab(slabs, slab={"w": "z"})
    both()
    with pytest.raises(ValueError, match=r"no other site for exact, but got z: .*, w: "):
        measure_gradient(L0_ELBO("spike_slab", slab={"w": "z"}, estimator="arm"), slabs, both, exact=True)


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
    report = measure_gradient(L0_ELBO("l0"), model, guide, draws=100)  # so that no variance is 0
    location = next(iter(family.learned))
    for gate, slope in zip(guide.posterior().values(), (report.variance / report.scaled_variance).sqrt(), strict=True):
        leaf = getattr(gate, location).detach().requires_grad_()
        others = {name: getattr(gate, name).detach() for name in family.learned if name != location}
        (expected,) = torch.autograd.grad(gate.with_learned(**{location: leaf}, **others).mean.sum(), leaf)
        # A location that a guide keeps by its logarithm has that chain's factor.
        factor = leaf.detach() if location != "log_alpha" else torch.ones(1)
        torch.testing.assert_close(slope, (expected * factor).abs()[0])
    assert report.mean.shape == (len(NAMES),)
