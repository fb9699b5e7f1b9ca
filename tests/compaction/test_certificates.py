"""Certificates relative to the output, inputs of another size, and dropout that stays dropout."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pyro_l0.compaction import compact
from pyro_l0.compaction.certificate import certify
from pyro_l0.compaction.compact import CompactionError
from pyro_l0.nn import L0Gate, fix_gates
from pyro_l0.nn.engine import rule
from pyro_l0.nn.gate import gate_names
from tests.networks import Dense, Net

GATE = torch.tensor([1.0, 0.0, 0.5, 0.9])


def dense(*middle, function=None):
    if function is None:
        return nn.Sequential(nn.Linear(6, 4), *middle, L0Gate(4), nn.Linear(4, 2))
    return Dense(function, a=(6, 4), g=4, b=(4, 2))


@rule("spoiled::scale")
def misleading(maps, operation):
    """Says that every unit is by itself, which is not so."""
    for dim in range(2):
        maps.passes(operation.value("x"), dim, operation.output, dim)


@torch.library.custom_op("spoiled::scale", mutates_args=())
def scale_by_units(x: torch.Tensor) -> torch.Tensor:
    return x * x.shape[-1]


torch.library.register_autograd(
    "spoiled::scale", lambda ctx, grad: 4 * grad, setup_context=lambda *args, **kwargs: None
)


def spoiled():
    """Computes something else with fewer units, 25 % less of four of which one leaves."""
    return Net(lambda net, x: scale_by_units(x))


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e6])
def test_the_certificate_is_relative_to_the_output(scale):
    """An error of a quarter is one, however small the outputs are."""
    x, right, wrong = torch.randn(5, 6), dense(nn.ReLU()), dense(spoiled())
    for net in (right, wrong):
        nn.init.zeros_(net[-1].bias)
        with torch.no_grad():
            net[-1].weight.mul_(scale)
    assert compact(right, {"2": GATE}, x).certificate < 1e-6  # float32
    with pytest.raises(CompactionError, match=r"by 2\.50e-01 of its largest output"):
        compact(wrong, {"2": GATE}, x)
    with pytest.raises(CompactionError, match=r"differs from the network with fixed gates by .* tolerance of 1e-30"):
        compact(right, {"2": GATE}, x, tolerance=1e-30)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_tolerance_is_that_of_the_type(dtype):
    """Rounding passes, an error of a quarter does not."""
    x = torch.randn(5, 6, dtype=dtype)
    result = compact(dense(nn.ReLU()).to(dtype), {"2": torch.tensor([1.0, 0.0, 0.3, 0.7], dtype=dtype)}, x)
    assert result.certificate < 0.05
    assert next(result.network.parameters()).dtype == dtype
    with pytest.raises(CompactionError):
        compact(dense(spoiled()).to(dtype), {"2": GATE.to(dtype)}, x)


forward, backward = Counter(), Counter()  # in the module, as what a closure holds is put back behind each call


@pytest.mark.parametrize("in_float64", [True, False])
def test_the_passes_of_a_certificate(in_float64):
    """Five forward passes of both networks, two of them with gradients, in float64 unless that is not wanted."""
    forward.clear(), backward.clear()

    def count(net, x):
        forward.update([x.dtype])
        x.requires_grad and x.register_hook(lambda gradient: backward.update([gradient.dtype]))
        return x.clone()

    x, given = torch.randn(5, 6), {"tolerance": 1e-2, "in_float64": in_float64}
    found = compact(dense(nn.ReLU(), Net(count)), {"3": GATE}, x, **given).certificate
    assert max(found.gradients, found.training_gradients) < 1e-5
    dtype = torch.float64 if in_float64 else torch.float32
    forward[torch.float32] -= 2  # of a check and a recording
    assert (+forward, backward) == ({dtype: 10}, {dtype: 4})
    wrong = dense(spoiled())
    nn.init.zeros_(wrong[-1].bias)
    with pytest.raises(CompactionError, match=r"by 2\.50e-01 of its largest output"):
        compact(wrong, {"2": GATE}, x, **given)


class Flag(torch.autograd.Function):
    """The identity, with a gradient that is the larger the more units there are."""

    @staticmethod
    def forward(ctx, x):
        ctx.size = x.shape[-1]
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.size


def test_a_wrong_gradient_is_refused():
    net = dense(function=lambda net, x: net.b(net.g(Flag.apply(net.a(x)))))
    with pytest.raises(CompactionError, match=r"by \d\.\d\de-01 of its largest output or gradient"):
        compact(net, {"g": GATE}, torch.randn(5, 6))


def test_the_modes_are_certified_one_by_one():
    """A part that differs in training mode is found there; one that draws random numbers can't be compared."""

    def certificate(function):
        middle = Net(lambda net, x: function(x) if net.training else x)
        return compact(dense(middle).double(), {"2": GATE.double()}, torch.randn(5, 6).double()).certificate

    with pytest.raises(CompactionError, match="differs"):
        certificate(lambda x: x * len(x.mT))
    found = certificate(lambda x: x + torch.randn_like(x))
    assert (found.training_outputs, found.training_gradients) == (None, None)
    found = certificate(torch.square)
    assert found.largest == max(found.training_outputs, found.training_gradients, found.outputs, found.gradients)
    assert found.largest < 1e-12


