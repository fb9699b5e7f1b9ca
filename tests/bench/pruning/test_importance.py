"""Importance scores against values by hand, and the rows of gates and scores."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from common.residual import ResidualNetwork
from pyro_l0 import HardConcrete
from pyro_l0.compaction import compact
from pyro_l0.nn import L0Gate, insert_gates
from pyro_l0.nn.insert import hooks_of
from tests.bench.pruning import importance_runs
from tests.bench.pruning.importance import SCORES, Units, derivatives, prune_by_importance
from tests.bench.pruning.importance_runs import Problem, Shuffled
from tests.bench.pruning.masks import GATED_STEPS, drawn_as


def small(seed=0):
    """A dense network of 3 inputs, 4 units and 2 outputs, with gates for the first two."""
    torch.manual_seed(seed)
    return nn.Sequential(L0Gate(3), nn.Linear(3, 4), nn.ReLU(), L0Gate(4), nn.Linear(4, 2))


def residual():
    torch.manual_seed(1)
    network = ResidualNetwork(1, (4, 6))
    example = torch.rand(1, 1, 8, 8)
    return network, insert_gates(network, importance_runs.places(network, example)), example


def counted(network, example):
    """Multiply-adds of convolutions and dense layers, from the sizes of what they are called with."""
    total = 0

    def count(layer, inputs, output):
        nonlocal total
        total += output[0].numel() * math.prod(layer.weight.shape[1:])

    for layer in network.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            layer.register_forward_hook(count)
    network(example)
    return total


def test_norms_by_hand():
    """What reads and writes a unit, over the mean of each layer, without closed units on either side."""
    units = Units(small(), torch.ones(1, 3))
    first, last = units.network[1].weight.detach().abs(), units.network[4].weight.detach().abs()
    units.gates["0"][2] = 0.0
    units.gates["3"][1] = 0.0
    reads = first[[0, 2, 3], :2].sum(0)
    writes, read = first[:, :2].sum(1)[[0, 2, 3]], last.sum(0)[[0, 2, 3]]
    found = units.norms()
    torch.testing.assert_close(found["0"][:2], reads / reads.mean())
    torch.testing.assert_close(found["3"][[0, 2, 3]], (writes / writes.mean() + read / read.mean()) / 2)


def test_derivatives_agree_with_differences():
    """Of each example's loss by each gate, in a network with BatchNorm and a shortcut."""
    _, gated, example = residual()
    units = Units(gated, example)
    units.network.double()
    units.gates = {site: layer.value for site, layer in units.layers.items()}
    x, y = torch.rand(3, 1, 8, 8, dtype=torch.float64), torch.tensor([1, 5, 0])
    found = derivatives(units, x, y, F.cross_entropy)
    assert not any(len(layer._forward_pre_hooks) > 1 for layer in units.layers.values())
    for site, gate in units.gates.items():
        for unit in range(len(gate)):
            losses = []
            for value in (1 - 1e-6, 1 + 1e-6):
                gate[unit] = value
                losses.append(F.cross_entropy(units.network(x), y, reduction="none").detach())
            gate[unit] = 1.0
            torch.testing.assert_close(
                found[site][:, unit].double(), (losses[1] - losses[0]) / 2e-6, atol=1e-5, rtol=1e-4
            )


def test_taylor_and_fisher_by_hand():
    """A linear network's: the square of the mean and the mean of the squares, per multiply-add."""
    network = nn.Sequential(L0Gate(2), nn.Linear(2, 1, bias=False))
    units = Units(network, torch.ones(1, 2))
    weight = units.network[1].weight.detach()
    x, y = torch.tensor([[1.0, 2.0], [3.0, -1.0]]), torch.tensor([[0.5], [-2.0]])
    slopes = 2 * (x @ weight.T - y) * x * weight
    assert units.prices()["0"].tolist() == [0.5, 0.5]
    taylor, fisher = (SCORES[name](units, [(x, y)], F.mse_loss)["0"] for name in ("taylor", "fisher"))
    torch.testing.assert_close(taylor, 2 * slopes.mean(0).square())
    torch.testing.assert_close(fisher, 2 * slopes.square().mean(0))


