"""One gated network in a loop of torch, as a model of Pyro, under a budget and through prune."""

import copy
import warnings

import pyro
import pytest
import torch
import torch.nn.functional as F
from pyro import poutine
from pyro.infer import SVI
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from pyro_l0 import HardConcrete, prune
from pyro_l0.callbacks.budget import NetworkBudget
from pyro_l0.compaction import compact
from pyro_l0.infer import L0_ELBO, AutoGate
from pyro_l0.nn import (
    Gate,
    L0Gate,
    NetworkGates,
    fix_gates,
    gate_heads,
    gate_weights,
    insert_gates,
    penalty,
    suggest_gates,
)
from pyro_l0.nn.gate import gate_names
from pyro_l0.nn.weights import fix_weights
from tests.nn.test_l0_gate import Model


class Block(nn.Module):
    """Two convolutions with BatchNorm beside a residual stream."""

    def __init__(self, run=lambda block, x: block(x)):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 5, 3, padding=1), nn.BatchNorm2d(5)
        self.conv2, self.bn2 = nn.Conv2d(5, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.run = run

    def forward(self, x):
        return torch.relu(x + self.run(self.branch, x))

    def branch(self, x):
        return self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))


def images(*blocks):
    stem = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


def encoder():
    layer = nn.TransformerEncoderLayer(8, 4, 12, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Linear(5, 8), layer, nn.Flatten(), nn.Linear(24, 3))


def tied():
    shared = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), shared, shared, nn.Linear(8, 3))


def suggested(net, x):
    return insert_gates(net, suggest_gates(net, x), x)


def heads(net, x):
    return gate_heads(net, {"1.self_attn.out_proj": 4}, x)


def mlp():
    return nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 3))


NETWORKS = {
    "mlp": (mlp, (5,), suggested),
    "residual": (lambda: images(Block(), Block()), (1, 6, 6), suggested),
    "checkpointed": (
        lambda: images(*(Block(lambda block, x: checkpoint(block, x, use_reentrant=False)) for _ in range(2))),
        (1, 6, 6),
        suggested,
    ),
    "heads": (encoder, (3, 5), heads),
    "heads and units": (encoder, (3, 5), lambda net, x: suggested(heads(net, x), x)),
    "weights": (mlp, (5,), lambda net, x: gate_weights(net, "0", "2")),
    "tied": (tied, (5,), lambda net, x: insert_gates(net, {"1": L0Gate(8), "2.1": L0Gate(8)}, x)),
}


def data(shape):
    return torch.randn(12, *shape), torch.arange(12) % 3


def train_by_torch(gated, x, y):
    gates = NetworkGates(gated)
    optimiser = torch.optim.Adam(gated.parameters(), 0.02)
    for _ in range(4):
        optimiser.zero_grad()
        (F.cross_entropy(gated(x), y, reduction="sum") + penalty(gated, 0.1)).backward()
        optimiser.step()
    return gates


def train_by_pyro(gated, x, y):
    pyro.clear_param_store()
    model = Model(gated)
    guide = AutoGate(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), L0_ELBO("l0", lam=0.1))
    for _ in range(4):
        svi.step(x, y)
    return guide


def multiply_adds(net, x):
    """Of a batch in training, where attention is computed by plain products."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        copy.deepcopy(net).train()(x)
    return counter.get_total_flops() / 2


def closed(gates):
    """Every third gate is closed; the others are as they were trained."""
    return {site: torch.where(torch.arange(len(z)) % 3 == 1, 0.0, z) for site, z in gates.items()}


def check_cut(gated, gates, x):
    """What is cut computes what the network does as a model whose gates have these values."""
    if any(".gate" in site and "self_attn" not in site for site in gates):
        small = fix_weights(gated, gates)
    else:
        small = compact(gated, gates, x).network
    assert not gate_names(small)
    with poutine.condition(data=gates):
        expected = gated.eval()(x)
    gated.train()
    torch.testing.assert_close(small.eval()(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("order", ["torch first", "pyro first"])
@pytest.mark.parametrize("name", NETWORKS)
def test_one_gated_network_is_trained_either_way_and_cut(name, order):
    """The same object: its own parameters, a guide's, and its own again, each exactly what is cut."""
    torch.manual_seed(0)
    make, shape, gate = NETWORKS[name]
    x, y = data(shape)
    gated = gate(make(), x)
    sites = list(gate_names(gated))
    for train in (train_by_torch, train_by_pyro) if order == "torch first" else (train_by_pyro, train_by_torch):
        before = {site: layer.location.detach().clone() for site, layer in gate_names(gated).items()}
        guide = train(gated, x, y)
        moved = {site: not torch.equal(layer.location, before[site]) for site, layer in gate_names(gated).items()}
        assert set(moved.values()) == {train is train_by_torch}  # a guide has parameters of its own
        assert list(guide.posterior()) == list(guide.test_gates())
        assert set(guide.posterior()) == set(sites)
        for z, location in zip(guide.posterior().values(), guide.locations(), strict=True):
            assert z.batch_shape == location.shape
        check_cut(gated, closed(guide.test_gates()), x)


@pytest.mark.parametrize("name", ["mlp", "residual", "heads and units", "tied"])
def test_the_same_object_under_a_budget_and_through_prune(name):
    """Multiply-adds are those that torch counts when what is left is called."""
    torch.manual_seed(0)
    make, shape, gate = NETWORKS[name]
    x, y = data(shape)
    gated = gate(make(), x)
    full = multiply_adds(make(), x)
    train_by_pyro(gated, x, y)  # which leaves the gates to a guide, until prune or a budget takes them
    assert not any(True for layer in gate_names(gated).values() for _ in layer.parameters())
    given = copy.deepcopy(gated.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few steps, and of what the budget leaves unused
        result = prune(gated, F.cross_entropy, [(x, y)] * 8, x[:2], 0.6, epochs=6, pretrained=False)
    assert all(torch.equal(value, given[key]) for key, value in gated.state_dict().items())  # a copy is trained
    assert multiply_adds(result.network, x) <= 0.6 * full

    budget = NetworkBudget(gated, x, 0.6)
    weights = [p for p in gated.parameters() if p not in set(budget.gates.parameters())]
    optimiser = torch.optim.Adam(weights, 0.01)
    budget.start(40, 0, gated.parameters())
    for _ in range(40):
        optimiser.zero_grad()
        F.cross_entropy(gated(x), y).backward()
        budget.step()
        optimiser.step()
    small = budget.finish()
    assert multiply_adds(small, x) <= 0.6 * full
    expected = fix_gates(gated, budget.gates.test_gates()).eval()(x)
    torch.testing.assert_close(small.eval()(x), expected, rtol=1e-4, atol=1e-5)


def test_a_row_of_units_has_its_gate():
    """The same layer, with the arguments in the order of a model; its gates start alike."""
    gate, other = Gate(8, 1), L0Gate(8, dim=1, init_jitter=0.0)
    assert isinstance(gate, L0Gate)
    assert gate.state_dict().keys() == other.state_dict().keys()
    for name, value in gate.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[name], rtol=0, atol=0)
    assert Gate(8, prior=HardConcrete(1.0)).prior.log_alpha.tolist() == [1.0] * 8
    gated = insert_gates(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), {"1": Gate(8)})
    assert [type(x) for x in gated.modules() if isinstance(x, L0Gate)] == [Gate]
