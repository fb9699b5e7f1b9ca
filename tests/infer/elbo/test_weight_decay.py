"""The expected weight decay whose norms the layers compute, against norms of their own."""

import weakref
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from pyro_l0 import BernoulliGate, HardConcrete
from pyro_l0.fast.products import defer_product, record_norms, recorded_norms
from pyro_l0.infer import L0_ELBO, AutoGate
from pyro_l0.maths import hard_concrete
from pyro_l0.nn import Gate
from pyro_l0.nn.gate import name_gates
from pyro_l0.nn.square_norms import _SquaredColumns, square_norms


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


def keep_sums(_context, operation, *_args, **_kwargs):
    """What a selective checkpoint keeps: operations that norms use as well."""
    kept = operation in (torch.ops.aten.sum.dim_IntList, torch.ops.aten.pow.Tensor_Scalar)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.usefixtures("_frozen_noise")
def test_a_selective_checkpoint_sees_the_same_operations_twice():
    """It hands out what it has kept in their order."""

    class Body(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y * y.square().sum(0).tanh()

    net, guide, x, plain = problem(lambda: checkpointed(False))
    example = square_norms(net, x)  # of a layer that is followed for its shape alone
    torch.manual_seed(1)
    body = Body(3, 2).double()
    body.weight, net.layer = net.layer.weight, body
    selective = {"context_fn": partial(create_selective_checkpoint_contexts, keep_sums)}
    options = iter([selective, {}])

    def choose():
        net.options = {"use_reentrant": False, **next(options)}

    assert_same_gradients(partial(classify, net, x), net, guide, example, plain, before=choose)


@pytest.mark.parametrize("particles", [1, 2, 3])
def test_draws_whose_graph_has_been_used_up(particles):
    """An estimator takes the gradient of one draw before the next is made."""
    net, guide, x, plain = problem(mlp, BernoulliGate)
    options = {"estimator": "rebar", "num_particles": particles}
    assert_same_gradients(partial(classify, net, x), net, guide, square_norms(net, x), plain, **options)


@pytest.mark.usefixtures("_frozen_noise")
def test_models_that_differentiate_their_network():
    """Their inner gradient uses up the first pass; the last one counts."""
    net, guide, x, plain = problem(mlp)

    def model():
        moved = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(net(moved), torch.arange(9) % 2), moved)
        classify(net, x + 0.1 * slope.sign())

    assert_same_gradients(model, net, guide, square_norms(net, x), plain)


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


def test_no_other_pass_over_dense_weights(monkeypatch):
    """A step with gradients leaves nothing to compute; frozen weights and steps without do it the plain way."""
    net, guide, x, _ = problem(mlp)
    model = partial(classify, net, x)
    elbo = L0_ELBO("l0", weight_decay=0.7, square_norm=square_norms(net, x))
    expected = elbo.terms(model, guide)["l2"]
    asked = []
    apply = _SquaredColumns.apply
    monkeypatch.setattr(_SquaredColumns, "apply", lambda *weights: asked.append(weights) or apply(*weights))
    elbo.differentiable_loss(model, guide)
    assert asked == []
    torch.testing.assert_close(elbo.terms(model, guide)["l2"], expected)
    assert len(asked) == 1
    net[1].weight.requires_grad_(False)
    elbo.differentiable_loss(model, guide)
    assert len(asked) == 2
    assert [id(w) for w in asked[1]] == [id(net[1].weight)]


def test_norms_are_recorded_where_they_are_asked_for():
    """Inside the context, for its weights, once, and with a graph; gone after it, also after an error."""
    torch.manual_seed(2)
    layer, other = nn.Linear(4, 3), nn.Linear(4, 3)
    z = torch.rand(4, requires_grad=True)

    def run(module):
        return module(defer_product(torch.randn(5, 4), z))

    def ask():
        with record_norms([layer.weight]):
            deferred = defer_product(torch.randn(5, 4), z)
            with torch.no_grad():
                layer(deferred)
            assert recorded_norms(layer.weight) is None
            run(layer)
            run(other)
            norms = recorded_norms(layer.weight)
            torch.testing.assert_close(norms, layer.weight.square().sum(0))
            run(layer)
            assert recorded_norms(layer.weight) is norms
            assert recorded_norms(other.weight) is None
            with record_norms([other.weight]):
                assert recorded_norms(layer.weight) is None
            assert recorded_norms(layer.weight) is norms
            raise ZeroDivisionError

    run(layer)
    assert recorded_norms(layer.weight) is None
    with pytest.raises(ZeroDivisionError):
        ask()
    assert recorded_norms(layer.weight) is None


def test_a_graph_that_is_dropped_is_freed():
    """At once, whether it was used or not: a cycle through the graph would never be found."""
    net, guide, x, _ = problem(mlp)
    elbo = L0_ELBO("l0", weight_decay=0.7, square_norm=square_norms(net, x))
    batches = []

    def model():
        batch = x.clone()
        batches.append(weakref.ref(batch))
        classify(net, batch)

    loss = elbo.differentiable_loss(model, guide)
    assert batches[0]() is not None  # its layer has saved it
    del loss
    assert batches[0]() is None
    elbo.differentiable_loss(model, guide).backward()
    assert batches[1]() is None


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the compiler does it
def test_norms_under_a_compiler():
    net, _, x, _ = problem(mlp)
    norms = square_norms(net, x)
    compiled = torch.compile(lambda: norms.together(["0", "3"]).sum(), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(), norms.together(["0", "3"]).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_norms_and_outputs(dtype):
    """The gradient of the norms alone, of the outputs alone, and of both, against autograd of the formula."""
    torch.manual_seed(4)
    x, z = torch.randn(5, 4, dtype=dtype), torch.rand(4, dtype=dtype, requires_grad=True)
    layer = nn.Linear(4, 3).to(dtype)
    leaves = [layer.weight, layer.bias, z]
    for of_output, of_norms in ((0.0, 1.0), (1.0, 0.0), (1.0, 0.3)):
        with record_norms([layer.weight]):
            output = layer(defer_product(x, z))
            ours = of_output * output.square().sum() + of_norms * recorded_norms(layer.weight).square().sum()
        scaled, norms = layer(x * z), layer.weight.square().sum(0)
        plain = of_output * scaled.square().sum() + of_norms * norms.square().sum()
        torch.testing.assert_close(torch.autograd.grad(ours, leaves), torch.autograd.grad(plain, leaves))
    with record_norms([layer.weight]):
        layer(defer_product(x, z))
        (found,) = torch.autograd.grad(recorded_norms(layer.weight).sum(), [layer.weight])
    torch.testing.assert_close(found, 2 * layer.weight.detach())


def test_an_output_that_is_not_used():
    """A layer whose output and norms no loss depends on passes nothing on to the layers before it."""
    torch.manual_seed(6)
    z = torch.rand(4, requires_grad=True)
    first, second = nn.Linear(4, 4), nn.Linear(4, 3)
    with record_norms([second.weight]):
        hidden = torch.tanh(first(defer_product(torch.randn(40, 4), z)))
        second(defer_product(hidden, z)).detach()
        norms = recorded_norms(second.weight)
    leaves = [second.weight, z, first.weight]
    found = torch.autograd.grad(norms.sum(), leaves, allow_unused=True, retain_graph=True)
    torch.testing.assert_close(found[0], 2 * second.weight.detach())
    assert found[1:] == (None, None)
    (of_hidden,) = torch.autograd.grad(hidden.sum(), [first.weight])
    assert of_hidden.abs().sum() > 0
