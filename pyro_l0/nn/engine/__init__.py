"""The network engine: records a call, follows the units that its tensors share, and finds which can be removed."""

from pyro_l0.nn.engine.analysis import Analysis, Fold, GateMap, ReducedNorm, analyse
from pyro_l0.nn.engine.maps import Maps
from pyro_l0.nn.engine.operations import find_entry, rule
from pyro_l0.nn.engine.record import Call, Example, Operation, Recording, Value, calls_of, record

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
    "find_entry",
    "record",
    "rule",
]