def test_outputs_that_are_all_zero():
    """Equal ones are certified; others are infinitely far apart, or far from what is output elsewhere."""
    net = nn.Sequential(nn.Linear(6, 4, bias=False), L0Gate(4), nn.Linear(4, 2, bias=False))
    assert compact(net, {"1": torch.zeros(4)}, torch.randn(5, 6)).certificate == 0.0
    assert compact(net, {"1": GATE}, torch.zeros(5, 6)).certificate < 1e-6
    four = dense(function=lambda net, x: net.b(net.g(net.a(x))) * (len(net.a.weight) != 4))
    with pytest.raises(CompactionError, match="by inf"):
        compact(four, {"g": GATE}, torch.randn(5, 6))


# ------------------------------------------------------------ inputs of another size


def shifted(*layers):
    """Closed maps that BatchNorm shifts, in front of other layers."""
    net = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), L0Gate(3, dim=1), nn.BatchNorm2d(3), *layers).eval()
    nn.init.ones_(net[2].bias)
    return net


HEAD = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
MAPS = {
    "padded convolution": lambda: shifted(nn.ReLU(), nn.Conv2d(3, 3, 3, padding=1), *HEAD),
    "padded pooling, averaged": lambda: shifted(nn.AvgPool2d(3, 1, 1), *HEAD),
    "size as an argument": lambda: shifted(Net(lambda _, x: x / x.shape[2]), *HEAD),
}


@pytest.mark.parametrize("size", [8, 2, 1])
@pytest.mark.parametrize("kind", MAPS)
def test_inputs_of_another_size_are_refused(kind, size):
    """By name, where constants depend on it; of the same size in batches of any number."""
    net = MAPS[kind]()
    gates = {name: torch.tensor([0.0, 1.0, 0.3][: gate.size]) for name, gate in gate_names(net).items()}
    small, fixed = compact(net, gates, torch.randn(2, 1, size, size)).network, fix_gates(net, gates).eval()
    for rows in (1, 2, 5):
        x = torch.randn(rows, 1, size, size)
        torch.testing.assert_close(small(x), fixed(x), rtol=1e-5, atol=1e-6)
    for other in {1, 2, 8, 9} - {size}:
        with pytest.raises(ValueError, match=rf"inputs of size \(1, {size}, {size}\).*got \(1, {other}, {other}\)"):
            small(torch.randn(2, 1, other, other))


@pytest.mark.parametrize("size", [(5, 5), (4, 6)])
def test_larger_images_are_not_read_in_part(size):
    """The features behind a flattening are selected by place."""
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), L0Gate(3, dim=1), nn.Flatten(), L0Gate(12), nn.Linear(12, 2))
    gates = {"2": torch.tensor([1.0, 1.0, 0.0]), "4": (torch.arange(12) % 2).float()}
    small = compact(net, gates, torch.randn(2, 1, 4, 4)).network
    assert small(torch.randn(3, 1, 4, 4)).shape == (3, 2)
    with pytest.raises(ValueError, match="Expected 8 units in dimension -1, of which 4 are read"):
        small(torch.randn(2, 1, *size))


# ------------------------------------------------------------ dropout


DROPOUTS = {
    "keywords": lambda net, h: F.dropout(h, p=0.4, training=net.training),
    "positions": lambda net, h: F.dropout(h, 0.4, net.training),
    "attribute": lambda net, h: F.dropout(h, net.p, training=net.training, inplace=True),
    "feature alpha": lambda net, h: F.feature_alpha_dropout(h, 0.5, net.training),
    "of whole rows": lambda net, h: h * (torch.rand(h.shape[0], 1) > 0.5) if net.training else h,
}


@pytest.mark.parametrize("kind", DROPOUTS)
def test_dropout_stays_the_networks_own(kind):
    """On in training mode, off in evaluation mode; certificates are without torch's."""
    net = dense(function=lambda net, x: net.b(DROPOUTS[kind](net, net.g(torch.relu(net.a(x)))))).double()
    net.p, x, gates = 0.4, torch.randn(5, 6).double(), {"g": torch.ones(4).double()}
    result, fixed = compact(net, gates, x), fix_gates(net, gates)
    small, found = result.network, result.certificate
    assert max(found.outputs, found.gradients, found.training_outputs, found.training_gradients) < 1e-12
    torch.testing.assert_close(small(x), fixed.eval()(x))
    outputs = []
    for network in (small.train(), fixed.train()):
        torch.manual_seed(7)
        outputs.append(network(x))
    torch.testing.assert_close(*outputs)
    assert not torch.equal(outputs[0], small(x))


def pool(place, apart=1e-16):
    """The largest of four numbers, one of which is larger by what rounding may make."""
    rounding = torch.zeros(4, dtype=torch.float64).index_fill(0, torch.tensor(place), apart).view(2, 2)

    def forward(net, x):
        return F.max_pool2d(x * net.weight + net.rounding.to(x), 2)

    return Net(forward, weight=nn.Parameter(torch.ones(1, 1, 2, 2)), rounding=nn.Buffer(rounding))


def test_entries_that_are_equal_but_for_rounding():
    """The gradient may go to either; where they differ by more, that is a difference."""
    zeros = [((torch.zeros(1, 1, 2, 2),), {})]
    assert certify(pool(0), pool(2), zeros, {}, {}).largest < 1e-10
    assert certify(pool(0, 1.0), pool(2, 1.0), zeros, {}, {}).gradients > 0.1
