"""Weights and multiply-adds against counts by hand, by enumeration and by torch's own counter."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pyro_l0.nn import L0Gate, NetworkCost
from pyro_l0.nn.gate import gate_names
from pyro_l0.nn.square_norms import square_norms
from tests.networks import Dense


def mlp(sizes, gated=True):
    layers = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        layers += ([L0Gate(fan_in)] if gated else []) + [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def test_the_papers_counts():
    """MLP 784-300-100 has 266,200 weights; 219-214-100 leaves 69,266 (Table 1)."""
    cost = NetworkCost(mlp((784, 300, 100, 10)), torch.zeros(1, 784))
    assert cost.total_weights == cost.total_macs == 266_200
    assert cost.group_sizes == {"0": 300.0, "3": 100.0, "6": 10.0}
    kept = {name: (torch.arange(n) < k).float() for name, n, k in (("0", 784, 219), ("3", 300, 214), ("6", 100, 100))}
    assert cost.weights(kept).item() == 69_266


def test_expectation_is_exact():
    """The expected count under independent gates, by enumerating every state of a small network."""
    cost = NetworkCost(mlp((3, 2, 2)), torch.zeros(1, 3))
    probs = {"0": torch.tensor([0.2, 0.9, 0.5]), "3": torch.tensor([0.3, 0.7])}
    expected = 0.0
    for state in itertools.product((0.0, 1.0), repeat=5):
        gates = {"0": torch.tensor(state[:3]), "3": torch.tensor(state[3:])}
        weight = 1.0
        for name, p in probs.items():
            weight *= torch.where(gates[name] > 0, p, 1 - p).prod().item()
        expected += weight * cost.weights(gates).item()
    assert cost.weights(probs).item() == pytest.approx(expected, rel=1e-6)  # float32


def test_square_norms_of_several_sites():
    """Side by side in the order asked for, with the gradient of the separate norms, flattened maps included."""
    torch.manual_seed(7)
    plain = mlp((3, 4, 2))
    first = nn.Conv2d(1, 2, 2), L0Gate(2, dim=1)
    maps = nn.Sequential(*first, nn.Conv2d(2, 3, 2), nn.Flatten(), L0Gate(12), nn.Linear(12, 2))
    flat = nn.Sequential(*first, nn.Flatten(), nn.Linear(18, 2))
    both = nn.Sequential(*flat[:3], L0Gate(18), flat[3])  # one layer behind two sites
    image = torch.zeros(1, 1, 4, 4)
    for net, x in ((plain, torch.zeros(1, 3)), (maps, image), (flat, image), (both, image)):
        norms = square_norms(net, x)
        names = list(reversed(norms))
        together = norms.together(names)
        alone = torch.cat([norms[name]() for name in names])
        torch.testing.assert_close(together, alone)
        scale, weights = torch.rand_like(alone), [p for p in net.parameters() if p.dim() > 1]
        torch.testing.assert_close(
            *(torch.autograd.grad((scale * y).sum(), weights, materialize_grads=True) for y in (together, alone))
        )


class MovedTensors(TorchDispatchMode):
    """Counts the operations that take tensors of several devices, or copy from one to another."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor) and x.dim()]
        self.count += len({x.device for x in tensors}) > 1
        return result


@pytest.mark.parametrize("residual", [False, True])
def test_a_count_moves_nothing_to_its_device_twice(residual):
    """The host would wait for it in every step; the meta device stands for any but the CPU."""

    def forward(net, x):  # two gated branches that meet in a sum
        h = net.first(F.relu(net.enter(x)))
        return net.leave(h + net.second(F.relu(net.inner(h))))

    if residual:
        net, example = Dense(forward, enter=(5, 4), first=4, inner=(4, 4), second=4, leave=(4, 2)), torch.zeros(1, 5)
    else:
        net = nn.Sequential(nn.Conv2d(1, 2, 2), L0Gate(2, dim=1), nn.Flatten(), L0Gate(8), nn.Linear(8, 3))
        example = torch.zeros(1, 1, 3, 3)
    cost, norms = NetworkCost(net, example), square_norms(net, example)
    net.to("meta")
    active = {name: torch.rand(gate.size, device="meta", requires_grad=True) for name, gate in gate_names(net).items()}
    counts = []
    for _ in range(3):
        with MovedTensors() as moved:
            (cost.macs(active) + norms.together(list(norms)).sum()).backward()
        counts.append(moved.count)
    assert counts[0] > 0
    assert counts[1:] == [0, 0]


@pytest.mark.parametrize(
    ("net", "macs"),
    [
        (nn.Sequential(nn.ConvTranspose1d(3, 2, 1)), 3 * 2 * 2),
        (nn.Sequential(nn.Conv1d(3, 3, 1, groups=3)), 3 * 2),
        (nn.Sequential(L0Gate(3, dim=1), nn.Softmax(-1), nn.Linear(2, 5)), 3 * 2 * 5),
    ],
    ids=repr,
)
def test_layers_of_all_kinds_are_counted(net, macs):
    assert NetworkCost(net, torch.zeros(4, 3, 2)).total_macs == macs


@pytest.mark.parametrize(
    "look_up",
    [
        lambda x: x[:, torch.tensor([2, 0])],
        lambda x: x.index_select(1, torch.tensor([2, 0])),
        lambda x: x.gather(1, torch.tensor([2, 0]).view(1, 2, 1).expand(len(x), 2, 3)),
        lambda x: x[torch.arange(len(x)), torch.tensor([1, 0])],
    ],
)
def test_units_that_are_looked_up_leave_with_their_gates(look_up):
    """The numbers of the places, which are no zeros, do not make closed units count."""
    network = Dense(lambda net, x: net.two(look_up(net.gate(net.one(x)))), one=(4, 3), gate=3, two=(3, 2))
    cost = NetworkCost(network, torch.zeros(2, 5, 4))
    assert cost.weights({"gate": torch.tensor([1.0, 0.0, 0.0])}) == 4 + 2
    assert str(cost.report()) == "every unit leaves with its gate"
