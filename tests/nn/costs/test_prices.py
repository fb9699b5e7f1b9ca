"""Group sizes, tied weights and refusals of the counts."""

import itertools

import pytest
import torch
from torch import nn

from pyro_l0.nn import L0Gate, NetworkCost
from pyro_l0.nn.square_norms import square_norms
from tests.networks import Dense, Net


@pytest.mark.parametrize("places", [(2, 3), (1, 1)])
@pytest.mark.parametrize("how", ["unflatten", "view"])
def test_gates_in_front_of_features_that_become_maps_have_a_price(places, how):
    """A feature is read by its map's kernels, of all places; in a map of one place alone it is the map."""
    size, conv = 4 * places[0] * places[1], nn.Conv2d(4, 5, 3, padding=1)
    view = Net(lambda net, x: x.view(x.size(0), *net.shape), shape=(4, *places))
    shaped = nn.Unflatten(1, (4, *places)) if how == "unflatten" else view
    network = nn.Sequential(nn.Linear(7, size), nn.ReLU(), L0Gate(size), shaped, conv)
    cost, norms = NetworkCost(network, torch.randn(3, 7)), square_norms(network, torch.randn(3, 7))
    assert cost.group_sizes == {"2": 5 * 9.0}
    assert cost.filter_sizes == {"2": 7.0}
    columns = conv.weight.square().sum([0, 2, 3])
    torch.testing.assert_close(norms["2"](), columns.repeat_interleave(places[0] * places[1]))
    torch.testing.assert_close(norms.together(["2"]), norms["2"]())


def test_group_sizes_of_gates_that_nothing_reads_are_refused():
    """Such as a gate of the outputs; what else is counted stays."""
    network = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), L0Gate(3), nn.Linear(3, 2), L0Gate(2), nn.BatchNorm1d(2))
    cost = NetworkCost(network, torch.randn(2, 4))
    with pytest.raises(ValueError, match=r"layers that read the units of '4', but .* depends on none.*group_size"):
        _ = cost.group_sizes
    assert cost.filter_sizes == {"2": 4.0, "4": 3.0}
    assert cost.weights({"2": torch.tensor([1.0, 0.0, 1.0]), "4": torch.tensor([1.0, 0.0])}).item() == 4 * 2 + 2 * 1


def tied_layers(shared_gate, uses=2):
    """The same weight in two or three layers, with gates around them."""

    def forward(net, x):
        for gate, layer in zip(net.gates, net.layers, strict=True):
            x = torch.tanh(layer(gate(x)))
        return net.last(x)

    layers, gate = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(uses)), L0Gate(3)
    for layer in layers[1:]:
        layer.weight = layers[0].weight
    gates = nn.ModuleList(gate if shared_gate else L0Gate(3) for _ in range(uses))
    return Dense(forward, layers=layers, gates=gates, last=(3, 2))


@pytest.mark.parametrize("shared_gate", [False, True])
@pytest.mark.parametrize("uses", [2, 3])
def test_tied_weights_count_once(shared_gate, uses):
    """In totals, and of what is left the weights that any layer needs, by enumeration; macs count every use."""
    network = tied_layers(shared_gate, uses)
    cost = NetworkCost(network, torch.randn(2, 3))
    assert (cost.total_weights, cost.total_macs) == (9 + 6, 9 * uses + 6)
    names = list(cost.filter_sizes)
    for bits in itertools.product((0.0, 1.0), repeat=3 * len(names)):
        active = {name: torch.tensor(bits[3 * i : 3 * i + 3]) for i, name in enumerate(names)}
        if not all(value.any() for value in active.values()):
            continue  # what nothing reaches is not computed
        # One weight has one set of inputs: those that any layer reads. Its last use writes all units.
        read = torch.stack(list(active.values())).amax(0)
        assert cost.weights(active).item() == 3 * read.sum() + 6
    probs = {name: torch.full((3,), 0.5, requires_grad=True) for name in names}
    cost.weights(probs).backward()
    assert all(prob.grad.min() > 0 for prob in probs.values())


@pytest.mark.parametrize(("tied", "times"), [(True, 1), (False, 2)])
def test_tied_weights_that_a_gates_units_are_read_by_twice_count_once(tied, times):
    """In group sizes and norms; weights of the same values that are not tied count twice."""

    def forward(net, x):
        x = net.gate(x)
        return net.last(torch.relu(net.a(x)) + torch.tanh(net.b(x)))

    network = Dense(forward, gate=3, a=(3, 4), b=(3, 4), last=(4, 1))
    network.b.load_state_dict(network.a.state_dict())
    if tied:
        network.b.weight = network.a.weight
    cost, norms = NetworkCost(network, torch.randn(2, 3)), square_norms(network, torch.randn(2, 3))
    assert cost.group_sizes == {"gate": 4.0 * times}
    assert cost.total_weights == 12 * times + 4
    assert cost.weights({"gate": torch.tensor([1.0, 0.0, 1.0])}).item() == 8 * times + 4
    # Both branches vary if the gate is open.
    assert cost.weights({"gate": torch.tensor([0.5, 0.0, 0.0])}).item() == 2 * times + 0.5 * 4
    torch.testing.assert_close(norms["gate"](), times * network.a.weight.square().sum(0))
