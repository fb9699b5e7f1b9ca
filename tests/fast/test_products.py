"""Products with gates that the layer behind takes apart: values and gradients of plain products, whatever uses them."""

import pytest
import torch
import torch.nn.functional as F
from pyro import poutine
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_l0.fast.products import gated_product, multiply_along
from pyro_l0.nn import L0Gate
from pyro_l0.nn.gate import name_gates


def factors(*shape, units=4, make=torch.rand, needs_gradient=True, dtype=None):
    torch.manual_seed(0)
    x = make(*shape, dtype=dtype, requires_grad=needs_gradient)
    return x, torch.rand(units, dtype=dtype, requires_grad=True)


def gradients(y, leaves, twice=False):
    first = torch.autograd.grad(y.square().sum(), leaves, create_graph=twice)
    if not twice:
        return first
    return *first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves)


def named(gate):
    gate.site_name = "gate"
    return gate


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


PADDINGS = [{"padding": 1, "padding_mode": mode} for mode in ("reflect", "circular")]
OPTIONS = [{}, {"bias": False}, {"padding": 1, "stride": 2}, {"padding": "same", "dilation": 2}, {"groups": 2}]
LAYERS = [
    *[(0, {"out_features": size, "bias": bias}) for size in (3, 7) for bias in (True, False)],
    *[(dims, options) for dims in (1, 2, 3) for options in OPTIONS + PADDINGS],
]


@pytest.mark.parametrize("needs_gradient", [True, False])
@pytest.mark.parametrize(("dims", "options"), LAYERS, ids=str)
def test_a_layer_of_a_product(dims, options, needs_gradient):
    """Also twice differentiated. Groups and other paddings, sequences and inputs without a batch take it as it is."""
    x, z = factors(
        2 if dims else 5, 4, *[5] * dims, make=torch.randn, needs_gradient=needs_gradient, dtype=torch.double
    )
    layer = (getattr(nn, f"Conv{dims}d")(4, 6, 3, **options) if dims else nn.Linear(4, **options)).double()
    leaves, dim = [z, *layer.parameters(), *([x] if needs_gradient else [])], 1 if dims else -1
    ours, plain = layer(gated_product(x, z, dim)), layer(multiply_along(x, z, dim))
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    of_ours, of_plain = gradients(ours, leaves, twice=True), gradients(plain, leaves, twice=True)
    torch.testing.assert_close(of_ours, of_plain, rtol=1e-10, atol=1e-10)
    if not dims:
        sequence = torch.randn(2, 5, 4, dtype=torch.float64)
        torch.testing.assert_close(layer(gated_product(sequence, z)), layer(sequence * z))
    elif not options:
        torch.testing.assert_close(layer(gated_product(x, z, 1)[0]), layer(multiply_along(x, z, 1)[0]))


@pytest.mark.parametrize(
    "use",
    [
        nn.BatchNorm2d(4),
        F.relu,
        lambda h: h + 1,
        lambda h: h.flatten(1),
        lambda h: torch.stack([h, h]),
        *[lambda h, dims=dims: h.flatten(*dims) for dims in ((0,), (2,), (0, 1), (1, 2))],
    ],
)
def test_every_other_use_sees_the_plain_product(use):
    x, z = factors(2, 4, 5, 5)
    y = torch.rand(4, requires_grad=True)
    product, nested = gated_product(x, z, 1), gated_product(gated_product(x, z, 1), y, 1)
    plain = multiply_along(x, z, 1)
    torch.testing.assert_close(use(product), use(plain))
    torch.testing.assert_close(use(nested), use(multiply_along(plain, y, 1)))
    assert nested.shape == x.shape


def test_two_gates_in_a_row_in_front_of_a_convolution():
    x, z = factors(2, 4, 5, 5, make=torch.randn)
    y, layer = torch.rand(4, requires_grad=True), nn.Conv2d(4, 3, 3)
    nested, both = gated_product(gated_product(x, z, 1), y, 1), multiply_along(multiply_along(x, z, 1), y, 1)
    torch.testing.assert_close(layer(nested), layer(both))
    ours, plain = (gradients(layer(h), [x, z, y]) for h in (nested, both))
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


