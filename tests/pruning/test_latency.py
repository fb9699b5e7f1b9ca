"""Budgets of latency, with multiply-adds in place of time, so that what should come out is known."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from pyro_l0 import prune
from pyro_l0.compaction import compact
from pyro_l0.nn import L0Gate
from pyro_l0.pruning import latency
from pyro_l0.pruning.latency import Latency, measure_latency, microseconds
from pyro_l0.pruning.result import notes_on_latency
from tests.processes import in_two
from tests.pruning.networks import BATCHES, Mlp, ResidualCnn, VisionTransformer, X

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # few steps, an untrained network


def flops(runs, device, *_):
    """The floating-point operations of each, and ten for whatever runs."""
    found = []
    for run in runs:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            run()
        found.append(float(counter.get_total_flops()) + 10)
        calls.append(run)
    return found


calls = []


@pytest.fixture
def counted(monkeypatch):
    """Times are counts; the list of what was timed."""
    calls.clear()
    monkeypatch.setattr(latency, "microseconds", flops)
    return calls


def convolutions():
    torch.manual_seed(0)
    first = [nn.Conv2d(1, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), L0Gate(12, dim=1), nn.Conv2d(12, 12, 3, groups=12)]
    return nn.Sequential(*first, nn.ReLU(), nn.Flatten(), nn.Linear(192, 30), nn.ReLU(), L0Gate(30), nn.Linear(30, 4))


@pytest.mark.usefixtures("counted")
def test_it_is_that_of_the_compacted_network():
    """For any gates, through convolutions in groups, flattened maps and dense layers; no gate of a site counts 0."""
    network, x = convolutions(), torch.randn(2, 1, 8, 8)
    model = Latency(network, x)
    torch.manual_seed(1)
    for maps, units in ((12, 30), (5, 17), (1, 1), (7, 30), (12, 2)):
        numbers = {"3": (12, maps), "9": (30, units)}
        gates = {site: (torch.rand(n).argsort().argsort() < k).float() for site, (n, k) in numbers.items()}
        small = compact(network, gates, x).network
        (expected,) = flops([lambda small=small: small(x)], None)
        assert float(model(gates)) == pytest.approx(expected, rel=0.01)
    assert float(model({"3": torch.zeros(12), "9": torch.ones(30)})) < 0.3 * float(
        model({"3": torch.ones(12), "9": torch.ones(30)})
    )


@pytest.mark.usefixtures("counted")
def test_streams_get_gates_where_the_time_needs_them(monkeypatch):
    """Times fall more slowly than multiply-adds, which gates of inner units alone would bring down far enough."""
    monkeypatch.setattr(latency, "microseconds", lambda runs, *_: [count**0.3 for count in flops(runs, None)])
    result = prune(ResidualCnn(), F.cross_entropy, BATCHES, X[:2], 0.6, cost="latency", epochs=3)
    assert result.network.stem[0].out_channels < 8
    assert result.report.target.fraction["cost"] <= 0.6


def test_steps_are_found(counted, monkeypatch):
    """Times that jump between two sizes are met on both sides, by few measurements; derivatives are those of a line."""

    def steps(runs, device, *_):
        return [100.0 * (1 + (count > 10 + 10 * 97)) for count in flops(runs, device)]

    monkeypatch.setattr(latency, "microseconds", steps)
    network = nn.Sequential(nn.Linear(3, 200), nn.ReLU(), L0Gate(200), nn.Linear(200, 2))
    model = Latency(network, torch.ones(1, 3))
    assert len(counted) < 30
    at = [model({"2": (torch.arange(200) < n).float()}).item() for n in (1, 97, 98, 200)]
    assert at[0] == pytest.approx(at[1], rel=0.05)
    assert at[2] == pytest.approx(at[3], rel=0.05)
    assert at[2] > 1.5 * at[1]
    active = torch.full((200,), 0.25, requires_grad=True)
    (slope,) = torch.autograd.grad(model({"2": active}), active)
    torch.testing.assert_close(slope, torch.full((200,), (at[3] - at[0]) / 199))


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("kind", [Mlp, pytest.param(VisionTransformer, marks=pytest.mark.slow)])
def test_a_budget_of_it(kind):
    """Met by the pruned network, as the report measures it."""
    torch.manual_seed(0)
    result = prune(kind(), F.cross_entropy, BATCHES, X[:2], 0.5, cost="latency", epochs=2)
    ours, theirs = result.report.left["latency"]
    assert 0.45 < ours / theirs <= 0.51
    assert " microseconds (" in str(result.report)
    assert 0.9 < result.report.target.of_budget <= 1


@pytest.mark.usefixtures("counted")
def test_beside_other_costs_and_with_one_of_the_user_s_of_that_name():
    both = prune(Mlp(), F.cross_entropy, BATCHES, X[:2], {"latency": 0.6, "weights": 0.4}, epochs=2)
    assert set(both.report.target.budget) == {"latency", "weights"}
    own = {"latency": lambda gates: sum(gate.sum() for gate in gates.values())}
    result = prune(Mlp(), F.cross_entropy, BATCHES, X[:2], {"latency": 0.6}, cost=own, epochs=2)
    assert "latency" not in result.report.left


def test_times_of_a_clock(monkeypatch):
    """Microseconds of the shortest call of each, however much longer others take; those of real calls are positive."""
    now = [0.0]

    def takes(seconds):
        longer = itertools.cycle((3.0, 1.5, 1.0, 7.0, 2.0))

        def run():
            now[0] += seconds * next(longer)

        return run

    x = torch.randn(16, 16)
    assert microseconds([lambda: x @ x], torch.device("cpu"))[0] > 0
    monkeypatch.setattr(latency, "time", SimpleNamespace(perf_counter=lambda: now[0], thread_time=lambda: now[0]))
    found = microseconds([takes(3e-3), takes(1e-5), takes(0.2)], torch.device("cpu"))
    assert found == pytest.approx([3000.0, 10.0, 200_000.0], rel=1e-6)  # rounding of the clock's sum


@pytest.mark.usefixtures("counted")
def test_a_network_without_such_operations():
    network = nn.Sequential(L0Gate(3), nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match=r"less time with fewer units.*take another cost"):
        Latency(network, torch.ones(2, 3))


def measured(rank, folder):
    """What each of two processes takes for the times."""
    network = nn.Sequential(nn.Linear(3, 20), nn.ReLU(), L0Gate(20), nn.Linear(20, 2))
    return measure_latency(network, torch.ones(1, 3), None).measured


@pytest.mark.slow  # starts two processes
def test_two_processes_have_one_table(tmp_path):
    first, second = in_two(measured, tmp_path)
    assert first == second
    assert len(first) > 5


def test_a_network_that_takes_too_long_is_reported():
    assert notes_on_latency((54.0, 100.0), {"cost": 0.5}) == []
    (note,) = notes_on_latency((60.0, 100.0), {"latency": 0.5, "macs": 0.9})
    assert note.is_warning
    assert "60.0% of the whole network's, and the budget is 50.0%" in note.text
