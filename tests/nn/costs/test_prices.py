"""Group sizes, tied weights and refusals of the counts."""

import itertools

import pytest
import torch
from torch import nn

from pyro_l0.nn import L0Gate, NetworkCost
from pyro_l0.nn.square_norms import square_norms


class Shaped(nn.Module):
    """Features, made into a shape in which a layer reads them."""

    def __init__(self, shape, *layers):
        super().__init__()
        self.shape, self.gate, self.layers = shape, L0Gate(layers[0].in_features), nn.Sequential(*layers[1:])

    def forward(self, x):
        return self.layers(self.gate(x).view(x.size(0), *self.shape))


def test_gates_in_front_of_features_that_become_maps_have_a_price():
    """A feature is read by its map's kernels, of all places; in a map of one place alone it is the map."""
    for places, net in itertools.product(((2, 3), (1, 1)), ("unflatten", "view")):
        size, conv = 4 * places[0] * places[1], nn.Conv2d(4, 5, 3, padding=1)
        if net == "unflatten":
            network = nn.Sequential(nn.Linear(7, size), nn.ReLU(), L0Gate(size), nn.Unflatten(1, (4, *places)), conv)
        else:
            network = nn.Sequential(nn.Linear(7, size), Shaped((4, *places), nn.Linear(size, 1), conv))
        cost = NetworkCost(network, torch.randn(3, 7))
        (name,) = cost.group_sizes
        assert cost.group_sizes == {name: 5 * 9.0}
        assert cost.filter_sizes == {name: 7.0}
        norms = square_norms(network, torch.randn(3, 7))
        columns = conv.weight.square().sum([0, 2, 3])
        torch.testing.assert_close(norms[name](), columns.repeat_interleave(places[0] * places[1]))
        torch.testing.assert_close(norms.together([name]), norms[name]())


def test_group_sizes_of_gates_that_nothing_reads_are_refused():
    """Such as a gate of the outputs; what else is counted stays."""
    network = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), L0Gate(3), nn.Linear(3, 2), L0Gate(2), nn.BatchNorm1d(2))
    cost = NetworkCost(network, torch.randn(2, 4))
    with pytest.raises(ValueError, match=r"layers that read the units of '4', but .* depends on none.*group_size"):
        _ = cost.group_sizes
    assert cost.filter_sizes == {"2": 4.0, "4": 3.0}
    assert cost.weights({"2": torch.tensor([1.0, 0.0, 1.0]), "4": torch.tensor([1.0, 0.0])}).item() == 4 * 2 + 2 * 1


class Tied(nn.Module):
    """The same weight in two or three layers, with gates around them."""

    def __init__(self, shared_gate, uses=2):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(uses))
        for layer in self.layers[1:]:
            layer.weight = self.layers[0].weight
        gate = L0Gate(3)
        self.gates = nn.ModuleList(gate if shared_gate else L0Gate(3) for _ in range(uses))
        self.last = nn.Linear(3, 2)

    def forward(self, x):
        for gate, layer in zip(self.gates, self.layers, strict=True):
            x = torch.tanh(layer(gate(x)))
        return self.last(x)


@pytest.mark.parametrize("shared_gate", [False, True])
@pytest.mark.parametrize("uses", [2, 3])
def test_tied_weights_count_once(shared_gate, uses):
    """In totals, and of what is left the weights that any layer needs, by enumeration; macs count every use."""
    network = Tied(shared_gate, uses)
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


def test_tied_weights_that_a_gates_units_are_read_by_twice_count_once():
    """In group sizes and norms; weights of the same values that are not tied count twice."""

    class Twins(nn.Module):
        def __init__(self, tied):
            super().__init__()
            self.gate, self.a, self.b, self.last = L0Gate(3), nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 1)
            if tied:
                self.b.weight = self.a.weight
            else:
                self.b.load_state_dict(self.a.state_dict())

        def forward(self, x):
            x = self.gate(x)
            return self.last(torch.relu(self.a(x)) + torch.tanh(self.b(x)))

    for tied, times in ((True, 1), (False, 2)):
        network = Twins(tied)
        cost, norms = NetworkCost(network, torch.randn(2, 3)), square_norms(network, torch.randn(2, 3))
        assert cost.group_sizes == {"gate": 4.0 * times}
        assert cost.total_weights == 12 * times + 4
        assert cost.weights({"gate": torch.tensor([1.0, 0.0, 1.0])}).item() == 8 * times + 4
        # Both branches vary if the gate is open.
        assert cost.weights({"gate": torch.tensor([0.5, 0.0, 0.0])}).item() == 2 * times + 0.5 * 4
        torch.testing.assert_close(norms["gate"](), times * network.a.weight.square().sum(0))
