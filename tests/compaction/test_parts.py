"""The parts of compaction by themselves: norms over fewer units, integers, what gates become, parts."""

import copy
import io
import pickle
import warnings
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pyro_l0.compaction import compact
from pyro_l0.compaction.layers import ReducedLayerNorm, ReducedRMSNorm, reduce_norm
from pyro_l0.nn import L0Gate, NetworkCost
from pyro_l0.nn.engine import operations, record, rule
from pyro_l0.nn.engine.sizes import are_sizes
from tests.compaction.networks import cut
from tests.networks import Dense


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("affine", [True, False])
def test_norms_count_units_that_left_as_zeros(kind, affine):
    """Values and gradients of the whole norm on the same units among zeros; in steps, as in one."""
    whole = kind(6, elementwise_affine=affine, eps=0.1).double()
    for parameter in whole.parameters():
        nn.init.normal_(parameter)
    x, left = torch.randn(3, 6).double(), [0, 3, 4]
    x[:, [1, 2, 5]] = 0.0
    x.requires_grad_()
    small = copy.deepcopy(whole)
    for parameter in small.parameters():
        parameter.data = parameter.data[left]
    small.normalized_shape = (3,)
    reduce_norm(small, 6)
    assert isinstance(small, (ReducedLayerNorm, ReducedRMSNorm))
    y = x.detach()[:, left].requires_grad_()
    expected, got = whole(x)[:, left], small(y)
    torch.testing.assert_close(got, expected, rtol=1e-14, atol=1e-14)
    weight = torch.randn(3, 3).double()
    full, part = (torch.autograd.grad((out * weight).sum(), at)[0] for out, at in ((expected, x), (got, y)))
    torch.testing.assert_close(part, full[:, left], rtol=1e-13, atol=1e-13)
    kind_in_place = type(small)
    assert len(record(nn.Sequential(small), y).operations) == len(record(nn.Sequential(whole), x).operations) == 1
    assert type(small) is kind_in_place is not kind
    with pytest.raises(TypeError, match=r"Expected nn.LayerNorm or nn.RMSNorm .* got GroupNorm"):
        reduce_norm(nn.GroupNorm(1, 4), 4)


def test_gates_become_nothing_numbers_selections_or_zeros():
    """By what their units are for; hooks stay on what stays."""

    def forward(s, x):
        y = s.h(torch.sigmoid(s.g(torch.relu(s.a(s.inputs(x))))))
        return s.c(y + s.branch(s.b(y)))

    net = Dense(forward, c=(4, 2), a=(4, 4), b=(4, 4), inputs=4, g=4, h=4, branch=4).double()
    gates = {"inputs": [1.0, 0.0, 1.0, 1.0], "g": [1.0] * 4, "h": [0.5, 1.0, 1.0, 1.0], "branch": [1.0, 1.0, 0.0, 0.0]}
    gates = {name: torch.tensor(gate).double() for name, gate in gates.items()}
    small = cut(net, gates, torch.randn(3, 4).double(), rtol=1e-13, atol=1e-13)
    assert isinstance(small.g, nn.Identity)
    assert small.h.value.tolist() == [0.5, 1.0, 1.0, 1.0]  # in front of a sum it can't go into weights
    assert small.inputs.before.index.tolist() == [0, 2, 3]
    assert small.branch.after.index.tolist() == [0, 1]
    assert (small.a.in_features, small.b.out_features) == (3, 2)


@pytest.mark.parametrize(
    ("parts", "sizes"),
    [
        (lambda h: h.chunk(2, -1), (4, 4)),
        (lambda h: torch.tensor_split(h, 2, dim=-1), (4, 4)),
        (lambda h: torch.chunk(h, 3, -1), (3, 3, 1)),
        (lambda h: h.tensor_split(3, -1), (3, 2, 2)),
    ],
    ids=["chunk", "tensor_split", "uneven chunk", "uneven tensor_split"],
)
def test_parts_that_close_unequally_stay_as_large_as_they_are_cut(parts, sizes):
    """Every pattern of closed gates is cut, and units stay for the parts' sizes alone; one part has a layer."""

    def forward(s, x):
        first, *others = parts(s.gate(s.one(x).relu()))
        return s.out(torch.cat([s.mid(first), *others], -1))

    units, first = sum(sizes), sizes[0]
    network = Dense(forward, one=(6, units), mid=(first, 5), gate=units, out=(5 + units - first, 2)).double().eval()
    generator = torch.Generator().manual_seed(4)
    patterns = [(torch.rand(units, generator=generator) < share).double() for share in (0.2, 0.4, 0.6, 0.8)]
    even = torch.ones(units, dtype=torch.float64).index_fill(0, torch.tensor([0, first]), 0.0)
    for gates in [*patterns, (torch.arange(units) >= first).double(), even]:
        small = cut(network, {"gate": gates}, torch.randn(3, 6, dtype=torch.float64))
    if len(sizes) == 2:
        assert small.one.out_features == units - 2


