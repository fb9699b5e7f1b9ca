"""Units that stay, at least so many or a multiple of a number, and several budgets at once, which all hold."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from pyro_l0.callbacks.budget import NetworkBudget
from pyro_l0.nn import L0Gate, gate_heads, insert_gates
from pyro_l0.nn.gate import name_gates
from pyro_l0.pruning.insertion_points import gates_at_least, gates_in_step
from tests.pruning.networks import BATCHES, Mlp, ResidualCnn, VisionTransformer, X, prune_with, stopping

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # few steps, an untrained network


def run(network=None, budget=0.4, stop=None, epochs=2, **options):
    torch.manual_seed(3)
    callbacks = [stopping(stop)]
    return prune_with(
        network or Mlp(), F.cross_entropy, BATCHES, X[:2], budget, epochs=epochs, callbacks=callbacks, **options
    )


def test_units_that_stay():
    """By number and by fraction, at a gate whose path differs from its site's; without them it keeps fewer."""
    assert run().network.second.out_features < 16
    result = run(at_least={"second": 16, "dropout": 0.1})
    assert result.network.second.out_features >= 16
    assert result.report.target.of_budget <= 1
    assert run(at_least={"second": 1.0}, budget=0.5).network.second.out_features == 24


def test_paths_of_modules_around_gates():
    """Each site inside has its fraction, rounded up; the larger of two numbers holds, and a shared gate counts once."""
    shared = L0Gate(8)
    layers = [nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 10), L0Gate(10), nn.Linear(10, 2)]
    inner = insert_gates(nn.Sequential(*layers), {"1": shared, "3": shared})
    assert gates_at_least(inner, {"": 0.3}) == {"1.1": 3, "5": 3}
    assert gates_at_least(inner, {"3": 5, "": 0.3}) == {"1.1": 5, "5": 3}
    assert gates_at_least(inner, {"5": 1.0}) == {"5": 10}
    outer = nn.Sequential(inner)
    name_gates(outer)
    assert gates_at_least(outer, {"0": 2}) == {"0.1.1": 2, "0.5": 2}


@pytest.mark.parametrize("kind", [Mlp, ResidualCnn, pytest.param(VisionTransformer, marks=pytest.mark.slow)])
def test_multiples(kind):
    """Every layer whose units left has a multiple of 8, and the budget holds."""
    network = kind(48, 40) if kind is Mlp else kind(24) if kind is ResidualCnn else kind(48, 12)
    before = {name: p.shape for name, p in network.named_parameters()}
    result = run(network, multiple_of=8)
    assert result.report.target.of_budget <= 1
    shapes = {name: p.shape for name, p in result.network.named_parameters() if "l0_gates" not in name}
    pairs = [(n, of) for name, p in shapes.items() for n, of in zip(p, before[name], strict=True)]
    assert any(n < of for n, of in pairs)
    assert all(n == of or n % 8 == 0 for n, of in pairs)


def test_heads_count_by_their_features():
    """Of 4 heads of 12 features an even number has a multiple of 8; maps behind a flattening count as such."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(48, 4, 64, batch_first=True)
    gated = insert_gates(gate_heads(layer, {"self_attn.out_proj": 4}), {"linear1": L0Gate(64)})
    found = gates_in_step(gated, torch.zeros(1, 3, 48), 8)
    assert found == {"self_attn.out_proj.gate": 2, "linear1.1": 8}
    convolutions = nn.Sequential(nn.Conv2d(1, 12, 3), nn.ReLU(), L0Gate(12, dim=1), nn.Flatten(), nn.Linear(48, 2))
    assert gates_in_step(convolutions, torch.zeros(1, 1, 4, 4), 8) == {"2": 8}


# Of a convolution of 8 channels on 6 x 6 pixels and layers of 32 and 10 units, with their biases.
FULL = {"macs": 36 * 8 * 9 + 288 * 32 + 32 * 10, "parameters": 8 * 10 + 289 * 32 + 33 * 10}


def convolutional():
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
    assert counted(convolutional()) == {"macs": 1.0, "parameters": 1.0}
    result = run(convolutional(), limits, epochs=4)
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
    gated = insert_gates(convolutional(), {"4": L0Gate(32)}, X[:2])
    for refused in (
        lambda: run(convolutional(), budget, cost=cost),
        lambda: NetworkBudget(gated, X[:2], budget, cost),
    ):
        with pytest.raises(ValueError, match=words):
            refused()
    NetworkBudget(gated, X[:2], {"macs": 0.5, "units": 0.5}, {"units": units})
