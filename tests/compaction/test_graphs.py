"""Shrinking and compaction of networks with shared gates, residual sums, sizes as arguments and aliases."""

import pytest
import torch
from pyro import poutine
from torch import nn

from pyro_l0.compaction import Shrinker, compact, load_compacted
from pyro_l0.infer import AutoGate
from pyro_l0.nn import L0Gate, NetworkCost, fix_gates
from pyro_l0.nn.gate import gate_names, name_gates
from pyro_l0.nn.square_norms import square_norms
from tests.compaction.networks import cut, started
from tests.networks import Dense


def shrunk(net, x, closed):
    """Close gates, shrink, and check that nothing else has changed."""
    model, guide, optimiser, shrinker = started(net.double(), x)
    close(model, guide, shrinker, x, closed)
    return model, guide, optimiser, shrinker


def close(model, guide, shrinker, x, closed):
    for site, places in closed.items():
        guide.close(site, torch.tensor(places))
    # Open gates between 0 and 1, so that a constant behind one shows.
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter[parameter > -3] = 0.3
    norms = [module for module in model.net.modules() if isinstance(module, nn.BatchNorm1d)]
    for module in norms:  # the limit of channels that are always zero, which shrinking sets
        module.running_mean.zero_()
    before = fix_gates(model.net, guide.test_gates()).eval()(x.clone())
    assert shrinker.step()
    torch.testing.assert_close(fix_gates(model.net, guide.test_gates()).eval()(x.clone()), before, rtol=0, atol=1e-12)
    assert compact(model.net, guide.test_gates(), x).certificate < 1e-12


def vectors(seed=0):
    torch.manual_seed(seed)
    return torch.randn(5, 3, dtype=torch.float64)


def residual():
    def forward(net, x):
        x = torch.relu(net.first(x))
        x = x + net.g(torch.relu(net.a(x)))
        x = x + net.h(torch.relu(net.b(x)))
        return net.last(x)

    return Dense(forward, g=4, h=4, first=(3, 4), a=(4, 4), b=(4, 4), last=(4, 2))


