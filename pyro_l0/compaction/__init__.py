"""Network and gates in, a smaller plain network that computes the same out."""

from pyro_l0.compaction.compact import CompactionError, compact
from pyro_l0.compaction.plan import Plan, plan
from pyro_l0.compaction.rewrite import rewrite
from pyro_l0.compaction.selected_inputs import SelectedInputs
from pyro_l0.compaction.shrinker import Replica, Shrinker
from pyro_l0.compaction.storage import Compacted, load_compacted

__all__ = [
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
