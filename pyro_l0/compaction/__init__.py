"""Network and gates in, the same network with fewer units, that computes the same, out."""

from pyro_l0.compaction.certificate import Certificate
from pyro_l0.compaction.compact import CompactionError, compact, plan, rewrite
from pyro_l0.compaction.plan import Plan
from pyro_l0.compaction.selected_inputs import SelectedInputs
from pyro_l0.compaction.shrinker import Replica, Shrinker
from pyro_l0.compaction.storage import Compacted, load_compacted

__all__ = [
    "Certificate",
    "Compacted",
    "CompactionError",
    "Plan",
    "Replica",
    "SelectedInputs",
    "Shrinker",
    "compact",
    "load_compacted",
    "plan",
    "rewrite",
]
