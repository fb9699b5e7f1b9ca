"""Units that stay: at least so many, or a multiple of a number, within the budget all the same."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

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
