"""L0Gate and what takes it: values, gradients, the tools of torch, budgets, compaction, shrinking and diagnosis."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import kl_divergence
from torch.utils.checkpoint import checkpoint

from pyro_l0 import ExponentialGate, HardConcrete, PowerLawGate, RectifiedNormal, fast
from pyro_l0.compaction import Shrinker, compact
from pyro_l0.diagnostics import diagnose
from pyro_l0.infer import L0_ELBO, AutoGate, SparsityTarget, factor
from pyro_l0.nn import L0Gate, NetworkCost, NetworkGates, penalty
from pyro_l0.nn.gate import name_gates
from pyro_l0.nn.l0_gate import FAMILIES
from tests.cases import first_by_default, new_compiler
from tests.networks import Dense

X, Y = torch.linspace(-2, 2, 8 * 6).view(8, 6).sin(), torch.arange(8) % 3


def network(gate=None, other=None):
    """A small classifier with gates behind its hidden units."""
    torch.manual_seed(0)
    layers = nn.Linear(6, 10), nn.ReLU(), gate or L0Gate(10), nn.Linear(10, 7), nn.ReLU(), other or L0Gate(7)
    return nn.Sequential(*layers, nn.Linear(7, 3))


def loss(net, x=X, y=Y):
    return F.cross_entropy(net(x), y, reduction="sum")


class Model(nn.Module):
    """The classifier as a model."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, y):
        factor("y", -loss(self.net, x, y))


# ------------------------------------------------------------ values and gradients


@pytest.mark.parametrize("objective", ["l0", "free_energy"])
@pytest.mark.parametrize("family", [HardConcrete, ExponentialGate, PowerLawGate])
def test_a_plain_loss_is_that_of_the_objective_bit_for_bit(family, objective):
    prior = family.from_active_prob(0.3)
    sizes = {"net.2": 7.0, "net.5": 3.0}
    model = Model(network(L0Gate(10, prior=prior), L0Gate(7, prior=prior)))
    name_gates(model)
    guide = AutoGate(model, family, init_jitter=0.5)
    guide(X, Y)
    net = network(L0Gate(10, family=family), L0Gate(7, family=family))
    net.load_state_dict(model.net.state_dict(), strict=False)
    key = next(iter(family.learned))
    with torch.no_grad():
        for gate, location in zip((net[2], net[5]), guide.locations(), strict=True):
            getattr(gate, key).copy_(location)
    with fast.disabled():
        torch.manual_seed(1)
        theirs = L0_ELBO(objective, lam=0.01, group_size=sizes)(model, guide)(X, Y)
        theirs.backward()
        torch.manual_seed(1)
        ours = loss(net) + 0.01 * 7.0 * net[2].active_prob.sum() + 0.01 * 3.0 * net[5].active_prob.sum()
        if objective == "free_energy":
            ours = ours + (net[2].kl(prior) + net[5].kl(prior))
        ours.backward()
    assert torch.equal(ours, theirs)
    for name, parameter in model.net.named_parameters():
        assert torch.equal(parameter.grad, net.get_parameter(name).grad), name
    for gate, location in zip((net[2], net[5]), guide.locations(), strict=True):
        assert torch.equal(getattr(gate, key).grad, location.grad)
    with torch.no_grad():
        terms = L0_ELBO("l0", lam=0.01, group_size=sizes).terms(model, guide, X, Y)
        assert torch.equal(penalty(net, {"2": 0.01 * 7.0, "5": 0.01 * 3.0}), terms["l0"])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_draws_in_training_and_is_deterministic_in_evaluation(family):
    torch.manual_seed(2)
    gate = L0Gate(4, 3, family=family, init_active_prob=0.6)
    assert gate().shape == (4, 3)
    draws = torch.stack([gate() for _ in range(1000)])
    error = ((draws != 0).float().mean(0) - gate.active_prob).abs().max()
    assert error < 5 * 0.5 / 1000**0.5
    assert torch.allclose(gate.active_prob, torch.full((4, 3), 0.6), atol=0.05)
    assert torch.equal(gate.expected_l0(), gate.active_prob.sum())
    gate.eval()
    assert torch.equal(gate(), gate.distribution.test_gate)
    x = torch.randn(2, 4, 3)
    assert torch.equal(gate(x), x * gate.test_gate)
    assert torch.equal(gate(x.transpose(0, 1).transpose(1, 2), 1), (x * gate.test_gate).transpose(0, 1).transpose(1, 2))


