"""Shrinking refuses, before anything is cut, a network that would train otherwise once it is written anew."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pyro_l0.compaction import Shrinker
from pyro_l0.infer import AutoGate
from pyro_l0.nn import Gate


class Net(nn.Module):
    """Layers by name and a function of them."""

    def __init__(self, function, **layers):
        super().__init__()
        self.function = function
        for name, layer in {"a": nn.Linear(3, 4), "gate": Gate(4), "b": nn.Linear(4, 2), **layers}.items():
            setattr(self, name, layer)

    def forward(self, x):
        return self.function(self, x)


def plain(net, x):
    return net.b(net.gate(torch.relu(net.a(x))))


def make(net, x=None):
    """A shrinker of a network that a model holds, after the guide's first call."""
    x = torch.ones(2, 3) if x is None else x
    model = nn.Sequential(net)
    guide = AutoGate(model)
    guide(x)
    optimiser = torch.optim.SGD([*model.parameters(), *guide.parameters()], 0.1)
    return model, guide, optimiser, Shrinker(model[0], guide, x, optimiser, patience=1)


class StraightThrough(torch.autograd.Function):
    """relu with the gradient of the identity."""

    @staticmethod
    def forward(ctx, x):
        return torch.relu(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class DropPath(nn.Module):
    def forward(self, x):
        if not self.training:
            return x
        return x * (torch.rand(x.shape[0], 1) > 0.5)


class Running(nn.Module):
    """A buffer that every call moves."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        self.mean.mul_(0.9)
        return x


class FrozenStatistics(nn.Sequential):
    def train(self, mode=True):
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()
        return self


def without_gradient(net, x):
    with torch.no_grad():
        h = net.a(x)
    return net.b(net.gate(torch.relu(h)))


def without_gradient_of_gates(net, x):
    with torch.no_grad():
        x = net.gate(x)
    return net.b(x)


def training_only(net, x):
    h = torch.relu(net.a(x))
    if net.training:
        h = h + 1
    return net.b(net.gate(h))


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (lambda: Net(without_gradient), "the gradient of 'a.weight'"),
        (lambda: Net(without_gradient_of_gates, a=nn.Identity(), gate=Gate(3), b=nn.Linear(3, 2)), "of its input"),
        (lambda: Net(lambda net, x: net.b(net.gate(StraightThrough.apply(net.a(x))))), "of 'StraightThrough'"),
        (lambda: Net(training_only), r"`self.training` in forward of Net"),
        (lambda: Net(lambda net, x: plain(net, net.path(x)), path=DropPath()), r"in module 'path' \(DropPath\)"),
        (lambda: Net(lambda net, x: plain(net, net.own(x)), own=Running()), "updates of buffer 'own.mean'"),
        (lambda: Net(lambda net, x: net.b(F.dropout(net.gate(net.a(x)), 0.5))), "'dropout' in forward of Net is on"),
        (
            lambda: FrozenStatistics(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), Gate(4), nn.Linear(4, 2)),
            "its output in training mode",
        ),
    ],
    ids=["no_grad", "no_grad of gates", "backward", "training", "DropPath", "buffer", "dropout", "frozen statistics"],
)
def test_what_shrinking_would_lose_is_refused(net, message):
    """By the name of the module, the function or the parameter, with a remedy."""
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=f"(?s){message}.*(leave|pass)"):
        make(net())


HOOKS = {
    "forward hooks of module '0'": lambda net: net[0].register_forward_hook(lambda module, inputs, output: None),
    "forward pre hooks of module '1'": lambda net: net[1].register_forward_pre_hook(lambda module, inputs: None),
    "backward hooks of module '2'": lambda net: net[2].register_full_backward_hook(lambda module, grads, outputs: None),
    "backward pre hooks of the network": lambda net: net.register_full_backward_pre_hook(lambda module, grads: None),
    "hooks of parameter '3.weight'": lambda net: net[3].weight.register_hook(lambda grad: 2 * grad),
    "hooks of parameter '0.bias'": lambda net: net[0].bias.register_post_accumulate_grad_hook(lambda tensor: None),
}


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("later", [False, True])
def test_hooks_are_refused(name, later):
    """Before the first shrinking, also if they came when the shrinker was there."""
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), Gate(4), nn.Linear(4, 2))
    if not later:
        HOOKS[name](net)
        with pytest.raises(ValueError, match=f"without hooks.* {name}.*take them off"):
            make(net)
        return
    model, guide, _, shrinker = make(net)
    HOOKS[name](net)
    guide.close("0.2", torch.tensor([1]))
    with pytest.raises(ValueError, match=f"without hooks.* {name}.*take them off"):
        shrinker.step()
    assert model[0] is net


def test_what_trains_alike_is_taken_and_left_as_it_is():
    """Dropout, BatchNorm, frozen weights; no state, gradient, mode or random number is used up."""
    torch.manual_seed(1)
    layers = (nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), Gate(4), nn.Dropout(0.5), nn.Linear(4, 2))
    net = nn.Sequential(*layers)
    net[0].weight.requires_grad_(False)
    net[4].eval()
    model = nn.Sequential(net)
    guide = AutoGate(model)
    guide(torch.ones(2, 3))
    optimiser = torch.optim.SGD([*model.parameters(), *guide.parameters()], 0.1)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    state = torch.get_rng_state()
    Shrinker(model[0], guide, torch.ones(1, 3), optimiser)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [module.training for module in net] == [True, True, True, True, False, True]


def test_functional_dropout_follows_its_own_module():
    """Which may be in another mode than the network."""

    class Block(nn.Module):
        def forward(self, x):
            return F.dropout(x, 0.5, self.training)

    torch.manual_seed(2)
    model, guide, _, shrinker = make(Net(lambda net, x: net.b(net.block(net.gate(net.a(x)))), block=Block()))
    model[0].block.eval()
    guide.close("0.gate", torch.tensor([1]))
    assert shrinker.step()
    (dropout,) = (module for module in model.modules() if isinstance(module, nn.Dropout))
    assert (dropout.p, dropout.training, model[0].training) == (0.5, False, True)


def test_parameters_that_were_replaced_have_no_gradient():
    """A list from before a shrinking has no norm to clip, instead of one that does not count."""
    torch.manual_seed(3)
    model, guide, _, shrinker = make(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), Gate(4), nn.Linear(4, 2)))
    stale = list(model.parameters())
    for parameter in stale:
        parameter.grad = torch.ones_like(parameter)
    guide.close("0.2", torch.tensor([1]))
    assert shrinker.step()
    assert not set(stale) & set(model.parameters())
    assert torch.nn.utils.clip_grad_norm_(stale, 1.0) == 0


def test_networks_of_integers_are_compared_on_their_example():
    """Images in bytes, which the network scales."""
    torch.manual_seed(4)
    images = torch.randint(256, (3, 3), dtype=torch.uint8)
    make(Net(lambda net, x: plain(net, x / 255)), images)
