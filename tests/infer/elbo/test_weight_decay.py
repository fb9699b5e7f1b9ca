"""The expected weight decay of a network's norms, against norms by plain autograd."""

from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from pyro_l0 import HardConcrete
from pyro_l0.infer import L0_ELBO, AutoGate
from pyro_l0.maths import hard_concrete
from pyro_l0.nn import Gate
from pyro_l0.nn.gate import name_gates
from pyro_l0.nn.square_norms import square_norms


def columns(layer):
    weight = layer.weight
    return weight.square().sum([dim for dim in range(weight.dim()) if dim != 1])


def mlp():
    net = nn.Sequential(Gate(4), nn.Linear(4, 3), nn.Tanh(), Gate(3), nn.Linear(3, 2, bias=False))
    return net, (9, 4), {"0": lambda: columns(net[1]), "3": lambda: columns(net[4])}


def sequences():
    """Three dimensions, and a nonlinearity that changes the layer's output in place."""
    net, _, norms = mlp()
    net[2] = nn.ReLU(inplace=True)
    return nn.Sequential(*net, nn.Flatten(), nn.Linear(10, 2)), (9, 5, 4), norms


def maps_and_features():
    """A convolution behind gates; a dense layer behind gates on maps and on the features that they become."""
    maps = (nn.Conv2d(1, 2, 2), Gate(2, dim=1), nn.Conv2d(2, 3, (2, 3)), nn.Tanh(), Gate(3, dim=1))
    net = nn.Sequential(*maps, nn.Flatten(), Gate(6), nn.Linear(6, 2))
    norms = {"1": lambda: columns(net[2]), "4": lambda: columns(net[7]).view(3, 2).sum(1), "6": lambda: columns(net[7])}
    return net, (30, 1, 4, 4), norms


class Checkpointed(nn.Module):
    """A layer behind a gate whose activations are computed again for the gradient."""

    def __init__(self, **options):
        super().__init__()
        self.first, self.gate, self.layer, self.options = nn.Linear(4, 3), Gate(3), nn.Linear(3, 2), options

    def forward(self, x):
        gated = self.gate(torch.tanh(self.first(x)))
        return checkpoint(self.layer, gated, **self.options) if self.options else self.layer(gated)


def checkpointed(reentrant):
    net = Checkpointed(use_reentrant=reentrant)
    return net, (9, 4), {"gate": lambda: columns(net.layer)}


NETWORKS = {
    "mlp": mlp,
    "sequences": sequences,
    "maps and features": maps_and_features,
    "checkpointed": partial(checkpointed, False),
    "checkpointed, reentrant": partial(checkpointed, True),
}


def problem(build, family=HardConcrete):
    """A classifier in float64, its guide, one batch, and the norms by plain autograd."""
    torch.manual_seed(5)
    net, shape, norms = build()
    net = net.double()
    name_gates(net)
    x = torch.randn(shape, dtype=torch.float64)
    guide = AutoGate(partial(classify, net, x), family, init_jitter=0.0)
    guide()
    return net, guide, x, norms


def classify(net, x):
    pyro.sample("y", dist.Categorical(logits=net(x)).to_event(1), obs=torch.arange(len(x)) % 2)


def gradients(loss, *modules):
    """The gradients that accumulate, as reentrant checkpoints ask for."""
    leaves = [p for module in modules for p in module.parameters()]
    for leaf in leaves:
        leaf.grad = None
    loss.backward()
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def assert_same(ours, expected):
    """Equal to rounding in float64, and not all zero."""
    assert any(g.abs().sum() > 0 for g in ours)
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


def assert_same_gradients(model, net, guide, *norms, before=lambda: None, decay=0.7, **options):
    """Of an objective with each of two square norms, after a function that prepares its run."""
    results = []
    for square_norm in norms:
        before()
        pyro.set_rng_seed(3)
        elbo = L0_ELBO("l0", weight_decay=decay, square_norm=square_norm, **options)
        results.append(gradients(elbo.differentiable_loss(model, guide), net, guide))
    assert_same(*results)


@pytest.fixture
def _frozen_noise(monkeypatch):
    """The same draw of the gates each time."""
    monkeypatch.setattr(hard_concrete, "logistic_noise", lambda shape, dtype, _: torch.full(shape, 0.3, dtype=dtype))


@pytest.mark.usefixtures("_frozen_noise")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # where a checkpoint's shapes are read
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize(
    "options", [{"lam": 0.1}, {"num_particles": 2}, {"objective": "free_energy"}, {"part": True}], ids=str
)
def test_norms_of_the_layers_change_nothing(network, options):
    """Loss and gradient, and that of the gradient's square, are those with norms of their own."""
    net, guide, x, plain = problem(NETWORKS[network])
    options = {"objective": "l0", **options}
    decay = 0.7
    if options.pop("part", False):
        decay = {list(plain)[-1]: 0.7}  # one site has it, the others do not
    results = []
    for square_norm in (square_norms(net, x), plain):
        elbo = L0_ELBO(weight_decay=decay, square_norm=square_norm, **options)
        loss = elbo.differentiable_loss(partial(classify, net, x), guide)
        if network.startswith("checkpointed"):
            results.append([loss, *gradients(loss, net, guide)])
        else:
            leaves = [*net.parameters(), *guide.parameters()]
            first = torch.autograd.grad(loss, leaves, create_graph=True)
            results.append([loss, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves)])
    assert_same(*results)


@pytest.mark.usefixtures("_frozen_noise")
def test_a_site_whose_norm_is_the_users():
    """A function that replaces one of the library's is called, for all decays or for its own."""
    net, guide, x, plain = problem(mlp)
    norms = square_norms(net, x)
    norms["0"] = plain["0"] = lambda: 3 * columns(net[1])
    for decay in (0.7, {"0": 0.7}):
        assert_same_gradients(partial(classify, net, x), net, guide, norms, plain, decay=decay)


class Counted(nn.Module):
    """A parametrisation that counts how often it is evaluated."""

    calls = 0

    def forward(self, weight):
        self.calls += 1
        return 2 * weight


@pytest.mark.usefixtures("_frozen_noise")
def test_parametrised_weights_are_computed_no_more_often():
    """Once for the forward pass and once for the norms, which are those of the weights as they are."""
    net, guide, x, plain = problem(mlp)
    norms = square_norms(net, x)
    counted = Counted()
    parametrize.register_parametrization(net[1], "weight", counted)
    calls = []
    assert_same_gradients(
        partial(classify, net, x), net, guide, norms, plain, before=lambda: calls.append(counted.calls)
    )
    assert [*calls, counted.calls] == [calls[0], calls[0] + 2, calls[0] + 4]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the compiler does it
def test_norms_under_a_compiler():
    net, _, x, _ = problem(mlp)
    norms = square_norms(net, x)
    compiled = torch.compile(lambda: norms.together(["0", "3"]).sum(), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(), norms.together(["0", "3"]).sum())
