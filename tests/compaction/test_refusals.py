"""Networks, examples and gates that can't be taken: the message names the thing, and says what to do."""

import copy

import pytest
import torch
from torch import nn

from pyro_l0.compaction import compact
from pyro_l0.nn import Gate, fix_gates, gate_names
from pyro_l0.nn.reading import read_network

VECTORS, SEQUENCES, IMAGES = (
    torch.randn(*shape, generator=torch.Generator().manual_seed(0)) for shape in ((5, 6), (2, 7, 6), (2, 3, 8, 8))
)


class Net(nn.Module):
    """Layers by name and a function of them."""

    def __init__(self, function, **layers):
        super().__init__()
        self.function = function
        for name, layer in {"a": nn.Linear(6, 4), "gate": Gate(4), "b": nn.Linear(4, 2), **layers}.items():
            setattr(self, name, layer)

    def forward(self, x):
        return self.function(self, x)


def images(function):
    return Net(function, a=nn.Conv2d(3, 4, 3), gate=Gate(4, dim=1))


def refused(net, x, message, gates=None, error=ValueError):
    """By compaction and, if it is about the network or the example, wherever a network is read."""
    if gates is None:
        with pytest.raises(error, match=message):
            read_network(net, x)
        gates = {name: torch.ones(gate.size) for name, gate in gate_names(net).items()}
    with pytest.raises(error, match=message):
        compact(net, gates, x)


class Block(nn.Module):
    """A part of a network, in which reading stops."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def branch(x):
    if x.sum() > 0:
        return x
    return -x


def iterate(x):
    return torch.stack([row * 2 for row in x])


def assign(x):
    x[:, 0] = 0.0
    return x


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        (branch, r"line \d+ of test_refusals.py: if x.sum\(\) > 0:\) branches on the values.*torch.where"),
        (lambda x: x if x.shape[0] > 1 and x.max() > 0 else -x, "branches on the values"),
        (iterate, "iterates over a tensor.*by index"),
        (lambda x: x.view(*x.shape), "iterates over a tensor"),
        (lambda x: x.view(len(x), -1), r"takes len\(\) of a tensor.*x.shape\[0\]"),
        (lambda x: x.view(int(x.shape[0]), -1), "code that is not torch's"),
        (lambda x: sum(x for _ in range(x.shape[1])), "code that is not torch's"),
        (lambda x: torch.from_numpy(x.detach().numpy()), "code that is not torch's"),
        (assign, "code that is not torch's"),
    ],
    ids=["branch", "and", "iterate", "star", "len", "int", "range", "numpy", "assign"],
)
def test_code_that_depends_on_data_is_named(function, cause):
    """The module's path and class, the line, and what is wrong with it in plain words."""
    net = nn.Sequential(nn.Linear(6, 4), nn.Sequential(nn.ReLU(), Block(function)), Gate(4), nn.Linear(4, 2))
    refused(net, VECTORS, rf"(?s)code in module '1.1' \(Block\).*{cause}")


def test_modules_in_a_list_are_named():
    layers = [nn.ReLU()]
    refused(Net(lambda net, x: net.b(layers[0](net.a(x)))), VECTORS, "in forward of Net calls a module that is none of")


class Inputs(nn.Module):
    """The ways that a forward takes more than one tensor."""

    def __init__(self):
        super().__init__()
        self.a, self.gate, self.b = nn.Linear(6, 4), Gate(4), nn.Linear(4, 2)

    def two(self, x, y):
        return self.b(self.gate(self.a(x) + self.a(y)))

    def flag(self, x, return_features=False):
        return self.gate(self.a(x)) if return_features else self.b(self.gate(self.a(x)))

    def variadic(self, *args, **kwargs):
        return self.b(self.gate(self.a(args[0])))


@pytest.mark.parametrize(
    ("name", "taken"),
    [("two", "x, y"), ("flag", "x, return_features=False"), ("variadic", r"\*args, \*\*kwargs")],
)
def test_more_inputs_than_one_are_named(name, taken):
    kind = type("Several", (Inputs,), {"forward": getattr(Inputs, name)})
    refused(kind(), VECTORS, rf"one input, but forward of Several takes \({taken}\); wrap it")


