"""A network that shrinks while it trains stays the user's own, and trains as the whole one does."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from pyro import poutine
from torch import nn
from torch.utils.checkpoint import checkpoint

from pyro_l0.compaction import Shrinker, compact
from pyro_l0.infer import L0_ELBO, AutoGate
from pyro_l0.nn import L0Gate, fix_gates
from tests.compaction.networks import Model, set_gates, started
from tests.engine.zoo import attention as zoo
from tests.networks import Net

STEPS = 50
X = torch.ones(2, 3)
AT = (10, 22, 35)  # the steps in front of which units leave


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 12), nn.Linear(12, 10), nn.Linear(10, 3)
        self.g, self.h = L0Gate(12), L0Gate(10)

    def first(self, x):
        return self.g(F.gelu(self.a(x)))

    def block(self, h):
        return self.h(torch.tanh(self.b(h)))

    def forward(self, x):
        return self.c(self.block(self.first(x)))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(2, 3, 2, stride=2), nn.Sequential(residual_block(3), residual_block(3))
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        x = self.blocks(self.stem(x.view(-1, 2, 2, 2)))
        return self.head(x.mean((2, 3)))


def residual_block(width):
    return Net(
        lambda net, x: x + net.two(net.gate(F.relu(net.norm(net.one(x))))),
        one=nn.Conv2d(width, 2 * width, 3, padding=1, bias=False), norm=nn.BatchNorm2d(2 * width),
        gate=L0Gate(2 * width, dim=1), two=nn.Conv2d(2 * width, width, 3, padding=1),
    )  # fmt: skip


class Transformer(nn.Module):
    """A block with a number of heads that its code reads."""

    def __init__(self):
        super().__init__()
        self.embed, self.places, self.head = nn.Linear(2, 8), nn.Parameter(torch.randn(4, 8)), nn.Linear(8, 3)
        self.block = zoo.Block(8, 4, fused=True, fixed=True)
        self.block.dropout.p = 0.0

    def forward(self, x):
        return self.head(self.block(self.embed(x.view(-1, 4, 2)) + self.places).mean(1))


OPTIMISERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.002, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.001, centered=True),
}


def trained(make, optimiser, shrinks, steps=STEPS):
    """The losses of training with gates that are closed for certain one after the other."""
    torch.manual_seed(0)
    net = make().double()
    model = Model(net)
    x, y = torch.randn(16, 8).double(), torch.randint(3, (16,))
    guide = AutoGate(model)
    loss = L0_ELBO("l0", lam=0.0)(model, guide)
    loss(x, y)
    sizes = {site: len(gate) for site, gate in guide.test_gates().items()}
    for site in sizes:
        set_gates(guide, site, range(sizes[site]), 60.0)
    optimiser = OPTIMISERS[optimiser]([*model.parameters(), *guide.parameters()])
    shrinker = Shrinker(net, guide, x[:3], optimiser, patience=1)
    parameters, losses, cuts = list(net.parameters()), [], 0
    for step in range(steps):
        if step in AT:
            for site, size in sizes.items():
                closing = set(range(AT.index(step), size, 5))
                left = shrinker.remaining[site].tolist()
                set_gates(guide, site, [place for place, unit in enumerate(left) if unit in closing], -60.0)
            cuts += shrinks and shrinker.step()
        optimiser.zero_grad()
        value = loss(x, y)
        value.backward()
        optimiser.step()
        losses.append(value.item())
    assert all(one is other for one, other in zip(parameters, net.parameters(), strict=True))
    return torch.tensor(losses, dtype=torch.float64), net, cuts


@pytest.mark.parametrize(
    ("make", "optimiser"),
    [(Mlp, "sgd"), (Mlp, "adam"), (Mlp, "adamw"), (Mlp, "rmsprop"), (Residual, "adam"), (Transformer, "adamw")],
)
def test_losses_are_those_of_the_whole_network(make, optimiser):
    """To 1e-12 in every one of fifty steps, with three shrinkings; the network's class and parameters stay."""
    whole, net, _ = trained(make, optimiser, False)
    small, cut, cuts = trained(make, optimiser, True)
    assert cuts == 3
    torch.testing.assert_close(small, whole, rtol=1e-12, atol=1e-12)
    assert whole[0] > whole[-1]
    assert type(cut) is make
    assert sum(p.numel() for p in cut.parameters()) < 0.7 * sum(p.numel() for p in net.parameters())


