"""An analysis of a network, whose answer is certified by the compacted network."""

import torch
from torch import nn

from pyro_l0.compaction import compact
from pyro_l0.nn.engine import analyse, record
from pyro_l0.nn.gate import name_gates
from tests.networks import Dense


def between(operation, *layers, second=False):
    """An operation between eight gated units and the layer that reads what it makes."""

    def forward(net, x):
        h = net.gate(net.one(x))
        return net.out(operation(*([h, net.other(x)] if second else [h]), *net.layers))

    others = {"other": (6, 8)} if second else {}
    network = Dense(forward, one=(6, 8), gate=8, layers=nn.ModuleList(layers), **others, out=nn.LazyLinear(3))
    network(torch.ones(2, 6))
    return network


def close_some(network, fraction=0.5, seed=0):
    """Closed gates by site, and values for all, some of them between 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    closed, values = {}, {}
    for site, gate in name_gates(network).items():
        order = torch.randperm(gate.size, generator=generator)
        closed[site] = torch.zeros(gate.size, dtype=torch.bool)
        closed[site][order[: round(gate.size * fraction)]] = True
        value = 0.3 + 0.7 * torch.rand(gate.size, generator=generator, dtype=torch.float64)
        values[site] = value.masked_fill(closed[site], 0.0)
    return closed, values


def shake(network, seed=0):
    """Random numbers in the place of the ones and zeros that layers begin with."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*network.parameters(), *network.buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(0.3 + 0.5 * torch.rand(tensor.shape, generator=generator, dtype=torch.float64))
                if tensor.dim() > 1:
                    tensor.sub_(0.55)
    return network


def examine(network, example, closed=None, fraction=0.5, folds=False):
    """Close gates, certify what compaction makes of the answer, and return the analysis."""
    network = shake(network.double().eval())
    drawn, values = close_some(network, fraction)
    if closed is None:
        closed = drawn
    else:
        values = {site: (~mask).double() for site, mask in closed.items()}
    assert compact(network, values, example).certificate <= 1e-9
    return analyse(record(network, example), closed, values, folds=folds)