@pytest.mark.parametrize(
    ("output", "what"),
    [(lambda y: {"y": y}, "dict of 1"), (lambda y: (y, y), "tuple of 2"), (lambda y: None, "no tensor")],
)
def test_other_outputs_than_a_tensor_are_named(output, what):
    net = Net(lambda net, x: output(net.b(net.gate(net.a(x)))))
    refused(net, VECTORS, f"returns one tensor, but got .*{what} in forward of Net; wrap it")


@pytest.mark.parametrize(
    ("net", "x", "message"),
    [
        (images(lambda net, x: net.gate(net.a(x)).mean(1)), IMAGES, r"dimension 1 .* its 4 units"),
        (images(lambda net, x: net.gate(net.a(x)).mean()), IMAGES, r"dimension 0 .* the batch"),
        (Net(lambda net, x: net.b(net.gate(net.a(x))).mean(-1)), VECTORS, r"dimension 1 .* its 2 units"),
        (Net(lambda net, x: net.b(net.gate(net.a(x)).mean(1))), SEQUENCES, r"in front of the 4 units in dimension 2"),
    ],
)
def test_means_over_units_are_named(net, x, message):
    refused(
        net,
        x,
        rf"'mean' in forward of Net to keep units apart.* averages over {message}"
        if "front" not in message
        else f"'mean' in forward of Net.*{message}",
    )


def behind(layer, part=lambda output: output):
    return Net(lambda net, x: net.b(net.gate(part(net.a(x)))), a=layer)


@pytest.mark.parametrize(
    ("net", "x", "what"),
    [
        (behind(nn.LSTM(6, 4, batch_first=True), lambda output: output[0]), SEQUENCES, r"module 'a' \(LSTM\)"),
        (behind(nn.GRU(6, 4, batch_first=True), lambda output: output[0][:, -1]), SEQUENCES, r"module 'a' \(GRU\)"),
        (behind(nn.Embedding(9, 4)), torch.tensor([[0, 3]]), r"module 'a' \(Embedding\)"),
        (Net(lambda net, x: net.b(net.gate(torch.cat([net.a(x)[:, :2]] * 2, 1)))), VECTORS, "function 'getitem' in"),
        (Net(lambda net, x: net.b(net.gate(net.a(x) + torch.ones(4)))), VECTORS, "a tensor made in forward of Net"),
        (
            Net(lambda net, x: net.b(net.gate(net.a(x) * net.scale)), scale=nn.Parameter(torch.ones(4))),
            VECTORS,
            "parameter or buffer 'scale', used directly in forward of Net",
        ),
    ],
    ids=["LSTM", "GRU", "embedding", "slices", "tensor", "parameter"],
)
def test_what_gates_stand_behind_is_named(net, x, what):
    """With what to do about it."""
    refused(net, x, f"but got {what}.*Make a network of what is before or behind it")


# ------------------------------------------------------------ examples


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float64, torch.float16])
@pytest.mark.parametrize("kind", ["dense", "maps"])
def test_examples_of_another_type_are_named(dtype, kind):
    net, x = (
        (Net(lambda net, x: net.b(net.gate(net.a(x)))), VECTORS)
        if kind == "dense"
        else (images(lambda net, x: net.b(net.gate(net.a(x)).mean((2, 3)))), IMAGES)
    )
    refused(net, x.abs().to(dtype), f"of dtype torch.float32, as the .* and dtype {dtype}, at which 'a' in module 'a'")