def width_as(fill):
    """The width that a module holds also stands in what it computes, by whichever operation."""
    return lambda s, x: s.out(fill(s.gate(s.one(x)).view(-1, s.width), s.width))


def strided(s, x):
    """Views rely on the strides of the recorded tensors."""
    h = s.gate(s.one(x).view(len(x), -1, 2).transpose(-1, -2))
    return s.out(h.exp().transpose(-1, -2).flatten(-2))


FORWARDS = {
    # ``index_select`` behind a gate reads every entry of the index, as ``h[:, index]`` does.
    "places": (lambda s, x: s.last(s.gate(s.one(x)).index_select(1, s.places)), 8, 3),
    "filled with its width": (width_as(lambda h, n: h.masked_fill(h > 1, n)), 8, 8),
    "where": (width_as(lambda h, n: torch.where(h > 1, h, n)), 8, 8),
    "divided by its width": (width_as(lambda h, n: h // n), 8, 8),
    "closed behind views": (strided, 4, None),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_indices_and_integers_that_are_more_than_sizes_stay(name):
    forward, size, left = FORWARDS[name]
    places = nn.Buffer(torch.tensor([0, 3, 5]))
    network = Dense(forward, one=(6, 8), gate=size, out=(8, 2), last=(3, 2), places=places).double().eval()
    network.width = 8
    gates = {"gate": (torch.arange(size) % 2).double() if left else torch.zeros(size).double()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Expected an example that uses the whole network")
        small = cut(network, gates, torch.randn(5, 6).double())
    if name == "places":
        assert small.places.tolist() == [0, 3, 5]
    elif left:
        assert small.out.in_features == left


def page():
    """The example of docs/howto/save_and_load.md."""
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), L0Gate(16), nn.Linear(16, 2))
    return net, {"2": (torch.arange(16) % 3 > 0).float()}


def page_with_values():
    """A gate on inputs, and one whose values a sigmoid keeps out of the weights."""
    net = nn.Sequential(L0Gate(8), nn.Linear(8, 16), L0Gate(16), nn.Sigmoid(), nn.Linear(16, 2))
    return net, {"0": torch.arange(8).remainder(2).float(), "2": torch.linspace(0.1, 0.9, 16)}


class Stream(nn.Module):
    """A branch of which some units are added to a stream, and norms that count what left as zeros."""

    def __init__(self):
        super().__init__()
        self.a, self.gate, self.b, self.branch = nn.Linear(8, 6), L0Gate(6), nn.Linear(6, 6), L0Gate(6, dim=1)
        self.layer_norm, self.rms_norm, self.c = nn.LayerNorm(6), nn.RMSNorm(6), nn.Linear(6, 2)

    def forward(self, x):
        x = self.gate(self.a(x), 1)
        x = x + self.branch(self.b(self.rms_norm(self.layer_norm(x))))
        return self.c(x)


def stream():
    return Stream(), {"gate": torch.tensor([1.0, 1, 1, 0, 1, 1]), "branch": torch.tensor([0.0, 1, 1, 0, 1, 1])}


def maps():
    """A constant in front of padding, which becomes a map."""
    net = nn.Sequential(
        nn.Unflatten(1, (2, 2, 2)), L0Gate(2, dim=1), nn.Conv2d(2, 3, 1), L0Gate(3, dim=1), nn.Sigmoid()
    )
    return net.extend([nn.Conv2d(3, 2, 3, padding=1)]), {"1": torch.ones(2), "3": torch.tensor([1.0, 0.0, 1.0])}


def onnx(net, x):
    onnxruntime = pytest.importorskip("onnxruntime", reason="ONNX is tested with the export extra")
    pytest.importorskip("onnxscript", reason="ONNX is tested with the export extra")
    file = io.BytesIO()
    torch.onnx.export(net, (x,), dynamo=True, verbose=False).save(file)
    session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


EXPORTS = {
    "script": lambda net, x: torch.jit.script(net),
    "trace": torch.jit.trace,
    "symbolic trace": lambda net, x: torch.fx.symbolic_trace(net),
    "export": lambda net, x: torch.export.export(net, (x,)).module(),
    "compile": lambda net, x: torch.compile(net, backend="eager", fullgraph=True, dynamic=True),
    "pickle": lambda net, x: pickle.loads(pickle.dumps(net)),
    "onnx": onnx,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch's own exporters
@pytest.mark.parametrize(
    ("make", "how"),
    [*((stream, how) for how in EXPORTS), *product([page, page_with_values, maps], ["script", "export"])],
)
def test_compact_networks_are_exported(make, how):
    """Of plain torch, or with typed modules for what has to stay, without hooks; another network needs the library."""
    torch.manual_seed(0)
    net, gates = make()
    found, x = compact(net, gates, torch.randn(4, 8)), torch.randn(4, 8)
    small = found.network
    assert found.needs_pyro_l0 == (make is not page)
    assert {path for path, _ in small.named_modules()} >= {path for path, _ in net.named_modules()}
    if make is maps:
        assert [type(hook).__name__ for hook in small._forward_pre_hooks.values()] == ["InputSizes"]
        small._forward_pre_hooks.clear()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in small.modules())
    torch.testing.assert_close(EXPORTS[how](small, x)(x), small(x), rtol=1e-4, atol=1e-5)  # float32 kernels


def test_one_entry_from_outside_cuts_prices_and_folds_an_operation(monkeypatch):
    """Patches of an image: of three open channels at 0.5 the linear layer behind takes up the factor."""
    monkeypatch.setattr(operations, "ENTRIES", dict(operations.ENTRIES))

    @rule("aten::im2col", is_homogeneous=True)
    def patches(maps, operation):
        x, output = operation.value("self"), operation.output
        maps.passes(x, 0, output, 0)
        maps.reshape([maps.axes[x][1], maps.fixed(output.shape[1] // x.shape[1])], [maps.axes[output][1]])
        maps.fixes(x, 2, 3)
        maps.fixes(output, 2)

    layers = nn.Conv2d(2, 5, 1), L0Gate(5, dim=1), nn.Unfold(2, stride=2), nn.Flatten(), nn.Linear(5 * 4 * 4, 3)
    network, x, gates = nn.Sequential(*layers), torch.randn(2, 2, 4, 4), {"1": torch.tensor([0.5, 0, 0.5, 0, 0.5])}
    cut(network, gates, x)
    result = compact(network, gates, x)
    assert not any(isinstance(module, L0Gate) for module in result.network.modules())
    assert {*result.plan.factors} == {"4.weight"}
    assert {*result.plan.factors["4.weight"]} <= {0.5, 1.0}
    assert tuple(result.network[0].weight.shape[:2]) == (3, 2)
    assert tuple(result.network[4].weight.shape) == (3, 3 * 4 * 4)
    assert NetworkCost(network, x).weights({"1": gates["1"].ceil()}).item() == 3 * 2 + 3 * 3 * 4 * 4


def test_an_operation_of_several_inputs_is_recorded_as_one_function(monkeypatch):
    """An image read at positions that another input says: a closed channel leaves on both sides and is priced so."""
    monkeypatch.setattr(operations, "ENTRIES", dict(operations.ENTRIES))
    monkeypatch.setitem(operations.WHOLE, F.grid_sample, "")  # not there afterwards

    @rule("aten::grid_sampler", calls=(F.grid_sample,), arguments="input grid mode padding_mode align_corners")
    def sample(maps, operation):
        x, grid, output = operation.value("input"), operation.value("grid"), operation.output
        maps.passes(x, 0, output, 0)
        maps.passes(x, 1, output, 1, nonzero=maps.kind(grid), is_factor=True)
        maps.same(grid, 0, output, 0)
        for value, first in ((x, 2), (grid, 1), (output, 2)):
            maps.fixes(value, *range(first, value.rank))

    def forward(net, image, grid):
        return net.out(F.grid_sample(net.gate(net.enter(image)), grid, align_corners=False))

    network = Dense(forward, enter=nn.Conv2d(2, 5, 1), gate=L0Gate(5, dim=1), out=nn.Conv2d(5, 3, 1)).double()
    example = torch.randn(2, 2, 4, 4).double(), torch.rand(2, 3, 3, 2).double() * 2 - 1
    gates = {"gate": torch.tensor([1.0, 0.0, 0.5, 0.0, 1.0]).double()}
    small = cut(network, gates, example)
    assert tuple(small.enter.weight.shape[:2]) == (3, 2)
    assert tuple(small.out.weight.shape[:2]) == (3, 3)
    cost = NetworkCost(network, example)
    assert cost.weights({"gate": gates["gate"].ceil()}).item() == 3 * 2 + 3 * 3
    assert cost.group_sizes == {"gate": 3}


@torch.library.custom_op("mine::columns", mutates_args=())
def columns(x: torch.Tensor, count: int) -> torch.Tensor:
    """A matrix of so many columns."""
    return x.reshape(-1, count).clone()


columns.register_autograd(lambda ctx, gradient: (gradient.clone(), None))


def test_integers_of_an_operation_of_ones_own_are_followed(monkeypatch):
    """A module's width, which says how its operation shapes units, becomes the number that is left."""
    monkeypatch.setattr(operations, "ENTRIES", dict(operations.ENTRIES))

    @rule("mine::columns", integers=are_sizes)
    def same(maps, operation):
        maps.passes_rest(operation.value("x"), operation.output)

    network = Dense(lambda s, x: s.out(columns(s.gate(s.one(x)), s.width)), one=(6, 8), gate=8, out=(8, 2))
    network.width = 8
    small = cut(network.eval(), {"gate": (torch.arange(8) % 2).float()}, torch.randn(5, 6))
    assert (small.width, small.out.in_features) == (4, 4)
