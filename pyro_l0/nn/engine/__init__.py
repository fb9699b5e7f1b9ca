"""The network engine: one recorded call, the units that its tensors share, and which of them can leave."""

from pyro_l0.nn.engine.analysis import Analysis, Fold, GateMap, ReducedNorm, analyse
from pyro_l0.nn.engine.maps import Maps
from pyro_l0.nn.engine.record import Call, Example, Operation, Recording, Value, calls_of, record
from pyro_l0.nn.engine.registry import find_rule, rule

__all__ = [
    "Analysis",
    "Call",
    "Example",
    "Fold",
    "GateMap",
    "Maps",
    "Operation",
    "Recording",
    "ReducedNorm",
    "Value",
    "analyse",
    "calls_of",
    "find_rule",
    "record",
    "rule",
]