def test_bytes_that_a_network_scales_are_taken():
    """Images as they come from a data set."""
    net = Net(lambda net, x: net.b(net.gate(net.a(x / 255))))
    x = torch.randint(256, (5, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    assert compact(net, {"gate": torch.tensor([1.0, 0.0, 0.5, 1.0])}, x).certificate < 1e-6  # float32


def test_examples_elsewhere_and_of_other_kinds_are_named():
    net = nn.Sequential(nn.Linear(6, 4), Gate(4), nn.Linear(4, 2))
    elsewhere = copy.deepcopy(net).to("meta")
    refused(elsewhere, VECTORS, r"example_input on meta, where .* but got one on cpu; move it by .to\('meta'\)")
    refused(net, VECTORS.to("meta"), "example_input on cpu, where .* but got one on meta")
    refused(elsewhere, VECTORS.to("meta"), "a network with values", {"1": torch.ones(4)})
    refused(net, VECTORS[:0], r"with entries, but got shape \(0, 6\)", {"1": torch.ones(4)})
    refused(net, [VECTORS], "example_input to be one tensor, but got list", error=TypeError)
    refused(lambda x: x, VECTORS, "network to be a torch module, but got function", {}, TypeError)


def test_networks_that_are_not_ready_are_named():
    lazy = nn.Sequential(nn.LazyLinear(4), Gate(4), nn.Linear(4, 2))
    refused(lazy, VECTORS, "'0.weight' is lazy; call the network once", {"1": torch.ones(4)})
    kept = Net(lambda net, x: net.b(net.gate(net.a(x))))
    kept.last = kept.a(VECTORS)  # a result with a graph
    refused(kept, VECTORS, "copy.deepcopy can copy, but it can't copy Net")
    refused(Gate(6), VECTORS, "but got a Gate; put it into nn.Sequential")


# ------------------------------------------------------------ gates


def test_gates_that_are_fixed_already_are_named():
    net = nn.Sequential(nn.Linear(6, 4), nn.Sequential(nn.ReLU(), Gate(4)), nn.Linear(4, 2))
    gates = {"1.1": torch.ones(4)}
    refused(fix_gates(net, gates), VECTORS, "'1.1' is a FixedGate: the gates of this network are fixed", gates)


@pytest.mark.parametrize(
    ("gates", "message"),
    [
        ({}, "no value for 'hidden'"),
        ({"hidden": torch.ones(4), "other": torch.ones(2)}, r"has \['hidden'\].*no layer for 'other'"),
        ({"hidden": torch.ones(3)}, r"gates\['hidden'\] of shape \(4,\), but got \(3,\)"),
        ({"hidden": torch.tensor([0.0, 1.0, torch.nan, 1.0])}, r"gates\['hidden'\] in \[0, 1\]"),
        ({"hidden": torch.ones(4, device="meta")}, r"gates\['hidden'\] with values, but it is on the device meta"),
    ],
)
def test_wrong_gates_are_named(gates, message):
    refused(
        Net(lambda net, x: net.b(net.hidden(net.a(x))), gate=nn.Identity(), hidden=Gate(4)), VECTORS, message, gates
    )


# ------------------------------------------------------------ what is taken is right


def shared(net, x):
    return net.b(net.gate(net.relu(net.mid(net.relu(net.a(x))))))


def unpacked(net, x):
    rows, _, _, _ = x.shape
    return net.b(net.gate(net.a(x)).mean((2, 3)).view(rows, -1))


@pytest.mark.parametrize(
    ("net", "x"),
    [
        (Net(shared, relu=nn.ReLU(), mid=nn.Linear(4, 4)), VECTORS),
        (images(unpacked), IMAGES),
        (behind(nn.utils.parametrizations.weight_norm(nn.Linear(6, 4))), VECTORS),
        (behind(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4))), VECTORS),
        (Net(lambda net, x: net.b(net.gate(net.a(x)))), SEQUENCES),
    ],
    ids=["activation used twice", "shape unpacked", "weight norm", "spectral norm", "sequences"],
)
def test_networks_that_are_taken_are_right_and_left_alone(net, x):
    """For batches of any number of rows; nothing of the network has moved."""
    torch.manual_seed(2)
    before = copy.deepcopy(net.state_dict())
    gates = {"gate": torch.tensor([1.0, 0.0, 0.5, 0.9])}
    small = compact(net, gates, x).network
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(module.training for module in net.modules())
    fixed = fix_gates(net, gates).eval()
    for rows in (1, 4):
        torch.testing.assert_close(small(x[:1].expand(rows, *x.shape[1:])), fixed(x[:1].expand(rows, *x.shape[1:])))
