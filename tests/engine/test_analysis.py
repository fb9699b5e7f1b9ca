"""The whole analysis: several calls, ties, reasons, costs, and rules from outside."""

from pathlib import Path

import pytest
import torch
from torch import nn

from pyro_l0.nn import L0Gate, fix_gates
from pyro_l0.nn.engine import analyse, record
from tests.engine import own_operation
from tests.engine.exactness import between, close_some, examine, shake
from tests.networks import Dense


def test_an_input_may_be_pruned_at_one_place_and_used_at_another():
    closed = {"gate": torch.tensor([True, False] * 3)}
    examples = [
        (torch.randn(2, 6, dtype=torch.float64),),
        {"x": torch.randn(3, 6, dtype=torch.float64), "use_all": False},
    ]

    def forward(net, x, *, use_all=True):
        h = net.one(net.gate(x))
        return h + net.two(x) if use_all else h

    analysis = examine(Dense(forward, gate=6, one=(6, 4), two=(6, 4)), examples, closed)
    assert analysis.remaining["one.weight"][1].tolist() == [1, 3, 5]
    assert analysis.remaining["two.weight"][1].tolist() == list(range(6))


@pytest.mark.filterwarnings("ignore:Expected an example that uses the whole network")
def test_several_examples_take_several_ways():
    """What one way does not read, another may; what no recorded way used is not in the answer."""

    def forward(net, x, way="a"):
        h = net.gate(torch.relu(net.one(x)))
        return net.ways[way](h if way == "a" else h.softmax(-1))

    def network():
        return Dense(forward, one=(6, 4), gate=4, ways=nn.ModuleDict({way: nn.Linear(4, 2) for way in "abc"}))

    x = torch.randn(2, 6, dtype=torch.float64)
    one = examine(network(), x)
    assert len(one.removed["gate"]) == 2
    assert "ways.b.weight" not in one.remaining
    both = examine(network(), [(x,), (x, "b")])
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
    def writing(net, h):
        h[:, :4] *= 2
        return h

    def changing(net, h):
        return h.view(len(h), -1).mul_(2)  # nobody reads what was there before

    def examined(change):
        def forward(net, x):
            return net.out(net.second(torch.relu(net.two(change(net, net.gate(torch.relu(net.one(x))))))))

        network = Dense(forward, one=(6, 8), gate=8, two=(8, 8), second=8, out=(8, 2))
        return examine(network, torch.randn(2, 6, dtype=torch.float64))

    pinned = examined(writing)
    assert set(pinned.barriers) == {"write in place in the network"}
    assert set(pinned.reasons["gate"].values()) == {"write in place in the network"}
    assert len(pinned.removed["second"]) == 4
    free = examined(changing)
    assert len(free.removed["gate"]) == len(free.removed["second"]) == 4
    assert not free.barriers


def test_a_rule_from_outside_takes_one_short_file():
    assert len(Path(own_operation.__file__).read_text().splitlines()) <= 30
    network = between(lambda h: own_operation.swap_halves(h.unsqueeze(-1).expand(-1, -1, 4)).sum(1))
    network.gate.dim = 1
    analysis = examine(network, torch.randn(2, 6, dtype=torch.float64))
    assert len(analysis.removed["gate"]) == 4
    assert not analysis.barriers