@pytest.mark.parametrize("budget", [0.6, 0.3, 0.1])
def test_closing_meets_the_budget(budget):
    """The least units are closed, none that still fits, and every site keeps its best."""
    _, gated, example = residual()
    units = Units(gated, example)
    torch.manual_seed(3)
    scores = {site: torch.rand(len(gate)) for site, gate in units.gates.items()}
    units.close(scores, budget, dict.fromkeys(scores, 1))
    assert units.fraction(units.gates) <= budget
    for site, gate in units.gates.items():
        assert gate[scores[site].argmax()] == 1
        for unit in (gate == 0).nonzero().flatten().tolist():
            other = {name: value.clone() for name, value in units.gates.items()}
            other[site][unit] = 1.0
            is_next = scores[site][unit] == scores[site][gate == 0].max()
            assert not is_next or units.fraction(other) > budget
    before = {site: gate.clone() for site, gate in units.gates.items()}
    units.close({site: -score for site, score in scores.items()}, 0.9 * budget, dict.fromkeys(scores, 1))
    assert all((gate <= before[site]).all() for site, gate in units.gates.items())


@pytest.mark.parametrize("score", ["l1", "l1_global", "taylor", "fisher_floor"])
def test_each_score_on_a_residual_network(score):
    """Within the budget; compacted, it does the multiply-adds that were counted; no gate changes after the cut."""
    network, gated, example = residual()
    torch.manual_seed(4)
    batches = Shuffled(torch.rand(40, 1, 8, 8), torch.randint(10, (40,)), 10)
    opened = []

    def measure(pruned):
        opened.append(
            {site: pruned.get_submodule(f"l0_gates.{site}").value.clone() for site in Units(gated, example).gates}
        )
        return float(len(opened))

    found = prune_by_importance(gated, score, 0.2, batches, 10, F.cross_entropy, example, measure)
    assert (found.cut, found.end) == (1.0, 2.0)
    assert all(torch.equal(value, opened[1][site]) for site, value in opened[0].items())
    assert 0.1 < found.fraction <= 0.2
    total = counted(network, example)
    left = counted(compact(gated.eval(), found.gates, example).network, example)
    assert found.fraction == pytest.approx(left / total, abs=1e-6)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of few steps, and of a network that was not trained
def test_rows_of_gates_and_scores():
    """Both count against the same network; one gate acts on the units of a residual stream, wherever it stands."""
    torch.manual_seed(6)
    x, y = torch.rand(40, 1, 8, 8), torch.randint(10, (40,))
    problem = Problem(lambda: ResidualNetwork(1, (4, 6)), Shuffled(x, y, 10), x, y, 1, 10)
    network = problem.make()
    rows = [importance_runs.prune(problem, network, method, 0.3, 1) for method in ("gates", "l1")]
    for row in rows:
        assert row["units"].keys() == {"stem.2.1", "blocks.0.relu1.1", "blocks.1.relu1.1", "head.1.1"}
        assert 0.5 < row["used"] <= 1
        assert row["dense"] == problem.error(network)
        assert 0 <= row["cut"] <= 100
    shared = insert_gates(network, importance_runs.places(network, x[:1]))
    streams = {path: hook.gate for path, hook in hooks_of(shared)}
    assert streams["stem.2"] is streams["blocks.0.relu2"]


@pytest.mark.parametrize(("method", "value", "like"), [("mean", "test_gate", "mean"), ("falling", "median", "median")])
def test_masks_without_noise(method, value, like):
    """In the end, the values and slopes that each says; several gates are drawn together."""
    gates = [HardConcrete(torch.linspace(-4, 6, size, requires_grad=True)) for size in (3, 5)]
    with drawn_as(method):
        *_, last = (gates[0].draw_jointly(gates).draws[1] for _ in range(GATED_STEPS + 1))
    torch.testing.assert_close(last, getattr(gates[1], value))
    slopes = [torch.autograd.grad(x.sum(), gates[1].log_alpha)[0] for x in (last, getattr(gates[1], like))]
    torch.testing.assert_close(*slopes)