def test_functions_by_keyword_and_autocast():
    x, z = factors(5, 4)
    ones = torch.ones(1, 4)
    product = gated_product(x, z)
    for h in (product, product.clone(), gated_product(x, z)):  # used before, changed, and not used yet
        torch.testing.assert_close(F.linear(input=h, weight=ones), (x * z).sum(-1, keepdim=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for h in (product, gated_product(x, z)):
            assert nn.Linear(4, 3)(h).dtype == torch.bfloat16
        assert nn.Conv2d(4, 3, 3)(gated_product(*factors(2, 4, 5, 5), 1)).dtype == torch.bfloat16


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
    x, z = factors(rows, 3, 2, 2, units=3, make=torch.randn, dtype=torch.float64)
    maps, features, layer = L0Gate(3, dim=1), L0Gate(12), nn.Linear(12, 4).double()
    maps.site_name, features.site_name = "maps", "features"
    y = torch.rand(12, dtype=torch.float64, requires_grad=True)
    with poutine.condition(data={"maps": z, "features": y}):
        ours = layer(features(flatten(maps(x))))
    plain = layer(flatten(x * z.view(3, 1, 1)) * y)
    torch.testing.assert_close(ours, plain)
    leaves = [x, z, y, layer.weight]
    torch.testing.assert_close(gradients(ours, leaves), gradients(plain, leaves))


@pytest.mark.parametrize(
    ("shape", "layer", "by_weights"),
    [
        ((9, 4), nn.Linear(4, 3), True),
        ((2, 4), nn.Linear(4, 3), False),
        ((9, 4), nn.Linear(4, 3).requires_grad_(False), False),
        ((2, 4, 8, 8), nn.Conv2d(4, 3, 3), True),
        ((2, 4, 3, 3), nn.Conv2d(4, 3, 3), False),
    ],
    ids=["fewer outputs than rows", "more outputs than rows", "frozen", "more features than kernels", "fewer features"],
)
def test_the_layer_behind_multiplies_its_weights_where_that_is_cheaper(shape, layer, by_weights):
    """Then no product of the backward pass has the shape of the features."""
    x, z = factors(*shape)
    with poutine.condition(data={"gate": z}):
        loss = layer(named(L0Gate(4, dim=1))(x)).sum()
    with Products() as products:
        loss.backward()
    assert (shape in products.shapes) is not by_weights
    assert (layer.weight.shape in products.shapes) is by_weights
    expected = torch.autograd.grad(layer(multiply_along(x, z, 1)).sum(), [x, z])
    torch.testing.assert_close((x.grad, z.grad), expected)


def test_a_product_whose_factors_have_changed():
    """It stays what it was; where it was cut off from its graph, it has none."""
    x, z = factors(5, 4, make=torch.randn, needs_gradient=False)
    product, expected = gated_product(x, z), (x * z).detach()
    x.add_(1.0)
    for use in (F.relu, nn.Linear(4, 3), torch.vmap(torch.sin)):
        torch.testing.assert_close(use(product), use(expected))
    first = gated_product(x, z)
    first.relu_()
    second = gated_product(first, z)
    torch.testing.assert_close(nn.Identity()(second), F.relu(x * z) * z)
    layer = nn.Linear(4, 3)
    torch.testing.assert_close(layer(second), layer(F.relu(x * z) * z))
    cut = gated_product(x, z)
    cut.detach_()
    nn.Linear(4, 3)(cut).sum().backward()
    assert z.grad is None


def test_no_product_knows_its_factors_where_the_layer_would_differ():
    """Without gradients, which the layer behind would have, and with complex features. One without rows may."""
    x, z = factors(5, 4)
    gate, layer = named(L0Gate(4)), nn.Linear(4, 3)
    with poutine.condition(data={"gate": z}):
        with torch.no_grad():
            features = gate(x)
        assert not features.requires_grad
        layer(features).sum().backward()
        assert z.grad is None
        assert type(gate(torch.rand(5, 4, dtype=torch.complex64))) is torch.Tensor
    empty = gated_product(torch.rand(0, 4), z)
    assert layer(empty).shape == (0, 3)
    assert (empty + 1).shape == (0, 4)


@pytest.mark.parametrize(
    ("layer", "shape", "message"),
    [
        (nn.Linear(1, 3), (9, 4), "cannot be multiplied"),
        (nn.Linear(5, 3), (9, 4), "cannot be multiplied"),
        (nn.Conv2d(1, 3, 3), (2, 4, 5, 5), "channels"),
    ],
    ids=repr,
)
def test_a_layer_of_another_number_of_inputs_raises_its_own_error(layer, shape, message):
    with pytest.raises(RuntimeError, match=message):
        layer(gated_product(*factors(*shape), 1))


def test_weights_of_another_librarys_tensors_are_asked_what_to_do():
    class Other(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return "asked"

    weight = torch.rand(3, 4).as_subclass(Other)
    assert F.linear(gated_product(*factors(9, 4)), weight) == "asked"


def test_gradients_of_the_product_itself():
    """A hook, a kept gradient, and a backward pass through several uses."""
    x, z = factors(5, 4)
    layer, seen = nn.Linear(4, 3), []
    product = gated_product(x, z)
    product.retain_grad()
    product.register_hook(seen.append)
    (layer(product).sum() + product.square().sum()).backward()
    expected = layer.weight.sum(0) + 2 * x * z
    torch.testing.assert_close(product.grad, expected.detach())
    torch.testing.assert_close(seen[0], expected.detach())
    torch.testing.assert_close(z.grad, (expected * x).sum(0).detach())


def test_gates_inside_transforms():
    x, z = factors(6, 4)
    net = nn.Sequential(L0Gate(4), nn.Linear(4, 3))
    name_gates(net)

    def run(rows, gates):
        with poutine.condition(data={"0": gates}):
            return net(rows)

    rows = torch.vmap(run, (0, None))(x.unsqueeze(1), z)
    torch.testing.assert_close(rows.squeeze(1), net[1](x * z))


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return 2 * h

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def test_what_never_asks_a_subclass_gets_the_product():
    """Changes in place, custom functions, reentrant checkpointing, vmap: values and gradients of the plain product."""
    x, z = factors(4, 3, 5, 5, units=3, make=torch.randn)
    layer = nn.Conv2d(3, 2, 3)

    def backward(y):
        x.grad = z.grad = None
        y.square().sum().backward()
        return y.detach(), x.grad, z.grad

    def changed(h):
        h.add_(1)
        h[:, :, 0] = 0.0
        return layer(h)

    def checkpointed(h):
        return torch.utils.checkpoint.checkpoint(layer, h, use_reentrant=True)

    for use in (changed, Double.apply, checkpointed, lambda h: Double.apply(h.mul_(2))):
        ours, plain = backward(use(gated_product(x, z, 1))), backward(use(multiply_along(x, z, 1)))
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
    dense, rows, gates = nn.Linear(6, 2), torch.randn(7, 6), torch.rand(6, requires_grad=True)
    torch.testing.assert_close(torch.vmap(dense)(gated_product(rows, gates)), dense(rows * gates))
    dense.register_full_backward_hook(lambda module, grad_in, grad_out: None)
    dense(gated_product(rows, gates)).sum().backward()
    torch.testing.assert_close(gates.grad, (dense.weight.sum(0) * rows.sum(0)).detach())


@pytest.mark.parametrize("change", [lambda x: x.data.clamp_(min=0), lambda x: x.detach().numpy().fill(1.0)])
def test_values_that_are_changed_behind_torchs_back_count(change):
    x, z = factors(8, 4, make=torch.randn)
    layer = nn.Linear(4, 2)
    h = gated_product(x, z)
    change(h)
    torch.testing.assert_close(layer(h), F.linear(torch.Tensor(h.detach().numpy()), layer.weight, layer.bias))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_layer_that_is_compiled_by_itself_reads_a_product():
    x, z = factors(64, 4)
    layer = nn.Linear(4, 3)
    expected = gradients(layer(gated_product(x, z)), (x, z))
    layer.compile(backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(gradients(layer(gated_product(x, z)), (x, z)), expected)
