"""Models of networks, and shrinkers of them."""

import pyro
import pyro.distributions as dist
import torch
from torch import nn

from pyro_l0.compaction import Shrinker
from pyro_l0.infer import AutoGate
from pyro_l0.nn.gate import name_gates


class Model(nn.Module):
    """A network under an attribute, as in a Pyro model; labels are observed where there are any.

    Gates are named after their paths in it.
    """

    def __init__(self, net):
        super().__init__()
        self.net = net
        name_gates(self)

    def forward(self, x, y=None):
        logits = self.net(x)
        if y is not None:
            with pyro.plate("data", len(x)):
                pyro.sample("y", dist.Categorical(logits=logits), obs=y)
        return logits


def started(net, x, optimiser=torch.optim.Adam, **options):
    """A model of a network, its guide, an optimiser of both, and a shrinker that waits for one call."""
    model = Model(net)
    guide = AutoGate(model)
    guide(x)
    trained = optimiser([*model.parameters(), *guide.parameters()], 0.1)
    return model, guide, trained, Shrinker(net, guide, x, trained, patience=1, **options)


def set_gates(guide, site, units, value):
    """Open some gates for certain, or close them."""
    with torch.no_grad():
        guide.sites[site.replace(".", "/")]["log_alpha"][list(units)] = value
