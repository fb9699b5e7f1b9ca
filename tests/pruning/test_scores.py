"""Scores of units, the gates that they leave in a budget, and the choice between these and the trained gates."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pyro_l0.infer import SparsityTarget
from pyro_l0.nn import L0Gate, NetworkCost, NetworkGates, fix_gates, insert_gates
from pyro_l0.pruning import run as runs
from pyro_l0.pruning.phases import BatchLoss
from pyro_l0.pruning.result import choice_of
from pyro_l0.pruning.scores import magnitudes, slopes, unit_scores
from tests.processes import in_two
from tests.pruning.networks import StoppedError, prune_with, same, stopping

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # few steps

CPU = torch.device("cpu")


def gated_mlp():
    """Five gated units in float64, three batches, and the loss."""
    torch.manual_seed(0)
    network = insert_gates(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), {"1": L0Gate(5)}).double()
    batches = [(torch.randn(4, 3).double(), torch.randn(4, 2).double()) for _ in range(3)]
    return network, batches, BatchLoss(F.mse_loss, CPU, None)


def test_slopes_are_those_written_by_hand():
    """The loss is the mean of (y - t)^2 over 8 numbers, and y is linear in each gate, by its unit times its weights."""
    network, batches, loss = gated_mlp()
    first, last = network[0], network[2]
    found = slopes(network, loss, batches)
    assert list(found) == ["1.1"]
    with torch.no_grad():
        for row, (x, t) in zip(found["1.1"], batches, strict=True):
            units = first(x).tanh()
            far = units @ last.weight.T + last.bias - t
            by_hand = (2 / 8 * far @ last.weight * units).sum(0)
            torch.testing.assert_close(row, by_hand, rtol=1e-12, atol=1e-14)


def test_slopes_are_those_of_differences():
    """To one side, as gates are at most 1: the loss is a square in each gate, so two differences leave no error."""
    network, batches, loss = gated_mlp()

    def at(unit, value):
        gates = torch.ones(5).double().index_fill(0, torch.tensor([unit]), value)
        return float(loss(fix_gates(network, {"1.1": gates}), batches[0]).detach())

    for unit, slope in enumerate(slopes(network, loss, batches[:1])["1.1"][0].tolist()):
        assert slope == pytest.approx(3 * at(unit, 1.0) - 4 * at(unit, 0.5) + at(unit, 0.0), rel=1e-9, abs=1e-12)


def test_scores_of_units():
    """Taylor and Fisher are made of the slopes, and all have a mean of 1; slopes that are zero are left out."""
    network, batches, loss = gated_mlp()
    found, rows = unit_scores(network, batches[0][0], loss, batches), slopes(network, loss, batches)["1.1"]
    assert list(found) == ["L1", "Taylor", "Fisher"]
    for name, score in (("Taylor", rows.sum(0).abs()), ("Fisher", rows.square().sum(0))):
        torch.testing.assert_close(found[name]["1.1"], (score / score.mean()).float())
    flat = BatchLoss(lambda outputs, _: 0 * outputs.sum(), CPU, None)
    assert list(unit_scores(network, batches[0][0], flat, batches)) == ["L1"]


def test_magnitudes_are_sums_of_weights():
    """Of maps between convolutions, in groups too, and of features flattened from maps, each with all that it reads."""
    torch.manual_seed(0)
    each = nn.Conv2d(4, 4, 3, padding=1, groups=4)
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), each, nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 2)
    )
    gated = insert_gates(network, {"3": L0Gate(4, dim=1)})
    first, last = network[0].weight.abs(), network[5].weight.abs()
    layers = (first.sum((1, 2, 3)), each.weight.abs().sum((1, 2, 3)), last.view(2, 4, 9).sum((0, 2)))
    found = magnitudes(gated, torch.randn(2, 1, 3, 3))["3.1"]
    by_hand = torch.stack([layers[1], layers[2]]).mean(0)
    torch.testing.assert_close(found, by_hand.detach().double())


def test_the_best_units_stay_in_the_budget():
    """The least scores close first; a site keeps its least, and a multiple of a number that leave together."""
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    gated = insert_gates(network, {"1": L0Gate(8), "3": L0Gate(8)})
    macs = NetworkCost(gated, torch.ones(1, 4)).macs  # 4 a + a b + b for a and b open units, of 104
    scores = {"1.1": torch.arange(8.0), "3.1": torch.arange(8.0) / 10}
    options = {"cost": macs, "steps": 10, "multiple_of": {"1.1": 3}, "at_least": {"3.1": 2}}
    target = SparsityTarget(NetworkGates(gated), 0.5, **options)
    gates = target.best_within(scores, {"cost": 0.5})
    assert gates["1.1"].tolist() == [0, 0, 1, 1, 1, 1, 1, 1]  # 24 + 6 b + b within 52, and b is 4 but for a minimum
    assert gates["3.1"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert float(target.report(gates).fraction["cost"]) == pytest.approx(52 / 104)
    assert target.report(gates).open == {"1.1": (6, 8), "3.1": (4, 8)}


def wide():
    """A network that is the sum of four inputs by its first four units of sixteen; the rest add next to nothing."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    with torch.no_grad():
        network[0].weight.mul_(0.01)
        network[0].weight[:4] = 0.1 * torch.eye(4)
        network[0].bias.zero_()
        network[2].weight.mul_(0.01)
        network[2].weight[:, :4] = 10.0
    x = torch.randn(320, 4)
    return network, [(x[i : i + 20], x[i : i + 20].sum(1, keepdim=True)) for i in range(0, 320, 20)]