# ------------------------------------------------------------ what a rewriting would lose


class Negative(torch.autograd.Function):
    """The identity, with another gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return -0.5 * grad


class Hooked(Mlp):
    """A forward hook, hooks of parameters, and methods and attributes of its own."""

    def __init__(self):
        super().__init__()
        self.seen = []
        self.b.register_forward_hook(lambda module, inputs, output: 2 * output)
        self.b.weight.register_hook(lambda grad: 3 * grad)
        self.a.weight.register_post_accumulate_grad_hook(lambda p: self.seen.append(tuple(p.grad.shape)))

    def hidden(self):
        return self.a.out_features


class WithoutGradient(Mlp):
    @torch.no_grad()
    def first(self, x):
        return super().first(x)


class CustomBackward(Mlp):
    def first(self, x):
        return Negative.apply(super().first(x))


class InTraining(Mlp):
    """In training, a part of the rows, others in every call."""

    calls = 0

    def block(self, h):
        if not self.training:
            return super().block(h)
        self.calls += 1
        rows = (7 * torch.arange(len(h)) + 3 * self.calls) % 5 > 0
        return super().block((h + 0.1 * h.square()) * rows[:, None])


class Checkpointed(Mlp):
    def block(self, h):
        return self.h(checkpoint(lambda h: torch.tanh(self.b(h)), h, use_reentrant=False))


@pytest.mark.parametrize("make", [Hooked, WithoutGradient, CustomBackward, InTraining, Checkpointed])
def test_code_of_the_network_stays(make):
    """Hooks, no_grad, a custom backward function, code for training and checkpointing act on."""
    whole, net, _ = trained(make, "adam", False, 40)
    small, cut, cuts = trained(make, "adam", True, 40)
    assert cuts == 3
    torch.testing.assert_close(small, whole, rtol=1e-12, atol=1e-12)
    if make is Hooked:
        assert cut.seen[0] == (12, 8)
        assert cut.seen[-1] == (cut.hidden(), 8) == (4, 8)
        assert len(cut.seen) == len(net.seen)
    if make is WithoutGradient:
        assert cut.a.weight.grad is None
    if make is InTraining:
        assert cut.calls == net.calls > 40 - 1


def dense():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), L0Gate(4), nn.Linear(4, 2))


def test_nothing_is_used_up_by_looking():
    """No state, gradient, mode or random number, when the shrinker is made and when nothing is closed."""
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), L0Gate(4), nn.Dropout(0.5), nn.Linear(4, 2))
    net[0].weight.requires_grad_(False)
    net[4].eval()
    model, guide, *_ = started(net, X)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    state = torch.get_rng_state()
    shrinker = Shrinker(net, guide, torch.ones(1, 3), torch.optim.SGD(net.parameters(), 0.1), patience=1)
    assert not shrinker.step()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [module.training for module in net] == [True, True, True, True, False, True]
    guide.close("net.3", torch.tensor([1]))
    assert shrinker.step()
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in net] == [True, True, True, True, False, True]
    assert [p.requires_grad for p in net[0].parameters()] == [False, True]


@pytest.mark.parametrize("bias", [True, False])
def test_batch_norm_behind_a_gate_is_exact_in_training(bias):
    """What its shift hands on goes into the next bias, a new one perhaps; outputs and gradients stay as they are."""
    torch.manual_seed(1)  # with which no rectifier is closed
    net = nn.Sequential(
        nn.Linear(3, 6), nn.ReLU(), L0Gate(6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2, bias=bias)
    ).double()
    nn.init.normal_(net[3].bias)
    nn.init.normal_(net[3].running_mean)
    x = torch.randn(8, 3).double()
    _, guide, optimiser, shrinker = started(net, x, torch.optim.SGD)
    guide.close("net.2", torch.tensor([1, 4]))
    set_gates(guide, "net.2", [0, 2, 3, 5], 60.0)
    left, results = [0, 2, 3, 5], []
    for _ in range(2):
        fixed = fix_gates(net, {"net.2": guide.test_gates()["net.2"].double()}).train()
        y = fixed(x)
        y.sin().sum().backward()
        results.append((y.detach(), [p.grad for p in fixed.parameters()]))
        if len(results) == 1:
            assert shrinker.step()
    (expected, whole), (got, small) = results
    torch.testing.assert_close(got, expected, rtol=4e-15, atol=4e-15)
    for full, part in zip(whole, small, strict=False):
        full = full[left] if full.shape[0] == 6 else full
        full = full[:, left] if full.dim() == 2 and full.shape[1] == 6 else full
        torch.testing.assert_close(part, full, rtol=2e-14, atol=2e-14)
    assert any(p is net[5].bias for group in optimiser.param_groups for p in group["params"])
    assert net[3].num_features == 4


def test_gradients_and_gradient_nodes_that_are_alive():
    """A gradient is cut with its parameter; nodes that accumulate gradients take the new shape."""
    net = dense()
    model, guide, _, shrinker = started(net, X, torch.optim.SGD)
    nodes = [p.expand_as(p).grad_fn.next_functions[0][0] for p in net.parameters()]
    expected = [torch.randn_like(p) for p in net.parameters()]
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        parameter.grad = gradient.clone()
    guide.close("net.2", torch.tensor([1]))
    assert shrinker.step()
    rows = [0, 2, 3]
    assert torch.equal(net[0].weight.grad, expected[0][rows])
    assert torch.equal(net[3].weight.grad, expected[2][:, rows])
    fix_gates(model, guide.test_gates())(torch.ones(2, 3)).sum().backward()
    with poutine.trace():
        net(torch.ones(2, 3)).sum().backward()
    assert len(nodes) == 4


def test_a_refused_shrinking_changes_nothing():
    """Neither the network nor the guide, where the example leaves out a part of a module that is cut."""
    network = Net(
        lambda net, x, other=False: F.linear(x, net.other if other else net.weight),
        **{name: nn.Parameter(torch.ones(4, 3)) for name in ("weight", "other")},
    )
    net = nn.Sequential(network, nn.ReLU(), L0Gate(4), nn.Linear(4, 2))
    _, guide, _, shrinker = started(net, X, torch.optim.SGD)
    guide.close("net.2", torch.tensor([1]))
    message = r"uses all parameters of module '0', .* but '0.other' was not used; give a list"
    with pytest.raises(ValueError, match=message):
        shrinker.step()
    assert net[0].weight.shape == (4, 3)
    assert len(guide.test_gates()["net.2"]) == net[2].size == 4


def test_on_shrink_is_called_after_a_shrinking(monkeypatch):
    """And not without one; without it, several processes are told to wrap the network anew."""
    told, warning = [], r"Expected on_shrink .* DistributedDataParallel .* wrap the network anew"
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for on_shrink, context in ((lambda: told.append(True), nullcontext()), (None, pytest.warns(match=warning))):
        _, guide, _, shrinker = started(dense(), X, torch.optim.SGD, on_shrink=on_shrink)
        assert not shrinker.step()
        guide.close("net.2", torch.tensor([1]))
        with context:
            assert shrinker.step()
        assert not shrinker.step()
        assert told == [True]


@pytest.mark.parametrize("make", [Residual, Transformer])
def test_a_block_that_closes_wholly_and_shrinkings_after_it(make):
    """Its site leaves; what is left of the block makes zeros, and the rest goes on shrinking."""

    def computed():
        return fix_gates(net, {site: gate.double() for site, gate in guide.test_gates().items()}).eval()(x)

    net = make().double()
    x = torch.randn(6, 8).double()
    _, guide, _, shrinker = started(net, x, torch.optim.SGD)
    first, second = guide.test_gates()
    for site, places in ((first, range(len(guide.test_gates()[first]))), (second, [0, 2]), (second, [1])):
        for other, gate in guide.test_gates().items():
            set_gates(guide, other, range(len(gate)), 60.0)
        set_gates(guide, site, places, -60.0)
        before = computed()
        assert shrinker.step()
        assert list(guide.test_gates()) == [second]
        torch.testing.assert_close(computed(), before, rtol=1e-13, atol=1e-13)
    assert len(guide.test_gates()[second]) == len(shrinker.remaining[second]) == len(shrinker.full({})[second]) - 3
    assert not shrinker.step()
    result = compact(net, {second: guide.test_gates()[second].double()}, x, before=shrinker.plans)
    assert result.certificate < 1e-12
