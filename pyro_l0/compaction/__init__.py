"""Network and gates in, a smaller plain network that computes the same out."""

from pyro_l0.compaction.loading import load_compacted
from pyro_l0.compaction.plan import Plan, plan
from pyro_l0.compaction.rewrite import CompactionError, compact, rewrite
from pyro_l0.compaction.storage import Compacted
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