def choose(**options):
    """Prune it to the multiply-adds of four units by a rate that moves no weight far."""
    network, batches = wide()
    settings = {"epochs": 6, "finetune": 0.5, "make_optimiser": lambda p: torch.optim.SGD(p, 1e-4)}
    return prune_with(
        network, F.mse_loss, batches, batches[0][0][:2], options.pop("budget", 0.25), **settings | options
    )


def open_the(monkeypatch, descending):
    """As many open gates as the training found, but the first of a site, or the last."""
    keep = runs.Run.on_budget

    def on_budget(run, budget, gates):
        keep(run, budget, {site: gate.sort(descending=descending).values for site, gate in gates.items()})

    monkeypatch.setattr(runs.Run, "on_budget", on_budget)


@pytest.fixture
def bad_gates(monkeypatch):
    open_the(monkeypatch, descending=False)


def test_scores_replace_bad_gates(bad_gates):
    """Trained gates that closed the four units lose to each score, all of which keep them."""
    result = choose()
    assert sorted(result.plan.remaining["0.weight"][0]) == [0, 1, 2, 3]
    assert re.fullmatch(
        r"The units chosen by (L1|Taylor|Fisher) scores were kept: 4 steps after the cut their loss on held-out "
        r"batches was [\d.e-]+, and [\d.e-]+ of those by gates\.",
        result.report.choice,
    )
    assert result.report.choice in str(result.report)
    assert result.report.target.of_budget <= 1
    assert result.history[-1]["step"] == 96


def test_gates_stay_where_scores_are_bad(monkeypatch):
    """Scores that prefer the useless units lose to the gates, which keep the four that add something."""

    def upside_down(*args):
        return {name: {site: -x for site, x in each.items()} for name, each in unit_scores(*args).items()}

    open_the(monkeypatch, descending=True)
    monkeypatch.setattr(runs, "unit_scores", upside_down)
    result = choose()
    assert sorted(result.plan.remaining["0.weight"][0]) == [0, 1, 2, 3]
    assert result.report.choice.startswith("The units chosen by gates were kept: 4 steps after the cut their loss ")


def test_each_budget_has_its_choice(bad_gates):
    result = choose(budget=[0.5, 0.25])
    for pruned, budget in ((result.on_the_way[0], 0.5), (result, 0.25)):
        assert pruned.report.target.budget == {"cost": pytest.approx(budget)}
        assert pruned.report.target.of_budget <= 1
        assert {0, 1, 2, 3} <= set(pruned.plan.remaining["0.weight"][0])
        assert pruned.report.choice is not None


@pytest.mark.parametrize("stop", [3, 4, 5])
def test_a_killed_run_goes_on_with_its_choice(bad_gates, stop, tmp_path):
    """Before the trial, after it and in the steps that follow."""
    whole, path = choose(), tmp_path / "run.pt"
    with pytest.raises(StoppedError):
        choose(checkpoint=path, callbacks=[stopping(stop)])
    resumed = choose(checkpoint=path, resume=True)
    assert same(resumed.network, whole.network)
    assert (resumed.history, resumed.report) == (whole.history, whole.report)


def test_no_trial():
    """Nor is there one of frozen weights, a network that was not trained before, or too few steps for a tenth."""
    network, batches = wide()
    for options in ({"weights": "frozen"}, {"pretrained": False}, {"finetune": 0.09}):
        result = prune_with(network, F.mse_loss, batches, batches[0][0][:2], 0.25, epochs=6, **options)
        assert result.report.choice is None
    assert choice_of("gates", {}, 3) is None


def of_two_processes(rank, folder):
    """Each has half of the data."""
    network, batches = wide()
    found = prune_with(network, F.mse_loss, batches[rank::2], batches[0][0][:2], 0.25, epochs=12)
    weights = {name: weight.tolist() for name, weight in found.network.state_dict().items()}
    return {"choice": found.report.choice, "weights": weights}


@pytest.mark.slow
def test_two_processes_choose_alike(tmp_path):
    one, other = in_two(of_two_processes, tmp_path)
    assert one["choice"] is not None
    assert one == other
