"""Gates in networks: the layer, fixed gates, and what open gates cost."""

from pyro_l0.nn.cost import NetworkCost
from pyro_l0.nn.fixed import fix_gates
from pyro_l0.nn.gate import Gate
from pyro_l0.nn.heads import gate_heads
from pyro_l0.nn.insert import gate_dropout, insert_gates
from pyro_l0.nn.square_norms import square_norms
from pyro_l0.nn.suggest import suggest_gates
from pyro_l0.nn.weights import gate_weights
from pyro_l0.retired import retired_names

__all__ = [
    "Gate",
    "NetworkCost",
    "fix_gates",
    "gate_dropout",
    "gate_heads",
    "gate_weights",
    "insert_gates",
    "square_norms",
    "suggest_gates",
]

__getattr__ = retired_names(
    __name__,
    {
        "FixedGate": "pyro_l0.nn.fixed.FixedGate",
        "gate_names": "pyro_l0.nn.gate.gate_names",
        "name_gates": "pyro_l0.nn.gate.name_gates",
        "fix_weights": "pyro_l0.nn.weights.fix_weights",
        "pack_zeros": "pyro_l0.nn.weights.pack_zeros",
        "unpack_zeros": "pyro_l0.nn.weights.unpack_zeros",
    },
)
