"""The Gate layer, its site names, the deferred product, and fixed gates."""

import io

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro import poutine
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_l0 import HardConcrete
from pyro_l0.fast.deferred import defer_product, multiply_along
from pyro_l0.infer import L0_ELBO, AutoGate
from pyro_l0.nn import Gate, fix_gates
from pyro_l0.nn.fixed import FixedGate
from pyro_l0.nn.gate import gate_names, name_gates


def network():
    return nn.Sequential(Gate(4), nn.Linear(4, 3), nn.ReLU(), Gate(3), nn.Linear(3, 2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, x):
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Categorical(logits=self.net(x)), obs=torch.zeros(len(x)))


def sites(model, *args):
    nodes = poutine.trace(model).get_trace(*args).nodes
    return [name for name, site in nodes.items() if site["type"] == "sample" and name not in ("data", "y")]


@pytest.mark.parametrize(("shape", "dim"), [((2, 3), -1), ((2, 3, 4, 4), 1), ((2, 5, 3), -1), ((2, 1), -1)])
def test_one_gate_multiplies_an_input_of_any_size(shape, dim):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    gate = Gate(1, dim)
    name_gates(gate)
    z = torch.tensor([0.3], requires_grad=True)
    with poutine.condition(data={"gate": z}):
        gated = gate(x)
    torch.testing.assert_close(gated, 0.3 * x)
    torch.testing.assert_close(torch.autograd.grad(gated.sum(), z)[0], x.sum()[None])
    assert torch.equal(fix_gates(nn.Sequential(gate), {"gate": torch.tensor([0.5])})(x), 0.5 * x)


def test_sites_are_named_after_module_paths():
    """From the outermost module that is called: a plain function adds nothing, losses do not count."""
    x = torch.ones(2, 4)
    net = network()
    assert sites(lambda x: net(x), x) == ["0", "3"]
    model = Model()
    guide = AutoGate(model)
    L0_ELBO()(model, guide)(x)
    assert list(guide.posterior()) == ["net.0", "net.3"]
    assert list(gate_names(model.net)) == ["net.0", "net.3"]
    assert sites(Gate(4), x) == ["gate"]


def test_wrappers_do_not_show_in_names():
    """What torch.compile puts in between is left out."""

    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self._orig_mod = inner

        def forward(self, x):
            return self._orig_mod(x)

    assert sites(Wrapper(network()), torch.ones(2, 4)) == ["0", "3"]


def test_names_can_be_given():
    """Before any call, with a prefix."""
    net = network()
    assert list(name_gates(net, prefix="classifier.")) == ["classifier.0", "classifier.3"]
    assert sites(net, torch.ones(2, 4)) == ["classifier.0", "classifier.3"]


@pytest.mark.parametrize(("shape", "dim"), [((2, 3), -1), ((2, 3, 5, 5), 1), ((2, 5, 3), -1), ((2, 3, 5), -2)])
def test_units_of_any_dimension(shape, dim):
    """One sample multiplies the whole batch."""
    gate = Gate(3, dim=dim)
    trace = poutine.trace(gate).get_trace(torch.ones(shape))
    z = trace.nodes["gate"]["value"]
    view = [1] * len(shape)
    view[dim] = 3
    torch.testing.assert_close(trace.nodes["_RETURN"]["value"], torch.ones(shape) * z.reshape(view))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("needs_input_gradient", "outputs"), [(False, 3), (False, 7), (True, 3), (True, 7)])
