"""A network that shrinks while it trains goes on as the whole one would."""

import copy

import pytest
import torch
from torch import nn

import mnist
from common.networks import build as build_network
from mnist import Options
from pyro_l0.compaction import Shrinker, load_compacted
from pyro_l0.compaction.shrinker import Replica
from pyro_l0.infer import L0_ELBO, AutoGate
from pyro_l0.nn import L0Gate, fix_gates
from pyro_l0.nn.gate import name_gates
from tests.compaction.networks import Model, set_gates
from tests.examples.killing import without_seconds
from tests.networks import Dense

CLOSED = {"net.2": [0, 3], "net.6": [1], "net.8": [0, 1, 3, 5, 9], "net.11": [2, 4]}


def network():
    """Convolutions, flattening, BatchNorm; gates that are open or closed for certain."""
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.ReLU(), L0Gate(4, dim=1)),
        *(nn.Conv2d(4, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU(), L0Gate(3, dim=1)),
        *(nn.Flatten(), L0Gate(12), nn.Linear(12, 5), nn.ReLU(), L0Gate(5), nn.Linear(5, 2)),
    )


def build(seed=0):
    torch.manual_seed(seed)
    model = Model(network()).double()
    x, y = torch.randn(6, 1, 6, 6, dtype=torch.float64), torch.randint(2, (6,))
    guide = AutoGate(model)
    loss = L0_ELBO("l0", lam=dict.fromkeys(CLOSED, 0.0))(model, guide)
    loss(x, y)
    for name, gate in guide.test_gates().items():
        set_gates(guide, name, range(len(gate)), 60.0)
        set_gates(guide, name, CLOSED[name], -60.0)
    optimiser = torch.optim.Adam([*model.parameters(), *guide.parameters()], 0.01, weight_decay=0.0)
    return model, guide, loss, optimiser, x, y


def train(loss, optimiser, x, y, steps):
    values = []
    for _ in range(steps):
        optimiser.zero_grad()
        value = loss(x, y)
        value.backward()
        optimiser.step()
        values.append(value.item())
    return values


def test_what_is_left_and_full_sizes():
    """Original places of the units that stay, zeros for those that left; the same outputs."""
    model, guide, loss, optimiser, x, _ = build()
    before = fix_gates(model.net, guide.test_gates()).eval()(x)
    shrinker = Shrinker(model.net, guide, x, optimiser, loss.elbo, patience=1)
    assert shrinker.step()
    assert shrinker.remaining["net.2"].tolist() == [1, 2]
    assert shrinker.remaining["net.8"].tolist() == [2, 8, 10, 11]  # of the second map, which is closed, nothing is left
    full = shrinker.full(guide.test_gates())
    assert {name: len(gate) for name, gate in full.items()} == {"net.2": 4, "net.6": 3, "net.8": 12, "net.11": 5}
    assert full["net.11"].tolist() == [1.0, 1.0, 0.0, 1.0, 0.0]
    torch.testing.assert_close(fix_gates(model.net, guide.test_gates()).eval()(x), before, rtol=1e-10, atol=1e-10)
    assert not shrinker.step()


def test_replicas_shrink_alike():
    """An average of the network and the guide."""
    model, guide, loss, optimiser, x, y = build()
    average = copy.deepcopy(nn.ModuleList([model.net, guide]))
    train(loss, optimiser, x, y, 2)
    shrinker = Shrinker(model.net, guide, x, optimiser, loss.elbo, [Replica(average[0], average[1])], patience=1)
    before = fix_gates(average[0], average[1].test_gates()).eval()(x)
    assert shrinker.step()
    assert [p.shape for p in average.parameters()] == [p.shape for p in nn.ModuleList([model.net, guide]).parameters()]
    after = fix_gates(average[0], average[1].test_gates()).eval()(x)
    torch.testing.assert_close(after, before, rtol=1e-10, atol=1e-10)


