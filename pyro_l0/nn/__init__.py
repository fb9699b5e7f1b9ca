"""Gates in networks: the layer, fixed gates, and what open gates cost."""

from pyro_l0.nn.cost import NetworkCost
from pyro_l0.nn.fixed import FixedGate, fix_gates
from pyro_l0.nn.gate import Gate, gate_names, name_gates
from pyro_l0.nn.heads import gate_heads
from pyro_l0.nn.insert import gate_dropout, insert_gates
from pyro_l0.nn.square_norms import square_norms
from pyro_l0.nn.suggest import suggest_gates
from pyro_l0.nn.weights import fix_weights, gate_weights, pack_zeros, unpack_zeros

__all__ = [
    "FixedGate",
    "Gate",
    "NetworkCost",
    "fix_gates",
    "fix_weights",
    "gate_dropout",
    "gate_heads",
    "gate_names",
    "gate_weights",
    "insert_gates",
    "name_gates",
    "pack_zeros",
    "square_norms",
    "suggest_gates",
    "unpack_zeros",
]
