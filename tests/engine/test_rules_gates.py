"""The rule of gates: where a unit ends in front of one, begins behind it, or both."""

import torch
from torch import nn

from pyro_l0.nn import L0Gate
from pyro_l0.nn.engine import analyse, record
from pyro_l0.nn.gate import name_gates
from tests.engine.exactness import examine
from tests.networks import Dense, Net


def inputs(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_a_gate_that_is_drawn_for_ones():
    """A gate of ones is a number of the whole block, which closes it."""

    def forward(net, x):
        return x + net.gate(x.new_ones(1, 1)) * net.two(torch.relu(net.one(x)))

    analysis = examine(Dense(forward, one=(6, 5), two=(5, 6), gate=1), inputs(2, 6), {"gate": torch.tensor([True])})
    assert len(analysis.remaining["one.weight"][0]) == 1


def test_calls_of_one_gate_have_one_size():
    """One gate at two places: a unit is kept in front of both if one needs it."""

    def forward(net, x):
        plain = net.one(x)
        return net.out(net.gate(plain)) + net.out(net.gate(net.two(x))) + plain.sum(-1, keepdim=True)

    network = Dense(forward, one=(6, 4), two=(6, 4), gate=4, out=(4, 2))
    analysis = examine(network, inputs(2, 6), {"gate": torch.tensor([True, False, False, True])})
    assert analysis.gates["gate"].front.tolist() == [0, 1, 2, 3]
    assert analysis.gates["gate"].behind.tolist() == [1, 2]
    assert len(analysis.remaining["two.weight"][0]) == 4


def test_constants_that_stay_are_still_computed():
    """With all gates closed the output is constant; what stays since no dimension may be empty is still right."""
    branch = nn.Sequential(nn.Linear(4, 4, bias=False), nn.LayerNorm(4), nn.Linear(4, 4, bias=False))
    residual = Net(lambda net, x: x + net.branch(x), branch=branch)
    layers = [nn.Linear(6, 4), L0Gate(4), residual, nn.LayerNorm(4), nn.Linear(4, 3)]
    examine(nn.Sequential(*layers), inputs(2, 6), fraction=1.0, folds=True)
    layers = [nn.Linear(6, 4), L0Gate(4), nn.BatchNorm1d(4), nn.Linear(4, 3)]
    analysis = examine(nn.Sequential(*layers), inputs(2, 6), fraction=1.0, folds=True)
    assert [len(x) for x in analysis.remaining["3.weight"]] == [3, 1]
    assert len(analysis.folds[0].units) == 3


def test_constants_at_open_gates_vary_unless_the_gates_are_fixed():
    """A constant that an open gate multiplies leaves into a bias only where the gate's value is given."""

    def forward(net, x):
        return net.out(net.second(net.gate(net.one(x)).sigmoid()))

    network = Dense(forward, one=(6, 4), gate=4, second=4, out=(4, 2)).double()
    name_gates(network)
    closed = {"gate": torch.tensor([True, True, False, False]), "second": torch.tensor([True, False, True, False])}
    recording = record(network, inputs(2, 6))
    fixed = analyse(recording, closed, {"gate": torch.ones(4), "second": torch.tensor([0.0, 0.5, 0.0, 1.0])})
    assert fixed.removed["second"].tolist() == [0, 1, 2]
    (fold,) = fixed.folds
    assert fold.units.tolist() == [1]
    assert fold.constant.tolist() == [0.25]  # sigmoid(0) / 2
    training = analyse(recording, closed)
    assert training.removed["second"].tolist() == [0, 2]
    assert not training.folds
    assert training.gates["second"].behind.tolist() == [1, 3]