def test_a_run_can_be_resumed():
    """The state repeats the shrinking on a fresh network; parameters and optimiser then fit."""
    model, guide, loss, optimiser, x, y = build()
    shrinker = Shrinker(model.net, guide, x, optimiser, loss.elbo, patience=1)
    train(loss, optimiser, x, y, 2)
    shrinker.step()
    states = [part.state_dict() for part in (shrinker, model, guide, optimiser)]
    states = copy.deepcopy(states)
    expected = train(loss, optimiser, x, y, 3)
    model, guide, loss, optimiser, x, y = build(seed=0)
    shrinker = Shrinker(model.net, guide, x, optimiser, loss.elbo, patience=1)
    for part, state in zip((shrinker, model, guide, optimiser), states, strict=True):
        part.load_state_dict(state)
    assert train(loss, optimiser, x, y, 3) == expected


def test_a_site_without_open_gates_leaves():
    """From the network, the guide and the objective's coefficients; weight decay goes on with what is left."""
    layers = dict(one=nn.Conv2d(2, 3, 3, padding=1), gate=L0Gate(3, dim=1), two=nn.Conv2d(3, 2, 3, padding=1))

    def forward(s, x):
        return s.head(s.head_gate((x + s.two(s.gate(s.one(x).relu()))).mean((2, 3))))

    net = Dense(forward, **layers, head_gate=2, head=(2, 2))
    model, x, y = Model(net), torch.randn(4, 2, 5, 5), torch.randint(2, (4,))
    guide, names = AutoGate(model), ("net.gate", "net.head_gate")
    elbo = L0_ELBO("l0", lam=dict.fromkeys(names, 0.1), group_size=dict.fromkeys(names, 2.0))
    elbo.loss(model, guide, x, y)
    set_gates(guide, "net.gate", range(3), -30.0)
    optimiser = torch.optim.Adam([*net.parameters(), *guide.parameters()])
    shrinker = Shrinker(net, guide, x, optimiser, elbo, patience=1)
    assert shrinker.step()
    assert net.one.out_channels == net.two.in_channels == 1  # the code around calls them; what they make is zeros
    assert list(guide.posterior()) == list(shrinker.remaining) == ["net.head_gate"]
    assert elbo.lam == {"net.head_gate": 0.1}
    assert torch.isfinite(torch.tensor(elbo.loss(model, guide, x, y)))
    assert shrinker.full(guide.test_gates())["net.gate"].tolist() == [0.0, 0.0, 0.0]


def test_a_dead_network_is_left_as_it_is():
    """All gates of a layer closed: a warning, and nothing happens."""
    model, guide, loss, optimiser, x, _ = build()
    set_gates(guide, "net.11", range(5), -60.0)
    shrinker = Shrinker(model.net, guide, x, optimiser, loss.elbo, patience=1)
    with pytest.warns(UserWarning, match="output would be a constant"):
        assert not shrinker.step()
    assert model.net[0].out_channels == 4


@pytest.mark.slow
def test_the_example_resumes_across_shrinkings(tmp_path):
    """To the last bit; units have left before and leave after."""
    options = {"lam": (0.15,), "gate_learning_rate": 0.03, "shrink": True}
    straight = mnist.main(Options(epochs=40, out=tmp_path / "straight", **options))
    mnist.main(Options(epochs=32, out=tmp_path, **options))
    resumed = mnist.main(Options(epochs=40, out=tmp_path, resume=True, **options))
    assert resumed["architecture"] == straight["architecture"]
    assert sum(straight["architecture"]) < 464
    net = build_network("mlp", 64)
    name_gates(net, prefix="net.")
    small = load_compacted(net, tmp_path / "pruned")
    assert small.before
    weights = sum(p.numel() for p in small.network.parameters() if p.dim() > 1)
    assert weights == resumed["weights_left"]
    for entry in (*resumed["history"], *straight["history"]):
        entry.pop("gate_shares", None)  # after those epochs that the picture of so many shows
    assert without_seconds(resumed) == without_seconds(straight)