@pytest.mark.parametrize("family", FAMILIES)
def test_gates_from_logits(family):
    logits = torch.tensor([[-1.0, 0.5], [0.0, 1.0]], requires_grad=True)
    gate = L0Gate.from_logits(logits, family=family)
    assert torch.allclose(gate.active_prob, torch.sigmoid(logits), atol=1e-5)
    (slope,) = torch.autograd.grad(gate.expected_l0(), logits)
    assert torch.allclose(slope, torch.sigmoid(logits) * torch.sigmoid(-logits), atol=1e-4)
    assert not list(gate.parameters())
    assert torch.equal(gate.eval()(), gate.test_gate)
    assert gate(torch.ones(2, 2, 5), 1).shape == (2, 2, 5)


def test_logits_of_a_hard_concrete_keep_their_gradient_in_the_tails():
    logits = torch.tensor([-40.0, 40.0], requires_grad=True)
    gate = L0Gate.from_logits(logits)
    gate.distribution.log_prob_zero.sum().backward()
    assert torch.allclose(gate.distribution.log_active_prob[0], logits[0])
    assert logits.grad[1] == -1
    half = L0Gate.from_logits(torch.zeros(2, dtype=torch.bfloat16))
    assert half().dtype == torch.float32


def test_kl_and_penalty():
    torch.manual_seed(3)
    net = network(L0Gate(10, init_jitter=1.0), L0Gate(7, init_jitter=1.0, family=RectifiedNormal))
    prior = HardConcrete.from_active_prob(0.2)
    assert torch.equal(net[2].kl(prior), kl_divergence(net[2].distribution, prior.expand((10,))).sum())
    probs = {"2": net[2].active_prob, "5": net[5].active_prob}
    assert torch.allclose(penalty(net, 0.5), 0.5 * sum(x.sum() for x in probs.values()))
    cost = NetworkCost(net, X)
    assert torch.equal(penalty(net, cost.macs), cost.macs(probs))


@pytest.mark.parametrize("family", ["hard_concrete", "rectified_normal", "exponential", "power_law"])
def test_the_price_beside_a_draw_is_that_of_the_gates_as_they_are(family):
    """With one backward pass for loss and price, and with one each in either order; after a change, and elsewhere."""
    net = network(*(L0Gate(n, family=family, init_jitter=1.0) for n in (10, 7)))
    parameters = list(NetworkGates(net).parameters())
    prices = {"2": 0.3, "5": 2.0}

    def by_gates():
        return sum(c * net.get_submodule(site).active_prob.sum() for site, c in prices.items())

    def slopes(*losses):
        net.zero_grad()
        for each in losses:
            each.backward()
        return [p.grad for p in parameters]

    close, expected = torch.testing.assert_close, slopes(by_gates())
    close(slopes(net(X).sum() * 0 + penalty(net, prices)), expected)
    task = net(X).sum() * 0
    close(slopes(task, penalty(net, prices)), expected)
    task = net(X).sum() * 0
    close(slopes(penalty(net, prices), task), expected)
    task.detach_()
    close(slopes(penalty(net, prices)), expected)
    net(X)
    close(slopes(penalty(net, prices), penalty(net, prices)), [2 * x for x in expected])
    net(X)
    with torch.no_grad():
        assert not penalty(net, prices).requires_grad
        parameters[0].add_(1)
    close(penalty(net, prices), by_gates())
    net.eval()(X)
    close(penalty(net, prices), by_gates())
    net.train()(X)
    net[2].narrow(torch.arange(3))
    close(penalty(net, prices), by_gates())


# ------------------------------------------------------------ the tools of torch


@new_compiler
@pytest.mark.parametrize("family", first_by_default(sorted(FAMILIES, key="hard_concrete".__ne__)))
def test_the_compiler_takes_it_whole(family):
    torch._dynamo.reset()
    net = network(L0Gate(10, family=family), L0Gate(7, family=family))

    def run(x):
        return net(x).sum() + penalty(net, 0.1) + net[2].distribution.test_gate.sum()

    torch.compile(run, fullgraph=True, backend="eager")(X).backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in net.parameters())
    net.eval()
    assert torch.allclose(torch.compile(net, fullgraph=True, backend="eager")(X), net(X))


