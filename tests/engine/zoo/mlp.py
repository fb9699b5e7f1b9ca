"""Dense networks: what stands behind a gate is a matrix product, and what stands before it nearly anything."""

import torch
import torch.nn.functional as F
from torch import nn

from pyro_l0.nn import L0Gate
from tests.engine.zoo.entry import Entry
from tests.networks import Net


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
        if h.sum() > 0:
            h = h * 2
        return net.output(h)

    return Net(forward, hidden=nn.Linear(6, 10), gate=L0Gate(10), output=nn.Linear(10, 2))


def swi_glu(size=8, hidden=12):
    """Two projections that multiply each other."""
    return Net(
        lambda net, x: net.output(net.gate(F.silu(net.gated(x)) * net.linear(x))),
        gated=nn.Linear(size, hidden, bias=False),
        linear=nn.Linear(size, hidden, bias=False),
        gate=L0Gate(hidden),
        output=nn.Linear(hidden, size, bias=False),
    )


def glu():
    """The same by one projection, whose halves ``F.glu`` multiplies."""
    return Net(
        lambda net, x: net.output(net.gate(F.glu(net.hidden(x), -1))),
        hidden=nn.Linear(8, 20),
        gate=L0Gate(10),
        output=nn.Linear(10, 3),
    )


def maxout():
    """The largest of three pieces a unit: all pieces of a closed one leave."""
    return Net(
        lambda net, x: net.output(net.gate(net.pieces(x).view(len(x), -1, 3).amax(-1))),
        pieces=nn.Linear(8, 30),
        gate=L0Gate(10),
        output=nn.Linear(10, 3),
    )


class SoftExperts(nn.Module):
    """A mixture of experts that are all asked, with gates on experts and on the units that all of them have."""

    def __init__(self, size=6, hidden=8, experts=4):
        super().__init__()
        self.router = nn.Linear(size, experts)
        self.inner = nn.Parameter(torch.randn(experts, size, hidden))
        self.outer = nn.Parameter(torch.randn(experts, hidden, size))
        self.expert_gate = L0Gate(experts)
        self.unit_gate = L0Gate(hidden)

    def forward(self, x):
        share = self.expert_gate(torch.softmax(self.router(x), -1))
        hidden = self.unit_gate(torch.tanh(torch.einsum("bi,eih->beh", x, self.inner)))
        return torch.einsum("be,beh,eho->bo", share, hidden, self.outer)


def _rows(*sizes):
    return lambda batch: torch.randn(batch, *sizes)


ENTRIES = {
    "mlp": Entry(mlp, _rows(8), shapes={"0.weight": (8, 8), "3.weight": (6, 8), "6.weight": (3, 6), "3.bias": (6,)}),
    "inputs_and_log_softmax": Entry(inputs_and_log_softmax, _rows(8), shapes={"1.weight": (3, 4), "4.weight": (4, 3)}),
    "batch_norm": Entry(batch_norm, _rows(8), shapes={"0.weight": (5, 8), "3.weight": (5,), "4.weight": (3, 5)}),
    "drops_units": Entry(drops_units, _rows(8), shapes={"layers.3.weight": (6, 8)}),
    "data_dependent": Entry(data_dependent, _rows(6), shapes={"hidden.weight": (5, 6)}),
    "swiglu": Entry(swi_glu, _rows(8), shapes={"gated.weight": (6, 8), "linear.weight": (6, 8)}),
    "glu": Entry(glu, _rows(8), shapes={"hidden.weight": (10, 8), "output.weight": (3, 5)}),
    "maxout": Entry(maxout, _rows(8), shapes={"pieces.weight": (15, 8), "output.weight": (3, 5)}),
    "soft_experts": Entry(
        # The router's softmax is over all experts, so that its rows stay.
        SoftExperts, _rows(6), shapes={"inner": (2, 6, 4), "outer": (2, 4, 6), "router.weight": (4, 6)},
    ),
}  # fmt: skip
