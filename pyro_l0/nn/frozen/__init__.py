"""Gates in networks whose weights stay as others trained them: on ranks of adapters, and on edges of circuits."""

from pyro_l0.nn.frozen.edges import NetworkEdges, gate_edges
from pyro_l0.nn.frozen.lora import compact_lora_ranks, gate_lora_ranks

__all__ = ["NetworkEdges", "compact_lora_ranks", "gate_edges", "gate_lora_ranks"]
