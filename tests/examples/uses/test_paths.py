"""Active weights against paths that are enumerated, and units that leave while a network trains."""

import itertools
import math

import pytest
import torch
from torch import nn

from common.bayesian import InputSkipMLP
from common.paths import OpenUnits, WeightGates, active_weights
from pyro_l0.bayes import SpikeSlabPrior, bayesian, kl
from pyro_l0.compaction import Shrinker


def random_gates(net, share, seed):
    """Open so many of a network's weights, and close the others for good."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name.endswith("logits"):
                parameter.copy_(torch.where(torch.rand(parameter.shape, generator=noise) < share, 9.0, -9.0))
    return net


def enumerated(net, sizes):
    """The weights on paths from an input to an output of an InputSkipMLP, by following every edge."""
    inputs, *hidden, _ = sizes
    edges = []  # from, to, layer, row, column
    for k, layer in enumerate(net.layers):
        for row, column in (layer.logits > 0).nonzero().tolist():
            before = hidden[k - 1] if k else 0
            source = ("in", column - before) if column >= before else (k - 1, column)
            edges.append((source, (k, row), k, row, column))
    last = len(net.layers) - 1
    reached, useful = {("in", i) for i in range(inputs)}, {(last, i) for i in range(sizes[-1])}
    for _ in sizes:
        reached |= {to for source, to, *_ in edges if source in reached}
        useful |= {source for source, to, *_ in edges if to in useful}
    return {
        index
        for source, to, *index in map(tuple, edges)
        for index in [tuple(index)]
        if source in reached and to in useful
    }


def test_active_weights_are_those_on_enumerated_paths():
    sizes = (4, 5, 3, 2)
    for seed, share in itertools.product(range(10), (0.15, 0.3)):
        net = random_gates(bayesian(InputSkipMLP(*sizes)), share, seed)
        active = active_weights(net, torch.randn(2, 4))
        found = {
            (int(path.split(".")[1]), *index)
            for path, on in active.items()
            for index in map(tuple, on.nonzero().tolist())
        }
        assert found == enumerated(net, sizes)


def test_active_weights_of_a_convolutional_network():
    """An input map, a kernel and a dense column that lead nowhere are not active; the input's sign does not matter."""
    net = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 2)
    )
    net = random_gates(bayesian(net), 2.0, 0)
    with torch.no_grad():
        net[0].logits[0] = -9.0  # the first map reads nothing
        net[5].logits[:, 4:8] = -9.0  # nothing reads the second
    active = active_weights(net, -torch.ones(1, 2, 6, 6))
    assert not active["0"][:2].any()
    assert active["0"][2].all()
    assert not active["5"][:, :8].any()
    assert active["5"][:, 8:].all()


def test_units_that_nothing_reads_leave_with_their_optimiser_states():
    """The bound stays what it was but for what left, and the next step is the step that the whole network takes."""
    torch.manual_seed(0)
    whole = random_gates(bayesian(InputSkipMLP(6, 5, 4, 2), SpikeSlabPrior(0.1)), 0.3, 1)
    x, y = torch.randn(40, 6), torch.randint(2, (40,))
    optimiser = torch.optim.Adam(whole.parameters(), 0.01)
    for _ in range(3):
        optimiser.zero_grad()
        (40 * nn.functional.cross_entropy(whole(x), y) + kl(whole)).backward()
        optimiser.step()
    before = whole.eval()(x)
    total = sum(layer.mean.numel() for layer in whole.layers)
    shrinker = Shrinker(whole, WeightGates(whole, x[:2]), x[:2], optimiser, patience=1)
    assert shrinker.step()
    assert sum(layer.mean.numel() for layer in whole.layers) < total
    torch.testing.assert_close(whole.eval()(x), before)
    for parameter in whole.parameters():
        assert optimiser.state[parameter]["exp_avg"].shape == parameter.shape
    whole.train()
    kl(whole).backward()
    optimiser.step()


@pytest.mark.parametrize(("prior", "limit"), [(0.05, 0.1), (0.4, 0.5), (0.9, 0.5)])
def test_units_are_closed_up_to_twice_the_prior_probability(prior, limit):
    net = bayesian(InputSkipMLP(3, 2, 1), SpikeSlabPrior(prior))
    gates = WeightGates(net, torch.ones(1, 3))
    for probability, is_open in ((limit - 0.01, 0.0), (limit + 0.01, 1.0)):
        with torch.no_grad():
            for layer in net.layers:
                layer.logits.fill_(math.log(probability / (1 - probability)))
        assert all((unit.test_gate == is_open).all() for unit in gates.posterior().values())


def test_open_units_change_nothing():
    x = torch.randn(2, 3)
    assert torch.equal(OpenUnits(3)(x), x)
