"""What is neither a network nor what is asked for it, at each public door, by a message that says what was expected."""

import numpy as np
import pytest
import torch
from torch import nn

from pyro_l0.compaction.compact import rewrite
from pyro_l0.diagnostics.gradients import pathwise_noise
from pyro_l0.nn import (
    Gate,
    NetworkCost,
    fix_gates,
    gate_dropout,
    gate_heads,
    gate_weights,
    insert_gates,
    square_norms,
    suggest_gates,
)
from pyro_l0.nn.fixed import FixedGate
from pyro_l0.nn.gate import gate_names, name_gates
from pyro_l0.nn.weights import fix_weights, pack_zeros, unpack_zeros

DOORS = {
    "insert_gates": lambda network: insert_gates(network, {"0": Gate(3)}),
    "fix_gates": lambda network: fix_gates(network, {}),
    "fix_weights": lambda network: fix_weights(network, {}),
    "gate_heads": lambda network: gate_heads(network, {"0": 2}),
    "gate_dropout": lambda network: gate_dropout(network, torch.ones(1, 2)),
    "gate_names": gate_names,
    "name_gates": name_gates,
    "gate_weights": lambda network: gate_weights(network, "0"),
    "NetworkCost": lambda network: NetworkCost(network, torch.ones(1, 2)),
    "square_norms": lambda network: square_norms(network, torch.ones(1, 2)),
    "suggest_gates": lambda network: suggest_gates(network, torch.ones(1, 2)),
}


@pytest.mark.parametrize("name", DOORS)
@pytest.mark.parametrize("network", [None, "abc", {"0": 3}, nn.Linear], ids=["none", "string", "dict", "class"])
def test_no_network(name, network):
    with pytest.raises(TypeError, match=r"Expected a network, an nn\.Module, but got a"):
        DOORS[name](network)


@pytest.mark.parametrize("entries", [None, 3, ["0"], {0: 3}], ids=["none", "number", "list", "integer keys"])
@pytest.mark.parametrize("door", [insert_gates, fix_gates, fix_weights, gate_heads])
def test_no_entries_by_name(door, entries):
    with pytest.raises(TypeError, match=r"Expected (gates|numbers of heads) by (module path|site name)"):
        door(nn.Sequential(nn.Linear(2, 3)), entries)


def test_sizes_and_dimensions_of_gates():
    """Integers of numpy are integers; other kinds are none."""
    gate = Gate(np.int64(4), dim=np.int64(1))
    assert (type(gate.size), type(gate.dim)) == (int, int)
    assert gate(torch.ones(2, 4)).shape == (2, 4)
    for dim in ("abc", None, 1.0, True):
        with pytest.raises(TypeError, match="Expected dim to be an integer"):
            Gate(6, dim=dim)


@pytest.mark.parametrize("bad", [None, "abc", [1.0], {"weight": 3}])
def test_what_holds_no_tensors(bad):
    """A state to be packed or unpacked, and the values of a fixed gate."""
    for door in (pack_zeros, unpack_zeros):
        with pytest.raises(TypeError, match="Expected tensors by name"):
            door(bad)
    with pytest.raises(TypeError, match="Expected value to be a tensor"):
        FixedGate(bad)


@pytest.mark.parametrize("bad", [None, "abc", {}])
def test_what_is_no_plan_and_no_gate(bad):
    with pytest.raises(TypeError, match=r"Expected what plan\(\) returns"):
        rewrite(nn.Linear(2, 2), bad)
    with pytest.raises(TypeError, match="Expected a gate, but got"):
        pathwise_noise(bad)
