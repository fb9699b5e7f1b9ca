"""Prices whose names are not those of the guide."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_l0.infer import L0_ELBO, AutoGate
from pyro_l0.nn import Gate, NetworkCost


class Model(nn.Module):
    """A regression by a network."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), Gate(4), nn.Linear(4, 1))

    def forward(self, x):
        mean = self.net(x).squeeze(-1)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=x[:, 0])


def test_cost_that_was_read_before_the_guide_says_so():
    """Gates without a name go by their path in the network alone; after the guide's call they have the model's."""
    model, x = Model(), torch.randn(5, 3)
    before, guide = NetworkCost(model.net, x).group_sizes, AutoGate(model)
    guide(x)
    with pytest.raises(ValueError, match=r"\['net\.2'\], but got '2'; call the guide before NetworkCost"):
        L0_ELBO("l0", lam=0.1, group_size=before)(model, guide)(x)
    L0_ELBO("l0", lam=0.1, group_size=NetworkCost(model.net, x).group_sizes)(model, guide)(x)
