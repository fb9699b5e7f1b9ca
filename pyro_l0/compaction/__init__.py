"""Turns a network and the values of its gates into the same network with fewer units and equal outputs."""

from pyro_l0.compaction.compact import compact
from pyro_l0.compaction.shrinker import Shrinker
from pyro_l0.compaction.storage import load_compacted
from pyro_l0.compaction.zeros import compact_zeros

__all__ = [
    "Shrinker",
    "compact",
    "compact_zeros",
    "load_compacted",
]
