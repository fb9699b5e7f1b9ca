"""Several budgets at once: each holds in what torch counts on the network that was cut."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from pyro_l0.callbacks.budget import NetworkBudget
from pyro_l0.nn import L0Gate, insert_gates
from tests.pruning.networks import BATCHES, X, prune_with

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # few steps, an untrained network
# Of a convolution of 8 channels on 6 x 6 pixels and layers of 32 and 10 units, with their biases.
FULL = {"macs": 36 * 8 * 9 + 288 * 32 + 32 * 10, "parameters": 8 * 10 + 289 * 32 + 33 * 10}


def network():
    torch.manual_seed(3)
    convolution = nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*convolution, nn.Linear(288, 32), nn.ReLU(), nn.Linear(32, 10))


def counted(network):
    """Multiply-adds of an image by torch's counter of operations, and the sizes of the tensors, over all of them."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(X[:1])
    found = {"macs": counter.get_total_flops() / 2, "parameters": sum(p.numel() for p in network.parameters())}
    return {name: number / FULL[name] for name, number in found.items()}


@pytest.mark.parametrize(
    "limits",
    [{"macs": 0.3, "parameters": 0.5}, {"macs": 0.9, "parameters": 0.3}, {"macs": 0.3, "parameters": 0.9}],
)
def test_all_hold(limits):
    """The report says what is counted, as a share of the whole network."""
    assert counted(network()) == {"macs": 1.0, "parameters": 1.0}
    result = prune_with(network(), F.cross_entropy, BATCHES, X[:2], limits, epochs=4)
    left = counted(result.network)
    assert all(left[name] <= limit for name, limit in limits.items())
    assert dict(result.report.target.fraction) == pytest.approx(left, rel=1e-5)  # float32


def units(gates):
    return gates["4.1"].sum()


@pytest.mark.parametrize(
    ("budget", "cost", "words"),
    [
        ({"macs": 0.5}, "parameters", r"got \['macs'\] and none for \['parameters'\]"),
        ({"macs": 0.5}, {"units": units}, r"got \['macs'\] and none for \['units'\]"),
        ({"macs": 0.5}, units, r"got \['macs'\] and none for \['a function'\]; .* cost={name: cost}"),
        ({"macs": 0.5, "flops": 0.4}, "macs", r"of macs, weights, parameters, with a budget.*\['macs', 'flops'\]"),
    ],
)
def test_a_cost_without_a_budget_is_refused(budget, cost, words):
    """And a budget without a cost: nothing that was asked for is passed over. What the message advises is taken."""
    gated = insert_gates(network(), {"4": L0Gate(32)}, X[:2])
    for refused in (
        lambda: prune_with(network(), F.cross_entropy, BATCHES, X[:2], budget, cost=cost, epochs=4),
        lambda: NetworkBudget(gated, X[:2], budget, cost),
    ):
        with pytest.raises(ValueError, match=words):
            refused()
    NetworkBudget(gated, X[:2], {"macs": 0.5, "units": 0.5}, {"units": units})
