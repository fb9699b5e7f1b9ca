"""Turns a network and the values of its gates into the same network with fewer units and equal outputs."""

from pyro_l0.compaction.apply import apply_plan as apply_plan
from pyro_l0.compaction.certificate import Certificate as Certificate
from pyro_l0.compaction.compact import CompactionError as CompactionError
from pyro_l0.compaction.compact import compact
from pyro_l0.compaction.plan import Plan as Plan
from pyro_l0.compaction.shrinker import Replica as Replica
from pyro_l0.compaction.shrinker import Shrinker
from pyro_l0.compaction.storage import Compacted as Compacted
from pyro_l0.compaction.storage import load_compacted
from pyro_l0.compaction.zeros import compact_zeros

# What a star brings; what is imported "as" itself is public, too.
__all__ = [
    "Shrinker",
    "compact",
    "compact_zeros",
    "load_compacted",
]