def test_an_exported_network_has_the_deterministic_gates():
    net = network().eval()
    exported = torch.export.export(net, (X,)).module()
    assert torch.allclose(exported(X), net(X), atol=1e-6)


def test_half_precision_is_computed_in_float32():
    net = network()
    with torch.autocast("cpu", torch.bfloat16):
        assert net(X).dtype == torch.bfloat16
        assert net[2]().dtype == torch.float32
    assert net.half()[2]().dtype == torch.float32
    assert net[2](torch.ones(2, 10, dtype=torch.float16)).dtype == torch.float16


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block_draws_the_same_gates_again(reentrant):
    net, found = network(), []
    x = X.clone().requires_grad_()
    for run in (net, lambda x: checkpoint(net, x, use_reentrant=reentrant)):
        net.zero_grad()
        torch.manual_seed(5)
        F.cross_entropy(run(x), Y).backward()
        found.append([p.grad.clone() for p in net.parameters()])
    assert all(torch.allclose(one, other, atol=1e-7) for one, other in zip(*found, strict=True))


# ------------------------------------------------------------ what takes a guide


def test_a_budget_a_compacted_network_and_a_diagnosis():
    torch.manual_seed(6)
    net = network()
    gates, cost = NetworkGates(net), NetworkCost(net, X)
    assert cost.total_parameters == sum(p.numel() for i in (0, 3, 6) for p in net[i].parameters())
    weights = [p for i in (0, 3, 6) for p in net[i].parameters()]
    target = SparsityTarget(gates, 0.4, cost.macs, steps=100)
    options = [{"params": weights, "lr": 1e-2}, {"params": gates.locations(), **target.optimiser_options}]
    optimiser = torch.optim.Adam(options)
    for _ in range(100):
        optimiser.zero_grad()
        loss(net).backward()
        target.add_gradient()
        optimiser.step()
        target.ascend()
    assert 0.3 < float(target.fraction()) <= 0.4
    found = diagnose(gates, optimiser, loss=lambda x, y: loss(net, x, y), batches=[(X, Y)], network=net, target=target)
    assert "gates-not-trained" not in found.codes
    small = compact(net, gates.test_gates(), X)
    assert torch.allclose(small.network(X), net.eval()(X), atol=1e-5)
    assert not [m for m in small.network.modules() if isinstance(m, L0Gate)]
    assert small.network[0].out_features == int((gates.test_gates()["2"] != 0).sum())


def test_an_optimiser_without_the_gates_is_found():
    net = network()
    found = diagnose(NetworkGates(net), torch.optim.Adam(net[0].parameters()), steps_left=10)
    assert "gates-not-trained" in found.codes


def test_a_network_that_shrinks_while_it_trains():
    net = network()
    gates, optimiser = NetworkGates(net), torch.optim.Adam(net.parameters(), 1e-3)
    loss(net).backward()
    optimiser.step()
    with torch.no_grad():
        net[2].log_alpha[3:] = -20.0
    shrinker = Shrinker(net, gates, X, optimiser, patience=1)
    kept = net[2].log_alpha.detach()[:3].clone()
    moments = optimiser.state[net[2].log_alpha]["exp_avg"][:3].clone()
    assert shrinker.step()
    assert net[0].out_features == net[2].size == len(gates.locations()[0]) == 3
    assert gates.locations()[0] is net[2].log_alpha
    assert torch.equal(net[2].log_alpha.detach(), kept)
    assert torch.equal(optimiser.state[net[2].log_alpha]["exp_avg"], moments)
    optimiser.zero_grad()
    (loss(net) + penalty(net, 0.1)).backward()
    optimiser.step()
    assert not torch.equal(net[2].log_alpha.detach(), kept)


def test_values_of_gates_may_be_changed_in_place():
    """They are the caller's own, and not those with which the network's call multiplies."""
    network = Dense(lambda s, x: (s.gate().clamp_(max=0), s.gate(x))[1], gate=3)
    NetworkGates(network)
    torch.manual_seed(0)
    assert network(torch.ones(2, 3)).any()
