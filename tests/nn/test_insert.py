"""Gates in networks that were written without them, also behind modules that are called several times."""

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro import poutine
from torch import nn

from pyro_l0 import prune
from pyro_l0.compaction import compact
from pyro_l0.infer import L0_ELBO, AutoGate, factor
from pyro_l0.nn import Gate, NetworkCost, fix_gates, insert_gates, suggest_gates
from pyro_l0.nn.fixed import FixedGate
from pyro_l0.nn.gate import gate_names
from tests.networks import Net


class User(nn.Module):
    """A network of somebody's, with functional activations and several kinds of Dropout."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.drop_maps, self.drop, self.none = nn.Dropout(0.3), nn.Dropout(0.5), nn.Dropout(0.0)
        self.blocks = nn.Sequential(nn.Sequential(nn.Linear(16, 6), nn.ReLU()), nn.Linear(6, 2))

    def forward(self, x):
        x = self.drop_maps(torch.relu(self.conv(x)))
        x = self.none(self.drop(torch.flatten(x, 1)))
        return self.blocks(x)


X = torch.randn(3, 1, 4, 4)


def test_gates_behind_named_modules():
    """Inner and outer ones; the network computes the same when they are open, and compacts."""
    net = User().eval()
    gated = insert_gates(net, {"conv": Gate(4, dim=1), "blocks.0": Gate(6), "blocks.0.0": Gate(6)})
    assert set(gate_names(gated)) == {"conv.1", "blocks.0.1", "blocks.0.0.1"}
    ones = {name: torch.ones(gate.size) for name, gate in gate_names(gated).items()}
    torch.testing.assert_close(fix_gates(gated, ones).eval()(X), net(X))
    gates = {name: (torch.arange(len(gate)) % 2).float() for name, gate in ones.items()}
    assert compact(gated, gates, X).certificate < 1e-5  # float32
    assert not any(isinstance(module, (Gate, FixedGate)) for module in net.modules())


def test_one_gate_at_several_places():
    """A gate on a residual stream is drawn once in a run, by a loss and by Pyro's own handlers."""

    def forward(net, x):
        h = net.gate(net.enter(x))
        h = net.gate(h + net.inner(h))
        return net.leave(h)

    net = Net(forward, enter=nn.Linear(3, 4), inner=nn.Linear(4, 4), leave=nn.Linear(4, 2), gate=Gate(4), seen=[])

    def model(x):
        logits = net(x)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Categorical(logits=logits), obs=torch.zeros(len(x)))

    x = torch.randn(5, 3)
    trace = poutine.trace(model).get_trace(x)
    z = trace.nodes["gate"]["value"]
    h = net.enter(x) * z
    expected = net.leave((h + net.inner(h)) * z)
    torch.testing.assert_close(trace.nodes["y"]["fn"].logits, expected - expected.logsumexp(-1, keepdim=True))
    guide = AutoGate(model)
    loss = L0_ELBO("l0", lam=0.1)(model, guide)
    loss(x).backward()
    assert guide.sites["gate"]["log_alpha"].grad.abs().sum() > 0


# ------------------------------------------------------------ modules that a network calls several times

torch.manual_seed(0)
LEFT, RIGHT = torch.randn(240, 6).double(), torch.randn(240, 6).double()


class Siamese(nn.Module):
    """One tower for two inputs."""

    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 5), nn.Tanh())
        self.head = nn.Linear(15, 2)

    def forward(self, left, right):
        one, other = self.tower(left), self.tower(right)
        return self.head(torch.cat([one, other, (one - other).abs()], -1))


class Repeated(nn.Module):
    """One layer three times, as in ALBERT, and one under two names."""

    def __init__(self):
        super().__init__()
        self.enter, self.inner, self.act = nn.Linear(6, 8), nn.Linear(8, 12), nn.GELU()
        self.outer, self.head = nn.Linear(12, 8), nn.Linear(8, 2)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh())] * 2)

    def forward(self, left, right):
        h = self.enter(left + right)
        for _ in range(3):
            h = h + self.outer(self.act(self.inner(h)))
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


def counted(network):
    return sum(module.weight.numel() for module in set(network.modules()) if isinstance(module, nn.Linear))


@pytest.mark.parametrize("kind", [Siamese, Repeated])
def test_suggestions_costs_and_compaction_agree(kind):
    """A unit saves the weights of its rows and columns once, and their multiply-adds at each call."""
    torch.manual_seed(1)
    network, example = kind().double(), (LEFT[:3], RIGHT[:3])
    found = suggest_gates(network, example)
    assert {"tower.1", "tower.3"} <= found.keys() if kind is Siamese else {"act", "layers.0.1"} <= found.keys()
    gated = insert_gates(network, found, example)
    cost = NetworkCost(gated, example)
    assert cost.total_weights == counted(network)
    if kind is Siamese:
        assert {place.path: (place.weights, place.macs) for place in found.locations} == {
            "tower.1": (6 + 5, 2 * (6 + 5)),
            "tower.3": (16 + 6, 2 * 16 + 6),
        }
        assert cost.group_sizes == {"tower.1.1": 5, "tower.3.1": 6}
    gates = {site: (torch.arange(size) % 2).double() for site, size in cost.sizes.items()}
    small = compact(gated, gates, example)
    assert small.certificate < 1e-10
    assert counted(small.network) == cost.weights(gates)


def test_one_site_with_one_draw():
    """In a loss evaluation, and for Pyro's handlers; its gradient is that of both calls."""
    torch.manual_seed(1)
    gated = insert_gates(Siamese().double(), suggest_gates(Siamese().double(), (LEFT[:3], RIGHT[:3])))
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


@pytest.mark.filterwarnings("ignore::UserWarning")  # few steps, large units
def test_pruning():
    """Towers that compare: both inputs go through one smaller tower."""
    torch.manual_seed(1)
    left, right = LEFT.float(), RIGHT.float()
    data = [
        ((left[i : i + 24], right[i : i + 24]), (left[i : i + 24, 0] > right[i : i + 24, 0]).long())
        for i in range(0, 240, 24)
    ]
    batches = [(*inputs, targets) for inputs, targets in data]
    network = Siamese()
    result = prune(network, F.cross_entropy, batches, data[0][0], 0.4, epochs=20, pretrained=False)
    macs = result.report.left["macs"]
    assert macs[0] <= 0.4 * macs[1]
    assert result.certificate < 1e-5
    assert list(result.network.state_dict()) == list(network.state_dict())
    tower = result.network.tower
    assert macs[0] == 2 * (tower[0].weight.numel() + tower[2].weight.numel()) + result.network.head.weight.numel()
    assert not gate_names(result.network)
