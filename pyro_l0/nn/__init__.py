"""Gates in networks: the layer, fixed gates, and what open gates cost."""

from pyro_l0.nn.costs.cost import NetworkCost
from pyro_l0.nn.fixed import fix_gates
from pyro_l0.nn.gate import Gate
from pyro_l0.nn.heads import gate_heads
from pyro_l0.nn.insert import insert_gates
from pyro_l0.nn.l0_gate import L0Gate
from pyro_l0.nn.network_gates import NetworkGates, penalty
from pyro_l0.nn.suggest import suggest_gates
from pyro_l0.nn.weights import gate_weights
from pyro_l0.retired import retired_names

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

__getattr__ = retired_names(
    __name__,
    {
        "square_norms": "pyro_l0.nn.costs.square_norms.square_norms",
        "gate_dropout": "pyro_l0.nn.insert.gate_dropout",
        "FixedGate": "pyro_l0.nn.fixed.FixedGate",
        "gate_names": "pyro_l0.nn.gate_layer.gate_names",
        "name_gates": "pyro_l0.nn.gate_layer.name_gates",
        "fix_weights": "pyro_l0.nn.weights.fix_weights",
        "pack_zeros": "pyro_l0.nn.weights.pack_zeros",
        "unpack_zeros": "pyro_l0.nn.weights.unpack_zeros",
    },
)
