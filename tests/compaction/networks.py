"""Models of networks, and shrinkers of them."""

import pyro
import pyro.distributions as dist
import torch
from torch import nn

from pyro_l0.compaction import Shrinker, compact
from pyro_l0.infer import AutoGate
from pyro_l0.nn import fix_gates
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


def cut(network, gates, x, *others, example=None, **tolerance):
    """What compaction makes of a network, which computes what the network with fixed gates does."""
    small, fixed = compact(network, gates, x if example is None else example).network, fix_gates(network, gates).eval()
    for inputs in (x, *others):
        inputs = inputs if isinstance(inputs, tuple) else (inputs,)
        torch.testing.assert_close(small(*inputs), fixed(*inputs), **tolerance)
    return small
