"""A number of active gates for each example, which a network computes."""

import math

import pyro
import pytest
import torch
from torch import nn

from pyro_l0 import HardConcrete
from pyro_l0.infer import L0_ELBO, factor
from pyro_l0.infer.control.sparsity_target import ActiveTarget
from pyro_l0.nn import L0Gate


@pytest.mark.parametrize("active", [2.25, 4.15, 5.45])
@pytest.mark.parametrize("family", ["hard_concrete", "rectified_normal"])
def test_the_gradient_that_is_added(family, active):
    """The expected number times the multiplier, e^-5 times the ratio of root mean squares, and what the batch says."""
    torch.manual_seed(1)
    weight = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    x, factors = torch.randn(2, 5, 4).double(), torch.randn(2, 5, 6).double()
    target = ActiveTarget(active, steps=100)
    (name, *_), grads = L0Gate.from_logits(x @ weight, family=family).distribution.learned, []
    for is_added in (True, False):
        gates = L0Gate.from_logits(x @ weight, family=family).distribution
        location = getattr(gates, name)
        loss, expected = (gates.active_prob * factors).sum(), gates.active_prob.sum(-1).mean()
        if is_added:
            target.add_gradient(gates)
            grads.append(torch.autograd.grad(loss, weight)[0])
        else:
            of_loss, of_number = (torch.autograd.grad(y, location, retain_graph=True)[0] for y in (loss, expected))
            multiplier = math.exp(-5) * (of_loss.square().mean() / of_number.square().mean()).sqrt()
            number = (gates.test_gate != 0).sum().item() / 10
            factor = math.exp(max(-3.0, min(3.0, 10 * math.log(number / active))))
            grads.append(torch.autograd.grad(loss + multiplier * factor * expected, weight)[0])
    assert target.multiplier.item() == pytest.approx(multiplier.item(), rel=1e-4)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-7)


def superposition(number, generator):
    """Sums of some of 24 features, 3 in the mean, with directions in 12 dimensions."""
    directions = nn.functional.normalize(torch.randn(12, 24, generator=torch.Generator().manual_seed(0)), dim=0)
    features = (torch.rand(number, 24, generator=generator) < 3 / 24) * (
        torch.rand(number, 24, generator=generator) + 1
    )
    return directions, features @ directions.T


class Autoencoder(nn.Module):
    def __init__(self, directions, scale=1.0):
        super().__init__()
        self.encoder = nn.Linear(12, 24)
        self.decoder = nn.Linear(24, 12)
        self.encoder.load_state_dict({"weight": directions.T.clone(), "bias": torch.full((24,), -0.5)})
        self.scale = scale

    def forward(self, x):
        before = self.encoder(x)
        gate = L0Gate.from_logits(10 * before).train(self.training)
        return self.scale * (self.decoder(gate((before + 0.5).relu())) - x).square().sum(1).mean(), gate


def train(network, target, optimiser, generator, steps, parts=1):
    for _ in range(steps):
        optimiser.zero_grad()
        for x in superposition(128, generator)[1].to(network.decoder.weight).chunk(parts):
            loss, gate = network(x)
            target.add_gradient(gate.distribution)
            loss.backward()
        optimiser.step()
        target.ascend()


def start(active, steps, scale=1.0, seed=0, double=False):
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    network = Autoencoder(superposition(1, generator)[0], scale).to(torch.float64 if double else torch.float32)
    return network, ActiveTarget(active, steps=steps), torch.optim.Adam(network.parameters(), 0.01), generator


@pytest.mark.parametrize(("active", "parts"), [(1, 1), (3, 1), (3, 2), (4.5, 1)])
def test_held_out_examples_have_the_number(active, parts):
    """To four percent; the count of a step has a standard error of five percent."""
    network, target, optimiser, generator = start(active, 400)
    train(network, target, optimiser, generator, 400, parts)
    gate = network.eval()(superposition(5000, generator)[1])[1]
    assert (gate.test_gate != 0).sum(1).double().mean().item() == pytest.approx(active, rel=0.04)
    assert gate.active_prob.sum(1).mean().item() == pytest.approx(active, rel=0.15)


def test_the_scale_of_the_loss_does_not_matter():
    """Adam's steps are the same, whose epsilon is far below these gradients."""
    networks = []
    for scale in (1.0, 1000.0):
        network, target, optimiser, generator = start(3, 60, scale, double=True)
        train(network, target, optimiser, generator, 60)
        networks.append(network)
    for a, b in zip(*(x.parameters() for x in networks), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_a_run_that_is_resumed():
    found = []
    for is_resumed in (False, True):
        network, target, optimiser, generator = start(3, 40)
        train(network, target, optimiser, generator, 25)
        if is_resumed:
            state = target.state_dict()
            target = ActiveTarget(3, steps=40)
            target.load_state_dict(state)
        train(network, target, optimiser, generator, 15)
        found.append((network.encoder.weight.detach(), target.multiplier, target.step))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]


def test_a_guide_of_pyro():
    """SVI's loss is a sum; evaluation leaves the target alone. Batches of 64 are off by up to six percent."""
    pyro.set_rng_seed(0)
    masks, target = nn.Linear(3, 8), ActiveTarget(2, steps=300)

    def model(x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", HardConcrete.from_active_prob(torch.full((8,), 0.9)).to_event(1))
            factor("y", -((z - 1) * torch.arange(1.0, 9)).square().sum(1))

    def guide(x):
        gates = HardConcrete.from_logits(pyro.module("masks", masks)(x))
        target.add_gradient(gates)
        with pyro.plate("data", len(x)):
            pyro.sample("z", gates.to_event(1))

    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), L0_ELBO("l0"))
    for _ in range(300):
        svi.step(torch.randn(64, 3))
        target.ascend()
    x = torch.randn(2000, 3)
    assert (HardConcrete.from_logits(masks(x)).test_gate != 0).sum().item() / 2000 == pytest.approx(2, rel=0.1)
    svi.evaluate_loss(x)
    with pytest.raises(ValueError, match="Expected a backward pass through the gates in every step"):
        target.ascend()