def test_a_residual_network_shrinks_twice(tmp_path):
    """What the first shrinking put between the layers is read by the second, by costs and by compaction."""
    x = vectors()
    model, guide, _, shrinker = shrunk(residual(), x, {"net.g": [1]})
    close(model, guide, shrinker, x, {"net.h": [2]})
    assert NetworkCost(model.net, x).group_sizes == {"net.g": 5.0, "net.h": 2.0}
    norms = square_norms(model.net, x)
    expected = model.net.b.weight.square().sum(0)[[0, 2, 3]] + model.net.last.weight.square().sum(0)[[0, 2, 3]]
    torch.testing.assert_close(norms["net.g"](), expected)
    result = compact(model.net, guide.test_gates(), x, before=shrinker.plans)
    result.save(tmp_path / "small")
    fresh = residual().double()
    name_gates(fresh, "net.")
    loaded = load_compacted(fresh, tmp_path / "small").network
    torch.testing.assert_close(loaded(x), result.network(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("function", "closed", "kept"),
    [
        (
            lambda s, x: s.b(s.k(s.g(s.a(x)))) + s.d(s.l(s.g(s.c(x)))),
            {"net.k": [0], "net.l": [1]},
            {"net.g": 4, "net.k": 3, "net.l": 3},
        ),
        (lambda s, x: s.b(s.k(s.g(s.a(x)))) + s.d(s.g(s.c(x))), {"net.k": [0]}, {"net.g": 4, "net.k": 3}),
        (lambda s, x: s.d(s.g(s.c(x))) + s.b(s.k(s.g(s.a(x)))), {"net.k": [0, 1, 2, 3]}, {"net.g": 4}),
    ],
)
def test_a_gate_at_two_places_keeps_what_either_needs(function, closed, kept):
    gates = {"g": 4, "k": 4} | ({"l": 4} if "net.l" in closed else {})
    network = Dense(function, a=(3, 4), c=(3, 4), b=(4, 2), d=(4, 2), **gates)
    model, guide, _, shrinker = shrunk(network, vectors(), closed)
    assert {site: len(units) for site, units in shrinker.remaining.items()} == kept
    assert guide.posterior().keys() == gate_names(model.net).keys()


def test_other_gates_of_the_guide_are_left_alone():
    """An encoder shrinks, the decoder's gates do not."""
    encoder, decoder = (
        nn.Sequential(nn.Linear(3, 4), L0Gate(4), nn.Linear(4, 3)),
        nn.Sequential(nn.Linear(3, 3), L0Gate(3)),
    )
    model = Dense(lambda net, x: net.decoder(net.net(x)), net=encoder, decoder=decoder).double()
    guide, x = AutoGate(model), vectors()
    name_gates(model)
    guide(x)
    optimiser = torch.optim.Adam([*model.parameters(), *guide.parameters()])
    shrinker = Shrinker(model.net, guide, x, optimiser, patience=1)
    guide.close("net.1", torch.tensor([0]))
    assert shrinker.step()
    assert gate_names(model)["net.1"].size == 3
    assert guide.posterior().keys() == {"net.1", "decoder.1"}


@pytest.mark.parametrize("kind", ["parametrised", "tied"])
def test_weights_that_are_computed_or_shared(kind):
    """Weight normalisation, and one weight of two layers."""
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), L0Gate(3), nn.Linear(3, 3))
    if kind == "tied":
        net[3].weight = net[0].weight
    else:
        nn.utils.parametrizations.weight_norm(net[0])
    model, guide, _, shrinker = started(net.double(), vectors())
    guide.close("net.2", torch.tensor([1]))
    before = fix_gates(model.net, guide.test_gates()).eval()(vectors())
    assert shrinker.step() == (kind == "parametrised")
    fixed = fix_gates(model.net, {"net.2": guide.test_gates()["net.2"]}).eval()
    torch.testing.assert_close(fixed(vectors()), before, rtol=0, atol=1e-12)
    if kind == "tied":
        assert net[3].weight is net[0].weight


def test_an_optimiser_with_other_shapes_is_refused():
    x = vectors()
    model, guide, optimiser, shrinker = started(
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(), L0Gate(4), nn.Linear(4, 2)).double(), x, torch.optim.Adafactor
    )
    poutine.trace(model).get_trace(x).nodes["_RETURN"]["value"].sum().backward()
    optimiser.step()
    guide.close("net.2", torch.tensor([1]))
    with pytest.raises(ValueError, match=r"'row_var' of Adafactor has \(4, 1\) for \(4, 3\); train with Adam"):
        shrinker.step()
    assert model.net[0].out_features == 4


def flattened(net, x):
    """Holds the number of a dimension, which is also the number of its channels."""
    return net.last(net.gate(net.first(x)).flatten(net.start))


def frozen(net, x):
    """Takes features without gradients, and adds columns, of which there are none here."""
    with torch.inference_mode():
        features = net.features(x).mean((2, 3))
    y = net.last(net.gate(net.first(features.clone()).relu()))
    for column in x[:, 2:].unbind(1):
        y = y + column.mean()
    return y


@pytest.mark.parametrize(
    ("forward", "layers"),
    [
        (flattened, dict(first=nn.Conv2d(2, 2, 1), gate=L0Gate(2, dim=1), last=nn.Conv1d(2, 2, 1))),
        (frozen, dict(features=nn.Conv2d(2, 4, 1), first=(4, 2), gate=2, last=(2, 2))),
    ],
    ids=["flattened", "frozen"],
)
def test_a_dimension_that_is_held_and_features_without_gradients(forward, layers):
    network, x = Dense(forward, **layers).eval(), torch.randn(3, 2, 4, 5)
    network.start = 2
    assert cut(network, {"gate": torch.tensor([1.0, 0.0])}, x, x + 1).first.weight.shape[0] == 1
