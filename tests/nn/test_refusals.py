"""What gates, networks with gates and values of gates may not be: refused with what was expected and what arrived."""

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import nn

from pyro_l0 import BernoulliGate, HardConcrete
from pyro_l0.compaction.apply import apply_plan
from pyro_l0.nn import (
    L0Gate,
    NetworkCost,
    NetworkGates,
    fix_gates,
    gate_heads,
    gate_weights,
    insert_gates,
    suggest_gates,
)
from pyro_l0.nn.fixed import FixedGate
from pyro_l0.nn.gate import gate_names, name_gates
from pyro_l0.nn.heads import PlainAttention
from pyro_l0.nn.square_norms import square_norms
from pyro_l0.nn.weights import fix_weights
from tests.nn.test_heads import attention

FUNCTIONS = {
    "insert_gates": lambda network: insert_gates(network, {"0": L0Gate(3)}),
    "fix_gates": lambda network: fix_gates(network, {}),
    "fix_weights": lambda network: fix_weights(network, {}),
    "gate_heads": lambda network: gate_heads(network, {"0": 2}),
    "gate_names": gate_names,
    "name_gates": name_gates,
    "gate_weights": lambda network: gate_weights(network, "0"),
    "NetworkCost": lambda network: NetworkCost(network, torch.ones(1, 2)),
    "square_norms": lambda network: square_norms(network, torch.ones(1, 2)),
    "suggest_gates": lambda network: suggest_gates(network, torch.ones(1, 2)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("network", [None, "abc", {"0": 3}, nn.Linear], ids=["none", "string", "dict", "class"])
def test_no_network(name, network):
    with pytest.raises(TypeError, match=r"Expected network to be an nn\.Module, but got a value of type"):
        FUNCTIONS[name](network)


@pytest.mark.parametrize("entries", [None, 3, ["0"], {0: 3}], ids=["none", "number", "list", "integer keys"])
@pytest.mark.parametrize("function", [insert_gates, fix_gates, fix_weights, gate_heads])
def test_no_entries_by_name(function, entries):
    with pytest.raises(TypeError, match=r"Expected (gates|numbers of heads) by (module path|site name)"):
        function(nn.Sequential(nn.Linear(2, 3)), entries)


@pytest.mark.parametrize("bad", [None, "abc", [1.0], {"weight": 3}])
def test_what_holds_no_tensors(bad):
    """The values of a fixed gate, and a plan."""
    with pytest.raises(TypeError, match="Expected value to be a tensor"):
        FixedGate(bad)
    with pytest.raises(TypeError, match="Expected plan to be the plan of a compacted network"):
        apply_plan(nn.Linear(2, 2), bad)


def test_integers_of_numpy_are_sizes_and_dimensions():
    gate = L0Gate(np.int64(4), dim=np.int64(1))
    assert (type(gate.size), type(gate.dim)) == (int, int)
    assert gate(torch.ones(2, 4)).shape == (2, 4)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: L0Gate(0), ValueError, "size of at least 1, but got 0"),
        (lambda: L0Gate(2.0), TypeError, "size to be a whole number"),
        (lambda: L0Gate(2, dim="1"), TypeError, "dim to be a whole number"),
        (lambda: L0Gate(2, dim=0), ValueError, "got 0, the batch"),
        (lambda: L0Gate(2, prior=dist.Normal(0.0, 1.0)), TypeError, "prior to be a gate distribution"),
        (lambda: L0Gate(2, prior=HardConcrete(torch.zeros(3))), RuntimeError, "must match the existing size"),
        (lambda: L0Gate(), ValueError, "a shape"),
        (lambda: L0Gate(3, family="bernoulli"), ValueError, "family to be one of .*, but got 'bernoulli'"),
        (lambda: L0Gate(3, family=BernoulliGate), ValueError, "pathwise draws"),
        (lambda: L0Gate(3)(torch.ones(2, 4)), ValueError, "Expected 3 units in dimension -1 at gate"),
        (lambda: L0Gate(4, 3)(torch.ones(1, 3)), ValueError, "without enlarging it, but got one of shape"),
        (lambda: NetworkGates(nn.Linear(2, 2)), ValueError, "a network with L0Gates, but it has none"),
        (lambda: FixedGate(torch.ones(2, 3)), ValueError, r"one value per unit, shape \(size,\)"),
        (lambda: FixedGate(torch.tensor(1.0)), ValueError, r"one value per unit, shape \(size,\)"),
        (lambda: FixedGate(torch.ones(3), 0), ValueError, r"one value per unit, shape \(size,\)"),
    ],
)
def test_bad_layers(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("make", [lambda: L0Gate(5), lambda: FixedGate(torch.ones(5))], ids=["random", "fixed"])
@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (nn.LSTM(3, 5)(torch.randn(2, 4, 3)), TypeError, "a tensor at gate .*but got a tuple; .*nn.LSTM"),
        (torch.ones(2, 5, dtype=torch.uint8), TypeError, r"floating type at gate .*but got torch.uint8.*\.float\(\)"),
        (torch.ones(2, 5).bool(), TypeError, "but got torch.bool"),
        (torch.ones(2, 1), ValueError, r"5 units in dimension -1 at gate .*, but got an input of shape \(2, 1\)"),
        (torch.ones(()), ValueError, r"5 units in dimension -1 at gate .*, but got an input of shape \(\)"),
    ],
    ids=["LSTM", "uint8", "bool", "shape", "scalar"],
)
def test_inputs_that_gates_cannot_multiply(make, x, error, message):
    """A tuple, integers, which would round gates to 0, and units that would be broadcast."""
    with pytest.raises(error, match=message), poutine.trace():
        make()(x)


def network():
    return nn.Sequential(L0Gate(4), nn.Linear(4, 3), L0Gate(3), nn.Linear(3, 2))


