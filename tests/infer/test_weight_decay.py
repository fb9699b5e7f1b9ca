"""The expected weight decay whose norms the layers compute on the way, against norms of their own."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pyro_l0 import _numerics
from pyro_l0.infer import L0_ELBO, AutoGate
from pyro_l0.nn import Gate, cost, name_gates, square_norms
from pyro_l0.nn.deferred import defer_product, leave_norms, left_norms

IMAGE = (2, 1, 4, 4)


def mlp():
    return nn.Sequential(Gate(4), nn.Linear(4, 3), nn.Tanh(), Gate(3), nn.Linear(3, 2, bias=False)), (9, 4)


def maps_and_features():
    layers = (nn.Conv2d(1, 2, 2), Gate(2, dim=1), nn.Conv2d(2, 3, 2), nn.Tanh(), Gate(3, dim=1), nn.Flatten())
    return nn.Sequential(*layers, Gate(12), nn.Linear(12, 2)), (30, *IMAGE[1:])


class Checkpointed(nn.Module):
    """A layer behind a gate whose activations are computed again for the gradient."""

    def __init__(self, reentrant):
        super().__init__()
        self.first, self.gate, self.layer, self.reentrant = nn.Linear(4, 3), Gate(3), nn.Linear(3, 2), reentrant

    def forward(self, x):
        gated = self.gate(torch.tanh(self.first(x)))
        return checkpoint(self.layer, gated, use_reentrant=self.reentrant)


NETWORKS = {
    "mlp": mlp,
    "maps and features": maps_and_features,
    "checkpointed": lambda: (Checkpointed(reentrant=False), (9, 4)),
    "checkpointed, reentrant": lambda: (Checkpointed(reentrant=True), (9, 4)),
}


def problem(build, seed=5):
    """A classifier in float64, its guide, and one batch."""
    torch.manual_seed(seed)
    net, shape = build()
    net = net.double()
    name_gates(net)
    x = torch.randn(shape, dtype=torch.float64)

    def model():
        pyro.sample("y", dist.Categorical(logits=net(x)).to_event(1), obs=torch.arange(len(x)) % 2)

    guide = AutoGate(model, init_jitter=0.0)
    guide()
    return net, model, guide, x


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # where a checkpoint's shapes are read
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize(
    "options", [{"lam": 0.1}, {"num_particles": 2}, {"objective": "free_energy"}, {"part": True}], ids=str
)
def test_norms_on_the_way_change_nothing(network, options, frozen_noise):
    """Loss, its gradient and the gradient of that one's square are those with norms of their own."""
    net, model, guide, x = problem(NETWORKS[network])
    options = {"objective": "l0", **options}
    norms = square_norms(net, x)
    decay = 0.7
    if options.pop("part", False):
        decay = {list(norms)[-1]: 0.7}  # one site has it, the others do not
    leaves = [p for p in (*net.parameters(), *guide.parameters()) if p.requires_grad]
    results = []
    for square_norm in (norms, dict(norms)):
        loss = L0_ELBO(weight_decay=decay, square_norm=square_norm, **options).differentiable_loss(model, guide)
        twice = not network.startswith("checkpointed")
        first = torch.autograd.grad(loss, leaves, create_graph=twice) if twice else backward(loss, leaves)
        again = torch.autograd.grad(sum(g.square().sum() for g in first), leaves) if twice else ()
        results.append([loss, *first, *again])
    assert any(g.abs().sum() > 0 for g in results[0][1:])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


def backward(loss, leaves):
    """The gradients that accumulate, as reentrant checkpoints ask for."""
    for leaf in leaves:
        leaf.grad = None
    loss.backward()
    return [leaf.grad for leaf in leaves]


@pytest.fixture
def frozen_noise(monkeypatch):
    """The same draw of the gates each time."""
    monkeypatch.setattr(_numerics, "logistic_noise", lambda shape, dtype, _: torch.full(shape, 0.3, dtype=dtype))


def test_no_other_pass_over_dense_weights(monkeypatch):
    """A step with gradients leaves nothing to compute; one without does it the plain way."""
    net, model, guide, x = problem(mlp)
    elbo = L0_ELBO("l0", weight_decay=0.7, square_norm=square_norms(net, x))
    expected = elbo.terms(model, guide)["l2"]
    asked = []
    apply = cost._SquaredColumns.apply
    monkeypatch.setattr(cost._SquaredColumns, "apply", lambda *weights: asked.append(weights) or apply(*weights))
    elbo.differentiable_loss(model, guide)
    assert asked == []
    torch.testing.assert_close(elbo.terms(model, guide)["l2"], expected)
    assert len(asked) == 1


def test_norms_are_left_where_they_are_asked_for():
    """Inside the context, for its weights, once, and with a graph; gone after it, also after an error."""
    torch.manual_seed(2)
    layer, other = nn.Linear(4, 3), nn.Linear(4, 3)
    z = torch.rand(4, requires_grad=True)

    def run(module):
        return module(defer_product(torch.randn(5, 4), z))

    def ask():
        with leave_norms([layer.weight]):
            deferred = defer_product(torch.randn(5, 4), z)
            with torch.no_grad():
                layer(deferred)
            assert left_norms(layer.weight) is None
            run(layer)
            run(other)
            norms = left_norms(layer.weight)
            torch.testing.assert_close(norms, layer.weight.square().sum(0))
            run(layer)
            assert left_norms(layer.weight) is norms
            assert left_norms(other.weight) is None
            raise ZeroDivisionError

    run(layer)
    assert left_norms(layer.weight) is None
    with pytest.raises(ZeroDivisionError):
        ask()
    assert left_norms(layer.weight) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_norms_and_outputs(dtype):
    """The gradient of the norms alone, of the outputs alone, and of both, against autograd of the formula."""
    torch.manual_seed(4)
    x, z = torch.randn(5, 4, dtype=dtype), torch.rand(4, dtype=dtype, requires_grad=True)
    layer = nn.Linear(4, 3).to(dtype)
    leaves = [layer.weight, layer.bias, z]
    for of_output, of_norms in ((0.0, 1.0), (1.0, 0.0), (1.0, 0.3)):
        with leave_norms([layer.weight]):
            output = layer(defer_product(x, z))
            ours = of_output * output.square().sum() + of_norms * left_norms(layer.weight).square().sum()
        scaled, norms = layer(x * z), layer.weight.square().sum(0)
        plain = of_output * scaled.square().sum() + of_norms * norms.square().sum()
        torch.testing.assert_close(
            torch.autograd.grad(ours, leaves), torch.autograd.grad(plain, leaves, allow_unused=True)
        )
    with leave_norms([layer.weight]):
        layer(defer_product(x, z))
        (found,) = torch.autograd.grad(left_norms(layer.weight).sum(), [layer.weight])
    torch.testing.assert_close(found, 2 * layer.weight.detach())