def test_deferred_product_is_the_product(bias, needs_input_gradient, outputs):
    """Value and gradients of a layer behind deferred gates, also twice differentiated."""
    torch.manual_seed(0)
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=needs_input_gradient)
    z = torch.rand(4, dtype=torch.float64, requires_grad=True)
    layer = nn.Linear(4, outputs, bias=bias).double()
    leaves = [z, *layer.parameters(), *([x] if needs_input_gradient else [])]

    def gradients(y):
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        return [y, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves)]

    for ours, plain in zip(gradients(layer(defer_product(x, z))), gradients(layer(x * z)), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    sequence = torch.randn(2, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(layer(defer_product(sequence, z)), layer(sequence * z))


@pytest.mark.parametrize("needs_input_gradient", [True, False])
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"padding": 1, "stride": 2}, {"padding": "same", "dilation": 2}, {"groups": 2}]
    + [{"padding": 1, "padding_mode": mode} for mode in ("reflect", "circular")],
    ids=str,
)
def test_deferred_product_in_front_of_a_convolution(dims, options, needs_input_gradient):
    """Value and gradients, also twice differentiated; groups and other paddings take the product itself."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, *[5] * dims, dtype=torch.float64, requires_grad=needs_input_gradient)
    z = torch.rand(4, dtype=torch.float64, requires_grad=True)
    layer = getattr(nn, f"Conv{dims}d")(4, 6, 3, **options).double()
    leaves = [z, *layer.parameters(), *([x] if needs_input_gradient else [])]

    def gradients(y):
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        return [y, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves)]

    product = multiply_along(x, z, 1)
    for ours, plain in zip(gradients(layer(defer_product(x, z, 1))), gradients(layer(product)), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-10)
    alone = x[0]  # without a batch the maps are dimension 0
    if not options:
        torch.testing.assert_close(layer(defer_product(x, z, 1)[0]), layer(product[0]))
        assert alone.dim() == dims + 1


def test_deferred_products_of_maps_nest_and_reach_other_consumers():
    """Two gates in a row, a flattening, a sum, BatchNorm, and autocast."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, 5, 5, requires_grad=True)
    z, y = torch.rand(4, requires_grad=True), torch.rand(4, requires_grad=True)
    layer = nn.Conv2d(4, 3, 3)
    both = multiply_along(multiply_along(x, z, 1), y, 1)
    nested = defer_product(defer_product(x, z, 1), y, 1)
    torch.testing.assert_close(layer(nested), layer(both))
    torch.testing.assert_close(nested.flatten(1), both.flatten(1))
    torch.testing.assert_close(nn.BatchNorm2d(4)(nested), nn.BatchNorm2d(4)(both))
    torch.testing.assert_close(x + nested, x + both)
    assert nested.shape == (2, 4, 5, 5)
    for leaf in (x, z, y):
        ours, plain = (torch.autograd.grad(layer(t).square().sum(), leaf)[0] for t in (nested, both))
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
        nested = defer_product(defer_product(x, z, 1), y, 1)
        both = multiply_along(multiply_along(x, z, 1), y, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(nested).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "flatten",
    [
        nn.Flatten(),
        lambda x: x.flatten(1),
        lambda x: torch.flatten(x, 1, -1),
        lambda x: torch.flatten(input=x, start_dim=1),
        lambda x: x.flatten(start_dim=1, end_dim=3),
        lambda x: x.flatten(-3),
        lambda x: x.reshape(len(x), 12),
        lambda x: x.view(x.size(0), x.shape[1] * x.shape[2] * x.shape[3]),
    ],
)
@pytest.mark.parametrize("rows", [2, 50, 0])
def test_gates_of_maps_and_of_the_features_behind_a_flattening(flatten, rows):
    """Values and gradients of two plain products, whether or not they become one."""
    torch.manual_seed(0)
    maps, features, layer = Gate(3, dim=1), Gate(12), nn.Linear(12, 4).double()
    maps.site_name, features.site_name = "maps", "features"
    x = torch.randn(rows, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    z = torch.rand(3, dtype=torch.float64, requires_grad=True)
    y = torch.rand(12, dtype=torch.float64, requires_grad=True)
    with poutine.condition(data={"maps": z, "features": y}):
        ours = layer(features(flatten(maps(x))))
    plain = layer(flatten(x * z.view(3, 1, 1)) * y)
    torch.testing.assert_close(ours, plain)
    leaves = [x, z, y, layer.weight]
    for one, other in zip(
        torch.autograd.grad(ours.square().sum(), leaves), torch.autograd.grad(plain.square().sum(), leaves), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_a_flattening_keeps_a_product_waiting():
    """None has the shape of the maps; of the features, one for both gates."""
    torch.manual_seed(0)
    maps, features, layer = Gate(3, dim=1), Gate(12), nn.Linear(12, 4)
    maps.site_name, features.site_name = "maps", "features"
    x, z, y = torch.rand(2, 3, 2, 2, requires_grad=True), torch.rand(3, requires_grad=True), torch.rand(12)
    with poutine.condition(data={"maps": z, "features": y.requires_grad_()}), Products() as products:
        layer(features(maps(x).flatten(1)))
    assert (2, 3, 2, 2) not in products.shapes
    assert products.shapes.count((2, 12)) == 1


@pytest.mark.parametrize("changed", ["maps", "features", "some features"])
def test_a_change_in_place_on_one_side_of_a_flattening(changed):
    """It is seen on the same side; the other may not be used any more, having a memory of its own."""
    torch.manual_seed(0)
    x, z = torch.randn(2, 3, 2, 2, requires_grad=True), torch.rand(3, requires_grad=True)

    def change(maps, features):
        if changed == "maps":
            maps.add_(1)
        elif changed == "features":
            features.relu_()
        else:
            features[:, :5].mul_(2)
        return maps if changed == "maps" else features

    maps, plain = defer_product(x, z, 1), x * z.view(3, 1, 1)
    features = maps.flatten(1)
    ours, expected = change(maps, features), change(plain, plain.flatten(1))
    torch.testing.assert_close(ours, expected)
    for one, other in zip(
        torch.autograd.grad(ours.square().sum(), [x, z]),
        torch.autograd.grad(expected.square().sum(), [x, z]),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
    other_side = features if changed == "maps" else maps
    for use in (torch.sin, torch.vmap(torch.sin), lambda t: t.flatten(1)):
        with pytest.raises(RuntimeError, match="changed in place"):
            use(other_side)


def test_flattenings_that_compute_the_product():
    """Other dimensions, no gradients, and inside transforms; and the maps may be used beside their features."""
    torch.manual_seed(0)
    x, z = torch.randn(2, 3, 2, 2, requires_grad=True), torch.rand(3, requires_grad=True)
    product, layer = x * z.view(3, 1, 1), nn.Linear(12, 4)
    for dims in ((0,), (2,), (0, 1), (1, 2)):
        torch.testing.assert_close(defer_product(x, z, 1).flatten(*dims), product.flatten(*dims))
    with pytest.raises(TypeError, match="flatten"):
        defer_product(x, z, 1).flatten(1, step=2)
    maps = defer_product(x, z, 1)
    with torch.no_grad():
        flat = maps.flatten(1)
    layer(flat).sum().backward()
    assert x.grad is None
    assert z.grad is None
    torch.testing.assert_close(flat, product.detach().flatten(1))
    maps = defer_product(x, z, 1)
    torch.testing.assert_close(torch.vmap(lambda t: maps.flatten(1) + t)(torch.zeros(1))[0], product.flatten(1))
    maps = defer_product(x, z, 1)
    both = layer(maps.flatten(1)).sum() + maps.square().sum()
    expected = layer(product.flatten(1)).sum() + product.square().sum()
    for one, other in zip(torch.autograd.grad(both, [x, z]), torch.autograd.grad(expected, [x, z]), strict=True):
        torch.testing.assert_close(one, other)


def test_deferred_product_with_other_consumers():
    """Any use but a linear layer's sees the plain product."""
    x, z = torch.randn(5, 4), torch.rand(4, requires_grad=True)
    product = defer_product(x, z)
    torch.testing.assert_close(F.relu(product), F.relu(x * z))
    torch.testing.assert_close(product + 1, x * z + 1)
    torch.testing.assert_close(torch.stack([product, product]), torch.stack([x * z, x * z]))
    torch.testing.assert_close(F.linear(input=product, weight=torch.ones(1, 4)), (x * z).sum(-1, keepdim=True))
    torch.testing.assert_close(F.linear(defer_product(x, z), weight=torch.ones(1, 4)), (x * z).sum(-1, keepdim=True))
    assert product.shape == (5, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = nn.Linear(4, 3)(product)
    assert out.dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = nn.Linear(4, 3)(defer_product(x, z))
    assert out.dtype == torch.bfloat16


class Products(TorchDispatchMode):
    """Records the shapes of all products."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mul.Tensor, torch.ops.aten.mul.out):
            self.shapes.append(tuple(out.shape))
        return out


@pytest.mark.parametrize(
    ("shape", "layer", "deferred"),
    [
        ((9, 4), nn.Linear(4, 3), True),
        ((2, 4), nn.Linear(4, 3), False),
        ((9, 4), nn.Linear(4, 3).requires_grad_(False), False),
        ((2, 4, 8, 8), nn.Conv2d(4, 3, 3), True),
        ((2, 4, 3, 3), nn.Conv2d(4, 3, 3), False),
    ],
    ids=["fewer outputs than rows", "more outputs than rows", "frozen", "more features than kernels", "fewer features"],
)
def test_the_layer_behind_multiplies_its_weights_where_that_is_cheaper(shape, layer, deferred):
    """Then no product has the shape of the features, forward or backward."""
    torch.manual_seed(0)
    gate, z = Gate(4, dim=1), torch.rand(4, requires_grad=True)
    x = torch.rand(shape, requires_grad=True)
    with poutine.condition(data={"gate": z}), Products() as products:
        layer(gate(x)).sum().backward()
    assert (shape in products.shapes) is not deferred
    assert layer.weight.shape in products.shapes or not deferred
    of_x, of_z = torch.autograd.grad(layer(multiply_along(x, z, 1)).sum(), [x, z])
    torch.testing.assert_close(x.grad, of_x)
    torch.testing.assert_close(z.grad, of_z)


def test_a_product_whose_factors_have_changed():
    """It was not computed in time: an error, not another value."""
    torch.manual_seed(0)
    x, z = torch.rand(5, 4), torch.rand(4, requires_grad=True)
    product = defer_product(x, z)
    x.add_(1.0)
    for use in (F.relu, nn.Linear(4, 3), torch.vmap(torch.sin)):
        with pytest.raises(RuntimeError, match="changed in place"):
            use(product)
    product = defer_product(x, z)
    before = (x * z).detach()
    torch.testing.assert_close(product.detach(), before)
    x.add_(1.0)
    torch.testing.assert_close(product.detach(), before)


def test_no_product_waits_where_it_would_differ():
    """Without gradients, which the layer behind would have, and with complex features. One without rows may."""
    torch.manual_seed(0)
    z = torch.rand(4, requires_grad=True)
    gate, layer = Gate(4), nn.Linear(4, 3)
    with poutine.condition(data={"gate": z}):
        with torch.no_grad():
            features = gate(torch.rand(5, 4, requires_grad=True))
        assert not features.requires_grad
        layer(features).sum().backward()
        assert z.grad is None
        assert type(gate(torch.rand(5, 4, dtype=torch.complex64))) is torch.Tensor
    empty = defer_product(torch.rand(0, 4), z)
    assert layer(empty).shape == (0, 3)
    assert (empty + 1).shape == (0, 4)


@pytest.mark.parametrize("layer", [nn.Linear(1, 3), nn.Linear(5, 3)])
def test_a_layer_of_another_number_of_inputs(layer):
    """Its own error."""
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        layer(defer_product(torch.rand(9, 4), torch.rand(4, requires_grad=True)))
    convolution = nn.Conv2d(1, 3, 3)
    with pytest.raises(RuntimeError, match="channels"):
        convolution(defer_product(torch.rand(2, 4, 5, 5), torch.rand(4, requires_grad=True), 1))


def test_weights_of_another_librarys_tensors():
    """Are asked what to do."""

    class Other(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return "asked"

    weight = torch.rand(3, 4).as_subclass(Other)
    assert F.linear(defer_product(torch.rand(9, 4), torch.rand(4, requires_grad=True)), weight) == "asked"


def test_a_product_that_is_asked_for_its_memory():
    """Its address, arrays and files hold values."""
    torch.manual_seed(0)
    x, z = torch.rand(5, 4), torch.rand(4, requires_grad=True)
    assert defer_product(x, z).data_ptr() != 0
    np.testing.assert_array_equal(defer_product(x, z).detach().numpy(), (x * z).detach().numpy())
    file = io.BytesIO()
    torch.save(defer_product(x, z).detach(), file)
    file.seek(0)
    torch.testing.assert_close(torch.load(file), (x * z).detach())


def test_gradients_of_the_product_itself():
    """A hook, a kept gradient, and a backward pass through several uses."""
    torch.manual_seed(0)
    x, z = torch.rand(5, 4, requires_grad=True), torch.rand(4, requires_grad=True)
    layer, seen = nn.Linear(4, 3), []
    product = defer_product(x, z)
    product.retain_grad()
    product.register_hook(seen.append)
    (layer(product).sum() + product.square().sum()).backward()
    expected = layer.weight.sum(0) + 2 * x * z
    torch.testing.assert_close(product.grad, expected.detach())
    torch.testing.assert_close(seen[0], expected.detach())
    torch.testing.assert_close(z.grad, (expected * x).sum(0).detach())


def test_the_layer_does_not_defer_inside_transforms():
    """Their tensors are no plain ones."""
    torch.manual_seed(0)
    net = nn.Sequential(Gate(4), nn.Linear(4, 3))
    name_gates(net)
    x, z = torch.rand(6, 4), torch.rand(4, requires_grad=True)

    def run(rows, gates):
        with poutine.condition(data={"0": gates}):
            return net(rows)

    rows = torch.vmap(run, (0, None))(x.unsqueeze(1), z)
    torch.testing.assert_close(rows.squeeze(1), net[1](x * z))


def test_the_prior_moves_with_the_network():
    """To another type, in the site too."""
    gate = Gate(3, prior=HardConcrete(torch.zeros(3), torch.full((3,), 0.5)))
    gate.double()
    assert (
        poutine.trace(gate).get_trace(torch.ones(2, 3)).nodes["gate"]["fn"].base_dist.log_alpha.dtype == torch.float64
    )


def test_default_prior_is_a_fair_one():
    """Open with probability one half."""
    torch.testing.assert_close(Gate(2).prior.active_prob, torch.full((2,), 0.5))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0,), ValueError, "size to be a positive number of units, but got 0"),
        ((2.0,), ValueError, "size to be a positive number"),
        ((2, 0), ValueError, "got 0, the batch"),
        ((2, -1, dist.Normal(0.0, 1.0)), TypeError, "prior to be a gate distribution"),
        ((2, -1, HardConcrete(torch.zeros(3))), ValueError, r"prior of shape \(\) or \(2,\), but got \(3,\)"),
    ],
)
def test_bad_layers(arguments, error, message):
    """Refused when the layer is made."""
    with pytest.raises(error, match=message):
        Gate(*arguments)


@pytest.mark.parametrize("x", [torch.ones(2, 4), torch.ones(())])
def test_a_gate_of_the_wrong_size(x):
    """Names the units and the input's shape."""
    with pytest.raises(ValueError, match="3 units in dimension -1 at gate"):
        Gate(3)(x)


def test_fixed_gates_are_deterministic_and_leave_the_network():
    """A copy whose units are multiplied by what is given; the state of the original is shared with nothing."""
    net = network()
    gates = {"0": torch.tensor([1.0, 0.0, 0.5, 1.0]), "3": torch.tensor([0.0, 1.0, 0.3])}
    fixed = fix_gates(net, gates)
    x = torch.randn(5, 4)
    expected = net[4](net[2](net[1](x * gates["0"])) * gates["3"])
    torch.testing.assert_close(fixed(x), expected)
    assert isinstance(net[0], Gate)
    assert isinstance(fixed[0], FixedGate)
    assert fixed[1].weight is not net[1].weight
    assert set(fixed.state_dict()) == {"0.value", "1.weight", "1.bias", "3.value", "4.weight", "4.bias"}
    assert "FixedGate(3, dim=-1)" in repr(fixed)


@pytest.mark.parametrize(
    ("gates", "message"),
    [
        ({"0": torch.ones(4)}, "no value for '3'"),
        ({"0": torch.ones(4), "3": torch.ones(3), "5": torch.ones(1)}, "no layer for '5'"),
        ({"0": torch.ones(4), "3": torch.ones(2)}, r"gates\['3'\] of shape \(3,\), but got \(2,\)"),
        ({"0": torch.ones(4), "3": torch.full((3,), 1.5)}, r"gates\['3'\] in \[0, 1\]"),
        ({"0": torch.ones(4), "3": torch.full((3,), float("nan"))}, r"gates\['3'\] in \[0, 1\]"),
    ],
)
def test_bad_fixed_gates(gates, message):
    """By site name."""
    with pytest.raises(ValueError, match=message):
        fix_gates(network(), gates)


def test_what_never_asks_a_subclass_gets_the_product():
    """Changes in place, custom functions, reentrant checkpointing, vmap: values and gradients of the plain product."""
    torch.manual_seed(0)
    x, z = torch.randn(4, 3, 5, 5, requires_grad=True), torch.rand(3, requires_grad=True)
    layer, factor = nn.Conv2d(3, 2, 3), z.view(1, 3, 1, 1)

    def gradients(y):
        x.grad = z.grad = None
        y.square().sum().backward()
        return y.detach(), x.grad, z.grad

    def changed(h):
        h.add_(1)
        h[:, :, 0] = 0.0
        return layer(h)

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h):
            return 2 * h

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    def checkpointed(h):
        return torch.utils.checkpoint.checkpoint(layer, h, use_reentrant=True)

    def changed_and_passed_on(h):
        h.mul_(2)
        return Double.apply(h)

    for use in (changed, Double.apply, checkpointed, changed_and_passed_on):
        ours, plain = gradients(use(defer_product(x, z, 1))), gradients(use(x * factor))
        for one, other in zip(ours, plain, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    dense, rows, gates = nn.Linear(6, 2), torch.randn(7, 6), torch.rand(6, requires_grad=True)
    torch.testing.assert_close(torch.vmap(dense)(defer_product(rows, gates)), dense(rows * gates))
    dense.register_full_backward_hook(lambda module, grad_in, grad_out: None)
    dense(defer_product(rows, gates)).sum().backward()
    torch.testing.assert_close(gates.grad, (dense.weight.sum(0) * rows.sum(0)).detach())


def test_a_network_inside_the_data_plate():
    """Every example would have gates of its own: a warning where it happens, and a hint where it shows."""
    net = nn.Sequential(nn.Linear(3, 4), Gate(4), nn.Linear(4, 2))
    x, y = torch.randn(20, 3), torch.zeros(20).long()

    def model():
        with pyro.plate("data", 20, subsample_size=5) as index:
            pyro.sample("y", dist.Categorical(logits=net(x[index])), obs=y[index])

    name_gates(net)
    guide = AutoGate(model)
    with pytest.warns(UserWarning, match="inside the subsampled plate 'data'"):
        guide()
    with pytest.raises(ValueError, match="a gate per example"):
        fix_gates(net, guide.test_gates())
