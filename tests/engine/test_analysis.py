"""The whole analysis: several calls, ties, reasons, costs, and rules from outside."""

from pathlib import Path

import pytest
import torch
from torch import nn

from pyro_l0.nn import L0Gate, fix_gates
from pyro_l0.nn.engine import analyse, record
from tests.engine import own_operation
from tests.engine.exactness import Between, close_some, examine, shake
from tests.networks import Net


def test_an_input_may_be_pruned_at_one_place_and_used_at_another():
    closed = {"gate": torch.tensor([True, False] * 3)}
    examples = [
        (torch.randn(2, 6, dtype=torch.float64),),
        {"x": torch.randn(3, 6, dtype=torch.float64), "use_all": False},
    ]

    def forward(net, x, *, use_all=True):
        h = net.one(net.gate(x))
        return h + net.two(x) if use_all else h

    network = Net(forward, gate=L0Gate(6), one=nn.Linear(6, 4), two=nn.Linear(6, 4))
    analysis = examine(network, examples, closed)
    assert analysis.remaining["one.weight"][1].tolist() == [1, 3, 5]
    assert analysis.remaining["two.weight"][1].tolist() == list(range(6))


@pytest.mark.filterwarnings("ignore:Expected an example that uses the whole network")
def test_several_examples_take_several_ways():
    """What one way does not read, another may; what no recorded way used is not in the answer."""

    class Ways(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.gate = nn.Linear(6, 4), L0Gate(4)
            self.ways = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 2), "c": nn.Linear(4, 2)})

        def forward(self, x, way="a"):
            h = self.gate(torch.relu(self.one(x)))
            return self.ways[way](h if way == "a" else h.softmax(-1))

    x = torch.randn(2, 6, dtype=torch.float64)
    one = examine(Ways(), x)
    assert len(one.removed["gate"]) == 2
    assert "ways.b.weight" not in one.remaining
    both = examine(Ways(), [(x,), (x, "b")])
    assert not len(both.removed["gate"])
    assert "ways.b.weight" in both.remaining
    assert "ways.c.weight" not in both.remaining


def test_all_that_stays_matters():
    """Each slice of a parameter that is said to stay changes the outputs when it changes."""
    first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), L0Gate(8, dim=1))
    second = nn.Sequential(nn.Conv2d(8, 12, 3, groups=2), nn.GELU(), L0Gate(12, dim=1), nn.AdaptiveAvgPool2d(1))
    network = shake(nn.Sequential(first, second, nn.Flatten(), nn.Linear(12, 2)).double().eval())
    _, values = close_some(network)
    closed = {"0.3": torch.arange(8) < 4, "1.2": torch.arange(12) % 6 < 2}
    values = {site: value.clamp(0.3, 1.0).masked_fill(closed[site], 0.0) for site, value in values.items()}
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    analysis = analyse(record(network, x), closed, values)
    fixed = fix_gates(network, values)
    before = fixed(x)
    for name, parameter in fixed.named_parameters():
        for dim, entries in enumerate(analysis.remaining[name]):
            for entry in entries.tolist():
                kept = parameter.detach().clone()
                with torch.no_grad():
                    parameter.select(dim, entry).add_(torch.randn(parameter.select(dim, entry).shape).abs() + 0.5)
                    assert not torch.allclose(fixed(x), before, rtol=1e-9), (name, dim, entry)
                    parameter.copy_(kept)


def test_writes_to_views_pin_what_they_alias_and_nothing_else():
    class Net(nn.Module):
        def __init__(self, writes):
            super().__init__()
            self.one, self.gate, self.two, self.second = nn.Linear(6, 8), L0Gate(8), nn.Linear(8, 8), L0Gate(8)
            self.out = nn.Linear(8, 2)
            self.writes = writes

        def forward(self, x):
            h = self.gate(torch.relu(self.one(x)))
            if self.writes:
                h[:, :4] *= 2
            else:
                h = h.view(len(h), -1).mul_(2)  # nobody reads what was there before
            return self.out(self.second(torch.relu(self.two(h))))

    x = torch.randn(2, 6, dtype=torch.float64)
    pinned = examine(Net(True), x)
    assert set(pinned.barriers) == {"write in place in the network"}
    assert set(pinned.reasons["gate"].values()) == {"write in place in the network"}
    assert len(pinned.removed["second"]) == 4
    free = examine(Net(False), x)
    assert len(free.removed["gate"]) == len(free.removed["second"]) == 4
    assert not free.barriers


def test_tensors_that_nobody_can_slice_stay():
    scale = torch.ones(8, dtype=torch.float64)
    analysis = examine(Between(lambda h: h * scale), torch.randn(2, 6, dtype=torch.float64))
    assert set(analysis.reasons["gate"].values()) == {"a tensor that is no parameter or buffer, at mul in the network"}


def test_a_rule_from_outside_takes_one_short_file():
    assert len(Path(own_operation.__file__).read_text().splitlines()) <= 30
    network = Between(lambda h: own_operation.swap_halves(h.unsqueeze(-1).expand(-1, -1, 4)).sum(1))
    network.gate.dim = 1
    analysis = examine(network, torch.randn(2, 6, dtype=torch.float64))
    assert len(analysis.removed["gate"]) == 4
    assert not analysis.barriers
