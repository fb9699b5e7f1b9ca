"""Gates in networks: the layer, fixed gates, and what open gates cost."""

from pyro_l0.nn.cost import NetworkCost
from pyro_l0.nn.cost import Report as Report
from pyro_l0.nn.fixed import FixedGate as FixedGate
from pyro_l0.nn.fixed import fix_gates
from pyro_l0.nn.frozen import NetworkEdges as NetworkEdges
from pyro_l0.nn.frozen import compact_lora_ranks as compact_lora_ranks
from pyro_l0.nn.frozen import gate_edges as gate_edges
from pyro_l0.nn.frozen import gate_lora_ranks as gate_lora_ranks
from pyro_l0.nn.gate import GateLayer as GateLayer
from pyro_l0.nn.gate import gate_names as gate_names
from pyro_l0.nn.gate import name_gates as name_gates
from pyro_l0.nn.heads import gate_heads
from pyro_l0.nn.insert import insert_gates
from pyro_l0.nn.l0_gate import FAMILIES as FAMILIES
from pyro_l0.nn.l0_gate import Gate, L0Gate, NetworkGates, penalty
from pyro_l0.nn.square_norms import SquareNorms as SquareNorms
from pyro_l0.nn.square_norms import square_norms as square_norms
from pyro_l0.nn.suggest import Suggestions as Suggestions
from pyro_l0.nn.suggest import suggest_gates
from pyro_l0.nn.weights import fix_weights as fix_weights
from pyro_l0.nn.weights import gate_weights

# What a star brings; what is imported "as" itself is public, too.
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
