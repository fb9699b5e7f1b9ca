"""What the examples train by: the averages of the weights and the model's likelihood."""

import math

import pyro
import pyro.distributions as dist
import torch
from torch import nn

from common.averages import AVERAGE_POWER, Average
from common.networks import Classifier
from pyro_l0.infer import L0_ELBO, AutoGate
from pyro_l0.nn import Gate


def test_averages_reach_back_over_a_tenth_of_the_steps():
    """The weight of step s among t grows as s (s + 1) ... (s + k - 1); averages that are taken up again go on."""
    module = nn.Linear(2, 1).double()
    averaged = nn.Linear(2, 1).double()
    average = Average(averaged, module)
    for step in range(1, 501):
        if step == 200:
            average = Average(averaged, module, average.steps)
        nn.init.constant_(module.weight, step)
        average.update()
    weights = [math.prod(range(s, s + AVERAGE_POWER)) for s in range(1, 501)]
    mean = sum(s * weight for s, weight in enumerate(weights, 1)) / sum(weights)
    torch.testing.assert_close(averaged.weight, torch.full_like(averaged.weight, mean))
    torch.testing.assert_close(averaged.bias, module.bias)  # one value throughout
    assert 0.9 < mean / 500 < 0.92


def test_the_likelihood_is_that_of_a_plate():
    """The classifier's loss and gradients are those of a Categorical in a subsampled plate."""
    x, y = torch.rand(6, 4), torch.randint(0, 3, (6,))
    net = nn.Sequential(Gate(4), nn.Linear(4, 3))
    classifier = Classifier(net, 50)

    def plated(x, y):
        logits = classifier.net(x)
        with pyro.plate("data", 50, subsample=torch.arange(6)):
            pyro.sample("labels", dist.Categorical(logits=logits), obs=y)

    guide = AutoGate(classifier)
    guide(x, y)
    found = []
    for model in (classifier, plated):
        torch.manual_seed(0)
        loss = L0_ELBO("l0", lam=0.1).differentiable_loss(model, guide, x, y)
        parameters = [*net.parameters(), *guide.parameters()]
        found.append([loss, *torch.autograd.grad(loss, parameters)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
