"""Dense networks: what stands behind a gate is a matrix product, and what stands before it nearly anything."""

import torch
import torch.nn.functional as F
from torch import nn

from pyro_l0.nn import L0Gate
from tests.engine.zoo.entry import Entry, normal
from tests.networks import Dense, Net


def mlp():
    return nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), L0Gate(16), nn.Linear(16, 12), nn.GELU(), L0Gate(12), nn.Linear(12, 3)
    )


def inputs_and_log_softmax():
    """Gates on the inputs, and a head that normalises."""
    return nn.Sequential(L0Gate(8), nn.Linear(8, 6), nn.Tanh(), L0Gate(6), nn.Linear(6, 4), nn.LogSoftmax(-1))


def batch_norm():
    """A constant that leaves a closed unit behind each normalisation."""
    layers = [nn.Linear(8, 10), nn.ReLU(), L0Gate(10), nn.BatchNorm1d(10), nn.Linear(10, 6), nn.BatchNorm1d(6)]
    return nn.Sequential(*layers, nn.Sigmoid(), L0Gate(6), nn.Linear(6, 2))


def drops_units():
    """Drops units of whole examples, in training mode alone."""

    def forward(net, x):
        for layer in net.layers:
            x = layer(x)
            if net.training and isinstance(layer, L0Gate):
                x = x * x.new_empty(len(x), 1).bernoulli_(0.9) / 0.9
        return x

    return Net(forward, layers=mlp())


def data_dependent():
    def forward(net, x):
        h = net.gate(F.relu(net.hidden(x)))
        return net.output(h * 2 if h.sum() > 0 else h)

    return Dense(forward, hidden=(6, 10), gate=10, output=(10, 2))


def swi_glu(size=8, hidden=12):
    """Two projections that multiply each other."""
    layers = {name: nn.Linear(size, hidden, bias=False) for name in ("gated", "linear")}

    def forward(net, x):
        return net.output(net.gate(F.silu(net.gated(x)) * net.linear(x)))

    return Dense(forward, gate=hidden, output=nn.Linear(hidden, size, bias=False), **layers)


def glu():
    """The same by one projection, whose halves ``F.glu`` multiplies."""
    return Dense(lambda net, x: net.output(net.gate(F.glu(net.hidden(x), -1))), hidden=(8, 20), gate=10, output=(10, 3))


def maxout():
    """The largest of three pieces a unit: all pieces of a closed one leave."""

    def forward(net, x):
        return net.output(net.gate(net.pieces(x).view(len(x), -1, 3).amax(-1)))

    return Dense(forward, pieces=(8, 30), gate=10, output=(10, 3))


def soft_experts(size=6, hidden=8, experts=4):
    """A mixture of experts that are all asked, with gates on experts and on the units that all of them have."""

    def forward(net, x):
        share = net.expert_gate(torch.softmax(net.router(x), -1))
        hidden = net.unit_gate(torch.tanh(torch.einsum("bi,eih->beh", x, net.inner)))
        return torch.einsum("be,beh,eho->bo", share, hidden, net.outer)

    sizes = {"inner": (experts, size, hidden), "outer": (experts, hidden, size)}
    weights = {name: nn.Parameter(torch.randn(size)) for name, size in sizes.items()}
    return Dense(forward, router=(size, experts), expert_gate=experts, unit_gate=hidden, **weights)


ENTRIES = {
    "mlp": Entry(mlp, normal(8), shapes={"0.weight": (8, 8), "3.weight": (6, 8), "6.weight": (3, 6), "3.bias": (6,)}),
    "inputs_and_log_softmax": Entry(inputs_and_log_softmax, normal(8), shapes={"1.weight": (3, 4), "4.weight": (4, 3)}),
    "batch_norm": Entry(batch_norm, normal(8), shapes={"0.weight": (5, 8), "3.weight": (5,), "4.weight": (3, 5)}),
    "drops_units": Entry(drops_units, normal(8), shapes={"layers.3.weight": (6, 8)}),
    "data_dependent": Entry(data_dependent, normal(6), shapes={"hidden.weight": (5, 6)}),
    "swiglu": Entry(swi_glu, normal(8), shapes={"gated.weight": (6, 8), "linear.weight": (6, 8)}),
    "glu": Entry(glu, normal(8), shapes={"hidden.weight": (10, 8), "output.weight": (3, 5)}),
    "maxout": Entry(maxout, normal(8), shapes={"pieces.weight": (15, 8), "output.weight": (3, 5)}),
    "soft_experts": Entry(
        # The router's softmax is over all experts, so that its rows stay.
        soft_experts, normal(6), shapes={"inner": (2, 6, 4), "outer": (2, 4, 6), "router.weight": (4, 6)},
    ),
}  # fmt: skip
