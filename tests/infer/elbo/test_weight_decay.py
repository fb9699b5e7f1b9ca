"""The expected weight decay of a network's norms, against norms by plain autograd."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from pyro_l0.infer import L0_ELBO, AutoGate
from pyro_l0.nn import L0Gate
from pyro_l0.nn.gate import name_gates
from pyro_l0.nn.square_norms import square_norms


def columns(layer):
    weight = layer.weight
    return weight.square().sum([dim for dim in range(weight.dim()) if dim != 1])


def mlp():
    net = nn.Sequential(L0Gate(4), nn.Linear(4, 3), nn.Tanh(), L0Gate(3), nn.Linear(3, 2, bias=False))
    return net, (9, 4), {"0": lambda: columns(net[1]), "3": lambda: columns(net[4])}


def maps_and_features():
    """A convolution behind gates; a dense layer behind gates on maps and on the features that they become."""
    maps = (nn.Conv2d(1, 2, 2), L0Gate(2, dim=1), nn.Conv2d(2, 3, (2, 3)), nn.Tanh(), L0Gate(3, dim=1))
    net = nn.Sequential(*maps, nn.Flatten(), L0Gate(6), nn.Linear(6, 2))
    norms = {"1": lambda: columns(net[2]), "4": lambda: columns(net[7]).view(3, 2).sum(1), "6": lambda: columns(net[7])}
    return net, (30, 1, 4, 4), norms


def problem(build):
    """A classifier in float64, its model and guide, one batch, and the norms by plain autograd."""
    torch.manual_seed(5)
    net, shape, norms = build()
    net = net.double()
    name_gates(net)
    x = torch.randn(shape, dtype=torch.float64)

    def model():
        pyro.sample("y", dist.Categorical(logits=net(x)).to_event(1), obs=torch.arange(len(x)) % 2)

    guide = AutoGate(model, init_jitter=0.0)
    guide()
    return net, model, guide, x, norms


def results(net, model, guide, **options):
    """The loss, its gradients, and those of the gradients' squares, at one draw."""
    pyro.set_rng_seed(3)
    loss = L0_ELBO(**options).differentiable_loss(model, guide)
    leaves = [*net.parameters(), *guide.parameters()]
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    return [loss, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves)]


def assert_same(ours, expected):
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("build", [mlp, maps_and_features])
@pytest.mark.parametrize("options", [{"lam": 0.1}, {"num_particles": 2}, {"objective": "free_energy"}], ids=str)
def test_norms_of_the_layers_are_those_of_autograd(build, options):
    """Of all sites, and where one site alone has a decay."""
    net, model, guide, x, plain = problem(build)
    for decay in (0.7, {list(plain)[-1]: 0.7}):
        options = {"objective": "l0", "weight_decay": decay, **options}
        ours = results(net, model, guide, square_norm=square_norms(net, x), **options)
        assert_same(ours, results(net, model, guide, square_norm=plain, **options))


def test_a_site_whose_norm_is_the_users():
    """A function that replaces one of the library's is called, for all decays or for its own."""
    net, model, guide, x, plain = problem(mlp)
    norms = square_norms(net, x)
    norms["0"] = plain["0"] = lambda: 3 * columns(net[1])
    for decay in (0.7, {"0": 0.7}):
        ours, expected = (
            results(net, model, guide, objective="l0", weight_decay=decay, square_norm=each) for each in (norms, plain)
        )
        assert_same(ours, expected)


class Counted(nn.Module):
    """A parametrisation that counts how often it is evaluated."""

    calls = 0

    def forward(self, weight):
        self.calls += 1
        return 2 * weight


def test_parametrised_weights_are_computed_no_more_often():
    """Once for the forward pass and once for the norms, which are those of the weights as they are."""
    net, model, guide, x, plain = problem(mlp)
    norms, counted = square_norms(net, x), Counted()
    parametrize.register_parametrization(net[1], "weight", counted)
    before = counted.calls
    ours = results(net, model, guide, objective="l0", weight_decay=0.7, square_norm=norms)
    assert counted.calls == before + 2
    assert_same(ours, results(net, model, guide, objective="l0", weight_decay=0.7, square_norm=plain))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the compiler does it
def test_norms_under_a_compiler():
    net, _, _, x, _ = problem(mlp)
    norms = square_norms(net, x)
    compiled = torch.compile(lambda: norms.together(["0", "3"]).sum(), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(), norms.together(["0", "3"]).sum())
