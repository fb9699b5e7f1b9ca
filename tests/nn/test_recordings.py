"""A recording of a network stands for an example of its calls, until the network changes."""

import inspect

import pytest
import torch
from torch import nn

from pyro_l0 import prune
from pyro_l0.callbacks.budget import NetworkBudget
from pyro_l0.compaction import Shrinker, compact, compact_zeros
from pyro_l0.compaction.apply import apply_plan
from pyro_l0.nn import L0Gate, NetworkCost, NetworkGates, gate_heads, insert_gates, suggest_gates
from pyro_l0.nn.engine import record
from pyro_l0.nn.square_norms import square_norms
from pyro_l0.pruning.latency import Latency
from tests.networks import Net

X = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
Z = {"2": torch.tensor([1.0, 0.0, 1.0, 0.0])}
FUNCTIONS = [
    NetworkCost, NetworkBudget, Latency, Shrinker, apply_plan, compact, compact_zeros, gate_heads, insert_gates, prune,
    square_norms, suggest_gates,
]  # fmt: skip


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def gated():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), L0Gate(4), nn.Linear(4, 2))


def pruned(network, example):
    data = [(torch.randn(4, 3), torch.randn(4, 2))] * 20
    return prune(network, nn.MSELoss(), data, example, 0.6, epochs=1, pretrained=False).report.left["macs"]


TAKING = {
    "suggest_gates": (plain, lambda net, x: str(suggest_gates(net, x))),
    "insert_gates": (plain, lambda net, x: str(insert_gates(net, suggest_gates(net, x), x))),
    "gate_heads": (plain, lambda net, x: str(gate_heads(net, {"2": 2}, x))),
    "NetworkCost": (gated, lambda net, x: NetworkCost(net, x).macs(Z)),
    "square_norms": (gated, lambda net, x: square_norms(net, x)["2"]()),
    "compact": (gated, lambda net, x: compact(net, Z, x).network(X)),
    "apply_plan": (gated, lambda net, x: apply_plan(net, compact(net, Z, X).plan, x)(X)),
    "compact_zeros": (plain, lambda net, x: compact_zeros(net, x).network(X)),
    "Shrinker": (gated, lambda net, x: Shrinker(net, NetworkGates(net), x, torch.optim.SGD(net.parameters())).step()),
    "NetworkBudget": (gated, lambda net, x: NetworkBudget(net, x, 0.5)._example),
    "prune": (plain, pruned),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TAKING)
def test_a_recording_is_accepted_wherever_an_example_is(name):
    """With the same answer; that of a copy is refused."""
    make, take = TAKING[name]
    network, other = make(), make()
    if name == "compact_zeros":
        for each in (network, other):
            each[0].weight.data[1] = 0.0
    torch.manual_seed(0)
    expected = take(network, X)
    torch.manual_seed(0)
    got = take(other, record(other, X))
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    else:
        assert got == expected
    with pytest.raises(ValueError, match=r"Expected a recording of the network itself, but .* another Sequential"):
        take(make(), record(make(), X))


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net.__setitem__(3, nn.Linear(4, 2)),
        lambda net: setattr(net[3], "weight", nn.Parameter(torch.ones(2, 4))),
        lambda net: setattr(net[3].weight, "data", torch.ones(2, 5)),
        lambda net: setattr(net[3], "in_features", 5),
        lambda net: setattr(net[3], "stride", (2, 2)),
        lambda net: setattr(net[3], "forward", torch.relu),
        lambda net: net[3].register_forward_hook(lambda module, args, output: output * 2),
        lambda net: net[3].double(),
    ],
)
def test_a_network_that_changed_since_is_refused(change):
    network = gated()
    recording = record(network, X)
    change(network)
    with pytest.raises(ValueError, match=r"Expected a recording of the network as it is now, but '3' has changed"):
        NetworkCost(network, recording)


def test_a_recording_of_training_too_is_no_example():
    """It has each call twice, whose multiply-adds would count twice."""
    network = gated()
    with pytest.raises(ValueError, match=r"Expected a recording of the network as it evaluates, but .* its training"):
        NetworkCost(network, record(network, X, with_training=True))
    with pytest.raises(TypeError, match=r"list of such calls, but got a Recording"):
        NetworkCost(network, [record(network, X)])


def test_a_recording_holds_while_the_network_trains():
    """Modes, numbers and who has the gates' posterior are no change of it."""
    network = gated()
    recording = record(network, X)
    NetworkGates(network)
    for _ in range(2):
        network.train()(X).sum().backward()
        torch.optim.SGD(network.parameters(), 0.1).step()
    assert record(network.eval(), recording) is recording


def counting(net, x):
    """Has a counter and its last mean, which are no settings, and a number of times, which is one."""
    net.calls += 1
    net.last = float(x.mean())
    return net.layer(x) * net.times


def test_what_calls_change_is_no_setting():
    """Counters, marks of torch, and a hook that belongs to no module."""
    network, seen = Net(counting, layer=nn.Linear(3, 2), calls=0, last=None, times=2), {}
    network.layer.register_forward_pre_hook(seen.setdefault)
    recording = record(network, X)
    network(X)
    network.layer.register_full_backward_hook(lambda *args: None)
    assert record(network, recording) is recording
    network.times = 3
    with pytest.raises(ValueError, match="'the network' has changed since"):
        record(network, recording)


def test_the_example_stands_behind_what_acts_on_the_network():
    """The network, its gates, heads, guide or plan, or what trains it; then the example; then all else."""
    acting = {"gates", "heads", "guide", "plan", "loss_fn", "loader"}
    for function in FUNCTIONS:
        parameters = inspect.signature(function).parameters
        positional = [name for name, x in parameters.items() if x.kind is x.POSITIONAL_OR_KEYWORD]
        before, behind = (positional[: positional.index("example")], positional[positional.index("example") + 1 :])
        assert before[0] == "network", function
        assert acting.issuperset(before[1:]), function
        assert acting.isdisjoint(behind), function
