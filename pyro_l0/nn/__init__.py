"""Gates in networks: the layer, fixed gates, and what open gates cost."""

from pyro_l0.nn.cost import NetworkCost
from pyro_l0.nn.fixed import fix_gates
from pyro_l0.nn.heads import gate_heads
from pyro_l0.nn.insert import insert_gates
from pyro_l0.nn.l0_gate import Gate, L0Gate, NetworkGates, penalty
from pyro_l0.nn.suggest import suggest_gates
from pyro_l0.nn.weights import gate_weights

__all__ = [
    "Gate",
    "L0Gate",
    "NetworkCost",
    "NetworkGates",
    "fix_gates",
    "gate_heads",
    "gate_weights",
    "insert_gates",
    "penalty",
    "suggest_gates",
]
