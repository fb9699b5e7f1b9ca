"""Gates in networks: the layer, fixed gates, and what open gates cost."""

from pyro_l0.nn.cost import NetworkCost
from pyro_l0.nn.fixed import FixedGate, fix_gates
from pyro_l0.nn.gate import Gate, gate_names, name_gates
from pyro_l0.nn.insert import gate_dropout, insert_gates
from pyro_l0.nn.square_norms import square_norms
from pyro_l0.nn.suggest import suggest_gates

__all__ = [
    "FixedGate",
    "Gate",
    "NetworkCost",
    "fix_gates",
    "gate_dropout",
    "gate_names",
    "insert_gates",
    "name_gates",
    "square_norms",
    "suggest_gates",
]