GATES = {"0": torch.ones(4), "2": torch.ones(3)}


@pytest.mark.parametrize(
    ("gates", "error", "message"),
    [
        ({"0": torch.ones(4)}, ValueError, "no value for '2'"),
        ({**GATES, "5": torch.ones(1)}, ValueError, "no layer for '5'"),
        (
            {f"net.{name}": value for name, value in GATES.items()},
            ValueError,
            r"no value for '0', '2' and no layer for .* \(the paths start at different modules; name_gates",
        ),
        ({**GATES, "2": torch.ones(2)}, ValueError, r"gates\['2'\] of shape \(3,\), but got \(2,\)"),
        ({**GATES, "2": torch.full((3,), 1.5)}, ValueError, r"gates\['2'\] in \[0, 1\]"),
        ({**GATES, "2": torch.full((3,), float("nan"))}, ValueError, r"gates\['2'\] in \[0, 1\]"),
        ({**GATES, "2": [1.0] * 3}, TypeError, r"gates\['2'\] to be a tensor, but got a value of type list"),
        ([torch.ones(5)], TypeError, r"gates by site name, such as guide.test_gates\(\), but got a list"),
    ],
)
def test_names_and_values_that_do_not_fit(gates, error, message):
    with pytest.raises(error, match=message):
        fix_gates(network(), gates)


def test_gates_that_have_been_fixed_before():
    with pytest.raises(ValueError, match=r"no layer for '0', '2' \(gates of this network have been fixed"):
        fix_gates(fix_gates(network(), GATES), GATES)


@pytest.mark.parametrize(
    ("path", "gate", "error", "message"),
    [
        ("encodr", L0Gate(4), ValueError, "modules inside of the network, but got 'encodr'; there are 'encoder'"),
        ("x", L0Gate(4), ValueError, "got 'x'; there are 'encoder', 'decoder'"),  # the outermost ones
        ("encoder", 4, TypeError, r"gates\['encoder'\] to be an L0Gate, but got a value of type int"),
    ],
)
def test_bad_paths_and_gates(path, gate, error, message):
    net = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(3, 4)), "decoder": nn.Linear(4, 3)})
    with pytest.raises(error, match=message):
        insert_gates(net, {path: gate})


def test_an_example_of_another_type():
    message = r"example that the network takes, .* got one of shape \(2, 4\) and dtype torch.uint8"
    with pytest.raises(ValueError, match=message):
        suggest_gates(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.ones(2, 4, dtype=torch.uint8))


# ------------------------------------------------------------ gates on heads and on weights


def heads(shared=False, **options):
    net = nn.ModuleDict({"a": attention(), "conv": nn.Conv1d(6, 6, 1), "words": nn.Embedding(3, 4)})
    net["torch"] = nn.MultiheadAttention(6, 2, **options)
    if shared:
        net["out"], net["b"] = net["a"].out, net["torch"]
    return net


@pytest.mark.parametrize(
    ("net", "path", "number", "error", "message"),
    [
        (heads(), "a.o", 2, ValueError, r"dense layers inside of the network, but got 'a\.o'; there are 'a\.out'"),
        (heads(), "conv", 2, TypeError, "dense layer at 'conv', which reads the heads side by side, but got Conv1d"),
        (heads(), "words", 2, TypeError, "at 'words', .* got Embedding"),
        (heads(), "a.out", 4, ValueError, "divides its 6 inputs, but got 4"),
        (heads(), "a.out", 0, ValueError, r"heads\['a\.out'\] of at least 1"),
        (heads(), "a.out", 2.0, TypeError, r"heads\['a\.out'\] to be a whole number"),
        (gate_heads(heads(), {"a.out": 2}), "a.out", 2, ValueError, r"without head gates, but 'a\.out' has them"),
        (heads(shared=True), "a.out", 2, ValueError, "it is at 'a.out' and at 'out'"),
        (heads(), "torch.out_proj", 3, ValueError, r"Expected 2 heads at 'torch\.out_proj', .* but got 3"),
        (heads(add_bias_kv=True), "torch.out_proj", 2, ValueError, "without add_bias_kv and add_zero_attn"),
        (heads(shared=True), "torch.out_proj", 2, ValueError, "it is at 'torch' and at 'b'"),
        (nn.MultiheadAttention(6, 2), "out_proj", 2, ValueError, "target name"),
    ],
)
def test_heads_that_cannot_be_gated(net, path, number, error, message):
    with pytest.raises(error, match=message):
        gate_heads(net, {path: number})


def test_a_causal_call_without_a_mask():
    with pytest.raises(ValueError, match="attn_mask with is_causal=True"):
        PlainAttention(nn.MultiheadAttention(6, 2))(*[torch.ones(1, 2, 6)] * 3, is_causal=True)


def tied():
    net = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False), nn.LayerNorm(4))
    net[1].weight = net[0].weight
    return net


@pytest.mark.parametrize(
    ("net", "path", "error", "message"),
    [
        (nn.Linear(2, 1), "", ValueError, "inside of the network, but got ''"),
        (tied(), "1", ValueError, r"'0\.weight' and '1\.weight'; untie them"),
        (tied(), "2", TypeError, "'2' is a LayerNorm"),
        (tied(), "5", ValueError, "got '5'; there are '0', '1'"),
        (gate_weights(nn.Sequential(nn.Linear(3, 2)), "0"), "0", ValueError, "has them already"),
        (nn.TransformerEncoderLayer(4, 2), "self_attn.out_proj", ValueError, r"is part of an nn\.MultiheadAttention"),
    ],
)
def test_weights_that_cannot_be_gated(net, path, error, message):
    with pytest.raises(error, match=message):
        gate_weights(net, path)
