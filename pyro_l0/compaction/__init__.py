"""Network and gates in, a smaller plain network that computes the same out."""

from pyro_l0.compaction.plan import Plan, plan
from pyro_l0.compaction.rewrite import Compacted, CompactionError, compact, load_compacted, rewrite
from pyro_l0.compaction.training import Replica, SelectedInputs, Shrinker

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
