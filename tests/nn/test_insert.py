"""Gates in networks that were written without them, also behind modules that are called several times."""

import pyro
import pytest
import torch
from pyro import poutine
from torch import nn

from pyro_l0.compaction import compact
from pyro_l0.infer import L0_ELBO, AutoGate, factor
from pyro_l0.nn import NetworkCost, insert_gates, suggest_gates
from tests.networks import Dense

torch.manual_seed(0)
LEFT, RIGHT = torch.randn(240, 6).double(), torch.randn(240, 6).double()


def siamese():
    """One tower for two inputs."""

    def forward(net, left, right):
        one, other = net.tower(left), net.tower(right)
        return net.head(torch.cat([one, other, (one - other).abs()], -1))

    tower = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 5), nn.Tanh())
    return Dense(forward, tower=tower, head=(15, 2))


def repeated():
    """One layer three times, as in ALBERT, and one under two names."""

    def forward(net, left, right):
        h = net.enter(left + right)
        for _ in range(3):
            h = h + net.outer(net.act(net.inner(h)))
        for layer in net.layers:
            h = layer(h)
        return net.head(h)

    layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh())] * 2)
    return Dense(forward, enter=(6, 8), inner=(8, 12), act=nn.GELU(), outer=(12, 8), layers=layers, head=(8, 2))


def counted(network):
    return sum(module.weight.numel() for module in set(network.modules()) if isinstance(module, nn.Linear))


@pytest.mark.parametrize("make", [siamese, repeated])
def test_suggestions_costs_and_compaction_agree(make):
    """A unit saves the weights of its rows and columns once, and their multiply-adds at each call."""
    torch.manual_seed(1)
    network, example = make().double(), (LEFT[:3], RIGHT[:3])
    found = suggest_gates(network, example)
    saved = {place.path: (place.weights, place.macs) for place in found.locations}
    gated = insert_gates(network, found, example)
    cost = NetworkCost(gated, example)
    assert cost.total_weights == counted(network)
    if make is siamese:
        assert saved == {"tower.1": (6 + 5, 2 * (6 + 5)), "tower.3": (16 + 6, 2 * 16 + 6)}
        assert cost.group_sizes == {"tower.1.1": 5, "tower.3.1": 6}
    else:
        assert {"act", "layers.0.1"} <= saved.keys()
    gates = {site: (torch.arange(size) % 2).double() for site, size in cost.sizes.items()}
    small = compact(gated, gates, example)
    assert small.certificate < 1e-10
    assert counted(small.network) == cost.weights(gates)


def test_one_site_with_one_draw():
    """In a loss evaluation, and for Pyro's handlers; its gradient is that of both calls."""
    torch.manual_seed(1)
    gated = insert_gates(siamese().double(), suggest_gates(siamese().double(), (LEFT[:3], RIGHT[:3])))
    pyro.set_rng_seed(2)
    trace = poutine.trace(gated).get_trace(LEFT, RIGHT)
    assert [name for name, site in trace.nodes.items() if site["type"] == "sample"] == ["tower.1.1", "tower.3.1"]
    z = trace.nodes["tower.3.1"]["value"]
    with poutine.condition(data={"tower.1.1": trace.nodes["tower.1.1"]["value"], "tower.3.1": torch.ones_like(z)}):
        one, other = gated.tower(LEFT), gated.tower(RIGHT)
    expected = gated.head(torch.cat([one * z, other * z, (one * z - other * z).abs()], -1))
    torch.testing.assert_close(trace.nodes["_RETURN"]["value"], expected)

    def model():
        factor("loss", -gated(LEFT, RIGHT).square().mean())

    guide = AutoGate(model)
    guide()
    L0_ELBO("l0", lam=0.1, group_size=1.0)(model, guide)().backward()
    assert all(bool((parameter.grad != 0).any()) for parameter in guide.parameters())
